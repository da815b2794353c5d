"""Which parameters a model has, and copies that are not trained."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fluxutils_py.nn import GRU, LSTM, Recur
from fluxutils_py.nn.parameters import (
    gradinfo,
    namedparams,
    namedweights,
    net2vec,
    notrack,
    weights,
)
from fluxutils_py.nn.states import module_of


class Tied(nn.Module):
    """An embedding whose weights are those of the output layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.rnn = GRU(4, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.rnn(self.embed(x)))


def everything():
    return nn.ModuleDict(
        {
            "lstm": LSTM(3, 5, num_layers=2),
            "norm": nn.LayerNorm(5),
            "batchnorm": nn.BatchNorm1d(5),
            "conv": nn.Conv1d(5, 2, 3),
            "cell": Recur(nn.GRUCell(2, 2)),
            "linear": nn.Linear(2, 1),
        }
    )


def test_named_parameters_are_torchs_in_the_order_of_the_vector():
    model = everything()
    expected = list(model.named_parameters())
    assert [n for n, _ in namedparams(model)] == [n for n, _ in expected]
    assert all(p is q for (_, p), (_, q) in zip(namedparams(model), expected, strict=True))
    assert torch.cat([p.detach().flatten() for _, p in namedparams(model)]).equal(net2vec(model))
    assert len({n for n, _ in namedparams(model)}) == len(namedparams(model))


def test_weights_are_neither_biases_nor_scales():
    model = everything()
    names = [
        *(f"lstm.module.weight_{kind}_l{layer}" for layer in (0, 1) for kind in ("ih", "hh")),
        "conv.weight",
        "cell.module.weight_ih",
        "cell.module.weight_hh",
        "linear.weight",
    ]
    assert [n for n, _ in namedweights(model)] == names
    parameters = dict(model.named_parameters())
    assert all(w is parameters[n] for w, n in zip(weights(model), names, strict=True))


def test_the_weights_of_a_penalty_are_the_models_own():
    model = everything()
    sum(w.square().sum() for w in weights(model)).backward()
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            assert p.grad.equal(2 * p.detach())
        else:
            assert p.grad is None, name


def test_tied_parameters_count_once():
    model = Tied()
    assert [n for n, _ in namedparams(model)].count("embed.weight") == 1
    assert "out.weight" not in [n for n, _ in namedparams(model)]
    assert [n for n, _ in namedweights(model)] == [
        "embed.weight",
        "rnn.module.weight_ih_l0",
        "rnn.module.weight_hh_l0",
    ]


def test_the_module_of_an_estimator_is_the_fitted_one_if_there_is_one():
    given, fitted = nn.Linear(2, 1), nn.Linear(2, 1)
    assert module_of(given) is given
    assert module_of(SimpleNamespace(model=given)) is given
    assert module_of(SimpleNamespace(model=given, model_=fitted)) is fitted
    assert namedparams(SimpleNamespace(model=given, model_=fitted))[0][1] is fitted.weight
    assert weights(SimpleNamespace(model=nn.Linear, model_=fitted))[0] is fitted.weight


@pytest.mark.parametrize("function", [namedparams, namedweights, weights, notrack])
def test_what_holds_no_module_is_refused(function):
    with pytest.raises(TypeError, match=r"torch module or an estimator.* got list$"):
        function([nn.Linear(2, 1)])
    unfitted = type("Unfitted", (), {"fit": None, "model": nn.Linear})()
    with pytest.raises(TypeError, match=r"got Unfitted: .*call fit first$"):
        function(unfitted)


def test_notrack_is_a_copy_without_gradients_in_evaluation_mode():
    model = Tied().train()
    x = torch.randint(7, (5, 2))
    out = model(x)
    copied = notrack(model)
    assert copied is not model
    assert not copied.training
    assert not any(p.requires_grad for p in copied.parameters())
    assert copied.out.weight is copied.embed.weight
    assert net2vec(copied).equal(net2vec(model))
    assert not copied(x).requires_grad
    with torch.no_grad():
        copied.embed.weight.zero_()
    assert model.embed.weight.abs().max() > 0
    # the original is as it was, its graph alive
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    out.sum().backward()


def test_notrack_of_a_model_without_gradients_is_the_model():
    model = Tied().requires_grad_(False)
    assert notrack(model) is model
    model.out.bias.requires_grad_(True)
    assert notrack(model) is not model
    relu = nn.ReLU()
    assert notrack(relu) is relu


def test_gradinfo_counts_and_measures_what_is_a_number():
    grads = [
        torch.tensor([[3.0, -4.0], [float("nan"), 0.0]]),
        None,
        torch.tensor([float("nan"), 12.0]),
    ]
    assert gradinfo(grads) == (2, 0, 12.0, 9.0 + 16 + 144)
    assert gradinfo([torch.tensor([1.0, -float("inf")])]) == (0, 1, float("inf"), float("inf"))
    assert gradinfo([None, torch.tensor([float("nan")])]) == (1, 0, 0.0, 0.0)
    assert gradinfo([]) == (0, 0, 0.0, 0.0)
    assert gradinfo([torch.tensor([[0.0, 0.0], [1.0, -2.0]]).to_sparse(1)]).l2 == 5
