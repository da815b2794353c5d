"""What h5mmap gives for every kind of dataset and every kind of damage, row by row of the table in
its notes.
"""

import contextlib
import errno
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from fluxutils_py.data import H5Lazy, H5Map, h5create, h5load, h5mmap, h5save
from fluxutils_py.data.hdf5 import mapping
from fluxutils_py.errors import H5DataError

F, N, T = 3, 5, 7
SHAPE = (T, N, F)  # as in the file


def numbers(dtype="f4"):
    """(T, N, F), no number twice as far as the type allows."""
    a = np.arange(T * N * F).reshape(SHAPE)
    return (a % 3 == 0 if dtype == "?" else a).astype(dtype)


def write(path, a=None, name="x", **kwargs):
    with h5py.File(path, "a") as file:
        dataset = file.create_dataset(name, data=numbers() if a is None else a, **kwargs)
        dataset.attrs["axes"] = "TNF"
    return path


def error(*args, **kwargs):
    with pytest.raises(H5DataError) as caught:
        h5mmap(*args, **kwargs)
    return str(caught.value)


@contextlib.contextmanager
def other_process(python, program, *args):
    """Another process that has run a program, says so, and goes on until the end of the block."""
    program = (
        f"import sys, h5py, numpy as np\n{program}\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [python, "-c", program, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.stdin.close()
            process.wait(20)


def assert_map(x, expected):
    assert type(x) is H5Map
    assert x.shape == (F, N, T)
    assert x.dtype == expected.dtype
    assert np.array_equal(x, expected.transpose(2, 1, 0))


def assert_lazy(x, expected):
    assert type(x) is H5Lazy
    assert not isinstance(x, np.ndarray)
    assert x.shape == (F, N, T)
    assert x.dtype == expected.dtype
    assert np.array_equal(x[:, :, :], expected.transpose(2, 1, 0))
    x.close()


# -- maps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"libver": "earliest"},
        {"libver": "v108"},
        {"libver": "v110"},
        {"libver": "latest"},
        {"userblock_size": 512},
        {"userblock_size": 4096},
        {"fs_strategy": "page", "fs_page_size": 4096},
        {"alignment_threshold": 1, "alignment_interval": 4096},
    ],
    ids=str,
)
def test_contiguous(tmp_path, options):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", **options) as file:
        file["before"] = np.arange(11, dtype="u1")
        file["x"] = numbers()
    assert_map(h5mmap(path, "x", axes="TNF"), numbers())


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_unaligned(tmp_path, libver):
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file["bytes"] = np.zeros(1, "u1")
        file["x"] = numbers("f8")
        assert file["x"].id.get_offset() % 8 != 0
    assert_map(h5mmap(tmp_path / "a.h5", "x", axes="TNF"), numbers("f8"))


def test_what_h5save_writes_is_aligned(tmp_path):
    x = numbers("f8").transpose(2, 1, 0)
    h5save(tmp_path / "a.h5", {"bytes": np.zeros(1, "u1"), "x": x, "one": np.ones(1, "u1"), "y": x})
    with h5py.File(tmp_path / "a.h5") as file:
        assert [file[name].id.get_offset() % 64 for name in ("bytes", "x", "one", "y")] == [0] * 4
    assert_map(h5mmap(tmp_path / "a.h5", "y"), numbers("f8"))


TYPES = [
    "f2",
    "f4",
    "f8",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "?",
    ">f2",
    ">f4",
    ">f8",
    ">i4",
    ">u2",
]


@pytest.mark.parametrize("dtype", TYPES)
def test_number_formats(tmp_path, dtype):
    x = h5mmap(write(tmp_path / "a.h5", numbers(dtype)), "x")
    assert x.dtype.str == np.dtype(dtype).str
    assert_map(x, numbers(dtype))


def test_enumerations_are_their_numbers(tmp_path):
    write(tmp_path / "a.h5", numbers("i2") % 2, dtype=h5py.enum_dtype({"off": 0, "on": 1}, "i2"))
    assert_map(h5mmap(tmp_path / "a.h5", "x"), numbers("i2") % 2)


# -- lazy arrays --------------------------------------------------------------------------------------------


def bfloat16():
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_precision(16)
    kind.set_ebias(127)
    return kind


