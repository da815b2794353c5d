"""Transformers step by step give what they give for whole series."""

import numpy as np
import pytest

from fluxutils_py import SequenceScaler, WinsorScaler
from fluxutils_py.errors import ShapeError, SpecError

F, N, T = 3, 5, 11


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transformer", [SequenceScaler(), WinsorScaler()])
def test_a_stream_of_steps_is_the_transform_of_the_series(rng, transformer, dtype):
    x = rng.normal(50, 3, size=(F, N, T)).astype(dtype)
    x[rng.random(x.shape) < 0.1] = np.nan
    stream = transformer.fit(x).stream(N)
    found = np.stack([stream.step(x[:, :, t]) for t in range(T)], 2)
    assert found.dtype == dtype
    assert np.array_equal(found, transformer.transform(x), equal_nan=True)
    assert stream.state == []
    stream.reset()


def test_steps_of_another_shape_are_named(rng):
    scaler = SequenceScaler().fit(rng.normal(size=(F, N, T)))
    with pytest.raises(ShapeError, match=r"^a step must have the shape \(F, N\) = \(3, 1\), got \(3,\)$"):
        scaler.stream().step(np.zeros(3))
    with pytest.raises(ShapeError, match=r"^state has the shapes \[\(2,\)\]; expected \[\] for 4 series$"):
        scaler.stream(4, [np.zeros(2)])
    with pytest.raises(SpecError, match=r"^n_series must be a positive integer, got 0$"):
        scaler.stream(0)
