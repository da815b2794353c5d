"""Lazy arrays against NumPy indexing of the same numbers."""

import copy
import multiprocessing
import os
import pickle
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import joblib
import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from fluxutils_py import Estimator, SequenceScaler, Spec, net2vec, samples
from fluxutils_py.data import H5Lazy, LazyArray, SeriesArray, h5concat, h5mmap, h5save
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import H5DataError

F, N, T = 3, 11, 13
X = np.arange(F * N * T).reshape(F, N, T).astype("f4")
INDICES = [
    (slice(None), slice(None), slice(None)),
    (slice(None), slice(2, 5), slice(3, 9)),
    (slice(1, 2),),
    slice(0, 2),
    ...,
    (..., slice(4, 6)),
    (slice(None), ...),
    (1, ..., 4),
    (slice(None), slice(None, None, 3), slice(1, None, 4)),
    (slice(None), slice(None, None, -1), slice(-2, 2, -3)),
    (slice(None), slice(5, 2), slice(None)),
    (slice(None), slice(5, 99), slice(-4, None)),
    1,
    -1,
    (1, 2, 3),
    (np.int64(1), slice(None), -13),
    (slice(None), [1, 2, 3]),
    (slice(None), [3, 1, 1, 7], slice(2, 4)),
    (slice(None), np.array([-1, 0, 5]), 3),
    (slice(None), [], slice(2, 4)),
    ([2, 0],),
    (0, slice(2, 4), [1, 5]),
    (0, [1, 5]),
    (slice(None), slice(None), np.arange(T) % 3 == 0),
    (slice(None), np.zeros(N, bool)),
    (slice(None), np.array([4], "u8")),
]


def chunked(tmp_path, axes="TNF", x=X, **kwargs):
    options = {"chunks": (2, 3, 2), "compression": "gzip"} | kwargs
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x.transpose(["FNT".index(c) for c in axes]), **options).attrs[
            "axes"
        ] = axes
    return h5mmap(tmp_path / "a.h5", "x")


@pytest.mark.parametrize("axes", ["TNF", "FNT", "NFT"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_that_of_numpy(tmp_path, index, axes):
    with chunked(tmp_path, axes) as x:
        found, expected = x[index], X[index]
    assert np.shape(found) == np.shape(expected)
    assert np.array_equal(found, expected)
    assert found.dtype == expected.dtype


def test_what_is_read_is_the_callers(tmp_path):
    with chunked(tmp_path) as x:
        x[:, 1:3].read(range(F), range(2), range(T))[...] = 0
        block = x[:, [1, 2]]
        block[...] = 0
        assert np.array_equal(x[...], X)


def test_slices_are_lazy_as_those_of_a_map_are_views(tmp_path):
    plain = X[:, ::2][..., 9:3:-2][1:]
    with chunked(tmp_path) as x:
        part = x[:, ::2][..., 9:3:-2][1:]
        assert not isinstance(part, np.ndarray)
        assert (part.shape, part.dtype) == (plain.shape, plain.dtype)
        np.testing.assert_array_equal(part, plain)
        np.testing.assert_array_equal(part[0, [2, 0]], plain[0, [2, 0]])
        assert type(1 - part) is np.ndarray
        np.testing.assert_array_equal(1 - part, 1 - plain)
        assert (part == plain).all()
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), plain)
        h5save(tmp_path / "c.h5", {"x": part})
        np.testing.assert_array_equal(h5mmap(tmp_path / "c.h5", "x"), plain)
    np.testing.assert_array_equal(part, plain)  # though the whole is closed
    with pytest.raises(H5DataError, match="was closed"):
        x[:, 1:2]


