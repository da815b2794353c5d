"""Step by step gives what predict gives for the whole."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    Spec,
    WinsorScaler,
    samples,
    states,
    stream,
)
from fluxutils_py.auto.sequence_estimators import CELLS
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.nn import GRU, LSTM, Recur, native_kernels
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.steps.session import InferenceSession
from tests.plain_networks import plain_classifier, plain_regressor

F, N, T, G = 3, 37, 23, 2
CLOSE = {"float32": 2e-6, "float64": 1e-12}


def data(dtype="float64"):
    x = np.random.default_rng(0).normal(50, 3, size=(F, N, T)).astype(dtype)
    return x, np.stack([x.mean(0), x[0].cumsum(1) / 50])


def fitted(dtype="float64", model=None, **spec):
    x, y = data(dtype)
    model = model or nn.Sequential(LSTM(F, 7, 2), GRU(7, 5), nn.Linear(5, G))
    return Estimator(
        model, spec=Spec(epochs=1, batchsize=8, seqsize=10, **spec), random_state=0
    ).fit(x, y), x


def steps(live, x, start=0, stop=None):
    """What a stream gives for steps of (F, N, T), put together."""
    return np.stack(
        [live.step(x[:, :, t]) for t in range(start, x.shape[2] if stop is None else stop)], 2
    )


class Shifted(nn.Module):
    """A causal convolution over three steps: a model without state that must see windows."""

    takes_windows = True

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(F, G, 3)

    def forward(self, x):  # (S, B, F)
        padded = nn.functional.pad(x.permute(1, 2, 0), (2, 0))
        return self.conv(padded).permute(2, 0, 1)


class PerStep(nn.Module):
    """A recurrent model that takes single steps only."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = Recur(nn.LSTMCell(F, 4)), nn.Linear(4, G)

    def forward(self, x):
        n_series, _ = x.shape
        return self.head(self.rnn(x)).reshape(n_series, G)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["layers", "steps only", "no state", "windows"])
def test_steps_equal_the_whole(dtype, kind):
    model = {
        "layers": None,
        "steps only": PerStep(),
        "no state": nn.Linear(F, G),
        "windows": Shifted(),
    }[kind]
    est, x = fitted(dtype, model, overlap=2)
    live = est.stream(N)
    found = steps(live, x)
    assert found.dtype == dtype
    assert np.abs(found - est.predict(x)).max() < CLOSE[dtype] * 50
    _, expected = est.predict(x, return_state=True)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(live.state, expected, strict=True))


def test_state_is_plain_and_goes_on_anywhere(tmp_path):
    est, x = fitted()
    whole = est.predict(x)
    live = est.stream(N)
    steps(live, x, 0, 9)
    state = live.state
    assert type(state) is list
    assert not any(t.is_inference() or t.requires_grad for t in state)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    kept = [t.clone() for t in state]
    for going_on in (live, est.stream(N, loaded), est.stream(N, [t.numpy() for t in state])):
        assert np.abs(steps(going_on, x, 9) - whole[:, :, 9:]).max() < 1e-11
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))  # a copy
    assert np.abs(est.predict(x[:, :, 9:], state=state) - whole[:, :, 9:]).max() < 1e-11
    assert (
        np.abs(
            steps(est.stream(N, est.predict(x[:, :, :9], return_state=True)[1]), x, 9)
            - whole[:, :, 9:]
        ).max()
        < 1e-11
    )


def test_streams_leave_the_estimator_alone_and_each_other():
    est, x = fitted()
    est.model_.train()
    est.model_(torch.tensor(x[:, :5, 0].T.copy()))
    kept = states(est)
    one, other = est.stream(N), est.stream(N)
    first = steps(one, x)
    assert np.array_equal(steps(other, x), first)
    assert est.model_.training
    assert all(torch.equal(a, b) for a, b in zip(states(est), kept, strict=True))
    est.fit(x[:, :, :5], data()[1][:, :, :5])
    one.reset()
    assert np.array_equal(steps(one, x), first)  # goes on with the model it was made of


def test_outputs_are_not_the_state():
    x, y = data()
    est = Estimator(Recur(nn.RNNCell(F, G)), spec=Spec(epochs=1, batchsize=8, seqsize=10)).fit(x, y)
    live = est.stream(N)
    for t in range(T):
        live.step(x[:, :, t])[:] = 99
    assert np.abs(live.state[0].numpy()).max() <= 1


def test_the_users_array_is_left_alone():
    class InPlace(nn.Linear):
        takes_windows = True

        def forward(self, x):
            return super().forward(x.mul_(2))

    est, x = fitted(model=InPlace(F, G))
    step = np.asfortranarray(x[:, :, 0])
    before = step.copy()
    est.stream(N).step(step)
    assert np.array_equal(step, before)


