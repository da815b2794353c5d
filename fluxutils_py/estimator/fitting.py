"""Fit an estimator: prepare the data, assemble model, optimizer and loop, then train."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fluxutils_py.data import SeriesArray
from fluxutils_py.errors import DataError, ShapeError, SpecError, warn
from fluxutils_py.estimator.building import (
    build_model,
    build_optimizer,
    make_generator,
    require_gradients,
)
from fluxutils_py.estimator.estimator_settings import MinibatchSize, Settings, as_callbacks
from fluxutils_py.estimator.fingerprint import shapes_and_digests
from fluxutils_py.estimator.fit_data import (
    FitData,
    FitRequest,
    ReadData,
    Split,
    Training,
    plan_of,
    read_data,
)
from fluxutils_py.estimator.fit_warnings import (
    warn_few_updates,
    warn_nothing_learnt,
    warn_one_class,
    warn_single_steps,
    warn_truncated_layers,
    watch_scales,
    watch_targets,
)
from fluxutils_py.estimator.fitted_parts import FittedParts, SeriesEstimator, input_schema
from fluxutils_py.estimator.resuming import restore_newest, saved_minibatch_size, with_checkpoints
from fluxutils_py.estimator.same_fit import course_of_fit, require_same_fit, require_same_inputs
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.inputs.inputs import Inputs, feature_counts
from fluxutils_py.inputs.sharded_data import SeriesPool, ranks_of_call
from fluxutils_py.nn.closed_form_model import closed_form_parts, is_closed_form, takes_gaps
from fluxutils_py.nn.compiling import compile_arguments, compiled
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.model_windows import (
    cached_window_mode,
    require_step_outputs,
    takes_windows,
)
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.launcher import local_rank
from fluxutils_py.reporting.progress import EpochLog, ProgressBar, progress_hook, say_stage
from fluxutils_py.sklearn_callbacks import begin_fit, hooks_of, nothing
from fluxutils_py.training import Checkpointer, Loop
from fluxutils_py.training.closed_form_fit import FixedTask, fit_fixed_parts
from fluxutils_py.training.closed_form_step import ClosedFormStep
from fluxutils_py.training.early_stopping import EarlyStopping, MostUpdates, Schedule, Validation
from fluxutils_py.training.make_optimizer import make_scheduler
from fluxutils_py.training.tensor_batches import TensorBatches, first_steps
from fluxutils_py.training.window_step import WindowStep, differentiate_windows, evaluate_windows

SHORT_FLOATS = {"float16", "float32", "bool"}  # data for which parameters are float32
VALIDATION_STEPS = 1 << 14  # series times steps of a validation window


@dataclass(frozen=True)
class BegunFit:
    """A fit whose data have been read.

    Attributes
    ----------
    est : Estimator
    data : ReadData
    ranks : RankGroup
    seed : int
        Of splits, equal on all ranks.
    saved : mapping or None
        Size of the minibatches of a checkpoint.
    continues : bool
        Whether it goes on from an earlier fit.
    """

    est: SeriesEstimator
    data: ReadData
    ranks: RankGroup
    seed: int
    saved: Mapping[str, Any] | None
    continues: bool


After = Callable[[Training], None]
Before = Callable[[Settings, BegunFit], tuple[Settings, After]]


def nothing_more(training: Training) -> None:
    """Do nothing after a fit."""


def run_fit(est: SeriesEstimator, request: FitRequest, before: Before | None = None) -> None:
    """Fit an estimator, alone or together with the ranks of its ``comm``.

    The estimator does not change before training begins. A later error restores it if no update was
    made, or, unless it is an interrupt, if this fit replaces an earlier one.

    ``before(settings, fit)`` is called once the data are read; it returns the settings to fit with,
    and a function to call with the :class:`Training` that is done.
    """
    settings = est.resolved_params()
    earlier = _earlier_fit(est, request)
    with ranks_of_call(settings.comm, "fit", request.sharded) as ranks:
        callbacks = [*as_callbacks(settings.callbacks), *hooks_of(est)]
        if not ranks.is_single:
            _agree_on_course(settings, callbacks, earlier, request, ranks)
        require_gradients("fit")
        # before data are read, as both decide how they are cut
        randomness = _shared_randomness(settings, earlier, ranks)
        saved = None if earlier is not None else _saved_size(callbacks, ranks)
        parts = None if earlier is None else earlier.fitted_parts_
        data = _read(est, settings, request, parts, ranks)
        after: After = nothing_more
        if before is not None:
            begun = BegunFit(est, data, ranks, randomness.split_seed, saved, earlier is not None)
            settings, after = before(settings, begun)
        split = _split(data, settings, randomness.split_seed)
        size = MinibatchSize.of(settings, ranks.size, saved)
        fit_data = data.cut(settings, size.whole, split)
        training = assemble(fit_data, ranks, randomness.rng, size, earlier, request)
        if is_closed_form(training.step.model) and not request.is_fit:
            raise _no_partial_fit(est)
        # now, when a model exists that tells what it sees, and before any time is spent
        _warn_about(training, request)
        if not ranks.is_single:
            require_same_fit(training)
        end_fit = _begin_fit(est, training, request)
        # a partial_fit may be of data unlike those before
        target_sums = watch_targets(training) if request.is_fit else []
        run(est, training)
        after(training)
        end_fit()
        warn_nothing_learnt(training, target_sums)


def _agree_on_course(
    settings: Settings,
    callbacks: list[Any],
    earlier: SeriesEstimator | None,
    request: FitRequest,
    ranks: RankGroup,
) -> None:
    with_hooks = replace(settings, callbacks=callbacks)
    ranks.require_equal(course_of_fit(with_hooks, earlier is not None, request.epochs))


def _saved_size(callbacks: list[Any], ranks: RankGroup) -> Mapping[str, Any] | None:
    """Return the size of the minibatches of the checkpoint that a fit continues from, if any."""
    return saved_minibatch_size(callbacks, ranks) if has_checkpointers(callbacks) else None


def _split(data: ReadData, settings: Settings, seed: int) -> Split | None:
    """Hold out validation data if the settings ask for it and none are given."""
    request = data.request
    if not settings.early_stopping or not request.is_fit or request.validation_data is not None:
        return None
    return data.split(settings.validation_fraction, seed)


def _read(
    est: SeriesEstimator,
    settings: Settings,
    request: FitRequest,
    parts: FittedParts | None,
    ranks: RankGroup,
) -> ReadData:
    """Read the data of a call; ``parts`` are those of the fit that it follows."""
    schema = input_schema(est, settings, parts)
    codec = None if parts is None else parts.codec
    pool = SeriesPool(ranks if request.sharded else RankGroup())
    return read_data(settings, schema, request, codec, pool)


def _begin_fit(est: SeriesEstimator, training: Training, request: FitRequest) -> Callable[[], None]:
    """Begin the task of scikit-learn's callbacks, on rank 0; return what ends it."""
    ranks = training.loop.ranks
    if ranks.rank > 0:
        return nothing
    given = {
        "sample_weight": request.sample_weight,
        "lengths": request.lengths,
        "starts": request.starts,
    }
    return begin_fit(
        est,
        request.x,
        request.y,
        {name: value for name, value in given.items() if value is not None},
        n_epochs=1 if is_closed_form(training.step.model) else training.epochs,
        fitted=lambda: _fitted_now(est, alone=not ranks.is_single),
    )


