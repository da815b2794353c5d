"""Describe one step of a model as a list of operations on plain arrays.

:func:`program_of` makes a :class:`StepProgram` of a model of stateful layers, linear layers and
activations. Two consumers share it: :class:`fluxutils_py.steps.native_step.NativeStep` runs it in
one call, and a C file holds it as source. What surrounds a model in an estimator, scalers of inputs
and the units or labels of outputs, is in :mod:`fluxutils_py.estimator.streams.step_chain`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.causal_kernels import TRIPLES, _Kernels
from fluxutils_py.nn.cells import (
    CellStack,
    FLSTMCell,
    HFGRUCell,
    MGUCell,
    SGRUCell,
    SMGUCell,
    _Cell,
)
from fluxutils_py.nn.closed_form_model import ClosedFormModel, InputScale
from fluxutils_py.nn.kernels.modules import is_intercepted, is_plain
from fluxutils_py.nn.layers import BatchNorm, Elementwise, GaussianNoise
from fluxutils_py.nn.linear_rnn import _DiagonalRecurrence, _MinGRU, _MinLSTM
from fluxutils_py.nn.ready_made import (
    LARGEST,
    LinearPlusNetwork,
    MeanModel,
    MeanOfKernels,
    WithIntervals,
)
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.sequence_stack import SequenceStack, _Block
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.nn.time_features import (
    _ExponentialMeans,
    _Lags,
    _RollingStatistics,
    _RunningStatistics,
)
from fluxutils_py.steps.operations import (
    CELLS,
    FUNCTIONS,
    Activation,
    CellStep,
    Dense,
    Diagonal,
    Dots,
    Fade,
    Gated,
    Join,
    KernelHits,
    LagValues,
    LayerNormalization,
    Means,
    Operation,
    Rolling,
    Running,
    Scaler,
    ScaleShift,
    Sum,
)


class UnsupportedStep(TypeError):
    """A model has a part that no operation describes; the message names it."""


class StateTensor(NamedTuple):
    """One tensor of a model's state.

    Attributes
    ----------
    layer : int
        Its place among :func:`fluxutils_py.nn.states.recurrent_layers`.
    batch_axis : int
    initial : ndarray
        Of one series: (L, H), (H,), or (n_states, 2); of past inputs (n_past, F).
    """

    layer: int
    batch_axis: int
    initial: np.ndarray


class StepProgram(NamedTuple):
    """One step of a model for one series.

    Attributes
    ----------
    n_in, n_out : int
        Features of the input and of the output, which is the last value.
    dtype : numpy.dtype
        float32 or float64, of all weights and values, and of states but those of KernelHits.
    operations : tuple of Operation
        In order; each value is computed once.
    states : tuple of StateTensor
        In the order of :func:`fluxutils_py.states`.
    tensors : tuple of Tensor
        The parameters and buffers that the program was made from: it is out of date once one of
        them has another ``data_ptr()`` or ``_version``.
    moments : Scaler, optional
        Value 0 is the input after it. The input is rounded to ``dtype`` before and after.
    """

    n_in: int
    n_out: int
    dtype: np.dtype
    operations: tuple[Operation, ...]
    states: tuple[StateTensor, ...]
    tensors: tuple[Tensor, ...]
    moments: Scaler | None = None

    def size_of(self, value: int) -> int:
        """Return how many numbers a value has."""
        return self.operations[value - 1].n_out if value else self.n_in


def step_program(model: nn.Module, n_in: int) -> StepProgram | None:
    """Return :func:`program_of` a model, or None if there is none."""
    try:
        return program_of(model, n_in)
    except UnsupportedStep:
        return None


def program_of(model: nn.Module, n_in: int) -> StepProgram:
    """Describe one step of a model in evaluation mode.

    Parameters
    ----------
    model : nn.Module
        Made of ``nn.Sequential``, the recurrent layers and cells of torch and of this package in
        :class:`Recur`, :class:`SequenceStack`, linear layers, normalisations and activations; or a
        model of the ready-made estimators. On the CPU, in evaluation mode.
    n_in : int
        Features of its input.

    Raises
    ------
    UnsupportedStep
        If a part is anything else, is a subclass, has hooks or computed weights, or is in training
        mode.
    """
    if any(m.training for m in model.modules()):
        raise UnsupportedStep(f"{type(model).__name__} is in training mode")
    writer = _Writer(model, n_in)
    result = writer.write(model, 0)
    # one that ends with its input has computed for nothing
    if not writer.tensors or result != len(writer.operations):
        raise UnsupportedStep(f"{type(model).__name__} computes nothing")
    return StepProgram(
        n_in,
        writer.sizes[-1],
        writer.dtype,
        tuple(writer.operations),
        tuple(writer.states),
        tuple(writer.tensors),
        writer.moments,
    )


class _Writer:
    """Writes the operations of a model, module by module."""

    def __init__(self, model: nn.Module, n_in: int) -> None:
        self.sizes = [n_in]  # of the values
        self.operations: list[Operation] = []
        self.states: list[StateTensor] = []
        self.tensors: list[Tensor] = []
        self.moments: Scaler | None = None
        self._n_scaled = 0
        self._layers = {id(r): i for i, r in enumerate(recurrent_layers(model))}
        # of what a layer has no parameters for, which may come before all parameters
        plain = filter(is_plain, chain(model.parameters(), model.buffers()))
        self.dtype = next((_as_array(t).dtype for t in plain), np.dtype("f4"))

    def write(self, module: nn.Module, source: int) -> int:
        """Write a module that reads a value; return the value that holds its result."""
        if is_intercepted(module):
            raise UnsupportedStep(f"{type(module).__name__} has hooks")
        writer = _WRITERS.get(type(module))
        if writer is not None:
            return writer(self, module, source)
        # classes that only build what they hold compute as their base does
        if isinstance(module, nn.Sequential) and _computes_as(type(module), nn.Sequential):
            return self.write_sequence(module, source)
        if isinstance(module, Recur) and _computes_as(type(module), Recur):
            return self.write_recurrent(module, source)
        raise UnsupportedStep(f"no operation computes {type(module).__name__}")

    def add(self, operation: Operation) -> int:
        self.operations.append(operation)
        self.sizes.append(operation.n_out)
        return len(self.operations)

    def add_product(self, source: int, weight: np.ndarray, bias: np.ndarray | None = None) -> int:
        """Add a product with weights (n_out, n_in), which are copied."""
        n_out, n_in = weight.shape
        if bias is None:
            bias = np.zeros(n_out, self.dtype)
        if n_out < 16 and n_in >= 64 and n_in > 8 * n_out:
            return self.add(Dots(source, n_out, np.array(weight, self.dtype), bias))
        return self.add(Dense(source, n_out, _columns(weight, self.dtype), bias))

    def array(self, module: nn.Module, name: str, is_weight: bool = True) -> np.ndarray:
        """Return a parameter or buffer as an array that shares its memory, of the type of the
        weights unless it is none.
        """
        content = vars(module)
        tensor = content["_parameters"].get(name)
        if tensor is None:
            tensor = content["_buffers"].get(name)
        is_known = type(tensor) is Tensor and tensor.is_cpu
        if is_weight:
            is_known = tensor is not None and is_plain(tensor)
        if not is_known or tensor.is_inference():
            raise UnsupportedStep(f"{name} of {type(module).__name__} is not a plain tensor")
        array = _as_array(tensor)
        if is_weight and array.dtype != self.dtype:
            raise UnsupportedStep(f"{name} of {type(module).__name__} has another type of weights")
        self.tensors.append(tensor)
        return array

    def optional(self, module: nn.Module, name: str, n: int, default: float) -> np.ndarray:
        """Return a parameter (n,), or an array of the default if the module has none."""
        if getattr(module, name) is not None:
            return self.array(module, name)
        return np.full(n, default, self.dtype)

    def _check_size(self, module: nn.Module, source: int, n_in: int) -> None:
        if self.sizes[source] != n_in:
            raise UnsupportedStep(
                f"{type(module).__name__} takes {n_in} features, got {self.sizes[source]}"
            )

    # -- plain layers ------------------------------------------------------------------------------

    def write_sequence(self, module: nn.Module, source: int) -> int:
        # not children(), which shows a layer that stands in two places once
        for child in vars(module)["_modules"].values():
            source = self.write(child, source)
        return source

    def write_nothing(self, module: nn.Module, source: int) -> int:
        return source

    def write_linear(self, module: Any, source: int) -> int:
        self._check_size(module, source, module.in_features)
        return self.add_product(source, *self.linear_arrays(module))

    def linear_arrays(self, module: nn.Module) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights (n_out, n_in) of a linear layer, and a copy of its bias."""
        if type(module) is not nn.Linear or is_intercepted(module):
            raise UnsupportedStep(f"{type(module).__name__} is no plain linear layer")
        weight = self.array(module, "weight")
        return weight, np.array(self.optional(module, "bias", len(weight), 0.0))

    def write_activation(self, module: Any, source: int) -> int:
        n = self.sizes[source]
        function: Any = module.function if isinstance(module, Elementwise) else type(module)
        name, parameter = _ACTIVATIONS.get(function, ("", ""))
        is_other = isinstance(module, nn.Softplus | nn.GELU) and repr(module) != repr(function())
        if not name or is_other:
            raise UnsupportedStep(f"no operation computes {module}")
        alpha = float(getattr(module, parameter)) if parameter else 0.0
        return self.add(Activation(source, n, cell=FUNCTIONS.index(name), alpha=alpha))

    def write_layer_norm(self, module: Any, source: int) -> int:
        n = self.sizes[source]
        if tuple(module.normalized_shape) != (n,):
            raise UnsupportedStep(f"LayerNorm of {module.normalized_shape}, got {n} features")
        weight = np.array(self.optional(module, "weight", n, 1.0))
        bias = np.array(self.optional(module, "bias", n, 0.0))
        return self.add(LayerNormalization(source, n, weight, bias, alpha=module.eps))

    def write_batch_norm(self, module: Any, source: int) -> int:
        self._check_size(module, source, module.num_features)
        n = module.num_features
        if module.running_mean is None:
            raise UnsupportedStep(f"{type(module).__name__} takes the statistics of its batch")
        mean = self.array(module, "running_mean")
        variance = self.array(module, "running_var")
        scale = self.optional(module, "weight", n, 1.0) / np.sqrt(variance + module.eps)
        shift = self.optional(module, "bias", n, 0.0) - mean * scale
        return self.add(ScaleShift(source, n, scale.astype(mean.dtype), shift.astype(mean.dtype)))

    def write_stack(self, module: Any, source: int) -> int:
        value = self.write(module.embed, source)
        value = self.write(module.blocks, value)
        return self.write(module.norm, value)

    def write_block(self, module: Any, source: int) -> int:
        layer = self.write(module.layer, self.write(module.layer_norm, source))
        layer = self.write(module.dropout, layer)
        x = self.add(Sum(source, self.sizes[source], other=layer))
        up = self.write(module.up, self.write(module.mlp_norm, x))
        mixed = self.write(module.down, self.add(Gated(up, self.sizes[up] // 2)))
        return self.add(Sum(x, self.sizes[x], other=self.write(module.dropout, mixed)))

    # -- models of the ready-made estimators -------------------------------------------------------

    def write_input_scale(self, module: Any, source: int) -> int:
        self._check_size(module, source, len(module.mean))
        if module.fills_gaps:
            raise UnsupportedStep("an InputScale that fills gaps")
        arrays = [self.array(module, name, False).astype(float) for name in ("mean", "scale")]
        moments = Scaler("standardize", *arrays)
        is_first = not self.operations
        if self.moments is not None:
            is_first = np.array_equal(self.moments[1:3], moments[1:3])
        if source or not is_first:
            raise UnsupportedStep("an InputScale that is not what all inputs go through first")
        self.moments = moments
        self._n_scaled += 1
        return 0

    def write_closed_form(self, module: Any, source: int) -> int:
        """Write a linear head on features side by side as a sum of one product for each layer."""
        scaled = self.write(module.scale, source)
        weight, bias = self.linear_arrays(module.head)
        start = 0
        total = -1
        for layer in module.layers:
            features = self.write(layer, scaled)
            stop = start + self.sizes[features]
            product = self.add_product(features, weight[:, start:stop], bias)
            total = product if total < 0 else self.add(Sum(total, len(weight), other=product))
            bias = np.zeros_like(bias)
            start = stop
        return total

    def write_linear_plus_network(self, module: Any, source: int) -> int:
        linear = self.write(module.linear, source)
        scaled = self.write(module.linear.scale, source)
        seen = level = scaled
        first = 0
        if module.means is not None:
            level = means = self.write(module.means, scaled)
            first = self.sizes[scaled]
            seen = self.add(Join(scaled, self.sizes[scaled] + self.sizes[means], other=means))
        clamp = FUNCTIONS.index("clamp")
        clamped = self.add(Activation(seen, self.sizes[seen], cell=clamp, alpha=LARGEST))
        value = self.write(module.network, self.write(module.noise, clamped))
        added = self.write(module.head, self.write(module.dropout, value))
        n = self.sizes[added]
        gain = np.full(n, module.gain, self.dtype)
        scaled_up = self.add(ScaleShift(added, n, gain, np.zeros_like(gain)))
        fade = Fade(
            scaled_up,
            n,
            alpha=LARGEST + 1,
            other=level,
            first=first,
            n_levels=self.sizes[scaled],
        )
        return self.add(Sum(linear, n, other=self.add(fade)))

    def write_with_intervals(self, module: Any, source: int) -> int:
        y = self.write(module.center, source)
        scaled = source if module.scale is None else self.write(module.scale, source)
        n = self.sizes[y]
        known = self.add(Join(scaled, self.sizes[scaled] + n, other=y))
        means = self.write(module.means, known)
        seen = self.add(Join(known, self.sizes[known] + self.sizes[means], other=means))
        clamp = FUNCTIONS.index("clamp")
        clamped = self.add(Activation(seen, self.sizes[seen], cell=clamp, alpha=LARGEST))
        value = self.write(module.network, self.write(module.noise, clamped))
        value = self.write(module.head, self.write(module.dropout, value))
        softplus = FUNCTIONS.index("softplus")
        value = self.add(Activation(value, self.sizes[value], cell=softplus))
        distances = self.write(module.ends, value)
        n_ends = self.sizes[distances]
        copies = self.add_product(y, np.tile(np.eye(n, dtype=self.dtype), (n_ends // n, 1)))
        ends = self.add(Sum(copies, n_ends, other=distances))
        return self.add(Join(y, n + n_ends, other=ends))

    def write_mean(self, module: Any, source: int) -> int:
        values = []
        counts = []
        for member in module.members:
            values.append(self.write(member, source))
            counts.append(self._n_scaled > 0)
            self._n_scaled = 0
        if len(set(counts)) != 1:
            raise UnsupportedStep("models of which some standardise their inputs, and some do not")
        total = values[0]
        n = self.sizes[total]
        for value in values[1:]:
            total = self.add(Sum(total, n, other=value))
        share = np.full(n, 1 / len(values), self.dtype)
        return self.add(ScaleShift(total, n, share, np.zeros_like(share)))

    # -- recurrent layers --------------------------------------------------------------------------

    def write_recurrent(self, layer: Recur, source: int) -> int:
        inner = layer.module
        writer = _CELL_WRITERS.get(type(inner))
        index = self._layers.pop(id(layer), None)
        # a layer that stands in two places moves its state twice; none that is asked for its class
        if writer is None or index is None or is_intercepted(inner):
            name = f"{type(layer).__name__}({type(inner).__name__})"
            raise UnsupportedStep(f"no operation computes {name}")
        first_cell: Any = inner.cells[0] if isinstance(inner, CellStack) else inner
        n_in = first_cell.input_size if hasattr(inner, "input_size") else first_cell.n_in
        self._check_size(inner, source, n_in)
        first = len(self.states)
        empty = layer.empty_state()
        assert empty is not None
        axis = layer.batch_dim
        for k, t in enumerate(empty):
            if not is_plain(t):
                raise UnsupportedStep(f"the state of {type(layer).__name__} is {t.dtype}")
            shape = (*t.shape[:axis], *t.shape[axis + 1 :])
            initial = np.zeros(shape, _as_array(t).dtype)
            if layer.trainable_init:
                trained = self.array(layer.initial_state, str(k))
                initial = np.array(trained.reshape(shape))
            self.states.append(StateTensor(index, axis, initial))
        return writer(self, inner, source, tuple(range(first, len(self.states))))

    def write_torch(self, module: Any, source: int, states: tuple[int, ...], number: int) -> int:
        """Write an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``, or a cell of these."""
        n_layers = getattr(module, "num_layers", 1)
        if getattr(module, "proj_size", 0):
            raise UnsupportedStep(f"no operation computes projections: {module}")
        if getattr(module, "nonlinearity", "tanh") == "relu":
            number += 1
        names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"][: 4 if module.bias else 2]
        for k in range(n_layers):
            layer = f"_l{k}" if isinstance(module, nn.RNNBase) else ""
            weights = [self.array(module, name + layer) for name in names]
            source = self._add_cell(number, 0.0, source, states, k, weights)
        return source

    def write_own_stack(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        for k, cell in enumerate(module.cells):
            if type(cell) not in _OWN_CELLS or is_intercepted(cell):
                raise UnsupportedStep(f"no operation computes {type(cell).__name__}")
            source = self.write_own_cell(cell, source, states, k)
        return source

    def write_own_cell(
        self, cell: _Cell, source: int, states: tuple[int, ...], place: int = 0
    ) -> int:
        weights = [self.array(cell, n) for n in ("weight_ih", "weight_hh", "bias")]
        form: object = cell.form
        if not isinstance(form, int | float):  # a tensor may stand in for alpha
            raise UnsupportedStep(f"{type(cell).__name__} depends on a tensor instead of a number")
        return self._add_cell(cell.kernel, form, source, states, place, weights)

    def write_input_gated(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        weight, bias = self.linear_arrays(module.linear)
        no_products = np.empty((0, module.n_out), weight.dtype)
        return self._add_cell(module.kernel, 0.0, source, states, 0, [weight, no_products, bias])

    def write_diagonal(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        """Write an LRU: products, eigenvalues, products, and those of the input."""
        n = 2 * module.n_states
        names = ("weight_in", "weight_out", "weight_skip", "nu_log", "theta_log", "gamma_log")
        w_in, w_out, skip, _nu_log, _theta_log, gamma_log = (self.array(module, k) for k in names)
        # with the rounding that windows have: of a modulus close to 1 it adds up over many steps
        with torch.no_grad():
            pairs = _as_array(torch.view_as_real(module.eigenvalues())).ravel()
        scaled = np.exp(gamma_log.astype(float)).repeat(2)[:, None] * w_in
        added = self.add_product(source, scaled)
        h = self.add(Diagonal(added, n, pairs.astype(self.dtype), states=states))
        y = self.add_product(h, w_out)
        return self.add(Sum(y, module.n_out, other=self.add_product(source, skip)))

    def write_lags(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        n_out = module.n_in * len(module.lags)
        return self.add(LagValues(source, n_out, numbers=tuple(module.lags), states=states))

    def write_means(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        factors = self.array(module, "factors", False).astype(self.dtype)
        return self.add(Means(source, len(factors), factors, states=states))

    def write_rolling(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        n_out = 3 * module.n_in * len(module.spans)
        return self.add(Rolling(source, n_out, numbers=tuple(module.spans), states=states))

    def write_running(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        return self.add(Running(source, 7 * module.n_in + 1, states=states))

    def write_kernels(self, module: Any, source: int, states: tuple[int, ...]) -> int:
        biases = np.array(self.array(module, "biases"))
        plan = self.array(module, "dilations", False)
        plan = plan[plan[:, 0] > 0]
        n_kernels = len(TRIPLES) * len(plan)
        channels = np.array(self.array(module, "channels", False)[:n_kernels])
        if len(TRIPLES) * plan[:, 1].sum() != len(biases):
            raise UnsupportedStep(f"{len(biases)} biases, for the dilations and numbers {plan}")
        n_out = 2 * len(biases)
        return self.add(
            KernelHits(source, n_out, biases, w_h=channels, numbers=plan, states=states)
        )

    def _add_cell(
        self,
        number: int,
        alpha: float,
        source: int,
        states: tuple[int, ...],
        place: int,
        weights: Sequence[np.ndarray],
    ) -> int:
        """Add a cell with weights of x and h, and with no bias, one, or one for each."""
        form = CELLS[number]
        w_x, w_h, *biases = weights
        H = len(w_x) // len(form.of_x)
        bias = np.zeros((form.rows, H), w_x.dtype)
        orders = (form.of_x, form.of_h)
        if len(biases) == 1:
            orders = (form.of_bias or form.of_x, ())
        for b, order in zip(biases, orders, strict=False):
            for block, row in zip(b.reshape(-1, H), order, strict=True):
                bias[row] += block
        operation = CellStep(
            source,
            H,
            _in_rows(w_x, form.of_x, 0, H),
            bias.ravel(),
            _in_rows(w_h, form.of_h, form.rows - len(form.of_h), H),
            cell=number,
            alpha=float(alpha),
            states=states,
            place=place,
        )
        return self.add(operation)


def _computes_as(kind: type, base: type) -> bool:
    """Whether a class has the computing methods of a base class of its own."""
    names = ("forward", "__call__", "_run_module", "_call_module", "reset", "empty_state")
    return all(getattr(kind, n, None) is getattr(base, n, None) for n in names)


def _as_array(t: Tensor) -> np.ndarray:
    return t.detach().numpy()


def _columns(weight: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return weights (n_out, n_in) as (n_in, n_out), in memory of their own."""
    out = np.empty(weight.shape[::-1], dtype)
    # torch transposes four times as fast as NumPy where a row of memory is long
    torch.from_numpy(out).copy_(torch.from_numpy(weight).t())
    return out


def _in_rows(weight: np.ndarray, order: tuple[int, ...], first: int, H: int) -> np.ndarray:
    """Return weights (k H, n) as (n, k H), block after block in the order of the sums from
    ``first`` on.
    """
    blocks = weight.reshape(len(order), H, weight.shape[1])
    places = np.argsort([row - first for row in order])
    rows = blocks[places].reshape(-1, weight.shape[1])
    return _columns(rows, rows.dtype)


# by the class of the module, or by the function of an Elementwise: its name, and that of the
# attribute with its number
_ACTIVATIONS: dict[Any, tuple[str, str]] = {
    nn.ReLU: ("relu", ""),
    nn.Tanh: ("tanh", ""),
    nn.Sigmoid: ("sigmoid", ""),
    nn.SiLU: ("silu", ""),
    nn.LeakyReLU: ("leaky_relu", "negative_slope"),
    nn.ELU: ("elu", "alpha"),
    nn.Softplus: ("softplus", ""),
    nn.GELU: ("gelu", ""),
    torch.relu: ("relu", ""),
    F.relu: ("relu", ""),
    torch.tanh: ("tanh", ""),
    torch.sigmoid: ("sigmoid", ""),
    F.silu: ("silu", ""),
    psigmoid: ("parabolic_sigmoid", ""),
    ptanh: ("parabolic_tanh", ""),
}
# Exact classes only: subclasses may compute something else.
_WRITERS: dict[type, Callable[..., int]] = {
    nn.Sequential: _Writer.write_sequence,
    nn.Identity: _Writer.write_nothing,
    nn.Dropout: _Writer.write_nothing,
    GaussianNoise: _Writer.write_nothing,
    nn.Linear: _Writer.write_linear,
    nn.LayerNorm: _Writer.write_layer_norm,
    nn.BatchNorm1d: _Writer.write_batch_norm,
    BatchNorm: _Writer.write_batch_norm,
    SequenceStack: _Writer.write_stack,
    _Block: _Writer.write_block,
    Elementwise: _Writer.write_activation,
    InputScale: _Writer.write_input_scale,
    ClosedFormModel: _Writer.write_closed_form,
    LinearPlusNetwork: _Writer.write_linear_plus_network,
    WithIntervals: _Writer.write_with_intervals,
    MeanModel: _Writer.write_mean,
    MeanOfKernels: _Writer.write_mean,
    **dict.fromkeys(filter(inspect.isclass, _ACTIVATIONS), _Writer.write_activation),
}
_OWN_CELLS = (FLSTMCell, SGRUCell, MGUCell, SMGUCell, HFGRUCell)
_CELL_WRITERS: dict[type, Callable[..., int]] = {
    **dict.fromkeys((nn.LSTM, nn.LSTMCell), partial(_Writer.write_torch, number=0)),
    **dict.fromkeys((nn.GRU, nn.GRUCell), partial(_Writer.write_torch, number=1)),
    **dict.fromkeys((nn.RNN, nn.RNNCell), partial(_Writer.write_torch, number=2)),
    CellStack: _Writer.write_own_stack,
    **dict.fromkeys(_OWN_CELLS, _Writer.write_own_cell),
    _MinGRU: _Writer.write_input_gated,
    _MinLSTM: _Writer.write_input_gated,
    _DiagonalRecurrence: _Writer.write_diagonal,
    _Lags: _Writer.write_lags,
    _ExponentialMeans: _Writer.write_means,
    _RollingStatistics: _Writer.write_rolling,
    _RunningStatistics: _Writer.write_running,
    _Kernels: _Writer.write_kernels,
}
