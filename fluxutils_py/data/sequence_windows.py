"""Truncated-BPTT minibatches, cut lazily from (F, N, T) arrays."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.segments import Segments, SeriesShards
from fluxutils_py.data.series import SeriesArray
from fluxutils_py.data.weights import SampleWeight, live_steps
from fluxutils_py.errors import DataError


@dataclass(frozen=True)
class WindowIndex:
    """Position of a window in the data.

    Attributes
    ----------
    segments : Segments
    start, stop : int
        Steps of the rows, the n_overlap included.
    n_overlap : int
        Earlier steps at the beginning, through which gradients flow, but that carry no loss
        (``overlap``).
    first, last : bool
        Whether the window starts from the zero state, and whether it is the last of its group.
    has_loss : bool
        False for ``burn_in`` windows, which only move the state.
    next_start : int or None
        Where the next window of the group starts, if that is before the end of this one.
    """

    segments: Segments
    start: int
    stop: int
    n_overlap: int
    first: bool
    last: bool
    has_loss: bool
    next_start: int | None


@dataclass(frozen=True)
class Window:
    """One minibatch: ``S`` steps of ``B`` rows.

    Attributes
    ----------
    x, y : tuple of ndarray, shapes (S, B, F) and (S - n_overlap, B, G)
        Views of the data or fresh arrays, in any memory order; not to be written to. ``y`` is empty
        without targets.
    w : ndarray of shape (S - n_overlap, B, 1) or (S - n_overlap, B, G), or None
        Weights of the steps, 0 where a step does not count; None if all count equally. Where single
        outputs of a step that counts are missing, one column for each output, of several targets
        one after the other.
    missing_steps : ndarray of bool, shape (S, B), or None
        Without targets: the steps that have no input, whose prediction means nothing.
    n_live : float
        Steps that count; a step of which some outputs are missing counts for the share that is
        there.
    index : WindowIndex or None
        Its position; None of other pieces.
    """

    x: tuple[np.ndarray, ...]
    y: tuple[np.ndarray, ...]
    w: np.ndarray | None
    missing_steps: np.ndarray | None
    n_live: float
    index: WindowIndex | None = None


class SequenceWindows:
    """Cut ``(F, N, T)`` arrays into truncated-BPTT minibatches, lazily.

    Rows are taken in groups of ``batchsize``; each group is read forward in time, ``seqsize`` steps
    at a time, before the next group begins. A model may therefore carry its hidden state from one
    window to the next, and must forget it where ``first`` is true. Only the window being yielded is
    read: the arrays may be memory maps or open HDF5 datasets larger than memory. Nothing is
    dropped: the last group and the last window may be smaller.

    Parameters
    ----------
    x, y : sequence of SeriesArray
        Inputs and targets, aligned in series and time; ``y`` may be empty.
    weight : SampleWeight, optional
    batchsize : int
        Rows per window. The last group may be smaller.
    seqsize : int
        Time steps per window. The last window of a group may be shorter.
    overlap : int
        Earlier steps read again at the beginning of each window, for gradients to reach further
        back.
    burn_in : int
        Leading steps of each row, cut into separate windows that carry no loss.
    segments : Segments, optional
        Rows to cut windows from; by default each series from its start to its end.
    equal_lengths : bool
        Put only rows of equal length into a group, so that no step needs masking.
    mask_per_output : bool
        Whether to mask single missing outputs of a step. Otherwise such a step does not count.
    one_target : bool
        Whether each series has one target, or is asked for one, at its last step, so that its
        earlier inputs count too.
    shards : SeriesShards, optional
        Of series that are divided over ranks: ``segments`` are then rows of all ranks, the arrays
        hold this rank's series only, and :meth:`of_rank` picks the rows that can be read.

    Yields
    ------
    Window

    Raises
    ------
    DataError
        On reading: an infinite value, or a NaN input at a step whose target counts. NaN targets,
        and steps past the end of a row, do not count; NaN in their inputs becomes zero. Without
        targets, and with ``one_target``, inputs of all steps count, except where all features are
        NaN; ``one_target`` makes no such exception at the last step.

    Notes
    -----
    Order as in ``datagen`` of FluxUtils.jl, where time is the inner loop too. On truncated
    backpropagation through time: Williams & Peng (1990), Neural Computation 2(4), 490-501; ``k1 =
    seqsize``, ``k2 = seqsize + overlap``.

    Examples
    --------
    >>> from fluxutils_py.inputs import as_series
    >>> x = as_series(np.zeros((4, 3, 5), dtype="float32"), "x")
    >>> for w in SequenceWindows(x, batchsize=2, seqsize=3):
    ...     at = w.index
    ...     print(w.x[0].shape, at.segments.series, at.start, at.first, at.last)
    (3, 2, 4) [0 1] 0 True False
    (2, 2, 4) [0 1] 3 False True
    (3, 1, 4) [2] 0 True False
    (2, 1, 4) [2] 3 False True
    """

    def __init__(
        self,
        x: Sequence[SeriesArray],
        y: Sequence[SeriesArray] = (),
        weight: SampleWeight | None = None,
        *,
        batchsize: int,
        seqsize: int,
        overlap: int = 0,
        burn_in: int = 0,
        segments: Segments | None = None,
        equal_lengths: bool = False,
        mask_per_output: bool = False,
        one_target: bool = False,
        shards: SeriesShards | None = None,
    ) -> None:
        self.x = tuple(x)
        self.y = tuple(y)
        self.weight = weight
        self.batchsize = batchsize
        self.seqsize = seqsize
        self.overlap = overlap
        self.burn_in = burn_in
        self.segments = Segments.from_lengths(x[0].N, x[0].T) if segments is None else segments
        self.equal_lengths = equal_lengths
        self.one_target = one_target
        self.shards = shards
        # whether the overlap may reach into the burn-in, for models without a state
        self.overlap_into_burn_in = False
        # what models get for a step without input; see gap_value_of
        self.gap_value: float | None = 0.0

        self._output_sizes = [s.F for s in self.y]
        stops = accumulate(self._output_sizes)
        self._output_columns = [
            slice(stop - size, stop) for size, stop in zip(self._output_sizes, stops, strict=True)
        ]
        self.mask_per_output = mask_per_output and sum(self._output_sizes) > 1
        self._checked: set[int] = set()  # ids of arrays known to be finite everywhere
        self._is_complete = False  # whether no array can lack a value or a label
        self._order: np.ndarray | None = None

    def changed(self, **settings: object) -> SequenceWindows:
        """Return windows of the same data with other values of some attributes."""
        other = copy.copy(self)
        vars(other).update(settings)
        return other

    def check(self) -> None:
        """Look for NaN and infinity now in arrays that are in memory, not window by window.

        Raises
        ------
        DataError
            As windows would, before the first one.
        """
        for s in (*self.x, *self.y):
            if s.kind == "int" or (s.in_memory and all(map(_all_finite, s.stored_arrays))):
                self._checked.add(id(s))
        self._is_complete = not any(map(self._may_lack, (*self.x, *self.y)))
        arrays = self.x if self.one_target else (*self.x, *self.y)
        if all(s.in_memory for s in arrays) and any(id(s) not in self._checked for s in arrays):
            # some value is not finite: cutting raises unless it is where it may be
            # one row per series, from the first to the last of its steps that is in any row
            _, n_series, n_steps = self.x[0].shape
            rows = self.of_rank(self.segments)
            starts = np.full(n_series, n_steps)
            stops = np.zeros(n_series, int)
            np.minimum.at(starts, rows.series, rows.start)
            np.maximum.at(stops, rows.series, rows.stop)
            starts = np.minimum(starts, stops)  # a series without rows has no steps
            spans = Segments.from_lengths(n_series, n_steps, stops - starts, starts)
            for series, steps in block_slices(self.x[0].N, spans.max_length, self.x[0].F):
                self.cut(spans[series], steps.start, steps.stop)

    def _may_lack(self, s: SeriesArray) -> bool:
        return s.missing_label is not None or self._may_hold_nan(s)

    @property
    def has_missing_targets(self) -> bool:
        """Whether :meth:`check` found steps without a target; False if it could not tell, as for
        memory maps.
        """
        return any(s.in_memory and id(s) not in self._checked for s in self.y)

    def shuffle(self, rng: np.random.Generator | None) -> None:
        """Draw a new order of the rows for the next pass; None is the given order. Time always runs
        forward.
        """
        self._order = None if rng is None else rng.permutation(len(self.segments))
        if self._order is not None and self.shards is not None:
            self._order = self.shards.permute_within_ranks(self._order, self.segments)

    def of_rank(self, rows: Segments) -> Segments:
        """Return the rows among these that this rank can read: all, unless series are divided over
        ranks.
        """
        return rows if self.shards is None else self.shards.of_rank(rows)

    def __len__(self) -> int:
        return sum(len(self._spans(group.max_length)) for group in self._groups())

    def __iter__(self) -> Iterator[Window]:
        return map(self.read, self.indices())

    @property
    def blocking(self) -> bool:
        """Whether reading a window may wait for a disk, even if it was prefetched."""
        return not all(s.nonblocking for s in (*self.x, *self.y))

    def prefetch(self, rows: Segments, start: int, stop: int) -> None:
        """Prefetch steps that will be read soon: maps are read ahead."""
        for s in (*self.x, *self.y):
            s.prefetch(rows, start, stop)

    def indices(self) -> Iterator[WindowIndex]:
        """Yield the positions of the windows of one pass, in order, for :meth:`read`. It reads no
        data.
        """
        for group in self._groups():
            spans = self._spans(group.max_length)
            for i, (start, stop, has_loss) in enumerate(spans):
                following, _, goes_on = spans[i + 1] if i + 1 < len(spans) else (stop, stop, False)
                # the steps before a window with loss that are read again
                earliest = 0 if self.overlap_into_burn_in else self.burn_in
                n_overlap = min(self.overlap, start - earliest) if has_loss else 0
                next_start = None
                if self.overlap and has_loss and goes_on:
                    next_start = max(self.burn_in, following - self.overlap)
                yield WindowIndex(
                    segments=group,
                    start=start - n_overlap,
                    stop=stop,
                    n_overlap=n_overlap,
                    first=i == 0,
                    last=i + 1 == len(spans),
                    has_loss=has_loss,
                    next_start=next_start,
                )

    def indices_with_loss(self) -> Iterator[WindowIndex]:
        """Yield the :meth:`indices` that carry loss, as far as positions tell: nothing is read.

        With one target per series, these are the windows in which a series ends.
        """
        for index in self.indices():
            ends = index.segments.length
            first = index.start + index.n_overlap
            if index.has_loss and (
                not self.one_target or ((ends > first) & (ends <= index.stop)).any()
            ):
                yield index

    def read(self, index: WindowIndex) -> Window:
        """Read the window at a position; any thread may call this."""
        window = self.cut(index.segments, index.start, index.stop, index.n_overlap, index)
        return window if index.has_loss else replace(window, n_live=0)

    def weights_of_targets(self, rows: Segments) -> np.ndarray:
        """Return the weight of the one target of each row, at its last step: (B,), 0 where it has
        no loss.
        """
        ends = self.cut(rows.last_steps(), 0, 1)
        weights = np.ones(len(rows)) if ends.w is None else ends.w[0].min(1).astype(float)
        return np.where(rows.length > self.burn_in, weights, 0)

    # -- which windows there are -------------------------------------------------------------------

    def _groups(self) -> Iterator[Segments]:
        rows = self.segments if self._order is None else self.segments[self._order]
        subsets = [rows]
        if self.equal_lengths and rows.min_length < rows.max_length:
            subsets = [rows[rows.length == length] for length in np.unique(rows.length)[::-1]]
        for subset in subsets:
            for i in range(0, len(subset), self.batchsize):
                yield subset[i : i + self.batchsize]

    def _spans(self, length: int) -> list[tuple[int, int, bool]]:
        """Return the start and stop of the new steps of each window of a group whose longest row
        has this length, and whether they have a loss.
        """
        burn = min(self.burn_in, length)
        return [
            (start, min(start + self.seqsize, end), has_loss)
            for begin, end, has_loss in ((0, burn, False), (burn, length, True))
            for start in range(begin, end, self.seqsize)
        ]

    # -- what is in a window -----------------------------------------------------------------------

    def cut(
        self,
        rows: Segments,
        start: int,
        stop: int,
        n_overlap: int = 0,
        index: WindowIndex | None = None,
    ) -> Window:
        """Read steps ``start`` to ``stop`` of some rows, as a window with this index."""
        x = [s.read(rows, start, stop) for s in self.x]
        y = [s.read(rows, start, stop) for s in self.y]
        # for small windows, to look for what is missing takes as long as to read them
        if self._is_complete and self.weight is None and stop <= rows.min_length:
            targets = tuple(v[n_overlap:] for v in y)
            n_live = (stop - start - n_overlap) * len(rows)
            return Window(tuple(x), targets, None, None, n_live, index)
        return self._masked(x, y, rows, start, stop, n_overlap, index)

    def _masked(
        self,
        x: list[np.ndarray],
        y: list[np.ndarray],
        rows: Segments,
        start: int,
        stop: int,
        n_overlap: int,
        index: WindowIndex | None,
    ) -> Window:
        """Return a window in which steps may not count."""
        missing = self._missing_values(y)  # (S, B, F) for each target, None if none is

        # Masks of steps are (S, B); None stands for all steps, which is common and costs nothing.
        exists = rows.step_mask(start, stop)
        weighted = exists
        w = None
        if self.weight is not None:
            weights = self.weight.read(rows, start, stop)
            weighted = _both_masks(exists, weights > 0)
            w = weights[n_overlap:, :, None]

        outputs = self._present_outputs(y, missing)
        live = _both_masks(weighted, _steps_with_target(missing, outputs))
        missing_steps = None
        if not self.y:
            live = self._with_input(weighted, x)
            missing_steps = None if live is None else ~live
        required = live  # steps whose inputs must be numbers
        if self.one_target:
            required = self._required_steps(live, x, weighted, rows, start, stop)

        mask = _loss_mask(outputs, live)
        input_mask = _with_axis(required)
        x = [
            self._clean_values(s, v, rows, start, input_mask, exists, self.gap_value)
            for s, v in zip(self.x, x, strict=True)
        ]
        masks = self._masks_of_targets(mask)
        y = [
            # a label without weight may be none that the loss knows
            self._clean_values(s, v, rows, start, m, weighted if s.kind == "int" else exists)
            for s, v, m in zip(self.y, y, masks, strict=True)
        ]

        n_live: float = (stop - start - n_overlap) * len(rows)
        if mask is not None:
            mask = mask[n_overlap:]
            n_live = live_steps(mask, self._output_sizes if mask.shape[2] > 1 else [1])
            w = mask if w is None else np.where(mask, w, 0)
        targets = tuple(v[n_overlap:] for v in y)
        return Window(tuple(x), targets, w, missing_steps, n_live, index)

    def _may_hold_nan(self, s: SeriesArray) -> bool:
        return s.kind == "float" and id(s) not in self._checked

    def _missing_values(self, y: list[np.ndarray]) -> list[np.ndarray | None]:
        return [
            s.missing_mask(v) if s.kind == "int" or self._may_hold_nan(s) else None
            for s, v in zip(self.y, y, strict=True)
        ]

    def _present_outputs(
        self, y: list[np.ndarray], missing: list[np.ndarray | None]
    ) -> np.ndarray | None:
        """Return which outputs of all targets are there, (S, B, outputs); None if none is missing,
        or if they are not masked one by one.
        """
        if not self.mask_per_output or all(m is None for m in missing):
            return None
        present = [
            np.ones(v.shape, bool) if m is None else ~m for v, m in zip(y, missing, strict=True)
        ]
        return np.concatenate(present, -1)

    def _with_input(self, steps: np.ndarray | None, x: list[np.ndarray]) -> np.ndarray | None:
        """Return those of some steps that have an input: one that is NaN in all features is a gap,
        one that is NaN in some an error.
        """
        for s, v in zip(self.x, x, strict=True):
            if self._may_hold_nan(s):
                steps = _both_masks(steps, ~np.isnan(v).all(-1))
        return steps

    def _required_steps(
        self,
        live: np.ndarray | None,
        x: list[np.ndarray],
        weighted: np.ndarray | None,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray | None:
        """Return the live steps and those that the answer of a series needs besides."""
        if live is None:
            return None
        if not self.y:  # there is no answer without an input of the last step
            return live | (np.arange(start, stop)[:, None] == rows.length - 1)
        # the steps before the one with the target feed it
        others = self._with_input(weighted, x)
        return None if others is None else live | others

    def _masks_of_targets(self, mask: np.ndarray | None) -> list[np.ndarray | None]:
        """Return the part of a mask of the loss that belongs to each target."""
        if mask is None or mask.shape[2] == 1:
            return [mask] * len(self.y)
        return [mask[:, :, columns] for columns in self._output_columns]

    def _clean_values(
        self,
        s: SeriesArray,
        v: np.ndarray,
        rows: Segments,
        start: int,
        live: np.ndarray | None,
        exists: np.ndarray | None,
        filling: float | None = 0.0,
    ) -> np.ndarray:
        """Return ``v`` with zeros, or another filling, where a dead step or value holds no number;
        None keeps NaN, in live steps too.

        ``live`` is (S, B, 1), or (S, B, F) where single values of a step are masked.

        Raises
        ------
        DataError
            If a live value is not finite.
        """
        if exists is not None:
            v = np.where(exists[:, :, None], v, v.dtype.type(0))
        if not self._may_hold_nan(s) or v.dtype.kind == "b":
            return v
        nonfinite = np.isinf(v) if filling is None else ~np.isfinite(v)
        if not nonfinite.any():
            return v
        bad = nonfinite if live is None else nonfinite & live
        if bad.any():
            raise _error_of(s, v, rows, start, bad)
        if live is None or live.shape[2] == 1:
            nonfinite = nonfinite.any(-1, keepdims=True)  # the whole step, not single features
        return np.where(nonfinite, v.dtype.type(np.nan if filling is None else filling), v)


def _steps_with_target(
    missing: list[np.ndarray | None], outputs: np.ndarray | None
) -> np.ndarray | None:
    """Return the steps with any output where those are masked one by one, else with all outputs."""
    if outputs is not None:
        return np.asarray(outputs.any(-1))
    steps = None
    for mask in missing:
        if mask is not None:
            steps = _both_masks(steps, np.asarray(~mask.any(-1)))
    return steps


def _loss_mask(outputs: np.ndarray | None, live: np.ndarray | None) -> np.ndarray | None:
    """Return a mask of single outputs, (S, B, outputs), if a live step lacks some, else of whole
    steps, (S, B, 1).
    """
    if outputs is not None:
        if live is not None:
            outputs = outputs & live[:, :, None]
        if (outputs.any(-1) != outputs.all(-1)).any():
            return outputs
    return _with_axis(live)


def _with_axis(steps: np.ndarray | None) -> np.ndarray | None:
    return None if steps is None else steps[:, :, None]


def _both_masks(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return the steps in both masks, None if those are all."""
    if b is None or b.all():
        return a
    return b if a is None else a & b


def _all_finite(a: np.ndarray) -> bool:
    if a.dtype.kind == "b":
        return True
    # a sum reads the array once, without a mask of its size; it may overflow though all is finite
    with np.errstate(over="ignore", invalid="ignore"):
        total = a.sum(dtype=np.float32 if a.dtype == np.float16 else None)
    return bool(np.isfinite(total)) or bool(np.isfinite(a).all())


def _error_of(
    s: SeriesArray, v: np.ndarray, rows: Segments, start: int, bad: np.ndarray
) -> DataError:
    """Return the error for the first bad value of a window (S, B, F)."""
    t, b, f = (int(i) for i in np.argwhere(bad)[0])
    what = f"{v[t, b, f]} at feature {f if s.feature_names is None else repr(s.feature_names[f])},"
    if s.F > 1 and np.isnan(v[t, b]).all():
        what = "nan in all features at"
    return DataError(
        f"{s.name} is {what} series {rows.series[b]}, step {rows.start[b] + start + t}; fill it "
        "in, as SequenceImputer does, or leave the step out: NaN in all features means no input, "
        "NaN in the target or a weight of 0 no loss, and series of unequal lengths are a list of "
        "(F, T_i), or have lengths="
    )
