"""Recurrent cells of FluxUtils.jl, with fast passes over whole windows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.kernels.modules import run_cell
from fluxutils_py.nn.kernels.recurrence import LSTM, Cell, State
from fluxutils_py.nn.precision import as_float32, without_autocast
from fluxutils_py.nn.scan import scan_gru, scan_lstm
from fluxutils_py.tree import tree_map

__all__ = ["FLSTMCell", "HFGRUCell", "MGUCell", "SGRUCell", "SMGUCell"]

Activation = Callable[[Tensor], Tensor]
States = tuple[Tensor, ...]

_CELL_DOC = """{first}

    {formula}

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, units H.
    {keyword}

    Attributes
    ----------
    weight_ih : Parameter of shape ({x_blocks}, n_in)
    weight_hh : Parameter of shape ({h_blocks}, H)
        Orthogonal in each block of H rows, at first.
    bias : Parameter of shape ({h_blocks},)

    Notes
    -----
    ``cell(x, state)`` takes ``x`` (B, n_in) and the state {state}, or None for zero. It returns the
    output (B, H) and the new state, as ``Recur`` wants it. ``window`` takes ``x`` (S, B, n_in).

    Source: ``{name}`` of FluxUtils.jl{but}.

    Examples
    --------
    >>> y, state = {name}(3, 5)(torch.zeros(4, 3))
    >>> y.shape
    torch.Size([4, 5])
    """
_EXACT = """exact : bool
        Use the exact sigmoid and tanh instead of ``psigmoid`` and ``ptanh``."""


class _Cell(nn.Module):
    """What the cells share; their state is one tensor (B, H), or ``n_states`` of them."""

    x_blocks: ClassVar[int]  # of H rows, in weight_ih
    h_blocks: ClassVar[int]  # in weight_hh
    n_states: ClassVar[int] = 1
    kernel: ClassVar[int]  # number of the native kernel

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        # torch refuses NumPy's integers
        self.n_in = n_in = operator.index(n_in)
        self.n_out = n_out = operator.index(n_out)
        x_rows = self.x_blocks * n_out
        h_rows = self.h_blocks * n_out
        self.weight_ih = nn.Parameter(torch.empty(x_rows, n_in))
        self.weight_hh = nn.Parameter(torch.empty(h_rows, n_out))
        self.bias = nn.Parameter(torch.empty(h_rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters from torch's generator."""
        nn.init.xavier_uniform_(self.weight_ih)
        with torch.no_grad():
            # block by block, so that the weights of each gate are orthogonal
            for block in self.weight_hh.split(self.n_out):
                nn.init.orthogonal_(block)
        nn.init.zeros_(self.bias)

    def zero_state(self, x: Tensor) -> State:
        """Return the state of zeros for an input (B, n_in) or (S, B, n_in)."""
        # not of the type of x: under autocast, states keep the type of the parameters
        zeros = self.weight_hh.new_zeros(x.shape[-2], self.n_out)
        return zeros if self.n_states == 1 else (zeros,) * self.n_states

    def empty_state(self) -> tuple[Tensor, ...]:
        """Return the state of a batch of 0, see ``Recur``."""
        return (self.weight_hh.detach().new_zeros(0, self.n_out),) * self.n_states

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        result = self.by_kernel(x, state)
        if result is not None:
            return result
        if state is None:
            state = self.zero_state(x)
        states = (state,) if isinstance(state, Tensor) else state
        after = self.formula(x, states, self.weight_ih, self.weight_hh, None, self.bias, self.form)
        y = after[0]
        # as Recur expects it: one tensor is not in a tuple
        return y, y if self.n_states == 1 else after

    def window(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Compute all steps of ``x`` (S, B, n_in): the outputs (S, B, H) and the last state.

        Differentiable twice where the native kernels compute it, else once.
        """
        result = self.by_kernel(x, state)
        if result is not None:
            return result
        # without autocast, which would mix types in the scans
        with without_autocast(x.device):
            x = as_float32(x)
            state = tree_map(as_float32, state)
            return self._scan(x, self.zero_state(x) if state is None else state)

    def _scan(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute ``window`` without the native kernels."""
        ys = []
        for step in x.unbind():
            y, state = self(step, state)
            ys.append(y)
        return torch.stack(ys), state

    def by_kernel(self, x: Tensor, state: State | None) -> tuple[Tensor, State] | None:
        """Compute a step (B, n_in) or a window (S, B, n_in) by the native kernels; None where they
        do not apply.
        """
        kernel = Cell(self.kernel, self.n_states, self.x_blocks, self.h_blocks, self.formula)
        parameters = self._parameters
        bias = parameters.get("bias")
        if bias is None:  # it is computed, such as under torch's parametrizations
            return None
        weights = (parameters.get("weight_ih"), parameters.get("weight_hh"), None, bias)
        return run_cell(self, kernel, x, state, weights, self.form)

    @staticmethod
    def formula(
        x: Tensor, state: States, w_x: Tensor, w_h: Tensor, b_x: None, bias: Tensor, form: float
    ) -> States:
        """Return the state after a step. It starts with the output."""
        raise NotImplementedError

    @property
    def form(self) -> float:
        """Return the number that the formula depends on, besides its tensors."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.n_in}, {self.n_out}"


class _Approximate(_Cell):
    """A cell with the approximate activations, or the exact ones."""

    def __init__(self, n_in: int, n_out: int, exact: bool = False) -> None:
        super().__init__(n_in, n_out)
        self.exact = exact

    @property
    def form(self) -> float:
        return float(self.exact)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", exact=True" if self.exact else "")


# a float, because kernels and formulas share the form of a cell, which is alpha elsewhere
def _activations(exact: float) -> tuple[Activation, Activation]:
    return (torch.sigmoid, torch.tanh) if exact else (psigmoid, ptanh)


def lstm_step(
    gates: Tensor,
    c: Tensor,
    sigmoid: Activation = torch.sigmoid,
    tanh: Activation = torch.tanh,
) -> tuple[Tensor, Tensor]:
    """Return the next h and c of an LSTM from its gates (B, 4 H) before the activations."""
    i, f, g, o = gates.chunk(4, 1)
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def gru_step(of_x: Tensor, of_h: Tensor, h: Tensor) -> Tensor:
    """Return the next state of a GRU from the products with its input and with its state."""
    xr, xz, xn = of_x.chunk(3, 1)
    hr, hz, hn = of_h.chunk(3, 1)
    r = torch.sigmoid(xr + hr)
    z = torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return (1 - z) * n + z * h


class FLSTMCell(_Approximate):
    __doc__ = _CELL_DOC.format(
        name="FLSTMCell",
        first="An LSTM cell with activations that cost no exponential.",
        formula="i, f, g, o = Wi x + Wh h + b; c' = psigmoid(f) c + psigmoid(i) ptanh(g); "
        "h' = psigmoid(o) ptanh(c')",
        keyword=_EXACT,
        x_blocks="4 H",
        h_blocks="4 H",
        state="``(h, c)`` of shapes (B, H)",
        but="",
    )
    x_blocks = h_blocks = 4
    n_states = 2

    @staticmethod
    def formula(
        x: Tensor, state: States, w_x: Tensor, w_h: Tensor, b_x: None, bias: Tensor, exact: float
    ) -> States:
        sigmoid, tanh = _activations(exact)
        h, c = state
        gates = F.linear(x, w_x, bias) + F.linear(h, w_h)
        return lstm_step(gates, c, sigmoid, tanh)

    # of an instance, because it depends on the activations
    @property
    def kernel(self) -> int:  # type: ignore[override]
        return LSTM.number if self.exact else 4

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _glorot_(self.bias)
        with torch.no_grad():
            self.bias[self.n_out : 2 * self.n_out] = 1  # to remember, at first

    def _scan(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if self.exact:  # then nn.LSTM is faster still
            return super()._scan(x, state)
        h, c = state
        y, h, c = scan_lstm(x, h, c, self.weight_ih, self.weight_hh, self.bias)
        return y, (h, c)


class _Gated(_Approximate):
    """A GRU cell with fewer products or gates: ``h' = (1 - z) n + z h``."""

    def _scan(self, x: Tensor, state: Any) -> tuple[Tensor, State]:
        # the shapes of the weights tell which of the cells it is
        return scan_gru(x, state, self.weight_ih, self.weight_hh, self.bias, exact=self.exact)


class _StateGated(_Gated):
    """A cell whose gates see the state alone: two of them, or one for both purposes."""

    x_blocks = 1

    @staticmethod
    def formula(
        x: Tensor, state: States, w_x: Tensor, w_h: Tensor, b_x: None, bias: Tensor, exact: float
    ) -> States:
        sigmoid, tanh = _activations(exact)
        (h,) = state
        n_blocks = w_h.shape[0] // h.shape[1]
        *h_gates, hn = F.linear(h, w_h).chunk(n_blocks, 1)
        *biases, bn = bias.chunk(n_blocks)
        gates = [sigmoid(gate + b) for gate, b in zip(h_gates, biases, strict=True)]
        r = gates[0]
        z = gates[-1]  # the same one where there is one for both
        n = tanh(F.linear(x, w_x, bn) + r * hn)
        return ((1 - z) * n + z * h,)


class SGRUCell(_StateGated):
    __doc__ = _CELL_DOC.format(
        name="SGRUCell",
        first="A GRU cell whose gates see the state alone.",
        formula="r = psigmoid(Wr h + br); z = psigmoid(Wz h + bz); "
        "n = ptanh(Wi x + r (Wn h) + bn); h' = (1 - z) n + z h",
        keyword=_EXACT,
        x_blocks="H",
        h_blocks="3 H",
        state="``h`` (B, H)",
        but="",
    )
    h_blocks = 3
    kernel = 5


class MGUCell(_Gated):
    __doc__ = _CELL_DOC.format(
        name="MGUCell",
        first="A GRU cell with one gate for both purposes.",
        formula="z = psigmoid(Vz x + Wz h + bz); n = ptanh(Vn x + z (Wn h) + bn); "
        "h' = (1 - z) n + z h",
        keyword=_EXACT,
        x_blocks="2 H",
        h_blocks="2 H",
        state="``h`` (B, H)",
        but="",
    )
    x_blocks = 2
    h_blocks = 2
    kernel = 6

    @staticmethod
    def formula(
        x: Tensor, state: States, w_x: Tensor, w_h: Tensor, b_x: None, bias: Tensor, exact: float
    ) -> States:
        sigmoid, tanh = _activations(exact)
        (h,) = state
        xz, xn = F.linear(x, w_x, bias).chunk(2, 1)
        hz, hn = F.linear(h, w_h).chunk(2, 1)
        z = sigmoid(xz + hz)
        n = tanh(xn + z * hn)
        return ((1 - z) * n + z * h,)


class SMGUCell(_StateGated):
    __doc__ = _CELL_DOC.format(
        name="SMGUCell",
        first="A GRU cell with one gate for both purposes, which sees the state alone.",
        formula="z = psigmoid(Wz h + bz); n = ptanh(Wi x + z (Wn h) + bn); h' = (1 - z) n + z h",
        keyword=_EXACT,
        x_blocks="H",
        h_blocks="2 H",
        state="``h`` (B, H)",
        but="",
    )
    h_blocks = 2
    kernel = 7


class HFGRUCell(_Cell):
    __doc__ = _CELL_DOC.format(
        name="HFGRUCell",
        first="A GRU cell whose update can be slowed down, for data of high frequency.",
        formula="r, z = sigmoid(Vr x + Wr h + br), alpha sigmoid(Vz x + Wz h + bz); "
        "n = tanh(Vn x + r (Wn h) + bn); h' = z n + (1 - z) h",
        keyword="""alpha : float
        The largest share of the state that a step replaces.""",
        x_blocks="3 H",
        h_blocks="3 H",
        state="``h`` (B, H)",
        but=" (which does not train it)",
    )
    x_blocks = 3
    h_blocks = 3
    kernel = 8

    def __init__(self, n_in: int, n_out: int, alpha: float = 1.0) -> None:
        super().__init__(n_in, n_out)
        self.alpha = float(alpha)

    @staticmethod
    def formula(
        x: Tensor, state: States, w_x: Tensor, w_h: Tensor, b_x: None, bias: Tensor, alpha: float
    ) -> States:
        (h,) = state
        xr, xz, xn = F.linear(x, w_x, bias).chunk(3, 1)
        hr, hz, hn = F.linear(h, w_h).chunk(3, 1)
        r = torch.sigmoid(xr + hr)
        z = alpha * torch.sigmoid(xz + hz)
        n = torch.tanh(xn + r * hn)
        return (z * n + (1 - z) * h,)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _glorot_(self.bias)  # after the weights: the order of the draws is part of a seed's result

    def _scan(self, x: Tensor, state: Any) -> tuple[Tensor, State]:
        weights = (self.weight_ih, self.weight_hh, self.bias)
        # z weighs the candidate here, and the state in the other cells
        return scan_gru(x, state, *weights, exact=True, reverse=True, alpha=self.alpha)

    @property
    def form(self) -> float:
        return self.alpha

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", alpha={self.alpha}" if self.alpha != 1 else "")


def _glorot_(bias: Tensor) -> None:
    """Draw a bias as glorot_uniform of Flux.jl does for a vector."""
    bound = math.sqrt(6 / len(bias))
    nn.init.uniform_(bias, -bound, bound)