def _fitted_now(est: SeriesEstimator, alone: bool) -> dict[str, Any]:
    """Return copies of what a fit goes on to change; ``alone`` for a copy that predicts on its rank
    alone.
    """
    model = deep_copy(est.model_)
    pairs = zip(est.model_.parameters(), model.parameters(), strict=True)
    # the optimizer of the copy has the parameters of the copy
    optimizer = copy.deepcopy(est.optimizer_, {id(p): twin for p, twin in pairs})
    parts = est.fitted_parts_
    attributes = {
        "model_": reset(model).eval(),
        "optimizer_": optimizer,
        "fitted_parts_": replace(parts, rng=copy.deepcopy(parts.rng), scheduler=None),
    }
    return attributes | {"comm": None} if alone else attributes


def _earlier_fit(est: SeriesEstimator, request: FitRequest) -> SeriesEstimator | None:
    """Return the estimator if this call continues its fit.

    Raises
    ------
    SpecError
        If a ``partial_fit`` is of a model that is fitted in closed form.
    """
    if not request.resume or not hasattr(est, "model_"):
        return None
    if request.is_fit or not is_closed_form(est.model_):
        return est
    chosen = est.fitted_parts_.choice
    if getattr(est, "cell", None) != "auto" or chosen is None:
        raise _no_partial_fit(est)
    warn(
        f"partial_fit begins anew, with a network: the model of the fit before, "
        f"cell_={chosen.cell!r}, learns from all data at once; set cell='lstm' before fit to "
        "continue it"
    )
    return None


