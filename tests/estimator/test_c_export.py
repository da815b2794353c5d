"""Headers of C: compiled strictly, they give what streams give; wrong use; text."""

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
    check_export,
    export,
    samples,
    stream,
)
from fluxutils_py.errors import ExportError, LoadError, ShapeError
from fluxutils_py.exporting.compiled_header import run_header
from fluxutils_py.nn import GRU, HFGRU, LRU, LSTM, RNN, TCN, MinLSTM, SequenceStack
from tests.exporting.c_programs import build, run_steps
from tests.plain_networks import LagRegressor, plain_classifier, plain_regressor

N, T = 5, 40
SPEC = {"epochs": 1, "batchsize": 4, "seqsize": 10}
CELLS = ["lstm", "gru", "rnn", "flstm", "sgru", "mgu", "smgu", "hfgru", "mingru", "minlstm", "lru"]


@pytest.fixture
def x(rng):
    """(F, N, T)"""
    return rng.normal(size=(3, N, T)).astype("float32")


def streamed(model, steps, method="predict"):
    """The outputs (T, G) for steps (T, F) of one series."""
    live = stream(model, method=method)
    return np.stack([live.step(step[:, None])[:, 0] for step in steps])


def error(found, wanted):
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    largest = max(1, np.nanmax(np.abs(wanted)))
    return np.nanmax(np.abs(found - wanted)) / largest


