"""Describe the recent past of each feature, lazily: lags, means, deviations and slopes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data import LazyArray
from fluxutils_py.data.arrays import read_block
from fluxutils_py.data.indexing import Index
from fluxutils_py.exporting.steps import InitialState
from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.inputs.moments import FeatureModule
from fluxutils_py.inputs.targets import SeriesReader
from fluxutils_py.nn.time_features import ExponentialMeans, Lags, RollingStatistics
from fluxutils_py.transformers.imputer import ForwardFill
from fluxutils_py.transformers.transformer_base import SequenceTransformer
from fluxutils_py.validation import check_integer

# spans of an exponential mean, after which the weight of a value is below the rounding of float64
SPANS_OF_MEMORY = 19


class SequenceFeatures(SequenceTransformer):
    """Add to each step what came before it: earlier values, means, deviations and slopes.

    For models that see one step at a time, such as ridge regression or gradient boosting on
    :func:`fluxutils_py.timesteps`, and for networks that should not have to learn averages. Nothing
    looks ahead, and ``transform`` reads files window by window.

    Parameters
    ----------
    lags : sequence of int
        Values so many steps ago; zeros before the start of a series.
    exponential_means : sequence of int
        Spans of exponentially weighted means: the weight of a value falls by the factor
        ``1 - 2 / (span + 1)`` with each step.
    rolling : sequence of int
        Spans, in steps, of means, standard deviations (divided by n) and slopes per step; fewer
        steps at the start of a series.
    keep_inputs : bool
        Whether the features themselves come first.

    Attributes
    ----------
    n_features_in_ : int
        F; for a matrix or a view, its number of columns.
    n_features_out_ : int
        Features of each step after :meth:`transform`.
    feature_names_in_ : ndarray of str
        Names of features, for inputs that have them; see :func:`fluxutils_py.samples`.

    Notes
    -----
    A missing value (NaN) counts as the last one before it in its series, or 0. A series begins with
    its first input: steps before it and after the last one stay NaN. ``transform`` gives
    new arrays ``(P, N, T)``, or lazy ones for data in files, which differ by rounding from results
    in memory. The layers of :mod:`fluxutils_py.nn` of the same names compute the features.

    Examples
    --------
    >>> x = np.array([[[1.0, 2.0, 4.0, 8.0]]])  # (F, N, T)
    >>> features = SequenceFeatures(lags=[1], exponential_means=(), rolling=[2]).fit(x)
    >>> features.transform(x)[:, 0]
    array([[1. , 2. , 4. , 8. ],
           [0. , 1. , 2. , 4. ],
           [1. , 1.5, 3. , 6. ],
           [0. , 0.5, 1. , 2. ],
           [0. , 1. , 2. , 4. ]])
    >>> features.get_feature_names_out().tolist()
    ['x0', 'x0 lag 1', 'x0 mean 2', 'x0 deviation 2', 'x0 slope 2']
    """

    n_features_out_: int

    def __init__(
        self,
        lags: Sequence[int] = (),
        *,
        exponential_means: Sequence[int] = (5, 20, 80),
        rolling: Sequence[int] = (5, 20, 80),
        keep_inputs: bool = True,
    ) -> None:
        self.lags = lags
        self.exponential_means = exponential_means
        self.rolling = rolling
        self.keep_inputs = keep_inputs

    @property
    def n_inputs(self) -> int:
        """F, the number of features of each step in ``fit``."""
        return int(self._layout.features)

    def _compute_statistics(self, inputs: Inputs, pool: SeriesReader) -> dict[str, Any]:
        n_out = PastFeatures(inputs.series[0].F, *self._settings()).n_out
        if not n_out:
            raise ValueError(
                "SequenceFeatures gives no features: set lags, exponential_means, rolling or "
                "keep_inputs"
            )
        return {"n_features_out_": n_out}

    def _settings(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return all lags, 0 for the inputs, and the spans, after checking them."""
        lags, means, rolling = (
            tuple(check_integer(name, value, 1) for value in getattr(self, name))
            for name in ("lags", "exponential_means", "rolling")
        )
        return ((0, *lags) if self.keep_inputs else lags), means, rolling

    def as_module(self) -> PastFeatures:
        return PastFeatures(self.n_inputs, *self._settings())

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the output features, such as ``"speed mean 20"``.

        Parameters
        ----------
        input_features : array-like of str, optional
            Names of the F inputs; by default those of the fit, or x0, x1, ...
        """
        names = input_features
        if names is None:
            names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_inputs)])
        if len(names) != self.n_inputs:
            raise ValueError(
                f"input_features has {len(names)} names, fit had {self.n_inputs} features"
            )
        lags, means, rolling = self._settings()
        kinds = ["" if lag == 0 else f" lag {lag}" for lag in lags]
        kinds += [f" exponential mean {span}" for span in means]
        for span in rolling:
            kinds += [f" {what} {span}" for what in ("mean", "deviation", "slope")]
        return np.array([f"{name}{kind}" for kind in kinds for name in names], dtype=object)


class PastFeatures(FeatureModule):
    """Describe the past of the features of a step.

    The state is the last value of each feature, and then those of the layers.
    """

    keeps_features = False
    fills_gaps = True

    def __init__(
        self,
        n_features: int,
        lags: tuple[int, ...],
        means: tuple[int, ...],
        rolling: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.n_features = n_features
        self.fill = ForwardFill(np.zeros(n_features))
        kinds = (Lags, lags), (ExponentialMeans, means), (RollingStatistics, rolling)
        layers = [kind(n_features, given) for kind, given in kinds if given]
        self.n_out = sum(layer.n_out for layer in layers)
        # so many steps before a window are all that matters
        self.memory = max(
            [*lags, *(s - 1 for s in rolling), *(SPANS_OF_MEMORY * s for s in means)], default=0
        )
        inner: list[Any] = [layer.module for layer in layers]
        self.layers = nn.ModuleList(inner)
        states = [module.first_state(1) for module in inner]
        self.n_tensors = [len(state) for state in states]
        self.initial = (
            *self.fill.initial,
            *(InitialState(t, batch_axis=1) for state in states for t in state),
        )

    def forward(self, x: Tensor, last: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        filled, last = self.fill(x, last)
        y, new = self._run(filled[None], [t.to(filled.dtype) for t in states])
        return y[0], last, *(t.to(s.dtype) for t, s in zip(new, states, strict=True))

    def transform_block(self, block: np.ndarray) -> np.ndarray:
        filled = self.fill.transform_block(block)
        xs = torch.from_numpy(np.ascontiguousarray(filled.transpose(2, 1, 0)))
        with torch.no_grad():
            y, _ = self._run(xs, None)
        return y.numpy().transpose(2, 1, 0)

    def _run(self, xs: Tensor, state: Sequence[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Return the features of a window (S, B, P), and the new state of the layers."""
        parts = []
        new: list[Tensor] = []
        before = iter(() if state is None else state)
        for layer, n_tensors in zip(self.layers, self.n_tensors, strict=True):
            own = None if state is None else tuple(next(before) for _ in range(n_tensors))
            y, after = layer(xs, own)
            parts.append(y)
            new.extend(after)
        return torch.cat(parts, -1), new

    def over(self, array: Any, first: np.ndarray) -> LazyArray:
        filled = self.fill.over(array, first)
        shape = (self.n_out, *filled.shape[1:])
        reader = partial(self._read, first)
        return LazyArray(filled, reader=reader, shape=shape, dtype=filled.dtype)

    def _read(self, first: np.ndarray, source: Any, series: Index, steps: range) -> np.ndarray:
        """Read a block of an array whose series begin at the steps ``first``."""
        features = range(self.n_features)
        begins = np.maximum(first[np.asarray(series)], max(0, steps.start - self.memory))
        out = np.zeros((self.n_out, len(series), len(steps)), source.dtype)
        for begin in np.unique(begins[begins < steps.stop]):
            which = np.flatnonzero(begins == begin)
            some = series if len(which) == len(series) else np.asarray(series)[which]
            block = read_block(source, features, some, range(begin, steps.stop))
            n_steps = min(steps.stop - begin, len(steps))
            out[:, which, -n_steps:] = self.transform_block(block)[:, :, -n_steps:]
        return out
