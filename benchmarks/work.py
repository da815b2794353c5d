"""The work that contenders do: data, a model, a hand-written loop, ``Estimator.fit``, and a judge
of the outcome.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from common import counted, median, ratios, spread
from torch import Tensor, nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import GRU, LSTM


@dataclass(frozen=True)
class Shape:
    n_features: int
    n_series: int
    n_steps: int
    n_hidden: int
    batchsize: int
    seqsize: int
    epochs: int
    cell: str = "LSTM"

    def __str__(self) -> str:
        return (
            f"F={self.n_features}, N={self.n_series}, T={self.n_steps}, "
            f"{self.cell}({self.n_hidden}), b={self.batchsize}, s={self.seqsize}, float32, x in C "
            "order"
        )

    @property
    def training(self) -> str:
        """The shape, and how long it is trained."""
        return f"{self}, {counted(self.epochs, 'epoch')}"

    def quick(self) -> Shape:
        """As little of it as has two groups of two windows each."""
        return replace(self, n_hidden=7, n_series=16, n_steps=24, batchsize=8, seqsize=12)

    @property
    def places(self) -> list[tuple[slice, slice]]:
        """Series and steps of the windows of an epoch, in order: time first."""
        return [
            (slice(n, n + self.batchsize), slice(t, t + self.seqsize))
            for n in range(0, self.n_series, self.batchsize)
            for t in range(0, self.n_steps, self.seqsize)
        ]


SHAPES = {
    "small": Shape(10, 1000, 1000, 10, 100, 100, 2),
    "large": Shape(32, 256, 1024, 128, 64, 64, 2),
}
ONE_SERIES = Shape(10, 1, 20_000, 64, 1, 100, 1)

Data = tuple[np.ndarray, np.ndarray, nn.Module]
# called with x, y, model and shape; returns the weights that it ends with
Contender = Callable[..., Tensor]


def make(shape: Shape) -> Data:
    """Inputs, the mean over their features as targets, and a model, the same ones each time."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((shape.n_features, shape.n_series, shape.n_steps), dtype=np.float32)
    torch.manual_seed(0)
    layer = {"LSTM": LSTM, "GRU": GRU}[shape.cell]
    model = nn.Sequential(layer(shape.n_features, shape.n_hidden), nn.Linear(shape.n_hidden, 1))
    return x, x.mean(0, keepdims=True), model


def two_windows(data: Data, shape: Shape) -> tuple[Data, Shape]:
    """So much of the data, to have everything loaded and running."""
    x, y, model = data
    part = replace(shape, n_series=shape.batchsize, n_steps=2 * shape.seqsize, epochs=1)
    cut = np.s_[:, : part.n_series, : part.n_steps]
    return (x[cut], y[cut], model), part


def time_major(*arrays: np.ndarray) -> list[Tensor]:
    """(F, N, T) arrays as contiguous (T, N, F) tensors."""
    return [torch.from_numpy(a).permute(2, 1, 0).contiguous() for a in arrays]


State = Tensor | tuple[Tensor, Tensor]


