"""What weights of 8 bits cost: a program of one step with them, run in NumPy.

The formulas are those of ``step.h``, in float64: the difference between two programs is then that
of their weights alone, also where there is no compiler and no native kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.causal_kernels import TAPS, TRIPLES
from fluxutils_py.steps.step_program import (
    Activation,
    CellStep,
    Dense,
    Diagonal,
    Fade,
    Gated,
    Join,
    KernelHits,
    LagValues,
    LayerNormalization,
    Means,
    Operation,
    PastOperation,
    Rolling,
    ScaleShift,
    StepProgram,
    Sum,
)

Function = Callable[[np.ndarray], np.ndarray]


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (n_in, n_out) as integers from -127 to 127, and the scale of each output."""
    largest = np.abs(weight).max(0, initial=0)
    scale = np.where(largest > 0, largest / 127, 1).astype(weight.dtype)
    return np.rint(weight / scale).astype(np.int8), scale


def with_rounded_weights(program: StepProgram) -> StepProgram:
    """Return a program whose products have the weights that 8 bits leave."""
    operations: list[Operation] = []
    for o in program.operations:
        if isinstance(o, Dense):
            o = replace(o, weight=_rounded(o.weight))
        elif isinstance(o, CellStep):
            o = replace(o, weight_x=_rounded(o.weight_x), weight_h=_rounded(o.weight_h))
        operations.append(o)
    return replace(program, operations=tuple(operations))


def _rounded(weight: np.ndarray) -> np.ndarray:
    integers, scale = quantized(weight)
    return integers * scale


def run_program(program: StepProgram, xs: np.ndarray) -> np.ndarray:
    """Return the outputs (T, B, G) of a program for steps (T, B, F) of some series, in float64."""
    n_series = xs.shape[1]
    states = []
    for state in program.states:
        # series first, whatever the model has
        start = np.repeat(np.asarray(state.initial, float)[None], n_series, 0)
        states.append(start.reshape(n_series, -1))
    outputs = []
    for x in xs.astype(float):
        values = [x]
        for operation in program.operations:
            values.append(_result(operation, values, states))
        outputs.append(values[-1])
    return np.stack(outputs)


def _result(o: Any, values: list[np.ndarray], states: list[np.ndarray]) -> np.ndarray:
    """Return the result (B, n_out) of an operation, and move its states (B, ...) on."""
    x = values[o.source]
    match o:
        case CellStep():
            return _cell_result(o, x, states)
        case PastOperation():
            return _past_result(o, x, states)
        case Dense():
            y = x @ o.weight + o.bias
        case Diagonal():
            (place,) = o.states
            h = states[place].view(complex)
            y = (o.eigenvalues.astype(float).view(complex) * h).view(float) + x
            states[place] = y
        case Activation():
            y = _ACTIVATIONS[o.function](torch.from_numpy(x), o.alpha).numpy()
        case Gated():
            gate = x[:, : o.n_out]
            y = gate * _sigmoid(gate) * x[:, o.n_out :]
        case Sum():
            y = x + values[o.other]
        case Join():
            y = np.concatenate([x, values[o.other]], 1)
        case LayerNormalization():
            centered = x - x.mean(1, keepdims=True)
            variance = np.square(centered).mean(1, keepdims=True)
            y = centered / np.sqrt(variance + o.eps) * o.weight + o.bias
        case Fade():
            level = np.abs(values[o.other][:, o.first : o.first + o.n_other])
            y = x * np.clip(o.limit - level.max(1, keepdims=True), 0, 1)
        case ScaleShift():
            y = x * o.scale + o.shift
    return np.asarray(y)


