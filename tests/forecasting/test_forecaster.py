"""The forecaster as a whole: against a loop in plain NumPy and torch, and against itself on changed
data.
"""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch import nn

from fluxutils_py import h5mmap, h5save
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.nn import GRU

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")


def on_grid(df, freq="D"):
    """Each series from its first to its last time, NaN where there is no row."""
    found = {}
    for name, part in df.groupby("unique_id"):
        y = part.set_index("ds").y.sort_index()
        found[name] = y.reindex(pd.date_range(y.index[0], y.index[-1], freq=freq)).to_numpy()
    return found


def column(fc, df):
    return df.sort_values(["unique_id", "ds"]).Forecaster.to_numpy().reshape(-1, fc.h)


@pytest.mark.slow
@pytest.mark.parametrize(("h", "lag"), [(3, None), (5, 14), (9, 7), (16, 14)])
def test_forecasts_equal_a_naive_loop(panel, small, oracle, h, lag):
    season = (7,) if lag is None else (7, lag)
    fc = Forecaster(h, season, **small).fit(panel)
    assert not fc.features_.log
    out = fc.predict()
    for name, y in on_grid(panel).items():
        expected = oracle.forecast(y, fc.features_, fc.models_[0])
        found = out[out.unique_id == name]
        np.testing.assert_allclose(
            found.Forecaster, expected, rtol=2e-5, atol=2e-6 * fc.features_.unit, err_msg=name
        )
        last = panel[panel.unique_id == name].ds.max()
        assert (found.ds == pd.date_range(last, periods=h + 1, freq="D")[1:]).all()


@pytest.mark.slow
def test_forecasts_of_logarithms_equal_a_naive_loop(small, oracle, make_panel):
    df = make_panel(("wave", "constant", "large"))
    df = df[~df.y.le(0)]
    fc = Forecaster(4, **small).fit(df)
    assert fc.features_.log
    out = fc.predict()
    for name, y in on_grid(df).items():
        expected = oracle.forecast(y, fc.features_, fc.models_[0])
        np.testing.assert_allclose(
            out[out.unique_id == name].Forecaster, expected, rtol=2e-5, err_msg=name
        )


@pytest.mark.parametrize("kinds", [("wave",), ("zero", "negative", "large")])
def test_the_transform_is_the_logarithm_only_of_positive_values(make_panel, small, kinds):
    assert Forecaster(2, **small).fit(make_panel(kinds)).features_.log == (kinds == ("wave",))


