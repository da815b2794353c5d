"""Run fitted estimators and pipelines step by step, as data arrive."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.estimator.spec import read_spec
from fluxutils_py.estimator.streams.step_chain import output_form, scaler_of
from fluxutils_py.estimator.streams.step_learner import Learning, StepLearner
from fluxutils_py.estimator.streams.watched_stream import StreamOptions, watched_stream
from fluxutils_py.inputs.single_steps import read_step, series_indices
from fluxutils_py.inputs.target_codec import Transform
from fluxutils_py.nn.kernels.recurrence import TYPES
from fluxutils_py.nn.model_windows import gap_value_of
from fluxutils_py.nn.parameters import Freeze
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.nn.states import have_begun, read_states, snapshot
from fluxutils_py.steps.native_step import NativeStep, Scaler
from fluxutils_py.steps.session import InferenceSession
from fluxutils_py.training.minibatch import to_tensor
from fluxutils_py.validation import check_integer

# NumPy's codes of the numbers that a native step reads; uint64 may hold what int64 does not
NATIVE_INPUTS = "?bhilqBHIefdg"


def stream(
    model: Any,
    n_series: int = 1,
    state: Sequence[Tensor] | None = None,
    *,
    method: str = "predict",
    interval: float | None = None,
    alarm: bool | int | str = False,
    calibration: Any = None,
    learn: bool | float = False,
    freeze: Freeze = None,
    delay: int | None = None,
) -> Any:
    """Run a fitted estimator or pipeline step by step, as data arrive.

    Parameters
    ----------
    model : estimator, Pipeline, TransformedTargetRegressor, or fitted search
        The transformers of a pipeline run at each step: those of this package, such as
        :class:`SequenceScaler`, on the step; those of scikit-learn on its N rows of F features, if
        they were fitted on rows of F features. A search runs its best estimator.
    n_series : int
        N, the number of series at each step.
    state : list of Tensor, optional
        The ``state`` of an earlier stream to continue from. None: the start of the series. A state
        from ``predict`` covers the estimator alone: if a transformer depends on earlier steps
        (:class:`SequenceImputer` with "ffill", :class:`SequenceFeatures`), begin with a stream that
        steps through the stored data.
    method : "predict", "predict_proba", "predict_log_proba" or "decision_function"
        The output that each step returns.
    interval, alarm, calibration, learn, freeze, delay
        See :meth:`Estimator.stream`. Transformers do not learn.

    Returns
    -------
    EstimatorStream, PipelineStream or WatchedStream
        Its ``step(x)`` takes ``(F, N)`` and returns ``(G, N)``, the output of ``method`` at that
        step of the series; with ``interval`` and ``alarm``, the ends and the alarm too.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        Before ``fit``.
    TypeError, ValueError
        If something cannot run step by step; the message names the remedy.

    Notes
    -----
    Where native kernels are in use, a step of a few series is one native call of a few
    microseconds, if transformers are ``SequenceScaler``, ``WinsorScaler``, ``SequenceImputer`` (not
    "ffill") or ``StandardScaler``, and the model consists of the recurrent layers of torch and this
    package, features of time, linear layers, normalisations and activations, or is a ready-made
    one. Results are equal to rounding.

    Examples
    --------
    >>> from sklearn.pipeline import make_pipeline
    >>> from fluxutils_py import SequenceRegressor, SequenceScaler, samples, stream
    >>> x = np.random.default_rng(0).normal(50, 3, size=(2, 30, 20)).astype("float32")  # (F, N, T)
    >>> pipe = make_pipeline(SequenceScaler(), SequenceRegressor(8, epochs=2)).fit(
    ...     samples(x), samples(x[:1])
    ... )
    >>> live = stream(pipe, n_series=30)
    >>> for t in range(20):
    ...     y = live.step(x[:, :, t])
    >>> y.shape, np.allclose(y, pipe.predict(x)[:, :, -1], atol=1e-5)
    ((1, 30), True)
    """
    parts = unwrap(model)
    if not hasattr(parts.estimator, "predict") or not hasattr(parts.estimator, "stream"):
        raise TypeError(
            f"{type(parts.estimator).__name__} cannot run step by step; stream takes estimators of "
            "this package, pipelines of transformers and such an estimator, and searches over these"
        )

    options = StreamOptions(interval, alarm, calibration, learn, freeze, delay)
    learning = options.learning
    if learning is not None and parts.of_targets:
        raise SpecError(
            "learn: targets come in the units of the stream, and a TransformedTargetRegressor "
            "cannot transform targets of single steps; scale targets by scale_target=True "
            "of SequenceRegressor"
        )

    def plain(last: Any, state: Sequence[Tensor] | None) -> Any:
        live: Any
        if parts.transformers:
            live = PipelineStream(parts.transformers, last, n_series, state, method, learning)
        elif learning is not None:
            live = EstimatorStream(last, n_series, state, method, learning)
        else:
            live = last.stream(n_series, state, method=method)
        live.transforms.extend(partial(_undo, _without_names(t)) for t in parts.of_targets)
        return live

    return watched_stream(
        plain,
        model,
        parts.estimator,
        n_series,
        state,
        options,
        is_in_units=not parts.of_targets,
    )


@dataclass(frozen=True)
class ModelParts:
    """What searches, pipelines and ``TransformedTargetRegressor`` around an estimator consist of.

    Attributes
    ----------
    transformers : list of (name, transformer)
        Those of inputs, in the order in which they are applied.
    estimator : estimator, or whatever else is innermost
    of_targets : list of transformer
        Those of targets, the first to undo first.
    """

    transformers: list[tuple[str, Any]]
    estimator: Any
    of_targets: list[Any]


def unwrap(model: Any) -> ModelParts:
    """Take a fitted model apart.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        If a pipeline or a ``TransformedTargetRegressor`` is not fitted.
    """
    if hasattr(model, "best_estimator_"):
        return unwrap(model.best_estimator_)
    if hasattr(model, "steps"):
        check_is_fitted(model)
        inner = unwrap(model.steps[-1][1])
        before = pipeline_transformers(model.steps[:-1])
        return ModelParts([*before, *inner.transformers], inner.estimator, inner.of_targets)
    # a TransformedTargetRegressor
    if hasattr(model, "regressor") and hasattr(model, "check_inverse"):
        check_is_fitted(model)
        inner = unwrap(model.regressor_)
        of_targets = [*inner.of_targets, model.transformer_]
        return ModelParts(inner.transformers, inner.estimator, of_targets)
    return ModelParts([], model, [])


class EstimatorStream:
    """A fitted estimator that predicts step by step; made by ``Estimator.stream``.

    It has a copy of the model, with the same parameters and a separate state. Use it from one
    thread at a time.

    Parameters
    ----------
    est, n_series, state, method
        See ``Estimator.stream``.
    learning : Learning, optional
        Makes the stream learn from targets that :meth:`take_target` gets.

    Attributes
    ----------
    n_series : int

    Examples
    --------
    >>> from fluxutils_py import Estimator
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> est = Estimator(spec={"epochs": 1, "batchsize": 10, "seqsize": 25}).fit(x, x[:1])
    >>> live = est.stream(n_series=20)
    >>> y = np.stack([live.step(x[:, :, t]) for t in range(50)], axis=2)
    >>> np.allclose(y, est.predict(x), atol=2e-6)
    True
    """

    @undisturbed()
    def __init__(
        self,
        est: BaseSeriesEstimator,
        n_series: int = 1,
        state: Sequence[Tensor] | None = None,
        method: str = "predict",
        learning: Learning | None = None,
    ) -> None:
        check_is_fitted(est, "model_")
        check_integer("n_series", n_series, 1, error=SpecError)
        self.n_series = int(n_series)
        self.transforms: list[Transform] = [_find_decoder(est, method)]
        layout = est.fitted_parts_.layout
        self._shapes = [(n, self.n_series) for n in layout.sizes]
        parameter = next(est.model_.parameters(), torch.empty(0))
        self._dtype = parameter.dtype
        self._device = parameter.device

        spec = read_spec(est.resolved_params().spec)
        # copies the model: a later fit of the estimator does not change a running stream
        self._gap_value = gap_value_of(est.model_)
        model = est.model_
        self._learner: StepLearner | None = None
        if learning is not None:
            self._learner = StepLearner(est, self.n_series, learning)
            model = self._learner.model
        self._session = InferenceSession(
            model, partial(self._sample, layout.kinds), int(spec.overlap), spec.precision
        )
        self._load(state)
        # series without any input yet, if there are some: they begin with it, as in predict
        known = None if state is None else self._session.state
        waiting = ~have_begun(self._session.model, known, self.n_series)
        self._waiting = waiting if waiting.any() else None
        codec = est.fitted_parts_.codec
        self._classes = codec.classes if method == "predict" else None
        self._output = None
        # parameters that change with each target would be packed anew at each step
        if self._learner is None and len(self._shapes) == 1 and self._dtype in TYPES:
            name = str(self._dtype).removeprefix("torch.")
            self._output = output_form(codec, method, np.dtype(name))
        self._native = self.native_step()

    def _sample(self, kinds: Sequence[str]) -> list[Tensor]:
        """Return three steps of a few series, to try the model on."""
        size = min(4, self.n_series)
        dtypes = [torch.int64 if kind == "int" else self._dtype for kind in kinds]
        return [
            torch.zeros(3, size, n, dtype=dtype, device=self._device)
            for (n, _), dtype in zip(self._shapes, dtypes, strict=True)
        ]

    def _load(self, state: Sequence[Tensor] | None) -> None:
        """Continue from a state of the model, with what was learnt behind it or without."""
        if self._learner is None:
            self._session.load(state, self.n_series)
            return
        if self._session.needs_context:
            raise SpecError(
                "learn needs a model that carries its state from step to step; this one sees its "
                "last inputs again with each step (overlap). Use recurrent layers, or layers of "
                "fluxutils_py.nn that keep their inputs, such as TCN"
            )
        tensors = None if state is None else read_states(state)
        learnt = None
        if tensors and tensors[-1].dtype == torch.uint8:
            *tensors, learnt = tensors
        self._session.load(tensors, self.n_series)
        if learnt is None:
            self._learner.begin(snapshot(self._session.model))
        else:
            self._learner.load(learnt)

    def native_step(self, scalers: Sequence[Scaler] = ()) -> NativeStep | None:
        """Return what runs steps natively for :meth:`native_outputs`; None if there is nothing."""
        if self._output is None:
            return None
        return self._session.native_step(self._shapes[0], scalers, self._output)

    def native_outputs(self, native: NativeStep | None, x: object) -> Any:
        """Return the outputs of the next step from a native step of this stream, or None, with
        nothing changed, if :meth:`step` has to compute or refuse it.
        """
        # the plainest input alone: the ordinary way reads, or refuses, everything else
        if native is None or type(x) is not np.ndarray or x.shape != native.shape:
            return None
        y = native.run(x) if x.dtype.char in NATIVE_INPUTS else None
        if y is None:
            return None
        if self._waiting is not None:
            self._hold(self._waiting, native.gap)
        if self._classes is not None:
            y = self._classes[y]
        if len(self.transforms) == 1:
            return y
        y = y.T[None]
        with undisturbed():
            for transform in self.transforms[1:]:
                y = transform(y)
        return np.array(y[0].T)

    def step(self, x: object) -> Any:
        """Return the outputs for the next step of all series, and move the state on.

        Parameters
        ----------
        x : array of shape (F, N), or a tuple of them for several inputs
            A series whose features are all NaN has no input at this step: its outputs are NaN, as
            in ``predict``. Before its first input a series has not begun; later its state moves on
            as with zeros, since a stream does not know where a series ends.

        Returns
        -------
        ndarray of shape (G, N), or a tuple of them for several outputs
            New arrays.

        Raises
        ------
        ValueError
            If ``x`` does not fit, or has single NaNs or infinities. The state then stays.
        """
        y = self.native_outputs(self._native, x)
        if y is not None:
            return y
        with undisturbed():
            return self._step_in_torch(x)

    def _step_in_torch(self, x: object) -> Any:
        given = x if isinstance(x, tuple) else (x,)
        if len(given) != len(self._shapes):
            raise ShapeError(
                f"a step has {len(given)} inputs, the model takes {len(self._shapes)}, as a tuple "
                "of arrays"
            )
        arrays = [read_step(a, shape) for a, shape in zip(given, self._shapes, strict=True)]
        gap = None
        if not all(map(_has_finite_squares, arrays)):
            arrays, gap = _without_gaps(arrays, self._gap_value)
        xs = tuple(to_tensor(a.T[None], self._dtype, self._device) for a in arrays)  # (1, N, F)
        if self._learner is not None:
            self._learner.note(arrays[0], gap)
        # faster than no_grad, and outputs are never part of a graph
        with torch.inference_mode():
            outs = self._session.run(xs)
        if self._waiting is not None:
            self._hold(self._waiting, gap)
        outputs = tuple(self._decode_outputs(o, gap) for o in outs)
        return outputs if len(outputs) > 1 else outputs[0]

    def _hold(self, waiting: np.ndarray, gap: np.ndarray | None) -> None:
        """Keep series that have had no input yet before their first step."""
        waiting = waiting & gap if gap is not None else np.zeros(self.n_series, bool)
        if waiting.all() and self._learner is None:
            self.reset()
        elif waiting.any():
            # a model whose zero state is not known forgets all series or none
            with contextlib.suppress(DataError):
                self.reset(waiting)
        self._waiting = waiting if waiting.any() else None

    def _decode_outputs(self, out: Tensor, gap: np.ndarray | None) -> np.ndarray:
        y = out.cpu().numpy()
        if gap is not None:
            y = np.where(gap[None, :, None], np.nan, y).astype(y.dtype)
        for transform in self.transforms:
            y = transform(y)
        return np.array(y[0].T)  # a copy, since an output may share memory with the state

    def take_target(self, y_true: np.ndarray) -> None:
        """Learn from the target (G, N) of the oldest step that has none yet, NaN where it is
        unknown; labels by their places.
        """
        if self._learner is not None:
            self._learner.observe(y_true)

    @property
    def state(self) -> list[Tensor]:
        """Copy of the state that the next outputs depend on, as :func:`fluxutils_py.states` gives
        it; if the stream learns, a tensor of bytes follows.
        """
        learnt = [] if self._learner is None else [self._learner.state]
        return [*self._session.state, *learnt]

    def reset(self, series: object = None) -> None:
        """Start all series anew, or some: an index, a list or slice of them, or a mask (N,)."""
        chosen = None if series is None else series_indices(series, self.n_series)
        if self._waiting is None:
            self._waiting = np.zeros(self.n_series, bool)
        self._waiting[slice(None) if chosen is None else chosen] = True
        if chosen is None:
            self._session.load(None, self.n_series)
        else:
            self._session.reset(torch.from_numpy(chosen).to(self._device))
        if self._learner is not None:
            self._learner.reset(chosen)


class PipelineStream:
    """A fitted pipeline that predicts step by step; see :func:`stream`.

    Parameters
    ----------
    steps : list of (name, transformer)
    last : estimator
    n_series, state, method
        See :func:`stream`.
    learning : Learning, optional
        See :class:`EstimatorStream`.
    """

    def __init__(
        self,
        steps: Sequence[tuple[str, Any]],
        last: Any,
        n_series: int,
        state: Sequence[Tensor] | None,
        method: str,
        learning: Learning | None,
    ) -> None:
        unread = None if state is None else list(state)
        self._steps: list[Any] = []
        for name, transformer in pipeline_transformers(steps):
            if not hasattr(transformer, "stream"):
                self._steps.append(_RowsStream(transformer, name))
                continue
            live = transformer.stream(n_series)
            if unread is not None:
                n_tensors = len(live.state)  # those of this transformer come first
                live = _continued(transformer, name, n_series, unread[:n_tensors])
                unread = unread[n_tensors:]
            self._steps.append(live)
        self._last: Any
        if learning is None:
            self._last = stream(last, n_series, unread, method=method)
        else:
            self._last = EstimatorStream(last, n_series, unread, method, learning)
        self.n_series = self._last.n_series
        self.transforms = self._last.transforms
        scalers = [scaler_of(each.function) for each in self._steps]
        self._native: NativeStep | None = None
        if all(scalers) and isinstance(self._last, EstimatorStream):
            self._native = self._last.native_step([s for s in scalers if s is not None])

    def step(self, x: object) -> Any:
        """Transform the next step (F, N) of all series, and return the estimator's outputs, as its
        stream does.
        """
        # transformers would fill in what is before the first input
        if self._native is not None and all(each.has_begun for each in self._steps):
            y = self._last.native_outputs(self._native, x)
            if y is not None:
                return y
        with undisturbed():
            for each in self._steps:
                x = each.step(x)
            return self._last.step(x)

    def take_target(self, y_true: np.ndarray) -> None:
        """Learn as :meth:`EstimatorStream.take_target` does."""
        self._last.take_target(y_true)

    @property
    def state(self) -> list[Tensor]:
        """Copy of the state that the next outputs depend on: of the transformers, then of the
        estimator.
        """
        of_transformers = [t.clone() for each in self._steps for t in each.state]
        return of_transformers + self._last.state

    def reset(self, series: object = None) -> None:
        """Start all series anew, or some: an index, a list or slice of them, or a mask (N,)."""
        self._last.reset(series)
        for each in self._steps:
            each.reset(series)


class _RowsStream:
    """A fitted transformer of scikit-learn, applied to the N rows of F features of each step."""

    state: tuple[Tensor, ...] = ()
    has_begun = True

    def __init__(self, transformer: Any, name: str) -> None:
        check_is_fitted(transformer)
        self.function = _without_names(transformer)
        self.name = name

    def step(self, x: object) -> np.ndarray:
        rows = np.asarray(x).T
        wanted = getattr(self.function, "n_features_in_", rows.shape[-1])
        if rows.ndim != 2 or rows.shape[1] != wanted:
            raise ShapeError(
                f"the step {self.name!r} of the pipeline, {type(self.function).__name__}, was "
                f"fitted on rows of {wanted} columns and cannot transform a step of shape "
                f"{rows.T.shape}: use SequenceScaler or SequenceImputer, which know features, "
                "series and time"
            )
        return np.asarray(self.function.transform(rows)).T

    def reset(self, series: object = None) -> None:
        pass


def _without_names(transformer: Any) -> Any:
    """Return a copy of a transformer for rows of a step, which have no names of columns."""
    copied = copy.copy(transformer)
    vars(copied).pop("feature_names_in_", None)
    return copied


def _undo(transformer: Any, y: np.ndarray) -> np.ndarray:
    """Invert the transformer of a ``TransformedTargetRegressor`` for outputs (1, N, G)."""
    # of a FunctionTransformer, whose method would want as many columns as y had in fit
    function = getattr(transformer, "inverse_func", None)
    wanted = getattr(transformer, "n_features_in_", y.shape[2])
    if function is None and wanted != y.shape[2]:
        raise DataError(
            f"the target's transformer, {type(transformer).__name__}, was fitted on rows of "
            f"{wanted} columns and cannot be undone for the {y.shape[2]} outputs of one step: "
            "scale targets by scale_target=True of SequenceRegressor, or by a function and its "
            "inverse"
        )
    inverse = transformer.inverse_transform if function is None else function
    return np.asarray(inverse(y[0])).reshape(y.shape)


def _has_finite_squares(array: np.ndarray) -> bool:
    # one product is much faster than a mask, and steps without gaps are the rule; where large
    # numbers overflow it, without a warning, the mask finds no gap
    return array.dtype.kind != "f" or math.isfinite(np.vdot(array, array))


def _without_gaps(
    arrays: list[np.ndarray], gap_value: float | None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return a step with a value for series without input, and a mask of these series (N,); None
    keeps NaN, also in single features.
    """
    floats = [a for a in arrays if a.dtype.kind == "f"]
    # integers are all finite
    not_finite = [np.isinf(a) if gap_value is None else ~np.isfinite(a) for a in arrays]
    # integers cannot be NaN: of several inputs, one without any number makes the gap
    gap = np.logical_or.reduce([np.isnan(a).all(0) for a in floats])
    for a, where in zip(arrays, not_finite, strict=True):
        bad = np.argwhere(where & ~gap)
        if len(bad):
            f, n = bad[0]
            raise DataError(
                f"x is {a[f, n]} at feature {f}, series {n}; a step without input is NaN in all "
                "features; fill in single ones"
            )
    if gap_value is None:
        return arrays, gap
    filled = [
        np.where(where.any(0), a.dtype.type(gap_value), a) if a.dtype.kind == "f" else a
        for a, where in zip(arrays, not_finite, strict=True)
    ]
    return filled, gap


def pipeline_transformers(steps: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the transformers of a pipeline and of pipelines inside it, without passthroughs."""
    flat: list[tuple[str, Any]] = []
    for name, transformer in steps:
        if hasattr(transformer, "steps"):  # a pipeline
            flat += pipeline_transformers(transformer.steps)
        elif transformer is not None and transformer != "passthrough":
            flat.append((name, transformer))
    return flat


def _continued(transformer: Any, name: str, n_series: int, state: Sequence[Tensor]) -> Any:
    """Return the stream of a transformer that continues from its part of a given state."""
    try:
        return transformer.stream(n_series, state)
    except ShapeError as error:
        raise ShapeError(
            f"{error}. The state of a stream of this pipeline begins with the state of its step "
            f"{name!r}; predict returns the state of the estimator alone. Use the state of a "
            "stream that has stepped through the series so far"
        ) from None


def _find_decoder(est: BaseSeriesEstimator, method: str) -> Transform:
    decoders = est.fitted_parts_.codec.decoders()
    if method not in decoders:
        raise ValueError(
            f"method must be {' or '.join(map(repr, decoders))} for {type(est).__name__}, got "
            f"{method!r}"
        )
    return decoders[method]
