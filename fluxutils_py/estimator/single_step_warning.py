"""Warn if a recurrent model is fitted on a data frame of time steps as if its rows were samples."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch import nn

from fluxutils_py.errors import SingleStepWarning
from fluxutils_py.estimator.inputs import Inputs
from fluxutils_py.nn import Recur

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
