"""Judging what was trained."""

from fluxutils_py.evaluation.sampling import SampledSet
from fluxutils_py.evaluation.selecting import bestmodelselector, initevalcby

__all__ = ["SampledSet", "bestmodelselector", "initevalcby"]
