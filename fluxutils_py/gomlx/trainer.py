"""Train and evaluate a model on batches of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fluxutils_py.gomlx.trainer_metrics import LossFn, TrainerMetrics
from fluxutils_py.gomlx.weighted_loss import WeightedLoss
from fluxutils_py.nn.losses import require_equal_shapes
from fluxutils_py.nn.precision import as_float32
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.training.added_losses import collected_losses, get_losses
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.dataset import as_dataset
from fluxutils_py.training.hooks import require_arguments
from fluxutils_py.training.make_optimizer import begin_schedule, make_optimizer, make_scheduler
from fluxutils_py.training.minibatch import (
    Minibatch,
    as_minibatch,
    begins_series,
    detached,
    require_parts,
    require_same_arity,
)
from fluxutils_py.training.resharding import state_of_rank
from fluxutils_py.training.running_metrics import (
    EMAMetric,
    MeanMetric,
    compute_all,
    metric_name,
    n_elements,
    weighted_mean,
)
from fluxutils_py.training.step_info import BatchLoss, StepInfo
from fluxutils_py.tree import is_sequence, tree_map
from fluxutils_py.validation import check_integer

if TYPE_CHECKING:
    from fluxutils_py.training.loop import Loop

Executor = Callable[[tuple[Any, ...]], Any]  # calls the model with the inputs of a batch


class Mode(Enum):
    """Purpose of a step."""

    TRAIN = "train"
    EVAL = "eval"


class Trainer:
    """Train and evaluate a model with a loss, an optimizer and metrics, on batches of any kind.

    A :class:`Loop` goes through the data: ``Loop(trainer).run_epochs(dataset, 10)``. A step does
    what :class:`GradientStep` does, then applies the per-step updates, the scheduler and the
    metrics, in this order.

    Parameters
    ----------
    model : nn.Module
        Called ``model(*inputs)``. It may call :func:`add_loss`.
    loss_fn : callable, optional
        ``loss_fn(prediction, label)``, in torch's order; several predictions or labels come as
        tuples, a single one of a list or tuple by itself. A result that is not a scalar is averaged
        over all elements. With a tensor of weights, the loss is the sum of weight times loss,
        divided by the number of nonzero weights. None: only the losses that :func:`add_loss` adds.
    opt : torch.optim.Optimizer, or a class or callable that makes one from the parameters, optional
        None: evaluation only.
    train_metrics, eval_metrics : sequence of metrics
        Updated with predictions, labels and weights; see :class:`MeanMetric`. For training, use
        moving averages.
    comm, batches, clip, accumulate, clip_nan, precision
        See :class:`GradientStep`. With several ranks, a :class:`MeanMetric` covers all of them;
        others cover this rank only.
    axis : int
        Axis along which ranks divide a batch: 0 for batch first, 1 for time-major ``(S,
        B, F)``. Ignored for windows.
    scheduler : callable, optional
        ``scheduler(optimizer)`` returns a learning-rate scheduler, which steps after each update.
        To combine several, such as ``LinearLR`` (warm-up) and ``CosineAnnealingLR``, use
        ``SequentialLR`` of ``torch.optim``.
    stateful : bool
        Whether recurrent layers continue from the detached state of the previous batch when a batch
        has no ``first``. By default they then start from zero.
    max_kinds : int
        Largest number of executors; there is one for each pair of ``kind`` and mode.
    takes_kind : bool
        Whether to call ``model(kind, *inputs)``.
    compile : bool or callable
        True compiles each executor with ``torch.compile``; a callable compiles it with
        ``compile(fn)``.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer or None
    scheduler : learning-rate scheduler or None
    ranks : RankGroup
    train_metrics, eval_metrics : list
        The built-in metrics, then the given ones. Training has ``batch_loss``, the loss of the
        step; ``ema_loss``, its moving average (0.01); and ``ema_loss_fn``, the moving average of
        ``loss_fn`` alone, if given. Evaluation has ``loss`` and ``loss_fn``, means over the data.
        ``StepInfo.metrics`` and :meth:`eval` use the same names.

    Raises
    ------
    FloatingPointError
        In a training step, if the loss or the gradient is NaN or infinite, with the module that
        gave it first. The step leaves the parameters unchanged.
    ShapeError
        In a step, if a torch criterion gets a prediction and a label of different shapes.
    ValueError
        In a step, if a batch has no inputs, an input that is None, or not as many inputs or labels
        as earlier batches of the same ``kind``; if nothing gives a loss, or the loss does not
        depend on the parameters.
    RuntimeError
        In a step, if there are more than ``max_kinds`` executors.

    Notes
    -----
    :meth:`eval` preserves the state of recurrent layers and the mode of every module.
    Source: ``Trainer`` of gomlx ``train``, whose loss functions take labels first, and which calls
    kinds specs.

    Examples
    --------
    >>> from fluxutils_py.training import InMemory
    >>> from fluxutils_py.training import Loop
    >>> x = torch.randn(50, 3)
    >>> data = InMemory(x, x.sum(1, keepdim=True), batchsize=8)
    >>> trainer = Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.Adam)
    >>> before = trainer.eval(data)["loss"]
    >>> _ = Loop(trainer).run_epochs(data, 20)
    >>> trainer.eval(data)["loss"] < before
    True
    """

    name = "trainer"
    priority = -math.inf  # before all other hooks, which may look at the metrics
    ends_together = True  # see Loop: a rank without a batch still takes part in a step
    collective = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None = None,
        opt: Any = None,
        train_metrics: Sequence[Any] = (),
        eval_metrics: Sequence[Any] = (),
        *,
        comm: object = "auto",
        batches: str = "same",
        axis: int = 0,
        clip: float | None = None,
        accumulate: int = 1,
        clip_nan: bool = False,
        precision: str = "float32",
        scheduler: Callable[[Any], Any] | None = None,
        stateful: bool = False,
        max_kinds: int = 20,
        takes_kind: bool = False,
        compile: bool | Callable[[Any], Any] = False,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.axis = axis
        self.stateful = stateful
        self.takes_kind = takes_kind
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = None if opt is None else make_optimizer(opt, trainable)
        self.scheduler = None if scheduler is None else make_scheduler(scheduler, self.optimizer)
        self._batch_loss = _loss_metric("batch_loss", "loss+")
        self._train_metrics = TrainerMetrics(
            loss_fn,
            [self._batch_loss, _loss_metric("ema_loss", "~loss+", EMAMetric)],
            _loss_metric("ema_loss_fn", "~loss", EMAMetric),
            train_metrics,
        )
        self._eval_metrics = TrainerMetrics(
            loss_fn,
            [_loss_metric("loss", "#loss+")],
            _loss_metric("loss_fn", "#loss"),
            eval_metrics,
        )
        self.train_metrics = self._train_metrics.all
        self.eval_metrics = self._eval_metrics.all
        self.max_kinds = check_integer("max_kinds", max_kinds, 1)
        self._compile = torch.compile if compile is True else compile or None
        self._executors: dict[tuple[Any, Mode], Executor] = {}
        self._on_exec_creation: list[Callable[[Executor, Mode], Any]] = []
        self._arity: dict[tuple[Any, Mode], tuple[int, int]] = {}
        self._updates: dict[str, Callable[[nn.Module], Any]] = {}
        reduction = "sum" if getattr(loss_fn, "reduction", None) == "sum" else "mean"
        self._step = BatchStep(
            self._compute_loss,
            model,
            self.optimizer,
            axis=axis,
            comm=comm,
            batches=batches,
            clip=clip,
            accumulate=accumulate,
            clip_nan=clip_nan,
            precision=precision,
            reduction=reduction,
            n_numbers=self._train_metrics.n_numbers,
            stateful=stateful,
            compute_again=self._run_again,
            defer=False,  # metrics need the loss
        )
        self.ranks = self._step.ranks

    def on_exec_creation(self, handler: Callable[[Executor, Mode], Any]) -> Trainer:
        """Call ``handler(executor, mode)`` when a kind first occurs in a mode. Returns self."""
        require_arguments("on_exec_creation", handler, "the executor", "the mode")
        self._on_exec_creation.append(handler)
        return self

    def add_per_step_update(
        self, fn: Callable[[nn.Module], Any], name: str | None = None
    ) -> Trainer:
        """Call ``fn(model)`` without gradients after each optimizer step, such as to constrain
        parameters.

        It does not affect the loss of that step. It replaces an earlier function of the same
        ``name``, by default the name of the function. Returns self.
        """
        require_arguments("add_per_step_update", fn, "the model")
        self._updates[name or str(getattr(fn, "__name__", repr(fn)))] = fn
        return self

    def to(self, device: torch.device | str) -> Trainer:
        """Move the model and the optimizer's state to a device. Later batches follow.

        Returns self.
        """
        self.model.to(device)
        if self.optimizer is not None:
            # loading moves the moments to the device of their parameters
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        self._step.bind()
        return self

    @property
    def shares_batches(self) -> bool:
        """Whether all ranks need the same batches, and so equally many."""
        return self._step.shares_batches

    # -- training ----------------------------------------------------------------------------------

    def train_step(self, batch: object) -> StepInfo | None:
        """Train on one batch: anything that :func:`as_minibatch` takes, or None if this rank has no
        more batches.

        Returns
        -------
        StepInfo or None
            None if ranks agreed to stop or no rank has a batch; such a step does not count.
        """
        if self.optimizer is None:
            raise ValueError("this Trainer has no optimizer: give it opt to train")
        if not self.model.training:
            self.model.train()
        before = self._step.n_updates  # with accumulate, most steps update nothing
        self._predicted: tuple[Any, Minibatch] | None = None
        info = self._step(None if batch is None else self.ranks.guard(as_minibatch, batch))
        if info is None or info.batch_loss is None:
            return info
        # a metric of the user may fail on one rank: guard tells the others
        self.ranks.guard(self._finish_step, info, self._step.n_updates > before)
        return replace(info, metrics=compute_all(self.train_metrics))

    def _compute_loss(self, model: nn.Module, batch: Minibatch) -> BatchLoss:
        """Return the loss of this rank's part of a batch."""
        batch = self._check_batch(batch, Mode.TRAIN)
        executor = self._executor(batch.kind, Mode.TRAIN)
        with collected_losses():
            prediction = tree_map(as_float32, executor(batch.inputs))
            loss, own_loss = self._total_loss(prediction, batch)
        prediction = detached(prediction)
        self._predicted = prediction, batch
        numbers = self._train_metrics.measure(prediction, batch, own_loss)
        return BatchLoss(loss, n_elements(prediction, batch.weight), numbers=numbers)

    def _run_again(self, batch: Minibatch) -> None:
        """Call the model as a training step does, but uncompiled, so that hooks see each module."""
        moved = self._on_model_device(batch)
        with collected_losses():
            self._call_model(moved.kind, moved.inputs)

    def _finish_step(self, info: StepInfo, updated: bool) -> None:
        if updated:
            with torch.no_grad():
                for update in self._updates.values():
                    update(self.model)
            if self.scheduler is not None:
                self.scheduler.step()
        self._batch_loss.reset()  # it shows the loss of this step alone
        self._train_metrics.add(info.batch_loss, self._step.numbers, info.n_live)
        if self._predicted is not None:  # else this rank had no part of the batch
            self._train_metrics.add_predictions(*self._predicted)
            self._predicted = None  # it may be large

    def reset_train_metrics(self) -> None:
        """Reset the training metrics."""
        for metric in self.train_metrics:
            metric.reset()

    def on_start(self, loop: Loop) -> None:
        """Begin a run; reset the metrics unless the run continues an interrupted one."""
        if loop.step == loop.start_step:
            self.reset_train_metrics()
        n_updates = None
        if loop.end_step is not None:
            # the last update may have fewer batches: round up
            n_updates = -(-(loop.end_step - loop.step) // self._step.accumulate)
        begin_schedule(self.scheduler, n_updates)

    def on_epoch(self, loop: Loop) -> None:
        """Finish a pass over the data."""
        self._step.on_epoch(loop)

    # -- evaluation --------------------------------------------------------------------------------

    def eval_step(self, batch: object) -> dict[str, Any]:
        """Update the evaluation metrics with one batch; return their values so far by name."""
        with evaluating(self.model):
            return self._eval_step(batch)

    def eval(self, dataset: Iterable[Any]) -> dict[str, Any]:
        """Return the means of loss and metrics over a finite dataset, from its beginning.

        With ``batches="per_rank"`` all ranks must call it. A :class:`MeanMetric` then covers the
        data of all ranks; other metrics, subclasses included, cover this rank's data only.

        Raises
        ------
        ValueError
            If the dataset is empty.
        """
        data = as_dataset(dataset)
        data.reset()
        for metric in self.eval_metrics:
            metric.reset()
        n_batches = 0
        with evaluating(self.model):
            for batch in data:
                self._eval_step(batch)
                n_batches += 1
        if not self.shares_batches and not self.ranks.is_single:
            # a rank without batches is fine if another one has some
            n_batches = sum(self.ranks.allgather(n_batches))
            self._eval_metrics.add_up_ranks(self.ranks)
        if not n_batches:
            raise ValueError(f"dataset {data.name!r} has no batches: nothing to evaluate")
        return compute_all(self.eval_metrics)

    def _eval_step(self, batch: object) -> dict[str, Any]:
        batch = self._check_batch(as_minibatch(batch), Mode.EVAL)
        if begins_series(batch, self.stateful):
            reset(self.model)
        with collected_losses(), self._step.autocast:
            executor = self._executor(batch.kind, Mode.EVAL)
            prediction = tree_map(as_float32, executor(batch.inputs))
            loss, own_loss = self._total_loss(prediction, batch)
        numbers = self._eval_metrics.measure(prediction, batch, own_loss)
        self._eval_metrics.add(loss.item(), numbers, n_elements(prediction, batch.weight))
        self._eval_metrics.add_predictions(prediction, batch)
        return compute_all(self.eval_metrics)

    # -- both --------------------------------------------------------------------------------------

    def _executor(self, kind: object, mode: Mode) -> Executor:
        """Return the function that calls the model for a kind of batch.

        There is one per kind and mode, so that a compiled model is compiled once for each.
        """
        key = kind_key(kind), mode
        if key not in self._executors:
            if len(self._executors) >= self.max_kinds:
                raise RuntimeError(
                    f"kind {kind!r} in mode {mode.value!r} is one more than "
                    f"max_kinds={self.max_kinds}: a kind stands for many batches, not for one; use "
                    "fewer, or raise max_kinds"
                )
            executor = self._executors[key] = self._make_executor(kind)
            for handler in self._on_exec_creation:
                handler(executor, mode)
        return self._executors[key]

    def _make_executor(self, kind: object) -> Executor:
        def run(inputs: tuple[Any, ...]) -> Any:  # torch.compile takes no functools.partial
            return self._call_model(kind, inputs)

        return run if self._compile is None else self._compile(run)

    def _call_model(self, kind: object, inputs: tuple[Any, ...]) -> Any:
        arguments = (kind, *inputs) if self.takes_kind else inputs
        prediction = self.model(*arguments)
        if is_sequence(prediction) and len(prediction) == 1:  # as a single label
            return prediction[0]
        return prediction

    def _check_batch(self, batch: Minibatch, mode: Mode) -> Minibatch:
        """Check a batch against its kind, and move it to the device of the model."""
        require_parts(batch)
        sizes = len(batch.inputs), len(batch.labels)
        key = kind_key(batch.kind), mode
        require_same_arity(batch, sizes, self._arity.setdefault(key, sizes))
        if isinstance(self.loss_fn, WeightedLoss):
            batch = self.loss_fn.weigh(batch)
        return self._on_model_device(batch)

    def _on_model_device(self, batch: Minibatch) -> Minibatch:
        first = next(self.model.parameters(), None)
        # batches of datasets are in main memory already, and moving one costs time
        return batch if first is None or first.device.type == "cpu" else batch.to(first.device)

    def _total_loss(self, prediction: Any, batch: Minibatch) -> tuple[Tensor, float | None]:
        """Return the loss of a batch, and the part of it that ``loss_fn`` gave."""
        added = get_losses()
        if self.loss_fn is not None:
            require_equal_shapes(self.loss_fn, prediction, batch.y)
            loss = weighted_mean(self.loss_fn(prediction, batch.y), batch.weight)
            return (loss if added is None else loss + added), loss.item()
        if added is None:
            raise ValueError(
                "there is no loss: give the Trainer a loss_fn, or call add_loss in the model"
            )
        return added, None

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the training state without model and optimizer, which are saved separately."""
        metrics = {
            metric_name(m): m.state_dict() for m in self.train_metrics if hasattr(m, "state_dict")
        }
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"metrics": metrics, "scheduler": scheduler, **self._step.state_dict()}

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        step = self._step.reshard_state_dict(states, rank, size)
        return {**state_of_rank(states, rank), **step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        # a checkpoint may lack a metric that was added since
        for metric in self.train_metrics:
            if metric_name(metric) in state["metrics"]:
                metric.load_state_dict(state["metrics"][metric_name(metric)])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._step.load_state_dict(state)


def _loss_metric(name: str, short_name: str, metric: type[MeanMetric] = MeanMetric) -> MeanMetric:
    return metric(name=name, short_name=short_name, metric_type="loss")


def kind_key(kind: object) -> object:
    """Return a hashable key for a kind of batch."""
    try:
        hash(kind)
    except TypeError:
        return repr(kind)
    return kind
