"""The training step of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import restore, snapshot
from fluxutils_py.parallel import RankGroup, Threads
from fluxutils_py.parallel.threads import n_threads
from fluxutils_py.training.function_step import FunctionStep
from fluxutils_py.training.resharding import require_shared_batches, reshard_rows
from fluxutils_py.training.step_info import BatchLoss, StepInfo
from fluxutils_py.training.threaded_loss import ThreadedLoss, detached, shares
from fluxutils_py.training.train_state import TrainState

Seed = int | torch.Generator


class TaskStep:
    """Training step of a task, for a :class:`Loop` or to call directly as ``step(state, batch,
    rng)``.

    Parameters
    ----------
    task : BaseTrainTask
    state : TrainState, optional
        State to train in place; a :class:`Loop` requires it, and counts steps from ``state.step``.
    seed : int
        Seed, step number and rank determine the random numbers of a step, so resuming needs no
        saved generator.
    comm
        See :class:`GradientStep`.
    n_jobs : int or None
        Number of threads, which divide each batch with :meth:`BaseTrainTask.shard_batch`. Each part
        has random numbers of its own. Auxiliary outputs are averaged by
        :meth:`BaseTrainTask.batch_weight`, so they must be numbers.
    **settings
        ``batches``, ``clip``, ``accumulate``, ``precision``, ``stateful``, ``defer``: see
        :class:`GradientStep`. Several ranks divide a batch with :meth:`BaseTrainTask.shard_batch`,
        and :meth:`BaseTrainTask.batch_weight` weights the parts.

    Attributes
    ----------
    ranks : RankGroup

    Notes
    -----
    To resume exactly in another process, call ``Checkpointer(dir).track(**state.parts(), loop=loop,
    data=data)``, and ``restore()`` before the run. The loop's part of the checkpoint includes
    recurrent states.
    """

    name, priority, ends_together, collective = "task", -math.inf, True, True

    def __init__(
        self,
        task: Any,
        state: TrainState | None = None,
        seed: int = 0,
        *,
        comm: Any = "auto",
        n_jobs: int | None = None,
        **settings: Any,
    ) -> None:
        self.task, self.seed, self.ranks, self._settings = (
            task,
            seed,
            RankGroup.from_comm(comm, "training"),
            settings,
        )
        self._threads = Threads(n_threads(n_jobs))
        self._bound: tuple[Any, ...] = ()
        if state is not None:
            self._bind_state(state)

    def _bind_state(self, state: TrainState) -> None:
        self.state, self._bound = state, (state.model, state.opt)
        compute: Any = self._compute_loss
        if self._threads.n > 1:
            divide = shares(self.task.shard_batch)
            compute = ThreadedLoss(self._compute_part_loss, state.model, self._threads, divide)
        self._step = FunctionStep(
            compute,
            state.opt,
            state.model,
            comm=self.ranks,
            shard=self.task.shard_batch,
            compute_again=self._run_again,
            **self._settings,
        )

    @property
    def model(self) -> nn.Module:
        """Model of the state."""
        return self.state.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the state."""
        return self.state.opt

    @property
    def step(self) -> int:
        """Step number of the state."""
        return self.state.step

    @property
    def shares_batches(self) -> bool:
        """Whether all ranks need the same batches, and so equally many."""
        return self._settings.get("batches", "same") == "same"

    def __call__(self, state: TrainState, batch: Any, rng: Seed) -> tuple[TrainState, StepInfo]:
        """Take one step, changing the given state in place. See
        :meth:`BaseTrainTask.make_training_step_fn`.
        """
        if self._bound != (state.model, state.opt):
            self._bind_state(state)
        self.state = state
        info = self._take_step(batch, rng)
        return state, StepInfo(None, 0) if info is None else info

    def train_step(self, batch: Any) -> StepInfo | None:
        """Train on one batch; pass None on a rank that has no more batches.

        Returns
        -------
        StepInfo or None
            None if ranks agreed to stop or no rank has a batch; such a step does not count.
        """
        return self._take_step(batch, self.seed)

    def _take_step(self, batch: Any, rng: Seed) -> StepInfo | None:
        state, ranks = self.state, self.ranks
        self._rng, self._n_own = rng, 0.0
        self._metrics: dict[str, Any] = {}
        if not state.model.training:
            state.model.train()
        if self._threads.n > 1:
            base = as_generator(rng, state.step, ranks.rank)
            self._part_seed, self._parts = draw(base), {}  # type: int, dict[int, tuple[float, Any]]
            with seeded(self._part_seed), self._threads:
                return self._run_step(batch, rng)
        return self._run_step(batch, rng)

    def _run_step(self, batch: Any, rng: Seed) -> StepInfo | None:
        state, ranks = self.state, self.ranks
        if ranks.is_single:
            info = self._step(batch)
        else:
            with ranks.step(lambda: self._take_step(None, rng)):
                info = self._step(batch)
                if self._threads.n > 1:
                    self._mean_metrics()  # and the weight of this rank
                if info is not None and info.batch_loss is not None and state.extra_vars:
                    self.task.reduce_extra_vars(state.extra_vars, ranks=ranks, weight=self._n_own)
        if info is None:
            return None
        if self._threads.n > 1:
            self._metrics = self._mean_metrics()
        state.step += 1
        return replace(info, metrics=self._metrics)

    def _compute_loss(self, batch: Any) -> BatchLoss | None:
        """Return the loss of a batch, with the random numbers of this step and rank."""
        state, n = self.state, self.task.batch_weight(batch)
        if not n:
            return None
        generator = as_generator(self._rng, state.step, self.ranks.rank)
        device = next(state.model.parameters()).device
        with seeded(draw(generator), [device] if device.type == "cuda" else []):
            loss, metrics = self._call_task(state.model, batch, generator)
        self._metrics, self._n_own = dict(metrics or {}), n
        return BatchLoss(loss, n)

    def _run_again(self, batch: Any) -> None:
        """Call the task's loss of a batch; a generator that the user gave does not advance."""
        given = self._rng
        before = given.get_state() if isinstance(given, torch.Generator) else None
        try:
            rng = as_generator(given, self.state.step, self.ranks.rank)
            device = next(self.state.model.parameters()).device
            with seeded(draw(rng), [device] if device.type == "cuda" else []):
                self._call_task(self.state.model, batch, rng)
        finally:
            if isinstance(given, torch.Generator) and before is not None:
                given.set_state(before)

    def _compute_part_loss(self, part: Any, model: nn.Module, i: int) -> BatchLoss | None:
        """Return the loss of a thread's part of a batch, with random numbers of its own."""
        n = self.task.batch_weight(part)
        if not n:
            return None
        rng = generator(np.random.SeedSequence(self._part_seed, spawn_key=(i,)))
        loss, metrics = self._call_task(model, part, rng)
        self._parts[i] = n, metrics
        return BatchLoss(loss, n)

    def _call_task(
        self, model: nn.Module, batch: Any, rng: torch.Generator
    ) -> tuple[Any, Mapping[str, Any] | None]:
        """Return the loss and the auxiliary outputs of a batch, detached and by name; None without
        any.
        """
        result = self.task.compute_loss(model, batch, step=self.state.step, rng=rng)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        return loss, detached(aux if aux is None or isinstance(aux, Mapping) else {"aux": aux})

    def _mean_metrics(self) -> dict[str, Any]:
        """Return the metrics of all parts, averaged."""
        parts = [self._parts[i] for i in sorted(self._parts)]
        self._n_own = total = sum(n for n, _ in parts)
        metrics = [(n / total, aux) for n, aux in parts if aux is not None]
        return {
            name: sum(share * aux[name] for share, aux in metrics)
            for name in (metrics[0][1] if metrics else ())
        }

    def on_start(self, loop: Any) -> None:
        """Begin a run, perhaps from a restored checkpoint."""
        self._threads.__enter__()
        self.state.step = loop.step

    def on_close(self, loop: Any) -> None:
        """End a run, even after an error: stop the threads."""
        self._threads.__exit__()

    def on_epoch(self, loop: Any) -> None:
        """Finish a pass over the data."""
        self._step.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return recurrent states and waiting gradients; model and optimizer are saved separately."""
        return {"states": snapshot(self.model), "step": self._step.state_dict()}

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        require_shared_batches(self._settings.get("batches"), len(states), size)
        step = self._step.reshard_state_dict([state["step"] for state in states], rank, size)
        rows = reshard_rows(self.model, [state["states"] for state in states], rank, size)
        return {"states": rows, "step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        restore(self.model, state["states"])
        self._step.load_state_dict(state["step"])


def as_generator(rng: Seed, step: int, rank: int = 0) -> torch.Generator:
    """Return a generator that depends only on seed, step and rank; a generator given as ``rng`` is
    returned itself.
    """
    if isinstance(rng, torch.Generator):
        return rng
    return generator(np.random.SeedSequence(rng, spawn_key=(step, rank)))


def draw(rng: Seed) -> int:
    """Return the given seed, or draw one from the given generator."""
    return (
        int(torch.randint(2**63 - 1, (), generator=rng))
        if isinstance(rng, torch.Generator)
        else int(rng)
    )


def generator(seed: np.random.SeedSequence) -> torch.Generator:
    """Return a torch generator seeded from a NumPy seed sequence."""
    return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> np.uint64(1)))
