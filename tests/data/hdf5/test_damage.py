"""Damaged files: what h5mmap gives is right, or an H5DataError; nothing runs for ever."""

import json
import os
import subprocess

import h5py
import numpy as np
import pytest

from fluxutils_py.data import h5concat, h5mmap, h5save
from fluxutils_py.data.hdf5.damage import lookup3
from fluxutils_py.errors import H5DataError

F, N, T = 3, 5, 7
X = np.arange(F * N * T, dtype="f4").reshape(F, N, T)
LIMIT = 120  # seconds; 4 are needed

PROGRAM = """if True:
    import collections, json, os, random, sys
    import h5py, numpy as np
    from fluxutils_py.data import h5mmap
    from fluxutils_py.errors import H5DataError

    folder, n_mutations = sys.argv[1], int(sys.argv[2])
    seeds = {name: open(os.path.join(folder, name), "rb").read() for name in sorted(os.listdir(folder))}
    x = np.arange(3 * 5 * 7, dtype="f4").reshape(3, 5, 7)
    outcomes, path = collections.Counter(), os.path.join(folder, "mutant")

    def outcome():
        try:
            found = h5mmap(path, "x")
            values = np.asarray(found)
            names = found.feature_names
        except (FileNotFoundError, H5DataError) as error:
            assert path in str(error) and len(str(error)) > len(path) + 10, error
            return "error"
        finally:
            if "found" in locals() and hasattr(found, "close"):
                found.close()
        if np.array_equal(values, x):
            return "right"
        with h5py.File(path) as file:  # damage that HDF5 does not see: to the numbers themselves, their type, a chunk
            expected = file["x"][()].T
        assert (values.shape, values.dtype) == (expected.shape, expected.dtype)
        assert not np.array_equal(expected, x)
        return "as h5py"

    for i in range(n_mutations):
        name = list(seeds)[i % len(seeds)]
        rng, data = random.Random(i), bytearray(seeds[name])
        for _ in range(rng.choice([1, 1, 1, 2, 4, 8])):
            at = rng.randrange(len(data))
            data[at] = rng.choice([0, 255, rng.randrange(256), data[at] ^ 1 << rng.randrange(8)])
        if i:
            os.unlink(path)  # a file that is written over is flushed to the disk first
        with open(path, "wb") as file:
            file.write(data)
        print(f"{name} {i}", file=sys.stderr, flush=True)  # the last line tells where it hangs
        outcomes[outcome()] += 1
    print(json.dumps(outcomes))
"""


def sound_files(folder):
    """Files that keep the same array in as many ways."""
    os.makedirs(folder)
    h5save(folder / "h5save", {"x": X})
    h5save(folder / "names", {"group": {"y": X}, "x": X}, feature_names={"x": ["a", "bb", "c"]})
    with h5py.File(folder / "gzip", "w") as file:
        file.create_dataset("x", data=X.T, chunks=(2, 3, 2), compression="gzip").attrs["axes"] = (
            "TNF"
        )
    with h5py.File(folder / "attributes", "w", libver="latest") as file:
        dataset = file.create_dataset("x", data=X.T)
        for i in range(12):  # so many that they leave the header
            dataset.attrs[f"k{i}"] = "v" * i
        dataset.attrs["axes"] = "TNF"
    with h5py.File(folder / "growing", "w", libver="latest") as file:
        file.create_dataset("x", data=X.T, chunks=(2, 3, 2), maxshape=(None, N, F)).attrs[
            "axes"
        ] = "TNF"

    layout = h5py.VirtualLayout((T, N, F), "f4")
    layout[:4] = h5py.VirtualSource("h5save", "x", (T, N, F))[:4]
    layout[4:] = h5py.VirtualSource("gzip", "x", (T, N, F))[4:]
    with h5py.File(folder / "virtual", "w") as file:
        file.create_virtual_dataset("x", layout).attrs["axes"] = "TNF"


