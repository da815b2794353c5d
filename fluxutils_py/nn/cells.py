"""Recurrent cells of FluxUtils.jl, and layers of them."""

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
from fluxutils_py.nn.kernels.recurrence import Cell, State
from fluxutils_py.nn.precision import as_float32, without_autocast
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.sizes import check_probability, set_sizes
from fluxutils_py.tree import tree_map

__all__ = ["FLSTMCell", "HFGRUCell", "MGUCell", "SGRUCell", "SMGUCell"]

Activation = Callable[[Tensor], Tensor]

# -- formulas of one step --------------------------------------------------------------------------


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


def _state_gated(cell: _Cell, x: Tensor, state: Any) -> Tensor:
    """Gates that see the state alone: two of them, or one for both purposes."""
    n_blocks = cell.h_blocks
    *h_gates, hn = F.linear(state, cell.weight_hh).chunk(n_blocks, 1)
    *biases, bn = cell.bias.chunk(n_blocks)
    gates = [psigmoid(gate + b) for gate, b in zip(h_gates, biases, strict=True)]
    r = gates[0]
    z = gates[-1]  # the same one where there is one for both
    n = ptanh(F.linear(x, cell.weight_ih, bn) + r * hn)
    return (1 - z) * n + z * state


# -- cells -----------------------------------------------------------------------------------------


