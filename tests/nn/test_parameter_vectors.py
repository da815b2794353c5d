"""Parameters and gradients as one vector."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import GRU, LSTM
from fluxutils_py.nn.parameters import (
    dense_gradients,
    grad2net,
    net2grad,
    net2vec,
    vec2net,
    weights,
    windices,
)
from fluxutils_py.nn.states import reset


def small():
    return nn.Sequential(LSTM(3, 4, num_layers=2), nn.Linear(4, 1))


def mixed():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double(), nn.Linear(2, 1).half())
    assert {p.dtype for p in model.parameters()} == {torch.float16, torch.float32, torch.float64}
    return model


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model, before):
    return all(
        p.equal(b) and p.dtype == b.dtype for p, b in zip(model.parameters(), before, strict=True)
    )


def test_the_vector_is_the_parameters_one_after_another_row_by_row():
    model = small()
    expected = [v for p in model.parameters() for v in p.detach().flatten().tolist()]
    assert net2vec(model).tolist() == expected
    assert net2vec(model).equal(nn.utils.parameters_to_vector(model.parameters()).detach())


def test_a_parameter_in_another_memory_order_is_still_read_row_by_row():
    layer = nn.Linear(3, 2)
    rows = layer.weight.detach().clone()
    layer.weight = nn.Parameter(rows.t().contiguous().t())
    assert not layer.weight.is_contiguous()
    assert net2vec(layer)[:6].equal(rows.flatten())
    vec2net(layer, torch.arange(8.0))
    assert layer.weight.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("make", [small, tied, mixed, lambda: nn.Linear(3, 1, bias=False)])
def test_the_vector_is_a_detached_copy(make):
    model = make()
    before = values(model)
    v = net2vec(model)
    assert not v.requires_grad
    v.fill_(7)
    assert unchanged(model, before)


@pytest.mark.parametrize("make", [small, tied, mixed])
def test_round_trips_change_nothing(make):
    model, other = make(), make()
    before = values(model)
    assert vec2net(other, net2vec(model)) is other
    assert unchanged(other, before)
    assert vec2net(model, net2vec(model)) is model
    assert unchanged(model, before)


def test_mixed_types_make_the_widest_vector_and_stay_as_they_are():
    model = mixed()
    assert net2vec(model).dtype == torch.float64
    assert net2vec(model, torch.float32).dtype == torch.float32
    types = [p.dtype for p in model.parameters()]
    vec2net(model, np.arange(17, dtype="float64") / 3)
    assert [p.dtype for p in model.parameters()] == types
    assert model[1].bias.tolist() == [12 / 3, 13 / 3]
    assert model[0].bias.equal(torch.tensor([6, 7]) / 3)


def test_the_model_never_shares_memory_with_the_vector():
    model = small()
    v = torch.randn(net2vec(model).numel())
    kept = v.clone()
    vec2net(model, v)
    v.zero_()
    assert net2vec(model).equal(kept)
    as_numpy = kept.numpy().copy()
    vec2net(model, as_numpy)
    as_numpy[:] = 0
    assert net2vec(model).equal(kept)


def test_parameters_stay_the_ones_an_optimizer_holds():
    model = small()
    before = list(model.parameters())
    vec2net(model, torch.zeros(net2vec(model).numel(), requires_grad=True))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@pytest.mark.parametrize("kind", [list, np.array, lambda v: torch.tensor(v, dtype=torch.float64)])
def test_anything_that_torch_takes_is_a_vector(kind):
    layer = vec2net(nn.Linear(2, 1), kind([1.0, 2.0, 3.0]))
    assert layer.weight.tolist() == [[1, 2]]
    assert layer.bias.tolist() == [3]
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("v", "message"),
    [
        (torch.zeros(9), r"vec2net: .*9 values, .*8 parameters"),
        (torch.zeros(7), r"vec2net: .*7 values, .*8 parameters"),
        (torch.zeros(0), r"vec2net: .* 0 values, .*8 parameters"),
        (torch.zeros(1, 8), r"vec2net: .*\(8,\), got .*\(1, 8\)"),
        (torch.zeros(8, 1), r"vec2net: .*\(8,\), got .*\(8, 1\)"),
        (torch.tensor(0.0), r"vec2net: .*\(8,\), got .*\(\)"),
    ],
)
def test_vectors_of_another_size_are_refused_and_change_nothing(v, message):
    model = nn.Linear(3, 2)
    before = values(model)
    with pytest.raises(ShapeError, match=message):
        vec2net(model, v)
    assert unchanged(model, before)


def test_a_shared_parameter_counts_once():
    model = tied()
    assert net2vec(model).numel() == 9 + 3 + 3
    vec2net(model, torch.arange(15.0))
    assert model[2].weight is model[0].weight
    assert model[2].bias.tolist() == [12, 13, 14]


def test_estimators_are_as_good_as_models():
    model = small()
    estimator = SimpleNamespace(model_=model)
    assert net2vec(estimator).equal(net2vec(model))
    assert vec2net(estimator, torch.zeros_like(net2vec(model))) is estimator
    assert not net2vec(model).any()
    model[1].weight.grad = torch.ones_like(model[1].weight)
    assert net2grad(estimator).equal(net2grad(model))


def test_a_model_without_parameters_is_an_empty_vector():
    assert net2vec(nn.Tanh()).shape == (0,)
    assert net2grad(nn.Tanh()).shape == (0,)
    vec2net(nn.Tanh(), torch.empty(0))


@pytest.mark.parametrize("make", [small, tied])
def test_gradients_are_those_of_autograd(make):
    model = make().double()
    xs = torch.randn(5, 2, 3, dtype=torch.float64)
    model(xs).square().sum().backward()
    got = net2grad(model)
    reset(model)
    expected = torch.autograd.grad(model(xs).square().sum(), list(model.parameters()))
    torch.testing.assert_close(got, torch.cat([g.flatten() for g in expected]), rtol=0, atol=1e-12)
    got.zero_()
    assert net2grad(model).abs().max() > 0
    assert net2grad(model, torch.float32).dtype == torch.float32


def test_parameters_without_a_gradient_count_as_zeros():
    model = nn.Sequential(nn.Linear(3, 2), GRU(2, 2))
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        got = net2grad(model)
    assert not got.any()
    assert got.shape == net2vec(model).shape
    model[0](torch.ones(1, 3)).sum().backward()
    got = net2grad(model)
    assert got[:8].equal(torch.ones(8))
    assert not got[8:].any()
    assert [g.shape for g in dense_gradients(model.parameters())] == [
        p.shape for p in model.parameters()
    ]


def test_sparse_gradients_become_dense():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 1, 3])).sum().backward()
    assert layer.weight.grad.is_sparse
    assert net2grad(layer).tolist() == [0, 0, 2, 2, 0, 0, 1, 1]
    assert not net2grad(layer).requires_grad


def test_gradients_that_have_a_graph_come_without_it():
    layer = nn.Linear(2, 1)
    (layer.weight.grad,) = torch.autograd.grad(
        layer(torch.ones(1, 2)).square().sum(), layer.weight, create_graph=True
    )
    assert layer.weight.grad.requires_grad
    assert not net2grad(layer).requires_grad


def test_indices_of_weights_pick_them_from_the_vector():
    model = nn.Sequential(
        nn.Conv1d(2, 3, 5), nn.LayerNorm(3), LSTM(3, 4, num_layers=2), nn.Linear(4, 1)
    )
    vector = net2vec(model)
    picked = [vector[i] for i in windices(model)]
    expected = [w.detach().reshape(-1) for w in weights(model)]
    assert [p.tolist() for p in picked] == [e.tolist() for e in expected]


def test_indices_by_unit_pick_the_rows_of_the_weights():
    model = nn.Sequential(nn.Conv1d(2, 3, 5), LSTM(3, 4), nn.Linear(4, 2))
    vector = net2vec(model)
    picked = [vector[i].tolist() for i in windices(model, maxnorm=True)]
    assert picked == [row.reshape(-1).tolist() for w in weights(model) for row in w.detach()]


def test_grad2net_is_the_inverse_of_net2grad():
    model, other = (nn.Sequential(nn.Linear(3, 2), GRU(2, 2)).double() for _ in range(2))
    model(torch.randn(5, 4, 3, dtype=torch.float64)).square().mean().backward()
    vector = net2grad(model)
    assert grad2net(other, vector) is other
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert q.grad.equal(p.grad)
    vector.zero_()
    assert net2grad(other).equal(net2grad(model))  # a copy


def test_an_optimizer_uses_the_gradients_that_grad2net_sets():
    tied = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(tied, nn.Tanh(), tied)  # a shared parameter counts once
    before = net2vec(model)
    grad2net(model, np.arange(4, dtype="float64"))
    assert tied.weight.grad.dtype == torch.float32
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    torch.testing.assert_close(net2vec(model), before - 0.5 * torch.arange(4.0))


def test_grad2net_refuses_a_vector_of_another_length():
    model = nn.Linear(3, 2)
    with pytest.raises(ShapeError, match=r"^grad2net: .*9 values.* 8 parameters$"):
        grad2net(model, torch.zeros(9))
    assert model.weight.grad is None
