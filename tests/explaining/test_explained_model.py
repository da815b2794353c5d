"""What reaches the model: means, names, and the past of a step."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from fluxutils_py import Estimator, SequenceScaler, explain, samples
from fluxutils_py.explaining.integrated_gradients import read_model, read_past

X = np.random.default_rng(0).normal(2, 3, size=(2, 5, 12))
SPEC = {"epochs": 1, "batchsize": 3, "seqsize": 7}


@pytest.fixture(scope="module")
def est():
    return Estimator(spec=SPEC, random_state=0, verbose=False).fit(X, X[:1])


def test_means_are_of_the_steps_that_exist(est):
    x = X.copy()
    x[:, 3, 2:4] = np.nan
    x[:, 1, 6:] = 1e9
    lengths = np.array([12, 6, 12, 12, 12])
    model = read_model(est, x, lengths, None)
    x[:, 1, 6:] = np.nan
    assert_allclose(model.mean(model.inputs.series[0]), np.nanmean(x, (1, 2)))


def test_the_past_ends_at_the_step(est):
    past = read_past(read_model(est, X, None, None), -1, -2)
    assert (past.first, past.at) == (0, 10)
    (x,), missing = past.read(slice(3, 9))
    assert_allclose(x[:, 0].T.numpy(), X[:, 4, 3:9])
    assert missing is None or not missing.any()


def test_columns_of_frames_are_named():
    frame = pd.DataFrame(X[:, :, 0].T, columns=["wind", "sun"])
    with pytest.warns(UserWarning, match="updates"):
        est = Estimator(spec=SPEC, random_state=0, verbose=False).fit(frame, frame["sun"])
    e = explain(est, frame, series=2)
    assert e.feature_names == ("wind", "sun")
    assert_allclose(e.value, est.predict(frame)[2], rtol=1e-6)


def test_views(est):
    on_views = Estimator(spec=SPEC, random_state=0, verbose=False).fit(samples(X), samples(X[:1]))
    a = explain(on_views, samples(X), 1, 8)
    b = explain(est, X, 1, 8)
    assert_allclose(a.attributions, b.attributions, atol=1e-12)
    scaled = SequenceScaler().fit(samples(X)).transform(samples(X))
    model = read_model(on_views, scaled, None, None)
    assert_allclose(model.mean(model.inputs.series[0]), 0, atol=1e-12)
