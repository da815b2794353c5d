"""Where predictions are written."""

import numpy as np
import pytest

from fluxutils_py import Estimator, timesteps
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.estimator.predicting import PredictionWriter
from fluxutils_py.training.predictor import Prediction

G, N, T = 2, 7, 11
Y = np.random.default_rng(0).normal(size=(T, N, G))


def blocks():
    for n in (slice(0, 3), slice(3, N)):
        for t in (slice(0, 4), slice(4, T)):
            yield Prediction((Y[t, n],), n, t)


def test_blocks_in_any_order_fill_a_new_or_a_given_array():
    given = np.empty((G, N, T), "float32")
    for out in (None, given):
        writer = PredictionWriter(out, N, T)
        for block in list(blocks())[::-1]:
            writer.write(block)
        assert np.allclose(writer.result(), Y.T, rtol=0, atol=1e-7)
    assert writer.result() is given


def test_series_that_begin_late_have_nothing_before():
    writer = PredictionWriter(None, N, T, starts=np.arange(N))
    for block in blocks():
        writer.write(block)
    expected = np.full((G, N, T), np.nan)
    for n in range(N):
        expected[:, n, n:] = Y[: T - n, n].T
    assert np.array_equal(writer.result(), expected, equal_nan=True)


@pytest.mark.parametrize(("out", "error", "message"), [
    (np.empty((G, N, T + 1)), ShapeError, r"^out has shape \(2, 7, 12\); expected \(G, 7, 11\)"),
    ([np.empty((G, N, T)), 3], ShapeError, r"^out\[1\] must be an array of shape \(G, N, T\)"),
    (np.broadcast_to(0.0, (G, N, T)), DataError, r"^out is read-only"),
])  # fmt: skip
def test_what_cannot_be_written_to_is_found_before_anything_is(out, error, message):
    with pytest.raises(error, match=message):
        PredictionWriter(out, N, T)


def test_integers_cannot_hold_numbers():
    with pytest.raises(DataError, match=r"^out .*int64, .*float64"):
        PredictionWriter(np.zeros((G, N, T), int), N, T).write(next(blocks()))


def test_a_given_state_is_that_before_the_run_not_before_its_context():
    x = np.random.default_rng(0).normal(size=(3, 2, T))
    est = Estimator(spec={"epochs": 1, "batchsize": 2, "seqsize": T}).fit(x, x[:1])
    whole = est.predict(x)
    _, state = est.predict(x[:, :, :5], return_state=True)
    view = timesteps(x, context=3)[5:]
    found = est.predict(view, state=state)  # (T - 5, N), as the rows of the view
    np.testing.assert_allclose(found, whole[0, :, 5:].T, atol=1e-6)
