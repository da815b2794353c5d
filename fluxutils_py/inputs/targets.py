"""Read targets in any form and align them with the inputs as series."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np
from sklearn.utils import assert_all_finite, check_array, check_consistent_length, column_or_1d
from torch import Tensor

from fluxutils_py.data import SamplesView, SampleWeight, SeriesArray, TimestepsView
from fluxutils_py.data.arrays import as_three_axes, reject_masked, require_list_of_series
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.lazy import LazyArray
from fluxutils_py.data.ragged import RaggedArray, as_ragged
from fluxutils_py.data.series import check_source
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.inputs.inputs import (
    BATCH_FIRST,
    Inputs,
    Schema,
    as_series,
    check_aligned,
    feature_counts,
    is_native,
    n_axes,
    read_inputs,
    read_weight,
    require_array,
)
from fluxutils_py.inputs.labels import MISSING_LABEL, encode_labels, is_label
from fluxutils_py.inputs.moments import Moments

Summand = TypeVar("Summand")

# steps: a matrix with this many columns or fewer may also hold that many targets per series
FEW = 10


@dataclass(frozen=True)
class Targets:
    """Targets as series.

    ``series`` have shape (G, N, T). ``per_series`` says whether each series has a single target, at
    its last step. ``ndim`` is the number of axes of the array that the user gave.
    """

    series: tuple[SeriesArray, ...]
    per_series: bool
    ndim: int


class SeriesReader:
    """Reads the series of a call that has all of them: its sums and labels are those of all."""

    def inputs(self, x: object, schema: Schema, *, name: str = "x", **bounds: Any) -> Inputs:
        """Read inputs; see :func:`read_inputs`."""
        return read_inputs(x, schema, name=name, **bounds)

    def weight(
        self, sample_weight: object, inputs: Inputs, *, beside_lengths: bool = False
    ) -> SampleWeight | None:
        """Read weights; see :func:`read_weight`."""
        return read_weight(sample_weight, inputs, beside_lengths=beside_lengths)

    def targets(self, y: object, inputs: Inputs, schema: Schema) -> Targets:
        """Read targets; see :func:`read_targets`."""
        return read_targets(y, inputs, schema)

    def classes(
        self, find: Callable[[], tuple[np.ndarray, int]], inputs: Inputs
    ) -> tuple[np.ndarray, int]:
        """Return the classes of all series, sorted, and the number of labels; ``find()`` returns
        those of the series at hand, of which there may be none.
        """
        return find()

    def gather(self, value: Any) -> list[Any]:
        """Return a value of each process that reads, in their order."""
        return [value]

    def total(self, values: Summand) -> Summand:
        """Add up arrays or numbers of all series."""
        # in the order of ranks, so that all get the same bits
        return reduce(operator.add, self.gather(values))

    def add_up(self, t: Tensor) -> Tensor:
        """Add up large tensors of all series, in place."""
        return t

    def moments(self, moments: Moments) -> Moments:
        """Merge the moments of all series."""
        return reduce(Moments.merge, self.gather(moments))

    def require_equal(self, values: Mapping[str, Any]) -> None:
        """Raise unless all that read have equal values."""


def read_targets(y: object, inputs: Inputs, schema: Schema) -> Targets:
    """Read targets in any form and check that they align with the inputs.

    Raises
    ------
    ValueError, TypeError
        From scikit-learn for vectors and matrices; ShapeError and DataError for sequences.
    """
    if y is None:
        raise ValueError(  # in the words of scikit-learn, which its own tests look for
            f"This {schema.estimator} estimator requires y to be passed, but the target y is None."
        )
    y = require_array(
        y,
        schema.target_name,
        "(G, N, T), samples(y) or timesteps(y) of one, or a vector or matrix with the rows of x",
    )
    if isinstance(y, SequenceView):
        form = "timesteps" if isinstance(y, TimestepsView) else "samples"
        if inputs.form in ("samples", "timesteps") and inputs.form != form:
            raise ShapeError(
                f"x is {inputs.form}(...) and y is {form}(...); both must be split alike"
            )
        series = SeriesArray(_encoded(y.native, schema), schema.target_name)
        targets = Targets((series,), per_series=False, ndim=2)
    elif is_native(y):
        targets = _read_native_targets(y, inputs, schema)
    else:
        targets = _read_plain_targets(y, inputs, schema)
    n_steps = targets.series[0].T
    if inputs.form == "rows" and n_steps != inputs.T:
        raise ShapeError(
            f"the rows of the matrix {inputs.series[0].name} are series of {inputs.T} "
            f"step{'s' * (inputs.T > 1)}, but {schema.target_name} has {n_steps} steps; if it is "
            "of one series or of one feature, add the missing axis: x[:, None] or x[None]; if "
            "StandardScaler or SimpleImputer made it of samples(x) or timesteps(x), use "
            "SequenceScaler or SequenceImputer, which keep the steps; if permutation_importance of "
            "sklearn.inspection did, give samples(x) and samples(y) to fit and to it"
        )
    check_aligned(inputs.series[0], targets.series[0])
    if schema.kind == "labels" and any(s.F != 1 for s in targets.series):
        raise ShapeError(
            f"{schema.target_name} has {feature_counts(targets.series)} labels per step; a "
            "classifier learns one, of shape (1, N, T): for several at once, give rows of zeros "
            "and ones to Estimator(loss=nn.BCEWithLogitsLoss()), whose outputs are log-odds"
        )
    return targets


def _read_native_targets(y: object, inputs: Inputs, schema: Schema) -> Targets:
    y = y if hasattr(y, "shape") else as_ragged(y, schema.target_name)
    # as_ragged has turned lists of series, also those in a tuple, into RaggedArrays
    arrays = y if isinstance(y, tuple) else (y,)
    if inputs.is_list != all(isinstance(a, RaggedArray) for a in arrays):
        form = "a list of series" if inputs.is_list else "an array"
        raise ShapeError(
            f"{inputs.series[0].name} is {form} and {schema.target_name} is not: give both as "
            "arrays (F, N, T), or both as lists of arrays (F, T_i)"
        )
    encoded = tuple(_encoded(a, schema) for a in arrays)
    series = as_series(encoded if isinstance(y, tuple) else encoded[0], schema.target_name)
    return Targets(series, per_series=False, ndim=3)


def _encoded(labels: object, schema: Schema) -> object:
    return labels if schema.encode is None else encode_labels(labels, schema.encode)


# -- vectors and matrices ------------------------------------------------------------------------


def _read_plain_targets(y: object, inputs: Inputs, schema: Schema) -> Targets:
    """Read a vector or matrix with one row per series, or one per step for a view of time steps."""
    name = schema.target_name
    ndim = max(1, n_axes(y))  # after a vector, predictions are vectors
    n_rows = inputs.T if inputs.form == "timesteps" else inputs.N
    if schema.kind == "labels":
        array = _labels_of_rows(y, inputs, name)
    else:
        array = check_array(y, accept_sparse="csr", ensure_2d=False, dtype=None, input_name="y")
        # numbers as objects, as in a data frame of mixed columns
        array = array.astype(np.float64) if array.dtype.kind == "O" else array
        _check_rows(array, n_rows, inputs, name)
    array = array.reshape(n_rows, -1)
    if schema.encode is not None:
        array = schema.encode(array)
    native: np.ndarray | LazyArray
    per_series = False
    if inputs.form == "timesteps":
        n_columns = array.shape[1]
        if n_columns % inputs.N:
            raise ShapeError(
                f"{name} has {n_columns} columns, which are not the targets of {inputs.N} series; "
                f"use timesteps({name})"
            )
        native = TimestepsView.from_rows(array, n_columns // inputs.N)
    elif _has_target_per_step(array.shape, inputs, schema):
        native = SamplesView.from_rows(array, array.shape[1] // inputs.T)
    else:
        per_series = True
        if array.dtype.kind in "iub" and schema.kind == "numbers":
            array = array.astype(float)  # NaN marks the steps without a target
        native = last_step_targets(array, inputs.T, inputs.local_series().stop - 1)
    return Targets((SeriesArray(native, name),), per_series, ndim)


def _check_rows(array: np.ndarray, n_rows: int, inputs: Inputs, name: str) -> None:
    """Raise ValueError, as scikit-learn does, unless there are as many rows as series, or steps of
    a view.
    """
    n = len(array)
    remedy = _transpose_remedy(n, n_rows, inputs)
    y = name.split()[-1]
    of_steps = f"{y}[None, None]" if array.ndim == 1 else f"{y}.T[:, None]"
    if not remedy and inputs.form == "native" and n == inputs.T != n_rows == 1:
        remedy = f"; for a target at each of its {n} steps, give {of_steps}"
    if inputs.form == "rows" and n == inputs.columns != n_rows:
        remedy = (
            f"; if x is one series (F, T), give x[:, None] and {of_steps}; if a matrix of features "
            "by samples, give x.T"
        )
    if remedy:
        x = f"x of shape (F, N, T) = {inputs.series[0].shape} has {n_rows} series"
        if inputs.form == "rows":
            x = f"the matrix x has {n_rows}, and {inputs.columns} columns"
        raise ShapeError(f"{name} has {n} rows, but {x}{remedy}")
    check_consistent_length(np.empty(n_rows), array)


def _transpose_remedy(n: int, n_rows: int, inputs: Inputs) -> str:
    """Say how to transpose inputs whose features are as many as the rows of targets, ``n``."""
    return BATCH_FIRST if inputs.form == "native" and n == inputs.series[0].F != n_rows else ""


def _has_target_per_step(shape: tuple[int, int], inputs: Inputs, schema: Schema) -> bool:
    """Whether a matrix of one row per series holds the targets of all its steps.

    Raises
    ------
    ShapeError
        If the shape fits both meanings and no setting decides.
    """
    n_columns = shape[1]
    n_steps = inputs.T
    fits_steps = n_columns % n_steps == 0
    if schema.target == "step" and not fits_steps:
        raise ShapeError(
            f"target='step', but {schema.target_name} has {n_columns} columns, which are not "
            f"{n_steps} steps of any number of targets"
        )
    if n_steps == 1 or schema.target == "step":
        return True
    if schema.target == "series" or not fits_steps:
        return False
    if schema.kind == "labels":  # a matrix of one column has one label per series
        return True
    # Rows of a matrix or a view are flattened steps, so its targets most likely are too; with few
    # steps, as many targets per series are as likely.
    if inputs.form != "native" and (schema.per_series is not None or n_steps > FEW):
        return not schema.per_series
    name = schema.target_name
    n_outputs = n_columns // n_steps
    if n_outputs == 1:
        axes = "(N, T)"
        meaning = "a target for each step"
        remedy = f"add the missing axis, {name}[None]"
    else:
        axes = f"(N, {n_outputs} * T)"
        meaning = f"{n_outputs} targets for each step"
        remedy = f"give an array, ({n_outputs}, N, T)"
    raise ShapeError(
        f"{name} has shape {shape} = {axes} and x has shape (F, N, T): if it is {meaning}, "
        f"{remedy}, or set target='step'; if it is {n_columns} targets for each series, set "
        "target='series'"
    )


def last_step_targets(values: np.ndarray, n_steps: int, last: np.ndarray) -> LazyArray:
    """Return a (G, N, T) array with one target per series, at its last step.

    All other steps hold NaN or, for integers, ``MISSING_LABEL``.

    Parameters
    ----------
    values : ndarray of shape (N, G)
    n_steps : int
    last : ndarray of int, shape (N,)
        Index of the last step of each series.
    """
    repeated = np.broadcast_to(values.T[:, :, None], (*values.T.shape, n_steps))
    return LazyArray(repeated, at=partial(_missing_before, last))


def _missing_before(last: np.ndarray, block: np.ndarray, series: Index, steps: Index) -> np.ndarray:
    missing = MISSING_LABEL if block.dtype.kind in "iu" else np.nan
    is_last = last[np.asarray(series, np.intp)][:, None] == np.asarray(steps, np.intp)
    return np.where(is_last, block, block.dtype.type(missing))


# -- labels --------------------------------------------------------------------------------------


def read_labels(y: object, inputs: Inputs) -> Any:
    """Return unencoded labels, (1, N, T) or, for one per series, (1, N, 1)."""
    if isinstance(y, SequenceView):
        return y.native
    check_source(y, "y")
    if is_native(y):
        return as_three_axes(as_ragged(y, "y"), "y")
    array = _labels_of_rows(y, inputs, "y")
    if inputs.form == "timesteps":
        return array[None, None] if array.ndim == 1 else array.T[None]
    return array[None] if array.ndim == 2 else array[None, :, None]


def _labels_of_rows(y: object, inputs: Inputs, name: str) -> np.ndarray:
    """Return unencoded labels of rows, (n,), or of their steps, (n, m), where None and NaN mark
    missing labels.

    Raises
    ------
    ValueError, DataError
        If their number differs from the series or steps of the inputs, or one of a vector is
        missing or infinite.
    """
    reject_masked(y, name)
    require_list_of_series(y, name)
    rows_are_steps = inputs.form == "timesteps"
    shape = (inputs.T, inputs.N) if rows_are_steps else (inputs.N, inputs.T)
    labels = np.asarray(y)
    if labels.dtype.kind == "U" and not hasattr(y, "dtype"):
        # of a NaN in a list of texts NumPy makes the text "nan"
        given = np.asarray(y, dtype=object)
        labels = labels if is_label(given).all() else given
    if labels.ndim == 2 and labels.shape[1] > 1:
        if labels.shape != shape:
            raise ShapeError(
                f"y should be a 1d array, one label per {'step' if rows_are_steps else 'series'}, "
                f"or have the shape {shape}, a label per step; {name} has shape {labels.shape}"
                + _transpose_remedy(len(labels), shape[0], inputs)
            )
        return labels
    # one column is a vector; scikit-learn warns of it
    labels = np.asarray(column_or_1d(labels, warn=True))
    if labels.dtype.kind != "O":
        assert_all_finite(labels, input_name="y")
    elif not (present := is_label(labels)).all():
        row = int(present.argmin())
        raise DataError(
            f"{name} has no label in row {row}: {labels[row]!r}; leave such rows out, or give them "
            "a label and the sample_weight 0. Only labels of steps, (1, N, T), may be missing"
        )
    _check_rows(labels, shape[0], inputs, name)
    return labels
