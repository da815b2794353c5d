"""Networks by their formulas, one step at a time, in plain torch: the slow half of the comparison.

Nothing here is imported from the package. A net gets its parameters as a flat list of float64
tensors, in the order of ``nn.Module.parameters()``, biases as columns; inputs, outputs and states
have a column for each series, as their last axis. A state is a list with one tuple per recurrent
layer.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


def psigmoid(x):
    """0 up to -4.1, 1 from 4.1 on, two parabolas in between."""
    u = torch.clamp(x / 4.1, -1, 1)
    return 0.5 + u - 0.5 * u * torch.abs(u)


def ptanh(x):
    """Two parabolas, flat beyond 1.92033."""
    v = torch.clamp(x, -1.92033, 1.92033)
    return torch.where(
        x > 0, 0.96016 - 0.26037 * (v - 1.92033) ** 2, 0.26037 * (v + 1.92033) ** 2 - 0.96016
    )


def lstm(p, x, s):
    w_ih, w_hh, b_ih, b_hh = p
    h, c = s
    i, f, g, o = (w_ih @ x + b_ih + w_hh @ h + b_hh).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, (h, c)


def gru(p, x, s):
    w_ih, w_hh, b_ih, b_hh = p
    (h,) = s
    xr, xz, xn = (w_ih @ x + b_ih).chunk(3)
    hr, hz, hn = (w_hh @ h + b_hh).chunk(3)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    h = (1 - z) * torch.tanh(xn + r * hn) + z * h
    return h, (h,)


def rnn(p, x, s):
    w_ih, w_hh, b_ih, b_hh = p
    h = torch.tanh(w_ih @ x + b_ih + w_hh @ s[0] + b_hh)
    return h, (h,)


def rnn_relu(p, x, s):
    w_ih, w_hh, b_ih, b_hh = p
    h = torch.relu(w_ih @ x + b_ih + w_hh @ s[0] + b_hh)
    return h, (h,)


def flstm(p, x, s):
    w_ih, w_hh, b = p
    h, c = s
    i, f, g, o = (w_ih @ x + w_hh @ h + b).chunk(4)
    c = psigmoid(f) * c + psigmoid(i) * ptanh(g)
    h = psigmoid(o) * ptanh(c)
    return h, (h, c)


def sgru(p, x, s):
    w_ih, w_hh, b = p
    (h,) = s
    (wr, wz, wn), (br, bz, bn) = w_hh.chunk(3), b.chunk(3)
    r, z = psigmoid(wr @ h + br), psigmoid(wz @ h + bz)
    h = (1 - z) * ptanh(w_ih @ x + r * (wn @ h) + bn) + z * h
    return h, (h,)


def mgu(p, x, s):
    w_ih, w_hh, b = p
    (h,) = s
    (vz, vn), (wz, wn), (bz, bn) = w_ih.chunk(2), w_hh.chunk(2), b.chunk(2)
    z = psigmoid(vz @ x + wz @ h + bz)
    h = (1 - z) * ptanh(vn @ x + z * (wn @ h) + bn) + z * h
    return h, (h,)


def hfgru(p, x, s, alpha=1.0):
    w_ih, w_hh, b = p
    (h,) = s
    (vr, vz, vn), (wr, wz, wn), (br, bz, bn) = w_ih.chunk(3), w_hh.chunk(3), b.chunk(3)
    r, z = torch.sigmoid(vr @ x + wr @ h + br), alpha * torch.sigmoid(vz @ x + wz @ h + bz)
    h = z * torch.tanh(vn @ x + r * (wn @ h) + bn) + (1 - z) * h
    return h, (h,)


def leaky(p, x, s):
    """A module of the user's own: a running mean that lags behind, and counts its steps."""
    rate, gain = p
    h, count = s
    h = h + torch.sigmoid(rate) * (gain @ x - h)
    count = count + 1
    return h / torch.sqrt(1 + 0.1 * count), (h, count)


def min_gru(p, x, s):
    w, b = p
    gate, candidate = (w @ x + b).chunk(2)
    z = torch.sigmoid(gate)
    h = (1 - z) * s[0] + z * candidate
    return h, (h,)


def min_lstm(p, x, s):
    w, b = p
    f, i, candidate = (w @ x + b).chunk(3)
    f, i = torch.sigmoid(f), torch.sigmoid(i)
    h = (f * s[0] + i * candidate) / (f + i)
    return h, (h,)


def lru(p, x, s):
    """Real and imaginary parts apart."""
    nu, theta, gamma, w_in, w_out, skip = p
    re, im = s[0].unbind(1)
    a, angle = torch.exp(-torch.exp(nu)), torch.exp(theta)
    b_re, b_im = (torch.exp(gamma) * (w @ x) for w in (w_in[0::2], w_in[1::2]))
    cos, sin = a * torch.cos(angle), a * torch.sin(angle)
    re, im = cos * re - sin * im + b_re, sin * re + cos * im + b_im
    return w_out[:, 0::2] @ re + w_out[:, 1::2] @ im + skip @ x, (torch.stack([re, im], 1),)


