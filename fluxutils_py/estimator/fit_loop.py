"""The loop of a fit: model, optimizer, step, and what ends an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.errors import DataError, ShapeError, SpecError, warn
from fluxutils_py.estimator.building import build_model, build_optimizer
from fluxutils_py.estimator.fit_data import FitData, describe_minibatches
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.estimator.spec import Settings, Spec, read_spec
from fluxutils_py.inputs.inputs import feature_counts
from fluxutils_py.nn.compiling import compile_arguments, compiled
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.model_windows import (
    cached_window_mode,
    gap_value_of,
    takes_windows,
)
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.launcher import local_rank
from fluxutils_py.reporting.progress import EpochLog, ProgressBar, progress_hook, say_once
from fluxutils_py.training import Loop
from fluxutils_py.training.early_stopping import EarlyStopping, Schedule
from fluxutils_py.training.make_optimizer import make_scheduler
from fluxutils_py.training.minibatch import TensorBatches, first_steps
from fluxutils_py.training.window_step import WindowStep, evaluate_windows

SHORT_FLOATS = {"float16", "float32", "bool"}  # data for which parameters are float32
VALIDATION_STEPS = 1 << 14  # series times steps of a validation window


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
    makes_updates = True  # not where all is in closed form

    def __init__(
        self,
        data: FitData,
        ranks: RankGroup,
        rng: np.random.Generator,
        earlier: BaseSeriesEstimator | None = None,
    ) -> None:
        settings = data.settings
        spec = data.spec
        progress = None if settings.verbose is False else progress_hook(settings.verbose)
        self.rng = rng
        self.resume = earlier is not None
        self.compile = _compile_arguments(settings, spec)
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
        self._plan(spec)
        self.estimator: BaseSeriesEstimator | None = None
        self._add_parts(spec)
        if progress is not None and ranks.rank == 0:
            self._attach_progress(progress)

    def _plan(self, spec: Spec) -> None:
        """Set the length of the fit."""
        self.n_windows = sum(1 for _ in self.data.windows.indices_with_loss())
        per_epoch = -(-self.n_windows // spec.accumulate)
        self.epochs = spec.planned_epochs(per_epoch)
        self.n_updates = self.epochs * per_epoch
        if spec.max_updates is not None:
            self.n_updates = min(self.n_updates, spec.max_updates)

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

    def _add_parts(self, spec: Spec) -> None:
        """Add validation, learning-rate schedule and early stopping, where the spec has them."""
        self.validation: TensorBatches | None = None
        if self.data.validation is not None:
            self.validation = self.on_device(self.data.validation, self.ranks)
        self.schedule = self._new_schedule()
        self.stopping = None
        if spec.patience is not None:
            self.stopping = EarlyStopping(self.model, spec.patience)
        for part in (self.schedule, self.stopping):
            if part is not None:
                self.hooks.register_state(part.name, part)

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
            self.hooks.add("start", lambda loop: say_once(progress, line), name="minibatch size")

    # -- a run: each part before the hooks of users ------------------------------------------------

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


def _compile_arguments(settings: Settings, spec: Spec) -> Any:
    """Return the arguments of ``torch.compile``; None: the model is not compiled."""
    if settings.compile is False:
        return None
    arguments = compile_arguments(settings.compile)
    if arguments is not None and spec.gradient == "exact":
        raise SpecError(
            f"compile={settings.compile!r} and spec.gradient='exact': compiled layers carry no "
            "sensitivities; leave compile out, or set gradient='truncated'"
        )
    return arguments


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
    except ShapeError as error:
        if isinstance(data.loss, SeqLoss):
            raise
        warn(f"predict will fail: {error}")
    of_both: dict[str, Any] = {"gap_value": gap_value_of(model)}
    of_validation: dict[str, Any] = {}
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


def _earlier_model(est: BaseSeriesEstimator, settings: Settings) -> tuple[nn.Module, Optimizer]:
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


def _scheduler_after(
    earlier: BaseSeriesEstimator | None, data: FitData, optimizer: Optimizer
) -> Any:
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


def publish(est: BaseSeriesEstimator, history: list[dict[str, Any]], n_steps: int) -> None:
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
