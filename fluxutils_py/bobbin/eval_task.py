"""The base class of evaluation tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxutils_py.bobbin.evaluate import Batches
from fluxutils_py.bobbin.results import EvalResults, raise_undefined
from fluxutils_py.bobbin.run_eval import RunEval


class EvalTask:
    """Base class of evaluation tasks: create empty results, evaluate one batch, finalize the merged
    results.

    Notes
    -----
    Source: ``EvalTask`` of bobbin, where ranks without a batch call ``evaluate`` with None.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import torch
    >>> from torch import nn
    >>> from fluxutils_py.bobbin import eval_batches
    >>> @dataclass(frozen=True)
    ... class Errors(EvalResults):
    ...     squares: float = 0.0
    ...     n: int = 0
    ...
    ...     def reduce(self, other):
    ...         return Errors(self.squares + other.squares, self.n + other.n)
    >>> class SquaredErrors(EvalTask):
    ...     def create_eval_results(self, dataset_name):
    ...         return Errors()
    ...
    ...     def evaluate(self, batch, model):
    ...         x, y = batch
    ...         return Errors((model(x) - y).square().sum().item(), y.numel())
    >>> x = torch.arange(6.0).reshape(6, 1)
    >>> batches = [(x[:4], x[:4] + 1), (x[4:], x[4:] + 3)]
    >>> eval_batches(SquaredErrors(), "dev", batches, nn.Identity())
    Errors(squares=22.0, n=6)
    """

    def create_eval_results(self, dataset_name: str) -> EvalResults:
        """Return the result of no data, the start of every merge: its ``reduce(r)`` must equal
        ``r``.
        """
        raise_undefined(self, "create_eval_results(dataset_name)", "gives the result of no data")

    def evaluate(self, batch: Any, *args: Any, **kwargs: Any) -> EvalResults:
        """Return the result of one batch; :func:`eval_datasets` passes its other arguments on.

        Each rank calls this for its batches only. Do not call collectives in it: ranks may have
        different numbers of batches.
        """
        raise_undefined(self, "evaluate(batch, ...)", "gives the result of a batch")

    def finalize_eval_results(self, results: EvalResults) -> EvalResults:
        """Return the final results, given the merged results of all ranks; by default unchanged.
        All ranks call it.
        """
        return results

    def make_cron_action(
        self,
        datasets: Mapping[str, Batches],
        *,
        tensorboard_root_path: Any = None,
        comm: Any = "auto",
    ) -> RunEval:
        """Return a hook that runs this task in a training loop: a :class:`RunEval`."""
        return RunEval(self, datasets, tensorboard_root_path, comm=comm)
