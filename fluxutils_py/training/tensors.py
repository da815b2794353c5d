"""Windows of arrays as tensors: one copy, into contiguous memory of the type and device of the
model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.nn.kernels.library import library_in_use, n_threads
from fluxutils_py.tree import tree_map

SMALL_COPY = 4096  # values up to which plain NumPy copies are fastest
# As csrc/kernels.h numbers them.
_FLOATS = {
    np.dtype(np.float32): 0,
    np.dtype(np.float64): 1,
}


def to_tensor(
    values: np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
    *,
    background: bool = False,
) -> Tensor:
    """Copy a window ``(S, B, F)`` of any memory order to a contiguous tensor.

    The tensor never shares memory with ``values``, so a model that works in place cannot change the
    user's data. If features are not neighbours in memory, the native kernels transpose the window;
    without them, NumPy gathers it in memory order and torch transposes it
    (benchmarks/bench_windows.py).

    Parameters
    ----------
    values : ndarray
        Integers become int64, all other types ``dtype``.
    dtype : torch.dtype
    device : torch.device
    background : bool
        Whether this runs during training: then it uses one core instead of all.
    """
    if values.dtype.kind in "iu":
        dtype = torch.int64
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.size <= SMALL_COPY and device.type == "cpu":
        # sizes as separate arguments: torch takes longer to read them from a tuple
        out = torch.empty(*values.shape, dtype=dtype)
        np.copyto(out.numpy(), values, casting="unsafe")
        return out
    on_gpu = device.type == "cuda"
    out = torch.empty(values.shape, dtype=dtype, pin_memory=on_gpu)
    _fill(out, values, background)
    if device.type == "cpu":
        return out
    # A copy from pinned memory to a GPU does not block; torch keeps the memory until it is done.
    return out.to(device, non_blocking=on_gpu)


def _fill(out: Tensor, values: np.ndarray, background: bool) -> None:
    if values.size <= SMALL_COPY:
        np.copyto(out.numpy(), values, casting="unsafe")
        return
    if values.strides[-1] == values.itemsize:
        _copy_values(out, values, background)
        return
    threads = 1 if background else None
    if not copy_window(out.numpy(), values, threads):
        _copy_values(out, gathered(values), background)


def copy_window(out: np.ndarray, values: np.ndarray, threads: int | None = None) -> bool:
    """Copy a window whose memory runs along its steps or series to contiguous memory, if the
    kernels support it.

    Parameters
    ----------
    out : ndarray of shape (S, B, F), C order, float32 or float64
    values : ndarray of shape (S, B, F)
        float32 or float64, the latter also for a float32 ``out``. One axis must have neighbours in
        memory.
    threads : int, optional
        Number of threads; by default as many as recurrent layers use.

    Returns
    -------
    bool
        True if it copied; if False, ``out`` is unchanged.
    """
    out_code = _FLOATS.get(out.dtype)
    code = _FLOATS.get(values.dtype)
    size = values.itemsize
    loaded = library_in_use()
    if loaded is None or out_code is None or code is None:
        return False
    if values.ndim != 3 or not values.size:
        return False
    # The kernels count strides in values, not in bytes.
    if not values.flags.aligned:
        return False
    if any(stride % size for stride in values.strides):
        return False
    strides = (stride // size for stride in values.strides)
    threads = n_threads() if threads is None else threads
    status = loaded.copy_window(
        out.ctypes.data,
        out_code,
        values.ctypes.data,
        code,
        *values.shape,
        *strides,
        threads,
    )
    return not status


def _copy_values(out: Tensor, values: np.ndarray, background: bool) -> None:
    half = values.dtype == np.float16
    if half and not _torch_takes(values):
        values = np.array(values)
    # Torch transposes, and converts halves, faster than NumPy, but on all cores.
    scattered = half or values.strides[-1] != values.itemsize
    if (scattered or not background) and _torch_takes(values):
        writable = values if values.flags.writeable else np.asarray(_Writable(values))
        out.copy_(torch.from_numpy(writable))
    else:
        np.copyto(out.numpy(), values, casting="unsafe")


def gathered(values: np.ndarray) -> np.ndarray:
    """Gather a window (S, B, F) into one piece of memory, in memory order; return one that is in
    one piece uncopied.

    Runs of the memory stay innermost and features come next. Transposing to (S, B, F) then stays in
    the cache, and is up to five times as fast as from a plain copy in memory order
    (benchmarks/bench_windows.py).
    """
    jumps = zip(values.shape, values.strides, strict=True)
    extent = sum((n - 1) * abs(stride) for n, stride in jumps) + values.itemsize
    if values.ndim != 3 or extent == values.nbytes:  # in one piece already
        return values
    along_steps = abs(values.strides[0]) <= abs(values.strides[1])
    if along_steps:
        in_memory_order = values.transpose(1, 2, 0)
        return np.ascontiguousarray(in_memory_order).transpose(2, 0, 1)
    in_memory_order = values.transpose(0, 2, 1)
    return np.ascontiguousarray(in_memory_order).transpose(0, 2, 1)


def _torch_takes(values: np.ndarray) -> bool:
    """Return whether torch can view this memory: no stride is negative or a fraction of a value."""
    size = values.itemsize
    if size > 8:
        return False
    return all(stride >= 0 and stride % size == 0 for stride in values.strides)


class _Writable:
    """Present the memory of a read-only array as writable, since torch warns about read-only
    arrays.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values  # keeps the memory alive
        interface = dict(values.__array_interface__)
        address, _ = interface["data"]
        interface["data"] = (address, False)
        self.__array_interface__ = interface


def detached(prediction: Any) -> Any:
    """Return a prediction, a tree, without its graph."""

    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return tree_map(detach, prediction)
