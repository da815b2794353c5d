"""Parse and infer frequencies, and convert times to numbers of steps and back."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace

import numpy as np

from fluxutils_py.frames.frames import require

POLARS = re.compile(r"(\d*)(ns|us|ms|s|m|h|d|w|mo|q|y)")
# aliases of polars to those of pandas
OF_POLARS = {
    "m": "min",
    "d": "D",
    "w": "W",
    "mo": "MS",
    "q": "QS",
    "y": "YS",
}
RENAMED = re.compile(  # pandas 3.0 quotes a KeyError before the full stop
    r"([\w-]+)(?:'\))?\. Did you mean ([\w-]+)\?"
    r"|'([\w-]+)' is no longer supported.* use '([\w-]+)' instead"
)
DAY = 86_400_000_000_000
# from the largest, since a size is named by the first unit that divides it
NANOSECONDS = {
    "Hour": DAY // 24,
    "Minute": 60_000_000_000,
    "Second": 1_000_000_000,
    "Milli": 1_000_000,
    "Micro": 1_000,
    "Nano": 1,
}
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

    def is_outside(self, times: np.ndarray) -> np.ndarray:
        """Return where times are on weekends, for business days; nowhere for other kinds."""
        if self.kind != "business":
            return np.zeros(len(times), bool)
        return ~np.is_busday(_to_days(times))

    def outside_remedy(self) -> str:
        """Return the end of an error for a time that :meth:`is_outside`."""
        return (
            f", on a weekend, and freq={self.text!r} has business days only; leave the row out, or "
            "give freq='D'"
        )

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


# of one step of each class of offsets of pandas
UNITS = {name: Frequency("elapsed", size) for name, size in NANOSECONDS.items()} | {
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


def parse_frequency(freq: object, integer: bool, polars: bool) -> Frequency:
    """Parse the ``freq`` of a user.

    Raises
    ------
    ValueError
        If it is not a supported frequency, or is for integers where the times are dates, or the
        reverse.
    """
    if isinstance(freq, int | np.integer):
        return _parse_integer(freq, integer)
    if integer:
        raise ValueError(
            f"freq={freq!r}, but the times are integers; give the integer between two times, such "
            "as 1"
        )
    freq = _alias_of_pandas(freq, polars)
    try:
        offset = require("pandas").tseries.frequencies.to_offset(freq)
    except (ValueError, TypeError):
        raise ValueError(f"freq={freq!r} is no frequency{_hint(freq)}; give {SUPPORTED}") from None
    name = type(offset).__name__
    n = int(offset.n)
    if name in UNITS and n >= 1:
        return replace(UNITS[name], size=n * UNITS[name].size, text=offset.freqstr)
    if name == "DateOffset" and set(offset.kwds) <= {"months", "years"} and offset.kwds:
        months = n * (offset.kwds.get("months", 0) + 12 * offset.kwds.get("years", 0))
        return Frequency("months", months, "same", str(freq))
    raise ValueError(
        f"freq={freq!r} is not supported; give {SUPPORTED}; or number the times, in a column of "
        "integers"
    )


def _parse_integer(freq: int | np.integer, integer: bool) -> Frequency:
    if not integer:
        raise ValueError(
            f"freq={freq!r}, but the times are dates; give an alias of pandas such as 'h', 'D', "
            "'MS'"
        )
    if freq < 1:
        raise ValueError(f"freq must be a positive integer, got {freq!r}")
    return Frequency("integer", int(freq), text=str(int(freq)))


def _alias_of_pandas(freq: object, polars: bool) -> object:
    alias = POLARS.fullmatch(freq) if isinstance(freq, str) else None
    # a bare "m" is a minute for polars, and was a month for pandas
    if alias and (polars or alias[2] != "m"):
        return alias[1] + OF_POLARS.get(alias[2], alias[2])
    return freq


def _hint(freq: object) -> str:
    """Return what pandas now calls a frequency of older versions, in brackets, or nothing."""
    to_offset = require("pandas").tseries.frequencies.to_offset
    proposed = freq
    for _ in range(4):  # "A" has become "Y", and this "YE"; "1H30T" has two old names
        try:
            to_offset(proposed)
        except (ValueError, TypeError) as error:
            renamed = RENAMED.search(str(error))
        else:
            return f" (pandas now says {proposed!r})"
        if renamed is None:
            return ""
        old, new = filter(None, renamed.groups())
        proposed = re.sub(rf"(?<![A-Za-z]){re.escape(old)}(?![A-Za-z])", new, str(proposed))
    return ""


def infer_frequency(
    absolute: np.ndarray,
    local: np.ndarray | None,
    series: np.ndarray,
) -> Frequency:
    """Infer the frequency from the most common difference between neighbouring times, as
    ``pandas.infer_freq`` does where no time is missing.

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
        return _elapsed(elapsed)
    # months first: their lengths are whole days too
    return (
        _infer_months(usual, times, series)
        or _infer_offset(times, series)
        or _infer_days(usual, times, series)
    )


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
    same = Frequency("months", n, "same", f"pandas.DateOffset(months={n})")
    return same if same.steps_between(first_times(times, series)[series], times)[1].all() else None


def _infer_offset(times: np.ndarray, series: np.ndarray) -> Frequency | None:
    """Return what pandas infers from the longest series, such as business days, if all times of all
    series follow it; None for days and what is not supported.
    """
    longest = times[series == np.bincount(series).argmax()]
    if len(longest) < 3:
        return None
    pandas = require("pandas")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a later version returns an offset, which will do
        offset = pandas.infer_freq(pandas.DatetimeIndex(longest.astype("M8[ns]")))
    if offset is None:
        return None
    try:
        found = parse_frequency(offset, False, False)
    except ValueError:
        return None
    fits = found.steps_between(first_times(times, series)[series], times)[1].all()
    return found if fits and found.kind != "days" else None


def _infer_days(usual: int, times: np.ndarray, series: np.ndarray) -> Frequency:
    n = usual // DAY
    # business days with gaps: all of them occur, and a series has some on both sides of a weekend
    weekday = (times // DAY + 3) % 7  # 1970 began on a Thursday
    span = times - first_times(times, series)[series]
    if n == 1 and np.array_equal(np.unique(weekday), range(5)) and span.max() > 4 * DAY:
        return Frequency("business", 1, text="B")
    return Frequency("days", usual, text=f"{n}D" if n % 7 else f"{n // 7}W")


def _elapsed(usual: int) -> Frequency:
    name, size = next(unit for unit in NANOSECONDS.items() if usual % unit[1] == 0)
    return Frequency("elapsed", usual, text=f"{usual // size} {name.lower()}s")


def _to_days(times: np.ndarray) -> np.ndarray:
    return np.floor_divide(times, DAY).astype("M8[D]")


def _to_months(times: np.ndarray) -> np.ndarray:
    """Convert times in nanoseconds to months since January 1970."""
    return _to_days(times).astype("M8[M]").astype(np.int64)


def _first_days(months: np.ndarray) -> np.ndarray:
    """Return the first day of each month, in days since 1970."""
    return np.asarray(months).astype("M8[M]").astype("M8[D]").astype(np.int64)
