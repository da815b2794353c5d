"""scikit-learn's own checks: all of them pass, none is left out."""

import os
from functools import partial
from unittest import SkipTest

import joblib
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_array_equal
from sklearn import config_context, get_config
from sklearn.base import clone
from sklearn.utils.estimator_checks import (
    check_array_api_input,
    check_array_api_input_and_values,
    check_class_weight_classifiers,
    check_classifiers_train,
    check_dataframe_column_names_consistency,
    check_do_not_raise_errors_in_init_or_set_params,
    check_global_output_transform_pandas,
    check_inplace_ensure_writeable,
    check_regressors_train,
    check_set_output_transform,
    check_set_output_transform_pandas,
    estimator_checks_generator,
    parametrize_with_checks,
)

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
)
from fluxutils_py.training import Loop
from tests.plain_networks import plain_classifier, plain_regressor
from tests.versions import skip_before

# checks that fail where a fit has not gone far enough; for all others, two epochs are a fit
OF_WHAT_WAS_LEARNT = {
    check_class_weight_classifiers,
    check_classifiers_train,
    check_regressors_train,
}
# how many checks there are at least: a mixin, a tag or a parameter that were lost would take some
# away unseen
LEAST = [
    (Estimator(), 48),
    (EstimatorRegressor(), 60),
    (EstimatorClassifier(), 62),
    (SequenceRegressor(), 60),
    (SequenceClassifier(), 63),
    (SequenceScaler(), 47),
    (WinsorScaler(), 43),
    (SequenceImputer(), 44),
    (SequenceImputer("constant", fill_value=3), 44),
]
KINDS = [
    Estimator(),
    EstimatorRegressor(),
    EstimatorClassifier(),
    SequenceRegressor(),
    SequenceClassifier(),
]
SMALL = [
    plain_regressor(4, epochs=2),
    plain_classifier(4, epochs=2),
    SequenceScaler(),
    WinsorScaler(),
    SequenceImputer(),
]


def name(value):
    return type(value).__name__


@pytest.fixture
def few_epochs(monkeypatch):
    """``few_epochs()``: whatever the settings say, fits end after two epochs."""

    def run_epochs(self, batches, epochs):
        return whole(self, batches, min(epochs, 2))

    whole = Loop.run_epochs
    return partial(monkeypatch.setattr, Loop, "run_epochs", run_epochs)


# scikit-learn fits labels of one class, which we warn of
@pytest.mark.few
@pytest.mark.filterwarnings("ignore:all labels of y are")
@parametrize_with_checks([est for est, _ in LEAST], expected_failed_checks=lambda est: {})
def test_check_of_scikit_learn(estimator, check, few_epochs):
    if check.func not in OF_WHAT_WAS_LEARNT:
        few_epochs()
    elif check.keywords.get("readonly_memmap") and "cell" in estimator.get_params():
        # a network learns for seconds, and reads maps alike
        estimator = clone(estimator).set_params(cell="linear")
    try:
        check(estimator)
    except SkipTest as error:  # an optional package is missing, or SCIPY_ARRAY_API
        pytest.fail(f"the check did not run: {error}")


@pytest.mark.parametrize(
    ("est", "least"), LEAST, ids=lambda v: name(v) if hasattr(v, "fit") else str(v)
)
def test_as_many_checks_as_there_should_be(est, least):
    found = list(estimator_checks_generator(est))
    assert len(found) >= least
    assert all(isinstance(check, partial) for _, check in found)


@pytest.mark.few
@pytest.mark.parametrize("est", SMALL, ids=name)
def test_the_check_of_array_dispatch_does_fit_under_dispatch(est):
    """It skips itself without SCIPY_ARRAY_API=1, which scipy reads once, when it is imported."""
    skip_before("scikit-learn", "1.9", "array-API dispatch on views")
    assert os.environ["SCIPY_ARRAY_API"] == "1"
    seen = []

    class Watched(type(est)):
        def fit(self, *args, **kwargs):
            seen.append(get_config()["array_api_dispatch"])
            return super().fit(*args, **kwargs)

    Watched.__init__ = type(est).__init__  # get_params reads its signature
    (check,) = [
        c for _, c in estimator_checks_generator(Watched()) if c.func is check_array_api_input
    ]
    check(Watched(**est.get_params(deep=False)))
    assert seen[:2] == [False, True]


# -- beyond check_estimator: what scikit-learn checks of its own estimators -------------------------------


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize("est", [*SMALL, *(clone(e).set_params(spec={"epochs": 2, "batchsize": 64, "seqsize": None})
                                           for e in KINDS[:3])], ids=name)  # fmt: skip
@pytest.mark.parametrize(
    "check",
    [
        check_dataframe_column_names_consistency,
        check_inplace_ensure_writeable,
        check_do_not_raise_errors_in_init_or_set_params,
        partial(check_array_api_input_and_values, array_namespace="numpy"),
    ],
    ids=lambda c: getattr(c, "func", c).__name__,
)
def test_check_of_scikit_learn_itself(check, est):
    check(name(est), est)


# the check gives matrices to what was fitted on frames; scikit-learn's own scaler warns there too
@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:X does not have valid feature names", "ignore:X has feature names, but"
)
@pytest.mark.parametrize(
    "check",
    [
        check_set_output_transform,
        check_set_output_transform_pandas,
        check_global_output_transform_pandas,
    ],
)
@pytest.mark.parametrize("est", [SequenceScaler(), WinsorScaler(), SequenceImputer()], ids=name)
def test_check_of_set_output(check, est):
    check(name(est), est)


@pytest.mark.apart
@pytest.mark.parametrize("est", SMALL, ids=name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_read_only_maps_are_read(est, dtype, tmp_path):
    """Matrices as joblib's workers get them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(13, 3)).astype(dtype), np.arange(13) % 2
    mapped = []
    for i, a in enumerate((x, y)):
        joblib.dump(a, tmp_path / f"{i}.pkl")
        mapped.append(joblib.load(tmp_path / f"{i}.pkl", mmap_mode="r"))
    method = "transform" if hasattr(est, "transform") else "predict"
    found = getattr(clone(est).set_params(**seed(est)).fit(*mapped), method)(mapped[0])
    assert isinstance(mapped[0], np.memmap)
    assert_array_equal(found, getattr(clone(est).set_params(**seed(est)).fit(x, y), method)(x))
    assert_array_equal(mapped[0], x)


def seed(est):
    return {"random_state": 0} if "random_state" in est.get_params() else {}


@pytest.mark.few
@pytest.mark.parametrize("est", SMALL[:2], ids=name)
def test_names_of_columns_are_learnt_and_forgotten(est):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(11, 3)), columns=["a", "b", "c"])
    y = np.arange(11) % 2
    est = clone(est).set_params(random_state=0).fit(frame, y)
    assert est.feature_names_in_.tolist() == ["a", "b", "c"]
    assert est.n_features_in_ == 3
    assert_array_equal(
        est.predict(frame), clone(est).fit(frame.to_numpy(), y).predict(frame.to_numpy())
    )
    with pytest.raises(ValueError, match=r"Feature names .*same order .*fit"):
        est.predict(frame[["b", "a", "c"]])
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        est.predict(frame.to_numpy())
    assert not hasattr(est.fit(frame.to_numpy(), y), "feature_names_in_")


@pytest.mark.parametrize("est", KINDS, ids=name)
def test_clones_and_their_clones_have_the_same_arguments(est):
    with config_context(print_changed_only=False):
        assert repr(clone(clone(est))) == repr(est)
