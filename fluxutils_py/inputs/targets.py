"""Read targets in any form and align them with the inputs as series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils import assert_all_finite, check_array, check_consistent_length, column_or_1d

from fluxutils_py.data import SamplesView, SampleWeight, SeriesArray, TimestepsView
from fluxutils_py.data.arrays import DuckArray, as_three_axes, read_block, reject_masked, to_numpy
from fluxutils_py.data.hdf5.datasets import check_dataset
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.lazy import DerivedArray
from fluxutils_py.data.ragged import RaggedArray, as_ragged
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.inputs import as_series
from fluxutils_py.inputs.inputs import (
    BATCH_FIRST,
    Inputs,
    check_aligned,
    feature_counts,
    is_native,
    n_axes,
    require_array,
)

MISSING_LABEL = -100  # marks a step without a label, as in torch
FEW = (
    10  # steps: a matrix with this many columns or fewer may also hold that many targets per series
)


@dataclass(frozen=True)
class Targets:
    """Targets as series.

    ``series`` have shape (G, N, T). ``per_series`` says whether each series has a single target, at
    its last step. ``ndim`` is the number of axes of the array that the user gave.
    """

    series: tuple[SeriesArray, ...]
    per_series: bool
    ndim: int


@dataclass(frozen=True)
class TargetSchema:
    """Requirements that :func:`read_targets` checks.

    Attributes
    ----------
    estimator : str
        Name of the estimator's class, for messages.
    kind : "numbers", "integers" or "labels"
        Integers are for losses that need them. Labels have any type, one per step or series.
    target : "auto", "step" or "series"
        What a matrix holds, see :class:`fluxutils_py.Estimator`.
    per_series : bool, optional
        Whether a matrix has one target per series, if ``target`` is "auto" and its shape fits both.
        None: unknown.
    encode : callable, optional
        Turns labels into integers.
    name : str
        Name of the targets in messages.
    """

    estimator: str
    kind: str = "numbers"
    target: str = "auto"
    per_series: bool | None = None
    encode: Callable[[np.ndarray], np.ndarray] | None = None
    name: str = "y"


def read_targets(y: Any, inputs: Inputs, schema: TargetSchema) -> Targets:
    """Read targets in any form and check that they align with the inputs.

    Raises
    ------
    ValueError, TypeError
        From scikit-learn for vectors and matrices; ShapeError and DataError for sequences.
    """
    if y is None:
        raise ValueError(
            f"This {schema.estimator} estimator requires y to be passed, but the target y is None."
        )
    encode, name = schema.encode, schema.name
    require_array(
        y,
        name,
        "(G, N, T), samples(y) or timesteps(y) of one, or a vector or matrix with the rows of x",
    )
    if isinstance(y, SequenceView):
        _require_same_view(y, inputs)
        series: tuple[SeriesArray, ...] = (SeriesArray(_encode_labels(y.native, encode), name),)
        targets = Targets(series, False, 2)
    elif is_native(y):
        y = as_ragged(y, name)
        arrays = y if isinstance(y, tuple) else (y,)
        if inputs.is_list != all(isinstance(a, RaggedArray) for a in arrays):
            of = "a list of series" if inputs.is_list else "an array"
            raise ShapeError(
                f"{inputs.series[0].name} is {of} and {name} is not: give both as arrays (F, N, "
                "T), or both as lists of arrays (F, T_i)"
            )
        read = tuple(_encode_labels(a, encode) for a in arrays)
        targets = Targets(as_series(read if isinstance(y, tuple) else read[0], name), False, 3)
    else:
        targets = _read_plain_targets(y, inputs, schema)
    if inputs.form == "rows" and targets.series[0].T != inputs.T:
        raise ShapeError(
            f"the rows of the matrix {inputs.series[0].name} are series of {inputs.T} "
            f"step{'s' * (inputs.T > 1)}, but {name} has {targets.series[0].T} steps; if it is of "
            "one series or of one feature, add the missing axis: x[:, None] or x[None]; if "
            "StandardScaler or SimpleImputer made it of samples(x) or timesteps(x), take "
            "SequenceScaler or SequenceImputer, which keep the steps"
        )
    check_aligned(inputs.series[0], targets.series[0])
    if schema.kind == "labels" and any(s.F != 1 for s in targets.series):
        raise ShapeError(
            f"{name} has {feature_counts(targets.series)} labels per step; a classifier learns "
            "one, of shape (1, N, T): take an Estimator with a loss of your own for several"
        )
    return targets


def _require_same_view(y: SequenceView, inputs: Inputs) -> None:
    form = "timesteps" if isinstance(y, TimestepsView) else "samples"
    if inputs.form in ("samples", "timesteps") and inputs.form != form:
        raise ShapeError(f"x is {inputs.form}(...) and y is {form}(...); both must be split alike")


def _encode_labels(a: Any, encode: Callable[[np.ndarray], np.ndarray] | None) -> Any:
    """Turn labels into integers: at once if they are in memory, else when they are read."""
    if encode is None:
        return a
    if isinstance(a, RaggedArray):
        return a.map(lambda series: _encode_labels(series, encode), fill=MISSING_LABEL)
    if not hasattr(a, "shape"):
        a = np.asarray(a)
    a = to_numpy(a)
    return encode(a) if type(a) is np.ndarray else EncodedLabels(a, encode)


class EncodedLabels(DerivedArray):
    """Labels that become integers when they are read."""

    def __init__(self, source: Any, encode: Callable[[np.ndarray], np.ndarray]) -> None:
        self.source, self.encode = source, encode
        self.shape, self.dtype = tuple(source.shape), np.dtype(np.int64)

    def read(self, *index: Index) -> np.ndarray:
        return self.encode(read_block(self.source, *index))


def _read_plain_targets(y: Any, inputs: Inputs, schema: TargetSchema) -> Targets:
    """Read a vector or matrix with one row per series, or one per step for a view of time steps."""
    y, name = to_numpy(y), schema.name
    ndim = max(1, n_axes(y))
    n_rows = inputs.T if inputs.form == "timesteps" else inputs.N
    if schema.kind == "labels":
        array = _labels_of_rows(y, inputs, name)
    else:
        array = check_array(y, accept_sparse="csr", ensure_2d=False, dtype=None, input_name="y")
        array = array.astype(np.float64) if array.dtype.kind == "O" else array
        _check_rows(array, n_rows, inputs, name)
    array = array.reshape(n_rows, -1)
    if schema.encode is not None:
        array = schema.encode(array)
    columns = array.shape[1]
    if inputs.form == "timesteps":
        if columns % inputs.N:
            raise ShapeError(
                f"{name} has {columns} columns, which are not the targets of {inputs.N} series; "
                f"use timesteps({name})"
            )
        return Targets(
            (SeriesArray(TimestepsView.from_rows(array, columns // inputs.N), name),), False, ndim
        )
    if _has_target_per_step(array.shape, inputs, schema):
        return Targets(
            (SeriesArray(SamplesView.from_rows(array, columns // inputs.T), name),), False, ndim
        )
    whole = inputs.whole()
    last = whole.start + whole.length - 1
    if (
        array.dtype.kind in "iub" and schema.kind == "numbers"
    ):  # NaN marks the steps without a target
        array = array.astype(float)
    return Targets((SeriesArray(LastStepTargets(array, inputs.T, last), name),), True, ndim)


def _check_rows(array: np.ndarray, n_rows: int, inputs: Inputs, name: str) -> None:
    """Raise ValueError, as scikit-learn does, unless there are as many rows as series, or steps of
    a view.
    """
    way_out = _of_other_layout(len(array), n_rows, inputs)
    if way_out:
        raise ShapeError(
            f"{name} has {len(array)} rows beside x of shape (F, N, T) = {inputs.series[0].shape}, "
            f"which has {n_rows} series{way_out}"
        )
    check_consistent_length(np.empty(n_rows), array)


def _of_other_layout(n: int, n_rows: int, inputs: Inputs) -> str:
    """Say how to transpose inputs that have as many features as there are rows of targets, ``n``."""
    return BATCH_FIRST if inputs.form == "native" and n == inputs.series[0].F != n_rows else ""


def _has_target_per_step(shape: tuple[int, int], inputs: Inputs, schema: TargetSchema) -> bool:
    """Whether a matrix of one row per series holds the targets of all its steps.

    Raises
    ------
    ShapeError
        If the shape fits both meanings and no setting decides.
    """
    (_, columns), n_steps, target, name = shape, inputs.T, schema.target, schema.name
    fits = columns % n_steps == 0
    if target == "step" and not fits:
        raise ShapeError(
            f"target='step', but {name} has {columns} columns, which are not {n_steps} steps of "
            "any number of targets"
        )
    if n_steps == 1 or target == "step":
        return True
    if target == "series" or not fits:
        return False
    if schema.kind == "labels":  # one label per series
        return True
    if inputs.form != "native" and (schema.per_series is not None or n_steps > FEW):
        return not schema.per_series
    g = columns // n_steps
    what, many, array = (
        ("a target", "T", f"{name}[None]")
        if g == 1
        else (f"{g} targets", f"{g} * T", f"({g}, N, T)")
    )
    raise ShapeError(
        f"{name} has shape {shape} = (N, {many}) beside x of (F, N, T): if it is {what} for each "
        f"step, {'add the missing axis' if g == 1 else 'give an array'}, {array}, or set "
        f"target='step'; if it is {columns} targets for each series, set target='series'"
    )


def _labels_of_rows(y: Any, inputs: Inputs, name: str) -> np.ndarray:
    """Return unencoded labels of rows, (n,), or of their steps, (n, m), where None and NaN mark
    missing labels.

    Raises
    ------
    ValueError, DataError
        If their number differs from the series or steps of the inputs, or one of a vector is
        missing or infinite.
    """
    reject_masked(y, name)
    n_rows, n_columns = (inputs.T, inputs.N) if inputs.form == "timesteps" else (inputs.N, inputs.T)
    labels = np.asarray(y)
    if labels.dtype.kind == "U" and not hasattr(
        y, "dtype"
    ):  # of a NaN in a list NumPy makes the text "nan"
        given = np.asarray(y, dtype=object)
        labels = labels if is_label(given).all() else given
    if labels.ndim == 2 and labels.shape[1] > 1:
        if labels.shape != (n_rows, n_columns):
            raise ShapeError(
                "y should be a 1d array, one label per "
                f"{'step' if inputs.form == 'timesteps' else 'series'}, or have the shape "
                f"({n_rows}, {n_columns}), a label per step; {name} has shape {labels.shape}"
                + _of_other_layout(len(labels), n_rows, inputs)
            )
        return labels
    labels = np.asarray(column_or_1d(labels, warn=True))
    if labels.dtype.kind != "O":
        assert_all_finite(labels, input_name="y")
    elif not (there := is_label(labels)).all():
        row = int(there.argmin())
        raise DataError(
            f"{name} has no label in row {row}: {labels[row]!r}; leave such rows out, or give them "
            "a label and the sample_weight 0. Only labels of steps, (1, N, T), may be missing"
        )
    _check_rows(labels, n_rows, inputs, name)
    return labels


def read_labels(
    y: Any, inputs: Inputs, weight: SampleWeight | None
) -> tuple[Any, SampleWeight | None]:
    """Return unencoded labels, (1, N, T) or, for one per series, (1, N, 1), and weights of the same
    shape.
    """
    if isinstance(y, SequenceView):
        return y.native, weight
    check_dataset(y, "y")
    if is_native(y):
        return as_three_axes(as_ragged(y, "y"), "y"), weight
    array = _labels_of_rows(y, inputs, "y")
    if inputs.form == "timesteps":
        return (array[None, None] if array.ndim == 1 else array.T[None]), weight
    if array.ndim == 2:
        return array[None], weight
    if weight is not None:
        weight = SampleWeight(weight.max_per_series(), inputs.N, 1)
    return array[None, :, None], weight


class LastStepTargets(DuckArray):
    """A (G, N, T) array with one target per series, at its last step.

    All other steps hold NaN or, for integers, ``MISSING_LABEL``.

    Parameters
    ----------
    values : ndarray of shape (N, G)
    n_steps : int
    last : ndarray of int, shape (N,)
        Index of the last step of each series.
    """

    nonblocking = True

    def __init__(self, values: np.ndarray, n_steps: int, last: np.ndarray) -> None:
        self.values, self.last, self.dtype = values, last, values.dtype
        self.shape = (values.shape[1], values.shape[0], n_steps)

    def read(self, *index: Index) -> np.ndarray:
        g, n, t = map(np.asarray, index)
        out = np.full(
            (len(g), len(n), len(t)),
            MISSING_LABEL if self.dtype.kind in "iu" else np.nan,
            self.dtype,
        )
        row, column = np.nonzero(self.last[n][:, None] == t)
        out[:, row, column] = self.values[n[row]].T[g]
        return out


def is_label(labels: np.ndarray) -> np.ndarray:
    """Return a mask of labels that are not missing: not NaN and, among objects, not None or pandas'
    NA or NaT.
    """
    if labels.dtype.kind == "f":
        return ~np.isnan(labels)
    if labels.dtype.kind != "O":
        return np.ones(labels.shape, bool)
    return np.array([_is_label_object(v) for v in labels.ravel()], bool).reshape(labels.shape)


def _is_label_object(value: Any) -> bool:
    return (
        value is not None
        and type(value).__name__ not in ("NAType", "NaTType")
        and bool(value == value)
    )
