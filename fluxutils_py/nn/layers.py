"""Layers of FluxUtils.jl and PrayTools.jl other than recurrent ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.recurrent import LSTM
from fluxutils_py.validation import check_integer

__all__ = ["DenseReLU", "ffnn"]


def RNNStack(
    n_in: int,
    n_out: int,
    nlayers: int,
    dropout: float = 0.0,
    layer: Callable[[int, int], nn.Module] = LSTM,
) -> nn.Sequential:
    """Stack recurrent layers of any kind, with dropout between them.

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, units of each layer.
    nlayers : int
    dropout : float
        Probability of dropping an output between two layers, in training, drawn for each step. With
        0 there are no dropout layers.
    layer : class or function
        Called as ``layer(n_in, n_out)``.

    Returns
    -------
    nn.Sequential
        ``layer``, ``nn.Dropout``, ``layer``, ...

    Notes
    -----
    ``LSTM(n_in, n_out, num_layers, dropout)`` computes the same, in one call for all layers.
    Source: ``RNN(in, out, nlayers, dropout, layer)`` of FluxUtils.jl.

    Examples
    --------
    >>> from fluxutils_py.nn import GRU
    >>> [type(m).__name__ for m in RNNStack(3, 5, 2, 0.1, GRU)]
    ['GRU', 'Dropout', 'GRU']
    """
    check_integer("nlayers", nlayers, 1)
    layers = [layer(n_in, n_out)]
    # dropout stands between layers, so the last one has none after it
    for _ in range(nlayers - 1):
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
        layers.append(layer(n_out, n_out))
    return nn.Sequential(*layers)


def DenseReLU(n_in: int, n_out: int, bias: bool = True) -> nn.Sequential:
    """Make a linear layer and ``relu``. Source: ``DenseReLU`` of FluxUtils.jl.

    >>> DenseReLU(3, 5)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """
    return nn.Sequential(nn.Linear(n_in, n_out, bias), nn.ReLU())


def ffnn(
    idim: int,
    nneurons: int,
    nlayers: int,
    fun: Callable[..., Any],
    bnfun: Callable[..., Any] | None = None,
    dropout: float = 0.0,
    last_linear: bool = False,
) -> nn.Module:
    """Make a feed-forward network of layers of equal width.

    Parameters
    ----------
    idim, nneurons, nlayers : int
        Features of the input, units of each layer, layers.
    fun : nn.Module class, or function of a tensor
        Activation after each linear layer: ``nn.Tanh`` or ``torch.tanh``. A model with functions
        cannot be saved as plain data; one with modules can.
    bnfun : same as ``fun``, optional
        End each layer with a batch normalisation and this function; ``nn.Identity`` for the
        normalisation alone.
    dropout : float
        If above 0, end each layer with a dropout with this probability.
    last_linear : bool
        Whether the last layer is linear only.

    Returns
    -------
    nn.Sequential
        One module per operation; a single linear layer is returned alone.

    Notes
    -----
    It takes ``(..., idim)``; with batch normalisation ``(B, idim)`` or windows ``(S, B, idim)``,
    whose steps and series are normalised together. Source: ``ffnn`` of PrayTools.jl, which has
    ``last_linear`` only without the other two.

    Examples
    --------
    >>> [type(m).__name__ for m in ffnn(3, 5, 2, nn.Tanh, dropout=0.1, last_linear=True)]
    ['Linear', 'Tanh', 'Dropout', 'Linear']
    """
    check_integer("nlayers", nlayers, 1)
    layers: list[nn.Module] = []
    for k in range(nlayers):
        layers.append(nn.Linear(nneurons if k else idim, nneurons))
        # the activation, normalisation and dropout follow all layers but such a last one
        if last_linear and k == nlayers - 1:
            break
        layers.append(_as_module(fun))
        if bnfun is not None:
            layers += [BatchNorm(nneurons), _as_module(bnfun)]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


class BatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that takes windows ``(S, B, F)`` too: features last, steps and series
    normalised together.
    """

    def forward(self, x: Tensor) -> Tensor:
        # torch would take the series of (S, B, F) for the channels
        rows = x.reshape(-1, x.shape[-1])
        return super().forward(rows).reshape(x.shape)


class Elementwise(nn.Module):
    """A function of a tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def _as_module(function: Callable[..., Any]) -> nn.Module:
    # one instance in several places would share weights, and a name in state_dict
    if isinstance(function, nn.Module):
        raise TypeError(
            f"each layer needs a separate module: give the class {type(function).__name__}, not "
            "an instance"
        )
    return function() if isinstance(function, type) else Elementwise(function)


class GaussianNoise(nn.Module):
    """Add normal noise in training; in evaluation, or with ``stddev=0``, return ``x`` itself.

    Parameters
    ----------
    stddev : float

    Notes
    -----
    Noise comes from torch's generator; ``x`` has any shape. Source: ``GaussianNoise`` of
    FluxUtils.jl.

    Examples
    --------
    >>> x = torch.zeros(7, 4, 3)
    >>> GaussianNoise(0.1).eval()(x) is x
    True
    """

    def __init__(self, stddev: float) -> None:
        super().__init__()
        if not stddev >= 0:  # also for NaN
            raise ValueError(f"stddev must be 0 or more, got {stddev}")
        self.stddev = stddev

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.stddev == 0:
            return x
        return x + self.stddev * torch.randn_like(x)

    def extra_repr(self) -> str:
        return f"{self.stddev}"
