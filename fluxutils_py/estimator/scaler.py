"""Scaling to mean 0 and variance 1, per feature, of data that need not fit into memory."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils._set_output import _wrap_data_with_container
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data import LazyArray, SampleWeight, SequenceView, Series
from fluxutils_py.data.weights import blocks
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.estimator.layout import Inputs, read_inputs, read_weight, sizes
from fluxutils_py.estimator.scoring import merge

CONSTANT = 10 * np.finfo(float).eps  # a spread of so much of the mean is rounding


class _Transforming:
    """Methods that scikit-learn's ``set_output`` must not wrap, as it does those of the transformer's own class.

    It would make a data frame of a view, by reading all of it.
    """

    def transform(self, x: Any) -> Any:
        """Subtract the mean and divide by the scale.

        Parameters
        ----------
        x : array of shape (F, N, T), view, or matrix
            Of the F features that were fitted, in any of these forms, with any N and T. After fitting a view, a
            matrix of the view's columns too.

        Returns
        -------
        view, ndarray or LazyArray
            Of a view, a view, and of an array in a file, a lazy array: windows are transformed as they are read. Of
            an array in memory, a fresh one in the same memory order. Of a matrix, a matrix (what ``set_output``
            asked for). float32 and float64 stay; float16 becomes float32, integers become float64. NaN stays.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x`` has other features, or is an infinite matrix.
        """
        found = self._apply(x, self)
        is_matrix = isinstance(found, np.ndarray) and found.ndim == 2
        return _wrap_data_with_container("transform", found, x, self) if is_matrix else found

    def fit_transform(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """``fit(x)``, then ``transform(x)``."""
        return self.fit(x, y, sample_weight).transform(x)  # type: ignore[attr-defined]  # of the class below

    def _apply(self, x: Any, est: Any, inverse: bool = False) -> Any:
        raise NotImplementedError


class SequenceScaler(_Transforming, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
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
    _parameter_constraints: ClassVar = {"with_mean": ["boolean"], "with_std": ["boolean"]}
    # scikit-learn's routing of metadata takes any other name than X for metadata
    __metadata_request__fit: ClassVar = {"x": UNUSED}
    __metadata_request__partial_fit: ClassVar = {"x": UNUSED}
    __metadata_request__transform: ClassVar = {"x": UNUSED}
    __metadata_request__inverse_transform: ClassVar = {"x": UNUSED}

    def __init__(self, *, with_mean: bool = True, with_std: bool = True) -> None:
        self.with_mean = with_mean
        self.with_std = with_std

    def fit(self, x: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn means and scales.

        Parameters
        ----------
        x : array of shape (F, N, T), view, or matrix
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
        return self._learn(x, sample_weight, onward=False)

    def partial_fit(self, x: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn from more data of the same features, to what ``fit`` on all of them together gives; see :meth:`fit`."""
        return self._learn(x, sample_weight, onward=hasattr(self, "mean_"))

    def inverse_transform(self, x: Any) -> Any:
        """Multiply by the scale and add the mean.

        What :meth:`transform` takes and returns; always an array for a matrix. So predictions of scaled targets get
        back their units: in the form that the targets had when they were fitted, which ``predict`` returns.
        """
        nameless = copy.copy(self)  # predictions have no names of columns
        nameless.__dict__.pop("feature_names_in_", None)
        return self._apply(x.to_numpy() if hasattr(x, "to_numpy") else x, nameless, inverse=True)

    # -- inside ----------------------------------------------------------------------------------------

    def _learn(self, x: Any, sample_weight: Any, onward: bool) -> Self:
        self._validate_params()
        inputs, series = _one_input(x, self, fitted=onward)
        weight = read_weight(sample_weight, inputs)
        if weight is not None:
            weight.normalise(inputs.whole(), ())  # checks it: the scale of weights does not matter
        count, mean, squares = _moments(series, inputs, weight)
        if onward:
            n = self.n_samples_seen_
            count, mean, squares = merge(n, self.mean_, self.var_ * n, count, mean, squares)
        else:
            self.n_features_in_, self._n_inputs, self._form = inputs.columns, sizes(inputs.series), inputs.form
            self.__dict__.pop("feature_names_in_", None)
            if inputs.names is not None:
                self.feature_names_in_ = inputs.names
        self.n_samples_seen_, self.mean_, self.var_ = count, mean, squares / np.where(count > 0, count, 1)
        scale = np.sqrt(self.var_)
        self.scale_ = np.where(scale <= CONSTANT * abs(mean), 1.0, scale) if self.with_std else None
        return self

    def _apply(self, x: Any, est: Any, inverse: bool = False) -> Any:
        check_is_fitted(self)
        inputs, series = _one_input(x, est, fitted=True)
        mean = self.mean_ if self.with_mean else np.zeros(series.F)
        scale = np.ones(series.F) if self.scale_ is None else self.scale_
        function = _Scaling(mean, scale, inverse)
        if isinstance(x, SequenceView):
            return x.map(function)
        if not series.in_memory and inputs.form == "native":
            return LazyArray(series.array, functions=(function,))
        return inputs.flat(function(series.array))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class _Scaling:
    """What is done to blocks of shape (F, n, t): a function that can be pickled."""

    def __init__(self, mean: np.ndarray, scale: np.ndarray, inverse: bool) -> None:
        self.mean, self.scale, self.inverse = mean[:, None, None], scale[:, None, None], inverse

    def __call__(self, block: np.ndarray) -> np.ndarray:
        is_short = block.dtype.kind == "f" and block.dtype.itemsize <= 4
        out = np.empty_like(block, np.float32 if is_short else np.float64, subok=False)  # the same memory order
        # NumPy computes in float64 and rounds to float32: a large mean takes no digits from what is left
        if self.inverse:
            return np.add(np.multiply(block, self.scale, dtype=float), self.mean, out=out, casting="same_kind")
        np.subtract(block, self.mean, out=out, casting="same_kind")
        return np.divide(out, self.scale, out=out, casting="same_kind")


