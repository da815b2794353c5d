"""Save a fit in checkpoints, and resume it from the newest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.fingerprint import (
    SHARDS,
    changed_data,
    changed_settings,
    data_digests,
    join_differences,
    requested_identity,
)
from fluxutils_py.estimator.fit_data import minibatch_size
from fluxutils_py.estimator.fit_loop import FitLoop
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training import Checkpointer
from fluxutils_py.training.generator_state import RandomGenerators

SERIES_OF_RANKS = (SHARDS.format(""), SHARDS.format("validation "))


def with_checkpoints(callbacks: list[Any], loop: FitLoop, est: BaseSeriesEstimator) -> list[Any]:
    """Return the callbacks, with each :class:`Checkpointer` replaced by one that tracks the whole
    fit.
    """
    tracked = {
        # first: it rejects a checkpoint of a different fit before anything else is restored
        "fit": _Fit(loop, est),
        "model": loop.model,
        "optimizer": loop.optimizer,
        "loop": loop,
        "batches": loop.windows,
        "step": loop.trainer,
        "random": RandomGenerators(loop.windows.device, rng=loop.rng),
    }
    return [c.with_tracked(**tracked) if isinstance(c, Checkpointer) else c for c in callbacks]


def restore_newest(callbacks: list[Any], ranks: RankGroup) -> bool:
    """Restore the newest checkpoint of the callbacks, and return whether there was one."""
    checkpointers = _checkpointers(callbacks)
    # rank 0 decides: another rank may see a folder that is a moment older
    steps = ranks.allgather(ranks.guard(lambda: [c.latest_step() for c in checkpointers]))[0]
    return checkpointers[steps.index(max(steps))].restore(ranks)


def saved_minibatch_size(callbacks: list[Any], ranks: RankGroup) -> Mapping[str, Any] | None:
    """Return what :func:`minibatch_size` was in the checkpoint that :func:`restore_newest` will
    restore.

    None if there is no checkpoint, or none of a fit.
    """
    checkpointers = _checkpointers(callbacks)

    def read() -> Any:
        # of several newest ones the first, as in restore_newest
        newest = max(checkpointers, key=Checkpointer.latest_step)
        path = newest.latest()
        state = None if path is None else newest.read(path)
        return (state or {}).get("fit", {}).get("size")

    return ranks.allgather(ranks.guard(read) if ranks.rank == 0 else None)[0]


def _checkpointers(callbacks: list[Any]) -> list[Checkpointer]:
    return [c for c in callbacks if isinstance(c, Checkpointer)]


class _Fit:
    """Settings and data of a fit, which must match to resume it, and the mean gradient of the last
    epoch.
    """

    def __init__(self, loop: FitLoop, est: BaseSeriesEstimator) -> None:
        self.est = est
        self.loop = loop
        self.device = loop.windows.device
        # now, before hooks change what it describes
        self.identity = requested_identity(loop)
        self.data = data_digests(loop.data)
        self.size = minibatch_size(loop.data.settings, loop.data.windows)

    def state_dict(self) -> dict[str, Any]:
        return {
            "of": self.identity,
            "data": self.data,
            "size": self.size,
            "hooks": list(self.loop.hooks.state_dict()),
            "grad": self.est.grad_,
        }

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        if rank < len(states):
            return states[rank]
        # a rank that is new needs none of the hooks that rank 0 alone may have, such as a report
        return {**states[0], "hooks": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._require_same_fit(state)
        hooks = self.loop.hooks.state_dict()
        if missing := [name for name in state["hooks"] if name not in hooks]:
            raise LoadError(
                f"the checkpoint was written with the hooks {', '.join(map(repr, missing))}, "
                "which are missing here; add them"
            )
        for name, (whole, _) in state["data"].items():
            own, sample = self.data[name]
            # keeps a digest of all values for later checkpoints, where this fit read a sample only
            self.data[name] = (own or whole, sample)
        self.est.grad_ = state["grad"].to(self.device)

    def _require_same_fit(self, state: Mapping[str, Any]) -> None:
        # digests last: sizes are among the settings, and explain a change better
        changed = changed_settings(state["of"], self.identity)
        changed = changed or changed_data(state["data"], self.data)
        if series_moved := [text for text in changed if text.startswith(SERIES_OF_RANKS)]:
            raise LoadError(
                f"{series_moved[0]}; the order of the series and their states belong to the ranks "
                "that have them, so continue with as many ranks, each with the series that it had "
                "(several ranks may run on one machine), or give the Checkpointer another folder"
            )
        if changed:
            raise LoadError(
                f"{join_differences(changed)}; call fit with the same data and settings to "
                "continue it, or give the Checkpointer another folder"
            )