def _past_result(o: PastOperation, x: np.ndarray, states: list[np.ndarray]) -> np.ndarray:
    before = [states[s] for s in o.states]
    if isinstance(o, LagValues | Rolling | KernelHits):  # whose first state are inputs
        inputs = np.concatenate([before[0].reshape(len(x), -1, x.shape[1]), x[:, None]], 1)
        later_inputs = inputs[:, 1:].reshape(len(x), -1)
    match o:
        case LagValues():
            y = np.concatenate([inputs[:, -1 - lag] for lag in o.lags], 1)
            after = [later_inputs]
        case Means():
            share = 1 - o.factors.astype(float)
            repeated = np.tile(x, (1, o.n_out // x.shape[1]))
            after = [(1 - share) * before[0] + share * repeated, (1 - share) * before[1] + share]
            y = after[0] / after[1]
        case Rolling():
            t = int(before[1].flat[0]) + 1  # all series begin together
            y = np.concatenate([_recent(inputs[:, -min(t, span) :]) for span in o.spans], 1)
            after = [later_inputs, before[1] + 1]
        case KernelHits():
            number = before[1] + 1
            hits = _kernel_hits(o, inputs)
            after = [later_inputs, number, before[2] + hits, before[3] + number * hits]
            y = np.concatenate([after[2] / number, 2 * after[3] / number**2], 1)
        case _:
            y, after = _whole_past(x, before)
    for s, value in zip(o.states, after, strict=True):
        states[s] = value
    return y


def _recent(window: np.ndarray) -> np.ndarray:
    """Return means, deviations and slopes of a window (B, n, F)."""
    n = window.shape[1]
    mean = window.mean(1)
    away = window - mean[:, None]
    places = np.arange(n) - (n - 1) / 2
    slope = np.einsum("k,bkf->bf", places, away) / max(np.square(places).sum(), 1e-3)
    return np.concatenate([mean, np.sqrt(np.square(away).mean(1)), slope], 1)


def _whole_past(x: np.ndarray, before: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return running statistics and the state after them."""
    t, first, last, largest, smallest, sums, squares, changes = before
    if not t.any():
        first = last = largest = smallest = x
    t = t + 1
    largest = np.maximum(largest, x)
    smallest = np.minimum(smallest, x)
    sums = sums + (x - first)
    squares = squares + np.square(x - first)
    changes = changes + np.abs(x - last)
    mean = sums / t
    deviation = np.sqrt(np.maximum(squares / t - mean**2, 0))
    change = changes / np.maximum(t - 1, 1)
    y = [first + mean, deviation, largest, smallest, x, first, change, np.log(t)]
    return np.concatenate(y, 1), [t, first, x, largest, smallest, sums, squares, changes]


def _kernel_hits(o: KernelHits, inputs: np.ndarray) -> np.ndarray:
    """Return which outputs of kernels exceed their biases, (B, biases), from the last inputs."""
    hits = []
    start = 0
    for (dilation, n), channels in zip(o.plan, np.split(o.channels, len(o.plan)), strict=True):
        ago = np.arange(TAPS)[::-1] * dilation
        taps = inputs[:, -1 - ago] @ channels.T.astype(float)  # (B, TAPS, kernels)
        three = np.stack([taps[:, triple, k].sum(1) for k, triple in enumerate(TRIPLES)], 1)
        outputs = 3 * three - taps.sum(1)
        stop = start + n * len(TRIPLES)
        biases = o.biases[start:stop].reshape(len(TRIPLES), n)
        hits.append((outputs[..., None] > biases).reshape(len(inputs), -1))
        start = stop
    return np.concatenate(hits, 1).astype(float)


def _cell_result(o: CellStep, x: np.ndarray, states: list[np.ndarray]) -> np.ndarray:
    H = o.n_out
    part = slice(o.place * H, (o.place + 1) * H)
    before = [states[s][:, part].copy() for s in o.states]
    sums = np.tile(o.bias.astype(float), (len(x), 1))
    n_x, n_h = o.weight_x.shape[1], o.weight_h.shape[1]
    sums[:, :n_x] += x @ o.weight_x
    if n_h:
        sums[:, -n_h:] += before[0] @ o.weight_h
    a = [sums[:, k * H : (k + 1) * H] for k in range(o.rows)]
    after = _CELLS[o.number](a, before, o.alpha)
    for s, value in zip(o.states, after, strict=True):
        states[s][:, part] = value
    return after[0]


# -- the formulas of cells: from sums a and the state before to the state after --------------------


def _sigmoid(a: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * a))


def _parabolic_sigmoid(a: np.ndarray) -> np.ndarray:
    u = np.clip(a / 4.1, -1, 1)
    return np.asarray(0.5 + u * (1 - 0.5 * np.abs(u)))


def _parabolic_tanh(a: np.ndarray) -> np.ndarray:
    to_knee = np.maximum(1.92033 - np.abs(a), 0)
    return np.asarray(np.where(a > 0, 1, -1) * (0.96016 - 0.26037 * to_knee**2))


_EXACT: tuple[Function, Function] = (_sigmoid, np.tanh)
_PARABOLIC: tuple[Function, Function] = (_parabolic_sigmoid, _parabolic_tanh)
_States = list[np.ndarray]


def _lstm(a: _States, before: _States, alpha: float) -> _States:
    return _lstm_with(_EXACT, a, before)


def _flstm(a: _States, before: _States, alpha: float) -> _States:
    return _lstm_with(_PARABOLIC, a, before)


def _lstm_with(functions: tuple[Function, Function], a: _States, before: _States) -> _States:
    sigmoid, tanh = functions
    c = sigmoid(a[1]) * before[1] + sigmoid(a[0]) * tanh(a[2])
    return [sigmoid(a[3]) * tanh(c), c]


def _gru(a: _States, before: _States, alpha: float) -> _States:
    return _gated_with(_EXACT, a, before)


def _own_gru(a: _States, before: _States, alpha: float) -> _States:
    return _gated_with(_EXACT if alpha else _PARABOLIC, a, before)


def _gated_with(functions: tuple[Function, Function], a: _States, before: _States) -> _States:
    """SGRU, GRU, MGU and SMGU: the last two have one gate for both purposes."""
    sigmoid, tanh = functions
    r, z = sigmoid(a[1]), sigmoid(a[-2])
    n = tanh(a[0] + r * a[-1])
    return [z * (before[0] - n) + n]


def _hfgru(a: _States, before: _States, alpha: float) -> _States:
    n = np.tanh(a[0] + _sigmoid(a[1]) * a[3])
    return [alpha * _sigmoid(a[2]) * (n - before[0]) + before[0]]


def _min_gru(a: _States, before: _States, alpha: float) -> _States:
    return [_sigmoid(a[0]) * (a[1] - before[0]) + before[0]]


def _min_lstm(a: _States, before: _States, alpha: float) -> _States:
    log_f, log_i = -np.logaddexp(0, -a[0]), -np.logaddexp(0, -a[1])
    keep = _sigmoid(log_f - log_i)
    return [keep * (before[0] - a[2]) + a[2]]


def _rnn_tanh(a: _States, before: _States, alpha: float) -> _States:
    return [np.tanh(a[0])]


def _rnn_relu(a: _States, before: _States, alpha: float) -> _States:
    return [np.maximum(a[0], 0)]


# by the number of the native kernel
_CELLS = [
    _lstm,
    _gru,
    _rnn_tanh,
    _rnn_relu,
    _flstm,
    _own_gru,
    _own_gru,
    _own_gru,
    _hfgru,
    _min_gru,
    _min_lstm,
]

_ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "relu": lambda x, alpha: F.relu(x),
    "tanh": lambda x, alpha: torch.tanh(x),
    "sigmoid": lambda x, alpha: torch.sigmoid(x),
    "silu": lambda x, alpha: F.silu(x),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softplus": lambda x, alpha: F.softplus(x),
    "gelu": lambda x, alpha: F.gelu(x),
    "psigmoid": lambda x, alpha: psigmoid(x),
    "ptanh": lambda x, alpha: ptanh(x),
    "clamp": lambda x, alpha: x.clamp(-alpha, alpha),
}
