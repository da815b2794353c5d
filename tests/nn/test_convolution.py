"""Causal convolutions against their formula, and the TCN against torch's convolutions over the
padded series.
"""

import pytest
import torch
from torch import nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import TCN, CausalConv1d
from fluxutils_py.nn.states import reset, states

from .stepwise import B, F, S, assert_follows


def convolution(layer):
    """What is kept is every input so far."""
    m = layer.module

    def step(x, past):
        past, weight = [*past, x], m.weight
        if layer.weight_norm:
            weight = (
                weight
                / torch.linalg.vector_norm(weight, dim=(1, 2), keepdim=True)
                * m.norm[:, None, None]
            )
        y = torch.zeros(B, layer.n_out, dtype=x.dtype)
        for k in range(layer.kernel_size):
            at = len(past) - 1 - (layer.kernel_size - 1 - k) * layer.dilation
            if at >= 0:
                y = y + past[at] @ weight[:, :, k].T
        return y if m.bias is None else y + m.bias, past

    return step


@pytest.mark.parametrize(
    "arguments", [(1,), (2,), (3, 4), (5, 1, False), (2, 7, True, True), (4, 20)]
)
def test_a_convolution_is_its_formula(arguments):
    layer = CausalConv1d(F, 5, *arguments).double()
    if layer.weight_norm:
        nn.init.uniform_(layer.module.norm)
    assert_follows(layer, convolution(layer), [])


def test_inputs_before_the_first_may_be_trained():
    layer = CausalConv1d(F, 5, 3, 2, trainable_init=True).double()
    nn.init.normal_(layer.initial_state[0])
    step = convolution(layer)
    start = lambda: list(layer.initial_state[0].expand(-1, B, -1))  # noqa: E731
    assert_follows(layer, lambda x, past: step(x, start() if past is None else past))


def by_torch(tcn, x):
    """``nn.Conv1d`` with torch's weight normalisation over the whole series (S, B, F), zeros before
    it.
    """
    x = x.permute(1, 2, 0)
    for block in tcn.blocks:
        y = x
        for conv in (block.conv1, block.conv2):
            plain = nn.Conv1d(
                conv.n_in, conv.n_out, conv.kernel_size, dilation=conv.dilation
            ).double()
            plain = nn.utils.parametrizations.weight_norm(plain)
            parameters = {
                "bias": conv.module.bias,
                "parametrizations.weight.original0": conv.module.norm[:, None, None],
                "parametrizations.weight.original1": conv.module.weight,
            }
            padded = nn.functional.pad(y, ((conv.kernel_size - 1) * conv.dilation, 0))
            y = torch.func.functional_call(plain, parameters, (padded,)).relu()
        skip = (
            x
            if isinstance(block.skip, nn.Identity)
            else block.skip(x.transpose(1, 2)).transpose(1, 2)
        )
        x = (y + skip).relu()
    return x.permute(2, 0, 1)


@pytest.mark.few
@pytest.mark.parametrize(("n_in", "n_levels", "kernel_size"), [(F, 1, 2), (5, 3, 3), (F, 4, 3)])
def test_the_tcn_is_torchs_convolutions_over_the_padded_series(n_in, n_levels, kernel_size):
    torch.manual_seed(0)
    tcn = TCN(n_in, 5, n_levels, kernel_size).double()
    x = torch.randn(S, B, n_in, dtype=torch.float64, requires_grad=True)
    expected = by_torch(tcn, x)
    weight = torch.randn_like(expected)
    wanted = [x, *tcn.parameters()]
    gradients = torch.autograd.grad((expected * weight).sum(), wanted)
    for size in (S, 10, 1):
        y = torch.cat([reset(tcn)(x[:size]), *(tcn(part) for part in x[size:].split(size))])
        found = torch.autograd.grad((y * weight).sum(), wanted)
        assert (y - expected).abs().max() < 1e-12
        for ours, theirs in zip(found, gradients, strict=True):
            assert (ours - theirs).abs().max() < 1e-12 * (1 + theirs.abs().max())


def test_the_receptive_field_is_what_an_output_sees():
    tcn = TCN(1, 4, n_levels=3, kernel_size=2).double()
    x = torch.randn(40, 1, 1, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(tcn(x)[-1].sum(), x)
    seen = int((gradient.flatten() != 0).nonzero()[0])
    assert 40 - seen == tcn.receptive_field == 15


def test_the_states_are_the_last_inputs_of_each_convolution():
    tcn = TCN(3, 5, n_levels=2)
    assert [tuple(s.shape) for s in states(tcn)] == [(2, 0, 3), (2, 0, 5), (4, 0, 5), (4, 0, 5)]
    x = torch.randn(7, 2, 3)
    tcn(x)
    assert torch.equal(states(tcn)[0], x[-2:])
    assert [tuple(s.shape) for s in states(tcn)] == [(2, 2, 3), (2, 2, 5), (4, 2, 5), (4, 2, 5)]


def test_dropout_is_of_training_only():
    tcn, x = TCN(3, 5, 2, dropout=0.5), torch.randn(9, 2, 3)
    assert not torch.equal(reset(tcn)(x), reset(tcn)(x))
    tcn.eval()
    assert torch.equal(reset(tcn)(x), reset(tcn)(x))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: CausalConv1d(0, 5, 2),
            ValueError,
            r"CausalConv1d: n_in .*positive.* 0",
        ),
        (
            lambda: CausalConv1d(3, 5, 0),
            ValueError,
            r"CausalConv1d: kernel_size .*positive.* 0",
        ),
        (
            lambda: CausalConv1d(3, 5, 2, 0),
            ValueError,
            r"CausalConv1d: dilation .*positive.* 0",
        ),
        (
            lambda: CausalConv1d(3, 5, "2"),
            TypeError,
            r"CausalConv1d: kernel_size .*integer.* '2'",
        ),
        (lambda: TCN(3, 0), ValueError, r"TCN: n_out .*positive integer.* 0"),
        (lambda: TCN(3, 5, 0), ValueError, r"TCN: n_levels .*positive integer.* 0"),
        (lambda: TCN(3, 5, 2, 0), ValueError, r"TCN: kernel_size .*positive integer.* 0"),
        (
            lambda: TCN(3, 5, dropout=1.5),
            ValueError,
            r"TCN: dropout .*0 to 1, got 1\.5",
        ),
    ],
)
def test_bad_sizes_are_named(make, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        make()


def test_another_number_of_features_is_named():
    with pytest.raises(
        ShapeError,
        match=r"^CausalConv1d .*3 .*n_in.*\(1, 2, 4\)$",
    ):
        CausalConv1d(3, 5, 2)(torch.zeros(2, 4))
