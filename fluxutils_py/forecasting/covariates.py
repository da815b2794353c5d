"""Standardise numeric covariates and number categories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.data.filling import last_positions
from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.panel_windows import Channels
from fluxutils_py.frames.panel import Columns, Panel


@dataclass(frozen=True)
class Covariate:
    """Conversion of one column to a channel: standardised numbers, or codes of categories.

    Attributes
    ----------
    name : str
    mean, scale : float
        Mean and standard deviation of a numeric column.
    categories : tuple or None
        Values of a categorical column; the code of each is its position, from 1. None: the column
        is numeric.
    """

    name: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> Covariate:
        """Fit the conversion to the values that are not missing."""
        if values.dtype == object:
            different = {v for v in values if v is not None}
            # by text, since categories may be of several types
            ordered = sorted(different, key=str)
            return cls(name, categories=tuple(ordered))
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(name)
        mean = float(known.mean())
        scale = float(known.std())
        # the spread of equal values is a rounding error, by which nothing may be divided
        if scale <= 1e-12 * abs(mean):
            scale = 1.0
        return cls(name, mean, scale)

    @property
    def is_category(self) -> bool:
        return self.categories is not None

    def channel(self, values: np.ndarray) -> np.ndarray:
        """Return standardised numbers, or codes: (total,), NaN where missing.

        Warns of categories that were not there in training; their code is 0.

        Raises
        ------
        DataError
            If the column held numbers in training and holds text now, or the reverse.
        """
        # True and None are objects; the same column without None comes as numbers
        if values.dtype != object and self._has_number_categories():
            values = _as_labels(values)
        if (values.dtype == object) != self.is_category:
            kinds = ("numbers", "categories") if self.is_category else ("text", "numbers")
            raise DataError(
                f"column {self.name!r} holds {kinds[0]}, and held {kinds[1]} when the forecaster "
                "was fitted"
            )
        if self.categories is None:
            return (values - self.mean) / self.scale
        return self._codes(values, self.categories)

    def _has_number_categories(self) -> bool:
        """Whether the categories were numbers in a column of objects, which may come as numbers."""
        if not self.categories:
            return False
        return not any(isinstance(category, str) for category in self.categories)

    def _codes(
        self,
        labels: np.ndarray,
        categories: tuple[Any, ...],
    ) -> np.ndarray:
        code_of: dict[Any, float] = {v: float(i) for i, v in enumerate(categories, 1)}
        code_of[None] = np.nan
        codes = np.array([code_of.get(v, 0.0) for v in labels], float)
        # NaN, a missing label, is no new category
        new = set(labels[codes == 0])
        if new:
            first = sorted(map(repr, new))[:3]
            shown = ", ".join(first)
            warn(
                f"column {self.name!r} has categories that were not there in training: {shown}; "
                "their embedding is zero"
            )
        return codes

    def describe(self, code: float) -> str:
        """Return the value that became ``code`` in a channel, as text for messages."""
        if self.categories is None:
            return f"{code * self.scale + self.mean:.10g}"
        if code == 0:
            return "a category that was not there in training"
        return repr(self.categories[int(code) - 1])


def _as_labels(values: np.ndarray) -> np.ndarray:
    """Convert numbers to objects, None where missing."""
    # 1.0 finds the category True, to which it is equal
    labels = values.astype(object)
    labels[np.isnan(values)] = None
    return labels


def filled_forward(
    values: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:
    """Fill missing values of channels (C, total) with the last value before in the same series, or
    0.
    """
    if not np.isnan(values).any():
        return values
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = last_positions(~np.isnan(values))
    last = np.take_along_axis(values, np.maximum(at, 0), 1)
    # the last value may be one of the series before
    return np.where(at >= begin, last, 0.0)


@dataclass(frozen=True)
class Covariates:
    """All covariates of a panel, as fitted in training; numbers before categories in each group.

    This is the order of :class:`Channels`, on which the networks depend.
    """

    hist: tuple[Covariate, ...] = ()
    futr: tuple[Covariate, ...] = ()
    stat: tuple[Covariate, ...] = ()

    @classmethod
    def of(cls, panel: Panel, columns: Columns) -> Covariates:
        """Fit the covariates that ``columns`` names."""
        return cls(
            hist=_fit_group(columns.hist, panel.values),
            futr=_fit_group(columns.futr, panel.values),
            stat=_fit_group(columns.stat, panel.static),
        )

    def steps(self, panel: Panel, group: str) -> np.ndarray:
        """Return the channels (C, total) of the ``"hist"`` or ``"futr"`` covariates, NaN where
        missing.
        """
        covariates: tuple[Covariate, ...] = getattr(self, group)
        # np.stack needs at least one array
        if not covariates:
            return np.empty((0, int(panel.lengths.sum())))
        channels = [c.channel(panel.values[c.name]) for c in covariates]
        return np.stack(channels)

    def static(self, panel: Panel) -> np.ndarray:
        """Return the channels (N, C) of the static covariates."""
        if not self.stat:
            return np.empty((panel.n_series, 0))
        channels = [c.channel(panel.static[c.name]) for c in self.stat]
        return np.stack(channels, 1)

    def channels(
        self,
        h: int,
        history: int,
        base: bool,
    ) -> Channels:
        """Return the channels of a network's input, ``history`` of which come from the target."""
        return Channels(
            h,
            history,
            hist=_count_numbers(self.hist),
            stat=_count_numbers(self.stat),
            futr=_count_numbers(self.futr),
            hist_categories=_count_codes(self.hist),
            stat_categories=_count_codes(self.stat),
            futr_categories=_count_codes(self.futr),
            base=base,
        )


def _fit_group(
    names: Sequence[str],
    values: dict[str, np.ndarray],
) -> tuple[Covariate, ...]:
    group = [Covariate.of(name, values[name]) for name in names]
    return tuple(sorted(group, key=lambda c: c.is_category))  # keeps the user's order within each


def _count_numbers(group: tuple[Covariate, ...]) -> int:
    return sum(not c.is_category for c in group)


def _count_codes(group: tuple[Covariate, ...]) -> tuple[int, ...]:
    # one more than categories: code 0
    return tuple(len(c.categories) + 1 for c in group if c.categories is not None)
