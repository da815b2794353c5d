"""Positions in the day, the week and the year, as covariates that are known ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fluxutils_py.errors import DataError, warn
from fluxutils_py.frames.frames import to_local
from fluxutils_py.frames.frequency import DAY, Frequency
from fluxutils_py.frames.panel import Panel

PREFIX = "calendar_"
WAVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"sin": np.sin, "cos": np.cos}
LEAST_YEARS = 2  # of a series from which positions in the year are learnt


def _hour(times: np.ndarray) -> np.ndarray:
    return times % DAY / DAY  # with minutes and seconds


def _day_of_week(times: np.ndarray) -> np.ndarray:
    return (_days(times) + 3) % 7 / 7  # 1970 began on a Thursday


def _day_of_month(times: np.ndarray) -> np.ndarray:
    days = times.astype("M8[ns]").astype("M8[D]")
    return (days - days.astype("M8[M]")).astype(int) / 31


def _week_of_year(times: np.ndarray) -> np.ndarray:
    # by ISO 8601: a week is of the year of its Thursday
    days = _days(times)
    thursday = (days - (days + 3) % 7 + 3).astype("M8[D]")
    day_of_year = (thursday - thursday.astype("M8[Y]")).astype(int)
    return day_of_year // 7 / 53


def _month(times: np.ndarray) -> np.ndarray:
    return times.astype("M8[ns]").astype("M8[M]").astype(int) % 12 / 12


def _days(times: np.ndarray) -> np.ndarray:
    return np.floor_divide(times, DAY)


# each maps local times in nanoseconds to the share of a cycle that has passed
FIELDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "hour": _hour,
    "dayofweek": _day_of_week,
    "dayofmonth": _day_of_month,
    "weekofyear": _week_of_year,
    "month": _month,
}


def calendar_names(calendar: str | Sequence[str], panel: Panel | None) -> list[str]:
    """Return the names of the covariates for ``Forecaster(calendar=...)``: a sine and a cosine of
    each field.

    Raises
    ------
    DataError
        If times are integers, or there are none.
    """
    if not len(calendar):
        return []
    if panel is None or panel.frequency.kind == "integer":
        held = "an array (F, N, T) has no times" if panel is None else "the times are integers"
        raise DataError(
            f"calendar={calendar!r} needs dates, and {held}: give dates, or leave calendar out and "
            "give columns of your own in futr_exog_list"
        )
    fields = usual_fields(panel) if isinstance(calendar, str) else list(calendar)
    names = [f"{PREFIX}{field}_{wave}" for field in fields for wave in WAVES]
    for field, name in zip(fields, names[::2], strict=True):
        if not isinstance(calendar, str) and not np.ptp(calendar_channel(panel, name)):
            warn(
                f"calendar names {field!r}, which is the same at all times of "
                f"freq={panel.frequency.text!r}: nothing can be learnt from it"
            )
    return names


def usual_fields(panel: Panel) -> list[str]:
    """Return the fields for the frequency of a panel; those of the year only if a series has two
    years.
    """
    frequency = panel.frequency
    fields = []
    is_within_day = frequency.kind == "elapsed" and frequency.size < DAY
    if is_within_day or (frequency.kind == "grid" and frequency.times_per_day > 1):
        fields.append("hour")
    if _is_daily_or_less(frequency):
        fields.append("dayofweek")
    longest = np.arange(panel.n_series), panel.lengths - 1
    spans = _local_times(panel, *longest) - _local_times(panel, longest[0], 0 * longest[1])
    if spans.max(initial=0) >= (365 * LEAST_YEARS - 31) * DAY:
        fields.append("month" if frequency.kind == "months" else "weekofyear")
    return fields


def _is_daily_or_less(frequency: Frequency) -> bool:
    if frequency.kind == "business":
        return frequency.size == 1
    if frequency.kind == "grid":
        return int(np.median(np.diff(frequency.grid))) <= DAY
    return frequency.kind in ("elapsed", "days") and frequency.size <= DAY


def calendar_channel(panel: Panel, name: str) -> np.ndarray:
    """Return the covariate of this name at all steps of a panel, (total,)."""
    series = np.repeat(np.arange(panel.n_series), panel.lengths)
    steps = np.arange(len(series)) - panel.offsets[series]
    return calendar_values(panel, series, steps, name)


def calendar_values(
    panel: Panel,
    series: np.ndarray,
    steps: np.ndarray,
    name: str,
) -> np.ndarray:
    """Return the covariate of this name at steps of series, also after their ends."""
    field, _, wave = name.removeprefix(PREFIX).rpartition("_")
    share = FIELDS[field](_local_times(panel, series, steps))
    return WAVES[wave](2 * np.pi * share)


def _local_times(panel: Panel, series: np.ndarray, steps: np.ndarray) -> np.ndarray:
    times = panel.frequency.add_steps(panel.first[series], steps)
    return times if panel.frequency.is_local else to_local(times, panel.zone)
