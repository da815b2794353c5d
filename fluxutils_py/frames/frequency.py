"""Parse and infer frequencies, and convert times to numbers of steps and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.frames.frames import require

DAY = 86_400_000_000_000
SUPPORTED = (
    "an integer for integer times, or an alias of pandas such as 'h', '15min', 'D', 'W', 'MS', "
    "'ME', 'QS', 'B'"
)


@dataclass(frozen=True)
class Frequency:
    """Length of one step.

    Attributes
    ----------
    kind : "integer", "elapsed", "days", "months" or "business"
        Kind of step: a number for integer times, elapsed time (hours and less, unaffected by clock
        changes), calendar days, months, or business days.
    size : int
        Size of the step, in this order: integers, nanoseconds, nanoseconds (whole days), months,
        business days.
    at : "start", "end" or "same"
        Day in the month, for the kind "months": the first, the last, or that of the first time.
    text : str
        Name in error messages, such as the alias of pandas.
    """

    kind: str
    size: int
    at: str = "same"
    text: str = ""

    @property
    def is_local(self) -> bool:
        """Whether steps follow the calendar of the time zone."""
        return self.kind in ("days", "months", "business")

    def steps_between(self, first: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of steps from ``first`` to ``times``, and a mask of where that number
        is whole.

        Both arguments are int64: integers, or nanoseconds since 1970, in local time if
        :attr:`is_local`.
        """
        if self.kind in ("integer", "elapsed", "days"):
            steps, rest = np.divmod(times - first, self.size)
            return steps, rest == 0
        if self.kind == "business":
            distance = np.busday_count(_to_days(first), _to_days(times))
        else:
            distance = _to_months(times) - _to_months(first)
        steps, rest = np.divmod(distance, self.size)
        # the months or days may match while the day of the month or the clock does not
        return steps, (rest == 0) & (self.add_steps(first, steps) == times)

    def add_steps(self, first: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the times ``steps`` steps after ``first``."""
        if self.kind in ("integer", "elapsed", "days"):
            return first + steps * self.size
        day, clock = np.divmod(first, DAY)
        if self.kind == "business":
            # a weekend rolls to Monday, a different day: steps_between sees that it is off the grid
            days = np.busday_offset(_to_days(first), steps * self.size, roll="forward")
            return days.astype(np.int64) * DAY + clock
        month = _to_months(first)
        later = month + steps * self.size
        start = _first_days(later)
        last_day = _first_days(later + 1) - 1 - start
        day_of_month = day - _first_days(month)
        if self.at == "end":
            day_of_month = last_day
        elif self.at == "same":  # the 31st is the last day of a shorter month
            day_of_month = np.minimum(day_of_month, last_day)
        return (start + day_of_month) * DAY + clock


# of one step of each class of offsets of pandas that is no fixed time
UNITS = {
    "Day": Frequency("days", DAY),
    "Week": Frequency("days", 7 * DAY),
    "BusinessDay": Frequency("business", 1),
    "MonthBegin": Frequency("months", 1, "start"),
    "MonthEnd": Frequency("months", 1, "end"),
    "QuarterBegin": Frequency("months", 3, "start"),
    "QuarterEnd": Frequency("months", 3, "end"),
    "YearBegin": Frequency("months", 12, "start"),
    "YearEnd": Frequency("months", 12, "end"),
}


def parse_frequency(freq: Any, integer: bool) -> Frequency:
    """Parse the ``freq`` of a user.

    Raises
    ------
    ValueError
        If it is not a supported frequency, or is for integers where the times are dates, or the
        reverse.
    """
    is_number = isinstance(freq, int | np.integer)
    if is_number != integer:
        times = "integers" if integer else "dates"
        raise ValueError(f"freq={freq!r}, but the times are {times}; give {SUPPORTED}")
    if is_number:
        if freq < 1:
            raise ValueError(f"freq must be a positive integer, got {freq!r}")
        return Frequency("integer", int(freq), text=str(freq))
    pandas = require("pandas")
    try:
        offset = pandas.tseries.frequencies.to_offset(freq)
    except (ValueError, TypeError) as error:  # which says what pandas has renamed
        raise ValueError(f"freq={freq!r} is no frequency; give {SUPPORTED}. {error}") from None
    name = type(offset).__name__
    if name in UNITS and offset.n >= 1:
        size = int(offset.n) * UNITS[name].size
        return replace(UNITS[name], size=size, text=offset.freqstr)
    if isinstance(offset, pandas.tseries.offsets.Tick) and offset.n >= 1:
        return Frequency("elapsed", int(offset.nanos), text=offset.freqstr)
    raise ValueError(
        f"freq={freq!r} is not supported; give {SUPPORTED}; or number the times, in a column of "
        "integers"
    )


def infer_frequency(
    absolute: np.ndarray,
    local: np.ndarray | None,
    series: np.ndarray,
) -> Frequency:
    """Infer the frequency from the most common difference between neighbouring times.

    Whole months and business days are found if all times follow them.

    Parameters
    ----------
    absolute : ndarray of int, shape (rows,)
        Integers, or nanoseconds in UTC.
    local : ndarray of int, shape (rows,), or None
        Nanoseconds in local time. None: the times are integers.
    series : ndarray of int, shape (rows,)
        The series of each time.

    Raises
    ------
    ValueError
        If no series has two times.
    """
    order = np.lexsort((absolute, series))
    series = series[order]
    elapsed = _usual_difference(absolute[order], series)
    if elapsed is None:
        raise ValueError(f"no series has two times to infer freq from; give freq: {SUPPORTED}")
    if local is None:
        return Frequency("integer", elapsed, text=str(elapsed))
    # a day of 23 hours is a day in local time; an hour is one in UTC
    times = local[order]
    usual = _usual_difference(times, series)
    if usual is None or usual % DAY:
        pandas = require("pandas")
        offset = pandas.tseries.frequencies.to_offset(pandas.Timedelta(elapsed))
        return Frequency("elapsed", elapsed, text=offset.freqstr)
    # months first: their lengths are whole days too
    months = _infer_months(usual, times, series)
    if months is not None:
        return months
    n = usual // DAY
    # business days: all of them occur, and a series has some on both sides of a weekend
    weekday = (times // DAY + 3) % 7  # 1970 began on a Thursday
    span = times - first_times(times, series)[series]
    if n == 1 and np.array_equal(np.unique(weekday), range(5)) and span.max() > 4 * DAY:
        return Frequency("business", 1, text="B")
    return Frequency("days", usual, text=f"{n}D" if n % 7 else f"{n // 7}W")


def _usual_difference(times: np.ndarray, series: np.ndarray) -> int | None:
    """Return the most common difference, above 0, between neighbouring times of a series."""
    differences = np.diff(times)[np.diff(series) == 0]
    values, counts = np.unique(differences[differences > 0], return_counts=True)
    return int(values[counts.argmax()]) if len(values) else None


def first_times(times: np.ndarray, series: np.ndarray) -> np.ndarray:
    """Return the first time of each series."""
    # not the first row: rows may be in any order
    first = np.full(series.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, series, times)
    return first


def _infer_months(usual: int, times: np.ndarray, series: np.ndarray) -> Frequency | None:
    day, clock = np.divmod(times, DAY)
    if usual < 28 * DAY or (clock != clock[0]).any():
        return None
    n = round(usual / DAY / 30.44)
    month = _to_months(times)
    if (day == _first_days(month)).all():
        return Frequency("months", n, "start", f"{n}MS")
    if (day + 1 == _first_days(month + 1)).all():
        return Frequency("months", n, "end", f"{n}ME")
    same = Frequency("months", n, "same", f"{n} months")
    return same if same.steps_between(first_times(times, series)[series], times)[1].all() else None


def _to_days(times: np.ndarray) -> np.ndarray:
    return np.floor_divide(times, DAY).astype("M8[D]")


def _to_months(times: np.ndarray) -> np.ndarray:
    """Convert times in nanoseconds to months since January 1970."""
    return _to_days(times).astype("M8[M]").astype(np.int64)


def _first_days(months: np.ndarray) -> np.ndarray:
    """Return the first day of each month, in days since 1970."""
    return np.asarray(months).astype("M8[M]").astype("M8[D]").astype(np.int64)
