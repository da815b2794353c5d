"""Fit an estimator: read the data, build model, optimizer and loop, then train."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.digest import shapes_and_digests
from fluxutils_py.errors import DataError, ShapeError, SpecError, warn
from fluxutils_py.estimator.building import (
    build_model,
    build_optimizer,
    make_generator,
    require_gradients,
)
from fluxutils_py.estimator.fit_data import (
    FitData,
    ReadData,
    describe_minibatches,
    read_data,
    spec_of_call,
    whole_batchsize,
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
from fluxutils_py.estimator.spec import Settings, Spec, read_spec
from fluxutils_py.inputs.inputs import InputSchema, feature_counts
from fluxutils_py.inputs.sharded_data import sharded_reader
from fluxutils_py.inputs.targets import SeriesReader
from fluxutils_py.nn.compiling import compile_arguments, compiled
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.model_windows import (
    cached_window_mode,
    require_step_outputs,
    takes_gaps,
    takes_windows,
)
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.launcher import local_rank
from fluxutils_py.parallel.rank_group import ranks_of_call
from fluxutils_py.reporting.progress import EpochLog, ProgressBar, progress_hook, say_stage
from fluxutils_py.sklearn_callbacks import ATTRIBUTE, begin_fit, hooks_of
from fluxutils_py.training import Checkpointer, Loop
from fluxutils_py.training.early_stopping import EarlyStopping, Schedule
from fluxutils_py.training.hooks import as_callbacks
from fluxutils_py.training.make_optimizer import make_scheduler
from fluxutils_py.training.minibatch import TensorBatches, first_steps
from fluxutils_py.training.window_step import WindowStep, differentiate_windows, evaluate_windows

SHORT_FLOATS = {"float16", "float32", "bool"}  # data for which parameters are float32
VALIDATION_STEPS = 1 << 14  # series times steps of a validation window


@dataclass(frozen=True)
class BegunFit:
    """A fit whose data have been read.

    Attributes
    ----------
    est : Estimator
    settings : Settings
    data : ReadData
    ranks : RankGroup
    rng : numpy.random.Generator
        Source of all randomness, equal on all ranks.
    seed : int
        Of held-out validation data, equal on all ranks.
    saved : mapping or None
        The size of the minibatches of a checkpoint that the fit continues from.
    earlier : Estimator or None
        The estimator, if this fit continues its last one.
    epochs : int or None
        Of this call.
    is_first : bool
        Whether no later call is announced that would go on from it.
    task : callable or None
        Begins the task of scikit-learn's callbacks, and returns what ends it.
    """

    est: SeriesEstimator
    settings: Settings
    data: ReadData
    ranks: RankGroup
    rng: np.random.Generator
    seed: int
    saved: Mapping[str, Any] | None
    earlier: SeriesEstimator | None
    epochs: int | None
    is_first: bool
    task: Callable[..., Callable[[], None]] | None

    def cut(self, settings: Settings) -> FitData:
        """Cut the data into the windows of a fit, and of its validation, if there is any."""
        data = self.data
        spec = spec_of_call(settings, self.epochs, data.is_fit)
        batchsize = whole_batchsize(settings, self.ranks.size, self.saved)
        split = None
        if settings.early_stopping and data.is_fit and data.validation_data is None:
            split = data.split(settings.validation_fraction, self.seed)
        return data.cut(settings, spec, batchsize, split)


@contextmanager
def begun_fit(
    est: SeriesEstimator,
    x: object,
    y: object,
    sample_weight: object = None,
    lengths: object = None,
    starts: object = None,
    sharded: bool = False,
    *,
    validation_data: object = None,
    epochs: int | None = None,
    classes: object = None,
    resume: bool = False,
    is_fit: bool = False,
) -> Iterator[BegunFit]:
    """Read the data of a fit, alone or together with the ranks of the estimator's ``comm``.

    The estimator does not change. Parameters are those of ``Estimator.fit``, and:

    Parameters
    ----------
    classes : array-like, optional
        All labels, where ``y`` may lack some; see ``EstimatorClassifier.partial_fit``.
    resume : bool
        Whether to continue with the estimator's model and optimizer, if it has any.
    is_fit : bool
        Whether this is a call of ``fit``, whose length the user set: it holds out validation data
        if the settings ask for it, and warns of few updates.
    """
    settings = est.resolved_params()
    earlier = est if resume and hasattr(est, "model_") else None
    parts = None if earlier is None else earlier.fitted_parts_
    has_callbacks = bool(vars(est).get(ATTRIBUTE))
    with ranks_of_call(settings.comm, "fit", sharded) as ranks:
        callbacks = as_callbacks(settings.callbacks)
        if not ranks.is_single:
            hooks = [*callbacks, *hooks_of(est)]
            with_hooks = replace(settings, callbacks=hooks)
            ranks.require_equal(course_of_fit(with_hooks, earlier is not None, epochs))
        require_gradients("fit")
        # copied, so that the user's generator advances only once training has begun
        rng = make_generator(copy.deepcopy(settings.random_state))
        seed = int(make_generator(copy.deepcopy(settings.random_state)).integers(2**31))
        if parts is not None:
            rng = copy.deepcopy(parts.rng)
        rng, seed = ranks.allgather((rng, seed))[0]
        # before data are read, as it decides how they are cut
        saved = None
        if earlier is None and has_checkpointers(callbacks):
            saved = saved_minibatch_size(callbacks, ranks)
        spec_of_call(settings, epochs, is_fit)  # raises its errors before anything is read
        schema = InputSchema(type(est).__name__, settings.n_timesteps)
        if parts is not None:
            schema = input_schema(est, settings, parts)
        data = read_data(
            settings,
            schema,
            x,
            y,
            sample_weight,
            lengths,
            starts,
            reader=sharded_reader(ranks) if sharded else SeriesReader(),
            validation_data=validation_data,
            classes=classes,
            earlier=None if parts is None else parts.codec,
            is_fit=is_fit,
        )
        task = None
        if has_callbacks and ranks.rank == 0:
            given = {"sample_weight": sample_weight, "lengths": lengths, "starts": starts}
            metadata = {name: value for name, value in given.items() if value is not None}
            task = partial(begin_fit, est, x, y, metadata)
        is_first = is_fit and not resume
        yield BegunFit(
            est, settings, data, ranks, rng, seed, saved, earlier, epochs, is_first, task
        )


def run_fit(est: SeriesEstimator, *series: Any, groups: object = None, **call: Any) -> None:
    """Fit an estimator; the arguments are those of :func:`begun_fit`."""
    if groups is not None:
        raise no_groups()
    with begun_fit(est, *series, **call) as begun:
        data = begun.cut(begun.settings)
        train(begun, FitLoop(data, begun.ranks, begun.rng, begun.earlier))


def no_groups() -> DataError:
    """Return the error for ``groups`` where no penalty is chosen."""
    return DataError(
        "groups are left out together when the penalty of a closed form is chosen, and this "
        "model has none: leave groups out, or set cell='kernels' or 'linear'"
    )


def train(begun: BegunFit, loop: FitLoop) -> None:
    """Train, and keep the attributes of the estimator up to date: run the epochs that are left,
    after those of a checkpoint.

    The estimator does not change before loop begins. A later error restores it if no update was
    made, or, unless it is an interrupt, if this fit replaces an earlier one.
    """
    est = begun.est
    ranks = begun.ranks
    callbacks = as_callbacks(loop.data.settings.callbacks)
    # now, when a model exists that tells what it sees; the first fit has said it
    if ranks.rank == 0 and not loop.resume:
        loop.warn(is_first=begun.is_first)
    if not ranks.is_single:
        require_same_fit(loop)
    end_task = None
    if begun.task is not None:
        fitted = partial(_fitted_now, est, alone=not ranks.is_single)
        end_task = begun.task(n_epochs=loop.epochs, fitted=fitted)
    if vars(est).get(ATTRIBUTE):
        callbacks = [*callbacks, *hooks_of(est)]
    # a partial_fit may be of data unlike those before
    target_sums = watch_targets(loop) if begun.data.is_fit else []
    with _restoring(est, loop):
        loop.estimator = est
        loop.shared_data = {
            "estimator": est,
            "model": loop.model,
            "optimizer": loop.optimizer,
        }
        has_checkpoints = has_checkpointers(callbacks)
        if has_checkpoints:
            callbacks = with_checkpoints(callbacks, loop, est)
        for callback in callbacks:
            loop.hooks.attach(callback)
        begin_attributes(est, loop)
        with loop.surroundings():
            is_restored = has_checkpoints and _restore(est, loop, callbacks)
            if not (loop.resume or is_restored):
                loop.prepare()
            loop.run_epochs(loop.passes, loop.epochs)
    if end_task is not None:
        end_task()
    warn_nothing_learnt(loop, target_sums)


def has_checkpointers(callbacks: list[Any]) -> bool:
    """Return whether a fit may continue from a checkpoint."""
    return any(isinstance(callback, Checkpointer) for callback in callbacks)


class FitLoop(Loop):
    """The loop of a fit that is ready to run.

    Parameters
    ----------
    data : FitData
    ranks : RankGroup
    rng : numpy.random.Generator
        Source of all randomness, equal on all ranks.
    earlier : Estimator, optional
        The fitted estimator that this fit continues; its attributes are only read.

    Attributes
    ----------
    data : FitData
        Its windows are cut for the model.
    rng : numpy.random.Generator
    resume : bool
        Whether model and optimizer come from an earlier fit.
    groups : list of dict
        Parameter groups of the optimizer before a new scheduler changes them.
    scheduler : learning-rate scheduler of torch, or None
    windows : TensorBatches
        This rank's part of the windows.
    passes : iterable
        What an epoch runs over: the windows, or a list of them that is one step.
    validation : TensorBatches or None
    epochs, n_windows, n_updates : int
        Epochs, windows with a loss in an epoch, and updates in all, if every window has a live
        step.
    estimator : Estimator or None
        Gets its attributes at the end of each epoch.
    """

    model: nn.Module

    def __init__(
        self,
        data: FitData,
        ranks: RankGroup,
        rng: np.random.Generator,
        earlier: SeriesEstimator | None = None,
    ) -> None:
        settings = data.settings
        spec = data.spec
        progress = None if settings.verbose is False else progress_hook(settings.verbose)
        self.rng = rng
        self.resume = earlier is not None
        self.compile = None
        if settings.compile is not False:
            self.compile = compile_arguments(settings.compile)
        if self.compile is not None and spec.gradient == "exact":
            raise SpecError(
                f"compile={settings.compile!r} and spec.gradient='exact': compiled layers carry no "
                "sensitivities; leave compile out, or set gradient='truncated'"
            )
        if earlier is None:
            self.model, self.optimizer = _new_model(data, ranks, rng)
        else:
            self.model, self.optimizer = _earlier_model(earlier, settings)
        self.data = cut_for_model(data, self.model)
        self.windows = self.on_device(self.data.windows, ranks, rng if spec.shuffle else None)
        self.passes: Iterable[Any] = self.windows
        # copied before a scheduler is made, which changes them: a failed fit puts them back
        self.groups = [dict(group) for group in self.optimizer.param_groups]
        self.scheduler = _scheduler_after(earlier, data, self.optimizer)
        super().__init__(self.new_step(ranks), ranks)
        if earlier is not None and hasattr(earlier, "history_"):
            self.epoch = earlier.n_iter_
            self.history = list(earlier.history_)
            self.step = earlier.fitted_parts_.n_steps
        self.n_windows = sum(1 for _ in self.data.windows.indices_with_loss())
        per_epoch = -(-self.n_windows // spec.accumulate)
        self.epochs = spec.planned_epochs(per_epoch)
        self.n_updates = self.epochs * per_epoch
        if spec.max_updates is not None:
            self.n_updates = min(self.n_updates, spec.max_updates)
        self.estimator: SeriesEstimator | None = None
        self.validation: TensorBatches | None = None
        if self.data.validation is not None:
            self.validation = self.on_device(self.data.validation, ranks)
        self.schedule = self._new_schedule()
        self.stopping = None
        if spec.patience is not None:
            self.stopping = EarlyStopping(self.model, spec.patience)
        for part in (self.schedule, self.stopping):
            if part is not None:
                self.hooks.register_state(part.name, part)
        if progress is not None and ranks.rank == 0:
            self._attach_progress(progress)

    def new_step(self, ranks: RankGroup) -> Any:
        """Return the step of the loop."""
        spec = self.data.spec
        return WindowStep(
            self.model,
            self.data.loss,
            self.optimizer,
            clip=None if spec.clip is None else float(spec.clip),
            accumulate=spec.accumulate,
            precision=spec.precision,
            gradient=spec.gradient,
            comm=ranks,
        )

    def on_device(
        self, windows: SequenceWindows, ranks: RankGroup, rng: np.random.Generator | None = None
    ) -> TensorBatches:
        """Return this rank's part of windows as tensors for the model."""
        parameter = next(self.model.parameters())
        return TensorBatches(
            windows, parameter.dtype, parameter.device, rng, rank=ranks.rank, size=ranks.size
        )

    def _new_schedule(self) -> Schedule | None:
        spec = self.data.spec
        if self.scheduler is None:
            return None
        assert spec.schedule is not None
        has_plan = spec.schedule_follows_length or spec.max_updates is not None
        return Schedule(
            self.scheduler,
            spec.schedule[0],
            lambda: self.trainer.n_updates,
            spec.accumulate,
            self.n_updates if has_plan else None,
        )

    def _attach_progress(self, progress: ProgressBar | EpochLog) -> None:
        """Attach the report of progress, which first says how large the minibatches are."""
        self.hooks.attach(progress)
        line = describe_minibatches(self.data.settings, self.data.windows, self.ranks.size)
        if line is not None:
            self.hooks.add("start", lambda loop: progress.say_once(line), name="minibatch size")

    # -- a run: each part before the hooks of users ------------------------------------------------

    def warn(self, *, is_first: bool) -> None:
        """Warn about data that the model is likely to learn the wrong thing from, and of few
        updates, if the fit ``is_first``.
        """
        warn_single_steps(self.data.inputs, self.model)
        warn_one_class(self.data.codec.classes)
        if self.data.spec.gradient == "exact":
            warn_truncated_layers(self.model)
        if not takes_gaps(self.model):
            watch_scales(self.windows, self.model)
        if is_first:
            warn_few_updates(self)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Seed torch, compile the model if asked for, and let it begin from the zero state."""
        device = self.windows.device
        # each rank draws other numbers for dropout, from the same generator
        seed = (int(self.rng.integers(2**63)) + self.ranks.rank) % 2**63
        compiling = nullcontext() if self.compile is None else compiled(self.model, self.compile)
        with seeded(seed, [device] if device.type == "cuda" else []), compiling:
            reset(self.model.train())
            yield

    def prepare(self) -> None:
        """Set what a new model learns before the first epoch."""

    def _run_begins(self) -> None:
        if self.schedule is not None:
            self.schedule.on_start(self)
        if self.stopping is not None:
            self.stopping.on_start(self)

    def _step_ends(self) -> None:
        if self.schedule is not None:
            self.schedule.on_step(self)
        most = self.data.spec.max_updates
        if most is not None and self.trainer.n_updates >= most:
            self.stop()

    def _epoch_ends(self) -> None:
        step = self.trainer
        step.flush()  # with accumulate, an update may still wait for minibatches
        if step.n_updates == 0 and not self.stopped:
            raise DataError("nothing to train on: every step of y that carries weight is NaN")
        self.record["folds"] = self.data.windows.segments.folds
        gradient = step.mean_gradient()
        step.start_epoch()
        if self.validation is not None:
            self.record["validation_loss"] = evaluate_windows(
                self.model, self.data.loss, self.validation, self.ranks, self.data.spec.precision
            )
        if self.schedule is not None:
            self.schedule.on_epoch(self)
        if self.stopping is not None:
            self.stopping.on_epoch(self)
        if self.estimator is not None:
            self.estimator.grad_ = gradient
            publish(self.estimator, [*self.history, self.record], self.step)

    def _run_ends(self) -> None:
        if self.stopping is not None:
            self.stopping.on_end(self)


def cut_for_model(data: FitData, model: nn.Module) -> FitData:
    """Return the data with new windows: all that a model decides about them is decided here.

    First runs the model on a few steps, to find out whether it takes whole windows, and whether it
    runs at all. A custom loss may call the model differently; then a failure is only a warning that
    ``predict`` will fail.

    A model without state sees earlier steps at the start of each window. Validation with a mean
    over steps takes longer windows than training where it can, since it stores nothing for
    gradients.
    """
    steps = first_steps(data.windows, next(model.parameters()))
    try:
        with seeded(0):  # restores the generators; the lock keeps other fits out
            takes_windows(model, steps)
            if not isinstance(data.loss, SeqLoss):  # which compares shapes at each window
                require_step_outputs(model, steps)
    except ShapeError as error:
        if isinstance(data.loss, SeqLoss):
            raise
        warn(f"predict will fail: {error}")
    of_both: dict[str, Any] = {}
    of_validation: dict[str, Any] = {}
    if takes_gaps(model):
        of_both["gap_value"] = math.nan
    validation = data.validation
    # known from the run above
    if cached_window_mode(model) == "windows" and not recurrent_layers(model):
        of_both["overlap_into_burn_in"] = True
        of_validation["overlap"] = data.spec.overlap
    elif validation is not None and isinstance(data.loss, SeqLoss) and data.loss.is_mean:
        together = min(len(validation.segments), validation.batchsize)
        # a model that says so itself may want windows of the length that it was trained on
        if not hasattr(model, "takes_windows"):
            of_validation["seqsize"] = max(validation.seqsize, VALIDATION_STEPS // together)
    if validation is not None:
        validation = validation.changed(**of_both, **of_validation)
    return replace(data, windows=data.windows.changed(**of_both), validation=validation)


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


# -- the estimator --------------------------------------------------------------------------------


def begin_attributes(est: SeriesEstimator, loop: FitLoop) -> None:
    """Set the model, and the attributes that depend on the data."""
    data = loop.data
    inputs = data.inputs
    codec = data.codec
    layout = inputs.layout
    n_steps = 0
    longest = int(inputs.all_series().length.max())
    if loop.resume:
        layout = est.fitted_parts_.layout
        n_steps = est.fitted_parts_.n_steps
        longest = est.fitted_parts_.longest
    est.model_ = loop.model
    est.optimizer_ = loop.optimizer
    est.fitted_parts_ = FittedParts(
        layout,
        codec,
        loop.rng,
        # one that follows the length of the fit ends with it
        scheduler=None if data.spec.schedule_follows_length else loop.scheduler,
        n_steps=n_steps,
        choice=data.settings.choice,
        data=shapes_and_digests(data.windows, data.validation),
        longest=longest,
    )
    if loop.resume:
        return
    est.n_features_in_ = inputs.columns
    est.n_outputs_ = data.n_outputs
    vars(est).pop("feature_names_in_", None)  # of an earlier fit, on named features
    if inputs.names is not None:
        est.feature_names_in_ = inputs.names
    if codec.classes is not None:
        est.classes_ = codec.classes
    n_parameters = sum(p.numel() for p in est.model_.parameters())
    est.grad_ = torch.zeros(n_parameters, dtype=loop.windows.dtype)
    publish(est, [], 0)


def publish(est: SeriesEstimator, history: list[dict[str, Any]], n_steps: int) -> None:
    """Set the losses, history and counts after these epochs."""
    loss = history[-1]["mean_batch_loss"] if history else None
    est.loss_ = math.nan if loss is None else loss
    est.loss_curve_ = [record["loss"] for record in history]
    est.validation_loss_curve_ = [
        record["validation_loss"] for record in history if "validation_loss" in record
    ]
    est.history_ = list(history)
    est.n_iter_ = len(history)
    est.fitted_parts_ = replace(est.fitted_parts_, n_steps=n_steps)


def _restore(est: SeriesEstimator, loop: FitLoop, callbacks: list[Any]) -> bool:
    """Restore the newest checkpoint, if there is one, and say where the fit goes on."""
    if loop.resume or not restore_newest(callbacks, loop.ranks):
        return False
    publish(est, loop.history, loop.step - loop.epoch_step)
    epochs = loop.epochs
    n_done = loop.epoch - loop.start_epoch
    if n_done < epochs:
        line = f"a checkpoint: continues at step {loop.step}, in epoch {loop.epoch + 1}"
        say_stage(loop.data.settings.verbose, loop.ranks, line)
    if n_done > epochs:
        warn(
            f"the checkpoint is of {n_done} epochs, more than epochs={epochs}: this is the "
            "model after all of them; give the Checkpointer another folder to train a "
            "shorter time"
        )
    return True


@contextmanager
def _restoring(est: SeriesEstimator, loop: FitLoop) -> Iterator[None]:
    """Restore the estimator after an error if there was no update, or, unless it is an interrupt,
    if this fit replaces another.

    Parameters need no copy: without an update they are as before, and the model of a fit that
    replaces another is a new one.
    """
    attributes = dict(vars(est))
    buffers = [b.clone() for b in loop.model.buffers()]
    step = loop.trainer
    ranks = loop.ranks
    try:
        yield
    except BaseException as error:
        step.discard()
        # an error may have left one rank half updated
        step.n_updates = ranks.resynchronize(loop.model, loop.optimizer, step.n_updates)
        replaces = "model_" in attributes and not loop.resume
        if step.n_updates == 0 or (replaces and not ranks.is_interrupt(error)):
            vars(est).clear()
            vars(est).update(attributes)
            for buffer, value in zip(loop.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            groups = loop.optimizer.param_groups
            for group, values in zip(groups, loop.groups, strict=True):
                group.clear()
                group.update(values)
        raise
    finally:
        # also after an interrupt, so that predict begins with the zero state
        reset(loop.model)
        loop.model.eval()
        parts = vars(est).get("fitted_parts_")
        if parts is not None and parts.rng is loop.rng and not loop.resume:
            # loop used a copy: the user's own generator advances like it
            make_generator(loop.data.settings.random_state)


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


# -- a pass without updates -----------------------------------------------------------------------


def run_evaluate(
    est: SeriesEstimator,
    x: object,
    y: object,
    sample_weight: object = None,
    lengths: object = None,
    starts: object = None,
    sharded: bool = False,
    *,
    gradient: bool = False,
    whole: bool = False,
) -> float | tuple[float, Tensor]:
    """Run an epoch without updates; return its loss, and its mean gradient if asked for.

    ``whole``: walk whole series as ``predict`` does, without folds or burn-in.
    """
    settings = est.resolved_params()
    with ranks_of_call(settings.comm, "evaluate", sharded) as ranks:
        told: dict[str, object] = {"gradient": bool(gradient)}
        if not sharded:  # with shards, the pool of series compares the weights
            told["sample_weight"] = "none" if sample_weight is None else "given"
        ranks.require_equal(told)
        if gradient:
            require_gradients("evaluate(gradient=True)")
        check_is_fitted(est, "model_")
        if whole:
            spec = replace(read_spec(settings.spec), rebatch=False, burn_in=0)
            settings = replace(settings, spec=spec)
        spec = spec_of_call(settings, None, False)
        parts = est.fitted_parts_
        read = read_data(
            settings,
            input_schema(est, settings, parts),
            x,
            y,
            sample_weight,
            lengths,
            starts,
            reader=sharded_reader(ranks) if sharded else SeriesReader(),
            earlier=parts.codec,
        )
        data = read.cut(settings, spec, whole_batchsize(settings, ranks.size))
        if not (sharded or ranks.is_single):
            require_same_inputs(ranks, data.inputs)
        data = cut_for_model(data, est.model_)
        parameter = next(est.model_.parameters())
        batches = TensorBatches(
            data.windows, parameter.dtype, parameter.device, rank=ranks.rank, size=ranks.size
        )
        arguments = (est.model_, data.loss, batches, ranks, data.spec.precision)
        if not gradient:
            return evaluate_windows(*arguments)
        # cuDNN computes no gradients in evaluation mode
        with torch.backends.cudnn.flags(enabled=False):
            return differentiate_windows(*arguments, data.spec.gradient)
