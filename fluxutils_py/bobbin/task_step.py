"""The training step of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fluxutils_py.nn.seeding import seeded
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.train_state import TrainState

if TYPE_CHECKING:
    from fluxutils_py.training.loop import Loop

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

    name = "task"
    priority = -math.inf  # before all other hooks, which may look at the step number
    ends_together = True  # see Loop: a rank without a batch still takes part in a step
    collective = True

    def __init__(
        self,
        task: Any,
        state: TrainState | None = None,
        seed: int = 0,
        *,
        comm: object = "auto",
        **settings: Any,
    ) -> None:
        self.task = task
        self.seed = seed
        self.ranks = RankGroup.from_comm(comm, "training")
        self._settings = settings
        self._bound: tuple[Any, ...] = ()
        if state is not None:
            self._bind_state(state)

    def _bind_state(self, state: TrainState) -> None:
        self.state = state
        self._bound = state.model, state.opt
        self._step = BatchStep(
            self._loss_and_aux,
            state.model,
            state.opt,
            comm=self.ranks,
            weigh=self.task.batch_weight,
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
        return self._step.shares_batches

    def __call__(
        self,
        state: TrainState,
        batch: object,
        rng: Seed,
    ) -> tuple[TrainState, StepInfo]:
        """Take one step, changing the given state in place. See
        :meth:`BaseTrainTask.make_training_step_fn`.
        """
        # not bound again at each step, which would lose the gradients that wait for more batches
        if self._bound != (state.model, state.opt):
            self._bind_state(state)
        self.state = state
        info = self._take_step(batch, rng)
        return state, StepInfo(None, 0) if info is None else info

    def train_step(self, batch: object) -> StepInfo | None:
        """Train on one batch; pass None on a rank that has no more batches.

        Returns
        -------
        StepInfo or None
            None if ranks agreed to stop or no rank has a batch; such a step does not count.
        """
        return self._take_step(batch, self.seed)

    def _take_step(
        self,
        batch: object,
        rng: Seed,
    ) -> StepInfo | None:
        state = self.state
        self._rng = rng
        # asked first: train() goes through all modules
        if not state.model.training:
            state.model.train()
        ranks = self.ranks
        if ranks.is_single:
            info = self._step.train_step(batch)
        else:
            # a rank whose batches are used up takes part in the steps of the others without one
            with ranks.step(lambda: self._take_step(None, rng)):
                info = self._step.train_step(batch)
                if info is not None and info.batch_loss is not None and state.extra_vars:
                    weight = self._step.weight
                    self.task.reduce_extra_vars(state.extra_vars, ranks=ranks, weight=weight)
        if info is not None:
            state.step += 1
        return info

    def _loss_and_aux(self, model: nn.Module, batch: object) -> tuple[Any, Mapping[str, Any]]:
        """Return the loss of a batch and other values, with the random numbers of this step and
        rank.
        """
        rng = as_generator(self._rng, self.state.step, self.ranks.rank)
        with self._seeded_torch(rng):
            result = self.task.compute_loss(model, batch, step=self.state.step, rng=rng)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        if aux is None:
            return loss, {}
        return loss, aux if isinstance(aux, Mapping) else {"aux": aux}

    def _run_again(self, batch: object) -> None:
        """Call the task's loss of a batch; a generator that the user gave does not advance."""
        given = self._rng
        before = given.get_state() if isinstance(given, torch.Generator) else None
        try:
            self._loss_and_aux(self.model, batch)
        finally:
            if isinstance(given, torch.Generator) and before is not None:
                given.set_state(before)

    def _seeded_torch(self, rng: torch.Generator) -> AbstractContextManager[Any]:
        """Seed torch's global generators, which dropout uses, from ``rng``, for a block."""
        # reading the generator of another GPU would start a context there
        device = next(self.state.model.parameters()).device
        return seeded(draw(rng), [device] if device.type == "cuda" else [])

    def on_start(self, loop: Loop) -> None:
        """Begin a run, perhaps from a restored checkpoint."""
        self.state.step = loop.step

    def on_epoch(self, loop: Loop) -> None:
        """Finish a pass over the data."""
        self._step.on_epoch(loop)

    def state_dict(self) -> dict[str, Any]:
        """Return recurrent states and waiting gradients, without model and optimizer."""
        return self._step.state_dict()

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        return self._step.reshard_state_dict(states, rank, size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self._step.load_state_dict(state)


def as_generator(
    rng: Seed,
    step: int,
    rank: int = 0,
) -> torch.Generator:
    """Return a generator that depends only on seed, step and rank; a generator given as ``rng`` is
    returned itself.
    """
    if isinstance(rng, torch.Generator):
        return rng
    return generator(np.random.SeedSequence(rng, spawn_key=(step, rank)))


def draw(rng: Seed) -> int:
    """Return the given seed, or draw one from the given generator."""
    if not isinstance(rng, torch.Generator):
        return int(rng)
    return int(torch.randint(2**63 - 1, (), generator=rng))


def generator(seed: np.random.SeedSequence) -> torch.Generator:
    """Return a torch generator seeded from a NumPy seed sequence."""
    number = seed.generate_state(1, np.uint64)[0] >> np.uint64(1)  # torch's seeds are signed
    return torch.Generator().manual_seed(int(number))
