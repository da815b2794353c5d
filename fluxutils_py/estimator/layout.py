"""The four forms in which users give sequences, and the one that a model is trained on.

=============  =======================================  ==========================================
form           rows are                                 targets, predictions
=============  =======================================  ==========================================
``native``     an (F, N, T) array, or a tuple of such   (G, N, T); or (N,), (N, G): one per series
``rows``       samples of one step: (n, F)              (n,) or (n, G)
``samples``    series: ``samples(x)``                   ``samples(y)``; or (N,), (N, G)
``timesteps``  steps: ``timesteps(x)``                  ``timesteps(y)``; or (T,), (T, G * N)
=============  =======================================  ==========================================
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.utils import check_array, check_consistent_length, column_or_1d, get_tags
from sklearn.utils.validation import _check_sample_weight, _check_y, assert_all_finite, validate_data

from fluxutils_py.data import (
    Rows,
    SamplesView,
    SampleWeight,
    SequenceView,
    Series,
    Stretch,
    TimestepsView,
    as_series,
    require_aligned,
)
from fluxutils_py.data.indexing import picks
from fluxutils_py.data.series import three_axes
from fluxutils_py.errors import DataError, ShapeError

FLOATS = [np.float64, np.float32]
MISSING = -100  # label of a step that has none, as in torch


@dataclass(frozen=True)
class Inputs:
    """Inputs of any form, as series.

    Attributes
    ----------
    series : tuple of Series
        (F, N, T), or several inputs.
    form : "native", "rows", "samples" or "timesteps"
    columns : int, or tuple of int for several inputs
        What scikit-learn calls the number of features.
    names : ndarray of str, optional
        Of the columns of a data frame.
    """

    series: tuple[Series, ...]
    form: str
    columns: Any
    names: np.ndarray | None = None
    _view: SequenceView | None = field(default=None, repr=False)

    @property
    def N(self) -> int:
        return self.series[0].N

    @property
    def T(self) -> int:
        return self.series[0].T

    def rows(self, lengths: Any = None) -> Rows:
        """What is walked through from the zero state, in training: series, or the stretches between gaps in time."""
        if not isinstance(self._view, TimestepsView):
            return self.whole(lengths)
        runs = self._view.runs()
        starts, stops = np.array([r.start for r in runs]), np.array([r.stop for r in runs])
        n = np.arange(self.N)
        return Rows(np.repeat(n, len(runs)), np.tile(starts, self.N), np.tile(stops - starts, self.N))

    def whole(self, lengths: Any = None) -> Rows:
        """The series, whatever gaps there are."""
        return Rows.whole(self.N, self.T, read_lengths(lengths, self))

    def stretches(self) -> list[Stretch]:
        """What is walked through in one go, in prediction, with the earlier steps that only warm the state."""
        if self._view is None or self.form == "samples":
            return [Stretch(tuple(s.array for s in self.series), 0, slice(0, self.T))]
        return [s._replace(array=(s.array,)) for s in self._view.stretches()]

    def flat(self, array: np.ndarray) -> np.ndarray:
        """An (G, N, T) array as rows like those of the inputs; native ones stay."""
        if self.form == "native":
            return array
        return (TimestepsView if self.form == "timesteps" else SamplesView).flat(array)


@dataclass(frozen=True)
class Targets:
    """Targets of any form, as series.

    ``series`` are (G, N, T). ``per_series`` says that there is one target per series, at its last step; ``ndim`` is
    that of the array that was given.
    """

    series: tuple[Series, ...]
    per_series: bool
    ndim: int


# -- inputs --------------------------------------------------------------------------------------------


def read_inputs(x: Any, est: Any, *, fitted: bool, name: str = "x") -> Inputs:
    """Inputs of whatever form, checked; with ``fitted``, to have the features that the estimator was fitted on.

    The estimator is left as it is.

    Raises
    ------
    ValueError, TypeError
        scikit-learn's own for matrices; ShapeError and DataError for sequences.
    """
    _require_array(x, name, "(F, N, T), samples(x) or timesteps(x) of one, or a matrix with one row per sample")
    if isinstance(x, SequenceView):
        inputs = _read_view(x, name)
    elif _is_native(x):
        series = as_series(x, name)
        inputs = Inputs(series, "native", sizes(series))
    else:
        inputs = _read_rows(x, est, fitted, name)
    if fitted and sizes(inputs.series) != est._n_inputs:
        raise ShapeError(
            f"{name} has {sizes(inputs.series)} features per step, but {type(est).__name__} was fitted on "
            f"{est._n_inputs}; if a splitter cut it, note that arrays of shape (F, N, T) are cut along F: hand "
            "samples(x) or timesteps(x) to whatever splits"
        )
    return inputs


def _require_array(value: Any, name: str, forms: str) -> None:
    """Raise on what is plainly no array; of the rest, scikit-learn and NumPy have things to say."""
    is_mapping = isinstance(value, Mapping) and not hasattr(value, "shape")  # some sparse matrices are dicts too
    if value is None or is_mapping or isinstance(value, str | bytes | numbers.Number):
        got = type(value).__name__ if isinstance(value, Mapping) else repr(value)
        raise DataError(f"{name} must be an array {forms}; got {got}")


def _is_native(x: Any) -> bool:
    if isinstance(x, tuple):
        return any(_ndim(a) == 3 for a in x) or not x
    return _ndim(x) >= 3


def _ndim(x: Any) -> int:
    """Of an array, or of nested lists."""
    if hasattr(x, "shape"):
        try:
            return len(x.shape)
        except TypeError:  # a lazy frame
            return 2
    n = 0
    while isinstance(x, list | tuple) and len(x):
        n, x = n + 1, x[0]
        if hasattr(x, "shape"):
            return n + len(x.shape)
    return n


def _read_view(view: SequenceView, name: str) -> Inputs:
    if len(view) == 0:
        raise ValueError(f"Found array with 0 sample(s) (shape={view.shape}) while a minimum of 1 is required.")
    form = "timesteps" if isinstance(view, TimestepsView) else "samples"
    return Inputs((Series(view.native, name),), form, view.shape[1], None, view)


def _read_rows(x: Any, est: Any, fitted: bool, name: str) -> Inputs:
    """A matrix: rows are samples of one step, or, where series of more steps are expected, flat series."""
    if type(x).__module__.split(".")[0] == "torch":
        x = x.detach().cpu().numpy()
    if _ndim(x) == 1 and not hasattr(x, "iloc"):
        raise ShapeError(
            f"{name} has one axis, of {len(x)} values. Reshape your data: x[None, None] if they are one feature of one "
            "series (F, N, T), x.reshape(-1, 1) if a matrix of one feature, x.reshape(1, -1) if one of a single sample"
        )
    shape: Any = getattr(x, "shape", ())
    if fitted and est._form == "native" and len(shape) == 2 and shape[1] != est.n_features_in_:
        raise ShapeError(
            f"X has {shape[1]} features, but {type(est).__name__} is expecting {est.n_features_in_} features as input; "
            f"the rows of a matrix are series of one step: if {name} is of one series or of one feature, add the "
            "missing axis: x[:, None] or x[None]"
        )
    asked = getattr(est, "n_timesteps", None)
    finite = "allow-nan" if get_tags(est).input_tags.allow_nan else True
    form = est._form if fitted else "rows"
    if form in ("samples", "timesteps"):
        # the matrix that a view looks like to scikit-learn
        x = check_array(x, dtype=FLOATS, ensure_all_finite=finite, estimator=est, input_name="X")
        n_features, names = int(est._n_inputs), None
        if x.shape[1] % n_features or (form == "timesteps" and x.shape[1] != est.n_features_in_):
            raise ValueError(
                f"X has {x.shape[1]} features, but {type(est).__name__} is expecting {est.n_features_in_} features as "
                f"input: {n_features} features at each of {est.n_features_in_ // n_features} "
                + ("series" if form == "timesteps" else "steps")
            )
        if form == "timesteps":
            array = TimestepsView.unflat(x, n_features)
            return Inputs((Series(array, name),), form, x.shape[1], None, TimestepsView(array))
    else:
        probe = copy.copy(est)  # takes what validate_data leaves behind
        x = validate_data(probe, x, dtype=FLOATS, ensure_all_finite=finite, reset=not fitted)
        names = getattr(probe, "feature_names_in_", None)
        n_steps = 1 if asked is None else int(asked)
        if x.shape[1] % n_steps:
            raise ShapeError(
                f"X has {x.shape[1]} columns, which are not {n_steps} steps (n_timesteps) of any number of features"
            )
        n_features = x.shape[1] // n_steps
    array = SamplesView.unflat(x, n_features)
    return Inputs((Series(array, name),), "rows" if form == "native" else form, x.shape[1], names)


def read_lengths(lengths: Any, inputs: Inputs) -> np.ndarray | None:
    """Lengths of the series, checked: N integers from 1 to T."""
    if lengths is None:
        return None
    if inputs.form == "timesteps":
        raise ValueError("lengths are for series that differ; timesteps(x) has one row per step, common to all series")
    found = np.asarray(lengths)
    if found.shape != (inputs.N,) or found.dtype.kind not in "iu":
        raise ShapeError(
            f"lengths must be {inputs.N} integers, one per series; got shape {found.shape} of dtype {found.dtype}"
        )
    if found.min() < 1 or found.max() > inputs.T:
        raise DataError(f"lengths must be from 1 to T={inputs.T}, got {found.min()} to {found.max()}")
    return found.astype(int)


def sizes(arrays: tuple[Series, ...]) -> Any:
    """Number of features: an int, or a tuple of them for several arrays."""
    return arrays[0].F if len(arrays) == 1 else tuple(a.F for a in arrays)


# -- targets -------------------------------------------------------------------------------------------


def read_targets(
    y: Any,
    inputs: Inputs,
    est: Any,
    lengths: Any = None,
    *,
    kind: str = "numbers",
    encode: Callable[[np.ndarray], np.ndarray] | None = None,
    name: str = "y",
) -> Targets:
    """Targets of whatever form, aligned with the inputs.

    Parameters
    ----------
    kind : "numbers", "integers" or "labels"
        Integers are for losses that want them; labels are of any type, one per step or series.
    encode : callable, optional
        Makes integers of labels.
    """
    if y is None:
        raise ValueError(f"This {type(est).__name__} estimator requires y to be passed, but the target y is None.")
    _require_array(y, name, "(G, N, T), samples(y) or timesteps(y) of one, or a vector or matrix with the rows of x")
    if isinstance(y, SequenceView):
        _require_same_view(y, inputs)
        series: tuple[Series, ...] = (Series(_encoded(y.native, encode), name),)
        targets = Targets(series, False, 2)
    elif _is_native(y):
        arrays = y if isinstance(y, tuple) else (y,)
        read = tuple(_encoded(a, encode) for a in arrays)
        targets = Targets(as_series(read if isinstance(y, tuple) else read[0], name), False, 3)
    else:
        targets = _read_plain_targets(y, inputs, est, lengths, kind, encode, name)
    if inputs.form == "rows" and targets.series[0].T != inputs.T:
        raise ShapeError(
            f"the rows of the matrix {inputs.series[0].name} are series of {inputs.T} step{'s' * (inputs.T > 1)}, but "
            f"{name} has {targets.series[0].T} steps; if it is of one series or of one feature, add the missing "
            "axis: x[:, None] or x[None]"
        )
    require_aligned(inputs.series[0], targets.series[0])
    if kind == "labels" and any(s.F != 1 for s in targets.series):
        raise ShapeError(
            f"{name} has {sizes(targets.series)} labels per step; a classifier learns one, of shape (1, N, T): "
            "take an Estimator with a loss of your own for several"
        )
    return targets


def _require_same_view(y: SequenceView, inputs: Inputs) -> None:
    form = "timesteps" if isinstance(y, TimestepsView) else "samples"
    if inputs.form in ("samples", "timesteps") and inputs.form != form:
        raise ShapeError(f"x is {inputs.form}(...) and y is {form}(...); both must be split alike")


def _encoded(a: Any, encode: Callable[[np.ndarray], np.ndarray] | None) -> Any:
    """Labels as integers: at once if they are in memory, else as they are read."""
    if encode is None:
        return a
    if not hasattr(a, "shape"):
        a = np.asarray(a)
    if type(a).__module__.split(".")[0] == "torch":
        a = a.detach().cpu().numpy()
    return encode(a) if type(a) is np.ndarray else Encoded(a, encode)


class Encoded:
    """Labels as integers, made of them as they are read."""

    ndim, dtype = 3, np.dtype(np.int64)

    def __init__(self, labels: Any, encode: Callable[[np.ndarray], np.ndarray]) -> None:
        self.labels, self.encode, self.shape = labels, encode, tuple(labels.shape)
        self.at_hand = getattr(labels, "at_hand", False)

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.encode(np.asarray(self.labels[key]))


def _read_plain_targets(y: Any, inputs: Inputs, est: Any, lengths: Any, kind: str, encode: Any, name: str) -> Targets:
    """A vector or matrix: one row per series, or per time step of a view of time steps."""
    if type(y).__module__.split(".")[0] == "torch":
        y = y.detach().cpu().numpy()
    ndim = max(1, _ndim(y))
    array = _labels(y) if kind == "labels" else _check_y(y, multi_output=True, y_numeric=True, estimator=est)
    n_rows = inputs.T if inputs.form == "timesteps" else inputs.N
    check_consistent_length(np.empty(n_rows), array)
    array = array.reshape(n_rows, -1)
    if encode is not None:
        array = encode(array)
    columns = array.shape[1]
    if inputs.form == "timesteps":
        if columns % inputs.N:
            raise ShapeError(
                f"{name} has {columns} columns, which are not the targets of {inputs.N} series; use timesteps({name})"
            )
        return Targets((Series(TimestepsView.unflat(array, columns // inputs.N), name),), False, ndim)
    if inputs.T == 1 or est._settings().target == "step":
        if columns % inputs.T:
            raise ShapeError(
                f"target='step', but {name} has {columns} columns, which are not {inputs.T} steps of any number of "
                "targets"
            )
        return Targets((Series(SamplesView.unflat(array, columns // inputs.T), name),), False, ndim)
    if inputs.form == "native" and columns == inputs.T:
        raise ShapeError(
            f"{name} has shape {array.shape} = (N, T) beside x of (F, N, T): if it is a target for each step, add the "
            f"missing axis, {name}[None]; if it is {columns} targets for each series, take samples(x)"
        )
    found = read_lengths(lengths, inputs)
    last = np.full(inputs.N, inputs.T - 1) if found is None else found - 1
    if array.dtype.kind in "iub" and kind == "numbers":  # NaN says where there is none
        array = array.astype(float)
    return Targets((Series(AtLastStep(array, inputs.T, last), name),), True, ndim)


def _labels(y: Any) -> np.ndarray:
    found = np.asarray(column_or_1d(y, warn=True))
    assert_all_finite(found, input_name="y")
    return found


def read_labels(y: Any, inputs: Inputs, weight: SampleWeight | None) -> tuple[Any, SampleWeight | None]:
    """Labels as they were given, of shape (1, N, T) or, one per series, (1, N, 1), and weights of that shape."""
    if isinstance(y, SequenceView):
        return y.native, weight
    if _is_native(y):
        return three_axes(y, "y"), weight
    array = _labels(y)
    if inputs.form == "timesteps":
        return array[None, None], weight
    if weight is not None:
        weight = SampleWeight(weight.largest(), inputs.N, 1)
    check_consistent_length(np.empty(inputs.N), array)
    return array[None, :, None], weight


class AtLastStep:
    """One target per series as a (G, N, T) array that holds it at each series' last step, and nothing elsewhere.

    Elsewhere there is NaN, or, for integers, ``MISSING``.

    Parameters
    ----------
    values : ndarray of shape (N, G)
    n_steps : int
    last : ndarray of int, shape (N,)
        The last step of each series.
    """

    ndim, at_hand = 3, True

    def __init__(self, values: np.ndarray, n_steps: int, last: np.ndarray) -> None:
        self.values, self.last, self.dtype = values, last, values.dtype
        self.shape = (values.shape[1], values.shape[0], n_steps)

    def __getitem__(self, key: Any) -> Any:
        wanted = picks(key, self.shape)
        g, n, t = (np.atleast_1d(np.asarray(p, dtype=np.intp)) for p in wanted)
        out = np.full((len(g), len(n), len(t)), MISSING if self.dtype.kind in "iu" else np.nan, self.dtype)
        row, column = np.nonzero(self.last[n][:, None] == t)
        out[:, row, column] = self.values[n[row]].T[g]
        return out[tuple(0 if isinstance(p, int) else slice(None) for p in wanted)]


# -- weights -------------------------------------------------------------------------------------------


def read_weight(sample_weight: Any, inputs: Inputs) -> SampleWeight | None:
    """Weights of rows or of steps; None stays None."""
    if sample_weight is None:
        return None
    w = sample_weight
    if type(w).__module__.split(".")[0] == "torch":
        w = w.detach().cpu().numpy()
    if inputs.form == "rows" and inputs.T == 1:
        w = _check_sample_weight(w, np.empty((inputs.N, 1)), dtype=np.float64, ensure_non_negative=True)
    w = w if hasattr(w, "shape") and not hasattr(w, "iloc") else np.asarray(w)
    if inputs.form == "timesteps":  # one row per step
        if w.shape == (inputs.T,):
            w = np.broadcast_to(np.asarray(w), (inputs.N, inputs.T))
        elif w.shape == (inputs.T, inputs.N):
            w = np.asarray(w).T
        elif w.shape != (1, inputs.N, inputs.T):
            raise ShapeError(
                f"sample_weight has shape {tuple(w.shape)}; expected ({inputs.T},), ({inputs.T}, {inputs.N}) or "
                f"(1, {inputs.N}, {inputs.T}) for {inputs.T} time steps of {inputs.N} series"
            )
    return SampleWeight(w, inputs.N, inputs.T)
