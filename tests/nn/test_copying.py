"""Copies of models, deep and with shared parameters."""

import torch
from torch import nn

from fluxutils_py.nn import LSTM
from fluxutils_py.nn.copying import deep_copy, shallow_copy


def model():
    return nn.Sequential(LSTM(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def test_a_deep_copy_shares_nothing_but_what_it_is_told_to():
    original = model()
    twin = deep_copy(original, shared=[original[2].weight])
    for (name, p), (_, q) in zip(original.named_parameters(), twin.named_parameters(), strict=True):
        assert p.equal(q)
        assert (p is q) == (name == "2.weight")


def test_a_deep_copy_detaches_what_a_model_has_left_in_an_attribute():
    original = nn.Linear(3, 1)
    original.last = original(torch.ones(1, 3))  # torch cannot copy a tensor with a graph
    twin = deep_copy(original)
    assert not twin.last.requires_grad
    assert twin.last.equal(original.last)


def test_a_shallow_copy_shares_parameters_and_starts_from_zero():
    original = model().train()
    original(torch.ones(5, 2, 3))
    twin = shallow_copy(original)
    assert [p is q for p, q in zip(original.parameters(), twin.parameters(), strict=True)] == [
        True
    ] * 6
    assert original.training
    assert not any(m.training for m in twin.modules())
    assert twin[0].state is None
    assert original[0].state is not None
    expected = deep_copy(original).eval()
    expected[0].reset()
    assert twin(torch.ones(5, 2, 3)).equal(expected(torch.ones(5, 2, 3)))


def test_a_module_that_stands_twice_is_copied_once():
    shared = nn.Linear(2, 2)
    twin = shallow_copy(nn.Sequential(shared, nn.Tanh(), shared))
    assert twin[0] is twin[2]


def test_a_model_with_a_hook_or_a_module_of_ones_own_has_no_shallow_copy():
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, inputs, output: output)
    assert shallow_copy(nn.Sequential(hooked)) is None
    assert shallow_copy(nn.Sequential(Own(2, 2))) is None
