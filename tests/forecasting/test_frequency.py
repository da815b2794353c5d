"""Times as numbers of steps: against pandas' own date ranges."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.inputs.frequency import Frequency, infer_frequency, parse_frequency

ALIASES = ["h", "15min", "30s", "D", "3D", "W", "MS", "ME", "2MS", "QS", "QE", "YS", "YE", "B"]


def nanoseconds(times):
    return np.asarray(times.astype("datetime64[ns]").astype(np.int64))


@pytest.mark.parametrize("alias", ALIASES)
def test_steps_are_those_of_date_ranges_over_leap_years(alias):
    times = nanoseconds(
        pd.date_range("2019-01-31" if alias.endswith("E") else "2018-12-30", periods=70, freq=alias)
    )
    freq = parse_frequency(alias, integer=False, polars=False)
    first = np.full(70, times[0])
    steps, whole = freq.steps_between(first, times)
    assert whole.all()
    assert steps.tolist() == list(range(70))
    np.testing.assert_array_equal(freq.add_steps(first, np.arange(70)), times)
    off = freq.steps_between(first[1:], times[1:] + 7_000_000_000)[1]
    assert not off.any()


@pytest.mark.parametrize("alias", ["h", "D", "W", "MS", "ME", "QS", "B", "15min"])
def test_what_is_inferred_is_what_it_was(alias):
    times = nanoseconds(pd.date_range("2023-06-30", periods=80, freq=alias))
    kept = np.delete(times, [5, 6, 30])
    found = infer_frequency(np.diff(kept), kept, integer=False)
    expected = parse_frequency(alias, integer=False, polars=False)
    assert (found.kind, found.size, found.at) == (expected.kind, expected.size, expected.at)


@pytest.mark.parametrize(
    ("freq", "same"),
    [
        ("1h", "h"),
        ("15m", "15min"),
        ("1d", "D"),
        ("2w", "2W"),
        ("1mo", "MS"),
        ("1q", "QS"),
        ("1y", "YS"),
    ],
)
def test_frequencies_as_polars_says_them(freq, same):
    a, b = (
        parse_frequency(freq, integer=False, polars=True),
        parse_frequency(same, integer=False, polars=False),
    )
    assert (a.kind, a.size, a.at) == (b.kind, b.size, b.at)


def test_a_day_of_the_month_that_is_missing_is_its_last():
    freq = parse_frequency(pd.DateOffset(months=1), integer=False, polars=False)
    first = nanoseconds(pd.DatetimeIndex(["2024-01-31"]))
    found = (
        freq.add_steps(np.repeat(first, 4), np.arange(4))
        .astype("M8[ns]")
        .astype("M8[D]")
        .astype(str)
    )
    assert found.tolist() == ["2024-01-31", "2024-02-29", "2024-03-31", "2024-04-30"]


def test_integers_have_the_usual_difference():
    assert infer_frequency(np.array([5, 5, 10, 5]), np.arange(4), integer=True) == Frequency(
        "integer", 5, text="5"
    )


@pytest.mark.parametrize(
    ("freq", "integer", "message"),
    [
        (
            "D",
            True,
            r"freq='D', .*integers; .*such as 1",
        ),
        (1, False, r"freq=1, .*dates; .*alias of pandas"),
        (0, True, "freq must be a positive integer, got 0"),
        (
            "fortnight",
            False,
            r"freq='fortnight' .*integer .*alias",
        ),
        ("WOM-2TUE", False, r"freq='WOM-2TUE' .*give an integer"),
    ],
)
def test_what_is_no_frequency_is_refused(freq, integer, message):
    with pytest.raises(ValueError, match=message):
        parse_frequency(freq, integer=integer, polars=False)


def test_single_times_tell_no_frequency():
    with pytest.raises(ValueError, match=r"no series .*two times .*freq"):
        infer_frequency(np.array([], int), np.array([1]), integer=False)
