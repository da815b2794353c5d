"""Arrays that a transformer made without the steps before them, which matter where a state says
that there were some.
"""

from __future__ import annotations

import weakref
from typing import Any

from fluxutils_py.errors import warn

# by identity: arrays take no attributes, and a pipeline hands on nothing else; each goes with its
# array
_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_missing_past(x: Any) -> None:
    """Note that the first steps of an array, view or list of arrays depend on steps that whoever
    made it has not seen.
    """
    for each in _arrays(x):
        _made[id(each)] = each


def misses_past(x: Any) -> bool:
    """Whether this very array, view or list was noted."""
    return any(_made.get(id(each)) is each for each in _arrays(x))


def warn_of_missing_past(x: Any) -> None:
    """Warn that predictions for an array that was noted do not continue those before it."""
    if misses_past(x):
        warn(
            "state continues series, but a transformer before the estimator (SequenceImputer with "
            "'ffill', or SequenceFeatures) saw x as their beginning, and what it makes of the "
            "first steps depends on those before: predictions may differ from those of the whole "
            "series. The state is of the estimator alone; for both, step through all of the series "
            "with fluxutils_py.stream(pipeline, n_series), or predict whole series"
        )


def _arrays(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]
