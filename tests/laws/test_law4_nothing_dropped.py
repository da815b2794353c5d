"""Law 4: nothing is dropped. Short last windows, short last groups, folds of unequal length."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fluxutils_py import Estimator, Spec, net2vec

from .conftest import N, T, difference, flat, make_task, plain_loop

sgd = partial(torch.optim.SGD, lr=0.05)
still = partial(torch.optim.SGD, lr=0.0)


@pytest.mark.few
@pytest.mark.parametrize(("batchsize", "seqsize", "overlap", "burn_in"), [
    (8, 10, 0, 0), (36, 42, 0, 0), (1, 1, 0, 0), (5, 43, 0, 0), (8, 10, 7, 0), (8, 10, 25, 0), (8, 10, 0, 4),
    (50, 9, 3, 4),
])  # fmt: skip
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_step_is_a_target_exactly_once(task, batchsize, seqsize, overlap, burn_in, shuffle):
    y = np.arange(N * T, dtype=float).reshape(1, N, T)
    seen = []

    def loss(model, xs, ys):
        seen.append(ys.reshape(-1).numpy().copy())
        return model(xs).mean()

    spec = Spec(1, batchsize, seqsize, overlap=overlap, burn_in=burn_in, shuffle=shuffle)
    Estimator(task.ours(), loss, still, spec, random_state=0).fit(task.x, y)
    assert sorted(np.concatenate(seen)) == sorted(y[0, :, burn_in:].reshape(-1))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("n_series", "n_steps", "batchsize"), [(3, 43, 11), (1, 43, 8), (2, 7, 13), (5, 43, 10)]
)
def test_every_step_of_folded_series_is_a_target_exactly_once(
    n_series, n_steps, batchsize, weighted
):
    task = make_task(n_series=n_series, n_steps=n_steps)
    y = np.arange(1.0, n_series * n_steps + 1).reshape(1, n_series, n_steps)
    seen, rows = [], []

    def look(model, xs, ys, ws=None):
        live = torch.ones(ys.shape, dtype=bool) if ws is None else ws > 0
        seen.append(ys[live].numpy().copy())
        rows.append(ys.shape[1])
        return model(xs).mean()

    loss = look if weighted else lambda model, xs, ys: look(model, xs, ys)
    Estimator(task.ours(), loss, still, Spec(1, batchsize, 4, rebatch=True)).fit(task.x, y)
    assert sorted(np.concatenate(seen)) == sorted(y.reshape(-1))
    if weighted:
        assert max(rows) > n_series  # they were folded


@pytest.mark.few
@pytest.mark.parametrize("time_major", [True, False])
def test_folds_equal_series_cut_by_hand(time_major):
    task = make_task(n_series=3, n_steps=44)
    n = 11  # folds of 4 steps: 33 rows of a batch of 35
    # row b*n + k
    x, y = (a.reshape(a.shape[0], 3, n, 4).reshape(a.shape[0], 3 * n, 4) for a in (task.x, task.y))
    hand = make_task(n_series=3, n_steps=44)
    hand.x, hand.y = x, y
    expected, _, _ = plain_loop(hand, sgd, epochs=2, batchsize=100, seqsize=3)
    spec = Spec(epochs=2, batchsize=35, seqsize=3, rebatch=True)
    given = (
        np.ascontiguousarray(task.x.transpose(2, 1, 0)).transpose(2, 1, 0) if time_major else task.x
    )
    est = Estimator(task.ours(), None, sgd, spec).fit(given, task.y)
    assert difference(net2vec(est), expected) < 1e-12
    off = Estimator(task.ours(), None, sgd, Spec(2, 35, 3, rebatch=False)).fit(task.x, task.y)
    assert (
        difference(net2vec(off), plain_loop(task, sgd, epochs=2, batchsize=35, seqsize=3)[0])
        < 1e-12
    )


def test_uneven_folds_weigh_their_steps():
    task = make_task(n_series=1, n_steps=11)
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    x, y = torch.tensor(task.x), torch.tensor(task.y)
    folds = np.split(np.arange(11), [3, 6, 9])  # numpy.array_split: 3, 3, 3, 2
    outs = [head(lstm(x[:, 0, f].T.unsqueeze(1))[0]) for f in folds]  # each fold alone, from zero
    errors = torch.cat(
        [((o[:, 0] - y[:, 0, f].T) ** 2).mean(1) for o, f in zip(outs, folds, strict=True)]
    )
    expected = flat(torch.autograd.grad(errors.sum() / 11, params))
    est = Estimator(task.ours(), None, still, Spec(1, 4, None, rebatch=True)).fit(task.x, task.y)
    assert difference(est.grad_, expected) < 1e-14


def test_windows_of_a_loss_without_weights_are_of_equal_rows():
    task = make_task(n_series=1, n_steps=11)
    shapes = []

    def loss(model, xs, ys):
        shapes.append(tuple(ys.shape))
        return F.mse_loss(model(xs), ys)

    Estimator(task.ours(), loss, still, Spec(1, 4, None, rebatch=True)).fit(task.x, task.y)
    assert shapes == [(3, 3, 2), (2, 1, 2)]