def _no_partial_fit(est: SeriesEstimator) -> SpecError:
    return SpecError(
        f"partial_fit: a {type(est).__name__} with cell={getattr(est, 'cell', None)!r} is "
        "fitted in closed form, on all data at once; call fit, or choose another cell"
    )


class Randomness(NamedTuple):
    """The sources of randomness of a fit, equal on all ranks."""

    rng: np.random.Generator
    split_seed: int  # of held-out validation data


def _shared_randomness(
    settings: Settings, earlier: SeriesEstimator | None, ranks: RankGroup
) -> Randomness:
    """Return the randomness of rank 0 on every rank.

    Generators are copied, so that the user's advance only once training has begun.
    """
    if earlier is None:
        rng = make_generator(copy.deepcopy(settings.random_state))
    else:
        rng = copy.deepcopy(earlier.fitted_parts_.rng)
    seed = int(make_generator(copy.deepcopy(settings.random_state)).integers(2**31))
    shared: Randomness = ranks.allgather(Randomness(rng, seed))[0]
    return shared


def _warn_about(training: Training, request: FitRequest) -> None:
    """Warn on rank 0 about data that the model is likely to learn the wrong thing from."""
    data = training.data
    model = training.step.model
    if training.loop.ranks.rank > 0 or training.resume:  # the first fit has said it
        return
    warn_single_steps(data.inputs, model)
    warn_one_class(data.codec.classes)
    if is_closed_form(model):
        return
    if data.spec.gradient == "exact":
        warn_truncated_layers(model)
    if not takes_gaps(model):
        watch_scales(training)
    if request.is_fit and not request.resume:
        warn_few_updates(training)


def run_evaluate(
    est: SeriesEstimator, request: FitRequest, *, gradient: bool, whole: bool = False
) -> float | tuple[float, Tensor]:
    """Run an epoch without updates; return its loss, and its mean gradient if asked for.

    ``whole``: walk whole series as ``predict`` does, without folds or burn-in.
    """
    settings = est.resolved_params()
    with ranks_of_call(settings.comm, "evaluate", request.sharded) as ranks:
        told: dict[str, object] = {"gradient": bool(gradient)}
        if not request.sharded:  # with shards, the pool of series compares the weights
            told["sample_weight"] = "none" if request.sample_weight is None else "given"
        ranks.require_equal(told)
        if gradient:
            require_gradients("evaluate(gradient=True)")
        check_is_fitted(est, "model_")
        parts = est.fitted_parts_
        if whole:
            spec = replace(read_spec(settings.spec), rebatch=False, burn_in=0)
            settings = replace(settings, spec=spec)
        read = _read(est, settings, request, parts, ranks)
        data = read.cut(settings, MinibatchSize.of(settings, ranks.size).whole)
        if not (request.sharded or ranks.is_single):
            require_same_inputs(ranks, data.inputs)
        batches = tensor_batches(data, est.model_, ranks)
        arguments = (est.model_, data.loss, batches, ranks, data.spec.precision)
        if not gradient:
            return evaluate_windows(*arguments)
        # cuDNN computes no gradients in evaluation mode
        with torch.backends.cudnn.flags(enabled=False):
            return differentiate_windows(*arguments, data.spec.gradient)


# -- assemble ----------------------------------------------------------------------------------


def assemble(
    data: FitData,
    ranks: RankGroup,
    rng: np.random.Generator,
    size: MinibatchSize,
    earlier: SeriesEstimator | None = None,
    request: FitRequest | None = None,
) -> Training:
    """Build model, optimizer, step and loop.

    ``earlier`` is the fitted estimator that this fit continues; its attributes are only read.
    ``request`` is the call.
    """
    settings = data.settings
    spec = data.spec
    compiles = settings.compile is not False and compile_arguments(settings.compile) is not None
    if compiles and spec.gradient == "exact":
        raise SpecError(
            f"compile={settings.compile!r} and spec.gradient='exact': compiled layers carry no "
            "sensitivities; leave compile out, or set gradient='truncated'"
        )
    progress = progress_hook(settings.verbose)
    if earlier is None:
        model, optimizer = _new_model(data, ranks, rng)
    else:
        model, optimizer = _earlier_model(earlier, settings)
    batches = tensor_batches(data, model, ranks, rng if spec.shuffle else None)
    # copied before a scheduler is made, which changes them: a failed fit puts them back
    groups = [dict(group) for group in optimizer.param_groups]
    scheduler = _scheduler_after(earlier, data, optimizer)
    task = _fixed_task(data, None if request is None else request.groups, model)
    step = _new_step(data, model, optimizer, ranks, task)
    resume = earlier is not None
    loop = _loop_after(earlier, step, ranks)
    training = Training(
        data,
        size,
        rng,
        resume,
        optimizer,
        groups,
        scheduler,
        batches,
        step,
        loop,
        task,
        *plan_of(spec, data.windows),
    )
    _attach_epoch_hooks(training)
    if progress is not None and ranks.rank == 0:
        _attach_progress(training, progress)
    return training


