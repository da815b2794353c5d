"""Layers made of the cells of FluxUtils.jl, used like LSTM, GRU and RNN."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.nn.cells import FLSTMCell, HFGRUCell, MGUCell, SGRUCell, SMGUCell, _Cell
from fluxutils_py.nn.kernels.recurrence import State
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.sizes import check_probability
from fluxutils_py.validation import check_integer


class CellStack(nn.Module):
    """Stacked cells, run over whole windows; the layers here wrap one, as ``LSTM`` wraps an
    ``nn.LSTM``.

    ``stack(x, state)`` takes ``x`` (S, B, n_in) and a state of one tensor (L, B, H), a tuple of
    them, or None. It returns the outputs (S, B, H) of the last cell and the new state.
    """

    takes_windows = True
    batch_dim = 1

    def __init__(self, cells: list[_Cell], dropout: float = 0.0) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)
        self.dropout = dropout
        self.n_states = cells[0].n_states  # all cells are of one class

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        states = []
        cell: Any
        for k, cell in enumerate(self.cells):
            if k > 0:  # between cells only, as in nn.LSTM
                x = F.dropout(x, self.dropout, self.training)
            x, after = cell.window(x, self._state_of_cell(state, k))
            states.append(after)
        return x, self._stacked(states)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute one step (B, n_in) by the cells' formulas, for export."""
        states = []
        # without dropout: what is exported only predicts
        for k, cell in enumerate(self.cells):
            x, after = cell(x, self._state_of_cell(state, k))
            states.append(after)
        return x, self._stacked(states)

    def _state_of_cell(self, state: State | None, k: int) -> State | None:
        if state is None:
            return None
        # one tensor has the cells as its first axis, and so has each tensor of a tuple
        return state[k] if self.n_states == 1 else tuple(s[k] for s in state)

    def _stacked(self, states: list[State]) -> State:
        """Return the states of the cells as one state with the cells as the first axis."""
        if self.n_states == 1:
            return torch.stack(cast(list[Tensor], states))  # no tuples then
        # from a tuple per cell to a tensor per state
        return tuple(map(torch.stack, zip(*states, strict=True)))

    def empty_state(self) -> tuple[Tensor, ...]:
        first: Any = self.cells[0]
        return tuple(s.expand(len(self.cells), *s.shape) for s in first.empty_state())


class _CellLayer(Recur):
    """A Recur around a stack of cells that it builds itself."""

    cell: type[_Cell]

    def __init__(
        self,
        n_in: int,
        n_out: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        trainable_init: bool = False,
    ) -> None:
        # as Python's integers: torch refuses those of NumPy
        n_in = operator.index(n_in)
        n_out = operator.index(n_out)
        num_layers = check_integer("num_layers", num_layers, 1)
        dropout = check_probability(self, "dropout", dropout)
        # each cell but the first reads the outputs of the one before
        cells = [self._make(n_out if k else n_in, n_out) for k in range(num_layers)]
        super().__init__(CellStack(cells, dropout), trainable_init)
        self.n_in = n_in
        self.n_out = n_out
        self.num_layers = num_layers
        self.dropout = dropout

    def _make(self, n_in: int, n_out: int) -> _Cell:
        return self.cell(n_in, n_out)


_LAYER_DOC = """{first}

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, units of each layer.
    num_layers : int
        Layers stacked on one another, each with its own state.
    dropout : float
        Probability of dropping an output between two layers (not after the last), in training only.
    {alpha}trainable_init : bool
        Whether the initial state is trained; see :class:`Recur`.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``; the
    state is carried as in :class:`Recur`. Whole windows are several times faster than their steps.
    Without the native kernels (see :func:`native_kernels`) it is differentiable once, so penalties
    on gradients do not work. See :class:`{name}Cell` for the formula.

    Source: ``{name}`` of FluxUtils.jl.

    Examples
    --------
    >>> {name}(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """


class FLSTM(_CellLayer):
    __doc__ = _LAYER_DOC.format(
        name="FLSTM", first="LSTM layers with activations that cost no exponential.", alpha=""
    )
    cell = FLSTMCell


class SGRU(_CellLayer):
    __doc__ = _LAYER_DOC.format(
        name="SGRU", first="GRU layers whose gates see the state alone.", alpha=""
    )
    cell = SGRUCell


class MGU(_CellLayer):
    __doc__ = _LAYER_DOC.format(
        name="MGU", first="GRU layers with one gate for both purposes.", alpha=""
    )
    cell = MGUCell


class SMGU(_CellLayer):
    __doc__ = _LAYER_DOC.format(
        name="SMGU",
        first="GRU layers with one gate for both purposes, which sees the state alone.",
        alpha="",
    )
    cell = SMGUCell


class HFGRU(_CellLayer):
    __doc__ = _LAYER_DOC.format(
        name="HFGRU",
        first="GRU layers whose update can be slowed down, for data of high frequency.",
        alpha="""alpha : float
        The largest share of the state that a step replaces.
    """,
    )
    cell = HFGRUCell

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

    def _make(self, n_in: int, n_out: int) -> _Cell:
        return HFGRUCell(n_in, n_out, self.alpha)