@pytest.mark.slow
@pytest.mark.parametrize("cutoff", [9, 20, 44])
def test_nothing_of_the_future_leaks(panel, small, cutoff):
    fc = Forecaster(5, quantiles=(0.2, 0.8), **small).fit(panel)
    times = pd.date_range("2024-02-01", periods=61, freq="D")
    past = panel[panel.ds <= times[cutoff]]
    changed = panel.copy()
    later = changed.ds > times[cutoff]
    changed.loc[later, "y"] = np.random.default_rng(1).normal(size=later.sum()) * 1e3
    expected = fc.predict(past)
    found = fc.predict(changed[changed.ds <= times[cutoff]])
    pd.testing.assert_frame_equal(found, expected)
    before, after = (fc._fitted.windows(fc._read_known(df, None)) for df in (panel, changed))
    n, length = before.n_series, int(before.source.lengths.max())
    segments = make_segments(n, length)
    first = fc._read_known(panel, None).first
    last_known = ((times[cutoff].value - first) // (24 * 3600 * 10**9)).astype(int)
    known = np.arange(length) <= last_known[:, None]
    a, b = (w.inputs(segments, 0, length) for w in (before, after))
    np.testing.assert_array_equal(a[known], b[known])
    assert not (a[~known] == b[~known]).all()


def make_segments(n, length):
    return Segments(np.arange(n), np.zeros(n, int), np.full(n, length))


@pytest.mark.slow
def test_training_sees_nothing_behind_the_end_of_a_truncated_panel(panel, small):
    """A forecaster of the past alone is what it is, whatever happens later."""
    cutoff = pd.Timestamp("2024-03-10")
    past = panel[panel.ds <= cutoff]
    a, b = (Forecaster(3, **small).fit(past.sample(frac=1, random_state=s)) for s in (0, 1))
    pd.testing.assert_frame_equal(a.predict(), b.predict())


@pytest.mark.slow
def test_quantiles_never_cross_and_have_columns_in_order(panel, small):
    fc = Forecaster(5, quantiles=(0.9, 0.1, 0.5), **{**small, "max_steps": 30, "n_models": 2}).fit(
        panel
    )
    out = fc.predict()
    assert list(out.columns) == [
        "unique_id",
        "ds",
        *(f"Forecaster{q}" for q in ("", "-lo-80", "-median", "-hi-80")),
    ]
    assert (out["Forecaster-lo-80"] <= out["Forecaster-median"]).all()
    assert (out["Forecaster-median"] <= out["Forecaster-hi-80"]).all()


@pytest.mark.slow
def test_several_models_are_the_mean_of_each_in_the_units_of_the_transform(make_panel, small):
    fc = Forecaster(3, **{**small, "n_models": 3}).fit(make_panel(("wave",)))
    each = []
    for i in range(3):
        one = clone(fc).set_params(n_models=1).fit(make_panel(("wave",)))
        one.state_ = replace(one.state_, models=fc.models_[i : i + 1])
        one.history_.states = [fc.history_.states[i]]
        each.append(np.log(column(one, one.predict())))
    assert np.ptp(each, 0).max() > 1e-3
    np.testing.assert_allclose(np.log(column(fc, fc.predict())), np.mean(each, 0), rtol=1e-6)


@pytest.mark.slow
def test_polars_frames_come_back_as_polars(panel, small, to_polars):
    found = Forecaster(4, **small).fit(to_polars(panel)).predict()
    expected = Forecaster(4, **small).fit(panel).predict()
    assert isinstance(found, pl.DataFrame)
    assert found.schema["ds"] == to_polars(panel).schema["ds"]
    pd.testing.assert_frame_equal(
        pd.DataFrame(found.to_dict(as_series=False)), expected, check_dtype=False
    )


@pytest.mark.few
@pytest.mark.parametrize(
    ("times", "freq", "following"),
    [
        (
            pd.date_range("2023-11-30", periods=40, freq="ME"),
            "ME",
            pd.date_range("2027-03-31", periods=3, freq="ME"),
        ),
        (
            pd.date_range("2020-01-01", periods=40, freq="MS"),
            None,
            pd.date_range("2023-05-01", periods=3, freq="MS"),
        ),
        (
            pd.date_range("2024-02-26", periods=40, freq="B"),
            "B",
            pd.date_range("2024-04-22", periods=3, freq="B"),
        ),
        (np.arange(7, 7 + 3 * 40, 3), 3, np.array([127, 130, 133])),
        (pd.date_range("2024-03-30", periods=40, freq="h", tz="Europe/Berlin"), None, None),
        (pd.date_range("2024-10-01", periods=40, freq="D", tz="Europe/Berlin"), "D", None),
        (pd.date_range("2024-01-31", periods=40, freq="D", tz="America/New_York"), None, None),
    ],
)
def test_times_go_on_by_the_calendar(times, freq, following, small, oracle):
    y = np.cos(np.arange(40.0))
    df = pd.DataFrame({"unique_id": "a", "ds": times, "y": y})
    fc = Forecaster(3, season_length=4, freq=freq, **small).fit(df.drop(index=[11, 12]))
    if following is None:
        following = pd.date_range(times[-1], periods=4, freq=times.freq)[1:]
    out = fc.predict()
    assert (out.ds == following).all()
    assert out.ds.dtype == df.ds.dtype
    y[[11, 12]] = np.nan
    expected = oracle.forecast(y, fc.features_, fc.models_[0])
    np.testing.assert_allclose(out.Forecaster, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_update_equals_a_new_predict(panel, small):
    fc = Forecaster(4, quantiles=(0.5,), **small).fit(panel[panel.ds <= "2024-03-01"])
    expected = fc.predict(panel)
    for begin, end in (
        ("2024-03-01", "2024-03-02"),
        ("2024-03-02", "2024-03-20"),
        ("2024-03-20", "2024-05-01"),
    ):
        fc.update(panel[(panel.ds > begin) & (panel.ds <= end)])
    both = fc.predict().merge(expected, on=["unique_id", "ds"], validate="1:1")
    assert len(both) == len(expected)
    np.testing.assert_allclose(
        both["Forecaster_x"], both["Forecaster_y"], rtol=1e-5, atol=1e-5 * fc.features_.unit
    )


@pytest.mark.slow
def test_update_refuses_rows_that_are_known(panel, small):
    fc = Forecaster(4, **small).fit(panel)
    known = panel[panel.unique_id == "wave-60"]
    expected = fc.predict()
    with pytest.raises(DataError, match=r"'wave-60' .*'ds'.*known until"):
        fc.update(known)
    pd.testing.assert_frame_equal(fc.predict(), expected)


def covariate_panel(rng, n=50, n_series=5):
    df = pd.DataFrame(
        {
            "unique_id": np.repeat([f"s{i}" for i in range(n_series)], n),
            "ds": np.tile(np.arange(n), n_series),
        }
    )
    df["promo"] = rng.integers(0, 2, len(df))
    df["price"] = rng.normal(size=len(df))
    df["weather"] = rng.choice(["dry", "wet"], len(df))
    df["town"] = df.unique_id.map({f"s{i}": ["x", "y", "z"][i % 3] for i in range(n_series)})
    df["size"] = df.unique_id.map({f"s{i}": float(i) for i in range(n_series)})
    df["y"] = 10 + df["size"] + 3 * df.promo + rng.normal(size=len(df)) * 0.1
    return df


EXOG = {
    "hist_exog_list": ["price", "weather"],
    "futr_exog_list": ["promo"],
    "stat_exog_list": ["town", "size"],
}


@pytest.mark.slow
def test_covariates_known_ahead_are_learnt(rng, small):
    numbers = covariate_panel(rng, 60)
    settings = {**small, "max_steps": 150, "lr": 1e-2}

    def error(df, exog):
        past, future = df[df.ds < 50], df[(df.ds >= 50) & (df.ds < 56)]
        fc = Forecaster(6, freq=1, season_length=1, **exog, **settings).fit(past)
        out = fc.predict(futr_df=future[["unique_id", "ds", "promo"]] if exog else None)
        out = out.merge(future, on=["unique_id", "ds"])
        return np.abs(out.Forecaster - out.y).mean()

    plain = error(numbers, {})
    assert error(numbers, EXOG) < 0.6 * plain
    categories = numbers.assign(promo=numbers.promo.map({0: "no", 1: "yes"}))
    assert error(categories, EXOG) < 0.6 * plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["promo", "weather", "town"])
def test_categories_that_training_did_not_see_have_the_code_zero(rng, small, name):
    """Known ahead, past or static: the embedding of code 0 is zero, and a warning names the column."""
    df = covariate_panel(rng).assign(promo=lambda d: d.promo.map({0: "no", 1: "yes"}))
    fc = Forecaster(4, freq=1, **EXOG, **{**small, "max_steps": 20}).fit(df)
    futr = fc.make_future_dataframe().assign(promo="no")
    other, seen = df.copy(), futr.copy()
    if name == "promo":
        seen.loc[seen.ds == 51, "promo"] = "never seen"
    else:
        other[name] = "never seen"
    said = f"'{name}' has categories .*'never seen'"
    with pytest.warns(UserWarning, match=said):
        found = fc.predict(other, futr_df=seen)
    expected = fc.predict(df, futr_df=futr)
    same = np.isclose(found.Forecaster, expected.Forecaster, rtol=1e-9).reshape(-1, 4).all(0)
    assert same.tolist() == ([True, False, True, True] if name == "promo" else [False] * 4)
    table = fc.models_[0].embeddings[["weather", "town", "promo"].index(name)]
    assert not table.weight[0].any()


def test_a_missing_horizon_is_named():
    with pytest.raises(TypeError, match=r"Forecaster\.__init__.*'h'"):
        Forecaster()


@pytest.mark.slow
def test_past_categories_may_be_missing_and_columns_keep_their_kind(rng, small):
    df = covariate_panel(rng)
    whole = Forecaster(4, freq=1, hist_exog_list=["weather"], **small).fit(df)
    gone = df.assign(weather=df.weather.where(df.ds % 7 != 3))
    filled = gone.assign(weather=gone.groupby("unique_id").weather.ffill())
    pd.testing.assert_frame_equal(whole.predict(gone), whole.predict(filled))
    with pytest.raises(DataError, match=r"'weather' holds numbers.* categories"):
        whole.predict(df.assign(weather=1.0))


@pytest.mark.slow
def test_update_and_files_keep_covariates(rng, small, tmp_path):
    df = covariate_panel(rng)
    fc = Forecaster(4, freq=1, quantiles=(0.1, 0.9), **EXOG, **small).fit(df[df.ds < 40])
    futr = pd.concat(
        [
            df[["unique_id", "ds", "promo"]],
            df[df.ds < 4][["unique_id", "ds", "promo"]].assign(ds=lambda d: d.ds + 50),
        ]
    )
    expected = fc.predict(df, futr_df=futr)
    fc.save(tmp_path / "fc.pt")
    again = Forecaster.load(tmp_path / "fc.pt")
    for one in (fc, again):
        one.update(df[df.ds >= 40])
        pd.testing.assert_frame_equal(one.predict(futr_df=futr), expected, rtol=1e-5)


@pytest.mark.slow
def test_what_is_known_ahead_changes_only_the_steps_from_there_on(rng, small):
    df = covariate_panel(rng)
    fc = Forecaster(4, freq=1, **EXOG, **{**small, "max_steps": 20}).fit(df)
    futr = fc.make_future_dataframe().assign(promo=0)
    a = fc.predict(futr_df=futr)
    b = fc.predict(futr_df=futr.assign(promo=lambda d: (d.ds == 52).astype(int)))
    same = (a.Forecaster == b.Forecaster).to_numpy().reshape(-1, 4)
    assert same[:, [0, 1, 3]].all()
    assert not same[:, 2].any()


@pytest.mark.slow
def test_arrays_equal_frames(rng, small):
    x = rng.normal(size=(2, 3, 47)) + 5
    fc = Forecaster(6, season_length=5, quantiles=(0.5,), **small).fit(x)
    out = fc.predict()
    assert {name: y.shape for name, y in out.items()} == {
        "Forecaster": (2, 3, 6),
        "Forecaster-median": (2, 3, 6),
    }
    df = pd.DataFrame(
        {"unique_id": np.repeat(np.arange(6), 47), "ds": np.tile(np.arange(47), 6), "y": x.ravel()}
    )
    expected = Forecaster(6, season_length=5, quantiles=(0.5,), **small).fit(df).predict()
    np.testing.assert_allclose(out["Forecaster"].ravel(), expected.Forecaster, rtol=1e-6)
    part = Forecaster(6, season_length=5, quantiles=(0.5,), **small).fit(x[:, :, :40])
    np.testing.assert_allclose(
        part.update(x[:, :, 40:]).predict()["Forecaster"], part.predict(x)["Forecaster"], rtol=1e-5
    )


@pytest.mark.slow
def test_maps_equal_arrays_in_memory(rng, small, tmp_path):
    x = (rng.normal(size=(1, 9, 50)) + 9).astype("float32")
    h5save(tmp_path / "x.h5", {"x": x})
    # all series in each window, in whatever order
    settings = {
        **small,
        "batchsize": 9,
    }
    found = Forecaster(3, season_length=7, **settings).fit(h5mmap(tmp_path / "x.h5", "x")).predict()
    expected = Forecaster(3, season_length=7, **settings).fit(x).predict()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["smape", "mae", "mse", nn.HuberLoss()])
