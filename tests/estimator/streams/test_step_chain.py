"""Scalers before a model, and the form of its outputs, as one step computes them."""

import numpy as np
import pytest
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from fluxutils_py import SequenceImputer, SequenceScaler, WinsorScaler
from fluxutils_py.estimator.streams.step_chain import output_form, scaler_of
from fluxutils_py.inputs.target_codec import TargetCodec, TargetScale

F, N, T = 3, 7, 11


@pytest.fixture
def x():
    x = np.random.default_rng(0).normal(50, 3, size=(F, N, T))
    x[1, 2, 3] = np.nan
    return x


def applied(scaler, step):
    """What a scaler makes of a step (F, N), by its definition."""
    mean, scale = scaler.mean[:, None], scaler.scale[:, None]
    if scaler.kind == "fill":
        return np.where(np.isnan(step), mean, step)
    if scaler.kind == "winsorize":
        step = np.clip(step, scaler.lower[:, None], scaler.upper[:, None])
        return np.nan_to_num((step - mean) / scale)
    assert scaler.kind == "standardize"
    return (step - mean) / scale


@pytest.mark.parametrize(
    "transformer",
    [
        SequenceScaler(),
        SequenceScaler(with_mean=False),
        SequenceScaler(with_std=False),
        WinsorScaler(),
        SequenceImputer(),
        SequenceImputer("constant", fill_value=3.0),
    ],
    ids=str,
)
def test_transformers_are_scalers(transformer, x):
    live = transformer.fit(x).stream(N)
    scaler = scaler_of(live.function)
    assert scaler is not None
    arrays = [a for a in scaler[1:] if a.size]
    assert all(a.shape == (F,) and a.dtype == np.float64 for a in arrays)
    np.testing.assert_allclose(applied(scaler, x[:, :, 3]), live.step(x[:, :, 3]), rtol=1e-14)


@pytest.mark.parametrize("with_mean", [True, False])
@pytest.mark.parametrize("with_std", [True, False])
def test_scalers_of_rows_are_too(with_mean, with_std, x):
    transformer = StandardScaler(with_mean=with_mean, with_std=with_std).fit(x[:, :, 0].T)
    expected = transformer.transform(x[:, :, 3].T).T
    got = applied(scaler_of(transformer), x[:, :, 3])
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13)


class Doubled(StandardScaler):
    def transform(self, X, copy=None):
        return 2 * super().transform(X, copy)


def test_other_transformers_are_none(x):
    rows = x[:, :, 0].T
    assert scaler_of(Doubled().fit(rows)) is None
    assert scaler_of(MinMaxScaler().fit(rows)) is None
    assert scaler_of(SequenceImputer("ffill").fit(x).stream(N).function) is None


@pytest.mark.parametrize("n_classes", [2, 5])
def test_forms_of_classifiers(n_classes):
    codec = TargetCodec(classes=np.array(list("abcde"))[:n_classes])
    expected = {
        "predict": "label",
        "predict_proba": "probabilities",
        "predict_log_proba": "log_probabilities",
        "decision_function": "difference" if n_classes == 2 else "raw",
    }
    for method, name in expected.items():
        form = output_form(codec, method, np.dtype("f4"))
        assert (form.method, form.n_outputs) == (name, n_classes)


def test_forms_of_regressors():
    assert output_form(TargetCodec(), "predict", np.dtype("f4")).method == "raw"
    mean, scale = np.array([1.0, 2]), np.array([3.0, 4])
    for of_targets, dtype in [("f4", "f4"), ("f8", "f8"), ("f2", "f4"), ("i8", "f8")]:
        codec = TargetCodec(scale=TargetScale(mean, scale, np.dtype(of_targets)))
        form = output_form(codec, "predict", np.dtype("f4"))
        assert (form.method, form.dtype, form.n_outputs) == ("scaled", np.dtype(dtype), 2)
    longest = TargetCodec(scale=TargetScale(mean, scale, np.dtype(np.longdouble)))
    assert output_form(longest, "predict", np.dtype("f4")) is None
