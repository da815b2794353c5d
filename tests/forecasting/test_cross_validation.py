"""Walking forward: against fits and predictions by hand."""

import numpy as np
import optuna
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.model_selection import GridSearchCV
from utilsforecast.losses import mae, smape

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster, WalkForwardSplit, evaluate

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*series have no more steps", "ignore:.*too short for the first window"
)
BASELINES = ["Naive", "SeasonalNaive", "Drift", "WindowAverage"]


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
        "Forecaster-q0.5",
        *BASELINES,
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


def test_panels_too_short_for_the_windows_are_refused(panel, small):
    with pytest.raises(
        DataError,
        match=r"303 steps .*longest .*fewer windows",
    ):
        Forecaster(3, **small).cross_validation(panel, n_windows=2, step_size=300)
    with pytest.raises(DataError, match="cross_validation takes a data frame"):
        Forecaster(3, **small).cross_validation(np.zeros((1, 2, 30)))


@pytest.mark.slow
def test_scores_are_those_of_utilsforecast(panel, small):
    found = Forecaster(3, **small).cross_validation(panel.dropna(), n_windows=1).dropna()
    scores = evaluate(found.drop(columns="cutoff"), [mae, smape], agg_fn="mean").set_index("metric")
    assert list(scores.columns) == ["Forecaster", *BASELINES]
    for name in scores.columns:
        each = (found[name] - found.y).abs().groupby(found.unique_id).mean()
        np.testing.assert_allclose(scores.loc["mae", name], each.mean())


@pytest.mark.slow
def test_coverage_is_the_share_of_truths_inside_of_each_band(panel, small):
    fc = Forecaster(3, quantiles=(0.05, 0.1, 0.5, 0.9), **small)
    found = fc.cross_validation(panel.dropna(), n_windows=2).dropna()
    # every third truth lies far outside
    found["y"] = np.where(np.arange(len(found)) % 3, found["Forecaster-q0.5"], 1e6)
    found.loc[found.index[1], "y"] = np.nan  # neither in nor out
    inside = (found.y >= found["Forecaster-q0.1"]) & (found.y <= found["Forecaster-q0.9"])
    inside = inside[found.y.notna()].groupby([found.unique_id, found.cutoff]).mean()
    for frame in (
        found,
        pl.DataFrame(found.to_dict("list")),
        pa.Table.from_pandas(found, preserve_index=False),
    ):
        each = evaluate(frame)
        each = each if isinstance(each, pd.DataFrame) else each.to_pandas()
        bands = each[each.metric.str.startswith("coverage")]
        assert set(bands.metric) == {"coverage_level80"}  # .05 has no counterpart
        bands = bands.set_index(["unique_id", "cutoff"]).Forecaster.sort_index()
        np.testing.assert_allclose(bands, inside.to_numpy())
        assert set(each.columns) == {"unique_id", "cutoff", "metric", "Forecaster", *BASELINES}
    # one row for each metric over all cutoffs, as the docstring says
    whole = evaluate(found.drop(columns="cutoff"), agg_fn="mean").set_index("metric")
    assert list(whole.index) == ["smape", "mae", "rmse", "coverage_level80"]
    per_series = inside.groupby(level=0).mean()
    assert abs(whole.loc["coverage_level80", "Forecaster"] - per_series.mean()) < 0.1
    assert whole.loc["coverage_level80", BASELINES].isna().all()


def test_splits_are_by_time(panel):
    splitter = WalkForwardSplit(h=4, n_splits=3, step_size=5)
    times = np.unique(panel.ds)
    parts = list(splitter.split(panel))
    assert len(parts) == splitter.get_n_splits() == 3
    for i, (train, test) in enumerate(parts):
        begin = len(times) - 4 - 5 * (2 - i)
        np.testing.assert_array_equal(np.unique(panel.ds.iloc[train]), times[:begin])
        np.testing.assert_array_equal(np.unique(panel.ds.iloc[test]), times[begin : begin + 4])
    with pytest.raises(DataError, match=r"3 splits of 30 times .*nothing to train"):
        list(WalkForwardSplit(h=30).split(panel))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no series has a later one")
