"""Store the end of each series, its last values and the network's state, and forecast from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting.covariates import filled_forward
from fluxutils_py.forecasting.features import Past
from fluxutils_py.forecasting.panel import Panel
from fluxutils_py.forecasting.panel_windows import PanelWindows, WindowArray
from fluxutils_py.nn.session import InferenceSession
from fluxutils_py.nn.states import batch_dims
from fluxutils_py.training.predictor import Predictor

BLOCK = 1024  # number of series to forecast at a time


@dataclass
class History:
    """Last values of N series, and the state of each network after all steps but the last.

    Each forecast runs the last step again, because its input includes the covariates known ahead.

    Attributes
    ----------
    tail : ndarray of shape (C, N, K)
        Last K values of each channel (target, past covariates, covariates known ahead), NaN before
        the first step.
    lengths : ndarray of int, shape (N,)
        Number of steps of each series so far.
    static : ndarray of shape (N, ...)
    states : list of list of Tensor
        State of each network for N series, as from :func:`fluxutils_py.states`.
    panel : Panel or None
        Ids and times of the series, without values. None: the series came as an array.
    """

    tail: np.ndarray
    lengths: np.ndarray
    static: np.ndarray
    states: list[list[Tensor]]
    panel: Panel | None = None

    @property
    def n_series(self) -> int:
        return self.tail.shape[1]

    @property
    def n_kept(self) -> int:
        """Number of last steps in ``tail``, K."""
        return self.tail.shape[2]

    def extended(
        self, models: Sequence[nn.Module], more: Steps, make: Callable[..., PanelWindows]
    ) -> History:
        """Return a new history with more steps of some series, and with new series; networks read
        only these steps.
        """
        which, n_old = more.series, self.n_series
        n_new = max(0, int(which.max()) + 1 - n_old)
        channels, _, K = self.tail.shape
        tail = np.concatenate([self.tail, np.full((channels, n_new, K), np.nan)], axis=1)
        static = np.concatenate([self.static, np.zeros((n_new, self.static.shape[1]))])
        lengths = np.concatenate([self.lengths, np.zeros(n_new, int)])
        fresh = which >= n_old
        static[which[fresh]] = more.static[fresh]
        values = np.full((channels, len(which), K + int(more.lengths.max())), np.nan)
        values[:, :, :K] = tail[:, which]
        ends = np.cumsum(more.lengths)
        for i, (stop, n) in enumerate(zip(ends, more.lengths, strict=True)):
            values[:, i, K : K + n] = more.values[:, stop - n : stop]
        size = values.shape[2]
        for c in range(1, channels):
            flat = filled_forward(values[c].reshape(1, -1), np.full(len(which), size))
            values[c] = flat.reshape(len(which), size)
        windows = make(values, static[which])
        begin = np.where(fresh, K, K - 1)
        count = more.lengths - fresh
        states = []
        for model, old in zip(models, self.states, strict=True):
            dims = state_dims(model, old)
            wide = [_pad_series(t, d, n_new) for t, d in zip(old, dims, strict=True)]
            chosen = torch.from_numpy(which)
            part = [t.index_select(d, chosen.to(t.device)) for t, d in zip(wide, dims, strict=True)]
            moved = run_steps(model, windows, begin, count, part)
            triples = zip(wide, moved, dims, strict=True)
            states.append([w.index_copy(d, chosen.to(w.device), m) for w, m, d in triples])
        stop = K + more.lengths
        for i, series in enumerate(which):
            tail[:, series] = values[:, i, stop[i] - K : stop[i]]
        lengths[which] += more.lengths
        return History(tail, lengths, static, states, more.panel)


@dataclass(frozen=True)
class Steps:
    """New steps with which to extend a :class:`History`.

    Attributes
    ----------
    series : ndarray of int, shape (n,)
        Numbers of the series; new series are numbered from N.
    lengths : ndarray of int, shape (n,)
    values : ndarray of shape (C, total)
        New steps of all series, one series after the other.
    static : ndarray of shape (n, ...)
    panel : Panel or None
        The ``panel`` of the extended history.
    """

    series: np.ndarray
    lengths: np.ndarray
    values: np.ndarray
    static: np.ndarray
    panel: Panel | None = None


def start_history(
    models: Sequence[nn.Module], windows: PanelWindows, panel: Panel | None
) -> History:
    """Run the networks through all series from the first step; return the history at the end."""
    lengths = np.asarray(windows.source.lengths)
    n, K = windows.n_series, windows.features.lookback + 1
    series = np.arange(n)
    parts = [windows.source.cut(series, lengths - K, K)]
    if windows.ahead is not None:
        parts.append(windows.ahead.cut(series, lengths - K, K))
    states = [run_steps(model, windows, np.zeros(n, int), lengths - 1, None) for model in models]
    static = np.zeros((n, 0)) if windows.static is None else windows.static
    meta = None if panel is None else replace(panel, values={}, static={})
    return History(np.concatenate(parts), lengths, static, states, meta)


def state_dims(model: nn.Module, state: list[Tensor]) -> list[int]:
    """Return the series axis of each tensor of a state."""
    return batch_dims(model) or [1] * len(state)


def _pad_series(state: Tensor, dim: int, n: int) -> Tensor:
    shape = list(state.shape)
    shape[dim] = n
    return torch.cat([state, state.new_zeros(shape)], dim)


def run_steps(
    model: nn.Module,
    windows: PanelWindows,
    start: np.ndarray,
    count: np.ndarray,
    state: list[Tensor] | None,
) -> list[Tensor]:
    """Run a network for ``count[n]`` steps of each series from step ``start[n]``, and return its
    state.
    """
    n = windows.n_series
    rows = Segments(np.arange(n), start, count)
    array = WindowArray(windows, "inputs", n_steps=max(1, int(count.max())))
    batches = SequenceWindows(
        (SeriesArray(array, "x"),), batchsize=n, seqsize=array.shape[2], segments=rows
    )
    predictor = Predictor(model, batches, state, keep_state=True)
    dims = predictor.session.batch_dims
    before = predictor.session.state if state is None else state
    if state is None:
        before = [_pad_series(t, d, n - t.shape[d]) for t, d in zip(before, dims, strict=True)]
    if not count.any():
        return before
    for _ in predictor:
        pass
    after = predictor.state()
    # restore the states of series without a step
    still = torch.from_numpy(np.flatnonzero(count == 0))
    triples = zip(after, before, dims, strict=True)
    return [
        a.index_copy(d, still.to(a.device), b.index_select(d, still.to(b.device)))
        for a, b, d in triples
    ]


def last_outputs(
    model: nn.Module, windows: PanelWindows, at: np.ndarray, state: list[Tensor]
) -> np.ndarray:
    """Return a network's outputs (N, outputs) at the step ``at[n]`` of each series, from the state
    before it.
    """
    n, first = windows.n_series, next(model.parameters())
    found: list[np.ndarray] = []

    def tensor(series: np.ndarray) -> Tensor:
        rows = Segments(series, at[series], np.ones(len(series), int))
        x = np.ascontiguousarray(windows.inputs(rows, 0, 1).transpose(1, 0, 2))
        return torch.from_numpy(x).to(first.device, first.dtype)

    session = InferenceSession(model, lambda: [tensor(np.arange(min(n, 4))).repeat(3, 1, 1)])
    for begin in range(0, n, BLOCK):
        series = slice(begin, min(begin + BLOCK, n))
        session.load(state, n, series)
        with torch.no_grad():
            (out,) = session.run((tensor(np.arange(series.start, series.stop)),))
        found.append(out[0].cpu().numpy().astype(np.float64))
    return np.concatenate(found)


def outputs_along(model: nn.Module, windows: PanelWindows, origins: np.ndarray) -> np.ndarray:
    """Return a network's outputs (N, W, outputs) at steps ``origins[n, w]``, in one pass; NaN where
    it is -1.
    """
    n, out = windows.n_series, np.empty(0)
    count = np.maximum(origins.max(1) + 1, 1)
    rows = Segments(np.arange(n), np.zeros(n, int), count)
    array = WindowArray(windows, "inputs", n_steps=int(count.max()))
    batches = SequenceWindows(
        (SeriesArray(array, "x"),), batchsize=n, seqsize=array.shape[2], segments=rows
    )
    for block in Predictor(model, batches):
        (y,) = block.y  # (S, B, outputs)
        if not out.size:
            out = np.full((*origins.shape, y.shape[2]), np.nan)
        at = origins[block.series] - block.steps.start
        series, which = np.nonzero((at >= 0) & (at < len(y)))
        out[block.series.start + series, which] = y[at[series, which], series]
    return out


def forecasts_along(
    models: Sequence[Any], windows: PanelWindows, origins: np.ndarray, n_quantiles: int
) -> Iterator[np.ndarray]:
    """Yield forecasts (N, 1 + quantiles, h) from the steps in each column of ``origins`` (N, W);
    NaN for -1.
    """
    outputs = np.mean([outputs_along(model, windows, origins) for model in models], 0)
    series = np.arange(windows.n_series)
    for out, at in zip(outputs.swapaxes(0, 1), origins.T, strict=True):
        past = windows.past(Segments(series, np.maximum(at, 0), np.ones(len(at), int)), 0, 1)
        yield denormalise(windows, past, out, n_quantiles)


def denormalise(windows: PanelWindows, past: Past, out: np.ndarray, n_quantiles: int) -> np.ndarray:
    """Convert outputs (N, outputs) to the units of the series, (N, 1 + quantiles, h); NaN where no
    value is known.
    """
    z = past.naive + past.scale[:, :, None] * out.reshape(len(out), 1 + n_quantiles, -1)
    found = windows.features.inverse(z)
    found[~past.known[:, 0]] = np.nan
    return found


def forecasts(
    models: Sequence[Any],
    windows: PanelWindows,
    at: np.ndarray,
    states: list[list[Tensor]],
    n_quantiles: int,
) -> np.ndarray:
    """Forecast from the step ``at[n]`` of each series, in its units: (N, 1 + quantiles, h).

    Outputs of several networks are averaged before the transform is undone, which keeps quantiles
    in order. NaN for series without known values.
    """
    rows = Segments(np.arange(windows.n_series), at, np.ones(windows.n_series, int))
    past = windows.past(rows, 0, 1)
    pairs = zip(models, states, strict=True)
    out = np.mean([last_outputs(model, windows, at, state) for model, state in pairs], 0)
    return denormalise(windows, past, out, n_quantiles)
