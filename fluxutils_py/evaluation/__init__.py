"""Judging what was trained."""

from fluxutils_py.evaluation.actions import KeepBestResults, RunEval, RunEvalKeepBest
from fluxutils_py.evaluation.metrics import Means, MetricsEval
from fluxutils_py.evaluation.results import EvalResults
from fluxutils_py.evaluation.sampling import SampledSet
from fluxutils_py.evaluation.selecting import bestmodelselector, initevalcby
from fluxutils_py.evaluation.task import EvalTask, eval_batches, eval_datasets

__all__ = [
    "EvalResults",
    "EvalTask",
    "KeepBestResults",
    "Means",
    "MetricsEval",
    "RunEval",
    "RunEvalKeepBest",
    "SampledSet",
    "bestmodelselector",
    "eval_batches",
    "eval_datasets",
    "initevalcby",
]
