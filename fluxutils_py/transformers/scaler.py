"""Standardise features to mean 0 and variance 1, lazily."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.inputs.moments import Affine
from fluxutils_py.inputs.targets import SeriesReader
from fluxutils_py.sklearn_callbacks import run_as_one_task
from fluxutils_py.transformers.transformer_base import SequenceTransformer


class SequenceScaler(SequenceTransformer):
    """Standardise each feature to mean 0 and variance 1, with one mean and one scale per feature.

    It does for the features of sequences what :class:`sklearn.preprocessing.StandardScaler` does
    for the columns of a matrix: statistics cover all series and steps. They are computed in
    float64, block by block, and do not depend on the memory order. Neither ``fit`` nor
    ``transform`` reads a file as a whole.

    Of more than 2**25 values (``MOST_VALUES`` of ``transformers.transformer_base``), ``fit`` reads
    about as many, in blocks of neighbouring series and steps: one of every few consecutive blocks,
    chosen at random but always the same. Infinite values in other blocks are not found.

    Parameters
    ----------
    with_mean : bool
        Whether to subtract the mean.
    with_std : bool
        Whether to divide by the standard deviation.

    Attributes
    ----------
    mean_, var_ : ndarray of shape (F,), float64
        Statistics without NaN. A feature without values has mean 0 and variance 0.
    scale_ : ndarray of shape (F,), or None without ``with_std``
        Square root of ``var_``; 1 for constant features, whose standard deviation is 0 or only
        rounding against their mean.
    n_samples_seen_ : ndarray of shape (F,)
        Number of values per feature that were read, or the sum of their weights.
    n_features_in_ : int
        F; for a matrix or a view, its columns.
    feature_names_in_ : ndarray of str
        Names of features, for inputs that have them.

    Notes
    -----
    In a plain matrix, each column is a feature. ``TransformedTargetRegressor`` turns a view of
    targets into a plain matrix, so each step of ``samples(y)``, or each series of ``timesteps(y)``,
    gets its own mean there. For one mean per feature, scale ``y`` first, and undo it with
    ``inverse_transform``.

    Examples
    --------
    >>> from sklearn.pipeline import make_pipeline
    >>> from fluxutils_py import SequenceRegressor, samples
    >>> x = np.random.default_rng(0).normal(
    ...     [[[50.0]], [[-30.0]]], [[[3.0]], [[0.2]]], size=(2, 30, 20)
    ... )  # (F, N, T)
    >>> scaler = SequenceScaler().fit(x)
    >>> scaler.mean_.round(), scaler.scale_.round(1)
    (array([ 50., -30.]), array([3. , 0.2]))
    >>> scaler.transform(samples(x))  # nothing is read
    SamplesView(shape=(30, 40), dtype=float64, of (F, N, T)=(2, 30, 20))
    >>> make_pipeline(SequenceScaler(), SequenceRegressor(epochs=2)).fit(
    ...     samples(x), samples(x[:1])
    ... ).predict(x).shape
    (1, 30, 20)
    """

    mean_: np.ndarray
    var_: np.ndarray
    n_samples_seen_: np.ndarray
    # scikit-learn's routing of metadata takes any other name than X for metadata
    __metadata_request__inverse_transform: ClassVar = {"x": UNUSED}

    def __init__(
        self,
        *,
        with_mean: bool = True,
        with_std: bool = True,
    ) -> None:
        self.with_mean = with_mean
        self.with_std = with_std

    def fit(
        self,
        x: object,
        y: object = None,
        sample_weight: object = None,
        *,
        sharded: bool = False,
    ) -> Self:
        """Learn means and scales.

        Parameters
        ----------
        x : array of shape (F, N, T), list of arrays of shape (F, T_i), view, or matrix
            As for :class:`fluxutils_py.Estimator`, but only one input. NaN marks missing values.
        y : None
            Ignored.
        sample_weight : array of shape (N,), (N, T) or (1, N, T), optional
            Weights of series (or rows) or of steps. For ``timesteps``, (T,) or (T, N).
        sharded : bool
            Whether each of the ranks that a launcher started gives separate series, or None. All
            ranks learn from all series, with equal results.

        Returns
        -------
        SequenceScaler
            Itself.

        Raises
        ------
        ValueError
            For infinite values, several inputs, or arguments of wrong shapes. Nothing is changed
            then.
        RankError
            With ``sharded``, on every rank, if ranks differ in a parameter, in the features of
            their series, or if only some of them give ``sample_weight``.
        """
        given = {} if sample_weight is None else {"sample_weight": sample_weight}
        run_as_one_task(self, lambda: self._fit(x, sharded, sample_weight), x, given)
        return self

    def _compute_statistics(
        self, inputs: Inputs, pool: SeriesReader, sample_weight: object = None
    ) -> dict[str, Any]:
        weight = pool.weight(sample_weight, inputs)
        if weight is not None:  # checks it: the scale of weights does not matter
            weight = weight.normalized(inputs.local_series(), (), add_up=pool.total)
        total = self._read_moments(inputs, pool, weight)
        name = inputs.series[0].name
        return {
            "scale_": total.scale(name, inputs.names) if self.with_std else None,
            "n_samples_seen_": total.count,
            "mean_": total.mean,
            "var_": total.variance,
        }

    def inverse_transform(self, x: object) -> Any:
        """Multiply by the scale and add the mean.

        It takes and returns what :meth:`transform` does, but always an array for a matrix. Use it
        to convert predictions of scaled targets, as ``predict`` returns them, back to their units.

        Parameters
        ----------
        x : array of shape (F, N, T), list of arrays of shape (F, T_i), view, or matrix

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x`` has other features.
        """
        check_is_fitted(self)
        # columns of a data frame have other names than those of fit
        x = x.to_numpy() if hasattr(x, "to_numpy") else x
        undo = self.as_module().inverted()
        return self._apply_to_blocks(x, undo, replace(self._layout, names=None))

    def as_module(self) -> Affine:
        mean = self.mean_ if self.with_mean else np.zeros_like(self.mean_)
        return Affine(mean, np.ones_like(mean) if self.scale_ is None else self.scale_)
