"""Cross-entropies as gomlx has them, against NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.gomlx import Trainer, WeightedLoss
from fluxutils_py.gomlx.cross_entropy import (
    categorical_cross_entropy,
    sparse_categorical_cross_entropy,
)

B, V = 11, 4


@pytest.fixture
def data(rng):
    """Probabilities, some 0 and 1; distributions as targets; scores; labels (B, 1); weights (B,); a
    mask (B,).
    """
    p, q = rng.dirichlet(np.ones(V), size=(2, B))
    p[3], p[4] = [0, 0, 1, 0], [1, 0, 0, 0]
    return (
        p,
        q,
        rng.normal(size=(B, V)),
        rng.integers(0, V, size=(B, 1)),
        rng.random(B),
        rng.random(B) < 0.6,
    )


def tensors(*arrays):
    return [torch.from_numpy(a) for a in arrays]


@pytest.mark.parametrize(("dtype", "epsilon"), [("float32", 1e-7), ("float64", 1e-8)])
def test_probabilities_are_clipped_and_each_row_has_its_loss(data, dtype, epsilon):
    p, q = (a.astype(dtype) for a in data[:2])
    expected = -(q * np.log(np.clip(p, epsilon, 1 - epsilon))).sum(1)
    each = categorical_cross_entropy(*tensors(p, q), reduction="none")
    np.testing.assert_allclose(each, expected, rtol=1e-12 if dtype == "float64" else 1e-5)
    assert each.isfinite().all()
    for name in ("mean", "sum"):
        np.testing.assert_allclose(
            categorical_cross_entropy(*tensors(p, q), reduction=name), getattr(each, name)()
        )


def test_gradients_are_finite_and_zero_where_a_probability_was_clipped(data):
    p, q = tensors(*data[:2])
    p.requires_grad_()
    categorical_cross_entropy(p, q, reduction="sum").backward()
    clipped = (p == 0) | (p == 1)
    assert clipped.sum() == 8
    assert torch.equal(p.grad, torch.where(clipped, 0, -q / p.detach().clamp(min=1e-8)))


def test_labels_in_a_last_axis_with_weights_and_a_mask(data):
    _, _, scores, labels, w, m = data
    each = np.log(np.exp(scores).sum(1)) - np.take_along_axis(scores, labels, 1)[:, 0]
    s, y, w_, m_ = tensors(scores, labels, w, m)
    np.testing.assert_allclose(sparse_categorical_cross_entropy(s, y), each.mean(), rtol=1e-12)
    loss = WeightedLoss(sparse_categorical_cross_entropy)
    np.testing.assert_allclose(loss(s, (y, w_)), w * each, rtol=1e-12)
    np.testing.assert_allclose(loss(s, (y, w_, m_)), w * m * each, rtol=1e-12)
    np.testing.assert_allclose(
        sparse_categorical_cross_entropy(s.view(1, B, V), y.int().view(1, B, 1), reduction="none")[
            0
        ],
        each,
        rtol=1e-12,
    )
    p, q = tensors(*data[:2])
    np.testing.assert_allclose(
        WeightedLoss(categorical_cross_entropy)(p, (q, w_)),
        w * categorical_cross_entropy(p, q, reduction="none").numpy(),
    )


@pytest.mark.slow
def test_a_trainer_and_an_estimator_learn_with_them(data):
    _, q, scores, labels, _, _ = data
    x, y = tensors(scores, labels)
    trainer = Trainer(nn.Linear(V, V).double(), sparse_categorical_cross_entropy, torch.optim.Adam)
    first = trainer.train_step((x, y)).loss
    for _ in range(20):
        last = trainer.train_step((x, y)).loss
    assert last < first
    model = nn.Sequential(nn.Linear(V, V), nn.Softmax(-1))
    est = Estimator(
        model,
        categorical_cross_entropy,
        torch.optim.Adam,
        Spec(epochs=20, batchsize=1),
        random_state=0,
    )
    est.fit(scores.T[:, None], q.T[:, None])  # one series of B steps
    assert est.loss_curve_[-1] < est.loss_curve_[0]


def test_other_shapes_and_labels_are_errors(data):
    p, q, scores, labels, _, _ = map(torch.from_numpy, data)
    with pytest.raises(ShapeError, match=r"\., V\), got \(11, 4\) and \(11, 1\)"):
        categorical_cross_entropy(p, labels)
    with pytest.raises(ShapeError, match=r"\(\.\.\., 1\), got \(11, 4\) and \(11,\)"):
        sparse_categorical_cross_entropy(scores, labels[:, 0])
    with pytest.raises(DataError, match=r"integer labels, got torch\.float64"):
        sparse_categorical_cross_entropy(scores, labels.double())
    with pytest.raises(KeyError, match="batch"):
        categorical_cross_entropy(p, q, reduction="batch")
