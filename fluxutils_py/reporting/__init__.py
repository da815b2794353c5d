"""Telling people how it goes."""

from fluxutils_py.audience import watched
from fluxutils_py.reporting.points import Point, PointsWriter, load_points
from fluxutils_py.reporting.progress import ProgressBar
from fluxutils_py.reporting.tables import report_eval

__all__ = ["Point", "PointsWriter", "ProgressBar", "load_points", "report_eval", "watched"]
