"""WinsorScaler on every kind of input, against NumPy over all series and steps, and against the
layer.
"""

import pickle

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import TimeSeriesSplit, cross_val_predict
from sklearn.pipeline import make_pipeline

from fluxutils_py import WinsorScaler, h5mmap, h5save, samples, timesteps
from fluxutils_py.data import LazyArray, SamplesView, TimestepsView
from fluxutils_py.data import blocks as blocks_module
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn import WinsorNorm
from tests.plain_networks import plain_regressor

F, N, T = 3, 7, 41


@pytest.fixture
def x(rng):
    x = (rng.standard_t(1.5, size=(F, N, T)) + 5) * np.array([1e-6, 1.0, 1e3]).reshape(F, 1, 1)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x


@pytest.fixture(params=[1 << 20, 40])
def _block_sizes(request, monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK", request.param)


def statistics(x):
    lower, upper = np.nanquantile(x, [0.01, 0.99], axis=(1, 2))
    y = np.clip(x, lower[:, None, None], upper[:, None, None])
    return lower, upper, np.nanmean(y, axis=(1, 2)), np.nanstd(y, axis=(1, 2), ddof=1)


def expected(x, of=None):
    lower, upper, mean, std = (s[:, None, None] for s in statistics(x if of is None else of))
    return np.nan_to_num((np.clip(x, lower, upper) - mean) / std)


def learnt(s):
    return np.stack([s.lower_, s.upper_, s.mean_, s.scale_])


def mapped(x, path):
    h5save(path, {"x": x})
    return h5mmap(path, "x")


@pytest.mark.few
@pytest.mark.usefixtures("_block_sizes")
def test_statistics_are_numpys(x):
    s = WinsorScaler().fit(x)
    np.testing.assert_allclose(learnt(s), statistics(x), rtol=1e-13)
    same = WinsorNorm().fit(x)
    np.testing.assert_allclose(
        learnt(s), torch.stack([same.lower, same.upper, same.mean, same.std]), rtol=1e-13
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_transformed_keeps_its_form_and_type(x, dtype, tmp_path):
    x = x.astype(dtype)
    s, y = WinsorScaler().fit(x), expected(x.astype(float))
    bound = {"rtol": 0, "atol": 1e-12 if dtype == "float64" else 1e-5}
    found = s.transform(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, y, **bound)
    other = x[:, :2, :5] * 10
    np.testing.assert_allclose(
        s.transform(other), expected(other.astype(float), x.astype(float)), **bound
    )
    lazy = s.transform(mapped(x, tmp_path / "x"))
    assert isinstance(lazy, LazyArray)
    assert lazy.dtype == dtype
    np.testing.assert_allclose(np.asarray(lazy[:, 2:4, 3:]), y[:, 2:4, 3:], **bound)
    for view, kind in ((samples(x), SamplesView), (timesteps(x), TimestepsView)):
        seen = s.transform(view)
        assert isinstance(seen, kind)
        np.testing.assert_allclose(np.asarray(seen), kind.to_rows(y), **bound)
        np.testing.assert_allclose(
            np.asarray(pickle.loads(pickle.dumps(seen))[3:5]), kind.to_rows(y)[3:5], **bound
        )
    assert np.isnan(x).any()  # the data are left as they were


def test_integers_become_double_and_constants_zero():
    s = WinsorScaler().fit(np.full((1, 2, 3), 7))
    assert s.transform(np.array([[[7, 9, 5]]])).tolist() == [[[0.0, 0.0, 0.0]]]
    assert s.scale_.tolist() == [1]


def test_columns_of_a_matrix_are_its_features(x):
    rows = np.ascontiguousarray(x[:, :, 0].T)
    s = WinsorScaler().fit(rows)
    np.testing.assert_allclose(learnt(s), statistics(x[:, :, :1]), rtol=1e-13)
    np.testing.assert_allclose(
        s.transform(rows), expected(x[:, :, :1])[:, :, 0].T, rtol=0, atol=1e-12
    )
    assert s.set_output(transform="pandas").transform(rows).columns.tolist() == ["x0", "x1", "x2"]
    assert isinstance(s.fit(samples(x)).transform(samples(x)), SamplesView)  # no frame of a view


def test_parts_of_views_are_what_counts(x):
    some = np.array([4, 0, 5])
    np.testing.assert_allclose(
        learnt(WinsorScaler().fit(samples(x)[some])), statistics(x[:, some]), rtol=1e-13
    )


@pytest.mark.slow
def test_a_pipeline_learns_bounds_from_training_folds_only(rng):
    x = rng.standard_cauchy((2, 5, 60))
    y = np.tanh(x).mean(0, keepdims=True)
    model = make_pipeline(WinsorScaler(), plain_regressor(4, cell="smgu", epochs=2, random_state=0))
    cv = [
        (train, test) for train, test in TimeSeriesSplit(2).split(np.arange(60)) if len(train) == 40
    ]
    model.fit(timesteps(x)[:40], timesteps(y)[:40])
    np.testing.assert_allclose(learnt(model[0]), statistics(x[:, :, :40]), rtol=1e-13)
    assert np.isfinite(model.predict(timesteps(x)[cv[0][1]])).all()
    found = cross_val_predict(model, samples(x), samples(y), cv=3)
    assert found.shape == (5, 60)


def test_errors(x):
    with pytest.raises(NotFittedError):
        WinsorScaler().transform(x)
    s = WinsorScaler().fit(x)
    before = learnt(s).copy()
    with pytest.raises(ShapeError, match=r"2 features .*WinsorScaler .*on 3"):
        s.transform(x[:2])
    with pytest.raises(ShapeError, match=r"WinsorScaler .*a tuple of 2"):
        s.fit((x, x))
    bad = x.copy()
    bad[2, :2] = np.inf
    with pytest.raises(DataError, match="feature 2 is infinite"):
        s.fit(bad)
    assert np.array_equal(learnt(s), before)
