"""Batches of inputs and labels, and the windows of a pass as such."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data import BackgroundDataLoader, SequenceWindows
from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.sequence_windows import WindowIndex
from fluxutils_py.errors import DataError, LoadError
from fluxutils_py.nn.kernels.library import library_in_use, n_threads
from fluxutils_py.training.generator_state import (
    get_generator_state,
    set_generator_state,
    start_epoch_order,
)
from fluxutils_py.training.sharding import n_observations, shard
from fluxutils_py.tree import tree_map

__all__ = ["Minibatch", "TensorBatches", "as_minibatch", "first_steps"]

SMALL_COPY = 4096  # values up to which plain NumPy copies are fastest
# As csrc/kernels.h numbers them.
_FLOATS = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}


@dataclass(frozen=True, slots=True)
class Minibatch:
    """A batch of examples, or a window of several series.

    Attributes
    ----------
    inputs, labels : tuple of Tensor
        Always tuples, even of one tensor. Labels may be empty.
    kind : hashable or anything with a repr, optional
        Kind of batch, for models that treat kinds differently. A :class:`Trainer` keeps one
        executor for each.
    weight : float or Tensor, optional
        Float: weight of the batch in means over several. Tensor: weights of its elements,
        broadcastable to an unreduced loss; 0 excludes an element. For windows ``(S, B, 1)``, or
        ``(S, B, G)`` if single outputs are missing.
    first : bool, optional
        Whether it begins a group of series, so that recurrent layers forget their state before it.
        None: see ``stateful`` of :class:`GradientStep`.
    index : WindowIndex, optional
        For windows: the place in the data. Tensors of windows are ``(S, B, F)``.
    n_live : float
        For windows: number of steps that count.
    """

    inputs: tuple[Any, ...]
    labels: tuple[Any, ...] = ()
    kind: Any = None
    weight: Any = None
    first: bool | None = None
    index: WindowIndex | None = None
    n_live: float = 0

    @property
    def x(self) -> Any:
        """Inputs as a loss over windows takes them: one tensor, or a tuple of several."""
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs

    @property
    def y(self) -> Any:
        """Labels as a loss over windows takes them: one tensor, or a tuple of several."""
        return self.labels[0] if len(self.labels) == 1 else self.labels

    def to(self, device: str | torch.device) -> Minibatch:
        """Return the batch with its tensors and modules on a device."""
        return replace(
            self,
            inputs=tuple(_move_to(v, device) for v in self.inputs),
            labels=tuple(_move_to(v, device) for v in self.labels),
            # a number has no device and stays
            weight=_move_to(self.weight, device),
        )

    def shard(self, rank: int, size: int, axis: int = 0) -> Minibatch | None:
        """Return a rank's share of the examples or series, None if empty; see :func:`shard`."""
        if self.index is not None:
            axis = 1  # windows are (S, B, F)
        # a number belongs to the whole batch, see below
        weight = self.weight if isinstance(self.weight, Tensor) else None
        whole = self.inputs, self.labels, weight
        part = shard(whole, rank, size, axis)
        if part is None:
            return None
        inputs, labels, weight = part
        n_whole = n_observations(whole, axis)
        if self.weight is not None and weight is None:  # a number, of the whole batch
            weight = self.weight * n_observations(part, axis) / n_whole
        index = self.index
        if index is not None:  # the place of this rank's series
            rows = array_split_slice(n_whole, size, rank)
            index = replace(index, segments=index.segments[rows])
        # n_live is not known of a part
        return replace(self, inputs=inputs, labels=labels, weight=weight, index=index, n_live=0)


def as_minibatch(item: object, kind: object = None) -> Minibatch:
    """Convert an item of a dataset to a :class:`Minibatch`.

    Parameters
    ----------
    item : Minibatch, Tensor, tuple or list
        A tuple or list is ``(inputs,)``, ``(inputs, labels)`` or ``(inputs, labels, weight)``:
        tensors or tuples of tensors. Anything else, such as a tensor or a mapping, is an input
        without labels.
    kind : hashable, optional
        Kind of the batch; ignored for a Minibatch.

    Raises
    ------
    DataError
        If a tuple has another length.
    """
    if isinstance(item, Minibatch):
        return item
    if not isinstance(item, tuple | list):
        return Minibatch((item,), (), kind)
    if len(item) not in (1, 2, 3):
        raise DataError(
            f"a batch is (inputs,), (inputs, labels) or (inputs, labels, weight), got {len(item)} "
            "entries; give several inputs or labels as a tuple"
        )
    labels = as_tuple(item[1]) if len(item) > 1 else ()
    weight = item[2] if len(item) > 2 else None
    return Minibatch(as_tuple(item[0]), labels, kind, weight)


