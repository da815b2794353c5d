"""Standardise numeric covariates and encode categorical ones."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.forecasting.panel import Panel
from fluxutils_py.forecasting.panel_windows import Channels


@dataclass(frozen=True)
class Covariate:
    """Conversion of one column to channels.

    Attributes
    ----------
    name : str
    mean, scale : float
        Mean and standard deviation of a numeric column.
    categories : tuple or None
        Values of a categorical column. None: the column is numeric.
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
        there = values[~np.isnan(values)]
        if not len(there):
            return cls(name)
        scale = float(there.std())
        return cls(name, float(there.mean()), scale if scale > 1e-12 * abs(float(there.mean())) else 1.0)

    @property
    def n_channels(self) -> int:
        return 1 if self.categories is None else len(self.categories)

    def channels(self, values: np.ndarray) -> np.ndarray:
        """Return standardised numbers, or an indicator of each category: (n_channels, total)."""
        if self.categories is None:
            return ((values - self.mean) / self.scale)[None]
        codes = self.codes(values)
        found = (codes == np.arange(1, 1 + len(self.categories))[:, None]).astype(float)
        found[:, [v is None for v in values]] = np.nan
        return found

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Return the codes of categories, from 1; 0 for categories not seen in training, with a warning."""
        number = {v: i + 1 for i, v in enumerate(self.categories or ())}
        codes = np.array([number.get(v, 0) for v in values], int)
        new = {v for v, c in zip(values, codes, strict=True) if c == 0 and v is not None}
        if new:
            shown = ", ".join(sorted(map(repr, new))[:3])
            warnings.warn(
                f"column {self.name!r} has values that were not there in training: {shown}; they count as none",
                stacklevel=2,
            )
        return codes


def filled_forward(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Fill missing values of channels (C, total) with the last value before in the same series, or 0."""
    if not np.isnan(values).any():
        return values
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = np.where(np.isnan(values), -1, np.arange(values.shape[1]))
    at = np.maximum.accumulate(at, axis=1)
    found = np.take_along_axis(values, np.maximum(at, 0), 1)
    return np.where(at >= begin, found, 0.0)


@dataclass(frozen=True)
class Covariates:
    """All covariates of a panel, as fitted in training."""

    hist: tuple[Covariate, ...] = ()
    futr: tuple[Covariate, ...] = ()
    stat: tuple[Covariate, ...] = ()

    @classmethod
    def of(cls, panel: Panel, hist: Any, futr: Any, stat: Any) -> Covariates:
        of_steps = [tuple(Covariate.of(c, panel.values[c]) for c in names) for names in (hist, futr)]
        return cls(of_steps[0], of_steps[1], tuple(Covariate.of(c, panel.static[c]) for c in stat))

    def steps(self, panel: Panel, kind: str) -> np.ndarray:
        """Return the channels (C, total) of the ``"hist"`` or ``"futr"`` covariates, NaN where missing."""
        parts = [c.channels(panel.values[c.name]) for c in getattr(self, kind)]
        return np.concatenate(parts) if parts else np.empty((0, int(panel.lengths.sum())))

    def n_channels(self, kind: str) -> int:
        return sum(c.n_channels for c in getattr(self, kind))

    def static(self, panel: Panel) -> np.ndarray:
        """Return the standardised static numbers of each series, (N, numeric static covariates)."""
        found = [c.channels(panel.static[c.name])[0] for c in self.stat if c.categories is None]
        return np.stack(found, 1) if found else np.empty((panel.n_series, 0))

    def codes(self, panel: Panel) -> np.ndarray:
        """Return the category codes of each series, (N, categorical static covariates)."""
        found = [c.codes(panel.static[c.name]) for c in self.stat if c.categories is not None]
        return np.stack(found, 1) if found else np.empty((panel.n_series, 0), int)

    def channels(self, h: int, history: int, base: bool) -> Channels:
        """Return the channels of a network's input, ``history`` of which come from the target."""
        codes = tuple(len(c.categories) + 1 for c in self.stat if c.categories is not None)
        hist, futr = self.n_channels("hist"), self.n_channels("futr")
        return Channels(h, history, hist, len(self.stat) - len(codes), futr, codes, base)
