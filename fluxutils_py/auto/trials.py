"""How much of a network to add to a linear model: what both do on data that are held out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from torch import nn

from fluxutils_py.auto.calibrating import HeldOut
from fluxutils_py.estimator.fitted_parts import FitChoice
from fluxutils_py.inputs.target_codec import TargetCodec
from fluxutils_py.nn.ready_made import LinearPlusNetwork
from fluxutils_py.parallel import RankGroup

GAINS = np.linspace(0, 1, 11)
BLOCKS = 4  # of the data that a trial holds out
MOST_HARM = 1.05  # of the error of the linear model, in the worst block
CLEARLY = 0.995  # of the error of the linear model, below which a network is worth it
CLEARLY_IN_TIME = 0.985
KEPT = 0.6  # of the best gain in time: four fifths of what it is worth, half of what it may cost
SURELY = 0.8  # of the error of the linear model, below which all of it is kept


def errors_by_block(held: HeldOut, model: nn.Module, axis: int, ranks: RankGroup) -> np.ndarray:
    """Return the error of each block of held-out data with each of the ``GAINS``.

    Parameters
    ----------
    held : HeldOut
    model : nn.Module
        With networks that add to linear models; their gains change.
    axis : int
        What blocks are made of: 0 series, 1 steps.
    ranks : RankGroup

    Returns
    -------
    ndarray of shape (BLOCKS, n_gains)
        The root mean squared error, or for labels the log loss without weights of classes; NaN
        where a block has no target.
    """
    networks = [m for m in model.modules() if isinstance(m, LinearPlusNetwork)]
    found = []
    for gain in (0.0, 1.0):
        for network in networks:
            network.gain = gain
        found.append(held.collect(model, _side_by_side))
    linear, both = found
    weight, target = linear[0], linear[1 : 1 + held.windows.y[0].F]
    linear, both = (outputs[1 + len(target) :] for outputs in found)
    if held.codec.class_weight is not None:
        weight = weight / held.codec.class_weight[_codes(target)]
    sums = np.zeros((2, BLOCKS, len(GAINS)))
    for g, gain in enumerate(GAINS):
        losses = _losses(held.codec, target, linear + gain * (both - linear))
        counted = np.where(np.isfinite(losses), weight, 0)
        for of_sum, values in zip(sums, (np.nan_to_num(losses) * counted, counted), strict=True):
            of_sum[:, g] = [block.sum() for block in np.array_split(values, BLOCKS, axis)]
    if held.windows.shards is not None:  # each rank has series of its own
        sums = np.sum(ranks.allgather(sums), axis=0)
    total, count = sums
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return mean if held.codec.classes is not None else np.sqrt(mean)


def _side_by_side(target: np.ndarray, out: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.concatenate([weight[:, :, None], target, out], 2)


def _codes(target: np.ndarray) -> np.ndarray:
    """Return labels (1, M, S) as places among the classes, (M, S); 0 where there is none."""
    return np.maximum(np.nan_to_num(target[0], nan=-1.0), 0).astype(int)


def _losses(codec: TargetCodec, target: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the loss (M, S) of outputs (G, M, S), NaN where there is no target."""
    if codec.classes is None:
        squares = (target - outputs) ** 2
        n_known = np.isfinite(squares).sum(0)
        return np.nansum(squares, 0) / np.where(n_known > 0, n_known, np.nan)
    likely = codec.decoders()["predict_log_proba"](np.moveaxis(outputs, 0, -1))
    of_label = np.take_along_axis(likely, _codes(target)[:, :, None], 2)[:, :, 0]
    return np.where(target[0] >= 0, -of_label, np.nan)


def choice_after_trials(choice: FitChoice, errors: np.ndarray, in_time: bool) -> FitChoice:
    """Return a choice with the gain that does best in trials, (n_blocks, n_gains).

    Errors are relative to those of the linear model; where these are small, to their mean. The best
    gain has the least mean over the blocks, of those up to the largest that makes no block worse
    than ``MOST_HARM``. Blocks of time differ from what is to come: there, the mean counts with its
    standard error, and of the best gain ``KEPT`` remains, unless it is ``SURELY`` better. Where a
    network gains nothing, the choice is the linear model alone.
    """
    known = errors[np.isfinite(errors).all(1)]
    linear = known[:, :1]
    unit = np.maximum(linear, linear.mean()) if len(linear) else linear
    relative = 1 + (known - linear) / np.maximum(unit, np.finfo(float).tiny)
    best = 0.0
    if len(relative):
        bound = relative.mean(0)
        enough = CLEARLY
        if in_time:
            bound += relative.std(0) / math.sqrt(len(relative))
            enough = CLEARLY_IN_TIME
        is_safe = np.logical_and.accumulate(relative.max(0) <= MOST_HARM)
        at = int(np.where(is_safe, bound, np.inf).argmin())
        best = float(GAINS[at]) if bound[at] < enough else 0.0
    is_sure = best > 0 and bound[at] < SURELY
    gain = round(best * KEPT, 2) if in_time and not is_sure else best
    cell = choice.cell if gain else "linear"
    tried = tuple(map(tuple, np.column_stack([GAINS, relative.T]).round(4).tolist()))
    return replace(choice, cell=cell, gain=gain, needs_trial=False, tried=tried)
