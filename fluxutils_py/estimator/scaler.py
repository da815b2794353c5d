"""Scaling to mean 0 and variance 1, per feature, of data that need not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.inputs import InputLayout, read_weight
from fluxutils_py.estimator.moments import Standardize, merge_moments, moments, safe_scale
from fluxutils_py.estimator.transformer_base import SequenceTransformer, read_numbers


class SequenceScaler(SequenceTransformer):
    """Shifts and scales each feature to mean 0 and variance 1: one mean and one scale per feature.

    What :class:`sklearn.preprocessing.StandardScaler` does to the columns of a matrix, this does to the features of
    sequences: statistics go over all series and steps. They are computed in float64, block by block, and the result
    does not depend on the order in memory; data in a file are never read as a whole, neither by ``fit`` nor by
    ``transform``.

    Parameters
    ----------
    with_mean : bool
        Whether to subtract the mean.
    with_std : bool
        Whether to divide by the standard deviation.

    Attributes
    ----------
    mean_, var_ : ndarray of shape (F,), float64
        NaN does not count. A feature without any value has mean 0 and variance 0.
    scale_ : ndarray of shape (F,), or None without ``with_std``
        Square root of ``var_``; 1 for constant features, whose standard deviation is 0 or, against their mean,
        no more than rounding.
    n_samples_seen_ : ndarray of shape (F,)
        How many values of each feature counted; with weights, their sum.
    n_features_in_ : int
        F; of a matrix or a view, its columns.
    feature_names_in_ : ndarray of str
        Of a data frame.

    Notes
    -----
    Of a plain matrix, each column is a feature. ``TransformedTargetRegressor`` makes a plain matrix of a view of
    targets: there each step of ``samples(y)``, or each series of ``timesteps(y)``, gets a mean of its own. To have
    one per feature, scale ``y`` before, and undo it with ``inverse_transform``.

    Merging as in Chan, Golub & LeVeque (1983), The American Statistician 37(3).

    Examples
    --------
    >>> from sklearn.pipeline import make_pipeline
    >>> from fluxutils_py import SequenceRegressor, samples
    >>> x = np.random.default_rng(0).normal([[[50.0]], [[-30.0]]], [[[3.0]], [[0.2]]], size=(2, 30, 20))  # (F, N, T)
    >>> scaler = SequenceScaler().fit(x)
    >>> scaler.mean_.round(), scaler.scale_.round(1)
    (array([ 50., -30.]), array([3. , 0.2]))
    >>> scaler.transform(samples(x))  # nothing is read
    SamplesView(shape=(30, 40), dtype=float64, of (F, N, T)=(2, 30, 20))
    >>> make_pipeline(SequenceScaler(), SequenceRegressor(epochs=2)).fit(samples(x), samples(x[:1])).predict(x).shape
    (1, 30, 20)
    """

    mean_: np.ndarray
    var_: np.ndarray
    n_samples_seen_: np.ndarray
    # scikit-learn's routing of metadata takes any other name than X for metadata
    __metadata_request__partial_fit: ClassVar = {"x": UNUSED}
    __metadata_request__inverse_transform: ClassVar = {"x": UNUSED}

    def __init__(self, *, with_mean: bool = True, with_std: bool = True) -> None:
        self.with_mean = with_mean
        self.with_std = with_std

    def fit(self, x: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn means and scales.

        Parameters
        ----------
        x : array of shape (F, N, T), list of arrays of shape (F, T_i), view, or matrix
            As :class:`fluxutils_py.Estimator` takes it, but not several inputs; NaN is a value that is missing.
        y : None
            Ignored.
        sample_weight : array of shape (N,), (N, T) or (1, N, T), optional
            Weights of series (or rows) or of steps. For ``timesteps``, (T,) or (T, N).

        Returns
        -------
        SequenceScaler
            Itself.

        Raises
        ------
        ValueError
            On infinite values, several inputs, or arguments of wrong shapes; nothing is changed.
        """
        return self._update(x, sample_weight, None)

    def partial_fit(self, x: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn from more data of the same features, to what ``fit`` on all of them together gives; see :meth:`fit`."""
        return self._update(x, sample_weight, getattr(self, "_layout", None))

    def inverse_transform(self, x: Any, *, features: Sequence[int | str] | None = None) -> Any:
        """Multiply by the scale and add the mean.

        What :meth:`transform` takes and returns; always an array for a matrix. So predictions of scaled targets get
        back their units: in the form that the targets had when they were fitted, which ``predict`` returns.

        Parameters
        ----------
        x : array of shape (F, N, T), list of arrays of shape (F, T_i), view, or matrix
        features : sequence of int or str, optional
            Which of the fitted features ``x`` holds, by their places or names, where it does not hold all: predictions
            of one output of several.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x`` has other features.
        """
        check_is_fitted(self)
        layout, n_features = self._layout, self._layout.features
        places = list(range(n_features)) if features is None else self._feature_indices(features)
        is_native = len(getattr(x, "shape", ())) == 3
        given = x.n_features if isinstance(x, SequenceView) else x.shape[0] if is_native else None
        if features is None and given not in (None, n_features):
            raise ShapeError(
                f"x has {given} features per step, but {type(self).__name__} was fitted on {n_features}; of some "
                f"of them, say which: inverse_transform(x, features={list(range(given))})"
            )
        columns = layout.columns // n_features * len(places)
        layout = replace(layout, features=len(places), columns=columns, names=None)  # predictions have no names
        x = x.to_numpy() if hasattr(x, "to_numpy") else x
        mean, scale = self._mean_and_scale()
        return self._apply(x, Standardize(mean[places], scale[places], inverse=True), layout)

    # -- inside ----------------------------------------------------------------------------------------

    def _update(self, x: Any, sample_weight: Any, layout: InputLayout | None) -> Self:
        """Learn from data: anew, or to what was learnt from data of this layout."""
        for name in ("with_mean", "with_std"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        inputs, series = self._read(x, layout)
        weight = read_weight(sample_weight, inputs)
        if weight is not None:
            weight.normalize(inputs.whole(), ())  # checks it: the scale of weights does not matter
        count, mean, squares = moments(read_numbers(series, inputs, type(self).__name__, weight), series.F)
        if layout is None:
            self._remember(inputs)
        else:
            n = self.n_samples_seen_
            count, mean, squares = merge_moments(n, self.mean_, self.var_ * n, count, mean, squares)
        self.n_samples_seen_, self.mean_, self.var_ = count, mean, squares / np.where(count > 0, count, 1)
        self.scale_ = safe_scale(mean, self.var_) if self.with_std else None
        return self

    def _feature_indices(self, features: Sequence[int | str]) -> list[int]:
        names, n_features = list(getattr(self, "feature_names_in_", ())), self._layout.features
        places = [names.index(f) if f in names else f for f in features]
        if not all(isinstance(f, int | np.integer) and 0 <= f < n_features for f in places):
            raise ShapeError(
                f"features must be {len(places)} places or names among the {n_features} features, got {list(features)}"
            )
        return [int(f) for f in places]

    def _mean_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        mean = self.mean_ if self.with_mean else np.zeros_like(self.mean_)
        return mean, np.ones_like(mean) if self.scale_ is None else self.scale_

    def _block_function(self) -> Standardize:
        return Standardize(*self._mean_and_scale(), inverse=False)
