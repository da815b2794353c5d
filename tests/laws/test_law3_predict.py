"""Law 3: predict is pure, and does not depend on how the work is divided."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, loadstates, net2vec, reset, states
from fluxutils_py.nn import GRU, LSTM, RNN, Recur
from fluxutils_py.training import predictor

from .conftest import B, N, S, T, difference, make_task

GROUPINGS = {"float32": 1e-6, "float64": 1e-12}
CHUNKS = {"float32": 2e-6, "float64": 1e-12}


def fitted(dtype="float64", model=None, n_steps=T, **spec):
    if model is None and not spec:
        return copy.deepcopy(fitted_once(dtype, n_steps))
    return fit(dtype, model, n_steps, **spec)


@functools.cache
def fitted_once(dtype, n_steps):
    return fit(dtype, None, n_steps)


@functools.cache
def fitted_layer(dtype, layer):
    """On 200 steps, once; tests only read it."""
    return fit(dtype, nn.Sequential(layer(3, 7), nn.Linear(7, 2)), 200)


def fit(dtype, model, n_steps, **spec):
    task = make_task(dtype, n_steps=n_steps)
    est = Estimator(
        model or task.ours(),
        None,
        None,
        Spec(epochs=1, batchsize=B, seqsize=S, **spec),
        random_state=0,
    )
    return est.fit(task.x, task.y), task.x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layer", [LSTM, GRU, RNN])
def test_equals_the_torch_layer_run_whole(dtype, layer):
    est, x = fitted(dtype, nn.Sequential(layer(3, 7, num_layers=2), nn.Linear(7, 2)))
    rnn, head = est.model_[0].module, est.model_[1]
    with torch.no_grad():
        expected = (
            head(rnn(torch.tensor(x.transpose(2, 1, 0).copy()))[0]).numpy().transpose(2, 1, 0)
        )
    predicted = est.predict(x)
    assert predicted.dtype == dtype
    assert np.abs(predicted - expected).max() < GROUPINGS[dtype]


def in_chunks(est, x, cuts, state=None, **arguments):
    """Predictions for chunks of time, each going on from the one before, and the state at the end."""
    parts, n_steps = [], x.shape[2]
    for start, stop in zip([0, *cuts], [*cuts, n_steps], strict=True):
        part, state = est.predict(x[:, :, start:stop], state=state, return_state=True, **arguments)
        parts.append(part)
    return np.concatenate(parts, 2), state


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layer", [LSTM, GRU, RNN])
@pytest.mark.parametrize(
    "cuts", [[1], [7, 8, 30], [16, 32], list(range(1, 200))], ids=["1", "7-8-30", "16-32", "each"]
)
def test_chunks_of_time_equal_the_whole(dtype, layer, cuts):
    est, x = fitted_layer(dtype, layer)
    found, _ = in_chunks(est, x, cuts)
    assert np.abs(found - est.predict(x)).max() < CHUNKS[dtype]


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 30]])
def test_the_state_is_the_models_own_after_the_last_step(dtype, cuts):
    est, x = fitted(dtype, nn.Sequential(LSTM(3, 7, num_layers=2), GRU(7, 5), nn.Linear(5, 2)))
    _, state = in_chunks(est, x, cuts)
    est.model_(torch.tensor(x.transpose(2, 1, 0).copy()))
    expected = states(est)
    assert type(state) is list
    assert [(t.shape, t.dtype) for t in state] == [(t.shape, t.dtype) for t in expected]
    for found, wanted in zip(state, expected, strict=True):
        assert difference(found, wanted) < CHUNKS[dtype]


def saved(state, path):
    torch.save(state, path)
    return torch.load(path, weights_only=True)


COPIES = {
    "list": lambda s, _: list(s),
    "slice": lambda s, _: s[:],
    "tuple": lambda s, _: tuple(s),
    "clones": lambda s, _: [t.clone() for t in s],
    "deep copy": lambda s, _: copy.deepcopy(s),
    "pickle": lambda s, _: pickle.loads(pickle.dumps(s)),
    "torch.save": lambda s, path: saved(s, path / "state.pt"),
    "arrays": lambda s, _: [t.numpy() for t in s],
    "read-only arrays": lambda s, _: [
        np.frombuffer(t.numpy().tobytes()).reshape(t.shape) for t in s
    ],
    "joined parts": lambda s, _: [torch.cat([t[:, :5], t[:, 5:]], 1) for t in s],
}


@pytest.mark.parametrize("kind", COPIES)
def test_every_copy_of_the_state_goes_on(kind, tmp_path):
    est, x = fitted()
    whole = est.predict(x)
    for cut in (13, 16):
        _, state = est.predict(x[:, :, :cut], return_state=True)
        again = est.predict(x[:, :, cut:], state=COPIES[kind](state, tmp_path))
        assert np.abs(again - whole[:, :, cut:]).max() < 1e-12


def test_the_state_goes_into_the_model_and_comes_from_it():
    est, x = fitted()
    whole, xs = est.predict(x), torch.tensor(x.transpose(2, 1, 0).copy())
    _, state = est.predict(x[:, :, :13], return_state=True)
    with torch.no_grad():
        found = loadstates(est, state).model_(xs[13:]).numpy().transpose(2, 1, 0)
    assert np.abs(found - whole[:, :, 13:]).max() < 1e-12
    reset(est).model_(xs[:29])
    assert np.abs(est.predict(x[:, :, 29:], state=states(est)) - whole[:, :, 29:]).max() < 1e-12
    # a fresh state is that of no series
    assert np.array_equal(est.predict(x, state=states(reset(est))), whole)


def test_a_state_of_some_series_goes_on_for_them():
    est, x = fitted()
    _, state = est.predict(x[:, :, :13], return_state=True)
    some = np.array([30, 2, 17])
    found = est.predict(x[:, some, 13:], state=[t[:, some] for t in state])
    assert np.abs(found - est.predict(x)[:, some, 13:]).max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("memory", [1, 1 << 13, 1 << 30])
def test_the_state_of_a_series_is_that_after_its_own_last_step(memory, monkeypatch):
    monkeypatch.setattr(predictor, "MAX_ACTIVATION_BYTES", memory)
    est, x = fitted()
    lengths = np.random.default_rng(3).integers(1, T + 1, N)
    predicted, state = est.predict(x, lengths=lengths, return_state=True)
    for n, length in enumerate(lengths):
        one, end = est.predict(x[:, n : n + 1, :length], return_state=True)
        assert np.abs(predicted[:, n : n + 1, :length] - one).max() < 1e-12
        assert all(difference(t[:, n : n + 1], e) < 1e-12 for t, e in zip(state, end, strict=True))


class Own(nn.Module):
    """A recurrent module whose first state is its first input, and counts its steps in integers."""

    def forward(self, x, state):
        mean, n = (x, torch.zeros(len(x), 1, dtype=torch.int64)) if state is None else state
        mean = mean + (x - mean) / (n + 1)
        return mean, (mean, n + 1)


@pytest.mark.slow
def test_modules_of_ones_own_go_on_from_a_state():
    est, x = fitted(model=nn.Sequential(Recur(Own()), LSTM(3, 4), Recur(Own()), nn.Linear(4, 2)))
    found, state = in_chunks(est, x, [1, 13])
    assert np.abs(found - est.predict(x)).max() < 1e-12
    assert [t.dtype.is_floating_point for t in state] == [True, False, True, True, True, False]
    assert {int(n) for n in state[1]} == {T}
    again = copy.deepcopy(est)
    # never ran
    again.model_ = nn.Sequential(
        Recur(Own()), copy.deepcopy(est.model_[1]), Recur(Own()), est.model_[3]
    )
    assert np.array_equal(again.predict(x, state=state), est.predict(x, state=state))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [1, 1 << 12, 1 << 14])
def test_the_memory_for_windows_does_not_matter(memory, monkeypatch):
    est, x = fitted()
    whole, end = est.predict(x, return_state=True)
    monkeypatch.setattr(predictor, "MAX_ACTIVATION_BYTES", memory)
    monkeypatch.setattr(predictor, "MANY_SERIES_STEPS", 7)
    found, state = est.predict(x, return_state=True)
    assert np.abs(found - whole).max() < 1e-12
    assert all(difference(t, e) < 1e-12 for t, e in zip(state, end, strict=True))


@pytest.mark.few
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_groupings_of_series_agree_to_rounding(dtype):
    est, x = fitted(dtype)
    whole = est.predict(x)
    for batchsize in (1, 5, 8, 36, 37, 1000):
        est.set_params(spec=Spec(epochs=1, batchsize=batchsize, seqsize=S))
        assert np.abs(est.predict(x) - whole).max() < GROUPINGS[dtype]
    one_by_one = np.concatenate([est.predict(x[:, n : n + 1]) for n in range(N)], 1)
    assert np.abs(one_by_one - whole).max() < GROUPINGS[dtype]


@pytest.mark.parametrize("seqsize", [1, 3, 43, 999, None])
def test_seqsize_does_not_matter(seqsize):
    est, x = fitted()
    whole = est.predict(x)
    est.set_params(spec=Spec(epochs=1, batchsize=B, seqsize=seqsize))
    assert np.array_equal(est.predict(x), whole)


def test_few_series_are_not_folded():
    est, x = fitted()
    whole = est.predict(x)
    est.set_params(spec=Spec(epochs=1, batchsize=1000, seqsize=S))
    assert np.abs(est.predict(x[:, :3]) - whole[:, :3]).max() < 1e-12


@pytest.mark.slow
def test_models_without_state_or_with_steps_only():
    class PerStep(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            n_series, _ = x.shape
            return self.head(self.lstm(x)).reshape(n_series, 2)

    for model in (PerStep(), nn.Linear(3, 2)):
        est, x = fitted(model=model)
        assert np.abs(in_chunks(est, x, [13])[0] - est.predict(x)).max() < 1e-12


@pytest.mark.slow
def test_the_model_is_left_as_it_was():
    model = nn.Sequential(LSTM(3, 6, num_layers=2, dropout=0.5), nn.Dropout(0.5), nn.Linear(6, 2))
    est, x = fitted(model=model)
    est.model_.train()
    est.model_(torch.tensor(x[:, :5, 0].T.copy()))
    before, kept, generator = net2vec(est), states(est), torch.get_rng_state()
    first = est.predict(x)
    est.score(x, first)
    assert np.array_equal(est.predict(x), first)  # dropout is off, and there is nothing left over
    assert est.model_.training
    assert torch.equal(net2vec(est), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(a, b) for a, b in zip(states(est), kept, strict=True))


def test_threads_may_predict_together():
    est, x = fitted()
    whole = est.predict(x)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(est.predict, [x] * 8):
            assert np.array_equal(result, whole)


@pytest.mark.parametrize(
    "kind", ["C", "F", "time-major", "memmap", "h5py", "view", "torch", "float32"]
)
def test_out_of_any_kind(kind, tmp_path):
    est, x = fitted()
    expected = est.predict(x)
    if kind == "h5py":
        with h5py.File(tmp_path / "out.h5", "w") as f:
            out = f.create_dataset("yhat", (2, N, T), "f4")
            assert est.predict(x, out=out) is out
            np.testing.assert_allclose(out[:], expected, rtol=1e-6)
        return
    out = {
        "C": lambda: np.full((2, N, T), 9.0),
        "F": lambda: np.full((2, N, T), 9.0, order="F"),
        "time-major": lambda: np.full((T, N, 2), 9.0).transpose(2, 1, 0),
        "memmap": lambda: np.memmap(tmp_path / "out", "f8", "w+", shape=(2, N, T)),
        "view": lambda: np.full((5, 2 * N, T + 3), 9.0)[1:5:2, ::2, 3:],
        "torch": lambda: torch.full((2, N, T), 9.0, dtype=torch.float64),
        "float32": lambda: np.zeros((2, N, T), "f4"),
    }[kind]()
    assert est.predict(x, out=out) is out
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-6 if kind == "float32" else 0)


def test_new_output_is_time_major():
    est, x = fitted()
    assert est.predict(x).transpose(2, 1, 0).flags.c_contiguous


def test_steps_without_input_give_nan_and_the_rest_is_as_in_training():
    est, x = fitted()
    x = x.copy()
    x[:, 3, 5:9] = np.nan
    x[:, 4, 30:] = np.nan
    predicted = est.predict(x)
    gaps = np.isnan(x).all(0)
    assert np.array_equal(np.isnan(predicted), np.broadcast_to(gaps, predicted.shape))
    np.testing.assert_array_equal(predicted[:, ~gaps], est.predict(np.nan_to_num(x))[:, ~gaps])
    lengths = np.full(N, T)
    lengths[4] = 30
    np.testing.assert_array_equal(
        est.predict(np.nan_to_num(x), lengths=lengths)[:, 4], predicted[:, 4]
    )
