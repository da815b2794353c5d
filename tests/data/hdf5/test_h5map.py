"""Mapped datasets: any memory order, any view, in this process and in others."""

import copy
import ctypes
import itertools
import mmap
import operator
import os
import pickle
import time
from types import SimpleNamespace

import h5py
import joblib
import numpy as np
import pytest

from fluxutils_py.data import H5Map, SeriesArray, h5create, h5mmap, h5save
from fluxutils_py.data.hdf5.h5map import PAGE
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import H5DataError

F, N, T = 3, 5, 7
ORDERS = ["".join(p) for p in itertools.permutations("FNT")]
VIEWS = {
    "whole": lambda x: x,
    "steps": lambda x: x[:, :, 2:5],
    "series": lambda x: x[:, 1:4],
    "features": lambda x: x[1:],
    "window": lambda x: x[:, 1:4, 2:6],
    "one series": lambda x: x[:, 2],
    "one step": lambda x: x[:, :, -1],
    "one feature": lambda x: x[1],
    "one value": lambda x: x[1:2, 2:3, 3:4].reshape(()),
    "strided": lambda x: x[::2, ::2, 1::3],
    "backwards": lambda x: x[::-1, :, ::-2],
    "transposed": lambda x: x.T,
    "time-major": lambda x: x.transpose(2, 1, 0)[2:5],
    "series first": lambda x: x.transpose(1, 0, 2)[1:3],
    "new axis": lambda x: x[:, None],
    "as bytes": lambda x: x[:, 1:2, 1:2, None].transpose(1, 2, 0, 3)[..., :1].view("u1"),
    "repeated": lambda x: np.broadcast_to(x[:, :1, 2:5], (F, 4, 3), subok=True),
    "nothing": lambda x: x[:, 2:2],
}


def numbers(dtype="f4", shape=(F, N, T)):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def saved(tmp_path, x=None, axes="TNF", **before):
    x = numbers() if x is None else x
    h5save(tmp_path / "a.h5", before | {"x": x}, axes=axes)
    return h5mmap(tmp_path / "a.h5", "x")


@pytest.mark.parametrize("axes", ORDERS)
def test_memory_is_in_the_order_of_the_file(tmp_path, axes):
    x = saved(tmp_path, axes=axes)
    assert type(x) is H5Map
    assert np.array_equal(x, numbers())
    assert "".join(sorted("FNT", key=lambda c: -x.strides["FNT".index(c)])) == axes
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"].attrs["axes"] == axes
        assert np.array_equal(file["x"], numbers().transpose(["FNT".index(c) for c in axes]))


def test_a_map_is_read_only_unless_asked(tmp_path):
    x = saved(tmp_path)
    assert not x.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        x[0, 0, 0] = 1
    y = h5mmap(tmp_path / "a.h5", "x", mode="r+")
    y[1, 2, 3] = 99
    y[:, 1:2].flush()
    assert x[1, 2, 3] == 99
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"][3, 2, 1] == 99


def test_results_of_arithmetic_are_plain(tmp_path):
    x, plain = saved(tmp_path), numbers()
    assert type(x + 1) is type(x[:, [0, 2]]) is type(x[x > 3]) is type(x.mean(0)) is np.ndarray
    assert type(x.sum()) is type(x[0, 0, 0]) is np.float32
    assert type(x[:, 1]) is type(x.T) is H5Map
    assert np.array_equal(x + 1, plain + 1)
    assert np.array_equal(x[:, [3, 1]], plain[:, [3, 1]])
    assert np.array_equal(np.add.reduce(x, 1), plain.sum(1))
    y = h5mmap(tmp_path / "a.h5", "x", mode="r+")
    assert np.multiply(y, 2, out=y) is y
    y += 1
    assert np.array_equal(x, plain * 2 + 1)
    assert x.max() == y.max() == plain.max() * 2 + 1


def test_reading_past_the_end_is_an_error_and_not_a_crash(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(100))
    with pytest.raises(H5DataError) as caught:
        H5Map(str(path), "f4", (5, 5), (20, 4), 4)
    assert str(caught.value) == (
        f"{path}: the file has 100 bytes, the data in it reach to 104: it is truncated, or not "
        "completely written yet; write or copy it again, or close it where it is written"
    )


