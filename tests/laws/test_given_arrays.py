"""What is given is never changed, and float64 and float32 of the same numbers are learnt alike."""

import numpy as np
import pytest

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceFeatures,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
    samples,
    timesteps,
)
from fluxutils_py.auto.sequence_estimators import CELLS

N, T = 5, 48
RNG = np.random.default_rng(2)
# in the memory of time-major files, which tensors share
X = RNG.normal(size=(T, N, 2)).astype("float32").T
Y = np.stack([X[0].cumsum(1) * 0.3, np.roll(X[1], 1, 1)]).astype("float32")
Y[1, :, :20] = np.nan
W = RNG.uniform(0.5, 2, (N, T)).astype("float32")
LABELS = (X[:1].cumsum(2) > 0).astype("float32")
STARTS = np.array([0, 3, 0, 1, 0])
LENGTHS = np.array([T, T - 3, T - 9, T - 1, T])

KINDS = [
    *((kind, None) for kind in (Estimator, EstimatorRegressor, EstimatorClassifier)),
    *((SequenceRegressor, cell) for cell in ("auto", "linear", "linear+lstm", "kernels", *CELLS)),
    *((SequenceClassifier, cell) for cell in ("auto", "linear", "linear+lstm", "kernels", "lstm")),
]


class Given:
    """Arrays of one type that nobody may write to, and their bytes as they were."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.arrays = []

    def __call__(self, array):
        # a copy in the same order in memory
        array = array.astype(self.dtype if array.dtype.kind == "f" else array.dtype)
        array.flags.writeable = False
        self.arrays.append((array, array.tobytes()))
        return array

    def are_unchanged(self):
        return all(array.tobytes() == before for array, before in self.arrays)


def fitted(kind, cell, given):
    """An estimator of a few updates, which show that the data are the same, and its data."""
    own = {"spec": {"epochs": 4, "batchsize": 3, "seqsize": 16}}
    if cell in ("linear", "kernels"):
        own = {"cell": cell}
    elif cell:
        own = {"cell": cell, "hidden_size": 4, "max_updates": 8}
    y = LABELS if "Classifier" in kind.__name__ else Y
    w = W
    if cell == "kernels":
        y, w = y[0, :, -1], W[:, 0]
    x, y = given(X), given(y)
    est = kind(random_state=0, verbose=False, **own)
    return est.fit(x, y, given(w), starts=given(STARTS), lengths=given(LENGTHS)), x, y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this fit makes", "ignore:the fit learnt")
@pytest.mark.parametrize(("kind", "cell"), KINDS)
def test_an_estimator_changes_nothing_and_learns_the_same_from_float64(kind, cell):
    results = []
    for dtype in ("float32", "float64"):
        given = Given(dtype)
        est, x, y = fitted(kind, cell, given)
        outputs = est.decision_function if hasattr(est, "decision_function") else est.predict
        live = est.stream(N)
        for t in range(3):
            live.step(given(X[:, :, t]))
        results.append((outputs(x), est.score(x, np.nan_to_num(y))))
        assert outputs(x).dtype == dtype
        if cell not in ("auto", "linear", "kernels"):
            est.partial_fit(x, y)
        assert given.are_unchanged()
    (short, score), (long, expected) = results
    # of networks, after some updates
    tolerance = 2e-5 if cell in ("linear", "kernels") else 5e-3
    assert np.abs(short - long).max() < tolerance * np.abs(long).max()
    assert abs(score - expected) < tolerance


@pytest.mark.parametrize(
    "make",
    [
        SequenceScaler,
        WinsorScaler,
        SequenceFeatures,
        SequenceImputer,
        lambda: SequenceImputer("ffill"),
    ],
)
@pytest.mark.parametrize("form", [np.asarray, samples, timesteps])
def test_a_transformer_changes_nothing_and_gives_the_same_for_float64(make, form):
    gaps = X.copy(order="K")
    gaps[:, 1, 4:9] = np.nan
    results = []
    for dtype in ("float32", "float64"):
        given = Given(dtype)
        transformer = make()
        found = transformer.fit(form(given(gaps))).transform(form(given(gaps)))
        if hasattr(transformer, "inverse_transform"):
            found = transformer.inverse_transform(found)
        results.append(np.asarray(found))
        assert given.are_unchanged()
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
