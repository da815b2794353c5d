"""The training loop, a step on batches, hooks and triggers, datasets, checkpoints."""

from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.checkpointer import Checkpointer
from fluxutils_py.training.dataset import Batch, InMemory, Map, ReadAhead, Take
from fluxutils_py.training.hooks import StopTraining
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.optuna_pruning import OptunaPruning
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.train_state import TrainState
from fluxutils_py.training.triggers import EveryNSeconds, EveryNSteps, NTimes, Trigger

__all__ = [
    "Batch",
    "BatchStep",
    "Checkpointer",
    "EveryNSeconds",
    "EveryNSteps",
    "InMemory",
    "Loop",
    "Map",
    "NTimes",
    "OptunaPruning",
    "ReadAhead",
    "StepInfo",
    "StopTraining",
    "Take",
    "TrainState",
    "Trigger",
]