@pytest.mark.parametrize("transform", ["log", "none"])
def test_every_loss_trains(make_panel, small, loss, transform):
    settings = {**small, "max_steps": 12}
    if (loss, transform) == ("smape", "none"):
        with pytest.raises(SpecError, match=r"'smape' .*logarithms.*loss='mae'"):
            Forecaster(3, loss=loss, transform=transform, **small).fit(make_panel(("wave",)))
        return
    fc = Forecaster(3, loss=loss, transform=transform, **settings).fit(make_panel(("wave",)))
    assert fc.loss_curve_[-1] < fc.loss_curve_[0]
    assert np.isfinite(fc.predict().Forecaster).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [
        "gru",
        lambda n_in, n_out: GRU(n_in, n_out, 2),
        lambda n_in, n_out: nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out)),
    ],
)
def test_layers_and_networks_of_ones_own(panel, small, network):
    fc = Forecaster(3, **{**small, "network": network}).fit(panel)
    assert fc.network_ == "recurrent"
    pd.testing.assert_frame_equal(fc.predict(), fc.predict(panel))


@pytest.mark.filterwarnings("ignore:.*no series has a later one")
def test_series_without_any_recent_value_have_no_forecast_and_are_named(small):
    y = np.r_[np.arange(20.0), np.full(200, np.nan)]
    df = pd.DataFrame({"unique_id": "a", "ds": np.arange(220), "y": y})
    df = pd.concat(
        [df, pd.DataFrame({"unique_id": "b", "ds": np.arange(30), "y": np.arange(30.0)})]
    )
    fc = Forecaster(3, **small).fit(df)
    with pytest.warns(UserWarning, match=r"1 series .*last 128 steps .*'a'"):
        out = fc.predict()
    assert out.Forecaster.isna().tolist() == [True] * 3 + [False] * 3


