"""Integrate the gradient of one output along a path of inputs, through the state, window by
window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.nn.kernels.recurrence import State
from fluxutils_py.nn.model_windows import as_tuple
from fluxutils_py.nn.recurrent import map_state
from fluxutils_py.nn.states import recurrent_layers, reset, restore, snapshot
from fluxutils_py.steps.session import InferenceSession

Tensors = tuple[Tensor, ...]
# the inputs of some steps and, of the same shape (S, 1, F) or (1, 1, F), their baselines
Ends = tuple[Tensors, Tensors]

MOST_ROWS = 64  # points of the path that are computed side by side


class PathIntegral(NamedTuple):
    """Attributions (F, T) of each input, float64, and the output at both ends of the path."""

    attributions: tuple[np.ndarray, ...]
    value: float
    baseline_value: float
    n_points: int


class PathGradients:
    """Integrates the gradient of a score along the straight path from baseline to inputs.

    The points of the path are the series of a batch. The states at the starts of windows are
    kept from a pass forward in time; then the windows are computed again, the last first, each
    with the gradient that the window after it has for its last state. So the gradient is that of
    the whole past, but only one window has a graph at a time.

    Parameters
    ----------
    session : InferenceSession
        Gives the model and how it is called; its state is overwritten.
    windows : sequence of slice
        Consecutive steps from 0 on; the last has the score.
    read : callable
        Returns inputs and baselines for the steps of a window.
    score : callable
        Maps the outputs (S, B, G) of the last window to the score (B,).
    """

    def __init__(
        self,
        session: InferenceSession,
        windows: Sequence[slice],
        read: Callable[[slice], Ends],
        score: Callable[[Tensors], Tensor],
    ) -> None:
        self.session = session
        self.windows = windows
        self.read = read
        self.score = score

    def integrate(self, n_points: int) -> PathIntegral:
        """Integrate by Gauss and Legendre's rule with this number of points, in as many equal
        parts of the path as it takes to have at most 64 points in each.
        """
        total: tuple[np.ndarray, ...] = ()
        value = baseline_value = 0.0
        for places, weights in _rules(n_points):
            # the two ends, of weight 0, tell the scores whose difference is to be explained
            rows = np.concatenate([[1.0, 0.0], places])
            of_rows = np.concatenate([[0.0, 0.0], weights])
            attributions, scores = self._attributions(rows, of_rows)
            value, baseline_value = float(scores[0]), float(scores[1])
            if total:
                attributions = tuple(a + b for a, b in zip(total, attributions, strict=True))
            total = attributions
        return PathIntegral(total, value, baseline_value, n_points)

    def _attributions(
        self, places: np.ndarray, weights: np.ndarray
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Return the weighted sum of attributions at places of the path, and the scores there."""
        starts = self._states_at_starts(places)
        sums: list[Tensors] = []
        carried: list[Tensor | None] = []
        scores = np.empty(0)
        for window, start in zip(reversed(self.windows), reversed(starts), strict=True):
            is_last = window == self.windows[-1]
            leaves = self._load_states(start)
            ends = self.read(window)
            floats, targets = self._run_with_graph(_points(ends, places), is_last)
            if is_last:
                scores = targets[0].detach().double().cpu().numpy()
                carried = [torch.as_tensor(weights).to(targets[0])]
            wanted = floats + [t for t in leaves if t is not None]
            # none where nothing before this window reaches the score
            gradients = _gradients(targets, carried, wanted)
            sums.append(_weigh(ends, gradients[: len(floats)]))
            # none for states of integers
            of_states = iter(gradients[len(floats) :])
            carried = [None if t is None else next(of_states) for t in leaves]
        reset(self.session.model)
        parts = zip(*reversed(sums), strict=True)  # of each input, forward in time
        return tuple(torch.cat(p).T.cpu().numpy() for p in parts), scores

    def _run_with_graph(self, rows: Tensors, is_last: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Run a window on rows (S, B, F); return the leaves of its inputs and what depends on
        them: the scores of the last window, else the states.
        """
        floats = [x.requires_grad_() for x in rows if x.is_floating_point()]
        # cuDNN differentiates recurrent layers in training mode only
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            outputs = self.session.run(rows)
            if is_last:
                return floats, [self.score(outputs)]
        return floats, _tensors([layer.state for layer in recurrent_layers(self.session.model)])

    def _states_at_starts(self, places: np.ndarray) -> list[list[State | None]]:
        """Run all windows but the last; return the states of all layers before each window."""
        self.session.load(None, len(places))
        starts: list[list[State | None]] = [[None for _ in snapshot(self.session.model)]]
        for window in self.windows[:-1]:
            with torch.no_grad():
                self.session.run(_points(self.read(window), places))
            # copies: a layer may go on in place
            starts.append(_copies(snapshot(self.session.model)))
        return starts

    def _load_states(self, start: list[State | None]) -> list[Tensor | None]:
        """Start from these states; return their tensors, to which gradients go back, with None
        for one of integers.
        """
        leaves = []
        for t in _tensors(start):
            leaves.append(t.requires_grad_() if t.is_floating_point() else None)
        # a copy of a leaf may be changed in place, a leaf may not
        restore(self.session.model, _copies(start))
        return leaves


def _rules(n_points: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the places and the weights of the points in each part of the path."""
    # one rule of thousands of points takes minutes to find
    n_parts = -(-n_points // MOST_ROWS)
    for i, points in enumerate(np.array_split(np.arange(n_points), n_parts)):
        nodes, weights = np.polynomial.legendre.leggauss(len(points))
        # from [-1, 1] to the part
        yield (i + (nodes + 1) / 2) / n_parts, weights / 2 / n_parts


def _points(ends: Ends, places: np.ndarray) -> Tensors:
    """Return the inputs (S, B, F) at B places of the path; integers are those of the inputs."""
    rows = []
    for x, baseline in zip(*ends, strict=True):
        if x.is_floating_point():
            at = torch.as_tensor(places).to(x)[None, :, None]
            rows.append(baseline + at * (x - baseline))
        else:
            rows.append(x.expand(-1, len(places), -1).contiguous())
    return tuple(rows)


def _weigh(ends: Ends, gradients: Sequence[Tensor | None]) -> Tensors:
    """Return the attributions (S, F) from gradients (S, B, F), whose weights they contain."""
    remaining = iter(gradients)
    sums = []
    for x, baseline in zip(*ends, strict=True):
        gradient = next(remaining) if x.is_floating_point() else None
        if gradient is None:
            sums.append(x.new_zeros(x.shape[::2], dtype=torch.float64))
            continue
        difference = (x.double() - baseline.double())[:, 0]
        sums.append(gradient.detach().double().sum(1) * difference)
    return tuple(sums)


def _gradients(
    targets: Sequence[Tensor], above: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of leaves, given those of targets; None where there is none."""
    with_graph = [
        (target, gradient)
        for target, gradient in zip(targets, above, strict=True)
        if gradient is not None and target.requires_grad
    ]
    if not with_graph or not leaves:
        return [None] * len(leaves)
    outputs, gradients = zip(*with_graph, strict=True)
    return torch.autograd.grad(outputs, list(leaves), gradients, allow_unused=True)


def _tensors(states: Sequence[State | None]) -> list[Tensor]:
    """Return the tensors of the states of all layers."""
    return [t for s in states if s is not None for t in as_tuple(s)]


def _copies(states: Sequence[State | None]) -> list[State | None]:
    return [None if s is None else map_state(Tensor.clone, s) for s in states]
