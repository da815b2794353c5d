"""Explain one output of an estimator by integrated gradients of the whole past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError, SpecError, warn
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator, input_schema
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.estimator.streams.streaming import unwrap
from fluxutils_py.explaining.explanation import Explanation
from fluxutils_py.inputs.inputs import Inputs, read_inputs
from fluxutils_py.inputs.target_codec import TargetCodec
from fluxutils_py.nn.causal_kernels import CausalKernels
from fluxutils_py.nn.kernels.recurrence import State
from fluxutils_py.nn.model_windows import as_tuple
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.nn.recurrent import map_state
from fluxutils_py.nn.states import recurrent_layers, reset, restore, snapshot
from fluxutils_py.steps.session import InferenceSession
from fluxutils_py.training.minibatch import to_tensor
from fluxutils_py.transformers import SequenceScaler
from fluxutils_py.transformers.transformer_base import read_blocks
from fluxutils_py.validation import check_integer

Tensors = tuple[Tensor, ...]
# the inputs of some steps and, of the same shape (S, 1, F) or (1, 1, F), their baselines
Ends = tuple[Tensors, Tensors]

MOST_ROWS = 64  # points of the path that are computed side by side
TOLERANCE = 1e-4  # of completeness
FIRST_POINTS = 16
MOST_POINTS = 4096  # kinks, as of ReLU, take many
MOST_EVALUATIONS = 1_000_000  # points times steps that are tried unasked: some seconds
LAST_STEPS = 200  # to give, where there are too many for more points
MOST_GRAPH_BYTES = 1 << 26  # of the graph of a window, about
TENSORS_PER_UNIT = 4  # that a graph keeps, about


@undisturbed()
def explain(
    est: Any,
    x: object,
    series: Any = 0,
    step: int | None = None,
    output: Any = None,
    *,
    baseline: Any = "mean",
    n_points: int | None = None,
    lengths: object = None,
    starts: object = None,
) -> Explanation:
    """Tell how much each input of the past contributed to one output: integrated gradients.

    The gradient is exact over the whole past, through the state, however long the series: windows
    are computed a second time, the last first, and each passes the gradient of its first state to
    the window before. Only one window has a graph at a time.

    Parameters
    ----------
    est : estimator, Pipeline or fitted search
        With any model of torch. If a pipeline's transformers only scale each feature
        (``SequenceScaler``, ``StandardScaler`` and its like), attributions are of your inputs; else
        of what reaches the model, and ``Explanation.explained`` says so.
    x : array of shape (F, N, T), tuple, list, view, or matrix
        As for ``est.predict``. Only the explained series is read, and all series once for their
        mean. Feature names are those of the fit, or of ``samples(x, feature_names=...)``, such as
        the ``names`` of a result of :func:`fluxutils_py.from_frame`.
    series : int
        Which series.
    step : int, optional
        The step whose output is explained; negative numbers count from the end. None: the last.
    output : int or class label, optional
        Which number of several, counted through all outputs; of a classifier, the class whose score
        is explained. None: the only number, or the class that is predicted at this step. The score
        is that of ``decision_function``: of two classes, the difference to the other.
    baseline : "mean", "zero", array of shape (F,), or a tuple of these
        The inputs to compare the series with, in the units of ``x``. "mean": the mean of each
        feature over all of ``x``. "zero": zeros, where the model gets them. Integer inputs stay as
        they are.
    n_points : int, optional
        Points on the path from baseline to inputs. None: 16, then four times as many, until
        attributions are complete to 1e-4, there are 4096 (models with kinks, such as ReLU, may need
        them), or points times steps would exceed a million.
    lengths, starts : array of int, shape (N,), optional
        As for ``est.predict``.

    Returns
    -------
    Explanation
        ``attributions`` of shape (F, T) in the units of the output, for all steps up to ``step``,
        with ``by_feature()``, ``by_step()``, ``plot()``.

    Raises
    ------
    TypeError
        If there is no gradient: integer inputs, ``cell="kernels"``, models of other packages. Use
        :func:`sklearn.inspection.permutation_importance` on ``samples(x)`` there.
    ValueError
        If an argument does not fit, or the output has no gradient.

    Warns
    -----
    UserWarning
        If the sum of attributions differs from ``value - baseline_value`` by more than 1e-4 of it.

    Notes
    -----
    Needs ``n_points / 64`` passes over the past, forward and backward, and keeps one state per
    window. Source: Sundararajan, Taly & Yan (2017), Axiomatic Attribution for Deep Networks, ICML;
    integrated by Gauss-Legendre quadrature.

    Examples
    --------
    >>> from fluxutils_py import SequenceRegressor
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> y = np.cumsum(x[1:2], axis=2) / 5  # of the second feature alone
    >>> est = SequenceRegressor(8, epochs=30, lr=0.02, random_state=0).fit(x, y)
    >>> e = explain(est, x, series=3, step=40)
    >>> e.attributions.shape, e.by_feature()[0].name, e.completeness < 1e-4
    ((3, 41), 'feature 1', True)
    """
    check_integer("n_points", n_points, 1, optional=True, error=SpecError)
    model = read_model(est, x, lengths, starts)
    past = read_past(model, series, step)
    session = InferenceSession(
        model.model, lambda: past.read(slice(0, min(3, past.n_steps)))[0], model.spec.overlap
    )
    windows = _windows(model, past, session)
    score = Score(model.est.fitted_parts_.codec, past.at - windows[-1].start, output)
    ends = partial(past.ends, read_baselines(model, past, baseline))
    gradients = PathGradients(session, windows, ends, score)
    integral = gradients.integrate(n_points or FIRST_POINTS)
    n_steps = past.at + 1 - windows[0].start
    while n_points is None and completeness_error(integral) > TOLERANCE:
        if integral.n_points >= MOST_POINTS or more_takes_long(integral.n_points, n_steps):
            break
        integral = gradients.integrate(4 * integral.n_points)
    attributions = integral.attributions
    # what the model saw after the step in its window counts only where it had an influence
    if not any(a[:, n_steps:].any() for a in attributions):
        attributions = tuple(np.ascontiguousarray(a[:, :n_steps]) for a in attributions)
    first = past.first + windows[0].start
    names = model.feature_names()
    several = len(attributions) > 1
    explanation = Explanation(
        attributions=attributions if several else attributions[0],
        steps=np.arange(first, first + attributions[0].shape[1]),
        feature_names=names if several else names[0],
        value=integral.value,
        baseline_value=integral.baseline_value,
        completeness=completeness_error(integral),
        n_points=integral.n_points,
        series=int(series) % model.inputs.N,
        step=past.first + past.at,
        output=score.name,
        explained=model.explained,
    )
    check_explanation(explanation)
    return explanation


def _windows(model: ExplainedModel, past: Past, session: InferenceSession) -> list[slice]:
    """Return the steps of the windows to run, the explained step in the last one."""
    if session.mode == "windows":
        # the model may see later steps of a window: the same windows as in predict
        size = min(past.windows.seqsize, past.n_steps)
        start = past.at // size * size
        stop = min(start + size, past.n_steps)
        if session.needs_context:
            return [slice(max(0, start - session.overlap), stop)]
    else:
        size = window_size(model.model, sum(s.F for s in past.windows.x))
        stop = past.at + 1
    return [slice(a, min(a + size, stop)) for a in range(0, stop, size)]


def window_size(model: nn.Module, n_features: int) -> int:
    """Return how many steps of a window have a graph of about 64 MB."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    n_units = n_features + TENSORS_PER_UNIT * sum(p.shape[0] for p in matrices)
    itemsize = next(model.parameters(), torch.empty(0)).dtype.itemsize
    return max(8, MOST_GRAPH_BYTES // ((MOST_ROWS + 2) * n_units * itemsize))


class Score:
    """The number that is explained, as a function of the outputs of a window.

    Parameters
    ----------
    codec : TargetCodec
    at : int
        The step in the window.
    output : int, class label or None

    Attributes
    ----------
    name : str
        What it is; of a classifier's predicted class only known after the first call.
    """

    def __init__(self, codec: TargetCodec, at: int, output: Any) -> None:
        self.codec = codec
        self.at = at
        self.output = output
        self.name = ""

    def __call__(self, outputs: Tensors) -> Tensor:
        """Return the scores (B,) for outputs (S, B, G)."""
        if self.codec.classes is not None:
            scores = outputs[0][self.at].double()
            classes = self.codec.classes
            if self.output is None:
                # the first row has the inputs
                self.output = classes[int(scores[0].argmax())]
            places = np.flatnonzero(classes == self.output)
            if len(places) != 1:
                raise DataError(f"output {self.output!r} is none of the classes {classes.tolist()}")
            place = int(places[0])
            self.name = f"score of {classes.tolist()[place]!r}"
            if len(classes) == 2:
                return scores[:, place] - scores[:, 1 - place]
            return scores[:, place]
        sizes = [o.shape[2] for o in outputs]
        if self.output is None and sum(sizes) > 1:
            raise SpecError(
                f"the model gives outputs of {sizes} numbers per step; choose one: output=0"
            )
        g = check_integer("output", self.output or 0, 0, error=SpecError)
        if g >= sum(sizes):
            raise SpecError(f"output is {g}, but there are {sizes} numbers per step")
        self.name = f"output {g}"
        value = torch.cat([o[self.at] for o in outputs], -1)[:, g].double()
        scale = self.codec.scale
        return value if scale is None else value * float(scale.scale[g]) + float(scale.mean[g])


def read_baselines(model: ExplainedModel, past: Past, given: Any) -> list[Tensor]:
    """Return the baseline of each input, (1, 1, F), from what was given for all or each."""
    arrays = past.windows.x
    each = given if isinstance(given, tuple) else (given,) * len(arrays)
    if len(each) != len(arrays):
        raise ShapeError(f"baseline has {len(each)} entries for {len(arrays)} inputs")
    tensors = []
    for b, series in zip(each, arrays, strict=True):
        if isinstance(b, str) and b == "mean":
            values = model.mean(series)
        elif isinstance(b, str) and b == "zero":
            values = np.zeros(series.F)
        else:
            values = _given_baseline(model, b, series.F)
        tensors.append(torch.as_tensor(values[None, None]).to(past.device, past.dtype))
    return tensors


def _given_baseline(model: ExplainedModel, given: object, n_features: int) -> np.ndarray:
    """Return a given baseline (F,), through the transformers of a pipeline."""
    values = np.asarray(given)
    if values.ndim != 1:
        raise SpecError(f"baseline must be 'mean', 'zero', or of shape (F,): {given!r}")
    for name, transformer in model.transformers:
        # those of this package know the features of a series of any length
        if not hasattr(transformer, "stream"):
            raise TypeError(
                f"a baseline cannot go through the step {name!r} of the pipeline, "
                f"{type(transformer).__name__}; use baseline='mean', or explain the last step of "
                "the pipeline on inputs that the others have transformed"
            )
        values = transformer.transform(values[:, None, None])[:, 0, 0]
    if len(values) != n_features or not np.isfinite(values).all():
        raise ShapeError(
            f"baseline has shape {np.shape(values)}; expected {n_features} finite features"
        )
    return values


def completeness_error(integral: PathIntegral) -> float:
    """Return what the sum of attributions lacks, relative to what they should explain."""
    total = sum(float(a.sum()) for a in integral.attributions)
    size = sum(float(abs(a).sum()) for a in integral.attributions)
    difference = integral.value - integral.baseline_value
    scale = max(abs(difference), size / 100)
    return abs(total - difference) / scale if scale > 0 else 0.0


def check_explanation(e: Explanation) -> None:
    """Raise DataError if there is no gradient at all, and warn of incomplete attributions."""
    difference = e.value - e.baseline_value
    matrix, _ = e.stacked()
    if not np.isfinite(matrix).all():
        raise DataError(
            "attributions are not finite: the model's gradient is NaN or infinite on the path from "
            f"baseline to inputs; choose another baseline, or {REMEDY}"
        )
    if difference != 0 and not matrix.any():
        raise DataError(
            f"{e.output} differs by {difference:.3g} from that of the baseline, but has no "
            f"gradient: the model has hard thresholds, or cuts its graph; {REMEDY}"
        )
    if e.completeness > TOLERANCE:
        more = f"use more, n_points={4 * e.n_points}"
        if more_takes_long(e.n_points, len(e.steps)):
            more = f"give the last steps only, x[..., -{LAST_STEPS}:], or {more}, which takes long"
        warn(
            f"attributions sum to {matrix.sum():.6g}, but {e.output} differs by "
            f"{difference:.6g} from that of the baseline, an error of {e.completeness:.1e} with "
            f"{e.n_points} points on the path and {len(e.steps)} steps; {more}, or if the model "
            f"has hard thresholds, {REMEDY}"
        )


def more_takes_long(n_points: int, n_steps: int) -> bool:
    """Return whether four times as many points take more steps of the model than are tried."""
    return 4 * n_points * n_steps > MOST_EVALUATIONS


# -- the model, and the inputs that reach it -------------------------------------------------------

REMEDY = "use permutation_importance of sklearn.inspection on samples(x), which needs no gradient"


@dataclass(frozen=True)
class ExplainedModel:
    """A fitted estimator, its inputs, and what stands before it in a pipeline.

    Attributes
    ----------
    est : estimator
    spec : Spec
    inputs : Inputs
        As they reach the model.
    transformers : list of (name, transformer)
    explained : str
        "inputs", or what reaches the model, if that is something else.
    """

    est: BaseSeriesEstimator
    spec: Spec
    inputs: Inputs
    transformers: list[tuple[str, Any]]
    explained: str

    @property
    def model(self) -> nn.Module:
        return self.est.model_

    def feature_names(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the features of each input."""
        names = self.inputs.names
        if names is None:
            names = getattr(self.est, "feature_names_in_", None)
        arrays = self.inputs.series
        if len(arrays) == 1 and names is not None and len(names) == arrays[0].F:
            return (tuple(map(str, names)),)
        return tuple(tuple(f"feature {i}" for i in range(s.F)) for s in arrays)

    def mean(self, series: SeriesArray) -> np.ndarray:
        """Return the mean of each feature of one of the inputs, (F,), over all series and steps."""
        total, count = np.zeros(series.F), np.zeros(series.F)
        for _, _, block in read_blocks(series, self.inputs):
            total += np.nansum(block, (1, 2), dtype=np.float64)
            count += (~np.isnan(block)).sum((1, 2))
        return total / np.maximum(count, 1)


def read_model(est: Any, x: object, lengths: object, starts: object) -> ExplainedModel:
    """Take a fitted estimator, pipeline or search apart, and transform its inputs.

    Raises
    ------
    TypeError
        If this is no estimator of this package, or its model has hard thresholds.
    ValueError
        If ``x`` does not fit.
    """
    parts = unwrap(est)
    inner = parts.estimator
    if not hasattr(inner, "resolved_params"):
        raise TypeError(
            f"explain takes estimators of this package, pipelines and searches of them, got "
            f"{type(inner).__name__}; for another model, {REMEDY}"
        )
    check_is_fitted(inner, "model_")
    if parts.of_targets:
        raise TypeError(
            "explain cannot look through the transformer of targets of a "
            "TransformedTargetRegressor; explain its regressor_, in the units that it predicts"
        )
    if any(isinstance(m, CausalKernels) for m in inner.model_.modules()):
        raise TypeError(
            f"the model of {type(inner).__name__} compares its inputs with hard thresholds "
            f"(CausalKernels), through which no gradient goes; {REMEDY}"
        )
    for _, transformer in parts.transformers:
        x = transformer.transform(x)
    settings = inner.resolved_params()
    schema = input_schema(inner, settings, inner.fitted_parts_)
    inputs = read_inputs(x, schema, starts=starts, lengths=lengths)
    if all(s.kind == "int" for s in inputs.series):
        raise TypeError(f"integer inputs have no gradient; {REMEDY}")
    from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

    # Each feature times a number plus a number: attributions are the same before and after them.
    linear = (SequenceScaler, StandardScaler, MaxAbsScaler, MinMaxScaler, RobustScaler)
    others = [
        type(t).__name__
        for _, t in parts.transformers
        # exactly: a subclass may compute something else
        if type(t) not in linear or getattr(t, "clip", False)
    ]
    explained = "inputs"
    if others:
        explained = f"inputs of the model, after {', '.join(others)}"
    return ExplainedModel(inner, read_spec(settings.spec), inputs, parts.transformers, explained)


@dataclass(frozen=True)
class Past:
    """The steps of one series up to an explained one.

    Attributes
    ----------
    windows : SequenceWindows
        Of this series alone.
    rows : Segments
    at : int
        The explained step, counted from the first one of the series.
    device, dtype
        Of the model.
    """

    windows: SequenceWindows
    rows: Segments
    at: int
    device: torch.device
    dtype: torch.dtype

    @property
    def first(self) -> int:
        """The first step of the series in the inputs."""
        return int(self.rows.start[0])

    @property
    def n_steps(self) -> int:
        return int(self.rows.length[0])

    def read(self, steps: slice) -> tuple[Tensors, Tensor | None]:
        """Return the inputs (S, 1, F) of some steps, zero where there are none, and where that
        is, (S, 1).
        """
        window = self.windows.cut(self.rows, steps.start, steps.stop)
        tensors = tuple(to_tensor(v, self.dtype, self.device) for v in window.x)
        if window.missing_steps is None:
            return tensors, None
        return tensors, torch.from_numpy(np.array(window.missing_steps)).to(self.device)

    def ends(self, baselines: Sequence[Tensor], steps: slice) -> Ends:
        """Return inputs and baselines of some steps, for baselines (1, 1, F) of each input; both
        are zero where there is no input, as in ``predict``.
        """
        xs, missing = self.read(steps)
        if missing is None:
            return xs, tuple(baselines)
        where = missing[:, :, None]
        return xs, tuple(torch.where(where, x, b) for x, b in zip(xs, baselines, strict=True))


def read_past(model: ExplainedModel, series: int, step: int | None) -> Past:
    """Return the past of one step of a series, checked; None is its last step."""
    inputs = model.inputs
    check_integer("series", series)
    if not -inputs.N <= series < inputs.N:
        raise ShapeError(f"series is {series}, but x has {inputs.N} series")
    series = int(series) % inputs.N
    whole = inputs.local_series()[series : series + 1]
    end = int(whole.stop[0])
    first = int(whole.start[0])
    step = end - 1 if step is None else check_integer("step", step)
    place = step if step >= 0 else end + step
    if not first <= place < end:
        raise ShapeError(f"step is {step}, but the series has the steps {first} to {end - 1}")
    # earlier rows with gaps between them are no past of one state
    if len(inputs.contiguous_runs()) > 1 or inputs.with_context(slice(0, inputs.T))[1]:
        raise ShapeError("x is timesteps with gaps or context; explain the array (F, N, T)")
    windows = SequenceWindows(
        inputs.series,
        batchsize=1,
        seqsize=model.spec.seqsize or inputs.T,
        segments=whole,
    )
    parameter = next(model.model.parameters(), torch.empty(0))
    past = Past(windows, whole, place - first, parameter.device, parameter.dtype)
    _, missing = past.read(slice(past.at, past.at + 1))
    if missing is not None and bool(missing.any()):
        raise DataError(
            f"step {place} of series {series} has no inputs (NaN), so that there is no output to "
            "explain; choose another step, or give lengths= if the series ends before"
        )
    return past


# -- the gradient along a path of inputs, window by window -----------------------------------------


class PathIntegral(NamedTuple):
    """Attributions (F, T) of each input, float64, and the output at both ends of the path."""

    attributions: tuple[np.ndarray, ...]
    value: float
    baseline_value: float
    n_points: int


class PathGradients:
    """Integrates the gradient of a score along the straight path from baseline to inputs.

    The points of the path are the series of a batch. The states at the starts of windows are
    kept from a pass forward in time; then the windows are computed again, the last first, each
    with the gradient that the window after it has for its last state. So the gradient is that of
    the whole past, but only one window has a graph at a time.

    Parameters
    ----------
    session : InferenceSession
        Gives the model and how it is called; its state is overwritten.
    windows : sequence of slice
        Consecutive steps from 0 on; the last has the score.
    read : callable
        Returns inputs and baselines for the steps of a window.
    score : callable
        Maps the outputs (S, B, G) of the last window to the score (B,).
    """

    def __init__(
        self,
        session: InferenceSession,
        windows: Sequence[slice],
        read: Callable[[slice], Ends],
        score: Callable[[Tensors], Tensor],
    ) -> None:
        self.session = session
        self.windows = windows
        self.read = read
        self.score = score

    def integrate(self, n_points: int) -> PathIntegral:
        """Integrate by Gauss and Legendre's rule with this number of points, in as many equal
        parts of the path as it takes to have at most 64 points in each.
        """
        total: tuple[np.ndarray, ...] = ()
        value = baseline_value = 0.0
        # one rule of thousands of points takes minutes to find
        n_parts = -(-n_points // MOST_ROWS)
        for i, points in enumerate(np.array_split(np.arange(n_points), n_parts)):
            nodes, weights = np.polynomial.legendre.leggauss(len(points))
            # from [-1, 1] to the part of the path
            places = (i + (nodes + 1) / 2) / n_parts
            # the two ends, of weight 0, tell the scores whose difference is to be explained
            rows = np.concatenate([[1.0, 0.0], places])
            of_rows = np.concatenate([[0.0, 0.0], weights / 2 / n_parts])
            attributions, (value, baseline_value, *_) = self._attributions(rows, of_rows)
            if total:
                attributions = tuple(a + b for a, b in zip(total, attributions, strict=True))
            total = attributions
        return PathIntegral(total, value, baseline_value, n_points)

    def _attributions(
        self, places: np.ndarray, weights: np.ndarray
    ) -> tuple[tuple[np.ndarray, ...], list[float]]:
        """Return the weighted sum of attributions at places of the path, and the scores there."""
        # the states of all layers before each window
        self.session.load(None, len(places))
        starts: list[list[State | None]] = [[None for _ in snapshot(self.session.model)]]
        for window in self.windows[:-1]:
            with torch.no_grad():
                self.session.run(_points(self.read(window), places))
            # copies: a layer may go on in place
            starts.append(_copies(snapshot(self.session.model)))
        sums: list[Tensors] = []
        carried: list[Tensor | None] = []
        scores: list[float] = []
        for window, start in zip(reversed(self.windows), reversed(starts), strict=True):
            is_last = window == self.windows[-1]
            # to which gradients go back; none for states of integers
            leaves = [
                t.requires_grad_() if t.is_floating_point() else None for t in _tensors(start)
            ]
            # a copy of a leaf may be changed in place, a leaf may not
            restore(self.session.model, _copies(start))
            ends = self.read(window)
            floats, targets = self._run_with_graph(_points(ends, places), is_last)
            if is_last:
                scores = targets[0].detach().double().tolist()
                carried = [torch.as_tensor(weights).to(targets[0])]
            wanted = floats + [t for t in leaves if t is not None]
            # none where nothing before this window reaches the score
            gradients = _gradients(targets, carried, wanted)
            sums.append(_weigh(ends, gradients[: len(floats)]))
            of_states = iter(gradients[len(floats) :])
            carried = [None if t is None else next(of_states) for t in leaves]
        reset(self.session.model)
        parts = zip(*reversed(sums), strict=True)  # of each input, forward in time
        return tuple(torch.cat(p).T.cpu().numpy() for p in parts), scores

    def _run_with_graph(self, rows: Tensors, is_last: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Run a window on rows (S, B, F); return the leaves of its inputs and what depends on
        them: the scores of the last window, else the states.
        """
        floats = [x.requires_grad_() for x in rows if x.is_floating_point()]
        # cuDNN differentiates recurrent layers in training mode only
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            outputs = self.session.run(rows)
            if is_last:
                return floats, [self.score(outputs)]
        return floats, _tensors([layer.state for layer in recurrent_layers(self.session.model)])


def _points(ends: Ends, places: np.ndarray) -> Tensors:
    """Return the inputs (S, B, F) at B places of the path; integers are those of the inputs."""
    rows = []
    for x, baseline in zip(*ends, strict=True):
        if x.is_floating_point():
            at = torch.as_tensor(places).to(x)[None, :, None]
            rows.append(baseline + at * (x - baseline))
        else:
            rows.append(x.expand(-1, len(places), -1).contiguous())
    return tuple(rows)


def _weigh(ends: Ends, gradients: Sequence[Tensor | None]) -> Tensors:
    """Return the attributions (S, F) from gradients (S, B, F), whose weights they contain."""
    remaining = iter(gradients)
    sums = []
    for x, baseline in zip(*ends, strict=True):
        gradient = next(remaining) if x.is_floating_point() else None
        if gradient is None:
            sums.append(x.new_zeros(x.shape[::2], dtype=torch.float64))
            continue
        difference = (x.double() - baseline.double())[:, 0]
        sums.append(gradient.detach().double().sum(1) * difference)
    return tuple(sums)


def _gradients(
    targets: Sequence[Tensor], above: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of leaves, given those of targets; None where there is none."""
    with_graph = [
        (target, gradient)
        for target, gradient in zip(targets, above, strict=True)
        if gradient is not None and target.requires_grad
    ]
    if not with_graph or not leaves:
        return [None] * len(leaves)
    outputs, gradients = zip(*with_graph, strict=True)
    return torch.autograd.grad(outputs, list(leaves), gradients, allow_unused=True)


def _tensors(states: Sequence[State | None]) -> list[Tensor]:
    """Return the tensors of the states of all layers."""
    return [t for s in states if s is not None for t in as_tuple(s)]


def _copies(states: Sequence[State | None]) -> list[State | None]:
    return [None if s is None else map_state(Tensor.clone, s) for s in states]
