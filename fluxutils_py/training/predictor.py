"""Run a trained model over series of any length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows
from fluxutils_py.data.sequence_windows import Window
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.model_windows import gap_value_of
from fluxutils_py.parallel import RankGroup
from fluxutils_py.steps.session import InferenceSession
from fluxutils_py.training.minibatch import to_tensor

MAX_ACTIVATION_BYTES = 1 << 23  # bytes for the outputs of a model's layers, per window
SMALL_INPUT = 128  # series times steps up to which the size of the model does not matter
# Least series per window, even with fewer steps: they keep vectors and threads busy.
MIN_SERIES = 64
MANY_SERIES_STEPS = 64  # steps per window of many series: the overhead of a call is then small


@dataclass(frozen=True, slots=True)
class Prediction:
    """Outputs for some series and steps: arrays ``y`` of shape (S, B, G), NaN at steps without
    input.
    """

    y: tuple[np.ndarray, ...]
    series: slice
    steps: slice


class Predictor:
    """Predict window by window.

    The size of windows is chosen for speed within bounded memory. Models with ``takes_windows =
    True`` get the same windows as in training, of ``seqsize`` steps.

    Parameters
    ----------
    model : nn.Module
        Not changed; a copy that shares its parameters predicts.
    windows : SequenceWindows
        Inputs. Its ``batchsize``, ``seqsize`` and ``overlap`` apply to models that take windows.
    state : list of Tensor, optional
        Initial state of all series, see :class:`InferenceSession`. None is the zero state.
    part : slice, optional
        Series to predict, possibly none; other ranks predict the rest. By default all.
    keep_state : bool
        Whether to keep the final states for :meth:`state`.
    precision : {"float32", "bfloat16"}
        See :class:`InferenceSession`.
    ends_only : bool
        Whether only the outputs at the last step of each series are needed. A model that can move
        on without outputs, by a method ``advance``, then computes no others.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: SequenceWindows,
        state: list[Tensor] | None = None,
        part: slice | None = None,
        keep_state: bool = False,
        precision: str = "float32",
        ends_only: bool = False,
    ) -> None:
        self.windows = windows
        windows.gap_value = gap_value_of(model)
        self.skips_steps = ends_only and hasattr(model, "advance")
        self.keep_state = keep_state
        self.n_series = windows.x[0].N
        self.n_steps = windows.x[0].T
        if part is None:
            part = slice(0, self.n_series)
        self.part = part
        first = next(model.parameters(), torch.empty(0))
        self.dtype = first.dtype
        self.device = first.device
        self.session = InferenceSession(model, self._sample_inputs, windows.overlap, precision)
        self.session.load(state, self.n_series)  # errors come before the first window
        self._before = state
        self._used = False
        self._batch, self._chunk = self._window_size(model)
        self._states: list[list[Tensor]] = []
        if keep_state and self.session.needs_context and any(x.kind == "int" for x in windows.x):
            # the state cannot tell how many inputs each series has seen: integers have no NaN
            lengths = windows.segments.length
            if lengths.min() < min(windows.overlap, lengths.max()):
                raise ShapeError(
                    "return_state with integer inputs and a model without recurrent state needs "
                    f"series of equal length, or of at least overlap={windows.overlap} steps; the "
                    f"shortest has {lengths.min()}"
                )

    def __iter__(self) -> Iterator[Prediction]:
        """Yield predictions, one group of series after the other, forward in time."""
        self._states = []
        stop = self.part.stop
        for begin in range(self.part.start, stop, self._batch):
            end = min(begin + self._batch, stop)
            yield from self._predict_group(slice(begin, end))

    def state(self, comm: RankGroup | None = None) -> list[Tensor]:
        """Return the state of each series after its last step in the last iteration, on all ranks
        of ``comm``.
        """
        ranks = RankGroup() if comm is None else comm
        if ranks.is_single and len(self._states) == 1:
            return self._states[0]  # one group: nothing to join
        answers = ranks.allgather((self._states, self.session.batch_dims))
        groups = [group for groups, _ in answers for group in groups]
        _, dims = answers[0]
        if self.session.needs_context:  # a group of short series has seen fewer inputs
            most = max(group[0].shape[0] for group in groups if group)
            groups = [_pad_history(group, most) for group in groups]
        columns = zip(*groups, strict=True)
        return [torch.cat(parts, dim) for parts, dim in zip(columns, dims, strict=True)]

    # -- one group of series -----------------------------------------------------------------------

    def _predict_group(self, series: slice) -> Iterator[Prediction]:
        if self._used or series != slice(0, self.n_series):
            self.session.load(self._before, self.n_series, series)
        self._used = True
        rows = self.windows.segments[series]
        ends: list[int] = []  # steps after which series end, where windows have to end too
        if self.keep_state or self.skips_steps:
            equal = rows.min_length == rows.max_length
            ends = [rows.max_length] if equal else np.unique(rows.length).tolist()
        kept: list[Tensor] = []
        start = 0
        stop = self._window_end(0, ends)
        while start < self.n_steps:
            window = self.windows.cut(rows, start, stop)
            following = self._window_end(stop, ends)
            if following > stop:
                self.windows.prefetch(rows, stop, following)
            first = self._first_needed(start, stop, ends)
            y = self._run(window, first - start)
            if self.keep_state and stop in ends:
                # forget what series without any step have been run over
                empty = np.flatnonzero(rows.length == 0)
                if len(empty):
                    self.session.reset(torch.from_numpy(empty).to(self.device))
                kept = self._merge_states(kept, rows.length < stop)
            if y:
                yield Prediction(y, series, slice(first, stop))
            start = stop
            stop = following
        self._states.append(kept)

    def _first_needed(self, start: int, stop: int, ends: list[int]) -> int:
        """Return the first step of a window whose outputs are needed, or ``stop``."""
        if not self.skips_steps:
            return start
        return stop - 1 if stop in ends else stop

    def _run(self, window: Window, n_skipped: int) -> tuple[np.ndarray, ...]:
        """Return the outputs of a window after its first steps; none if all are skipped."""
        inputs = tuple(to_tensor(v, self.dtype, self.device) for v in window.x)
        with torch.no_grad():
            self.session.advance(tuple(x[:n_skipped] for x in inputs))
            if n_skipped == len(inputs[0]):
                return ()
            outs = self.session.run(tuple(x[n_skipped:] for x in inputs))
        gap = None if window.missing_steps is None else window.missing_steps[n_skipped:]
        arrays = tuple(out.cpu().numpy() for out in outs)
        if gap is None:
            return arrays
        return tuple(np.where(gap[:, :, None], np.nan, y).astype(y.dtype) for y in arrays)

    def _window_end(self, start: int, ends: list[int]) -> int:
        """Return the end of the window that begins at ``start``: no later than the next of
        ``ends``.
        """
        stop = min(start + self._chunk, self.n_steps)
        return min([stop, *(end for end in ends if end > start)])

    def _merge_states(
        self,
        kept: list[Tensor],
        over: np.ndarray,
    ) -> list[Tensor]:
        """Return the current states, but the kept states for series that ended before."""
        now = self.session.state
        if not kept:
            return now
        (indices,) = np.nonzero(over)
        which = torch.from_numpy(indices).to(self.device)
        if self.session.needs_context:
            kept = _pad_history(kept, now[0].shape[0])
        states = zip(now, kept, self.session.batch_dims, strict=True)
        return [new.index_copy(d, which, old.index_select(d, which)) for new, old, d in states]

    # -- small matters -----------------------------------------------------------------------------

    def _sample_inputs(self) -> list[Tensor]:
        # not first_steps: series without any step predict too, and have a window to try
        window = self.windows.cut(self.windows.segments[:4], 0, min(3, self.n_steps))
        return [to_tensor(v, self.dtype, self.device) for v in window.x]

    def _window_size(self, model: nn.Module) -> tuple[int, int]:
        """Return the numbers of series and steps of a window."""
        if self.session.mode == "windows":
            return self.windows.batchsize, self.windows.seqsize
        if self.n_series * self.n_steps <= SMALL_INPUT:
            return self.n_series, self.n_steps
        n_features = sum(x.F for x in self.windows.x)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        n_units = sum(p.shape[0] for p in matrices)
        bytes_per_cell = (n_features + n_units) * self.dtype.itemsize
        cells = max(1, MAX_ACTIVATION_BYTES // bytes_per_cell)  # series times steps
        enough = cells // min(self.n_steps, MANY_SERIES_STEPS)
        n_series = min(self.n_series, max(min(MIN_SERIES, cells), enough))
        return n_series, max(1, cells // n_series)


def _pad_history(
    inputs: list[Tensor],
    n: int,
) -> list[Tensor]:
    """Return the last ``n`` inputs (n, B, F) of some series, NaN where they have fewer."""
    padded = []
    for x in inputs:
        if len(x) < n:
            missing = x.new_full((n - len(x), *x.shape[1:]), torch.nan)
            x = torch.cat([missing, x])
        padded.append(x)
    return padded
