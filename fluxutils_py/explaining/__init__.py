"""Explain outputs by the inputs of the past, and draw predictions."""

from fluxutils_py.explaining.explanation import Explanation
from fluxutils_py.explaining.integrated_gradients import explain
from fluxutils_py.explaining.sequence_display import SequencePredictionDisplay

__all__ = [
    "Explanation",
    "SequencePredictionDisplay",
    "explain",
]
