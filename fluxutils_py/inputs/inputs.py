"""Read the four forms of input and convert them to series.

=============  =======================================  ==========================================
form           rows are                                 targets, predictions
=============  =======================================  ==========================================
``native``     an (F, N, T) array, or a tuple of them   (G, N, T); or (N,), (N, G): one per series
``rows``       samples of one step: (n, F)              (n,) or (n, G)
``samples``    series: ``samples(x)``                   ``samples(y)``; or (N,), (N, G)
``timesteps``  steps: ``timesteps(x)``                  ``timesteps(y)``; or (T,), (T, G * N)
=============  =======================================  ==========================================
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from fluxutils_py.data import SamplesView, SampleWeight, SeriesArray, TimestepsView
from fluxutils_py.data.arrays import (
    TIME_FIRST,
    get_feature_names,
    is_list_of_series,
    reject_masked,
    require_list_of_series,
    to_numpy,
)
from fluxutils_py.data.ragged import RaggedArray, as_ragged
from fluxutils_py.data.segments import Segments, SeriesShards
from fluxutils_py.data.series import check_source, find_bounds
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import DataError, ShapeError, SingleStepWarning, warn

# Types of matrices that stay; scikit-learn converts all others to the first.
FLOATS = [np.float64, np.float32]


@dataclass(frozen=True)
class Inputs:
    """Inputs as series.

    Attributes
    ----------
    series : tuple of SeriesArray
        One array (F, N, T) per input.
    form : "native", "rows", "samples" or "timesteps"
    columns : int, or tuple of int for several inputs
        Number of features as scikit-learn counts them.
    names : ndarray of str, optional
        Names of the columns of a data frame, or of the features of a view or an array.
    view : SequenceView, optional
        The view that was given, which knows gaps and the steps before it.
    starts, lengths : ndarray of int, shape (N,), optional
        First step and length of each series, as given or without padding; None: all series have all
        steps.
    trimmed : bool
        Whether they were not given, but found where padding is NaN.
    shards : SeriesShards, optional
        The series of all ranks, if each rank has its own.
    """

    series: tuple[SeriesArray, ...]
    form: str
    columns: Any
    names: np.ndarray | None = None
    view: SequenceView | None = field(default=None, repr=False)
    starts: np.ndarray | None = None
    lengths: np.ndarray | None = None
    trimmed: bool = False
    shards: SeriesShards | None = None

    def __post_init__(self) -> None:
        if self.names is not None and len(self.names) == self.series[0].F:
            self.series[0].feature_names = self.names

    @property
    def N(self) -> int:
        return self.series[0].N

    @property
    def T(self) -> int:
        return self.series[0].T

    @property
    def is_list(self) -> bool:
        """Whether each series is a separate array."""
        return isinstance(self.series[0].array, RaggedArray)

    @property
    def layout(self) -> InputLayout:
        """Layout that later inputs must have."""
        return InputLayout(
            form=self.form,
            features=feature_counts(self.series),
            columns=self.columns,
            kinds=tuple(s.kind for s in self.series),
            names=self.names,
        )

    def segments(self) -> Segments:
        """Return the segments, of all ranks, that training starts from the zero state: series, or
        runs between gaps.
        """
        if not isinstance(self.view, TimestepsView):
            return self.all_series()
        runs = self.contiguous_runs()  # of the rows, which are steps of all series
        starts = np.array([run.start for run in runs])
        lengths = np.array([run.stop - run.start for run in runs])
        return Segments(
            np.repeat(np.arange(self.N), len(runs)),
            np.tile(starts, self.N),
            np.tile(lengths, self.N),
        )

    def local_series(self) -> Segments:
        """Return the whole series as segments, including any gaps."""
        return Segments.from_lengths(self.N, self.T, self.lengths, self.starts)

    def all_series(self) -> Segments:
        """Return the whole series of all ranks, where ranks have different ones."""
        return self.local_series() if self.shards is None else self.shards.all_series

    def of_rank(self, rows: Segments) -> Segments:
        """Return this rank's rows among rows of all ranks."""
        if self.shards is None:
            return rows
        # none of the rows of all ranks is a stand-in's, but what reads data needs one
        return self.local_series() if self.is_stand_in else self.shards.of_rank(rows)

    @property
    def is_stand_in(self) -> bool:
        """Whether this rank has no series: a series of zeros, of length 0, stands for them."""
        return self.shards is not None and not self.shards.counts[self.shards.rank]

    def contiguous_runs(self) -> list[slice]:
        """Return slices of consecutive steps; the state is reset between them."""
        return [slice(0, self.T)] if self.view is None else self.view.contiguous_runs()

    def with_context(self, run: slice) -> tuple[tuple[Any, ...], int]:
        """Return the arrays (F, N, n) of a run with earlier steps that only warm up the state, and
        their number.
        """
        # only a view of steps knows the steps that precede its rows
        if not isinstance(self.view, TimestepsView):
            return tuple(s.array for s in self.series), 0
        array, n_context = self.view.with_context(run)
        return (array,), n_context

    def to_rows(self, array: np.ndarray) -> np.ndarray:
        """Convert a (G, N, T) array to rows in the form of the inputs; return it unchanged for
        native inputs.
        """
        if self.form == "native" or array.ndim < 3:
            return array
        view_class = TimestepsView if self.form == "timesteps" else SamplesView
        return view_class.to_rows(array)


