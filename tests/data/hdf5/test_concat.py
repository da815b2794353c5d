"""Joined files against numpy.concatenate and numpy.block of what they hold."""

import os
import shutil
import subprocess

import h5py
import numpy as np
import pytest

from fluxutils_py.data import H5Lazy, H5Map, h5concat, h5mmap, h5save
from fluxutils_py.errors import H5DataError

BOTH = pytest.mark.parametrize("virtual", [True, False])


def numbers(shape, start=0, dtype="f4"):
    return (start + np.arange(np.prod(shape))).reshape(shape).astype(dtype)


def files(folder, arrays, name="x", axes="TNF", **more):
    """One file for each array; their paths."""
    paths = []
    for i, a in enumerate(arrays):
        paths.append(folder / f"{name}{i}.h5")
        h5save(paths[-1], {name: a, **more}, axes=axes)
    return paths


def read(path, name="x"):
    x = h5mmap(path, name)
    assert type(x) in (H5Map, H5Lazy)
    return np.array(x)


def error(*args, **kwargs):
    with pytest.raises(H5DataError) as caught:
        h5concat(*args, **kwargs)
    return str(caught.value)


# -- one axis -----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("axes", ["TNF", "FNT", "NFT"])
@pytest.mark.parametrize("dims", [0, 1, 2, -1, -2, -3])
def test_one_axis(tmp_path, dims, axes, virtual):
    arrays = []
    for n in (2, 5, 3):
        shape = [3, 4, 6]
        shape[dims] = n
        arrays.append(numbers(shape, 1000 * n))
    h5concat(tmp_path / "all.h5", files(tmp_path, arrays, axes=axes), dims, virtual)
    assert np.array_equal(read(tmp_path / "all.h5"), np.concatenate(arrays, dims))
    with h5py.File(tmp_path / "all.h5") as file:
        assert file["x"].is_virtual == virtual
        assert file["x"].attrs["axes"] == axes
    assert type(h5mmap(tmp_path / "all.h5", "x")) is (H5Lazy if virtual else H5Map)


@pytest.mark.few
@BOTH
def test_many_datasets_of_many_axes(tmp_path, virtual):
    """As in HDF5Utils' own test: a negative axis suits (F, N, T) and (N, T) alike."""
    parts = [
        {
            "x": numbers((3, n, 5), n),
            "y": numbers((n, 5), n, "f8"),
            "z": numbers((2, 2, n, 5), n, "i4"),
        }
        for n in (1, 4)
    ]
    for i, part in enumerate(parts):
        h5save(tmp_path / f"{i}.h5", part)
    h5concat(tmp_path / "all.h5", [tmp_path / "0.h5", tmp_path / "1.h5"], -2, virtual)
    for name in "xyz":
        expected = np.concatenate([part[name] for part in parts], -2)
        assert np.array_equal(read(tmp_path / "all.h5", name), expected)
        assert read(tmp_path / "all.h5", name).dtype == expected.dtype


@pytest.mark.slow
@BOTH
def test_the_same_file_many_times(tmp_path, virtual):
    (path,) = files(tmp_path, [numbers((2, 3, 4))])
    h5concat(tmp_path / "all.h5", [path] * 100, (-2,), virtual)
    assert np.array_equal(read(tmp_path / "all.h5"), np.concatenate([numbers((2, 3, 4))] * 100, 1))


@BOTH
def test_an_empty_part(tmp_path, virtual):
    arrays = [numbers((2, 3, 4)), numbers((2, 0, 4)), numbers((2, 1, 4), 99)]
    h5concat(tmp_path / "all.h5", files(tmp_path, arrays), 1, virtual)
    assert np.array_equal(read(tmp_path / "all.h5"), np.concatenate(arrays, 1))


@pytest.mark.few
@BOTH
def test_parts_of_every_layout(tmp_path, virtual):
    arrays = [numbers((2, 3, 4), 100 * i) for i in range(5)]
    paths = files(tmp_path, arrays)
    for path, kwargs in zip(
        paths[1:4], ({"chunks": True}, {"compression": "gzip"}, {"dtype": ">f4"}), strict=True
    ):
        with h5py.File(path, "w") as file:
            a = arrays[paths.index(path)].transpose(2, 1, 0)
            file.create_dataset("x", data=a, **kwargs).attrs["axes"] = "TNF"
    h5concat(tmp_path / "two.h5", paths[2:4], 1)  # a virtual one
    h5concat(tmp_path / "all.h5", [*paths[:2], tmp_path / "two.h5", paths[4]], 1, virtual)
    assert np.array_equal(read(tmp_path / "all.h5"), np.concatenate(arrays, 1))


