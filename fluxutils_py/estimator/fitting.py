"""Fit an estimator: prepare the data, assemble model, optimizer and loop, then train."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fluxutils_py.data import SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator.building import (
    build_model,
    build_optimizer,
    make_generator,
    require_gradients,
)
from fluxutils_py.estimator.collectives import (
    MinibatchSize,
    course_of_fit,
    device_of_rank,
    require_same_fit,
    require_same_inputs,
)
from fluxutils_py.estimator.data_warnings import (
    warn_cut,
    warn_repeated_search,
    warn_single_steps,
    warn_unlike_training,
    warn_unscaled,
)
from fluxutils_py.estimator.estimator_settings import Settings, as_callbacks
from fluxutils_py.estimator.few_updates_warning import warn_few_updates
from fluxutils_py.estimator.fit_data import FitData, prepare
from fluxutils_py.estimator.resuming import restore_newest, saved_minibatch_size, with_checkpoints
from fluxutils_py.estimator.spec import Spec
from fluxutils_py.inputs.inputs import feature_counts
from fluxutils_py.inputs.sharded_data import SeriesPool, ranks_of_call
from fluxutils_py.nn.compiling import compile_arguments, compiled
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.model_windows import cached_window_mode, takes_windows
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import RankGroup, Threads
from fluxutils_py.parallel.threads import n_threads
from fluxutils_py.reporting.progress import progress_hook
from fluxutils_py.training import EarlyStopping, Loop
from fluxutils_py.training.early_stopping import Schedule, Validation
from fluxutils_py.training.make_optimizer import with_python_numbers
from fluxutils_py.training.tensor_batches import TensorBatches
from fluxutils_py.training.tensors import to_tensor
from fluxutils_py.training.window_step import WindowStep, differentiate_windows, evaluate_windows

FLOATS = {
    "float16": torch.float32,
    "float32": torch.float32,
    "bool": torch.float32,
    "float64": torch.float64,
}
VALIDATION_STEPS = 1 << 14  # series times steps of a validation window


def run_fit(
    est: Any,
    *data: Any,
    sharded: bool = False,
    resume: bool = False,
    can_hold_out: bool = False,
    expects_to_learn: bool = False,
    **arguments: Any,
) -> None:
    """Fit an estimator, alone or together with the ranks of its ``comm``.

    Parameters
    ----------
    est : Estimator
        Does not change before training begins. A later error restores it if no update was made, or,
        unless it is an interrupt, if this fit replaces an earlier one.
    *data, **arguments
        ``x, y, sample_weight, validation_data`` and ``lengths, starts, epochs, classes``; see
        :func:`prepare`.
    sharded : bool
        Whether each rank has its own series.
    resume : bool
        Continue with the estimator's model and optimizer, if it has any.
    can_hold_out : bool
        Whether to hold out validation data, if the settings request it and none are given.
    expects_to_learn : bool
        Whether this call is all of the training, and the user set its length: few updates are then
        warned of.
    """
    settings, resume = est._resolved_params(), resume and hasattr(est, "model_")
    with ranks_of_call(settings.comm, "fit", sharded) as ranks:
        ranks.require_equal(course_of_fit(settings, resume, arguments.get("epochs")))
        require_gradients("fit")
        warn_repeated_search(ranks)
        # copy the user's generators, so that they advance only once training has begun
        rng = (
            copy.deepcopy(est._rng)
            if resume
            else make_generator(copy.deepcopy(settings.random_state))
        )
        seed = int(make_generator(copy.deepcopy(settings.random_state)).integers(2**31))
        rng, seed = ranks.allgather((rng, seed))[0]
        if resume:
            arguments["codec"] = est._codec
        if can_hold_out:
            arguments["split_seed"] = seed
        saved = None if resume else saved_minibatch_size(as_callbacks(settings.callbacks), ranks)
        size = MinibatchSize.of(settings, ranks.size, saved)
        pool = SeriesPool(ranks if sharded else RankGroup())
        schema = est._input_schema(fitted=resume)
        prepared = prepare(settings, schema, *data, batchsize=size.whole, pool=pool, **arguments)
        training = assemble(prepared, ranks, rng, size, est if resume else None)
        warn_single_steps(data[0], prepared.inputs, training.step.model)
        if not resume and not ranks.rank:
            warn_unscaled(
                prepared.windows, training.step.model, data[1], getattr(est, "scale_target", None)
            )
        if len(data) > 3 and data[3] is not None and not ranks.rank:  # validation_data
            warn_unlike_training(prepared.windows, prepared.validation)
        if expects_to_learn and not ranks.rank:
            warn_few_updates(
                prepared.windows, int(prepared.spec.epochs), int(prepared.spec.accumulate)
            )
        require_same_fit(training)
        run(est, training)


def run_evaluate(
    est: Any, *data: Any, gradient: bool, sharded: bool = False, **arguments: Any
) -> float | tuple[float, Tensor]:
    """Run an epoch without updates; for the arguments see :func:`run_fit`."""
    settings = est._resolved_params()
    with ranks_of_call(settings.comm, "evaluate", sharded) as ranks:
        weights = "given" if data[2] is not None else "none"
        told = (
            {} if sharded else {"sample_weight": weights}
        )  # with shards, the pool of series compares them
        ranks.require_equal({"gradient": bool(gradient), **told})
        if gradient:
            require_gradients("evaluate(gradient=True)")
        check_is_fitted(est, "model_")
        model, schema = est.model_, est._input_schema()
        pool = SeriesPool(ranks if sharded else RankGroup())
        size = MinibatchSize.of(settings, ranks.size)
        prepared = prepare(
            settings, schema, *data, codec=est._codec, batchsize=size.whole, pool=pool, **arguments
        )
        if not sharded:
            require_same_inputs(ranks, prepared.inputs)
        batches = tensor_batches(prepared, model, ranks)
        with torch.backends.cudnn.flags(
            enabled=not gradient
        ):  # cuDNN has no gradients in evaluation mode
            compute = differentiate_windows if gradient else evaluate_windows
            return compute(model, prepared.loss, batches, ranks, prepared.spec.precision)


# -- assemble ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Components of a fit that is ready to run.

    Attributes
    ----------
    data : FitData
    size : MinibatchSize
    rng : numpy.random.Generator
        Source of all randomness, equal on all ranks.
    resume : bool
        Whether model and optimizer come from an earlier fit.
    optimizer : torch.optim.Optimizer
    groups : list of dict
        Parameter groups of the optimizer before a new scheduler changes them.
    scheduler : learning-rate scheduler of torch, or None
    batches : TensorBatches
        This rank's part of the windows.
    threads : Threads
    step : WindowStep
        Holds the ``model``.
    loop : Loop
        Holds ``ranks`` and all hooks except the callbacks.
    callbacks : list
    """

    data: FitData
    size: MinibatchSize
    rng: np.random.Generator
    resume: bool
    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    scheduler: Any
    batches: TensorBatches
    threads: Threads
    step: WindowStep
    loop: Loop
    callbacks: list[Any]


