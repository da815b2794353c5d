"""Evaluation as an action of a training loop, and keeping the best model that it has seen."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from fluxutils_py.errors import DataError
from fluxutils_py.evaluation.eval_task import Batches, EvalTask, eval_datasets, resolve_ranks
from fluxutils_py.evaluation.results import EvalResults
from fluxutils_py.nn.parameters import module_of
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training import Checkpointer, StopTraining
from fluxutils_py.treejson import dump_pytree_json, read_pytree_json, write_pytree_json

logger = logging.getLogger(__name__)

ResultProcessor = Callable[[dict[str, EvalResults], Any], Any]


class RunEval:
    """An action that evaluates a task on datasets: ``action(state)`` returns the results by name.

    All ranks call it together, in a loop's hooks or by hand, and have the same results; see :func:`eval_datasets`. The
    task's ``evaluate`` is given the batch and the state. Results are logged on rank 0, at level INFO, then given to
    result processors on every rank.

    Parameters
    ----------
    task : EvalTask
    datasets : mapping of str to iterable or callable
        Batches that can be gone through again and again, or functions without arguments that return batches; of each
        rank its own.
    comm : "auto", "mpi", "torch", None or Communicator
        Which ranks, for a state without ``ranks``; one that has it, such as a :class:`Loop`, brings its own.

    Raises
    ------
    DataError
        If a dataset can be gone through only once.

    Notes
    -----
    Training goes on as if it had not been there: see :func:`eval_datasets`. Source: ``RunEval`` of bobbin.

    Examples
    --------
    >>> import torch
    >>> from fluxutils_py.training import InMemory, Loop, Trainer
    >>> @dataclass(frozen=True)
    ... class Loss(EvalResults):
    ...     total: float = 0.0
    ...     n: int = 0
    ...
    ...     def reduce(self, other):
    ...         return Loss(self.total + other.total, self.n + other.n)
    >>> class SquaredError(EvalTask):
    ...     def create_eval_results(self, dataset_name):
    ...         return Loss()
    ...
    ...     def evaluate(self, batch, state):
    ...         y = batch.inputs[0].sum(1, keepdim=True)
    ...         return Loss((state.model(*batch.inputs) - y).square().sum().item(), len(y))
    >>> x = torch.randn(50, 3)
    >>> evaluate = SquaredError().make_cron_action({"dev": InMemory(torch.randn(9, 3), batchsize=4)})
    >>> found = []
    >>> _ = evaluate.add_result_processor(lambda results, state: found.append(results["dev"].total))
    >>> trainer = Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.Adam)
    >>> loop = Loop(trainer)
    >>> loop.hooks.attach(evaluate)
    >>> loop.run_epochs(InMemory(x, x.sum(1, keepdim=True), batchsize=20), 2)
    >>> len(found), found[-1] < found[0]
    (6, True)
    """

    name, collective = "evaluation", True

    def __init__(self, task: EvalTask, datasets: Mapping[str, Batches], *, comm: Any = "auto") -> None:
        for name, batches in datasets.items():
            if isinstance(batches, Iterator) and not hasattr(batches, "reset"):
                raise DataError(
                    f"dataset {name!r} is a {type(batches).__name__}, which can be gone through once; give a list, an "
                    "object whose __iter__ begins anew each time, or a function that returns the batches"
                )
        self.task, self.datasets, self.comm = task, dict(datasets), comm
        self._processors: list[ResultProcessor] = []

    def add_result_processor(self, processor: ResultProcessor) -> Self:
        """Have ``processor(results, state)`` called after each evaluation, with the results by name. Returns self.

        Every rank calls it, by itself, with the same results: what one alone shall do is for rank 0. In a loop it may
        raise :class:`StopTraining`.
        """
        self._processors.append(processor)
        return self

    def keep_best_checkpoint(self, tune_on: str, dest: Any) -> RunEvalKeepBest:
        """This action, and afterwards keep the model in folder ``dest`` if it is the best so far on one dataset."""
        return RunEvalKeepBest(self, tune_on, dest)

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> dict[str, EvalResults]:
        with resolve_ranks(self.comm, getattr(state, "ranks", None), "RunEval") as ranks:
            return self.run(state, ranks)

    def run(self, state: Any, ranks: RankGroup) -> dict[str, EvalResults]:
        """Evaluate with the ranks of ``ranks``."""
        results = eval_datasets(self.task, self.datasets, state, ranks=ranks)
        ranks.guard(self._process, results, state, ranks.rank)
        ranks.allgather()
        return results

    def _process(self, results: dict[str, EvalResults], state: Any, rank: int) -> None:
        if rank == 0:
            for name, result in results.items():
                logger.info("step %d, %s: %s", state.step, name, result.to_log_message())
        for processor in self._processors:
            try:
                processor(results, state)
            except StopTraining:
                if not hasattr(state, "stop"):  # a loop of the user's own
                    raise
                state.stop()


@dataclass(frozen=True)
class KeepBestResults:
    """What :class:`RunEvalKeepBest` returns, the same on every rank.

    Attributes
    ----------
    eval_results : dict of str to EvalResults
        Of this evaluation.
    current_best : EvalResults
        The best so far, of the dataset that decides; of this evaluation or an earlier one.
    saved_train_state : Path or None
        The checkpoint, if this model is the best so far and was therefore saved.
    """

    eval_results: dict[str, EvalResults]
    current_best: EvalResults
    saved_train_state: Path | None


class RunEvalKeepBest:
    """An action that evaluates, and keeps the model in a folder if its result is better than the best so far.

    The folder has one checkpoint (:class:`Checkpointer`), of the model's parameters and buffers as rank 0 has them, and
    its result in ``results.json``. Rank 0 alone reads and writes there, and decides for all. The best result there is
    the one to beat, also for a training that is started anew: give each experiment a folder of its own. One that cannot
    be read is passed over with a warning.

    Parameters
    ----------
    run_eval : RunEval
    tune_on : str
        The dataset whose results decide, by their ``is_better_than``. The first is kept whatever it is.
    dest : str or path-like
        The folder; made when something is saved.

    Raises
    ------
    ValueError
        If there is no dataset ``tune_on``.

    Notes
    -----
    The checkpoint is written before its result: if the process is killed between the two, the model in the folder is
    better than its result says, never worse. :meth:`load_best` needs no action:
    ``model.load_state_dict(Checkpointer(dest).read()["model"])``.

    Source: ``RunEvalKeepBest`` of bobbin, which returns the state that it saved where this returns the checkpoint, and
    where ranks may disagree about the best after a restart.

    Examples
    --------
    ``CronTab().schedule(task.make_cron_action(datasets).keep_best_checkpoint("dev", "best"), step_interval=100)``
    """

    name, collective = "evaluation", True

    def __init__(self, run_eval: RunEval, tune_on: str, dest: Any) -> None:
        if tune_on not in run_eval.datasets:
            known = ", ".join(map(repr, run_eval.datasets)) or "none"
            raise ValueError(f"there is no dataset {tune_on!r} to tune on; there are {known}")
        self.run_eval, self.tune_on, self.dest = run_eval, tune_on, Path(dest)
        self._best: EvalResults | None = None  # of rank 0

    def add_result_processor(self, processor: ResultProcessor) -> Self:
        """As :meth:`RunEval.add_result_processor`; called before the model is kept."""
        self.run_eval.add_result_processor(processor)
        return self

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> KeepBestResults:
        with resolve_ranks(self.run_eval.comm, getattr(state, "ranks", None), "RunEvalKeepBest") as ranks:
            results = self.run_eval.run(state, ranks)
            best, path = _from_rank_0(ranks, lambda: self._keep(results[self.tune_on], state))
            return KeepBestResults(results, best, path)

    def load_best(self, model: nn.Module) -> nn.Module:
        """Give a model the parameters and buffers that were kept. Returns it. Every rank that wants them calls this.

        Raises
        ------
        FileNotFoundError
            If none have been kept yet.
        """
        kept = Checkpointer(self.dest).read()
        if kept is None:
            raise FileNotFoundError(f"{self.dest} holds no model: none has been kept yet")
        model.load_state_dict(kept["model"])
        return model

    def _keep(self, result: EvalResults, state: Any) -> tuple[EvalResults, Path | None]:
        """The best so far, and where the model was saved if that is this one."""
        if self._best is None:
            self._best = self._read(result)
        if self._best is not None and not result.is_better_than(self._best):
            return self._best, None
        dump_pytree_json(result)  # what cannot be written raises before anything is
        path = Checkpointer(self.dest).write({"model": module_of(state).state_dict()}, state.step)
        write_pytree_json(self.dest / "results.json", result)
        self._best = result
        return result, path

    def _read(self, like: EvalResults) -> EvalResults | None:
        """The best of an earlier process, if there is one."""
        path = self.dest / "results.json"
        try:
            return read_pytree_json(path, like)
        except FileNotFoundError:
            return None
        except ValueError as error:
            warnings.warn(f"{error}; it is passed over, and this model taken for the best so far", stacklevel=2)
            return None


def _from_rank_0(ranks: RankGroup, f: Callable[[], Any]) -> Any:
    """What ``f()`` gives on rank 0, on all ranks."""
    if ranks.is_single:
        return f()
    return pickle.loads(ranks.allgather(ranks.guard(lambda: pickle.dumps(f())) if ranks.rank == 0 else None)[0])
