"""Windows as tensors on the device of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.data import BackgroundDataLoader, SequenceWindows
from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.data.sequence_windows import Window, WindowIndex
from fluxutils_py.errors import LoadError
from fluxutils_py.training.generator_state import get_generator_state, set_generator_state, start_epoch_order
from fluxutils_py.training.tensors import to_tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A :class:`Window` whose data are tensors: ``x`` and ``y`` as a loss wants them, a tuple only for several."""

    x: Tensor | tuple[Tensor, ...]
    y: Tensor | tuple[Tensor, ...]
    w: Tensor | None
    window: Window

    @property
    def first(self) -> bool:
        """Whether it begins a group of series."""
        return self.window.index.first


class TensorBatches:
    """The windows of one pass as :class:`Batch`; each read when it is asked for.

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
        batches hold nothing but their place. All ranks have equally many batches.
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

    def __iter__(self) -> Iterator[Batch]:
        return self.skip(0)

    def skip(self, n: int) -> Iterator[Batch]:
        """A pass without its first ``n`` batches, which are not read.

        With ``n`` above 0 it is the last pass once more, of which :meth:`state_dict` tells another process.
        """
        if self.rng is not None:
            self._began = start_epoch_order(self.rng, self._began, n)
        self.windows.shuffle(self.rng)
        places: Iterator[WindowIndex] = islice(self.windows.indices(), n, None)
        if self.size > 1:
            places = map(self._part, places)
        places = self._prefetched(places)
        if self.device.type == "cpu" and not self.windows.blocking:
            yield from map(self._load, places)
            return
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def background(place: WindowIndex) -> Batch:
            with torch.cuda.stream(stream):  # that of the training, in whose order copies and kernels then run
                return self._load(place, background=True)

        with BackgroundDataLoader.map(background, places, n=1) as ahead:  # reads the next while one is worked on
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

    def _part(self, place: WindowIndex) -> WindowIndex:
        return replace(place, segments=place.segments[array_split_slice(len(place.segments), self.size, self.rank)])

    def _prefetched(self, places: Iterator[WindowIndex]) -> Iterator[WindowIndex]:
        """Each place, when the pages of the next are being fetched."""
        following = self._prefetch(next(places, None))
        while (place := following) is not None:
            following = self._prefetch(next(places, None))
            yield place

    def _prefetch(self, place: WindowIndex | None) -> WindowIndex | None:
        if place is not None and len(place.segments):
            self.windows.prefetch(place.segments, place.start, place.stop)
        return place

    def _load(self, place: WindowIndex, background: bool = False) -> Batch:
        if not len(place.segments):
            return Batch((), (), None, Window((), (), None, None, 0, place))
        w = self.windows.read(place)
        x = tuple(to_tensor(v, self.dtype, self.device, background=background) for v in w.x)
        y = tuple(to_tensor(v, self.dtype, self.device, background=background) for v in w.y)
        return Batch(
            x[0] if len(x) == 1 else x,
            y[0] if len(y) == 1 else y,
            None if w.w is None else to_tensor(w.w, self.dtype, self.device),
            w,
        )
