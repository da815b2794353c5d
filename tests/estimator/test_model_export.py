"""Estimators and pipelines as files: they give what streams give; wrong use; a consumer without
this package.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
    samples,
)
from fluxutils_py.errors import ExportError, ShapeError
from fluxutils_py.estimator import model_export
from fluxutils_py.estimator.model_export import _compare_labels, check_export, export
from fluxutils_py.exporting.export_files import read_metadata
from fluxutils_py.nn import LSTM
from tests.plain_networks import plain_classifier, plain_regressor

pytestmark = [
    pytest.mark.filterwarnings("ignore:feature . of . has values of about"),
    pytest.mark.usefixtures("onnx_operators_once"),
]

N, T = 7, 43
SPEC = {"epochs": 1, "batchsize": 4, "seqsize": 10}


@pytest.fixture
def x(rng):
    """(F, N, T) of unlike scales."""
    return rng.normal(
        [[[50.0]], [[-0.3]], [[1e3]]], [[[3.0]], [[0.01]], [[200.0]]], (3, N, T)
    ).astype("float32")


@pytest.fixture
def with_gaps(x, rng):
    x = x.copy()
    x[rng.random(x.shape) < 0.2] = np.nan
    x[:, :, 0] = 0.5  # all series begin at the first step: a file has no other beginning
    x[:, 1, 1:4] = np.nan
    return x


@pytest.fixture
def traced_once(monkeypatch):
    """All files of an estimator come from one trace, which takes most of the time."""

    def graph(est, *others):
        if est not in traced:
            traced[est] = trace(est, *others)
        return traced[est]

    trace, traced = model_export._graph, {}
    monkeypatch.setattr(model_export, "_graph", graph)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_once")
def test_a_pipeline_streams_many_steps(rng, tmp_path):
    x = rng.normal(50, 3, size=(3, 2, 100)).astype("float32")
    y = 1e3 + x[:2].cumsum(2)
    pipe = make_pipeline(SequenceScaler(), plain_regressor(6, epochs=1, seqsize=30))
    pipe.fit(samples(x), samples(y))
    for format in ("onnx", "torch"):
        path = tmp_path / "model.pt2"
        export(pipe, path, format)
        assert check_export(path, pipe, x) < 1e-5
        found = read_metadata(path)
        assert found["scale"] == {
            "mean": pipe[-1].target_mean_.tolist(),
            "scale": pipe[-1].target_scale_.tolist(),
        }
        assert found["estimator"] == "SequenceRegressor"
        assert found["outputs"][0]["shape"] == ["steps", "batch", 2]


@pytest.mark.slow
@pytest.mark.parametrize("made", [SequenceImputer(), WinsorScaler()], ids=repr)
def test_imputers_and_missing_values(made, x, with_gaps, tmp_path):
    pipe = make_pipeline(made, SequenceScaler(), plain_regressor(4, cell="gru", epochs=1))
    pipe.fit(samples(with_gaps), samples(x[:1]))
    export(pipe, tmp_path / "m.pt2", "torch")  # the page exports an imputer to ONNX
    assert check_export(tmp_path / "m.pt2", pipe, with_gaps) < 1e-5


@pytest.mark.slow
def test_a_function_may_follow_an_imputer_that_looks_back(rng, tmp_path):
    x = rng.normal(size=(3, 3, 20)).astype("float32")
    x[rng.random(x.shape) < 0.2] = np.nan
    steps = SequenceImputer("ffill"), FunctionTransformer(np.sinh), plain_regressor(4, epochs=1)
    pipe = make_pipeline(*steps)
    # scikit-learn counts series as the features of such an array: only as many can be exported
    pipe.fit(x, np.nan_to_num(x[:1]))
    export(pipe, tmp_path / "m", "torch")
    assert check_export(tmp_path / "m", pipe, x) < 1e-5


@pytest.mark.slow
def test_steps_without_input_are_nan_and_a_difference_is_found(x, tmp_path):
    est = plain_regressor(4, epochs=1, random_state=0).fit(x, x[:1])
    x[:, 2, 5:9] = np.nan
    est.export(tmp_path / "m.pt2", "torch")
    assert check_export(tmp_path / "m.pt2", est, x) < 1e-5
    with torch.no_grad():
        list(est.model_.parameters())[-1].add_(0.01)
    with pytest.raises(ExportError, match=r"y is .* step \d+, series \d+"):
        check_export(tmp_path / "m.pt2", est, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "label", "classes"),
    [
        ("torch", lambda up: np.where(up, "up", "down"), ["down", "up"]),
        ("onnx", lambda up: 3 * up + 4, [4, 7]),
    ],
    ids=["texts", "integers"],
)
def test_classifiers_give_labels_and_probabilities(format, label, classes, x, tmp_path):
    weights = {"class_weight": {classes[0]: 0.2}}
    est = plain_classifier(4, epochs=2, random_state=0, **weights)
    est.fit(x, label(x[0, :, -1] > 50))
    path = tmp_path / "m.pt2"
    est.export(path, format)
    assert check_export(path, est, x) < 1e-5
    found = read_metadata(path)
    assert [entry["name"] for entry in found["outputs"]] == ["label", "probabilities"]
    assert found["classes"] == classes
    assert found["per_series"]


def test_features_have_names(x):
    view = samples(x, feature_names=["a", "b", "c"])
    est = plain_regressor(4, epochs=1).fit(view, samples(x[:1]))
    assert model_export._metadata(est, est)["feature_names"] == ["a", "b", "c"]
    # names of F * T columns
    rows = pd.DataFrame(np.asarray(samples(x)), columns=[f"c{i}" for i in range(3 * T)])
    est = plain_regressor(4, epochs=1, n_timesteps=T).fit(rows, x[0, :, -1])
    assert model_export._metadata(est, est)["feature_names"] is None


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.a, self.b = LSTM(5, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, u, v):
        h = self.rnn(torch.cat([u, v], -1))
        return self.a(h), self.b(h)


@pytest.mark.slow
def test_targets_that_were_transformed_come_back(x, tmp_path):
    y = x[:1].cumsum(2)
    inner = make_pipeline(SequenceScaler(), plain_regressor(4, epochs=1, target="step"))
    logs = TransformedTargetRegressor(
        inner, func=np.log1p, inverse_func=np.expm1, check_inverse=False
    )
    logs.fit(samples(x), np.asarray(samples(y)))
    export(logs, tmp_path / "m.onnx")
    assert check_export(tmp_path / "m.onnx", logs, x) < 1e-5
    last = TransformedTargetRegressor(plain_regressor(4, epochs=1), transformer=StandardScaler())
    search = GridSearchCV(last, {"regressor__hidden_size": [3]}, cv=2).fit(samples(x), y[0, :, -1])
    export(search, tmp_path / "m.pt2", "torch")
    assert check_export(tmp_path / "m.pt2", search, x) < 1e-5


class Skip(nn.Module):
    """Something to compile."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = LSTM(3, 4), nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        return self.head(torch.cat([self.rnn(x), x], -1))