@pytest.fixture(scope="module", params=CELLS)
def of_cell(request, tmp_path_factory):
    """A header of two layers of a cell, 2,000 steps, and what the stream gives."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, N, T)).astype("float32")
    est = plain_regressor(7, cell=request.param, num_layers=2, epochs=2, random_state=0)
    est.fit(x, 100 + x[:2].cumsum(2))
    path = tmp_path_factory.mktemp("c") / "model.h"
    est.export(path, format="c")
    steps = rng.normal(size=(2000, 3)).astype("float32")
    return path, steps, streamed(est, steps)


@pytest.mark.apart
@pytest.mark.slow
def test_thousands_of_steps_of_each_cell(of_cell, request):
    path, steps, wanted = of_cell
    # each as C, and every other as C++ or on ARM
    other = ("c++", "arm")[CELLS.index(request.node.callspec.params["of_cell"]) % 2]
    for target in ("c", other):
        assert error(run_steps(target, path, steps), wanted) < 1e-5


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize(
    ("settings", "target"),
    [({"n_lags": 5}, "c"), ({"n_models": 2}, "c++"), ({"n_lags": 1}, "arm")],
    ids=str,
)
def test_a_linear_model_of_the_past(settings, target, rng, tmp_path):
    x = rng.normal(50, 3, size=(2, N, T)).astype("float32")
    est = LagRegressor(random_state=0, **{"n_lags": T, **settings})
    est.fit(x, 1e3 + x[:1].cumsum(2))
    est.export(tmp_path / "model.h", format="c")
    steps = x[:, 1].T.copy()
    steps[7] = np.nan
    wanted = est.predict(np.ascontiguousarray(steps.T[:, None]))[:, 0].T
    assert np.isnan(wanted).any(1).nonzero()[0].tolist() == [7]
    assert error(streamed(est, steps), wanted) < 1e-5
    assert error(run_steps(target, tmp_path / "model.h", steps), wanted) < 1e-5


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(("n_in", "target"), [(1, "c"), (3, "c++"), (3, "arm")])
def test_causal_kernels_with_plateaus(n_in, target, rng, tmp_path):
    # where an output is the same at many steps, biases are equal to it: one bit counts
    x = rng.normal(20, 3, size=(n_in, 12, 90)).astype("float32")
    x[:, :, 20:45] = x[:, :, 20:21]
    est = SequenceClassifier(cell="kernels", random_state=0)
    est.fit(x, np.arange(12) % 3)
    est.export(tmp_path / "model.h", format="c")
    steps = x[:, 1].T.copy()
    found = run_steps(target, tmp_path / "model.h", steps)
    assert error(found, streamed(est, steps, "predict_proba")) < 1e-5
    ends = est.predict_proba(x[:, 1:2])
    np.testing.assert_allclose(found[-1], ends.ravel(), rtol=0, atol=1e-5)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(("cell", "target"), [("kernels", "c"), ("linear+gru", "c++")])
def test_scalers_before_models_that_scale(cell, target, rng, tmp_path):
    x = rng.normal([[[900.0]], [[-0.3]]], [[[2.0]], [[0.7]]], (2, 12, T)).astype("float32")
    y = np.abs(x[:1] - 900) if "+" in cell else x[0, :, ::2].sum(1)
    est = SequenceRegressor(cell=cell, random_state=0)
    if "+" in cell:
        est.set_params(hidden_size=5, max_updates=50)
    pipe = make_pipeline(SequenceScaler(), est)
    pipe.fit(samples(x), samples(y) if "+" in cell else y)
    export(pipe, tmp_path / "model.h", format="c")
    steps = x[:, 1].T.copy()
    found = run_steps(target, tmp_path / "model.h", steps)
    assert error(found, streamed(pipe, steps)) < 1e-5
    said = export(pipe, tmp_path / "small.h", format="c", quantize="int8", example=x[:, 1:2])
    rounded = run_steps(target, tmp_path / "small.h", steps)
    assert np.abs(rounded - found).max() == pytest.approx(said, rel=1e-2, abs=1e-4)
    assert said > 1e-5


MODELS = {
    "stack": lambda: nn.Sequential(LSTM(3, 5), GRU(5, 4), RNN(4, 6), nn.Linear(6, 2)),
    "initial": lambda: nn.Sequential(
        GRU(3, 5, trainable_init=True), LRU(5, 4, trainable_init=True), nn.Linear(4, 2)
    ),
    "cells": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), HFGRU(4, 6, alpha=0.3), MinLSTM(6, 4), nn.Linear(4, 2)
    ),
    "blocks": lambda: nn.Sequential(SequenceStack(LRU, 3, 6, 2), nn.Linear(6, 2)),
    "no_state": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)),
}


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("stack", "float64"), *((name, "float32") for name in MODELS), ("cells", "float64")],
)
def test_models_of_several_layers(name, dtype, x, rng, tmp_path):
    torch.manual_seed(0)
    x = x.astype(dtype)
    est = Estimator(MODELS[name](), spec=SPEC, random_state=0).fit(x, x[:2])
    with torch.no_grad():
        for p in est.model_.parameters():
            p.add_(0.2 * torch.randn_like(p))
    est.export(tmp_path / "model.h", format="c")
    steps = rng.normal(size=(500, 3)).astype(dtype)
    bound = 1e-5 if dtype == "float32" else 1e-12
    assert error(run_steps("c", tmp_path / "model.h", steps), streamed(est, steps)) < bound


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize(
    ("made", "target"),
    [
        ([SequenceScaler()], "c"),
        ([WinsorScaler()], "c++"),
        ([SequenceImputer(), SequenceScaler()], "arm"),
        ([SequenceImputer("ffill"), FunctionTransformer(np.sinh), SequenceScaler()], "c++"),
        ([SequenceImputer("ffill"), FunctionTransformer(np.sinh), SequenceScaler()], "arm"),
    ],
    ids=repr,
)
def test_pipelines_and_missing_values(made, target, rng, tmp_path):
    # as many series as features, which scikit-learn mistakes for them
    x = rng.normal([[[9.0]], [[-0.3]], [[1.0]]], [[[2.0]], [[0.7]], [[1.0]]], (3, 3, T))
    x = x.astype("float32")
    holes = x.copy()
    holes[rng.random(x.shape) < 0.2] = np.nan
    pipe = make_pipeline(*made, plain_regressor(4, cell="gru", epochs=2, random_state=0))
    fits = (x, x[:2]) if len(made) == 3 else (samples(x), samples(x[:2]))
    pipe.fit(*fits)
    export(pipe, tmp_path / "model.h", format="c")
    steps = (x if isinstance(made[0], SequenceScaler) else holes)[:, 1].T.copy()
    steps[0] = x[:, 1, 0]  # a file takes its first step for one of the series, as streams do not
    steps[1:4] = steps[20] = np.nan
    found = run_steps(target, tmp_path / "model.h", steps)
    assert error(found, streamed(pipe, steps)) < 1e-5
    assert np.isnan(found).any() == isinstance(made[0], SequenceScaler)


@pytest.mark.slow
def test_targets_that_were_transformed_come_back(x, tmp_path):
    steps = x[:, 0].T
    y = np.exp(x[:1])
    logs = TransformedTargetRegressor(
        plain_regressor(4, epochs=1, target="step", random_state=0),
        func=np.log,
        inverse_func=np.exp,
        check_inverse=False,
    )
    logs.fit(samples(x), np.asarray(samples(y)))
    export(logs, tmp_path / "model.h", format="c")
    assert error(run_steps("c", tmp_path / "model.h", steps), streamed(logs, steps)) < 1e-5
    last = TransformedTargetRegressor(plain_regressor(4, epochs=1), transformer=MinMaxScaler())
    last.fit(samples(x), x[0, :, -1])
    export(last, tmp_path / "model.h", format="c")
    assert error(run_steps("c", tmp_path / "model.h", steps), streamed(last, steps)) < 1e-5


@pytest.mark.slow
def test_outputs_keep_the_digits_of_targets_in_float64(x, tmp_path):
    y = 1e8 + x[:1].cumsum(2, dtype=float)
    est = plain_regressor(4, epochs=2, random_state=0).fit(x, y)
    est.export(tmp_path / "model.h", format="c")
    steps = x[:, 0].T
    found = run_steps("c", tmp_path / "model.h", steps, out="float64")
    wanted = streamed(est, steps)
    assert wanted.dtype == np.float64
    # a float has steps of 8 there
    assert abs(found - wanted).max() < 1e-5 * np.ptp(y)


LABELLED = """
#include <stdio.h>
#include "model.h"

