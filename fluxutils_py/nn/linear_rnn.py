"""Recurrent layers with a linear state update: MinGRU, MinLSTM and LRU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fluxutils_py.nn.kernels.library import library_in_use
from fluxutils_py.nn.kernels.modules import is_intercepted, is_plain, run_cell
from fluxutils_py.nn.kernels.recurrence import Cell, State, last_state_slopes
from fluxutils_py.nn.linear_recurrence import linear_recurrence
from fluxutils_py.nn.recurrent import Recur, Sensitivity
from fluxutils_py.nn.sizes import check_features, set_sizes

# The kernels compute one series per vector lane; torch's matrix products are faster where most
# lanes would be idle, unless what they leave for the backward pass does not fit into the caches.
FEW_SERIES = 8
FEW_IN_LONG_WINDOWS = 4
LONG_WINDOW = 1 << 18  # values of all steps, series and units
FEW_COLUMNS = 16  # of a product with many rows, whose transpose is then several times faster


class _StateAfterPast(Function):
    """The state at the start of a window; its gradient goes on to the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        gradients: Callable[[Tensor], tuple[Tensor | None, ...]],
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.gradients = gradients
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, d_state: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradients(d_state)


def _after_past(
    state: Tensor | None,
    gradients: Callable[[Tensor], tuple[Tensor | None, ...]],
    *parameters: Tensor | None,
) -> Tensor | None:
    """Return the state that begins a window; where gradients are computed, one whose gradient goes
    on to the parameters, by the function ``gradients``.
    """
    if state is None or not torch.is_grad_enabled() or state.requires_grad:
        return state
    after: Tensor = _StateAfterPast.apply(state, gradients, *parameters)
    return after


