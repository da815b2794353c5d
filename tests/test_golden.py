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