int main(void) {
    model_state state;
    float x[MODEL_N_IN], y[MODEL_N_OUT];
    model_reset(&state);
    while (fread(x, sizeof x, 1, stdin) == 1) {
        model_step(&state, x, y);
        printf(FORMAT "\\n", model_label(y));
    }
    return 0;
}
"""


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize(
    ("classes", "format"),
    [
        (["step_low", 'a "b" \\ ??/ \u00e4\n', "*/ high"], "%s"),
        ([3, 4, -70], "%lld"),
        ([1.0, 2.0, -4.0], "%.17g"),
        ([False, True], "%lld"),
    ],
    ids=["texts", "integers", "numbers", "bools"],
)
@pytest.mark.parametrize("target", ["c", "c++"])
def test_classifiers_give_probabilities_and_labels(classes, format, target, x, tmp_path):
    y = np.array(classes)[(np.arange(N * T) % len(classes)).reshape(1, N, T)]
    y[:, 1:] = classes[0]
    est = plain_classifier(4, epochs=3, random_state=0, class_weight="balanced").fit(x, y)
    est.export(tmp_path / "model.h", format="c")
    steps = x[:, 0].T.copy()
    steps[7] = np.nan
    found = run_steps(target, tmp_path / "model.h", steps)
    assert error(found, streamed(est, steps, "predict_proba")) < 1e-5
    command = build(target, LABELLED, tmp_path, f'-DFORMAT="{format}"')
    said = subprocess.run(command, input=steps.tobytes(), capture_output=True, check=True).stdout
    labels = streamed(est, steps)[:, 0]
    wanted = [str(c) if format == "%s" else format.replace("ll", "") % c for c in labels.tolist()]
    assert said.decode() == "".join(f"{line}\n" for line in wanted)
    assert check_export(tmp_path / "model.h", est, x[:, :2]) < 1e-5


@pytest.mark.slow
def test_a_step_without_input_and_one_that_is_refused(x, tmp_path):
    est = plain_regressor(4, epochs=2, random_state=0).fit(x, x[:1])
    est.export(tmp_path / "model.h", format="c")
    source = """
    #include <stdio.h>
    #include "model.h"
    static model_state state;
    static void step(float a, float b, float c) {
        float x[3] = {a, b, c}, y[1] = {1};
        int result = model_step(&state, x, y);
        printf("%d %.9g\\n", result, (double)y[0]);
    }
    int main(void) {
        model_reset(&state);
        step(1, 2, 3);
        step(1, NAN, 3);
        step(1, 2, -INFINITY);
        step(NAN, NAN, NAN);
        step(1, 1, 1);
        return 0;
    }
    """
    command = build("c", source, tmp_path)
    said = np.loadtxt(subprocess.run(command, capture_output=True, check=True).stdout.splitlines())
    assert said[:, 0].tolist() == [0, -1, -1, 1, 0]
    assert np.isnan(said[1:3, 1]).all()
    # the steps that were refused have not moved the state
    steps = np.array([[1, 2, 3], [np.nan] * 3, [1, 1, 1]], "float32")
    assert error(said[[0, 3, 4], 1:], streamed(est, steps)) < 1e-5


@pytest.mark.slow
def test_two_models_fit_one_program_and_each_starts_anew(x, tmp_path):
    ests = [
        plain_regressor(4, cell=cell, epochs=2, random_state=0).fit(x, x[:1])
        for cell in ("lstm", "gru")
    ]
    for prefix, est in zip(("pump", "valve"), ests, strict=True):
        est.export(tmp_path / f"{prefix}.h", format="c", prefix=prefix)
    both = tmp_path / "both.h"
    both.write_text('#include "valve.h"\n#include "pump.h"\n#include "pump.h"\n')
    steps = x[:, 0].T
    for prefix, est in zip(("pump", "valve"), ests, strict=True):
        found = run_steps("c", both, steps, prefix, reset_at=21)
        wanted = np.concatenate([streamed(est, steps[:20]), streamed(est, steps[20:])])
        assert error(found, wanted) < 1e-5


@pytest.mark.slow
def test_the_text_is_the_same_each_time_and_says_what_it_needs(x, tmp_path):
    est = plain_regressor(4, epochs=1, random_state=0)
    est.fit(samples(x, feature_names=["a", "b */ /*", "\u00e4"]), samples(x[:1]))
    texts = []
    for _ in range(2):
        est.export(tmp_path / "model.h", format="c")
        texts.append((tmp_path / "model.h").read_text("ascii"))
    assert texts[0] == texts[1]
    assert "malloc" not in texts[0]
    assert set(re.findall(r"#include .*", texts[0])) == {"#include <math.h>", "#include <stdint.h>"}
    (size,) = re.findall(r"model_state +state; +/?/? *(\d+) bytes", texts[0])
    source = """
    #include <stdio.h>
    #include "model.h"
    int main(void) { printf("%u", (unsigned)sizeof(model_state)); return 0; }
    """
    for target in ("c", "arm"):
        command = build(target, source, tmp_path)
        assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == size


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("target", ["c", "arm"])
@pytest.mark.parametrize(("cell", "n_missing"), [("lstm", 0), ("gru", 297), ("lru", 0)])
def test_weights_of_8_bits_say_their_error(cell, n_missing, target, x, rng, tmp_path):
    est = plain_regressor(16, cell=cell, epochs=2, random_state=0).fit(x, x[:1].cumsum(2))
    steps = rng.normal(size=(300, 3)).astype("float32")
    steps[1 : n_missing + 1] = np.nan
    example = steps.T[:, None]
    said = est.export(tmp_path / "model.h", format="c", quantize="int8", example=example)
    found = run_steps(target, tmp_path / "model.h", steps)
    wanted = streamed(est, steps)
    assert np.nanmax(np.abs(found - wanted)) == pytest.approx(said, rel=1e-2, abs=1e-5)
    text = (tmp_path / "model.h").read_text()
    assert f"{said:.3g}" in text
    assert "static const signed char" in text
    est.export(tmp_path / "floats.h", format="c")
    # weights that do differ
    assert said > 1e-5
    assert "static const signed char" not in (tmp_path / "floats.h").read_text()
    assert est.export(tmp_path / "model.h", format="c", quantize="int8") is None


class Own(nn.Module):
    """Something that no operation describes."""

    def __init__(self):
        super().__init__()
        self.rnn = LSTM(3, 1)

    def forward(self, x):
        return 2 * self.rnn(x)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: nn.Sequential(TCN(3, 4, 1), nn.Linear(4, 1)), "TCN"),
        (lambda: nn.Sequential(Own(), nn.Linear(1, 1)), "Own"),
        (lambda: nn.Sequential(LSTM(3, 4), nn.Softsign(), nn.Linear(4, 1)), "Softsign"),
    ],
    ids=["convolution", "own", "activation"],
)
def test_what_cannot_be_written_is_named_with_the_remedy(model, named, x, tmp_path):
    est = Estimator(model(), spec=SPEC).fit(x, x[:1])
    with pytest.raises(ExportError, match=rf"written as C: .*{named}.* use format='onnx'"):
        est.export(tmp_path / "model.h", format="c")
    assert list(tmp_path.iterdir()) == []


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = LSTM(5, 1)

    def forward(self, u, v):
        return self.rnn(torch.cat([u, v], -1))


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, codes):
        return self.table(codes[..., 0])


def test_one_input_of_numbers(x, tmp_path):
    est = Estimator(Two(), spec=SPEC).fit((x, x[:2]), x[:1])
    with pytest.raises(ExportError, match=r"model takes 2 inputs, .*one"):
        est.export(tmp_path / "model.h", format="c")
    est = Estimator(nn.Sequential(Codes(), LSTM(3, 1)), spec=SPEC)
    est.fit(np.zeros((1, N, T), int), x[:1])
    with pytest.raises(ExportError, match="the model takes integers"):
        est.export(tmp_path / "model.h", format="c")


def test_wrong_settings(x, tmp_path):
    est = plain_regressor(4, epochs=1).fit(x, x[:1])
    path = tmp_path / "model.h"
    with pytest.raises(ValueError, match=r"quantize .*'int8', got 'int4'"):
        est.export(path, format="c", quantize="int4")
    with pytest.raises(ValueError, match=r"example= .*quantize='int8'"):
        est.export(path, format="c", example=x)
    with pytest.raises(ShapeError, match=r"arrays \(F, N, T\)"):
        est.export(path, format="c", quantize="int8", example=x[0])
    with pytest.raises(ShapeError, match=r"\(3, 5\), got \(2, 5\)"):
        est.export(path, format="c", quantize="int8", example=x[:2])
    with pytest.raises(ExportError, match="prefix must begin with a letter"):
        est.export(path, format="c", prefix="2nd")
    with pytest.raises(ValueError, match=r"format='c'.* got 'onnx'"):
        est.export(path, prefix="pump")
    with pytest.raises(ValueError, match=r"input_names .*output_names .*graphs"):
        est.export(path, format="c", output_names=["y"])
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_weights_that_are_no_numbers(x, tmp_path):
    est = plain_regressor(4, epochs=1).fit(x, x[:1])
    with torch.no_grad():
        next(est.model_.parameters())[0] = np.inf
    with pytest.raises(ExportError, match="a weight of the model is inf"):
        est.export(tmp_path / "model.h", format="c")
    assert list(tmp_path.iterdir()) == []


# -- check_export ----------------------------------------------------------------------------------


@pytest.fixture
def needs_cc():
    if shutil.which("cc") is None:
        pytest.skip("needs cc")


@pytest.mark.usefixtures("needs_cc")
def test_a_check_runs_the_header(x, tmp_path):
    pipe = make_pipeline(SequenceScaler(), plain_regressor(4, epochs=2, random_state=0))
    pipe.fit(samples(x), samples(x[:2]))
    x[:, 1, 7] = np.nan
    path = tmp_path / "a 'b'.h"
    export(pipe, path, format="c", prefix="pump")
    assert 0 < check_export(path, pipe, x) < 1e-5
    said = export(pipe, path, format="c", quantize="int8", example=x)
    assert check_export(path, pipe, x, tolerance=1.01 * said) > 1e-5
    with pytest.raises(ExportError, match=r"y is .* step \d+, series \d+"):
        check_export(path, pipe, x)
    with pytest.raises(ShapeError, match=r"takes 3 features, x has 2"):
        run_header(path, x[:2])


@pytest.mark.usefixtures("needs_cc")
def test_a_check_in_float64_keeps_its_digits(rng, tmp_path):
    x = rng.normal(size=(3, N, T))
    est = plain_regressor(4, cell="gru", epochs=2, random_state=0).fit(x, x[:2])
    est.export(tmp_path / "model.h", format="c")
    assert check_export(tmp_path / "model.h", est, x, tolerance=1e-12) < 1e-12


def test_a_check_that_cannot_run_says_why(x, tmp_path, monkeypatch):
    est = plain_regressor(4, epochs=1).fit(x, x[:1])
    path = tmp_path / "model.h"
    est.export(path, format="c")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(ExportError, match=r"no C compiler, such as cc.* CC"):
            check_export(path, est, x)
    other = tmp_path / "other.h"
    other.write_text("/* something else */")
    with pytest.raises(LoadError, match=r"other\.h is no C header that fluxutils_py exported"):
        check_export(other, est, x)
    if shutil.which("cc"):
        path.write_text(path.read_text().replace("int model_step(", "int model_stop("))
        with pytest.raises(ExportError, match=r"(?s)does not compile, cc .* says:.*model_step"):
            check_export(path, est, x)