def convolution(p, x, s, dilation=2):
    weight, b = p
    past = torch.cat([s[0], x[None]])
    y = b + sum(weight[:, :, k] @ past[k * dilation] for k in range(weight.shape[2]))
    return y, (past[1:],)


def tcn(p, x, s):
    """Two levels of kernel size 2."""
    p, after = list(p), []
    for level in range(2):
        y = x
        for k in range(2):
            direction, norm, b = (p.pop(0) for _ in range(3))
            weight = direction * (norm[:, 0] / (direction**2).sum((1, 2)).sqrt())[:, None, None]
            y, new = convolution((weight, b), y, s[2 * level + k : 2 * level + k + 1], 2**level)
            y = torch.relu(y)
            after += new
        skip = x
        if level == 0 and len(x) != len(y):
            weight, b = p.pop(0), p.pop(0)
            skip = weight @ x + b
        x = torch.relu(y + skip)
    return x, tuple(after)


def tcn_zeros(p):
    n_in, n_out = p[0].shape[1], p[0].shape[0]
    return tuple(zeros(*shape) for shape in ((1, n_in), (1, n_out), (2, n_out), (2, n_out)))


def attention(p, x, s):
    """One head; positions are relative, a pair of features turns by one radian a step, the next by
    less.
    """
    w, b, w_out, b_out = p
    q, k, v = (w @ x + b).chunk(3)
    keys, values, exist = (
        torch.cat([s[0], k[None]]),
        torch.cat([s[1], v[None]]),
        torch.cat([s[2], torch.ones_like(q[:1])]),
    )
    n = len(q) // 2
    ages = torch.arange(len(keys) - 1, -1, -1, dtype=torch.float64)[:, None, None]
    angles = -ages * 10_000.0 ** -(torch.arange(n, dtype=torch.float64)[:, None] / max(n, 1))
    first, second, odd = keys[:, :n], keys[:, n : 2 * n], keys[:, 2 * n :]
    turned = [
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
        odd,
    ]
    scores = (torch.cat(turned, 1) * q).sum(1) / len(q) ** 0.5
    share = torch.softmax(torch.where(exist > 0, scores, -torch.inf), 0)
    return w_out @ (share[:, None] * values).sum(0) + b_out, (keys[1:], values[1:], exist[1:])


def stack(p, x, s):
    """Two blocks with a MinGRU."""
    p, after = list(p), []

    def normed(v):
        scale, shift = p.pop(0), p.pop(0)
        v = v - v.mean(0)
        return v / torch.sqrt((v**2).mean(0) + 1e-5) * scale + shift

    def linear(v):
        return p.pop(0) @ v + p.pop(0)

    x = linear(x)
    for h in s:
        y = normed(x)
        y, new = min_gru((p.pop(0), p.pop(0)), y, (h,))
        x = x + y
        y = normed(x)
        gate, value = linear(y).chunk(2)
        x = x + linear(gate * torch.sigmoid(gate) * value)
        after += new
    return normed(x), tuple(after)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


class Cell(NamedTuple):
    """A formula, and how its parameters and its state look.

    ``n_params`` is None for all but those of the head; ``start(p)`` is the state at the start of a
    series; ``axis`` is where the package has the series in it, None for (L, B, H).
    """

    formula: Callable
    n_params: int | None
    start: Callable
    axis: int | None = None


def gated(formula, n_params, n_states=1):
    """From zeros; the second parameter is a product with the state."""
    return Cell(formula, n_params, lambda p: (zeros(p[1].shape[-1]),) * n_states)


def trained(formula, n_params, n_states=1, axis=None):
    """The initial state stands behind the other parameters, with axes for layers and series."""
    return Cell(
        lambda p, x, s: formula(p[:n_params], x, s),
        n_params + n_states,
        lambda p: tuple(h.flatten() for h in p[n_params:]),
        axis,
    )


