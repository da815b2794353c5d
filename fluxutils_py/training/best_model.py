"""Keep the best model so far."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


class BestModel:
    """Keep the parameters and buffers of a model at its best value so far.

    Parameters
    ----------
    model : nn.Module
    is_better : callable
        ``is_better(value, best)`` returns whether ``value`` is better; by default lower is better.

    Attributes
    ----------
    value : Any
        Best value so far; None before the first. NaN is ignored.
    parameters : dict or None
        Copy of the model's ``state_dict`` at that value, on the CPU.
    """

    def __init__(
        self, model: nn.Module | None = None, is_better: Callable[[Any, Any], bool] = operator.lt
    ) -> None:
        self.model: Any = model
        self.is_better = is_better
        self.value: Any = None
        self.parameters: dict[str, Any] | None = None

    def update(self, value: Any) -> bool:
        """Keep the current parameters if ``value`` is the best so far, and return whether it is."""
        if (
            value is None
            or value != value  # NaN
            or (self.value is not None and not self.is_better(value, self.value))
        ):
            return False
        self.parameters = copy_state(self.model)
        self.value = value  # last: an error while copying leaves the earlier best
        return True

    def restore(self) -> nn.Module:
        """Load the best parameters and buffers into the model, if there are any, and return the
        model.
        """
        if self.parameters is not None:
            self.model.load_state_dict(self.parameters)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and parameters."""
        return {"value": self.value, "parameters": self.parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.value = state["value"]
        self.parameters = state["parameters"]


def copy_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of the model's ``state_dict`` on the CPU."""
    state = model.state_dict().items()
    return {
        k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v)
        for k, v in state
    }
