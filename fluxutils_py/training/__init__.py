"""The training loop, its step on one window, and the same windows for prediction."""

from fluxutils_py.training.batches import Batch, TensorBatches
from fluxutils_py.training.functional import autotrain, itrain, ptrain, train, ttrain
from fluxutils_py.training.hooks import Hooks, StopTraining
from fluxutils_py.training.inference import Prediction, Predictor, StreamState
from fluxutils_py.training.loop import Loop, StepInfo
from fluxutils_py.training.step import WindowStep, mean_loss
from fluxutils_py.training.watching import EarlyStopping, Schedule, Validation

__all__ = [
    "Batch",
    "EarlyStopping",
    "Hooks",
    "Loop",
    "Prediction",
    "Predictor",
    "Schedule",
    "StepInfo",
    "StopTraining",
    "StreamState",
    "TensorBatches",
    "Validation",
    "WindowStep",
    "autotrain",
    "itrain",
    "mean_loss",
    "ptrain",
    "train",
    "ttrain",
]
