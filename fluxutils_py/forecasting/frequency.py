"""Parse and infer frequencies, and convert times to numbers of steps and back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.frames import require

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
RENAMED = re.compile(
    r"([\w-]+)\. Did you mean ([\w-]+)\?|'([\w-]+)' is no longer supported.* use '([\w-]+)' instead"
)
MONTHS = {"Month": 1, "Quarter": 3, "Year": 12}
NANOSECONDS = {
    "Hour": 3_600_000_000_000,
    "Minute": 60_000_000_000,
    "Second": 1_000_000_000,
    "Milli": 1_000_000,
}
NANOSECONDS |= {"Micro": 1_000, "Nano": 1}
DAY = 86_400_000_000_000
WAYS_OUT = (
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
            days, begin = (np.floor_divide(t, DAY).astype("M8[D]") for t in (times, first))
            steps, rest = np.divmod(np.busday_count(begin, days), self.size)
        else:
            steps, rest = np.divmod(_to_months(times) - _to_months(first), self.size)
        return steps, (rest == 0) & (self.add_steps(first, steps) == times)

    def is_weekend(self, times: np.ndarray) -> np.ndarray:
        """Return where times are on days that business days leave out; nowhere for other kinds."""
        if self.kind != "business":
            return np.zeros(len(times), bool)
        return ~np.is_busday(np.floor_divide(times, DAY).astype("M8[D]"))

    def add_steps(self, first: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the times ``steps`` steps after ``first``."""
        if self.kind in ("integer", "elapsed", "days"):
            return first + steps * self.size
        day, clock = np.divmod(first, DAY)
        # from a weekend on: from Monday, which is found to be another day
        if self.kind == "business":
            days = np.busday_offset(day.astype("M8[D]"), steps * self.size, roll="forward")
            return days.astype(np.int64) * DAY + clock
        month = _to_months(first) + steps * self.size
        start = _first_days(month)
        length = _first_days(month + 1) - start
        own = day - _first_days(_to_months(first))
        if self.at == "same":
            own = np.minimum(own, length - 1)
        return (start + (length - 1 if self.at == "end" else own)) * DAY + clock


# More than 12 branches: each family of aliases is one case.
def parse_frequency(freq: Any, integer: bool, polars: bool) -> Frequency:
    """Parse the ``freq`` of a user.

    Raises
    ------
    ValueError
        If it is not a supported frequency, or is for integers where the times are dates, or the
        reverse.
    """
    if isinstance(freq, int | np.integer):
        if not integer:
            raise ValueError(
                f"freq={freq!r}, but the times are dates; give an alias of pandas such as 'h', "
                "'D', 'MS'"
            )
        if freq < 1:
            raise ValueError(f"freq must be a positive integer, got {freq!r}")
        return Frequency("integer", int(freq), text=str(int(freq)))
    if integer:
        raise ValueError(
            f"freq={freq!r}, but the times are integers; give the integer between two times, such "
            "as 1"
        )
    pd = require("pandas")

    found = POLARS.fullmatch(freq) if isinstance(freq, str) else None
    if found and (polars or found[2] not in "m"):
        freq = found[1] + OF_POLARS.get(found[2], found[2])
    try:
        offset = pd.tseries.frequencies.to_offset(freq)
    except (ValueError, TypeError):
        raise ValueError(f"freq={freq!r} is no frequency{_hint(freq)}; give {WAYS_OUT}") from None
    name, n = type(offset).__name__, int(offset.n)
    if n >= 1 and name in NANOSECONDS:
        return Frequency("elapsed", n * NANOSECONDS[name], text=offset.freqstr)
    if n >= 1 and name in ("Day", "Week"):
        return Frequency("days", n * DAY * (7 if name == "Week" else 1), text=offset.freqstr)
    if n >= 1 and name == "BusinessDay":
        return Frequency("business", n, text=offset.freqstr)
    for unit, months in MONTHS.items():
        if n >= 1 and name in (f"{unit}Begin", f"{unit}End"):
            return Frequency(
                "months", n * months, "end" if name.endswith("End") else "start", offset.freqstr
            )
    if name == "DateOffset" and set(offset.kwds) <= {"months", "years"} and offset.kwds:
        months = n * (offset.kwds.get("months", 0) + 12 * offset.kwds.get("years", 0))
        return Frequency("months", months, "same", str(freq))
    raise ValueError(f"freq={freq!r} is not supported; give {WAYS_OUT}")