def begins_series(batch: object, stateful: bool = False) -> bool:
    """Return whether recurrent layers forget their state before a batch: its ``first``, else ``not
    stateful``.
    """
    first = getattr(batch, "first", None)
    # a data frame has a method of this name
    return first if isinstance(first, bool) else not stateful


def require_parts(batch: Minibatch) -> None:
    """Raise DataError or ValueError unless a batch has all parts that a model needs."""
    index = batch.index
    if index is not None and (
        index.n_overlap or index.next_start is not None or not index.has_loss
    ):
        raise DataError(
            "windows with overlap or burn_in need a WindowStep, which an Estimator trains with"
        )
    if not batch.inputs:
        raise ValueError("the batch has no inputs; a model needs at least one")
    if any(v is None for v in (*batch.inputs, *batch.labels)):
        raise ValueError(
            "an input or label of the batch is None; leave it out, and give such batches another "
            "kind"
        )


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return a tuple or list as a tuple, anything else as a tuple of one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _move_to(value: Any, device: str | torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor | nn.Module) else value


# -- windows as minibatches ------------------------------------------------------------------------


def first_steps(windows: SequenceWindows, parameter: Tensor) -> list[Tensor]:
    """Return up to three steps of up to four series of each input, (S, B, F), for a trial of the
    model that has this parameter.
    """
    # a rank without series tries the model on its stand-in
    rows = windows.of_rank(windows.segments)[:4] or Segments.from_lengths(1, windows.x[0].T)
    values = windows.cut(rows, 0, min(3, windows.segments.max_length)).x
    return [to_tensor(v, parameter.dtype, parameter.device) for v in values]


