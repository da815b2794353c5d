"""Weights of series and of single steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.arrays import check_named_axes, plain_block, reject_masked, to_numpy
from fluxutils_py.data.blocks import block_slices
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

    def __init__(self, weight: Any, n_series: int, n_steps: int) -> None:
        reject_masked(weight, "sample_weight", fill="0")
        weight = to_numpy(weight)
        w = weight if hasattr(weight, "shape") else np.asarray(weight)
        shape = tuple(w.shape)
        self._per_series: np.ndarray | None = None
        if shape == (1, n_series, n_steps):
            self._read = lambda s, t: plain_block(w[0, s, t], "sample_weight")
        elif shape == (n_series, n_steps):
            self._read = lambda s, t: plain_block(w[s, t], "sample_weight")
        elif shape == (n_series,):
            self._per_series = each = plain_block(w[:], "sample_weight")
            self._read = lambda s, t: np.repeat(each[s][:, None], max(t.stop - t.start, 0), 1)
        else:
            raise ShapeError(
                f"sample_weight has shape {shape}; expected ({n_series},), ({n_series}, {n_steps}) "
                f"or (1, {n_series}, {n_steps}) for {n_series} series of {n_steps} time steps"
            )
        if not isinstance(w, h5py.Dataset):  # the attribute of HDF5 is for arrays of three axes
            check_named_axes(w, "sample_weight", "series")
        if np.dtype(getattr(w, "dtype", float)).kind not in "fiub":
            raise DataError(f"sample_weight must hold real numbers, got dtype {w.dtype}")
        self.n_series = n_series
        self.n_steps = n_steps
        self.scale = 1.0

    def normalize(
        self,
        rows: Segments,
        ys: Sequence[SeriesArray],
        *,
        burn_in: int = 0,
        mask_per_output: bool = False,
        add_up: Callable[[np.ndarray], np.ndarray] = lambda sums: sums,
    ) -> None:
        """Scale to mean 1 over the steps that count: those of ``rows`` with a weight and no NaN
        target. In blocks.

        Parameters
        ----------
        rows : Segments
            Which steps of which series exist.
        ys : sequence of SeriesArray
        burn_in : int
            Steps at the start of each row that do not count.
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
        for series, steps in block_slices(self.n_series, self.n_steps):
            weights = self._read(series, steps).astype(float)  # (B, S)
            if not np.isfinite(weights).all() or (weights < 0).any():
                raise DataError(
                    "sample_weight must be finite and not negative; use 0 for steps that should "
                    "not count"
                )
            live = weights > 0
            covered = rows.coverage_mask(series, steps, burn_in)
            live = live if covered is None else live & covered
            missing = [y.missing_mask(y.stored_block(series, steps)) for y in ys]
            if mask_per_output and any(mask is not None for mask in missing):
                sums += _sums_of_outputs(weights, live, missing, [y.F for y in ys])
            else:
                sums += _sums_of_steps(weights, live, missing)
        total, count = add_up(sums)
        if count == 0:
            raise DataError(
                "sample_weight leaves nothing to learn from: every step has weight 0 or no target"
            )
        self.scale = float(count / total)

    def drop_zero_weight(self, rows: Segments) -> Segments:
        """Return the rows of series whose weight is not 0, if series are weighted; else all."""
        if self._per_series is None:
            return rows
        return rows[np.asarray(self._per_series > 0)[rows.series]]

    def max_per_series(self) -> np.ndarray:
        """Return the largest weight of each series, shape (N,)."""
        if self._per_series is not None:
            return self._per_series
        out = np.zeros(self.n_series)
        for series, steps in block_slices(self.n_series, self.n_steps):
            out[series] = np.maximum(out[series], self._read(series, steps).max(1))
        return out

    def block(self, series: slice, steps: slice) -> np.ndarray:
        """Return weights as they were given, shape (B, S)."""
        return self._read(series, steps)

    def read(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Return the scaled weights of the given rows, shape (S, B); a fresh array. Steps past a
        row's end are unspecified.
        """
        size = stop - start
        first = rows.common_start
        if first is not None and rows.common_series is not None:
            steps = slice(first + start, min(first + stop, self.n_steps))
            w = self._read(rows.common_series, steps).T * self.scale
            if len(w) == size:
                return w
            return np.concatenate([w, np.zeros((size - len(w), len(rows)))])
        out = np.zeros((size, len(rows)))
        for i, (s, t) in enumerate(zip(rows.series, rows.start, strict=True)):
            w = self._read(slice(s, s + 1), slice(t + start, min(t + stop, self.n_steps)))[0]
            out[: len(w), i] = w
        return out * self.scale


def _sums_of_steps(
    weights: np.ndarray, live: np.ndarray, missing: Sequence[np.ndarray | None]
) -> tuple[float, float]:
    """Return the sum of the weights of live steps that lack no output, and their number."""
    for mask in missing:
        if mask is not None:
            live = live & ~mask.any(0)
    return float(weights[live].sum()), int(live.sum())


def _sums_of_outputs(
    weights: np.ndarray,
    live: np.ndarray,
    missing: Sequence[np.ndarray | None],
    sizes: Sequence[int],
) -> tuple[float, float]:
    """Return the same sums where a live step counts for the share of its outputs that is there."""
    present = np.concatenate(
        [
            np.ones((size, *live.shape), bool) if mask is None else ~mask
            for size, mask in zip(sizes, missing, strict=True)
        ]
    )
    share = output_fractions(np.moveaxis(present & live, 0, -1), sizes)
    return float((weights * share).sum()), float(share.sum())


def output_fractions(present: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the fraction of outputs present at each step, (..., outputs) of bool to (...), equal
    for all targets.

    >>> output_fractions(np.array([[True, True, False], [True, False, False]]), [1, 2])
    array([0.75, 0.5 ])
    """
    parts = np.split(present, np.cumsum(sizes)[:-1], -1)
    return np.mean([part.mean(-1) for part in parts], 0)


def live_steps(present: np.ndarray, sizes: Sequence[int]) -> float:
    """Return the sum of :func:`output_fractions`, from counts."""
    parts = np.split(present, np.cumsum(sizes)[:-1], -1)
    return float(np.mean([int(part.sum()) / part.shape[-1] for part in parts]))
