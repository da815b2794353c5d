"""Windows as tensors on the device of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.data import SequenceWindows, Window


@dataclass(frozen=True, slots=True)
class Batch:
    """A :class:`Window` whose data are tensors: ``x`` and ``y`` as a loss wants them, a tuple only for several."""

    x: Tensor | tuple[Tensor, ...]
    y: Tensor | tuple[Tensor, ...]
    w: Tensor | None
    window: Window


class TensorBatches:
    """The windows of one pass as :class:`Batch`; each read when it is asked for.

    Parameters
    ----------
    windows : SequenceWindows
    dtype : torch.dtype
        Floating data are converted to it. Integers become int64, booleans ``dtype``.
    device : torch.device
    rng : numpy.random.SeedSequence, optional
        Shuffle the rows, anew for each pass.
    """

    def __init__(
        self,
        windows: SequenceWindows,
        dtype: torch.dtype,
        device: torch.device,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.windows, self.dtype, self.device, self.rng = windows, dtype, device, rng

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[Batch]:
        self.windows.shuffle(self.rng)
        for w in self.windows:
            x = tuple(to_tensor(v, self.dtype, self.device) for v in w.x)
            y = tuple(to_tensor(v, self.dtype, self.device) for v in w.y)
            yield Batch(
                x[0] if len(x) == 1 else x,
                y[0] if len(y) == 1 else y,
                None if w.w is None else to_tensor(w.w, self.dtype, self.device),
                w,
            )


def to_tensor(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor with a copy of an array of any memory order: integers as int64, all else as ``dtype``.

    Never shares memory with ``values``, so that a model that works in place cannot change the user's data.
    """
    if values.dtype.kind in "iu":
        dtype = torch.int64
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    out = torch.empty(values.shape, dtype=dtype)
    half, size = values.dtype == np.float16, values.itemsize
    # torch warns of memory it may not write to, and knows no strides that are negative or fall between two values
    plain = values.flags.writeable and size <= 8 and all(s >= 0 and s % size == 0 for s in values.strides)
    if half and not plain:
        values = np.array(values)
    if half or (plain and values.strides[-1] != size):
        out.copy_(torch.from_numpy(values))  # transposes a gathered block, and converts halves, faster than NumPy
    else:
        np.copyto(out.numpy(), values, casting="unsafe")
    return out if device.type == "cpu" else out.to(device)