class TensorBatches:
    """Iterate over the windows of one pass as :class:`Minibatch`, reading each on demand.

    For data that is not in memory, or a device other than the CPU, a background thread reads one
    window ahead.

    Parameters
    ----------
    windows : SequenceWindows
    dtype : torch.dtype
        Type for floating data and booleans. Integers become int64.
    device : torch.device
    rng : numpy.random.Generator, optional
        Shuffles the rows for each pass. None: no shuffling.
    rank, size : int
        Which of ``size`` equal parts of every window to read: consecutive rows, or the series of
        this rank if each rank has separate ones. Batches of a part without rows hold only their
        index. All ranks have equally many batches.
    """

    def __init__(
        self,
        windows: SequenceWindows,
        dtype: torch.dtype,
        device: torch.device,
        rng: np.random.Generator | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.windows = windows
        self.dtype = dtype
        self.device = device
        self.rng = rng
        self.rank = rank
        self.size = size
        self.observers: list[Callable[[Minibatch], None]] = []  # of the batches of one pass
        self._began: dict[str, Any] | None = None  # generator state at the start of the last pass

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[Minibatch]:
        return self.skip(0)

    def skip(self, n: int) -> Iterator[Minibatch]:
        """Iterate over a pass without its first ``n`` batches, which are not read.

        With ``n > 0`` this repeats the last pass, also in another process that has loaded
        :meth:`state_dict`. The ``observers`` are called with each batch of the next pass, if it is
        whole, and then dropped.
        """
        observers = self.observers
        self.observers = []
        batches = self._pass(n)
        return observed(batches, observers) if observers and not n else batches

    def _pass(self, n: int) -> Generator[Minibatch, None, None]:
        if self.rng is not None:
            self._began = start_epoch_order(self.rng, self._began, n)
        self.windows.shuffle(self.rng)
        indices: Iterator[WindowIndex] = islice(self.windows.indices(), n, None)
        # one rank takes all rows, without another index for each window
        if self.size > 1:
            indices = self._parts(indices)
        indices = self._prefetch_ahead(indices)  # last, so that it fetches this rank's rows only
        if self.device.type == "cpu" and not self.windows.blocking:
            yield from map(self._load, indices)
            return
        # Asked for here: the thread that loads ahead has another current stream.
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def load_ahead(index: WindowIndex) -> Minibatch:
            # The training stream, so that copies and kernels run in order.
            with torch.cuda.stream(stream):
                return self._load(index, background=True)

        # Reads the next window while the training runs on this one.
        with BackgroundDataLoader.map(load_ahead, indices, n=1) as ahead:
            yield from ahead

    def state_dict(self) -> dict[str, Any]:
        """Return the order of rows, now and in later passes: the generator's state now and at the
        pass's start.
        """
        return {
            "rng": None if self.rng is None else get_generator_state(self.rng),
            "began": self._began,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, for the same data."""
        if (self.rng is None) != (state["rng"] is None):
            raise LoadError(
                "the state is of shuffled batches and these are not, or the reverse; set shuffle "
                "alike"
            )
        if self.rng is not None:
            set_generator_state(self.rng, state["rng"])
            self._began = state["began"]

    def _parts(self, indices: Iterator[WindowIndex]) -> Iterator[WindowIndex]:
        """Yield each index with the rows of this rank, which the windows of a group share."""
        group = part = None
        for index in indices:
            if part is None or index.segments is not group:
                group = index.segments
                part = self.windows.of_rank(group)
                if self.windows.shards is None:
                    # as everywhere: predictions and states of ranks are divided in the same way
                    part = group[array_split_slice(len(group), self.size, self.rank)]
            yield replace(index, segments=part)

    def _prefetch_ahead(self, indices: Iterator[WindowIndex]) -> Iterator[WindowIndex]:
        """Yield each index after starting to fetch the pages of the next."""
        before = None
        for index in indices:
            if len(index.segments):
                self.windows.prefetch(index.segments, index.start, index.stop)
            if before is not None:
                yield before
            before = index
        if before is not None:
            yield before

    def _load(self, index: WindowIndex, background: bool = False) -> Minibatch:
        if not len(index.segments):
            return Minibatch((), (), first=index.first, index=index)
        w = self.windows.read(index)
        to = self.dtype, self.device
        inputs = tuple([to_tensor(v, *to, background=background) for v in w.x])
        labels = tuple([to_tensor(v, *to, background=background) for v in w.y])
        weight = None if w.w is None else to_tensor(w.w, self.dtype, self.device)
        return Minibatch(inputs, labels, None, weight, index.first, index, w.n_live)


def observed(
    batches: Generator[Minibatch, None, None], observers: Sequence[Callable[[Minibatch], None]]
) -> Iterator[Minibatch]:
    """Yield batches after calling some functions with each."""
    with closing(batches):
        for batch in batches:
            for observe in observers:
                observe(batch)
            yield batch


# -- windows of arrays as tensors: one copy, into contiguous memory --------------------------------


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
    if values.size <= SMALL_COPY:
        np.copyto(out.numpy(), values, casting="unsafe")
    elif values.strides[-1] == values.itemsize:
        _copy_values(out, values, background)
    elif not copy_window(out.numpy(), values, 1 if background else None):
        _copy_values(out, gathered(values), background)
    # A copy from pinned memory to a GPU does not block; torch keeps the memory until it is done.
    return out if device.type == "cpu" else out.to(device, non_blocking=on_gpu)


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
    if values.ndim != 3 or not values.size or not values.flags.aligned:
        return False
    # The kernels count strides in values, not in bytes.
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
        if not values.flags.writeable:  # as writable, since torch warns about read-only arrays
            address, _ = values.__array_interface__["data"]
            interface = {**values.__array_interface__, "data": (address, False)}
            # the values keep the memory alive
            values = np.asarray(SimpleNamespace(__array_interface__=interface, values=values))
        out.copy_(torch.from_numpy(values))
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
    if abs(values.strides[0]) <= abs(values.strides[1]):  # along steps
        return np.ascontiguousarray(values.transpose(1, 2, 0)).transpose(2, 0, 1)
    return np.ascontiguousarray(values.transpose(0, 2, 1)).transpose(0, 2, 1)


def _torch_takes(values: np.ndarray) -> bool:
    """Return whether torch can view this memory: no stride is negative or a fraction of a value."""
    size = values.itemsize
    return size <= 8 and all(stride >= 0 and stride % size == 0 for stride in values.strides)


def detached(prediction: Any) -> Any:
    """Return a prediction, a tree, without its graph."""

    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return tree_map(detach, prediction)