class _GatedRecurrence(nn.Module):
    """Compute ``h[t] = a[t] * h[t - 1] + b[t]``, where ``a`` and ``b`` depend only on the input."""

    takes_windows = True
    n_blocks: ClassVar[int]  # the weight has n_blocks * H rows: the gates, then the candidate
    kernel: ClassVar[int]  # number of the native kernel
    # a and b from the blocks, all (S, B, H)
    coefficients: ClassVar[Callable[..., tuple[Tensor, Tensor]]]

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.n_in = n_in
        self.n_out = n_out
        self.linear = nn.Linear(n_in, self.n_blocks * n_out)

    def empty_state(self) -> tuple[Tensor, ...]:
        return (self.linear.weight.detach().new_zeros(0, self.n_out),)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(type(self).__name__.lstrip("_"), x, self.n_in)
        weights = self.linear.weight.chunk(self.n_blocks)
        biases = self.linear.bias.chunk(self.n_blocks)
        # one product per block: a single product would have to copy the gradients of its parts
        # together
        blocks = map(F.linear, (x,) * self.n_blocks, weights, biases)
        a, b = self.coefficients(*blocks)
        h = linear_recurrence(a, b, state)
        return h, h[-1].clone()  # a view would keep the whole window in memory

    def by_kernel(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State] | None:
        """Compute a step (B, F) or a window (S, B, F) with the native kernels; None where they do
        not apply.
        """
        linear = self.linear
        few = x.dim() == 3 and len(x) > 1 and x.shape[1] < FEW_SERIES
        if few and x.shape[1] >= FEW_IN_LONG_WINDOWS:
            few = len(x) * x.shape[1] * self.n_out < LONG_WINDOW
        if few or type(linear) is not nn.Linear or is_intercepted(linear):
            return None
        # from the dict, where torch's functional calls replace them
        parameters = vars(linear)["_parameters"]
        if "weight" not in parameters or "bias" not in parameters:
            return None
        weights = (parameters["weight"], None, parameters["bias"], None)
        cell = Cell(self.kernel, 1, self.n_blocks, 0)
        return run_cell(self, cell, x, state, weights)

    # -- gradients that reach beyond a window, see nn/states.py -----------------------------

    def first_sensitivity(self, n_series: int, with_initial: bool) -> Sensitivity:
        """Return the sensitivity of the initial state: to the weights (B, F, blocks H), to the
        biases (B, blocks H), and if it is trained to itself (B, H).
        """
        n_rows = self.n_blocks * self.n_out
        of_weight = self.linear.weight.new_zeros(n_series, self.n_in, n_rows)
        of_bias = of_weight.new_zeros(n_series, n_rows)
        if with_initial:
            return of_weight, of_bias, of_weight.new_ones(n_series, self.n_out)
        return of_weight, of_bias

    def run_exactly(
        self, x: Tensor, state: Tensor | None, sensitivity: Sensitivity, initial: Tensor | None
    ) -> tuple[Tensor, Tensor, Sensitivity]:
        """Run a window (S, B, F); return outputs, state and sensitivity after it.

        The gradient with respect to the state before it goes on to the parameters, and to the
        ``initial`` state.
        """
        linear = self.linear
        of_weight, of_bias, *of_initial = sensitivity
        n_blocks = self.n_blocks

        def gradients(d_state: Tensor) -> tuple[Tensor | None, ...]:
            """Return what a gradient of the state adds to those of the weight, the bias and the
            initial state.
            """
            d_rows = d_state.repeat(1, n_blocks)
            d_weight = (of_weight * d_rows[:, None]).sum(0).T
            d_bias = (of_bias * d_rows).sum(0)
            d_initial = (of_initial[0] * d_state).sum(0, keepdim=True) if of_initial else None
            return d_weight, d_bias, d_initial

        start = _after_past(state, gradients, linear.weight, linear.bias, initial)
        result: Any = self.by_kernel(x, start)
        y, after = self(x, start) if result is None else result
        with torch.no_grad():
            moved = self._move_on(x, state, y, sensitivity)
        return y, after, moved

    def _move_on(
        self, x: Tensor, state: Tensor | None, y: Tensor, sensitivity: Sensitivity
    ) -> Sensitivity:
        linear = self.linear
        sums = F.linear(x, linear.weight, linear.bias)
        # the derivatives of the last state with respect to the sums (S, B, blocks H) of gates and
        # candidate, which they may replace, and the product of a over all steps
        library = library_in_use()
        tensors = (sums, y, state)
        if library is not None and y.numel() and all(t is None or is_plain(t) for t in tensors):
            slopes, product = last_state_slopes(library, self.kernel, sums, y, state)
        else:
            with torch.enable_grad():
                sums.requires_grad_()
                before = y.new_zeros(y.shape[1:]) if state is None else state.detach()
                start = before.requires_grad_()
                h = linear_recurrence(*self.coefficients(*sums.split(self.n_out, -1)), start)
                last = h[-1].sum()  # of states, each of which depends on the sums of one unit alone
            slopes, product = torch.autograd.grad(last, (sums, start))
        of_weight, of_bias, *of_initial = sensitivity
        kept = product.repeat(1, self.n_blocks)
        to_weight = of_weight * kept[:, None]
        to_weight.baddbmm_(x.permute(1, 2, 0), slopes.transpose(0, 1))
        to_bias = torch.addcmul(slopes.sum(0), of_bias, kept)
        return to_weight, to_bias, *(t * product for t in of_initial)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step (B, n_in), for export."""
        blocks = self.linear(x).chunk(self.n_blocks, -1)
        a, b = self.coefficients(*blocks)
        h = a * state + b
        return h, h


class _MinGRU(_GatedRecurrence):
    n_blocks = 2
    kernel = 9

    @staticmethod
    def coefficients(gate: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.sigmoid(gate)
        return 1 - z, z * candidate


class _MinLSTM(_GatedRecurrence):
    n_blocks = 3
    kernel = 10

    @staticmethod
    def coefficients(forget: Tensor, write: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
        # f / (f + i), also where both are 0 in floating point
        keep = torch.sigmoid(F.logsigmoid(forget) - F.logsigmoid(write))
        return keep, torch.addcmul(candidate, keep, candidate, value=-1)


class _GatedLayer(Recur):
    """A Recur around a gated recurrence that it builds itself."""

    _inner: ClassVar[type[_GatedRecurrence]]
    n_in: int
    n_out: int

    def __init__(self, n_in: int, n_out: int, trainable_init: bool = False) -> None:
        set_sizes(self, n_in=n_in, n_out=n_out)
        super().__init__(self._inner(self.n_in, self.n_out), trainable_init)


class MinGRU(_GatedLayer):
    """MinGRU: a GRU with a single gate, which depends on the input alone.

    z = sigmoid(Wz x + bz); h' = (1 - z) h + z (Wh x + bh)

    The gates and the candidate depend on the input but not on the state: there are no recurrent
    weights to multiply with at every step, and training is several times faster than with an LSTM.
    In exchange, a single layer can compute less than a GRU; stack two or more in a
    :class:`SequenceStack`.

    Parameters
    ----------
    n_in, n_out : int
        Number of input features, and number of units H.
    trainable_init : bool
        Whether to train the initial state; see :class:`Recur`.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer, or below 1.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    state is ``h`` (B, n_out), initially zero. ``module.linear`` holds the weights: H rows each for
    z and h, in this order. Native kernels compute windows of 8 or more series, and long windows of
    4 or more (see :func:`native_kernels`); otherwise matrix products and :func:`linear_recurrence`
    do. The results are equal up to rounding.

    Source: Feng et al. (2024), "Were RNNs all we needed?", arXiv:2410.01201.

    Examples
    --------
    >>> MinGRU(3, 5)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    _inner = _MinGRU


