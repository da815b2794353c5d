"""Views: matrices to scikit-learn, against the matrices that NumPy makes of the same arrays; and
what they read.
"""

import os
import pickle
import re
from functools import partial

import h5py
import joblib
import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.model_selection import KFold, TimeSeriesSplit, train_test_split
from sklearn.utils import _safe_indexing, check_array
from sklearn.utils.validation import _num_samples

from fluxutils_py import h5mmap, h5save, samples, timesteps
from fluxutils_py.data import LazyArray
from fluxutils_py.errors import DataError, ShapeError
from tests.versions import skip_before

F, N, T = 3, 5, 7
NATIVE = np.random.default_rng(0).normal(size=(F, N, T))


def matrix(make, x):
    """What a view is to look like, by NumPy alone."""
    x = np.asarray(x)
    order = (1, 0, 2) if make is samples else (2, 0, 1)
    return x.transpose(order).reshape(x.shape[order[0]], -1)


def double_and_mean(block):
    """A function that changes F: the mean over features, twice, and the first feature."""
    mean = block.mean(0, keepdims=True)
    return np.concatenate([mean, mean * 2, block[:1], block[1:2]]).astype("float32")


# -- where the array lies ---------------------------------------------------------------------------------


def tnf(x, path, mode="r+", offset=0, dtype=None):
    """A C-order (T, N, F) map of an (F, N, T) array, transposed to (F, N, T)."""
    a = np.ascontiguousarray(np.asarray(x).transpose(2, 1, 0))
    with open(path, "wb") as file:
        file.write(b"\7" * offset + a.tobytes())
    return np.memmap(path, a.dtype, mode, offset, a.shape).transpose(2, 1, 0)


def plain_map(x, path):
    tnf(np.asarray(x).T, path)
    return np.memmap(path, x.dtype, "r", shape=x.shape)


def sliced_map(x, path):
    """Every axis cut, one of them with a step and one backwards, of a map at an odd offset."""
    whole = np.zeros((F + 2, N * 2 + 1, T + 3))
    whole[1:-1, 1::2, 3:][:, :, ::-1] = x
    return tnf(whole, path, "r", offset=24)[1:-1, 1::2, 3:][:, :, ::-1]


def copy_on_write(x, path):
    """Changes that only this process has."""
    m = tnf(np.zeros_like(x), path, "c")
    m[:] = x
    return m


def in_h5(x, path, chunks=None):
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=np.asarray(x), chunks=chunks)
    return h5py.File(path, "r")["x"]


def mapped_h5(x, path):
    h5save(path, {"x": x})
    return h5mmap(path, "x")


def lazy_h5(x, path):
    with h5py.File(path, "w") as f:
        f.create_dataset(
            "x", data=np.asarray(x).transpose(2, 1, 0), chunks=(2, 2, 2), compression="gzip"
        )
    return h5mmap(path, "x", axes="TNF")


PLACES = {
    "memory": lambda x, path: x,
    "time-major memory": lambda x, path: np.ascontiguousarray(x.T).T,
    "np.memmap": plain_map,
    "transposed np.memmap": partial(tnf),
    "sliced np.memmap": sliced_map,
    "plain view of np.memmap": lambda x, path: sliced_map(x, path).view(np.ndarray),
    "mode c": copy_on_write,
    "h5mmap": mapped_h5,
    "sliced h5mmap": lambda x, path: mapped_h5(
        np.pad(x, ((1, 0), (2, 1), (0, 3)))[:, :, ::-1], path
    )[1:, 2:-1, :2:-1],
    "plain h5 view": lambda x, path: np.asarray(mapped_h5(x, path)),
    "lazy h5mmap": lazy_h5,
    "h5py": in_h5,
    "chunked h5py": partial(in_h5, chunks=(2, 2, 2)),
    "torch": lambda x, path: torch.tensor(x),
    "torch with gradients": lambda x, path: torch.tensor(x, requires_grad=True),
    "lists": lambda x, path: x.tolist(),
    "LazyArray": lambda x, path: LazyArray(x[::-1], functions=(np.flipud,)),
}
IN_A_FILE = [p for p in PLACES if "map" in p or "h5py" in p]
makes = pytest.mark.parametrize("make", [samples, timesteps], ids=lambda f: f.__name__)
places = pytest.mark.parametrize("place", PLACES)


