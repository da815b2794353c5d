"""Writing files: what h5py reads back, and what becomes of the old file."""

import itertools
import os
import subprocess

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py.data import H5Lazy, H5Map, LazyArray, h5create, h5mmap, h5save
from fluxutils_py.data.hdf5 import writing
from fluxutils_py.errors import H5DataError

F, N, T = 3, 5, 7
ORDERS = ["".join(p) for p in itertools.permutations("FNT")]
X = np.arange(F * N * T).reshape(F, N, T).astype("f4")


def in_memory_order(x, axes):
    order = ["FNT".index(c) for c in axes]
    return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


def stored(path, name="x"):
    with h5py.File(path) as file:
        return file[name][()], dict(file[name].attrs)


# -- what is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ORDERS)
@pytest.mark.parametrize("own", ORDERS)
def test_any_order_from_any_order(tmp_path, axes, own, monkeypatch):
    monkeypatch.setattr(writing, "BLOCK_BYTES", 40)  # ten values
    h5save(tmp_path / "a.h5", {"x": in_memory_order(X, own)}, axes=axes)
    found, attrs = stored(tmp_path / "a.h5")
    assert np.array_equal(found, X.transpose(["FNT".index(c) for c in axes]))
    assert attrs == {"axes": axes}


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u2", "i8", "?", ">f4", ">i2"])
def test_every_number_format(tmp_path, dtype):
    x = (X % 2).astype(dtype)
    h5save(tmp_path / "a.h5", {"x": x})
    found, _ = stored(tmp_path / "a.h5")
    assert found.dtype.str == x.dtype.str
    assert np.array_equal(found, x.transpose(2, 1, 0))
    assert type(h5mmap(tmp_path / "a.h5", "x")) is H5Map


SOURCES = {
    "list": lambda x, path: x.tolist(),
    "torch": lambda x, path: torch.tensor(x),
    "strided": lambda x, path: np.repeat(x, 2, 1)[:, ::2],
    "backwards": lambda x, path: np.ascontiguousarray(x[::-1, :, ::-1])[::-1, :, ::-1],
    "repeated": lambda x, path: np.broadcast_to(x[:, :1], x.shape),
    "np.memmap": lambda x, path: np.load(path, mmap_mode="r"),
    "h5py": lambda x, path: h5py.File(path.with_suffix(".h5"))["x"],
    "map": lambda x, path: h5mmap(path.with_suffix(".h5"), "x", "FNT"),
    "lazy": lambda x, path: h5mmap(path.with_suffix(".h5"), "chunked", "FNT"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_block_by_block(tmp_path, kind, monkeypatch):
    np.save(tmp_path / "source.npy", X)
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["x"] = X
        file.create_dataset("chunked", data=X, chunks=(2, 2, 2))
    monkeypatch.setattr(writing, "BLOCK_BYTES", 60)
    h5save(tmp_path / "a.h5", {"x": SOURCES[kind](X, tmp_path / "source.npy")})
    expected = np.repeat(X[:, :1], N, 1) if kind == "repeated" else X
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "x"), expected)


def test_a_source_is_read_in_small_blocks_only(tmp_path, monkeypatch):
    class Large:
        shape, dtype, reads = (4, 30, 50), np.dtype("f4"), []

        def __getitem__(self, key):
            sizes = [len(range(*k.indices(n))) for k, n in zip(key, self.shape, strict=True)]
            self.reads.append(np.prod(sizes) * 4)
            return np.ones(sizes, "f4")

    monkeypatch.setattr(writing, "BLOCK_BYTES", 1000)
    h5save(tmp_path / "a.h5", {"x": Large()})
    assert max(Large.reads) <= 1000
    assert sum(Large.reads) == 4 * 30 * 50 * 4
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "x"), np.ones(Large.shape))


