"""Scale losses in float16, so that small gradients do not become zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

START, GROWTH_INTERVAL, MOST_SKIPPED = 2.0**16, 2000, 40


class LossScale:
    """Factor for losses in float16, which adapts to the gradients.

    It follows torch's ``GradScaler``, but uses the gradient vector that all ranks share: an update with an infinite or
    NaN gradient halves the scale, 2000 others in a row double it. No value is read back from the GPU. Source:
    Micikevicius et al. (2018), Mixed precision training, arXiv:1710.03740.

    Attributes
    ----------
    value : Tensor
        The scale, a scalar.
    skip : Tensor
        Whether the last gradient was not finite.
    n_skipped : Tensor
        Number of updates in a row whose gradient was not finite.
    """

    def __init__(self, device: torch.device, earlier: LossScale | None = None) -> None:
        self.value = torch.tensor(START, device=device)
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        self.n_skipped, self._n_grown = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        if earlier is not None:
            self.load_state_dict(earlier.state_dict())

    def unscale_(self, gradient: Tensor) -> None:
        """Divide the gradient of an update by the scale, or set it to zero if it is not finite; adapt the scale."""
        gradient.div_(self.value)
        self.skip = ~torch.linalg.vector_norm(gradient).isfinite()
        gradient.masked_fill_(self.skip, 0)
        self.n_skipped = torch.where(self.skip, self.n_skipped + 1, 0)
        self._n_grown = torch.where(self.skip, 0, self._n_grown + 1)
        grown = self._n_grown == GROWTH_INTERVAL
        self._n_grown.masked_fill_(grown, 0)
        self.value = torch.where(self.skip, self.value / 2, torch.where(grown, self.value * 2, self.value))

    def state_dict(self) -> dict[str, Tensor]:
        """Return scale and counts."""
        return {"value": self.value, "n_skipped": self.n_skipped, "n_grown": self._n_grown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        device = self.value.device
        self.value, self.n_skipped = state["value"].to(device), state["n_skipped"].to(device)
        self._n_grown = state["n_grown"].to(device, copy=True)


def require_progress(n_skipped: float) -> None:
    """Raise FloatingPointError if too many updates in a row were skipped."""
    if n_skipped >= MOST_SKIPPED:
        raise FloatingPointError(
            f"the gradient in float16 was infinite or NaN in {int(n_skipped)} updates in a row, however small "
            "the scale of the loss: train with precision='bfloat16', which has the range of float32"
        )
