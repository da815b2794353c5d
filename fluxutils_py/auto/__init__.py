"""Ready-made estimators: choose a model, try it out and calibrate it by fits of estimators."""

from fluxutils_py.auto.sequence_estimators import SequenceClassifier, SequenceRegressor

__all__ = ["SequenceClassifier", "SequenceRegressor"]
