"""Compute scores pooled over series and time in one pass over the predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.estimator.fit_data import target_schema
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator, input_schema
from fluxutils_py.estimator.fitting import run_evaluate
from fluxutils_py.estimator.predicting import BlockPredictor
from fluxutils_py.estimator.spec import Settings, read_spec
from fluxutils_py.inputs.moments import Moments, moments
from fluxutils_py.inputs.sharded_data import sharded_reader
from fluxutils_py.inputs.targets import MISSING_LABEL, SeriesReader
from fluxutils_py.nn.losses import Loss, SeqLoss, as_loss
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.rank_group import ranks_of_call
from fluxutils_py.training.predictor import Prediction


def run_score(
    est: BaseSeriesEstimator,
    x: object,
    y: object,
    sample_weight: object = None,
    lengths: object = None,
    starts: object = None,
    sharded: bool = False,
) -> float:
    """Score the predictions of an estimator on all ranks; see ``Estimator.score``."""
    settings = est.resolved_params()
    with ranks_of_call(settings.comm, "score", sharded) as ranks:
        if not sharded:
            weighted = "none" if sample_weight is None else "given"
            ranks.require_equal({"sample_weight": weighted})
        check_is_fitted(est, "model_")
        parts = est.fitted_parts_
        schema = input_schema(est, settings, parts)
        reader = sharded_reader(ranks) if sharded else SeriesReader()
        inputs = reader.inputs(x, schema, starts=starts, lengths=lengths)
        spec = read_spec(settings.spec)
        # with shards, each rank predicts all of its own series
        together = RankGroup() if sharded else ranks
        # of one target per series, other steps than the last have no score
        ends_only = parts.codec.per_series
        predictions = BlockPredictor(est.model_, inputs, spec, together, ends_only=ends_only)
        schema_of_targets = target_schema(
            settings,
            schema.estimator,
            parts.codec.classes,
            per_series=parts.codec.per_series,
            unknown=-1,  # a label that training never had counts as predicted wrong
        )
        targets = reader.targets(y, inputs, schema_of_targets).series
        segments = inputs.local_series()
        weight = reader.weight(sample_weight, inputs)
        if weight is not None:
            weight = weight.normalized(segments, targets, mask_per_output=True, add_up=reader.total)
        loss = as_loss(settings.loss)
        missing = _missing_label(settings, loss, targets)
        if missing is not None:
            return pooled_accuracy(predictions, targets, segments, weight, missing, ranks)
        if isinstance(loss, SeqLoss) and loss.values:
            predictions.transform = parts.codec.decoders()["predict"]
            return pooled_r2(predictions, targets, segments, weight, ranks)
    # outputs in another unit than the targets, such as log-odds: the loss alone compares the two
    series = (x, y, sample_weight, lengths, starts, sharded)
    mean_loss = run_evaluate(est, *series, whole=True)
    assert isinstance(mean_loss, float)
    return -mean_loss


def _missing_label(settings: Settings, loss: Loss, y: tuple[SeriesArray, ...]) -> int | None:
    """Return the integer that marks missing labels; None if the targets are not labels."""
    if isinstance(loss, SeqLoss) and loss.classes and y[0].kind == "int":
        return loss.ignore_index
    return MISSING_LABEL if settings.is_classifier else None


def pooled_r2(
    predictions: Iterable[Prediction],
    y: tuple[SeriesArray, ...],
    rows: Segments,
    weight: SampleWeight | None = None,
    comm: RankGroup | None = None,
) -> float:
    """Return the coefficient of determination over all live steps of all series.

    ``1 - sum((y - yhat)**2) / sum((y - mean(y))**2)``, with sums over series, time and features,
    and one mean per feature. Several outputs give the mean of their scores. Missing targets (NaN)
    and steps without a prediction do not count. Makes one pass and stores only sums. NaN if no step
    counts; as in scikit-learn, 1 or 0 if ``y`` is constant.
    """
    sums = [_R2Sums(s.F) for s in y]
    for p, targets, weights in _live_targets(predictions, y, rows, weight):
        _require_features(targets, [out.shape[2] for out in p.y])
        for s, of_output, target, out in zip(y, sums, targets, p.y, strict=True):
            is_missing = np.isnan(target.astype(float)) | np.isnan(out.astype(float))
            w = np.where(is_missing, 0, weights[:, :, None])
            if (np.isinf(target) & (w > 0)).any():
                raise DataError(
                    f"{s.name} is infinite at a step that counts; give it no target (NaN) or no "
                    "weight"
                )
            of_output.add(target, out, w)
    ranks = RankGroup() if comm is None else comm
    # in the order of ranks, so that every rank gets the same bits
    first, *others = ranks.allgather(sums)
    for other in others:
        for of_output, part in zip(first, other, strict=True):
            of_output.join(part)
    scores = [of_output.r2() for of_output in first]
    return float(np.mean(scores))


def pooled_accuracy(
    predictions: Iterable[Prediction],
    y: tuple[SeriesArray, ...],
    rows: Segments,
    weight: SampleWeight | None,
    ignore_index: int,
    ranks: RankGroup,
) -> float:
    """Return the share of live steps with the largest score at the target; ``ignore_index`` marks
    missing labels.
    """
    right = 0.0
    total = 0.0
    for p, targets, weights in _live_targets(predictions, y, rows, weight):
        _require_features(targets, [1 for _ in p.y])  # one label, whatever number of scores
        for target, out in zip(targets, p.y, strict=True):
            label = target[:, :, 0]
            is_missing = (label == ignore_index) | np.isnan(out).any(-1)
            w = np.where(is_missing, 0, weights)
            is_right = out.argmax(-1) == label
            right += float((is_right * w).sum())
            total += float(w.sum())
    of_ranks = ranks.allgather((right, total))
    right = sum(part for part, _ in of_ranks)
    total = sum(part for _, part in of_ranks)
    return right / total if total else math.nan


def _live_targets(
    predictions: Iterable[Prediction],
    y: tuple[SeriesArray, ...],
    rows: Segments,
    weight: SampleWeight | None,
) -> Iterator[tuple[Prediction, list[np.ndarray], np.ndarray]]:
    """Yield predictions with their targets, (S, B, G) each, and the weights of their steps, (S, B),
    0 for steps outside a series.
    """
    for p in predictions:
        part = rows[p.series]
        start = p.steps.start
        stop = p.steps.stop
        # announced before any is read: several maps are then fetched from the disk together
        for s in y:
            s.prefetch(part, start, stop)
        targets = [s.read(part, start, stop) for s in y]
        if weight is None:
            weights = np.ones(targets[0].shape[:2])
        else:
            weights = weight.read(part, start, stop)
        exists = part.step_mask(start, stop)
        if exists is not None:
            weights = np.where(exists, weights, 0)
        yield p, targets, weights


def _require_features(
    targets: list[np.ndarray],
    wanted: list[int],
) -> None:
    """Raise ShapeError unless targets (S, B, G) have the features that the model gives."""
    given = [t.shape[2] for t in targets]
    if given == wanted:
        return  # NumPy would broadcast others silently
    given_text = ", ".join(map(str, given))
    wanted_text = ", ".join(map(str, wanted))
    raise ShapeError(
        f"y has {given_text} features (axis 0 of (G, N, T)) where score needs {wanted_text}, as "
        "the model gives them"
    )


class _R2Sums:
    """Running sum of squared errors, and weight, mean and sum of squares about the mean of each
    target feature.
    """

    def __init__(self, n_features: int) -> None:
        self.residual = 0.0
        self.moments = Moments(*np.zeros((3, n_features)))

    def add(
        self,
        y: np.ndarray,
        out: np.ndarray,
        w: np.ndarray,
    ) -> None:
        """Add a block of shape (S, B, G); values with weight 0 do not count."""
        # C order makes the sums independent of the memory order of the data
        y = np.where(w > 0, y, 0).astype(float, order="C")
        out = np.where(w > 0, out, 0).astype(float, order="C")
        block = _R2Sums(y.shape[2])
        block.residual = float((w * (y - out) ** 2).sum())
        y = y.transpose(2, 1, 0)  # (G, B, S)
        w = w.transpose(2, 1, 0)
        block.moments = moments([(y, w)], len(y))
        self.join(block)

    def join(self, other: _R2Sums) -> None:
        self.residual += other.residual
        self.moments = self.moments.merge(other.moments)

    def r2(self) -> float:
        weight, _, squares = self.moments
        if not weight.any():
            return math.nan
        spread = float(squares.sum())
        if spread == 0:  # constant targets, which scikit-learn scores so too
            return 1.0 if self.residual == 0 else 0.0
        return 1 - self.residual / spread