CELLS = {
    "lstm": gated(lstm, 4, 2),
    "gru": gated(gru, 4),
    "rnn": gated(rnn, 4),
    "rnn_relu": gated(rnn_relu, 4),
    "flstm": gated(flstm, 3, 2),
    "sgru": gated(sgru, 3),
    "mgu": gated(mgu, 3),
    "hfgru": gated(hfgru, 3),
    "leaky": Cell(leaky, 2, lambda p: (zeros(len(p[0])),) * 2),
    "lstm_init": trained(lstm, 4, 2),
    "grucell_init": trained(gru, 4, axis=0),
    "mingru": Cell(min_gru, 2, lambda p: (zeros(len(p[1]) // 2),), axis=0),
    "minlstm": Cell(min_lstm, 2, lambda p: (zeros(len(p[1]) // 3),), axis=0),
    "lru": Cell(lru, 6, lambda p: (zeros(len(p[0]), 2),), axis=0),
    "causalconv": Cell(convolution, 2, lambda p: (zeros(4, p[0].shape[1]),), axis=1),
    "tcn": Cell(tcn, None, tcn_zeros, axis=1),
    "attention": Cell(
        attention, 4, lambda p: (zeros(2, len(p[3])), zeros(2, len(p[3])), zeros(2)), axis=1
    ),
    "stack": Cell(stack, None, lambda p: (zeros(len(p[1])),) * 2, axis=0),
}


# of diagonal cells: the parameters that each state depends on itself
OWN = {
    "mingru": [(0, 1)],
    "minlstm": [(0, 1)],
    "lru": [(0, 1, 2, 3)],
    "stack": [(4, 5), (14, 15)],
}


def following(state, params):
    """A state of the same value that depends on parameters alone, with the derivatives of
    ``state``; a linear function of them.
    """
    value = state.detach()
    rows = [
        torch.autograd.grad(v, params, retain_graph=True, allow_unused=True)
        for v in state.reshape(-1)
    ]
    for p, slopes in zip(params, zip(*rows, strict=True), strict=True):
        slopes = torch.stack([torch.zeros_like(p) if g is None else g for g in slopes])
        value = value + (slopes.flatten(1) @ (p - p.detach()).flatten()).reshape(state.shape)
    return value


class Net:
    """Optional embedding, recurrent layers, linear head.

    Parameters
    ----------
    cells : sequence of (str, bool)
        Names in ``CELLS``, bottom to top, and whether a cell begins a layer of the module (the
        second of two in one ``nn.LSTM(num_layers=2)`` does not: their states are stacked).
    hidden : int
    embedded : bool
    splits : sequence of int
        Sizes of the outputs: the head's output, cut.
    """

    context = None  # of models without state: how many steps an output depends on

    def __init__(self, cells, hidden, splits, embedded=False):
        self.cells, self.hidden, self.splits, self.embedded = cells, hidden, list(splits), embedded

    def parameters(self, params):
        """Those of the embedding, if there is one; of each cell; and of the head."""
        params = list(params)
        embedding, of_cells = params.pop(0) if self.embedded else None, []
        for name, _ in self.cells:
            n = CELLS[name].n_params or len(params) - 2
            of_cells.append(params[:n])
            params = params[n:]
        return embedding, of_cells, params

    def initial_state(self, params, n_series):
        _, of_cells, _ = self.parameters(params)
        starts = [CELLS[name].start(p) for (name, _), p in zip(self.cells, of_cells, strict=True)]
        return [tuple(s[..., None].expand(*s.shape, n_series) for s in start) for start in starts]

    def step(self, parameters, x, state):
        """Outputs (a tuple of matrices) for one step ``x``, a tuple of matrices; and the new state."""
        embedding, of_cells, (weight, bias) = parameters
        x, new = torch.cat(x), []
        if embedding is not None:
            x = embedding[x[0].long()].T
        for (name, _), p, s in zip(self.cells, of_cells, state, strict=True):
            x, s = CELLS[name].formula(p, x, s)
            new.append(s)
        return (weight @ x + bias).split(self.splits), new

    def run(self, params, xs, state):
        """Outputs for the steps ``xs``, and the states before each of them and after the last."""
        outputs, states, parameters = [], [state], self.parameters(params)
        for x in xs:
            out, state = self.step(parameters, x, state)
            outputs.append(out)
            states.append(state)
        return outputs, states

    def following(self, params, state):
        """The states as functions of the parameters of their own cells; detached if a cell is not
        diagonal.
        """
        _, of_cells, *_ = self.parameters(list(range(len(params))))
        found = []
        for (name, _), own, s in zip(self.cells, of_cells, state, strict=True):
            wanted = OWN.get(name, [()] * len(s))
            found.append(
                tuple(
                    following(v, [params[own[k]] for k in places]) if places else v.detach()
                    for v, places in zip(s, wanted, strict=True)
                )
            )
        return found

    def stacked(self, of_series):
        """The states of several series as the package lists them: (L, B, H) of torch's layers."""
        found = []
        for i, (name, begins) in enumerate(self.cells):
            axis = CELLS[name].axis
            tensors = [
                torch.stack([s[i][k] for s in of_series], axis or 0)
                for k in range(len(of_series[0][i]))
            ]
            if axis is not None:
                found.append(tensors)
            elif begins:
                found.append([[t] for t in tensors])
            else:
                for layers, t in zip(found[-1], tensors, strict=True):
                    layers.append(t)
        return [
            t if isinstance(t, torch.Tensor) else torch.stack(t) for layer in found for t in layer
        ]


class Convolution:
    """A causal convolution over time, tanh, linear head; zeros stand before the first step of a
    call.
    """

    def __init__(self, context, splits):
        self.context, self.splits = context, list(splits)

    def initial_state(self, params, n_series):
        return []

    def following(self, params, state):
        return state

    def run(self, params, xs, state):
        kernel, b, weight, bias = params  # kernel (H, F, K)
        xs = [torch.cat(x) for x in xs]
        outputs = []
        for t in range(len(xs)):
            h = b
            for lag in range(min(self.context, t + 1)):
                h = h + kernel[:, :, self.context - 1 - lag] @ xs[t - lag]
            outputs.append((weight @ torch.tanh(h) + bias).split(self.splits))
        return outputs, [state] * (len(xs) + 1)