@pytest.mark.few
@pytest.mark.parametrize(
    "series", [5, [2, 30], slice(3, 9), np.arange(N) % 2 == 0, np.array([], int)]
)
@pytest.mark.parametrize("kind", ["layers", "steps only", "windows"])
def test_some_series_start_anew(kind, series):
    est, x = fitted(
        model={"layers": None, "steps only": PerStep(), "windows": Shifted()}[kind], overlap=2
    )
    live, new = est.stream(N), np.zeros(N, bool)
    new[series] = True
    steps(live, x, 0, 9)
    live.reset(series)
    state = live.state
    rest = steps(live, x, 9)
    assert np.abs(rest - est.predict(x)[:, :, 9:])[:, ~new].max(initial=0) < 1e-11
    assert np.abs(rest - est.predict(x[:, :, 9:]))[:, new].max(initial=0) < 1e-11
    assert np.array_equal(steps(est.stream(N, state), x, 9), rest)  # the state says it
    assert np.abs(est.predict(x[:, :, 9:], state=state) - rest).max() < 1e-11
    live.reset()
    assert np.abs(steps(live, x) - est.predict(x)).max() < 1e-11


@pytest.mark.parametrize("series", [99, [0, 99], "first", 2.5, [True] * 3])
def test_series_that_there_are_not_are_named(series):
    est, _ = fitted()
    scaler = SequenceImputer("ffill").fit(data()[0])
    for live in (est.stream(N), stream(make_pipeline(scaler, est), N), scaler.stream(N)):
        with pytest.raises(
            IndexError,
            match=f"^series .* {N} series; got {re.escape(repr(series))}$",
        ):
            live.reset(series)


def test_a_module_whose_first_state_is_not_known_starts_anew_as_a_whole_only():
    class Mean(nn.Module):
        def forward(self, x, state):
            state = x if state is None else 0.5 * (state + x)
            return state, state

    est, x = fitted(model=nn.Sequential(Recur(Mean()), nn.Linear(F, G)))
    live = est.stream(N)
    first = steps(live, x)
    with pytest.raises(
        DataError,
        match=r"state of Mean .*empty_state\(\)",
    ):
        live.reset([3])
    live.reset()
    assert np.array_equal(steps(live, x), first)


@pytest.mark.parametrize(
    "method", ["predict", "predict_proba", "predict_log_proba", "decision_function"]
)
@pytest.mark.parametrize("labels", [("down", "up"), ("a", "b", "c")])
def test_classifiers_give_what_is_asked_for(method, labels):
    x, _ = data()
    y = np.array(labels)[x.argmax(0) % len(labels)][None]
    y[:, :, :5] = labels[0]
    settings = {"epochs": 1, "seqsize": 10, "class_weight": "balanced"}
    est = plain_classifier(5, **settings, random_state=0).fit(x, y)
    whole = getattr(est, method)(x)
    found = steps(est.stream(N, method=method), x)
    first, state = getattr(est, method)(x[:, :, :9], return_state=True)
    rest = getattr(est, method)(x[:, :, 9:], state=state)
    for one in (found, np.concatenate([first, rest], 2)):
        assert (one.shape, one.dtype) == (whole.shape, whole.dtype)
        assert (
            np.array_equal(one, whole) if method == "predict" else np.abs(one - whole).max() < 1e-12
        )


def test_several_inputs_and_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(4, 2), LSTM(F + 2, 5), nn.Linear(5, G)

        def forward(self, x, k):
            h = self.rnn(torch.cat([x, self.embed(k[..., 0])], -1))
            return self.head(h), h[..., :1]

    x, y = data()
    k = np.random.default_rng(1).integers(0, 4, size=(1, N, T))
    est = Estimator(Two(), spec=Spec(epochs=1, batchsize=8, seqsize=10)).fit((x, k), (y, y[:1]))
    # of the copy's model it is not known yet whether it takes windows
    for fresh in (
        est,
        copy.deepcopy(est),
    ):
        live = fresh.stream(N)
        found = [live.step((x[:, :, t], k[:, :, t])) for t in range(T)]
        for one, whole in zip(zip(*found, strict=True), est.predict((x, k)), strict=True):
            assert np.abs(np.stack(one, 2) - whole).max() < 1e-12
    with pytest.raises(ShapeError, match=r"1 inputs, .*takes 2"):
        est.stream(N).step(x[:, :, 0])