def _one_input(x: Any, est: Any, fitted: bool) -> tuple[Inputs, Series]:
    inputs = read_inputs(x, est, fitted=fitted)
    if len(inputs.series) > 1:
        raise ShapeError(
            f"SequenceScaler takes one array of shape (F, N, T), got a tuple of {len(inputs.series)}; give each a "
            "scaler of its own"
        )
    return inputs, inputs.series[0]


def _moments(series: Series, inputs: Inputs, weight: SampleWeight | None) -> tuple[Any, Any, Any]:
    """Number (or weight), mean, and sum of squared distances from it, of each feature."""
    rows = inputs.whole()
    origin = np.full((series.F, 1), np.nan)  # of each feature, a value that occurs
    found: tuple[Any, Any, Any] = (np.zeros(series.F, int), np.zeros(series.F), np.zeros(series.F))
    for n, t in blocks(series.N, series.T, series.F):
        part = rows[n]
        series.announce(part, t.start, t.stop)
        block = series.read(part, t.start, t.stop).transpose(2, 1, 0)  # (F, B, S)
        # in C order, so that sums are added up alike whatever the memory order of the data
        values = np.array(block, float, order="C").reshape(series.F, -1)
        if np.isinf(values).any():
            f, i, j = np.argwhere(np.isinf(block))[0]
            raise DataError(
                f"{series.name} is infinite at feature {f}, series {n.start + i}, step {t.start + j}; SequenceScaler "
                "takes numbers, and NaN for what is missing"
            )
        w = ~np.isnan(values)
        if weight is not None:
            w = w * weight.block(n, t).ravel().astype(float)
        total = w.sum(1)
        origin = np.where(np.isnan(origin), np.fmax.reduce(np.where(w > 0, values, np.nan), 1, keepdims=True), origin)
        # small numbers, of which a sum loses no digits; of a constant, exactly 0
        distance = np.where(w > 0, values - origin, 0)
        mean = (w * distance).sum(1) / np.where(total > 0, total, 1)
        found = merge(*found, total, mean, (w * (distance - mean[:, None]) ** 2).sum(1))
    count, mean, squares = found
    return count, mean + np.nan_to_num(origin[:, 0]), squares
