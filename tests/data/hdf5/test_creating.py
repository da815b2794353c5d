"""Room for arrays: what is made, what is there already, and what is left when it fails."""

import contextlib
import errno
import os
import re

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
    out = h5create(tmp_path / "a.h5", "yhat", (2, 10**3, 10**3), "f4")  # 8 MB
    assert (tmp_path / "a.h5").stat().st_blocks * 512 >= 8 * 10**6
    assert not out.any()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(H5DataError, match=r"'y' .* 8000000 bytes .*sparse=True"):
        h5create(tmp_path / "a.h5", "y", (2, 10**3, 10**3), "f4")
    assert os.listdir(tmp_path) == []
    assert h5create(tmp_path / "a.h5", "y", (2, 10**3, 10**3), sparse=True).nbytes == 8 * 10**6


def test_file_systems_that_cannot_take_room_make_the_array_all_the_same(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", cannot, raising=False)
    h5create(tmp_path / "a.h5", "y", (1, 2, 3))[:] = 4
    assert (h5mmap(tmp_path / "a.h5", "y") == 4).all()


def test_arrays_in_groups_of_any_shape_and_order(tmp_path):
    out = h5create(tmp_path / "a.h5", "results/yhat", (1, N, T), axes="FNT")
    assert out.dtype == "f4"
    out[:] = 5
    h5create(tmp_path / "b.h5", "lengths", (N,), "i8")[:] = np.arange(N)
    assert (h5mmap(tmp_path / "a.h5", "results/yhat") == 5).all()
    with h5py.File(tmp_path / "a.h5") as file, h5py.File(tmp_path / "b.h5") as other:
        assert file["results/yhat"].shape == (1, N, T)
        assert file["results/yhat"].id.get_offset() % 64 == 0
        assert other["lengths"][()].tolist() == [0, 1, 2, 3, 4]
        assert dict(other["lengths"].attrs) == {}


def test_room_that_cannot_be_made(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    before = path.read_bytes()
    for name, shape, dtype, message in (
        ("y", X.shape, "f4", "'y' cannot be created: the file exists already; .*exist_ok=True"),
        ("y", (1, 2), "S3", r"'y'.* shape \(1, 2\) of \|S3 .*real numbers"),
        ("y", (), "f4", r"'y'.* shape \(\) of float32 .*one axis or more"),
        ("y", (1, 2, 3), "spam", r"dtype .*'float32', got .*'spam'"),
        ("", (1, 2, 3), "f4", "a dataset is named by a string, 'x' or 'group/x', got ''"),
    ):
        with pytest.raises(H5DataError, match=message):
            h5create(path, name, shape, dtype)
    with pytest.raises(H5DataError, match="axes must name F"):
        h5create(tmp_path / "b.h5", "y", (1, 2, 3), axes="TN")
    with pytest.raises(FileNotFoundError):
        h5create(tmp_path / "no" / "a.h5", "y", (1, 2, 3))
    assert os.listdir(tmp_path) == ["a.h5"]
    assert path.read_bytes() == before


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
        ("b", h5create(tmp_path / "d.h5", "zhat", (2, N, T), "f8", axes="FNT")),
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


def test_what_is_no_such_array_is_not_used(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("g/chunked", data=X.T, chunks=True).attrs["axes"] = "TNF"
        file.create_dataset("x", data=X.T).attrs["axes"] = "TNF"
    for name, shape, dtype, message in (
        ("x", (F, N, T + 1), "f4", r"'x' exists already .*\(3, 5, 7\).*in place of \(3, 5, 8\)"),
        ("x", X.shape, "f8", "'x' exists already .* of float32, in place of .* of float64"),
        ("g/chunked", X.shape, "f4", "'g/chunked' cannot be written to in place: it is chunked"),
        ("g", X.shape, "f4", "'g' is a group"),
        ("y", X.shape, "f4", "'y' cannot be opened .*the file holds g, x"),
    ):
        with pytest.raises(H5DataError, match=message):
            h5create(path, name, shape, dtype, exist_ok=True)
    assert np.array_equal(h5mmap(path, "x"), X)


# -- when it fails ------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    (shape, "shape and dtype must be those of an array, as (1, 37, 100) and 'float32'")
    for shape in ((2.5, 3, 4), None, "abc", 5, (-1, 3, 4))
] + [
    (shape, f"there can be no array of shape {shape} of float32")
    for shape in ((2**62, 2**20, 4), (0, 2**70, 4), (2**60, 1, 2))
]


@pytest.mark.parametrize(("shape", "message"), IMPOSSIBLE)
def test_nothing_is_left_where_no_room_can_be_made(tmp_path, shape, message):
    path = tmp_path / "a.h5"
    with pytest.raises(H5DataError, match=re.escape(f"{path}: dataset 'g/deep/y': {message}")):
        h5create(path, "g/deep/y", shape)
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_of_what_the_file_system_refuses(tmp_path):
    path = tmp_path / "a.h5"
    with pytest.raises(H5DataError) as caught:
        h5create(path, "g/y", (2**50, 3, 1))  # 12 PB
    assert str(caught.value).startswith(f"{path}: dataset 'g/y' cannot be created")
    assert os.listdir(tmp_path) == []


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
def test_of_several_processes_one_creates_and_all_map_the_same(tmp_path):
    """As ranks that call ``predict(x, out=h5create(..., exist_ok=True))``."""
    n = 5

    def task(i):
        h5create(path, "yhat", (1, n, T), exist_ok=True)[:, i] = i

    for turn in range(2):
        path = tmp_path / f"{turn}.h5"
        assert at_once(n, task) == [0] * n
        expected = np.broadcast_to(np.arange(n)[:, None], (1, n, T))
        np.testing.assert_array_equal(h5mmap(path, "yhat"), expected)
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
    with pytest.raises(H5DataError, match=r"'y' exists already .*\(1, 2, 3\).*\(1, 2, 4\)"):
        h5create(path, "y", (1, 2, 4))
    assert (h5mmap(path, "y") == 4).all()