def test_blocks_are_long_in_any_memory():
    """Of half a page at the least, where the array is that wide."""
    shape = (16, 4096, 8192)  # 2 GiB
    block = next(iter(writing._blocks(shape, 4)))
    size = [s.stop - s.start for s in block]
    assert writing.BLOCK_BYTES / 4 < np.prod(size) * 4 <= writing.BLOCK_BYTES
    for axes in ORDERS:
        run = 4
        for c in reversed(axes):
            i = "FNT".index(c)
            run *= size[i]
            if size[i] < shape[i]:
                break
        assert run >= 2048


def test_groups_scalars_strings_and_other_shapes(tmp_path):
    values = {
        "x": X,
        "train": {"x": X[:, :2], "deep": {"y": np.arange(4)}, "nothing": {}},
        "a/b": 3.5,
        "text": "série",
        "texts": ["a", "bc"],
        "bytes": np.array([b"ab", b"c"]),
        "flag": True,
        "matrix": np.arange(6).reshape(2, 3),
        "four": np.arange(16.0).reshape(2, 2, 2, 2),
        "complex": np.array([1j, 2]),
        "empty": np.zeros((3, 0, 2)),
    }
    h5save(tmp_path / "a.h5", values)
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["x"], X.transpose(2, 1, 0))
        assert np.array_equal(file["train/x"], X[:, :2].transpose(2, 1, 0))
        assert file["train/deep/y"][()].tolist() == [0, 1, 2, 3]
        assert list(file["train/nothing"]) == []
        assert file["a/b"][()] == 3.5
        assert file["text"].asstr()[()] == "série"
        assert file["texts"].asstr()[()].tolist() == ["a", "bc"]
        assert file["bytes"][()].tolist() == [b"ab", b"c"]
        assert file["flag"][()] is np.True_
        assert np.array_equal(file["matrix"], values["matrix"])
        assert np.array_equal(file["four"], values["four"])
        assert np.array_equal(file["complex"], values["complex"])
        assert file["empty"].shape == (2, 0, 3)
        noted = []
        file.visititems(lambda name, item: noted.append(name) if "axes" in item.attrs else None)
        assert noted == ["empty", "train/x", "x"]


# -- aside --------------------------------------------------------------------------------------------------


def test_a_live_map_stays_valid_and_may_be_the_source(tmp_path):
    path = tmp_path / "a.h5"
    h5save(path, {"x": X, "y": X + 1})
    x = h5mmap(path, "x")
    h5save(path, {"x": x[:, 1:3], "y": h5mmap(path, "y")})
    assert np.array_equal(x, X)
    assert np.array_equal(h5mmap(path, "x"), X[:, 1:3])
    assert np.array_equal(h5mmap(path, "y"), X + 1)


def test_a_lazy_array_may_be_the_source(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=True)
    with h5mmap(path, "x", "FNT") as x:
        h5save(path, {"x": x})
        assert np.array_equal(x[...], X)
    assert type(h5mmap(path, "x")) is H5Map
    assert np.array_equal(h5mmap(path, "x"), X)


def test_a_reader_survives_overwriting(python, tmp_path):
    """A map of a file that shrinks dies of SIGBUS: shown here with h5py, and not to happen with
    h5save.
    """
    program = """if True:
        import sys, numpy as np, h5py
        from fluxutils_py.data import h5mmap, h5save
        x = h5mmap(sys.argv[1], "x")
        if sys.argv[2] == "h5save":
            h5save(sys.argv[1], {"x": np.zeros((1, 1, 1))})
        else:
            h5py.File(sys.argv[1], "w").close()
        print(x.sum())
    """
    codes = {}
    for how in ("h5save", "h5py"):
        h5save(tmp_path / "a.h5", {"x": np.ones((8, 64, 512))})  # 2 MiB
        done = subprocess.run(
            [python, "-c", program, tmp_path / "a.h5", how],
            capture_output=True,
            text=True,
            timeout=300,
        )
        codes[how] = done.returncode, done.stdout
    assert codes == {"h5save": (0, f"{8 * 64 * 512.0}\n"), "h5py": (-7, "")}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_of_the_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        h5save(tmp_path / "a.h5", {"x": X})
    finally:
        os.umask(before)
    assert (tmp_path / "a.h5").stat().st_mode & 0o777 == 0o666 & ~umask
    (tmp_path / "a.h5").chmod(0o640)
    h5save(tmp_path / "a.h5", {"x": X})
    assert (tmp_path / "a.h5").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link.h5").symlink_to("data/a.h5")
    h5save(tmp_path / "link.h5", {"x": X})
    assert (tmp_path / "link.h5").is_symlink()
    assert np.array_equal(h5mmap(tmp_path / "data" / "a.h5", "x"), X)
    h5save(tmp_path / "link.h5", {"x": X + 1})
    assert (tmp_path / "link.h5").is_symlink()
    assert np.array_equal(h5mmap(tmp_path / "link.h5", "x"), X + 1)