@dataclass(frozen=True)
class InputLayout:
    """Layout of the inputs that an estimator was fitted on.

    Attributes
    ----------
    form : "native", "rows", "samples" or "timesteps"
    features : int, or tuple of int for several inputs
        Number of features per step.
    columns : int, or tuple of int for several inputs
        Number of features as scikit-learn counts them.
    kinds : tuple of "float" or "int"
        One for each input.
    names : ndarray of str, optional
        Names of the features, or of the columns of a data frame.
    """

    form: str
    features: Any
    columns: Any
    kinds: tuple[str, ...]
    names: np.ndarray | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of features of each input."""
        return tuple(map(int, np.atleast_1d(self.features)))


@dataclass(frozen=True)
class Schema:
    """What an estimator requires of its data: :func:`read_inputs` and ``read_targets`` check it.

    Attributes
    ----------
    estimator : str
        Name of the estimator's class, for messages.
    n_timesteps : int, optional
        Number of steps in each row of a matrix.
    allow_nan : bool
        Whether a matrix may contain NaN.
    fitted : InputLayout, optional
        Layout that the inputs must have; None before the first fit.
    longest : int
        Steps of the longest series of the fit, if results depend on earlier steps. Above 1, rows
        of a matrix that become series of one step are warned of.
    kind : "numbers", "integers" or "labels"
        Of targets. Integers are for losses that need them. Labels have any type, one per step or
        series.
    target : "auto", "step" or "series"
        What a matrix of targets holds, see :class:`fluxutils_py.Estimator`.
    per_series : bool, optional
        Whether such a matrix has one target per series, if ``target`` is "auto" and its shape fits
        both. None: unknown.
    encode : callable, optional
        Turns labels into integers.
    target_name : str
        Name of the targets in messages.
    """

    estimator: str
    n_timesteps: int | None = None
    allow_nan: bool = False
    fitted: InputLayout | None = None
    longest: int = 1
    kind: str = "numbers"
    target: str = "auto"
    per_series: bool | None = None
    encode: Callable[[np.ndarray], np.ndarray] | None = None
    target_name: str = "y"


def read_inputs(
    x: object,
    schema: Schema,
    *,
    name: str = "x",
    starts: object = None,
    lengths: object = None,
    padded: bool = True,
) -> Inputs:
    """Read inputs in any form and check them, after a fit also for equal features.

    ``padded`` says whether steps at the beginning and at the end of a series that are NaN in all
    features are padding, see :func:`without_padding`. ``starts`` and ``lengths`` say what is in
    their place.

    Raises
    ------
    ValueError, TypeError
        From scikit-learn for matrices; ShapeError and DataError for sequences.
    """
    x = require_array(
        x, name, "(F, N, T), samples(x) or timesteps(x) of one, or a matrix with one row per sample"
    )
    if isinstance(x, SequenceView):
        if len(x) == 0:
            raise ValueError(  # in the words of scikit-learn
                f"Found array with 0 sample(s) (shape={x.shape}) while a minimum of 1 is required."
            )
        inputs = Inputs(
            series=(SeriesArray(x.native, name),),
            form="timesteps" if isinstance(x, TimestepsView) else "samples",
            columns=x.shape[1],
            names=_as_names(x.feature_names),
            view=x,
        )
    elif is_native(x):
        inputs = _read_native(x, name)
    else:
        inputs = _read_rows(x, schema, name)
        _warn_short_rows(x, inputs, schema)
    if schema.fitted is not None:
        _require_fitted_features(inputs, schema.fitted, schema.estimator, name)
    if starts is None and lengths is None:
        return without_padding(inputs) if padded else inputs
    return restrict_steps(inputs, starts, lengths)


def _require_fitted_features(
    inputs: Inputs, fitted: InputLayout, estimator: str, name: str
) -> None:
    """Raise ShapeError or DataError if inputs have other features than those of the fit."""
    features = feature_counts(inputs.series)
    if features != fitted.features:
        raise ShapeError(
            f"{name} has {features} features per step, but {estimator} was fitted on "
            f"{fitted.features}; if a splitter cut it, note that arrays of shape (F, N, T) are cut "
            "along F: give samples(x) or timesteps(x) to the splitter"
        )
    if fitted.names is None or inputs.names is None:
        return
    if not np.array_equal(fitted.names, inputs.names):
        raise DataError(
            f"the features of {name} are {', '.join(inputs.names)}, but {estimator} was fitted on "
            f"{', '.join(fitted.names)}; bring them into that order"
        )


def require_array(value: object, name: str, forms: str) -> Any:
    """Return a value, converted by :func:`to_numpy`.

    Raises DataError for values that are clearly not arrays, and ShapeError for series that are not
    in a list; scikit-learn and NumPy check the rest.
    """
    # a dict or a group of HDF5: which of its arrays is meant is not known
    is_mapping = isinstance(check_source(value, name), Mapping) and not hasattr(value, "shape")
    if value is None or is_mapping or isinstance(value, str | bytes | numbers.Number):
        got = type(value).__name__ if isinstance(value, Mapping) else repr(value)
        raise DataError(f"{name} must be an array {forms}; got {got}")
    reject_masked(value, name)
    require_list_of_series(value, name)
    return to_numpy(value)


def is_native(x: object) -> bool:
    """Whether ``x`` is an (F, N, T) array, a list of series, or a tuple of them."""
    if isinstance(x, tuple):  # an empty one too: the message about it is that for tuples
        return any(n_axes(a) == 3 or is_list_of_series(a) for a in x) or not x
    return n_axes(x) >= 3 or is_list_of_series(x)


def n_axes(x: object) -> int:
    """Return the number of axes of an array or of nested lists."""
    n_lists = 0
    # the first element stands for all: NumPy checks later that they are alike
    while isinstance(x, list | tuple) and not hasattr(x, "shape") and len(x):
        n_lists += 1
        x = x[0]
    if not hasattr(x, "shape"):
        return n_lists
    try:
        return n_lists + len(x.shape)
    except TypeError:  # a lazy frame
        return n_lists + 2


# -- native: arrays (F, N, T) --------------------------------------------------------------------


def _read_native(x: object, name: str) -> Inputs:
    series = as_series(x if hasattr(x, "shape") else as_ragged(x, name), name)
    # feature_names_in_ of scikit-learn is for one array
    names = get_feature_names(x) if len(series) == 1 and hasattr(x, "shape") else None
    lengths = [s.array.lengths for s in series if isinstance(s.array, RaggedArray)]
    if lengths and len(lengths) < len(series):
        raise ShapeError(
            f"some of the {len(series)} arrays of {name} are lists of series; give all as lists, "
            "or none"
        )
    return Inputs(
        series=series,
        form="native",
        columns=feature_counts(series),
        names=_as_names(names),
        lengths=lengths[0] if lengths else None,
    )


def as_series(value: object, name: str) -> tuple[SeriesArray, ...]:
    """Return the arrays of one argument: a tuple means several inputs or outputs, of equal N and T.

    Raises
    ------
    ShapeError
        If the arrays differ in N or T.
    """
    if not isinstance(value, tuple):
        return (SeriesArray(value, name),)
    if not value:
        raise ShapeError(f"{name} is an empty tuple; give at least one array of shape (F, N, T)")
    arrays = tuple(SeriesArray(a, f"{name}[{i}]") for i, a in enumerate(value))
    for other in arrays[1:]:
        check_aligned(arrays[0], other)
    return arrays


def feature_counts(arrays: tuple[SeriesArray, ...]) -> Any:
    """Return the number of features: an int, or a tuple of them for several arrays."""
    return arrays[0].F if len(arrays) == 1 else tuple(a.F for a in arrays)


def _as_names(names: tuple[str, ...] | None) -> np.ndarray | None:
    return None if names is None else np.array(names, dtype=object)


BATCH_FIRST = (
    ": arrays (N, T, F) become so by a.transpose(2, 0, 1), datasets by h5mmap(path, name, "
    "axes='NTF'); arrays (N, F, T), as aeon and sktime have them, by a.transpose(1, 0, 2)"
)
# The methods that bring an array of these axes into the order FNT.
TRANSPOSES = {
    "FNT": "",
    "NFT": "transpose(1, 0, 2)",
    "NTF": "transpose(2, 0, 1)",
    "TNF": "transpose(2, 1, 0)",
}


def check_aligned(a: SeriesArray, b: SeriesArray) -> None:
    """Check that two arrays hold the same series and the same time steps."""
    # first, because T of a list is the length of its longest series, and names no series
    first, second = (getattr(s.array, "lengths", None) for s in (a, b))
    if first is not None and second is not None and len(first) == len(second):
        differing = np.flatnonzero(first != second)
        if len(differing):
            i = int(differing[0])
            remedy = f"; the arrays of a list are series (F, T_i){TIME_FIRST}" if a.F == b.F else ""
            raise ShapeError(
                f"{a.name}[{i}] has {first[i]} time steps and {b.name}[{i}] has {second[i]}{remedy}"
            )
    for axis, unit, m, n in ((1, "series", a.N, b.N), (2, "time steps", a.T, b.T)):
        if m != n:
            raise ShapeError(
                f"{a.name} has {m} {unit} and {b.name} has {n} (axis {axis} of shapes {a.shape} "
                f"and {b.shape}); both must be (F, N, T) with equal N and T{_other_layouts(a, b)}"
            )


def _other_layouts(a: SeriesArray, b: SeriesArray) -> str:
    """Say in which other layouts two arrays have equal N and T, and how they become (F, N, T); ""
    if in none.
    """
    if any(hasattr(s.array, "lengths") for s in (a, b)):  # lists have no axes to transpose
        return ""
    cases = []
    for of_a, of_b in itertools.product(TRANSPOSES, repeat=2):
        if _n_and_t(a, of_a) == _n_and_t(b, of_b):
            # the last word of a name is a variable: "validation x" is x
            remedies = [
                f"{s.name.split()[-1]}.{TRANSPOSES[order]}"
                for s, order in ((a, of_a), (b, of_b))
                if TRANSPOSES[order]
            ]
            layouts = f"{a.name} is ({', '.join(of_a)}) and {b.name} ({', '.join(of_b)})"
            cases.append(f"if {layouts}: {' and '.join(remedies)}")
    if not cases:
        return ""
    text = f". They have {', or '.join(cases)}"
    if any("(N, F, T)" in case for case in cases):
        text += "; aeon and sktime have (N, F, T)"
    if not (a.in_memory and b.in_memory):
        text += "; for datasets, h5mmap(path, name, axes='NFT') and the like"
    return text


def _n_and_t(s: SeriesArray, order: str) -> tuple[int, int]:
    """Return N and T of an array whose axes have this order."""
    return s.shape[order.index("N")], s.shape[order.index("T")]


# -- views and matrices --------------------------------------------------------------------------


def _read_rows(x: object, schema: Schema, name: str) -> Inputs:
    """Read a matrix, whose rows are samples of one step or, with ``n_timesteps``, flattened
    series.
    """
    given: Any = x
    if isinstance(x, np.ndarray):  # scikit-learn makes float64 of another byte order
        given = x.astype(x.dtype.newbyteorder("="), copy=False)
    if n_axes(given) == 1 and not hasattr(given, "iloc"):
        # scikit-learn's message would name only the two reshapes to a matrix
        raise ShapeError(
            f"{name} has one axis, of {len(given)} values. Reshape your data: x[None, None] if "
            "they are one feature of one series (F, N, T), x.reshape(-1, 1) if a matrix of one "
            "feature, x.reshape(1, -1) if one of a single sample"
        )
    fitted = schema.fitted
    # a plain matrix after a fit on a view: StandardScaler, say, returns one for a view
    if fitted is not None and fitted.form in ("samples", "timesteps"):
        return _read_flat_view(given, schema, fitted, name)
    if fitted is not None and fitted.form == "native":
        _require_columns_of_native(given, fitted, schema.estimator, name)
    matrix, names = _validate_matrix(given, schema)
    n_columns = matrix.shape[1]
    n_steps = schema.n_timesteps or 1
    if n_columns % n_steps:
        raise ShapeError(
            f"X has {n_columns} columns, which are not {n_steps} steps (n_timesteps) of any number "
            "of features"
        )
    array = SamplesView.from_rows(matrix, n_columns // n_steps)
    return Inputs((SeriesArray(array, name),), "rows", n_columns, names)


def _warn_short_rows(x: object, inputs: Inputs, schema: Schema) -> None:
    """Warn of a matrix ``x`` whose rows are read as series of one step, for a model that was fitted
    on longer ones.
    """
    if inputs.form not in ("rows", "samples") or inputs.T > 1 or schema.longest == 1:
        return
    name = inputs.series[0].name
    values = "x.to_numpy()" if hasattr(x, "columns") else "x"
    warn(
        f"{name} is a matrix, each of whose rows is taken for a series of one step, but "
        f"{schema.estimator} was fitted on series of up to {schema.longest} steps: nothing is "
        "carried from row to row. If the rows are the steps of one series, give "
        f"{values}.T[:, None], or timesteps({values}.T[:, None])",
        SingleStepWarning,
    )


def _require_columns_of_native(x: object, fitted: InputLayout, estimator: str, name: str) -> None:
    """Raise ShapeError if a matrix does not have the features of the arrays of the fit."""
    shape: tuple[int, ...] = getattr(x, "shape", ())
    if len(shape) != 2 or shape[1] == fitted.columns:
        return
    n_features = int(np.sum(fitted.features))
    remedy = "add the missing axis: x[:, None] or x[None]"
    if shape[1] % n_features == 0:
        t = shape[1] // n_features
        remedy += (
            f"; if it is samples(x) of {t} steps, fit on samples(x), or on its matrix with "
            f"n_timesteps={t}"
        )
    raise ShapeError(
        f"X has {shape[1]} features, but {estimator} is expecting {fitted.columns} features as "
        f"input; the rows of a matrix are series of one step: if {name} is of one series or of one "
        f"feature, {remedy}"
    )


def _validate_matrix(x: object, schema: Schema) -> tuple[np.ndarray, np.ndarray | None]:
    """Check a matrix with scikit-learn; return it and the names of its columns."""
    # validate_data stores its results on an estimator, whose class it names in messages
    keeper: Any = type(schema.estimator, (BaseEstimator,), {})()
    if schema.fitted is not None:
        keeper.n_features_in_ = schema.fitted.columns
        if schema.fitted.names is not None:
            keeper.feature_names_in_ = schema.fitted.names
    matrix = validate_data(
        keeper,
        x,
        dtype=FLOATS,
        ensure_all_finite="allow-nan" if schema.allow_nan else True,
        reset=schema.fitted is None,
    )
    return matrix, getattr(keeper, "feature_names_in_", None)


def _read_flat_view(x: object, schema: Schema, fitted: InputLayout, name: str) -> Inputs:
    """Read a matrix with the columns of a fitted view."""
    matrix = check_array(
        x,
        dtype=FLOATS,
        ensure_all_finite="allow-nan" if schema.allow_nan else True,
        estimator=schema.estimator,
        input_name="X",
    )
    n_columns = matrix.shape[1]
    n_features = int(fitted.features)
    over_time = fitted.form == "timesteps"
    # views of samples may differ in T, views of time steps not in N
    if n_columns % n_features or (over_time and n_columns != fitted.columns):
        raise ValueError(
            f"X has {n_columns} features, but {schema.estimator} is expecting {fitted.columns} "
            f"features as input: {n_features} features at each of {fitted.columns // n_features} "
            f"{'series' if over_time else 'steps'}"
        )
    array = (TimestepsView if over_time else SamplesView).from_rows(matrix, n_features)
    return Inputs(
        series=(SeriesArray(array, name),),
        form=fitted.form,
        columns=n_columns,
        # nothing says where rows are missing, so that they count as consecutive steps
        view=TimestepsView(array) if over_time else None,
    )


# -- steps of each series, and weights -----------------------------------------------------------


def restrict_steps(inputs: Inputs, starts: object, lengths: object) -> Inputs:
    """Restrict series to the steps ``starts[n]`` to ``starts[n] + lengths[n]``.

    Raises
    ------
    ShapeError, DataError, ValueError
        If they are not N integers, or a series would be empty or exceed T.
    """
    if inputs.is_list:
        raise ValueError(
            "starts and lengths are for series in one array; those of a list have their own lengths"
        )
    if inputs.form == "timesteps":
        raise ValueError(
            "starts and lengths are for series that differ; timesteps(x) has one row per step, "
            "common to all series"
        )
    last = inputs.T - 1
    first = np.zeros(inputs.N, int)
    if starts is not None:
        first = _one_per_series("starts", starts, inputs.N, (0, last), f"0 to T-1={last}")
    # without lengths, a series runs from its start to the end
    count = inputs.T - first
    if lengths is not None:
        bounds = (1, inputs.T)
        count = _one_per_series("lengths", lengths, inputs.N, bounds, f"1 to T={inputs.T}")
    beyond = np.flatnonzero(first + count > inputs.T)
    if len(beyond):
        n = int(beyond[0])
        raise DataError(
            f"series {n} starts at step {first[n]} and has {count[n]} steps, but there are "
            f"T={inputs.T} steps; lengths count from starts"
        )
    return replace(inputs, starts=first if first.any() else None, lengths=count)


def without_padding(inputs: Inputs, fresh: bool | np.ndarray = True, ended: bool = True) -> Inputs:
    """Restrict series to the steps from the first one with input, where they are ``fresh``, a mask
    (N,), to the last one, if they have ``ended``.

    A series without any input stays as it is; if it may begin later, it has no steps.
    """
    # the rows of a matrix are samples, and those of timesteps common to all series
    if not (np.any(fresh) or ended) or inputs.form not in ("native", "samples"):
        return inputs
    rows = inputs.local_series()
    bounds = find_bounds(inputs.series, rows)
    if bounds is None:
        return inputs
    has_input = bounds.length > 0
    first = np.where(has_input & fresh, bounds.start, rows.start)
    stop = np.where(has_input & ended, bounds.stop, rows.stop)
    if not ended:
        stop = np.where(~has_input & fresh, first, stop)
    starts = first if first.any() else None
    return replace(inputs, starts=starts, lengths=stop - first, trimmed=True)


def _one_per_series(
    name: str, value: object, n_series: int, bounds: tuple[int, int], expected: str
) -> np.ndarray:
    # before asarray, which drops the mask
    reject_masked(value, name, fill="T" if name == "lengths" else "0")
    values = np.asarray(value)
    if values.shape != (n_series,) or values.dtype.kind not in "iu":
        raise ShapeError(
            f"{name} must be {n_series} integers, one per series; got shape {values.shape} of "
            f"dtype {values.dtype}"
        )
    least, most = bounds
    if values.min() < least or values.max() > most:
        raise DataError(f"{name} must be from {expected}, got {values.min()} to {values.max()}")
    return values.astype(int)


def read_weight(w: object, inputs: Inputs, *, beside_lengths: bool = False) -> SampleWeight | None:
    """Read sample weights of rows or steps; None stays None.

    ``beside_lengths``: of validation data, where the series of the training data have lengths.

    Raises
    ------
    DataError
        If they look like the lengths of the series.
    """
    if w is None:
        return None
    # numbers in a list are one weight per series
    if inputs.is_list and isinstance(w, list) and any(np.ndim(a) for a in w):
        return _read_weights_of_list(w, inputs)
    reject_masked(check_source(w, "sample_weight"), "sample_weight", fill="0")
    weights = _as_weights(to_numpy(w), inputs)
    if inputs.form == "timesteps":  # of its rows, which are steps
        shape = tuple(weights.shape)
        if shape == (inputs.T,):  # a step counts the same in all series
            weights = np.broadcast_to(np.asarray(weights), (inputs.N, inputs.T))
        elif shape == (inputs.T, inputs.N):
            weights = np.asarray(weights).T
        elif shape != (1, inputs.N, inputs.T):
            raise ShapeError(
                f"sample_weight has shape {shape}; expected ({inputs.T},), ({inputs.T}, "
                f"{inputs.N}) or (1, {inputs.N}, {inputs.T}) for {inputs.T} time steps of "
                f"{inputs.N} series"
            )
    _refuse_lengths(weights, inputs, beside_lengths)
    return SampleWeight(weights, inputs.N, inputs.T)


def _refuse_lengths(w: Any, inputs: Inputs, beside_lengths: bool) -> None:
    """Raise DataError if the weights of whole series, without lengths, are their lengths: integers,
    after so many steps of which the inputs end.

    ``beside_lengths``: the inputs need not end if the integers are too large for weights, or equal.
    """
    if tuple(w.shape) != (inputs.N,) or w.dtype.kind not in "iu" or inputs.form == "timesteps":
        return
    lengths = np.asarray(w[:]).astype(int)
    has_lengths = not inputs.trimmed and inputs.all_series().min_length < inputs.T
    if has_lengths or lengths.min() < 1 or lengths.max() > inputs.T:
        return
    # the longest series is about as long as the array; equal weights would do nothing
    is_large = 2 * lengths.max() > inputs.T or 1 < lengths.min() == lengths.max()
    if (beside_lengths and is_large) or _end_after(inputs, lengths):
        raise DataError(
            f"sample_weight holds {lengths.min()} to {lengths.max()}, which look like the lengths "
            f"of the series of {inputs.series[0].name}, of {inputs.T} steps: give lengths=..., or "
            "validation_data=(x, y, None, lengths). If they are weights, give them as floats"
        )


def _end_after(inputs: Inputs, lengths: np.ndarray) -> bool:
    """Return whether all series shorter than the array end after so many steps, with zeros or NaN
    in all features.
    """
    shorter = np.flatnonzero(lengths < inputs.T)
    if not len(shorter):
        return False
    around_end = Segments(shorter, lengths[shorter] - 1, np.full(len(shorter), 2))
    has_input = np.zeros((2, len(shorter)), bool)
    for s in inputs.series:
        has_input |= (np.nan_to_num(s.read(around_end, 0, 2)) != 0).any(-1)
    last, following = has_input
    return bool(last.all() and not following.any())


def _as_weights(w: Any, inputs: Inputs) -> Any:
    """Return weights as an array, which may be in a file."""
    if isinstance(w, int | float):
        return np.full(inputs.N, float(w))
    if inputs.form == "rows" and inputs.T == 1:  # as scikit-learn has them, checked in its words
        w = check_array(w, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
        if not w.any():
            raise DataError("sample_weight is zero for all samples: there is nothing to learn from")
    is_array = hasattr(w, "shape") and not hasattr(w, "iloc")  # not a column of a data frame
    return w if is_array else np.asarray(w)


def _read_weights_of_list(w: list[Any], inputs: Inputs) -> SampleWeight:
    """Read the weights of all steps of a list of series, each of shape (T_i,) or (1, T_i)."""
    arrays = [a if hasattr(a, "shape") else np.asarray(a) for a in w]
    with_features = [np.asarray(a)[None] if len(a.shape) == 1 else a for a in arrays]
    ragged = RaggedArray(with_features, "sample_weight")
    if ragged.shape[0] != 1 or len(ragged.lengths) != inputs.N:
        raise ShapeError(
            f"sample_weight is a list of {len(w)} arrays of {ragged.shape[0]} features; expected "
            f"{inputs.N} of shape (T_i,), or a vector of one weight per series"
        )
    check_aligned(inputs.series[0], SeriesArray(ragged, "sample_weight"))
    return SampleWeight(ragged, inputs.N, inputs.T)
