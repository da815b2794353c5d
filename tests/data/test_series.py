"""Reading windows from arrays of any kind, against plain slicing of the same numbers."""

import copy
import itertools
import re

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py.data import SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.series import find_bounds
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.inputs import as_series
from fluxutils_py.inputs.inputs import check_aligned

N_FEATURES, N_SERIES, N_STEPS = 3, 7, 11
ORDERS = list(itertools.permutations(range(3)))
DTYPES = ["f2", "f4", "f8", ">f4", "i1", "u2", "i8", "?"]


def values(dtype="f8", shape=(N_FEATURES, N_SERIES, N_STEPS)):
    """No number twice, as far as the type allows."""
    x = np.arange(np.prod(shape)).reshape(shape)
    return (x % 7 < 3 if dtype == "?" else x % 120).astype(dtype)


def in_order(x, order):
    """The same array in another memory order."""
    back = np.argsort(order)
    y = np.ascontiguousarray(x.transpose(order)).transpose(back)
    assert np.array_equal(x, y)
    return y


class Recording:
    """Something that takes three slices, as h5py datasets do, and writes down which."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __getitem__(self, key):
        assert len(key) == 3
        assert all(isinstance(k, slice) and k.step is None for k in key)
        self.reads.append([range(*k.indices(n)) for k, n in zip(key, self.shape, strict=True)])
        found = self.array[key].copy()
        found.flags.writeable = False
        return found


class WithoutType(Recording):
    def __init__(self, array):
        super().__init__(array)
        del self.dtype


def on_disk(x, folder):
    m = np.memmap(folder / "x.bin", x.dtype, "w+", shape=x.shape[::-1])
    m[:] = x.transpose(2, 1, 0)
    m.flush()
    return np.memmap(folder / "x.bin", x.dtype, "r", shape=x.shape[::-1]).transpose(2, 1, 0)


def in_hdf5(x, folder, **kwargs):
    with h5py.File(folder / "x.h5", "w") as f:
        f.create_dataset("x", data=x, **kwargs)
    return h5py.File(folder / "x.h5", "r")["x"]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


FORMS = {
    **{
        f"memory order {''.join('FNT'[i] for i in o)}": (lambda x, _, o=o: in_order(x, o))
        for o in ORDERS
    },
    "features reversed": lambda x, _: x[::-1].copy()[::-1],
    "series reversed": lambda x, _: x[:, ::-1].copy()[:, ::-1],
    "time reversed": lambda x, _: x[:, :, ::-1].copy()[:, :, ::-1],
    "every second of more": lambda x, _: np.repeat(np.repeat(x, 2, 1), 2, 2)[:, ::2, ::2],
    "every second of time-major memory": lambda x, _: in_order(np.repeat(x, 2, 1), (2, 1, 0))[
        :, ::2
    ],
    "read-only": lambda x, _: read_only(x),
    "memory map": on_disk,
    "HDF5": in_hdf5,
    "HDF5 in chunks": lambda x, folder: in_hdf5(x, folder, chunks=True, compression="gzip"),
    "torch": lambda x, _: torch.from_numpy(x.astype(x.dtype.newbyteorder("="))).requires_grad_(
        x.dtype.kind == "f"
    ),
    "lists": lambda x, _: x.tolist(),
    "something that takes slices": lambda x, _: Recording(x),
    "something without a dtype": lambda x, _: WithoutType(x),
}
ROWS = {
    "whole": Segments.from_lengths(N_SERIES, N_STEPS),
    "some": Segments.from_lengths(N_SERIES, N_STEPS)[2:5],
    "one": Segments.from_lengths(N_SERIES, N_STEPS)[6:],
    "permuted": Segments.from_lengths(N_SERIES, N_STEPS)[np.array([4, 6, 0, 5, 1, 3, 2])],
    "with gaps": Segments.from_lengths(N_SERIES, N_STEPS)[np.array([0, 1, 3, 6])],
    "downwards": Segments.from_lengths(N_SERIES, N_STEPS)[::-1],
    "of other lengths": Segments.from_lengths(N_SERIES, N_STEPS, np.array([11, 1, 5, 11, 3, 2, 7])),
    "from the middle": Segments(np.array([1, 2, 5]), np.array([4, 4, 4]), np.array([7, 3, 6])),
    "folded": Segments.from_lengths(N_SERIES, N_STEPS).fold(30),
    "folded and permuted": Segments.from_lengths(N_SERIES, N_STEPS).fold(30)[
        np.random.default_rng(1).permutation(28)
    ],
    "folded with lengths": Segments.from_lengths(
        N_SERIES, N_STEPS, np.array([11, 1, 5, 11, 3, 2, 7])
    ).fold(21),
    "far apart": Segments(np.array([2, 2, 0]), np.array([0, 9, 10]), np.array([11, 2, 1])),
    "far apart with gaps": Segments(
        np.array([6, 0, 4, 2]), np.array([0, 9, 9, 9]), np.array([11, 2, 1, 2])
    ),
}


def check_reading(series, x, rows, size):
    """Compare each window of ``size`` steps with the plain array, at the steps that there are."""
    for start in range(0, rows.max_length, size):
        stop = min(start + size, rows.max_length)
        got = series.read(rows, start, stop)
        assert got.shape == (stop - start, len(rows), x.shape[0])
        assert got.dtype.newbyteorder("=") == x.dtype.newbyteorder("=")
        for i, (s, begin, length) in enumerate(
            zip(rows.series, rows.start, rows.length, strict=True)
        ):
            for t in range(start, min(stop, length)):
                assert got[t - start, i].tolist() == x[:, s, begin + t].tolist()


@pytest.mark.few
@pytest.mark.parametrize("seed", range(150))
def test_a_window_holds_what_plain_slicing_gives(seed, tmp_path):
    """Any form, memory order, type, shape and rows, at random."""
    rng = np.random.default_rng(seed)
    form, which = (list(table)[rng.integers(len(table))] for table in (FORMS, ROWS))
    is_typed = form not in ("lists", "something without a dtype")
    x = values(DTYPES[rng.integers(len(DTYPES))] if is_typed else "f8")
    rows = ROWS[which]
    if rng.random() < 0.2:  # single features, series and steps
        x = x[: rng.integers(1, 3), : rng.integers(1, 3), : rng.integers(1, 3)]
        rows = Segments.from_lengths(*x.shape[1:])[:: 1 - 2 * int(rng.integers(2))]
    source = FORMS[form](x, tmp_path)
    kept = copy.deepcopy(source) if is_typed and "HDF5" not in form else None
    series = SeriesArray(source, "x")
    assert series.shape == x.shape
    assert series.kind == ("int" if x.dtype.kind in "iu" else "float")
    check_reading(series, x, rows, int(rng.integers(1, 12)))
    beyond = series.read(rows, 9, 14)  # has its shape, though no row goes so far
    assert beyond.shape == (5, len(rows), x.shape[0])
    if isinstance(kept, np.ndarray):
        assert np.array_equal(source, kept)


@pytest.mark.parametrize("which", ROWS)
def test_nothing_but_the_asked_rectangle_is_read(which):
    rows = ROWS[which]
    source = Recording(values())
    series = SeriesArray(source, "x")
    assert source.reads == []  # nothing on construction
    for start in range(0, rows.max_length, 4):
        stop = min(start + 4, rows.max_length)
        source.reads.clear()
        series.read(rows, start, stop)
        cells = [
            (s, t)
            for s, begin in zip(rows.series.tolist(), rows.start.tolist(), strict=True)
            for t in range(begin + start, min(begin + stop, N_STEPS))
        ]
        read = [(s, t) for _, ns, ts in source.reads for s in ns for t in ts]
        assert sorted(read) == sorted(cells)


def test_reading_neighbours_costs_one_read_whatever_their_order():
    source = Recording(values())
    series = SeriesArray(source, "x")
    for which, n in (
        ("whole", 1),
        ("permuted", 1),
        ("downwards", 1),
        ("with gaps", 3),
        ("from the middle", 2),
    ):
        source.reads.clear()
        series.read(ROWS[which], 0, 4)
        assert len(source.reads) == n, which


def test_blocks_in_time_major_memory_are_views():
    x = in_order(values(), (2, 1, 0))
    block = SeriesArray(x, "x").read(ROWS["some"], 2, 6)
    assert np.shares_memory(block, x)


def test_in_memory_means_a_numpy_array_that_maps_no_file(tmp_path):
    x = values()
    m = on_disk(x, tmp_path)
    for source, expected in [
        (x, True),
        (in_order(x, (2, 0, 1))[:, 1:], True),
        (x.tolist(), True),
        (m, False),
        (m[1:], False),
        (np.asarray(m), False),
        (np.asarray(m)[:, ::2], False),
        (in_hdf5(x, tmp_path), False),
        (Recording(x), False),
    ]:
        assert SeriesArray(source, "x").in_memory == expected, type(source)


@pytest.mark.parametrize("shape", [(), (7,), (7, 11), (2, 3, 7, 11)])
def test_arrays_of_other_than_three_axes_are_refused_with_the_remedy(shape):
    with pytest.raises(ShapeError) as caught:
        SeriesArray(np.zeros(shape), "sample x")
    assert "sample x must have three axes (F, N, T)" in str(caught.value)
    assert f"got shape {shape}; x[None] " in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 2, 3), "features"), ((2, 0, 3), "series"), ((2, 3, 0), "time steps")]
)
def test_empty_arrays_are_refused(shape, axis):
    with pytest.raises(ShapeError, match=rf"x has no {axis}: shape "):
        SeriesArray(np.zeros(shape), "x")


@pytest.mark.parametrize("dtype", ["c16", "O", "U3", "M8[s]"])
def test_what_is_no_real_number_is_refused(dtype):
    with pytest.raises(DataError, match="x must hold real numbers, got dtype"):
        SeriesArray(np.zeros((2, 3, 4), dtype), "x")


def test_ragged_lists_are_refused():
    with pytest.raises(
        ShapeError,
        match=r"x .*\(F, N, T\).*F, T_i.*inhomogeneous",
    ):
        SeriesArray([[[1, 2], [3]]], "x")


def test_a_tuple_is_several_arrays_named_by_their_place():
    a, b = values(), values(shape=(1, N_SERIES, N_STEPS))
    found = as_series((a, b), "x")
    assert [s.name for s in found] == ["x[0]", "x[1]"]
    assert [s.F for s in found] == [3, 1]
    (alone,) = as_series(a, "y")
    assert alone.name == "y"
    with pytest.raises(ShapeError, match=r"y is an empty tuple.* one array"):
        as_series((), "y")
    with pytest.raises(ShapeError, match=r"x\[1\] must have three axes"):
        as_series((a, b[0]), "x")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (1, 6, 11),
            r"x\[0\] .*7 series.*x\[1\] .*6 .*axis 1 ",
        ),
        (
            (1, 7, 10),
            r"x\[0\] .*11 time .*x\[1\] .*10 .*axis 2 ",
        ),
    ],
)
def test_arrays_of_other_series_or_steps_are_refused(shape, message):
    with pytest.raises(ShapeError, match=message):
        as_series((values(), values(shape=shape)), "x")
    with pytest.raises(ShapeError, match="both must be"):
        check_aligned(SeriesArray(values(), "x"), SeriesArray(values(shape=shape), "y"))


F_NT = 4, 7, 11  # F, N, T


@pytest.mark.parametrize("order_x", ["FNT", "NFT", "NTF", "TNF"])
@pytest.mark.parametrize("order_y", ["FNT", "NFT", "NTF", "TNF"])
def test_shapes_that_match_in_other_layouts_are_named_with_transposes_that_run(order_x, order_y):
    x, y = np.zeros(F_NT), np.ones((1, *F_NT[1:]))
    given = {}
    for name, a, order in (("x", x, order_x), ("y", y, order_y)):
        given[name] = a.transpose(["FNT".index(axis) for axis in order])
    pair = [SeriesArray(a, name) for name, a in given.items()]
    if order_x == order_y == "FNT":
        check_aligned(*pair)
        return
    with pytest.raises(ShapeError) as error:
        check_aligned(*pair)
    layouts = [f"({', '.join(order)})" for order in (order_x, order_y)]
    (remedy,) = re.findall(
        rf"if x is {re.escape(layouts[0])} and y {re.escape(layouts[1])}: ([^;]*?)(?:, or if|;|$)",
        str(error.value),
    )
    become = dict(given)
    for call in remedy.split(" and "):
        become[call[0]] = eval(call, given)
    assert become["x"].shape == x.shape
    assert become["y"].shape == y.shape


def test_shapes_that_match_in_no_layout_are_given_no_transposes():
    with pytest.raises(ShapeError, match=r"with equal N and T$"):
        check_aligned(SeriesArray(np.zeros(F_NT), "x"), SeriesArray(np.zeros((1, 6, 11)), "y"))


def test_integers_that_int64_does_not_reach(tmp_path):
    large = values("u8")
    large[1, 2, 3] = 2**63
    message = (
        "codes holds 9223372036854775808, of type uint64, which int64 does not reach, and integers "
        "go to the model as int64; convert it to float if these are quantities, number the values "
        "anew if they are categories"
    )
    with pytest.raises(DataError) as caught:
        SeriesArray(large, "codes")
    assert str(caught.value) == message
    large.tofile(tmp_path / "x.bin")
    for lazy in (np.memmap(tmp_path / "x.bin", "u8", "r", 0, large.shape), Recording(large)):
        series, rows = SeriesArray(lazy, "codes"), Segments.from_lengths(N_SERIES, N_STEPS)
        assert np.array_equal(series.read(rows, 4, 9), large[:, :, 4:9].transpose(2, 1, 0))
        with pytest.raises(DataError) as caught:
            series.read(rows, 2, 5)
        assert str(caught.value) == message
    large[1, 2, 3] = 2**63 - 1
    assert SeriesArray(large, "codes").kind == "int"


def test_a_dataset_whose_file_was_closed(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        closed = file.create_dataset("x", data=values())
    with pytest.raises(DataError) as caught:
        SeriesArray(closed, "x")
    assert str(caught.value).startswith("x is in an HDF5 file that was closed")
    assert "h5mmap(path, name)" in str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_series_begin_and_end_where_a_loop_finds_input_whatever_lies_beyond(seed):
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((2, N_SERIES, N_STEPS)) < 0.8, np.nan, 1.0)
    start = rng.integers(0, 3, N_SERIES)
    length = rng.integers(0, N_STEPS - start + 1)
    found = find_bounds((SeriesArray(x, "x"),), Segments(np.arange(N_SERIES), start, length))
    for n in range(N_SERIES):
        steps = range(start[n], start[n] + length[n])
        known = [t for t in steps if not np.isnan(x[:, n, t]).all()]
        assert found.length[n] == (known[-1] - known[0] + 1 if known else 0)
        assert not known or found.start[n] == known[0]
