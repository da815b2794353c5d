"""Walking forward: against fits and predictions by hand."""

import numpy as np
import optuna
import pandas as pd
import pytest
from sklearn.model_selection import GridSearchCV
from utilsforecast.evaluation import evaluate
from utilsforecast.losses import coverage, mae, quantile_loss, scaled_crps
from utilsforecast.plotting import plot_series
from utilsforecast.processing import backtest_splits

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*series have no more steps", "ignore:.*too short for the first window"
)


def without_last(df, n):
    last = df.groupby("unique_id").ds.transform("max")
    return df[df.ds <= last - pd.Timedelta(days=n)]


@pytest.mark.slow
@pytest.mark.parametrize("refit", [True, False])
def test_windows_are_forecasts_of_what_was_known(make_panel, small, refit):
    panel = make_panel(missing=False)  # of rows; the cutoff of a series may be one that is missing
    panel.loc[::7, "y"] = np.nan
    fc = Forecaster(3, freq="D", quantiles=(0.5,), **small)
    found = fc.cross_validation(panel, n_windows=2, step_size=2, refit=refit)
    assert list(found.columns) == [
        "unique_id",
        "ds",
        "cutoff",
        "y",
        "Forecaster",
        "Forecaster-median",
    ]
    first = without_last(panel, 5)
    fitted = Forecaster(3, freq="D", quantiles=(0.5,), **small).fit(first)
    for behind in (5, 3):
        past = without_last(panel, behind)
        if refit:
            fitted.fit(past)
        expected = fitted.predict(past)
        last = panel.groupby("unique_id").ds.max() - pd.Timedelta(days=behind)
        expected["cutoff"] = expected.unique_id.map(last)
        both = expected.merge(found, on=["unique_id", "ds", "cutoff"], validate="1:1")
        assert len(both) == len(expected)
        np.testing.assert_allclose(both.Forecaster_x, both.Forecaster_y, rtol=1e-5, atol=1e-6)
        truth = both.merge(panel, on=["unique_id", "ds"], how="left")
        np.testing.assert_array_equal(truth.y_x, truth.y_y)


@pytest.mark.slow
def test_the_forecaster_itself_stays_unfitted(panel, small):
    fc = Forecaster(3, **small)
    fc.cross_validation(panel)
    assert not hasattr(fc, "models_")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_are_those_that_utilsforecast_takes(make_panel, small, to_polars, library):
    df = make_panel(missing=False)
    df = df[df.unique_id.isin(["wave-60", "wave-41", "large-44"])].sort_values(["unique_id", "ds"])
    given = to_polars(df) if library == "polars" else df
    fc = Forecaster(3, freq="D", quantiles=(0.05, 0.1, 0.5, 0.9, 0.95), **small)
    walk = fc.cross_validation(given, n_windows=2, level=[80, 90])
    columns = [f"Forecaster-{side}-{level}" for level in (80, 90) for side in ("lo", "hi")]
    assert list(walk.columns) == ["unique_id", "ds", "cutoff", "y", "Forecaster", *columns]
    whole = walk.drop("cutoff", axis=1) if library == "pandas" else walk.drop("cutoff")
    scores = evaluate(whole, [mae, coverage, scaled_crps], level=[80, 90], agg_fn="mean")
    by_name = dict(zip(scores["metric"], scores["Forecaster"], strict=False))
    rows = walk if library == "pandas" else pd.DataFrame(walk.to_dict(as_series=False))
    np.testing.assert_allclose(by_name["mae"], (rows.y - rows.Forecaster).abs().mean())
    inside = rows.y.between(rows["Forecaster-lo-80"], rows["Forecaster-hi-80"])
    np.testing.assert_allclose(by_name["coverage_level80"], inside.mean())
    levels = fc.cross_validation(given, n_windows=2, quantiles=[0.1, 0.5])
    levels = levels.drop("cutoff", axis=1) if library == "pandas" else levels.drop("cutoff")
    loss = quantile_loss(levels, {"low": "Forecaster-q0.1"}, q=0.1)
    low = rows.y - rows["Forecaster-lo-80"]
    expected = np.maximum(0.1 * low, -0.9 * low).groupby(rows.unique_id).mean()
    np.testing.assert_allclose(loss["low"].to_numpy(), expected, rtol=1e-6)
    future = fc.fit(given).predict(level=[80])
    assert list(future.columns) == ["unique_id", "ds", "Forecaster", *columns[:2]]
    figure = plot_series(given, future, level=[80])
    assert len(figure.axes) >= 3


def test_other_horizons_are_trained_for_and_other_quantiles_refused(make_panel, small):
    df = make_panel(("wave",), missing=False)
    fc = Forecaster(3, freq="D", quantiles=(0.1, 0.9), **small)
    walk = fc.cross_validation(df, h=5)
    assert walk.groupby("unique_id").size().max() == 5
    assert fc.h == 3
    fc.fit(df)
    with pytest.raises(SpecError, match="forecast 3 steps, not h=5"):
        fc.cross_validation(df, h=5, refit=None)
    for asked, said in (
        ({"level": [90]}, r"quantile 0\.05 .*quantiles=\(0\.05, 0\.1, 0\.9, 0\.95\)"),
        ({"quantiles": [0.5]}, r"quantile 0\.5 was not trained"),
        ({"level": 80}, r"level must be a list of numbers, such as \[80, 90\], got 80"),
        ({"level": [80], "quantiles": [0.1]}, "level and quantiles"),
    ):
        with pytest.raises(SpecError, match=said):
            fc.predict(**asked)


