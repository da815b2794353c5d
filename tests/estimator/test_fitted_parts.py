"""What a fit leaves in an estimator for later calls."""

import dataclasses

import numpy as np
import pytest

from fluxutils_py.estimator.fitted_parts import input_schema
from tests.plain_networks import plain_regressor

X = np.random.default_rng(0).normal(size=(2, 6, 9))
SMALL = {"hidden_size": 2, "epochs": 2, "seqsize": 3, "random_state": 0, "verbose": False}


def test_a_fit_leaves_its_parts_and_the_next_one_replaces_them():
    est = plain_regressor(**SMALL).fit(X, X[:1])
    first = est.fitted_parts_
    assert first.n_steps == 2 * 3
    assert first.layout.features == 2
    assert est.fit(X[:1], X[:1]).fitted_parts_ is not first
    assert first.layout.features == 2


def test_parts_are_frozen():
    est = plain_regressor(**SMALL).fit(X, X[:1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        est.fitted_parts_.n_steps = 0


def test_a_fit_that_fails_puts_back_the_parts_of_the_one_before():
    est = plain_regressor(**SMALL).fit(X, X[:1])
    before = est.fitted_parts_

    def fail(loop):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        est.set_params(callbacks=fail).fit(X, X[:1])
    assert est.fitted_parts_ is before


def test_the_schema_has_the_layout_of_the_fit_that_inputs_follow():
    est = plain_regressor(n_timesteps=9, **SMALL).fit(X, X[:1])
    parts = est.fitted_parts_
    schema = input_schema(est, est.resolved_params(), parts)
    assert (schema.estimator, schema.n_timesteps) == ("SequenceRegressor", 9)
    assert schema.fitted is parts.layout
    assert input_schema(est, est.resolved_params(), None).fitted is None
