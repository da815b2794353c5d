"""Writing HDF5 files such that they can be mapped, and such that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import h5py
import numpy as np

from fluxutils_py.errors import H5DataError

ALIGN = {"alignment_threshold": 1, "alignment_interval": 64}  # of raw data in the file, in bytes
BLOCK_BYTES = 32 << 20
RUN_BYTES = 64 << 10  # read this much in one piece where the source lies in another order


@contextlib.contextmanager
def aside(path: str | os.PathLike[str]) -> Iterator[str]:
    """Write to a new file in the same folder, which takes the place of ``path`` when all has gone well.

    Whoever has the old file open or mapped keeps it. The new one has the mode of the old one, or what the umask leaves.
    """
    target = os.path.realpath(os.fsdecode(path))
    if os.path.isdir(target):
        raise H5DataError(f"{target}: this is a directory; give the name of a file")
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(f"{os.path.dirname(target)}: there is no such folder to write a file to")
    new = f"{target}.{secrets.token_hex(4)}.tmp"
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield new
        if os.path.exists(target):
            shutil.copymode(target, new)
        os.replace(new, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def allocate(
    group: h5py.Group, name: str, shape: Sequence[int], dtype: Any, axes: str | None, fill: bool = False
) -> h5py.Dataset:
    """A contiguous dataset with its place in the file, which takes no room on the disk before it is written.

    Parameters
    ----------
    shape : sequence of int
        As in the file.
    axes : str, optional
        What to note as its order.
    fill : bool
        Write zeros now. In a new file what was never written reads as zeros anyway, but for what HDF5 uses again.
    """
    parent = group.require_group(name.rpartition("/")[0]) if "/" in name.strip("/") else group
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_ALLOC if fill else h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    space = h5py.h5s.create_simple(tuple(shape))
    leaf = name.strip("/").rpartition("/")[2]
    dataset = h5py.Dataset(h5py.h5d.create(parent.id, leaf.encode(), kind, space, plist))
    if axes is not None:
        dataset.attrs["axes"] = axes
    return dataset


def copy_into(
    dataset: h5py.Dataset,
    source: Any,
    axes: Sequence[int],
    done: Callable[[int], Any],
    at: Sequence[int] | None = None,
) -> None:
    """Copy an array into a dataset block by block; either may be larger than memory.

    Parameters
    ----------
    source : array
        With the (F, N, T) face; anything with ``shape`` that takes slices.
    axes : sequence of int
        Which axis of the dataset each axis of the source is.
    done : callable
        Is told the number of bytes after each block.
    at : sequence of int, optional
        Where in the dataset to begin, along each axis of the source.
    """
    order = np.argsort(axes).tolist()  # which axis of the source each axis of the dataset is
    at = [0] * len(axes) if at is None else at
    for block in _blocks(source, dataset.dtype.itemsize, order[::-1]):
        part = source[block]
        if hasattr(source, "willneed"):
            source.willneed(part)
        part = np.ascontiguousarray(np.asarray(part).transpose(order), dataset.dtype)
        target = tuple(slice(at[i] + block[i].start, at[i] + block[i].stop) for i in order)
        dataset.write_direct(part, dest_sel=target)
        done(part.nbytes)


def _blocks(source: Any, itemsize: int, fast_first: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cut a source into blocks that are long in the direction of its own memory as well as the dataset's."""
    shape, room = [int(n) for n in source.shape], max(1, BLOCK_BYTES // itemsize)
    if 0 in shape:
        return
    size = [1] * len(shape)
    if isinstance(source, np.ndarray):
        own = min(range(len(shape)), key=lambda i: (abs(source.strides[i]) or np.inf) if shape[i] > 1 else np.inf)
        size[own] = min(shape[own], max(1, RUN_BYTES // itemsize))
        room //= size[own]
    for axis in fast_first:
        more = min(-(-shape[axis] // size[axis]), max(1, room))
        size[axis] = min(size[axis] * more, shape[axis])
        room //= more
    yield from product(*([slice(i, min(i + k, n)) for i in range(0, n, k)] for n, k in zip(shape, size, strict=True)))
