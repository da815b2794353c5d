"""Recurrences over a window in torch with hand-written gradients, which do as much as possible for
all steps at once.

Forwards, the products with the inputs are one for the whole window; a step is a product with the
state and a dozen small operations, which write into their place. Backwards, the factors between the
gradients of a step's output and of its gates are computed for the whole window; a step is then a
product and two to four operations, and the gradient of the weights is one product.
``benchmarks/bench_cells.py`` shows what this gains, and what was tried besides.

The activations of :mod:`fluxutils_py.nn.activations` are computed on scaled values, with the scales
taken into the weights. Of ``u = x / REACH`` in -1..1, the sigmoid is ``u - u|u|/2 + 1/2`` and its
slope ``1 - |u|``. Of ``w = max(knee - |v|, 0)``, both are ``offset + copysign(top - w², v)``, and
the slope is ``2 w``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fluxutils_py.nn.activations import BEND, KNEE, PLATEAU, REACH

Gradients = tuple[Tensor | None, ...]
HALF = 0.5**0.5
# added to what may be 0, for which ptanh is negative: copysign goes by the sign of the zero
BELOW_ZERO = -1e-30


def scan_lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute an LSTM with the approximate activations over a window; gates in the order i, f, g,
    o.

    Parameters
    ----------
    x : Tensor of shape (S, B, F)
    h, c : Tensor of shape (B, H)
    weight_ih, weight_hh, bias : Tensor of shapes (4H, F), (4H, H), (4H,)

    Returns
    -------
    y, h, c : Tensor of shapes (S, B, H), (B, H), (B, H)
        Differentiable once.
    """

    def per_gate(sigmoid: float, tanh: float) -> Tensor:
        values = bias.new_tensor([sigmoid, sigmoid, tanh, sigmoid])
        return values.repeat_interleave(h.shape[1])

    # with these three, one pair of parabolas gives the sigmoids and the tanh of all gates
    knee = per_gate(HALF, KNEE * BEND**0.5)
    top = per_gate(0.5, PLATEAU)
    offset = per_gate(0.5, 0.0)

    scale = per_gate(HALF / REACH, BEND**0.5)
    of_rows = scale[:, None]
    bias = bias * scale + BELOW_ZERO
    pre = F.linear(x, weight_ih * of_rows, bias)
    weight = weight_hh * of_rows
    recording = _recording(pre, h, c, weight)  # here, because forward runs without gradients
    return _LSTM.apply(pre, h, c, weight, knee, top, offset, recording)


