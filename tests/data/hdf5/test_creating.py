"""Room for arrays: what is made, what is there already, and what is left when it fails."""

import contextlib
import errno
import fcntl
import os
import pickle
import re
import threading

import h5py
import numpy as np
import pytest

from fluxutils_py import Estimator, Spec
from fluxutils_py.data import H5Map, h5create, h5mmap, h5save
from fluxutils_py.data.hdf5 import writing
from fluxutils_py.errors import H5DataError

F, N, T = 3, 5, 7
X = np.arange(F * N * T).reshape(F, N, T).astype("f4")


def test_a_sparse_array_is_there_at_once_and_takes_no_room(tmp_path):
    out = h5create(tmp_path / "a.h5", "yhat", (2, 10**4, 10**5), "f8", sparse=True)  # 16 GB
    assert type(out) is H5Map
    assert out.shape == (2, 10**4, 10**5)
    assert (tmp_path / "a.h5").stat().st_size > 16 * 10**9
    assert (tmp_path / "a.h5").stat().st_blocks * 512 < 10**5
    out[1, 5000, 50_000] = 3
    assert out[:, 5000, 50_000].tolist() == [0, 3]
    assert (tmp_path / "a.h5").stat().st_blocks * 512 < 10**5
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["yhat"].shape == (10**5, 10**4, 2)
        assert file["yhat"].attrs["axes"] == "TNF"
        assert file["yhat"][50_000, 5000].tolist() == [0, 3]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="where the system cannot")
