"""Digests of data see every value that is walked through, and nothing else."""

import numpy as np
import pytest

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data import digest as module
from fluxutils_py.data.digest import digest_arrays, digest_sample, digest_series, digest_weight
from fluxutils_py.data.segments import Segments

F, N, T = 3, 7, 11
X = np.random.default_rng(1).normal(size=(F, N, T))
WHOLE = Segments.from_lengths(N, T)


class Lazy:
    """Takes slices, and counts the values that were read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, 0

    def __getitem__(self, key):
        self.read += self.array[key].size
        return self.array[key]


def changed(x, place):
    x = x.copy()
    x[place] += 1
    return x


def digest(x, rows=WHOLE):
    return digest_series(SeriesArray(x, "x"), rows)


@pytest.mark.slow
@pytest.mark.parametrize("block", [20, 1 << 20])
def test_each_value_matters_and_so_does_its_place(monkeypatch, block):
    monkeypatch.setattr("fluxutils_py.data.blocks.BLOCK", block)
    each = {digest(changed(X, place)) for place in np.ndindex(X.shape)}
    others = {
        digest(X[:, ::-1]),
        digest(X[..., ::-1]),
        digest(X[::-1]),
        digest(np.roll(X, 1, 2)),
        digest(X),
    }
    assert len(each | others) == X.size + 5


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", "u1", "?"])
def test_orders_of_memory_and_of_bytes_do_not_matter(dtype):
    x = (X * 10).astype(dtype)
    series_major = np.ascontiguousarray(x.transpose(1, 2, 0)).transpose(2, 0, 1)
    strided = np.repeat(x, 2, 2)[..., ::2]
    others = [
        np.asfortranarray(x),
        series_major,
        strided,
        x.astype(x.dtype.newbyteorder(">")),
        Lazy(x),
    ]
    assert {digest(other) for other in others} == {digest(x)}


def test_what_no_row_walks_through_may_be_anything():
    # 1 has two stretches
    rows = Segments(np.array([0, 1, 1, 6]), np.array([0, 2, 5, 4]), np.array([11, 3, 4, 7]))
    live = np.zeros((N, T), bool)
    live[0], live[1, 2:9], live[6, 4:] = True, True, True
    whole = digest(X, rows)
    for n, t in np.ndindex(N, T):
        assert (digest(changed(X, (1, n, t)), rows) == whole) == (not live[n, t])
    assert digest(np.where(live, X, np.nan), rows) == whole


def test_folded_rows_are_the_rows_they_were_folded_from():
    assert digest(X, WHOLE.fold(21)) == digest(X)


def test_of_large_files_a_sample_is_read(monkeypatch):
    monkeypatch.setattr(module, "WHOLE", 1000)
    x = np.random.default_rng(1).normal(size=(2, 60, 500))
    lazy = Lazy(x)
    assert digest(lazy, Segments.from_lengths(60, 500)) is None
    lazy.read = 0
    whole = digest_sample(SeriesArray(lazy, "x"), Segments.from_lengths(60, 500))
    assert lazy.read == 2 * 8 * 8 * 8
    assert whole == digest_sample(SeriesArray(x, "x"), Segments.from_lengths(60, 500))
    for place in ((0, 0, 0), (1, 0, 499), (0, 59, 0), (1, 59, 499), (0, 8, 70)):
        assert (
            digest_sample(SeriesArray(changed(x, place), "x"), Segments.from_lengths(60, 500))
            != whole
        ), place
    assert digest(x, Segments.from_lengths(60, 500)) is not None  # in memory


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (4, 9, 8), (2, 5, 40)])
def test_samples_of_small_data_fit_in_them(shape):
    x = np.zeros(shape)
    rows = Segments.from_lengths(*shape[1:])
    last = changed(x, (-1, -1, -1))
    assert digest_sample(SeriesArray(x, "x"), rows) != digest_sample(SeriesArray(last, "x"), rows)


def test_weights_of_each_step_matter():
    def of(w):
        return digest_weight(SampleWeight(w, N, T), WHOLE)

    w = np.arange(1.0, N + 1)
    assert len({of(w), of(w[::-1]), of(w + 1)}) == 3
    steps = np.repeat(w[:, None], T, 1)
    assert of(w) == of(steps) == of(steps[None]) == of(steps.astype(int))
    assert len({of(changed(steps, place)) for place in np.ndindex(N, T)}) == N * T
    assert digest_weight(None, WHOLE) is None


def test_shapes_and_types_matter_where_arrays_stand_alone():
    a = np.arange(6.0)
    same = {digest_arrays(a), digest_arrays(a.astype(">f8")), digest_arrays(np.repeat(a, 2)[::2])}
    assert len(same) == 1
    assert (
        len(
            same
            | {digest_arrays(a.reshape(2, 3)), digest_arrays(a.astype("f4")), digest_arrays(a, a)}
        )
        == 4
    )