def _new_step(
    data: FitData,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: RankGroup,
    task: FixedTask | None,
) -> WindowStep:
    of_whole_series = any(part.is_of_whole_series for part in closed_form_parts(model))
    if of_whole_series and not data.codec.per_series:
        raise SpecError(
            "cell='kernels' describes whole series, but y has a target at each step; use "
            "another cell, such as 'lstm' or 'linear'"
        )
    if task is not None and is_closed_form(model):
        return ClosedFormStep(model, data.loss, optimizer, comm=ranks, task=task)
    spec = data.spec
    return WindowStep(
        model,
        data.loss,
        optimizer,
        clip=None if spec.clip is None else float(spec.clip),
        accumulate=spec.accumulate,
        precision=spec.precision,
        gradient=spec.gradient,
        comm=ranks,
    )


def _fixed_task(data: FitData, groups: object, model: nn.Module) -> FixedTask | None:
    """Return what is to be fitted in closed form, scales of inputs included; None if nothing is."""
    if groups is None and not takes_gaps(model):
        return None
    if any(closed_form_parts(model)) or groups is None:
        classes = data.codec.classes
        n_classes = None if classes is None else len(classes)
        return FixedTask(n_classes, data.codec.per_series, read_groups(groups, data.inputs))
    raise DataError(
        "groups are left out together when the penalty of a closed form is chosen, and this "
        "model has none: leave groups out, or set cell='kernels' or 'linear'"
    )


def read_groups(groups: object, inputs: Inputs) -> np.ndarray | None:
    """Return a number from 0 for each series: that of its group.

    Raises
    ------
    ShapeError, DataError
        If there is not one group for each series.
    """
    if groups is None:
        return None
    given = np.asarray(groups)
    if given.shape != (inputs.N,):
        raise ShapeError(
            f"groups must have one entry for each of the {inputs.N} series, got the shape "
            f"{given.shape}"
        )
    if inputs.shards is not None:
        raise DataError("groups and sharded=True: each rank knows the groups of its series alone")
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def _loop_after(earlier: SeriesEstimator | None, step: WindowStep, ranks: RankGroup) -> Loop:
    """Return a loop that counts epochs and steps on from an earlier fit."""
    loop = Loop(step, ranks)
    if earlier is not None and hasattr(earlier, "history_"):
        loop.epoch = earlier.n_iter_
        loop.history = list(earlier.history_)
        loop.step = earlier.fitted_parts_.n_steps
    return loop


def _attach_epoch_hooks(training: Training) -> None:
    """Attach validation, learning-rate schedule and early stopping, where the spec has them."""
    data = training.data
    spec = data.spec
    batches = training.batches
    model = training.step.model
    hooks = training.loop.hooks
    ranks = training.loop.ranks
    if data.validation is not None:
        held_out = TensorBatches(
            data.validation, batches.dtype, batches.device, rank=ranks.rank, size=ranks.size
        )
        hooks.attach(Validation(model, data.loss, held_out, ranks, spec.precision))
    if training.scheduler is not None:
        has_plan = spec.schedule_follows_length or spec.max_updates is not None
        assert spec.schedule is not None
        hooks.attach(
            Schedule(
                training.scheduler,
                spec.schedule[0],
                lambda: training.step.n_updates,
                spec.accumulate,
                training.n_updates if has_plan else None,
            )
        )
    if spec.max_updates is not None and not is_closed_form(model):
        hooks.attach(MostUpdates(spec.max_updates, lambda: training.step.n_updates))
    if spec.patience is not None:
        hooks.attach(EarlyStopping(model, spec.patience))


