"""Networks by their formulas, one series and one step at a time, in plain torch: the slow half of the comparison.

Nothing here is imported from the package. A net gets its parameters as a flat list of float64 tensors, in the order of
``nn.Module.parameters()``; a state is a list with one tuple of vectors per recurrent layer.
"""

import torch


def psigmoid(x):
    """0 up to -4.1, 1 from 4.1 on, two parabolas in between."""
    u = torch.clamp(x / 4.1, -1, 1)
    return 0.5 + u - 0.5 * u * torch.abs(u)


def ptanh(x):
    """Two parabolas, flat beyond 1.92033."""
    v = torch.clamp(x, -1.92033, 1.92033)
    return torch.where(x > 0, 0.96016 - 0.26037 * (v - 1.92033) ** 2, 0.26037 * (v + 1.92033) ** 2 - 0.96016)


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


CELLS = {  # formula, parameters, tensors in its state
    "lstm": (lstm, 4, 2),
    "gru": (gru, 4, 1),
    "rnn": (rnn, 4, 1),
    "rnn_relu": (rnn_relu, 4, 1),
    "flstm": (flstm, 3, 2),
    "sgru": (sgru, 3, 1),
    "mgu": (mgu, 3, 1),
    "hfgru": (hfgru, 3, 1),
    "leaky": (leaky, 2, 2),
}


class Net:
    """Optional embedding, recurrent layers, linear head.

    Parameters
    ----------
    cells : sequence of (str, bool)
        Names in ``CELLS``, bottom to top, and whether a cell begins a layer of the module (the second of two in one
        ``nn.LSTM(num_layers=2)`` does not: their states are stacked).
    hidden : int
    embedded : bool
    splits : sequence of int
        Sizes of the outputs: the head's output, cut.
    """

    context = None  # of models without state: how many steps an output depends on

    def __init__(self, cells, hidden, splits, embedded=False):
        self.cells, self.hidden, self.splits, self.embedded = cells, hidden, list(splits), embedded

    def zero_state(self):
        sizes = [CELLS[name][2] for name, _ in self.cells]
        return [tuple(torch.zeros(self.hidden, dtype=torch.float64) for _ in range(n)) for n in sizes]

    def step(self, params, x, state):
        """Outputs (a tuple of vectors) for one step ``x``, a tuple of vectors; and the new state."""
        params, x = list(params), torch.cat(x)
        if self.embedded:
            x = params.pop(0)[int(x[0])]
        new = []
        for (name, _), s in zip(self.cells, state, strict=True):
            formula, n, _ = CELLS[name]
            x, s = formula(params[:n], x, s)
            params = params[n:]
            new.append(s)
        weight, bias = params
        return (weight @ x + bias).split(self.splits), new

    def run(self, params, xs, state):
        """Outputs for the steps ``xs``, and the states before each of them and after the last."""
        outputs, states = [], [state]
        for x in xs:
            out, state = self.step(params, x, state)
            outputs.append(out)
            states.append(state)
        return outputs, states

    def stacked(self, of_series):
        """The states of several series as the package lists them: (L, B, H) of layers, (B, H) of cells."""
        found = []
        for i, (_, begins) in enumerate(self.cells):
            tensors = [torch.stack([s[i][k] for s in of_series]) for k in range(len(of_series[0][i]))]
            if begins:
                found.append([[t] for t in tensors])
            else:
                for layers, t in zip(found[-1], tensors, strict=True):
                    layers.append(t)
        return [torch.stack(layers) for layer in found for layers in layer]


class Convolution:
    """A causal convolution over time, tanh, linear head; zeros stand before the first step of a call."""

    def __init__(self, context, splits):
        self.context, self.splits = context, list(splits)

    def zero_state(self):
        return []

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