def assemble(
    data: FitData,
    ranks: RankGroup,
    rng: np.random.Generator,
    size: MinibatchSize,
    earlier: Any = None,
) -> Training:
    """Build model, optimizer, step and loop.

    ``earlier`` is the fitted estimator that this fit continues; its attributes are only read.
    """
    settings, spec = data.settings, data.spec
    threads = Threads(n_threads(settings.n_jobs))
    if compile_arguments(settings.compile) is not None and threads.n > 1:
        raise SpecError(
            f"compile={settings.compile!r} trains in one thread, with torch's own threads inside; "
            "leave n_jobs at None"
        )
    callbacks, progress = as_callbacks(settings.callbacks), progress_hook(settings.verbose)
    model, optimizer = (
        _new_model(data, ranks, rng) if earlier is None else _earlier_model(earlier, settings)
    )
    batches = tensor_batches(data, model, ranks, rng if spec.shuffle else None)
    groups = [dict(group) for group in optimizer.param_groups]
    scheduler = getattr(earlier, "_scheduler", None) or _new_scheduler(spec, optimizer)
    step = WindowStep(
        model,
        data.loss,
        optimizer,
        clip=None if spec.clip is None else float(spec.clip),
        accumulate=int(spec.accumulate),
        precision=spec.precision,
        threads=threads,
        comm=ranks,
    )
    loop = Loop(step, ranks)
    if hasattr(earlier, "history_"):
        loop.epoch, loop.history, loop.step = (
            earlier.n_iter_,
            list(earlier.history_),
            earlier._n_steps,
        )
    if data.validation is not None:
        held_out = TensorBatches(
            data.validation, batches.dtype, batches.device, rank=ranks.rank, size=ranks.size
        )
        loop.hooks.attach(Validation(model, data.loss, held_out, ranks, spec.precision))
    if scheduler is not None:
        loop.hooks.attach(
            Schedule(scheduler, spec.schedule_every, lambda: step.n_updates, spec.accumulate)
        )
    if spec.patience is not None:
        loop.hooks.attach(EarlyStopping(model, int(spec.patience)))
    if progress is not None and ranks.rank == 0:
        loop.hooks.attach(progress)
        if size.resumed or not ranks.is_single:
            line = size.describe(data.windows.segments, sharded=data.windows.shards is not None)
            loop.hooks.add("start", lambda loop: progress.say_once(line), name="minibatch size")
    return Training(
        data,
        size,
        rng,
        earlier is not None,
        optimizer,
        groups,
        scheduler,
        batches,
        threads,
        step,
        loop,
        callbacks,
    )


