"""Evaluate models: tasks, results that merge over batches and ranks, and hooks that keep the best model."""

from fluxutils_py.evaluation.eval_task import EvalTask
from fluxutils_py.evaluation.evaluate import eval_batches, eval_datasets
from fluxutils_py.evaluation.mean_metrics import Means, MetricsEval
from fluxutils_py.evaluation.results import EvalResults
from fluxutils_py.evaluation.run_eval import KeepBestResults, RunEval, RunEvalKeepBest
from fluxutils_py.evaluation.sampled_set import SampledSet

__all__ = [
    "EvalResults",
    "EvalTask",
    "KeepBestResults",
    "Means",
    "MetricsEval",
    "RunEval",
    "RunEvalKeepBest",
    "SampledSet",
    "eval_batches",
    "eval_datasets",
]