# torch looks at the .grad of states as it traces, and hides its own warning about that, but not one
# that is an error
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:feature . of [xy]")  # of scales that are unlike
def test_after_compiling_and_loading_the_file_is_the_same(x, tmp_path):
    x /= 100
    est = Estimator(Skip(), spec=SPEC, random_state=0, compile={"backend": "eager"}).fit(x, x[:1])
    est.export(tmp_path / "compiled", "torch")
    assert check_export(tmp_path / "compiled", est, x) < 1e-5
    est.save(tmp_path / "est.pt")
    loaded = Estimator.load(tmp_path / "est.pt", model=Skip(), compile=None)
    loaded.export(tmp_path / "loaded", "torch")
    assert (tmp_path / "loaded").read_bytes() == (tmp_path / "compiled").read_bytes()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.criterion = LSTM(3, 1), nn.MSELoss()

    def forward(self, x):
        return self.rnn(x)


@pytest.mark.slow
def test_a_loss_inside_the_model_that_forward_does_not_use_is_no_part_of_it(x, tmp_path):
    est = Estimator(WithLoss(), spec=SPEC).fit(x, x[:1])
    est.export(tmp_path / "m.pt2", "torch")
    assert check_export(tmp_path / "m.pt2", est, x) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("traced_once")
@pytest.mark.filterwarnings("ignore:feature . of [xy]")  # of scales that are unlike
def test_several_outputs_need_names(x, tmp_path):
    def loss(model, xs, ys):
        return sum((a - b).square().mean() for a, b in zip(model(*xs), ys, strict=True))

    est = Estimator(Two(), loss, spec=SPEC).fit((x, x[:2]), (x[:1], x[1:]))
    path = tmp_path / "m.pt2"
    with pytest.raises(ExportError, match=r"2 outputs: .*output_names="):
        est.export(path, "torch")
    for names in (["a"], ["a", "a"], ["a", "state.0"]):
        with pytest.raises(ExportError, match="lists of as many different names"):
            est.export(path, "torch", output_names=names)
    with pytest.raises(ExportError, match="different names"):
        est.export(path, "torch", input_names=["a", "v"], output_names=["a", "b"])
    est.export(path, "torch", input_names=["u", "v"], output_names=["a", "b"])
    assert check_export(path, est, (x, x[:2])) < 1e-5
    assert [entry["name"] for entry in read_metadata(path)["inputs"]] == ["u", "v"]


