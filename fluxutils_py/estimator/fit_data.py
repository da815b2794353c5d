"""Read the data of a fit, hold a part of them out, and cut them into windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fluxutils_py.data import SampleWeight, SequenceWindows
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.weights import LossBlock, loss_blocks
from fluxutils_py.errors import ShapeError, SpecError
from fluxutils_py.estimator.building import require_stored
from fluxutils_py.estimator.spec import Settings, Spec, read_spec
from fluxutils_py.inputs.inputs import Inputs, Schema, feature_counts
from fluxutils_py.inputs.labels import (
    LabelEncoder,
    check_classes,
    class_weight_array,
    count_classes,
    find_classes,
    ignored_labels,
    weighted_classes,
    weights_of_classes,
)
from fluxutils_py.inputs.target_codec import TargetCodec, TargetScale
from fluxutils_py.inputs.targets import (
    MISSING_LABEL,
    SeriesReader,
    Targets,
    read_labels,
)
from fluxutils_py.nn.losses import Loss, SeqLoss, as_loss, takes_weights
from fluxutils_py.validation import check_integer

SCALINGS = ("weak", "strong")
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
    n_outputs: int | tuple[int, ...]


def read_data(
    settings: Settings,
    schema: Schema,
    x: object,
    y: object,
    sample_weight: object = None,
    lengths: object = None,
    starts: object = None,
    *,
    reader: SeriesReader | None = None,
    validation_data: object = None,
    classes: Any = None,
    earlier: TargetCodec | None = None,
    is_fit: bool = False,
) -> ReadData:
    """Read and check data, once: what is cut from them later changes none of them.

    Parameters
    ----------
    settings, schema
        Settings and input schema of the estimator.
    x, y, sample_weight, lengths, starts, validation_data
        See ``Estimator.fit``.
    reader : SeriesReader, optional
        Reads the series of this process, or of ranks that each have their own.
    classes : array-like, optional
        All labels, where ``y`` may lack some; see ``EstimatorClassifier.partial_fit``.
    earlier : TargetCodec, optional
        The codec of the fit that this one continues.
    is_fit : bool
        Whether the data are all that a fit learns from, not the first of several parts.
    """
    reader = reader or SeriesReader()
    # before anything is read: each reading below is a collective call of ranks that share the data
    reader.require_equal(
        {
            "whether validation_data are given": validation_data is not None,
            "early_stopping": settings.early_stopping,
            "scale_target": settings.scale_target,
            "class_weight": settings.class_weight,
            "classes": classes,
            "the fit to continue": earlier is not None,
        }
    )
    inputs = reader.inputs(x, schema, starts=starts, lengths=lengths)
    weight = reader.weight(sample_weight, inputs)
    # classes are the labels that occur at steps that have a loss
    finds_classes = settings.is_classifier and earlier is None and classes is None
    found = _classes(settings, y, classes, earlier, inputs, weight, reader)
    per_series = None if earlier is None else earlier.per_series

    def read_targets(classes: np.ndarray | None) -> Targets:
        of_targets = target_schema(
            settings,
            schema.estimator,
            classes,
            per_series=per_series,
            # classes found in the data lack labels of steps without a loss, which are no error
            unknown=MISSING_LABEL if finds_classes else None,
        )
        targets = reader.targets(y, inputs, of_targets)
        mark_missing_labels(targets, classes, as_loss(settings.loss))
        return targets

    targets = read_targets(found)
    return ReadData(
        reader,
        schema,
        inputs,
        weight,
        targets,
        found,
        earlier=earlier,
        validation_data=validation_data,
        read_targets=read_targets if finds_classes and found is not None else None,
        is_fit=is_fit,
    )


def _classes(
    settings: Settings,
    y: object,
    declared: Any,
    earlier: TargetCodec | None,
    inputs: Inputs,
    weight: SampleWeight | None,
    reader: SeriesReader,
) -> np.ndarray | None:
    """Return the classes of the first fit, else the declared ones, else the labels that occur.

    None if targets are no labels.
    """
    # A rank without series has no y, but takes part in collecting the labels.
    has_targets = y is not None or inputs.shards is not None
    if not (settings.is_classifier and has_targets):
        return None
    if declared is not None:
        declared = weighted_classes(settings.class_weight, np.unique(declared))
    if earlier is not None and earlier.classes is not None:
        _require_same_classes(declared, earlier.classes)
        return earlier.classes
    if declared is not None:
        return declared
    rows = inputs.of_rank(inputs.segments())
    burn_in = read_spec(settings.spec).burn_in

    def find_local_classes() -> tuple[np.ndarray, int]:
        labels = read_labels(y, inputs)
        if labels.shape[1:] == (inputs.N, inputs.T):
            return find_classes(labels, weight, rows.without_first(burn_in))
        if labels.shape[1:] != (inputs.N, 1):  # reading targets raises the error
            return find_classes(labels, None)
        counts = rows.length > burn_in
        if weight is not None:
            counts &= weight.read(rows.last_steps(), 0, 1)[0] > 0
        return find_classes(labels[:, counts], None)

    classes = check_classes(*reader.classes(find_local_classes, inputs))
    return weighted_classes(settings.class_weight, classes)


@dataclass(frozen=True)
class ReadData:
    """Data that were read and checked.

    Attributes
    ----------
    reader : SeriesReader
    schema : Schema
    inputs : Inputs
    weight : SampleWeight or None
    targets : Targets
    classes : ndarray or None
    counted : Segments or None
        The steps of each series to learn from, where these are not all.
    groups : ndarray of int, shape (N,), or None
        Of the series. Those of one group are held out together.
    earlier : TargetCodec or None
        Of the fit that this one continues.
    validation_data : tuple or None
        As the user gave them.
    read_targets : callable or None
        Reads the targets for some classes, where these were found in them.
    is_fit : bool
        See :func:`read_data`.
    """

    reader: SeriesReader
    schema: Schema
    inputs: Inputs
    weight: SampleWeight | None
    targets: Targets
    classes: np.ndarray | None = None
    counted: Segments | None = None
    groups: np.ndarray | None = None
    earlier: TargetCodec | None = None
    validation_data: object = None
    read_targets: Callable[[np.ndarray | None], Targets] | None = None
    is_fit: bool = False

    def split(self, fraction: float, seed: int, max_in_time: int = 1) -> Split:
        """Hold out a fraction of the series, or of their groups, chosen at random, or the last
        steps of ``timesteps`` and of up to ``max_in_time`` series without groups; the number is
        rounded up.

        Raises
        ------
        ValueError
            If it leaves nothing to train on.
        """
        whole = self.counted or self.inputs.all_series()
        groups = whole.series if self.groups is None else self.groups[whole.series]
        if self.groups is not None:
            max_in_time = 0
        in_time = self.inputs.form == "timesteps" or len(whole) <= max_in_time
        n = whole.max_length if in_time else len(np.unique(groups))
        n_held = math.ceil(n * fraction)
        # rounded up, so that there is always something to validate on; training needs the rest
        if n_held >= n:
            raise ValueError(
                f"early_stopping holds out {n_held} of "
                f"n_samples={n}{' time steps' if in_time else ''}, which leaves nothing to train "
                "on; give more data, or early_stopping=False"
            )
        if not in_time:
            # only labels can be split in proportion
            no_labels = self.classes is None or self.groups is not None
            labels = None if no_labels else self._labels_of_series()
            return _hold_out_series(whole, groups, n_held, seed, labels)
        if self.targets.per_series:
            raise ValueError(
                "early_stopping of one series holds out its last steps, but y has one target, at "
                "the last step; give more series, or early_stopping=False"
            )
        # The cut counts from the start of each series.
        n_before = np.minimum(n - n_held, whole.length)
        n_after = whole.length - n_before
        return Split(
            Segments(whole.series, whole.start, n_before),
            Segments(whole.series, whole.start + n_before, n_after),
        )

    def _labels_of_series(self) -> np.ndarray | None:
        """Return the label of each series of all ranks; None if labels belong to steps."""
        targets = self.targets
        array = targets.series[0].array
        shards = self.inputs.shards
        n_steps = self.inputs.T if shards is None else shards.n_steps
        if not targets.per_series and n_steps > 1:
            return None
        # of one target per series, at its last step, the source has it at all steps
        labels = array.source[0, :, 0] if targets.per_series else np.asarray(array[0, :, 0])
        return labels if shards is None else shards.in_common_order(self.reader.gather(labels))

    def cut(
        self, settings: Settings, spec: Spec, batchsize: int, split: Split | None = None
    ) -> FitData:
        """Cut the data into windows, with ``batchsize`` series over all ranks."""
        loss = as_loss(settings.loss)
        # after the split, as scale and frequencies are those of the training part
        part = self.counted if split is None else split.training
        rows = self.rows(spec, batchsize, part)
        all_rows = [rows]
        if split is not None:
            held_out_rows = self.rows(spec, batchsize, split.validation, training=False)
            all_rows.append(held_out_rows)
        data = self
        if self.read_targets is not None and rows.folds > 1 and spec.burn_in:
            classes = self._without_beginnings(self.loss_blocks(spec, loss, *all_rows))
            data = replace(self, classes=classes, targets=self.read_targets(classes))
        codec = data.codec_for(settings, partial(data.loss_blocks, spec, loss, rows))
        n_outputs = data.count_outputs(
            codec, loss, partial(data.loss_blocks, spec, loss, *all_rows)
        )
        keeps_gaps = settings.choice is not None and settings.choice.has_gaps
        arguments = (spec, loss, batchsize, codec)
        windows = data.windows(*arguments, rows, keeps_gaps)
        validation = None
        if split is not None:
            validation = data.windows(*arguments, held_out_rows, keeps_gaps, training=False)
        elif self.validation_data is not None:
            held_out = data.held_out(settings, loss, codec)
            held_out_rows = held_out.rows(spec, batchsize, training=False)
            validation = held_out.windows(*arguments, held_out_rows, keeps_gaps, training=False)
        return FitData(
            settings, spec, loss, self.inputs, data.targets, codec, windows, validation, n_outputs
        )

    def held_out(self, settings: Settings, loss: Loss, codec: TargetCodec) -> ReadData:
        """Read ``validation_data``, which must have the features of the training data."""
        given = self.validation_data
        if not isinstance(given, tuple | list) or len(given) not in (2, 3, 4, 5):
            raise ValueError(
                "validation_data must be (x, y), (x, y, sample_weight), (x, y, sample_weight, "
                "lengths) or (x, y, sample_weight, lengths, starts)"
            )
        x, y, sample_weight, lengths, starts = [*given, None, None, None][:5]
        inputs = self.reader.inputs(
            x,
            # compared with the training data below, whose error tells more
            replace(self.schema, fitted=None, longest=int(self.inputs.all_series().length.max())),
            name="validation x",
            starts=starts,
            lengths=lengths,
        )
        schema_of_targets = target_schema(
            settings,
            self.schema.estimator,
            codec.classes,
            per_series=self.targets.per_series,
            name="validation y",
        )
        targets = self.reader.targets(y, inputs, schema_of_targets)
        for of_training, of_validation in (
            (self.inputs.series, inputs.series),
            (self.targets.series, targets.series),
        ):
            if feature_counts(of_training) != feature_counts(of_validation):
                raise ShapeError(
                    f"{of_validation[0].name} has {feature_counts(of_validation)} features, the "
                    f"training data have {feature_counts(of_training)}"
                )
        series = self.inputs.all_series().length
        has_lengths = bool(series.min() < series.max())
        weight = self.reader.weight(sample_weight, inputs, beside_lengths=has_lengths)
        mark_missing_labels(targets, codec.classes, loss)
        return ReadData(self.reader, self.schema, inputs, weight, targets)

    def _without_beginnings(self, blocks: Iterable[LossBlock]) -> np.ndarray:
        """Return the classes without labels that occur nowhere but in the burn-in of folds."""
        classes = self.classes
        assert classes is not None
        counts = self.reader.total(count_classes(blocks, len(classes)))
        return check_classes(classes[counts > 0], int(counts.sum()))

    def codec_for(
        self, settings: Settings, blocks: Callable[[], Iterable[LossBlock]]
    ) -> TargetCodec:
        """Return the codec, which keeps classes and scale of an earlier fit; ``blocks()`` are what
        it learns from.
        """
        targets = self.targets
        classes = self.classes
        of_class = None
        if classes is not None and settings.class_weight is not None:
            # frequencies are those of the first of several parts
            of_class = None if self.earlier is None else self.earlier.class_weight
            if of_class is None or self.is_fit or not isinstance(settings.class_weight, str):
                n = len(classes)
                of_class = weights_of_classes(
                    settings.class_weight,
                    classes,
                    lambda: self.reader.total(count_classes(blocks(), n)),
                )
        if self.earlier is not None:
            return replace(
                self.earlier,
                per_series=targets.per_series,
                ndim=targets.ndim,
                class_weight=of_class,
            )
        scale = None
        if settings.scale_target and len(targets.series) == 1:
            scale = TargetScale.of(targets.series[0], blocks(), self.reader.moments)
        return TargetCodec(classes, scale, targets.per_series, targets.ndim, of_class)

    def count_outputs(
        self, codec: TargetCodec, loss: Loss, blocks: Callable[[], Iterable[LossBlock]]
    ) -> int | tuple[int, ...]:
        """Return the number of outputs that a new model needs."""
        (y, *others) = self.targets.series
        # a model gives one score for each class, whatever the shape of y
        if codec.classes is not None:
            return len(codec.classes)
        if not others and isinstance(loss, SeqLoss) and loss.classes and y.kind == "int":
            own = [values[has_loss].max(initial=-1) for (values,), (has_loss,), *_ in blocks()]
            # The largest label may occur on one rank only.
            return 1 + max(self.reader.gather(int(max(own, default=-1))))
        counts: int | tuple[int, ...] = feature_counts(self.targets.series)
        return counts

    def rows(
        self,
        spec: Spec,
        batchsize: int,
        bounds: Segments | None = None,
        *,
        training: bool = True,
    ) -> Segments:
        """Return the rows of all ranks that windows are cut from, within the bounds of each series.

        Raises
        ------
        ValueError
            If the burn-in leaves nothing of the longest.
        """
        targets = self.targets
        weight = self.weight
        segments = within(self.inputs.segments(), bounds)
        if self.inputs.form == "rows":
            # Rows that do not count take no place in minibatches. If none counts, normalizing the
            # weights raises the error.
            if weight is not None:
                segments = weight.drop_zero_weight(segments) or segments
            if targets.per_series and targets.series[0].missing_label is not None:
                labels = targets.series[0].array.source[0, :, 0]  # of the last steps
                segments = segments[labels[segments.series] != MISSING_LABEL] or segments
        # Folds of a series with one target, at its last step, would have nothing to learn from.
        # Validation walks whole series, as predict does.
        if training and spec.rebatch and not targets.per_series:
            segments = _folded(segments, spec, batchsize)
        burn_in = spec.burn_in
        if burn_in >= segments.max_length:
            where = " after folding (rebatch=True)" if segments.folds > 1 else ""
            raise ValueError(
                f"burn_in of {burn_in} leaves nothing of series of {segments.max_length} "
                f"steps{where}"
            )
        return segments

    def loss_blocks(self, spec: Spec, loss: Loss, *parts: Segments) -> Iterator[LossBlock]:
        """Yield the targets of this rank that have a loss in windows of some rows, part by part."""
        for rows in parts:
            yield from loss_blocks(
                self.targets.series,
                self.inputs.of_rank(rows).without_first(spec.burn_in),
                self.weight,
                _masks_outputs(loss, self.targets),
            )

    def windows(
        self,
        spec: Spec,
        loss: Loss,
        batchsize: int,
        codec: TargetCodec,
        segments: Segments,
        keeps_gaps: bool,
        *,
        training: bool = True,
    ) -> SequenceWindows:
        """Cut the data of some :meth:`rows` into windows; ``keeps_gaps``: with NaN in single
        features.
        """
        inputs = self.inputs
        targets = self.targets
        weight = self.weight
        can_weigh = takes_weights(loss)
        if not can_weigh:
            self._require_no_weights(loss)
        if codec.class_weight is not None:
            (codes,) = targets.series
            weights = class_weight_array(codec.class_weight, codes.array, weight)
            weight = SampleWeight(weights, codes.N, codes.T)
        mask_per_output = _masks_outputs(loss, targets)
        if weight is not None:
            # over the steps that count: after all cuts, without burn-in and missing targets
            weight = weight.normalized(
                inputs.of_rank(segments).without_first(spec.burn_in),
                targets.series,
                mask_per_output=mask_per_output,
                add_up=self.reader.total,
            )

        windows = SequenceWindows(
            inputs.series,
            codec.encode(targets.series),
            weight,
            batchsize=batchsize,
            seqsize=spec.seqsize or segments.max_length,
            # overlap is for gradients to reach further back, of which validation has none
            overlap=spec.overlap if training else 0,
            burn_in=spec.burn_in,
            segments=segments,
            equal_lengths=not can_weigh,
            mask_per_output=mask_per_output,
            one_target=targets.per_series,
            shards=inputs.shards,
        )
        windows.gap_value = None if keeps_gaps else 0.0
        windows.check()
        if windows.has_missing_targets and not can_weigh:
            raise ValueError(f"y has NaN (steps without a target), but {_why_no_weights(loss)}")
        return windows

    def _require_no_weights(self, loss: Loss) -> None:
        """Raise ValueError if the data need weights, for a loss without them."""
        lengths = self.inputs.all_series().length
        for needs_weights, reason in (
            (self.weight is not None, "sample_weight is given"),
            (len(np.unique(lengths)) > 1, "the series differ in length"),
            (self.targets.per_series, "y has one target per series, at its last step"),
        ):
            if needs_weights:
                raise ValueError(f"{reason}, but {_why_no_weights(loss)}")


def spec_of_call(settings: Settings, epochs: int | None, is_fit: bool) -> Spec:
    """Return the spec with the ``epochs`` of this call, after checking the settings of the data."""
    require_stored(spec=settings.spec, loss=settings.loss)
    if settings.target not in ("auto", "step", "series"):
        raise ValueError(f"target must be 'auto', 'step' or 'series', got {settings.target!r}")
    spec = read_spec(settings.spec)
    if not is_fit:  # one epoch of many: nothing tells the length of the whole
        schedule = None if spec.schedule_follows_length else spec.lr_schedule
        spec = replace(spec, max_updates=None, lr_schedule=schedule)
    if epochs is None:
        return spec
    epochs = check_integer("epochs", epochs, 1, error=SpecError)
    return replace(spec, epochs=epochs, max_updates=None)


def _require_same_classes(declared: np.ndarray | None, classes: np.ndarray) -> None:
    """Raise ValueError if a later call declares other classes than the first fit had."""
    if declared is not None and not np.array_equal(declared, classes):
        raise ValueError(
            f"classes={declared.tolist()}, but the first call had {classes.tolist()}; "
            "they cannot change"
        )


def target_schema(
    settings: Settings,
    estimator: str,
    classes: np.ndarray | None,
    *,
    per_series: bool | None,
    unknown: int | None = None,
    name: str = "y",
) -> Schema:
    """Return requirements on targets; ``unknown`` is the code of labels outside the classes, see
    :class:`LabelEncoder`.
    """
    loss = as_loss(settings.loss)
    kind = "numbers"
    if settings.is_classifier:
        kind = "labels"
    elif isinstance(loss, SeqLoss) and loss.classes:
        kind = "integers"
    encode = None
    if classes is not None:
        # no error where other labels outside the classes are
        ignored = ignored_labels(settings.class_weight) if unknown is None else []
        encode = LabelEncoder(classes, unknown, name, ignored)
    return Schema(
        estimator,
        kind=kind,
        target=settings.target,
        per_series=per_series,
        encode=encode,
        target_name=name,
    )


def _folded(segments: Segments, spec: Spec, batchsize: int) -> Segments:
    """Fold the segments according to ``spec.rebatch``."""
    if spec.rebatch != "auto":
        return segments.fold(batchsize)
    # with exact gradients, what lies before a fold would be lost for no gain
    if spec.seqsize is None or spec.gradient == "exact":
        return segments
    least = max(MIN_WINDOWS_PER_FOLD * spec.seqsize, spec.burn_in + 1)
    return segments.fold(batchsize, least)


def _masks_outputs(loss: Loss, targets: Targets) -> bool:
    """Return whether the loss can ignore single outputs of a step."""
    if not isinstance(loss, SeqLoss):
        return takes_weights(loss)
    if loss.classes:
        # Probabilities of classes are computed from all outputs of a step together.
        return all(s.F == 1 for s in targets.series)
    return loss.elementwise


def _why_no_weights(loss: Loss) -> str:
    name = getattr(loss, "__name__", repr(loss))
    return (
        f"the loss {name} takes no weights: give it a fourth argument, "
        "loss(model, xs, ys, ws), or use seqloss"
    )


def mark_missing_labels(targets: Targets, classes: np.ndarray | None, loss: Loss) -> None:
    """Set the integer that marks missing labels, where targets are labels."""
    uses_missing_label = classes is not None or targets.per_series
    ignored = None
    if isinstance(loss, SeqLoss) and loss.classes:
        ignored = loss.ignore_index
    if uses_missing_label and ignored not in (None, MISSING_LABEL):
        raise ValueError(
            f"ignore_index={ignored} of the loss: steps without a label are marked by "
            f"{MISSING_LABEL} here; leave it out"
        )
    for s in targets.series:
        if s.kind == "int":
            s.missing_label = MISSING_LABEL if uses_missing_label else ignored


def within(segments: Segments, bounds: Segments | None) -> Segments:
    """Return what is left of segments within the bounds of each series, one segment for each in
    order.
    """
    if bounds is None:
        return segments
    start = np.maximum(segments.start, bounds.start[segments.series])
    stop = np.minimum(segments.stop, bounds.stop[segments.series])
    left = stop > start
    return Segments(segments.series[left], start[left], (stop - start)[left])


class Split(NamedTuple):
    """Two parts of the data, with one segment per series each.

    A segment has length 0 if its series has no steps in that part.
    """

    training: Segments
    validation: Segments


def _hold_out_series(
    whole: Segments, groups: np.ndarray, n_held: int, seed: int, labels: np.ndarray | None
) -> Split:
    from sklearn.model_selection import train_test_split  # deferred: importing it takes 40 ms

    if labels is not None:
        counts = np.unique(labels, return_counts=True)[1]
        # both parts must contain each label
        if counts.min() == 1 or len(counts) > min(n_held, len(labels) - n_held):
            labels = None
    _, held_out = train_test_split(
        np.unique(groups), test_size=n_held, random_state=seed, stratify=labels
    )
    is_held_out = np.isin(groups, held_out)
    return Split(
        Segments(whole.series, whole.start, np.where(is_held_out, 0, whole.length)),
        Segments(whole.series, whole.start, np.where(is_held_out, whole.length, 0)),
    )


# -- how many series a minibatch has ---------------------------------------------------------------


def total_batchsize(
    settings: Settings, n_ranks: int, saved: Mapping[str, Any] | None = None
) -> int:
    """Return the number of series in a minibatch over all ranks.

    ``saved`` is :func:`minibatch_size` in the checkpoint that the fit continues from. With weak
    scaling and the same ``batchsize`` as then, the whole minibatch stays as it was, whatever the
    number of ranks.

    Raises
    ------
    SpecError
        If ``scaling`` is neither ``"weak"`` nor ``"strong"``.
    """
    scaling = settings.scaling
    if scaling not in SCALINGS:
        raise SpecError(
            "scaling must be 'weak' (batchsize counts the series on each rank) or 'strong' (in "
            f"the whole minibatch), got {scaling!r}"
        )
    batchsize = read_spec(settings.spec).batchsize
    # with strong scaling, a minibatch has the same size on any number of ranks
    if scaling == "strong":
        return batchsize
    # restoring the checkpoint of a different fit raises the error
    if saved is not None and (saved["scaling"], saved["batchsize"]) == (scaling, batchsize):
        return int(saved["whole"])
    return batchsize * n_ranks


def minibatch_size(settings: Settings, windows: SequenceWindows) -> dict[str, Any]:
    """Return the size of minibatches, as a checkpoint holds it."""
    return {
        "scaling": settings.scaling,
        "batchsize": read_spec(settings.spec).batchsize,
        "whole": windows.batchsize,
    }


def describe_minibatches(settings: Settings, windows: SequenceWindows, n_ranks: int) -> str | None:
    """Return how many series ranks train on together; None where it goes without saying."""
    if n_ranks == 1 and windows.batchsize == total_batchsize(settings, 1):
        return None
    ranks = f"{n_ranks} ranks share" if n_ranks > 1 else "one rank trains on"
    batchsize = read_spec(settings.spec).batchsize
    return (
        f"{ranks} minibatches of {windows.batchsize} series (batchsize={batchsize}, "
        f"scaling={settings.scaling!r})"
    )