@BOTH
def test_files_without_a_noted_order(tmp_path, virtual):
    arrays = [numbers((4, n, 2), n) for n in (3, 5)]
    for i, a in enumerate(arrays):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file["x"], file["y"] = a, a[:, :, 0]
    paths = [tmp_path / "0.h5", tmp_path / "1.h5"]
    message = error(tmp_path / "all.h5", paths, -2, virtual)
    assert message.startswith(f"{paths[0]}: dataset 'x' has the attribute axes=None")
    assert "axes='TNF'" in message
    h5concat(tmp_path / "all.h5", paths, 1, virtual, axes="TNF")
    assert np.array_equal(read(tmp_path / "all.h5"), np.concatenate(arrays, 1).transpose(2, 1, 0))
    assert np.array_equal(
        read(tmp_path / "all.h5", "y"), np.concatenate([a[:, :, 0] for a in arrays], 1)
    )


# -- types --------------------------------------------------------------------------------------------------

TYPES = [
    ["f4", "f8"], ["f8", "f4"], ["i2", "f4"], ["i8", "u8"], ["u1", "i1"], ["f2", "i4"], [">f4", ">f4"], [">f4", "<f4"],
    ["?", "?"], [">i2", "u2"], ["f2", "f4", "i1"],
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("dtypes", TYPES, ids=str)
def test_types_are_promoted(tmp_path, dtypes, virtual):
    arrays = [(numbers((2, 3, 4), i) % 100).astype(d) for i, d in enumerate(dtypes)]
    h5concat(tmp_path / "all.h5", files(tmp_path, arrays), 1, virtual)
    found, expected = read(tmp_path / "all.h5"), np.concatenate(arrays, 1)
    assert np.array_equal(found, expected)
    assert found.dtype.newbyteorder("=") == np.result_type(*dtypes)


@BOTH
def test_number_formats_that_numpy_lacks(tmp_path, virtual):
    a = numbers((4, 3, 2)).astype("u1") % 2
    for i in range(2):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            kind = h5py.h5t.STD_B8LE  # Julia's Bool
            h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple(a.shape))
            file["x"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, a, kind)
    h5concat(tmp_path / "all.h5", [tmp_path / "0.h5", tmp_path / "1.h5"], 1, virtual, axes="TNF")
    assert np.array_equal(read(tmp_path / "all.h5"), np.concatenate([a, a], 1).transpose(2, 1, 0))


# -- two axes -----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dims", [(1, 2), (-2, -1), (2, 1), (0, -1)])
def test_a_grid(tmp_path, dims, virtual):
    rows = []
    for i, m in enumerate((2, 3)):
        row = []
        for j, n in enumerate((4, 1, 2)):
            shape = [5, 5, 5]
            shape[dims[0]], shape[dims[1]] = m, n
            row.append(numbers(shape, 1000 * (3 * i + j)))
        rows.append(row)
    paths = files(tmp_path, [a for row in rows for a in row])
    h5concat(tmp_path / "all.h5", [paths[:3], paths[3:]], dims, virtual)
    expected = np.concatenate([np.concatenate(row, dims[1]) for row in rows], dims[0])
    assert np.array_equal(read(tmp_path / "all.h5"), expected)
    if dims == (1, 2):
        assert np.array_equal(expected, np.block(rows))


@BOTH
def test_rows_of_different_length_leave_zeros(tmp_path, virtual):
    """The test of HDF5Utils.jl: [x x 0; x 0 0; x x x]."""
    x = numbers((2, 3, 4), 1)
    (path,) = files(tmp_path, [x])
    h5concat(tmp_path / "all.h5", [[path] * 2, [path], [path] * 3], (-2, -1), virtual)
    o = np.zeros_like(x)
    assert np.array_equal(read(tmp_path / "all.h5"), np.block([[x, x, o], [x, o, o], [x, x, x]]))


