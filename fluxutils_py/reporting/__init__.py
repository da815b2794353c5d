"""Reporting: writers for TensorBoard and trackers, summaries, progress bars, logs and tables."""

from fluxutils_py.reporting.multi_directory_writer import MultiDirectorySummaryWriter
from fluxutils_py.reporting.progress import EpochLog, ProgressBar
from fluxutils_py.reporting.publish import PublishTrainingProgress, publish_trainer_env_info
from fluxutils_py.reporting.summaries import (
    ImageSummary,
    MplImageSummary,
    ScalarSummary,
    collected_summaries,
    publish_train_intermediates,
    sow,
)
from fluxutils_py.reporting.tensorboard import TensorBoard
from fluxutils_py.reporting.threaded_writer import ThreadedSummaryWriter
from fluxutils_py.reporting.track import Track
from fluxutils_py.reporting.writers import NullSummaryWriter, SummaryWriter, Writer

__all__ = [
    "EpochLog",
    "ImageSummary",
    "MplImageSummary",
    "MultiDirectorySummaryWriter",
    "NullSummaryWriter",
    "ProgressBar",
    "PublishTrainingProgress",
    "ScalarSummary",
    "SummaryWriter",
    "TensorBoard",
    "ThreadedSummaryWriter",
    "Track",
    "Writer",
    "collected_summaries",
    "publish_train_intermediates",
    "publish_trainer_env_info",
    "sow",
]
