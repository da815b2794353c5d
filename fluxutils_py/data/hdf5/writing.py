"""Save arrays in HDF5 files from which they can be mapped."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import h5py
import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.data.arrays import (
    Names,
    check_read_dtype,
    get_feature_names,
    plain_block,
    refuse_source,
    to_numpy,
)
from fluxutils_py.data.hdf5.h5map import H5Map
from fluxutils_py.data.hdf5.mapping import h5mmap
from fluxutils_py.data.hdf5.opening import (
    PathLike,
    Shape,
    check_axes,
    check_dataset,
    check_name,
    check_names,
    check_path,
    describe,
    wrap_h5_errors,
    write_names,
)
from fluxutils_py.data.parts import indbatch
from fluxutils_py.errors import DataError, H5DataError
from fluxutils_py.files import atomic_path, remove_leftovers
from fluxutils_py.validation import check_integer

ALIGN = {"alignment_threshold": 1, "alignment_interval": 64}  # of raw data in the file, in bytes
BLOCK_BYTES = 32 << 20


def h5save(
    path: PathLike,
    mapping: Mapping[str, Any],
    axes: str = "TNF",
    *,
    feature_names: object = None,
) -> None:
    """Write arrays to an HDF5 file, in a layout that can be mapped.

    The new file replaces an old one of that name only when it is complete, so nobody sees half of
    it. Processes that have mapped or opened the old file keep it, so the arrays to save may come
    from it. Maps of the old file can no longer be sent to other processes.

    Parameters
    ----------
    path : path-like
    mapping : mapping of str to array, or to another such mapping
        Arrays of shape (F, N, T), of any kind. They may be larger than memory: they are copied
        block by block. A mapping inside the mapping becomes a group. Arrays of fewer or more axes,
        numbers and strings are stored unchanged. Masked values are stored as NaN.
    axes : str
        Order of three axes in the file and in memory, slowest first. ``"TNF"`` is the fast one for
        training; Julia shows it as (F, N, T). It is noted in the dataset's attribute ``axes``.
    feature_names : mapping of str to list of str, optional
        Names of features by the name of their array, as ``{"x": ["temperature", "wind"]}``.
        They are noted in the dataset's attribute ``feature_names``, a vector of F strings, and
        ``h5mmap`` returns arrays with an attribute of that name. The default is such an attribute
        of the array itself.

    Raises
    ------
    H5DataError
        If something cannot be stored: objects, masked integers, two values for one name. An old
        file of that name then stays.

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "data.h5")
    >>> h5save(path, {"x": np.zeros((4, 3, 5)), "train": {"n_series": 2}})
    >>> with h5py.File(path) as f:
    ...     f["x"].shape, f["x"].attrs["axes"], f["train/n_series"][()].item()
    ((5, 3, 4), 'TNF', 2)
    """
    path = check_path(path)
    arrays = _collect(path, mapping, "", {})
    if not arrays:
        raise H5DataError(f"{path}: there is nothing to save: the mapping is empty")
    check_axes(axes, 3, path)
    names = _names_by_name(path, arrays, feature_names)
    with new_file(path) as file:
        for name, array in arrays.items():
            where = describe(path, name)
            try:
                dataset = _store(file, name, array, axes)
            # not OSError: a full disk is no fault of the array
            except (TypeError, ValueError, KeyError) as error:
                raise H5DataError(
                    f"{where}: cannot store {type(array).__name__} of type {array.dtype} "
                    f"({error}); convert it to an array of numbers, or give it another name"
                ) from error
            if name in names:
                write_names(dataset, names[name], where)


def _store(file: h5py.File, name: str, array: Any, axes: str) -> h5py.Group | h5py.Dataset:
    """Write one array, or a group in place of None."""
    if array is None:
        return file.require_group(name)
    if array.dtype.kind == "U":  # HDF5 has no such type: as texts of any length, in UTF-8
        return file.create_dataset(name, data=array.astype(object), dtype=h5py.string_dtype())
    ndim = len(array.shape)
    if array.dtype.kind not in "fiub" or ndim == 0:
        return file.create_dataset(name, data=array)
    order = check_axes(axes, ndim, name)
    # the inverse of the order: for each axis of the file, which axis of the array it is
    shape = [int(array.shape[i]) for i in np.argsort(order)]
    dataset = allocate(file, name, shape, array.dtype, axes if ndim == 3 else None)
    copy_into(dataset, array, order)
    return dataset


def _collect(path: str, mapping: object, prefix: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Collect arrays by the full names that HDF5 gives them, None for a group."""
    if not isinstance(mapping, Mapping):
        raise H5DataError(
            f"{path}: expected a mapping of names to arrays, as {{'x': x, 'y': y}}, got "
            f"{type(mapping).__name__}"
        )
    for key, value in mapping.items():
        check_name(path, key)
        name = "/".join(part for part in f"{prefix}/{key}".split("/") if part not in ("", "."))
        is_group = isinstance(value, Mapping)
        # {"a": {...}, "/a": {...}} names one group twice, which does no harm
        if name in arrays and not (is_group and arrays[name] is None):
            raise H5DataError(
                f"{describe(path, name)} is given twice; give one of the two another name"
            )
        arrays[name] = None if is_group else _as_array(value, describe(path, name))
        if is_group:
            _collect(path, value, name, arrays)
    return arrays