def by_window(
    lstm: nn.RNNBase, head: nn.Linear, xs: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """Outputs of a window (S, B, F) in one call, and the state behind it."""
    h, state = lstm(xs, state)
    return head(h), state


def window_loss(
    lstm: nn.RNNBase, head: nn.Linear, xs: Tensor, ys: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """Mean squared error over a window in one call, and the state behind it."""
    out, state = by_window(lstm, head, xs, state)
    return F.mse_loss(out, ys), state


def loss_by_steps(
    lstm: nn.LSTM, head: nn.Linear, xs: Tensor, ys: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """The same in one call per step, as :func:`step_loss` does it."""
    loss = xs.new_zeros(())
    for x, y in zip(xs, ys, strict=True):
        h, state = lstm(x[None], state)
        loss = loss + F.mse_loss(head(h[0]), y)
    assert state is not None
    return loss / len(xs), state


def by_hand(
    x: np.ndarray,
    y: np.ndarray,
    model: nn.Module,
    shape: Shape,
    fused: bool = True,
    loss: Callable[..., tuple[Tensor, State]] = window_loss,
    device: str = "cpu",
    upfront: bool = True,
) -> Tensor:
    """The loop that a careful person writes: data to time-major once, state carried and detached.

    On another device data are there from the start, or (not ``upfront``)
    each window is sent when its turn comes.
    """
    model = copy.deepcopy(model).to(device)
    lstm, head = model[0].module, model[1]
    opt = torch.optim.AdamW(model.parameters(), fused=fused)
    xs, ys = (v.to(device) if upfront else v for v in time_major(x, y))
    for _ in range(shape.epochs):
        state = None
        for rows, steps in shape.places:
            window = (v[steps, rows].to(device) for v in (xs, ys))
            error, state = loss(lstm, head, *window, None if steps.start == 0 else state)
            opt.zero_grad()
            error.backward()
            opt.step()
            state = (
                state.detach()
                if isinstance(state, Tensor)
                else (state[0].detach(), state[1].detach())
            )
    return net2vec(model).cpu()


def step_loss(model: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
    """A loss of the user's own that calls the model once per step."""
    return sum(F.mse_loss(model(x), y) for x, y in zip(xs, ys, strict=True)) / len(xs)


def by_fit(
    x: np.ndarray,
    y: np.ndarray,
    model: nn.Module,
    shape: Shape,
    loss: Callable[..., Tensor] = F.mse_loss,
    device: str | None = None,
) -> Tensor:
    spec = Spec(epochs=shape.epochs, batchsize=shape.batchsize, seqsize=shape.seqsize)
    est = Estimator(model, loss, None, spec, device=device, verbose=False)
    return net2vec(est.fit(x, y)).cpu()


# -- turns and outcome -------------------------------------------------------------------------------


def turns(
    contenders: Mapping[str, Contender], data: Data, shape: Shape, vectors: dict[str, Tensor]
) -> dict[str, Callable[[], float]]:
    """Contenders to be called by turns: each trains, puts its weights into ``vectors``, and returns
    its seconds.
    """

    def turn(name: str) -> float:
        began = time.perf_counter()
        vectors[name] = contenders[name](*data, shape)
        return time.perf_counter() - began

    return {name: partial(turn, name) for name in contenders}


COLUMNS = ["contender", "ratio (range)", "seconds", "MSE", "weights apart"]


def outcome(
    seconds: Mapping[str, Sequence[float]],
    vectors: Mapping[str, Tensor],
    base: str,
    data: Data,
    shape: Shape,
) -> tuple[list[list[str]], dict[str, float]]:
    """The rows of a table with :data:`COLUMNS`, and by how much each MSE differs from the base's,
    relatively.
    """
    x, y, _ = data
    mse = {name: judge(vector, x, y, shape) for name, vector in vectors.items()}
    rows = [
        [
            name,
            spread(ratios(taken, seconds[base])),
            f"{median(taken):.3f}",
            f"{mse[name]:.4e}",
            f"{apart(vectors[name], vectors[base], shape):.1e}",
        ]
        for name, taken in seconds.items()
    ]
    return rows, {name: abs(found / mse[base] - 1) for name, found in mse.items()}


# -- the judge -----------------------------------------------------------------------------------------


def unpack(vector: Tensor, shape: Shape) -> list[np.ndarray]:
    """The weights in a vector, as float64: input, recurrent, their biases, and the head's two.

    Both biases of an LSTM, which only ever come as a sum, are in the first.
    """
    n, h = shape.n_features, shape.n_hidden
    k = {"LSTM": 4, "GRU": 3}[shape.cell] * h
    w, u, b, c, v, d = (p.double().numpy() for p in vector.split([k * n, k * h, k, k, h, 1]))
    if shape.cell == "LSTM":
        b, c = b + c, np.zeros_like(c)
    return [w.reshape(k, n), u.reshape(k, h), b, c, v, d]


def apart(a: Tensor, b: Tensor, shape: Shape) -> float:
    """The largest difference of two sets of weights."""
    return max(
        float(np.abs(p - q).max()) for p, q in zip(unpack(a, shape), unpack(b, shape), strict=True)
    )


def judge(vector: Tensor, x: np.ndarray, y: np.ndarray, shape: Shape) -> float:
    """Mean squared error of an LSTM or GRU with these weights over the first group of series, from
    start to end.

    NumPy alone, in float64: no framework judges its own work.
    """
    w, u, b, b_h, v, d = unpack(vector, shape)
    xs, ys = (a[:, : shape.batchsize].astype(np.float64).transpose(2, 1, 0) for a in (x, y))
    h = c = np.zeros((xs.shape[1], shape.n_hidden))
    total = 0.0
    for x_t, y_t in zip(xs, ys, strict=True):
        of_x, of_h = x_t @ w.T + b, h @ u.T + b_h
        if shape.cell == "LSTM":
            i, f, g, o = np.split(of_x + of_h, 4, 1)
            c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            h = np.tanh(c) / (1 + np.exp(-o))
        else:
            (r, z, n), (r_h, z_h, n_h) = np.split(of_x, 3, 1), np.split(of_h, 3, 1)
            update = 1 / (1 + np.exp(-z - z_h))
            h = update * h + (1 - update) * np.tanh(n + n_h / (1 + np.exp(-r - r_h)))
        total += float(((h @ v + d - y_t[:, 0]) ** 2).mean())
    return total / len(xs)