def test_an_array_has_its_room_on_the_disk(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    for n, options in ((1, {}), (2, {"overwrite": True})):
        out = h5create(path, "yhat", (2, 10**3, 10**3), "f4", **options)  # 8 MB
        assert path.stat().st_blocks * 512 >= 8 * 10**6 * n
        assert not out.any()
    assert np.array_equal(h5mmap(path, "x"), X)


@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_is_an_error_before_anything_changes(tmp_path, monkeypatch, existing):
    path = tmp_path / "a.h5"
    if existing:
        h5save(path, {"x": X, "y": X})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(H5DataError, match=r"'y' .* 8000000 bytes .*sparse=True"):
        h5create(path, "y", (2, 10**3, 10**3), "f4", overwrite=True)
    assert os.listdir(tmp_path) == ["a.h5"] * existing
    if existing:
        with h5py.File(path) as file:
            assert sorted(file) == ["x", "y"]
        assert path.stat().st_blocks * 512 < 10**5
        assert np.array_equal(h5mmap(path, "y"), X)
    assert h5create(path, "y", (2, 10**3, 10**3), "f4", overwrite=True, sparse=True).shape == (
        2,
        10**3,
        10**3,
    )


def test_file_systems_that_cannot_take_room_make_the_array_all_the_same(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", cannot, raising=False)
    h5create(tmp_path / "a.h5", "y", (1, 2, 3))[:] = 4
    assert (h5mmap(tmp_path / "a.h5", "y") == 4).all()


def test_room_beside_other_datasets(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X, "n": 3})
    x = h5mmap(path, "x")
    out = h5create(path, "results/yhat", (1, N, T), axes="FNT")
    assert out.dtype == "f4"
    out[:] = 5
    second = h5create(path, "lengths", (N,), "i8")
    second[:] = np.arange(N)
    assert np.array_equal(x, X)
    assert np.array_equal(h5mmap(path, "x"), X)
    assert (h5mmap(path, "results/yhat") == 5).all()
    with h5py.File(path) as file:
        assert file["n"][()] == 3
        assert file["results/yhat"].shape == (1, N, T)
        assert (
            file["results/yhat"].id.get_offset() % 64 == file["lengths"].id.get_offset() % 64 == 0
        )
        assert file["lengths"][()].tolist() == [0, 1, 2, 3, 4]
        assert dict(file["lengths"].attrs) == {}


def test_room_that_cannot_be_made(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    for name, shape, dtype, message in (
        ("x", (1, 2, 3), "f4", r"'x' exists already; .*exist_ok=True .*mode='r\+'.*overwrite=True"),
        ("y", (1, 2), "S3", r"'y'.* shape \(1, 2\) of \|S3 .*real numbers"),
        ("y", (), "f4", r"'y'.* shape \(\) of float32 .*one axis or more"),
        ("", (1, 2, 3), "f4", "a dataset is named by a string, 'x' or 'group/x', got ''"),
    ):
        with pytest.raises(H5DataError, match=message):
            h5create(path, name, shape, dtype)
    monkeypatch.setattr("fluxutils_py.data.hdf5.opening.LOCK_WAIT", 0.1)
    with h5py.File(path), pytest.raises(H5DataError, match="open in another process, or elsewhere"):
        h5create(path, "y", (1, 2, 3))
    with pytest.raises(H5DataError, match="axes must name F"):
        h5create(tmp_path / "b.h5", "y", (1, 2, 3), axes="TN")
    with pytest.raises(FileNotFoundError):
        h5create(tmp_path / "no" / "a.h5", "y", (1, 2, 3))
    assert os.listdir(tmp_path) == ["a.h5"]


@pytest.mark.slow
def test_predicting_into_a_file(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(F, N, T)).astype("f4"), rng.normal(size=(2, N, T)).astype("f4")
    h5save(tmp_path / "a.h5", {"x": x, "y": y})
    with h5py.File(tmp_path / "b.h5", "w") as file:
        for name, a in (("x", x), ("y", y)):
            file.create_dataset(name, data=a, compression="gzip").attrs["axes"] = "FNT"
    spec = Spec(epochs=1, batchsize=2, seqsize=3, shuffle=True)
    plain = Estimator(spec=spec, random_state=0).fit(x, y).predict(x)
    for name, out in (
        ("a", h5create(tmp_path / "c.h5", "yhat", (2, N, T))),
        ("b", h5create(tmp_path / "c.h5", "zhat", (2, N, T), "f8", axes="FNT")),
    ):
        mx, my = h5mmap(tmp_path / f"{name}.h5", "x"), h5mmap(tmp_path / f"{name}.h5", "y")
        est = Estimator(spec=spec, random_state=0).fit(mx, my)
        assert est.predict(mx, out=out) is out
        assert np.array_equal(out, plain)
        if name == "b":
            mx.close()
            my.close()


# -- what is there already ----------------------------------------------------------------------------------


def test_a_script_runs_twice(tmp_path):
    for run in (1, 2):
        out = h5create(tmp_path / "a.h5", "results/yhat", (F, N, T), "f8", "FNT", exist_ok=True)
        assert type(out) is H5Map
        assert (out == (0 if run == 1 else 5)).all()  # what it holds stays
        out[:] = 5
        flat = h5create(tmp_path / "a.h5", "lengths", (N,), "i8", exist_ok=True)
        flat[:] = run
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["results/yhat"].shape == (F, N, T)
        assert (file["results/yhat"][()] == 5).all()
        assert file["lengths"][()].tolist() == [2] * N


MISFITS = {
    "shape (7, 5, 3) of float32 in the order TNF in place of shape (8, 5, 3) of float32 in the order TNF": (
        (F, N, T + 1), "f4", "TNF",
    ),
    "shape (7, 5, 3) of float32 in the order TNF in place of shape (7, 5, 3) of float64 in the order TNF": (
        (F, N, T), "f8", "TNF",
    ),
    "shape (7, 5, 3) of float32 in the order TNF in place of shape (5, 7, 3) of float32 in the order NTF": (
        (F, N, T), "f4", "NTF",
    ),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_another_array_of_that_name(tmp_path, misfit):
    path, (shape, dtype, axes) = tmp_path / "a.h5", MISFITS[misfit]
    h5save(path, {"x": X, "z": X + 1})
    old = h5mmap(path, "x")
    with pytest.raises(H5DataError) as caught:
        h5create(path, "x", shape, dtype, axes, exist_ok=True)
    assert str(caught.value) == (
        f"{path}: dataset 'x' exists already; it has, in the file, {misfit}; pass overwrite=True "
        "to put a new one in its place"
    )
    assert np.array_equal(h5mmap(path, "x"), X)
    new = h5create(path, "x", shape, dtype, axes, exist_ok=True, overwrite=True)
    assert (new.shape, new.dtype) == (shape, np.dtype(dtype))
    assert (new == 0).all()
    new[:] = 9
    assert np.array_equal(old, X)  # a map of the old one keeps it
    assert np.array_equal(h5mmap(path, "z"), X + 1)
    assert (h5mmap(path, "x") == 9).all()
    with h5py.File(path) as file:
        assert sorted(file) == ["x", "z"]


def test_what_cannot_be_mapped_is_no_room(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("g/x", data=X.T, chunks=True).attrs["axes"] = "TNF"
    with pytest.raises(H5DataError) as caught:
        h5create(path, "g/x", X.shape, exist_ok=True)
    assert str(caught.value).startswith(f"{path}: dataset 'g/x' exists already")
    assert "is chunked; pass overwrite=True" in str(caught.value)
    with pytest.raises(H5DataError, match="is a group"):
        h5create(path, "g", X.shape, exist_ok=True)
    assert (h5create(path, "g/x", X.shape, exist_ok=True, overwrite=True) == 0).all()


def test_overwriting_what_is_larger_leaves_its_maps_alive(tmp_path):
    """A file that shrank below a map would kill the process."""
    path = tmp_path / "a.h5"
    large = h5create(path, "x", (8, 64, 512))
    large[:] = 3
    for _ in range(3):
        h5create(path, "x", (1, 1, 1), overwrite=True)[:] = 1
    assert (large == 3).all()
    assert h5mmap(path, "x").shape == (1, 1, 1)
    pickle.dumps(large)


# -- when it fails ------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    (shape, "shape and dtype must be those of an array, as (1, 37, 100) and 'float32'")
    for shape in ((2.5, 3, 4), None, "abc", 5, (-1, 3, 4))
] + [
    (shape, f"there can be no array of shape {shape} of float32")
    for shape in ((2**62, 2**20, 4), (0, 2**70, 4))
]


@pytest.mark.parametrize(("shape", "message"), IMPOSSIBLE)
@pytest.mark.parametrize("existing", [True, False])
def test_nothing_is_left_where_no_room_can_be_made(tmp_path, shape, message, existing):
    path = tmp_path / "a.h5"
    if existing:
        h5save(path, {"x": X})
        before = path.read_bytes()
    with pytest.raises(H5DataError, match=re.escape(f"{path}: dataset 'g/deep/y': {message}")):
        h5create(path, "g/deep/y", shape)
    assert os.listdir(tmp_path) == ["a.h5"] * existing
    assert not existing or path.read_bytes() == before


@pytest.mark.parametrize("existing", [True, False])
def test_nothing_is_left_of_what_the_file_system_refuses(tmp_path, existing):
    path = tmp_path / "a.h5"
    if existing:
        h5save(path, {"x": X})
    with pytest.raises(H5DataError) as caught:
        h5create(path, "g/y", (2**50, 3, 1))  # 12 PB
    assert str(caught.value).startswith(f"{path}: dataset 'g/y' cannot be created ([Errno 27]")
    assert str(caught.value).endswith("make it smaller")
    assert os.listdir(tmp_path) == ["a.h5"] * existing
    if existing:
        with h5py.File(path) as file:
            assert list(file) == ["x"]
        assert (h5create(path, "g/y", (1, 2, 3)) == 0).all()


def test_what_stands_in_the_way(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    with pytest.raises(H5DataError, match="dataset 'x/y' cannot be created"):
        h5create(path, "x/y", (1, 2, 3))
    with pytest.raises(H5DataError, match=r"dtype .*'float32', got .*'spam'"):
        h5create(path, "y", (1, 2, 3), "spam")
    with h5py.File(path) as file:
        assert list(file) == ["x"]


# -- several processes ----------------------------------------------------------------------------


def at_once(n, task):
    """Run ``task(i)`` in processes that begin together, and return how each of them ended."""
    reader, writer = os.pipe()
    children = []
    for i in range(n):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes it
            status = 1
            with contextlib.suppress(Exception):
                task(i)
                status = 0
            os._exit(status)
        children.append(child)
    os.close(reader)
    os.close(writer)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.slow
@pytest.mark.parametrize("existing", [True, False])
def test_of_several_processes_one_creates_and_all_map_the_same(tmp_path, existing):
    """As ranks that call ``predict(x, out=h5create(..., exist_ok=True))``."""
    n = 5

    def task(i):
        h5create(path, "yhat", (1, n, T), exist_ok=True)[:, i] = i
        h5create(path, f"of_{i}", (1, 2, 3))[:] = i

    for turn in range(2):
        path = tmp_path / f"{turn}.h5"
        if existing:
            h5save(path, {"x": X})
        assert at_once(n, task) == [0] * n
        expected = np.broadcast_to(np.arange(n)[:, None], (1, n, T))
        np.testing.assert_array_equal(h5mmap(path, "yhat"), expected)
        for i in range(n):
            assert (h5mmap(path, f"of_{i}") == i).all()
        assert not existing or np.array_equal(h5mmap(path, "x"), X)
    assert all(name.endswith(".h5") for name in os.listdir(tmp_path))


def test_what_another_process_makes_meanwhile_stays(tmp_path, monkeypatch):
    """Of two that begin without a file, the second opens that of the first, if it fits."""
    path, before = tmp_path / "a.h5", writing.atomic_path

    def late(*arguments, **settings):
        monkeypatch.setattr(writing, "atomic_path", before)
        h5create(path, "y", (1, 2, 3))[:] = 4
        return before(*arguments, **settings)

    monkeypatch.setattr(writing, "atomic_path", late)
    assert (h5create(path, "y", (1, 2, 3)) == 4).all()
    path.unlink()
    monkeypatch.setattr(writing, "atomic_path", late)
    with pytest.raises(H5DataError, match=r"'y' exists already.*\(3, 2, 1\).*\(4, 2, 1\)"):
        h5create(path, "y", (1, 2, 4))
    assert (h5mmap(path, "y") == 4).all()


def test_a_lock_that_stays_is_an_error_and_one_that_goes_is_not(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    monkeypatch.setattr("fluxutils_py.data.hdf5.opening.LOCK_WAIT", 0.1)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as of another process that reads
        with pytest.raises(H5DataError, match=r"a\.h5.*another process"):
            h5create(path, "y", (1, 2, 3))
        assert h5create(path, "x", X.shape, exist_ok=True).shape == X.shape
        monkeypatch.setattr("fluxutils_py.data.hdf5.opening.LOCK_WAIT", 30)
        threading.Timer(0.1, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        assert h5create(path, "y", (1, 2, 3)).shape == (1, 2, 3)


def test_what_is_free_within_a_file_reads_as_zeros(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", fs_strategy="fsm", fs_persist=True) as file:
        file["a"] = np.full(10**4, 7.0)
        file["b"] = X
    with h5py.File(path, "r+") as file:
        del file["a"]
        end = file.id.get_filesize()
    assert not h5create(path, "y", (2, 3, 4)).any()
    with h5py.File(path) as file:
        assert file["y"].id.get_offset() < end - file["b"].nbytes
        np.testing.assert_array_equal(file["b"], X)