def test_searches_of_scikit_learn_and_optuna(make_panel, small):
    df = make_panel(("wave",))
    split = WalkForwardSplit(h=3, n_splits=2)
    search = GridSearchCV(
        Forecaster(3, 7, "D", **small), {"lr": [1e-3, 1e-2], "lag": [7, None]}, cv=split
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
        ({"target_col": "Naive"}, "target_col='Naive'"),
        ({"target_col": "Forecaster"}, "'Forecaster'"),
        ({"target_col": "Forecaster-q0.1", "quantiles": (0.1,)}, "target_col='Forecaster-q0.1'"),
        ({"time_col": "cutoff"}, "time_col='cutoff'"),
        ({"id_col": "Drift"}, "id_col='Drift'"),
        ({"quantiles": (0.1, 0.10000001)}, "quantiles"),
    ],
)
def test_columns_of_the_data_and_of_the_forecasts_have_different_names(panel, small, names, clash):
    columns = {"target_col": "y", "time_col": "ds", "id_col": "unique_id"}
    df = panel.rename(columns={columns[arg]: name for arg, name in names.items() if arg in columns})
    with pytest.raises(SpecError) as caught:
        Forecaster(3, freq="D", **small, **names).cross_validation(df)
    assert clash in str(caught.value)


@pytest.mark.slow
def test_a_model_whose_alias_looks_like_a_quantile_is_scored(panel, small):
    fc = Forecaster(3, freq="D", alias="lstm-quick", quantiles=(0.1, 1e-5), **small)
    found = fc.cross_validation(panel.dropna()).dropna().drop(columns="cutoff")
    scores = evaluate(found, [mae], agg_fn="mean")
    assert list(scores.columns) == ["metric", "lstm-quick", *BASELINES]
    expected = (found["lstm-quick"] - found.y).abs().groupby(found.unique_id).mean().mean()
    np.testing.assert_allclose(scores["lstm-quick"], expected)


@pytest.mark.slow
def test_drift_starts_at_the_first_value_of_a_long_series(small):
    n = 2500
    y = 100 + np.cumsum(np.random.default_rng(0).normal(size=n))
    df = pd.DataFrame({"unique_id": "a", "ds": pd.date_range("2000-01-01", periods=n), "y": y})
    found = Forecaster(2, freq="D", **small).cross_validation(df)
    past = y[: n - 2]
    np.testing.assert_allclose(
        found.Drift, past[-1] + np.arange(1, 3) * (past[-1] - past[0]) / (len(past) - 1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("refit", [False, None])
def test_a_first_zero_after_the_first_cutoff_is_named(small, refit):
    t = np.arange(50)
    df = pd.DataFrame(
        {"unique_id": np.repeat(["a", "b"], 50), "ds": np.tile(t, 2), "y": 2.0 + np.tile(t, 2) % 5}
    )
    fc = Forecaster(3, 5, **small).fit(df[df.ds < 35])
    later = df.assign(y=np.where((df.unique_id == "b") & (df.ds == 45), 0.0, df.y))
    with pytest.raises(DataError, match=r"0 in series 'b' at 45;.*transform='none'"):
        fc.cross_validation(later, n_windows=3, refit=refit)
    with pytest.warns(UserWarning, match="1 of 94 values .*'b'"):
        assert len(fc.cross_validation(later, n_windows=3, refit=True)) == 2 * 3 * 3
    # to score against, nothing else
    last = df.assign(y=np.where((df.unique_id == "b") & (df.ds == 48), 0.0, df.y))
    found = fc.cross_validation(last, n_windows=3, refit=refit)
    assert (found.y == 0).sum() == 1
    assert np.isfinite(found.Forecaster).all()