def _attach_progress(training: Training, progress: ProgressBar | EpochLog) -> None:
    """Attach the report of progress, which first says how large the minibatches are."""
    windows = training.data.windows
    hooks = training.loop.hooks
    hooks.attach(progress)
    choice = training.data.settings.choice
    if choice is not None and not training.resume:
        chosen = choice.describe(training.n_updates)
        hooks.add("start", lambda loop: progress.say(chosen), name="choice")
    if training.size.resumed or not training.loop.ranks.is_single:
        line = training.size.describe(windows.segments, sharded=windows.shards is not None)
        hooks.add("start", lambda loop: progress.say_once(line), name="minibatch size")


def _new_model(
    data: FitData, ranks: RankGroup, rng: np.random.Generator
) -> tuple[nn.Module, Optimizer]:
    settings = data.settings
    x = data.inputs.series
    # initial weights come from random_state: the global generators do not move
    with seeded(int(rng.integers(2**63))):
        model = build_model(
            settings.model,
            feature_counts(x),
            data.n_outputs,
            float_dtype(x, data.spec.precision),
            device_of_rank(settings.device, ranks),
        )
        return model, build_optimizer(settings.opt, settings.model, model)


def _earlier_model(est: SeriesEstimator, settings: Settings) -> tuple[nn.Module, Optimizer]:
    # an estimator loaded with another ``opt``, or without code for it, has no optimizer
    if hasattr(est, "optimizer_"):
        return est.model_, est.optimizer_
    return est.model_, build_optimizer(settings.opt, settings.model, est.model_)


def device_of_rank(device: object, ranks: RankGroup) -> object:
    """Return the device of this rank; ``device="cuda"`` spreads ranks over the machine's GPUs."""
    if ranks.is_single or device is None or str(device) != "cuda" or torch.cuda.device_count() < 2:
        return device
    return f"cuda:{local_rank() % torch.cuda.device_count()}"


def float_dtype(arrays: tuple[SeriesArray, ...], precision: str = "float32") -> torch.dtype | None:
    """Return the floating type of a model for these data.

    None if all are integers: the model then keeps its type.
    """
    if precision != "float32":
        return torch.float32  # lower precisions are of computations; parameters stay float32
    names = {a.dtype.newbyteorder("=").name for a in arrays if a.kind == "float"}
    if not names:
        return None
    return torch.float32 if names <= SHORT_FLOATS else torch.float64


def _scheduler_after(earlier: SeriesEstimator | None, data: FitData, optimizer: Optimizer) -> Any:
    """Return the schedule of the earlier fit, or a new one."""
    if earlier is not None:
        if read_spec(data.settings.spec).schedule_follows_length:
            # its rates have followed the length of a fit, to 0
            for group in optimizer.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
        if earlier.fitted_parts_.scheduler is not None:
            return earlier.fitted_parts_.scheduler
    return _new_scheduler(data.spec, optimizer)


