"""Arrays that read what is asked of them: the values of NumPy's indexing, no more than those read."""

import os
import pickle

import h5py
import numpy as np
import pytest

from fluxutils_py import h5mmap, h5save
from fluxutils_py.data import LazyArray
from fluxutils_py.data.lazy import as_picklable, read_block, select
from fluxutils_py.errors import DataError

F, N, T = 3, 6, 11
X = np.random.default_rng(0).normal(size=(F, N, T))
SERIES = [None, range(1, 5), range(5, 0, -2), np.array([4, 0, 0, 5, 1]), np.array([2]), range(0)]
STEPS = [
    None,
    range(2, 9),
    range(0, 11, 4),
    np.array([0, 1, 2, 5, 9, 10]),
    np.array([7, 3, 3]),
    range(4, 4),
]


class Recording:
    """An array that takes three slices, as windows are cut, and remembers them."""

    ndim = 3

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.asked = array, array.shape, array.dtype, []

    def __getitem__(self, key):
        assert all(isinstance(k, slice) and k.step in (None, 1) for k in key)
        found = self.array[key]
        self.asked.append(found.shape)
        return found

    @property
    def values(self):
        return sum(int(np.prod(shape)) for shape in self.asked)


def part(series, steps):
    """The part of X, by NumPy."""
    n = np.arange(N) if series is None else np.asarray(series, dtype=int)
    t = np.arange(T) if steps is None else np.asarray(steps, dtype=int)
    return X[:, n][:, :, t]


def sources(tmp_path):
    path = os.fspath(tmp_path / "x.h5")
    h5save(path, {"x": X})
    with h5py.File(tmp_path / "c.h5", "w") as f:
        f.create_dataset("x", data=X, chunks=(2, 4, 4))
        f.create_dataset("t", data=X.T, chunks=(4, 4, 2))
    return {
        "memory": X,
        "time-major": np.ascontiguousarray(X.T).T,
        "three slices": Recording(X),
        "h5py": h5py.File(tmp_path / "c.h5", "r")["x"],
        "h5mmap": h5mmap(path, "x"),
        "h5lazy": h5mmap(os.fspath(tmp_path / "c.h5"), "t", axes="TNF"),
        "lazy of lazy": LazyArray(LazyArray(X[:, ::-1], range(N - 1, -1, -1)), None, range(T)),
    }


@pytest.mark.parametrize("series", SERIES, ids=repr)
@pytest.mark.parametrize("steps", STEPS, ids=repr)
def test_any_choice_of_series_and_steps_is_that_of_numpy(series, steps, tmp_path):
    wanted = part(series, steps)
    for name, source in sources(tmp_path).items():
        found = select(source, series, steps)
        assert (found is source) == (series is None and steps is None)
        for a in (
            LazyArray(source, series, steps),
            LazyArray(source) if found is source else found,
        ):
            assert a.shape == wanted.shape, name
            assert a.dtype == wanted.dtype
            assert np.array_equal(np.asarray(a), wanted), name
            assert np.array_equal(a[:, 1:, ::2], wanted[:, 1:, ::2]), name
            assert np.array_equal(a[1:2, ::-1], wanted[1:2, ::-1]), name
            if wanted.size:
                assert np.array_equal(a[-1, 0], wanted[-1, 0]), name
                assert np.array_equal(a[:, [0, -1, 0]], wanted[:, [0, -1, 0]]), name
                assert np.array_equal(a[..., [-1, 0]], wanted[..., [-1, 0]]), name
                assert a[0, 0, -1] == wanted[0, 0, -1], name


def test_attributes_are_those_of_the_array():
    a = LazyArray(X, np.array([4, 0]), range(2, 9))
    assert (a.shape, a.size, a.nbytes, a.ndim, len(a)) == ((F, 2, 7), F * 14, F * 14 * 8, 3, F)
    assert repr(a) == "LazyArray(shape=(3, 2, 7), dtype=float64, of ndarray)"


def test_at_hand_is_what_the_source_says(tmp_path):
    s = sources(tmp_path)
    for name in ("memory", "time-major", "lazy of lazy"):
        assert LazyArray(s[name], np.array([4, 0])).nonblocking
    for name in ("h5py", "h5lazy", "three slices"):
        assert not LazyArray(s[name], np.array([4, 0])).nonblocking


def test_runs_of_neighbours_are_read_in_one_go_and_nothing_between_them():
    source = Recording(X)
    a = LazyArray(source, np.array([4, 5, 0, 1, 1]), np.array([0, 1, 2, 7, 8]))
    assert source.asked == []
    assert np.array_equal(a[...], part(a.series, a.steps))
    # each place once
    assert sorted(source.asked) == sorted([(F, n, t) for t in (3, 2) for n in (2, 2)])
    source.asked.clear()
    assert np.array_equal(a[:, 1:3, 2:4], part(a.series, a.steps)[:, 1:3, 2:4])
    assert source.values == F * 4
    source.asked.clear()
    a[:, [0, 1], 4], a[:, :, 4:4], a[:, []]
    assert source.values == F * 2


