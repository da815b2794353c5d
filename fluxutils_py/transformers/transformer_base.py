"""The base of the transformers: any form of input, windows transformed when they are read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fluxutils_py.data import LazyArray, SampleWeight, SeriesArray
from fluxutils_py.data.arrays import in_memory, read_block
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.series import find_bounds
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.inputs.inputs import InputLayout, Inputs, Schema
from fluxutils_py.inputs.moments import (
    FeatureModule,
    Moments,
    WeightedBlock,
    feature_text,
    moments,
)
from fluxutils_py.inputs.sharded_data import sharded_reader
from fluxutils_py.inputs.single_steps import read_step, series_indices
from fluxutils_py.inputs.targets import SeriesReader
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.parallel.rank_group import ranks_of_call
from fluxutils_py.sklearn_callbacks import CallbackSupport, run_as_one_task
from fluxutils_py.sklearn_private import as_configured
from fluxutils_py.training.descriptions import describe
from fluxutils_py.validation import check_integer

MOST_VALUES = 1 << 25  # from which means and scales are learnt; of more, from evenly spread blocks


def _apply_within(
    function: FeatureModule, block: np.ndarray, bounds: Segments | None
) -> np.ndarray:
    """Apply a function of blocks to whole series in memory."""
    out = function.transform_block(block)
    if bounds is None:
        return out
    if function.initial:
        for first in np.unique(bounds.start[bounds.start > 0]):
            which = np.flatnonzero(bounds.start == first)
            if first < block.shape[2]:
                out[:, which, first:] = function.transform_block(block[:, which, first:])
    out[:, bounds.outside(slice(None), np.arange(block.shape[2]))] = np.nan
    return out


def _apply_lazily(function: FeatureModule, array: Any, bounds: Segments | None) -> LazyArray:
    """Apply a function of blocks to an array (F, N, T), or (F, T), when it is read."""
    first = np.zeros(array.shape[1], int) if bounds is None else bounds.start
    result = function.over(array, first)
    return result if bounds is None else LazyArray(result, at=partial(_nan_outside, bounds))


def _nan_outside(bounds: Segments, block: np.ndarray, series: Index, steps: Index) -> np.ndarray:
    """Return a block of floats (F, B, S) with NaN at steps that are padding."""
    outside = bounds.outside(np.asarray(series, np.intp), np.asarray(steps, np.intp))
    return np.where(outside, block.dtype.type(np.nan), block)


def _of_one_series(function: FeatureModule, array: Any, bounds: Segments | None) -> Any:
    """Apply a function of blocks to one (F, T_i) array; lazily, if the array is in a file and steps
    are independent.
    """
    if in_memory(array) or function.initial:
        n_features, n_steps = array.shape
        block = read_block(array, range(n_features), range(n_steps))
        return _apply_within(function, block[:, None], bounds)[:, 0]
    return _apply_lazily(function, array, bounds)


# the keys: scikit-learn's set_output would turn the view that ``transform`` returns into a data
# frame, by reading all of it
class SequenceTransformer(
    CallbackSupport,
    OneToOneFeatureMixin,
    TransformerMixin,
    BaseEstimator,
    auto_wrap_output_keys=None,  # type: ignore[call-arg]  # of scikit-learn, without types
):
    """Base of transformers that change each feature."""

    _layout: InputLayout
    # scikit-learn's routing of metadata takes any other name than X for metadata
    __metadata_request__fit: ClassVar = {"x": UNUSED}
    __metadata_request__transform: ClassVar = {"x": UNUSED}

    def fit(self, x: object, y: object = None, *, sharded: bool = False) -> Self:
        """Learn what the transformation needs from the data.

        Parameters
        ----------
        x : array of shape (F, N, T), list of arrays of shape (F, T_i), view, or matrix
            As for :class:`fluxutils_py.Estimator`, but only one input. NaN marks missing values.
        y : None
            Ignored.
        sharded : bool
            Whether each of the ranks that a launcher started gives separate series, or None. All
            ranks learn from all series, with equal results.

        Returns
        -------
        SequenceTransformer
            Itself.

        Raises
        ------
        ValueError
            For values that cannot be used, several inputs, or arguments of wrong shapes. Nothing is
            changed then.
        RankError
            With ``sharded``, on every rank, if ranks differ in a parameter, or in the features of
            their series.
        """
        run_as_one_task(self, lambda: self._fit(x, sharded), x)
        return self

    def _fit(self, x: object, sharded: bool, *sample_weight: object) -> None:
        """Learn from all ranks together, if each has separate series.

        Raises
        ------
        RankError
            On every rank, if the ranks' transformers differ in a parameter.
        """
        name = type(self).__name__
        # not sharded, every rank fits by itself on the same data, and gets the same
        with ranks_of_call("auto" if sharded else None, f"{name}.fit", sharded) as ranks:
            texts: dict[str, str] = {}
            for parameter, value in self.get_params(deep=False).items():
                texts |= describe(parameter, value)
            ranks.require_equal(texts)  # at once: others may have other parameters
            pool = sharded_reader(ranks)
            inputs = self._read_series(x, None, pool)
            statistics = self._compute_statistics(inputs, pool, *sample_weight)
        # all that may fail comes first: an error changes nothing
        self.__dict__.update(statistics)
        self.n_features_in_ = inputs.columns
        self._layout = inputs.layout
        self.__dict__.pop("feature_names_in_", None)  # of an earlier fit
        if inputs.names is not None:
            self.feature_names_in_ = inputs.names

    @undisturbed()
    def transform(self, x: object) -> Any:
        """Transform the features of each step.

        Parameters
        ----------
        x : array of shape (F, N, T), list of arrays of shape (F, T_i), view, or matrix
            With the F fitted features, in any of these forms, with any N and T. After fitting a
            view, also a matrix with the view's columns. Steps before the first and after the last
            input of a series (NaN in all features) are padding, and stay NaN.

        Returns
        -------
        view, ndarray, LazyArray or list
            For a view, a view; for an array in a file, a lazy array: windows are transformed when
            they are read. For an array in memory, a new one in the same memory order; for a list, a
            list of them. For a matrix, a matrix, or the container chosen by ``set_output``. float32
            and float64 stay; float16 becomes float32, and integers become float64.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x`` has other features, or is a matrix with infinite values.
        """
        check_is_fitted(self)
        result = self._apply_to_blocks(x, self.as_module(), self._layout)
        if not isinstance(result, np.ndarray) or result.ndim != 2:
            return result
        # a container names its columns: a matrix of other columns than those of fit stays as it is
        names = self.get_feature_names_out()
        return as_configured(result, x, self) if result.shape[1] == len(names) else result

    def fit_transform(self, x: object, y: object = None, *args: Any, **settings: Any) -> Any:
        """Call ``fit`` with these arguments, then ``transform(x)``."""
        fitted = self.fit(x, y, *args, **settings)
        return fitted.transform(x)

    def _read_series(
        self, x: object, layout: InputLayout | None, pool: SeriesReader | None = None
    ) -> Inputs:
        """Read an input of any form that is one array, with the fitted layout if there is one.

        Raises
        ------
        ValueError, TypeError
            As :func:`fluxutils_py.inputs.inputs.read_inputs`.
        """
        name = type(self).__name__
        pool = pool or SeriesReader()
        schema = Schema(name, allow_nan=True, fitted=layout)
        inputs = pool.inputs(x, schema, padded=False)
        if len(inputs.series) > 1:
            raise ShapeError(
                f"{name} takes one array of shape (F, N, T), got a tuple of {len(inputs.series)}; "
                "give each a separate transformer"
            )
        return inputs

    def _apply_to_blocks(self, x: object, function: FeatureModule, layout: InputLayout) -> Any:
        """Apply a function of blocks to an input of any form."""
        inputs = self._read_series(x, layout)
        source = series = inputs.series[0]
        rows = inputs.local_series()
        if isinstance(x, SequenceView):  # before and after its steps there may be others
            source = SeriesArray(x.array, "x")
            rows = Segments.from_lengths(source.N, source.T)
        bounds = None
        if function.fills_gaps and inputs.form != "rows":  # samples, of which none is padding
            bounds = find_bounds((source,), rows)
        if isinstance(x, SequenceView):
            if bounds is None and not function.initial:
                return x.map(function.transform_block)
            return x.replace(lambda array: _apply_lazily(function, array, bounds))
        if inputs.is_list:  # series by series
            return [
                _of_one_series(function, a, None if bounds is None else bounds[i : i + 1])
                for i, a in enumerate(series.array.arrays)
            ]
        # a matrix of rows is in memory in any case
        if series.in_memory or inputs.form != "native":
            return inputs.to_rows(_apply_within(function, series.array, bounds))
        # a lazy array applies functions to windows, without the steps before them
        return _apply_lazily(function, series.array, bounds)

    def as_module(self) -> FeatureModule:
        """Return the fitted transformation, of NumPy's blocks (F, n, t) and, for export, of tensors
        (B, F), as a torch module.
        """
        raise NotImplementedError

    def _compute_statistics(self, inputs: Inputs, pool: SeriesReader) -> dict[str, Any]:
        """Compute the attributes that a fit sets."""
        raise NotImplementedError

    def _read_moments(
        self, inputs: Inputs, pool: SeriesReader, weight: SampleWeight | None = None
    ) -> Moments:
        """Return the moments of the values of all ranks; of more than MOST_VALUES, of about as
        many, in blocks all over series and time.

        Raises
        ------
        DataError
            If a value is infinite.
        """
        (series,) = inputs.series

        def blocks() -> Iterator[WeightedBlock]:
            for n, t, block in read_blocks(series, inputs, -(-n_values // MOST_VALUES)):
                is_infinite = np.isinf(block)
                if is_infinite.any():
                    f, i, j = np.argwhere(is_infinite)[0]
                    raise DataError(
                        f"{series.name} is infinite at feature {feature_text(f, inputs.names)}, "
                        f"series {n.start + i}, step {t.start + j}; {type(self).__name__} takes "
                        "numbers, and NaN for what is missing"
                    )
                yield block, None if weight is None else weight.block(n, t)

        n_values = pool.total(series.F * series.N * series.T)
        return pool.moments(moments(blocks(), series.F))

    def stream(
        self,
        n_series: int = 1,
        state: Sequence[Tensor] | None = None,
    ) -> TransformerStream:
        """Transform step by step, as data arrive.

        Parameters
        ----------
        n_series : int
            The number of series at each step.
        state : list of Tensor, optional
            The ``state`` of an earlier stream to continue from. None: the start of the series.

        Returns
        -------
        TransformerStream
            Its ``step`` takes ``(F, N)`` and returns what :meth:`transform` returns for that step
            of the series. Where a series ends is not known: after its first input, a step that is
            NaN in all features is a gap.
        """
        check_is_fitted(self)
        n_series = check_integer("n_series", n_series, 1, error=SpecError)
        shape = (self._layout.features, n_series)
        return TransformerStream(self.as_module(), shape, state)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the output features, which are those of the input.

        Parameters
        ----------
        input_features : array-like of str, optional
            Must equal the fitted names; for data without names, the names to use.

        Returns
        -------
        ndarray of str
            One per feature for sequences with names; one per column for a matrix, or a view without
            names.
        """
        # n_features_in_ of a view counts columns, but names are of features: scikit-learn's method
        # expects as many of these as of those
        names = getattr(self, "feature_names_in_", None)
        if names is not None and (input_features is None or np.array_equal(names, input_features)):
            return np.asarray(names)
        return super().get_feature_names_out(input_features)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class TransformerStream:
    """A fitted transformer that works step by step; made by ``stream``.

    Parameters
    ----------
    function : callable
        The result of a transformer's ``_block_function``.
    shape : (F, N)
    state : list of Tensor, optional

    Attributes
    ----------
    state : list of Tensor
        The values that the next step depends on; empty if steps are independent. ``torch.save``
        stores it.
    has_begun : bool
        Whether all series have had an input, or steps without one mean nothing to the transformer.
    """

    def __init__(
        self,
        function: FeatureModule,
        shape: tuple[int, int],
        state: Sequence[Tensor] | None = None,
    ) -> None:
        self.function = function
        self.shape = shape
        empty = function.empty_state(shape[1])
        self.state: list[Tensor] = empty if state is None else list(state)
        # which series have had an input, if that matters: before it, there is padding
        self._begun = np.full(shape[1], state is not None or not function.fills_gaps)
        if [t.shape for t in self.state] != [t.shape for t in empty]:
            raise ShapeError(f"state is not from a stream of {shape[1]} series")

    @property
    def has_begun(self) -> bool:
        return bool(self._begun.all())

    @undisturbed()
    def step(self, x: object) -> np.ndarray:
        """Transform the next step of all series: ``(F, N)`` to a new array ``(F, N)``."""
        x = read_step(x, self.shape)
        result, self.state = self.function.step(x, self.state)
        if not self.has_begun:
            self._begun |= ~np.isnan(x).all(0)
            result[:, ~self._begun] = np.nan
            self.state = self.function.forget(self.state, ~self._begun)
        return result

    def reset(self, series: Any = None) -> None:
        """Restart some series (an index or a mask; None: all)."""
        restarted = slice(None) if series is None else series_indices(series, self.shape[1])
        self._begun[restarted] = not self.function.fills_gaps
        self.state = self.function.forget(self.state, restarted)


def read_blocks(
    series: SeriesArray, inputs: Inputs, every: int = 1
) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Read all series and steps in blocks, or one of each ``every`` blocks: yield their indices and
    values (F, B, S), NaN where a series has ended.
    """
    rows = inputs.local_series()
    blocks = block_slices(series.N, series.T, series.F)
    # at random among its neighbours, as data may have a period; the same ones each time
    chance = random.Random(0)
    for i in range(0, len(blocks), every):
        n, t = chance.choice(blocks[i : i + every])
        part = rows[n]
        series.prefetch(part, t.start, t.stop)
        block = series.read(part, t.start, t.stop).transpose(2, 1, 0)  # from (S, B, F)
        exists = part.step_mask(t.start, t.stop)  # (S, B)
        if exists is not None:
            block = np.where(exists.T, block, np.nan)
        yield n, t, block