class _Cell(nn.Module):
    """What the cells share; their state is one tensor (B, H), or ``n_states`` of them."""

    x_blocks: ClassVar[int]  # of H rows, in weight_ih
    h_blocks: ClassVar[int]  # in weight_hh
    n_states: ClassVar[int] = 1
    kernel: ClassVar[int]  # number of the native kernel
    form: float = 0.0  # the number that the formula depends on, besides its tensors

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        # torch refuses NumPy's integers
        self.n_in = n_in = operator.index(n_in)
        self.n_out = n_out = operator.index(n_out)
        h_rows = self.h_blocks * n_out
        self.weight_ih = nn.Parameter(torch.empty(self.x_blocks * n_out, n_in))
        self.weight_hh = nn.Parameter(torch.empty(h_rows, n_out))
        self.bias = nn.Parameter(torch.empty(h_rows))
        self.reset_parameters()

    def formula(self, x: Tensor, state: Any) -> State:
        """Compute one step with torch: the new state, whose first tensor is the output."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw new parameters from torch's generator."""
        nn.init.xavier_uniform_(self.weight_ih)
        with torch.no_grad():
            # block by block, so that the weights of each gate are orthogonal
            for block in self.weight_hh.split(self.n_out):
                nn.init.orthogonal_(block)
        nn.init.zeros_(self.bias)

    def empty_state(self) -> tuple[Tensor, ...]:
        """Return the state of a batch of 0, see ``Recur``."""
        return (self.weight_hh.detach().new_zeros(0, self.n_out),) * self.n_states

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        result = self.by_kernel(x, state)
        if result is not None:
            return result
        if state is None:
            # not of the type of x: under autocast, states keep the type of the parameters
            zeros = self.weight_hh.new_zeros(x.shape[-2], self.n_out)
            state = zeros if self.n_states == 1 else (zeros,) * self.n_states
        after = self.formula(x, state)
        return after if isinstance(after, Tensor) else after[0], after

    def window(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Compute all steps of ``x`` (S, B, n_in): the outputs (S, B, H) and the last state."""
        result = self.by_kernel(x, state)
        if result is not None:
            return result
        # without autocast, under which a state of zeros is of another type than the next
        with without_autocast(x.device):
            x = as_float32(x)
            state = tree_map(as_float32, state)
            ys = []
            for step in x.unbind():
                y, state = self(step, state)
                ys.append(y)
        assert state is not None
        return torch.stack(ys), state

    def by_kernel(self, x: Tensor, state: State | None) -> tuple[Tensor, State] | None:
        """Compute a step (B, n_in) or a window (S, B, n_in) by the native kernels; None where they
        do not apply.
        """
        kernel = Cell(self.kernel, self.n_states, self.x_blocks, self.h_blocks)
        parameters = self._parameters
        bias = parameters.get("bias")
        if bias is None:  # it is computed, such as under torch's parametrizations
            return None
        weights = (parameters.get("weight_ih"), parameters.get("weight_hh"), None, bias)
        return run_cell(self, kernel, x, state, weights, self.form)

    def extra_repr(self) -> str:
        return f"{self.n_in}, {self.n_out}"


class FLSTMCell(_Cell):
    """An LSTM cell with activations that cost no exponential.

    i, f, g, o = Wi x + Wh h + b; c' = psigmoid(f) c + psigmoid(i) ptanh(g); h' = psigmoid(o)
    ptanh(c')

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, units H.

    Attributes
    ----------
    weight_ih : Parameter of shape (4 H, n_in)
    weight_hh : Parameter of shape (4 H, H)
        Orthogonal in each block of H rows, at first.
    bias : Parameter of shape (4 H,)

    Notes
    -----
    ``cell(x, state)`` takes ``x`` (B, n_in) and the state ``(h, c)`` of shapes (B, H), or None for
    zero. It returns the output (B, H) and the new state, as ``Recur`` wants it. ``window`` takes
    ``x`` (S, B, n_in).

    Source: ``FLSTMCell`` of FluxUtils.jl.

    Examples
    --------
    >>> y, state = FLSTMCell(3, 5)(torch.zeros(4, 3))
    >>> y.shape
    torch.Size([4, 5])
    """

    x_blocks = h_blocks = 4
    n_states = 2
    kernel = 4

    def formula(self, x: Tensor, state: Any) -> State:
        h, c = state
        gates = F.linear(x, self.weight_ih, self.bias) + F.linear(h, self.weight_hh)
        return lstm_step(gates, c, psigmoid, ptanh)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _glorot_(self.bias)
        with torch.no_grad():
            self.bias[self.n_out : 2 * self.n_out] = 1  # to remember, at first


class SGRUCell(_Cell):
    """A GRU cell whose gates see the state alone.

    r = psigmoid(Wr h + br); z = psigmoid(Wz h + bz); n = ptanh(Wi x + r (Wn h) + bn);
    h' = (1 - z) n + z h

    Called as :class:`FLSTMCell`, with the same arguments. The state is ``h`` (B, H); the weights
    have the shapes (H, n_in) and (3 H, H). Source: ``SGRUCell`` of FluxUtils.jl.
    """

    x_blocks = 1
    h_blocks = 3
    kernel = 5
    formula = _state_gated


class MGUCell(_Cell):
    """A GRU cell with one gate for both purposes.

    z = psigmoid(Vz x + Wz h + bz); n = ptanh(Vn x + z (Wn h) + bn); h' = (1 - z) n + z h

    Called as :class:`FLSTMCell`, with the same arguments. The state is ``h`` (B, H); the weights
    have the shapes (2 H, n_in) and (2 H, H). Source: ``MGUCell`` of FluxUtils.jl.
    """

    x_blocks = 2
    h_blocks = 2
    kernel = 6

    def formula(self, x: Tensor, state: Any) -> Tensor:
        xz, xn = F.linear(x, self.weight_ih, self.bias).chunk(2, 1)
        hz, hn = F.linear(state, self.weight_hh).chunk(2, 1)
        z = psigmoid(xz + hz)
        n = ptanh(xn + z * hn)
        return (1 - z) * n + z * state


class SMGUCell(_Cell):
    """A GRU cell with one gate for both purposes, which sees the state alone.

    z = psigmoid(Wz h + bz); n = ptanh(Wi x + z (Wn h) + bn); h' = (1 - z) n + z h

    Called as :class:`FLSTMCell`, with the same arguments. The state is ``h`` (B, H); the weights
    have the shapes (H, n_in) and (2 H, H). Source: ``SMGUCell`` of FluxUtils.jl.
    """

    x_blocks = 1
    h_blocks = 2
    kernel = 7
    formula = _state_gated


class HFGRUCell(_Cell):
    """A GRU cell whose update can be slowed down, for data of high frequency.

    r, z = sigmoid(Vr x + Wr h + br), alpha sigmoid(Vz x + Wz h + bz); n = tanh(Vn x + r (Wn h) +
    bn); h' = z n + (1 - z) h

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, units H.
    alpha : float
        The largest share of the state that a step replaces.

    Notes
    -----
    Called as :class:`FLSTMCell`. The state is ``h`` (B, H); the weights have the shapes (3 H, n_in)
    and (3 H, H). Source: ``HFGRUCell`` of FluxUtils.jl (which does not train it).
    """

    x_blocks = 3
    h_blocks = 3
    kernel = 8

    def __init__(self, n_in: int, n_out: int, alpha: float = 1.0) -> None:
        super().__init__(n_in, n_out)
        self.alpha = float(alpha)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _glorot_(self.bias)  # after the weights: the order of the draws is part of a seed's result

    def formula(self, x: Tensor, state: Any) -> Tensor:
        xr, xz, xn = F.linear(x, self.weight_ih, self.bias).chunk(3, 1)
        hr, hz, hn = F.linear(state, self.weight_hh).chunk(3, 1)
        r = torch.sigmoid(xr + hr)
        z = self.alpha * torch.sigmoid(xz + hz)
        n = torch.tanh(xn + r * hn)
        return z * n + (1 - z) * state

    @property
    def form(self) -> float:  # type: ignore[override]
        return self.alpha

    def extra_repr(self) -> str:
        return f"{self.n_in}, {self.n_out}" + (f", alpha={self.alpha}" if self.alpha != 1 else "")


def _glorot_(bias: Tensor) -> None:
    """Draw a bias as glorot_uniform of Flux.jl does for a vector."""
    bound = math.sqrt(6 / len(bias))
    nn.init.uniform_(bias, -bound, bound)


# -- layers ----------------------------------------------------------------------------------------


class CellStack(nn.Module):
    """Stacked cells, run over whole windows; the layers here wrap one, as ``LSTM`` wraps an
    ``nn.LSTM``.

    ``stack(x, state)`` takes ``x`` (S, B, n_in) and a state of one tensor (L, B, H), a tuple of
    them, or None. It returns the outputs (S, B, H) of the last cell and the new state.
    """

    takes_windows = True
    handles_autocast = True  # as the kernels do, and without them in float32
    batch_dim = 1

    def __init__(self, cells: list[_Cell], dropout: float = 0.0) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)
        self.dropout = dropout
        self.n_states = cells[0].n_states  # all cells are of one class

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        return self._run([cell.window for cell in self.cells], x, state)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute one step (B, n_in) by the cells' formulas, for export, which is of a model that
        does not train.
        """
        return self._run(list(self.cells), x, state)

    def _run(self, cells: list[Any], x: Tensor, state: State | None) -> tuple[Tensor, State]:
        states = []
        for k, cell in enumerate(cells):
            if k > 0 and self.training:  # between cells only, as in nn.LSTM
                x = F.dropout(x, self.dropout)
            # one tensor has the cells as its first axis, and so has each tensor of a tuple
            before = state
            if state is not None:
                before = state[k] if self.n_states == 1 else tuple(s[k] for s in state)
            x, after = cell(x, before)
            states.append(after)
        if self.n_states == 1:
            return x, torch.stack(states)
        # from a tuple per cell to a tensor per state
        return x, tuple(map(torch.stack, zip(*states, strict=True)))

    def empty_state(self) -> tuple[Tensor, ...]:
        first: Any = self.cells[0]
        return tuple(s.expand(len(self.cells), *s.shape) for s in first.empty_state())


class _CellLayer(Recur):
    """A Recur around a stack of cells that it builds itself."""

    _cell: Callable[..., _Cell]
    n_in: int
    n_out: int
    num_layers: int

    def __init__(
        self,
        n_in: int,
        n_out: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        trainable_init: bool = False,
    ) -> None:
        set_sizes(self, n_in=n_in, n_out=n_out, num_layers=num_layers)
        self.dropout = check_probability(self, "dropout", dropout)
        # each cell but the first reads the outputs of the one before
        sizes = [self.n_in] + [self.n_out] * (self.num_layers - 1)
        cells = [self._cell(size, self.n_out) for size in sizes]
        super().__init__(CellStack(cells, self.dropout), trainable_init)


class FLSTM(_CellLayer):
    """LSTM layers with activations that cost no exponential.

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, units of each layer.
    num_layers : int
        Layers stacked on one another, each with its own state.
    dropout : float
        Probability of dropping an output between two layers (not after the last), in training only.
    trainable_init : bool
        Whether the initial state is trained; see :class:`Recur`.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``; the
    state is carried as in :class:`Recur`. Native kernels (see :func:`native_kernels`) make whole
    windows several times faster than their steps.
    See :class:`FLSTMCell` for the formula.

    Source: ``FLSTM`` of FluxUtils.jl.

    Examples
    --------
    >>> FLSTM(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    _cell = FLSTMCell


class SGRU(_CellLayer):
    """GRU layers whose gates see the state alone.

    Arguments and notes are those of :class:`FLSTM`; see :class:`SGRUCell` for the formula. Source:
    ``SGRU`` of FluxUtils.jl.

    >>> SGRU(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    _cell = SGRUCell


class MGU(_CellLayer):
    """GRU layers with one gate for both purposes.

    Arguments and notes are those of :class:`FLSTM`; see :class:`MGUCell` for the formula. Source:
    ``MGU`` of FluxUtils.jl.

    >>> MGU(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    _cell = MGUCell


class SMGU(_CellLayer):
    """GRU layers with one gate for both purposes, which sees the state alone.

    Arguments and notes are those of :class:`FLSTM`; see :class:`SMGUCell` for the formula. Source:
    ``SMGU`` of FluxUtils.jl.

    >>> SMGU(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    _cell = SMGUCell


class HFGRU(_CellLayer):
    """GRU layers whose update can be slowed down, for data of high frequency.

    Parameters
    ----------
    n_in, n_out, num_layers, dropout, trainable_init
        As for :class:`FLSTM`.
    alpha : float
        The largest share of the state that a step replaces.

    Notes
    -----
    As for :class:`FLSTM`; see :class:`HFGRUCell` for the formula. Source: ``HFGRU`` of
    FluxUtils.jl.

    Examples
    --------
    >>> HFGRU(3, 5, alpha=0.5)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        alpha: float = 1.0,
        trainable_init: bool = False,
    ) -> None:
        self.alpha = float(alpha)  # before the cells are made, which take it
        super().__init__(n_in, n_out, num_layers, dropout, trainable_init)

    def _cell(self, n_in: int, n_out: int) -> _Cell:
        return HFGRUCell(n_in, n_out, self.alpha)