# -- other processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("axes", ORDERS)
def test_every_view_survives_pickling(tmp_path, axes):
    x, plain = saved(tmp_path, axes=axes, before=np.zeros(1, "u1")), numbers()
    for name, view in VIEWS.items():
        expected = view(plain)
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            data = pickle.dumps(view(x), protocol)
            found = pickle.loads(data)
            assert np.array_equal(found, expected), name
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
            assert len(data) < 500 + len(str(tmp_path))
        assert type(found) is (np.ndarray if name == "nothing" else H5Map)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_every_view_reaches_a_worker_right(tmp_path):
    big = numbers("f8", (3, 67, 101))
    plain, maps = [], []
    for axes in ("TNF", "FNT", "NFT"):
        (tmp_path / axes).mkdir()
        x = saved(tmp_path / axes, big, axes)
        plain += [view(big) for view in VIEWS.values()]
        maps += [view(x) for view in VIEWS.values()]
    with joblib.Parallel(n_jobs=2, max_nbytes=10) as parallel:
        found = parallel(joblib.delayed(np.array)(m) for m in maps)
        # views that are no longer H5Map, which joblib would send wrong if it took them for those of
        # an np.memmap
        bare = parallel(joblib.delayed(np.array)(np.asarray(m)) for m in maps)
        files = parallel(joblib.delayed(operator.attrgetter("filename"))(m) for m in maps if m.size)
    for a, b, c in zip(plain, found, bare, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    assert set(files) == {str(tmp_path / axes / "a.h5") for axes in ("TNF", "FNT", "NFT")}


def test_what_a_worker_writes_arrives(tmp_path):
    out = h5create(tmp_path / "a.h5", "out", (F, N, T), "f4")
    half = pickle.loads(pickle.dumps(out[:, 2:]))
    half[:] = 7
    assert (out[:, 2:] == 7).all()
    assert (out[:, :2] == 0).all()
    out.flags.writeable = False
    assert not pickle.loads(pickle.dumps(out)).flags.writeable


def test_copies_pickle_as_data(tmp_path):
    x = saved(tmp_path)
    for made in (x.copy(), copy.deepcopy(x), x.astype("f8")):
        os.rename(tmp_path / "a.h5", tmp_path / "gone.h5")
        found = pickle.loads(pickle.dumps(made))
        os.rename(tmp_path / "gone.h5", tmp_path / "a.h5")
        assert type(found) is np.ndarray
        assert np.array_equal(found, numbers())


def test_a_replaced_file_is_an_error_elsewhere(tmp_path):
    x = saved(tmp_path)
    data = pickle.dumps(x)
    saved(tmp_path, numbers() + 1)
    assert np.array_equal(x, numbers())
    with pytest.raises(H5DataError) as caught:
        pickle.loads(data)
    assert str(caught.value) == (
        f"{tmp_path}/a.h5: this is not the file that was mapped or opened, as it was: it has been "
        "replaced, copied or written to since; open it where it is needed with h5mmap, or map it "
        "again and send that"
    )
    os.unlink(tmp_path / "a.h5")
    with pytest.raises(FileNotFoundError, match=r"a\.h5"):
        pickle.loads(data)


# -- pages --------------------------------------------------------------------------------------------------


class Advised:
    """Stands for the memory of a map and notes what it is asked."""

    def __init__(self, size):
        self.size, self.calls = size, []

    def __len__(self):
        return self.size

    def madvise(self, option, start, length):
        assert option == mmap.MADV_WILLNEED
        assert start % PAGE == 0
        self.calls.append((start, length))


def observed(x):
    x._mmap = Advised(len(x._mmap))
    return x._mmap


def touched(x, *views):
    """Pages of a map in which an element of a view lies, one by one."""
    pages = set()
    for v in views:
        first = v.__array_interface__["data"][0] - x._address
        for index in np.ndindex(v.shape):
            byte = first + sum(i * s for i, s in zip(index, v.strides, strict=True))
            pages |= {byte // PAGE, (byte + v.itemsize - 1) // PAGE}
    return pages


def pages_of(calls):
    return [
        p for start, length in calls for p in range(start // PAGE, (start + length - 1) // PAGE + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("axes", ORDERS)
def test_just_the_pages_of_a_window_are_asked_for(tmp_path, axes):
    x = saved(tmp_path, numbers("f4", (4, 60, 400)), axes, before=np.zeros(999, "u1"))
    memory = observed(x)
    for view in (
        x[:, 10:20, 100:150], x[:, 59:, 399:], x[:, ::-7, 5:300:9], x[2], x.T[3:5], x[1, 2, 3:4], x[:, :, :1], x,
    ):  # fmt: skip
        x.willneed(view)
        assert set(pages_of(memory.calls)) == touched(x, view)
        assert len(pages_of(memory.calls)) == len(set(pages_of(memory.calls)))
        memory.calls.clear()
    rows = [x[:, n : n + 1, 100:150] for n in (50, 3, 4, 5, 29)]
    x.willneed(*rows)
    assert set(pages_of(memory.calls)) == touched(x, *rows)
    assert len(pages_of(memory.calls)) == len(set(pages_of(memory.calls)))


def test_what_is_not_in_the_map_is_left_alone(tmp_path):
    x = saved(tmp_path)
    memory = observed(x)
    for other in (np.zeros((2, 3)), x + 1, x[:, 2:2], x[:, [1, 2]]):
        x.willneed(other)
    x.willneed()
    assert memory.calls == []
    (x[:, [1, 2]].view(np.ndarray)).sum()
    x.copy().willneed(x)


def resident(x):
    """Which pages of the file are in memory."""
    vector = ctypes.create_string_buffer(-(-len(x._mmap) // PAGE))
    assert (
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(x._address), ctypes.c_size_t(len(x._mmap)), vector
        )
        == 0
    )
    return {i for i, byte in enumerate(vector.raw) if byte & 1}


def test_a_cold_window_is_read_and_nothing_else(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": np.ones((16, 256, 512), "f4")})  # 8 MiB, a step is 4 pages
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    x = h5mmap(path, "x")
    before = resident(x)
    if len(before) > 100:
        pytest.skip("this file system keeps its files in memory")
    window = x[:, 64:128, 100:140]
    x.willneed(window)
    expected = touched(x, window[:1])
    deadline = time.monotonic() + 10
    while not expected <= resident(x) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert expected <= resident(x)
    assert len(resident(x) - before - expected) < len(expected)  # the disk may fetch a few more


# -- windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ORDERS)
def test_series_reads_a_map_as_it_reads_an_array(tmp_path, axes):
    plain = numbers("f4", (4, 60, 400))
    x = SeriesArray(saved(tmp_path, plain, axes), "x")
    memory = observed(x.array)
    assert not x.in_memory
    assert not SeriesArray(np.asarray(x.array)[:, 1:], "x").in_memory
    assert SeriesArray(np.array(x.array), "x").in_memory
    whole = Segments.from_lengths(60, 400)
    folds = Segments(
        np.repeat(np.arange(5), 3), np.tile([0, 134, 267], 5), np.tile([134, 133, 133], 5)
    )
    for rows in (whole[10:20], whole[np.array([40, 3, 17, 18])], folds):
        memory.calls.clear()
        x.prefetch(rows, 30, 50)
        found = x.read(rows, 30, 50)  # asks for nothing more
        expected = [
            plain[:, n, t + 30 : t + 50].T for n, t in zip(rows.series, rows.start, strict=True)
        ]
        assert np.array_equal(found, np.stack(expected, 1))
        views = [
            x.array[:, n, t + 30 : t + 50] for n, t in zip(rows.series, rows.start, strict=True)
        ]
        assert set(pages_of(memory.calls)) == touched(x.array, *views)


def test_a_map_is_a_context_like_a_lazy_array(tmp_path):
    with saved(tmp_path) as x:
        assert isinstance(x, H5Map)
    assert np.isfinite(np.asarray(x)).all()  # still there: somebody refers to it


def test_of_a_map_pages_are_asked_for_until_none_was_waited_for_in_a_while(tmp_path, monkeypatch):
    x = saved(tmp_path, numbers("f4", (2, 3, 500)), "TNF")
    waited_before = {50, 51, 200}
    asked = []
    monkeypatch.setattr(H5Map, "willneed", lambda self, *views: asked.append(window))
    usage = lambda _: SimpleNamespace(ru_majflt=sum(w <= window for w in waited_before))  # noqa: E731
    monkeypatch.setattr("resource.getrusage", usage)
    series, rows = SeriesArray(x, "x"), Segments.from_lengths(3, 500)
    for window in range(400):
        series.prefetch(rows, window, window + 1)
        expected = np.asarray(x)[:, :, window : window + 1].transpose(2, 1, 0)
        # reading asks for nothing
        assert np.array_equal(series.read(rows, window, window + 1), expected)
    assert asked == [*range(51 + 65), *range(200, 200 + 65)]


@pytest.mark.parametrize(
    ("series", "start"),
    [([3, 0, 2], [4, 9, 4]), ([1, 2], [6, 7]), ([1, 2, 3], [5, 5, 5]), ([4, 0], [3, 3])],
)
def test_of_a_map_the_steps_of_a_window_are_asked_for_and_no_more(
    series, start, tmp_path, monkeypatch
):
    x, asked = saved(tmp_path, numbers("f4", (2, 5, 40)), "TNF"), []
    monkeypatch.setattr(H5Map, "willneed", lambda self, *views: asked.extend(views))
    rows = Segments(np.array(series), np.array(start), np.full(len(series), 20))
    SeriesArray(x, "x").prefetch(rows, 2, 9)
    wanted = [np.asarray(x)[:, n, s + 2 : s + 9] for n, s in zip(series, start, strict=True)]
    assert sorted(v for a in asked for v in a.ravel()) == sorted(
        v for a in wanted for v in a.ravel()
    )
