"""The training step of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import recurrent_layers, restore, snapshot
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.gradient_vector import GradientVector
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.train_state import TrainState
from fluxutils_py.training.trainer import gradient_norm, require_finite
from fluxutils_py.tree import tree_map

Seed = int | torch.Generator


class Step:
    """``step_fn(state, batch, rng)``; see :meth:`BaseTrainTask.make_training_step_fn`."""

    def __init__(self, task: Any, ranks: RankGroup) -> None:
        self.task, self.ranks = task, ranks
        self._model: nn.Module | None = None  # whose parameters the gradients are of

    def __call__(self, state: TrainState, batch: Any, rng: Seed) -> tuple[TrainState, StepInfo]:
        if self._model is not state.model:
            self._model, self._params = state.model, [p for p in state.model.parameters() if p.requires_grad]
            self._vector = GradientVector(self._params, self.ranks)
        if not state.model.training:
            state.model.train()
        state.opt.zero_grad()
        try:
            random = as_generator(rng, state.step, self.ranks.rank)
            info = self._alone(state, batch, random) if self.ranks.is_single else self._together(state, batch, random)
        finally:
            state.opt.zero_grad()
        return state, info

    def _alone(self, state: TrainState, batch: Any, rng: torch.Generator) -> StepInfo:
        value, weight, aux = self._part(state, batch, rng)
        if weight:
            require_finite("loss", value)
            require_finite("gradient norm", gradient_norm(self._params))
            state.opt.step()
        _count(state)
        return StepInfo(value if weight else None, weight, aux)

    def _together(self, state: TrainState, batch: Any, rng: torch.Generator) -> StepInfo:
        """The collective of this step: every rank comes here, also one that failed or has no data."""
        ranks, flat = self.ranks, self._vector.values
        found = None if ranks.is_leaving else ranks.guard(self._part, state, batch, rng)
        value, own, aux = found or (0.0, 0.0, {})
        weight, weighted, *_ = self._vector.reduce(own, value, math.ceil(own))
        if ranks.stopped:
            return StepInfo(None, 0)
        if not weight:
            _count(state)
            return StepInfo(None, 0)
        flat.div_(weight)
        for what, number in (("loss", weighted), ("gradient norm", torch.linalg.vector_norm(flat).item())):
            try:
                require_finite(what, number)
            except FloatingPointError as error:
                ranks.raise_on_all(error)
        ranks.guard(self._apply, state)
        _count(state)
        if state.extra_vars:
            self.task.reduce_extra_vars(state.extra_vars, ranks=ranks, weight=own)
        return StepInfo(weighted / weight, weight, aux)

    def _apply(self, state: TrainState) -> None:
        self._vector.assign(self._vector.layouts())
        state.opt.step()

    def _part(self, state: TrainState, batch: Any, rng: torch.Generator) -> tuple[float, float, dict[str, Any]]:
        """Loss, how many data it is of, and what else is known, of a batch; the gradient is then on the parameters."""
        weight = 0.0 if batch is None else self.task.batch_weight(batch)
        if not weight:
            return 0.0, 0.0, {}
        value, aux = self._gradient(state, batch, rng)
        return value, weight, aux

    def _gradient(self, state: TrainState, batch: Any, rng: torch.Generator) -> tuple[float, dict[str, Any]]:
        """The loss, and what else is known of the step; the gradient is then on the parameters."""
        where = next(state.model.parameters()).device
        with seeded(draw(rng), [where] if where.type == "cuda" else []):
            found = self.task.compute_loss(state.model, batch, step=state.step, rng=rng)
            loss, aux = found if isinstance(found, tuple) else (found, {})
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(
                    f"compute_loss must return a scalar tensor, or a pair of one and a mapping; got {shown}"
                )
            if not isinstance(aux, Mapping):
                raise TypeError(f"what compute_loss returns beside the loss must be a mapping, got {aux!r}")
            if not loss.requires_grad:
                raise ValueError(
                    "the loss does not depend on the model's parameters: compute it from the model's output, without "
                    "detach, item or numpy"
                )
            value = loss.item()
            if math.isfinite(value):  # else the gradient is not needed: the step fails
                loss.backward()
        return value, tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, aux)


class TaskStep:
    """The training step of a task for a :class:`Loop`, ``Loop(TaskStep(task, state, seed=0))``.

    Parameters
    ----------
    task : BaseTrainTask
    state : TrainState
        Is changed; the loop counts on from its step.
    seed : int
        From which each step has random numbers that depend on nothing else: to go on exactly, no generator is needed.
    comm : RankGroup, optional
        The same as the loop's.

    Notes
    -----
    To go on exactly in another process, track ``Checkpointer(dir).track(**state.parts(), loop=loop, data=data)``, and
    ``restore()`` before the run; recurrent states are saved with the loop.
    """

    name, priority = "task", -math.inf

    def __init__(self, task: Any, state: TrainState, seed: int = 0, comm: RankGroup | None = None) -> None:
        self.task, self.state, self.seed = task, state, seed
        self._step_fn: Step = task.make_training_step_fn(comm)

    @property
    def model(self) -> nn.Module:
        """That of the state."""
        return self.state.model

    @property
    def step(self) -> int:
        """That of the state."""
        return self.state.step

    def train_step(self, batch: Any) -> StepInfo | None:
        """Learn from one batch. None: ranks agreed to stop, this batch does not count."""
        _, info = self._step_fn(self.state, batch, self.seed)
        return None if info.loss is None and self._step_fn.ranks.stopped else info

    def on_start(self, loop: Any) -> None:
        """The loop may have been put back to a checkpoint."""
        self.state.step = loop.step

    def state_dict(self) -> dict[str, Any]:
        """The states of recurrent layers; model and optimizer are saved by themselves."""
        return {"states": snapshot(self.model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        restore(self.model, state["states"])


def _count(state: TrainState) -> None:
    for layer in recurrent_layers(state.model):
        layer.truncate()
    state.step += 1


def as_generator(rng: Seed, step: int, rank: int = 0) -> torch.Generator:
    """The generator of a step and a rank, which depends on nothing but them and the seed; a generator is itself."""
    if isinstance(rng, torch.Generator):
        return rng
    return generator(np.random.SeedSequence(rng, spawn_key=(step, rank)))


def draw(rng: Seed) -> int:
    """A seed: the one given, or one that a generator draws."""
    return int(torch.randint(2**63 - 1, (), generator=rng)) if isinstance(rng, torch.Generator) else int(rng)


def generator(seed: np.random.SeedSequence) -> torch.Generator:
    """A torch generator that starts from a NumPy seed."""
    return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> np.uint64(1)))
