"""Forecast panels of series, from a data frame to intervals."""

from fluxutils_py.forecasting.closed_loop import generate, rollout
from fluxutils_py.forecasting.forecast_display import ForecastDisplay
from fluxutils_py.forecasting.forecaster import Forecaster

__all__ = [
    "ForecastDisplay",
    "Forecaster",
    "generate",
    "rollout",
]
