"""Activations made of two parabolas, which need no exponential."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dpsigmoid", "dptanh", "psigmoid", "ptanh"]

REACH = 4.1  # psigmoid reaches 0 and 1 at -REACH and REACH
KNEE = 1.92033  # where ptanh becomes flat
PLATEAU = 0.96016  # its height there
BEND = 0.26037  # its curvature


def psigmoid(x: Tensor) -> Tensor:
    """Compute a sigmoid of two parabolas: 0 up to -4.1, 1 from 4.1 on, within 0.0194 of the
    logistic function.

    ``x`` has any shape; NaN stays NaN. Source: FluxUtils.jl.

    >>> psigmoid(torch.tensor([-9.0, -4.1, 0.0, 4.1]))
    tensor([0.0000, 0.0000, 0.5000, 1.0000])
    """
    u = (x / REACH).clamp(-1, 1)
    return 0.5 + u * (1 - 0.5 * u.abs())


def dpsigmoid(x: Tensor) -> Tensor:
    """Compute the derivative of :func:`psigmoid`. Source: FluxUtils.jl, where it is 4.1 times too
    large.
    """
    u = (x / REACH).clamp(-1, 1)
    return (1 - u.abs()) / REACH


def ptanh(x: Tensor) -> Tensor:
    """Compute a tanh of two parabolas: flat at ±0.96016 beyond ±1.92033, within 0.0399 of the
    hyperbolic tangent.

    ``x`` has any shape; NaN stays NaN. The constants are rounded, so it jumps by 4e-6 at 0. Source:
    FluxUtils.jl.

    >>> ptanh(torch.tensor([-9.0, -1.0, 1.0, 9.0]))
    tensor([-0.9602, -0.7396,  0.7396,  0.9602])
    """
    v = x.clamp(-KNEE, KNEE)
    above = v + KNEE
    below = v - KNEE
    right = PLATEAU - BEND * below.square()
    left = BEND * above.square() - PLATEAU
    return torch.where(x > 0, right, left)


def dptanh(x: Tensor) -> Tensor:
    """Compute the derivative of :func:`ptanh`. Source: FluxUtils.jl."""
    v = x.clamp(-KNEE, KNEE)
    return 2 * BEND * (KNEE - v.abs())
