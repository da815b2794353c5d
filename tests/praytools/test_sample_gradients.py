"""Gradients of several samples in threads, against one gradient of them all."""

import copy
import math
import threading

import pytest
import torch
from torch import nn

from fluxutils_py.data.parts import dividebatch
from fluxutils_py.praytools.functional import ptrain
from fluxutils_py.praytools.sample_gradients import (
    map_in_threads,
    paralelization_stats,
    parallelization_stats,
    pgradient,
    tgradient,
    tree_reduce,
)
from fluxutils_py.praytools.threads import Threads


@pytest.fixture
def task():
    """A loss over minibatches, its parameters, and an uneven minibatch."""
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    x, y = torch.randn(103, 4), torch.randn(103, 2)
    return lambda x, y: nn.functional.mse_loss(model(x), y), model, (x, y)


def distance(a, b):
    return max(float((g - h).abs().max()) for g, h in zip(a, b, strict=True))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_tree_reduce_keeps_the_order_and_is_as_deep_as_a_tree(n):
    depth = tree_reduce(
        [(0, [i]) for i in range(n)], lambda a, b: (max(a[0], b[0]) + 1, a[1] + b[1])
    )
    assert depth[1] == list(range(n))
    assert depth[0] == math.ceil(math.log2(n))


@pytest.mark.parametrize("bs", [1, 2, 4, 7])
def test_the_mean_weighted_by_sizes_is_the_gradient_of_the_whole(task, bs):
    loss, model, batch = task
    value = loss(*batch)
    expected = torch.autograd.grad(value, list(model.parameters()))
    samples = dividebatch(bs, *batch)
    found, grads = pgradient(loss, model, samples, [len(x) for x, _ in samples])
    assert found == pytest.approx(value.item(), rel=1e-6)
    assert distance(grads, expected) < 1e-6
    if bs == 4:  # 103 = 26 + 26 + 26 + 25: the plain mean is another one
        assert distance(pgradient(loss, model, samples)[1], expected) > 1e-5
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_no_run_differs_from_another_nor_from_one_thread(task):
    loss, model, batch = task
    samples = dividebatch(5, *batch)

    def alone(samples):
        """The same sum, written out."""
        if len(samples) > 1:
            a, b = alone(samples[: len(samples) // 2]), alone(samples[len(samples) // 2 :])
            return tuple(g + h for g, h in zip(a, b, strict=True))
        return torch.autograd.grad(loss(*samples[0]) * (1 / 5), list(model.parameters()))

    expected = alone(samples)
    for _ in range(20):
        for g, e in zip(pgradient(loss, model, samples)[1], expected, strict=True):
            assert torch.equal(g, e)


def test_parameters_without_a_gradient_have_none():
    a, b, unused = (nn.Parameter(torch.tensor([v])) for v in (1.0, 2.0, 3.0))
    frozen = nn.Parameter(torch.tensor([5.0]), requires_grad=False)
    _, grads = pgradient(lambda p: (p * frozen).sum(), [a, frozen, b, unused], [(a,), (b,)])
    assert grads == (2.5, None, 2.5, None)


def test_sparse_gradients_stay_sparse():
    table = nn.Embedding(11, 3, sparse=True)
    index = torch.tensor([1, 4, 4, 7, 1])
    _, (found,) = pgradient(lambda i: table(i).square().sum(), table, dividebatch(2, index), [1, 1])
    (expected,) = torch.autograd.grad(table(index).square().sum() / 2, [table.weight])
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


def test_samples_and_weights_must_fit(task):
    loss, model, batch = task
    with pytest.raises(ValueError, match=r"^there are no samples"):
        pgradient(loss, model, [])
    with pytest.raises(ValueError, match=r"zip\(\)"):
        pgradient(loss, model, dividebatch(2, *batch), [1, 2, 3])
    with pytest.raises(ValueError, match=r"^the weights .*positive sum, .*0.0$"):
        pgradient(loss, model, dividebatch(2, *batch), [0, 0])
    with pytest.raises(TypeError, match=r"^the loss .*scalar tensor, got float$"):
        pgradient(lambda x, y: 1.0, model, dividebatch(2, *batch))


def test_tgradient_prepares_its_samples_in_the_threads(task):
    loss, model, batch = task
    idents = []

    def preparesamples():
        idents.append(threading.get_ident())
        return batch

    value, grads = tgradient(loss, model, preparesamples, 3)
    assert len(idents) == 3
    assert len(set(idents)) > 1
    assert threading.get_ident() in idents
    assert value == pytest.approx(loss(*batch).item(), rel=1e-6)
    assert distance(grads, torch.autograd.grad(loss(*batch), list(model.parameters()))) < 1e-6


@pytest.mark.slow
def test_tgradient_draws_the_same_samples_in_every_run(task):
    loss, model, _ = task

    def run():
        torch.manual_seed(4)
        return tgradient(loss, model, lambda: (torch.randn(9, 4), torch.randn(9, 2)), 3)

    expected = run()
    for _ in range(20):
        found = run()
        assert found[0] == expected[0]
        assert all(torch.equal(g, e) for g, e in zip(found[1], expected[1], strict=True))


@pytest.mark.few
@pytest.mark.parametrize(
    ("size", "parts"), [(1, [1]), (12, [1, 2, 4, 8, 16]), (103, [1, 2, 4, 8, 16, 32, 64, 128])]
)
def test_stats_try_powers_of_two_and_change_nothing(task, size, parts):
    loss, model, batch = task
    before, calls = copy.deepcopy(model.state_dict()), []

    def prepare():
        calls.append(1)
        return tuple(v[:size] for v in batch)

    rows = parallelization_stats(loss, model, prepare, size, steps=1)
    assert [row["parts"] for row in rows] == [1, *parts]
    assert all(row["time"] > 0 for row in rows)
    assert len(calls) == 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert paralelization_stats is parallelization_stats


def test_stats_try_what_they_are_told(task):
    loss, model, batch = task
    assert [
        r["parts"] for r in parallelization_stats(loss, model, lambda: batch, 103, 1, [3, 2])
    ] == [1, 3, 2]


class UsedTransposed(nn.Module):
    """Its weight's gradient comes from autograd with the strides of the transposed weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 4))

    def forward(self, x):
        return x @ self.weight.transpose(1, 2).flatten(1).t()


def test_fused_optimizers_take_gradients_in_any_memory_order():
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    found = []
    for bs in (1, 2):
        torch.manual_seed(0)
        model = UsedTransposed()
        opt = torch.optim.AdamW(model.parameters(), fused=True)
        ptrain(lambda x, m=model: m(x).square().mean(), model, lambda: (x,), opt, 3, bs=bs)
        found.append(model.weight.detach())
    torch.testing.assert_close(*found)


def test_parts_run_in_threads_that_may_not_change_a_model():
    norm = nn.BatchNorm1d(2)
    with Threads(2) as threads:
        assert map_in_threads(lambda k: k + 1, [1, 2, 3], threads) == [2, 3, 4]
        one = map_in_threads(norm, [torch.zeros(3, 2)], threads)
        assert one[0].shape == (3, 2)
        with pytest.raises(ValueError, match="normalises over the whole minibatch"):
            map_in_threads(norm, [torch.zeros(3, 2)] * 2, threads)
