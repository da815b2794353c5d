"""Judging what was trained."""

from fluxutils_py.evaluation.selecting import bestmodelselector, initevalcby

__all__ = ["bestmodelselector", "initevalcby"]
