"""Names and arguments of gomlx ``ml/train`` and related packages, on this package's loop."""

from fluxutils_py.gomlx.loop_callbacks import (
    EveryNSteps,
    ExponentialCallback,
    NTimesDuringLoop,
    PeriodicCallback,
    report_eval,
)
from fluxutils_py.gomlx.running_metrics import (
    EMAMetric,
    MeanMetric,
    WeightedLoss,
    binary_accuracy,
    binary_logits_accuracy,
    sparse_categorical_accuracy,
)
from fluxutils_py.gomlx.trainer import Trainer
from fluxutils_py.nn.first_nonfinite import first_nonfinite
from fluxutils_py.optim import by_name, cosine, inverse_sqrt
from fluxutils_py.reporting import ProgressBar
from fluxutils_py.training import (
    Batch,
    Checkpointer,
    InMemory,
    Loop,
    Map,
    NTimes,
    ReadAhead,
    StopTraining,
    Take,
)
from fluxutils_py.training.added_losses import add_loss, collected_losses, get_losses
from fluxutils_py.training.dataset import as_dataset

__all__ = [
    "Batch",
    "Checkpointer",
    "EMAMetric",
    "EveryNSteps",
    "ExponentialCallback",
    "InMemory",
    "Loop",
    "Map",
    "MeanMetric",
    "NTimes",
    "NTimesDuringLoop",
    "PeriodicCallback",
    "ProgressBar",
    "ReadAhead",
    "StopTraining",
    "Take",
    "Trainer",
    "WeightedLoss",
    "add_loss",
    "as_dataset",
    "binary_accuracy",
    "binary_logits_accuracy",
    "by_name",
    "collected_losses",
    "cosine",
    "first_nonfinite",
    "get_losses",
    "inverse_sqrt",
    "report_eval",
    "sparse_categorical_accuracy",
]
