"""Check the arguments of a fit and cut the data into windows, without training or changing
anything.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.data import SampleWeight, SequenceWindows
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import ShapeError, SpecError
from fluxutils_py.estimator.building import require_stored
from fluxutils_py.estimator.estimator_settings import Settings
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.inputs.inputs import Inputs, InputSchema, feature_counts
from fluxutils_py.inputs.labels import ClassWeightArray, LabelEncoder, find_classes, find_largest
from fluxutils_py.inputs.sharded_data import SeriesPool
from fluxutils_py.inputs.target_codec import TargetCodec, TargetScale
from fluxutils_py.inputs.targets import MISSING_LABEL, Targets, TargetSchema, read_labels
from fluxutils_py.nn.losses import Loss, SeqLoss, as_loss, takes_weights
from fluxutils_py.parallel import RankGroup
from fluxutils_py.validation import check_integer

MIN_WINDOWS_PER_FOLD = 8  # with fewer windows in a fold, its state would be useless


@dataclass(frozen=True)
class FitData:
    """Checked arguments of a fit.

    Attributes
    ----------
    settings : Settings
    spec : Spec
    loss : callable
    inputs : Inputs
    targets : Targets
    codec : TargetCodec
        Encodes targets; has the classes and scale of the first fit, if this fit continues it.
    windows : SequenceWindows
        The minibatches of an epoch, for all ranks together.
    validation : SequenceWindows or None
    n_outputs : int, or tuple of int for several arrays of targets
        Number of outputs that a new model needs.
    """

    settings: Settings
    spec: Spec
    loss: Loss
    inputs: Inputs
    targets: Targets
    codec: TargetCodec
    windows: SequenceWindows
    validation: SequenceWindows | None
    n_outputs: Any


def prepare(
    settings: Settings,
    schema: InputSchema,
    x: Any,
    y: Any,
    sample_weight: Any = None,
    validation_data: Any = None,
    *,
    lengths: Any = None,
    starts: Any = None,
    epochs: int | None = None,
    classes: Any = None,
    codec: TargetCodec | None = None,
    split_seed: int | None = None,
    batchsize: int | None = None,
    pool: SeriesPool | None = None,
) -> FitData:
    """Check the arguments of ``fit``, read the data and cut them into windows.

    Parameters
    ----------
    settings, schema
        Settings and input schema of the estimator.
    x, y, sample_weight, validation_data, lengths, starts, epochs
        See ``Estimator.fit``.
    classes : array-like, optional
        All labels, where ``y`` may lack some; see ``EstimatorClassifier.partial_fit``.
    codec : TargetCodec, optional
        The codec of the fit that this one continues.
    split_seed : int, optional
        Seed of the split, if the settings hold out validation data. None: hold out nothing.
    batchsize : int, optional
        Series of a minibatch over all ranks, see :class:`MinibatchSize`; by default as in the spec.
    pool : SeriesPool, optional
        The ranks that have series of their own.
    """
    pool = pool or SeriesPool(RankGroup())
    require_stored(spec=settings.spec, loss=settings.loss)
    if settings.target not in ("auto", "step", "series"):
        raise ValueError(f"target must be 'auto', 'step' or 'series', got {settings.target!r}")
    spec = read_spec(settings.spec)
    if epochs is not None:
        check_integer("epochs", epochs, 1, error=SpecError)
        spec = dataclasses.replace(spec, epochs=int(epochs))
    loss = as_loss(settings.loss)
    pool.ranks.require_equal(
        {
            "whether validation_data are given": validation_data is not None,
            "early_stopping": (settings.early_stopping, settings.validation_fraction),
            "scale_target": settings.scale_target,
            "class_weight": settings.class_weight,
            "classes": classes,
            "the fit to continue": codec is not None,
        }
    )
    inputs = pool.inputs(x, schema, starts=starts, lengths=lengths)
    weight = pool.weight(sample_weight, inputs)
    labels = None
    if settings.is_classifier and (y is not None or inputs.shards is not None):
        labels = _find_labels(y, inputs, weight, classes, codec, pool)
    # labels outside the classes occur only at steps without weight
    unknown = MISSING_LABEL if labels is not None and codec is None and classes is None else None
    per_series = None if codec is None else codec.per_series
    how = target_schema(settings, schema.estimator, labels, per_series=per_series, unknown=unknown)
    targets = pool.targets(y, inputs, how)
    training = held_out = None
    if split_seed is not None and validation_data is None and settings.early_stopping:
        strata = _labels_of_series(inputs, targets, pool) if labels is not None else None
        training, held_out = hold_out(
            inputs, targets, settings.validation_fraction, split_seed, strata
        )
    if codec is None:
        scale = None
        if settings.scale_target and len(targets.series) == 1:
            rows = inputs.own(training or inputs.all_series())
            scale = TargetScale.of(targets.series[0], rows, weight, pool.moments)
        codec = TargetCodec(labels, scale, targets.per_series, targets.ndim)
    else:
        codec = dataclasses.replace(codec, per_series=targets.per_series, ndim=targets.ndim)
    maker = WindowMaker(settings, spec, loss, codec, batchsize or int(spec.batchsize), pool)
    windows = maker.windows(inputs, targets, weight, training)
    validation = None
    if held_out is not None:
        weight = pool.weight(sample_weight, inputs)  # normalized separately
        validation = maker.windows(inputs, targets, weight, held_out, training=False)
    elif validation_data is not None:
        validation = maker.validation_windows(validation_data, inputs, targets, schema)
    n_outputs = _count_outputs(targets, codec, loss, pool)
    return FitData(settings, spec, loss, inputs, targets, codec, windows, validation, n_outputs)


def _count_outputs(targets: Targets, codec: TargetCodec, loss: Loss, pool: SeriesPool) -> Any:
    (y, *others) = targets.series
    if codec.classes is not None:
        return len(codec.classes)
    if not others and isinstance(loss, SeqLoss) and loss.classes and y.kind == "int":
        return 1 + max(pool.ranks.allgather(find_largest(y.array)))
    return feature_counts(targets.series)


def target_schema(
    settings: Settings, estimator: str, classes: np.ndarray | None, **details: Any
) -> TargetSchema:
    """Return requirements on targets; ``details``: ``per_series``, ``name``, ``unknown``
    (:class:`LabelEncoder`).
    """
    loss, unknown = as_loss(settings.loss), details.pop("unknown", None)
    kind = "integers" if isinstance(loss, SeqLoss) and loss.classes else "numbers"
    encode = None if classes is None else LabelEncoder(classes, unknown, details.get("name", "y"))
    kind = "labels" if settings.is_classifier else kind
    return TargetSchema(estimator, kind, settings.target, encode=encode, **details)


def _find_labels(
    y: Any,
    inputs: Inputs,
    weight: SampleWeight | None,
    declared: Any,
    codec: TargetCodec | None,
    pool: SeriesPool,
) -> np.ndarray:
    """Return the classes of the first fit, else the declared ones, else the labels that occur."""
    if codec is not None and codec.classes is not None:
        if declared is not None and not np.array_equal(np.unique(declared), codec.classes):
            raise ValueError(
                f"classes={np.unique(declared).tolist()}, but the first call had "
                f"{codec.classes.tolist()}; they cannot change"
            )
        return codec.classes
    if declared is not None:
        return np.unique(declared)

    def find_labels() -> np.ndarray:
        labels, w = read_labels(y, inputs, weight)
        return find_classes(
            labels, w, inputs.whole() if labels.shape[1:] == (inputs.N, inputs.T) else None
        )

    return pool.classes(find_labels, inputs)


@dataclass(frozen=True)
class WindowMaker:
    """Cuts data into the minibatches of a fit."""

    settings: Settings
    spec: Spec
    loss: Loss
    codec: TargetCodec
    batchsize: int  # over all ranks
    pool: SeriesPool

    def windows(
        self,
        inputs: Inputs,
        targets: Targets,
        weight: SampleWeight | None,
        bounds: Segments | None = None,
        *,
        training: bool = True,
    ) -> SequenceWindows:
        """Cut the data into windows, or only their part within the bounds of each series."""
        segments = inputs.segments()  # of all ranks
        can_weigh = takes_weights(self.loss)
        if not can_weigh:
            self._require_no_weights(inputs, targets, weight)
        self._mark_missing_labels(targets)
        if self.settings.class_weight is not None and self.codec.classes is not None:
            (codes,) = targets.series
            how, rows = self.settings.class_weight, inputs.own(segments)
            weights = ClassWeightArray(
                how, self.codec.classes, codes.array, weight, rows, self.pool.total
            )
            weight = SampleWeight(weights, codes.N, codes.T)
        if bounds is not None:
            segments = intersect(segments, bounds)
            segments = segments[segments.length > 0]
        if (
            weight is not None and inputs.form == "rows"
        ):  # rows of weight 0 do not count in minibatches either
            segments = weight.drop_zero_weight(segments) or segments
        if training and self.spec.rebatch and not targets.per_series:
            segments = self._fold_segments(segments)
        burn_in = int(self.spec.burn_in)
        if burn_in >= segments.max_length:
            where = " after folding (rebatch=True)" if segments.folds > 1 else ""
            raise ValueError(
                f"burn_in of {burn_in} leaves nothing of series of {segments.max_length} "
                f"steps{where}"
            )
        mask_per_output = self._masks_outputs(targets)
        if weight is not None:
            rows, add_up = inputs.own(segments), self.pool.total
            weight.normalize(
                rows,
                targets.series,
                burn_in=burn_in,
                mask_per_output=mask_per_output,
                add_up=add_up,
            )
        windows = SequenceWindows(
            inputs.series,
            self.codec.encode(targets.series),
            weight,
            batchsize=self.batchsize,
            seqsize=int(self.spec.seqsize or segments.max_length),
            overlap=int(self.spec.overlap) if training else 0,
            burn_in=burn_in,
            segments=segments,
            equal_lengths=not can_weigh,
            mask_per_output=mask_per_output,
            one_target=targets.per_series,
            shards=inputs.shards,
        )
        windows.check()
        if windows.has_missing_targets and not can_weigh:
            raise ValueError(f"y has NaN (steps without a target), but {self._why_no_weights()}")
        return windows

    def validation_windows(
        self, data: Any, trained: Inputs, targets: Targets, schema: InputSchema
    ) -> SequenceWindows:
        """Cut ``validation_data``, which must have the features of the training data, into windows."""
        if not isinstance(data, tuple | list) or len(data) not in (2, 3, 4, 5):
            raise ValueError(
                "validation_data must be (x, y), (x, y, sample_weight), (x, y, sample_weight, "
                "lengths) or (x, y, sample_weight, lengths, starts)"
            )
        x, y, sample_weight, lengths, starts = (*data, None, None, None)[:5]
        schema = dataclasses.replace(schema, fitted=None)
        inputs = self.pool.inputs(x, schema, name="validation x", starts=starts, lengths=lengths)
        details = {"per_series": targets.per_series, "name": "validation y"}
        how = target_schema(self.settings, schema.estimator, self.codec.classes, **details)
        held_out = self.pool.targets(y, inputs, how)
        for of_training, of_validation in (
            (trained.series, inputs.series),
            (targets.series, held_out.series),
        ):
            if feature_counts(of_training) != feature_counts(of_validation):
                raise ShapeError(
                    f"{of_validation[0].name} has {feature_counts(of_validation)} features, the "
                    f"training data have {feature_counts(of_training)}"
                )
        return self.windows(
            inputs, held_out, self.pool.weight(sample_weight, inputs), training=False
        )

    def _fold_segments(self, segments: Segments) -> Segments:
        """Fold the segments according to ``spec.rebatch``."""
        if self.spec.rebatch != "auto":
            return segments.fold(self.batchsize)
        if self.spec.seqsize is None:
            return segments
        least = max(MIN_WINDOWS_PER_FOLD * int(self.spec.seqsize), int(self.spec.burn_in) + 1)
        return segments.fold(self.batchsize, least)

    def _masks_outputs(self, targets: Targets) -> bool:
        """Whether the loss can ignore single outputs of a step; a loss of class probabilities needs
        all.
        """
        if not isinstance(self.loss, SeqLoss):
            return takes_weights(self.loss)
        return all(s.F == 1 for s in targets.series) if self.loss.classes else self.loss.elementwise

    def _mark_missing_labels(self, targets: Targets) -> None:
        """Set the integer that marks missing labels, where targets are labels."""
        marked = (
            self.codec.classes is not None or targets.per_series
        )  # missing labels are MISSING_LABEL
        ignored = (
            self.loss.ignore_index if isinstance(self.loss, SeqLoss) and self.loss.classes else None
        )
        if marked and ignored not in (None, MISSING_LABEL):
            raise ValueError(
                f"ignore_index={ignored} of the loss: steps without a label are marked by "
                f"{MISSING_LABEL} here; leave it out"
            )
        for s in targets.series:
            if s.kind == "int":
                s.missing_label = MISSING_LABEL if marked else ignored

    def _require_no_weights(
        self, inputs: Inputs, targets: Targets, weight: SampleWeight | None
    ) -> None:
        """Raise ValueError if the data need weights, for a loss without them."""
        for needs, what in (
            (weight is not None, "sample_weight is given"),
            (len(np.unique(inputs.all_series().length)) > 1, "the series differ in length"),
            (targets.per_series, "y has one target per series, at its last step"),
        ):
            if needs:
                raise ValueError(f"{what}, but {self._why_no_weights()}")

    def _why_no_weights(self) -> str:
        name = getattr(self.loss, "__name__", repr(self.loss))
        return f"the loss {name} takes no weights: give it a fourth argument, loss(model, xs, ys, ws), or use seqloss"


def intersect(segments: Segments, bounds: Segments) -> Segments:
    """Return the part of each segment within the bounds of its series; some may have length 0.

    ``bounds`` has one segment for each series, in order.
    """
    start = np.maximum(segments.start, bounds.start[segments.series])
    stop = np.minimum(
        segments.start + segments.length, (bounds.start + bounds.length)[segments.series]
    )
    return Segments(segments.series, start, np.maximum(stop - start, 0))


def hold_out(
    inputs: Inputs, targets: Targets, fraction: Any, seed: int, labels: np.ndarray | None
) -> tuple[Segments, Segments]:
    """Hold out random series for validation, or the last steps of a single series and of
    ``timesteps``.

    Parameters
    ----------
    inputs : Inputs
    targets : Targets
    fraction : float
        Fraction of the series, or of the steps, to hold out; the number is rounded up.
    seed : int
    labels : ndarray of shape (N,), optional
        The label of each series, to be split in proportion if possible.

    Returns
    -------
    training, validation : Segments
        One segment per series, of length 0 if the series has no steps in that part.

    Raises
    ------
    ValueError
        If the fraction is not between 0 and 1, or leaves nothing to train on.
    """
    if (
        isinstance(fraction, bool)
        or not isinstance(fraction, numbers.Real)
        or not 0 < float(fraction) < 1
    ):
        raise ValueError(f"validation_fraction must be a number between 0 and 1, got {fraction!r}")
    whole = inputs.all_series()
    in_time = inputs.form == "timesteps" or len(whole) == 1
    n = whole.max_length if in_time else len(whole)
    n_held = math.ceil(n * float(fraction))
    if n_held >= n:
        raise ValueError(
            f"early_stopping holds out {n_held} of "
            f"n_samples={n}{' time steps' if in_time else ''}, which leaves nothing to train on; "
            "give more data, or early_stopping=False"
        )
    if not in_time:
        strata = labels if labels is not None and _can_stratify(labels, n_held) else None
        from sklearn.model_selection import train_test_split  # deferred: importing it takes 40 ms

        _, out = train_test_split(
            np.arange(n), test_size=n_held, random_state=seed, stratify=strata
        )
        is_out = np.isin(whole.series, out)
        n_training, n_validation = (
            np.where(is_out, 0, whole.length),
            np.where(is_out, whole.length, 0),
        )
        return Segments(whole.series, whole.start, n_training), Segments(
            whole.series, whole.start, n_validation
        )
    if targets.per_series:
        raise ValueError(
            "early_stopping of one series holds out its last steps, but y has one target, at the "
            "last step; give more series, or early_stopping=False"
        )
    # the cut counts from the start of each series
    n_before = np.minimum(n - n_held, whole.length)
    return (
        Segments(whole.series, whole.start, n_before),
        Segments(whole.series, whole.start + n_before, whole.length - n_before),
    )


def _labels_of_series(inputs: Inputs, targets: Targets, pool: SeriesPool) -> np.ndarray | None:
    """Return the label of each series of all ranks; None if labels belong to steps."""
    array, shards = targets.series[0].array, inputs.shards
    if not targets.per_series and (inputs.T if shards is None else shards.n_steps) > 1:
        return None
    labels = array.values[:, 0] if targets.per_series else np.asarray(array[0, :, 0])
    return labels if shards is None else shards.in_common_order(pool.ranks.allgather(labels))


def _can_stratify(labels: np.ndarray, n_held: int) -> bool:
    """Whether both parts can contain each label."""
    counts = np.unique(labels, return_counts=True)[1]
    return bool(counts.min() > 1) and len(counts) <= min(n_held, len(labels) - n_held)