def _new_scheduler(spec: Spec, optimizer: Optimizer) -> Any:
    if spec.schedule is None:
        return None
    every, make = spec.schedule
    scheduler = make_scheduler(make, optimizer, "spec.lr_schedule")
    if isinstance(scheduler, ReduceLROnPlateau) and every == "step":
        raise SpecError(
            "ReduceLROnPlateau goes by the loss of whole epochs: give it alone, without 'step', as "
            "spec.lr_schedule"
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
    windows = data.windows
    parameter = next(model.parameters())
    steps = first_steps(windows, parameter)
    try:
        with seeded(0):  # restores the generators; the lock keeps other fits out
            takes_windows(model, steps)
            if not isinstance(data.loss, SeqLoss):  # which compares shapes at each window
                require_step_outputs(model, steps)
    except ShapeError as error:
        if isinstance(data.loss, SeqLoss):
            raise
        warn(f"predict will fail: {error}")
    if takes_gaps(model):
        windows.gap_value = math.nan
        if data.validation is not None:
            data.validation.gap_value = math.nan
    _adapt_windows(data, model)
    return TensorBatches(
        windows, parameter.dtype, parameter.device, rng, rank=ranks.rank, size=ranks.size
    )


def _adapt_windows(data: FitData, model: nn.Module) -> None:
    """Adapt overlap and length of the windows to the model.

    A model without state sees earlier steps at the start of each window. Validation with a mean
    over steps takes longer windows than training where it can, since it stores nothing for
    gradients.
    """
    validation = data.validation
    # set by takes_windows, which has tried the model out
    if cached_window_mode(model) == "windows" and not recurrent_layers(model):
        data.windows.overlap_into_burn_in = True
        if validation is not None:
            validation.overlap_into_burn_in = True
            validation.overlap = data.spec.overlap
    elif validation is not None and isinstance(data.loss, SeqLoss) and data.loss.is_mean:
        together = min(len(validation.segments), validation.batchsize)
        # a model that says so itself may want windows of the length that it was trained on
        if not hasattr(model, "takes_windows"):
            validation.seqsize = max(validation.seqsize, VALIDATION_STEPS // together)


# -- run ---------------------------------------------------------------------------------------


def has_checkpointers(callbacks: list[Any]) -> bool:
    """Return whether a fit may continue from a checkpoint."""
    return any(isinstance(callback, Checkpointer) for callback in callbacks)


def run(est: SeriesEstimator, training: Training) -> None:
    """Train, and keep the attributes of the estimator up to date: run the epochs that are left,
    after those of a checkpoint.
    """
    loop = training.loop
    model = training.step.model
    settings = training.data.settings
    epochs = training.epochs
    device = training.batches.device
    before = EstimatorBefore(est, training)
    attributes = FittedAttributes(est, training)
    callbacks = [*as_callbacks(settings.callbacks), *hooks_of(est)]
    has_checkpoints = has_checkpointers(callbacks)
    if has_checkpoints:
        callbacks = with_checkpoints(callbacks, training, est)
    for callback in callbacks:
        loop.hooks.attach(callback)
    # nothing of the estimator has changed so far
    attributes.begin()
    with _restoring(training, before, attributes):
        # each rank draws other numbers for dropout, from the same generator
        seed = (int(training.rng.integers(2**63)) + loop.ranks.rank) % 2**63
        with seeded(seed, [device] if device.type == "cuda" else []):
            reset(model.train())
            is_restored = has_checkpoints and _restore(training, callbacks, attributes)
            if is_closed_form(model):
                say_stage(settings.verbose, loop.ranks, "fitting in closed form")
                loop.run_epochs([training.batches], 1)
                return
            if training.task is not None and not (training.resume or is_restored):
                if any(closed_form_parts(model)):
                    line = "fitting the linear model, then the network"
                    say_stage(settings.verbose, loop.ranks, line)
                fit_fixed_parts(model, training.batches, loop.ranks, training.task)
            if settings.compile is False:
                loop.run_epochs(training.batches, epochs)
                return
            with compiled(model, compile_arguments(settings.compile)):
                loop.run_epochs(training.batches, epochs)


def _restore(training: Training, callbacks: list[Any], attributes: FittedAttributes) -> bool:
    """Restore the newest checkpoint, if there is one, and say where the fit goes on."""
    loop = training.loop
    if training.resume or not restore_newest(callbacks, loop.ranks):
        return False
    attributes.publish(loop.history, loop.step - loop.epoch_step)
    epochs = training.epochs
    n_done = loop.epoch - loop.start_epoch
    if n_done < epochs:
        line = f"a checkpoint: continues at step {loop.step}, in epoch {loop.epoch + 1}"
        say_stage(training.data.settings.verbose, loop.ranks, line)
    if n_done > epochs:
        warn(
            f"the checkpoint is of {n_done} epochs, more than epochs={epochs}: this is the "
            "model after all of them; give the Checkpointer another folder to train a "
            "shorter time"
        )
    return True


@contextmanager
def _restoring(
    training: Training, before: EstimatorBefore, attributes: FittedAttributes
) -> Iterator[None]:
    """Restore the estimator after an error if there was no update, or, unless it is an interrupt,
    if this fit replaces another.
    """
    step = training.step
    ranks = training.loop.ranks
    try:
        yield
    except BaseException as error:
        step.discard()
        # an error may have left one rank half updated
        step.n_updates = ranks.resynchronize(step.model, training.optimizer, step.n_updates)
        replaces = before.was_fitted and not training.resume
        if step.n_updates == 0 or (replaces and not ranks.is_interrupt(error)):
            before.restore()
        raise
    finally:
        # also after an interrupt, so that predict begins with the zero state
        reset(step.model)
        step.model.eval()
        if attributes.has_begun() and not training.resume:
            # training used a copy: the user's own generator advances like it
            make_generator(training.data.settings.random_state)


class EstimatorBefore:
    """What a fit changes of an estimator, its model and optimizer, to put back after an error."""

    def __init__(self, est: SeriesEstimator, training: Training) -> None:
        self.est = est
        self.attributes = dict(vars(est))
        self.model = training.step.model
        self.buffers = [b.clone() for b in self.model.buffers()]
        self.optimizer = training.optimizer
        self.groups = training.groups

    @property
    def was_fitted(self) -> bool:
        return "model_" in self.attributes

    def restore(self) -> None:
        """Put back attributes, buffers and parameter groups.

        Parameters need no copy: without an update they are as before, and the model of a fit that
        replaces another is a new one.
        """
        vars(self.est).clear()
        vars(self.est).update(self.attributes)
        for buffer, value in zip(self.model.buffers(), self.buffers, strict=True):
            buffer.copy_(value)
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(values)


class FittedAttributes:
    """Sets the fitted attributes of an estimator when training begins and after each epoch."""

    def __init__(self, est: SeriesEstimator, training: Training) -> None:
        self.est = est
        self.training = training
        loop = training.loop
        loop.shared_data = {
            "estimator": est,
            "model": training.step.model,
            "optimizer": training.optimizer,
        }
        # first of all hooks: the others may look at the record of the epoch
        loop.hooks.add(
            "epoch", self._finish_epoch, name="bookkeeping", priority=-math.inf, collective=True
        )
        loop.hooks.add("epoch", self._publish_epoch, name="fitted attributes", priority=-5)

    def begin(self) -> None:
        """Set the model, and the attributes that depend on the data."""
        est = self.est
        training = self.training
        inputs = training.data.inputs
        codec = training.data.codec
        est.model_ = training.step.model
        est.optimizer_ = training.optimizer
        layout = est.fitted_parts_.layout if training.resume else inputs.layout
        n_steps = est.fitted_parts_.n_steps if training.resume else 0
        lengths = inputs.all_series().length
        longest = est.fitted_parts_.longest if training.resume else int(lengths.max())
        est.fitted_parts_ = FittedParts(
            layout,
            codec,
            training.rng,
            # one that follows the length of the fit ends with it
            scheduler=None if training.data.spec.schedule_follows_length else training.scheduler,
            n_steps=n_steps,
            choice=training.data.settings.choice,
            data=shapes_and_digests(training.data),
            longest=longest,
        )
        if training.resume:
            return
        est.n_features_in_ = inputs.columns
        est.n_outputs_ = training.data.n_outputs
        vars(est).pop("feature_names_in_", None)  # of an earlier fit, on named features
        if inputs.names is not None:
            est.feature_names_in_ = inputs.names
        if codec.classes is not None:
            est.classes_ = codec.classes
        n_parameters = sum(p.numel() for p in est.model_.parameters())
        est.grad_ = torch.zeros(n_parameters, dtype=training.batches.dtype)
        self.publish([], 0)

    def has_begun(self) -> bool:
        """Return whether the estimator has the attributes of this fit, not undone by an error."""
        parts = vars(self.est).get("fitted_parts_")
        return isinstance(parts, FittedParts) and parts.rng is self.training.rng

    def publish(self, history: list[dict[str, Any]], n_steps: int) -> None:
        """Set the losses, history and counts after these epochs."""
        est = self.est
        loss = history[-1]["mean_batch_loss"] if history else None
        est.loss_ = math.nan if loss is None else loss
        est.loss_curve_ = [record["loss"] for record in history]
        est.validation_loss_curve_ = [
            record["validation_loss"] for record in history if "validation_loss" in record
        ]
        est.history_ = list(history)
        est.n_iter_ = len(history)
        est.fitted_parts_ = replace(est.fitted_parts_, n_steps=n_steps)

    def _finish_epoch(self, loop: Loop) -> None:
        step = self.training.step
        step.flush()  # with accumulate, an update may still wait for minibatches
        if step.n_updates == 0 and not loop.stopped:
            raise DataError("nothing to train on: every step of y that carries weight is NaN")
        loop.record["folds"] = self.training.data.windows.segments.folds
        self._gradient = step.mean_gradient()
        step.start_epoch()

    def _publish_epoch(self, loop: Loop) -> None:
        self.est.grad_ = self._gradient
        self.publish([*loop.history, loop.record], loop.step)
