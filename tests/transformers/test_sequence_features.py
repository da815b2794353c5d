"""SequenceFeatures: what pandas computes, in every form of data."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline

import fluxutils_py
from fluxutils_py import (
    SequenceFeatures,
    SequenceImputer,
    SequenceRegressor,
    h5mmap,
    h5save,
    samples,
    stream,
    timesteps,
)
from fluxutils_py.errors import ShapeError

F, N, T = 2, 3, 47
SETTINGS = {"lags": [1, 4], "exponential_means": [3, 9], "rolling": [2, 6]}


@pytest.fixture
def x(rng):
    x = 5 + 2 * rng.normal(size=(F, N, T))
    x[1, 2, 10:14] = np.nan
    x[:, 0, :3] = np.nan
    x[0, 1] = 7.0  # a constant
    return x


def slope(values):
    return np.polyfit(np.arange(len(values)), values, 1)[0] if len(values) > 1 else 0.0


def by_pandas(x):
    """(P, N, T), in the order of the transformer."""
    series = []
    for n in range(x.shape[1]):
        first = np.flatnonzero(~np.isnan(x[:, n]).all(0))[0]  # before it, there is padding
        frame = pd.DataFrame(x[:, n, first:].T).ffill().fillna(0.0)
        parts = [frame] + [frame.shift(k, fill_value=0.0) for k in SETTINGS["lags"]]
        parts += [frame.ewm(span=s).mean() for s in SETTINGS["exponential_means"]]
        for span in SETTINGS["rolling"]:
            window = frame.rolling(span, min_periods=1)
            parts += [window.mean(), window.std(ddof=0), window.apply(slope, raw=True)]
        values = pd.concat(parts, axis=1).to_numpy().T
        series.append(np.pad(values, ((0, 0), (first, 0)), constant_values=np.nan))
    return np.stack(series, axis=1)


def test_features_are_those_of_pandas(x):
    features = SequenceFeatures(**SETTINGS).fit(x)
    found = features.transform(x)
    np.testing.assert_allclose(found, by_pandas(x), rtol=0, atol=2e-7)
    assert features.n_features_out_ == len(found) == F * (3 + 2 + 6)
    assert len(features.get_feature_names_out()) == len(found)
    constant = features.get_feature_names_out().tolist().index("x0 deviation 6")
    assert (found[constant, 1] == 0).all()


def test_every_form_has_the_same_values(x, tmp_path):
    features = SequenceFeatures(**SETTINGS).fit(x)
    whole = features.transform(x)
    lists = features.transform([x[:, n, : T - n] for n in range(N)])
    for n, series in enumerate(lists):
        np.testing.assert_allclose(series, whole[:, n, : T - n], rtol=0, atol=1e-12)
    rows = clone(features).fit(samples(x)).transform(samples(x))
    np.testing.assert_allclose(np.asarray(rows.native), whole, rtol=0, atol=1e-12)
    steps = clone(features).fit(timesteps(x)).transform(timesteps(x)[20:])
    np.testing.assert_allclose(np.asarray(steps.native), whole[:, :, 20:], rtol=0, atol=1e-12)
    h5save(tmp_path / "x.h5", {"x": x})
    lazy = features.transform(h5mmap(tmp_path / "x.h5", "x"))
    assert not isinstance(lazy, np.ndarray)
    for start, stop in ((0, 5), (30, 47), (12, 13)):
        np.testing.assert_allclose(
            lazy[:, 1:, start:stop], whole[:, 1:, start:stop], rtol=0, atol=1e-12
        )
    again = pickle.loads(pickle.dumps(lazy))[:, :, :9]
    assert np.array_equal(again, lazy[:, :, :9], equal_nan=True)


def test_a_window_of_a_long_series_needs_no_more_than_its_memory():
    x = np.random.default_rng(0).normal(size=(1, 1, 5000))
    features = SequenceFeatures(exponential_means=[20], rolling=[80]).fit(x)
    whole = features.transform(x)

    class Counting:
        shape, dtype, ndim = x.shape, x.dtype, 3
        read = 0

        def __getitem__(self, key):
            found = x[key]
            Counting.read += found.size
            return found

    late = features.transform(Counting())[:, :, 4990:]
    np.testing.assert_allclose(late, whole[:, :, 4990:], rtol=0, atol=1e-12)
    assert Counting.read < 500


@pytest.mark.few
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stream_gives_each_step_and_goes_on_from_a_state(x, dtype):
    x = x.astype(dtype)
    features = SequenceFeatures(**SETTINGS).fit(x)
    whole = features.transform(x)
    assert whole.dtype == dtype
    live = features.stream(N)
    for t in range(T):
        if t == 20:
            live = features.stream(N, [s.clone() for s in live.state])
        atol = 1e-12 if dtype == "float64" else 5e-6
        np.testing.assert_allclose(live.step(x[:, :, t]), whole[:, :, t], rtol=0, atol=atol)
    live.reset(1)
    found = live.step(x[:, :, 0])
    np.testing.assert_allclose(found[:, 1], whole[:, 1, 0], rtol=0, atol=1e-6)
    assert np.abs(found[:, 2] - whole[:, 2, 0]).max() > 0.1


@pytest.mark.slow
def test_pipelines_predict_stream_save_and_export(x, tmp_path):
    pytest.importorskip("onnxruntime")
    x = np.nan_to_num(x, nan=5.0).astype("float32")
    y = x[:1].cumsum(2) / 50
    pipe = make_pipeline(
        SequenceFeatures(lags=[2], exponential_means=[9], rolling=()),
        SequenceRegressor(4, cell="gru", epochs=1, random_state=0),
    ).fit(samples(x), samples(y))
    whole = pipe.predict(x)
    live = stream(pipe, N)
    found = np.stack([live.step(x[:, :, t]) for t in range(T)], axis=2)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5)
    fluxutils_py.save(pipe, tmp_path / "pipe")
    assert np.array_equal(fluxutils_py.load(tmp_path / "pipe").predict(x), whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of exporters
        fluxutils_py.export(pipe, tmp_path / "pipe.onnx")
    assert fluxutils_py.check_export(tmp_path / "pipe.onnx", pipe, x) < 1e-5


def test_steps_are_rows_for_models_of_tables(x):
    x = np.nan_to_num(x, nan=5.0)
    y = x[:1].cumsum(2)
    rows = SequenceFeatures(lags=[1, 2]).fit_transform(timesteps(x[:, :1]))
    ridge = Ridge().fit(np.asarray(rows), y[0, 0])
    assert ridge.n_features_in_ == F * (3 + 3 + 9)


def test_names_follow_those_of_the_data():
    frame = pd.DataFrame({"speed": [1.0, 2.0, 3.0]})
    features = SequenceFeatures(lags=[2], exponential_means=(), rolling=()).fit(frame)
    assert features.get_feature_names_out().tolist() == ["speed", "speed lag 2"]
    assert features.get_feature_names_out(["v"]).tolist() == ["v", "v lag 2"]
    with pytest.raises(ValueError, match="has 2 names, fit had 1 features"):
        features.get_feature_names_out(["a", "b"])


def test_features_of_a_view_have_no_names_of_its_inputs(x):
    view = samples(x, feature_names=[f"input {i}" for i in range(len(x))])
    assert SequenceFeatures().fit_transform(view).feature_names is None
    assert SequenceImputer("ffill").fit_transform(view).feature_names == view.feature_names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lags": [0]}, "lags must be a positive integer, got 0"),
        ({"rolling": [2.5]}, "rolling must be a positive integer, got 2.5"),
        ({"exponential_means": (), "rolling": (), "keep_inputs": False}, "gives no features"),
    ],
)
def test_bad_settings_are_named(x, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SequenceFeatures(**settings).fit(x)


def test_other_features_are_refused(x):
    with pytest.raises(ShapeError):
        SequenceFeatures().fit(x).transform(x[:1])
