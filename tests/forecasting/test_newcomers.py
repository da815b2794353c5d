"""A newcomer's first tries: short series, arrays and columns that are not as expected."""

import math
from copy import deepcopy
from statistics import NormalDist

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.feature_choice import usual_wander
from fluxutils_py.forecasting.forecaster_settings import quantile_column

H = 5
SEASON = 4
LEVELS = (0.1, 0.5, 0.9)


def frame(name, y, begin="2024-01-01"):
    return pd.DataFrame(
        {"unique_id": name, "ds": pd.date_range(begin, periods=len(y), freq="D"), "y": y}
    )


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    t = np.arange(40)
    y = 50 + 10 * np.sin(2 * np.pi * t / SEASON) + rng.normal(size=40)
    df = frame("a", y)
    fc = Forecaster(
        H,
        season_length=SEASON,
        quantiles=LEVELS,
        hidden_size=4,
        n_models=1,
        max_steps=2,
        calibrate=False,
        network="recurrent",
        random_state=0,
    ).fit(df)
    return fc, y


def width(rows):
    return np.log(rows["Forecaster-hi-80"] / rows["Forecaster-lo-80"]).to_numpy()


@pytest.mark.parametrize("n", [1, 3, SEASON])
@pytest.mark.parametrize("constant", [True, False])
def test_quantiles_of_a_short_series_are_as_wide_as_the_others_vary(fitted, n, constant):
    fc, y = fitted
    new = frame("new", 3 * (y[:1].repeat(n) if constant else y[:n]), "2024-02-10")
    with pytest.warns(UserWarning, match=f"1 of 1 series .* season of {SEASON} .*'new' has {n}"):
        updated = deepcopy(fc).update(new)
    both = updated.predict()
    found = both[both.unique_id == "new"]
    z = np.log(y)
    least = []
    for k in range(1, H + 1):
        # what is known a season before errs by a change of a season, else the last value by its own
        back = SEASON if n - 1 + k - SEASON * math.ceil(k / SEASON) >= 0 else k
        least.append(np.mean([abs(z[i + back] - z[i]) for i in range(len(z) - back)]))
    least = 2 * NormalDist().inv_cdf(0.9) * math.sqrt(math.pi / 2) * np.array(least)
    assert (width(found) >= least * (1 - 1e-12)).all()
    if constant:  # the network has nothing of its own to say
        np.testing.assert_allclose(width(found), least, rtol=1e-3)
    levels = found[[quantile_column(q) for q in LEVELS]].to_numpy()
    assert (np.diff(levels, axis=1) >= 0).all()
    # as from the whole series
    with pytest.warns(UserWarning, match=f"'new' has {n}"):
        alone = fc.predict(new)
    np.testing.assert_allclose(alone.iloc[:, 2:], found.iloc[:, 2:], rtol=1e-6)
    # the series of fit is forecast as before
    pd.testing.assert_frame_equal(both[both.unique_id == "a"], fc.predict())


def test_a_longer_series_keeps_its_own_width(fitted):
    fc, _ = fitted
    always = fc.predict(frame("always", np.full(3 * SEASON, 7.0)))
    assert (width(always) < 1e-4).all()


def test_a_file_keeps_how_far_series_go(fitted, tmp_path):
    fc, _ = fitted
    fc.save(tmp_path / "fc.pt")
    assert Forecaster.load(tmp_path / "fc.pt").features_ == fc.features_


def test_usual_changes_are_those_of_a_plain_loop(rng):
    z = rng.normal(size=(7, 9)).cumsum(1)
    z[0] = 4.0  # has no say
    z[1, 3:5] = np.nan
    z[2, :7] = np.nan
    wander = usual_wander(z, 11)
    for k in range(1, 9):
        means = []
        for row in z[1:]:
            changes = [abs(row[i + k] - row[i]) for i in range(9 - k)]
            changes = [c for c in changes if c == c]
            means += [np.mean(changes)] if changes else []
        assert wander[k - 1] == pytest.approx(np.median(means))
    assert wander[8:] == (wander[7],) * 3
    assert usual_wander(z[:1], 2) == (0.0, 0.0)


def test_what_is_no_panel_is_refused_with_the_way_to_one():
    fc = Forecaster(H, max_steps=2)
    y = np.arange(9.0)
    with pytest.raises(DataError, match=r"none of 9 .*transpose\(2, 1, 0\)"):
        fc.fit(y[:, None, None])
    series = pd.Series(y, pd.date_range("2024-01-01", periods=9))
    with pytest.raises(DataError, match=r"Series.*unique_id, ds, load, or an array"):
        fc.fit(series, target_col="load")
    with pytest.raises(DataError, match=r"Series.*unique_id, ds, load, or an array"):
        fc.fit(pl.Series(y), target_col="load")
