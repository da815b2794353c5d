"""Train and evaluate a model on batches of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.gomlx.executors import Executor, Executors, Mode, kind_key, run_uncompiled
from fluxutils_py.gomlx.metrics_of_batch import (
    add_up_ranks,
    add_weighed,
    is_mean,
    target_for_metrics,
    update_from_batch,
    weigh_metrics,
)
from fluxutils_py.nn.losses import require_equal_shapes
from fluxutils_py.nn.precision import as_float32
from fluxutils_py.nn.states import evaluating, reset, restore, snapshot
from fluxutils_py.parallel import Threads
from fluxutils_py.parallel.threads import n_threads
from fluxutils_py.training.added_losses import collected_losses, get_losses
from fluxutils_py.training.dataset import as_dataset
from fluxutils_py.training.element_weights import require_weighable, update_metric
from fluxutils_py.training.function_step import FunctionStep
from fluxutils_py.training.make_optimizer import begin_schedule, make_optimizer, make_scheduler
from fluxutils_py.training.minibatch import (
    Minibatch,
    as_minibatch,
    begins_series,
    require_parts,
    require_same_arity,
)
from fluxutils_py.training.resharding import require_shared_batches, reshard_rows, state_of_rank
from fluxutils_py.training.running_metrics import (
    EMAMetric,
    MeanMetric,
    compute_all,
    metric_name,
    n_elements,
    require_different_names,
    weighted_mean,
)
from fluxutils_py.training.step_info import BatchLoss, StepInfo
from fluxutils_py.training.threaded_loss import ThreadedLoss, detached, join_parts, shares
from fluxutils_py.tree import tree_map


class Trainer:
    """Train and evaluate a model with a loss, an optimizer and metrics, on batches of any kind.

    A :class:`Loop` goes through the data: ``Loop(trainer).run_epochs(dataset, 10)``. A step does
    what
    :class:`GradientStep` does, then applies the per-step updates, the scheduler and the metrics, in this order.

    Parameters
    ----------
    model : nn.Module
        Called ``model(*inputs)``. It may call :func:`add_loss`.
    loss_fn : callable, optional
        ``loss_fn(prediction, label)``, in torch's order; several predictions or labels come as
        tuples. A result that is not a scalar is averaged over all elements. With a tensor of
        weights, the loss is the sum of weight times loss, divided by the number of nonzero weights.
        None: only the losses that :func:`add_loss` adds.
    opt : torch.optim.Optimizer, or a class or callable that makes one from the parameters, optional
        None: evaluation only.
    train_metrics, eval_metrics : sequence of metrics
        Updated with predictions, labels and weights; see :class:`MeanMetric`. For training, use
        moving averages.
    comm, batches, clip, accumulate, precision
        See :class:`GradientStep`. With several ranks, a :class:`MeanMetric` covers all of them;
        others only their own.
    n_jobs : int or None
        Number of threads, which divide each batch as ranks do, to the same result; see
        :class:`Estimator`.
    axis : int
        Axis along which ranks and threads divide a batch: 0 for batch first, 1 for time-major ``(S,
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

    name, priority, ends_together, collective = "trainer", -math.inf, True, True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        opt: Any = None,
        train_metrics: Sequence[Any] = (),
        eval_metrics: Sequence[Any] = (),
        *,
        comm: Any = "auto",
        batches: str = "same",
        axis: int = 0,
        clip: float | None = None,
        accumulate: int = 1,
        precision: str = "float32",
        n_jobs: int | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        stateful: bool = False,
        max_kinds: int = 20,
        takes_kind: bool = False,
        compile: bool | Callable[[Any], Any] = False,
    ) -> None:
        self.model, self.loss_fn, self.axis, self.stateful = model, loss_fn, axis, stateful
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = None if opt is None else make_optimizer(opt, trainable)
        self.scheduler = None if scheduler is None else make_scheduler(scheduler, self.optimizer)
        self.train_metrics: list[Any] = [
            MeanMetric(name="batch_loss", short_name="loss+", metric_type="loss")
        ]
        self.train_metrics.append(
            EMAMetric(name="ema_loss", short_name="~loss+", metric_type="loss")
        )
        self.eval_metrics: list[Any] = [
            MeanMetric(name="loss", short_name="#loss+", metric_type="loss")
        ]
        if loss_fn is not None:
            self.train_metrics.append(
                EMAMetric(name="ema_loss_fn", short_name="~loss", metric_type="loss")
            )
            self.eval_metrics.append(
                MeanMetric(name="loss_fn", short_name="#loss", metric_type="loss")
            )
        self._n_own = len(self.train_metrics), len(self.eval_metrics)
        self.train_metrics += train_metrics
        self.eval_metrics += eval_metrics
        require_different_names(self.train_metrics)
        require_different_names(self.eval_metrics)
        self._executors = Executors(model, max_kinds, takes_kind, compile)
        self._arity: dict[tuple[Any, Mode], tuple[int, int]] = {}
        self._updates: dict[str, Callable[[nn.Module], Any]] = {}
        self._means = [m for m in train_metrics if is_mean(m)]
        self._others = [m for m in train_metrics if not is_mean(m)]
        self._batches = batches
        self._threads, compute = Threads(n_threads(n_jobs)), self._compute_loss  # type: Any, Any
        shard = partial(Minibatch.shard, axis=axis)
        reduction = "sum" if getattr(loss_fn, "reduction", None) == "sum" else "mean"
        if self._threads.n > 1:
            if compile:
                raise ValueError(
                    "a compiled model cannot run in several threads: leave out n_jobs, or compile"
                )
            self._replicated: dict[nn.Module, Executors] = {}
            compute = ThreadedLoss(
                self._compute_loss, model, self._threads, shares(shard), reduction
            )
        self._step = FunctionStep(
            compute,
            self.optimizer,
            model,
            comm=comm,
            batches=batches,
            shard=shard,
            clip=clip,
            accumulate=accumulate,
            precision=precision,
            reduction=reduction,
            n_numbers=2 * len(self._means) + (loss_fn is not None),
            stateful=stateful,
            compute_again=self._run_again,
            defer=False,  # metrics need the loss
        )
        self.ranks = self._step.ranks

    def on_exec_creation(self, handler: Callable[[Executor, Mode], Any]) -> Trainer:
        """Call ``handler(executor, mode)`` when a kind first occurs in a mode. Returns self."""
        self._executors.handlers.append(handler)
        return self

    def add_per_step_update(
        self, fn: Callable[[nn.Module], Any], name: str | None = None
    ) -> Trainer:
        """Call ``fn(model)`` without gradients after each optimizer step, for example to apply
        constraints.

        It does not affect the loss of that step. It replaces an earlier function of the same
        ``name``, by default the name of the function. Returns self.
        """
        self._updates[name or str(getattr(fn, "__name__", repr(fn)))] = fn
        return self

    def to(self, device: Any) -> Trainer:
        """Move the model and the optimizer's state to a device. Later batches follow. Returns self."""
        self.model.to(device)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(
                self.optimizer.state_dict()
            )  # moves moments to their parameters
        self._step.bind()
        return self

    @property
    def shares_batches(self) -> bool:
        """Whether all ranks need the same batches, and so equally many."""
        return self._step.shares_batches

    # -- training ------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepInfo | None:
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
        before = self._step.n_updates
        self._predicted: dict[int, tuple[Any, Any, Any]] = {}  # by thread
        with self._threads:
            info = self._step(None if batch is None else self.ranks.guard(as_minibatch, batch))
        if info is None or info.batch_loss is None:
            return info
        self.ranks.guard(self._finish_step, info, self._step.n_updates > before)
        return replace(info, metrics=compute_all(self.train_metrics))

    def _compute_loss(
        self, batch: Minibatch, model: nn.Module | None = None, thread: int = 0
    ) -> BatchLoss:
        batch, executors = self._check_batch(batch, Mode.TRAIN), self._executors
        if model is not None and model is not self.model:
            new = Executors(model, executors.max_kinds, executors.takes_kind, False)
            executors = self._replicated.setdefault(model, new)
        with collected_losses():
            prediction = tree_map(as_float32, executors(batch.kind, Mode.TRAIN)(batch.inputs))
            total, own = self._total_loss(prediction, batch)
        n, prediction = n_elements(prediction, batch.weight), detached(prediction)
        target, weight = target_for_metrics(self.loss_fn, batch)
        require_weighable(self._others, weight)
        self._predicted[thread] = prediction, target, weight
        numbers = [
            *([] if own is None else [own]),
            *weigh_metrics(self._means, self.loss_fn, prediction, batch),
        ]
        return BatchLoss(total, n, numbers=numbers)

    def _run_again(self, batch: Minibatch) -> None:
        with collected_losses():
            run_uncompiled(self.model, batch, self._executors.takes_kind)

    def _finish_step(self, info: StepInfo, updated: bool) -> None:
        if updated:
            with torch.no_grad():
                for update in self._updates.values():
                    update(self.model)
            if self.scheduler is not None:
                self.scheduler.step()
        numbers = list(self._step.numbers)
        self.train_metrics[0].reset()
        own = (info.batch_loss, info.batch_loss, *(numbers[:1] if self.loss_fn is not None else ()))
        for metric, value in zip(self.train_metrics, own, strict=False):
            metric.add(value, info.n_live)
        add_weighed(self._means, numbers[self.loss_fn is not None :], info.n_live)
        if self._predicted and self._others:
            parts = [self._predicted[i] for i in sorted(self._predicted)]
            prediction, target, weight = (
                join_parts(v, self.axis) for v in zip(*parts, strict=True)
            )
            for metric in self._others:
                update_metric(metric, prediction, target, weight)

    def reset_train_metrics(self) -> None:
        """Reset the training metrics."""
        for metric in self.train_metrics:
            metric.reset()

    def on_start(self, loop: Any) -> None:
        """Begin a run; reset the metrics unless the run continues an interrupted one."""
        self._threads.__enter__()
        if loop.step == loop.start_step:
            self.reset_train_metrics()
        begin_schedule(
            self.scheduler,
            loop.end_step and -(-(loop.end_step - loop.step) // self._step.accumulate),
        )

    def on_close(self, loop: Any) -> None:
        """End a run, even after an error: stop the threads."""
        self._threads.__exit__()

    def on_epoch(self, loop: Any) -> None:
        """Finish a pass over the data."""
        self._step.finish_epoch()

    # -- evaluation ----------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> dict[str, Any]:
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
        data, n_batches = as_dataset(dataset), 0
        data.reset()
        for metric in self.eval_metrics:
            metric.reset()
        with evaluating(self.model):
            for batch in data:
                self._eval_step(batch)
                n_batches += 1
        if self._batches == "per_rank" and not self.ranks.is_single:
            n_batches = sum(self.ranks.allgather(n_batches))
            add_up_ranks(self.eval_metrics, self.ranks)
        if not n_batches:
            raise ValueError(f"dataset {data.name!r} has no batches: nothing to evaluate")
        return compute_all(self.eval_metrics)

    def _eval_step(self, batch: Any) -> dict[str, Any]:
        batch = self._check_batch(as_minibatch(batch), Mode.EVAL)
        if begins_series(batch, self.stateful):
            reset(self.model)
        with collected_losses(), self._step.autocast:
            prediction = tree_map(as_float32, self._executors(batch.kind, Mode.EVAL)(batch.inputs))
            total, own = self._total_loss(prediction, batch)
        n, n_own = n_elements(prediction, batch.weight), self._n_own[1]
        require_weighable(self.eval_metrics[n_own:], target_for_metrics(self.loss_fn, batch)[1])
        for metric, value in zip(self.eval_metrics[:n_own], (total.item(), own), strict=False):
            metric.update(value, weight=n)
        for metric in self.eval_metrics[n_own:]:
            update_from_batch(metric, self.loss_fn, prediction, batch)
        return compute_all(self.eval_metrics)

    # -- both ----------------------------------------------------------------------------------------

    def _check_batch(self, batch: Minibatch, mode: Mode) -> Minibatch:
        """Check a batch against its kind, and move it to the device of the model."""
        require_parts(batch)
        sizes, key = (len(batch.inputs), len(batch.labels)), (kind_key(batch.kind), mode)
        require_same_arity(batch, sizes, self._arity.setdefault(key, sizes))
        first = next(self.model.parameters(), None)
        return batch if first is None or first.device.type == "cpu" else batch.to(first.device)

    def _total_loss(self, prediction: Any, batch: Minibatch) -> tuple[Tensor, float | None]:
        """Return the loss, and the part of it that ``loss_fn`` gave."""
        added, own = get_losses(), None
        if self.loss_fn is not None:
            label = batch.y
            require_equal_shapes(self.loss_fn, prediction, label)
            own = weighted_mean(self.loss_fn(prediction, label), batch.weight)
        if own is None:
            if added is None:
                raise ValueError(
                    "there is no loss: give the Trainer a loss_fn, or call add_loss in the model"
                )
            return added, None
        return own if added is None else own + added, own.item()

    def state_dict(self) -> dict[str, Any]:
        """Return the training state without model and optimizer, which are saved separately."""
        return {
            "metrics": {
                metric_name(m): m.state_dict()
                for m in self.train_metrics
                if hasattr(m, "state_dict")
            },
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "step": self._step.state_dict(),
            "states": snapshot(self.model),
        }

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        require_shared_batches(self._batches, len(states), size)
        step = self._step.reshard_state_dict([state["step"] for state in states], rank, size)
        rows = reshard_rows(self.model, [state["states"] for state in states], rank, size)
        return {**state_of_rank(states, rank), "step": step, "states": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        for metric in self.train_metrics:
            if metric_name(metric) in state["metrics"]:
                metric.load_state_dict(state["metrics"][metric_name(metric)])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._step.load_state_dict(state["step"])
        restore(self.model, state["states"])
