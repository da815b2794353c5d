"""What the transformers of this package share: every form of input, windows transformed as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils._set_output import _wrap_data_with_container
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data import LazyArray, SequenceView, Series
from fluxutils_py.data.weights import blocks
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.layout import Inputs, read_inputs, sizes


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

    def fit_transform(self, x: Any, y: Any = None, *args: Any, **settings: Any) -> Any:
        """``fit`` with these arguments, then ``transform(x)``."""
        return self.fit(x, y, *args, **settings).transform(x)  # type: ignore[attr-defined]  # of the classes below

    def _apply(self, x: Any, est: Any, inverse: bool = False) -> Any:
        check_is_fitted(self)
        inputs, series = one_input(x, est, fitted=True)
        function = self._function(series.F, inverse)
        if isinstance(x, SequenceView):
            return x.map(function)
        if not series.in_memory and inputs.form == "native":
            return LazyArray(series.array, functions=(function,))
        return inputs.flat(function(series.array))

    def _function(self, n_features: int, inverse: bool) -> Callable[[np.ndarray], np.ndarray]:
        """What is done to blocks of shape (F, n, t): a function that can be pickled."""
        raise NotImplementedError


class SequenceTransformer(_Transforming, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Base of transformers that do something to each feature."""

    # scikit-learn's routing of metadata takes any other name than X for metadata
    __metadata_request__fit: ClassVar = {"x": UNUSED}
    __metadata_request__transform: ClassVar = {"x": UNUSED}

    def _remember(self, inputs: Inputs) -> None:
        """Set the attributes that say what was fitted."""
        self.n_features_in_, self._n_inputs, self._form = inputs.columns, sizes(inputs.series), inputs.form
        self.__dict__.pop("feature_names_in_", None)
        if inputs.names is not None:
            self.feature_names_in_ = inputs.names

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def one_input(x: Any, est: Any, fitted: bool) -> tuple[Inputs, Series]:
    """An input of any form that is one array.

    Raises
    ------
    ValueError, TypeError
        As of :func:`fluxutils_py.estimator.layout.read_inputs`.
    """
    inputs = read_inputs(x, est, fitted=fitted)
    if len(inputs.series) > 1:
        raise ShapeError(
            f"{type(est).__name__} takes one array of shape (F, N, T), got a tuple of {len(inputs.series)}; give each "
            "a scaler of its own"
        )
    return inputs, inputs.series[0]


def read_blocks(series: Series, inputs: Inputs) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """A pass over all series and steps: which ones, and their values (F, B, S), a view or fresh."""
    rows = inputs.whole()
    for n, t in blocks(series.N, series.T, series.F):
        part = rows[n]
        series.announce(part, t.start, t.stop)
        yield n, t, series.read(part, t.start, t.stop).transpose(2, 1, 0)


def empty_result(block: np.ndarray) -> np.ndarray:
    """A fresh array for a function of a block, in the same memory order: float32 of short floats, else float64."""
    is_short = block.dtype.kind == "f" and block.dtype.itemsize <= 4
    return np.empty_like(block, np.float32 if is_short else np.float64, subok=False)
