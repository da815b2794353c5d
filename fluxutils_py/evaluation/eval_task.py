"""What to find out about a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxutils_py.evaluation.evaluate import Batches
from fluxutils_py.evaluation.results import EvalResults, raise_undefined
from fluxutils_py.evaluation.run_eval import RunEval


class EvalTask:
    """Base of evaluation tasks: where results begin, what a batch gives, and how they end.

    Notes
    -----
    Source: ``EvalTask`` of bobbin, where ranks without a batch evaluate None.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import torch
    >>> from torch import nn
    >>> from fluxutils_py.evaluation import eval_batches
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
        """The result of no data, with which others are merged: ``create(...).reduce(r)`` is to equal ``r``."""
        raise_undefined(self, "create_eval_results(dataset_name)", "gives the result of no data")

    def evaluate(self, batch: Any, *args: Any, **kwargs: Any) -> EvalResults:
        """The result of one batch; the other arguments are those that the evaluation was given.

        Called on the rank that has the batch, for itself: no collectives in here, ranks have different numbers of
        batches.
        """
        raise_undefined(self, "evaluate(batch, ...)", "gives the result of a batch")

    def finalize_eval_results(self, results: EvalResults) -> EvalResults:
        """What becomes of the results of all data of all ranks; by default nothing. Called on every rank, alike."""
        return results

    def make_cron_action(
        self, datasets: Mapping[str, Batches], *, tensorboard_root_path: Any = None, comm: Any = "auto"
    ) -> RunEval:
        """This task as a hook of a training loop: see :class:`RunEval`."""
        return RunEval(self, datasets, tensorboard_root_path, comm=comm)
