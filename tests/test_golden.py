"""Files that version 0.2.0 wrote, in ``tests/golden``, load and predict as they did then."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceRegressor,
    load,
    samples,
)
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.training import Checkpointer
from tests.plain_networks import plain_regressor

FOLDER = Path(__file__).parent / "golden"
DATA = np.load(FOLDER / "data.npz")
EXPECTED = np.load(FOLDER / "predictions.npz")
ESTIMATORS = {
    "Estimator": Estimator,
    "EstimatorRegressor": EstimatorRegressor,
    "EstimatorClassifier": EstimatorClassifier,
    "SequenceRegressor": SequenceRegressor,
    "SequenceRegressor-mgu": SequenceRegressor,
    "SequenceRegressor-tcn": SequenceRegressor,
    "SequenceRegressor-attention": SequenceRegressor,
    "SequenceRegressor-linear": SequenceRegressor,
}


def assert_as_expected(name, predictions):
    if EXPECTED[name].dtype.kind == "f":
        np.testing.assert_allclose(predictions, EXPECTED[name], rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(predictions, EXPECTED[name])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_predict_as_when_they_were_saved(name):
    assert_as_expected(name, ESTIMATORS[name].load(FOLDER / f"{name}.pt").predict(DATA["x"]))


def test_arguments_of_ready_made_estimators_that_went_are_in_the_spec_or_what_was_chosen():
    est = SequenceRegressor.load(FOLDER / "SequenceRegressor-mgu.pt")
    assert (est.spec["clip"], est.spec["lr_schedule"], est.spec["shuffle"]) == (None, None, False)
    assert not est.fitted_parts_.choice.scale_input
    before = est.n_iter_
    assert est.partial_fit(DATA["x"], DATA["y"]).n_iter_ == before + 1
    linear = SequenceRegressor.load(FOLDER / "SequenceRegressor-linear.pt")
    assert linear.fitted_parts_.choice.n_lags == 2


def test_intervals_are_those_that_were_saved():
    est = SequenceRegressor.load(FOLDER / "SequenceRegressor-interval.pt")
    assert_as_expected("SequenceRegressor-interval", np.stack(est.predict_interval(DATA["x"])))


def test_a_classifier_of_series_has_the_probabilities_that_it_had():
    est = SequenceClassifier.load(FOLDER / "SequenceClassifier.pt")
    assert est.classes_.tolist() == ["high", "low"]
    assert_as_expected("SequenceClassifier", est.predict_proba(samples(DATA["x"])))


def test_a_pipeline_predicts_as_when_it_was_saved():
    pipe = load(FOLDER / "pipeline.pt")
    assert_as_expected("pipeline", np.asarray(pipe.predict(samples(np.load(FOLDER / "xm.npy")))))


@pytest.mark.parametrize("transform", ["log", "none"])
def test_forecasters_forecast_as_when_they_were_saved(transform):
    fc = Forecaster.load(FOLDER / f"Forecaster-{transform}.pt")
    future = fc.make_future_dataframe().assign(promo=1.0)
    forecasts = fc.predict(futr_df=future)
    assert_as_expected(
        f"Forecaster-{transform}", forecasts.drop(columns=["unique_id", "ds"]).to_numpy()
    )
    assert forecasts.ds.min() == pd.Timestamp("2024-03-01")


def test_a_forecaster_of_an_array_forecasts_arrays_as_when_it_was_saved():
    found = Forecaster.load(FOLDER / "Forecaster-array.pt").predict()
    points = [[-4.057065, -5.389635, -3.971979], [9.391013, 9.169858, 10.274782]]
    points += [[-2.188638, -2.871115, -0.62373], [-1.961611, -3.6268, -5.093422]]
    expected = np.reshape(points, (2, 2, 3))
    np.testing.assert_allclose(found["Forecaster"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["Forecaster-lo-60"][0, 0, 0], -5.466564, rtol=1e-5)


def test_a_calendar_of_a_forecaster_is_asked_for_as_columns():
    fc = Forecaster.load(FOLDER / "Forecaster-calendar.pt")
    assert fc.futr_exog_list == ["calendar_dayofweek_sin", "calendar_dayofweek_cos"]
    future = fc.make_future_dataframe()
    week = 2 * np.pi * future.day.dt.day_of_week / 7
    future["calendar_dayofweek_sin"] = np.sin(week)
    future["calendar_dayofweek_cos"] = np.cos(week)
    found = fc.predict(futr_df=future).Forecaster
    np.testing.assert_allclose(found, [14.418074, 15.915984, 15.119228], rtol=1e-5)


def test_a_finished_fit_is_taken_from_its_checkpoint(tmp_path):
    folder = shutil.copytree(FOLDER / "checkpoints", tmp_path / "checkpoints")
    est = plain_regressor(
        hidden_size=4,
        epochs=3,
        batchsize=3,
        seqsize=10,
        callbacks=[Checkpointer(folder, keep=1)],
        verbose=False,
        comm=None,
        random_state=0,
    )
    assert_as_expected("checkpoints", est.fit(DATA["x"], DATA["y"]).predict(DATA["x"]))
    assert est.n_iter_ == 3
