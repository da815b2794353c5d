"""Losses with weights and masks, against torch's own and NumPy."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.gomlx import Trainer, WeightedLoss
from fluxutils_py.gomlx.running_metrics import MeanMetric
from fluxutils_py.training.minibatch import Minibatch

SHAPE = (7, 3)


@pytest.fixture
def batch(rng):
    prediction, target, weights = (torch.from_numpy(rng.normal(size=SHAPE)) for _ in range(3))
    return prediction, target, weights.abs(), torch.from_numpy(rng.random(SHAPE) < 0.6)


def squares(p, y):
    return (p - y) ** 2


def absolutes(p, y):
    return abs(p - y)


def cross_entropy_of_logits(p, y):
    return np.log1p(np.exp(p)) - y * p


@pytest.mark.parametrize(
    ("losses", "formula"),
    [
        ((F.mse_loss, nn.MSELoss(), nn.MSELoss(reduction="sum"), squares), squares),
        ((F.l1_loss, nn.L1Loss(reduction="none")), absolutes),
        ((F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()), cross_entropy_of_logits),
    ],
)
def test_the_loss_of_each_element_is_times_its_weight_and_0_where_masked(batch, losses, formula):
    prediction, target, weights, mask = batch
    p, y, w, m = (t.numpy() for t in batch)
    each = formula(p, y)
    for loss in map(WeightedLoss, losses):
        for labels, expected in (
            (target, each),
            ((target,), each),
            ((target, weights), w * each),
            ([target, mask], m * each),
            ((target, weights, mask), m * w * each),
            ((target, mask, weights), m * w * each),
        ):
            np.testing.assert_allclose(loss(prediction, labels).numpy(), expected, rtol=1e-12)


def test_a_mask_that_is_half_false_halves_a_constant_loss():
    prediction, target = torch.zeros(6, 2), torch.full((6, 2), 3.0)
    mask = torch.arange(12).reshape(6, 2) % 2 == 0
    assert WeightedLoss(F.mse_loss)(prediction, (target, mask)).mean() == 4.5


def test_classes_have_one_weight_per_label(rng):
    scores, labels = (
        torch.from_numpy(rng.normal(size=(11, 4))),
        torch.from_numpy(rng.integers(0, 4, size=11)),
    )
    w = rng.random(11)
    s = scores.numpy()
    expected = w * (np.log(np.exp(s).sum(1)) - s[np.arange(11), labels])
    np.testing.assert_allclose(
        WeightedLoss(nn.CrossEntropyLoss())(scores, (labels, torch.from_numpy(w))), expected
    )


@pytest.mark.parametrize("by", ["mask", "weights"])
def test_no_gradient_comes_from_where_nothing_counts_even_if_the_label_is_nan(batch, by):
    prediction, target, weights, mask = batch
    prediction.requires_grad_()
    broken = torch.where(mask, target, torch.nan)
    extra = mask if by == "mask" else torch.where(mask, weights, 0)
    WeightedLoss(F.mse_loss)(prediction, (broken, extra)).mean().backward()
    expected = 2 * (prediction.detach() - target) * extra / target.numel()
    assert torch.allclose(prediction.grad, expected, rtol=1e-12, atol=0)
    assert broken.isnan().any()  # the caller's are not changed


def test_a_trainer_takes_the_mean_over_all_elements(rng):
    x, y, w = (torch.from_numpy(rng.normal(size=(9, k))) for k in (5, 2, 2))
    torch.manual_seed(1)
    model = nn.Linear(5, 2).double()
    plain = copy.deepcopy(model)
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss = ((plain(x) - y) ** 2 * w).sum() / (9 * 2)
    loss.backward()
    opt.step()
    metric = MeanMetric(WeightedLoss(nn.L1Loss()))
    trainer = Trainer(
        model,
        WeightedLoss(nn.MSELoss()),
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        eval_metrics=[metric],
    )
    info = trainer.train_step(Minibatch((x,), (y, w)))
    assert info.loss == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(model.weight, plain.weight, rtol=1e-12, atol=0)
    found = trainer.eval([Minibatch((x,), (y, w))])["L1Loss"]
    assert found == pytest.approx(((plain(x) - y).abs() * w).mean().item(), rel=1e-12)


BEHIND = (
    "labels after the first must be a mask (a tensor of bool) or weights (a tensor of floats), at "
    "most one of each; got "
)


@pytest.mark.parametrize(
    ("extras", "error", "message"),
    [
        ([torch.ones(SHAPE, dtype=torch.int64)], DataError, BEHIND + "torch.int64"),
        (["weights"], DataError, BEHIND + "str"),
        ([torch.ones(SHAPE), torch.ones(SHAPE)], DataError, BEHIND + "torch.float32"),
        ([torch.ones(SHAPE) > 0] * 2, DataError, BEHIND + "torch.bool"),
        (
            [torch.ones(7, 1)],
            ShapeError,
            "weights and mask have shape (7, 1), the loss has (7, 3); give them one value for "
            "each of its elements, and a loss that can do without reduction",
        ),
    ],
)
def test_other_extras_are_refused(extras, error, message):
    with pytest.raises(error) as caught:
        WeightedLoss(F.mse_loss)(torch.zeros(SHAPE), (torch.zeros(SHAPE), *extras))
    assert str(caught.value) == message


def test_a_class_is_no_loss():
    with pytest.raises(TypeError) as caught:
        WeightedLoss(nn.MSELoss)
    assert str(caught.value) == (
        "WeightedLoss needs a loss(prediction, target), not <class 'torch.nn.modules.loss.MSELoss'>"
    )


def test_the_mean_is_over_all_elements_or_the_unmasked_as_gomlx_says_by_version(batch):
    """``ReduceAllMean`` before 0.17.1; since then ``MaskedReduceAllMean``: the sum over where the
    mask is True, divided by how many these are, at least 1.
    """
    prediction, target, weights, mask = batch
    p, y, w, m = (t.numpy() for t in batch)
    target = torch.where(mask, target, torch.nan)
    for labels, each in (
        ((target, mask), squares(p, y)),
        ((target, weights, mask), w * squares(p, y)),
    ):
        for weight, divisor in ((None, m.size), (mask, m.sum())):
            expected = each[m].sum() / divisor
            metric = MeanMetric(WeightedLoss(nn.MSELoss()), "mse")
            shift = Shift()
            trainer = Trainer(shift, WeightedLoss(nn.MSELoss()), LR1, [metric])
            info = trainer.train_step(Minibatch((prediction,), labels, weight=weight))
            assert info.batch_loss == pytest.approx(expected, rel=1e-12)
            scale = w if len(labels) == 3 else 1
            by_hand = (2 * (p - y) * scale)[m].sum() / divisor
            assert shift.by.item() == pytest.approx(-by_hand, rel=1e-12)
    trainer = Trainer(Shift(), WeightedLoss(nn.MSELoss()))
    # over two batches, too: the mean over what is unmasked in both
    halves = [
        Minibatch((prediction[i],), (target[i], mask[i]), weight=mask[i])
        for i in (slice(2), slice(2, 7))
    ]
    expected = squares(p, y)[m].mean()
    assert trainer.eval(halves)["loss"] == pytest.approx(expected, rel=1e-12)
    nothing = torch.zeros_like(mask)
    last = trainer.eval_step(Minibatch((prediction,), (target, nothing), weight=nothing))
    assert last["loss"] == pytest.approx(expected, rel=1e-12)


class Shift(nn.Module):
    """Adds a learnt number to its input."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return x + self.by


def LR1(params):
    return torch.optim.SGD(params, lr=1.0)