@BOTH
def test_files_of_different_height_leave_zeros(tmp_path, virtual):
    a, b, c = numbers((1, 2, 3), 10), numbers((1, 4, 2), 30), numbers((1, 1, 4), 50)
    paths = files(tmp_path, [a, b, c])
    h5concat(tmp_path / "all.h5", [paths[:2], paths[2:]], (1, 2), virtual)
    expected = np.zeros((1, 5, 5), "f4")
    expected[:, :2, :3], expected[:, :4, 3:], expected[:, 4:, :4] = a, b, c
    assert np.array_equal(read(tmp_path / "all.h5"), expected)


@pytest.mark.slow
@BOTH
def test_a_pattern_stands_for_the_files_that_match_it(tmp_path, virtual):
    arrays = [numbers((2, n, 3), n) for n in (1, 4, 2)]
    (tmp_path / "parts [1]").mkdir()
    for name, a in zip("acb", arrays, strict=True):
        h5save(tmp_path / "parts [1]" / f"{name}.h5", {"x": a})
    expected = np.concatenate([arrays[0], arrays[2], arrays[1]], 1)
    folder = tmp_path / "parts ?1?"
    for srcs in (f"{folder}/*.h5", folder / "[a-c].h5", [f"{folder}/a.h5", f"{folder}/[bc].h5"]):
        h5concat(tmp_path / "all.h5", srcs, 1, virtual)
        assert np.array_equal(read(tmp_path / "all.h5"), expected)
    h5concat(tmp_path / "all.h5", [[f"{folder}/*.h5"]], (2, 1), virtual)
    assert np.array_equal(read(tmp_path / "all.h5"), expected)
    # a file, though it looks like a pattern
    h5concat(tmp_path / "one.h5", tmp_path / "parts [1]" / "a.h5", 1, virtual)
    assert np.array_equal(read(tmp_path / "one.h5"), arrays[0])
    with pytest.raises(FileNotFoundError, match=r"\*\.npy: no file matches this pattern$"):
        h5concat(tmp_path / "all.h5", f"{tmp_path}/*.npy", 1, virtual)


# -- what else is in the files ------------------------------------------------------------------------------


@BOTH
def test_groups_come_from_the_first_file_that_has_them(tmp_path, virtual):
    h5save(tmp_path / "0.h5", {"x": numbers((1, 2, 3)), "both": {"n": 0}})
    h5save(
        tmp_path / "1.h5",
        {"x": numbers((1, 2, 3)), "both": {"n": 1}, "late": {"deep": {"n": [1, 2]}}},
    )
    h5concat(tmp_path / "all.h5", [tmp_path / "0.h5", tmp_path / "1.h5"], 1, virtual)
    with h5py.File(tmp_path / "all.h5") as file:
        assert sorted(file) == ["both", "late", "x"]
        assert file["both/n"][()] == 0
        assert file["late/deep/n"][()].tolist() == [1, 2]


@BOTH
def test_attributes_come_from_the_first_file(tmp_path, virtual):
    paths = files(tmp_path, [numbers((1, 2, 3))] * 2)
    for i, path in enumerate(paths):
        with h5py.File(path, "r+") as file:
            file.attrs["source"] = f"station {i}"
            file["x"].attrs["unit"] = ["K", "hPa"][i]
    h5concat(tmp_path / "all.h5", paths, 1, virtual)
    with h5py.File(tmp_path / "all.h5") as file:
        assert dict(file.attrs) == {"source": "station 0"}
        assert dict(file["x"].attrs) == {"unit": "K", "axes": "TNF"}


@BOTH
def test_what_cannot_be_joined_is_copied_from_the_first_file(tmp_path, virtual):
    first = {"mean": [1.0, np.nan], "names": ["a", "b"], "lr": 0.1, "flag": True, "z": [1j]}
    paths = files(tmp_path, [numbers((1, 2, 3)), numbers((1, 4, 3))], **first)
    h5save(paths[1], {"x": numbers((1, 4, 3)), **first, "lr": 0.2})
    h5concat(tmp_path / "all.h5", paths, -2, virtual)
    with h5py.File(tmp_path / "all.h5") as file:
        assert file["mean"][()].tolist()[0] == 1
        assert file["names"].asstr()[()].tolist() == ["a", "b"]
        assert file["lr"][()] == 0.1
    h5concat(tmp_path / "some.h5", paths, -2, virtual, names=["x"])
    with h5py.File(tmp_path / "some.h5") as file:
        assert list(file) == ["x"]


