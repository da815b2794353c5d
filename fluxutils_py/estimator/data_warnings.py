"""Warn about data that a model is likely to learn the wrong thing from."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from fluxutils_py.data import SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.sequence_windows import SequenceWindows, Window
from fluxutils_py.data.views import SequenceView, flattened_steps
from fluxutils_py.errors import DataError, SingleStepWarning, warn
from fluxutils_py.estimator.fitted_parts import uses_past
from fluxutils_py.inputs.inputs import Inputs, is_native
from fluxutils_py.nn import Recur
from fluxutils_py.nn.losses import Loss, SeqLoss
from fluxutils_py.nn.model_windows import cut_dependence, raw_ends, trial_outputs
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.sensitivities import carries, truncated_layers
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.joblib_mpi import is_active
from fluxutils_py.parallel.launcher import is_alone, launched
from fluxutils_py.training.tensor_batches import first_steps

# the scale of features and targets
LARGE = 1000  # root mean square of a feature, from which it should have been scaled
SMALL = 0.03  # standard deviation: at 1, R2 of 0.9; here, defaults reach 0.3 to 0.8; at 0.01, 0.1
RARE = 10 * SMALL  # distance from the mean that makes a value an event, no sign of a small scale
UNLIKE = 100  # factor between standard deviations of training and validation inputs
FAR = 30  # standard deviations between means of those
FEW = 5  # values, of which fewer may be alike by chance
CONSTANT = 1e-6  # share of the size of a feature, up to which it varies by rounding only
N_STEPS = 1000  # looked at
PLACES = 16  # pieces of data looked at
REVERSED_BITS = tuple(int(f"{k:04b}"[::-1], 2) for k in range(PLACES))
PIECE = 250  # values of a feature in a piece
N_SERIES = 4  # of a piece, if there are many steps
ALL = np.ones((1, 1, 1), bool)  # mask of steps that all count

# rows of a matrix that follow each other in time
MANY = 1000  # rows of a data frame; a larger one probably holds steps in time
FEW_ROWS = 60  # below which rows are alike by chance
MANY_COLUMNS = 64  # of which those before tell enough
DISTINCT = 10  # values of a column that can tell whether rows follow each other
SYMBOLS = 3  # columns of ones and zeros, from which they may be letters rather than flags
# the dependence of a letter on the one before over that on those further back: 2 in 1000 letters
# of a text, up to 1.6 in few that are sorted
STRONGER = 1.5
SURE = 8  # standard deviations between the two: 16 in 1000 letters of a text, 5 in sorted ones
MANY_SERIES = 20  # per step, from which the steps of a layout of another tool may look like series
ROUGHER = 2  # squared change along rows over that between rows, from which rows hold no series
FURTHER = (4, 5, 6, 7)  # rows further, with which neighbours are compared
# squared distance of neighbours over that of rows further apart; 1 for independent rows, 0.2 for a
# walk
ALIKE = 0.5
TIMES = (
    *("t", "time", "timestamp", "date", "datetime", "period", "step"),
    *("year", "month", "week", "day", "hour"),
)

NORMALIZE = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm, nn.Embedding),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

_is_said = False


# -- searches that ranks repeat ----------------------------------------------------------------


def warn_repeated_search(ranks: RankGroup) -> None:
    """Warn on rank 0, once, if a fit for scikit-learn's model selection runs by itself on each of
    several ranks.

    This is so with ``comm=None``, and in the processes and threads of ``n_jobs``. With
    ``comm="auto"`` and without ``n_jobs``, nothing is repeated: all ranks train each candidate
    together.
    """
    global _is_said
    _, rank, size = launched()
    runs_on_many_ranks = size > 1 and ranks.is_single and not is_alone() and not is_active()
    if _is_said or rank or not runs_on_many_ranks or not in_model_selection():
        return
    _is_said = True
    warn(
        f"each of {size} ranks repeats this search by itself: it fits the same candidates on the "
        "same folds. To share them out, search inside a block: "
        'with joblib.parallel_config("mpi"): search.fit(x, y). If each rank searches in its own '
        "data, this warning does not matter"
    )


def in_model_selection() -> bool:
    """Return whether this call comes from scikit-learn's model selection."""
    return any(True for _ in _frames_of_model_selection())


