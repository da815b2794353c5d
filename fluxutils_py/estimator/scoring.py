"""Compute scores pooled over series and time in one pass over the predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError, warn
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
    sample_weight: object,
    lengths: object,
    starts: object,
    sharded: bool,
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
        rows = segments
        # of series that end with their inputs, targets behind the end are told of
        if inputs.trimmed and not inputs.is_stand_in:
            rows = Segments.from_lengths(inputs.N, inputs.T, starts=inputs.starts)
        loss = as_loss(settings.loss)
        missing = _missing_label(settings, loss, targets)
        if missing is not None:
            return pooled_accuracy(predictions, targets, rows, weight, missing, ranks)
        if isinstance(loss, SeqLoss) and loss.values:
            predictions.transform = parts.codec.decoders()["predict"]
            return pooled_r2(predictions, targets, rows, weight, ranks)
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
    counts = np.zeros(2, int)
    for outputs, of_steps in _live_outputs(predictions, y, rows, weight):
        counts += of_steps
        for s, of_output, (target, out, w) in zip(y, sums, outputs, strict=True):
            if (np.isinf(target) & (w > 0)).any():
                raise DataError(
                    f"{s.name} is infinite at a step that counts; give it no target (NaN) or no "
                    "weight"
                )
            of_output.add(target, out, w)
    ranks = RankGroup() if comm is None else comm
    # in the order of ranks, so that every rank gets the same bits
    (first, counts), *others = ranks.allgather((sums, counts))
    for other, of_rank in others:
        counts = counts + of_rank
        for of_output, part in zip(first, other, strict=True):
            of_output.join(part)
    warn_of_unpredicted(*counts)
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
    sums = np.zeros(2)  # of weights where the label is right, and of all
    counts = np.zeros(2, int)
    for outputs, of_steps in _live_outputs(predictions, y, rows, weight, ignore_index):
        counts += of_steps
        for label, out, w in outputs:
            is_right = out.argmax(-1, keepdims=True) == label
            sums += float((is_right * w).sum()), float(w.sum())
    of_ranks = ranks.allgather((sums, counts))
    right, total = sum(part for part, _ in of_ranks)
    warn_of_unpredicted(*sum(part for _, part in of_ranks))
    return float(right / total) if total else math.nan


def warn_of_unpredicted(n_without: int, n_steps: int) -> None:
    """Warn of steps with a target that do not count, since they have no prediction."""
    if n_without:
        warn(
            f"{n_without} of {n_steps} steps with a target have no prediction, as where all inputs "
            "are NaN, and do not count in the score: fill the inputs in, as with SequenceImputer, "
            "or set these targets to NaN"
        )


def _live_outputs(
    predictions: Iterable[Prediction],
    y: tuple[SeriesArray, ...],
    rows: Segments,
    weight: SampleWeight | None,
    missing_label: int | None = None,
) -> Iterator[tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray]], tuple[int, int]]]:
    """Yield, for each block of predictions, the targets (S, B, G), predictions and weights (S, B,
    G) of each output, and how many steps with a target have no prediction, and how many there are.

    Weights are 0 where a step is outside a series, or has no target or no prediction. With
    ``missing_label``, targets are labels (S, B, 1), and predictions their scores (S, B, K).
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
        are_labels = missing_label is not None
        _require_features(targets, [1 if are_labels else out.shape[2] for out in p.y])
        w = weights[:, :, None]
        outputs = []
        has_target, lacks_prediction = np.zeros((2, *weights.shape), bool)
        for target, out in zip(targets, p.y, strict=True):
            if are_labels:
                has_value = target != missing_label
                is_predicted = ~np.isnan(out).any(-1, keepdims=True)
            else:
                has_value = ~np.isnan(target.astype(float))
                is_predicted = ~np.isnan(out.astype(float))
            counts = has_value & (w > 0)
            outputs.append((target, out, np.where(counts & is_predicted, w, 0)))
            has_target |= counts.any(2)
            lacks_prediction |= (counts & ~is_predicted).any(2)
        yield outputs, (int(lacks_prediction.sum()), int(has_target.sum()))


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