def test_wrong_use(x, tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(NotFittedError):
        SequenceRegressor().export(path)
    with pytest.raises(NotFittedError):
        export(make_pipeline(SequenceScaler(), SequenceRegressor()), path)
    for model in (
        TransformedTargetRegressor(SequenceRegressor()),
        GridSearchCV(SequenceRegressor(), {}),
    ):
        with pytest.raises(NotFittedError, match=type(model).__name__):
            export(model, path)
    with pytest.raises(TypeError, match="Ridge cannot be exported"):
        export(Ridge(), path)
    no_best = GridSearchCV(Ridge(), {}, refit=False, cv=2).fit(x[:, :, 0].T, x[0, :, 0])
    with pytest.raises(TypeError, match=r"GridSearchCV .*refit=True"):
        export(no_best, path)
    est = plain_regressor(4, epochs=1).fit(x, x[:1])
    with pytest.raises(ValueError, match="'onnx', 'torch' or 'c', got 'tensorrt'"):
        est.export(path, "tensorrt")
    assert not path.exists()


@pytest.mark.parametrize("classes", [1, 2, 3, 4])
def test_labels_must_be_equal_where_one_class_is_clearly_the_most_probable(classes):
    probabilities = np.full((3, 2, classes), 0.1)
    probabilities[..., 0] = 0.8
    probabilities[1, 1] = 0.4  # here any label will do, if there are several
    want = np.full((3, 2, 1), "a")
    got = want.copy()
    _compare_labels("m", "label", got, want, probabilities, 0.01)
    got[1, 1] = "b"
    if classes > 1:
        _compare_labels("m", "label", got, want, probabilities, 0.01)
    got[1, 1], got[2, 0] = "a", "b"
    with pytest.raises(ExportError, match=r"label is .*b.* step 2, series 0, .*a"):
        _compare_labels("m", "label", got, want, probabilities, 0.01)


def test_a_list_of_series_is_refused_by_a_check_with_the_remedy():
    x = [np.zeros((3, 5), "float32"), np.zeros((3, 8), "float32")]
    with pytest.raises(ShapeError, match=r"list of 2 arrays.*x\[0\]\[:, None\]"):
        check_export("nothing.onnx", SequenceRegressor(), x)