def test_slices_of_a_lazy_array_keep_the_names_of_their_features(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", data=X, chunks=True)
        dataset.attrs.update({"axes": "FNT", "feature_names": list("abc")})
    h5save(tmp_path / "b.h5", {"x": X}, feature_names={"x": list("abc")})
    for name in "ab":
        x = h5mmap(tmp_path / f"{name}.h5", "x")
        assert x[1:, :4].feature_names == x[1:][..., :2].feature_names == ("b", "c")
        assert LazyArray(x[1:]).feature_names == ("b", "c")


@pytest.mark.slow
def test_a_training_split_of_a_file_larger_than_memory(tmp_path):
    n, n_steps = 10**6, 10**5  # 800 GB
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset(
            "x", (n_steps, n, 2), "f4", chunks=(100, 50, 2), compression="gzip"
        )
        dataset.attrs["axes"] = "TNF"
        dataset[:100, -50:] = 7
    with h5mmap(tmp_path / "a.h5", "x") as x:
        parts = {"slice": x[:, n // 2 :], "slices": x[:, : n - 7][:, n // 2 :, :-1][:1]}
        train, test = train_test_split(samples(x), test_size=0.25, shuffle=False)
        parts |= {"train": train.native, "test": test.native}
        for name, part in parts.items():
            last = part[:, -60:, :3] if name != "train" else part[:, :60, :3]
            expected = np.zeros((len(part), 60, 3), "f4")
            expected[:, {"slices": 17}.get(name, 10) :] = 0 if name == "train" else 7
            np.testing.assert_array_equal(last, expected)
        scaled = SequenceScaler().fit(x[:, -60:, :100]).transform(x[:, 5:])
        assert scaled.shape == (2, n - 5, n_steps)
        assert not isinstance(scaled, np.ndarray)


@pytest.mark.slow
def test_a_fit_on_slices_is_that_on_the_same_numbers_in_memory(tmp_path):
    values = X / X.max()
    spec = Spec(epochs=2, batchsize=3, seqsize=4)
    plain = Estimator(spec=spec, random_state=0).fit(values[:2, :7], values[2:, :7])
    with chunked(tmp_path, x=values) as x:
        est = Estimator(spec=spec, random_state=0)
        est.fit(x[:2, :7], x[2:, :7], validation_data=(x[:2, 7:], x[2:, 7:]))
        assert np.array_equal(net2vec(est.model_), net2vec(plain.model_))
        assert np.array_equal(est.predict(x[:2, 7:]), plain.predict(values[:2, 7:]))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, "index 3 is out of bounds for axis 0 with size 3"),
        ((0, -12), "index -12 is out of bounds for axis 1 with size 11"),
        ((0, [1, 11]), "index 11 is out of bounds for axis 1 with size 11"),
        ((0, 0, 0, 0), "too many indices: the array has 3 axes, got 4 indices"),
        ((..., ...), "an index can have only one '...'"),
        (
            ([1], [2]),
            "arrays of indices are taken along one axis only; use slices along the others",
        ),
        ((0, [True, False]), "a mask along axis 1 must have 11 values, got shape (2,)"),
        (
            None,
            "an index must be an integer, a slice, '...', or one list of integers or booleans, "
            "got None",
        ),
        (
            1.5,
            "an index must be an integer, a slice, '...', or one list of integers or booleans, "
            "got 1.5",
        ),
    ],
)
def test_bad_indices(tmp_path, index, message):
    with chunked(tmp_path) as x, pytest.raises(IndexError) as caught:
        x[index]
    assert str(caught.value) == message


def test_face(tmp_path):
    with chunked(tmp_path) as x:
        assert not isinstance(x, np.ndarray)
        assert (x.shape, x.ndim, x.size, x.nbytes, len(x)) == (
            (F, N, T),
            3,
            F * N * T,
            F * N * T * 4,
            F,
        )
        assert repr(x) == f"H5Lazy('{tmp_path}/a.h5', 'x', shape=(3, 11, 13), dtype=float32)"
        assert np.array_equal(np.asarray(x), X)
        assert np.asarray(x, "f8").dtype == "f8"
        assert np.array_equal(list(x), list(X))
        with pytest.raises(ValueError, match="without copying it"):
            np.array(x, copy=False)
        with pytest.raises(TypeError):
            x[0] = 1
    assert repr(x) == f"H5Lazy('{tmp_path}/a.h5', 'x', shape=(3, 11, 13), dtype=float32, closed)"


@pytest.mark.parametrize("dtype", ["f2", ">f4", "i1", "u8", "?", ">i2"])
def test_number_formats(tmp_path, dtype):
    plain = (X % 2).astype(dtype)
    with chunked(tmp_path, x=plain) as x:
        assert x.dtype.str == plain.dtype.str
        assert np.array_equal(x[:, [3, 1]], plain[:, [3, 1]])


def test_closing(tmp_path):
    x, y = chunked(tmp_path), h5mmap(tmp_path / "a.h5", "x")
    x.close()
    x.close()
    assert (x.closed, y.closed) == (True, False)
    assert np.array_equal(y[...], X)
    with pytest.raises(H5DataError) as caught:
        x[:, 0]
    assert (
        str(caught.value) == f"{tmp_path}/a.h5: dataset 'x' was closed; open it again with h5mmap"
    )
    assert pickle.loads(pickle.dumps(x)).closed
    y.close()
    h5py.File(tmp_path / "a.h5", "r+").close()


def test_what_cannot_be_read_leaves_the_file_closed(tmp_path):
    x = chunked(tmp_path)
    sent = pickle.dumps(x)
    x.close()
    with pytest.raises(H5DataError, match="'y' cannot be opened") as caught:
        H5Lazy(tmp_path / "a.h5", "y")
    with h5py.File(tmp_path / "a.h5", "r+") as file:  # refused while it is open for reading
        del file["x"]
    assert caught.tb  # holds the frames, and all that they held
    received = pickle.loads(sent)
    with pytest.raises(H5DataError, match=r"a\.h5.*") as caught:
        received[:, 0]
    h5py.File(tmp_path / "a.h5", "r+").close()
    assert caught.tb


