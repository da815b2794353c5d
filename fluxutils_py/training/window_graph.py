"""Windows of one shape on a GPU, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.states import loadstates, states
from fluxutils_py.parallel.gradient_vector import GradientVector
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.step_info import StepInfo


class WindowGraph:
    """Compute the loss of windows and its gradient by a CUDA graph: one launch for each window, in
    place of one for each operation.

    It repeats what the GPU did for the first window. What Python does there, as in hooks, it does
    not repeat.

    Parameters
    ----------
    compute : callable
        ``compute(batch)`` returns the loss of a window, and writes its gradient into ``vector``.
    batch : Minibatch
        The first window. Model and state stay as they are before it.
    model : nn.Module
    vector : GradientVector
    """

    def __init__(
        self,
        compute: Callable[[Minibatch], Any],
        batch: Minibatch,
        model: nn.Module,
        vector: GradientVector,
    ) -> None:
        self.kind = kind_of_window(batch, model)
        self._model = model
        self._params = vector.params
        begin = states(model)
        inputs = tuple(t.clone() for t in batch.inputs)
        labels = tuple(t.clone() for t in batch.labels)
        fixed = replace(batch, inputs=inputs, labels=labels)
        self._memory = [*inputs, *labels, *begin]

        def run() -> list[Tensor]:
            for p in self._params:
                p.grad = None
            loadstates(model, begin)
            loss = compute(fixed).batch_loss
            return [loss, *states(model)]

        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._replay, self._results = capture(run)
        for buffer, value in buffers:
            buffer.copy_(value)
        loadstates(model, begin)
        pairs = zip(self._params, vector.views, strict=True)
        self._grads = [None if p.grad is None else view for p, view in pairs]

    def __call__(self, batch: Minibatch) -> StepInfo:
        """Return the loss of a window, in memory that the next one takes again; move the state on,
        and set the gradients.
        """
        given = [*batch.inputs, *batch.labels, *states(self._model)]
        for memory, value in zip(self._memory, given, strict=True):
            memory.copy_(value)
        self._replay()
        loss, *end = self._results
        loadstates(self._model, end)
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = grad
        return StepInfo(loss, batch.n_live)


def kind_of_window(batch: Minibatch, model: nn.Module) -> object:
    """Return what has to be equal for a graph to hold: shapes, and what the model computes."""
    tensors = [*batch.inputs, *batch.labels, *states(model)]
    return (
        [(t.shape, t.dtype) for t in tensors],
        [(p.data_ptr(), p.requires_grad) for p in model.parameters()],
        [m.training for m in model.modules()],
    )


def capture(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """Return what repeats a function's work on a GPU, and its results, which that writes anew.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, whole networks.
    """
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(current)
    # what is loaded at a first call cannot be captured; its random numbers do not count
    with torch.cuda.stream(side), torch.random.fork_rng([current.device]):
        run()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # a thread sends the next window meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph.replay, results
