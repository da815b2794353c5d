"""One open file is one version, and what was pickled never opens another, whoever replaces it
meanwhile.
"""

import contextlib
import os
import pickle
import shutil
import subprocess
import time

import h5py
import numpy as np
import pytest

from fluxutils_py.data import H5Lazy, H5Map, h5create, h5mmap, h5save
from fluxutils_py.data.lazy import as_picklable
from fluxutils_py.errors import H5DataError

F, N, T = 3, 37, 43
X = np.arange(F * N * T).reshape(F, N, T).astype("f4")
OTHER_FILE = (
    "{}: this is not the file that was mapped or opened, as it was: it has been replaced, copied "
    "or written to since; open it where it is needed with h5mmap, or map it again and send that"
)

WRITER = """if True:
    import sys, itertools, numpy as np
    from fluxutils_py.data import h5save
    path, same_layout = sys.argv[1], sys.argv[2] == "same"
    print("ready", flush=True)
    for version in itertools.count(1):
        steps = 43 if same_layout else 30 + version % 17
        before = {} if same_layout else {f"a{i}": np.zeros(i * 50) for i in range(version % 5)}
        h5save(path, before | {"x": np.full((3, 37, steps), version, "f4")})
"""


@contextlib.contextmanager
def replacing(python, path, layout):
    """Another process that replaces a file all the time."""
    h5save(path, {"x": np.zeros((3, 37, 43), "f4")})
    with subprocess.Popen(
        [python, "-c", WRITER, path, layout], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()
            process.wait(20)


def whole(x):
    """Whether an array is of one version."""
    return x.shape[:2] == (3, 37) and (np.asarray(x) == x[0, 0, 0]).all()


@pytest.mark.slow
def test_a_reader_sees_one_version_of_a_file_that_is_being_replaced(python, tmp_path):
    versions = set()
    with replacing(python, tmp_path / "a.h5", "other"):
        stop = time.monotonic() + 1
        while time.monotonic() < stop:
            x = h5mmap(tmp_path / "a.h5", "x")
            assert type(x) is H5Map
            assert whole(x)
            with H5Lazy(tmp_path / "a.h5", "x") as lazy:
                assert whole(lazy[...])
            versions |= {float(x[0, 0, 0])}
    assert len(versions) > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map", "lazy"])
def test_what_was_pickled_opens_the_same_version_or_none(python, tmp_path, kind):
    outcomes = {"same": 0, "refused": 0}
    with replacing(python, tmp_path / "a.h5", "same"):
        stop = time.monotonic() + 1
        while time.monotonic() < stop:
            x = h5mmap(tmp_path / "a.h5", "x") if kind == "map" else H5Lazy(tmp_path / "a.h5", "x")
            version, data = float(x[0, 0, 0]), pickle.dumps(x)
            if kind == "lazy":
                x.close()
            del x  # its inode is free now
            time.sleep(0.003 * (sum(outcomes.values()) % 5))
            try:
                found = pickle.loads(data)[...]
            except H5DataError:
                outcomes["refused"] += 1
            else:
                assert (found == version).all()
                outcomes["same"] += 1
    assert outcomes["refused"] > 5


def remade(path, x):
    """Replace a file by one of the same inode, size and layout."""
    inode, folder = os.stat(path).st_ino, path.parent / "others"
    folder.mkdir(exist_ok=True)
    os.unlink(path)
    for i in range(50):  # the inode is among those that are used next
        h5save(folder / f"{i}.h5", {"x": x})
        if os.stat(folder / f"{i}.h5").st_ino == inode:
            os.replace(folder / f"{i}.h5", path)
            return
    pytest.skip("this file system does not use inodes again")


def test_an_inode_that_is_used_again_is_another_file(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    data = pickle.dumps(h5mmap(path, "x"))
    remade(path, X + 1)
    with pytest.raises(H5DataError) as caught:
        pickle.loads(data)
    assert str(caught.value) == OTHER_FILE.format(path)


@pytest.mark.parametrize("how", ["touched", "written to", "copied", "put back with its old times"])
@pytest.mark.parametrize("kind", ["map", "lazy", "np.memmap"])
def test_a_file_that_may_be_another_is_refused_with_the_remedy(tmp_path, how, kind):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    x = H5Lazy(path, "x") if kind == "lazy" else h5mmap(path, "x")
    if kind == "np.memmap":
        x = np.memmap(path, "f4", "r", x.offset, (T, N, F))
    data = pickle.dumps(as_picklable(x))
    if kind == "lazy":
        x.close()
    if how == "touched":
        os.utime(path)
    elif how == "written to":
        h5mmap(path, "x", mode="r+")[0, 0, 0] = 5
    else:
        shutil.copy2(path, tmp_path / "b.h5")
        os.replace(tmp_path / "b.h5", path)
        if how == "copied":
            os.utime(path)
    with pytest.raises(H5DataError) as caught:
        pickle.loads(data)[...]
    assert str(caught.value) == OTHER_FILE.format(path)


@pytest.mark.slow
def test_a_map_for_writing_reaches_many_workers_while_others_write(tmp_path):
    out = h5create(tmp_path / "a.h5", "out", (F, N, T))
    data = [pickle.dumps(out[:, n]) for n in range(N)]
    for n, one in enumerate(data):
        pickle.loads(one)[:] = n
        time.sleep(0.001)
    assert (out == np.arange(N)[:, None]).all()


def test_a_file_that_grew_before_pickling_is_the_same(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X})
    x = h5mmap(path, "x")
    with h5py.File(path, "r+") as file:
        file["yhat"] = X[:1] + 3
    assert np.array_equal(pickle.loads(pickle.dumps(x)), X)
    with h5py.File(path, "r+") as file:  # which holds a lock
        assert np.array_equal(pickle.loads(pickle.dumps(x)), X)
        file["x"][0] = 1
        file.flush()
        assert np.array_equal(pickle.loads(pickle.dumps(x)), x)


@pytest.mark.slow
def test_a_lazy_array_reads_the_file_that_it_opened_after_a_fork(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X.T, chunks=True).attrs["axes"] = "TNF"
    x = h5mmap(path, "x")
    time.sleep(0.01)
    os.utime(path)  # before the fork: it is still that file

    def read_in_child():
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    code = 0 if np.array_equal(x[...], X) else 3
                except H5DataError:
                    code = 2
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert read_in_child() == 0
    h5save(path, {"x": X + 1})
    assert read_in_child() == 2
    assert np.array_equal(x[...], X)
    x.close()
