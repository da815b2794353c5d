"""What the hooks of this folder read of a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RunningLoop(Protocol):
    """The attributes of :class:`fluxutils_py.training.Loop` that are read here, described there."""

    step: int
    start_step: int
    end_step: int | None
    epoch: int
    epoch_step: int
    n_epochs: int | None
    steps_per_epoch: int | None
    record: dict[str, Any]
    shared_data: dict[str, Any]

    @property
    def batch_loss(self) -> float | None: ...

    @property
    def metrics(self) -> Mapping[str, Any]: ...
