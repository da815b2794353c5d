"""Running a trained model over series of any length, such that it does not matter how they were cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data import Rows, SequenceWindows
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import (
    batch_dims,
    loadstates,
    prediction_copy,
    reset,
    restore,
    run_window,
    snapshot,
    states,
    takes_windows,
)
from fluxutils_py.parallel import Sync
from fluxutils_py.training.batches import to_tensor

FIRST = 16  # steps of the first block: what one call of a small LSTM costs beyond its steps, it costs for ten of them
FULL, AT_MOST = 1 << 14, 256  # rows times steps of a block, and steps: what keeps a step's overhead small


class StreamState(list[Tensor]):
    """Where a prediction stopped, for the next one to go on from.

    A flat list of the recurrent states of all series, as :func:`fluxutils_py.nn.states` gives it, at the last block
    boundary, with the inputs that came after it. A plain list of states, taken between two steps, serves as well.

    Attributes
    ----------
    n_steps : int
        Steps predicted so far.
    pending : tuple of Tensor, shapes (k, N, F)
        Inputs since the boundary. The model sees them again, in the same block as the steps to come.
    """

    def __init__(self, tensors: Sequence[Tensor], n_steps: int = 0, pending: tuple[Tensor, ...] = ()) -> None:
        super().__init__(tensors)
        self.n_steps, self.pending = n_steps, pending


@dataclass(frozen=True, slots=True)
class Prediction:
    """Outputs for some series and steps: ``y`` of shapes (S, B, G), NaN at steps without input."""

    y: tuple[np.ndarray, ...]
    series: slice
    steps: slice


class Predictor:
    """Predict block by block.

    A product of two matrices may round differently when there are more rows, so a step's output would depend a little
    on how many steps are computed with it. Here it does not: the blocks in which a series is computed are the same
    however the calls cut it. They grow from 16 steps to 64, or 256 for few series; one that the data do not fill is
    filled up with zeros, and computed anew when the rest has come. The results for chunks of time are therefore
    equal to the last bit. Models that cannot take whole windows are run step by step, where there is nothing to prove;
    one that says itself that it takes windows (``takes_windows = True``) sees windows of ``seqsize`` steps.

    Parameters
    ----------
    model : nn.Module
        Left as it is: a copy that shares its parameters does the work.
    windows : SequenceWindows
        The inputs; its ``batchsize`` and ``seqsize`` are used.
    state : StreamState or list of Tensor, optional
        Of all series, from an earlier prediction or :func:`fluxutils_py.nn.states`. None is the zero state.
    part : slice, optional
        The series to predict, perhaps none; the others are left to other ranks. By default all.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: SequenceWindows,
        state: Sequence[Tensor] | None = None,
        part: slice | None = None,
    ) -> None:
        self.windows = windows
        self.n_series, self.n_steps = windows.x[0].N, windows.x[0].T
        self.part = slice(0, self.n_series) if part is None else part
        first = next(model.parameters(), torch.empty(0))
        self.dtype, self.device = first.dtype, first.device
        sample = [self._tensor(v) for v in windows.cut(windows.rows[:4], 0, min(3, self.n_steps))[0]]
        windowed = takes_windows(model, sample)
        self.model = prediction_copy(model)
        declared = isinstance(getattr(model, "takes_windows", None), bool)
        self._blocked = windowed and not declared
        self._chunk = windows.seqsize if windowed else 1024
        self._before = state if isinstance(state, StreamState) else None if state is None else StreamState(state)
        self._check_state()
        self._parts: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []

    def __iter__(self) -> Iterator[Prediction]:
        """The predictions, group by group of series, forward in time."""
        self._parts = []
        for begin in range(self.part.start, self.part.stop, self.windows.batchsize):
            yield from self._group(slice(begin, min(begin + self.windows.batchsize, self.part.stop)))

    def state(self, sync: Sync | None = None) -> StreamState:
        """Where the last iteration stopped, on all ranks of ``sync``."""
        found = (Sync() if sync is None else sync).share((self._parts, batch_dims(self.model)))
        tensors, pending = zip(*(part for parts, _ in found for part in parts), strict=True)
        dims = found[0][1]
        joined = [torch.cat(parts, d) for parts, d in zip(zip(*tensors, strict=True), dims, strict=True)]
        seen = self.n_steps + (0 if self._before is None else self._before.n_steps)
        return StreamState(joined, seen, tuple(torch.cat(parts, 1) for parts in zip(*pending, strict=True)))

    # -- one group of series -------------------------------------------------------------------------

    def _group(self, series: slice) -> Iterator[Prediction]:
        self._start(series)
        rows = self.windows.rows[series]
        seen, held = 0, tuple[Tensor, ...]()
        if self._before is not None:
            seen, held = self._before.n_steps, tuple(p[:, series].to(self.device) for p in self._before.pending)
        at = 0  # steps of this call that are done
        while at < self.n_steps:
            k = held[0].shape[0] if held else 0
            rest = self.n_steps - at
            sizes = blocks(seen + at - k, k + rest, len(rows)) if self._blocked else [min(self._chunk, rest)]
            with torch.no_grad():
                prediction, held = self._run(series, rows, at, sizes, held)
            yield prediction
            at = prediction.steps.stop
        self._parts.append((states(self.model), held or self._nothing_held(series)))

    def _run(
        self, series: slice, rows: Rows, at: int, sizes: list[int], held: tuple[Tensor, ...]
    ) -> tuple[Prediction, tuple[Tensor, ...]]:
        """Predict the next steps in blocks of these sizes; ``held`` are the steps before that are in the first one."""
        k = held[0].shape[0] if held else 0
        stop = min(at + sum(sizes) - k, self.n_steps)
        missing = sum(sizes) - k - (stop - at)  # of the last block
        self.windows.announce(rows, at, stop)
        values, _, _, gap, _ = self.windows.cut(rows, at, stop)
        xs = tuple(self._tensor(v) for v in values)
        if held:
            xs = tuple(torch.cat([h, x]) for h, x in zip(held, xs, strict=True))
        there = [*sizes[:-1], sizes[-1] - missing]
        *full, last = zip(*(x.split(there) for x in xs), strict=True)
        outs = [*(self._block(block) for block in full), self._block(last, missing)]
        y = tuple(self._output(parts, k, gap) for parts in zip(*outs, strict=True))
        return Prediction(y, series, slice(at, stop)), last if missing else ()

    def _block(self, xs: tuple[Tensor, ...], missing: int = 0) -> tuple[Tensor, ...]:
        """The outputs for one block, computed with so many steps of zeros behind it, which leave no trace."""
        before = snapshot(self.model) if missing else []
        n = xs[0].shape[0]
        if missing:
            xs = tuple(torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in xs)
        out = run_window(self.model, xs[0] if len(xs) == 1 else xs)
        if missing:
            restore(self.model, before)
        outs = (out,) if isinstance(out, Tensor) else out
        for o in outs:
            if o.dim() != 3:
                raise ShapeError(
                    f"the model gives outputs of shape {tuple(o.shape)} for a window; expected (S, B, G): "
                    "end it with an output axis, as nn.Linear(..., 1) has"
                )
        return tuple(o[:n] for o in outs) if missing else outs

    def _output(self, parts: tuple[Tensor, ...], skip: int, gap: np.ndarray | None) -> np.ndarray:
        """The outputs of some blocks behind the first ``skip`` steps, as one array."""
        y = (parts[0] if len(parts) == 1 else torch.cat(parts))[skip:].cpu().numpy()
        if gap is not None:
            y = np.where(gap[:, :, None], np.nan, y).astype(y.dtype)
        return y

    # -- small matters -------------------------------------------------------------------------------

    def _start(self, series: slice) -> None:
        if self._before is None:
            reset(self.model)
            return
        parts = [
            t.narrow(d, series.start, series.stop - series.start) if t.shape[d] else t
            for t, d in zip(self._before, self._dims, strict=True)
        ]
        loadstates(self.model, parts)

    def _check_state(self) -> None:
        if self._before is None:
            return
        loadstates(self.model, self._before)  # counts and shapes
        self._dims = batch_dims(self.model)
        for t, d in zip(self._before, self._dims, strict=True):
            if t.shape[d] not in (0, self.n_series):
                raise ShapeError(f"state is of {t.shape[d]} series, the input has {self.n_series}")
        for p in self._before.pending:
            if p.shape[1] != self.n_series:
                raise ShapeError(f"state is of {p.shape[1]} series, the input has {self.n_series}")
        held, given = [p.shape[2] for p in self._before.pending], [x.F for x in self.windows.x]
        if held and held != given:
            raise ShapeError(f"state holds steps of inputs of {held} features, the inputs have {given}")

    def _nothing_held(self, series: slice) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(0, series.stop - series.start, x.F, dtype=torch.int64 if x.kind == "int" else self.dtype)
            for x in self.windows.x
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return to_tensor(values, self.dtype, self.device)


