"""Streams that take in the target: intervals around predictions, alarms, and learning."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fluxutils_py.data.views import samples
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator.fitted_parts import estimator_of_intervals
from fluxutils_py.estimator.streams.conformal import AdaptiveInterval, Calibration, check_level
from fluxutils_py.estimator.streams.residual_model import LEAST_MEMORY, MEMORY, ResidualModel
from fluxutils_py.estimator.streams.step_learner import Learning
from fluxutils_py.inputs.labels import LabelEncoder
from fluxutils_py.inputs.single_steps import series_indices
from fluxutils_py.nn.parameters import Freeze
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.validation import check_integer, check_positive

MOST_PENDING = 10_000  # steps that may wait for their target
N_OWN = 4  # tensors behind those of the model in a state

# Relative distances below and above the prediction, and what they are relative to.
Ends = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class StreamOptions(NamedTuple):
    """Options of a stream; see ``Estimator.stream``."""

    interval: float | None = None
    alarm: bool | int | str = False
    calibration: Any = None
    learn: bool | float = False
    freeze: Freeze = None
    delay: int | None = None

    def check(self) -> None:
        """Raise SpecError for options without the one that they are for."""
        if not self.compares and self.calibration is not None:
            raise SpecError("calibration is for streams with interval=0.9 or alarm=True")
        if self.learn is False and self.freeze is not None:
            raise SpecError("freeze is for streams with learn=True")
        if self.is_plain and self.delay is not None:
            raise SpecError("delay is for streams with learn=True, interval=0.9 or alarm=True")

    @property
    def is_plain(self) -> bool:
        """Whether the stream only predicts."""
        return not self.compares and self.learn is False

    @property
    def compares(self) -> bool:
        """Whether predictions are compared with their targets."""
        return self.interval is not None or self.alarm is not False

    @property
    def learning(self) -> Learning | None:
        """How the stream learns; None if it does not."""
        if self.learn is False:
            return None
        if self.learn is True:
            return Learning(None, self.freeze)
        check_positive("learn", self.learn, error=SpecError)
        return Learning(float(self.learn), self.freeze)

    @property
    def most_pending(self) -> int:
        """Number of steps that may wait for their target."""
        if self.delay is None:
            return MOST_PENDING
        return check_integer("delay", self.delay, 0, error=SpecError) + 1

    @property
    def memory(self) -> int | None:
        """Half-life of the model of residuals, if the user tells."""
        if isinstance(self.alarm, bool) or self.alarm == "frozen":
            return None
        try:
            return check_integer("alarm", self.alarm, LEAST_MEMORY, error=SpecError)
        except SpecError as error:
            raise SpecError(
                f"{error}: a number is the half-life of the memory in steps, not a level. "
                'Set alarm=True or "frozen", and compare the alarm that step returns with a level'
            ) from None


@undisturbed()
def watched_stream(
    plain: Callable[[Any, Any], Any],
    model: Any,
    estimator: Any,
    n_series: int,
    state: Sequence[Tensor] | None,
    options: StreamOptions,
    *,
    is_in_units: bool = True,
) -> Any:
    """Return a stream that keeps an interval or a model of residuals, or learns; else a plain one.

    Parameters
    ----------
    plain : callable
        Makes the stream of predictions of an estimator from a state.
    model, estimator
        What predicts, and the estimator in it.
    n_series : int
    state : list of Tensor, optional
        Of such a stream, or of the model alone.
    options : StreamOptions
    is_in_units : bool
        Whether the estimator predicts in the units of the stream.
    """
    options.check()
    if options.is_plain:
        _refuse_other_options(list(state or ()))
        return plain(estimator, state)
    check_is_fitted(estimator, "model_")
    n_outputs = _count_outputs(estimator, options)
    predicting, levels = _estimator_that_predicts(estimator, options, is_in_units)
    plain = partial(plain, predicting)
    live = plain(None)
    given = list(state or ())
    own: list[Tensor] = []
    if len(given) == len(live.state) + N_OWN:
        given, own = given[:-N_OWN], given[-N_OWN:]
    _refuse_other_options(given)
    if given:  # of the model alone: the network of the ends starts now
        live = plain([*given, *live.state[len(given) :]])
    parts = estimator.fitted_parts_
    watched = WatchedStream(live, (n_outputs, n_series), options, parts.codec.classes, levels)
    if own:
        watched.load([np.asarray(t) for t in own])
        return watched
    calibration = None
    if options.calibration is not None:
        calibration = _errors_on(model, options.calibration)
    elif is_in_units:
        calibration = parts.calibration
    watched.calibrate(calibration)
    return watched


def _estimator_that_predicts(
    estimator: Any, options: StreamOptions, is_in_units: bool
) -> tuple[Any, tuple[float, ...]]:
    """Return the estimator, with the ends of its intervals behind its outputs where the stream
    follows them, and the levels of these.
    """
    uses_ends = options.interval is not None and options.calibration is None
    if uses_ends and options.learn is False and is_in_units:
        with_ends = estimator_of_intervals(estimator)
        if with_ends is not None:
            return with_ends, with_ends.model_.levels
    return estimator, ()


def _count_outputs(estimator: Any, options: StreamOptions) -> int:
    """Return how many numbers the target of a step has for each series.

    Raises
    ------
    SpecError
        If the stream cannot compare its steps with targets, or learn from them.
    """
    codec = estimator.fitted_parts_.codec
    name = type(estimator).__name__
    n_outputs = estimator.n_outputs_
    asked = "interval and alarm" if options.compares else "learn"
    if codec.per_series:
        raise SpecError(
            f"{asked}: a stream gets a target at each step, but this estimator was fitted on one "
            "target per series; fit it on targets (G, N, T)"
        )
    if isinstance(n_outputs, tuple) or isinstance(estimator.n_features_in_, tuple):
        raise SpecError(
            f"{asked}: a stream that takes in targets has one array of inputs and one of outputs, "
            f"but this {name} has several; join them along the features"
        )
    if codec.classes is None:
        return int(n_outputs)
    if options.compares:
        raise SpecError(
            f"interval and alarm are for streams of numbers; this {name} predicts labels"
        )
    return 1


def _errors_on(model: Any, data: Any) -> Calibration:
    """Return the errors of a model on the arrays (x, y) of the user."""
    if not isinstance(data, tuple) or len(data) != 2:
        raise SpecError(
            "calibration must be (x, y): arrays (F, N, T) and (G, N, T) that the fit has not seen"
        )
    x, y_true = data[0], np.asarray(data[1], dtype=np.float64)
    if hasattr(model, "fitted_parts_"):
        predicted = np.asarray(model.predict(x))
    else:  # tools of scikit-learn around an estimator take rows
        view = samples(x)
        rows = np.asarray(model.predict(view)).reshape(len(view), -1)
        predicted = np.asarray(view.from_rows(rows, rows.shape[1] // view.native.shape[2]))
    if y_true.ndim != 3 or y_true.shape != predicted.shape:
        raise ShapeError(
            f"calibration: y has shape {y_true.shape}, the predictions for x {predicted.shape}; "
            "expected (G, N, T) of both"
        )
    return Calibration.of(y_true - predicted, True)


def _refuse_other_options(state: Sequence[Tensor]) -> None:
    """Raise SpecError if the tensors of :attr:`WatchedStream.state` end a state of a model."""
    own = [tuple(np.shape(t)) for t in state[-N_OWN:]]
    if [len(shape) for shape in own] == [1, 3, 3, 4] and own[0] == (2,):
        raise SpecError(
            "the state is of a stream with other options, which keeps other tensors: give the same "
            "interval=, alarm=, calibration= and learn= as to that stream"
        )


def _check_same(had: str, has: str) -> None:
    if had != has:
        raise SpecError(f"the state is of a stream with {had}, this one has {has}")


class WatchedStream:
    """A stream that takes in targets: it gives an interval for the next, says how unlikely the last
    residuals were, or learns; made by ``Estimator.stream`` and :func:`fluxutils_py.stream`.

    ``step`` predicts, and ``observe`` takes in the target of the oldest step that waits for it;
    ``learn`` does both. A step whose target never comes takes a NaN. Use it from one thread at a
    time.

    Parameters
    ----------
    live : EstimatorStream or PipelineStream
    shape : (G, N)
        Shape of the target of a step.
    options : StreamOptions
    classes : ndarray, optional
        The classes, if targets are labels.
    levels : sequence of float
        Levels, in per cent, of the intervals that ``live`` gives after its predictions.

    Attributes
    ----------
    n_series : int
    n_pending : int
        Steps whose target has not come.

    Examples
    --------
    >>> from fluxutils_py import SequenceRegressor
    >>> x = np.random.default_rng(0).normal(size=(2, 3, 400))  # (F, N, T)
    >>> y = x.sum(0, keepdims=True) + np.random.default_rng(1).normal(size=(1, 3, 400))
    >>> est = SequenceRegressor(cell="linear", level=90).fit(x, y)
    >>> live = est.stream(3, interval=0.9, alarm=True)
    >>> prediction, low, high, alarm = live.step(x[:, :, 0])
    >>> live.observe(y[:, :, 0])
    >>> prediction.shape, low.shape, alarm.shape
    ((1, 3), (1, 3), (3,))
    """

    def __init__(
        self,
        live: Any,
        shape: tuple[int, int],
        options: StreamOptions,
        classes: np.ndarray | None = None,
        levels: Sequence[float] = (),
    ) -> None:
        self._live = live
        self._shape = shape
        self._encode = None if classes is None else LabelEncoder(classes)
        self._compares = options.compares
        self._learns = options.learning is not None
        self._most_pending = options.most_pending
        self.n_series = live.n_series
        self._interval: AdaptiveInterval | None = None
        if options.interval is not None:
            share = check_level("interval", options.interval)
            self._interval = AdaptiveInterval(share, shape)
            # of the levels of the fit, the closest gives distances, which are adapted
            places = range(len(levels))
            self._level = min(places, key=lambda k: abs(levels[k] - 100 * share), default=None)
        self._alarm, self._memory = options.alarm, options.memory
        self._residuals: ResidualModel | None = None
        # predictions that wait for their target, where it is compared with them, with the distances
        # to both ends
        self._pending: deque[tuple[Any, Ends | None]] = deque()

    # -- the beginning -----------------------------------------------------------------------------

    def calibrate(self, calibration: Calibration | None) -> None:
        """Start from errors on data that the fit has not seen."""
        is_frozen = self._alarm == "frozen"
        if calibration is None and (self._interval is not None or is_frozen):
            raise SpecError(
                "an interval, or a frozen alarm, starts from errors on data that the fit has "
                "not seen: fit SequenceRegressor(level=90), or give calibration=(x, y)"
            )
        n_outputs = self._shape[0]
        if self._interval is not None and calibration is not None:
            self._interval.calibrate(calibration.outputs(n_outputs, self._level))
        if self._alarm is False:
            return
        n_steps = 0 if calibration is None else calibration.errors.shape[2]
        # a frozen one cannot tell how means over more than the calibration vary
        memory = self._memory or max(LEAST_MEMORY if is_frozen else MEMORY, 2 * n_steps)
        self._residuals = ResidualModel(self._shape, memory, frozen=is_frozen)
        if calibration is not None:
            self._residuals.calibrate(calibration.outputs(n_outputs))

    def load(self, own: list[np.ndarray]) -> None:
        """Continue from the last tensors of a state."""
        (level, memory), interval, residuals, pending = own
        if self._interval is not None:
            had = "no interval" if np.isnan(level) else f"interval={level:g}"
            _check_same(had, f"interval={self._interval.level:g}")
            self._interval.load(interval)
        if self._alarm is not False:
            is_frozen = bool(np.isinf(residuals[2:3]).any())  # the number of steps
            had = "no alarm" if np.isnan(memory) else f"alarm={memory:.0f}"
            had = "alarm=frozen" if is_frozen else had
            fits = self._alarm is True and memory > 0 and not is_frozen
            _check_same(had, had if fits else f"alarm={self._alarm}")
            self._residuals = ResidualModel(self._shape, int(memory), frozen=is_frozen)
            self._residuals.load(residuals)
        for prediction, *of_ends in pending:
            ends = None if self._interval is None else tuple(of_ends)
            self._pending.append((prediction if self._compares else None, ends))

    # -- steps -------------------------------------------------------------------------------------

    def step(self, x: object, *, alarm: bool | None = None) -> Any:
        """Return what is known for the next step of all series, and move the state on.

        Parameters
        ----------
        x : array of shape (F, N)
        alarm : bool, optional
            Whether to return the alarm too. None: as the stream was made.

        Returns
        -------
        prediction, low, high : ndarray of shape (G, N)
            New arrays; low and high only with ``interval``.
        alarm : ndarray of shape (N,)
            How unlikely the last observed residuals are: 2 roughly once in 100 steps, 3 once in
            1000, if the residuals go on like those that the memory holds; one number for all
            outputs, see :attr:`alarm_shares`. Alarms come in spells, and tell nothing about what is
            rarer than the memory has seen. Zeros before the first target.

        Raises
        ------
        ValueError
            If ``x`` does not fit, or more steps than ``delay``, or 10,000, wait for their target.
            The state then stays.
        """
        wants_alarm = (self._alarm is not False) if alarm is None else alarm
        also = (self.alarm,) if wants_alarm else ()
        n = len(self._pending)
        if n >= self._most_pending:
            raise DataError(
                f"{n} step{'s wait' if n > 1 else ' waits'} for their target: give it to observe, "
                "NaN where it never comes; or make a stream with a larger delay, or a plain one"
            )
        y = self._live.step(x)
        ends = None
        if self._interval is not None:
            below, above = self._interval.below, self._interval.above
            down = up = np.ones(1)
            if self._level is not None:
                n = self._shape[0]
                first = (1 + 2 * self._level) * n
                down, up = y[:n] - y[first : first + n], y[first + n : first + 2 * n] - y[:n]
                y = y[:n].copy()
            ends = below, above, down, up
            low, high = y - (below * down).astype(y.dtype), y + (above * up).astype(y.dtype)
            also = (low, high, *also)
        self._pending.append((y.copy() if self._compares else None, ends))
        return (y, *also) if also else y

    def learn(self, x: object, y: object) -> Any:
        """Predict the next step of all series, then learn from its target.

        The same as ``step(x)`` and then ``observe(y)``, where no earlier step waits for its target.

        Parameters
        ----------
        x : array of shape (F, N)
        y : array of shape (G, N)
            See :meth:`observe`.

        Returns
        -------
        What :meth:`step` returns; the prediction has not seen ``y``.

        Raises
        ------
        ValueError
            If the stream was made without ``learn``, ``x`` or ``y`` does not fit, or earlier steps
            wait for their target. The state then stays.
        FloatingPointError
            See :meth:`observe`.
        """
        if not self._learns:
            raise SpecError("this stream does not learn: make it with learn=True")
        if self._pending:
            raise DataError(
                f"learn takes the target of the step itself, but targets of {len(self._pending)} "
                "earlier steps have not come: call step(x), and observe(y) for the oldest"
            )
        y_true = self._read_target(y)
        found = self.step(x)
        self._take(y_true)
        return found

    def observe(self, y: object) -> None:
        """Take in the target (G, N) of the oldest step that has none yet; NaN where it is unknown.

        For a classifier, ``y`` are labels (1, N).

        Raises
        ------
        ValueError
            If ``y`` has another shape or is infinite, or no step waits.
        FloatingPointError
            If the stream learns, and the loss or its gradient is not finite. The target is then
            taken in, and the parameters are as before.
        """
        y_true = self._read_target(y)
        if not self._pending:
            raise DataError("observe: no step waits for its target; call step first")
        self._take(y_true)

    def _read_target(self, y: Any) -> np.ndarray:
        """Return a target as numbers (G, N), NaN where it is unknown; labels by their places."""
        if isinstance(y, Tensor):
            y = y.detach().cpu()
        y_true = np.asarray(y, dtype=np.float64 if self._encode is None else None)
        if y_true.shape != self._shape:
            raise ShapeError(
                f"observe takes the target of one step, of shape (G, N) = {self._shape}, got "
                f"{y_true.shape}"
            )
        if self._encode is not None:
            codes = self._encode(y_true)
            return np.where(codes < 0, np.nan, codes)
        # one product is faster than a mask, and targets that are all known are the rule
        if not math.isfinite(np.vdot(y_true, y_true)) and np.isinf(y_true).any():
            raise DataError("observe: y is infinite; give NaN where the target is unknown")
        return y_true

    @undisturbed()
    def _take(self, y_true: np.ndarray) -> None:
        prediction, ends = self._pending.popleft()
        if self._interval is not None and ends is not None:
            below, above, down, up = ends
            residual = y_true - prediction
            # rounding may leave no distance
            residual /= np.maximum(np.where(residual > 0, up, down), 1e-30)
            self._interval.observe(residual, below, above, delay=len(self._pending))
        if self._residuals is not None:
            self._residuals.observe(y_true - prediction)
        if self._learns:
            self._live.take_target(y_true)

    @property
    @undisturbed()
    def alarm(self) -> np.ndarray:
        """How unlikely the last residuals of each series are, (N,); see :meth:`step`."""
        return self._model_of_residuals.alarm()

    @property
    def alarm_shares(self) -> np.ndarray:
        """The share of each output in the distance behind the alarm, over the last few steps:
        (G, N), each from 0 to 1, with a sum of 1 (0 before the first target).

        It tells which sensor differs beyond what its correlation with the others explains.

        Notes
        -----
        Source: Garthwaite & Koch (2016), Evaluating the contributions of individual variables to a
        quadratic form, Australian & New Zealand Journal of Statistics.
        """
        return self._model_of_residuals.shares()

    @property
    def _model_of_residuals(self) -> ResidualModel:
        if self._residuals is None:
            raise SpecError("this stream keeps no model of residuals: make it with alarm=True")
        return self._residuals

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    # -- the state ---------------------------------------------------------------------------------

    @property
    def state(self) -> list[Tensor]:
        """Copy of all that the next outputs depend on, for the ``state`` argument of a stream: the
        state of the model; with ``learn``, one tensor of bytes with what was learnt; and four
        tensors of the targets seen and awaited.
        """
        level, memory = np.nan, np.nan
        interval, residuals = np.empty((0, *self._shape)), np.empty((0, *self._shape))
        if self._interval is not None:
            level = self._interval.level
            interval = self._interval.state
        if self._residuals is not None:
            memory = self._residuals.memory
            residuals = self._residuals.state
        pending = np.empty((len(self._pending), 5, *self._shape))
        for row, (prediction, ends) in zip(pending, self._pending, strict=True):
            row[0] = np.nan if prediction is None else prediction
            for at, values in zip(row[1:], ends or (np.nan,) * 4, strict=True):
                at[:] = values
        own = (np.array([level, memory]), interval, residuals, pending)
        return [*self._live.state, *map(torch.from_numpy, own)]

    def reset(self, series: object = None) -> None:
        """Start all series anew, or some: an index, a list or slice of them, or a mask (N,).

        Their intervals and alarms start from the calibration; what was learnt stays. Targets of
        their earlier steps are no longer awaited; where other series still wait, ``observe``
        ignores the targets of these series.
        """
        self._live.reset(series)
        if series is None:
            self._pending.clear()
            series = slice(None)
        chosen = series_indices(series, self.n_series)
        for prediction, _ in self._pending:
            if prediction is not None:
                prediction[:, chosen] = np.nan
        for each in (self._interval, self._residuals):
            if each is not None:
                each.reset(chosen)