class Breaks:
    shape, dtype = (F, N, T), np.dtype("f4")

    def __init__(self, error):
        self.error = error

    def __getitem__(self, key):
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError("no space"), KeyboardInterrupt(), MemoryError(), IndexError("oh")], ids=repr
)
@pytest.mark.parametrize("existing", [True, False])
def test_nothing_is_left_after_an_error(tmp_path, error, existing):
    if existing:
        h5save(tmp_path / "a.h5", {"x": X})
    with pytest.raises(type(error)):
        h5save(tmp_path / "a.h5", {"y": X, "x": Breaks(error)})
    assert os.listdir(tmp_path) == ["a.h5"] * existing
    if existing:
        assert np.array_equal(h5mmap(tmp_path / "a.h5", "x"), X)


BAD = {
    "expected a mapping of names to arrays, as {'x': x, 'y': y}, got ndarray": (X, "TNF"),
    "a dataset is named by a string, 'x' or 'group/x', got 3": ({3: X}, "TNF"),
    "axes must name F (features), N (series) and T (time steps), as 'TNF', got 'TN'": (
        {"x": X},
        "TN",
    ),
    "dataset 'g/x': this is no array (": ({"g": {"x": [[1], [1, 2]]}}, "TNF"),
    "dataset 'x': cannot store ndarray of type object (Object dtype dtype('O') has no native HDF5 "
    "equivalent); convert "
    "it to an array of numbers, or give it another name": ({"x": None}, "TNF"),
    "dataset 'a/b' is given twice; give one of the two another name": (
        {"a": {"b": X}, "a/b": X + 1},
        "TNF",
    ),
    "dataset 'x' is given twice; give one of the two another name": ({"x": X, "/x/": X + 1}, "TNF"),
    "dataset 'a' is given twice; give one of the two another name": ({"a": {}, "./a": X}, "TNF"),
    "dataset 'x': 2 of the values read have a mask and the dtype int64": (
        {"x": np.ma.masked_less(np.arange(12).reshape(2, 3, 2), 2)},
        "TNF",
    ),
    "dataset 'x' must be an array, got torch.Tensor": (
        {"x": torch.zeros(2, 3, 4, dtype=torch.bfloat16)},
        "TNF",
    ),
    "dataset 'x/y': cannot store ndarray of type float32 (Incompatible object (Dataset) already "
    "exists); convert it to "
    "an array of numbers, or give it another name": ({"x": X, "x/y": X}, "TNF"),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_saved(tmp_path, message):
    mapping, axes = BAD[message]
    with pytest.raises(H5DataError) as caught:
        h5save(tmp_path / "a.h5", mapping, axes=axes)
    assert str(caught.value).startswith(f"{tmp_path}/a.h5: {message}")
    assert os.listdir(tmp_path) == []


def test_masked_values_are_missing(tmp_path):
    x = np.ma.masked_less(X, 4)
    x.data[0, 0, 0] = 99  # below the mask
    values = {"x": x, "list": [x[0], X[1]], "unmasked": np.ma.array([1, 2]), "one": np.ma.masked}
    h5save(tmp_path / "a.h5", values)
    expected = np.where(X < 4, np.nan, X).astype("f4")
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "x"), expected, equal_nan=True)
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "list"), expected[:2], equal_nan=True)
    assert stored(tmp_path / "a.h5", "unmasked")[0].tolist() == [1, 2]
    assert np.isnan(stored(tmp_path / "a.h5", "one")[0])


