"""Models as pure functions of one step and a state, for export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.errors import ExportError
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.kernels import native_kernels
from fluxutils_py.nn.model_windows import window_mode
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.states import recurrent_layers, reset

N_SERIES = 3  # of examples


class InitialState(NamedTuple):
    """The value of one tensor of a state at the start of a series, for a batch of 1, and its batch
    axis.
    """

    value: Tensor
    batch_axis: int

    def of(self, n_series: int) -> Tensor:
        """Return the value for a batch, as a new tensor."""
        return self.value.repeat_interleave(n_series, self.batch_axis)


class ModelStep(nn.Module):
    """One step of a model as a pure function: ``step(*inputs, *states)`` returns ``(*outputs,
    *next_states)``.

    Parameters
    ----------
    model : nn.Module
        A model whose state lives in :class:`fluxutils_py.nn.Recur` layers. It is copied to the CPU,
        in evaluation mode.
    inputs : sequence of Tensor of shape (S, B, F)
        Some inputs of the model, for instance noise, to try it out on.

    Attributes
    ----------
    initial : tuple of InitialState
        One for each tensor of :func:`fluxutils_py.states`, in its order.
    n_outputs : int

    Raises
    ------
    ExportError
        If the model looks into the future, holds a loss, gives something else than (B, G) for a
        step, or does not tell its initial state. The message names the module.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        examples = [x.detach().cpu()[:, [0] * N_SERIES] for x in inputs]
        self.model = reset(deep_copy(model).cpu().eval()).requires_grad_(False)
        require_exportable(self.model)
        self.windowed = window_mode(model, inputs) == "windows"
        self.layers = recurrent_layers(self.model)
        if self.windowed:
            require_causal(self.model, examples)
        for layer in self.layers:
            inner = layer.module
            if hasattr(inner, "step"):
                layer.module = _Stepwise(inner)
            elif isinstance(inner, nn.RNNBase) and (
                inner.weight_ih_l0.dtype is torch.float64
                or torch.__version__ < "2.13"  # scans mistake them
            ):
                layer.module = _TorchLayer(inner)
        with native_kernels(False), torch.no_grad():
            self._find_states([x[0] for x in examples])

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(tensors) - len(self.initial)
        self._set_states(tensors[n:])
        outputs = self._run_model(tensors[:n])
        after = [t for layer in self.layers for t in _state_tensors(layer)]
        reset(self.model)
        return (*outputs, *after)

    def _run_model(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = self.model(*(x[None] for x in xs)) if self.windowed else self.model(*xs)
        outputs = (out,) if isinstance(out, Tensor) else tuple(out)
        return tuple(o[0] for o in outputs) if self.windowed else outputs

    def _set_states(self, tensors: Sequence[Tensor]) -> None:
        at = 0
        for layer, (n, form) in zip(self.layers, self._forms, strict=True):
            part = tuple(tensors[at : at + n])
            object.__setattr__(layer, "state", part[0] if form == 0 else part)
            at += n

    def _find_states(self, xs: list[Tensor]) -> None:
        """Run one step from the start to see the state, and one from the initial state that this
        would be.
        """
        self._forms: list[tuple[int, int]] = []
        initial: list[InitialState] = []
        outputs, fresh = self._run_watched(xs)
        self.n_outputs = len(outputs)
        for layer in self.layers:
            if layer.state is None:  # never called
                empty = layer.empty_state() or ()
                self._forms.append((len(empty), 0 if len(empty) == 1 else len(empty)))
            else:
                self._forms.append(
                    (len(_state_tensors(layer)), 0 if isinstance(layer.state, Tensor) else 2)
                )
            initial += _initial_states(layer)
        self.initial = tuple(initial)
        reset(self.model)
        for o in outputs:
            if o.shape[:-1] != (N_SERIES,):
                lost = "a loss" if o.dim() == 0 else f"outputs of shape {tuple(o.shape)}"
                raise ExportError(
                    f"{type(self.model).__name__} gives {lost} for a step of {N_SERIES} series; "
                    f"what is exported gives outputs (B, G) = ({N_SERIES}, G): leave losses out of "
                    "the model, and give them to the estimator"
                )
        self._set_states([s.of(N_SERIES) for s in self.initial])
        _, started = self._run_watched(xs)
        reset(self.model)
        for name, y in fresh.items():
            if not torch.allclose(y, started[name], rtol=1e-5, atol=1e-6, equal_nan=True):
                raise ExportError(
                    f"{name!r} does not start from zeros: its first output differs if it gets "
                    "zeros as its state. Give its module a method empty_state() and Recur(module, "
                    "trainable_init=True), so that the initial state is known"
                )

    def _run_watched(self, xs: list[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Run one step; return the outputs, and the outputs of each recurrent layer by name."""
        seen: dict[str, Tensor] = {}
        names = [name for name, m in self.model.named_modules() if isinstance(m, Recur)]

        def hook(name: str) -> Any:
            def note(_: nn.Module, __: Any, y: Tensor) -> None:
                seen[name] = y.clone()

            return note

        hooks = [
            m.register_forward_hook(hook(n or "model"))
            for n, m in zip(names, self.layers, strict=True)
        ]
        try:
            outputs = self._run_model([x.clone() for x in xs])
        finally:
            for h in hooks:
                h.remove()
        return outputs, seen


class _Stepwise(nn.Module):
    """A recurrent module of this package by the formula of one step, in operations that every
    runtime has.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.batch_dim = module, getattr(module, "batch_dim", 0)

    def empty_state(self) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.module.empty_state()
        return found

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        if state is None:  # at the start, which the whole module knows
            ys, state = self.module(x[None])
            return ys[0], state
        y: tuple[Tensor, Any] = self.module.step(x, state)
        return y


class _TorchLayer(nn.Module):
    """One step of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` by its formula: runtimes have fused ones in
    float32 only.
    """

    batch_dim = 1

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.kind = layer.mode  # "LSTM", "GRU", "RNN_TANH", "RNN_RELU"

    def empty_state(self) -> tuple[Tensor, ...]:
        like, m = next(self.parameters()).detach(), self.layer
        h = like.new_zeros(m.num_layers, 0, m.proj_size or m.hidden_size)
        return (h, like.new_zeros(m.num_layers, 0, m.hidden_size)) if self.kind == "LSTM" else (h,)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        if state is None:
            ys, state = self.layer(x[None])
            return ys[0], state
        before = zip(*state, strict=True) if self.kind == "LSTM" else ((h,) for h in state)
        after = []
        for weights, s in zip(self.layer.all_weights, before, strict=True):
            new = self._cell_step(x, s, *weights)
            after.append(new)
            x = new[0]
        joined = tuple(torch.stack(parts) for parts in zip(*after, strict=True))
        return x, joined if self.kind == "LSTM" else joined[0]

    def _cell_step(
        self, x: Tensor, state: tuple[Tensor, ...], w_x: Tensor, w_h: Tensor, *more: Tensor
    ) -> tuple[Tensor, ...]:
        biases, h = more[:2] if self.layer.bias else (None, None), state[0]
        a, b = F.linear(x, w_x, biases[0]), F.linear(h, w_h, biases[1])
        if self.kind == "GRU":
            (xr, xz, xn), (hr, hz, hn) = a.chunk(3, 1), b.chunk(3, 1)
            z = torch.sigmoid(xz + hz)
            return ((1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h,)
        if self.kind != "LSTM":
            return (torch.relu(a + b) if self.kind == "RNN_RELU" else torch.tanh(a + b),)
        i, f, g, o = (a + b).chunk(4, 1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (F.linear(h, more[-1]) if self.layer.proj_size else h), c


def _state_tensors(layer: Recur) -> list[Tensor]:
    state = layer.state
    return [] if state is None else [state] if isinstance(state, Tensor) else list(state)


def _initial_states(layer: Recur) -> list[InitialState]:
    """Return the initial state of a layer that has run one step."""
    if layer.trainable_init:
        return [InitialState(p.detach().clone(), layer.batch_dim) for p in layer.initial_state]
    d, like = layer.batch_dim, layer.empty_state() if layer.state is None else _state_tensors(layer)
    return [InitialState(t.new_zeros([*t.shape[:d], 1, *t.shape[d + 1 :]]), d) for t in like or ()]


def require_exportable(model: nn.Module) -> None:
    """Raise an ExportError that names the first module that reads the future or is a loss."""
    for name, m in model.named_modules():
        where = f"{name or 'the model'!s} ({type(m).__name__})"
        if isinstance(m, nn.RNNBase) and m.bidirectional:
            raise ExportError(
                f"{where} is bidirectional: it reads the future, so that no step can be computed "
                "when it arrives; build it with bidirectional=False"
            )
        if isinstance(m, nn.modules.loss._Loss):
            raise ExportError(
                f"{where} is a loss; leave it out of the model and give it to the estimator as loss"
            )


def require_causal(model: nn.Module, xs: Sequence[Tensor]) -> None:
    """Raise an ExportError that names the module if outputs depend on later inputs."""
    seen: list[dict[str, Tensor]] = [{}, {}]
    changed = [x.clone() for x in xs]
    for x in changed:
        x[-1] = x[-1] + 1 if x.is_floating_point() else x[0]
    names = {m: name or "model" for name, m in model.named_modules()}

    def hooked(found: dict[str, Tensor]) -> Any:
        def note(m: nn.Module, _: Any, y: Any) -> None:
            first = y if isinstance(y, Tensor) else y[0] if isinstance(y, tuple) and y else None
            if isinstance(first, Tensor) and first.dim() == 3 and len(first) == len(xs[0]):
                found.setdefault(f"{names[m]} ({type(m).__name__})", first[:-1].clone())

        return note

    with torch.no_grad():
        for found, inputs in zip(seen, (xs, changed), strict=True):
            hooks = [m.register_forward_hook(hooked(found)) for m in names]
            reset(model)(*inputs)
            for h in hooks:
                h.remove()
    reset(model)
    for name, y in seen[0].items():
        other = seen[1].get(name)
        if other is not None and not torch.allclose(y, other, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ExportError(
                f"{name} reads the future: outputs of a step change with later inputs; make it "
                "causal"
            )


class ContextWindow(nn.Module):
    """A model over windows whose state is its last inputs: ``forward(*inputs, *states) ->
    (*outputs, *next_states)``.

    It is for models without recurrent layers that take whole windows, such as a convolution with
    padding. Before each window it puts the last ``overlap`` inputs, fewer at the start of a series,
    as streams of estimators do.

    Parameters
    ----------
    model : nn.Module
        It is copied to the CPU, in evaluation mode.
    inputs : sequence of Tensor of shape (S, B, F)
        Some inputs of the model.
    overlap : int

    Attributes
    ----------
    initial : tuple of InitialState
        Of each input, zero steps (0, B, F), which become up to ``overlap``; none if that is 0.

    Raises
    ------
    ExportError
        If the model looks into the future, or holds a loss.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor], overlap: int) -> None:
        super().__init__()
        self.model, self.overlap = deep_copy(model).cpu().eval().requires_grad_(False), overlap
        require_exportable(self.model)
        require_causal(self.model, [x.detach().cpu() for x in inputs])
        empty = [x.detach().cpu().new_zeros(0, 1, x.shape[2]) for x in inputs]
        self.initial = tuple(InitialState(x, 1) for x in empty) if overlap else ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(tensors) - len(self.initial)
        xs, before = tensors[:n], tensors[n:]
        if before:
            xs = tuple(torch.cat(both) for both in zip(before, xs, strict=True))
        found = self.model(*xs)
        outputs = (found,) if isinstance(found, Tensor) else tuple(found)
        if not before:
            return outputs
        past, steps = before[0].shape[0], xs[0].shape[0]
        forgotten = torch.sym_max(0, steps - self.overlap)
        return (*(y[past:] for y in outputs), *(x[forgotten:] for x in xs))
