"""Telling people how it goes."""

from fluxutils_py.audience import watched
from fluxutils_py.reporting.progress import ProgressBar

__all__ = ["ProgressBar", "watched"]
