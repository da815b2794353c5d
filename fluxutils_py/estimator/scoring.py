"""Scores pooled over series and time, computed as the predictions come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.estimator.fit_data import target_schema
from fluxutils_py.estimator.inputs import read_inputs, read_weight
from fluxutils_py.estimator.moments import merge_moments
from fluxutils_py.estimator.predicting import BlockPredictor
from fluxutils_py.estimator.spec import read_spec
from fluxutils_py.estimator.targets import read_targets
from fluxutils_py.nn.losses import SeqLoss, as_loss
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.predictor import Prediction


def run_score(est: Any, x: Any, y: Any, sample_weight: Any, lengths: Any, starts: Any) -> float:
    """The score of an estimator's predictions, of all ranks; arguments as of ``Estimator.score``."""
    settings = est._resolved_params()
    with RankGroup.from_comm(settings.comm, "score") as ranks:
        check_is_fitted(est, "model_")
        schema, codec = est._input_schema(), est._codec
        inputs = read_inputs(x, schema, starts=starts, lengths=lengths)
        predictions = BlockPredictor(est.model_, inputs, read_spec(settings.spec), comm=ranks)
        how = target_schema(settings, schema.estimator, codec.classes, per_series=codec.per_series, unknown=-1)
        targets = read_targets(y, inputs, how).series
        segments = inputs.whole()
        weight = read_weight(sample_weight, inputs)
        if weight is not None:
            weight.normalize(segments, targets, mask_per_output=True)
        loss = as_loss(settings.loss)
        if isinstance(loss, SeqLoss) and loss.classes and targets[0].kind == "int":
            return pooled_accuracy(predictions, targets, segments, weight, loss.ignore_index, ranks)
        predictions.transform = codec.decoders()["predict"]
        return pooled_r2(predictions, targets, segments, weight, ranks)


def pooled_r2(
    predictions: Iterable[Prediction],
    y: tuple[SeriesArray, ...],
    rows: Segments,
    weight: SampleWeight | None = None,
    comm: RankGroup | None = None,
) -> float:
    """Coefficient of determination over all live steps of all series.

    ``1 - sum((y - yhat)**2) / sum((y - mean(y))**2)``, the sums over series, time and features, the mean one per
    feature. For several outputs, the mean of their scores. Targets that are missing (NaN), and steps without a
    prediction, do not count.
    One pass: nothing is held but sums. NaN if no step counts; as in scikit-learn, 1 or 0 if ``y`` is constant.
    """
    moments = [_Moments(s.F) for s in y]
    for p, targets, w in _live(predictions, y, rows, weight):
        _require_sizes([t.shape[2] for t in targets], [out.shape[2] for out in p.y])
        for s, m, target, out in zip(y, moments, targets, p.y, strict=True):
            ww = _without(w, target, out)
            _require_finite(s, target, ww)
            m.add(target, out, ww)
    first, *others = (RankGroup() if comm is None else comm).allgather(moments)  # of the ranks
    for more in others:
        for m, part in zip(first, more, strict=True):
            m.join(part)
    return float(np.mean([m.r2() for m in first]))


def pooled_accuracy(
    predictions: Iterable[Prediction],
    y: tuple[SeriesArray, ...],
    rows: Segments,
    weight: SampleWeight | None = None,
    ignore_index: int = -100,
    comm: RankGroup | None = None,
) -> float:
    """Share of live steps whose largest score is at the target's label; ``ignore_index`` marks steps without one."""
    right = total = 0.0
    for p, targets, w in _live(predictions, y, rows, weight):
        _require_sizes([t.shape[2] for t in targets], [1] * len(p.y))
        for target, out in zip(targets, p.y, strict=True):
            ww = np.where((target[:, :, 0] == ignore_index) | np.isnan(out).any(-1), 0, w)
            right += float(((out.argmax(-1) == target[:, :, 0]) * ww).sum())
            total += float(ww.sum())
    right, total = (
        sum(parts) for parts in zip(*(RankGroup() if comm is None else comm).allgather((right, total)), strict=True)
    )
    return right / total if total else math.nan