def test_a_file_that_breaks_later(tmp_path):
    x = chunked(tmp_path)
    data = pickle.dumps(x)
    size = os.path.getsize(tmp_path / "a.h5")
    with open(tmp_path / "a.h5", "r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    with pytest.raises(H5DataError) as caught:
        [x[:, :, step] for step in range(T)]
    assert str(caught.value).startswith(f"{tmp_path}/a.h5: dataset 'x' cannot be read at (slice(")
    x.close()
    h5save(tmp_path / "a.h5", {"x": X})
    with pytest.raises(H5DataError, match=r"not the file .*mapped or opened"):
        pickle.loads(data)[0]
    os.unlink(tmp_path / "a.h5")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        pickle.loads(data)[0]


@pytest.mark.slow
def test_more_sources_than_files_may_be_open(tmp_path):
    """HDF5 itself would give zeros for those that it cannot open."""
    for i in range(40):
        h5save(tmp_path / f"{i}.h5", {"x": np.full((2, 1, 3), i + 1)})
    h5concat(tmp_path / "all.h5", [tmp_path / f"{i}.h5" for i in range(40)], 1)
    x = h5mmap(tmp_path / "all.h5", "x")
    limits, lowest_free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 20, limits[1]))
    try:
        with pytest.raises(H5DataError) as caught:
            np.asarray(x)
        assert x[0, :5, 0].tolist() == [1, 2, 3, 4, 5]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert str(caught.value) == (
        f"{tmp_path}/all.h5: dataset 'x' is virtual and needs more files open at once than this "
        "process may have (Too many open files); raise the limit, as with `ulimit -n 65536`, or "
        "copy it with h5concat(..., virtual=False)"
    )
    assert x[0, :, 0].tolist() == list(range(1, 41))
    x.close()


# -- processes and threads ----------------------------------------------------------------------------------


def test_pickles_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chunked(tmp_path).close()
    x = h5mmap("a.h5", "x")
    data = pickle.dumps(x)
    assert len(data) < 1000
    monkeypatch.chdir("/")
    with pickle.loads(data) as other, copy.copy(x) as third, copy.deepcopy(x) as fourth:
        for array in (other, third, fourth):
            assert np.array_equal(array[:, 2:4], X[:, 2:4])
    assert np.array_equal(x[...], X)
    x.close()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_reaches_workers(tmp_path):
    with chunked(tmp_path) as x:
        found = joblib.Parallel(n_jobs=2)(joblib.delayed(np.asarray)(x) for _ in range(3))
    assert all(np.array_equal(f, X) for f in found)


@pytest.mark.slow
def test_reads_in_forked_processes(tmp_path):
    """While another thread of the parent is reading all the time."""
    x = chunked(tmp_path, chunks=(1, 1, 1))
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            wrong.extend([] if np.array_equal(x[:, 1:4], X[:, 1:4]) else [1])

    def child(queue):
        queue.put(np.array_equal(x[...], X) and np.array_equal(x[:, [3, 1]], X[:, [3, 1]]))
        queue.close()
        queue.join_thread()
        os._exit(0)

    thread = threading.Thread(target=read)
    thread.start()
    context = multiprocessing.get_context("fork")
    try:
        queue = context.Queue()
        children = [context.Process(target=child, args=(queue,)) for _ in range(4)]
        for process in children:
            process.start()
        assert [queue.get(timeout=300) for _ in children] == [True] * 4
        for process in children:
            process.join(20)
            assert process.exitcode == 0
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert np.array_equal(x[...], X)
    x.close()


@pytest.mark.slow
def test_reads_in_threads(tmp_path):
    x = pickle.loads(pickle.dumps(chunked(tmp_path)))  # not open yet: all threads find it closed
    keys = [(slice(None), [i % N, (i * 7) % N], slice(i % T, None)) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda key: x[key], keys))
    assert all(np.array_equal(f, X[key]) for f, key in zip(found, keys, strict=True))
    x.close()


def test_series_reads_a_lazy_array(tmp_path):
    with chunked(tmp_path) as x:
        s = SeriesArray(x, "x")
        assert (s.shape, s.dtype, s.in_memory) == ((F, N, T), np.dtype("f4"), False)
        rows = Segments.from_lengths(N, T)
        assert np.array_equal(s.read(rows[2:5], 3, 9), X[:, 2:5, 3:9].T)
        assert np.array_equal(s.read(rows[np.array([7, 2, 3])], 3, 9), X[:, [7, 2, 3], 3:9].T)
        folds = Segments(np.array([4, 4]), np.array([0, 7]), np.array([7, 6]))
        assert np.array_equal(s.read(folds, 2, 5), np.stack([X[:, 4, 2:5].T, X[:, 4, 9:12].T], 1))
