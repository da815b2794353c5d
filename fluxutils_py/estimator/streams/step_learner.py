"""Learn from the targets of a stream, one step after another."""

from __future__ import annotations

import io
from collections import deque
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fluxutils_py.data.segments import Segments
from fluxutils_py.data.sequence_windows import WindowIndex
from fluxutils_py.errors import DataError, LoadError, SpecError
from fluxutils_py.estimator.building import build_optimizer, rebind, require_gradients
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.estimator.spec import read_spec
from fluxutils_py.nn.closed_form_model import is_closed_form
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.losses import Loss, SeqLoss, as_loss, takes_weights
from fluxutils_py.nn.parameters import Freeze, freeze_parameters
from fluxutils_py.nn.recurrent import State
from fluxutils_py.nn.states import recurrent_layers, reset, restore, truncated_layers
from fluxutils_py.training.minibatch import Minibatch, to_tensor
from fluxutils_py.training.window_step import WindowStep

SEQSIZE = 64  # steps that truncated gradients reach back, where a fit took whole series
# Of the learning rate of a fit: a step has less to say than a minibatch of windows.
SHARE_OF_RATE = 0.01


class Learning(NamedTuple):
    """How a stream learns: its highest learning rate, None for that of the fit times
    :data:`SHARE_OF_RATE`, and what does not learn.
    """

    rate: float | None = None
    freeze: Freeze = None


# A step without its target yet: its inputs (F, N), which series (N,) are learnt from, None if all
# are, and which begin anew at this step, None if none does.
_PendingStep = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]