class MinLSTM(_GatedLayer):
    """MinLSTM: an LSTM with two gates, which depend on the input alone and sum to one.

    f, i = sigmoid(Wf x + bf), sigmoid(Wi x + bi); h' = (f h + i (Wh x + bh)) / (f + i)

    As fast to train as :class:`MinGRU`, and like it best stacked in a :class:`SequenceStack`.

    Parameters
    ----------
    n_in, n_out : int
        Number of input features, and number of units H.
    trainable_init : bool
        Whether to train the initial state; see :class:`Recur`.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer, or below 1.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    state is ``h`` (B, n_out), initially zero. ``module.linear`` holds the weights: H rows each for
    f, i and h, in this order. Native kernels compute the same windows as for :class:`MinGRU`.

    Source: Feng et al. (2024), "Were RNNs all we needed?", arXiv:2410.01201.

    Examples
    --------
    >>> MinLSTM(3, 5)(torch.zeros(7, 4, 3)).shape
    torch.Size([7, 4, 5])
    """

    _inner = _MinLSTM


class _DiagonalRecurrence(nn.Module):
    """Inner module of :class:`LRU`; stores complex numbers as adjacent pairs of real ones."""

    takes_windows = True

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_states: int,
        ring: tuple[float, float, float],
    ) -> None:
        super().__init__()
        self.n_in = n_in
        self.n_out = n_out
        self.n_states = n_states
        self.ring = ring
        self.nu_log = nn.Parameter(torch.empty(n_states))
        self.theta_log = nn.Parameter(torch.empty(n_states))
        self.gamma_log = nn.Parameter(torch.empty(n_states))
        self.weight_in = nn.Parameter(torch.empty(2 * n_states, n_in))
        self.weight_out = nn.Parameter(torch.empty(n_out, 2 * n_states))
        self.weight_skip = nn.Parameter(torch.empty(n_out, n_in))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters from torch's generator, the eigenvalues uniformly from the ring."""
        r_min, r_max, max_phase = self.ring
        with torch.no_grad():
            # squared moduli, in which the area of a ring is uniform
            square = torch.rand(self.n_states) * (r_max**2 - r_min**2) + r_min**2
            square.clamp_(1e-12, 1 - 1e-7)  # so that both logarithms are finite
            self.nu_log.copy_(torch.log(-0.5 * torch.log(square)))
            phase = torch.rand(self.n_states).clamp_min_(1e-6)
            self.theta_log.copy_(torch.log(max_phase * phase))
            self.gamma_log.copy_(0.5 * torch.log1p(-square))
        nn.init.normal_(self.weight_in, std=(2 * self.n_in) ** -0.5)
        nn.init.normal_(self.weight_out, std=self.n_states**-0.5)
        nn.init.normal_(self.weight_skip, std=self.n_in**-0.5)

    def empty_state(self) -> tuple[Tensor, ...]:
        return (self.nu_log.detach().new_zeros(0, self.n_states, 2),)

    def eigenvalues(self) -> Tensor:
        """Return the complex eigenvalues (n_states,), with modulus below 1."""
        return torch.polar(*self._modulus_and_angle())

    def _modulus_and_angle(self) -> tuple[Tensor, Tensor]:
        return torch.exp(-torch.exp(self.nu_log)), torch.exp(self.theta_log)

    def _scaled_weight_in(self) -> Tensor:
        """Return the weights of the input times gamma, which belongs to both parts of a number."""
        scale = torch.exp(self.gamma_log).repeat_interleave(2)
        return self.weight_in * scale[:, None]

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, h = self._run(x, state)
        # a clone, because a view would keep the whole window in memory
        return y, h[-1].clone()

    def _run(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return outputs, and states (S, B, n_states, 2) after each step."""
        check_features("LRU", x, self.n_in)
        # one product, because products with few columns take longer than one with their columns
        # together
        weight = torch.cat([self._scaled_weight_in(), self.weight_skip])
        added, skip = F.linear(x, weight).split([2 * self.n_states, self.n_out], -1)
        pairs = added.contiguous().unflatten(-1, (self.n_states, 2))
        start = None
        if state is not None:
            start = torch.view_as_complex(state.contiguous())
        h = torch.view_as_real(
            linear_recurrence(self.eigenvalues(), torch.view_as_complex(pairs), start)
        )
        skip_rows = skip.flatten(0, 1)
        h_rows = h.flatten(0, 1).flatten(1)
        if self.n_out < FEW_COLUMNS:
            y = skip_rows + (self.weight_out @ h_rows.T).T
        else:
            y = torch.addmm(skip_rows, h_rows, self.weight_out.T)
        return y.view(*x.shape[:2], self.n_out), h

    # -- gradients that reach beyond a window, see nn/states.py -----------------------------

    def first_sensitivity(self, n_series: int, with_initial: bool) -> Sensitivity:
        """Return the sensitivity of the initial state: to nu_log, theta_log and gamma_log (B, 3,
        n_states, 2), to the weights of the input (B, n_states, 2, F), and if it is trained to
        itself (B, n_states, 2).

        Pairs are complex derivatives. That with respect to the imaginary part of a weight is ``i``
        times that with respect to the real part, which is kept.
        """
        weight = self.weight_in.detach()
        n = self.n_states
        of_units = weight.new_zeros(n_series, 3, n, 2)
        of_weight = weight.new_zeros(n_series, n, 2, self.n_in)
        if not with_initial:
            return of_units, of_weight
        of_initial = weight.new_zeros(n_series, n, 2)
        of_initial[..., 0] = 1
        return of_units, of_weight, of_initial

    def run_exactly(
        self, x: Tensor, state: Tensor | None, sensitivity: Sensitivity, initial: Tensor | None
    ) -> tuple[Tensor, Tensor, Sensitivity]:
        """Run a window as :meth:`_GatedRecurrence.run_exactly` does."""
        trained = (self.nu_log, self.theta_log, self.gamma_log, self.weight_in, initial)
        of_units, of_weight, *of_initial = sensitivity

        def gradients(d_state: Tensor) -> tuple[Tensor | None, ...]:
            """Return what a gradient of the state adds to those of nu_log, theta_log, gamma_log,
            the weights of the input and the initial state.
            """
            # of real numbers, by the real and the imaginary part of the state
            d_units = (of_units * d_state[:, None]).sum((0, 3))
            # of the imaginary part of a weight: i times the derivative by the real part
            real, imaginary = d_state.unbind(-1)
            turned = torch.stack([imaginary, -real], -1)
            d_weight = [(of_weight * d[..., None]).sum((0, 2)) for d in (d_state, turned)]
            d_initial = None
            if of_initial:
                d = [(of_initial[0] * d).sum((0, 2)) for d in (d_state, turned)]
                d_initial = torch.stack(d, -1)[None]
            return *d_units.unbind(0), torch.stack(d_weight, 1).flatten(0, 1), d_initial

        start = _after_past(state, gradients, *trained)
        y, h = self._run(x, start)
        with torch.no_grad():
            moved = self._move_on(x, state, h, sensitivity)
        return y, h[-1].clone(), moved

    def _move_on(
        self, x: Tensor, state: Tensor | None, h: Tensor, sensitivity: Sensitivity
    ) -> Sensitivity:
        S = len(x)
        factor = self.eigenvalues()
        ones = torch.ones_like(factor)[None]
        powers = linear_recurrence(factor, torch.zeros_like(ones).expand(S, 1, -1), ones)[:, 0]
        later = torch.cat([ones, powers[:-1]]).flip(0)  # products over the steps after each
        product = powers[-1]

        # what the window adds to the derivatives with respect to the eigenvalues, the inputs' gain
        # and the weights
        states = torch.view_as_complex(h)
        to_factor = (later[1:, None] * states[:-1]).sum(0)
        if state is not None:
            to_factor += later[0] * torch.view_as_complex(state.contiguous())
        turned = torch.view_as_real(later).permute(1, 2, 0).flatten(0, 1)  # (2 n_states, S)
        scale = torch.exp(self.gamma_log)
        to_weight = torch.matmul(turned, x.transpose(0, 1)).unflatten(1, (-1, 2))
        to_weight *= scale[:, None, None]
        pairs = self.weight_in.unflatten(0, (-1, 2))
        to_gain = torch.complex(
            (to_weight[:, :, 0] * pairs[:, 0] - to_weight[:, :, 1] * pairs[:, 1]).sum(-1),
            (to_weight[:, :, 0] * pairs[:, 1] + to_weight[:, :, 1] * pairs[:, 0]).sum(-1),
        )

        of_units, of_weight, *of_initial = sensitivity
        by_nu = factor * -torch.exp(self.nu_log)
        by_theta = factor * 1j * torch.exp(self.theta_log)
        added = torch.stack([to_factor * by_nu, to_factor * by_theta, to_gain], 1)
        units = torch.view_as_complex(of_units) * product + added
        real = product.real[:, None]
        imaginary = product.imag[:, None]
        to_weight[:, :, 0] += real * of_weight[:, :, 0] - imaginary * of_weight[:, :, 1]
        to_weight[:, :, 1] += imaginary * of_weight[:, :, 0] + real * of_weight[:, :, 1]
        initials = [torch.view_as_real(torch.view_as_complex(t) * product) for t in of_initial]
        return torch.view_as_real(units), to_weight, *initials

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step (B, n_in) in real numbers, for export."""
        added = F.linear(x, self._scaled_weight_in())
        modulus, angle = self._modulus_and_angle()
        real = modulus * torch.cos(angle)
        imaginary = modulus * torch.sin(angle)
        h_real, h_imaginary = state.unbind(-1)
        turned = [real * h_real - imaginary * h_imaginary, real * h_imaginary + imaginary * h_real]
        h = torch.stack(turned, -1) + added.unflatten(-1, (self.n_states, 2))
        y = F.linear(h.flatten(-2), self.weight_out) + F.linear(x, self.weight_skip)
        return y, h


class LRU(Recur):
    """Linear Recurrent Unit: a diagonal linear system with complex eigenvalues inside the unit
    circle.

    h' = lambda h + gamma (B x); y = Re(C h') + D x

    ``lambda = exp(-exp(nu_log) + i exp(theta_log))`` is stable for all parameters. The layer is
    linear in its input; put it into a :class:`SequenceStack` to learn nonlinear functions.

    Parameters
    ----------
    n_in, n_out : int
        Number of input and output features.
    n_states : int or None
        Number of complex values in the state. None is ``n_out / 2``, rounded up, which gives about
        ``n_out`` real values. A layer can distinguish as many of its last inputs as its state has
        real values.
    r_min, r_max : float
        Moduli between which to draw the eigenvalues: ``0 <= r_min < r_max <= 1``. An eigenvalue of
        modulus ``r`` remembers for about ``1 / (1 - r)`` steps.
    max_phase : float
        Largest angle of an eigenvalue, in radians; angles are drawn between 0 and it. Choose it
        small for slow signals.
    trainable_init : bool
        Whether to train the initial state; see :class:`Recur`.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer or below 1, or the ring is invalid; the message names the
        argument.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    state is (B, n_states, 2), the real and the imaginary part of ``h``. ``module.weight_in`` (2
    n_states, n_in) and ``module.weight_out`` (n_out, 2 n_states) also alternate real and imaginary
    parts: ``B = weight_in[0::2] + i weight_in[1::2]`` and ``C = weight_out[:, 0::2] - i
    weight_out[:, 1::2]``. D is ``module.weight_skip``.

    Source: Orvieto et al. (2023), "Resurrecting recurrent neural networks for long sequences",
    arXiv:2303.06349.

    Examples
    --------
    >>> layer = LRU(3, 5, n_states=8)
    >>> layer(torch.zeros(7, 4, 3)).shape, layer.state.shape
    (torch.Size([7, 4, 5]), torch.Size([4, 8, 2]))
    """

    n_in: int
    n_out: int
    n_states: int

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_states: int | None = None,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = 2 * math.pi,
        trainable_init: bool = False,
    ) -> None:
        set_sizes(self, n_in=n_in, n_out=n_out)
        set_sizes(self, n_states=(self.n_out + 1) // 2 if n_states is None else n_states)
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(
                f"LRU: the ring needs 0 <= r_min < r_max <= 1, got r_min={r_min!r}, r_max={r_max!r}"
            )
        if not 0 < max_phase <= 2 * math.pi:
            raise ValueError(
                f"LRU: max_phase must be an angle above 0, at most 2 pi, got {max_phase!r}"
            )
        self.r_min = float(r_min)
        self.r_max = float(r_max)
        self.max_phase = float(max_phase)
        ring = (self.r_min, self.r_max, self.max_phase)
        inner = _DiagonalRecurrence(self.n_in, self.n_out, self.n_states, ring)
        super().__init__(inner, trainable_init)