def test_steps_without_input_are_as_in_predict():
    est, x = fitted()
    x[:, 3, 5:9] = np.nan
    x[:, :, 11] = np.nan
    whole = est.predict(x)
    found = steps(est.stream(N), x)
    assert np.array_equal(np.isnan(found), np.isnan(whole))
    assert np.nanmax(np.abs(found - whole)) < 1e-11


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda x: x[:, :5],
            ShapeError,
            r"^a step .* \(F, N\) = \(3, 37\), got \(3, 5\): make the stream with n_series=5$",
        ),
        (
            lambda x: x[:, :5].T,
            ShapeError,
            r"got \(5, 3\): give x\.T, and make the stream with n_series=5$",
        ),
        (lambda x: x[0], ShapeError, r"got \(37,\)$"),
        (lambda x: x[:, :, None], ShapeError, r"got \(3, 37, 1\)$"),
        (lambda x: x.T, ShapeError, r"got \(37, 3\): give x\.T$"),
        (lambda x: x.astype(str), DataError, "^a step must hold real numbers, got dtype <U"),
        (
            lambda x: np.ma.masked_less(x, 50),
            DataError,
            r"^x is a masked array.*x\.filled\(np\.nan\)$",
        ),
        (
            lambda x: np.where(np.arange(N) == 4, np.inf, x),
            DataError,
            "^x is inf at feature 0, series 4; a step without",
        ),
        (
            lambda x: np.where((np.arange(F) == 1)[:, None] & (np.arange(N) == 4), np.nan, x),
            DataError,
            "^x is nan at feature 1, series 4; a step without input is NaN in all features; fill "
            "in single ones$",
        ),
    ],
)
def test_bad_steps_are_named_and_leave_the_state(change, error, message):
    est, x = fitted()
    live = est.stream(N)
    steps(live, x, 0, 3)
    before = live.state
    with pytest.raises(error, match=message):
        live.step(change(x[:, :, 3]))
    assert all(torch.equal(a, b) for a, b in zip(live.state, before, strict=True))


def test_bad_arguments_are_named():
    est, _ = fitted()
    with pytest.raises(NotFittedError):
        Estimator().stream()
    with pytest.raises(SpecError, match=r"^n_series .*got 0$"):
        est.stream(0)
    with pytest.raises(ValueError, match=r"'predict' .*got 'predict_proba'$"):
        est.stream(method="predict_proba")
    with pytest.raises(ShapeError, match=r"^state .*0 tensors, .*has 3;"):
        est.stream(state=[])
    with pytest.raises(ShapeError, match=r"^state\[0\] .*4 series, .*has 3$"):
        est.stream(3, [*[torch.zeros(2, 4, 7)] * 2, torch.zeros(1, 4, 5)])
    with pytest.raises(TypeError, match=r"^Ridge cannot run step by step"):
        stream(Ridge().fit(np.eye(3), np.arange(3)))


def test_a_saved_estimator_streams(tmp_path):
    est, x = fitted()
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est")
    assert np.array_equal(steps(loaded.stream(N), x), steps(est.stream(N), x))


# -- pipelines -----------------------------------------------------------------------------------------


def test_a_pipeline_streams(tmp_path):
    x, y = data()
    x[np.random.default_rng(3).random(x.shape) < 0.1] = np.nan
    pipe = make_pipeline(
        SequenceImputer("ffill"),
        make_pipeline(SequenceScaler(), "passthrough"),
        plain_regressor(5, epochs=1),
    )
    pipe.fit(samples(x), samples(y))
    whole = pipe.predict(x)
    live = stream(pipe, N)
    found = steps(live, x, 0, 9)
    torch.save(live.state, tmp_path / "state.pt")
    again = stream(pipe, N, torch.load(tmp_path / "state.pt", weights_only=True))
    found = np.concatenate([found, steps(again, x, 9)], 2)
    assert np.abs(found - whole).max() < 1e-11
    steps(live, x, 9)
    live.reset(np.arange(5))
    late = steps(live, x[:, :, :6])[:, :5]
    assert np.abs(late - whole[:, :5, :6]).max() < 1e-11
    live.reset()
    assert np.abs(steps(live, x) - whole).max() < 1e-11


def test_a_pipeline_of_rows_streams_their_scaler():
    x, y = data("float32")
    pipe = make_pipeline(StandardScaler(), plain_regressor(5, epochs=1)).fit(
        x[:, :, 0].T, y[0, :, 0]
    )
    expected = pipe.predict(x[:, :, 1].T)
    assert np.abs(stream(pipe, N).step(x[:, :, 1])[0] - expected).max() < 1e-4


