"""Explain outputs by the inputs of the past, and draw predictions, residuals and confusions."""

from fluxutils_py.explaining.explanation import Explanation, Share
from fluxutils_py.explaining.explanation_display import ExplanationDisplay
from fluxutils_py.explaining.integrated_gradients import explain
from fluxutils_py.explaining.permutation import PermutationImportance, permutation_importance

__all__ = [
    "Explanation",
    "ExplanationDisplay",
    "PermutationImportance",
    "Share",
    "explain",
    "permutation_importance",
]
