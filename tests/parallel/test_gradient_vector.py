"""Gradients as one vector; tests/mpi sums them over ranks."""

import torch
from torch import nn

from fluxutils_py.nn.parameters import net2grad
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.gradient_vector import DENSE, NONE, SPARSE, GradientVector


def test_packing_has_the_order_of_net2vec_and_zeros():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    vector = GradientVector(list(model.parameters()), RankGroup())
    model[0](torch.ones(4, 3)).sum().backward()
    assert vector.pack().equal(net2grad(model))
    assert vector.layouts() == [DENSE, DENSE, NONE, NONE]


def test_assigning_gives_views_and_none():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    vector = GradientVector(list(model.parameters()), RankGroup())
    vector.values.copy_(torch.arange(11.0))
    vector.assign([DENSE, DENSE, NONE, SPARSE])
    assert model[0].weight.grad.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model[1].weight.grad is None
    assert model[1].bias.grad.is_sparse
    vector.values.mul_(2)
    assert model[0].bias.grad.tolist() == [12, 14]  # a view of the vector


def test_one_rank_reduces_nothing():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    vector = GradientVector(list(embedding.parameters()), RankGroup())
    assert vector.layouts() == [SPARSE]
    assert vector.pack().tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
