"""Train and evaluate a model on batches of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.gomlx.running_metrics import (
    EMAMetric,
    MeanMetric,
    WeightedLoss,
    compute_all,
    metric_name,
    n_elements,
    target_and_weight,
    update_metric,
    weighted_mean,
)
from fluxutils_py.nn.losses import require_equal_shapes
from fluxutils_py.nn.precision import as_float32
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.training.added_losses import collected_losses, get_losses
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.dataset import as_dataset
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.make_optimizer import begin_schedule, make_scheduler
from fluxutils_py.training.minibatch import (
    Minibatch,
    as_minibatch,
    begins_series,
    detached,
    require_parts,
)
from fluxutils_py.training.resharding import state_of_rank
from fluxutils_py.training.step_info import BatchLoss, StepInfo
from fluxutils_py.tree import is_sequence, tree_map

LossFn = Callable[..., Tensor]
Executor = Callable[[tuple[Any, ...]], Any]  # calls the model with the inputs of a batch


class Trainer(BatchStep):
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
        moving averages. With several ranks, they cover the data of this rank, ``batch_loss`` and
        ``ema_loss`` those of all.
    axis : int
        Axis along which ranks divide a batch: 0 for batch first, 1 for time-major ``(S,
        B, F)``. Ignored for windows.
    scheduler : callable, optional
        ``scheduler(optimizer)`` returns a learning-rate scheduler, which steps after each update.
        To combine several, such as ``LinearLR`` (warm-up) and ``CosineAnnealingLR``, use
        ``SequentialLR`` of ``torch.optim``.
    max_kinds : int
        Largest number of executors; there is one for each pair of ``kind`` and mode.
    takes_kind : bool
        Whether to call ``model(kind, *inputs)``.
    **settings
        ``comm``, ``batches``, ``clip``, ``accumulate``, ``clip_nan``, ``precision``, ``stateful``:
        see :class:`GradientStep`.

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
        In a step, if a batch has no inputs, or an input that is None; if nothing gives a loss, or
        the loss does not depend on the parameters.
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
    model: Any  # here always a module

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None = None,
        opt: Any = None,
        train_metrics: Sequence[Any] = (),
        eval_metrics: Sequence[Any] = (),
        *,
        axis: int = 0,
        scheduler: Callable[[Any], Any] | None = None,
        max_kinds: int = 20,
        takes_kind: bool = False,
        **settings: Any,
    ) -> None:
        self.loss_fn = loss_fn
        self.takes_kind = takes_kind
        self.max_kinds = max_kinds
        names = {"batch_loss": "loss+", "ema_loss": "~loss+", "ema_loss_fn": "~loss"}
        self.train_metrics = self._with_losses(names, train_metrics)
        self.eval_metrics = self._with_losses({"loss": "#loss+", "loss_fn": "#loss"}, eval_metrics)
        self._executors: dict[tuple[str, str], Executor] = {}  # by kind and mode
        self._on_exec_creation: list[Callable[[Executor, str], Any]] = []
        self._updates: dict[str, Callable[[nn.Module], Any]] = {}
        reduction = "sum" if getattr(loss_fn, "reduction", None) == "sum" else "mean"
        # metrics need the loss: it is not deferred
        super().__init__(
            self._loss_of, model, opt, axis=axis, reduction=reduction, defer=False, **settings
        )
        self.scheduler = None if scheduler is None else make_scheduler(scheduler, self.optimizer)

    def _with_losses(self, names: Mapping[str, str], given: Sequence[Any]) -> list[Any]:
        """Return the metrics of losses, by name and short name, and those given after them."""
        metrics: list[Any] = []
        for name, short_name in names.items():
            if self.loss_fn is not None or not name.endswith("loss_fn"):
                metric = EMAMetric if name.startswith("ema") else MeanMetric
                metrics.append(metric(None, name, short_name, metric_type="loss"))
        metrics += given
        if len({*map(metric_name, metrics)}) < len(metrics):
            raise ValueError(f"metrics must have different names: {[*map(metric_name, metrics)]}")
        return metrics

    def on_exec_creation(self, handler: Callable[[Executor, str], Any]) -> Trainer:
        """Call ``handler(executor, mode)`` when a kind first occurs in a mode, "train" or "eval".

        Returns self.
        """
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
        self.bind()
        return self

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
        before = self.n_updates  # with accumulate, most steps update nothing
        info = super().train_step(None if batch is None else self.ranks.guard(as_minibatch, batch))
        if info is None or info.batch_loss is None:
            return info
        # a function of the user may fail on one rank: guard tells the others
        if self.n_updates > before:
            self.ranks.guard(self._update_model)
        batch_loss, ema_loss = self.train_metrics[:2]
        batch_loss.reset()  # it shows the loss of this step alone
        for metric in (batch_loss, ema_loss):
            metric.add(info.batch_loss, info.n_live)
        return replace(info, metrics=compute_all(self.train_metrics))

    @torch.no_grad()
    def _update_model(self) -> None:
        for update in self._updates.values():
            update(self.model)
        if self.scheduler is not None:
            self.scheduler.step()

    def _loss_of(self, model: nn.Module, batch: Minibatch) -> BatchLoss:
        """Return the loss of this rank's part of a batch."""
        loss, n = self._measured_loss(batch, "train", self.train_metrics[2:])
        return BatchLoss(loss, n)

    def compute_again(self, batch: Minibatch) -> None:
        self._call_model(batch.kind, self._on_device(batch).inputs)

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
            n_updates = -(-(loop.end_step - loop.step) // self.accumulate)
        begin_schedule(self.scheduler, n_updates)

    # -- evaluation --------------------------------------------------------------------------------

    def eval_step(self, batch: object) -> dict[str, Any]:
        """Update the evaluation metrics with one batch; return their values so far by name."""
        with evaluating(self.model):
            return self._eval_step(batch)

    def _eval_step(self, batch: object) -> dict[str, Any]:
        item = as_minibatch(batch)
        if begins_series(item, self.stateful):
            reset(self.model)
        with self.autocast:
            loss, n = self._measured_loss(item, "eval", self.eval_metrics[1:])
        if n:
            self.eval_metrics[0].add(loss.item(), n)
        return compute_all(self.eval_metrics)

    def eval(self, dataset: Iterable[Any]) -> dict[str, Any]:
        """Return the means of loss and metrics over a finite dataset, from its beginning.

        It covers the data that this rank is given.

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
        if not n_batches:
            raise ValueError(f"dataset {data.name!r} has no batches: nothing to evaluate")
        return compute_all(self.eval_metrics)

    # -- both --------------------------------------------------------------------------------------

    def _measured_loss(
        self, batch: Minibatch, mode: str, metrics: Sequence[Any]
    ) -> tuple[Tensor, float]:
        """Return the loss of a batch and its number of data; update the metrics, of which the first
        is that of ``loss_fn``.
        """
        executor = self._executor(batch, mode)
        batch = self._on_device(batch)
        with collected_losses():
            prediction = tree_map(as_float32, executor(batch.inputs))
            added = get_losses()
        n = n_elements(prediction, batch.weight)
        if self.loss_fn is None:
            if added is None:
                raise ValueError(
                    "there is no loss: give the Trainer a loss_fn, or call add_loss in the model"
                )
            loss = added
        else:
            require_equal_shapes(self.loss_fn, prediction, batch.y)
            own_loss = weighted_mean(self.loss_fn(prediction, batch.y), batch.weight)
            loss = own_loss if added is None else own_loss + added
            if n:
                metrics[0].add(own_loss.item(), n)
            metrics = metrics[1:]
        if n:
            self._update_metrics(metrics, detached(prediction), batch, n)
        return loss, n

    def _update_metrics(
        self, metrics: Sequence[Any], prediction: Any, batch: Minibatch, n: float
    ) -> None:
        target, among_labels = batch.y, None
        if isinstance(self.loss_fn, WeightedLoss):
            target, among_labels = target_and_weight(batch.labels)
        weight: Any = batch.weight if isinstance(batch.weight, Tensor) else among_labels
        if among_labels is not None and weight is not among_labels:
            weight = among_labels * weight
        for metric in metrics:
            if not isinstance(metric, MeanMetric):
                update_metric(metric, prediction, target, weight)
            elif isinstance(metric.measure, WeightedLoss):  # it reads the labels by itself
                metric.update(prediction, batch.y, weight=n)
            else:
                metric.update(prediction, target, weight=n if weight is None else weight)

    def _executor(self, batch: Minibatch, mode: str) -> Executor:
        """Return the function that calls the model for a kind of batch, after checking the batch.

        There is one per kind and mode.
        """
        require_parts(batch)
        kind = batch.kind
        key = repr(kind), mode  # which a kind has that is not hashable
        if key not in self._executors:
            if len(self._executors) >= self.max_kinds:
                raise RuntimeError(
                    f"kind {kind!r} in mode {mode!r} is one more than "
                    f"max_kinds={self.max_kinds}: a kind stands for many batches, not for one; use "
                    "fewer, or raise max_kinds"
                )
            self._executors[key] = partial(self._call_model, kind)
            for handler in self._on_exec_creation:
                handler(self._executors[key], mode)
        return self._executors[key]

    def _call_model(self, kind: object, inputs: tuple[Any, ...]) -> Any:
        arguments = (kind, *inputs) if self.takes_kind else inputs
        prediction = self.model(*arguments)
        if is_sequence(prediction) and len(prediction) == 1:  # as a single label
            return prediction[0]
        return prediction

    def _on_device(self, batch: Minibatch) -> Minibatch:
        first = next(self.model.parameters(), None)
        # batches of datasets are in main memory already, and moving one costs time
        return batch if first is None or first.device.type == "cpu" else batch.to(first.device)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the training state without model and optimizer, which are saved separately."""
        metrics = {
            metric_name(m): m.state_dict() for m in self.train_metrics if hasattr(m, "state_dict")
        }
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"metrics": metrics, "scheduler": scheduler, **super().state_dict()}

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        return {**state_of_rank(states, rank), **super().reshard_state_dict(states, rank, size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        # a checkpoint may lack a metric that was added since
        for metric in self.train_metrics:
            if metric_name(metric) in state["metrics"]:
                metric.load_state_dict(state["metrics"][metric_name(metric)])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        super().load_state_dict(state)
