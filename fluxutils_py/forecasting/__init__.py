"""Forecast panels of series, from a data frame to intervals."""

from fluxutils_py.forecasting.closed_loop import generate, rollout
from fluxutils_py.forecasting.forecaster import Forecaster

__all__ = [
    "Forecaster",
    "generate",
    "rollout",
]
