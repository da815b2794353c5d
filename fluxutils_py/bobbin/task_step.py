"""The training step of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fluxutils_py.nn.seeding import seeded
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.train_state import TrainState

Seed = int | torch.Generator


class TaskStep(BatchStep):
    """Training step of a task, for a :class:`Loop`, which counts steps from ``state.step``.

    Parameters
    ----------
    task : BaseTrainTask
    state : TrainState
        Trained in place.
    seed : int or torch.Generator
        Seed, step number and rank determine the random numbers of a step, so resuming needs no
        saved generator.
    **settings
        ``comm``, ``batches``, ``clip``, ``accumulate``, ``precision``, ``stateful``, ``defer``: see
        :class:`GradientStep`. Several ranks divide a batch with :meth:`BaseTrainTask.shard_batch`,
        and :meth:`BaseTrainTask.batch_weight` weights the parts.

    Notes
    -----
    To resume exactly in another process, call ``Checkpointer(dir).track(**state.parts(), loop=loop,
    data=data)``, and ``restore()`` before the run. The loop's part of the checkpoint includes
    recurrent states.
    """

    name = "task"

    def __init__(self, task: Any, state: TrainState, seed: Seed = 0, **settings: Any) -> None:
        self.task = task
        self.state = state
        self.seed = seed
        super().__init__(
            self._loss_and_aux,
            state.model,
            state.opt,
            weigh=task.batch_weight,
            shard=task.shard_batch,
            **settings,
        )

    @property
    def step(self) -> int:
        """Step number of the state."""
        return self.state.step

    def train_step(self, batch: object) -> StepInfo | None:
        state = self.state
        # asked first: train() goes through all modules
        if not state.model.training:
            state.model.train()
        # a rank whose batches are used up takes part in the steps of the others without one
        with self.ranks.step(lambda: self.train_step(None)):
            info = super().train_step(batch)
            has_trained = info is not None and info.batch_loss is not None
            if has_trained and not self.ranks.is_single and state.extra_vars:
                self.task.reduce_extra_vars(state.extra_vars, ranks=self.ranks, weight=self.weight)
        if info is not None:
            state.step += 1
        return info

    def _loss_and_aux(self, model: Any, batch: object) -> tuple[Any, Mapping[str, Any]]:
        """Return the loss of a batch and other values, with the random numbers of this step and
        rank.
        """
        rng = self.seed
        if not isinstance(rng, torch.Generator):
            place = (self.state.step, self.ranks.rank)
            rng = generator(np.random.SeedSequence(rng, spawn_key=place))
        # dropout draws from torch's own; reading that of another GPU would start a context there
        with seeded(draw(rng), [p.device for p in self.params[:1] if p.is_cuda]):
            result = self.task.compute_loss(model, batch, step=self.state.step, rng=rng)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        if aux is None:
            return loss, {}
        return loss, aux if isinstance(aux, Mapping) else {"aux": aux}

    def on_start(self, loop: Loop) -> None:
        """Begin a run, perhaps from a restored checkpoint."""
        self.state.step = loop.step


def draw(rng: Seed) -> int:
    """Return the given seed, or draw one from the given generator."""
    if not isinstance(rng, torch.Generator):
        return int(rng)
    return int(torch.randint(2**63 - 1, (), generator=rng))


def generator(seed: np.random.SeedSequence) -> torch.Generator:
    """Return a torch generator seeded from a NumPy seed sequence."""
    number = seed.generate_state(1, np.uint64)[0] >> np.uint64(1)  # torch's seeds are signed
    return torch.Generator().manual_seed(int(number))