def test_refit_is_yes_no_or_none(panel, small):
    with pytest.raises(SpecError, match="refit must be True, False or None, got 2"):
        Forecaster(3, freq="D", **small).cross_validation(panel, refit=2)


def test_panels_too_short_for_the_windows_are_refused(panel, small):
    with pytest.raises(
        DataError,
        match=r"303 steps .*longest .*fewer windows",
    ):
        Forecaster(3, **small).cross_validation(panel, n_windows=2, step_size=300)
    with pytest.raises(TypeError, match="df must be a data frame"):
        Forecaster(3, **small).cross_validation(np.zeros((1, 2, 30)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no series has a later one")
def test_searches_of_scikit_learn_and_optuna(make_panel, small):
    df = make_panel(("wave",))
    df = df[df.unique_id.isin(["wave-60", "wave-41"])].reset_index(drop=True)
    parts = backtest_splits(df, 2, 3, "unique_id", "ds", "D")
    split = [(train.index, test.index) for _, train, test in parts]
    search = GridSearchCV(
        Forecaster(3, 7, "D", **small), {"lr": [1e-3, 1e-2], "season_length": [7, (7,)]}, cv=split
    ).fit(df)
    assert len(search.best_estimator_.predict()) == 3 * df.unique_id.nunique()

    def objective(trial):
        fc = Forecaster(3, 7, "D", lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), **small)
        found = fc.cross_validation(df).dropna()
        return float((found.Forecaster - found.y).abs().mean())

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=2)
    assert np.isfinite(study.best_value)


@pytest.mark.slow
def test_the_score_is_the_error_at_the_times_that_follow(panel, small):
    past = without_last(panel, 2)
    fc = Forecaster(3, 7, "D", **small).fit(past)
    both = fc.predict().merge(panel.dropna(), on=["unique_id", "ds"])
    scales = {}
    for name, part in past.groupby("unique_id"):
        y = part.set_index("ds").y.sort_index()
        y = y.reindex(pd.date_range(y.index[0], y.index[-1])).to_numpy()
        change = np.abs(y[7:] - y[:-7])
        scales[name] = np.nanmean(change) if np.isfinite(change).any() else 0.0
    scale = np.maximum(both.unique_id.map(scales), 1e-6 * max(scales.values()))
    np.testing.assert_allclose(
        fc.score(panel), -((both.Forecaster - both.y).abs() / scale).mean(), rtol=1e-6
    )
    with pytest.raises(DataError, match="df has no row of the 3 steps"):
        fc.score(past)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no series has a later one")
def test_a_fitted_forecaster_is_scored_as_it_is(panel, small):
    fc = Forecaster(3, freq="D", **small).fit(without_last(panel, 9))
    found = fc.cross_validation(panel, n_windows=3, step_size=1, refit=None)
    for window, cutoff in enumerate(sorted(found[found.unique_id == "wave-60"].cutoff)[::3]):
        one = found[(found.unique_id == "wave-60") & (found.cutoff == cutoff)]
        past = panel[(panel.unique_id == "wave-60") & (panel.ds <= cutoff)]
        if past.ds.max() == cutoff:  # else the series would end earlier
            np.testing.assert_allclose(one.Forecaster, fc.predict(past).Forecaster, rtol=1e-5)
        assert (one.ds == pd.date_range(cutoff, periods=4)[1:]).all(), window


@pytest.mark.parametrize(
    ("names", "clash"),
    [
        ({"target_col": "Forecaster"}, "'Forecaster'"),
        ({"target_col": "Forecaster-lo-80", "quantiles": (0.1,)}, "'Forecaster-lo-80'"),
        ({"time_col": "cutoff"}, "'cutoff'"),
        ({"quantiles": (0.1, 0.10000001)}, "quantiles"),
    ],
)
def test_columns_of_the_data_and_of_the_forecasts_have_different_names(panel, small, names, clash):
    columns = {"target_col": "y", "time_col": "ds", "id_col": "unique_id"}
    names = dict(names)
    df = panel.rename(columns={columns[arg]: name for arg, name in names.items() if arg in columns})
    quantiles = names.pop("quantiles", ())
    with pytest.raises(SpecError) as caught:
        Forecaster(3, freq="D", quantiles=quantiles, **small).cross_validation(df, **names)
    assert clash in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("refit", [False, None])
def test_a_first_zero_after_the_first_cutoff_is_refused(small, refit):
    t = np.arange(50)
    df = pd.DataFrame(
        {"unique_id": np.repeat(["a", "b"], 50), "ds": np.tile(t, 2), "y": 2.0 + np.tile(t, 2) % 5}
    )
    fc = Forecaster(3, 5, **small).fit(df[df.ds < 35])
    later = df.assign(y=np.where((df.unique_id == "b") & (df.ds == 45), 0.0, df.y))
    with pytest.raises(DataError, match=r"there is 0;.*transform='none'"):
        fc.cross_validation(later, n_windows=3, refit=refit)
    assert len(fc.cross_validation(later, n_windows=3, refit=True)) == 2 * 3 * 3
    # to score against, nothing else
    last = df.assign(y=np.where((df.unique_id == "b") & (df.ds == 48), 0.0, df.y))
    found = fc.cross_validation(last, n_windows=3, refit=refit)
    assert (found.y == 0).sum() == 1
    assert np.isfinite(found.Forecaster).all()