@pytest.mark.parametrize("kind", ["bfloat16", "bitfield"])
def test_number_formats_that_numpy_lacks(tmp_path, kind):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        tid = bfloat16() if kind == "bfloat16" else h5py.h5t.STD_B8LE  # the latter is Julia's Bool
        h5py.h5d.create(file.id, b"x", tid, h5py.h5s.create_simple(SHAPE))
        expected = numbers("f4") if kind == "bfloat16" else numbers("u1") % 2
        if kind == "bfloat16":
            file["x"][...] = expected
        else:
            file["x"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, expected, tid)
    assert_lazy(h5mmap(tmp_path / "a.h5", "x", axes="TNF"), expected)
    assert error(tmp_path / "a.h5", "x", "TNF", fallback="error") == (
        f"{tmp_path}/a.h5: dataset 'x' cannot be mapped: it has a number format that NumPy lacks; "
        "write it again with h5save, or pass fallback='lazy'"
    )


def compact(path):
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(SHAPE), plist)
        file["x"][...] = numbers()
        file["x"].attrs["axes"] = "TNF"


def virtual(path, n_sources=2):
    parts = np.array_split(numbers(), n_sources)
    layout = h5py.VirtualLayout(SHAPE, "f4")
    start = 0
    for i, part in enumerate(parts):
        with h5py.File(path.parent / f"source{i}.h5", "w") as file:
            file["part"] = part
        layout[start : start + len(part)] = h5py.VirtualSource(f"source{i}.h5", "part", part.shape)
        start += len(part)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout).attrs["axes"] = "TNF"


