"""Winsorise and standardise features of sequences, lazily."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.inputs.moments import FeatureModule, Moments, float_type
from fluxutils_py.inputs.targets import SeriesReader
from fluxutils_py.nn.winsor import winsor_statistics
from fluxutils_py.transformers.transformer_base import SequenceTransformer, read_blocks


class WinsorScaler(SequenceTransformer):
    """Clamp each feature to its 1 and 99 per cent quantiles, then standardise it; NaN within a
    series becomes 0.

    Quantiles, means and scales cover all series and steps. They are exact, computed block by block
    in a few passes (three for float32, five for float64). Neither ``fit`` nor ``transform`` reads a
    file as a whole.

    Attributes
    ----------
    lower_, upper_ : ndarray of shape (F,), float64
        The quantiles (NumPy's default, type 7) of values other than NaN; 0 for features without
        values.
    mean_, scale_ : ndarray of shape (F,), float64
        Mean and standard deviation (of n - 1) of the clamped values. The scale of a constant
        feature is 1.
    n_features_in_ : int
        F; for a matrix or a view, its columns.
    feature_names_in_ : ndarray of str
        Names of features, for inputs that have them.

    Notes
    -----
    Infinite values are outliers like others, but a matrix must not have any.
    :class:`fluxutils_py.nn.WinsorNorm` is the same as a layer.

    Source: ``WinsorNorm`` of FluxUtils.jl, where NaN becomes the mean and constant features become
    NaN.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_cauchy((2, 30, 20))  # (F, N, T)
    >>> np.abs(x).max() > 1000, np.abs(WinsorScaler().fit_transform(x)).max() < 10
    (np.True_, np.True_)
    """

    lower_: np.ndarray
    upper_: np.ndarray
    mean_: np.ndarray
    scale_: np.ndarray

    def _compute_statistics(self, inputs: Inputs, pool: SeriesReader) -> dict[str, Any]:
        (series,) = inputs.series
        dtype = float_type(series.dtype)  # float32 needs fewer passes than float64

        def read_pass() -> Iterator[Tensor]:
            for _, _, block in read_blocks(series, inputs):
                # a copy: torch warns of blocks that cannot be written to
                values = np.array(block, dtype, order="C")
                yield torch.from_numpy(values.reshape(series.F, -1))

        def merge(*parts: Tensor) -> tuple[Tensor, ...]:
            moments = pool.moments(Moments(*(part.numpy() for part in parts)))
            return tuple(map(torch.from_numpy, moments))

        # in torch, because nn.WinsorNorm, which cannot import this, learns the same
        statistics = winsor_statistics(read_pass, pool.add_up, merge)
        names = "lower_", "upper_", "mean_", "scale_"
        return {name: t.numpy() for name, t in zip(names, statistics, strict=True)}

    def as_module(self) -> Winsorize:
        return Winsorize(lower=self.lower_, upper=self.upper_, mean=self.mean_, scale=self.scale_)


class Winsorize(FeatureModule):
    """Clamp to quantiles, standardise, and put 0 for NaN."""

    fills_gaps = True
    lower: Tensor
    upper: Tensor
    mean: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        # not clamp, which runtimes have for numbers only; rounded twice, as blocks are
        clamped = torch.minimum(torch.maximum(x.double(), self.lower), self.upper)
        y = ((clamped - self.mean).to(x.dtype).double() / self.scale).to(x.dtype)
        return torch.where(x.isnan(), torch.zeros_like(y), y)
