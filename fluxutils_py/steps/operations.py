"""The operations of a step: what each computes, its numbers for the native call, its text in C.

Each class is one function of ``exporting/step.h``, or a few, for which its weights are laid out. An
operation reads one value or two and makes one. How values get their places, and arrays their
addresses or names, is for those who run a step or write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

LANES = 16  # numbers in which step.h holds the taps of kernels
NOTHING = np.empty(0)


class Scaler(NamedTuple):
    """What happens to the features of a step before the model, in float64.

    ``kind`` is "standardize": ``(x - mean) / scale``; "winsorize": the same after a clamp to
    ``lower`` and ``upper``, and 0 for NaN; "fill": ``mean`` for NaN; or "round": to the type of the
    model. All arrays are (F,), float64, and those that the kind does not need are empty.
    """

    kind: str
    mean: np.ndarray = np.empty(0)
    scale: np.ndarray = np.empty(0)
    lower: np.ndarray = np.empty(0)
    upper: np.ndarray = np.empty(0)


class NativeCall(NamedTuple):
    """What an operation tells the native call: as ``fluxutils_step_operation`` of csrc/kernels.h,
    but for the places of its values, and with arrays for addresses.
    """

    kind: int
    cell: int = 0
    rows: int = 0
    x_rows: int = 0
    h_rows: int = 0
    alpha: float = 0.0
    w: np.ndarray = NOTHING
    w_h: np.ndarray = NOTHING
    bias: np.ndarray = NOTHING
    numbers: Sequence[int] | np.ndarray = ()
    first: int = 0  # of the second value, the first number that it reads


class Names(NamedTuple):
    """What an operation finds in C: the text of its arrays, and who writes constants.

    Attributes
    ----------
    x, y : str
        The value that it reads, and its result.
    other : str
        The second value that it reads, or its room.
    states : list of str
    n_in, n_past : int
        Numbers of x, and length of the first axis of its first state.
    table : callable
        Defines a table of a name and an array, and returns its name in C.
    number : callable
        Writes a float of the model's type.
    quantize : bool
        Whether products have weights of 8 bits.
    """

    x: str
    y: str
    other: str
    states: list[str]
    n_in: int
    n_past: int
    table: Callable[[str, np.ndarray], str]
    number: Callable[[float], str]
    quantize: bool


@dataclass(frozen=True, eq=False)
class Operation:
    """What the operations share.

    Attributes
    ----------
    source : int
        The value that it reads. Value 0 is the input, value ``i + 1`` the result of operation
        ``i``.
    n_out : int
        Numbers of its result.
    states : tuple of int
        The tensors of the model's state that it changes.
    place : int
        Where in these tensors its layer is, if they are of several layers.
    other : int, optional
        Another value that it reads.
    """

    source: int
    n_out: int
    states: tuple[int, ...] = field(default=(), kw_only=True)
    place: int = field(default=0, kw_only=True)
    other: int | None = field(default=None, kw_only=True)

    @property
    def sources(self) -> tuple[int, ...]:
        """All values that it reads."""
        return (self.source,) if self.other is None else (self.source, self.other)

    @property
    def result_is_state(self) -> bool:
        """Whether its result is its first state."""
        return False

    @property
    def n_products(self) -> int:
        """About how many products it costs as much as."""
        return self.n_out

    def room(self, n_in: int) -> int:
        """Return how many numbers it needs beside its result, from a value of ``n_in``."""
        return 0

    def pack(self) -> NativeCall:
        """Return what the native call needs to know of it."""
        raise NotImplementedError

    def c(self, names: Names) -> list[str]:
        """Return its statements in C."""
        raise NotImplementedError


# -- products and cells ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dense(Operation):
    """``x @ weight + bias``, with weight (n_in, n_out)."""

    weight: np.ndarray
    bias: np.ndarray

    @property
    def is_wide(self) -> bool:
        """Whether many inputs make few outputs: then sums of vectors of inputs are faster."""
        n_in, n_out = self.weight.shape
        return n_out < 16 and n_in >= 64 and n_in > 8 * n_out

    @property
    def n_products(self) -> int:
        return self.weight.size

    def pack(self) -> NativeCall:
        if self.is_wide:
            return NativeCall(14, w=self.weight.T, bias=self.bias)
        return NativeCall(0, w=self.weight, bias=self.bias)

    def c(self, names: Names) -> list[str]:
        if names.quantize or not self.is_wide:
            return [_product(names, "w", self.weight, names.x, names.y, self.bias)]
        tables = names.table("w", self.weight.T), names.table("b", self.bias)
        return [_call("dots", names.x, *tables, names.y, *self.weight.shape)]


class CellForm(NamedTuple):
    """The functions of ``step.h`` for a cell, and where blocks of H weights go among its sums.

    Of two functions, the first has the approximate activations. The inputs add to the first sums,
    the recurrent products to the last ones.
    """

    functions: tuple[str, ...]
    rows: int
    of_x: tuple[int, ...]  # for each block of the input weights, its sum
    of_h: tuple[int, ...] = ()  # of the recurrent weights
    of_bias: tuple[int, ...] = ()  # of the only bias of an own cell


_FOUR = (0, 1, 2, 3)
# by the number of the native kernel
CELLS = {
    0: CellForm(("lstm",), 4, _FOUR, _FOUR, _FOUR),
    1: CellForm(("gru",), 4, (1, 2, 0), (1, 2, 3), (1, 2, 0)),
    2: CellForm(("rnn_tanh",), 1, (0,), (0,)),
    3: CellForm(("rnn_relu",), 1, (0,), (0,)),
    4: CellForm(("flstm",), 4, _FOUR, _FOUR, _FOUR),
    5: CellForm(("sgru_parabolic", "gru"), 4, (0,), (1, 2, 3), (1, 2, 0)),
    6: CellForm(("mgu_parabolic", "mgu"), 3, (1, 0), (1, 2), (1, 0)),
    7: CellForm(("mgu_parabolic", "mgu"), 3, (0,), (1, 2), (1, 0)),
    8: CellForm(("hfgru",), 4, (1, 2, 0), (1, 2, 3), (1, 2, 0)),
    9: CellForm(("min_gru",), 2, (0, 1), of_bias=(0, 1)),
    10: CellForm(("min_lstm",), 3, (0, 1, 2), of_bias=(0, 1, 2)),
}


@dataclass(frozen=True, eq=False)
class CellStep(Operation):
    """One step of a cell with H = n_out units; the result is the new h.

    Attributes
    ----------
    number : int
        Of the native kernel, as ``csrc/kernels.h`` has it.
    alpha : float
        The number that the formula depends on: of HFGRU; of SGRU, MGU and SMGU 0 for the
        approximate activations.
    rows : int
        Sums per unit.
    weight_x : ndarray of shape (n_in, x_rows * H)
        Of the first ``x_rows`` sums.
    weight_h : ndarray of shape (H, h_rows * H)
        Of the last ``h_rows`` sums, which may be none.
    bias : ndarray of shape (rows * H,)
    """

    number: int
    alpha: float
    rows: int
    weight_x: np.ndarray
    weight_h: np.ndarray
    bias: np.ndarray

    @property
    def result_is_state(self) -> bool:
        return True

    @property
    def n_products(self) -> int:
        return self.weight_x.size + self.weight_h.size

    def room(self, n_in: int) -> int:
        return self.rows * self.n_out

    def pack(self) -> NativeCall:
        return NativeCall(
            1,
            self.number,
            self.rows,
            self.weight_x.shape[1] // self.n_out,
            self.weight_h.shape[1] // self.n_out,
            self.alpha,
            self.weight_x,
            self.weight_h,
            self.bias,
        )

    def c(self, names: Names) -> list[str]:
        sums = names.other
        calls = [_product(names, "w", self.weight_x, names.x, sums, self.bias)]
        if self.weight_h.size:
            first = self.bias.size - self.weight_h.shape[1]
            of_h = f"{sums} + {first}"
            calls.append(_product(names, "u", self.weight_h, names.states[0], of_h))
        functions = CELLS[self.number].functions
        arguments = [sums, *names.states]
        if functions == ("hfgru",):
            arguments.append(names.number(self.alpha))
        function = functions[-1] if self.alpha else functions[0]
        return [*calls, _call(function, *arguments, self.n_out)]


@dataclass(frozen=True, eq=False)
class Diagonal(Operation):
    """``h' = eigenvalues * h + x`` of n_out / 2 complex numbers, as pairs; the result is h'."""

    eigenvalues: np.ndarray  # (n_out,)

    @property
    def result_is_state(self) -> bool:
        return True

    def pack(self) -> NativeCall:
        return NativeCall(2, w=self.eigenvalues)

    def c(self, names: Names) -> list[str]:
        eigenvalues = names.table("lambda", self.eigenvalues)
        return [_call("diagonal", eigenvalues, names.x, names.y, self.n_out // 2)]


# -- plain layers ----------------------------------------------------------------------------------

# as step.h numbers them
_FUNCTIONS = (
    "relu",
    "tanh",
    "sigmoid",
    "silu",
    "leaky_relu",
    "elu",
    "softplus",
    "gelu",
    "parabolic_sigmoid",
    "parabolic_tanh",
    "clamp",
)


@dataclass(frozen=True, eq=False)
class Activation(Operation):
    """A function of single numbers, by its name in step.h."""

    function: str
    alpha: float = 0.0

    def pack(self) -> NativeCall:
        return NativeCall(3, _FUNCTIONS.index(self.function), alpha=self.alpha)

    def c(self, names: Names) -> list[str]:
        function = f"@@_STEP_{self.function.upper()}"
        alpha = names.number(self.alpha)
        return [_call("activate", function, alpha, names.x, names.y, self.n_out)]


@dataclass(frozen=True, eq=False)
class Gated(Operation):
    """``silu(x[:n_out]) * x[n_out:]``."""

    def pack(self) -> NativeCall:
        return NativeCall(4)

    def c(self, names: Names) -> list[str]:
        return [_call("gated", names.x, names.y, self.n_out)]


@dataclass(frozen=True, eq=False)
class Sum(Operation):
    """``x`` plus another value."""

    def pack(self) -> NativeCall:
        return NativeCall(5)

    def c(self, names: Names) -> list[str]:
        return [_call("add", names.x, names.other, names.y, self.n_out)]


@dataclass(frozen=True, eq=False)
class LayerNormalization(Operation):
    """Layer normalisation."""

    weight: np.ndarray
    bias: np.ndarray
    eps: float

    def pack(self) -> NativeCall:
        return NativeCall(6, alpha=self.eps, w=self.weight, bias=self.bias)

    def c(self, names: Names) -> list[str]:
        tables = names.table("w", self.weight), names.table("b", self.bias)
        eps = names.number(self.eps)
        return [_call("layer_norm", names.x, *tables, names.y, eps, self.n_out)]


@dataclass(frozen=True, eq=False)
class ScaleShift(Operation):
    """``x * scale + shift`` for each feature."""

    scale: np.ndarray
    shift: np.ndarray

    def pack(self) -> NativeCall:
        return NativeCall(7, w=self.scale, bias=self.shift)

    def c(self, names: Names) -> list[str]:
        tables = names.table("w", self.scale), names.table("b", self.shift)
        return [_call("scale_shift", names.x, *tables, names.y, self.n_out)]


@dataclass(frozen=True, eq=False)
class Join(Operation):
    """The numbers of ``source``, then those of another value."""

    def pack(self) -> NativeCall:
        return NativeCall(13)

    def c(self, names: Names) -> list[str]:
        n = names.n_in
        first = _call("copy", names.x, names.y, n)
        return [first, _call("copy", names.other, f"{names.y} + {n}", self.n_out - n)]


@dataclass(frozen=True, eq=False)
class Fade(Operation):
    """``x`` times ``limit`` less the largest of some absolute values of another, from 0 to 1."""

    first: int
    n_other: int
    limit: float

    def pack(self) -> NativeCall:
        return NativeCall(15, rows=self.n_other, alpha=self.limit, first=self.first)

    def c(self, names: Names) -> list[str]:
        level = f"{names.other} + {self.first}"
        limit = names.number(self.limit)
        return [_call("fade", names.x, level, limit, names.y, self.n_other, self.n_out)]


# -- what remembers inputs, by the formulas and in the states of a layer ---------------------------


@dataclass(frozen=True, eq=False)
class LagValues(Operation):
    """Earlier inputs; see :class:`fluxutils_py.nn.Lags`."""

    lags: tuple[int, ...]

    def pack(self) -> NativeCall:
        return NativeCall(8, rows=len(self.lags), numbers=self.lags)

    def c(self, names: Names) -> list[str]:
        n = names.n_in
        lags = names.table("lags", np.array(self.lags))
        sizes = len(self.lags), names.n_past
        return [_call("lags", names.x, names.states[0], n, lags, *sizes, names.y, n)]


@dataclass(frozen=True, eq=False)
class Means(Operation):
    """See :class:`fluxutils_py.nn.ExponentialMeans`."""

    factors: np.ndarray  # (n_out,), by which a weight falls with each step

    def pack(self) -> NativeCall:
        return NativeCall(9, w=self.factors)

    def c(self, names: Names) -> list[str]:
        factors = names.table("factors", self.factors)
        sizes = names.n_in, self.n_out
        return [_call("exponential_means", names.x, factors, *names.states, names.y, *sizes)]


@dataclass(frozen=True, eq=False)
class Rolling(Operation):
    """See :class:`fluxutils_py.nn.RollingStatistics`."""

    spans: tuple[int, ...]

    @property
    def n_products(self) -> int:
        return self.n_out // len(self.spans) * sum(self.spans)

    def pack(self) -> NativeCall:
        return NativeCall(10, rows=len(self.spans), numbers=self.spans)

    def c(self, names: Names) -> list[str]:
        n = names.n_in
        past, t = names.states
        spans = names.table("spans", np.array(self.spans))
        sizes = len(self.spans), names.n_past
        return [_call("rolling_statistics", names.x, past, n, t, spans, *sizes, names.y, n)]


@dataclass(frozen=True, eq=False)
class Running(Operation):
    """See :class:`fluxutils_py.nn.RunningStatistics`."""

    def pack(self) -> NativeCall:
        return NativeCall(11)

    def c(self, names: Names) -> list[str]:
        return [_call("running_statistics", names.x, *names.states, names.y, names.n_in)]


@dataclass(frozen=True, eq=False)
class KernelHits(Operation):
    """See :class:`fluxutils_py.nn.CausalKernels`.

    Attributes
    ----------
    plan : ndarray of shape (n_dilations, 2)
        The dilation, and the number of biases of each of its 84 kernels.
    channels : ndarray of shape (84 n_dilations, F), uint8
    biases : ndarray of shape (n_out / 2,)
    """

    plan: np.ndarray
    channels: np.ndarray
    biases: np.ndarray

    @property
    def n_products(self) -> int:
        return 2 * self.n_out + 9 * len(self.channels)

    def room(self, n_in: int) -> int:
        return LANES * n_in

    def pack(self) -> NativeCall:
        n_dilations = len(self.plan)
        return NativeCall(12, rows=n_dilations, w=self.biases, w_h=self.channels, numbers=self.plan)

    def c(self, names: Names) -> list[str]:
        n = names.n_in
        past, *counts = names.states
        plan = names.table("plan", self.plan)
        kernels = names.table("channels", self.channels), names.table("biases", self.biases)
        about = plan, len(self.plan), names.n_past, *kernels, names.other
        sizes = n, self.n_out // 2
        return [_call("causal_kernels", names.x, past, n, *counts, *about, names.y, *sizes)]


# -- text of C -------------------------------------------------------------------------------------


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (n_in, n_out) as integers from -127 to 127, and the scale of each output."""
    largest = np.abs(weight).max(0, initial=0)
    scale = np.where(largest > 0, largest / 127, 1).astype(weight.dtype)
    return np.rint(weight / scale).astype(np.int8), scale


def _call(function: str, *arguments: object) -> str:
    """Return the call of a function of step.h; @ stands for the prefix of names."""
    return f"@_step_{function}({', '.join(map(str, arguments))});"


def _product(
    names: Names, name: str, weight: np.ndarray, x: str, y: str, bias: np.ndarray | None = None
) -> str:
    """Return the call that adds the product of x with a matrix (n_in, n_products) to y, or puts it
    there with a bias.
    """
    suffix = ""
    if names.quantize:
        suffix = "_int8"
        integers, scale = quantized(weight)
        tables = [names.table(name, integers), names.table(f"{name}_scale", scale)]
    else:
        tables = [names.table(name, weight)]
    if bias is None:
        return _call(f"add_products{suffix}", x, *tables, y, *weight.shape)
    tables.append(names.table("b", bias))
    return _call(f"dense{suffix}", x, *tables, y, *weight.shape, bias.size)
