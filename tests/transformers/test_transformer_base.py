"""Transformers step by step give what they give for whole series."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    SequenceFeatures,
    SequenceImputer,
    SequenceScaler,
    WinsorScaler,
    h5mmap,
    h5save,
    samples,
    stream,
    timesteps,
)
from fluxutils_py.errors import ShapeError, SpecError
from tests.plain_networks import plain_regressor

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
    with pytest.raises(ShapeError, match=r"\(3, 1\), got \(3,\): give x\[:, None\]$"):
        scaler.stream().step(np.zeros(3))
    with pytest.raises(ShapeError, match=r"state .* 4 series"):
        scaler.stream(4, [np.zeros(2)])
    with pytest.raises(SpecError, match=r"^n_series .*got 0$"):
        scaler.stream(0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transformer", [
    SequenceScaler(), WinsorScaler(), SequenceImputer(), SequenceImputer("constant"), SequenceImputer("ffill"),
])  # fmt: skip
def test_lists_of_series_are_transformed_one_by_one(rng, transformer, dtype):
    """Steps behind the end of a series are none: the statistics are those of one long series."""
    xs = [rng.normal([[50], [-3]], 3, size=(2, n)).astype(dtype) for n in (7, 12, 30, 1)]
    for x in xs[:3]:
        x[rng.random(x.shape) < 0.2] = np.nan
    found = transformer.fit(xs).transform(xs)
    assert isinstance(found, list)
    assert [f.dtype for f in found] == [np.dtype(dtype)] * 4
    alone = clone(transformer).fit(np.concatenate(xs, 1)[:, None])
    for x, f in zip(xs, found, strict=True):
        assert np.allclose(
            f, alone.transform(x[:, None])[:, 0], rtol=1e-6, atol=1e-6, equal_nan=True
        )
    if hasattr(transformer, "inverse_transform"):
        back = transformer.inverse_transform(found)
        assert all(
            np.allclose(b, x, rtol=1e-6, atol=1e-5, equal_nan=True)
            for b, x in zip(back, xs, strict=True)
        )


@pytest.mark.slow
def test_a_pipeline_takes_lists_of_series(rng):
    xs = [rng.normal(size=(2, n)) for n in (7, 12, 30, 9)]
    ys = [500 + x[:1].cumsum(1) for x in xs]
    settings = {"hidden_size": 3, "epochs": 2, "seqsize": 5, "random_state": 0}
    model = make_pipeline(
        SequenceImputer("ffill"), SequenceScaler(), plain_regressor(**settings)
    ).fit(xs, ys)
    assert model[-1].target_mean_ == pytest.approx(np.concatenate(ys, 1).mean())
    by_hand = SequenceScaler().fit_transform(xs)
    wanted = plain_regressor(**settings).fit(by_hand, ys).predict(by_hand)
    assert all(np.array_equal(a, b) for a, b in zip(model.predict(xs), wanted, strict=True))


@pytest.mark.parametrize("strategy", ["mean", "ffill"])
def test_a_pipeline_with_a_scaled_target_streams(rng, strategy):
    x = rng.normal(size=(2, N, T))
    y = 1e6 + 30 * x[:1].cumsum(2)
    settings = {"hidden_size": 3, "epochs": 2, "seqsize": 5, "random_state": 0}
    model = make_pipeline(
        SequenceImputer(strategy), SequenceScaler(), plain_regressor(**settings)
    ).fit(x, y)
    x[rng.random(x.shape) < 0.2] = np.nan
    live = stream(model, N)
    first = [live.step(x[:, :, t]) for t in range(4)]
    again = stream(model, N, live.state)
    found = np.stack([*first, *(again.step(x[:, :, t]) for t in range(4, T))], 2)
    assert np.allclose(found, model.predict(x), rtol=1e-12)
    live.reset(2)
    anew = model.predict(x[:, 2:3, 4:])
    assert live.step(x[:, :, 4])[:, 2] == pytest.approx(anew[:, 0, 0], rel=1e-12)


PADDED = [
    SequenceScaler(),
    WinsorScaler(),
    SequenceImputer(),
    SequenceImputer("constant"),
    SequenceImputer("ffill"),
    SequenceFeatures([1, 3], exponential_means=[2], rolling=[4]),
]


def stored(a, path):
    h5save(path, {"x": a})
    return h5mmap(path, "x")


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("transformer", PADDED, ids=str)
def test_padding_stays_and_has_no_say(rng, transformer, at_start, tmp_path):
    lengths = np.array([7, 12, 30, 1, 22])
    xs = [rng.normal([[50], [-3]], 3, size=(2, n)) for n in lengths]
    for x in xs[:3]:
        x[:, 3:5] = np.nan  # a gap within a series, which is no padding
    first = (30 - lengths) * at_start
    steps = np.arange(30)
    outside = (steps < first[:, None]) | (steps >= (first + lengths)[:, None])
    padded = np.full((2, 5, 30), np.nan)
    padded[:, ~outside] = np.concatenate(xs, 1)
    of_list = clone(transformer).fit(xs)
    wanted = of_list.transform(xs)
    expected = np.full((len(wanted[0]), 5, 30), np.nan)
    expected[:, ~outside] = np.concatenate(wanted, 1)
    results = {
        "array": clone(transformer).fit_transform(padded),
        "samples": clone(transformer).fit(samples(padded)).transform(samples(padded)).native,
        "file": of_list.transform(stored(padded, tmp_path / "x.h5")),
        "list": np.stack(of_list.transform([padded[:, n] for n in range(5)]), 1),
    }
    for found in results.values():
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-12)
    turned = [4, 0, 2]
    some = of_list.transform(samples(padded)[turned])
    np.testing.assert_allclose(np.asarray(some.native), expected[:, turned], rtol=0, atol=1e-12)
    part = of_list.transform(timesteps(padded)[4:20])
    np.testing.assert_allclose(np.asarray(part.native), expected[:, :, 4:20], rtol=0, atol=1e-12)
    live = of_list.stream(5)
    found = np.stack([live.step(padded[:, :, t]) for t in steps], 2)
    known = steps < (first + lengths)[:, None]  # where a series ends, a stream cannot know
    np.testing.assert_allclose(found[:, known], expected[:, known], rtol=0, atol=1e-12)
