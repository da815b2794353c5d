"""Explain outputs by the inputs of the past, and draw predictions."""

from fluxutils_py.explaining.explanation import Explanation, Share
from fluxutils_py.explaining.explanation_display import ExplanationDisplay
from fluxutils_py.explaining.integrated_gradients import explain
from fluxutils_py.explaining.sequence_display import SequencePredictionDisplay

__all__ = [
    "Explanation",
    "ExplanationDisplay",
    "SequencePredictionDisplay",
    "Share",
    "explain",
]