@pytest.fixture
def view(make, place, tmp_path):
    return make(PLACES[place](NATIVE, os.fspath(tmp_path / "data.h5")))


ROWS = [
    slice(None),
    slice(1, 4),
    slice(-3, None),
    slice(0, None, 2),
    slice(3, 3),
    ...,
    np.array([1, 2, 3]),
    [0, 2, 4],
    [-2, -1],
    [],
    np.array([], dtype=float),
    np.array([1, 4], dtype=np.uint8),
    "mask",
]
MIXED = [slice(None, None, -1), slice(4, 0, -2), [4, 0, 3], [1, 1, 1], [3, 4, 0]]


def key_of(key, n):
    return np.arange(n) % 3 != 1 if isinstance(key, str) else key


@places
@makes
@pytest.mark.parametrize("forms", ["key", "(key, ...)", "(key, :)", "take"])
def test_rows_are_those_of_the_matrix(view, make, forms):
    wanted = matrix(make, NATIVE)
    for key in ROWS + (MIXED if make is samples else []):
        k = key_of(key, len(wanted))
        if forms == "take":
            if isinstance(k, slice) or k is ... or isinstance(key, str):
                continue
            found = view.take(k, axis=0)
        else:
            found = view[
                {
                    "key": k,
                    "(key, ...)": (k, ...) if k is not ... else k,
                    "(key, :)": (k, slice(None)),
                }[forms]
            ]
        if isinstance(k, np.ndarray | list) and not len(k):
            k = []
        assert type(found) is type(view)
        assert found.shape == wanted[k].shape
        assert len(found) == len(wanted[k])
        assert found.dtype == wanted.dtype
        assert np.array_equal(np.asarray(found), wanted[k]), key


@places
@makes
def test_single_rows_and_columns_are_read(view, make):
    wanted = matrix(make, NATIVE)
    for key in [0, -1, np.int64(2), (1, ...), (2, 3), (..., 2), (slice(None), -1), (slice(1, 3), [2, 0]), (0, [1, 2]),
                (slice(None), slice(2, 9, 3)), ([1, 3], 4), (slice(1, 3), np.arange(wanted.shape[1]) % 2 == 0),
                (..., 1, 2), (1, ..., 2), (slice(None), ..., [0, 1])]:  # fmt: skip
        found = view[key]
        assert isinstance(found, np.ndarray | np.floating)
        assert np.array_equal(found, wanted[key]), key
    assert np.array_equal(np.stack(list(view)), wanted)
    assert np.array_equal(view.take([2, 0], axis=1), wanted[:, [2, 0]])


@places
@makes
def test_parts_of_parts_and_their_native_arrays(view, make):
    wanted = matrix(make, NATIVE)
    a, b = [4, 1, 2, 3] if make is samples else [1, 2, 3, 4], [0, 2, 3]
    part = view[a][b]
    assert np.array_equal(part, wanted[a][b])
    axis = 1 if make is samples else 2
    native = np.take(NATIVE, np.asarray(a)[b], axis)
    assert part.native.shape == native.shape
    assert np.array_equal(part.native, native)
    assert np.array_equal(part[1:][::-1][::-1] if make is samples else part[1:], wanted[a][b][1:])
    assert view[2:].n_features == F


@places
@makes
def test_functions_are_applied_to_what_is_read(view, make):
    """To the transformed whole, as NumPy makes it, although it is applied to blocks; F changes from
    3 to 4.
    """
    mapped = view[1:5].map(double_and_mean).map(np.negative)
    part = NATIVE[:, 1:5] if make is samples else NATIVE[:, :, 1:5]
    wanted = matrix(make, -double_and_mean(part))
    assert mapped.n_features == 4
    assert mapped.shape == wanted.shape
    assert mapped.dtype == np.float32
    assert np.array_equal(mapped, wanted)
    assert np.array_equal(mapped[[0, 2]], wanted[[0, 2]])
    assert np.array_equal(mapped[1], wanted[1])
    assert np.array_equal(mapped[:, -1], wanted[:, -1])
    assert mapped.native.shape == (4, *part.shape[1:])
    assert np.array_equal(mapped.native[1:3, 0], -double_and_mean(part)[1:3, 0])


