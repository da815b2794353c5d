"""The training loop, what may be hooked to it, and what it trains: on windows, batches of any kind, or functions."""

from fluxutils_py.training.added import add_loss, get_losses
from fluxutils_py.training.batches import Batch, TensorBatches
from fluxutils_py.training.callbacks import cb, cby, history_table
from fluxutils_py.training.checkpoint import read_file, write_file
from fluxutils_py.training.checkpointer import Checkpointer
from fluxutils_py.training.crontab import CronTab
from fluxutils_py.training.dataset import Dataset, InMemory, Map, Minibatch, ReadAhead, Take, as_dataset, as_minibatch
from fluxutils_py.training.functional import autotrain, itrain, ptrain, train, ttrain
from fluxutils_py.training.hooks import Hooks, StopTraining
from fluxutils_py.training.inference import Prediction, Predictor
from fluxutils_py.training.loop import Loop, StepInfo
from fluxutils_py.training.losses import weighted
from fluxutils_py.training.metrics import (
    EMAMetric,
    MeanMetric,
    binary_accuracy,
    binary_logits_accuracy,
    sparse_categorical_accuracy,
)
from fluxutils_py.training.randomness import Randomness
from fluxutils_py.training.state import TrainState
from fluxutils_py.training.step import WindowStep, mean_loss
from fluxutils_py.training.task import BaseTrainTask, TrainTask
from fluxutils_py.training.taskstep import TaskStep
from fluxutils_py.training.trainer import Mode, Trainer
from fluxutils_py.training.triggers import (
    AnyOf,
    AtFirstNSteps,
    AtFirstNStepsOfProcess,
    AtNthStep,
    Every,
    EveryNSteps,
    EverySeconds,
    Exponential,
    ExponentialCallback,
    ForEachNSteps,
    ForEachTSeconds,
    NTimes,
    NTimesDuringLoop,
    PeriodicCallback,
    Trigger,
    when,
)
from fluxutils_py.training.watching import EarlyStopping, Schedule, Validation

__all__ = [
    "AnyOf",
    "AtFirstNSteps",
    "AtFirstNStepsOfProcess",
    "AtNthStep",
    "BaseTrainTask",
    "Batch",
    "Checkpointer",
    "CronTab",
    "Dataset",
    "EMAMetric",
    "EarlyStopping",
    "Every",
    "EveryNSteps",
    "EverySeconds",
    "Exponential",
    "ExponentialCallback",
    "ForEachNSteps",
    "ForEachTSeconds",
    "Hooks",
    "InMemory",
    "Loop",
    "Map",
    "MeanMetric",
    "Minibatch",
    "Mode",
    "NTimes",
    "NTimesDuringLoop",
    "PeriodicCallback",
    "Prediction",
    "Predictor",
    "Randomness",
    "ReadAhead",
    "Schedule",
    "StepInfo",
    "StopTraining",
    "Take",
    "TaskStep",
    "TensorBatches",
    "TrainState",
    "TrainTask",
    "Trainer",
    "Trigger",
    "Validation",
    "WindowStep",
    "add_loss",
    "as_dataset",
    "as_minibatch",
    "autotrain",
    "binary_accuracy",
    "binary_logits_accuracy",
    "cb",
    "cby",
    "get_losses",
    "history_table",
    "itrain",
    "mean_loss",
    "ptrain",
    "read_file",
    "sparse_categorical_accuracy",
    "train",
    "ttrain",
    "weighted",
    "when",
    "write_file",
]