def _live(
    predictions: Iterable[Prediction], y: tuple[SeriesArray, ...], rows: Segments, weight: SampleWeight | None
) -> Iterator[tuple[Prediction, list[np.ndarray], np.ndarray]]:
    """Each prediction with its targets (S, B, G) and weights (S, B), 0 for steps outside a series."""
    for p in predictions:
        part = rows[p.series]
        for s in y:
            s.prefetch(part, p.steps.start, p.steps.stop)
        targets = [s.read(part, p.steps.start, p.steps.stop) for s in y]
        shape = targets[0].shape[:2]
        w = np.ones(shape) if weight is None else weight.read(part, p.steps.start, p.steps.stop)
        exists = part.step_mask(p.steps.start, p.steps.stop)
        yield p, targets, w if exists is None else np.where(exists, w, 0)


def _without(w: np.ndarray, *values: np.ndarray) -> np.ndarray:
    """Weights (S, B), 0 where values (S, B, G) are NaN; (S, B, G), where only some values of a step are."""
    missing = np.zeros(values[0].shape, bool)
    for v in values:
        if v.dtype.kind == "f":
            missing |= np.isnan(v)
    any_, all_ = missing.any(-1), missing.all(-1)
    return np.where(any_, 0, w) if (any_ == all_).all() else np.where(missing, 0, w[:, :, None])


def _require_finite(s: SeriesArray, target: np.ndarray, w: np.ndarray) -> None:
    if target.dtype.kind == "f" and (np.isinf(target) & (w if w.ndim == 3 else w[:, :, None]).astype(bool)).any():
        raise DataError(f"{s.name} is infinite at a step that counts; give it no target (NaN) or no weight")


def _require_sizes(given: list[int], wanted: list[int]) -> None:
    """Raise unless targets have the sizes that predictions have: NumPy would broadcast them."""
    if given != wanted:
        raise ShapeError(
            f"y has {', '.join(map(str, given))} features (axis 0 of (G, N, T)) where score needs "
            f"{', '.join(map(str, wanted))}, as the model gives them"
        )


class _Moments:
    """Weighted sums of squares, combined block by block."""

    def __init__(self, n_features: int) -> None:
        self.residual, self.weight = 0.0, np.zeros(n_features)
        self.mean, self.squares = np.zeros(n_features), np.zeros(n_features)

    def add(self, y: np.ndarray, out: np.ndarray, w: np.ndarray) -> None:
        w = np.ascontiguousarray(w)
        of, each = ("sb", w[:, :, None]) if w.ndim == 2 else ("sbf", w)
        total = np.broadcast_to(w.sum((0, 1)), self.weight.shape)
        if not total.any():
            return
        live = each > 0
        # C order, so that sums are added up alike whatever the memory order of the data
        y, out = (np.where(live, v, 0).astype(float, order="C") for v in (y, out))
        block = _Moments(len(self.mean))
        block.residual, block.weight = float((each * (y - out) ** 2).sum()), total
        block.mean = np.einsum(f"{of},sbf->f", w, y) / np.where(total > 0, total, 1)
        block.squares = np.einsum(f"{of},sbf->f", w, (y - block.mean) ** 2)
        self.join(block)

    def join(self, other: _Moments) -> None:
        if not (self.weight + other.weight).any():
            return
        self.residual += other.residual
        self.weight, self.mean, self.squares = merge_moments(
            self.weight, self.mean, self.squares, other.weight, other.mean, other.squares
        )

    def r2(self) -> float:
        spread = float(self.squares.sum())
        if not self.weight.any():
            return math.nan
        if spread == 0:
            return 1.0 if self.residual == 0 else 0.0
        return 1 - self.residual / spread