@pytest.mark.slow
def test_a_failed_fit_leaves_the_earlier_one(panel, small):
    fc = Forecaster(3, freq="D", **small).fit(panel)
    expected = fc.predict()
    with pytest.raises(DataError, match=r"none of \d+ series has two steps"):
        fc.fit(panel.groupby("unique_id").head(1))
    pd.testing.assert_frame_equal(fc.predict(), expected)


def test_clone_and_set_params_keep_the_arguments(small):
    fc = Forecaster(3, 7, quantiles=[0.5], **small)
    assert clone(fc).get_params() == fc.get_params()
    assert fc.set_params(lr=1e-3).lr == 1e-3
    with pytest.raises(NotFittedError):
        fc.predict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"h": 0}, r"^h .*positive integer, got 0"),
        ({"season_length": 1.5}, r"season_length .*integer or None, got 1\.5"),
        (
            {"quantiles": (0.1, 1.0)},
            r"quantiles .*0 and 1, got \(0\.1, 1\.0\)",
        ),
        ({"transform": "sqrt"}, r"transform .*'log' or 'none', got 'sqrt'"),
        (
            {"loss": "rmse"},
            r"loss .*'smape', 'mae', .* got 'rmse'",
        ),
        ({"network": "lstmm"}, r"network .*'recurrent', .*'gru', .* got 'lstmm'"),
        ({"futr_exog_list": "promo"}, r"futr_exog_list .*list .* got 'promo'"),
        ({"quantiles": 0.5}, r"quantiles .*list .* got 0\.5"),
        ({"hist_exog_list": None}, r"hist_exog_list .*list .* got None"),
        ({"season_length": (7, 10)}, r"season_length .*multiple .*season of 7 .* got 10"),
        ({"season_length": (7, 14, 28)}, r"season_length .*got \(7, 14, 28\)"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(panel, small, settings, message):
    with pytest.raises(SpecError, match=message):
        Forecaster(**{"h": 3, **small, **settings}).fit(panel)


@pytest.mark.slow
def test_data_of_another_kind_are_refused(panel, small, rng):
    fc = Forecaster(3, **small).fit(panel)
    with pytest.raises(DataError, match=r"df is an array, .*fitted on a data frame"):
        fc.predict(rng.normal(size=(1, 2, 9)))
    with pytest.raises(DataError, match=r"df is a int, .* h of the constructor"):
        fc.predict(12)
    with pytest.raises(DataError, match=r"futr_df .*futr_exog_list .*no cov"):
        fc.predict(futr_df=panel)
    fc = Forecaster(3, **small).fit(rng.normal(size=(1, 2, 30)))
    with pytest.raises(DataError, match=r"df is a data frame, .*fitted on an array"):
        fc.predict(panel)
    with pytest.raises(ShapeError, match=r"df .*\(1, 3, 4\).*\(F, N, T\).*\(1, 2\)"):
        fc.update(rng.normal(size=(1, 3, 4)))


def test_series_shorter_than_a_season_are_named(small, make_panel):
    with pytest.warns(UserWarning, match=r"2 of 6 .*season of 7 .*'wave-1' has 1"):
        Forecaster(3, **small).fit(make_panel(("wave",)))


@pytest.mark.slow
def test_steps_that_no_series_is_long_enough_for_are_the_season_before(small, rng):
    df = pd.DataFrame(
        {"unique_id": ["a"] * 9 + ["b"] * 6, "ds": [*range(9), *range(6)], "y": rng.normal(size=15)}
    )
    with pytest.warns(
        UserWarning,
        match=r"horizon of 12 .*has 9\).* 9 or more",
    ):
        fc = Forecaster(12, 3, 1, **{**small, "max_steps": 20}).fit(df)
    out = fc.predict()
    for name, part in df.groupby("unique_id"):
        naive = np.tile(part.y.to_numpy()[-3:], 4)
        same = np.isclose(out[out.unique_id == name].Forecaster, naive, rtol=1e-6)
        assert same.tolist() == [False] * 8 + [True] * 4


@pytest.mark.slow
def test_values_that_have_no_logarithm_are_refused_later(small, make_panel):
    fc = Forecaster(3, **small).fit(make_panel(("wave",)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DataError, match=r"positive when .*transform='none'"):
            fc.predict(make_panel(("zero",)))


def test_a_device_that_is_none_is_refused(make_panel, small):
    with pytest.raises(ValueError, match="device='abacus'"):
        Forecaster(3, device="abacus", **small).fit(make_panel(("wave",)))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["auto", "none"])
def test_the_error_does_not_depend_on_the_level(transform):
    t, rng = np.arange(240), np.random.default_rng(0)
    wave = np.sin(2 * np.pi * t / 12 + np.arange(8)[:, None]) + 0.1 * rng.normal(size=(8, 240))
    fc = Forecaster(
        12, 12, transform=transform, random_state=0, verbose=False, max_steps=60, n_models=1
    )

    def error(level):
        y = wave + level
        return np.abs(fc.fit(y[None, :, :-12]).predict() - y[:, -12:]).mean()

    errors = [error(level) for level in (1e2, 1e4, 1e6, 1e9)]
    np.testing.assert_allclose(errors, errors[0], rtol=0.05)
    assert max(errors) < 0.95 * np.abs(wave[:, -12:] - wave[:, -24:-12]).mean()
