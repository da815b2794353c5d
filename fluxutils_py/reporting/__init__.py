"""Telling people how it goes."""

from fluxutils_py.audience import watched
from fluxutils_py.reporting.multidirectory import MultiDirectorySummaryWriter
from fluxutils_py.reporting.points import Point, PointsWriter, load_points
from fluxutils_py.reporting.progress import EpochLog, ProgressBar
from fluxutils_py.reporting.publish import PublishTrainingProgress, publish_trainer_env_info
from fluxutils_py.reporting.summaries import (
    ImageSummary,
    MplImageSummary,
    ScalarSummary,
    Summary,
    collected_summaries,
    publish_train_intermediates,
    sow,
)
from fluxutils_py.reporting.tables import report_eval
from fluxutils_py.reporting.tensorboard import TensorBoard
from fluxutils_py.reporting.writers import NullSummaryWriter, SummaryWriter, ThreadedSummaryWriter, Writer

__all__ = [
    "EpochLog",
    "ImageSummary",
    "MplImageSummary",
    "MultiDirectorySummaryWriter",
    "NullSummaryWriter",
    "Point",
    "PointsWriter",
    "ProgressBar",
    "PublishTrainingProgress",
    "ScalarSummary",
    "Summary",
    "SummaryWriter",
    "TensorBoard",
    "ThreadedSummaryWriter",
    "Writer",
    "collected_summaries",
    "load_points",
    "publish_train_intermediates",
    "publish_trainer_env_info",
    "report_eval",
    "sow",
    "watched",
]