@places
@makes
def test_a_pickled_view_is_the_same(view, make, place):
    wanted = matrix(make, NATIVE)
    for v, w in ((view, wanted), (view[1:4], wanted[1:4]), (view[[0, 2, 3]], wanted[[0, 2, 3]])):
        again = pickle.loads(pickle.dumps(v))
        assert type(again) is type(v)
        assert again.shape == v.shape
        assert np.array_equal(again, w)
    mapped = pickle.loads(pickle.dumps(view.map(double_and_mean)))
    assert np.array_equal(mapped, view.map(double_and_mean))


@makes
@pytest.mark.parametrize("place", IN_A_FILE)
def test_data_in_a_file_are_pickled_as_its_name(make, place, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 30, 40))
    path = os.fspath(tmp_path / "data")
    if "sliced" in place or "view" in place:
        whole = tnf(x, path)[:, 1:, ::-1] if "np" in place else mapped_h5(x, path)[:, 1:, ::-1]
        view = make(whole.view(np.ndarray) if "view" in place else whole)
    else:
        view = make(PLACES[place](x, path))
    assert view.nbytes > 8000
    assert len(pickle.dumps(view[2:7])) < 700


@makes
def test_a_sent_context_is_kept(make):
    v = pickle.loads(pickle.dumps(timesteps(NATIVE, context=2)[3:]))
    assert v.context == v.map(np.negative).context == 2
    assert v.with_context(slice(0, 1))[1] == 2


@pytest.mark.few
@makes
@pytest.mark.parametrize("place", ["transposed np.memmap", "sliced np.memmap", "plain view of np.memmap", "mode c",
                                   "h5mmap", "plain h5 view", "h5py", "memory", "time-major memory"])  # fmt: skip
@pytest.mark.usefixtures("forked_workers")
def test_workers_of_joblib_see_the_right_values(make, place, tmp_path):
    """It ships a memory map that is transposed with permuted values; and what is larger than
    max_nbytes as a map.
    """
    view = make(PLACES[place](NATIVE, os.fspath(tmp_path / "data.h5")))
    with joblib.parallel_config("loky", n_jobs=2, max_nbytes=100):
        whole, part = joblib.Parallel()(joblib.delayed(np.asarray)(v) for v in (view, view[[0, 2]]))
    assert np.array_equal(whole, matrix(make, NATIVE))
    assert np.array_equal(part, matrix(make, NATIVE)[[0, 2]])


# -- NumPy and scikit-learn -------------------------------------------------------------------------------


@makes
def test_numpy_reads_all_of_it(make):
    v, wanted = make(NATIVE), matrix(make, NATIVE)
    assert np.array_equal(np.array(v), wanted)
    assert np.asarray(v, dtype="float32").dtype == np.float32
    found = np.asarray(v)
    found[:] = 0  # a fresh array: the data stay
    assert NATIVE.all()
    with pytest.raises(ValueError, match=r"view .*matrix .*copying"):
        np.array(v, copy=False)
    with pytest.raises(ValueError, match=r"lazily read array .*copying"):
        np.array(LazyArray(NATIVE), copy=False)
    assert np.array_equal(v.copy(), wanted)
    assert np.array_equal(check_array(v), wanted)
    assert (v.ndim, v.size, v.nbytes, len(v)) == (2, wanted.size, wanted.nbytes, len(wanted))
    assert type(v.shape[0]) is int


@makes
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float16", ">f8"])
def test_the_dtype_stays(make, dtype):
    x = (NATIVE > 0).astype(dtype)
    assert make(x).dtype == make(x)[1:].dtype == np.asarray(make(x)).dtype == np.dtype(dtype)
    assert np.array_equal(make(x), matrix(make, x))


@makes
@pytest.mark.parametrize("dispatch", [False, True])
def test_tools_of_scikit_learn_take_rows_of_it(make, dispatch):
    if dispatch:
        skip_before("scikit-learn", "1.9", "array-API dispatch on views")
    v, wanted = make(NATIVE), matrix(make, NATIVE)
    with config_context(array_api_dispatch=dispatch):
        assert _num_samples(v) == len(wanted)
        for a, b in (KFold(3) if make is samples else TimeSeriesSplit(2)).split(v):
            for k in (a, b):
                found = _safe_indexing(v, k)
                assert type(found) is type(v)
                assert np.array_equal(found, wanted[k])
        first, last = train_test_split(v, test_size=2, shuffle=make is samples, random_state=0)
    assert type(first) is type(last) is type(v)
    assert sorted(map(tuple, np.vstack([first, last]).tolist())) == sorted(
        map(tuple, wanted.tolist())
    )


