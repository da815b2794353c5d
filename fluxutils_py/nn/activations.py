"""Activations made of two parabolas, which cost no exponential."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dpsigmoid", "dptanh", "psigmoid", "ptanh"]

REACH = 4.1  # where psigmoid arrives at 0 and 1
KNEE, PLATEAU, BEND = 1.92033, 0.96016, 0.26037  # where ptanh goes flat, how high, and its curvature


def psigmoid(x: Tensor) -> Tensor:
    """A sigmoid of two parabolas: 0 up to -4.1, 1 from 4.1 on, at most 0.0194 from the true one.

    Any shape; NaN stays NaN. Source: FluxUtils.jl.

    >>> psigmoid(torch.tensor([-9.0, -4.1, 0.0, 4.1]))
    tensor([0.0000, 0.0000, 0.5000, 1.0000])
    """
    u = (x / REACH).clamp(-1, 1)
    return 0.5 + u * (1 - 0.5 * u.abs())


def dpsigmoid(x: Tensor) -> Tensor:
    """The derivative of :func:`psigmoid`. Source: FluxUtils.jl (where it is 4.1 times too large)."""
    return (1 - (x / REACH).clamp(-1, 1).abs()) / REACH


def ptanh(x: Tensor) -> Tensor:
    """A hyperbolic tangent of two parabolas: flat at ±0.96016 beyond ±1.92033, at most 0.0399 from the true one.

    Any shape; NaN stays NaN. The constants being rounded, it jumps by 4e-6 at 0. Source: FluxUtils.jl.

    >>> ptanh(torch.tensor([-9.0, -1.0, 1.0, 9.0]))
    tensor([-0.9602, -0.7396,  0.7396,  0.9602])
    """
    v = x.clamp(-KNEE, KNEE)
    return torch.where(x > 0, PLATEAU - BEND * (v - KNEE).square(), BEND * (v + KNEE).square() - PLATEAU)


def dptanh(x: Tensor) -> Tensor:
    """The derivative of :func:`ptanh`. Source: FluxUtils.jl."""
    return 2 * BEND * (KNEE - x.clamp(-KNEE, KNEE).abs())
