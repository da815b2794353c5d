"""Models as pure functions of one step and a state, for export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.errors import ExportError
from fluxutils_py.nn.cells import gru_step, lstm_step
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.kernels.library import native_kernels
from fluxutils_py.nn.model_windows import as_tuple, window_mode
from fluxutils_py.nn.recurrent import Recur, State
from fluxutils_py.nn.states import recurrent_layers, reset

N_SERIES = 3  # of examples: not 1, which torch would take for a constant
Tensors = tuple[Tensor, ...]


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
        A model whose state is in :class:`fluxutils_py.nn.Recur` layers. It is copied to the CPU,
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
        first_series = [0] * N_SERIES  # repeated
        examples = [x.detach().cpu()[:, first_series] for x in inputs]
        self.model = reset(deep_copy(model)).cpu().eval().requires_grad_(False)
        require_exportable(self.model)
        # of "either", single steps are used: they are what the graph computes
        self.windowed = window_mode(model, inputs) == "windows"
        self.layers = recurrent_layers(self.model)
        if self.windowed:
            require_causal(self.model, examples)
        for layer in self.layers:
            if _needs_formula(layer.module):
                layer.module = _Stepwise(layer)
        with native_kernels(False), torch.no_grad():
            self._find_states([x[0] for x in examples])

    def forward(self, *tensors: Tensor) -> Tensors:
        n = len(tensors) - len(self.initial)
        self._set_states(tensors[n:])
        outputs = self._run_model(tensors[:n])
        after: list[Tensor] = []
        for layer in self.layers:
            after += _state_tensors(layer)
        # tensors of a trace must not stay in the model
        reset(self.model)
        return (*outputs, *after)

    def _run_model(self, xs: Sequence[Tensor]) -> Tensors:
        if not self.windowed:
            return as_tuple(self.model(*xs))
        windows = [x[None] for x in xs]  # of one step
        outputs = as_tuple(self.model(*windows))
        return tuple(o[0] for o in outputs)

    def _set_states(self, tensors: Sequence[Tensor]) -> None:
        start = 0
        for layer, n in zip(self.layers, self._n_tensors, strict=True):
            part = tuple(tensors[start : start + n])
            # the form of the last state is 0 for a tensor without a tuple
            state = part[0] if n == 1 and not layer.form else part
            object.__setattr__(layer, "state", state)  # as Recur sets it
            start += n

    def _find_states(self, xs: list[Tensor]) -> None:
        """Run one step from the start to see the state, and one from the initial state that this
        would be.
        """
        outputs, of_layers = self._run_watched(xs)
        self.n_outputs = len(outputs)
        by_layer = [_initial_states(layer) for layer in self.layers]
        self._n_tensors = list(map(len, by_layer))
        self.initial = tuple(chain.from_iterable(by_layer))
        reset(self.model)
        # before the outputs are compared, whose axes would differ
        self._require_one_row_per_series(outputs)
        self._set_states([s.of(N_SERIES) for s in self.initial])
        _, started = self._run_watched(xs)
        reset(self.model)
        for name, y in of_layers.items():
            if not torch.allclose(y, started[name], 1e-5, 1e-6, equal_nan=True):
                raise ExportError(
                    f"{name!r} does not start from zeros: its first output differs if it gets "
                    "zeros as its state. Give its module a method empty_state() and Recur(module, "
                    "trainable_init=True), so that the initial state is known"
                )

    def _require_one_row_per_series(self, outputs: Sequence[Tensor]) -> None:
        for o in outputs:
            if o.shape[:-1] != (N_SERIES,):
                given = "a loss" if o.dim() == 0 else f"outputs of shape {tuple(o.shape)}"
                raise ExportError(
                    f"{type(self.model).__name__} gives {given} for a step of {N_SERIES} series; "
                    f"what is exported gives outputs (B, G) = ({N_SERIES}, G): leave losses out of "
                    "the model, and give them to the estimator"
                )

    def _run_watched(self, xs: list[Tensor]) -> tuple[Tensors, dict[str, Tensor]]:
        """Run one step; return its outputs, and what each recurrent layer returned by name."""
        seen: dict[str, Tensor] = {}
        layers: dict[str, nn.Module] = {}
        for name, m in self.model.named_modules():
            if isinstance(m, Recur):
                layers[name or "model"] = m

        def note(name: str, y: Tensor) -> None:
            seen[name] = y.clone()  # the model may change it

        copies = [x.clone() for x in xs]
        with _watching(layers, note):
            outputs = self._run_model(copies)
        return outputs, seen


@contextmanager
def _watching(modules: Mapping[str, nn.Module], note: Callable[[str, Any], None]) -> Iterator[None]:
    """Call ``note(name, output)`` after each call of one of the modules inside the block."""

    def hook_of(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: note(name, output)

    hooks = []
    for name, module in modules.items():
        hooks.append(module.register_forward_hook(hook_of(name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _needs_formula(module: nn.Module) -> bool:
    """Whether runtimes have no operator for a recurrent module, but for its formula."""
    if not isinstance(module, nn.RNNBase):
        return hasattr(module, "step")
    is_wide = module.weight_ih_l0.dtype is torch.float64  # fused layers are of float32 only
    # scans of torch before 2.13 mistake fused layers
    return is_wide or torch.__version__ < "2.13"


class _Stepwise(nn.Module):
    """A recurrent module by the formula of one step, in operations that every runtime has."""

    def __init__(self, layer: Recur) -> None:
        super().__init__()
        self.module: Any = layer.module
        self.batch_dim = layer.batch_dim
        self.empty = layer.empty_state()

    def empty_state(self) -> Tensors | None:
        return self.empty

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if state is None:  # at the start, which the whole module knows
            ys, state = self.module(x[None])
            return ys[0], state
        if isinstance(self.module, nn.RNNBase):
            return _torch_step(self.module, x, as_tuple(state))
        stepped: tuple[Tensor, State] = self.module.step(x, state)
        return stepped


def _torch_step(layer: nn.RNNBase, x: Tensor, states: Tensors) -> tuple[Tensor, State]:
    """Return the output and the state after one step of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``;
    ``states`` are h, or h and c, of all layers.
    """
    after = []
    for k, weights in enumerate(layer.all_weights):
        before = tuple(part[k] for part in states)
        after.append(_torch_cell(layer, x, before, weights))
        x = after[-1][0]
    stacked = tuple(map(torch.stack, zip(*after, strict=True)))
    return x, stacked if layer.mode == "LSTM" else stacked[0]


def _torch_cell(layer: nn.RNNBase, x: Tensor, state: Tensors, weights: Sequence[Tensor]) -> Tensors:
    """Return the state after one step of one layer; the first tensor is the output."""
    w_x, w_h, *more = weights
    b_x, b_h = more[:2] if layer.bias else (None, None)
    h = state[0]
    of_x = F.linear(x, w_x, b_x)
    of_h = F.linear(h, w_h, b_h)
    if layer.mode == "LSTM":
        h, c = lstm_step(of_x + of_h, state[1])
        if layer.proj_size:  # the projection is the last of the weights
            h = F.linear(h, more[-1])
        return h, c
    if layer.mode == "GRU":
        return (gru_step(of_x, of_h, h),)
    function = torch.relu if layer.mode == "RNN_RELU" else torch.tanh
    return (function(of_x + of_h),)


def _state_tensors(layer: Recur) -> Tensors:
    return () if layer.state is None else as_tuple(layer.state)


def _initial_states(layer: Recur) -> list[InitialState]:
    """Return the initial state of a layer that has run one step."""
    axis = layer.batch_dim
    values = []
    if layer.trainable_init:
        for p in layer.initial_state:
            values.append(p.detach().clone())
    else:
        for t in _state_tensors(layer) or layer.empty_state() or ():
            shape = list(t.shape)
            shape[axis] = 1
            values.append(t.new_zeros(shape))
    return [InitialState(value, axis) for value in values]


def require_exportable(model: nn.Module) -> None:
    """Raise an ExportError that names the first module that reads the future."""
    for name, m in model.named_modules():
        where = f"{name or 'the model'!s} ({type(m).__name__})"
        if isinstance(m, nn.RNNBase) and m.bidirectional:
            raise ExportError(
                f"{where} is bidirectional: it reads the future, so that no step can be computed "
                "when it arrives; build it with bidirectional=False"
            )


def require_causal(model: nn.Module, xs: Sequence[Tensor]) -> None:
    """Raise an ExportError that names the module if outputs depend on later inputs."""
    changed = [x.clone() for x in xs]
    for x in changed:
        # integers may be indices of classes: use one that occurs
        x[-1] = x[-1] + 1 if x.is_floating_point() else x[0]
    before = _earlier_outputs(model, xs)
    after = _earlier_outputs(model, changed)
    reset(model)
    for name, y in before.items():
        other = after.get(name)
        if other is not None and not torch.allclose(y, other, 1e-4, 1e-5, equal_nan=True):
            raise ExportError(
                f"{name} reads the future: outputs of a step change with later inputs; make it "
                "causal"
            )


def _earlier_outputs(model: nn.Module, xs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Run a model over a window; return the outputs of its modules for all steps but the last."""
    n_steps = len(xs[0])
    seen: dict[str, Tensor] = {}

    def note(name: str, y: Any) -> None:
        if isinstance(y, tuple) and y:
            y = y[0]  # outputs, before a state
        if isinstance(y, Tensor) and y.dim() == 3 and len(y) == n_steps:
            seen.setdefault(name, y[:-1].clone())  # of the first call

    modules = {}
    for name, m in model.named_modules():
        modules[f"{name or 'model'} ({type(m).__name__})"] = m
    with torch.no_grad(), _watching(modules, note):
        reset(model)(*xs)
    return seen
