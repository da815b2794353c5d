"""Weights of series and of single steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import h5py
import numpy as np

from fluxutils_py.data.arrays import (
    check_named_axes,
    plain_block,
    read_block,
    reject_masked,
    to_numpy,
    with_shape,
)
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.lazy import Function, LazyArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.series import SeriesArray
from fluxutils_py.errors import DataError, ShapeError


class SampleWeight:
    """Weights of the steps of N series, of mean 1 over the steps that count.

    Parameters
    ----------
    weight : array of shape (N,), (N, T) or (1, N, T)
        Not negative, not all zero. Steps of weight 0 do not count. Unchanged: scaling happens on
        reading.
    n_series, n_steps : int

    Raises
    ------
    ShapeError, DataError
        If the shape does not fit, or a weight is negative, NaN or infinite.

    Notes
    -----
    Source: ``w`` of FluxUtils.jl's ``fit!`` (which scales the caller's array in place).
    """

    def __init__(
        self,
        weight: Any,
        n_series: int,
        n_steps: int,
    ) -> None:
        reject_masked(weight, "sample_weight", fill="0")
        w = with_shape(to_numpy(weight))
        shape = tuple(w.shape)
        # read at once if there is one per series; those of steps may be as large as the data
        self._per_series: np.ndarray | None = None
        whole = (1, n_series, n_steps)
        if shape == (n_series,):
            self._per_series = plain_block(w[:], "sample_weight")
            w = np.broadcast_to(self._per_series[None, :, None], whole)
        elif shape == whole[1:]:
            if not isinstance(w, h5py.Dataset):  # the attribute is for arrays of three axes
                check_named_axes(w, "sample_weight", "series")
            if isinstance(w, np.ndarray):
                w = w[None]
            else:  # not in memory
                dtype = getattr(w, "dtype", float)
                w = LazyArray(w, reader=_read_one_feature, shape=whole, dtype=dtype)
        elif shape != whole:
            raise ShapeError(
                f"sample_weight has shape {shape}; expected ({n_series},), ({n_series}, {n_steps}) "
                f"or (1, {n_series}, {n_steps}) for {n_series} series of {n_steps} time steps"
            )
        self._array = SeriesArray(w, "sample_weight")
        self.n_series = n_series
        self.n_steps = n_steps
        self.scale = 1.0

    def normalized(
        self,
        rows: Segments,
        ys: Sequence[SeriesArray],
        *,
        mask_per_output: bool = False,
        add_up: Function = lambda sums: sums,
    ) -> Self:
        """Return the weights, not copied, scaled to mean 1 over the steps that count: those of
        ``rows`` with a weight and a target.

        Parameters
        ----------
        rows : Segments
            Which steps of which series count.
        ys : sequence of SeriesArray
        mask_per_output : bool
            A step of which some targets are missing counts for the share that is there. Otherwise
            not at all.
        add_up : callable, optional
            Adds the sums over the series of other ranks to the sums over these.

        Raises
        ------
        DataError
            If no step is left.
        """
        sums = np.zeros(2)
        sizes = [y.F for y in ys]
        for block in loss_blocks(ys, rows, self, mask_per_output):
            assert block.weight is not None
            if block.steps is not None:
                sums += block.weight[block.steps].sum(), block.steps.sum()
            else:
                present = np.moveaxis(np.concatenate(block.has_loss), 0, -1)
                share = output_fractions(present, sizes)
                sums += (block.weight * share).sum(), share.sum()
        # every rank takes part, also one whose rows have no weight
        total, count = add_up(sums)
        if count == 0:
            raise DataError(
                "sample_weight leaves nothing to learn from: every step has weight 0 or no target"
            )
        scaled = copy.copy(self)
        scaled.scale = float(count / total)
        return scaled

    def drop_zero_weight(self, rows: Segments) -> Segments:
        """Return the rows of series whose weight is not 0, if series are weighted; else all."""
        if self._per_series is None:
            return rows
        # weights of steps stay: the state must run through steps of weight 0
        return rows[self._per_series[rows.series] > 0]

    def block(self, series: slice, steps: slice) -> np.ndarray:
        """Return weights as they were given, shape (B, S)."""
        return self._array.stored_block(series, steps)[0]

    def read(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray:
        """Return the scaled weights of the given rows, shape (S, B); a fresh array. Steps past a
        row's end are unspecified.
        """
        return self._array.read(rows, start, stop)[:, :, 0] * self.scale


def _read_one_feature(weight: Any, series: Index, steps: range) -> np.ndarray:
    """Read weights (N, T) that are not in memory as of one feature."""
    return read_block(weight, series, steps)[None]


class LossBlock(NamedTuple):
    """Targets of some series and steps, and which of their values have a loss.

    Attributes
    ----------
    values, has_loss : list of ndarray, shapes (G, B, S)
        For each array of targets; ``has_loss`` is of bool, not to be written to.
    weight : ndarray of shape (B, S), float, or None
        As they were given.
    steps : ndarray of bool, shape (B, S), or None
        The steps that have a loss with all their values; None if some have it with some.
    """

    values: list[np.ndarray]
    has_loss: list[np.ndarray]
    weight: np.ndarray | None
    steps: np.ndarray | None


def loss_blocks(
    ys: Sequence[SeriesArray],
    rows: Segments,
    weight: SampleWeight | None = None,
    mask_per_output: bool = False,
) -> Iterator[LossBlock]:
    """Yield all targets in blocks, with the values that have a loss: those in a row, with a weight
    and a target.

    Scales of targets, frequencies of classes and the mean of weights are learnt from these alone.
    The rows are without their burn-in, see :meth:`Segments.without_first`; the other arguments are
    those of :meth:`SampleWeight.normalize`.

    Raises
    ------
    DataError
        If a weight is not finite, or negative.
    """
    # scalers have weights without targets
    n_series, n_steps = (weight.n_series, weight.n_steps) if weight else ys[0].shape[1:]
    for series, steps in block_slices(n_series, n_steps, max((y.F for y in ys), default=1)):
        live = rows.coverage_mask(series, steps)
        if live is None:
            live = np.ones((series.stop - series.start, steps.stop - steps.start), bool)
        weights = None
        if weight is not None:
            weights = _finite_weights(weight, series, steps)
            live = live & (weights > 0)
        values = [_read_ahead(y, series, steps) for y in ys]
        missing = [y.missing_mask(v) for y, v in zip(ys, values, strict=True)]
        lacks_some, lacks_all = _lacking(missing, live.shape)
        if mask_per_output and (live & lacks_some & ~lacks_all).any():
            has_loss = [live & _there(v, m) for v, m in zip(values, missing, strict=True)]
            yield LossBlock(values, has_loss, weights, None)
            continue
        live = live & ~lacks_some
        has_loss = [np.broadcast_to(live, v.shape) for v in values]
        yield LossBlock(values, has_loss, weights, live)


def _read_ahead(y: SeriesArray, series: slice, steps: slice) -> np.ndarray:
    y.prefetch(Segments.from_lengths(y.N, y.T)[series], steps.start, steps.stop)
    return y.stored_block(series, steps)


def _there(values: np.ndarray, missing: np.ndarray | None) -> np.ndarray:
    return np.ones(values.shape, bool) if missing is None else ~missing


def _finite_weights(weight: SampleWeight, series: slice, steps: slice) -> np.ndarray:
    weights = weight.block(series, steps).astype(float)
    # not at the start, as the weights of a file are read here for the first time
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise DataError(
            "sample_weight must be finite and not negative; use 0 for steps that should not count"
        )
    return weights


def _lacking(
    missing: Sequence[np.ndarray | None], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return at which steps (B, S) any value is missing, and at which all are."""
    some = np.zeros(shape, bool)
    every = np.ones(shape, bool)
    for mask in missing:
        some |= False if mask is None else mask.any(0)
        every &= False if mask is None else mask.all(0)
    return some, every


def output_fractions(present: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the fraction of outputs present at each step, (..., outputs) of bool to (...), equal
    for all targets.

    >>> output_fractions(np.array([[True, True, False], [True, False, False]]), [1, 2])
    array([0.75, 0.5 ])
    """
    return np.mean([part.mean(-1) for part in _by_target(present, sizes)], 0)


def live_steps(present: np.ndarray, sizes: Sequence[int]) -> float:
    """Return the sum of :func:`output_fractions`."""
    # from counts, which are exact whatever the order of adding up
    sums = [int(part.sum()) / part.shape[-1] for part in _by_target(present, sizes)]
    return float(np.mean(sums))


def _by_target(present: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(present, np.cumsum(sizes)[:-1], -1)
