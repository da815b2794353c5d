"""Run a model again on a batch that gave NaN, to name the module where it began."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fluxutils_py.gomlx.added_losses import collected_losses
from fluxutils_py.gomlx.executors import Executors, Mode
from fluxutils_py.nn.first_nonfinite import first_nonfinite, is_finite
from fluxutils_py.nn.states import reset
from fluxutils_py.training.minibatch import Minibatch, begins_series


def find_nonfinite(
    model: nn.Module, batch: Minibatch, stateful: bool, takes_kind: bool, autocast: AbstractContextManager[Any]
) -> str:
    """Return where a number first was not finite, as the end of a clause.

    It is empty if the model gives finite numbers, or if the batch has others already.
    """
    if not is_finite(batch.inputs):
        return ""

    def run() -> None:
        if begins_series(batch, stateful):
            reset(model)
        first = next(model.parameters(), None)
        moved = batch if first is None else batch.to(first.device)
        with collected_losses(), autocast:
            Executors(model, 1, takes_kind, False)(moved.kind, Mode.TRAIN)(moved.inputs)

    return first_nonfinite(model, run)
