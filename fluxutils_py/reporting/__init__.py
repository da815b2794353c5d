"""Telling people how it goes."""

from fluxutils_py.reporting.progress import ProgressBar, watched

__all__ = ["ProgressBar", "watched"]