def _hint(freq: Any) -> str:
    """Return what pandas now calls a frequency of older versions, in brackets, or nothing."""
    to_offset, proposed = require("pandas").tseries.frequencies.to_offset, freq
    for _ in range(4):  # "A" has become "Y", and this "YE"; "1H30T" has two old names
        try:
            to_offset(proposed)
        except (ValueError, TypeError) as error:
            found = RENAMED.search(str(error))
        else:
            return f" (pandas now says {proposed!r})"
        if found is None:
            return ""
        old, new = found[1] or found[3], found[2] or found[4]
        proposed = re.sub(rf"(?<![A-Za-z]){re.escape(old)}(?![A-Za-z])", new, proposed)
    return ""


# More than 12 branches: each family of frequencies is tried in turn.
def infer_frequency(
    differences: np.ndarray, times: np.ndarray, integer: bool, first: np.ndarray | None = None
) -> Frequency:
    """Infer the frequency from the most common difference between neighbouring times.

    Parameters
    ----------
    differences : ndarray of int
        Differences between neighbouring times of a series: integers, or nanoseconds.
    times : ndarray of int
        Integers, or local times in nanoseconds.
    first : ndarray of int, optional
        The first time of the series of each of ``times``. Months on any day are inferred with these
        only.

    Raises
    ------
    ValueError
        If no series has two times.
    """
    differences = differences[differences > 0]
    if not len(differences):
        raise ValueError(f"no series has two times to infer freq from; give freq: {WAYS_OUT}")
    values, counts = np.unique(differences, return_counts=True)
    usual = int(values[counts.argmax()])
    if integer:
        return Frequency("integer", usual, text=str(usual))
    clock = times - np.floor_divide(times, DAY) * DAY
    day = np.floor_divide(times, DAY)
    if usual % DAY == 0 and usual // DAY >= 28 and (clock == clock[0]).all():
        months = round(usual / DAY / 30.44)
        if (day == _first_days(_to_months(times))).all():
            return Frequency("months", months, "start", f"{months}MS")
        if (day + 1 == _first_days(_to_months(times) + 1)).all():
            return Frequency("months", months, "end", f"{months}ME")
        same = Frequency("months", months, "same", f"pandas.DateOffset(months={months})")
        if first is not None and same.steps_between(first, times)[1].all():
            return same
    if usual % DAY == 0 or usual in (23 * DAY // 24, 25 * DAY // 24):
        days = max(1, round(usual / DAY))
        weekday = (day + 3) % 7  # 1970 began on a Thursday
        if days == 1 and weekday.max() < 5 and len(np.unique(weekday)) == 5:
            return Frequency("business", 1, text="B")
        return Frequency("days", days * DAY, text=f"{days}D" if days % 7 else f"{days // 7}W")
    for name, size in NANOSECONDS.items():
        if usual % size == 0:
            return Frequency("elapsed", usual, text=f"{usual // size} {name.lower()}s")
    raise DataError(f"times differ by {usual} ns; give freq: {WAYS_OUT}")


def _to_months(times: np.ndarray) -> np.ndarray:
    """Convert times in nanoseconds to months since January 1970."""
    return np.floor_divide(times, DAY).astype("M8[D]").astype("M8[M]").astype(np.int64)


def _first_days(months: np.ndarray) -> np.ndarray:
    """Return the first day of each month, in days since 1970."""
    return np.asarray(months).astype("M8[M]").astype("M8[D]").astype(np.int64)
