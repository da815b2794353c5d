"""Law 3: predict is pure, and does not depend on how the work is divided."""

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, states
from fluxutils_py.nn import GRU, LSTM, RNN

from .conftest import B, N, S, T, make_task

GROUPINGS = {"float32": 1e-6, "float64": 1e-12}


def fitted(dtype="float64", model=None, n_steps=T, **spec):
    task = make_task(dtype, n_steps=n_steps)
    est = Estimator(model or task.ours(), None, None, Spec(epochs=1, batchsize=B, seqsize=S, **spec), random_state=0)
    return est.fit(task.x, task.y), task.x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layer", [LSTM, GRU, RNN])
def test_equals_the_torch_layer_run_whole(dtype, layer):
    est, x = fitted(dtype, nn.Sequential(layer(3, 7, num_layers=2), nn.Linear(7, 2)))
    rnn, head = est.model_[0].module, est.model_[1]
    with torch.no_grad():
        expected = head(rnn(torch.tensor(x.transpose(2, 1, 0).copy()))[0]).numpy().transpose(2, 1, 0)
    predicted = est.predict(x)
    assert predicted.dtype == dtype
    assert np.abs(predicted - expected).max() < GROUPINGS[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layer", [LSTM, GRU, RNN])
@pytest.mark.parametrize("cuts", [[1], [7, 8, 30], [16, 32], list(range(1, 200))], ids=["1", "7-8-30", "16-32", "each"])
def test_chunks_of_time_agree_to_the_last_bit(dtype, layer, cuts):
    est, x = fitted(dtype, nn.Sequential(layer(3, 7), nn.Linear(7, 2)), n_steps=200)
    whole, state, parts = est.predict(x), None, []
    for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
        part, state = est.predict(x[:, :, start:stop], state=state, return_state=True)
        parts.append(part)
    assert np.array_equal(np.concatenate(parts, 2), whole)
    assert np.array_equal(est.predict(x[:, :, :77]), whole[:, :, :77])


class Noting(nn.Linear):
    """Notes the step at which each window that it is given begins, and how many steps that has."""

    seen: ClassVar[list[tuple[int, int]]] = []

    def forward(self, x):
        self.seen.append((round(float(x.detach().flatten()[0])), len(x)))
        return super().forward(x)


@pytest.mark.parametrize("sizes", [[1] * 300, [7, 1, 22, 270], [16, 32, 252], [130, 170]])
def test_chunks_of_time_are_computed_in_the_blocks_of_the_whole(sizes):
    steps = np.broadcast_to(np.arange(300.0), (3, 5, 300))  # many blocks round alike, so that numbers would not tell
    est = Estimator(Noting(3, 1), None, None, Spec(epochs=1, batchsize=B, seqsize=S)).fit(steps, steps[:1])
    est.predict(steps[:, :, :1])
    Noting.seen.clear()
    est.predict(steps)
    whole, state = dict(Noting.seen), None
    assert list(whole) == [0, *np.cumsum(list(whole.values()))[:-1]]
    assert sum(whole.values()) < 1.5 * 300
    Noting.seen.clear()
    for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
        _, state = est.predict(steps[:, :, stop - size : stop], state=state, return_state=True)
    assert dict(Noting.seen) == whole
    assert all(whole[start] == size for start, size in Noting.seen)


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


def test_streaming_from_the_states_of_a_model():
    est, x = fitted()
    _, state = est.predict(x[:, :, :16], return_state=True)  # 16 is a block boundary: nothing is pending
    again = est.predict(x[:, :, 16:], state=list(state))
    assert np.abs(again - est.predict(x)[:, :, 16:]).max() < 1e-12


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
        first, state = est.predict(x[:, :, :13], return_state=True)
        second = est.predict(x[:, :, 13:], state=state)
        assert np.array_equal(np.concatenate([first, second], 2), est.predict(x))


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


@pytest.mark.parametrize("kind", ["C", "F", "time-major", "memmap", "h5py", "view", "torch", "float32"])
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
    np.testing.assert_array_equal(est.predict(np.nan_to_num(x), lengths=lengths)[:, 4], predicted[:, 4])
