"""Windows as tensors on the device of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from fluxutils_py.data import BackgroundDataLoader, SequenceWindows
from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.data.sequence_windows import WindowIndex
from fluxutils_py.errors import LoadError
from fluxutils_py.training.generator_state import get_generator_state, set_generator_state, start_epoch_order
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.tensors import to_tensor


class TensorBatches:
    """The windows of one pass as :class:`Minibatch`; each read when it is asked for.

    From what is not in memory, and for another device than the CPU, each is read one ahead, in a thread of its own.

    Parameters
    ----------
    windows : SequenceWindows
    dtype : torch.dtype
        Floating data are converted to it. Integers become int64, booleans ``dtype``.
    device : torch.device
    rng : numpy.random.Generator, optional
        Shuffle the rows, anew for each pass.
    rank, size : int
        Which of how many equal parts of every window to take, of consecutive rows; a part may have none, whose
        batches hold nothing but their index. All ranks have equally many batches.
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
        self.windows, self.dtype, self.device, self.rng = windows, dtype, device, rng
        self.rank, self.size = rank, size
        self._began: dict[str, Any] | None = None  # the generator at the beginning of the last pass

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[Minibatch]:
        return self.skip(0)

    def skip(self, n: int) -> Iterator[Minibatch]:
        """A pass without its first ``n`` batches, which are not read.

        With ``n`` above 0 it is the last pass once more, of which :meth:`state_dict` tells another process.
        """
        if self.rng is not None:
            self._began = start_epoch_order(self.rng, self._began, n)
        self.windows.shuffle(self.rng)
        indices: Iterator[WindowIndex] = islice(self.windows.indices(), n, None)
        if self.size > 1:
            indices = map(self._part, indices)
        indices = self._prefetched(indices)
        if self.device.type == "cpu" and not self.windows.blocking:
            yield from map(self._load, indices)
            return
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def load_ahead(index: WindowIndex) -> Minibatch:
            with torch.cuda.stream(stream):  # that of the training, in whose order copies and kernels then run
                return self._load(index, background=True)

        with BackgroundDataLoader.map(load_ahead, indices, n=1) as ahead:  # reads the next while one is worked on
            yield from ahead

    def state_dict(self) -> dict[str, Any]:
        """The order of the rows in this pass and those to come: the generator as it is, and as it was."""
        return {"rng": None if self.rng is None else get_generator_state(self.rng), "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, with batches of the same data."""
        if (self.rng is None) != (state["rng"] is None):
            raise LoadError("one of the state and these batches is shuffled, the other is not")
        if self.rng is not None:
            set_generator_state(self.rng, state["rng"])
            self._began = state["began"]

    def _part(self, index: WindowIndex) -> WindowIndex:
        return replace(index, segments=index.segments[array_split_slice(len(index.segments), self.size, self.rank)])

    def _prefetched(self, indices: Iterator[WindowIndex]) -> Iterator[WindowIndex]:
        """Each index, when the pages of the next are being fetched."""
        following = self._prefetch(next(indices, None))
        while (index := following) is not None:
            following = self._prefetch(next(indices, None))
            yield index

    def _prefetch(self, index: WindowIndex | None) -> WindowIndex | None:
        if index is not None and len(index.segments):
            self.windows.prefetch(index.segments, index.start, index.stop)
        return index

    def _load(self, index: WindowIndex, background: bool = False) -> Minibatch:
        if not len(index.segments):
            return Minibatch((), (), first=index.first, index=index)
        w = self.windows.read(index)
        inputs, labels = (
            tuple(to_tensor(v, self.dtype, self.device, background=background) for v in values) for values in (w.x, w.y)
        )
        weight = None if w.w is None else to_tensor(w.w, self.dtype, self.device)
        return Minibatch(inputs, labels, None, weight, index.first, index, w.n_live)
