"""The array protocol of the package, and conversions to it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.indexing import Index, as_key, parse_index, read_slices
from fluxutils_py.errors import DataError, ShapeError

Names = tuple[str, ...]  # of features


class DuckArray:
    """An array whose values are read, or computed, when it is indexed.

    A subclass sets ``shape`` and ``dtype`` and defines :meth:`read`. The array takes indices as
    NumPy does, one array of indices at most, and returns NumPy arrays;
    ``np.asarray`` reads it all.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    nonblocking : bool
        Whether reading never waits for a disk.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nonblocking: bool = False

    def read(self, *index: Index) -> np.ndarray:
        """Return the block where the given places of every axis meet (``oindex`` of zarr)."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, key: Any) -> Any:
        index = parse_index(key, self.shape)
        block = self.read(*(range(i, i + 1) if isinstance(i, int) else i for i in index))
        # NumPy may move the axis of an array of indices that stands with a single index: indexing
        # the block by such a pair again moves it likewise
        has_single = any(isinstance(i, int) for i in index)
        return block[tuple(_key_of_block(i, has_single) for i in index)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("cannot return a lazily read array without copying it")
        return np.array(self.read(*map(range, self.shape)), dtype)


def _key_of_block(places: int | Index, has_single: bool) -> Any:
    if isinstance(places, int):
        return 0
    if has_single and isinstance(places, np.ndarray):
        return np.arange(len(places))
    return slice(None)


def read_block(source: Any, *index: Index) -> np.ndarray:
    """Return the block where the given places of every axis meet, of any array that takes slices;
    it may be a view.
    """
    if isinstance(source, DuckArray):
        return source.read(*index)
    if not isinstance(source, np.ndarray):
        return read_slices(lambda key: plain_block(source[key]), index)
    if sum(isinstance(i, np.ndarray) for i in index) > 1:
        return np.asarray(source[np.ix_(*index)])
    return np.asarray(source[tuple(map(as_key, index))])


class BlockError(DataError):
    """The values that were read from an array cannot be used.

    Whoever knows the name of the array puts it in front of the message.
    """


def plain_block(values: Any, name: str = "") -> np.ndarray:
    """Return values read from a source as a plain array, with NaN where they are masked.

    Raises
    ------
    BlockError
        If integers are masked, which have no NaN.
    """
    if isinstance(values, DuckArray):
        return values.read(*map(range, values.shape))
    if hasattr(values, "compute"):  # of dask, whose conversion drops the mask
        values = values.compute()
    if hasattr(values, "dims"):  # of xarray
        values = values.data
    if not isinstance(values, np.ma.MaskedArray):
        return np.asarray(values)
    if values.dtype.kind == "f":
        return values.filled(np.nan)
    if np.ma.is_masked(values):
        prefix = f"{name}: " if name else ""
        n_masked = np.ma.count_masked(values)
        raise BlockError(
            f"{prefix}{n_masked} of the values read have a mask and the dtype {values.dtype}, "
            "which has no NaN for missing values: convert the source to float, or fill the gaps"
        )
    return values.data


def check_read_dtype(array: Any, name: str) -> None:
    """Raise DataError if a first value shows that an array is of floats where it says integers.

    Nothing is read of other sources: floats of another size are cast without loss of meaning.
    """
    if isinstance(array, np.ndarray | DuckArray | h5py.Dataset) or not hasattr(array, "dtype"):
        return
    try:
        declared = np.dtype(array.dtype)
    except TypeError:  # of another library
        return
    if declared.kind not in "iub":
        return
    # the values of packed variables of NetCDF are floats, though their dtype says integers
    dtype = plain_block(array[(slice(0, 1),) * len(array.shape)], name).dtype
    if dtype != declared:
        raise DataError(
            f"{name} says dtype {declared}, but gives values of {dtype}, as packed variables of "
            "netCDF4 do; use xarray.open_dataset, or convert it"
        )


# -- what users give -----------------------------------------------------------------------------

TIME_FIRST = ": arrays (T_i, F) become so by a.T"


def is_list_of_series(value: object) -> bool:
    """Whether a value is a list of arrays, one per series; nested lists are one array."""
    if not isinstance(value, list) or not value:
        return False
    shapes = [tuple(getattr(a, "shape", ())) for a in value]
    if not all(shapes):  # a number, or a nested list
        return False
    return any(len(shape) > 1 for shape in shapes) or len(set(shapes)) > 1


def require_list_of_series(value: Any, name: str) -> None:
    """Raise ShapeError if series (F, T_i) are in a tuple, which means several inputs, or in an
    array of objects, and not in a list.
    """
    shape = getattr(value, "shape", ())
    is_of_objects = len(shape) == 1 and getattr(value, "dtype", None) == np.dtype(object)
    if not (is_of_objects or isinstance(value, tuple)):
        return
    if not hasattr(next(iter(value), None), "shape"):  # labels, of which there may be millions
        return
    arrays = list(value)
    several_inputs = any(len(getattr(a, "shape", ())) > 2 for a in arrays)
    if is_list_of_series(arrays) and (is_of_objects or not several_inputs):
        kind = "an array of objects" if is_of_objects else "a tuple"
        raise ShapeError(
            f"{name} is {kind} that holds {len(arrays)} arrays, the first of shape "
            f"{tuple(arrays[0].shape)}; series of different lengths are a list of arrays (F, T_i): "
            f"list({name})"
        )


WAYS = '.float(), .to_dense(), .toarray(), .compute(), .to_pandas() or ["name"]'


def refuse_source(value: Any, name: str) -> None:
    """Raise DataError for what cannot be read as an array, though users may pass it for one: a
    group of arrays, a loader, a sparse matrix, a tensor that NumPy lacks.

    ``name`` is that in messages.
    """
    is_single = not (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))
    if is_single or isinstance(value, np.ndarray | dict):
        return
    problem = _why_unreadable(value)
    if problem:
        cls = type(value)
        raise DataError(
            f"{name} must be an array, got {cls.__module__}.{cls.__qualname__}, which {problem}; "
            "give an array (F, N, T), or a list of series (F, T_i), dense and with values, as "
            f"{WAYS} gives, whichever it has"
        )


def _why_unreadable(value: Any) -> str | None:
    is_sliced = hasattr(value, "shape") and hasattr(value, "__getitem__")
    is_whole = hasattr(value, "__array__") or isinstance(value, Sequence | memoryview)
    if isinstance(value, Mapping) or not (is_sliced or is_whole):
        return "has no shape, or no slices"
    if hasattr(value, "toarray"):
        return "is sparse"
    shape = getattr(value, "shape", ())
    # dask has NaN for sizes that it has not computed
    if isinstance(shape, tuple) and any(isinstance(n, float) for n in shape):
        return f"has the shape {shape}: call compute_chunk_sizes() first"
    return _why_no_numpy(value) if is_tensor(value) and shape else None


def _why_no_numpy(tensor: Any) -> str | None:
    if not hasattr(tensor, "layout"):
        return None
    try:
        tensor.detach()[..., :0].cpu().numpy()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return f"is of {tensor.dtype} and {tensor.layout} on {tensor.device}, which NumPy lacks"
    return None


def with_shape(value: Any) -> Any:
    """Return nested lists and numbers as a NumPy array; anything with a shape unchanged."""
    return value if hasattr(value, "shape") else np.asarray(value)


def is_tensor(value: object) -> bool:
    """Whether something is a tensor of torch, which is not imported to find out."""
    of_torch = (c for c in type(value).__mro__ if c.__module__.split(".")[0] == "torch")
    return any(of_torch)  # a tensor of a subclass, too


def to_numpy(value: Any) -> Any:
    """Return a torch tensor, and what NumPy can convert but nobody can slice, as a NumPy array,
    which shares memory if it can; anything else unchanged.
    """
    if is_tensor(value):
        return value.detach().cpu().numpy()
    is_whole = hasattr(value, "__array__") and not hasattr(value, "shape")
    return np.asarray(value) if is_whole or isinstance(value, memoryview) else value


def in_memory(array: object) -> bool:
    """Whether an array is a NumPy array in memory, not a view of a file that is mapped."""
    if type(array) is not np.ndarray:  # not a subclass, which may read a file
        return False
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap | mmap.mmap):
            return False
        # np.frombuffer keeps a mmap behind a memoryview
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return True


def is_nonblocking(array: object) -> bool:
    """Whether reading an array never waits for a disk."""
    return array.nonblocking if isinstance(array, DuckArray) else in_memory(array)


def as_three_axes(array: Any, name: str) -> Any:
    """Return an array of shape (F, N, T) that takes three slices; of a torch tensor or nested
    lists, a NumPy array.

    Raises
    ------
    ShapeError, DataError
        If it has other axes, an axis is empty, or it is masked.
    """
    array = to_numpy(array)
    if not hasattr(array, "shape") or not hasattr(array, "__getitem__"):
        try:
            array = np.asarray(array)  # of nested lists
        except ValueError as error:
            raise ShapeError(
                f"{name} must be an array of shape (F, N, T), and the shapes of its parts differ; "
                "series of unequal length are a list of arrays (F, T_i), given to fit and predict "
                f"as it is ({error})"
            ) from None
    reject_masked(array, name)
    if len(array.shape) != 3:
        raise ShapeError(
            f"{name} must have three axes (F, N, T) = (features, series, time steps), got shape "
            f"{tuple(array.shape)}; x[None] adds the axis of one feature, x[:, None] that of one "
            "series (F, T), np.asarray(x).T[:, None] makes one of rows that are time steps, and "
            "x.reshape(-1, N, T) joins leading axes"
        )
    check_no_empty_axis(array, name, ("features", "series", "time steps"))
    check_named_axes(array, name)
    check_read_dtype(array, name)
    return array


def get_feature_names(array: Any) -> Names | None:
    """Return the names of the F features of an (F, N, T) array; None where it has none."""
    if isinstance(array, h5py.Dataset):
        if not array or array.ndim != 3:  # false: its file was closed
            return None
        # the first axis of a dataset in another order holds no features: no reason to warn
        return stored_names(array, array.shape[0])
    names = getattr(array, "feature_names", None)
    if names is None or len(array.shape) != 3 or len(names) != array.shape[0]:
        return None
    return tuple(str(name) for name in names)


def stored_names(dataset: h5py.Dataset, n_features: int) -> Names | None:
    """Return the names of features that an attribute of a dataset of HDF5 holds, if it does."""
    stored = dataset.attrs.get("feature_names")
    if not isinstance(stored, np.ndarray) or stored.shape != (n_features,):
        return None
    names = [
        name.decode(errors="replace") if isinstance(name, bytes) else name
        for name in stored.tolist()
    ]
    # a name of zero bytes only is a string that was never written
    if not names or not all(isinstance(name, str) and name.strip("\0") for name in names):
        return None
    return tuple(names)


TIMES = {
    "time",
    "times",
    "t",
    "date",
    "dates",
    "datetime",
    "timestamp",
    "timestep",
    "step",
    "steps",
    "valid_time",
}
FEATURES = {"variable", "variables", "feature", "features", "channel", "channels", "band", "bands"}


def check_named_axes(array: Any, name: str, rows: str = "features") -> None:
    """Raise ShapeError if the axes have names, as in xarray, and time or features are in another
    place.

    Axes of other names may stand for anything. A dataset of HDF5 has them in its attribute
    ``axes``. ``rows`` are the first axis of an array of two.
    """
    if isinstance(array, h5py.Dataset):
        axes = array.attrs.get("axes", "FNT")
        if isinstance(axes, bytes):  # of fixed length
            axes = axes.decode()
        if axes != "FNT":
            raise ShapeError(
                f"{name} is a dataset of shape {array.shape} whose attribute says axes={axes!r}, "
                f"but arrays are (F, N, T): use h5mmap({array.file.filename!r}, {array.name!r})"
            )
        return
    dims = getattr(array, "dims", None)
    if not isinstance(dims, tuple) or not all(isinstance(dim, str) for dim in dims):
        return
    wanted = _usual_order(dims)
    if wanted != dims:
        expected = "(features, series, time steps)" if len(dims) == 3 else f"({rows}, time steps)"
        raise ShapeError(
            f"{name} has the dimensions {dims}, but arrays are {expected}: use "
            f"{name}.transpose({', '.join(map(repr, wanted))})"
        )


def _usual_order(dims: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of dimensions with features first and time last, if one of them is time."""
    times = [dim for dim in dims if dim.lower() in TIMES]
    if len(times) != 1:  # which of several is meant cannot be known
        return dims
    features = [dim for dim in dims if dim.lower() in FEATURES]
    others = [dim for dim in dims if dim not in (*times, *features)]
    return (*features, *others, *times)


def check_no_empty_axis(array: Any, name: str, axes: tuple[str, ...]) -> None:
    """Raise ShapeError if one of the axes, whose names are given, has length 0."""
    for size, axis in zip(array.shape, axes, strict=True):
        if size == 0:
            raise ShapeError(f"{name} has no {axis}: shape {tuple(array.shape)}")


def reject_masked(array: object, name: str, fill: str = "np.nan") -> None:
    """Raise DataError if an array is masked: most operations drop the mask silently."""
    if isinstance(array, np.ma.MaskedArray):
        raise DataError(
            f"{name} is a masked array, whose mask would be lost; use {name}.filled({fill})"
        )
