"""Warn of data from which a model probably learns something else than was meant."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
from torch import nn

from fluxutils_py.data.sequence_windows import SequenceWindows
from fluxutils_py.errors import DataError, SingleStepWarning
from fluxutils_py.estimator.inputs import Inputs
from fluxutils_py.nn import Recur

LARGE = 1000  # root mean square of a feature, from which it should have been scaled
LOOKED_AT = 4, 1000  # series and steps
NORMALIZE = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Embedding, nn.modules.batchnorm._NormBase)
MANY = 1000  # rows; a larger frame probably holds steps in time
TIMES = ("date", "datetime", "day", "hour", "month", "period", "step", "t", "time", "timestamp", "week", "year")


def warn_single_step_frame(x: Any, inputs: Inputs, model: nn.Module) -> None:
    """Warn if a recurrent model is fitted on a data frame whose rows look like steps in time.

    Such a frame (pandas or polars) has an index of dates, or one named like time (``TIMES``), or at least ``MANY``
    rows. Arrays never cause a warning.
    """
    if inputs.form != "rows" or inputs.T > 1 or not hasattr(x, "columns"):
        return
    why = _looks_like_time(x) or (f"has {len(x)} rows" if len(x) >= MANY else None)
    if why is None or not any(isinstance(m, Recur) for m in model.modules()):
        return
    warnings.warn(
        f"x is a data frame that {why}, but each of its rows is taken for a series of one step: the model carries "
        "nothing from row to row. If the rows are the steps of one series, fit on timesteps(x.to_numpy().T[:, None]) "
        "and y; if of several, make an array (F, N, T) of them, and fit on that, on samples(x) or on timesteps(x); if "
        "they are independent, fit on x.to_numpy()",
        SingleStepWarning,
        stacklevel=_levels_to_caller(),
    )


def warn_unscaled(windows: SequenceWindows, model: nn.Module, scales_target: bool | None) -> None:
    """Warn if the first values of a feature have a root mean square of ``LARGE`` or more.

    Only layers in a row (``nn.Sequential``) are known to see inputs as they are, unless they normalize or embed them; a
    model of another class may scale them itself. ``scales_target`` is None for an estimator that cannot standardise
    its targets.
    """
    rows = windows.own(windows.segments)[: min(LOOKED_AT[0], windows.batchsize)]
    if not len(rows) or not isinstance(model, nn.Sequential):
        return
    try:
        window = windows.cut(rows, 0, min(LOOKED_AT[1], windows.seqsize, windows.segments.max_length))
    except DataError:  # training says so when it comes there
        return
    way_out = (
        "set scale_target=True" if scales_target is False else "wrap the estimator in a TransformedTargetRegressor"
    )
    live = True if window.w is None else (window.w > 0).any(-1, keepdims=True)
    found = [("y", np.where(live, v, 0), way_out) for v in window.y]
    if not any(isinstance(m, NORMALIZE) for m in model.modules()):
        found += [("x", v, "scale it, as with make_pipeline(SequenceScaler(), estimator)") for v in window.x]
    for name, values, way_out in found:
        with np.errstate(over="ignore"):
            size = np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=(0, 1)))
        if values.dtype.kind == "f" and size.max() >= LARGE:
            warnings.warn(
                f"feature {size.argmax()} of {name} has values of about {size.max():.0g}, from which networks learn "
                f"badly or not at all; {way_out}",
                stacklevel=_levels_to_caller(),
            )


def _looks_like_time(frame: Any) -> str | None:
    index = getattr(frame, "index", None)
    for level in getattr(index, "levels", None) or [index]:
        if type(level).__name__ in ("DatetimeIndex", "PeriodIndex", "TimedeltaIndex"):
            return f"has a {type(level).__name__}"
        name = getattr(level, "name", None)
        if isinstance(name, str) and name.lower() in TIMES:
            return f"has an index named {name!r}"
    return None


def _levels_to_caller() -> int:
    """Return the ``stacklevel`` of the line outside this package that led here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fluxutils_py."):
        level, frame = level + 1, frame.f_back
    return level
