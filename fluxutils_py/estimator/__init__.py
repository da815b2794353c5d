"""The estimators: what scikit-learn sees."""

from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.sequence import SequenceClassifier, SequenceRegressor
from fluxutils_py.estimator.spec import Spec
from fluxutils_py.estimator.typed import EstimatorClassifier, EstimatorRegressor

__all__ = ["Estimator", "EstimatorClassifier", "EstimatorRegressor", "SequenceClassifier", "SequenceRegressor", "Spec"]
