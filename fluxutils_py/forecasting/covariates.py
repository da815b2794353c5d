"""Standardise numeric covariates and number categories."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.panel import Panel
from fluxutils_py.forecasting.panel_windows import Channels


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
            return cls(name, categories=tuple(sorted(different, key=str)))
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(name)
        mean, scale = float(known.mean()), float(known.std())
        return cls(name, mean, scale if scale > 1e-12 * abs(mean) else 1.0)

    def channel(self, values: np.ndarray) -> np.ndarray:
        """Return standardised numbers, or codes: (total,), NaN where missing.

        Warns of categories that were not there in training; their code is 0.

        Raises
        ------
        DataError
            If the column held numbers in training and holds text now, or the reverse.
        """
        if (
            self.categories
            and values.dtype != object
            and not any(isinstance(c, str) for c in self.categories)
        ):
            missing, values = (
                np.isnan(values),
                values.astype(object),
            )  # numbers that were categories in training
            values[missing] = None
        if (values.dtype == object) != (self.categories is not None):
            now, then = (
                ("text", "numbers") if self.categories is None else ("numbers", "categories")
            )
            raise DataError(
                f"column {self.name!r} holds {now}, and held {then} when the forecaster was fitted"
            )
        if self.categories is None:
            return (values - self.mean) / self.scale
        number: dict[Any, float] = {v: i + 1.0 for i, v in enumerate(self.categories)}
        codes = np.array([np.nan if v is None else number.get(v, 0.0) for v in values], float)
        new = {v for v, c in zip(values, codes, strict=True) if c == 0}
        if new:
            shown = ", ".join(sorted(map(repr, new))[:3])
            warnings.warn(
                f"column {self.name!r} has categories that were not there in training: {shown}; "
                "their embedding is zero",
                stacklevel=2,
            )
        return codes

    def describe(self, code: float) -> str:
        """Return the value that became ``code`` in a channel, as text for messages."""
        if self.categories is None:
            return f"{code * self.scale + self.mean:.10g}"
        if code == 0:
            return "a category that was not there in training"
        return repr(self.categories[int(code) - 1])


def filled_forward(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Fill missing values of channels (C, total) with the last value before in the same series, or
    0.
    """
    if not np.isnan(values).any():
        return values
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = np.where(np.isnan(values), -1, np.arange(values.shape[1]))
    at = np.maximum.accumulate(at, axis=1)
    found = np.take_along_axis(values, np.maximum(at, 0), 1)
    return np.where(at >= begin, found, 0.0)


@dataclass(frozen=True)
class Covariates:
    """All covariates of a panel, as fitted in training; numbers before categories in each group."""

    hist: tuple[Covariate, ...] = ()
    futr: tuple[Covariate, ...] = ()
    stat: tuple[Covariate, ...] = ()

    @classmethod
    def of(cls, panel: Panel, hist: Any, futr: Any, stat: Any) -> Covariates:
        sources = (hist, panel.values), (futr, panel.values), (stat, panel.static)
        groups = [[Covariate.of(c, values[c]) for c in names] for names, values in sources]
        return cls(
            *(tuple(sorted(group, key=lambda c: c.categories is not None)) for group in groups)
        )

    def steps(self, panel: Panel, kind: str) -> np.ndarray:
        """Return the channels (C, total) of the ``"hist"`` or ``"futr"`` covariates, NaN where
        missing.
        """
        parts = [c.channel(panel.values[c.name]) for c in getattr(self, kind)]
        return np.stack(parts) if parts else np.empty((0, int(panel.lengths.sum())))

    def static(self, panel: Panel) -> np.ndarray:
        """Return the channels (N, C) of the static covariates."""
        found = [c.channel(panel.static[c.name]) for c in self.stat]
        return np.stack(found, 1) if found else np.empty((panel.n_series, 0))

    def channels(self, h: int, history: int, base: bool) -> Channels:
        """Return the channels of a network's input, ``history`` of which come from the target."""
        hist, stat, futr = (
            tuple(len(c.categories) + 1 for c in group if c.categories is not None)
            for group in (self.hist, self.stat, self.futr)
        )
        numbers = len(self.hist) - len(hist), len(self.stat) - len(stat), len(self.futr) - len(futr)
        return Channels(h, history, *numbers, hist, stat, futr, base)