def test_a_scaler_of_flat_series_cannot_stream():
    x, y = data()
    scaler = StandardScaler().fit(np.asarray(samples(x)))
    pipe = make_pipeline(StandardScaler(), plain_regressor(5, epochs=1))
    pipe.steps[0] = ("standardscaler", scaler)
    pipe.steps[1] = ("last", plain_regressor(5, epochs=1).fit(x, y))
    message = (
        r"^the step 'standardscaler' of the pipeline, StandardScaler, was fitted on rows of 69 columns and cannot "
        r"transform a step of shape \(3, 37\): use SequenceScaler or SequenceImputer"
    )
    with pytest.raises(ShapeError, match=message):
        stream(pipe, N).step(x[:, :, 0])


def test_probabilities_of_a_pipeline():
    x, _ = data()
    y = np.where(x[0] > 50, "up", "down")[None]
    pipe = make_pipeline(SequenceScaler(), EstimatorClassifier(spec=Spec(epochs=1))).fit(
        samples(x), samples(y)
    )
    found = steps(stream(pipe, N, method="predict_proba"), x)
    assert np.abs(found - pipe.predict_proba(x)).max() < 1e-11


def test_targets_that_were_transformed_come_back():
    x, y = data()
    inner = make_pipeline(SequenceScaler(), plain_regressor(5, epochs=1, target="step"))
    est = TransformedTargetRegressor(inner, func=np.log, inverse_func=np.exp, check_inverse=False)
    est.fit(samples(x), np.asarray(samples(y[:1])))
    whole = np.asarray(est.predict(samples(x))).reshape(N, 1, T).transpose(1, 0, 2)
    assert np.abs(steps(stream(est, N), x) - whole).max() < 1e-9
    est = TransformedTargetRegressor(inner, transformer=StandardScaler()).fit(
        samples(x), np.asarray(samples(y[:1]))
    )
    with pytest.raises(
        DataError,
        match=r"StandardScaler, .*23 columns",
    ):
        stream(est, N).step(x[:, :, 0])


def native(monkeypatch, live):
    """Let the stream have no other way than native steps."""

    def refuse(*_):
        raise AssertionError("torch computes this step")

    monkeypatch.setattr(InferenceSession, "run", refuse)
    return live


with_kernels = pytest.mark.skipif(
    kernels.library_in_use() is None, reason="the kernels are not in use"
)


@with_kernels
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cell", [c for c in CELLS if c not in ("tcn", "attention")])
def test_ready_made_networks_step_natively(cell, dtype, monkeypatch):
    x, y = data(dtype)
    est = plain_regressor(
        13, 2, cell, epochs=1, dropout=0.2, seqsize=10, scale_target=True, random_state=0
    ).fit(x, y)
    if dtype == "float64":
        est.model_.double()
    expected = est.predict(x)
    ys = steps(native(monkeypatch, est.stream(N)), x)
    assert ys.dtype == expected.dtype
    np.testing.assert_allclose(ys, expected, rtol=CLOSE[dtype], atol=20 * CLOSE[dtype])


@with_kernels
@pytest.mark.parametrize("labels", [["a", "b"], [3, 5, 8]])
def test_classifiers_step_natively(labels, monkeypatch):
    x, _ = data("float32")
    y = np.random.default_rng(1).choice(labels, size=(1, N, T))
    y[:, :, :9] = labels[0]
    settings = {"cell": "gru", "epochs": 1, "class_weight": "balanced"}
    est = plain_classifier(6, **settings, random_state=0).fit(x, y)
    methods = ["predict", "predict_proba", "predict_log_proba", "decision_function"]
    expected = {m: getattr(est, m)(x) for m in methods}
    for method, whole in expected.items():
        ys = steps(native(monkeypatch, est.stream(N, method=method)), x)
        assert ys.dtype == whole.dtype
        if method == "predict":
            np.testing.assert_array_equal(ys, whole)
        else:
            np.testing.assert_allclose(ys, whole, rtol=0, atol=4e-6)


@pytest.mark.slow
@with_kernels
def test_pipelines_of_scalers_step_natively(monkeypatch):
    x, y = data("float32")
    x[:, 3, 4] = np.nan
    x[:, 5, 1:7] = np.nan
    y[:, np.isnan(x).any(0)] = np.nan
    last = plain_regressor(6, epochs=1, scale_target=True, random_state=0)
    for scalers in ([SequenceScaler()], [WinsorScaler(), SequenceScaler()], [SequenceImputer()]):
        pipe = make_pipeline(*scalers, last).fit(samples(x), samples(y))
        expected = pipe.predict(x)
        with monkeypatch.context() as patch:
            ys = steps(native(patch, stream(pipe, N)), x)
        np.testing.assert_allclose(ys, expected, rtol=1e-5, atol=1e-5)


