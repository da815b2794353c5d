"""Scalers and imputers of sequences, for scikit-learn's pipelines."""

from fluxutils_py.transformers.imputer import SequenceImputer
from fluxutils_py.transformers.scaler import SequenceScaler
from fluxutils_py.transformers.sequence_features import SequenceFeatures
from fluxutils_py.transformers.winsor_scaler import WinsorScaler

__all__ = ["SequenceFeatures", "SequenceImputer", "SequenceScaler", "WinsorScaler"]
