"""scikit-learn lives on this floor."""

from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.spec import Spec

__all__ = ["Estimator", "Spec"]
