"""Training and evaluation of a model of any kind, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.states import recurrent_layers, reset, restore, snapshot
from fluxutils_py.training.added_losses import collected_losses, get_losses
from fluxutils_py.training.dataset import Minibatch, as_dataset, as_minibatch
from fluxutils_py.training.running_metrics import EMAMetric, MeanMetric
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.triggers import at_least

Executor = Callable[[tuple[Any, ...]], Any]


class Mode(Enum):
    """What a step is for."""

    TRAIN = "train"
    EVAL = "eval"


class Trainer:
    """Take training steps and evaluate: model, loss, optimizer and metrics, for batches of any kind.

    A :class:`Loop` goes through the data: ``Loop(trainer).run_epochs(dataset, 10)``. The order within a step: forward;
    check that the loss is finite; gradient; optimizer; per-step updates; metrics.

    Parameters
    ----------
    model : nn.Module
        Called ``model(*inputs)``. It may call :func:`add_loss`.
    loss_fn : callable, optional
        ``loss_fn(prediction, label)``, in torch's order; tuples of them if there are several. What is no scalar is
        averaged: over all cells, or with weights as a tensor, the sum of weight times loss divided by the number of
        cells whose weight is not 0. None: only what :func:`add_loss` adds.
    opt : torch.optim.Optimizer, or a class or callable that makes one of the parameters, optional
        None: no training, only evaluation.
    train_metrics, eval_metrics : sequence of metrics
        Given predictions and labels; see :class:`MeanMetric`. For training, moving averages make sense.
    max_specs : int
        How many executors there may be, one for each pair of ``spec`` and mode.
    takes_spec : bool
        Call ``model(spec, *inputs)``.
    compile : bool or callable
        Compile each executor: True with ``torch.compile``, else with ``compile(fn)``.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer or None
    train_metrics, eval_metrics : list
        Those that are always there, then those given. In training: ``batch_loss``, the loss of the step; ``ema_loss``,
        its moving average (0.01); ``ema_loss_fn``, that of ``loss_fn`` alone, if there is one. In evaluation: ``loss``
        and ``loss_fn``, means over the data. Names are those in ``StepInfo.metrics`` and in what :meth:`eval` returns.

    Raises
    ------
    FloatingPointError
        In a training step, if the loss or the gradient is NaN or infinite. The parameters are then as before it.
    ValueError
        In a step: for a batch without inputs, with an input that is None, or with another number of inputs or labels
        than earlier ones of the same ``spec``; if nothing gives a loss, or it does not depend on the parameters.
    RuntimeError
        In a step: at one spec too many.

    Notes
    -----
    Recurrent layers forget their state before a batch whose ``first`` is true (all, unless the dataset says otherwise)
    and are truncated after each. :meth:`eval` leaves their state, and the mode of every module, as they were.

    Source: ``Trainer`` of gomlx ``train``, where a loss function is given labels first.

    Examples
    --------
    >>> from fluxutils_py.training import InMemory, Loop
    >>> x = torch.randn(50, 3)
    >>> data = InMemory(x, x.sum(1, keepdim=True), batchsize=8)
    >>> trainer = Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.Adam)
    >>> before = trainer.eval(data)["loss"]
    >>> Loop(trainer).run_epochs(data, 20)
    >>> trainer.eval(data)["loss"] < before
    True
    """

    name, priority = "trainer", -math.inf

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        opt: Any = None,
        train_metrics: Sequence[Any] = (),
        eval_metrics: Sequence[Any] = (),
        *,
        max_specs: int = 20,
        takes_spec: bool = False,
        compile: bool | Callable[[Any], Any] = False,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = opt if opt is None or isinstance(opt, torch.optim.Optimizer) else opt(self._params)
        self.train_metrics: list[Any] = [MeanMetric(name="batch_loss", short_name="loss+")]
        self.train_metrics.append(EMAMetric(name="ema_loss", short_name="~loss+"))
        self.eval_metrics: list[Any] = [MeanMetric(name="loss", short_name="#loss+")]
        if loss_fn is not None:
            self.train_metrics.append(EMAMetric(name="ema_loss_fn", short_name="~loss"))
            self.eval_metrics.append(MeanMetric(name="loss_fn", short_name="#loss"))
        self._n_own = len(self.train_metrics), len(self.eval_metrics)
        self.train_metrics += train_metrics
        self.eval_metrics += eval_metrics
        for metrics in (self.train_metrics, self.eval_metrics):
            names = [metric_name(m) for m in metrics]
            if twice := {n for n in names if names.count(n) > 1}:
                raise ValueError(f"metrics must differ in their names, {', '.join(sorted(twice))} is there twice")
        self.max_specs, self.takes_spec = at_least(max_specs, 1, "max_specs"), takes_spec
        self._compile = torch.compile if compile is True else compile or None
        self._executors: dict[tuple[Any, Mode], Executor] = {}
        self._arity: dict[tuple[Any, Mode], tuple[int, int]] = {}
        self._handlers: list[Callable[[Executor, Mode], Any]] = []
        self._updates: dict[str, Callable[[nn.Module], Any]] = {}

    def on_exec_creation(self, handler: Callable[[Executor, Mode], Any]) -> Trainer:
        """Have ``handler(executor, mode)`` called when a spec is met for the first time in a mode. Returns self."""
        self._handlers.append(handler)
        return self

    def add_per_step_update(self, fn: Callable[[nn.Module], Any], name: str | None = None) -> Trainer:
        """Have ``fn(model)`` called after each step of the optimizer, without gradients, as for constraints.

        The loss of that step does not know of it. One of the same name, by default the function's own, is replaced.
        Returns self.
        """
        self._updates[name or str(getattr(fn, "__name__", repr(fn)))] = fn
        return self

    def to(self, device: Any) -> Trainer:
        """Move the model, and what the optimizer remembers of it. Batches follow it. Returns self."""
        self.model.to(device)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # which moves moments to their parameters
        return self

    # -- training ------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepInfo:
        """Learn from one batch; what :func:`as_minibatch` takes."""
        if self.optimizer is None:
            raise ValueError("this Trainer has no optimizer: give it opt to train")
        batch = self._checked(batch, Mode.TRAIN)
        if not self.model.training:
            self.model.train()
        with collected_losses():
            prediction = self._forward(batch, Mode.TRAIN)
            total, own = self._losses(prediction, batch)
        value = total.item()
        require_finite("loss", value)
        if not total.requires_grad:
            raise ValueError(
                "the loss does not depend on the model's parameters: compute it from the model's output, without "
                "detach, item or numpy"
            )
        self.optimizer.zero_grad()
        total.backward()
        try:
            require_finite("gradient norm", gradient_norm(self._params))
        except FloatingPointError:
            self.optimizer.zero_grad()
            raise
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for update in self._updates.values():
                update(self.model)
        for layer in recurrent_layers(self.model):
            layer.truncate()
        self.train_metrics[0].reset()
        n = self._measure(self.train_metrics, self._n_own[0], (value, value, own), prediction, batch)
        return StepInfo(value, n, compute_all(self.train_metrics))

    def reset_train_metrics(self) -> None:
        """Begin the metrics of training anew."""
        for metric in self.train_metrics:
            metric.reset()

    def on_start(self, loop: Any) -> None:
        """A run begins: with new metrics, unless it goes on where it was interrupted."""
        if loop.step == loop.start_step:
            self.reset_train_metrics()

    # -- evaluation ----------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Take one batch into the metrics of evaluation; what they come to so far."""
        batch = self._checked(batch, Mode.EVAL)
        modes = [(m, m.training) for m in self.model.modules()]
        try:
            self.model.eval()
            with torch.no_grad(), collected_losses():
                prediction = self._forward(batch, Mode.EVAL)
                total, own = self._losses(prediction, batch)
        finally:
            for m, mode in modes:
                m.training = mode
        self._measure(self.eval_metrics, self._n_own[1], (total.item(), own), prediction, batch)
        return compute_all(self.eval_metrics)

    def eval(self, dataset: Iterable[Any]) -> dict[str, Any]:
        """Means of loss and metrics over a finite dataset, from its beginning.

        Raises
        ------
        ValueError
            If it is empty.
        """
        data = as_dataset(dataset)
        data.reset()
        for metric in self.eval_metrics:
            metric.reset()
        kept, found = snapshot(self.model), None
        try:
            for batch in data:
                found = self.eval_step(batch)
        finally:
            restore(self.model, kept)
        if found is None:
            raise ValueError(f"dataset {data.name!r} has no batches: nothing to evaluate")
        return found

    # -- both ----------------------------------------------------------------------------------------

    def _checked(self, item: Any, mode: Mode) -> Minibatch:
        """The batch, on the device of the model, with what its kind must have."""
        batch = as_minibatch(item)
        if not batch.inputs:
            raise ValueError("the batch has no inputs; a model needs at least one")
        if any(v is None for v in (*batch.inputs, *batch.labels)):
            raise ValueError("an input or label of the batch is None; leave it out, under another spec")
        sizes, key = (len(batch.inputs), len(batch.labels)), (spec_key(batch.spec), mode)
        known = self._arity.setdefault(key, sizes)
        if sizes != known:
            raise ValueError(
                f"spec {batch.spec!r} came with {known[0]} inputs and {known[1]} labels before, now with {sizes[0]} "
                f"and {sizes[1]}; give batches of another kind another spec"
            )
        first = next(self.model.parameters(), None)
        if first is None or first.device.type == "cpu":
            return batch
        inputs, labels = (tuple(_to(v, first.device) for v in values) for values in (batch.inputs, batch.labels))
        return Minibatch(inputs, labels, batch.spec, _to(batch.weight, first.device), batch.first)

    def _forward(self, batch: Minibatch, mode: Mode) -> Any:
        if batch.first:
            reset(self.model)
        key = spec_key(batch.spec), mode
        executor = self._executors.get(key)
        if executor is None:
            if len(self._executors) >= self.max_specs:
                raise RuntimeError(
                    f"spec {batch.spec!r} in mode {mode.value!r} is one more than max_specs={self.max_specs}: a spec "
                    "is a kind of batch, not one batch; use fewer, or raise max_specs"
                )
            executor = self._executors[key] = self._executor(batch.spec)
            for handler in self._handlers:
                handler(executor, mode)
        return executor(batch.inputs)

    def _executor(self, spec: Any) -> Executor:
        def run(inputs: tuple[Any, ...]) -> Any:
            return self.model(spec, *inputs) if self.takes_spec else self.model(*inputs)

        return run if self._compile is None else self._compile(run)

    def _losses(self, prediction: Any, batch: Minibatch) -> tuple[Tensor, float | None]:
        """The loss, and the part of it that is of ``loss_fn``."""
        added, own = get_losses(), None
        if self.loss_fn is not None:
            own = weighted_mean(self.loss_fn(prediction, _one(batch.labels)), batch.weight)
        if own is None:
            if added is None:
                raise ValueError("there is no loss: give the Trainer a loss_fn, or call add_loss in the model")
            return added, None
        return own if added is None else own + added, own.item()

    def _measure(
        self, metrics: list[Any], n_own: int, losses: Sequence[Any], prediction: Any, batch: Minibatch
    ) -> float:
        """Update metrics; how many data the batch is of."""
        n = n_elements(prediction, batch.weight)
        for metric, value in zip(metrics[:n_own], losses, strict=False):
            metric.update(value, weight=n)
        prediction, label = _detached(prediction), _one(batch.labels)
        for metric in metrics[n_own:]:
            if isinstance(metric, MeanMetric):
                metric.update(prediction, label, weight=n)
            else:
                metric.update(prediction, label)
        return n

    def state_dict(self) -> dict[str, Any]:
        """What the metrics of training remember; model and optimizer are saved by themselves."""
        return {metric_name(m): m.state_dict() for m in self.train_metrics if hasattr(m, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for metric in self.train_metrics:
            if metric_name(metric) in state:
                metric.load_state_dict(state[metric_name(metric)])


def require_finite(what: str, value: float) -> None:
    """Raise FloatingPointError if a number is NaN or infinite, before it does harm."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the {what} is {value}; the parameters are as before this step. Lower the learning rate, or look for "
            "extreme values in the data"
        )


def gradient_norm(params: Iterable[Tensor]) -> float:
    """Norm of the gradients of all parameters together."""
    norms = [torch.linalg.vector_norm(p.grad.to_dense().double()) for p in params if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


def metric_name(metric: Any) -> str:
    """What a metric is called: its ``name``, or that of its class."""
    return getattr(metric, "name", None) or type(metric).__name__


def compute_all(metrics: Iterable[Any]) -> dict[str, Any]:
    """What metrics come to, by name; scalars as numbers."""
    found = {}
    for metric in metrics:
        value = metric.compute()
        found[metric_name(metric)] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return found


def spec_key(spec: Any) -> Any:
    """Something hashable that stands for a spec."""
    try:
        hash(spec)
    except TypeError:
        return repr(spec)
    return spec


def n_elements(prediction: Any, weight: float | Tensor | None) -> float:
    """How many data the mean over a batch is of: as its weight says, else all but the last axis of the prediction."""
    if isinstance(weight, Tensor):
        return int((weight != 0).sum())
    if weight is not None:
        return weight
    first = prediction[0] if isinstance(prediction, tuple | list) else prediction
    if not isinstance(first, Tensor):
        return 1
    return first.numel() // first.shape[-1] if first.ndim > 1 and first.shape[-1] else first.numel()


def weighted_mean(loss: Any, weight: float | Tensor | None) -> Tensor:
    """A loss as a scalar."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}")
    if not isinstance(weight, Tensor):
        return loss.mean()
    if loss.ndim == 0:
        raise ValueError(
            "the batch has weights, but the loss is a mean already: give the Trainer one that is not reduced, such as "
            'nn.MSELoss(reduction="none")'
        )
    weight = weight.to(loss.dtype).expand_as(loss)
    return torch.where(weight != 0, loss * weight, 0).sum() / (weight != 0).sum().clamp(min=1)


def _one(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _detached(prediction: Any) -> Any:
    if isinstance(prediction, tuple | list):
        return type(prediction)(_detached(p) for p in prediction)
    return prediction.detach() if isinstance(prediction, Tensor) else prediction


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor | nn.Module) else value