def _names_by_name(path: str, arrays: dict[str, Any], given: Any) -> dict[str, Names]:
    """Return feature names by array: those given, else those that the array itself has."""
    names = {name: get_feature_names(a) for name, a in arrays.items() if a is not None}
    if given is not None and not isinstance(given, Mapping):
        raise H5DataError(
            f"{path}: feature_names must say of which array they are, as {{'x': [...]}}, got "
            f"{type(given).__name__}"
        )
    for name, value in (given or {}).items():
        key = str(name).strip("/")
        if key not in names:
            raise H5DataError(
                f"{path}: feature_names are given for {name!r}, which is not among the arrays to "
                f"save: {', '.join(names)}"
            )
        names[key] = check_names(value, arrays[key].shape, describe(path, key))
    return {name: value for name, value in names.items() if value is not None}


def _as_array(value: Any, where: str) -> Any:
    """Return an object with shape, dtype and slices; masked values become NaN, as HDF5 files have
    no masks.
    """
    # np.asarray would drop the masks
    if isinstance(value, list | tuple) and any(isinstance(v, np.ma.MaskedArray) for v in value):
        value = np.ma.stack(value)
    try:
        if isinstance(value, h5py.Dataset):
            check_dataset(value, where)
        else:
            refuse_source(value, where)
            value = to_numpy(value)
        if isinstance(value, np.ma.MaskedArray):
            return plain_block(value, where)
        if all(hasattr(value, attribute) for attribute in ("shape", "dtype", "__getitem__")):
            check_read_dtype(value, where)
            return value
        return np.asarray(value)
    except H5DataError:
        raise
    except DataError as error:
        raise H5DataError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise H5DataError(
            f"{where}: this is no array ({error}); make it one of numbers, with equal lengths"
        ) from error


# -- datasets --------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_file(path: PathLike, replace: bool = True) -> Iterator[h5py.File]:
    """Open a new HDF5 file that takes the place of ``path`` if no error occurs, as
    :func:`fluxutils_py.files.atomic_path` says.
    """
    target = os.path.realpath(os.fsdecode(path))  # of a link, the file is replaced
    if os.path.isdir(target):
        raise H5DataError(f"{target}: this is a directory; give the name of a file")
    with atomic_path(target, replace=replace) as new, h5py.File(new, "w", **ALIGN) as file:
        yield file


def allocate(
    file: h5py.File,
    name: str,
    shape: Sequence[int],
    dtype: DTypeLike,
    axes: str | None,
) -> h5py.Dataset:
    """Create a contiguous dataset with its place in a new file; it reads as zeros, and takes no
    room on the disk, before it is written.

    Parameters
    ----------
    shape : sequence of int
        Shape in the file.
    axes : str, optional
        Order of axes to note.
    """
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    # a map needs the offset of the data, which HDF5 otherwise chooses at the first write
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    h5_type = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    space = h5py.h5s.create_simple(tuple(shape))
    group, _, leaf = f"/{name.strip('/')}".rpartition("/")
    parent = file.require_group(group or "/")
    dataset = h5py.Dataset(h5py.h5d.create(parent.id, leaf.encode(), h5_type, space, plist))
    if axes is not None:
        dataset.attrs["axes"] = axes
    return dataset


def copy_into(
    dataset: h5py.Dataset,
    source: Any,
    axes: Sequence[int],
    at: Sequence[int] | None = None,
) -> None:
    """Copy an array into a dataset block by block; either may be larger than memory.

    Parameters
    ----------
    source : array
        Of shape (F, N, T); anything with ``shape`` that takes slices.
    axes : sequence of int
        The axis of the dataset for each axis of the source.
    at : sequence of int, optional
        Index in the dataset at which to begin, along each axis of the source.
    """
    order = np.argsort(axes).tolist()  # which axis of the source each axis of the dataset is
    if at is None:
        at = [0] * len(axes)
    for block in _blocks(list(map(int, source.shape)), dataset.dtype.itemsize):
        part = source[block]
        if isinstance(source, H5Map):
            source.willneed(part)  # else its pages come one by one
        part = np.ascontiguousarray(plain_block(part).transpose(order), dataset.dtype)
        target = tuple(slice(at[i] + block[i].start, at[i] + block[i].stop) for i in order)
        dataset.write_direct(part, dest_sel=target)


