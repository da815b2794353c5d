"""Evaluation: results that merge over batches and ranks, evaluation tasks, keeping the best model."""

from fluxutils_py.evaluation.eval_task import EvalTask, eval_batches, eval_datasets
from fluxutils_py.evaluation.mean_metrics import Means, MetricsEval
from fluxutils_py.evaluation.praytools import bestmodelselector, initevalcby
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
    "bestmodelselector",
    "eval_batches",
    "eval_datasets",
    "initevalcby",
]