LAYOUTS = {
    "chunked": ("is chunked", lambda path: write(path, chunks=(2, 3, 2))),
    "gzip": ("is chunked", lambda path: write(path, compression="gzip")),
    "lzf": ("is chunked", lambda path: write(path, compression="lzf")),
    "scaleoffset": ("is chunked", lambda path: write(path, numbers("i4"), scaleoffset=0)),
    "fletcher32": ("is chunked", lambda path: write(path, fletcher32=True)),
    "compact": ("is compact: it is within the header of the file", compact),
    "virtual": ("is virtual: its data are in other files", virtual),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_cannot_be_mapped(tmp_path, layout):
    path = tmp_path / "a.h5"
    reason, make = LAYOUTS[layout]
    make(path)
    expected = numbers("i4" if layout == "scaleoffset" else "f4")
    assert_lazy(h5mmap(path, "x"), expected)
    read = h5load(path, "x", mmap=False)
    assert type(read) is np.ndarray
    assert np.array_equal(read, expected.transpose(2, 1, 0))
    assert error(path, "x", fallback="error") == (
        f"{path}: dataset 'x' cannot be mapped: it {reason}; write it again with h5save, or pass "
        "fallback='lazy'"
    )
    assert error(path, "x", mode="r+") == (
        f"{path}: dataset 'x' cannot be written to in place: it {reason}; make one that can be "
        "with h5create"
    )


def test_virtual_with_a_missing_source(tmp_path):
    path = tmp_path / "a.h5"
    virtual(path, n_sources=3)
    os.rename(tmp_path / "source1.h5", tmp_path / "elsewhere.h5")
    with h5py.File(path) as file:  # this is why
        assert (file["x"][3:5] == 0).all()
    assert error(path, "x") == (
        f"{path}: dataset 'x' is virtual and 1 of its source files are missing: source1.h5; put "
        "them back, or recreate the dataset (HDF5 would give fill values in their place)"
    )
    assert "1 of its source files are missing" in error(path, "x")
    os.rename(tmp_path / "elsewhere.h5", tmp_path / "source1.h5")
    assert_lazy(h5mmap(path, "x"), numbers())


def test_virtual_with_a_source_file_that_lacks_the_dataset(tmp_path):
    virtual(tmp_path / "a.h5")
    h5py.File(tmp_path / "source1.h5", "w").close()
    assert error(tmp_path / "a.h5", "x") == (
        f"{tmp_path}/source1.h5: dataset 'part' cannot be opened (Unable to synchronously open "
        "object (object 'part' doesn't exist)); the file holds no datasets"
    )


def test_virtual_of_virtual_with_a_missing_source(tmp_path):
    virtual(tmp_path / "a.h5")
    layout = h5py.VirtualLayout(SHAPE, "f4")
    layout[:] = h5py.VirtualSource("a.h5", "x", SHAPE)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_virtual_dataset("x", layout).attrs["axes"] = "TNF"
    assert_lazy(h5mmap(tmp_path / "b.h5", "x"), numbers())
    os.unlink(tmp_path / "source0.h5")
    assert "1 of its source files are missing: source0.h5" in error(tmp_path / "b.h5", "x")


def test_virtual_within_one_file_and_with_a_percent_sign(tmp_path):
    layout = h5py.VirtualLayout(SHAPE, "f4")
    layout[:3] = h5py.VirtualSource(".", "part", (3, N, F))
    layout[3:] = h5py.VirtualSource("50%%.h5", "part", (4, N, F))
    with h5py.File(tmp_path / "50%.h5", "w") as file:
        file["part"] = numbers()[3:]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["part"] = numbers()[:3]
        file.create_virtual_dataset("x", layout).attrs["axes"] = "TNF"
    assert_lazy(h5mmap(tmp_path / "a.h5", "x"), numbers())


def test_virtual_through_a_link_to_its_file(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    virtual(tmp_path / "data" / "a.h5")
    (tmp_path / "link.h5").symlink_to("data/a.h5")
    with h5py.File(tmp_path / "source0.h5", "w") as file:
        file["part"] = np.full((4, N, F), 99, "f4")  # HDF5 itself would take this one
    monkeypatch.chdir(tmp_path)
    assert_lazy(h5mmap("link.h5", "x"), numbers())


def test_created_but_never_written(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", SHAPE, "f4", fillvalue=3)
    assert_lazy(h5mmap(tmp_path / "a.h5", "x", "TNF"), np.full(SHAPE, 3, "f4"))
    assert "it was created but never written" in error(
        tmp_path / "a.h5", "x", "TNF", fallback="error"
    )
    assert_map(h5create(tmp_path / "b.h5", "out", (F, N, T)), np.zeros(SHAPE, "f4"))


def test_file_systems_that_cannot_map(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mapping, "H5Map", refuse)
    path = write(tmp_path / "a.h5")
    assert_lazy(h5mmap(path, "x"), numbers())
    message = error(path, "x", mode="r+")
    assert message.startswith(f"{path}: dataset 'x' cannot be written to in place")
    assert "(No such device)" in message
    assert "h5create" in message


@pytest.mark.parametrize("shape", [(0, N, F), (T, 0, F), (T, N, 0)])
def test_axis_of_length_zero(tmp_path, shape):
    x = h5mmap(write(tmp_path / "a.h5", np.zeros(shape, "f4")), "x")
    assert isinstance(x, np.ndarray)
    assert x.shape == shape[::-1]
    assert x.dtype == "f4"


# -- not an array of numbers --------------------------------------------------------------------------------

NOT_NUMBERS = {
    "object": lambda f: f.create_dataset("x", data=["a", "b"]),
    "|S1": lambda f: f.create_dataset("x", data=np.array([b"a", b"b"])),
    "of shape (2,)": lambda f: f.create_dataset("x", (2,), h5py.vlen_dtype("f4")),
    "[('a', '<f4'), ('b', '<i4')]": lambda f: f.create_dataset(
        "x", data=np.zeros(2, [("a", "f4"), ("b", "i4")])
    ),
    "complex64": lambda f: f.create_dataset("x", data=np.zeros(SHAPE, "c8")),
    "|V3": lambda f: f.create_dataset("x", data=np.zeros(2, "V3")),
    "of shape (2,); read it": lambda f: f.create_dataset("x", (2,), h5py.ref_dtype),
    "float64 of shape ()": lambda f: f.create_dataset("x", data=1.5),
    "float32 of shape None": lambda f: f.create_dataset("x", data=h5py.Empty("f4")),
    "is a group; name a dataset in it: '/x' holds a, b": lambda f: f.update({"x/a": 1, "x/b": 2}),
    "datatype": lambda f: f.update({"x": np.dtype("f4")}),
    "(3,)": lambda f: h5py.h5d.create(
        f.id, b"x", h5py.h5t.array_create(h5py.h5t.IEEE_F32LE, (3,)), h5py.h5s.create_simple((2,))
    ),
    "TypeTimeID": lambda f: h5py.h5d.create(
        f.id, b"x", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((2,))
    ),
}


@pytest.mark.parametrize("found", NOT_NUMBERS)
def test_what_is_not_an_array_of_numbers(tmp_path, found):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        NOT_NUMBERS[found](file)
    message = error(tmp_path / "a.h5", "x")
    assert message.startswith(f"{tmp_path}/a.h5: dataset 'x' ")
    assert found in message


@pytest.mark.parametrize("name", [None, 3, "", "/"])
def test_names_that_are_none(tmp_path, name):
    assert error(write(tmp_path / "a.h5"), name) == (
        f"{tmp_path}/a.h5: a dataset is named by a string, 'x' or 'group/x', got {name!r}"
    )


# -- order of axes ------------------------------------------------------------------------------------------


def test_order_that_cannot_be_known(tmp_path):
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["x"].attrs["axes"]
    assert error(path, "x") == (
        f"{path}: dataset 'x' has the attribute axes=None, so the order of its axes (7, 5, 3) "
        "cannot be known; pass axes='TNF' for a file from Julia or other column-major software, "
        "axes='FNT' if h5py shows (features, series, time steps)"
    )
    assert_map(h5mmap(path, "x", axes="TNF"), numbers())
    assert np.array_equal(h5mmap(path, "x", axes="FNT"), numbers())
    assert np.array_equal(h5mmap(path, "x", axes="NTF"), numbers().transpose(2, 0, 1))


@pytest.mark.parametrize("noted", ["time:series", 7, np.bytes_(b"TNF"), [1, 2]], ids=str)
def test_order_noted_by_other_software(tmp_path, noted):
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["x"].attrs["axes"] = noted
    if isinstance(noted, bytes):
        assert_map(h5mmap(path, "x"), numbers())
        return
    assert "has the attribute axes=" in error(path, "x")
    assert_map(h5mmap(path, "x", "TNF"), numbers())


def test_order_that_the_file_contradicts(tmp_path):
    path = write(tmp_path / "a.h5")
    assert error(path, "x", axes="FNT") == (
        f"{path}: dataset 'x' is in the order 'TNF' by its attribute 'axes', not 'FNT'; leave "
        "axes out"
    )


@pytest.mark.parametrize("axes", ["TNX", "TN", "TNN", "tnf", 3, ("T", "N", "F")])
def test_order_that_is_none(tmp_path, axes):
    assert error(write(tmp_path / "a.h5"), "x", axes=axes) == (
        f"{tmp_path}/a.h5: dataset 'x' has 3 axes, (7, 5, 3); axes must name each by one of the "
        f"letters F (features), N (series) and T (time steps), as in 'TNF', got {axes!r}"
    )


def test_fewer_and_more_axes_stay_as_they_are(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["one"], file["two"], file["four"] = (
            np.arange(4),
            np.arange(6).reshape(2, 3),
            np.arange(16).reshape([2] * 4),
        )
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "one"), np.arange(4))
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "two"), np.arange(6).reshape(2, 3))
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "two", axes="TN"), np.arange(6).reshape(2, 3).T)
    assert np.array_equal(h5mmap(tmp_path / "a.h5", "four"), np.arange(16).reshape([2] * 4))


