"""Fit and calibrate the intervals of a ready-made regressor, whose widths follow the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.auto.calibrating import HeldOut
from fluxutils_py.estimator.streams.conformal import Calibration, conformal_quantile
from fluxutils_py.nn.ready_made import WithIntervals

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of what the network says, in the distances
# Of the best share in time, where what is to come differs from what was held out, unless its score
# is so much better than that of equal distances.
KEPT = 0.6
CLEARLY = 0.8


def pinball_of_ends(out: Tensor, y: Tensor, *, shares: Sequence[float]) -> Tensor:
    """Return the mean pinball loss of the ends of intervals behind the outputs (..., G) of a model,
    (..., G); ``shares`` of targets are to lie below the ends.
    """
    n = y.shape[-1]
    error = y.unsqueeze(-2) - out[..., n:].unflatten(-1, (len(shares), n))
    below = torch.tensor(shares, dtype=out.dtype, device=out.device)[:, None]
    return torch.maximum(below * error, (below - 1) * error).mean(-2)


def loss_of_levels(levels: Sequence[float]) -> partial[Tensor]:
    """Return the loss of a :class:`WithIntervals` for levels in per cent."""
    tails = [(1 - level / 100) / 2 for level in levels]
    return partial(pinball_of_ends, shares=[s for tail in tails for s in (tail, 1 - tail)])


def calibrate(model: WithIntervals, held: HeldOut, *, in_time: bool) -> Calibration:
    """Scale the distances of a model to hold targets that were held out, and return the errors on
    these: of each output, in the units of the user, and behind them, for each level, relative to
    the distance from the prediction to the end on their side. Where they are too few to tell, there
    are none of these.

    Parameters
    ----------
    model : WithIntervals
        Fitted on the rest of the data; it changes.
    held : HeldOut
    in_time : bool
        Whether later steps are held out, not series.

    Notes
    -----
    Source: Romano, Patterson & Candes (2019), Conformalized quantile regression, NeurIPS; with
    scores relative to the distances, as in Kivaranovic, Johnson & Leeb (2020), Adaptive,
    distribution-free prediction intervals for deep networks, AISTATS.
    """
    n = model.n_out
    levels = model.levels
    found = held.collect(model, partial(_errors_and_distances, n_outputs=n))
    error = found[:n]  # (G, M, S)
    scale: Any = held.codec.scale
    in_units = error * scale.scale[:, None, None]
    of_every_series = error.shape[1] == held.windows.x[0].N
    plain = Calibration.of(in_units, of_every_series)
    # of both sides, and of all steps in the mean
    sides = found[n:].reshape(len(levels), 2, *error.shape)
    typical = np.nanmean(sides, (3, 4))
    is_above = error > 0

    def distances(share: float) -> np.ndarray:
        mixed = share * sides + (1 - share) * typical[..., None, None]
        return np.where(is_above, mixed[:, 1], mixed[:, 0])

    def score(share: float) -> float:
        """Return the mean interval score of Gneiting & Raftery (2007)."""
        total = 0.0
        for level, distance, width in zip(levels, distances(share), typical.sum(1), strict=True):
            scores = np.abs(error) / distance
            factor = np.nanquantile(scores, level / 100, axis=(1, 2), keepdims=True)
            outside = np.nanmean(distance * np.maximum(scores - factor, 0), (1, 2))
            total += np.mean(factor[:, 0, 0] * width + outside * 2 / (1 - level / 100))
        return total

    share = min(SHARES, key=score)
    if in_time and score(share) > CLEARLY * score(0):
        share *= KEPT
    relative = np.abs(error) / distances(share)
    factor = [
        [conformal_quantile(of_output, level / 100) for of_output in of_level]
        for of_level, level in zip(relative, levels, strict=True)
    ]
    # an interval of a higher level holds those of the lower ones; not 0 where all errors are
    factors = np.maximum(np.maximum.accumulate(factor, 0), 1e-9)
    if not np.isfinite(factors).all():
        return plain
    of_ends = [np.repeat(factors[:, None], 2, 1), typical]
    rows, means = (torch.from_numpy(a.reshape(-1)).to(model.ends.bias) for a in of_ends)
    model.set_distances(rows, share, means)
    signed = np.sign(error) * relative / factors[:, :, None, None]
    return Calibration.of(np.concatenate([in_units, *signed]), of_every_series)


def _errors_and_distances(
    target: np.ndarray, out: np.ndarray, weight: np.ndarray, *, n_outputs: int
) -> np.ndarray:
    """Return errors, and behind them the distances to all ends, NaN where nothing counts."""
    y = out[:, :, :n_outputs]
    distances = np.abs(out[:, :, n_outputs:] - np.tile(y, out.shape[2] // n_outputs - 1))
    both = np.concatenate([target - y, distances], 2).astype(np.float64)
    both[~np.isfinite(both)] = np.nan
    return np.where(weight[:, :, None] > 0, both, np.nan)