def _frames_of_model_selection() -> Iterator[FrameType]:
    """Yield the frames of scikit-learn's model selection among those of this call."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if str(frame.f_globals.get("__name__", "")).startswith("sklearn.model_selection."):
            yield frame


def refuse_renumbered_labels(x: object, y: Any) -> None:
    """Raise DataError if scikit-learn's ``cross_val_predict`` has numbered the labels of each step
    by themselves, as it does for methods such as ``predict_proba``.

    It takes steps for separate outputs: a label has another number where a step lacks one.
    """
    if isinstance(y, SequenceView) or not isinstance(x, SequenceView) or np.ndim(y) != 2:
        return
    methods = [
        frame.f_locals.get("method")
        for frame in _frames_of_model_selection()
        if frame.f_code.co_name == "_fit_and_predict"
    ]
    if methods and methods[0] != "predict":
        raise DataError(
            "cross_val_predict of scikit-learn cannot return probabilities or scores of labels at "
            "each step: it takes each step for a separate output, and numbers its labels anew. Fit "
            "and predict each fold: for train, test in cv.split(x): "
            "est.fit(x[train], y[train]).predict_proba(x[test]), with views x and y, and lengths= "
            "for series that are padded with NaN"
        )


# -- matrices whose rows are steps or whole series ---------------------------------------------


def warn_single_steps(x: object, inputs: Inputs, model: nn.Module) -> None:
    """Warn if a model of sequences is fitted on a matrix whose rows do not look like single steps.

    They may be series that another tool flattened, or follow each other in time: in a data frame
    (pandas or polars) with an index of dates, or one named like time (``TIMES``), or of at least
    ``MANY`` rows; in any matrix whose values are alike from row to row (:func:`follow_each_other`).

    Warn as well if an array may be one series in the layout (N, T, F) of other tools.
    """
    if not uses_past(model):
        return
    message = None
    if inputs.form == "rows" and inputs.T == 1:
        matrix = np.asarray(inputs.series[0].array)[:, :, 0].T
        message = _say_flattened(matrix) or _say_time(x, matrix, model)
    elif inputs.form in ("native", "samples"):
        message = _say_transposed(inputs)
    if message is not None:
        warn(message, SingleStepWarning)


def _say_transposed(inputs: Inputs) -> str | None:
    """Return what to say of an array (1, T, F), which is read as T series of F steps."""
    series = inputs.series[0]
    n_series, n_steps = inputs.N, inputs.T
    is_one = len(inputs.series) == 1 and series.F == 1 and not inputs.is_list
    if not is_one or n_series < MANY_SERIES * n_steps:
        return None
    values = np.asarray(series.array[:, :N_STEPS, :MANY_COLUMNS])
    matrix = values[0].astype(np.float64)
    if not _may_be_features(matrix) or not follow_each_other(matrix):
        return None
    shape = (1, n_series, n_steps)
    return (
        f"{series.name} of shape {shape} is read as (F, N, T): {n_series} series of one feature at "
        f"{n_steps} step{'s' * (n_steps > 1)}; but each is like the next, as steps in time are. If "
        "it is one series in the layout (N, T, F) of torch and Keras, give x.transpose(2, 0, 1), "
        "and y as (1, 1, T): y[None, None] of a vector; if the series are independent, shuffle "
        "them, or ignore this warning"
    )


def _may_be_features(matrix: np.ndarray) -> bool:
    """Return whether the columns of a matrix may be features, not steps of a series per row.

    In a series, a value is like the next, at least as much as in other series. It is like it as
    much in windows that overlap, and more in the days of a series that is cut into days.
    """
    if matrix.shape[1] == 1 or _is_one_hot(matrix):
        return True
    along, between = (np.square(np.diff(matrix, axis=axis)).mean() for axis in (1, 0))
    return bool(along >= ROUGHER * between)


def _say_flattened(matrix: np.ndarray) -> str | None:
    n_steps = flattened_steps(matrix)
    if n_steps is None:
        return None
    n_columns = matrix.shape[1]
    return (
        f"the {n_columns} columns of this matrix are those of samples(x), {n_columns // n_steps} "
        f"features at {n_steps} steps, which another tool turned into a matrix; each row is taken "
        f"for a series of one step. Set n_timesteps={n_steps}, as with "
        f"SequenceRegressor(n_timesteps={n_steps}), so that it is cut into steps again"
    )


def _say_time(x: Any, matrix: np.ndarray, model: nn.Module) -> str | None:
    if not any(isinstance(m, Recur) for m in model.modules()):
        return None
    is_frame = hasattr(x, "columns")
    reason = _looks_like_time(x) if is_frame else None
    if reason is None and follow_each_other(matrix):
        reason = (
            f"has {len(matrix)} rows with values that change little from row to row, as in time"
        )
    if reason is None:
        return None
    form = "a data frame" if is_frame else "a matrix"
    values = "x.to_numpy()" if is_frame else "x"
    apart = f"fit on {values}" if is_frame else "shuffle them, or ignore this warning"
    several = "make an array (F, N, T) of them"
    if is_frame:
        several = "call fluxutils_py.from_frame(x, id_col, time_col, x=[...], y=...)"
    return (
        f"x is {form} that {reason}, but each of its rows is taken for a series of one step: the "
        "model carries nothing from row to row. If the rows are the steps of one series, fit on "
        f"timesteps({values}.T[:, None]) and y; if of several, {several}, "
        f"and fit on that, on samples(x) or on timesteps(x); if they are independent, {apart}"
    )


def _looks_like_time(frame: Any) -> str | None:
    """Return in which way a data frame looks like steps in time, by its index or its length."""
    index = getattr(frame, "index", None)
    for level in getattr(index, "levels", None) or [index]:
        if type(level).__name__ in ("DatetimeIndex", "PeriodIndex", "TimedeltaIndex"):
            return f"has a {type(level).__name__}"
        name = getattr(level, "name", None)
        if isinstance(name, str) and name.lower() in TIMES:
            return f"has an index named {name!r}"
    return f"has {len(frame)} rows" if len(frame) >= MANY else None


def follow_each_other(matrix: np.ndarray) -> bool:
    """Return whether the rows look like steps in time: whether in at least half of the columns,
    values next to each other are alike.

    Neighbours are compared with values a few rows further, not with all: rows sorted by class are
    alike over long distances, but no more to their neighbours than to the others of their class.
    Columns that only rise or only fall do not count: tables are often sorted by one. Ranks stand
    for values, so that outliers have no say. Of rows that are one-hot, neighbours must depend on
    each other (:func:`_letters_follow`).
    """
    matrix = matrix[:N_STEPS]
    if len(matrix) < FEW_ROWS:
        return False
    if _is_one_hot(matrix):
        return _letters_follow(matrix.argmax(1))
    n_columns = 0
    n_alike = 0
    for column in matrix.T[:MANY_COLUMNS]:
        values, ranks = np.unique(column, return_inverse=True)
        change = np.diff(ranks)
        if len(values) < DISTINCT or (change >= 0).all() or (change <= 0).all():
            continue
        near = _usual_square(change)
        far = np.mean([_usual_square(ranks[k:] - ranks[:-k]) for k in FURTHER])
        n_columns += 1
        n_alike += bool(near < ALIKE * far)
    return n_alike > 0 and 2 * n_alike >= n_columns


def _is_one_hot(matrix: np.ndarray) -> bool:
    is_one = matrix == 1
    return (
        matrix.shape[1] >= SYMBOLS
        and bool((is_one.sum(1) == 1).all())
        and np.count_nonzero(matrix) == len(matrix)
    )


def _letters_follow(letters: np.ndarray) -> bool:
    """Return whether letters depend on the one before clearly more than on those further back.

    Rows sorted by class depend on both alike.
    """
    near = _dependence(letters, 1)
    far = float(np.mean([_dependence(letters, k) for k in FURTHER]))
    # of independent letters, the statistic is about chi-squared, of variance twice its mean
    return near > STRONGER * far and near > far + SURE * math.sqrt(2 * far)


def _dependence(letters: np.ndarray, distance: int) -> float:
    """Return the statistic G of the likelihood-ratio test of independence, for pairs of letters at
    a distance.
    """
    n_letters = int(letters.max()) + 1
    counts = np.zeros((n_letters, n_letters))
    np.add.at(counts, (letters[:-distance], letters[distance:]), 1)
    expected = np.outer(counts.sum(1), counts.sum(0)) / counts.sum()
    pairs = counts > 0
    return 2 * float((counts[pairs] * np.log(counts[pairs] / expected[pairs])).sum())


def _usual_square(changes: np.ndarray) -> float:
    """Return the mean square of the smaller changes: those from one class to the next are the
    largest.
    """
    squares = np.sort(np.square(changes, dtype=np.float64))
    return float(squares[: len(squares) * 3 // 4].mean())


def warn_one_class(classes: np.ndarray | None) -> None:
    """Warn if there is one class only, as found in the labels: all predictions are then equal."""
    if classes is not None and len(classes) == 1:
        warn(
            f"all labels of y are {classes.tolist()[0]!r}: the classifier knows no other class, "
            "and always predicts this one. Give data with all classes, or declare them in the "
            "first call of partial_fit, with classes=[...]"
        )


# -- windows that cut what a model sees --------------------------------------------------------


def warn_cut(model: nn.Module, steps: Sequence[Tensor], overlap: int, seqsize: int) -> None:
    """Warn if the outputs of a model without state depend on where windows cut the series.
    ``steps`` are inputs.
    """
    side = cut_dependence(model, steps, overlap)
    if side is None:
        return
    if side == "later":
        dependence = "change with later steps"
        remedy = (
            "Make it causal: pad on the left alone, mask attention, or use "
            "fluxutils_py.nn.CausalConv1d"
        )
    else:
        dependence = f"change with steps more than overlap={overlap} before them"
        remedy = "Set spec.overlap to the number of earlier steps that an output needs"
    warn(
        f"the outputs of {type(model).__name__} {dependence}, and windows of seqsize={seqsize} cut "
        f"the series: what it predicts depends on where they are cut. {remedy}; or let windows be "
        "whole series with spec.seqsize=None, and predict whole series"
    )


# -- last layers that do not fit the loss ------------------------------------------------------


def warn_last_layer(model: nn.Module, loss: Loss, steps: Sequence[Tensor]) -> None:
    """Warn about a last layer that the loss has inside already, or lacks; ``steps`` are inputs."""
    if not isinstance(loss, SeqLoss) or not loss.scores:
        return
    for out in trial_outputs(model, steps):
        misfit = loss.misfit(out)
        if misfit is not None:
            warn(f"{loss!r} {misfit}; with {type(model).__name__} as it is, it learns poorly")


# -- scales of features and targets ------------------------------------------------------------


def warn_unscaled(
    windows: SequenceWindows, model: nn.Module, y: object, scales_target: bool | None
) -> None:
    """Warn if values of a feature are too large to learn from, or vary too little (:class:`Scale`).

    A model may scale values itself: what counts are inputs that reach a layer as they are
    (:func:`raw_ends`), in models that do not normalize or embed, and targets that a layer has to
    give as they are. Models of this package, such as those of a Forecaster, are made for the
    features that they get. ``y`` are the targets as they were given. ``scales_target`` is None for
    an estimator that cannot standardise its targets.
    """
    if type(model).__module__.startswith("fluxutils_py."):
        return
    scales = spread_scales(windows)
    found = {name: scale.describe_unusual() for name, scale in scales.items()}
    if not any(found.values()):
        return
    for name, remedy in _remedies_for_raw(windows, model, y, scales_target).items():
        unusual = found.get(name)
        if unusual is not None:
            warn(
                f"feature {unusual.feature} of {name} {unusual.problem}: networks train poorly on "
                f"such values, or not at all; {remedy}"
            )


def _remedies_for_raw(
    windows: SequenceWindows, model: nn.Module, y: object, scales_target: bool | None
) -> dict[str, str]:
    """Return what to do about unusual scales of each array whose values layers see as they are."""
    with seeded(0):  # as each trial of a model
        ends = raw_ends(model, first_steps(windows, next(model.parameters())))
    remedies: dict[str, str] = {}
    if len(ends.outputs) == len(windows.y):
        of_targets = _remedy_for_targets(y, scales_target)
        pairs = zip(windows.y, ends.outputs, strict=True)
        remedies = {s.name: of_targets for s, is_raw in pairs if is_raw}
    if not any(isinstance(m, NORMALIZE) for m in model.modules()):
        as_input = "scale it, as with make_pipeline(SequenceScaler(), estimator)"
        pairs = zip(windows.x, ends.inputs, strict=True)
        remedies |= {s.name: as_input for s, is_raw in pairs if is_raw}
    return remedies


def warn_unlike_training(windows: SequenceWindows, validation: SequenceWindows | None) -> None:
    """Warn if validation inputs have a scale ``UNLIKE`` that of the training inputs, or are
    ``FAR`` off.
    """
    if validation is None:
        return
    of_training = spread_scales(windows)
    of_validation = spread_scales(validation)
    for s, v in zip(windows.x, validation.x, strict=True):
        # integers have no scale, nor do data that cannot be read
        if s.name not in of_training or v.name not in of_validation:
            continue
        a = of_training[s.name]
        b = of_validation[v.name]
        unlike = a.is_unlike(b)
        if unlike.any():
            f = int(unlike.argmax())
            warn(
                f"feature {f} of {v.name} is about {b.describe(f)}, that of {s.name} "
                f"{a.describe(f)}: a Pipeline does not transform validation_data; set "
                "early_stopping=True, or transform them yourself"
            )


def _remedy_for_targets(y: object, scales_target: bool | None) -> str:
    """Return lines that scale targets of this form; the tests run them."""
    if scales_target is False:
        return "set scale_target=True"
    if is_native(y) or isinstance(y, SequenceView):
        return (
            "scale it: scaler = SequenceScaler().fit(y); estimator.fit(x, scaler.transform(y)); "
            "scaler.inverse_transform(estimator.predict(x))"
        )
    return "scale it: TransformedTargetRegressor(estimator, transformer=StandardScaler()).fit(x, y)"


class Unusual(NamedTuple):
    """A feature whose scale is unusual, and in which way."""

    feature: int
    problem: str


@dataclass(frozen=True)
class Scale:
    """The scale of each feature of some values.

    Attributes
    ----------
    count, mean, size, spread, reach : ndarray of shape (F,)
        Number of values, mean, root mean square, standard deviation, and largest distance from the
        mean.
    """

    count: np.ndarray
    mean: np.ndarray
    size: np.ndarray
    spread: np.ndarray
    reach: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, live: np.ndarray) -> Scale:
        """Return the scale of those values (S, B, F) for which ``live`` is true; it broadcasts."""
        values = np.where(live, values, 0).astype(np.float64)
        n = np.broadcast_to(live, values.shape).sum((0, 1))
        count = np.maximum(n, 1)
        with np.errstate(over="ignore"):
            mean = values.sum((0, 1)) / count
            distance = np.where(live, values - mean, 0)
            size = np.sqrt(np.square(values).sum((0, 1)) / count)
            spread = np.sqrt(np.square(distance).sum((0, 1)) / count)
        return cls(n, mean, size, spread, abs(distance).max((0, 1)))

    @property
    def varies(self) -> np.ndarray:
        """A mask of the features that are not constant, as far as float32 can tell."""
        return self.spread > CONSTANT * self.size

    def is_unlike(self, other: Scale) -> np.ndarray:
        """Return which features differ from another scale more than data of one kind do."""
        larger = np.maximum(self.spread, other.spread)
        smaller = np.minimum(self.spread, other.spread)
        can_tell = self.varies & other.varies & (self.count >= FEW) & (other.count >= FEW)
        is_far = abs(self.mean - other.mean) > FAR * larger
        unlike: np.ndarray = can_tell & ((larger > UNLIKE * smaller) | is_far)
        return unlike

    def describe(self, feature: int) -> str:
        return f"{self.mean[feature]:.2g} +- {self.spread[feature]:.1g}"

    def describe_unusual(self) -> Unusual | None:
        """Return the feature that is most too large, or else varies least; None: all are fine."""
        is_large = self.size >= LARGE
        is_small = self.varies & (self.count >= FEW) & (self.spread < SMALL)
        is_small &= self.reach < RARE  # rare events are far from the mean
        for mask, statistic, sign, problem in (
            (is_large, self.size, -1, "has values of about {:.0g}"),
            (is_small, self.spread, 1, "varies by no more than about {:.0g}"),
        ):
            if mask.any():
                feature = int(np.where(mask, sign * statistic, np.inf).argmin())
                return Unusual(feature, problem.format(statistic[feature]))
        return None


def spread_scales(windows: SequenceWindows) -> dict[str, Scale]:
    """Return the scale of each array of numbers, by its name, as found in pieces of the data; of
    none if they cannot be read.
    """
    rows = windows.own(windows.segments).without_first(windows.burn_in)
    sample = _Sample(windows)
    try:
        for some, start, stop in _pieces(rows, windows.batchsize, windows.seqsize):
            sample.add_piece(some, start, stop)
        if windows.y and sample.n_live == 0 and len(rows):
            sample.add_last_targets(rows)
    except DataError:  # training says so when it comes there
        return {}
    return sample.scales()


class _Sample:
    """Values of arrays of numbers, and which of them count.

    Attributes
    ----------
    n_live : float
        Steps with a target.
    """

    def __init__(self, windows: SequenceWindows) -> None:
        self.windows = windows
        self.n_live = 0.0
        self._values: dict[str, list[np.ndarray]] = {}
        self._live: dict[str, list[np.ndarray]] = {}

    def add_piece(self, rows: Segments, start: int, stop: int) -> None:
        window = self.windows.cut(rows, start, stop)
        exists = rows.step_mask(start, stop)
        for s, values in zip(self.windows.x, window.x, strict=True):
            self._add(s, values, ALL if exists is None else exists[:, :, None])
        if not self.windows.one_target:  # few pieces hold one
            self._add_targets(window)
            self.n_live += window.n_live

    def add_last_targets(self, rows: Segments) -> None:
        """Add targets of the last steps of some rows: there may be one for each series, there."""
        # of no more values than a window
        n = min(PIECE, self.windows.batchsize * self.windows.seqsize)
        which = np.unique(np.linspace(0, len(rows) - 1, n).astype(int))
        some = rows[which]
        self._add_targets(self.windows.cut(some.last_steps(), 0, 1))

    def _add_targets(self, window: Window) -> None:
        column = 0
        for s, values in zip(self.windows.y, window.y, strict=True):
            live = ALL
            if window.w is not None:
                # one weight for each output, or one for all outputs of a step
                per_output = window.w.shape[2] > 1
                live = (window.w[:, :, column : column + s.F] if per_output else window.w) > 0
            column += s.F
            self._add(s, values, live)

    def _add(self, s: SeriesArray, values: np.ndarray, live: np.ndarray) -> None:
        if values.dtype.kind == "f":
            mask = np.broadcast_to(live, values.shape)
            self._values.setdefault(s.name, []).append(values.reshape(-1, 1, s.F))
            self._live.setdefault(s.name, []).append(mask.reshape(-1, 1, s.F))

    def scales(self) -> dict[str, Scale]:
        """Return the scale of each array of which some values count."""
        scales = {}
        for name, values in self._values.items():
            live = np.concatenate(self._live[name])
            if live.any():
                scales[name] = Scale.of(np.concatenate(values), live)
        return scales


def _pieces(rows: Segments, most_rows: int, most_steps: int) -> Iterator[tuple[Segments, int, int]]:
    """Yield up to ``PLACES`` pieces of up to ``PIECE`` values per feature, spread evenly over rows
    and time: rows, first step, and the step after the last. None is larger than a window.
    """
    if not len(rows):
        return
    n_steps = min(PIECE // min(len(rows), N_SERIES), most_steps, rows.max_length)
    n_rows = max(1, min(PIECE // n_steps, most_rows))
    n_blocks = math.ceil(len(rows) / n_rows)
    seen = set()
    # points of Hammersley: evenly spaced in time, and in rows by reversing the bits
    for k, reverse in enumerate(REVERSED_BITS):
        block = reverse * n_blocks // PLACES
        some = rows[block * n_rows : (block + 1) * n_rows]
        start = k * math.ceil(some.max_length / n_steps) // PLACES * n_steps
        if (block, start) not in seen:
            seen.add((block, start))
            yield some, start, min(start + n_steps, some.max_length)


# -- gradients that do not reach beyond a window -----------------------------------------------


def warn_truncated_layers(model: nn.Module) -> None:
    """Warn about layers that ``gradient="exact"`` does not help to learn from steps before a
    window.
    """
    names = truncated_layers(model)
    if names:
        warn(
            f"spec.gradient='exact': {', '.join(names)} stay{'s' * (len(names) == 1)} truncated at "
            "windows; only LRU, MinGRU and MinLSTM carry their gradients on"
        )
    elif not any(map(carries, recurrent_layers(model))):
        warn(
            "spec.gradient='exact' does nothing: the model has no recurrent layer with parameters "
            "to train; use LRU, MinGRU or MinLSTM"
        )
