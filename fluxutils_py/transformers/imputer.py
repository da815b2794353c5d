"""Impute missing values of sequences lazily."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fluxutils_py.data import LazyArray
from fluxutils_py.data.arrays import read_block
from fluxutils_py.data.filling import forward_fill, last_values
from fluxutils_py.data.indexing import Index
from fluxutils_py.errors import ShapeError, SpecError
from fluxutils_py.exporting.steps import InitialState
from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.inputs.moments import FeatureModule, as_floats, float_type
from fluxutils_py.inputs.targets import SeriesReader
from fluxutils_py.transformers.transformer_base import SequenceTransformer

LOOK_BACK = 64  # steps that are read first, to find the last value before a block; then ever more
# the first two fill in step by step, the last two look ahead
STRATEGIES = "mean", "constant", "ffill", "series_mean", "interpolate"
SERIES = 1024  # filled in at a time, to keep temporary arrays small


class SequenceImputer(SequenceTransformer):
    """Fill in missing values (NaN) with each feature's mean, a constant, the last value before
    them, or values of their own series before and after.

    Treats the features of sequences as :class:`sklearn.impute.SimpleImputer` treats the columns of
    a matrix, and can also fill along time. Neither ``fit`` nor ``transform`` reads a whole file at
    once.

    Parameters
    ----------
    strategy : "mean", "constant", "ffill", "series_mean" or "interpolate"
        "mean": the mean of the feature over all series and steps of ``fit`` (of very many, of a
        part, as in :class:`SequenceScaler`). "constant": ``fill_value``. "ffill": the last value of
        the feature before the gap, in the same series; later steps are never used. "series_mean":
        the mean of the feature in the same series. "interpolate": the straight line between the
        values of the feature before and after the gap, in the same series; after the last value,
        that value.
    fill_value : float, array of shape (F,), or None
        Value for "constant"; with "ffill" and "interpolate", before the first value of a feature;
        with "series_mean", for features without values in a series. None: 0 for "constant", else
        the feature's mean in ``fit``.

    Attributes
    ----------
    statistics_ : ndarray of shape (F,), float64
        Value that replaces missing ones, or those for which the series has no value. The mean of a
        feature without values is 0.
    n_features_in_ : int
        F; for a matrix or a view, its number of columns.
    feature_names_in_ : ndarray of str
        Names of features, for inputs that have them; see :func:`fluxutils_py.samples`.

    Notes
    -----
    Steps with all features missing are filled in too, but not before the first input of a series or
    after the last one: that is padding, and stays NaN. A stream cannot know the last input, and
    fills in all steps after the first.

    "series_mean" and "interpolate" look ahead, to the end of the series: they are for stored data.
    They cannot be streamed or exported, fill a fold in time from steps of other folds, and read
    whole series for each window of a file. The other strategies never look ahead.

    With "ffill", a subset of the rows of ``timesteps(x)`` is filled in from earlier steps of ``x``,
    as if ``x`` had been transformed first, so results do not depend on the split. A plain matrix
    raises an error, since its rows are series of one step. A stream continues from its last step,
    but arrays given in chunks of time are filled in as separate series: a ``state`` covers the
    estimator alone.

    Examples
    --------
    >>> x = np.array([[[np.nan, 1.0, np.nan, 3.0, np.nan]]])  # (F, N, T)
    >>> SequenceImputer().fit_transform(x)
    array([[[nan,  1.,  2.,  3., nan]]])
    >>> SequenceImputer("ffill").fit_transform(x)
    array([[[nan,  1.,  1.,  3., nan]]])
    """

    statistics_: np.ndarray

    def __init__(
        self,
        strategy: str = "mean",
        *,
        fill_value: ArrayLike | None = None,
    ) -> None:
        self.strategy = strategy
        self.fill_value = fill_value

    def _compute_statistics(self, inputs: Inputs, pool: SeriesReader) -> dict[str, Any]:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}, got {self.strategy!r}")
        if self.strategy in STRATEGIES[2:] and inputs.form == "rows":
            raise ShapeError(
                f"strategy={self.strategy!r} fills in from other steps, but the rows of a matrix "
                "are series of one step; give an array (F, N, T), or timesteps(x) of one"
            )
        value = self.fill_value
        if value is not None and (self.strategy == "mean" or not np.isfinite(value).all()):
            raise ValueError(
                f"fill_value must be finite, and None for strategy='mean', got {value!r} with "
                f"strategy={self.strategy!r}; for a value of your own, set strategy='constant'"
            )
        if value is not None or self.strategy == "constant":
            filled = np.asarray(0.0 if value is None else value, float)
            return {"statistics_": np.array(np.broadcast_to(filled, inputs.series[0].F))}
        # for all others too: series may begin with missing values
        return {"statistics_": self._read_moments(inputs, pool).mean}

    def as_module(self) -> Fill | ForwardFill:
        if self.strategy == "ffill":
            return ForwardFill(self.statistics_)
        if self.strategy in STRATEGIES[3:]:
            return SeriesFill(self.statistics_, self.strategy)
        return Fill(values=self.statistics_)


class Fill(FeatureModule):
    """Put one value per feature for NaN."""

    fills_gaps = True
    values: Tensor

    def transform_block(self, block: np.ndarray) -> np.ndarray:
        out = as_floats(block)
        np.copyto(out, self.arrays["values"], where=np.isnan(out), casting="same_kind")
        return out

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.isnan(), self.values.to(x.dtype), x)


class ForwardFill(FeatureModule):
    """Put the last value before it for NaN.

    The state is (F, B), the last values, NaN where there is none.

    Parameters
    ----------
    start : ndarray of shape (F,)
        Value before the first one of a series.
    """

    fills_gaps = True
    start: Tensor
    # what was read last: the source, its series, the step after it, and the last values there
    _last: tuple[Any, Any, int, Any] = None, None, 0, None

    def __init__(self, start: np.ndarray) -> None:
        super().__init__(start=start)
        nothing_before = torch.full((len(start), 1), torch.nan, dtype=torch.float64)
        self.initial = (InitialState(nothing_before, batch_axis=1),)

    def __getstate__(self) -> dict[str, Any]:
        return {name: v for name, v in self.__dict__.items() if name != "_last"}

    def forward(self, x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.where(x.isnan(), last.t().to(x.dtype), x)
        filled = torch.where(known.isnan(), self.start.to(x.dtype), known)
        # without the fill value: it is for steps before the first value only
        return filled, known.t().double()

    def transform_block(self, block: np.ndarray) -> np.ndarray:
        out = as_floats(block)
        # in place: a part is a view of the result
        for n in range(0, out.shape[1], SERIES):
            part = out[:, n : n + SERIES]
            forward_fill(part, np.full(part.shape[:2], np.nan), self.arrays["start"].ravel())
        return out

    def over(self, array: Any, first: np.ndarray) -> LazyArray:
        return LazyArray(array, reader=self.read, dtype=float_type(array.dtype))

    def read(self, source: Any, series: Index, steps: range) -> np.ndarray:
        """Read a block of an array (F, N, T), and earlier steps where it begins with a missing
        value, back to the last one: the result does not depend on how it is read.
        """
        block = _read_floats(source, series, steps)
        same_source, same_series, end, last = self._last
        # only ranges compare as a whole
        is_range = isinstance(series, range)
        if not (is_range and source is same_source and (series, steps.start) == (same_series, end)):
            missing = np.isnan(block[:, :, 0])
            last = np.full(missing.shape, np.nan, block.dtype)
            stop = steps.start
            size = LOOK_BACK
            while stop > 0 and missing.any():
                columns = np.flatnonzero(missing.any(0))
                before = range(max(0, stop - size), stop)
                found = last_values(_read_floats(source, np.asarray(series)[columns], before))
                last[:, columns] = np.where(missing[:, columns], found, last[:, columns])
                missing = missing & np.isnan(last)
                stop = before.start
                size *= 2  # so that a long gap is read in few pieces
        last = forward_fill(block, last, self.arrays["start"].ravel())
        if isinstance(series, range):  # the next window most often continues here
            self._last = source, series, steps.stop, last
        return block


class SeriesFill(ForwardFill):
    """Put the mean of the series for NaN, or what is between its neighbours in time; of whole
    series only.
    """

    def __init__(self, start: np.ndarray, strategy: str) -> None:
        super().__init__(start)
        self.strategy = strategy

    def transform_block(self, block: np.ndarray) -> np.ndarray:
        out = as_floats(block)
        for f, n in np.argwhere(np.isnan(out).any(2)):
            values = out[f, n]
            missing = np.isnan(values)
            known = values[~missing]
            filled = start = self.arrays["start"][f, 0, 0]
            if len(known) and self.strategy == "series_mean":
                filled = known.mean(dtype=float)
            elif len(known):
                at, places = np.flatnonzero(missing), np.flatnonzero(~missing)
                filled = np.interp(at, places, known, left=start)
            values[missing] = filled
        return out

    def read(self, source: Any, series: Index, steps: range) -> np.ndarray:
        whole = _read_floats(source, series, range(source.shape[2]))
        return self.transform_block(whole)[:, :, steps.start : steps.stop]

    def empty_state(self, n_series: int) -> list[Tensor]:
        raise SpecError(
            f"strategy={self.strategy!r} uses later steps, which a stream or an exported model "
            "does not have: use SequenceImputer('ffill')"
        )

    def forward(self, x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        self.empty_state(len(x))
        return x, last


def _read_floats(source: Any, series: Index, steps: range) -> np.ndarray:
    return as_floats(read_block(source, range(source.shape[0]), series, steps))
