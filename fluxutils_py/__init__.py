"""Train recurrent networks on long series with carried state, as scikit-learn estimators.

>>> import numpy as np
>>> from fluxutils_py import Estimator
>>> x = (
...     np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")
... )  # (F, N, T): features, series, time
>>> y = x.mean(axis=0, keepdims=True)
>>> est = Estimator(spec={"epochs": 1, "batchsize": 10, "seqsize": 25}).fit(x, y)
>>> est.predict(x).shape
(1, 20, 50)
"""

from fluxutils_py.auto import SequenceClassifier, SequenceRegressor
from fluxutils_py.data import h5concat, h5create, h5mmap, h5save, samples, timesteps
from fluxutils_py.estimator import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    LossCurveDisplay,
    Spec,
    check_export,
    export,
    pooled_scorer,
    stream,
)
from fluxutils_py.explaining import explain
from fluxutils_py.frames import from_frame
from fluxutils_py.nn.losses import seqloss
from fluxutils_py.nn.ops import bmm
from fluxutils_py.nn.parameters import (
    grad2net,
    namedparams,
    net2grad,
    net2vec,
    notrack,
    vec2net,
    weights,
)
from fluxutils_py.nn.states import loadstates, reset, states, truncate
from fluxutils_py.saving import card, load, save
from fluxutils_py.transformers import (
    SequenceFeatures,
    SequenceImputer,
    SequenceScaler,
    WinsorScaler,
)
from fluxutils_py.versions import show_versions

__all__ = [
    "Estimator",
    "EstimatorClassifier",
    "EstimatorRegressor",
    "LossCurveDisplay",
    "SequenceClassifier",
    "SequenceFeatures",
    "SequenceImputer",
    "SequenceRegressor",
    "SequenceScaler",
    "Spec",
    "WinsorScaler",
    "bmm",
    "card",
    "check_export",
    "explain",
    "export",
    "from_frame",
    "grad2net",
    "h5concat",
    "h5create",
    "h5mmap",
    "h5save",
    "load",
    "loadstates",
    "namedparams",
    "net2grad",
    "net2vec",
    "notrack",
    "pooled_scorer",
    "reset",
    "samples",
    "save",
    "seqloss",
    "show_versions",
    "states",
    "stream",
    "timesteps",
    "truncate",
    "vec2net",
    "weights",
]
__version__ = "0.2.0"
