"""Estimators, streams, scorers and exports, as scikit-learn expects them."""

from fluxutils_py.estimator.display import LossCurveDisplay
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.model_export import check_export, export
from fluxutils_py.estimator.pooled_scorer import flatten_steps, pooled_scorer
from fluxutils_py.estimator.spec import Spec
from fluxutils_py.estimator.streams.streaming import EstimatorStream, stream
from fluxutils_py.estimator.streams.watched_stream import WatchedStream
from fluxutils_py.estimator.typed_estimators import EstimatorClassifier, EstimatorRegressor

__all__ = [
    "Estimator",
    "EstimatorClassifier",
    "EstimatorRegressor",
    "EstimatorStream",
    "LossCurveDisplay",
    "Spec",
    "WatchedStream",
    "check_export",
    "export",
    "flatten_steps",
    "pooled_scorer",
    "stream",
]