# -- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["soft", "hard", "external", "within a group"])
def test_links_that_lead_somewhere(tmp_path, kind):
    path = write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["link"] = h5py.ExternalLink("a.h5", "/x")
    with h5py.File(path, "r+") as file:
        file["soft"], file["hard"], file["group/soft"] = (
            h5py.SoftLink("/x"),
            file["x"],
            h5py.SoftLink("/x"),
        )
    if kind == "external":
        x = h5mmap(tmp_path / "b.h5", "link")
        assert x.filename == str(path)
    else:
        x = h5mmap(path, "group/soft" if kind == "within a group" else kind)
    assert_map(x, numbers())


def test_links_that_lead_nowhere(tmp_path):
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["soft"] = h5py.SoftLink("/gone")
        file["file"] = h5py.ExternalLink("gone.h5", "/x")
        file["dataset"] = h5py.ExternalLink("b.h5", "/gone")
    h5py.File(tmp_path / "b.h5", "w").close()
    for name in ("soft", "file", "dataset"):
        message = error(path, name)
        assert message.startswith(f"{path}: dataset '{name}' cannot be opened (")
        assert message.endswith("the file holds dataset, file, soft, x")


def test_names_that_do_not_exist(tmp_path):
    path = write(write(tmp_path / "a.h5"), name="train/targets")
    assert error(path, "y").startswith(f"{path}: dataset 'y' cannot be opened (")
    assert error(path, "y").endswith("; the file holds train, x")
    assert error(path, "train/target").endswith("; '/train' holds targets")
    assert error(path, "none/x").endswith("; the file holds train, x")
    assert error(path, "x/y").startswith(f"{path}: dataset 'x/y' cannot be opened (")
    h5py.File(tmp_path / "b.h5", "w").close()
    assert error(tmp_path / "b.h5", "x").endswith("; the file holds no datasets")