def blocks(start: int, n_steps: int, n_series: int) -> list[int]:
    """Steps of the blocks from the one that begins at a step: as many as are needed, or as one of the largest holds.

    >>> blocks(0, 1000, 100), blocks(0, 20, 100), blocks(128, 1000, 100), blocks(256, 1000, 100)
    ([16, 16, 16, 16, 32, 32], [16, 16], [64, 64], [128])
    """
    sizes = [block_size(start, n_series)]
    while (done := sum(sizes)) < n_steps and done + (size := block_size(start + done, n_series)) <= largest(n_series):
        sizes.append(size)
    return sizes


def block_size(start: int, n_series: int) -> int:
    """Steps of the block that begins at a step: 16, 16, 16, 16, 32, 32, 64, 64, ... up to a most.

    Of a series of 32 steps or more, at most a third is computed in vain.

    >>> [block_size(start, 1) for start in (0, 16, 32, 48, 64, 96, 128, 512, 768, 1024)]
    [16, 16, 16, 16, 32, 32, 64, 256, 256, 256]
    >>> block_size(4096, 100), block_size(4096, 100_000)
    (128, 64)
    """
    even = 1 << start.bit_length() >> 1  # the largest power of two that is not above
    return min(largest(n_series), max(FIRST, even // 2))


def largest(n_series: int) -> int:
    """Steps of the largest blocks."""
    return max(64, min(AT_MOST, 1 << max(1, FULL // n_series).bit_length() - 1))
