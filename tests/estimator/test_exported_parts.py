"""Transformers and decoders as modules give what they give in NumPy."""

import numpy as np
import pytest
import torch
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
)

from fluxutils_py import SequenceImputer, SequenceScaler, WinsorScaler
from fluxutils_py.errors import ExportError
from fluxutils_py.estimator.model_export import (
    inverse_target_module,
    transformer_module,
)
from fluxutils_py.inputs.labels import Classify, LabelDecoder
from fluxutils_py.inputs.target_codec import TargetScale


@pytest.fixture
def x(rng):
    """(F, N, T) with a large mean and missing values."""
    x = rng.normal([[[1e4]], [[-3.0]], [[0.0]]], [[[2.0]], [[0.1]], [[30.0]]], size=(3, 7, 43))
    x[rng.random(x.shape) < 0.2] = np.nan
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "made",
    [SequenceScaler(), SequenceScaler(with_mean=False), WinsorScaler(), SequenceImputer()],
    ids=repr,
)
def test_our_transformers(made, dtype, x):
    x = x.astype(dtype)
    wanted = made.fit(x).transform(x)
    found = (
        transformer_module(made, "step", 3)(torch.from_numpy(x.transpose(2, 1, 0).copy()))
        .numpy()
        .transpose(2, 1, 0)
    )
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def test_the_forward_fill_carries_its_last_values(x):
    x[:, 0, 1:5] = np.nan  # before the first input, a series has not begun
    made = SequenceImputer("ffill").fit(x)
    part, live = transformer_module(made, "step", 3), made.stream(7)
    state = part.initial[0].of(7)
    for t in range(43):
        y, state = part(torch.from_numpy(x[:, :, t].T.copy()), state)
        np.testing.assert_array_equal(y.numpy().T, live.step(x[:, :, t]))
        np.testing.assert_array_equal(state.numpy(), live.state[0].numpy())


SCALERS = [
    StandardScaler(),
    StandardScaler(with_mean=False),
    StandardScaler(with_std=False),
    RobustScaler(),
    RobustScaler(with_centering=False),
    RobustScaler(with_scaling=False),
    MaxAbsScaler(),
    MinMaxScaler(),
]
scalers_of_scikit_learn = pytest.mark.parametrize("made", SCALERS, ids=repr)


@scalers_of_scikit_learn
def test_scalers_of_scikit_learn(made, rng):
    rows = rng.normal(50, 3, size=(40, 3))
    found = transformer_module(made.fit(rows), "step", 3)(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(found, made.transform(rows), rtol=1e-12)


@scalers_of_scikit_learn
def test_scalers_of_targets_are_undone(made, rng):
    rows = rng.normal(50, 3, size=(40, 2))
    scaled = made.fit(rows).transform(rows)
    found = inverse_target_module(made, 2)(torch.from_numpy(scaled)).numpy()
    np.testing.assert_allclose(found, made.inverse_transform(scaled), rtol=1e-12)


@pytest.mark.parametrize(
    ("func", "inverse"), [(np.log1p, np.expm1), (np.arcsinh, np.sinh), (None, None)]
)
def test_functions_of_numpy_become_those_of_torch(func, inverse, rng):
    rows = rng.uniform(1, 3, size=(40, 3))
    made = FunctionTransformer(func, inverse).fit(rows)
    found = transformer_module(made, "step", 3)(torch.from_numpy(rows))
    np.testing.assert_allclose(found.numpy(), made.transform(rows), rtol=1e-12)
    np.testing.assert_allclose(inverse_target_module(made, 3)(found).numpy(), rows, rtol=1e-12)


def halve(x):
    return x / 2


def test_transformers_of_targets_that_cannot_be_undone_are_named(rng):
    rows = rng.normal(size=(40, 6))
    for made, said in (
        (
            QuantileTransformer(n_quantiles=5),
            r"QuantileTransformer, cannot be exported: .*StandardScaler, .* scale_tar",
        ),
        (
            StandardScaler(),
            r"StandardScaler, was fitted on rows of 6 columns and cannot be undone for the 1 outputs of",
        ),
        (
            FunctionTransformer(np.sqrt, halve, check_inverse=False),
            r"the inverse_func of TransformedTargetRegressor, halve, cannot be expo",
        ),
        (
            FunctionTransformer(np.abs, np.modf, check_inverse=False),
            r"the inverse_func of TransformedTargetRegressor, modf, cannot be expo",
        ),
    ):
        with pytest.raises(ExportError, match=said):
            inverse_target_module(
                made.fit(np.abs(rows)), 1 if isinstance(made, StandardScaler) else 6
            )


def test_other_transformers_are_named(rng):
    rows = rng.normal(size=(40, 6))
    with pytest.raises(ExportError, match=r"'quantiles' .*QuantileTransformer"):
        transformer_module(QuantileTransformer(n_quantiles=5).fit(rows), "quantiles", 6)
    with pytest.raises(
        ExportError,
        match=r"'scale' .*StandardScaler, .*6 columns",
    ):
        transformer_module(StandardScaler().fit(rows), "scale", 3)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_outputs_get_their_units_with_the_digits_of_the_targets(kind, rng):
    scale = TargetScale(np.array([1e6, 0.0]), np.array([3.0, 0.5]), np.dtype(kind))
    y = rng.normal(size=(5, 4, 2)).astype("float32")
    found = scale.as_module(torch.float32)(torch.from_numpy(y)).numpy()
    assert found.dtype == kind
    np.testing.assert_array_equal(found, scale.decode(y))


@pytest.mark.parametrize(
    "classes", [np.array([3, 7, 9]), np.array([0.5, 1.5, 2.0]), np.array(["a", "b", "c"])]
)
def test_labels_and_probabilities(classes, rng):
    scores = rng.normal(size=(5, 4, 3)).astype("float32")
    log_weight = np.log([1.0, 3.0, 0.5])
    decoder = LabelDecoder(classes, log_weight)
    label, probabilities = Classify(classes, log_weight)(torch.from_numpy(scores))
    named = classes[label.numpy()] if classes.dtype.kind == "U" else label.numpy()
    np.testing.assert_array_equal(named, decoder.labels(scores))
    np.testing.assert_allclose(probabilities.numpy(), decoder.probabilities(scores), rtol=1e-6)