@with_kernels
def test_a_state_moves_between_native_streams_and_predict():
    est, x = fitted("float32")
    expected = est.predict(x)
    live = est.stream(N)
    steps(live, x, 0, 7)
    _, state = est.predict(x[:, :, :7], return_state=True)
    for got, wanted in zip(live.state, state, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
    whole = est.predict(x[:, :, 7:], state=live.state)
    np.testing.assert_allclose(whole, expected[:, :, 7:], rtol=0, atol=CLOSE["float32"])
    other = est.stream(N, state)
    np.testing.assert_allclose(steps(other, x, 7), expected[:, :, 7:], rtol=0, atol=2e-6)
    with native_kernels(False):
        by_torch = live.step(x[:, :, 7])
    np.testing.assert_allclose(by_torch, expected[:, :, 7], rtol=0, atol=2e-6)
    np.testing.assert_allclose(steps(live, x, 8), expected[:, :, 8:], rtol=0, atol=2e-6)


@with_kernels
def test_a_stream_sees_that_its_model_has_learnt():
    est, x = fitted("float32")
    live = est.stream(N)
    live.step(x[:, :, 0])
    with torch.no_grad():
        for p in est.model_.parameters():
            p += 0.1
    live.reset()
    np.testing.assert_allclose(steps(live, x), est.predict(x), rtol=0, atol=5e-6)


@pytest.mark.few
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_of_a_stream_go_on(copied):
    est, x = fitted("float32")
    live = est.stream(N)
    expected = est.predict(x)
    steps(live, x, 0, 7)
    twin = copied(live)
    for each in (live, twin):
        np.testing.assert_allclose(steps(each, x, 7), expected[:, :, 7:], rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def filling():
    """A pipeline whose imputer carries values over gaps, and its inputs."""
    x = np.random.default_rng(3).normal(size=(2, 4, 60)).cumsum(2)
    x[:, :, 0] = 0
    x[:, 1:, 25:32] = np.nan
    pipe = make_pipeline(
        SequenceImputer("ffill"), SequenceScaler(), plain_regressor(3, epochs=1, random_state=0)
    )
    return pipe.fit(x, np.nan_to_num(x[:1])), x


def test_a_stream_of_a_pipeline_is_warmed_up_by_its_history(filling):
    pipe, x = filling
    whole = pipe.predict(x)
    _, of_estimator = pipe.predict(x[:, :, :28], return_state=True)
    with pytest.raises(ShapeError, match=r"'sequenceimputer'.*stepped through"):
        stream(pipe, 4, of_estimator)
    past = stream(pipe, 4)
    for t in range(28):
        past.step(x[:, :, t])
    np.testing.assert_allclose(steps(past, x, 28), whole[:, :, 28:], atol=1e-6)
    watched = stream(pipe, 4, past.state, alarm=True)
    assert watched.step(x[:, :, 0])[0].shape == (1, 4)


@pytest.mark.filterwarnings("ignore:this fit makes", "ignore:after [0-9]+ updates the loss")
@pytest.mark.parametrize("large", [1e30, 3.4e38])
@pytest.mark.parametrize("cell", ["mingru", "minlstm", "lru", "attention", "linear"])
def test_steps_near_the_largest_number_are_those_of_predict(cell, large):
    x = np.random.default_rng(0).normal(size=(F, 9, 24)).astype("float32")
    settings = {} if cell == "linear" else {"hidden_size": 4, "max_updates": 2}
    est = SequenceRegressor(cell=cell, random_state=0, **settings).fit(x, x[:1])
    usual = est.predict(x)
    is_large = np.arange(24) >= np.array([0, 5, 5, *6 * [24]])[:, None]
    x[:, is_large] *= large / np.abs(x).max()
    y = est.predict(x)
    # neither earlier steps nor other series depend on them
    np.testing.assert_allclose(y[:, ~is_large], usual[:, ~is_large], rtol=0, atol=2e-5)
    scale = np.abs(y[np.isfinite(y)]).max()
    np.testing.assert_allclose(steps(est.stream(9), x) / scale, y / scale, rtol=0, atol=1e-5)


def test_an_integer_that_int64_does_not_hold_is_refused_as_by_predict():
    est, x = fitted("float32")
    x = np.full(x.shape, 2**63, np.uint64)
    for call in (est.predict, lambda x: est.stream(N).step(x[:, :, 0])):
        with pytest.raises(DataError, match=r"9223372036854775808.*uint64.*int64"):
            call(x)
