"""Warn of data from which a model probably learns something else than was meant."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from fluxutils_py.data.segments import Segments
from fluxutils_py.data.sequence_windows import SequenceWindows
from fluxutils_py.data.views import SequenceView, flattened_steps
from fluxutils_py.errors import DataError, SingleStepWarning
from fluxutils_py.inputs.inputs import Inputs, is_native
from fluxutils_py.nn import Recur
from fluxutils_py.nn.model_windows import cut_dependence
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.joblib_mpi import is_active
from fluxutils_py.parallel.launcher import is_alone, launched

_is_said = False


def warn_repeated_search(ranks: RankGroup) -> None:
    """Warn on rank 0, once, if a fit for scikit-learn's model selection runs by itself on each of
    several ranks.

    This is so with ``comm=None``, and in the processes and threads of ``n_jobs``. With
    ``comm="auto"`` and without ``n_jobs``, nothing is repeated: all ranks train each candidate
    together.
    """
    global _is_said
    _, rank, size = launched()
    if (
        _is_said
        or not ranks.is_single
        or size == 1
        or rank
        or is_alone()
        or is_active()
        or not _in_model_selection()
    ):
        return
    _is_said = True
    warnings.warn(
        f"each of {size} ranks repeats this search by itself: it fits the same candidates on the "
        "same folds. To share "
        'them out, search inside a block: with joblib.parallel_config("mpi"): search.fit(x, y). If each rank '
        "searches in data of its own, this warning does not matter",
        stacklevel=2,
    )


def _in_model_selection() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").startswith("sklearn.model_selection."):
            return True
        frame = frame.f_back
    return False


LARGE = 1000  # root mean square of a feature, from which it should have been scaled
# standard deviation, below which defaults hardly learn: R2 of 0.9 at 1 is 0.3-0.8 there, 0.1 at
# 0.01
SMALL = 0.03
RARE = (
    10 * SMALL
)  # distance from the mean, from which a value is an event, and no sign of a small scale
# factor between standard deviations of training and validation inputs that are not scaled alike
UNLIKE = 100
FAR = 30  # standard deviations between means of those
FEW = 5  # values, of which fewer may be alike by chance
CONSTANT = 1e-6  # share of the size of a feature, up to which it varies by rounding only
AS_INPUT = "scale it, as with make_pipeline(SequenceScaler(), estimator)"
FEW_ROWS = 60  # below which rows are alike by chance
MANY_COLUMNS = 64  # of which those before tell enough
DISTINCT = 10  # values of a column that can tell whether rows follow each other
FURTHER = (4, 5, 6, 7)  # rows further, with which neighbours are compared
# squared distance of neighbours over that of rows further apart; 1 for independent rows, 0.2 for a
# walk
ALIKE = 0.5
LOOKED_AT = 4, 1000  # series and steps
NORMALIZE = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Embedding, nn.modules.batchnorm._NormBase)
MANY = 1000  # rows; a larger frame probably holds steps in time
TIMES = (
    "date",
    "datetime",
    "day",
    "hour",
    "month",
    "period",
    "step",
    "t",
    "time",
    "timestamp",
    "week",
    "year",
)


def warn_single_steps(x: Any, inputs: Inputs, model: nn.Module) -> None:
    """Warn if a model of sequences is fitted on a matrix whose rows look like something else than
    single steps.

    They may be series that another tool flattened, or follow each other in time: in a data frame
    (pandas or polars) with an index of dates, or one named like time (``TIMES``), or of at least
    ``MANY`` rows; in any matrix whose values are alike from row to row (:func:`follow_each_other`).
    """
    if inputs.form != "rows" or inputs.T > 1:
        return
    if not any(isinstance(m, Recur) or hasattr(m, "takes_windows") for m in model.modules()):
        return
    matrix = np.asarray(inputs.series[0].array)[:, :, 0].T
    message = _say_flattened(matrix) or _say_time(x, matrix, model)
    if message is not None:
        warnings.warn(message, SingleStepWarning, stacklevel=levels_to_caller())


def _say_flattened(matrix: np.ndarray) -> str | None:
    n_steps = flattened_steps(matrix)
    if n_steps is None:
        return None
    n_columns = matrix.shape[1]
    return (
        f"the {n_columns} columns of this matrix are those of samples(x), {n_columns // n_steps} "
        f"features at {n_steps} steps, that another tool made a matrix of; each row is taken for a "
        f"series of one step. Set n_timesteps={n_steps}, as with "
        f"SequenceRegressor(n_timesteps={n_steps}), so that it is cut into steps again"
    )


def _say_time(x: Any, matrix: np.ndarray, model: nn.Module) -> str | None:
    if not any(isinstance(m, Recur) for m in model.modules()):
        return None
    is_frame = hasattr(x, "columns")
    why = _looks_like_time(x) if is_frame else None
    if why is None and is_frame and len(x) >= MANY:
        why = f"has {len(x)} rows"
    if why is None and follow_each_other(matrix):
        why = f"has {len(matrix)} rows with values that change little from row to row, as in time"
    if why is None:
        return None
    what, values = ("a data frame", "x.to_numpy()") if is_frame else ("a matrix", "x")
    apart = f"fit on {values}" if is_frame else "shuffle them, or ignore this warning"
    return (
        f"x is {what} that {why}, but each of its rows is taken for a series of one step: the "
        "model carries nothing from row to row. If the rows are the steps of one series, fit on "
        f"timesteps({values}.T[:, None]) and y; if of several, make an array (F, N, T) of them, "
        f"and fit on that, on samples(x) or on timesteps(x); if they are independent, {apart}"
    )


def follow_each_other(matrix: np.ndarray) -> bool:
    """Whether the rows look like steps in time: in at least half of the columns, values next to
    each other are alike.

    Neighbours are compared with values a few rows further, not with all: rows sorted by class are
    alike over long distances, but no more to their neighbours than to the others of their class.
    Columns that only rise or only fall do not count: tables are often sorted by one. Ranks stand
    for values, so that outliers have no say.
    """
    matrix = matrix[: LOOKED_AT[1]]
    if len(matrix) < FEW_ROWS:
        return False
    n_columns = n_alike = 0
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


def _usual_square(changes: np.ndarray) -> float:
    """Return the mean square of the smaller changes: those from one class to the next are the
    largest.
    """
    squares = np.sort(np.square(changes, dtype=np.float64))
    return float(squares[: len(squares) * 3 // 4].mean())


def warn_cut(model: nn.Module, steps: Sequence[Tensor], overlap: int, seqsize: int) -> None:
    """Warn if the outputs of a model without state depend on where windows cut the series.
    ``steps`` are inputs.
    """
    found = cut_dependence(model, steps, overlap)
    if found is None:
        return
    depends, way = {
        "later": (
            "change with later steps",
            "make it causal: pad on the left alone, mask attention, or take "
            "fluxutils_py.nn.CausalConv1d",
        ),
        "earlier": (
            f"change with steps more than overlap={overlap} before them",
            "set spec.overlap to the number of earlier steps that an output needs",
        ),
    }[found]
    warnings.warn(
        f"the outputs of {type(model).__name__} {depends}, and windows of seqsize={seqsize} cut "
        f"the series: what it predicts depends on where they are cut. {way[0].upper()}{way[1:]}; "
        "or let windows be whole series with spec.seqsize=None, and predict whole series",
        stacklevel=levels_to_caller(),
    )


def warn_unscaled(
    windows: SequenceWindows, model: nn.Module, y: Any, scales_target: bool | None
) -> None:
    """Warn if the first values of a feature are too large to learn from, or vary too little
    (:class:`Scale`).

    Only layers in a row (``nn.Sequential``) are known to see inputs as they are, unless they
    normalize or embed them; a model of another class may scale them itself. ``y`` are the targets
    as they were given. ``scales_target`` is None for an estimator that cannot standardise its
    targets.
    """
    scales = first_scales(windows) if isinstance(model, nn.Sequential) else {}
    normalizes = any(isinstance(m, NORMALIZE) for m in model.modules())
    for name, scale in scales.items():
        is_input = name.startswith("x")
        if (found := scale.describe_unusual()) is not None and not (is_input and normalizes):
            way_out = AS_INPUT if is_input else _way_to_scale(y, scales_target)
            warnings.warn(
                f"feature {found[0]} of {name} {found[1]}, from which networks learn badly or not "
                f"at all; {way_out}",
                stacklevel=levels_to_caller(),
            )


def warn_unlike_training(windows: SequenceWindows, validation: SequenceWindows | None) -> None:
    """Warn if the first validation inputs have a scale ``UNLIKE`` that of the training inputs, or
    lie ``FAR`` off.
    """
    if validation is None:
        return
    of_training, of_validation = first_scales(windows), first_scales(validation)
    for s, v in zip(windows.x, validation.x, strict=True):
        a, b = of_training.get(s.name), of_validation.get(v.name)
        if a is None or b is None:
            continue
        larger, smaller = np.maximum(a.spread, b.spread), np.minimum(a.spread, b.spread)
        can_tell = a.varies & b.varies & (a.count >= FEW) & (b.count >= FEW)
        unlike = can_tell & ((larger > UNLIKE * smaller) | (abs(a.mean - b.mean) > FAR * larger))
        if unlike.any():
            f = int(unlike.argmax())
            described = (f"{scale.mean[f]:.2g} +- {scale.spread[f]:.1g}" for scale in (b, a))
            warnings.warn(
                f"feature {f} of {v.name} is about {next(described)}, that of {s.name} "
                f"{next(described)}: a Pipeline does not transform validation_data; set "
                "early_stopping=True, or transform them yourself",
                stacklevel=levels_to_caller(),
            )


def _way_to_scale(y: Any, scales_target: bool | None) -> str:
    """Return lines that scale targets of this form; the tests run them."""
    if scales_target is False:
        return "set scale_target=True"
    if is_native(y) or isinstance(y, SequenceView):
        return (
            "scale it: scaler = SequenceScaler().fit(y); estimator.fit(x, scaler.transform(y)); "
            "scaler.inverse_transform(estimator.predict(x))"
        )
    return "scale it: TransformedTargetRegressor(estimator, transformer=StandardScaler()).fit(x, y)"


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
        """Of values (S, B, F), where ``live``, of a shape that broadcasts to theirs, is true."""
        values = np.where(live, values, 0).astype(np.float64)
        n = np.broadcast_to(live, values.shape).sum((0, 1))
        count = np.maximum(n, 1)
        with np.errstate(over="ignore"):
            mean = values.sum((0, 1)) / count
            distance = np.where(live, values - mean, 0)
            size, spread = (np.sqrt(np.square(v).sum((0, 1)) / count) for v in (values, distance))
        return cls(n, mean, size, spread, abs(distance).max((0, 1)))

    @property
    def varies(self) -> np.ndarray:
        """Which features are not constant, as far as float32 can tell."""
        return self.spread > CONSTANT * self.size

    def describe_unusual(self) -> tuple[int, str] | None:
        """Return the position of a feature that is too large or varies too little, and in which
        way; None: all fine.
        """
        if self.size.max() >= LARGE:
            return int(self.size.argmax()), f"has values of about {self.size.max():.0g}"
        is_small = self.varies & (self.count >= FEW) & (self.spread < SMALL)
        is_small &= self.reach < RARE  # rare events lie far from the mean
        if not is_small.any():
            return None
        i = int(np.where(is_small, self.spread, np.inf).argmin())
        return i, f"varies by no more than about {self.spread[i]:.0g}"


def first_scales(windows: SequenceWindows) -> dict[str, Scale]:
    """Return the scale of the first values of each array of numbers, by its name; of none if they
    cannot be read.
    """
    n_steps = min(LOOKED_AT[1], windows.seqsize, windows.segments.max_length)
    rows = windows.own(windows.segments)[: windows.batchsize]
    first = rows[: LOOKED_AT[0] * LOOKED_AT[1] // n_steps]  # more of short series
    if not len(rows):
        return {}
    try:
        window = windows.cut(first, 0, n_steps)
        with_targets = window
        if window.y and window.n_live == 0:  # there may be one for each series, at its last step
            last = Segments(rows.series, rows.start + rows.length - 1, np.ones_like(rows.length))
            with_targets = windows.cut(last, 0, 1)
    except DataError:  # training says so when it comes there
        return {}
    scales: dict[str, Scale] = {}
    column, w, every = 0, with_targets.w, np.ones((1, 1, 1), bool)
    for s, v in zip(windows.y, with_targets.y, strict=True):
        live = (
            every if w is None else w[:, :, column : column + s.F] > 0 if w.shape[2] > 1 else w > 0
        )
        column += s.F
        if v.dtype.kind == "f" and live.any():
            scales[s.name] = Scale.of(v, live)
    exists = first.step_mask(0, n_steps)
    for s, v in zip(windows.x, window.x, strict=True):
        if v.dtype.kind == "f":
            scales[s.name] = Scale.of(v, every if exists is None else exists[:, :, None])
    return scales


def _looks_like_time(frame: Any) -> str | None:
    index = getattr(frame, "index", None)
    for level in getattr(index, "levels", None) or [index]:
        if type(level).__name__ in ("DatetimeIndex", "PeriodIndex", "TimedeltaIndex"):
            return f"has a {type(level).__name__}"
        name = getattr(level, "name", None)
        if isinstance(name, str) and name.lower() in TIMES:
            return f"has an index named {name!r}"
    return None


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the line outside this package that led here."""
    warnings.warn(message, category, stacklevel=levels_to_caller())


def levels_to_caller() -> int:
    """Return the ``stacklevel`` of the line outside this package that led here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        "fluxutils_py."
    ):
        level, frame = level + 1, frame.f_back
    return level
