"""Stacks against residual blocks written out."""

from functools import partial

import pytest
import torch
from torch import nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import LRU, LSTM, TCN, MinGRU, MinLSTM, SequenceStack, SlidingWindowAttention
from fluxutils_py.nn.states import reset, states

from .stepwise import B, F, assert_follows

CELLS = {
    "MinGRU": MinGRU,
    "MinLSTM": MinLSTM,
    "LRU": LRU,
    "TCN": partial(TCN, n_levels=2),
    "attention": partial(SlidingWindowAttention, n_heads=2, window=5),
    "LSTM": LSTM,
    "nn.GRU": nn.GRU,
}


def blocks(stack):
    """Each layer on single steps; it keeps its own state, and what it computes is tested with it."""

    def normed(norm, x):
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias

    def step(x, _):
        h = x @ stack.embed.weight.T + stack.embed.bias
        for block in stack.blocks:
            h = h + block.layer(normed(block.layer_norm, h))
            gate, value = (normed(block.mlp_norm, h) @ block.up.weight.T + block.up.bias).split(
                stack.n_out, -1
            )
            h = h + (gate * torch.sigmoid(gate) * value) @ block.down.weight.T + block.down.bias
        return normed(stack.norm, h), None

    return step


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_stack_is_residual_blocks(cell):
    stack = SequenceStack(cell, F, 6, n_layers=2).double()
    assert_follows(stack, blocks(stack), None, reset)


def test_states_are_those_of_the_layers():
    stack = SequenceStack(LSTM, 3, 6, n_layers=2)
    assert [tuple(s.shape) for s in states(stack)] == [(1, 0, 6)] * 4
    stack(torch.zeros(4, B, 3))
    assert [tuple(s.shape) for s in states(stack)] == [(1, B, 6)] * 4


def test_integers_are_read_as_numbers():
    stack = SequenceStack(MinGRU, 1, 4)
    x = torch.arange(10).view(5, 2, 1)
    assert torch.equal(reset(stack)(x), reset(stack)(x.float()))


def test_dropout_is_of_training_only():
    stack, x = SequenceStack(MinGRU, 3, 4, dropout=0.5), torch.randn(9, 2, 3)
    assert not torch.equal(reset(stack)(x), reset(stack)(x))
    stack.eval()
    assert torch.equal(reset(stack)(x), reset(stack)(x))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("gru", 3, 4), TypeError, r"cell .*callable, got 'gru'"),
        ((lambda i, o: i, 3, 4), TypeError, r"cell\(n_in, n_out\) .*module, got int"),
        ((MinGRU, 0, 4), ValueError, r"n_in .*positive integer, got 0"),
        ((MinGRU, 3, 4, 0), ValueError, r"n_layers .*positive integer, got 0"),
        ((MinGRU, 3, 4, 1, -0.1), ValueError, r"dropout .*0 to 1, got -0\.1"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=f"^SequenceStack: {message}$"):
        SequenceStack(*arguments)


def test_another_number_of_features_is_named():
    message = r"SequenceStack .*3 .*n_in.*\(6, 2, 4\)"
    with pytest.raises(ShapeError, match=f"^{message}$"):
        SequenceStack(MinGRU, 3, 5)(torch.zeros(6, 2, 4))