@makes
def test_folds_of_neighbours_are_numpy_views(make):
    part = make(NATIVE)[np.array([1, 2, 3])].native
    assert isinstance(part, np.ndarray)
    assert np.shares_memory(part, NATIVE)


def test_a_matrix_becomes_an_array_again():
    for make in (samples, timesteps):
        v = make(NATIVE)
        assert np.array_equal(v.from_rows(np.asarray(v), F), NATIVE)


def test_how_a_view_prints():
    assert (
        repr(samples(NATIVE)[:2])
        == "SamplesView(shape=(2, 21), dtype=float64, of (F, N, T)=(3, 5, 7))"
    )
    assert (
        repr(timesteps(NATIVE))
        == "TimestepsView(shape=(7, 15), dtype=float64, of (F, N, T)=(3, 5, 7))"
    )


# -- what is read ------------------------------------------------------------------------------------------


class Recording:
    """An array that remembers what was asked of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim, self.values = (
            array,
            array.shape,
            array.dtype,
            3,
            0,
        )

    def __getitem__(self, key):
        found = self.array[key]
        self.values += found.size
        return found


@makes
def test_only_what_is_looked_at_is_read(make):
    x = Recording(NATIVE)
    v = make(x)
    rows = v[1:][[0, 2, 3]].map(np.negative)
    (
        rows.native,
        rows.shape,
        rows.dtype,
        len(rows),
        rows.nbytes,
        repr(rows),
        rows.n_features,
        rows.take([0], axis=0),
    )
    make(x).map(double_and_mean)[0:2]
    if make is timesteps:
        rows.with_context(rows.contiguous_runs()[0])
    assert x.values == 0
    rows[1]
    assert x.values == rows.shape[1]
    x.values = 0
    np.asarray(rows)
    assert x.values == rows.size  # two runs of neighbours, nothing between them
    x.values = 0
    rows.native[:, 1:2, 1:2]
    assert x.values == F
    x.values = 0
    np.asarray(v[[]]), np.asarray(v[0:0])
    assert x.values == 0


# -- time --------------------------------------------------------------------------------------------------


X = np.arange(2 * 3 * 20.0).reshape(2, 3, 20)


def test_gaps_are_found():
    v = timesteps(X)
    assert v.contiguous_runs() == [slice(0, 20)]
    assert v[3:9].contiguous_runs() == [slice(0, 6)]
    assert v[[0, 1, 5, 6, 7, 19]].contiguous_runs() == [slice(0, 2), slice(2, 5), slice(5, 6)]
    assert v[::3].contiguous_runs() == [slice(i, i + 1) for i in range(7)]
    assert v[2:10][[0, 1, 4, 5]].contiguous_runs() == [slice(0, 2), slice(2, 4)]
    assert v[[]].contiguous_runs() == []


@pytest.mark.parametrize("context", [0, 1, 4, 100])
def test_runs_begin_with_the_steps_before_them(context):
    index = np.array([2, 3, 4, 9, 10, 19])
    v = timesteps(X, context)[index]
    for run in v.contiguous_runs():
        steps = index[run]
        array, n_context = v.with_context(run)
        assert n_context == min(context, steps[0])
        assert np.array_equal(array, X[:, :, steps[0] - n_context : steps[-1] + 1])


def test_runs_of_transformed_steps():
    array, n_context = timesteps(X, 3)[5:7].map(np.negative).with_context(slice(0, 2))
    assert n_context == 3
    assert np.array_equal(array, -X[:, :, 2:7])


def test_series_are_walked_through_in_one_go():
    v = samples(X)[[2, 0]]
    assert v.contiguous_runs() == [slice(0, 20)]
    array, n_context = v.with_context(slice(0, 20))
    assert n_context == 0
    assert np.array_equal(array, X[:, [2, 0]])


# -- errors ------------------------------------------------------------------------------------------------

DISORDER = (
    "time steps must stay in their order: a state that runs forward cannot be carried through "
    "steps that are shuffled, reversed or repeated; split with TimeSeriesSplit or "
    "KFold(shuffle=False), or use samples(x) to split between series"
)


@pytest.mark.parametrize(
    "key", [slice(None, None, -1), [1, 0], [3, 3], [0, 1, 1], [5, 6, 4]], ids=repr
)
def test_time_in_disorder_is_an_error(key):
    with pytest.raises(ValueError, match=f"^{re.escape(DISORDER)}$"):
        timesteps(X)[key]


def test_a_shuffled_splitter_of_time_is_an_error():
    v = timesteps(X)
    with pytest.raises(ValueError, match=r"^time steps must stay in their order"):
        train_test_split(v, random_state=0)
    a, b = next(KFold(3, shuffle=True, random_state=0).split(v))
    # sorted, with gaps: the state is forgotten there
    assert _safe_indexing(v, a).contiguous_runs() != []
    assert len(_safe_indexing(v, b)) == 7


@makes
@pytest.mark.parametrize(("x", "error", "message"), [
    (NATIVE[0], ShapeError, "x must have three axes (F, N, T) = (features, series, time steps), got shape (5, 7)"),
    (NATIVE[:, :0], ShapeError, "x has no series: shape (3, 0, 7)"),
    (NATIVE + 1j, DataError, "x must hold real numbers, or labels, got dtype complex128; convert it, as with astype"),
    (3, ShapeError, "x must have three axes (F, N, T) = (features, series, time steps), got shape ()"),
    (None, ShapeError, "x must have three axes (F, N, T) = (features, series, time steps), got shape ()"),
])  # fmt: skip
def test_what_is_no_array_of_three_axes(make, x, error, message):
    with pytest.raises(error) as info:
        make(x)
    assert info.type is error
    assert str(info.value).startswith(message)


@makes
def test_a_view_of_a_view_or_tuple(make):
    name = make.__name__
    with pytest.raises(DataError) as info:
        make(samples(NATIVE))
    assert (
        str(info.value)
        == f"{name} takes an array of shape (F, N, T), got a view of one; its array is x.native"
    )
    with pytest.raises(ShapeError) as info:
        make((NATIVE, NATIVE))
    assert str(info.value).startswith(
        f"{name} takes one array of shape (F, N, T), got a tuple of 2 series or arrays; stack"
    )


@pytest.mark.parametrize("context", [-1, 1.0, True, None, "3"])
def test_a_context_that_is_no_number_of_steps(context):
    with pytest.raises(ValueError, match=f"^context .*integer .* 0, got {context!r}$"):
        timesteps(NATIVE, context)


@makes
@pytest.mark.parametrize(("key", "message"), [
    ((0, 1, 2), "too many indices: the array has 2 axes, got 3 indices"),
    ((..., 0, ...), "an index can have only one '...'"),
    (99, "index 99 is out of bounds for axis 0 with size {n}"),
    ([0, -99], "index -99 is out of bounds for axis 0 with size {n}"),
    (None, "an index must be an integer, a slice, '...', or one list of integers or booleans, got None"),
    ("a", "an index must be an integer, a slice, '...', or one list of integers or booleans, got 'a'"),
    ([True, False], "a mask along axis 0 must have {n} values, got shape (2,)"),
    ((0, 99), "index 99 is out of bounds for axis 1 with size {columns}"),
    ((slice(2), "a"), "an index must be an integer, a slice, '...', or one list of integers or booleans, got 'a'"),
    (([0, 1], [0, 1]), "arrays of indices are taken along one axis only; use slices along the others"),
    (([True] * 5, [0, 1]), "arrays of indices are taken along one axis only; use slices along the others"),
])  # fmt: skip
def test_a_bad_index_says_why(make, key, message):
    v = make(np.zeros((2, 5, 5)))
    with pytest.raises(IndexError) as info:
        v[key]
    assert str(info.value) == message.format(n=len(v), columns=v.shape[1])


def test_rows_do_not_turn_into_a_frame_for_scikit_learn():
    assert not hasattr(samples(X), "iloc")
    assert not hasattr(samples(X), "columns")


@pytest.mark.parametrize("view", [samples, timesteps])
@pytest.mark.parametrize("lengths", [(4, 7, 5), (4, 4, 4)])
def test_a_list_of_series_is_refused_with_the_way_to_a_search(view, lengths):
    series = [np.zeros((2, t)) for t in lengths]
    with pytest.raises(ShapeError, match=r"list of 3 series.*NaN.*lengths="):
        view(series)