def scan_gru(
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    *,
    exact: bool = False,
    reverse: bool = False,
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute a relative of the GRU over a window: ``h' = (1 - z) n + z h`` with ``n = tanh(.. + r
    * (Whn h))``.

    Parameters
    ----------
    x : Tensor of shape (S, B, F)
    h : Tensor of shape (B, H)
    weight_ih : Tensor of shape (kH, F), or (H, F) if the gates do not see the input
    weight_hh, bias : Tensor of shapes (kH, H), (kH,)
        Of r, z and n (k = 3), or of the one gate that is both, and n (k = 2).
    exact : bool
        With the true sigmoid and tanh.
    reverse : bool
        ``h' = z n + (1 - z) h``.
    alpha : float
        Factor of z, where there are three.

    Returns
    -------
    y, h : Tensor of shapes (S, B, H), (B, H)
        Differentiable once.
    """
    n = h.shape[1]
    n_gates = len(weight_hh) // n - 1
    n_rows = len(weight_ih)  # the last ones: those of the candidate, with or without the gates
    if not exact:
        scales = [1 / REACH] * n_gates + [BEND**0.5]
        scale = bias.new_tensor(scales).repeat_interleave(n)
        weight_ih = weight_ih * scale[-n_rows:, None]
        weight_hh = weight_hh * scale[:, None]
        bias = bias * scale + BELOW_ZERO
    x_bias = bias[-n_rows:]
    pre = F.linear(x, weight_ih, x_bias)
    if n_rows == n:
        S, B, _ = x.shape
        gates = bias[:-n].expand(S, B, -1)
        candidate = pre
    else:
        gates, candidate = pre.split([n_rows - n, n], 2)
    recording = _recording(gates, candidate, h, weight_hh)
    return _GRU.apply(gates, candidate, h, weight_hh, exact, reverse, alpha, recording)


class _LSTM(Function):
    @staticmethod
    def forward(
        ctx: Any,
        pre: Tensor,
        h: Tensor,
        c: Tensor,
        weight: Tensor,
        knee: Tensor,
        top: Tensor,
        offset: Tensor,
        recording: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        S = len(pre)
        B, H = h.shape
        n = S if recording else 1
        gates, slopes = pre.new_empty(2, n, B, 4 * H)  # the slopes are halved
        squashed, c_slopes = pre.new_empty(2, n, B, H)  # ptanh of c, half its slope
        cells = pre.new_empty(n + recording, B, H)
        y = pre.new_empty(S, B, H)
        cells[0] = c

        raw = pre.new_empty(B, 4 * H)
        across = weight.t()
        c_knee = pre.new_tensor(KNEE)
        c_top = pre.new_tensor(PLATEAU)
        below_zero = pre.new_tensor(BELOW_ZERO)

        # lists of views, made once: to index a tensor costs as much as an operation of a step
        parts = gates.view(n, B, 4, H).unbind(2)
        i, f, g, o = (_steps(part, S) for part in parts)
        pres = pre.unbind()
        step_gates = _steps(gates, S)
        step_slopes = _steps(slopes, S)
        step_squashed = _steps(squashed, S)
        step_c_slopes = _steps(c_slopes, S)
        step_cells = _steps(cells, S + 1)
        ys = y.unbind()
        state = h
        cell = step_cells[0]
        for t in range(S):
            torch.addmm(pres[t], state, across, out=raw)
            gate = step_gates[t]
            _write_ptanh(gate, step_slopes[t], raw, knee, top)
            gate.add_(offset)
            before = cell
            cell = step_cells[t + 1]
            torch.addcmul(below_zero, f[t], before, out=cell)
            cell.addcmul_(i[t], g[t])
            out = step_squashed[t]
            _write_ptanh(out, step_c_slopes[t], cell, c_knee, c_top, BEND)
            state = torch.mul(o[t], out, out=ys[t])

        if recording:
            ctx.save_for_backward(h, weight, gates, slopes, squashed, c_slopes, cells, y)
        # clones, because views would keep the whole window in memory
        return y, y[-1].clone(), cells[-1].clone()

    @staticmethod
    def backward(
        ctx: Any,
        d_y: Tensor,
        d_h: Tensor,
        d_c: Tensor,
    ) -> Gradients:
        _require_first_order()
        h, weight, gates, slopes, squashed, c_slopes, cells, y = ctx.saved_tensors
        S, B, H = y.shape
        i, f, g, o = gates.view(S, B, 4, H).unbind(2)

        # factors from the gradient of c (of i, f and g) or h (of o) to those of the gates
        doubled = 2 * slopes
        factors = doubled.view(S, B, 4, H)
        of_i, of_f, of_g, of_o = factors.unbind(2)
        of_i.mul_(g)
        of_f.mul_(cells[:-1])
        of_g.mul_(i)
        of_o.mul_(squashed)
        d_gates = torch.empty_like(factors)
        d_pre = d_gates.view(S, B, 4 * H)

        # lists of views, as forwards
        by_c = factors[:, :, :3].unbind()
        by_h = of_o.unbind()
        factors_c = (o * c_slopes).mul_(2 * BEND)
        h_to_c = factors_c.unbind()
        forgets = f.unbind()
        d_ys = d_y.unbind()
        d_pres = d_pre.unbind()
        d_ifgs = d_gates[:, :, :3].unbind()
        d_os = d_gates[:, :, 3].unbind()

        dh = d_y[-1] + d_h
        dc = d_c.clone()
        dc_each = dc[:, None]  # a view: it follows dc, which changes in place
        for t in range(S - 1, -1, -1):
            dc.addcmul_(dh, h_to_c[t])
            torch.mul(by_c[t], dc_each, out=d_ifgs[t])
            torch.mul(by_h[t], dh, out=d_os[t])
            dc.mul_(forgets[t])
            if t > 0:
                torch.addmm(d_ys[t - 1], d_pres[t], weight, out=dh)
            else:
                dh = d_pres[t] @ weight
        d_weight = _weight_gradient(d_pre, h, y)
        return d_pre, dh, dc, d_weight, None, None, None, None


class _GRU(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        candidate: Tensor,
        h: Tensor,
        weight: Tensor,
        exact: bool,
        reverse: bool,
        alpha: float,
        recording: bool,
    ) -> tuple[Tensor, Tensor]:
        S, B, H = candidate.shape
        n = S if recording else 1
        n_gates = len(weight) - H
        n_products = n_gates + H
        products = h.new_empty(n, B, n_products)  # with the state
        active, magnitudes = h.new_empty(2, n, B, n_gates)  # gates, 1 less their slopes
        squashed, slopes = h.new_empty(2, n, B, H)  # candidates, half their slopes
        y = h.new_empty(S, B, H)

        raw = torch.empty_like(h)
        across = weight.t()
        knee = h.new_tensor(KNEE * BEND**0.5)
        top = h.new_tensor(PLATEAU)

        # lists of views, as in the LSTM
        x_gates = gates.unbind()
        x_candidates = candidate.unbind()
        step_products = _steps(products, S)
        h_gates = _steps(products[..., :n_gates], S)
        h_candidates = _steps(products[..., n_gates:], S)
        step_gates = _steps(active, S)
        r = _steps(active[..., :H], S)
        z = _steps(active[..., -H:], S)
        step_magnitudes = _steps(magnitudes, S)
        news = _steps(squashed, S)
        step_slopes = _steps(slopes, S)
        ys = y.unbind()
        state = h
        for t in range(S):
            torch.mm(state, across, out=step_products[t])
            gate = step_gates[t]
            torch.add(h_gates[t], x_gates[t], out=gate)
            x_new = x_candidates[t]
            h_new = h_candidates[t]
            new = news[t]
            if exact:
                gate.sigmoid_()
                torch.addcmul(x_new, r[t], h_new, out=new)
                new.tanh_()
            else:
                gate.clamp_(-1, 1)
                magnitude = torch.abs(gate, out=step_magnitudes[t])
                torch.addcmul(gate, gate, magnitude, value=-0.5, out=gate)
                gate.add_(0.5)
                torch.addcmul(x_new, r[t], h_new, out=raw)
                _write_ptanh(new, step_slopes[t], raw, knee, top)
            weighted = z[t] if alpha == 1 else alpha * z[t]
            if reverse:
                state = torch.lerp(state, new, weighted, out=ys[t])
            else:
                state = torch.lerp(new, state, weighted, out=ys[t])

        if recording:
            ctx.save_for_backward(h, weight, products, active, magnitudes, squashed, slopes, y)
            ctx.settings = (exact, reverse, alpha)
        return y, y[-1].clone()

    @staticmethod
    def backward(
        ctx: Any,
        d_y: Tensor,
        d_h: Tensor,
    ) -> Gradients:
        _require_first_order()
        h, weight, products, gates, magnitudes, squashed, slopes, y = ctx.saved_tensors
        exact, reverse, alpha = ctx.settings
        S, B, H = y.shape
        n_gates = gates.shape[2]
        k = len(weight) // H
        r = gates[..., :H]
        z = gates[..., -H:] * alpha

        # share of the state, from its gradient to that of the one before
        kept = 1 - z if reverse else z
        # factors from the gradient of h to those of the candidate and of the gates
        if exact:
            by_new = 1 - squashed * squashed
        else:
            by_new = 2 * slopes
        by_new.mul_(1 - kept)
        by_r = by_new * products[..., -H:]
        by_z = torch.cat([h[None], y[:-1]])  # the states before each step
        by_z.sub_(squashed)
        by_z.mul_(-alpha if reverse else alpha)
        gate_slopes = gates * (1 - gates) if exact else 1 - magnitudes
        gate_slopes = gate_slopes.split(H, 2)
        by_gates = [by_r + by_z] if k == 2 else [by_r, by_z]  # two blocks: one gate is both
        factors = torch.empty_like(products)
        factors = factors.view(S, B, k, H)
        *of_gates, of_new = factors.unbind(2)
        torch.mul(by_new, r, out=of_new)
        for factor, by_gate, slope in zip(of_gates, by_gates, gate_slopes, strict=True):
            torch.mul(by_gate, slope, out=factor)

        d_parts = torch.empty_like(factors)
        d_products = d_parts.view(S, B, k * H)
        d_states = torch.empty_like(y)
        torch.add(d_y[-1], d_h, out=d_states[-1])

        step_factors = factors.unbind()
        shares = kept.unbind()
        d_ys = d_y.unbind()
        d_hs = d_states.unbind()
        d_hs_each = d_states[:, :, None].unbind()
        d_each = d_parts.unbind()
        ds = d_products.unbind()
        for t in range(S - 1, -1, -1):
            torch.mul(step_factors[t], d_hs_each[t], out=d_each[t])
            if t > 0:
                earlier = d_hs[t - 1]
                torch.addmm(d_ys[t - 1], ds[t], weight, out=earlier)
            else:
                earlier = ds[t] @ weight
            earlier.addcmul_(d_hs[t], shares[t])
        d_gates = d_products[..., :n_gates]
        d_weight = _weight_gradient(d_products, h, y)
        return d_gates, d_states * by_new, earlier, d_weight, None, None, None, None


def _write_ptanh(
    out: Tensor,
    slope: Tensor,
    raw: Tensor,
    knee: Tensor,
    top: Tensor,
    bend: float = 1,
) -> None:
    """Write the two parabolas of ``raw`` into ``out``, and half their slope into ``slope``.

    The three need separate memory: ``raw`` gives the signs at the end.
    """
    torch.abs(raw, out=slope)
    torch.sub(knee, slope, out=slope)
    slope.clamp_min_(0)
    torch.addcmul(top, slope, slope, value=-bend, out=out)
    out.copysign_(raw)


def _require_first_order() -> None:
    """Refuse to differentiate the backward pass again: it would silently leave out most of the
    gradient.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "windows through these layers can be differentiated once, not with create_graph=True; "
            "steps can be differentiated again: use a cell, as Recur(FLSTMCell(n_in, n_out))"
        )


def _weight_gradient(d_products: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of a weight from those of its products with the states before each step:
    ``h``, then all of ``y`` but the last.
    """
    first = d_products[0].t() @ h
    others = d_products[1:].flatten(0, 1)
    states = y[:-1].flatten(0, 1)
    return first.addmm_(others.t(), states)


def _steps(a: Tensor, n: int) -> Sequence[Tensor]:
    """Return the n steps of a tensor. One of a single step repeats it: each step then overwrites
    the one before, because nothing is recorded.
    """
    parts = a.unbind()
    return parts if len(parts) == n else parts * n


def _recording(*inputs: Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in inputs)
