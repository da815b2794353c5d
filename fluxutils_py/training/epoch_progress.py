"""The progress of a loop within its epoch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from fluxutils_py.training.pending_loss import PendingLoss
from fluxutils_py.training.step_info import StepInfo

SUMS = ("n_losses", "n_live", "total", "weighted")


class EpochProgress:
    """Position of an epoch in its batches, and the sums behind the means in its record.

    Attributes
    ----------
    step : int
        Number of steps completed in the epoch.
    batches : iterable or None
        The batches of the epoch.
    """

    def __init__(self) -> None:
        self.batches: Any = None
        self._source: Iterator[Any] | None = None  # the rest of the epoch
        self._pending: deque[StepInfo] = deque()  # steps with unread losses, oldest first
        self._reset_sums()

    def _reset_sums(self) -> None:
        self.step = self.n_losses = 0
        self.n_live = self.total = self.weighted = self._seconds = 0.0
        self._started: float | None = None
        self._pending.clear()

    def is_over(self, batches: Iterable[Any]) -> bool:
        """Return whether an epoch over these batches has begun."""
        return self.step > 0 if self._source is None else self.batches is batches

    def open(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return the rest of the epoch, or a new epoch if the batches are others."""
        if not self.is_over(batches):
            self.close()
        if self._source is None:
            self.batches, self._source = batches, iterate_from(batches, self.step)
        return self._source

    def close(self) -> None:
        """Forget the epoch, complete or not."""
        source, batches, self._source, self.batches = self._source, self.batches, None, None
        self._reset_sums()
        close = getattr(source, "close", None)
        if close is not None and source is not batches:  # it may be reading ahead; the caller closes batches
            close()

    def add(self, info: StepInfo) -> None:
        """Count a step."""
        self.step += 1
        if isinstance(info.batch_loss, PendingLoss):
            self._pending.append(info)
            self.read_pending(keep=1)
        elif info.batch_loss is not None:
            self._add_loss(info.batch_loss, info.n_live)

    def read_pending(self, keep: int = 0) -> None:
        """Read the losses computed on a GPU, except the ``keep`` newest, which it may still be computing."""
        while len(self._pending) > keep:
            info = self._pending.popleft()
            self._add_loss(float(info.batch_loss), info.n_live)

    def _add_loss(self, batch_loss: float, n_live: float) -> None:
        self.n_losses += 1
        self.n_live += n_live
        self.total += batch_loss
        self.weighted += batch_loss * n_live

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        self._seconds, self._started = self.seconds, None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def record(self) -> dict[str, float | None]:
        """Return the means over the steps so far, and the seconds."""
        return {
            "loss": self.weighted / self.n_live if self.n_live else None,
            "mean_batch_loss": self.total / self.n_losses if self.n_losses else None,
            "seconds": self.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        self.read_pending()
        return {"step": self.step, "seconds": self.seconds, **{name: getattr(self, name) for name in SUMS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.close()
        self.step, self._seconds = state["step"], state["seconds"]
        for name in SUMS:
            setattr(self, name, state[name])


def known_length(batches: Any) -> int | None:
    """Return the number of batches in a pass, or None if it is unknown."""
    try:
        return len(batches)
    except TypeError:
        return None


def iterate_from(batches: Iterable[Any], done: int) -> Iterator[Any]:
    """Return a pass without its first ``done`` batches: call ``batches.skip``, or else read and drop them."""
    if not done:
        return iter(batches)
    if hasattr(batches, "skip"):
        return iter(batches.skip(done))
    rest = iter(batches)
    deque(islice(rest, done), maxlen=0)
    return rest