@pytest.mark.slow
def test_a_damaged_file_gives_right_data_or_an_error_in_time(finalized_python, tmp_path):
    sound_files(tmp_path / "files")
    n_mutations = int(os.environ.get("FLUXUTILS_MUTATIONS", "600"))
    done = subprocess.run(
        [finalized_python, "-c", PROGRAM, tmp_path / "files", str(n_mutations)],
        capture_output=True, text=True, timeout=LIMIT + n_mutations / 10,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == n_mutations
    assert min(outcomes["right"], outcomes["error"]) > n_mutations / 10


# -- where HDF5 itself would not come back ------------------------------------------------------------------


def heap_of(data):
    """Where the free object of the only heap begins."""
    heap = data.index(b"GCOL")
    place = heap + 16
    while data[place : place + 2] != b"\0\0":
        place += 16 + -(-int.from_bytes(data[place + 8 : place + 16], "little") // 8) * 8
    return heap, place


ENDLESS = {
    "no size": (0).to_bytes(8, "little"),
    "a size that leads back": (2**64 - 24).to_bytes(8, "little"),
    "a size that leads to the same place": (2**64).to_bytes(9, "little")[:8],
}


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("size", ENDLESS)
def test_a_heap_without_an_end(tmp_path, libver, size):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=X.T).attrs["axes"] = "TNF"
    data = bytearray(path.read_bytes())
    heap, free = heap_of(data)
    data[free + 8 : free + 16] = ENDLESS[size]
    path.write_bytes(data)
    with pytest.raises(H5DataError) as caught:
        h5mmap(path, "x")
    assert str(caught.value) == (
        f"{path}: dataset 'x' cannot be read, as the file is damaged (the heap at byte {heap} has "
        "no end); copy or write it again"
    )


@pytest.mark.parametrize("libver", ["earliest", "v110", "latest"])
@pytest.mark.parametrize("attribute", ["axes", "feature_names"])
def test_a_string_of_gigabytes(tmp_path, libver, attribute):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=libver) as file:
        dataset = file.create_dataset("x", data=X.T)
        dataset.attrs["axes"] = "TNF"
        dataset.attrs["feature_names"] = ["first", "second", "third"]
    data, length = bytearray(path.read_bytes()), {"axes": 3, "feature_names": 6}[attribute]
    heap = data.index(b"GCOL")
    place = data.index(length.to_bytes(4, "little") + heap.to_bytes(8, "little"))
    data[place + 3] = 0x9C
    path.write_bytes(data)
    message = h5mmap_error(path)
    if libver == "earliest":
        assert f"a string in an attribute is said to have {length + (0x9C << 24)} bytes" in message
    else:  # newer headers have checksums
        assert "incorrect metadata checksum" in message


def h5mmap_error(path):
    with pytest.raises(H5DataError) as caught:
        h5mmap(path, "x")
    assert str(caught.value).startswith(f"{path}: dataset 'x' ")
    return str(caught.value)


@pytest.mark.parametrize("what", ["an attribute", "strings"])
def test_joining_files_with_a_heap_without_an_end(tmp_path, what):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=X.T)
        dataset.attrs["axes"] = np.bytes_(b"TNF")
        if what == "strings":
            file["x_names"] = ["a", "b"]
        else:
            dataset.attrs["unit"] = "m"
    data = bytearray(path.read_bytes())
    free = heap_of(data)[1]
    data[free + 8 : free + 16] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(H5DataError, match="has no end"):
        h5concat(tmp_path / "all.h5", [path], 1)
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_list_of_sources_with_a_wrong_checksum(tmp_path):
    """HDF5 itself dies of it."""
    sound_files(tmp_path / "files")
    path = tmp_path / "files" / "virtual"
    assert np.array_equal(h5mmap(path, "x"), X)
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    at = data.index(b"gzip", heap)
    data[at] ^= 1
    path.write_bytes(data)
    assert h5mmap_error(path) == (
        f"{path}: dataset 'x' cannot be read, as the file is damaged (the list of sources in the "
        f"heap at byte {heap} has a wrong checksum); copy or write it again"
    )


def test_the_checksum_is_that_of_its_author():
    assert lookup3(b"") == 0xDEADBEEF
    assert lookup3(b"Four score and seven years ago") == 0x17770551  # both from lookup3.c


def test_a_text_that_looks_like_a_heap_is_none(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", data=X.T)
        dataset.attrs["note"], dataset.attrs["axes"] = (
            np.bytes_(b"GCOL\1\0\0\0" + b"\1" * 40),
            "TNF",
        )
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "x"), X)
