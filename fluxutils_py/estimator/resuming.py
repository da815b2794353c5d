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
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training import Checkpointer
from fluxutils_py.training.checkpointer import explain_lost_files
from fluxutils_py.training.generator_state import RandomGenerators

SERIES_OF_RANKS = SHARDS.format(""), SHARDS.format("validation ")


def with_checkpoints(callbacks: list[Any], training: Any, attributes: Any) -> list[Any]:
    """Return the callbacks, with each :class:`Checkpointer` replaced by one that tracks the whole
    fit.
    """
    if not any(isinstance(c, Checkpointer) for c in callbacks):
        return callbacks
    things = {
        "fit": _Fit(
            training, attributes
        ),  # first: rejects checkpoints of another fit before anything is read
        "model": training.step.model,
        "optimizer": training.optimizer,
        "loop": training.loop,
        "batches": training.batches,
        "step": training.step,
        "random": RandomGenerators(training.batches.device, rng=training.rng),
    }
    return [c.with_tracked(**things) if isinstance(c, Checkpointer) else c for c in callbacks]


def restore_newest(callbacks: list[Any], ranks: RankGroup) -> bool:
    """Restore the newest checkpoint of the callbacks, and return whether there was one."""
    checkpointers = [c for c in callbacks if isinstance(c, Checkpointer)]
    if not checkpointers:
        return False
    steps = ranks.allgather(ranks.guard(lambda: [c.latest_step() for c in checkpointers]))[0]
    return checkpointers[steps.index(max(steps))].restore(ranks)


def saved_minibatch_size(callbacks: list[Any], ranks: RankGroup) -> Mapping[str, Any] | None:
    """Return the state of :class:`MinibatchSize` in the checkpoint that :func:`restore_newest` will
    restore.

    None if there is no checkpoint, or none of a fit.
    """
    checkpointers = [c for c in callbacks if isinstance(c, Checkpointer)]

    def read() -> Any:
        newest = max(
            checkpointers, key=Checkpointer.latest_step
        )  # the first of several, as restore_newest takes it
        with explain_lost_files(newest.dir):
            path = newest.latest()
            state = None if path is None else newest.read(path)
        return (state or {}).get("fit", {}).get("size")

    if not checkpointers:
        return None
    return ranks.allgather(ranks.guard(read) if ranks.rank == 0 else None)[0]


class _Fit:
    """Settings and data of a fit, which must match to resume it, and the mean gradient of the last
    epoch.
    """

    def __init__(self, training: Any, attributes: Any) -> None:
        self.est, self.loop, self.device = attributes.est, training.loop, training.batches.device
        self.identity, self.data = requested_identity(training), data_digests(training.data)
        self.size = training.size

    def state_dict(self) -> dict[str, Any]:
        return {
            "of": self.identity,
            "data": self.data,
            "size": self.size.state_dict(),
            "hooks": list(self.loop.hooks.state_dict()),
            "grad": self.est.grad_,
        }

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        return (
            states[rank] if rank < len(states) else {**states[0], "hooks": []}
        )  # rank 0 may have hooks of its own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        changed = changed_settings(state["of"], self.identity) or changed_data(
            state["data"], self.data
        )
        if dealt := [text for text in changed if text.startswith(SERIES_OF_RANKS)]:
            raise LoadError(
                f"{dealt[0]}; the order of the series and their states belong to the ranks that "
                "have them, so go on with as many ranks, each with the series that it had "
                "(several ranks may run on one machine), or give the Checkpointer another folder"
            )
        if changed:
            raise LoadError(
                f"{join_differences(changed)}; call fit with the same data and settings to go on "
                "with it, or give the Checkpointer another folder"
            )
        for name, (whole, _) in state["data"].items():
            self.data[name] = self.data[name][0] or whole, self.data[name][1]
        missing = [name for name in state["hooks"] if name not in self.loop.hooks.state_dict()]
        if missing:
            raise LoadError(
                f"it had the hooks {', '.join(map(repr, missing))}, which this fit lacks; add them"
            )
        self.est.grad_ = state["grad"].to(self.device)
