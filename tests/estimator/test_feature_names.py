"""Names of features go from arrays, files and views through transformers into estimators, which
check them.
"""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
    h5mmap,
    h5save,
    samples,
    timesteps,
)
from fluxutils_py.errors import DataError
from tests.plain_networks import plain_regressor

N, T = 6, 9
NAMES = ("wind", "rain", "heat")
SMALL = {"hidden_size": 3, "epochs": 1, "random_state": 0}
X = np.random.default_rng(0).normal(size=(3, N, T))
Y = X[:1].cumsum(2)


def file(path):
    h5save(path / "d.h5", {"x": X}, feature_names={"x": list(NAMES)})
    return h5mmap(path / "d.h5", "x")


FORMS = {
    "file": file,
    "samples of a file": lambda path: samples(file(path)),
    "timesteps of a file": lambda path: timesteps(file(path), context=2),
    "samples": lambda path: samples(X, feature_names=NAMES),
    "timesteps": lambda path: timesteps(X, context=2, feature_names=list(NAMES)),
}
forms = pytest.mark.parametrize("form", FORMS)


def target(x):
    return (
        Y
        if isinstance(x, np.ndarray)
        else samples(Y)
        if type(x).__name__ == "SamplesView"
        else timesteps(Y)
    )


@forms
@pytest.mark.parametrize(
    "transformer", [SequenceScaler(), WinsorScaler(), SequenceImputer(), SequenceImputer("ffill")]
)
def test_they_go_through_views_and_transformers(form, transformer, tmp_path):
    x = FORMS[form](tmp_path)
    assert x.feature_names == NAMES
    found = transformer.fit_transform(x)
    assert found.feature_names == NAMES
    assert list(transformer.feature_names_in_) == list(NAMES)
    assert list(transformer.get_feature_names_out()) == list(NAMES)
    assert list(transformer.get_feature_names_out(NAMES)) == list(NAMES)
    twice = make_pipeline(SequenceScaler(), transformer).fit(x)
    assert list(twice.get_feature_names_out(NAMES)) == list(NAMES)
    est = make_pipeline(transformer, plain_regressor(**SMALL)).fit(x, target(x))
    assert list(est[-1].feature_names_in_) == list(NAMES)
    assert np.array_equal(np.asarray(est.predict(x)), np.asarray(est.predict(x)))


@forms
def test_views_keep_them_when_they_are_split_and_pickled(form, tmp_path):
    x = FORMS[form](tmp_path)
    part = x[:, :4] if isinstance(x, np.ndarray) else x[1:4]
    assert part.feature_names == NAMES
    again = pickle.loads(pickle.dumps(part))
    assert again.feature_names == NAMES
    assert getattr(again, "context", 0) == getattr(part, "context", 0)
    if not isinstance(x, np.ndarray):
        assert len(cross_val_score(plain_regressor(**SMALL), x, target(x), cv=3)) == 3


@pytest.mark.parametrize("view", [samples, timesteps])
def test_functions_that_may_move_features_lose_them(view):
    x = view(X, feature_names=NAMES)
    assert x.map(np.negative).feature_names == NAMES
    assert x.map(np.flipud).feature_names is None
    assert pickle.loads(pickle.dumps(x.map(np.flipud).map(np.negative))).feature_names is None
    assert SequenceImputer("ffill").fit_transform(x.map(np.flipud)).feature_names is None
    est = plain_regressor(**SMALL).fit(x, target(x))
    est.fit(x.map(np.flipud), target(x))
    assert not hasattr(est, "feature_names_in_")


@forms
def test_other_names_are_refused(form, tmp_path):
    x = FORMS[form](tmp_path)
    est = plain_regressor(**SMALL).fit(x, target(x))
    assert list(est.feature_names_in_) == list(NAMES)
    assert est.predict(X).shape == Y.shape  # an array without names is taken as it is
    turned = samples(X[[1, 0, 2]], feature_names=("rain", "wind", "heat"))
    scaler = SequenceScaler().fit(x)
    for fitted, call in (
        (est, est.predict),
        (est, lambda v: est.partial_fit(v, Y)),
        (scaler, scaler.transform),
    ):
        with pytest.raises(DataError) as info:
            call(turned)
        assert all(
            part in str(info.value)
            for part in (
                "rain, wind, heat",
                f"{type(fitted).__name__} was fitted on wind, rain, heat",
            )
        )
    est.save(tmp_path / "est")
    again = SequenceRegressor.load(tmp_path / "est")
    assert list(again.feature_names_in_) == list(NAMES)
    assert not hasattr(est.fit(X, Y), "feature_names_in_")


def test_frames_and_sequences_have_them_in_common():
    frame = pd.DataFrame(X[:, 0].T, columns=list(NAMES))
    scaler = SequenceScaler().fit(frame)
    assert scaler.transform(samples(X, feature_names=NAMES)).feature_names == NAMES
    of_view = SequenceScaler().set_output(transform="pandas").fit(samples(X, feature_names=NAMES))
    # of 27 columns, not 3 features
    assert isinstance(of_view.transform(np.asarray(samples(X))), np.ndarray)
    assert list(scaler.set_output(transform="pandas").transform(frame).columns) == list(NAMES)


@pytest.mark.parametrize("names", [("a", "b"), "abc", (1, 2, 3)])
def test_names_that_are_not_those_of_features(names):
    for view in (samples, timesteps):
        with pytest.raises(DataError) as info:
            view(X, feature_names=names)
        assert all(
            part in str(info.value) for part in ("feature_names", "3 strings", f"got {names!r}")
        )


def test_an_empty_choice_of_columns_is_empty():
    assert samples(X)[[0, 1], 3:3].shape == (2, 0)
    assert samples(X)[1, 3:3].shape == (0,)
    assert timesteps(X)[1:3, []].shape == (2, 0)