def test_functions_are_applied_in_order_to_what_is_read():
    seen = []

    def note(block):
        seen.append(block.shape)
        return block * 2

    a = LazyArray(X, range(1, 5), None, (note, lambda b: b[:1] + 1, np.float32))
    assert (a.shape, a.dtype) == ((1, 4, T), np.float32)
    assert np.array_equal(a[:, 2:, 3:5], np.float32(X[:1, 3:5, 3:5] * 2 + 1))
    assert np.array_equal(a[0, 0], np.float32(X[0, 1] * 2 + 1))
    # one step of one series tells the features and the type of the result
    assert seen == [(F, 1, 1), (F, 2, 2), (F, 1, T)]
    source = X.copy()
    LazyArray(source, None, None, (np.negative,))[...]
    assert np.array_equal(source, X)


def test_what_can_be_a_numpy_view_is_one():
    assert select(X, None, None) is X
    assert select(X, range(N), range(T)) is X
    for series, steps in ((range(1, 4), None), (None, range(0, T, 3)), (range(2), range(5, 9))):
        found = select(X, series, steps)
        assert isinstance(found, np.ndarray)
        assert np.shares_memory(found, X)
        assert np.array_equal(found, part(series, steps))
    for series, steps in ((np.array([1, 2]), None), (None, range(3, 3))):
        assert isinstance(select(X, series, steps), LazyArray)


def test_a_map_is_not_read_by_selecting(tmp_path):
    m = sources(tmp_path)["h5mmap"]
    found = select(m, range(1, 3), range(2, 5))
    assert type(found) is type(m)  # so that its pages may still be asked for
    assert np.shares_memory(found, m)


def test_both_axes_by_index_arrays():
    n, t = np.array([4, 0, 4]), np.array([9, 2, 3, 1])
    for source in (X, Recording(X), LazyArray(Recording(X))):
        assert np.array_equal(read_block(source, range(F), n, t), X[:, n][:, :, t])


@pytest.mark.parametrize(
    "name", ["memory", "time-major", "h5py", "h5mmap", "h5lazy", "lazy of lazy"]
)
def test_a_pickled_array_is_the_same(name, tmp_path):
    source = sources(tmp_path)[name]
    a = LazyArray(source, np.array([4, 0]), range(2, 9, 2), (np.negative,))
    again = pickle.loads(pickle.dumps(a))
    assert np.array_equal(again, -part(a.series, a.steps))
    assert np.array_equal(pickle.loads(pickle.dumps(as_picklable(source))), X)


def test_of_a_closed_file_nothing_can_be_sent(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as f:
        dataset = f.create_dataset("x", data=X)
    with pytest.raises(DataError) as caught:
        as_picklable(dataset)
    assert "file that was closed" in str(caught.value)
    assert "h5mmap" in str(caught.value)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("offset", [0, 3, 4096, 5000])
def test_a_view_of_a_memory_map_is_sent_as_the_place_of_its_bytes(mode, offset, tmp_path):
    whole = np.arange(4 * 5 * 6, dtype="<f4").reshape(4, 5, 6)
    (tmp_path / "x").write_bytes(b"\1" * offset + whole.tobytes())
    m = np.memmap(tmp_path / "x", "<f4", mode, offset, whole.shape)
    for cut in (
        lambda a: a,
        lambda a: a.T,
        lambda a: a[1:, ::-2, 2:].T[:, 1:],
        lambda a: a[1:].view(np.ndarray)[:, 2:],
        lambda a: a[::-1, ::-1, ::-1],
        lambda a: a[:, None, 2],
        lambda a: a[2:][1:].transpose(2, 0, 1),
    ):
        sent = pickle.dumps(as_picklable(cut(m)))
        assert np.array_equal(pickle.loads(sent), cut(whole))
        assert (b"/x" in sent) == (mode != "c")


def test_what_was_written_to_a_map_is_seen_elsewhere_and_copies_on_write_are_not_shared(tmp_path):
    whole = np.zeros((4, 5, 6))
    (tmp_path / "x").write_bytes(whole.tobytes())
    written = np.memmap(tmp_path / "x", float, "r+", shape=whole.shape)
    written[1] = 5
    own = np.memmap(tmp_path / "x", float, "c", shape=whole.shape)
    own[2] = 7
    assert np.array_equal(pickle.loads(pickle.dumps(LazyArray(written.T))), written.T)
    assert np.array_equal(pickle.loads(pickle.dumps(LazyArray(own.T))), own.T)
    assert not np.array_equal(own, written)


def test_what_was_computed_from_a_map_is_sent_as_data(tmp_path):
    whole = np.arange(24.0).reshape(2, 3, 4)
    (tmp_path / "x").write_bytes(whole.tobytes())
    m = np.memmap(tmp_path / "x", float, "r", shape=whole.shape)
    for a, wanted in (
        (m + 1, whole + 1),
        (m[[1, 0]], whole[[1, 0]]),
        (m.copy(), whole),
        (m.astype("f4"), whole),
    ):
        assert np.array_equal(pickle.loads(pickle.dumps(as_picklable(a))), wanted)
