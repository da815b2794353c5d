"""Causal convolutions that keep their last inputs as state."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.sizes import check_features, check_probability, set_sizes


class _Convolution(nn.Module):
    """Inner module of :class:`CausalConv1d`; its state is the last ``(kernel_size - 1) * dilation``
    inputs.
    """

    takes_windows = True
    batch_dim = 1

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel_size: int,
        dilation: int,
        bias: bool,
        weight_norm: bool,
    ) -> None:
        super().__init__()
        self.n_in = n_in
        self.n_out = n_out
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.n_past = (kernel_size - 1) * dilation
        self.weight = nn.Parameter(torch.empty(n_out, n_in, kernel_size))
        self.norm = nn.Parameter(torch.empty(n_out)) if weight_norm else None
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters from torch's generator, as ``nn.Conv1d`` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = (self.n_in * self.kernel_size) ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)
        if self.norm is not None:  # so that the weights are at first as they were drawn
            with torch.no_grad():
                self.norm.copy_(self._lengths())

    def _lengths(self) -> Tensor:
        """Return the length of the weights of each output."""
        return self.weight.flatten(1).norm(dim=1)

    def empty_state(self) -> tuple[Tensor, ...]:
        return (self.weight.detach().new_zeros(self.n_past, 0, self.n_in),)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features("CausalConv1d", x, self.n_in)
        S, B, _ = x.shape
        if state is None:
            state = x.new_zeros(self.n_past, B, self.n_in)
        both = torch.cat([state, x])  # (n_past + S, B, F)
        weight: Tensor = self.weight
        if self.norm is not None:
            # computed anew each time, so that gradients flow through the lengths
            weight = weight * (self.norm / self._lengths())[:, None, None]
        # one product over all taps is faster than conv1d, which needs time as the last axis
        starts = range(0, self.kernel_size * self.dilation, self.dilation)
        taps = [both[start : start + S] for start in starts]
        rows = weight.transpose(1, 2).flatten(1)
        y = F.linear(torch.cat(taps, 2), rows, self.bias)
        # a clone, because a view would keep the whole window in memory
        return y, both[S:].clone()


class CausalConv1d(Recur):
    """Convolution over time that sees only present and past inputs, and keeps the past ones as its
    state.

    y[t] = bias + sum over k of weight[:, :, k] x[t - (kernel_size - 1 - k) dilation]

    Parameters
    ----------
    n_in, n_out : int
        Number of input and output features.
    kernel_size : int
        Number of steps that an output sees, ``dilation`` apart.
    dilation : int
    bias : bool
    weight_norm : bool
        Whether the weights of each output are a direction times a length, ``module.norm`` (Salimans
        & Kingma 2016).
    trainable_init : bool
        Whether to train the inputs before the first one, which are otherwise zero; see
        :class:`Recur`.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer, or below 1; the message names it.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``, without
    padding to cut off. The state holds the last inputs, ((kernel_size - 1) dilation, B, n_in).
    ``module.weight`` has the shape that ``nn.Conv1d`` uses.

    Examples
    --------
    >>> layer = CausalConv1d(3, 5, kernel_size=2, dilation=4)
    >>> layer(torch.zeros(7, 4, 3)).shape, layer.state.shape
    (torch.Size([7, 4, 5]), torch.Size([4, 4, 3]))
    """

    n_in: int
    n_out: int
    kernel_size: int
    dilation: int

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel_size: int,
        dilation: int = 1,
        bias: bool = True,
        weight_norm: bool = False,
        trainable_init: bool = False,
    ) -> None:
        set_sizes(self, n_in=n_in, n_out=n_out, kernel_size=kernel_size, dilation=dilation)
        self.bias = bool(bias)
        self.weight_norm = bool(weight_norm)
        inner = _Convolution(
            self.n_in,
            self.n_out,
            self.kernel_size,
            self.dilation,
            self.bias,
            self.weight_norm,
        )
        super().__init__(inner, trainable_init)


class _ResidualBlock(nn.Module):
    """Two causal convolutions with a residual connection."""

    def __init__(
        self, n_in: int, n_out: int, kernel_size: int, dilation: int, dropout: float
    ) -> None:
        super().__init__()
        self.conv1 = CausalConv1d(n_in, n_out, kernel_size, dilation, weight_norm=True)
        # it sees as far again, so a block sees twice (kernel_size - 1) dilation back
        self.conv2 = CausalConv1d(n_out, n_out, kernel_size, dilation, weight_norm=True)
        self.dropout = nn.Dropout(dropout)
        # a sum needs as many channels; where they agree, x itself keeps gradients as they are
        self.skip = nn.Identity() if n_in == n_out else nn.Linear(n_in, n_out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.relu(self.conv1(x)))
        y = self.dropout(F.relu(self.conv2(y)))
        return F.relu(y + self.skip(x))


class TCN(nn.Module):
    """Temporal convolutional network: residual blocks of causal convolutions with doubling
    dilation.

    Parameters
    ----------
    n_in, n_out : int
        Number of input features, and number of channels of every block.
    n_levels : int
        Number of blocks. Each has two convolutions; the blocks have dilations 1, 2, 4, ...
    kernel_size : int
    dropout : float
        Probability of dropping an output of a convolution in training.

    Attributes
    ----------
    receptive_field : int
        Number of steps that an output sees: ``1 + 2 (kernel_size - 1) (2 ** n_levels - 1)``, 253 by
        default.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer or below 1, or ``dropout`` is not a probability; the message
        names it.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    convolutions are :class:`CausalConv1d` with weight normalisation. They keep the state, so
    windows and single steps give the same outputs as the whole series.

    Source: Bai, Kolter & Koltun (2018), "An empirical evaluation of generic convolutional and
    recurrent networks for sequence modeling", arXiv:1803.01271.

    Examples
    --------
    >>> model = TCN(3, 5, n_levels=3)
    >>> model(torch.zeros(7, 4, 3)).shape, model.receptive_field
    (torch.Size([7, 4, 5]), 29)
    """

    n_in: int
    n_out: int
    n_levels: int
    kernel_size: int

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_levels: int = 6,
        kernel_size: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        set_sizes(self, n_in=n_in, n_out=n_out, n_levels=n_levels, kernel_size=kernel_size)
        self.dropout = check_probability(self, "dropout", dropout)
        self.blocks = nn.Sequential()
        for k in range(self.n_levels):
            n_channels = self.n_out if k else self.n_in
            block = _ResidualBlock(n_channels, self.n_out, self.kernel_size, 2**k, self.dropout)
            self.blocks.append(block)

    @property
    def receptive_field(self) -> int:
        # two convolutions in each block, whose dilations add up to 2 ** n_levels - 1
        return 1 + 2 * (self.kernel_size - 1) * (2**self.n_levels - 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y
