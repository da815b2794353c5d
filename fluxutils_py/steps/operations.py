"""The operations of a step: what each computes, its number in the native call, its text in C.

Each class is one function of ``exporting/step.h``, or a few, for which its weights are laid out. An
operation reads one value or two and makes one. How values get their places, and arrays their
addresses or names, is for those who run a step or write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, NamedTuple

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
    mean: np.ndarray = NOTHING
    scale: np.ndarray = NOTHING
    lower: np.ndarray = NOTHING
    upper: np.ndarray = NOTHING


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


@dataclass(eq=False)
class Operation:
    """What the operations share: they are written once, and not changed.

    Attributes
    ----------
    kind : int
        Its number in ``csrc/kernels.h``.
    text : str
        The call of its function in ``step.h``, with the names of its arguments in braces.
    source : int
        The value that it reads. Value 0 is the input, value ``i + 1`` the result of operation
        ``i``.
    n_out : int
        Numbers of its result.
    w, bias, w_h : ndarray
        Its weights, of the model's type, as ``step.h`` has them.
    numbers : sequence of int, or array of them
    cell : int
        Which of several functions.
    alpha : float
    states : tuple of int
        The tensors of the model's state that it changes.
    place : int
        Where in these tensors its layer is, if they are of several layers.
    other : int, optional
        Another value that it reads, from its number ``first`` on.
    """

    kind: ClassVar[int]
    text: ClassVar[str]
    result_is_state: ClassVar[bool] = False  # whether its result is its first state

    source: int
    n_out: int
    w: np.ndarray = field(default_factory=lambda: NOTHING)
    bias: np.ndarray = field(default_factory=lambda: NOTHING)
    w_h: np.ndarray = field(default_factory=lambda: NOTHING)
    _: KW_ONLY
    numbers: Sequence[int] | np.ndarray = ()
    cell: int = 0
    alpha: float = 0.0
    states: tuple[int, ...] = ()
    place: int = 0
    other: int | None = None
    first: int = 0

    @property
    def sources(self) -> tuple[int, ...]:
        """All values that it reads."""
        return (self.source,) if self.other is None else (self.source, self.other)

    @property
    def rows(self) -> int:
        """How many ``numbers`` there are, or sums of a cell per unit."""
        return len(self.numbers)

    @property
    def n_products(self) -> int:
        """About how many products it costs as much as."""
        return max(self.n_out, self.w.size + self.w_h.size)

    def room(self, n_in: int) -> int:
        """Return how many numbers it needs beside its result, from a value of ``n_in``."""
        return 0

    def c(self, names: Names) -> list[str]:
        """Return its statements in C."""
        given = {"w": self.w, "bias": self.bias, "w_h": self.w_h, "numbers": np.array(self.numbers)}
        tables = {name: names.table(name, array) for name, array in given.items() if array.size}
        text = self.text.format(
            x=names.x,
            y=names.y,
            other=names.other,
            states=", ".join(names.states),
            # past inputs, n_in numbers apart, and what else there is
            past=", ".join([*names.states[:1], str(names.n_in), *names.states[1:]]),
            n_in=names.n_in,
            n_past=names.n_past,
            n=self.n_out,
            n_pairs=self.n_out // 2,
            rows=self.rows,
            first=self.first,
            alpha=names.number(self.alpha),
            **tables,
        )
        return [f"@_step_{text};"]


# -- products and cells ----------------------------------------------------------------------------


class Dense(Operation):
    """``x @ w + bias``, with w (n_in, n_out)."""

    kind = 0

    def c(self, names: Names) -> list[str]:
        return [_product(names, "w", self.w, names.x, names.y, self.bias)]


class Dots(Operation):
    """``w @ x + bias``, with w (n_out, n_in): faster where many inputs make few outputs."""

    kind = 14
    text = "dots({x}, {w}, {bias}, {y}, {n_in}, {n})"

    def c(self, names: Names) -> list[str]:
        if names.quantize:
            return [_product(names, "w", self.w.T, names.x, names.y, self.bias)]
        return super().c(names)


class CellForm(NamedTuple):
    """The functions of ``step.h`` for a cell, and where blocks of H weights go among its sums.

    Of two functions, the first has the approximate activations. The inputs add to the first sums,
    the recurrent products to the last ones.
    """

    functions: tuple[str, ...]
    of_x: tuple[int, ...]  # for each block of the input weights, its sum
    of_h: tuple[int, ...] = ()  # of the recurrent weights
    of_bias: tuple[int, ...] = ()  # of the only bias of an own cell, if not as of_x

    @property
    def rows(self) -> int:
        """How many sums there are."""
        return 1 + max(self.of_x + self.of_h)


_FOUR = (0, 1, 2, 3)
# by the number of the native kernel
CELLS = {
    0: CellForm(("lstm",), _FOUR, _FOUR),
    1: CellForm(("gru",), (1, 2, 0), (1, 2, 3)),
    2: CellForm(("rnn_tanh",), (0,), (0,)),
    3: CellForm(("rnn_relu",), (0,), (0,)),
    4: CellForm(("flstm",), _FOUR, _FOUR),
    5: CellForm(("sgru_parabolic", "gru"), (0,), (1, 2, 3), (1, 2, 0)),
    6: CellForm(("mgu_parabolic", "mgu"), (1, 0), (1, 2)),
    7: CellForm(("mgu_parabolic", "mgu"), (0,), (1, 2), (1, 0)),
    8: CellForm(("hfgru",), (1, 2, 0), (1, 2, 3)),
    9: CellForm(("min_gru",), (0, 1)),
    10: CellForm(("min_lstm",), (0, 1, 2)),
}


class CellStep(Operation):
    """One step of a cell with H = n_out units, ``cell`` in ``csrc/kernels.h``; the result is h.

    ``w`` (n_in, x_rows * H) is of the first sums, ``w_h`` (H, h_rows * H) of the last, which may be
    none, ``bias`` (rows * H,) of all. The formula of HFGRU depends on ``alpha``; for SGRU, MGU and
    SMGU, 0 are the approximate activations.
    """

    kind = 1
    result_is_state = True

    @property
    def rows(self) -> int:
        return self.bias.size // self.n_out

    def room(self, n_in: int) -> int:
        return self.bias.size

    def c(self, names: Names) -> list[str]:
        sums = names.other
        calls = [_product(names, "w", self.w, names.x, sums, self.bias)]
        if self.w_h.size:
            of_h = f"{sums} + {self.bias.size - self.w_h.shape[1]}"
            calls.append(_product(names, "u", self.w_h, names.states[0], of_h))
        functions = CELLS[self.cell].functions
        arguments = [sums, *names.states]
        if functions == ("hfgru",):
            arguments.append(names.number(self.alpha))
        function = functions[-1] if self.alpha else functions[0]
        return [*calls, _call(function, *arguments, self.n_out)]


class Diagonal(Operation):
    """``h' = w * h + x`` of n_out / 2 complex numbers, as pairs; the result is h'."""

    kind = 2
    text = "diagonal({w}, {x}, {y}, {n_pairs})"
    result_is_state = True


# -- plain layers ----------------------------------------------------------------------------------

# as step.h numbers them
FUNCTIONS = (
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


class Activation(Operation):
    """A function of single numbers, ``FUNCTIONS[cell]`` of ``alpha``."""

    kind = 3

    def c(self, names: Names) -> list[str]:
        function = f"@@_STEP_{FUNCTIONS[self.cell].upper()}"
        return [_call("activate", function, names.number(self.alpha), names.x, names.y, self.n_out)]


class Gated(Operation):
    """``silu(x[:n_out]) * x[n_out:]``."""

    kind = 4
    text = "gated({x}, {y}, {n})"


class Sum(Operation):
    """``x`` plus another value."""

    kind = 5
    text = "add({x}, {other}, {y}, {n})"


class LayerNormalization(Operation):
    """Layer normalisation, with ``alpha`` as eps."""

    kind = 6
    text = "layer_norm({x}, {w}, {bias}, {y}, {alpha}, {n})"


class ScaleShift(Operation):
    """``x * w + bias`` for each feature."""

    kind = 7
    text = "scale_shift({x}, {w}, {bias}, {y}, {n})"


class Join(Operation):
    """The numbers of ``source``, then those of another value."""

    kind = 13
    text = "copy({x}, {y}, {n_in}); @_step_copy({other}, {y} + {n_in}, {n} - {n_in})"


@dataclass(eq=False)
class Fade(Operation):
    """``x`` times ``alpha`` less the largest of some absolute values of another, from 0 to 1."""

    kind = 15
    text = "fade({x}, {other} + {first}, {alpha}, {y}, {rows}, {n})"

    _: KW_ONLY
    n_levels: int

    @property
    def rows(self) -> int:
        return self.n_levels


# -- what remembers inputs, by the formulas and in the states of a layer ---------------------------


class LagValues(Operation):
    """Earlier inputs, ``numbers`` steps before; see :class:`fluxutils_py.nn.Lags`."""

    kind = 8
    text = "lags({x}, {past}, {numbers}, {rows}, {n_past}, {y}, {n_in})"


class Means(Operation):
    """See :class:`fluxutils_py.nn.ExponentialMeans`; a weight falls with each step by ``w``."""

    kind = 9
    text = "exponential_means({x}, {w}, {states}, {y}, {n_in}, {n})"


class Rolling(Operation):
    """Of ``numbers`` steps; see :class:`fluxutils_py.nn.RollingStatistics`."""

    kind = 10
    text = "rolling_statistics({x}, {past}, {numbers}, {rows}, {n_past}, {y}, {n_in})"

    @property
    def n_products(self) -> int:
        return self.n_out // len(self.numbers) * sum(self.numbers)


class Running(Operation):
    """See :class:`fluxutils_py.nn.RunningStatistics`."""

    kind = 11
    text = "running_statistics({x}, {states}, {y}, {n_in})"


class KernelHits(Operation):
    """See :class:`fluxutils_py.nn.CausalKernels`.

    ``numbers`` (n_dilations, 2) are the dilation, and the number of biases of each of its 84
    kernels; ``w_h`` (84 n_dilations, F) the channels, uint8; ``w`` (n_out / 2,) the biases.
    """

    kind = 12
    text = (
        "causal_kernels({x}, {past}, {numbers}, {rows}, {n_past}, {w_h}, {w}, {other}, {y}, "
        "{n_in}, {n_pairs})"
    )

    @property
    def n_products(self) -> int:
        return 2 * self.n_out + 9 * len(self.w_h)

    def room(self, n_in: int) -> int:
        return LANES * n_in


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