def _new_model(
    data: FitData, ranks: RankGroup, rng: np.random.Generator
) -> tuple[nn.Module, torch.optim.Optimizer]:
    settings, x = data.settings, data.inputs.series
    with seeded(int(rng.integers(2**63))):
        device = device_of_rank(settings.device, ranks)
        model = build_model(
            settings.model,
            feature_counts(x),
            data.n_outputs,
            float_dtype(x, data.spec.precision),
            device,
        )
        return model, build_optimizer(settings.opt, settings.model, model)


def _earlier_model(est: Any, settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    if hasattr(est, "optimizer_"):
        return est.model_, est.optimizer_
    return est.model_, build_optimizer(settings.opt, settings.model, est.model_)


def float_dtype(arrays: tuple[SeriesArray, ...], precision: str = "float32") -> torch.dtype | None:
    """Return the floating type of a model for these data; None (leave it unchanged) if all are
    integers.
    """
    if precision != "float32":
        return torch.float32
    dtypes = [
        FLOATS.get(a.dtype.newbyteorder("=").name, torch.float64)
        for a in arrays
        if a.kind == "float"
    ]
    return None if not dtypes else torch.float64 if torch.float64 in dtypes else torch.float32


def _new_scheduler(spec: Spec, optimizer: torch.optim.Optimizer) -> Any:
    if spec.scheduler is None:
        return None
    scheduler = with_python_numbers(spec.scheduler)(optimizer)
    if not hasattr(scheduler, "step"):
        raise TypeError(
            f"spec.scheduler must make a torch learning-rate scheduler, it made {scheduler!r}"
        )
    if (
        isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        and spec.schedule_every == "step"
    ):
        raise SpecError(
            "ReduceLROnPlateau goes by the loss of whole epochs; set spec.schedule_every to 'epoch'"
        )
    return scheduler


def tensor_batches(
    data: FitData, model: nn.Module, ranks: RankGroup, rng: np.random.Generator | None = None
) -> TensorBatches:
    """Return this rank's part of the windows as tensors, cut for the model.

    First runs the model on a few steps, to find out whether it takes whole windows, and whether it
    runs at all. A custom loss may call the model differently; then a failure is only a warning that
    ``predict`` will fail.
    """
    windows, first = data.windows, next(model.parameters())
    some = windows.own(windows.segments)[:4]
    rows = some if len(some) else Segments.from_lengths(1, windows.x[0].T)
    values = windows.cut(rows, 0, min(3, windows.segments.max_length)).x
    steps = [to_tensor(v, first.dtype, first.device) for v in values]
    try:
        with seeded(0):  # restores the generators; the lock keeps other fits out
            takes_windows(model, steps)
    except ShapeError as error:
        if isinstance(data.loss, SeqLoss):
            raise
        warnings.warn(f"predict will fail: {error}", stacklevel=5)
    if _adapt_windows(data, model) and windows.seqsize < windows.segments.max_length:
        with seeded(0):
            warn_cut(model, steps, int(data.spec.overlap), windows.seqsize)
    return TensorBatches(windows, first.dtype, first.device, rng, rank=ranks.rank, size=ranks.size)


def _adapt_windows(data: FitData, model: nn.Module) -> bool:
    """Adapt overlap and length of the windows to the model; tell whether it is one without state
    that takes windows.

    A model without state sees earlier steps at the start of each window. Validation with a mean
    over steps takes longer windows than training where it can, since it stores nothing for
    gradients.
    """
    validation = data.validation
    stateless = cached_window_mode(model) == "windows" and not recurrent_layers(model)
    if stateless:
        data.windows.overlap_into_burn_in = True
        if validation is not None:
            validation.overlap_into_burn_in, validation.overlap = True, int(data.spec.overlap)
    elif validation is not None and isinstance(data.loss, SeqLoss) and data.loss.is_mean:
        together = min(len(validation.segments), validation.batchsize)
        if not hasattr(model, "takes_windows"):
            validation.seqsize = max(validation.seqsize, VALIDATION_STEPS // together)
    return stateless


# -- run ---------------------------------------------------------------------------------------------------


def run(est: Any, training: Training) -> None:
    """Train, and keep the attributes of the estimator up to date.

    An error restores the estimator if there was no update, or, unless it is an interrupt, if this
    fit replaces another.
    """
    step, loop, data = training.step, training.loop, training.data
    model, ranks = step.model, loop.ranks
    before, buffers = dict(vars(est)), [b.clone() for b in model.buffers()]
    attributes = FittedAttributes(est, training)
    callbacks = with_checkpoints(training.callbacks, training, attributes)
    for callback in callbacks:
        loop.hooks.attach(callback)
    attributes.begin()
    seed = (int(training.rng.integers(2**63)) + ranks.rank) % 2**63
    device = training.batches.device
    try:
        with seeded(seed, [device] if device.type == "cuda" else []), training.threads:
            reset(model.train())
            if not training.resume and restore_newest(callbacks, ranks):
                attributes.publish(loop.history, loop.step - loop.epoch_step)
                if (done := loop.epoch - loop.start_epoch) > data.spec.epochs:
                    warnings.warn(
                        f"the checkpoint is of {done} epochs, more than "
                        f"epochs={data.spec.epochs}: this is the model after all of them; give "
                        "the Checkpointer another folder to train a shorter time",
                        stacklevel=5,
                    )
            with compiled(model, compile_arguments(data.settings.compile)):
                loop.run_epochs(training.batches, data.spec.epochs)
    except BaseException as error:
        step.discard()
        step.n_updates = ranks.resynchronize(model, training.optimizer, step.n_updates)
        replaces = not training.resume and "model_" in before
        if step.n_updates == 0 or (replaces and not ranks.is_interrupt(error)):  # undo the fit
            vars(est).clear()
            vars(est).update(before)
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            for group, values in zip(training.optimizer.param_groups, training.groups, strict=True):
                group.clear()
                group.update(values)
        raise
    finally:
        reset(model)
        model.eval()
        if vars(est).get("_rng") is training.rng and not training.resume:
            make_generator(data.settings.random_state)  # advance the user's generator like its copy


class FittedAttributes:
    """Sets the fitted attributes of an estimator when training begins and after each epoch."""

    def __init__(self, est: Any, training: Training) -> None:
        self.est, self.training = est, training
        loop, hooks = training.loop, training.loop.hooks
        loop.shared_data = {
            "estimator": est,
            "model": training.step.model,
            "optimizer": training.optimizer,
        }
        hooks.add(
            "epoch", self._finish_epoch, name="bookkeeping", priority=-math.inf, collective=True
        )
        hooks.add("epoch", self._publish_epoch, name="fitted attributes", priority=-5)

    def begin(self) -> None:
        """Set the model, and the attributes that depend on the data."""
        est, training, data = self.est, self.training, self.training.data
        est.model_, est.optimizer_ = training.step.model, training.optimizer
        est._rng, est._scheduler, est._codec = training.rng, training.scheduler, data.codec
        if training.resume:
            return
        est._layout, est.n_features_in_, est.n_outputs_ = (
            data.inputs.layout,
            data.inputs.columns,
            data.n_outputs,
        )
        vars(est).pop("feature_names_in_", None)
        if data.inputs.names is not None:
            est.feature_names_in_ = data.inputs.names
        if data.codec.classes is not None:
            est.classes_ = data.codec.classes
        est.grad_ = torch.zeros(
            sum(p.numel() for p in est.model_.parameters()), dtype=training.batches.dtype
        )
        self.publish([], 0)

    def publish(self, history: list[dict[str, Any]], n_steps: int) -> None:
        """Set the losses, history and counts after these epochs."""
        est, last = self.est, history[-1] if history else {"mean_batch_loss": None}
        est.loss_ = math.nan if last["mean_batch_loss"] is None else last["mean_batch_loss"]
        est.loss_curve_ = [record["loss"] for record in history]
        est.validation_loss_curve_ = [
            r["validation_loss"] for r in history if "validation_loss" in r
        ]
        est.history_ = list(history)
        est.n_iter_, est._n_steps = len(history), n_steps

    def _finish_epoch(self, loop: Loop) -> None:
        step = self.training.step
        step.flush()
        if step.n_updates == 0 and not loop.stopped:
            raise DataError(
                "there is nothing to learn from: no step of y that counts has a target (all are "
                "NaN)"
            )
        loop.record["folds"] = self.training.data.windows.segments.folds
        self._gradient = step.mean_gradient()
        step.start_epoch()

    def _publish_epoch(self, loop: Loop) -> None:
        self.est.grad_ = self._gradient
        self.publish([*loop.history, loop.record], loop.step)
