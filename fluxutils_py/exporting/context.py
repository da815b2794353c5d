"""Models without recurrent state that see their last inputs again, as pure functions of a window and these inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fluxutils_py.exporting.steps import InitialState, require_causal, require_exportable
from fluxutils_py.nn.copying import deep_copy


class ContextWindow(nn.Module):
    """A model over windows whose state is its last inputs: ``forward(*inputs, *states) -> (*outputs, *next_states)``.

    It is for models without recurrent layers that take whole windows, such as a convolution with padding. Before each
    window it puts the last ``overlap`` inputs, fewer at the start of a series, as streams of estimators do.

    Parameters
    ----------
    model : nn.Module
        It is copied to the CPU, in evaluation mode.
    inputs : sequence of Tensor of shape (S, B, F)
        Some inputs of the model.
    overlap : int

    Attributes
    ----------
    initial : tuple of InitialState
        Of each input, zero steps (0, B, F), which become up to ``overlap``; none if that is 0.

    Raises
    ------
    ExportError
        If the model looks into the future, or holds a loss.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor], overlap: int) -> None:
        super().__init__()
        self.model, self.overlap = deep_copy(model).cpu().eval().requires_grad_(False), overlap
        require_exportable(self.model)
        require_causal(self.model, [x.detach().cpu() for x in inputs])
        empty = [x.detach().cpu().new_zeros(0, 1, x.shape[2]) for x in inputs]
        self.initial = tuple(InitialState(x, 1) for x in empty) if overlap else ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(tensors) - len(self.initial)
        xs, before = tensors[:n], tensors[n:]
        if before:
            xs = tuple(torch.cat(both) for both in zip(before, xs, strict=True))
        found = self.model(*xs)
        outputs = (found,) if isinstance(found, Tensor) else tuple(found)
        if not before:
            return outputs
        past, steps = before[0].shape[0], xs[0].shape[0]
        forgotten = torch.sym_max(0, steps - self.overlap)
        return (*(y[past:] for y in outputs), *(x[forgotten:] for x in xs))