def test_a_source_whose_file_was_closed(tmp_path):
    with h5py.File(tmp_path / "source.h5", "w") as file:
        closed = file.create_dataset("x", data=X)
    with pytest.raises(H5DataError) as caught:
        h5save(tmp_path / "a.h5", {"x": closed})
    assert f"{tmp_path}/a.h5: dataset 'x'" in str(caught.value)
    assert "file that was closed" in str(caught.value)
    assert "h5mmap" in str(caught.value)
    assert os.listdir(tmp_path) == ["source.h5"]


@pytest.mark.parametrize("path", [None, "", 3, "a\0b", ["a.h5"]], ids=repr)
def test_paths_that_are_none(path):
    for call in (
        lambda: h5save(path, {"x": X}),
        lambda: h5mmap(path, "x"),
        lambda: H5Lazy(path, "x"),
        lambda: h5create(path, "x", (1, 2, 3)),
    ):
        with pytest.raises(H5DataError) as caught:
            call()
        assert str(caught.value) == f"path must be the name of a file, got {path!r}"


def test_where_nothing_can_be_saved(tmp_path):
    with pytest.raises(H5DataError) as caught:
        h5save(tmp_path, {"x": X})
    assert str(caught.value) == f"{tmp_path}: this is a directory; give the name of a file"
    with pytest.raises(FileNotFoundError) as missing:
        h5save(tmp_path / "no" / "a.h5", {"x": X})
    assert str(missing.value) == f"{tmp_path}/no: there is no such folder to write to"


class Foreign:
    """A lazy array as those of netCDF4, whose blocks may be masked."""

    def __init__(self, values, dtype):
        self.values, self.shape, self.dtype = values, values.shape, np.dtype(dtype)

    def __getitem__(self, key):
        return self.values[key]


@pytest.mark.parametrize("lazily", [False, True])
def test_blocks_that_are_masked_are_stored_as_nan(tmp_path, lazily):
    mask = np.random.default_rng(0).random(X.shape) < 0.4
    assert not mask[0, 0, 0]
    values = np.ma.MaskedArray(np.where(mask, 1e20, X).astype("f4"), mask)
    source = Foreign(values, "f4")
    array = LazyArray(source, range(1, N)) if lazily else source
    h5save(tmp_path / "a.h5", {"x": array})
    found = h5mmap(tmp_path / "a.h5", "x")
    assert found.dtype == "f4"
    expected = np.where(mask, np.nan, X)
    np.testing.assert_array_equal(found, expected[:, 1:] if lazily else expected)


def test_integers_that_turn_out_to_be_masked_leave_the_old_file(tmp_path):
    h5save(tmp_path / "a.h5", {"x": X})
    values = np.ma.MaskedArray(X.astype("i4"), X[-1, -1, -1] == X)
    with pytest.raises(H5DataError, match=r"'x': .*1 of the values read have a mask .*int32"):
        h5save(tmp_path / "a.h5", {"x": Foreign(values, "i4")})
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "x"), X)
    assert os.listdir(tmp_path) == ["a.h5"]


def test_nothing_to_save_leaves_the_file(tmp_path):
    h5save(tmp_path / "a.h5", {"x": np.ones((1, 2, 3))})
    with pytest.raises(H5DataError, match="nothing to save"):
        h5save(tmp_path / "a.h5", {})
    assert h5mmap(tmp_path / "a.h5", "x").shape == (1, 2, 3)
