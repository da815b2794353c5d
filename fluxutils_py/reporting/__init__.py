"""Reporting: progress bars, logs, curves for TensorBoard and trackers, tables."""

from fluxutils_py.reporting.progress import EpochLog, ProgressBar
from fluxutils_py.reporting.tensorboard import TensorBoard
from fluxutils_py.reporting.track import Track

__all__ = ["EpochLog", "ProgressBar", "TensorBoard", "Track"]