def _blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Cut a shape into blocks as close to cubes as the axes allow, so that runs are long in any
    memory order.
    """
    if 0 in shape:
        return
    size = list(shape)
    while math.prod(size) * itemsize > BLOCK_BYTES and max(size) > 1:
        longest = size.index(max(size))
        size[longest] = -(-size[longest] // 2)
    yield from product(*map(indbatch, shape, size))


# -- room for an array -----------------------------------------------------------------------------

LARGEST = 1 << 62  # bytes: HDF5 counts them in 64 bits, and wraps
UNCREATABLE = "cannot be created ({}); give it another name, or make it smaller"


def h5create(
    path: PathLike,
    name: str,
    shape: Sequence[int],
    dtype: DTypeLike = "float32",
    axes: str = "TNF",
    *,
    exist_ok: bool = False,
    sparse: bool = False,
) -> Any:
    """Make an HDF5 file with room for an array of shape (F, N, T), and map it for writing.

    The dataset is contiguous, takes its room on the disk at once, and reads as zeros where it is
    not written. The file appears whole or not at all, also when the process is killed.

    Several processes may call it at the same time, such as the ranks of ``mpirun``, with the same
    arguments and ``exist_ok=True``: one of them makes the file, and all of them map it.

    Parameters
    ----------
    path : path-like
        The new file, which holds this array alone.
    name : str
        Name of the dataset; missing groups are created.
    shape : sequence of int
    dtype : dtype
        Of real numbers.
    axes : str
        Order of three axes in the file, slowest first. ``"TNF"`` is the fast one for training.
    exist_ok : bool
        If there is a file with a dataset of that name, shape and type, map that one with its
        numbers, so that a script can run a second time.
    sparse : bool
        Take room on the disk only where the map is written. If the disk is full then, the system
        kills the process (SIGBUS), with no error to catch.

    Returns
    -------
    H5Map
        The map, in mode ``"r+"``; an empty ndarray for a shape without elements.

    Raises
    ------
    H5DataError
        If the file exists, unless ``exist_ok`` and it has such a dataset, if there can be no such
        array, or if the disk has no room for it.

    Examples
    --------
    >>> import os, tempfile
    >>> out = h5create(os.path.join(tempfile.mkdtemp(), "predictions.h5"), "yhat", (1, 3, 4))
    >>> out[:, 0] = 7  # as est.predict(x, out=out) would
    >>> float(out.sum())
    28.0
    """
    path = check_path(path)
    check_name(path, name)
    where = describe(path, name)
    sizes, numpy_type = _check_array(where, shape, dtype)
    in_file = [sizes[i] for i in np.argsort(check_axes(axes, len(sizes), where))]
    if not os.path.exists(path):
        # if another process makes the file first, that one's is what this process maps
        exist_ok = True
        with (
            wrap_h5_errors(where, UNCREATABLE),
            contextlib.suppress(FileExistsError),
            new_file(path, replace=False) as file,
        ):
            noted = axes if len(sizes) == 3 else None
            dataset = allocate(file, name, in_file, numpy_type, noted)
            file.flush()  # the file is as long then
            n_bytes = dataset.nbytes
            # A full disk kills a process that writes to a map (SIGBUS): where the file system can,
            # it gives the dataset all of its room now.
            if n_bytes and not sparse and hasattr(os, "posix_fallocate"):
                descriptor = file.id.get_vfd_handle()
                try:
                    os.posix_fallocate(descriptor, dataset.id.get_offset() or 0, n_bytes)
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise H5DataError(
                            f"{where} cannot be created: it needs {n_bytes} bytes on the disk "
                            f"({error.strerror}); make room, or pass sparse=True to take room only "
                            "where it is written"
                        ) from error
    if not exist_ok:
        raise H5DataError(
            f"{where} cannot be created: the file exists already; give the array a file of its "
            "own, or pass exist_ok=True to write to one that the file has"
        )
    remove_leftovers(os.path.realpath(path))  # of a process that died as the file appeared
    array = h5mmap(path, name, mode="r+")
    if (array.shape, array.dtype) != (sizes, numpy_type):
        raise H5DataError(
            f"{where} exists already with shape {array.shape} of {array.dtype}, in place of "
            f"{sizes} of {numpy_type}; give the array a file of its own, or remove that one"
        )
    return array


def _check_array(where: str, shape: Any, dtype: DTypeLike) -> tuple[Shape, np.dtype]:
    """Check that there can be an array of real numbers of that shape and type."""
    try:
        sizes = tuple(check_integer("", n, 0) for n in shape)
        numpy_type = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise H5DataError(
            f"{where}: shape and dtype must be those of an array, as (1, 37, 100) and 'float32', "
            f"got {shape!r} and {dtype!r}"
        ) from error
    n_bytes = math.prod(sizes) * numpy_type.itemsize
    if numpy_type.kind not in "fiub" or not sizes or max(n_bytes, *sizes) > LARGEST:
        raise H5DataError(
            f"{where}: there can be no array of shape {sizes} of {numpy_type} in a file; expected "
            "real numbers, one axis or more, and less than 2**62 bytes"
        )
    return sizes, numpy_type