NAMES = ["train/x", "train/mean", "50% off"]


@BOTH
def test_named_datasets_may_lie_in_groups(tmp_path, virtual):
    arrays = [numbers((2, n, 3), n) for n in (1, 4)]
    for i, a in enumerate(arrays):
        h5save(
            tmp_path / f"{i}.h5",
            {"train": {"x": a, "y": a, "mean": [1, 2]}, "50% off": a, "other": i},
        )
    h5concat(tmp_path / "all.h5", [tmp_path / "0.h5", tmp_path / "1.h5"], 1, virtual, names=NAMES)
    with h5py.File(tmp_path / "all.h5") as file:
        assert sorted(file) == ["50% off", "train"]
        assert list(file["train"]) == ["mean", "x"]
        assert file["train/mean"][()].tolist() == [1, 2]
    for name in ("train/x", "50% off"):
        assert np.array_equal(read(tmp_path / "all.h5", name), np.concatenate(arrays, 1))


# -- where the sources are ----------------------------------------------------------------------------------


def test_a_folder_can_be_moved(tmp_path, monkeypatch):
    (tmp_path / "one" / "parts 100%").mkdir(parents=True)
    arrays = [numbers((2, n, 3), n) for n in (1, 4)]
    paths = files(tmp_path / "one" / "parts 100%", arrays)
    monkeypatch.chdir(tmp_path / "one")
    h5concat("all.h5", [os.path.relpath(p) for p in paths], 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two").mkdir()
    shutil.move(tmp_path / "one", tmp_path / "two" / "moved")
    assert np.array_equal(read(tmp_path / "two" / "moved" / "all.h5"), np.concatenate(arrays, 1))
    os.unlink(tmp_path / "two" / "moved" / "parts 100%" / "x0.h5")
    with pytest.raises(H5DataError, match=r"1 of its .*missing: parts 100%/x0\.h5;"):
        h5mmap(tmp_path / "two" / "moved" / "all.h5", "x")


def test_sources_and_targets_through_links(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")  # from where "../x0.h5" is another file
    arrays = [numbers((2, n, 3), n) for n in (1, 4)]
    paths = files(tmp_path, arrays)
    h5concat(tmp_path / "link" / "all.h5", paths, 1)
    assert np.array_equal(read(tmp_path / "link" / "all.h5"), np.concatenate(arrays, 1))
    assert np.array_equal(read(tmp_path / "a" / "b" / "all.h5"), np.concatenate(arrays, 1))


def test_a_source_that_grows_afterwards_changes_nothing(tmp_path):
    paths = files(tmp_path, [numbers((2, 3, 4)), numbers((2, 3, 4), 100)])
    h5concat(tmp_path / "all.h5", paths, 1)
    before = read(tmp_path / "all.h5")
    grown = np.zeros((5, 6, 7), "f4")
    grown[:2, :3, :4] = numbers((2, 3, 4))
    h5save(paths[0], {"x": grown})
    assert np.array_equal(read(tmp_path / "all.h5"), before)


# -- errors -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@BOTH
def test_errors_leave_the_old_file_and_no_other(tmp_path, virtual):
    a = numbers((2, 3, 4))
    paths = files(tmp_path, [a, numbers((2, 3, 5)), numbers((2, 3))])
    h5save(tmp_path / "y.h5", {"x": a, "y": a})
    h5save(tmp_path / "text.h5", {"x": ["a"]})
    h5save(tmp_path / "all.h5", {"old": a})
    present = sorted(os.listdir(tmp_path))
    out = tmp_path / "all.h5"
    other = "or has another type or number of axes than in"
    cases = {
        f"{paths[1]}: dataset 'x' has shape (2, 3, 5), in the order TNF, in {paths[0]} it is "
        "(2, 3, 4), in the order TNF; they may differ only along -2; ": (paths[:2], -2),
        f"{paths[2]}: dataset 'x' has shape (2, 3), in the order None, in {paths[0]} it is "
        "(2, 3, 4)": ([paths[0], paths[2]], -2),
        f"{paths[0]}: dataset 'y' is missing there, {other} {tmp_path}/y.h5; ": (
            [paths[0], tmp_path / "y.h5"],
            -2,
        ),
        f"{paths[0]}: dataset 'y' is missing": ([tmp_path / "y.h5", paths[0]], -2),
        f"{tmp_path}/text.h5: dataset 'x' is missing there, {other} {paths[0]}; ": (
            [paths[0], tmp_path / "text.h5"],
            -2,
        ),
        f"{paths[0]}: no dataset in it has an axis 3 to join along; it holds x (datasets in groups "
        "are joined when "
        "named: names=['group/x'])": ([paths[0]], 3),
        f"{paths[0]}: dataset 'x': dims=(1, -2) name the same axis of 3; give two axes": (
            [[paths[0]]],
            (1, -2),
        ),
        f"{out}: dims must be an axis or a pair of axes, got 'N'": ([paths[0]], "N"),
        f"{out}: dims must be an axis or a pair of axes, got (0, 1, 2)": ([paths[0]], (0, 1, 2)),
        f"{out}: this file is among the sources; give the result another name": (
            [paths[0], out],
            0,
        ),
    }
    for message, (srcs, dims) in cases.items():
        assert error(out, srcs, dims, virtual).startswith(message)
        assert sorted(os.listdir(tmp_path)) == present
        assert np.array_equal(h5mmap(out, "old"), a)
    for srcs, dims in (([paths[0]], (0, 1)), ([], 0), ([["a"], []], (0, 1))):
        assert error(out, srcs, dims).startswith(f"{out}: srcs must be a list of files")
    assert "each of srcs must be the name of a file" in error(out, [[paths[0]]], 0)
    with pytest.raises(FileNotFoundError, match=r"gone.h5: there is no such file"):
        h5concat(out, [paths[0], tmp_path / "gone.h5"], 0, virtual)
    os.link(out, tmp_path / "same.h5")
    assert error(out, [tmp_path / "same.h5"], 0, virtual).endswith(
        "this file is among the sources; give the result another name"
    )


@BOTH
def test_orders_that_differ(tmp_path, virtual):
    a = numbers((2, 3, 4))
    h5save(tmp_path / "0.h5", {"x": a}, axes="TNF")
    h5save(tmp_path / "1.h5", {"x": a}, axes="FNT")
    message = error(tmp_path / "all.h5", [tmp_path / "0.h5", tmp_path / "1.h5"], 1, virtual)
    assert "in the order FNT" in message
    assert "h5save(axes=)" in message


@BOTH
def test_a_source_that_lacks_its_own_sources(tmp_path, virtual):
    paths = files(tmp_path, [numbers((2, 3, 4))] * 3)
    h5concat(tmp_path / "two.h5", paths[:2], 1)
    os.unlink(paths[0])
    assert "1 of its source files are missing: x0.h5" in error(
        tmp_path / "all.h5", [paths[2], tmp_path / "two.h5"], 1, virtual
    )


def test_killed_half_way_it_leaves_the_old_file(python, tmp_path):
    h5save(tmp_path / "all.h5", {"x": numbers((1, 1, 1))})
    paths = files(tmp_path, [numbers((2, 3, 4))] * 2)
    program = """if True:
        import os, sys
        from fluxutils_py.data.hdf5 import concat, h5concat
        concat.copy_into = lambda *args: os._exit(9)
        h5concat(sys.argv[1], sys.argv[2:], 1, virtual=False)
    """
    done = subprocess.run([python, "-c", program, tmp_path / "all.h5", *paths], timeout=300)
    assert done.returncode == 9
    assert read(tmp_path / "all.h5").shape == (1, 1, 1)


@pytest.mark.parametrize("source", [None, 3, ""], ids=repr)
def test_sources_that_are_no_files(tmp_path, source):
    for sources in (source, [source]):
        if sources is not None and sources != 3:
            with pytest.raises(H5DataError) as caught:
                h5concat(tmp_path / "all.h5", sources, 1)
            assert str(caught.value) == (
                f"{tmp_path}/all.h5: each of srcs must be the name of a file, got {source!r}"
            )
    with pytest.raises(H5DataError, match="dst must be the name of a file, got None"):
        h5concat(None, ["a.h5"], 1)