# -- files --------------------------------------------------------------------------------------------------


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        h5mmap(tmp_path / "a.h5", "x")
    assert str(caught.value) == f"{tmp_path}/a.h5: there is no such file"


def test_truncated_file(tmp_path):
    path = write(tmp_path / "a.h5")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    message = error(path, "x")
    assert message.startswith(f"{path}: ")
    assert f"stored_eof = {size}" in message
    assert "write or copy it again" in message


def test_other_files(tmp_path):
    path = tmp_path / "a.h5"
    path.write_bytes(b"")
    assert error(path, "x").startswith(f"{path}: this cannot be opened as an HDF5 file (")
    path.write_text("no HDF5 " * 1000)
    assert "file signature not found" in error(path, "x")
    assert "Is a directory" in error(tmp_path, "x")
    with open(write(tmp_path / "b.h5"), "r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 40)
    message = error(tmp_path / "b.h5", "x")
    assert message.startswith(f"{tmp_path}/b.h5: this cannot be opened as an HDF5 file (")


def test_a_damaged_header_is_h5pys_error_with_file_and_dataset(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=numbers()).attrs["axes"] = np.bytes_(b"TNF")
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[data.index(b"TNF")] ^= 1
    (tmp_path / "a.h5").write_bytes(data)
    message = error(tmp_path / "a.h5", "x")
    assert message.startswith(f"{tmp_path}/a.h5: dataset 'x' cannot be ")
    assert "checksum" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read(tmp_path):
    path = write(tmp_path / "a.h5")
    path.chmod(0o400)
    assert error(path, "x", mode="r+") == (
        f"{path}: dataset 'x' cannot be opened for writing (Permission denied); use mode='r'"
    )
    path.chmod(0)
    assert "Permission denied" in error(path, "x")


def test_bad_options(tmp_path):
    path = write(tmp_path / "a.h5")
    assert error(path, "x", mode="w") == (
        f"{path}: dataset 'x': mode must be 'r' or 'r+', got 'w'; h5create makes new datasets"
    )
    assert error(path, "x", fallback="no") == (
        f"{path}: dataset 'x': fallback must be 'lazy' or 'error', got 'no'"
    )


# -- other processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_file_open_for_writing_elsewhere(python, tmp_path):
    path = write(tmp_path / "a.h5")
    with other_process(python, "f = h5py.File(sys.argv[1], 'r+')", path):
        assert error(path, "x") == (
            f"{path}: the file is open in another process, or elsewhere in this one; close it "
            "there, or set HDF5_USE_FILE_LOCKING=FALSE in the environment if that process leaves "
            "this data alone"
        )
        program = "import sys; from fluxutils_py.data import h5mmap; x = h5mmap(sys.argv[1], 'x'); print(type(x).__name__)"
        done = subprocess.run(
            [sys.executable, "-c", program, path],
            env=os.environ | {"HDF5_USE_FILE_LOCKING": "FALSE"}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("H5Map\n", "")
    assert_map(h5mmap(path, "x"), numbers())


@pytest.mark.slow
def test_virtual_source_open_for_writing_elsewhere(python, tmp_path):
    virtual(tmp_path / "a.h5")
    with other_process(python, "f = h5py.File(sys.argv[1], 'r+')", tmp_path / "source1.h5"):
        message = error(tmp_path / "a.h5", "x")
        assert message.startswith(f"{tmp_path}/source1.h5: the file is open in another process")


def test_a_map_lets_others_write_and_sees_what_they_do(python, tmp_path):
    path = write(tmp_path / "a.h5")
    x = h5mmap(path, "x")
    with other_process(
        python, "f = h5py.File(sys.argv[1], 'r+'); f['x'][2, 1, 0] = 99; f.flush()", path
    ):
        assert x[0, 1, 2] == 99


@pytest.mark.slow
def test_a_lazy_array_keeps_writers_out_until_it_is_closed(tmp_path):
    path = write(tmp_path / "a.h5", chunks=True)
    program = "try: h5py.File(sys.argv[1], 'r+')\nexcept OSError as e: print('refused', e.errno)"
    run = [sys.executable, "-c", f"import sys, h5py\n{program}", str(path)]
    with h5mmap(path, "x") as x:
        assert np.array_equal(x[...], numbers().transpose(2, 1, 0))
        assert (
            subprocess.run(run, capture_output=True, text=True, timeout=300).stdout
            == "refused 11\n"
        )
    assert x.closed
    assert subprocess.run(run, capture_output=True, text=True, timeout=300).stdout == ""
    with pytest.raises(H5DataError) as caught:
        x[0]
    assert str(caught.value) == f"{path}: dataset 'x' was closed; open it again with h5mmap"


# -- this process -------------------------------------------------------------------------------------------


def test_file_open_for_writing_in_this_process(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = numbers()
        file["x"].attrs["axes"] = "TNF"
        file["x"][0, 0, 0] = 5
        x = h5mmap(tmp_path / "a.h5", "x")
        assert x[0, 0, 0] == 5
        file["x"][0, 0, 0] = 6  # the file is still open
        file.flush()
        assert x[0, 0, 0] == 6


def test_files_are_closed_again(tmp_path):
    path = write(write(tmp_path / "a.h5"), name="chunked", chunks=True)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("x", "chunked", "missing"):
        with contextlib.suppress(H5DataError):
            h5mmap(path, name, fallback="error")
    h5load(path, "chunked", mmap=False)
    assert len(os.listdir("/proc/self/fd")) == before
    h5py.File(path, "r+").close()


# -- h5load -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False])
def test_loading_is_the_inverse_of_saving(tmp_path, mmap):
    saved = {
        "x": numbers(),
        "train": {
            "y": np.arange(6).reshape(2, 3),
            "more": {"mask": np.array([True, False])},
            "empty": {},
        },
        "n": 5,
        "unit": "kWh",
        "names": np.array(["a", "bcd"]),
    }
    h5save(tmp_path / "a.h5", saved)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file.create_dataset("train/z", data=np.arange(8.0), chunks=(2,))
    loaded = h5load(tmp_path / "a.h5", mmap=mmap)
    z = loaded["train"].pop("z")
    assert isinstance(z, H5Lazy if mmap else np.ndarray)
    assert np.asarray(z).tolist() == list(range(8))
    assert isinstance(loaded["x"], H5Map) == mmap
    assert (loaded["n"], loaded["unit"], list(loaded["names"])) == (5, "kWh", ["a", "bcd"])
    assert loaded.keys() == saved.keys()
    assert loaded["train"].keys() == saved["train"].keys()
    assert loaded["train"]["empty"] == {}
    for a, b in (
        (loaded["x"], saved["x"]),
        *((loaded["train"][k], saved["train"][k]) for k in ("y",)),
    ):
        assert np.array_equal(a, b)
    assert loaded["train"]["more"]["mask"].tolist() == [True, False]
    if mmap:
        z.close()


def test_loading_by_name(tmp_path):
    h5save(tmp_path / "a.h5", {"x": numbers(), "train": {"y": np.arange(3)}})
    assert np.array_equal(h5load(tmp_path / "a.h5", "x"), numbers())
    assert h5load(tmp_path / "a.h5", "train")["y"].tolist() == [0, 1, 2]
    assert list(h5load(tmp_path / "a.h5", ["train/y"])) == ["train/y"]
    with pytest.raises(H5DataError, match=r"'train/z' cannot be opened .*'/train' holds y$"):
        h5load(tmp_path / "a.h5", "train/z")
    with pytest.raises(FileNotFoundError):
        h5load(tmp_path / "b.h5")


def test_loading_a_file_of_julia_needs_its_order(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = numbers().T, np.arange(3)
    with pytest.raises(H5DataError, match="pass axes='TNF'"):
        h5load(tmp_path / "a.h5")
    loaded = h5load(tmp_path / "a.h5", axes="TNF")
    assert np.array_equal(loaded["x"], numbers())
    assert loaded["y"].tolist() == [0, 1, 2]
