"""Times as numbers of steps: against pandas' own date ranges."""

import warnings

import numpy as np
import pandas as pd
import pytest

from fluxutils_py import from_frame
from fluxutils_py.frames.frequency import DAY, Frequency, infer_frequency, parse_frequency

ALIASES = [
    "h",
    "15min",
    "30s",
    "D",
    "3D",
    "W",
    "MS",
    "ME",
    "2MS",
    "QS",
    "QE",
    "YS",
    "YE",
    "B",
]


def nanoseconds(times):
    if times.tz is not None:
        times = times.tz_convert("UTC").tz_localize(None)
    return np.asarray(times.astype("datetime64[ns]").astype(np.int64))


@pytest.mark.parametrize("alias", ALIASES)
def test_steps_are_those_of_date_ranges_over_leap_years(alias):
    times = nanoseconds(
        pd.date_range("2019-01-31" if alias.endswith("E") else "2018-12-30", periods=70, freq=alias)
    )
    freq = parse_frequency(alias, integer=False)
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
    found = infer_frequency(kept, kept, np.zeros(77, int))
    expected = parse_frequency(alias, integer=False)
    assert (found.kind, found.size, found.at) == (expected.kind, expected.size, expected.at)


def test_a_day_of_the_month_that_is_missing_is_its_last():
    freq = Frequency("months", 1, "same")
    first = nanoseconds(pd.DatetimeIndex(["2024-01-31"]))
    found = (
        freq.add_steps(np.repeat(first, 4), np.arange(4))
        .astype("M8[ns]")
        .astype("M8[D]")
        .astype(str)
    )
    assert found.tolist() == ["2024-01-31", "2024-02-29", "2024-03-31", "2024-04-30"]


OFTEN = ["B", "D", "3D", "W-WED", "2W-SUN", "MS", "ME", "2MS", "QS", "QE-FEB"]
OFTEN += ["YS", "YE-JUN", "h", "6h", "15min"]


@pytest.mark.few
@pytest.mark.parametrize("alias", OFTEN)
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_what_pandas_infers_is_inferred(alias, zone, rng):
    """From any first time on, of few rows and many, across changes of clocks too."""
    fewest = 7 if alias == "B" else 3  # all days of a week
    for _ in range(8):
        start = pd.Timestamp("2023-10-20") + pd.Timedelta(days=int(rng.integers(400)))
        times = pd.date_range(start, periods=int(rng.integers(fewest, 30)), freq=alias, tz=zone)
        local = nanoseconds(times.tz_localize(None))
        mixed = rng.permutation(len(times))
        found = infer_frequency(nanoseconds(times)[mixed], local[mixed], np.zeros(len(times), int))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it will return an offset
            answer = pd.infer_freq(times)
        assert answer is not None
        more = pd.date_range(times[0], periods=len(times) + 9, freq=answer)
        first = np.full(len(more), (local if found.is_local else nanoseconds(times))[0])
        steps = found.add_steps(first, np.arange(len(more)))
        expected = more.tz_localize(None) if found.is_local else more
        np.testing.assert_array_equal(steps, nanoseconds(expected), err_msg=f"{times}")


@pytest.mark.parametrize(
    ("rows", "kind", "size"),
    [
        (["2024-03-01", "2024-04-01"], "months", 1),  # 743 hours
        (["2024-02-29", "2024-03-31"], "months", 1),
        (["2024-03-30 12:00", "2024-04-01 12:00"], "days", 2 * DAY),
        (["2024-03-30", "2024-04-06"], "days", 7 * DAY),
        (["2024-03-31 01:00", "2024-03-31 03:00"], "elapsed", DAY // 24),
        (["2024-03-25", "2024-03-26", "2024-03-27", "2024-03-28", "2024-03-29"], "days", DAY),
    ],
)
def test_few_times_across_a_change_of_clocks(rows, kind, size):
    times = pd.DatetimeIndex(rows).tz_localize("Europe/Berlin")
    found = from_frame(pd.DataFrame({"at": times, "v": 1.0}), time_col="at", x="v")
    assert (found.panel.frequency.kind, found.panel.frequency.size) == (kind, size)
    assert found.x.shape == (1, 1, len(rows))


def test_weeks_of_series_that_each_have_one_are_no_business_days():
    weeks = [pd.date_range(monday, periods=5) for monday in ("2024-01-01", "2024-01-15")]
    df = pd.DataFrame({"id": np.repeat([0, 1], 5), "at": weeks[0].append(weeks[1]), "v": 1.0})
    kinds = [from_frame(df, i, "at", x="v").panel.frequency.kind for i in ("id", None)]
    assert kinds == ["days", "business"]


def test_integers_have_the_usual_difference():
    times = np.array([0, 5, 15, 20, 25])
    expected = Frequency("integer", 5, text="5")
    assert infer_frequency(times, None, np.zeros(5, int)) == expected


@pytest.mark.parametrize(
    ("freq", "integer", "message"),
    [
        (
            "D",
            True,
            r"freq='D', .*integers; .*integer for integer times",
        ),
        (1, False, r"freq=1, .*dates; .*alias of pandas"),
        (0, True, "freq must be a positive integer, got 0"),
        (
            "fortnight",
            False,
            r"freq='fortnight' .*integer .*alias",
        ),
        ("WOM-2TUE", False, r"freq='WOM-2TUE' .*give an integer.*number the times"),
        ("bh", False, r"freq='bh' is not supported"),
        ("1mo", False, r"freq='1mo' is no frequency; .*'MS'"),
        pytest.param(
            "M",
            False,
            r"freq='M' is no frequency; .*'ME'",
            marks=pytest.mark.skipif(pd.__version__ < "3", reason="pandas takes it as 'ME'"),
        ),
        (pd.DateOffset(months=1), False, "not supported"),
    ],
)
def test_what_is_no_frequency_is_refused(freq, integer, message):
    with pytest.raises(ValueError, match=message):
        parse_frequency(freq, integer=integer)


def test_single_times_tell_no_frequency():
    with pytest.raises(ValueError, match=r"no series .*two times .*freq"):
        infer_frequency(np.array([1]), np.array([1]), np.array([0]))
