"""Standardise features to mean 0 and variance 1, lazily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import ShapeError
from fluxutils_py.inputs.inputs import InputLayout
from fluxutils_py.inputs.moments import Affine, Moments, moments
from fluxutils_py.sklearn_callbacks import run_as_one_task
from fluxutils_py.transformers.transformer_base import (
    SequenceTransformer,
    pool_of_call,
    read_numbers,
)


class SequenceScaler(SequenceTransformer):
    """Standardise each feature to mean 0 and variance 1, with one mean and one scale per feature.

    It does for the features of sequences what :class:`sklearn.preprocessing.StandardScaler` does
    for the columns of a matrix: statistics cover all series and steps. They are computed in
    float64, block by block, and do not depend on the memory order. Neither ``fit`` nor
    ``transform`` reads a file as a whole.

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
        Number of values per feature, or the sum of their weights.
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

    Merging as in Chan, Golub & LeVeque (1983), The American Statistician 37(3).

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
    __metadata_request__partial_fit: ClassVar = {"x": UNUSED}
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
        lengths: object = None,
        starts: object = None,
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
        lengths, starts : array of int, shape (N,), optional
            Series ``n`` has the steps ``starts[n]`` (default 0) to ``starts[n] + lengths[n]``
            (default T), where padding is not NaN; other steps have no say. In a pipeline, name
            them ``sequencescaler__lengths`` in ``fit``.
        sharded : bool
            Whether each of the ranks that a launcher started gives separate series, or None; all
            learn from all, and get equal results.

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

        def fit() -> None:
            self._update_statistics(x, sample_weight, None, sharded, lengths, starts)

        run_as_one_task(self, fit, x, given)
        return self

    def partial_fit(
        self,
        x: object,
        y: object = None,
        sample_weight: object = None,
        *,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> Self:
        """Learn from more data of the same features; the result is that of :meth:`fit` on all data
        together.
        """
        layout = getattr(self, "_layout", None)
        return self._update_statistics(x, sample_weight, layout, sharded, lengths, starts)

    def inverse_transform(
        self,
        x: object,
        *,
        features: Sequence[int | str] | None = None,
    ) -> Any:
        """Multiply by the scale and add the mean.

        It takes and returns what :meth:`transform` does, but always an array for a matrix. Use it
        to give predictions of scaled targets their units back, in the form in which ``predict``
        returns them.

        Parameters
        ----------
        x : array of shape (F, N, T), list of arrays of shape (F, T_i), view, or matrix
        features : sequence of int or str, optional
            The fitted features that ``x`` holds, by position or name, if it does not hold all: for
            instance predictions of one output of several.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x`` has other features.
        """
        check_is_fitted(self)
        n_features = self._layout.features
        given = _count_features(x)
        if features is None and given not in (None, n_features):
            raise ShapeError(
                f"x has {given} features per step, but {type(self).__name__} was fitted on "
                f"{n_features}; of some of them, say which: inverse_transform(x, "
                f"features={list(range(given))})"
            )
        places = list(range(n_features)) if features is None else self._feature_indices(features)
        layout = replace(
            self._layout,
            features=len(places),
            columns=self._layout.columns // n_features * len(places),
            names=None,  # predictions have none
        )
        # columns of a data frame have other names than those of fit, or are only some of them
        x = x.to_numpy() if hasattr(x, "to_numpy") else x
        mean, scale = self._mean_and_scale()
        undo = Affine(mean[places], scale[places], inverse=True)
        return self._apply_to_blocks(x, undo, layout)

    # -- inside ----------------------------------------------------------------------------------

    def _update_statistics(
        self,
        x: object,
        sample_weight: object,
        layout: InputLayout | None,
        sharded: bool,
        lengths: object,
        starts: object,
    ) -> Self:
        """Learn from data, from scratch or in addition to earlier data of this layout."""
        earlier = {"data learnt earlier": self._describe_earlier(layout)}
        with pool_of_call(self, sharded, **earlier) as pool:
            for name in ("with_mean", "with_std"):
                if not isinstance(getattr(self, name), bool | np.bool_):
                    raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
            inputs, series = self._read_series(x, layout, pool, lengths, starts)
            weight = pool.weight(sample_weight, inputs)
            if weight is not None:  # checks it: the scale of weights does not matter
                weight = weight.normalized(inputs.whole(), (), add_up=pool.total)
            blocks = read_numbers(series, inputs, type(self).__name__, weight)
            total = pool.moments(moments(blocks, series.F))
        if layout is not None:
            n = self.n_samples_seen_
            total = Moments(n, self.mean_, self.var_ * n).merge(total)
        scale = total.scale(series.name) if self.with_std else None
        # set after all that may fail: an error changes nothing
        if layout is None:
            self._set_fitted(inputs)
        self.n_samples_seen_ = total.count
        self.mean_ = total.mean
        self.var_ = total.variance
        self.scale_ = scale
        return self

    def _describe_earlier(self, layout: InputLayout | None) -> str:
        """Describe the data that this fit adds to: as their results, they must be the same on all
        ranks.
        """
        if layout is None:
            return "none"
        n = self.n_samples_seen_.max(initial=0)
        digest = digest_arrays(self.n_samples_seen_, self.mean_, self.var_)
        return f"{n:g} values with the digest {digest}"

    def _feature_indices(self, features: Sequence[int | str]) -> list[int]:
        # what is no name stays, and is checked as a position below
        names = list(getattr(self, "feature_names_in_", ()))
        n_features = self._layout.features
        places = [names.index(f) if f in names else f for f in features]
        if not all(isinstance(f, int | np.integer) and 0 <= f < n_features for f in places):
            raise ShapeError(
                f"features must be {len(places)} places or names among the {n_features} features, "
                f"got {list(features)}"
            )
        return [int(f) for f in places]

    def _mean_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        # mean_ and var_ are learnt anyway: partial_fit needs both
        mean = self.mean_ if self.with_mean else np.zeros_like(self.mean_)
        scale = np.ones_like(mean) if self.scale_ is None else self.scale_
        return mean, scale

    def as_module(self) -> Affine:
        return Affine(*self._mean_and_scale())


def _count_features(x: object) -> Any:
    """Return the features of a step of a view or an array (F, N, T); None of anything else."""
    if isinstance(x, SequenceView):
        return x.n_features
    shape: tuple[int, ...] = getattr(x, "shape", ())
    return shape[0] if len(shape) == 3 else None
