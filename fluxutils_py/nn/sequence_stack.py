"""Residual blocks around any stateful layer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.nn.recurrent import TORCH_LAYERS, Recur
from fluxutils_py.nn.sizes import check_features, check_probability, set_sizes


class _Block(nn.Module):
    """Compute ``x + layer(norm(x))``, then ``x + mlp(norm(x))`` with a gated MLP."""

    def __init__(self, layer: nn.Module, n: int, dropout: float) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(n)
        self.layer = layer
        self.mlp_norm = nn.LayerNorm(n)
        self.up = nn.Linear(n, 2 * n)  # gate and value, in one product
        self.down = nn.Linear(n, n)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.layer(self.layer_norm(x)))
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        y: Tensor = x + self.dropout(self.down(F.silu(gate) * value))
        return y


class SequenceStack(nn.Module):
    """Deep sequence model of pre-norm residual blocks, each with a stateful layer and a gated MLP.

    Parameters
    ----------
    cell : class or callable
        Makes the layer of each block, as ``cell(n_out, n_out)``: :class:`MinGRU`, :class:`LRU`,
        :class:`LSTM`, ``functools.partial(SlidingWindowAttention, window=32)``, ``nn.LSTM``, ...
    n_in, n_out : int
        Number of input features, and width of the blocks and of the output.
    n_layers : int
        Number of blocks.
    dropout : float
        Probability of dropping an output of a layer or an MLP in training, drawn anew at each step.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer or below 1, ``dropout`` is not a probability, or ``cell`` does
        not return a module; the message names it.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. Applies
    a linear layer, the blocks and a final normalisation. The layers keep the states; see
    :func:`states`. The MLP is SwiGLU of Shazeer (2020), arXiv:2002.05202, with width ``n_out``.

    Examples
    --------
    >>> import torch
    >>> from fluxutils_py import states
    >>> from fluxutils_py.nn import LRU
    >>> model = nn.Sequential(SequenceStack(LRU, 3, 16, n_layers=2), nn.Linear(16, 1))
    >>> model(torch.zeros(7, 4, 3)).shape, len(states(model))
    (torch.Size([7, 4, 1]), 2)
    """

    n_in: int
    n_out: int
    n_layers: int

    def __init__(
        self,
        cell: Callable[[int, int], nn.Module],
        n_in: int,
        n_out: int,
        n_layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not callable(cell):
            raise TypeError(
                f"SequenceStack: cell must be a class of layers or a callable, got {cell!r}"
            )
        self.cell = cell
        set_sizes(self, n_in=n_in, n_out=n_out, n_layers=n_layers)
        self.dropout = check_probability(self, "dropout", dropout)
        self.embed = nn.Linear(self.n_in, self.n_out)
        blocks = [_Block(self._layer(), self.n_out, self.dropout) for _ in range(self.n_layers)]
        self.blocks = nn.Sequential(*blocks)
        # blocks normalise their inputs, so nothing has normalised the sum of their outputs
        self.norm = nn.LayerNorm(self.n_out)

    def _layer(self) -> nn.Module:
        layer = self.cell(self.n_out, self.n_out)
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"SequenceStack: cell(n_in, n_out) must make a module, got {type(layer).__name__}"
            )
        # a bare layer of torch would forget its state, and returns it with the outputs
        return Recur(layer) if isinstance(layer, TORCH_LAYERS) else layer

    def forward(self, x: Tensor) -> Tensor:
        check_features("SequenceStack", x, self.n_in)
        if not x.is_floating_point():  # a linear layer refuses integers
            x = x.to(self.embed.weight.dtype)
        y: Tensor = self.norm(self.blocks(self.embed(x)))
        return y
