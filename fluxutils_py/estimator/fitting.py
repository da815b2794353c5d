"""One fit: everything checked and built first, then run."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from fluxutils_py.data import SampleWeight, SequenceWindows
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator.arguments import (
    as_callbacks,
    count_classes,
    float_dtype,
    folded,
    supports_output_masks,
    takes_no_weights_message,
)
from fluxutils_py.estimator.building import (
    build_model,
    build_optimizer,
    make_generator,
    require_stored,
    with_python_numbers,
)
from fluxutils_py.estimator.collectives import device_of_rank, require_same_fit
from fluxutils_py.estimator.inputs import Inputs, feature_counts, read_inputs, read_weight
from fluxutils_py.estimator.resuming import restore_newest, with_checkpoints
from fluxutils_py.estimator.single_step_warning import warn_single_step_frame
from fluxutils_py.estimator.spec import check_int, read_spec
from fluxutils_py.estimator.target_scale import TargetScale
from fluxutils_py.estimator.targets import MISSING_LABEL, Targets
from fluxutils_py.estimator.validation_split import Part, hold_out
from fluxutils_py.nn.losses import SeqLoss, as_loss, takes_weights
from fluxutils_py.nn.model_windows import cached_window_mode, takes_windows
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import RankGroup, Threads
from fluxutils_py.parallel.threads import n_threads
from fluxutils_py.reporting.progress import progress_hook
from fluxutils_py.training import EarlyStopping, Loop
from fluxutils_py.training.early_stopping import Schedule, Validation
from fluxutils_py.training.tensor_batches import TensorBatches
from fluxutils_py.training.tensors import to_tensor
from fluxutils_py.training.window_step import WindowStep

VALIDATION = 1 << 14  # rows times steps computed together


def run_fit(est: Any, *args: Any, **kwargs: Any) -> None:
    """Fit, alone or with the ranks that ``est.comm`` means; arguments as for :class:`Fit`."""
    with RankGroup.from_comm(est._resolved_params().comm, "fit") as ranks:
        Fit(est, *args, **kwargs | {"comm": ranks}).run()


class Fit:
    """What one call of ``fit`` or ``partial_fit`` does.

    Construction reads and checks every argument and builds model, optimizer and windows, without changing the
    estimator. :meth:`run` trains. The estimator's attributes are set when training begins. They are put back if
    anything fails before the first update, and after any error in a fit that replaces an earlier one.

    Parameters
    ----------
    est : Estimator
    x, y, sample_weight, validation_data, lengths, starts
        As in ``Estimator.fit``.
    epochs : int or None
        None: as the spec says.
    resume : bool
        Go on with the estimator's model and optimizer, if it has any.
    holds_out : bool
        Whether to keep ``validation_fraction`` of the data for validation.
    comm : RankGroup, optional
        The ranks that fit together. Every one is given the same arguments, and takes its part of each minibatch, which
        is ``batchsize`` series for each of them.
    """

    def __init__(
        self,
        est: Any,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        validation_data: Any = None,
        lengths: Any = None,
        starts: Any = None,
        epochs: int | None = None,
        resume: bool = False,
        holds_out: bool = False,
        comm: RankGroup | None = None,
    ) -> None:
        self.ranks = RankGroup() if comm is None else comm
        self.est, self.settings = est, est._resolved_params()
        self.threads = Threads(n_threads(self.settings.n_jobs))
        require_stored(spec=self.settings.spec, loss=self.settings.loss)
        if self.settings.target not in ("auto", "step", "series"):
            raise ValueError(f"target must be 'auto', 'step' or 'series', got {self.settings.target!r}")
        self.spec = read_spec(self.settings.spec)
        if epochs is not None:
            check_int("epochs", epochs, 1)
            self.spec = dataclasses.replace(self.spec, epochs=int(epochs))
        self.batchsize = int(self.spec.batchsize) * self.ranks.size
        self.loss = as_loss(self.settings.loss)
        self.resume = resume and hasattr(est, "model_")
        self.inputs = read_inputs(x, est, fitted=self.resume, starts=starts, lengths=lengths)
        weight = read_weight(sample_weight, self.inputs)
        self.classes = est._collect_classes(y, self.inputs, weight, self.resume) if y is not None else None
        # what is no class of those that were looked for in these labels has weight 0
        unknown = None if self.resume or getattr(est, "_declared_classes", None) is not None else MISSING_LABEL
        known = est._per_series if self.resume else None
        self.targets = est._read_targets(y, self.inputs, self.classes, unknown, per_series=known)
        self.x, self.y = self.inputs.series, self.targets.series
        self.callbacks, self.progress = as_callbacks(self.settings.callbacks), progress_hook(self.settings.verbose)
        # of copies: the originals move on only when something has been learnt
        self.rng: np.random.Generator = self.ranks.allgather(
            copy.deepcopy(est._rng) if self.resume else make_generator(copy.deepcopy(self.settings.random_state))
        )[0]
        parts: tuple[Part | None, Part | None] = (None, None)
        if holds_out:
            seed = self.ranks.allgather(int(make_generator(copy.deepcopy(self.settings.random_state)).integers(2**31)))[
                0
            ]
            stratify = self.classes is not None
            fraction = self.settings.validation_fraction
            parts = hold_out(self.inputs, self.targets, fraction, seed, stratify)
        self.target_scale = self._find_target_scale(weight, parts[0])
        self.windows = self._cut(self.inputs, self.targets, weight, parts[0])
        self.model, self.optimizer = self._build()
        warn_single_step_frame(x, self.inputs, self.model)
        first = next(self.model.parameters())
        self.dtype, self.device = first.dtype, first.device
        self.batches = self._batches(self.windows, self.rng if self.spec.shuffle else None)
        if parts[1] is not None:
            weight = read_weight(sample_weight, self.inputs)  # is scaled for itself
            held = self._cut(self.inputs, self.targets, weight, parts[1], training=False)
            self.validation: Validation | None = self._validation_on(held)
        else:
            self.validation = self._validation(validation_data)
        self._try_model()
        if cached_window_mode(self.model) == "windows" and not recurrent_layers(self.model):
            self._give_context()
        self.groups = [dict(group) for group in self.optimizer.param_groups]  # a new scheduler changes them
        self.scheduler = self._schedule()
        self.loop = self._hooked_loop()
        require_same_fit(self)

    def run(self) -> None:
        """Train."""
        est = self.est
        before, buffers = dict(vars(est)), [b.clone() for b in self.model.buffers()]
        self._adopt()
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with seeded((int(self.rng.integers(2**63)) + self.ranks.rank) % 2**63, devices), self.threads:
                reset(self.model.train())
                if not self.resume and restore_newest(self.callbacks, self):
                    self._show(self.loop.history, self.loop.step - self.loop.epoch_step)
                self.loop.run_epochs(self.batches, self.spec.epochs)
        except BaseException as error:
            self.step.discard()
            self.step.n_updates = self.ranks.resynchronize(self.model, self.optimizer, self.step.n_updates)
            refit = not self.resume and "model_" in before
            if self.step.n_updates == 0 or (
                refit and not self.ranks.is_interrupt(error)
            ):  # as if it had not been tried
                vars(est).clear()
                vars(est).update(before)
                for b, kept in zip(self.model.buffers(), buffers, strict=True):
                    b.copy_(kept)
                for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
                    group.clear()
                    group.update(settings)
            raise
        finally:
            reset(self.model)
            self.model.eval()
            if vars(est).get("_rng") is self.rng and not self.resume:
                make_generator(self.settings.random_state)  # a generator of the user's moves on, as its copy did

    # -- building ------------------------------------------------------------------------------------

    def _find_target_scale(self, weight: SampleWeight | None, part: Part | None) -> TargetScale | None:
        """The mean and scale of the targets that are trained on; those of the first fit where this one goes on."""
        if self.resume:
            return self.est._target_scale
        if not getattr(self.settings, "scale_target", False) or len(self.y) > 1:
            return None
        whole = self.inputs.whole()
        return TargetScale.of(self.y[0], whole if part is None else part.of(whole), weight)

    def _cut(
        self,
        inputs: Inputs,
        targets: Targets,
        weight: SampleWeight | None,
        part: Part | None = None,
        training: bool = True,
    ) -> SequenceWindows:
        """Windows of these data, or of a part of them."""
        x, y = inputs.series, targets.series
        rows = inputs.segments()
        weighable = takes_weights(self.loss)
        if weight is not None and not weighable:
            raise ValueError(f"sample_weight is given, but {takes_no_weights_message(self.loss)}")
        if inputs.lengths is not None and len(set(inputs.lengths)) > 1 and not weighable:
            raise ValueError(f"the series differ in length, but {takes_no_weights_message(self.loss)}")
        if targets.per_series and not weighable:
            raise ValueError(
                f"y has one target per series, at its last step, but {takes_no_weights_message(self.loss)}"
            )
        self._mark_missing(targets)
        weight = self.est._apply_class_weight(weight, targets, self.classes, rows)
        if part is not None:
            rows = part.of(rows)
            rows = rows[rows.length > 0]
        if weight is not None and inputs.form == "rows":  # as if rows of weight 0 were not there: minibatches too
            rows = weight.drop_zero_weight(rows) or rows
        unfolded = rows
        if training and self.spec.rebatch and not targets.per_series:
            rows = folded(rows, self.spec, self.batchsize)
        if self.spec.burn_in >= rows.max_length:
            where = " after folding (rebatch=True)" if rows is not unfolded else ""
            raise ValueError(
                f"burn_in of {self.spec.burn_in} leaves nothing of series of {rows.max_length} steps{where}"
            )
        mask_per_output = supports_output_masks(self.loss, targets)
        if weight is not None:
            weight.normalize(rows, y, burn_in=int(self.spec.burn_in), mask_per_output=mask_per_output)
        windows = SequenceWindows(
            x,
            y if self.target_scale is None else tuple(self.target_scale.scaled(s) for s in y),
            weight,
            batchsize=self.batchsize,
            seqsize=self._seqsize(rows, training),
            overlap=int(self.spec.overlap) if training else 0,
            burn_in=int(self.spec.burn_in),
            segments=rows,
            equal_lengths=not weighable,
            mask_per_output=mask_per_output,
        )
        windows.check()
        if windows.has_missing_targets and not weighable:
            raise ValueError(f"y has NaN (steps without a target), but {takes_no_weights_message(self.loss)}")
        return windows

    def _mark_missing(self, targets: Targets) -> None:
        """Say which label stands for none, where targets are labels."""
        ours = self.classes is not None or targets.per_series  # where there is none, we put MISSING_LABEL
        ignored = self.loss.ignore_index if isinstance(self.loss, SeqLoss) and self.loss.classes else None
        if ours and ignored not in (None, MISSING_LABEL):
            raise ValueError(
                f"ignore_index={ignored} of the loss: steps without a label are marked by {MISSING_LABEL} here; "
                "leave it out"
            )
        for s in targets.series:
            if s.kind == "int":
                s.missing_label = MISSING_LABEL if ours else ignored

    def _seqsize(self, rows: Segments, training: bool) -> int:
        """Steps per window. Validation of a mean over steps may take longer ones: nothing is kept for gradients."""
        asked = int(self.spec.seqsize or rows.max_length)
        plain_mean = isinstance(self.loss, SeqLoss) and self.loss.is_mean
        if training or not plain_mean or hasattr(self.model, "takes_windows"):
            return asked
        return max(asked, VALIDATION // min(len(rows), self.batchsize))

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        est = self.est
        if self.resume:
            if not hasattr(est, "optimizer_"):
                return est.model_, build_optimizer(self.settings.opt, self.settings.model, est.model_)
            return est.model_, est.optimizer_
        n_in = feature_counts(self.x)
        dtype = float_dtype(self.x)
        with seeded(int(self.rng.integers(2**63))):
            device = device_of_rank(self.settings.device, self.ranks)
            model = build_model(self.settings.model, n_in, self._n_out(), dtype, device)
            optimizer = build_optimizer(self.settings.opt, self.settings.model, model)
        return model, optimizer

    def _n_out(self) -> Any:
        """How many outputs the model needs."""
        if self.classes is not None:
            return len(self.classes)
        if isinstance(self.loss, SeqLoss) and self.loss.classes and self.y[0].kind == "int":
            return count_classes(self.y[0])
        return feature_counts(self.y)

    def _schedule(self) -> Any:
        if self.resume and getattr(self.est, "_scheduler", None) is not None:
            return self.est._scheduler
        if self.spec.scheduler is None:
            return None
        scheduler = with_python_numbers(self.spec.scheduler)(self.optimizer)
        if not hasattr(scheduler, "step"):
            raise TypeError(f"spec.scheduler must make a torch learning-rate scheduler, it made {scheduler!r}")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and self.spec.schedule_every == "step":
            raise SpecError("ReduceLROnPlateau goes by the loss of whole epochs; set spec.schedule_every to 'epoch'")
        return scheduler

    def _validation(self, data: Any) -> Validation | None:
        if data is None:
            return None
        if not isinstance(data, tuple | list) or len(data) not in (2, 3, 4, 5):
            raise ValueError(
                "validation_data must be (x, y), (x, y, sample_weight), (x, y, sample_weight, lengths) or "
                "(x, y, sample_weight, lengths, starts)"
            )
        x, y, sample_weight, lengths, starts = (*data, None, None, None)[:5]
        inputs = read_inputs(x, self.est, fitted=False, name="validation x", starts=starts, lengths=lengths)
        known = self.targets.per_series
        targets = self.est._read_targets(y, inputs, self.classes, name="validation y", per_series=known)
        for ours, theirs in ((self.x, inputs.series), (self.y, targets.series)):
            if [s.F for s in ours] != [s.F for s in theirs]:
                raise ShapeError(
                    f"{theirs[0].name} has {feature_counts(theirs)} features, "
                    f"the training data have {feature_counts(ours)}"
                )
        weight = read_weight(sample_weight, inputs)
        return self._validation_on(self._cut(inputs, targets, weight, training=False))

    def _validation_on(self, windows: SequenceWindows) -> Validation:
        return Validation(self.model, self.loss, self._batches(windows), self.ranks)

    def _batches(self, windows: SequenceWindows, rng: np.random.Generator | None = None) -> TensorBatches:
        """This rank's part of the windows."""
        return TensorBatches(windows, self.dtype, self.device, rng, rank=self.ranks.rank, size=self.ranks.size)

    def _try_model(self) -> None:
        """Learn whether the model takes whole windows, and that it runs at all, before anything is changed.

        A loss of the user's own may call the model in ways of its own: then only ``predict`` needs to know.
        """
        n_steps = min(3, self.windows.segments.max_length)
        values = self.windows.cut(self.windows.segments[:4], 0, n_steps)[0]
        try:
            with seeded(0):  # trying it out puts the generators back: not while another fit draws from them
                takes_windows(self.model, [to_tensor(v, self.dtype, self.device) for v in values])
        except ShapeError as error:
            if isinstance(self.loss, SeqLoss):
                raise
            warnings.warn(f"predict will fail: {error}", stacklevel=4)

    def _give_context(self) -> None:
        """Have windows begin with earlier steps, for a model that has no state to know of them; in validation too."""
        self.windows.overlap_into_burn_in = True
        if self.validation is not None:
            batches: Any = self.validation.batches
            held = batches.windows
            held.overlap_into_burn_in, held.overlap = True, int(self.spec.overlap)
            held.seqsize = int(self.spec.seqsize or held.segments.max_length)

    def _hooked_loop(self) -> Loop:
        self.step = WindowStep(
            self.model,
            self.loss,
            self.optimizer,
            clip=None if self.spec.clip is None else float(self.spec.clip),
            accumulate=int(self.spec.accumulate),
            threads=self.threads,
            comm=self.ranks,
        )
        loop = Loop(self.step, self.ranks)
        if self.resume and hasattr(self.est, "history_"):
            loop.epoch, loop.history = self.est.n_iter_, list(self.est.history_)
            loop.step = self.est._n_steps
        loop.shared_data = {"estimator": self.est, "model": self.model, "optimizer": self.optimizer}
        loop.hooks.add("epoch", self._finish_epoch, name="bookkeeping", priority=-math.inf)
        loop.hooks.add("epoch", self._publish, name="fitted attributes", priority=-5)
        watchers: list[Any] = []
        if self.validation is not None:
            watchers.append(self.validation)
        if self.scheduler is not None:
            watchers.append(Schedule(self.scheduler, self.spec.schedule_every, lambda: self.step.n_updates))
        if self.spec.patience is not None:
            watchers.append(EarlyStopping(self.model, int(self.spec.patience)))
        if self.progress is not None and self.ranks.rank == 0:
            watchers.append(self.progress)
        self.callbacks = with_checkpoints(self.callbacks, self, loop)
        for hook in (*watchers, *self.callbacks):
            loop.hooks.attach(hook)
        return loop

    # -- the estimator's attributes ------------------------------------------------------------------

    def _adopt(self) -> None:
        est = self.est
        est.model_, est.optimizer_ = self.model, self.optimizer
        est._rng, est._scheduler = self.rng, self.scheduler
        est._input_kinds = tuple(s.kind for s in self.x)
        est._per_series, est._y_ndim = self.targets.per_series, self.targets.ndim
        if not self.resume:
            est.n_features_in_, est._n_inputs, est._form = self.inputs.columns, feature_counts(self.x), self.inputs.form
            est.n_outputs_ = self._n_out()
            vars(est).pop("feature_names_in_", None)
            if self.inputs.names is not None:
                est.feature_names_in_ = self.inputs.names
            if self.classes is not None:
                est.classes_ = self.classes
            est._target_scale = self.target_scale
            est.loss_, est.n_iter_, est._n_steps = math.nan, 0, 0
            est.grad_ = torch.zeros(sum(p.numel() for p in self.model.parameters()), dtype=self.dtype)
            est.loss_curve_, est.validation_loss_curve_, est.history_ = [], [], []

    def _finish_epoch(self, loop: Loop) -> None:
        self.step.flush()
        if self.step.n_updates == 0 and not loop.stopped:
            raise DataError("there is nothing to learn from: no step of y that counts has a target (all are NaN)")
        loop.record["folds"] = self.windows.segments.folds
        self._gradient = self.step.mean_gradient()
        self.step.start_epoch()

    def _publish(self, loop: Loop) -> None:
        self.est.grad_ = self._gradient
        self._show([*loop.history, loop.record], loop.step)

    def _show(self, history: list[dict[str, Any]], n_steps: int) -> None:
        est, last = self.est, history[-1] if history else {"mean_batch_loss": None}
        est.loss_ = math.nan if last["mean_batch_loss"] is None else last["mean_batch_loss"]
        est.loss_curve_ = [record["loss"] for record in history]
        est.validation_loss_curve_ = [r["validation_loss"] for r in history if "validation_loss" in r]
        est.history_ = list(history)
        est.n_iter_, est._n_steps = len(history), n_steps
