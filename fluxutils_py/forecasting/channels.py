"""Name the channels of a network's input, and make those of covariates: standardised numbers, and
codes of categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fluxutils_py.data.filling import last_positions
from fluxutils_py.errors import DataError, warn
from fluxutils_py.frames.panel import Panel

T = TypeVar("T")


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

    @property
    def n_codes(self) -> int:
        """Number of codes of a categorical column. Code 0: missing, or not seen in training."""
        return 0 if self.categories is None else len(self.categories) + 1

    def channel(self, values: np.ndarray) -> np.ndarray:
        """Return standardised numbers, or codes: (total,), NaN where missing.

        Warns of categories that were not there in training; their code is 0.

        Raises
        ------
        DataError
            If the column held numbers in training and holds text now, or the reverse.
        """
        if (values.dtype == object) != self.is_category:
            kinds = ("numbers", "categories") if self.is_category else ("text", "numbers")
            raise DataError(
                f"column {self.name!r} holds {kinds[0]}, and held {kinds[1]} when the forecaster "
                "was fitted"
            )
        if self.categories is None:
            return (values - self.mean) / self.scale
        code_of: dict[Any, float] = {v: float(i) for i, v in enumerate(self.categories, 1)}
        code_of[None] = np.nan
        codes = np.array([code_of.get(v, 0.0) for v in values], float)
        # NaN, a missing label, is no new category
        new = set(values[codes == 0])
        if new:
            first = sorted(map(repr, new))[:3]
            shown = ", ".join(first)
            warn(
                f"column {self.name!r} has categories that were not there in training: {shown}; "
                "their embedding is zero"
            )
        return codes


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
class Channels:
    """The channels of a network's input, which windows, networks, histories and exports share.

    In this order: ``history`` features of the target; the covariates at the current step; each
    covariate known ahead at the next ``h`` steps, and at the ``h`` steps that the seasonal naive
    forecast repeats; the scale, which only the loss reads.

    Attributes
    ----------
    h, history : int
    hist, stat, futr : tuple of Covariate
        Past, static, and known ahead, as fitted in training; numbers before categories in each.
    """

    h: int
    history: int
    hist: tuple[Covariate, ...] = ()
    stat: tuple[Covariate, ...] = ()
    futr: tuple[Covariate, ...] = ()

    @property
    def groups(self) -> dict[str, tuple[Covariate, ...]]:
        """The covariates by the names of the inputs of an exported file."""
        return {"past": self.hist, "static": self.stat, "known": self.futr}

    @property
    def covariates(self) -> list[Covariate]:
        """All covariates, group by group."""
        return [*self.hist, *self.stat, *self.futr]

    def in_order(self, given: Sequence[T]) -> list[T]:
        """Return what is given for each of :attr:`covariates` in the order of their channels: all
        numbers come first, then all codes, since each network splits there.
        """
        covariates = self.covariates
        order = sorted(range(len(covariates)), key=lambda i: covariates[i].is_category)
        return [given[i] for i in order]

    @property
    def n_codes(self) -> list[int]:
        """Number of codes of each categorical covariate, in the order of their channels."""
        return [c.n_codes for c in self.covariates if c.is_category]

    @property
    def numeric(self) -> int:
        """Number of channels at the current step that hold numbers, which come first."""
        return self.current - len(self.n_codes)

    @property
    def current(self) -> int:
        """Number of channels at the current step."""
        return self.history + len(self.covariates)

    @property
    def ahead(self) -> int:
        """Number of channels of covariates known ahead, which follow."""
        return 2 * self.h * len(self.futr)

    @property
    def total(self) -> int:
        return self.current + self.ahead + 1

    def values(self, panel: Panel, target: str) -> np.ndarray:
        """Return the target, past covariates and those known ahead: (C, total), NaN where
        missing.
        """
        channels = [c.channel(panel.values[c.name]) for c in (*self.hist, *self.futr)]
        return np.stack([panel.values[target], *channels])

    def static(self, panel: Panel) -> np.ndarray:
        """Return the channels (N, C) of the static covariates."""
        # np.stack needs at least one array
        if not self.stat:
            return np.empty((panel.n_series, 0))
        return np.stack([c.channel(panel.static[c.name]) for c in self.stat], 1)


def fit_covariates(names: Sequence[str], values: dict[str, np.ndarray]) -> tuple[Covariate, ...]:
    """Fit covariates to their columns; numbers come before categories."""
    group = [Covariate.of(name, values[name]) for name in names]
    return tuple(sorted(group, key=lambda c: c.is_category))  # keeps the user's order within each