class StepLearner:
    """Updates a copy of a fitted model from the target of one step of a stream after another.

    The copy walks behind the stream: its state is that before the oldest step whose target has not
    come. With a target it makes this step once more, in evaluation mode, and an update follows: by
    exact gradients of all of the past if all recurrent layers with parameters are diagonal, else by
    truncated ones of the last ``seqsize`` steps.

    Parameters
    ----------
    est : fitted estimator
        Not changed.
    n_series : int
    learning : Learning

    Attributes
    ----------
    model : nn.Module
        The copy.
    """

    def __init__(self, est: BaseSeriesEstimator, n_series: int, learning: Learning) -> None:
        require_gradients("stream(learn=...)")
        settings = est.resolved_params()
        spec = read_spec(settings.spec)
        if is_closed_form(est.model_):
            raise SpecError(
                f"learn: this {type(est).__name__} with cell={getattr(est, 'cell_', None)!r} was "
                "fitted in closed form, on all data at once, and has no gradient steps to go on "
                "with; fit a network, such as cell='linear+mingru' or cell='mingru'"
            )
        codec = est.fitted_parts_.codec
        self.model = reset(deep_copy(est.model_)).eval()
        freeze_parameters(self.model, learning.freeze)
        self._loss: Loss = as_loss(settings.loss)
        self._n_series = n_series
        self._scale = codec.scale
        self._class_weight = codec.class_weight
        self._optimizer = _new_optimizer(est, self.model, learning.rate)
        is_exact = not truncated_layers(self.model)
        self._n_steps = 1 if is_exact else spec.seqsize or SEQSIZE
        self._step = WindowStep(
            self.model,
            self._loss,
            self._optimizer,
            comm=None,
            clip=None if spec.clip is None else float(spec.clip),
            precision=spec.precision,
            gradient="exact" if is_exact else "truncated",
            defer=False,
        )
        self._rows = Segments.from_lengths(n_series, 1)
        parameter = next(self.model.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        self._masks_outputs, self._of_classes = takes_weights(self._loss), False
        if isinstance(self._loss, SeqLoss):
            self._masks_outputs = self._loss.elementwise
            self._of_classes = self._loss.classes
        self._past: deque[Tensor] = deque()  # inputs before the oldest step that waits
        self._waiting: deque[_PendingStep] = deque()
        self._fresh: np.ndarray | None = None  # series that begin anew at the next step

    # -- steps -------------------------------------------------------------------------------------

    def note(self, x: np.ndarray, gap: np.ndarray | None) -> None:
        """Keep a copy of the inputs (F, N) of a step until its target comes; ``gap`` marks series
        without any.
        """
        self._waiting.append((x.copy(), None if gap is None else ~gap, self._fresh))
        self._fresh = None

    def observe(self, y_true: np.ndarray) -> None:
        """Learn from the target (G, N) of the oldest step that waits; NaN where it is unknown.

        Raises
        ------
        FloatingPointError
            If the loss or its gradient is not finite. The parameters then stay.
        """
        x, live, fresh = self._waiting.popleft()
        if fresh is not None:
            self._begin_anew(fresh)
        if live is not None:
            y_true = np.where(live, y_true, np.nan)
        xs = to_tensor(x.T[None], self._dtype, self._device)  # (1, N, F)
        known = ~np.isnan(y_true.T[None])  # (1, N, G)
        if not self._masks_outputs:
            known[:] = known.all(-1, keepdims=True)
        batch = self._window(xs, self._as_target(y_true, known), known)
        # cuDNN computes no gradients in evaluation mode
        on_gpu = self._device.type == "cuda"
        without = torch.backends.cudnn.flags(enabled=False) if on_gpu else nullcontext()
        with without, torch.enable_grad():  # who only predicts may have switched gradients off
            self._step(batch)
        self._past.append(xs)
        if len(self._past) == self._n_steps:
            self._past.popleft()

    def _as_target(self, y_true: np.ndarray, known: np.ndarray) -> Tensor:
        """Return a target (G, N) as the loss takes it, (1, N, G), zeros where it is unknown."""
        y = np.where(known, y_true.T[None], 0)
        if self._of_classes:
            return torch.from_numpy(y.astype(np.int64)).to(self._device)
        if self._scale is not None:
            y = (y - self._scale.mean) / self._scale.scale
        return torch.from_numpy(y).to(self._device, self._dtype)

    def _window(self, xs: Tensor, y: Tensor, known: np.ndarray) -> Minibatch:
        """Return the step, with the earlier ones that its gradient reaches."""
        n_overlap = len(self._past)
        is_full = n_overlap == self._n_steps - 1
        next_start = None if self._n_steps == 1 else int(is_full)
        index = WindowIndex(self._rows, 0, n_overlap + 1, n_overlap, False, False, True, next_start)
        weight = None
        if not known.all():
            if (known.any(-1) == known.all(-1)).all():
                known = known[:, :, :1]
            weight = torch.from_numpy(known).to(self._device, self._dtype)
        if self._class_weight is not None:  # probabilities are told without it, see TargetCodec
            of_class = torch.from_numpy(self._class_weight).to(self._device, self._dtype)
            weight = of_class[y] if weight is None else weight * of_class[y]
        n_live = float(known.mean(-1).sum())
        inputs = torch.cat([*self._past, xs]) if n_overlap else xs
        return Minibatch((inputs,), (y,), None, weight, False, index, n_live)

    def _begin_anew(self, fresh: np.ndarray) -> None:
        """Restart some series (N,)."""
        # a window begins with one state: those of the other series become shorter for a while
        self._past.clear()
        where = torch.from_numpy(np.flatnonzero(fresh)).to(self._device)
        for layer in recurrent_layers(self.model):
            if layer.state is not None:
                layer.reset_series(where)

    # -- the state ---------------------------------------------------------------------------------

    def begin(self, states: list[State | None]) -> None:
        """Start from a state of the model, as :func:`fluxutils_py.nn.states.snapshot` gives it."""
        self.reset(None)
        restore(self.model, states)

    def reset(self, series: np.ndarray | None) -> None:
        """Start all series anew, or some. What was learnt stays; targets of earlier steps of these
        series are not learnt from.
        """
        if series is not None:
            chosen = np.zeros(self._n_series, bool)
            chosen[series] = True
            for k, (x, live, fresh) in enumerate(self._waiting):
                others = ~chosen if live is None else live & ~chosen
                self._waiting[k] = (x, others, fresh)
            self._fresh = chosen if self._fresh is None else self._fresh | chosen
            return
        reset(self.model)
        self._past.clear()
        self._waiting.clear()
        self._fresh = None

    @property
    def state(self) -> Tensor:
        """All that the next updates depend on, as bytes of a file of plain data and tensors."""
        content = {
            "n_series": self._n_series,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step.state_dict(),
            "past": list(self._past),
            "waiting": [tuple(map(_as_tensor, step)) for step in self._waiting],
            "fresh": _as_tensor(self._fresh),
        }
        file = io.BytesIO()
        torch.save(content, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def load(self, state: Tensor) -> None:
        """Continue from a :attr:`state` of such a learner.

        Raises
        ------
        LoadError, DataError
            If it is of another model or number of series, or damaged.
        """
        try:
            file = io.BytesIO(state.cpu().numpy().tobytes())
            content = torch.load(file, map_location=self._device, weights_only=True)
            self.model.load_state_dict(content["model"])
            self._optimizer.load_state_dict(content["optimizer"])
            _lay_out_memory(self._optimizer)
        except Exception as error:  # torch may raise any error for damaged bytes
            reason = (str(error).splitlines() or [""])[0]
            raise LoadError(
                f"state: what was learnt is damaged, or of another model ({type(error).__name__}: "
                f"{reason})"
            ) from None
        if content["n_series"] != self._n_series:
            raise DataError(
                f"the state is of a stream of {content['n_series']} series, this one has "
                f"{self._n_series}"
            )
        self.reset(None)
        self._step.load_state_dict(content["step"])
        self._past.extend(content["past"])
        for x, live, fresh in content["waiting"]:
            self._waiting.append((_as_array(x), _as_array(live), _as_array(fresh)))
        self._fresh = _as_array(content["fresh"])


def _lay_out_memory(optimizer: Optimizer) -> None:
    """Give what an optimizer remembers of each parameter the strides of the parameter: fused ones
    walk through memory, and states of version 0.2.0 have other strides.
    """
    for p, memory in optimizer.state.items():
        for name, value in memory.items():
            is_like = isinstance(value, Tensor) and value.shape == p.shape
            if is_like and value.stride() != p.stride():
                memory[name] = torch.empty_like(p.detach()).copy_(value)


def _as_tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _as_array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.cpu().numpy()


def _new_optimizer(est: BaseSeriesEstimator, model: nn.Module, rate: float | None) -> Optimizer:
    """Return an optimizer like that of the fit for a copy of its model, without its memory: that is
    of gradients of minibatches.
    """
    settings = est.resolved_params()
    if hasattr(est, "optimizer_"):
        optimizer = rebind(est.optimizer_, est.model_, model)
    else:  # loaded without the code for it
        optimizer = build_optimizer(settings.opt, settings.model, model)
    groups = [group for group in optimizer.param_groups if "lr" in group]
    if read_spec(settings.spec).schedule_follows_length:
        # its rates have followed the length of a fit, to 0
        for group in groups:
            group["lr"] = group.get("initial_lr", group["lr"])
    highest = max((float(group["lr"]) for group in groups), default=0.0)
    factor = SHARE_OF_RATE
    if rate is not None and highest > 0:
        factor = rate / highest
    for group in groups:
        group["lr"] = factor * group["lr"]
    return optimizer
