"""Fits of a part of the data, by which ready-made estimators choose and calibrate."""

import numpy as np
import pytest
from sklearn.metrics import log_loss

from fluxutils_py import SequenceClassifier, SequenceRegressor
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator import fitting
from fluxutils_py.estimator.fit_loop import FitLoop

X = np.random.default_rng(0).normal(size=(2, 10, 40))  # (F, N, T)
Y = X[:1].cumsum(2)
SHORT = {"cell": "mingru", "max_updates": 3, "hidden_size": 2}


@pytest.fixture
def counts(monkeypatch):
    """How often data are read, and windows are trained on."""
    found = {"read": 0, "run": 0}

    def counting(thing, name, key):
        plain = getattr(thing, name)

        def call(*arguments, **settings):
            found[key] += 1
            return plain(*arguments, **settings)

        monkeypatch.setattr(thing, name, call)

    counting(fitting, "read_data", "read")
    counting(FitLoop, "surroundings", "run")
    return found


@pytest.mark.parametrize(
    ("settings", "n_runs"),
    [
        # the linear model, a trial of the network, the fit, one to calibrate, and its intervals
        pytest.param({"level": 80}, 5, marks=pytest.mark.slow),
        ({**SHORT, "level": 80}, 3),
        (SHORT, 1),
        ({**SHORT, "level": 80, "early_stopping": True}, 2),
    ],
)
def test_all_fits_share_the_data_that_were_read_once(counts, settings, n_runs):
    est = SequenceRegressor(random_state=0, **settings)
    est.fit(X, Y)
    assert counts == {"read": 1, "run": n_runs}
    assert (est.fitted_parts_.calibration is None) == ("level" not in settings)


def test_weights_are_scaled_to_each_part_anew():
    """The fit after a trial is that without one, with weights too."""
    weight = np.random.default_rng(1).random((10, 40)) + 0.1
    with_trial = SequenceRegressor(level=80, random_state=0, **SHORT).fit(X, Y, weight)
    without = SequenceRegressor(random_state=0, **SHORT).fit(X, Y, weight)
    np.testing.assert_array_equal(with_trial.predict(X), without.predict(X))
    assert with_trial.loss_curve_ == without.loss_curve_


@pytest.mark.parametrize("labels", [False, True])
def test_a_closed_form_is_one_step_whose_loss_is_that_of_rows_left_out(labels):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, 30))
    y = x.sum(0, keepdims=True) + rng.normal(size=(1, 7, 30))
    if labels:
        y = (x[:1] + 0.3 * y > 0).astype(int)
        est = SequenceClassifier(cell="linear").fit(x, y)
    else:
        est = SequenceRegressor(cell="linear", scale_target=False).fit(x, y)
    assert est.n_iter_ == est.fitted_parts_.n_steps == 1
    assert not est.grad_.any()
    if labels:
        train_loss = log_loss(y.ravel(), est.predict_proba(x).reshape(2, -1).T)
    else:
        train_loss = np.square(y - est.predict(x)).mean()
    assert train_loss < est.loss_curve_[0] < 2 * train_loss


def test_a_closed_form_that_the_user_has_chosen_is_not_fitted_in_parts():
    est = SequenceRegressor(cell="linear").fit(X, Y)
    with pytest.raises(SpecError, match="cell='linear' is fitted in closed form, on all data"):
        est.partial_fit(X, Y)
