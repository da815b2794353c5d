"""Recurrent layers that carry their own state from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.kernels.modules import is_intercepted, run_module
from fluxutils_py.nn.kernels.recurrence import Recorded, State
from fluxutils_py.nn.precision import as_float32, without_autocast
from fluxutils_py.nn.sizes import check_probability, set_sizes

TORCH_LAYERS = (nn.RNNBase, nn.RNNCellBase)  # made once: a union takes longer to make than to ask
_BATCH_DIMS = {nn.LSTM: 1, nn.GRU: 1, nn.RNN: 1}  # of the states of the commonest modules


# derivatives of a state with respect to the layer's parameters, see nn/states.py; axis 0 is
# the batch
Sensitivity = tuple[Tensor, ...]


class Recur(nn.Module):
    """Give a recurrent module a memory: each call continues where the last one ended.

    Parameters
    ----------
    module : nn.Module
        One of

        - ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` (any number of layers, time-major, one direction);
        - ``nn.LSTMCell``, ``nn.GRUCell``, ``nn.RNNCell``;
        - any module with ``forward(x, state) -> (y, state)``. ``state`` is None on the first
          call, then the state that
          the module returned: a tensor or a tuple of tensors, whose axis 0 is the batch (set
          ``batch_dim = 1`` on the module for another axis). The module gets one time step ``(B,
          F)`` at a time, or whole windows ``(S, B, F)`` if it has ``takes_windows = True``. A
          method ``empty_state()`` that returns a tuple of the state's tensors for a batch of 0 lets
          :func:`states` know the state before the first call.
    trainable_init : bool
        Whether to train the state at the start of a series: parameters ``initial_state``, zero at
        first, one for each tensor of the state, for a batch of 1. For this, your own module needs
        the method ``empty_state()``.

    Notes
    -----
    ``forward`` takes one step ``(B, F)`` or a window ``(S, B, F)``, and returns ``(B, H)`` or ``(S,
    B, H)``. Integer input is converted to the floating type of the parameters. The state lives in
    the attribute ``state``; None is the initial state. It is part of the autograd graph until
    :func:`fluxutils_py.truncate`; :func:`fluxutils_py.reset` forgets it. It is not in
    ``state_dict()``: use :func:`fluxutils_py.states` and :func:`fluxutils_py.loadstates`.

    On the CPU, native kernels compute torch's layers and cells if they were built, with torch's
    results to rounding; see :func:`fluxutils_py.nn.native_kernels`.

    Source: ``Recur`` of Flux.jl 0.9, as used by FluxUtils.jl. There the initial state is always
    trained.

    Raises
    ------
    TypeError
        If ``module`` is not a module, is a ``Recur`` already, is bidirectional (it would look into
        the future) or is ``batch_first``, or ``trainable_init`` is set for a module whose state is
        unknown.
    ShapeError
        In ``forward``, if ``x`` is neither 2-D nor 3-D, or the carried state has another batch
        size.

    Examples
    --------
    >>> rnn = Recur(nn.GRU(3, 5))
    >>> x = torch.randn(7, 2, 3)  # (S, B, F)
    >>> whole = rnn(x)
    >>> rnn.reset()
    >>> parts = torch.cat([rnn(x[:4]), rnn(x[4:])])
    >>> torch.allclose(whole, parts, atol=1e-6)
    True
    """

    state: State | None
    sensitivity: Sensitivity | None = None
    carries_sensitivity: bool = False

    def __init__(self, module: nn.Module, trainable_init: bool = False) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"Recur wraps a torch module, got {type(module).__name__}")
        if isinstance(module, Recur):
            raise TypeError("this module is already a Recur: use it as it is")
        if isinstance(module, nn.RNNBase):
            if module.bidirectional:
                raise TypeError(
                    f"a bidirectional {type(module).__name__} reads the future and cannot carry a "
                    "state forward; build it with bidirectional=False, and to see k steps ahead, "
                    "fit on x[:, :, k:] and y[:, :, :-k]: the output is then k steps late"
                )
            if module.batch_first:
                raise TypeError(
                    f"windows are (S, B, F), time first: build the {type(module).__name__} with "
                    "batch_first=False"
                )
        self.module = module
        self.state = None
        # of the last state: 0 for one tensor, n for a tuple of n; None before the first
        self.form: int | None = None
        self._mark: int | None = None  # steps until the state is to be noted, see mark()
        self._marked: State | None = None
        self.trainable_init = bool(trainable_init)
        if self.trainable_init:
            self.initial_state = _InitialState(self._zero_state())

    # -- what kind of module is inside -------------------------------------------------------------

    @property
    def batch_dim(self) -> int:
        """Return the batch axis of state tensors: ``batch_dim`` of the module, else 1 for
        ``nn.LSTM``, else 0.
        """
        m: Any = self._modules["module"]  # by its name, it takes half a microsecond to find
        dim = _BATCH_DIMS.get(type(m))
        if dim is not None:
            return dim
        # a module takes a microsecond to say that it lacks something
        if isinstance(m, TORCH_LAYERS):
            return int(isinstance(m, nn.RNNBase))
        return int(getattr(m, "batch_dim", 0))

    @property
    def _is_windowed(self) -> bool:
        """Whether the inner module gets whole windows ``(S, B, F)`` rather than single steps."""
        m = self.module
        if isinstance(m, TORCH_LAYERS):
            return isinstance(m, nn.RNNBase)
        return bool(getattr(m, "takes_windows", False))

    @property
    def is_diagonal(self) -> bool:
        """Whether each unit's state depends on the unit's own past alone, so that the inner module
        can carry how it depends on the unit's parameters; see ``nn/states.py``.
        """
        m = self.module
        # hooks would not see what is computed
        return hasattr(type(m), "run_exactly") and not is_intercepted(m)

    def empty_state(self) -> tuple[Tensor, ...] | None:
        """Return the state of zero series, whose tensors show count and shape; None if only a run
        could tell.
        """
        m: Any = self.module
        like = next(m.parameters(), torch.empty(0))
        if isinstance(m, nn.RNNBase):
            h = like.new_zeros(m.num_layers, 0, m.proj_size or m.hidden_size)  # (L, B, H)
            c = like.new_zeros(m.num_layers, 0, m.hidden_size)
            return (h, c) if isinstance(m, nn.LSTM) else (h,)
        if isinstance(m, nn.RNNCellBase):
            h = like.new_zeros(0, m.hidden_size)  # (B, H)
            return (h, h.clone()) if isinstance(m, nn.LSTMCell) else (h,)
        return m.empty_state() if hasattr(m, "empty_state") else None

    def _zero_state(self) -> list[Tensor]:
        """For a batch of 1."""
        empty = self.empty_state()
        if empty is None or not all(t.is_floating_point() for t in empty):
            raise TypeError(
                f"trainable_init needs to know the state of {type(self.module).__name__}: give it "
                "a method empty_state() that returns the state's tensors, of floating-point "
                "numbers, for a batch of 0"
            )
        shapes = [list(t.shape) for t in empty]
        for shape in shapes:
            shape[self.batch_dim] = 1
        return [t.new_zeros(shape) for t, shape in zip(empty, shapes, strict=True)]

    # -- state -------------------------------------------------------------------------------------

    def _set_initial_state(self, n_series: int) -> None:
        """Set the state to the trained initial one, which gradients then reach."""
        d = self.batch_dim
        tensors = [p.expand(*p.shape[:d], n_series, *p.shape[d + 1 :]) for p in self.initial_state]
        self.state = tensors[0] if len(tensors) == 1 and not self.form else tuple(tensors)
        if self.carries_sensitivity:
            diagonal: Any = self.module
            self.sensitivity = diagonal.first_sensitivity(n_series, True)

    def reset_series(self, index: Tensor) -> None:
        """Restart some of the series, given as indices (n,); the layer must have a state."""
        assert self.state is not None
        if self.sensitivity is not None:
            diagonal: Any = self.module
            fresh = diagonal.first_sensitivity(len(index), self.trainable_init)
            self.sensitivity = tuple(
                t.index_copy(0, index, start)
                for t, start in zip(self.sensitivity, fresh, strict=True)
            )
        tensors = [self.state] if isinstance(self.state, Tensor) else list(self.state)
        starts = [t.new_zeros(()) for t in tensors]
        if self.trainable_init:
            starts = list(self.initial_state)
        where = (slice(None),) * self.batch_dim + (index,)
        for k, (t, start) in enumerate(zip(tensors, starts, strict=True)):
            tensors[k] = t.clone()
            tensors[k][where] = start.to(t.dtype)
        self.state = tensors[0] if isinstance(self.state, Tensor) else tuple(tensors)

    def reset(self) -> None:
        """Forget: the next call starts from the initial state and may have any batch size."""
        if self.state is not None:
            self.form = 0 if isinstance(self.state, Tensor) else len(self.state)
        # a module's own way takes a microsecond for each
        self.__dict__.update(state=None, _marked=None, _mark=None, sensitivity=None)

    def truncate(self) -> None:
        """Detach the state: its value stays, gradients stop here."""
        if self.state is not None:
            self.__dict__["state"] = map_state(Tensor.detach, self.state)

    def mark(self, steps: int) -> None:
        """Note the state after ``steps`` more steps (0: now), detached; :meth:`marked` then returns
        it.
        """
        self._mark = steps
        self._marked = None if self.state is None else map_state(Tensor.detach, self.state)

    def marked(self) -> State | None:
        """Return the state noted by the last :meth:`mark`, or the state at that call if the step
        was not reached.
        """
        return self._marked

    def joined(self, parts: Sequence[State | None]) -> State | None:
        """Return states of several groups of series as one, detached; None if one is None."""
        kept: list[Any] = [p for p in parts if p is not None]
        if len(kept) < len(parts):
            return None

        def join(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([t.detach() for t in tensors], self.batch_dim)

        if isinstance(kept[0], Tensor):  # then all are
            return join(kept)
        return tuple(map(join, zip(*kept, strict=True)))

    # -- computing ---------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() not in (2, 3):
            raise ShapeError(
                f"{self._name()} takes a step (B, F) or a window (S, B, F), got a tensor of shape "
                f"{tuple(x.shape)}"
            )
        if not x.is_floating_point():
            x = x.to(next((p.dtype for p in self.parameters()), torch.float32))
        if self.state is not None:
            self._check_batch(self.state, x.shape[-2])
        elif self.trainable_init:
            self._set_initial_state(x.size(-2))
        if self._mark is None:
            return self._run_module(x)
        n_steps = x.shape[0] if x.dim() == 3 else 1
        cut, self._mark = self._mark, self._mark - n_steps
        if not 0 < cut <= n_steps:
            return self._run_module(x)
        y = self._run_module(x[:cut] if x.dim() == 3 else x)
        assert self.state is not None
        self._marked = map_state(Tensor.detach, self.state)
        return y if cut == n_steps else torch.cat([y, self._run_module(x[cut:])])

    def _run_module(self, x: Tensor) -> Tensor:
        module: Any = self._modules["module"]
        if self.carries_sensitivity:
            return self._run_diagonal(x)
        result = run_module(module, x, self.state)
        if result is not None:
            # a module's own way takes a microsecond, at every step
            y, self.__dict__["state"] = result
            return y
        in_autocast = torch.is_autocast_enabled("cpu") and x.is_cpu
        if in_autocast and not getattr(module, "handles_autocast", False):
            # torch computes most recurrent layers in bfloat16 on the CPU slowly, or not at all
            self.state = None if self.state is None else map_state(as_float32, self.state)
            with without_autocast(x.device):
                return self._run_module(as_float32(x))
        if x.dim() == 2:
            return self._call_module(x[None])[0] if self._is_windowed else self._call_module(x)
        if self._is_windowed:
            return self._call_module(x)
        return torch.stack([self._call_module(step) for step in x])

    def run_recorded(self, x: Tensor, tape: list[Recorded]) -> tuple[Tensor, State] | None:
        """Return outputs and the next state of a window from the native kernels, which record in
        ``tape`` what its gradient needs; None if they do not compute it. The state stays.
        """
        if self._mark is not None or self.trainable_init or self.carries_sensitivity:
            return None
        return None if is_intercepted(self) else run_module(self.module, x, self.state, tape)

    def _run_diagonal(self, x: Tensor) -> Tensor:
        """Run a diagonal module, which also moves the sensitivity of its state on; in float32 or
        float64, whatever autocast says.
        """
        module: Any = self._modules["module"]
        state: Any = self.state
        initial = self.initial_state[0] if self.trainable_init else None
        with without_autocast(x.device):
            window = as_float32(x if x.dim() == 3 else x.unsqueeze(0))
            if self.sensitivity is None:
                first = module.first_sensitivity(window.shape[1], self.trainable_init)
                # after steps that count for nothing, neither does the start
                self.sensitivity = tuple(map(torch.zeros_like, first))
            y, self.state, self.sensitivity = module.run_exactly(
                window, as_float32(state), self.sensitivity, initial
            )
        return y if x.dim() == 3 else y[0]

    def _call_module(self, x: Tensor) -> Tensor:
        """Call the inner module once and keep its state; return its output."""
        module = self.module
        if x.is_cuda and self.state is not None:
            self.state = map_state(Tensor.contiguous, self.state)  # as cuDNN wants it
        if isinstance(module, nn.RNNCellBase):
            state = module(x, self.state)
            y = state[0] if isinstance(module, nn.LSTMCell) else state
        else:
            y, state = module(x, self.state)
        # a module's own takes a microsecond, at every step
        object.__setattr__(self, "state", state)
        return y

    def _check_batch(self, state: State, n_series: int) -> None:
        first = state if isinstance(state, Tensor) else state[0]
        carried = first.shape[self.batch_dim]
        if carried != n_series:
            raise ShapeError(
                f"{self._name()} carries the state of {carried} series and got a batch of "
                f"{n_series}: call reset(model) before other series"
            )

    def _name(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__})"

    # -- moving and copying ------------------------------------------------------------------------

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Recur:
        super()._apply(fn, recurse)
        if self.state is not None:
            self.state = map_state(fn, self.state)  # the state follows .to(), .double(), .cuda()
        if self.sensitivity is not None:
            self.sensitivity = tuple(map(fn, self.sensitivity))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # copies and pickles carry the value of the state, never its graph (torch cannot copy
        # non-leaf tensors)
        content = self.__dict__.copy()
        for name in ("state", "_marked"):
            if content[name] is not None:
                content[name] = map_state(lambda t: t.detach().clone(), content[name])
        return content

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self.module, nn.RNNBase):
            # cuDNN wants the weights in one piece; copies and pickles make each by itself
            self.module.flatten_parameters()


class _InitialState(nn.ParameterList):
    """The trained initial state of a layer. Its text has the shapes, and no types."""

    def extra_repr(self) -> str:
        return ", ".join(str(tuple(p.shape)) for p in self)


class _Ready(Recur):
    """A Recur around a torch layer that it builds itself."""

    layer: Callable[..., nn.RNNBase]
    n_in: int
    n_out: int
    num_layers: int

    def __init__(
        self,
        n_in: int,
        n_out: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
        trainable_init: bool = False,
    ) -> None:
        set_sizes(self, n_in=n_in, n_out=n_out, num_layers=num_layers)
        self.dropout = check_probability(self, "dropout", dropout)
        self.bias = bool(bias)
        sizes = (self.n_in, self.n_out, self.num_layers)
        super().__init__(self.layer(*sizes, dropout=self.dropout, bias=self.bias), trainable_init)


class LSTM(_Ready):
    """LSTM that carries its state.

    The same as ``Recur(nn.LSTM(n_in, n_out, num_layers, dropout=dropout))``.

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, units of each layer.
    num_layers : int
        Layers stacked on one another, each with its own state.
    dropout : float
        Probability of dropping an output between two layers (not after the last), in training only.
    bias : bool
        Whether the gates have biases.
    trainable_init : bool
        Whether the initial state is trained; see :class:`Recur`.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``; see
    :class:`Recur`.
    Source: ``RNN(in, out, nlayers, dropout)`` of FluxUtils.jl.

    Examples
    --------
    >>> LSTM(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    layer = nn.LSTM


class GRU(_Ready):
    """GRU that carries its state, with the arguments of :class:`LSTM`.

    The same as ``Recur(nn.GRU(n_in, n_out, num_layers, dropout=dropout))``.

    >>> GRU(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    layer = nn.GRU


class RNN(_Ready):
    """RNN that carries its state, with the arguments of :class:`LSTM`.

    The same as ``Recur(nn.RNN(n_in, n_out, num_layers, dropout=dropout))``.

    >>> RNN(3, 5, num_layers=2)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    layer = nn.RNN


def wrap_recurrent(model: nn.Module) -> nn.Module:
    """Wrap bare torch recurrent layers and cells inside ``nn.Sequential``, or the model itself, in
    a Recur.

    It changes the containers in place and returns the model, or its wrapper if the model itself is
    such a layer. The order of the parameters stays; their names gain ``module.``. Recurrent layers
    inside other modules stay, since the ``forward`` of those handles them.
    """
    if isinstance(model, TORCH_LAYERS):
        return Recur(model)
    for container in model.modules():
        if (
            isinstance(container, nn.Sequential)
            and type(container).forward is nn.Sequential.forward
        ):
            # by index: named_children shows a layer used twice once
            for i, child in enumerate(container):
                if isinstance(child, TORCH_LAYERS):
                    container[i] = Recur(child)
    return model


def unwrapped_recurrent(model: nn.Module) -> list[str]:
    """Names of torch recurrent layers that no Recur holds: their state is lost between calls."""
    wrapped = {id(m) for r in model.modules() if isinstance(r, Recur) for m in r.modules()}
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, TORCH_LAYERS) and id(m) not in wrapped
    ]


def map_state(fn: Callable[[Tensor], Tensor], state: State) -> State:
    return fn(state) if isinstance(state, Tensor) else tuple(map(fn, state))
