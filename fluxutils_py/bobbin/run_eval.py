"""Hooks of a training loop that evaluate the model and keep the best one."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from fluxutils_py.bobbin.evaluate import Batches, eval_datasets
from fluxutils_py.bobbin.results import EvalResults
from fluxutils_py.bobbin.treejson import dump_pytree_json, read_pytree_json, write_pytree_json
from fluxutils_py.errors import DataError
from fluxutils_py.nn.parameters import module_of
from fluxutils_py.parallel import RankGroup
from fluxutils_py.reporting.multi_directory_writer import MultiDirectorySummaryWriter
from fluxutils_py.training.best_model import BestModel
from fluxutils_py.training.checkpointer import Checkpointer
from fluxutils_py.training.hooks import StopTraining

logger = logging.getLogger(__name__)

ResultProcessor = Callable[[dict[str, EvalResults], Any], Any]


class RunEval:
    """Hook that evaluates a task on datasets: ``run_eval(loop)`` returns the results by name.

    All ranks call it together, as a hook or directly, and get the same results; see
    :func:`eval_datasets`. It calls the task's ``evaluate(batch, loop)``. Rank 0 logs the results at
    level INFO; then every rank calls the result processors.

    Parameters
    ----------
    task : EvalTask
    datasets : mapping of str to iterable or callable
        The batches of this rank, iterable more than once, or a function without arguments that
        returns them.
    tensorboard_root_path : path-like, optional
        Write the results to TensorBoard with a :class:`MultiDirectorySummaryWriter`: one
        subdirectory per dataset, named after it.
    comm : "auto", "mpi", "torch", None, a communicator or a RankGroup
        The ranks to use for a state without ``ranks``; a :class:`Loop` uses its ranks.

    Raises
    ------
    DataError
        If a dataset is an iterator, which can be read only once.

    Notes
    -----
    Evaluation does not change training: see :func:`eval_datasets`. Source: ``RunEval`` of bobbin.

    Examples
    --------
    >>> import torch
    >>> from fluxutils_py.bobbin import EvalTask
    >>> from fluxutils_py.training import InMemory
    >>> from fluxutils_py.gomlx import Trainer
    >>> from fluxutils_py.training import Loop
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
    >>> evaluate = SquaredError().make_cron_action(
    ...     {"dev": InMemory(torch.randn(9, 3), batchsize=4)}
    ... )
    >>> found = []
    >>> _ = evaluate.add_result_processor(lambda results, state: found.append(results["dev"].total))
    >>> trainer = Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.Adam)
    >>> loop = Loop(trainer)
    >>> loop.hooks.attach(evaluate)
    >>> _ = loop.run_epochs(InMemory(x, x.sum(1, keepdim=True), batchsize=20), 2)
    >>> len(found), found[-1] < found[0]
    (6, True)
    """

    name, collective = "evaluation", True

    def __init__(
        self,
        task: Any,
        datasets: Mapping[str, Batches],
        tensorboard_root_path: Any = None,
        *,
        comm: Any = "auto",
    ) -> None:
        for name, batches in datasets.items():
            if isinstance(batches, Iterator) and not hasattr(batches, "reset"):
                raise DataError(
                    f"dataset {name!r} is a {type(batches).__name__}, which can be iterated over "
                    "only once; give a list, an object that can be iterated over again, or a "
                    "function that returns the batches"
                )
        self.task, self.datasets, self.comm = task, dict(datasets), comm
        self._processors: list[ResultProcessor] = []
        if tensorboard_root_path is not None:
            writer = MultiDirectorySummaryWriter(
                tensorboard_root_path, keys=self.datasets, comm=comm
            )
            self.add_result_processor(writer.as_result_processor())

    def add_result_processor(self, processor: ResultProcessor) -> Self:
        """Call ``processor(results, state)`` after each evaluation, with the results by name.
        Return self.

        Every rank calls it with the same results; let only rank 0 write files or print. In a loop
        it may raise
        :class:`StopTraining`.
        """
        self._processors.append(processor)
        return self

    def keep_best_checkpoint(self, tune_on: str, dest: Any) -> RunEvalKeepBest:
        """Return a hook that evaluates, then saves the model in folder ``dest`` if it is the best
        on one dataset.
        """
        return RunEvalKeepBest(self, tune_on, dest)

    def __call__(self, loop: Any, *_: Any, **__: Any) -> dict[str, EvalResults]:
        with ranks_of(loop, self.comm, "RunEval") as ranks:
            return self.run(loop, ranks)

    def run(self, loop: Any, ranks: RankGroup) -> dict[str, EvalResults]:
        """Evaluate on the given ranks and call the result processors; return the results by name."""
        results = eval_datasets(self.task, self.datasets, loop, comm=ranks)
        ranks.guard(self._process_results, results, loop, ranks.rank)
        ranks.allgather()
        return results

    def _process_results(self, results: dict[str, EvalResults], loop: Any, rank: int) -> None:
        if rank == 0:
            for name, result in results.items():
                logger.info("step %d, %s: %s", loop.step, name, result.to_log_message())
        for processor in self._processors:
            try:
                processor(results, loop)
            except StopTraining:
                if not hasattr(loop, "stop"):  # the user wrote the loop
                    raise
                loop.stop()


@dataclass(frozen=True)
class KeepBestResults:
    """Return value of :class:`RunEvalKeepBest`, the same on every rank.

    Attributes
    ----------
    eval_results : dict of str to EvalResults
        Results of this evaluation, by dataset.
    current_best : EvalResults
        Best result so far on the dataset ``tune_on``.
    saved_train_state : Path or None
        The checkpoint of this model if it is the best so far, else None.
    """

    eval_results: dict[str, EvalResults]
    current_best: EvalResults
    saved_train_state: Path | None


class RunEvalKeepBest:
    """Hook that evaluates the model and saves it in a folder if its result is the best so far.

    The folder holds one checkpoint (:class:`Checkpointer`) of rank 0's model and optimizer, and the
    result in ``results.json``. Only rank 0 reads and writes the folder; it decides for all ranks. A
    new training must beat the result in the folder too, so use one folder per experiment. A result
    that cannot be read gives a warning and is ignored.

    Parameters
    ----------
    run_eval : RunEval
    tune_on : str
        Name of the dataset whose results are compared with ``is_better_than``. The first result
        always counts as best.
    dest : str or path-like
        The folder. The first save creates it.

    Raises
    ------
    ValueError
        If there is no dataset ``tune_on``.

    Notes
    -----
    The checkpoint is written before its result: if the process is killed between the two, the model
    in the folder is better than its result says, never worse. Without this hook, load the best
    model as :meth:`load_best` does: ``model.load_state_dict(Checkpointer(dest).read()["model"])``.
    ``TrainTask.initialize_train_state`` resumes from the folder.

    Source: ``RunEvalKeepBest`` of bobbin, which returns the saved state instead of the checkpoint's
    path, and whose ranks may disagree about the best result after a restart.

    Examples
    --------
    ``CronTab().schedule(task.make_cron_action(datasets).keep_best_checkpoint("dev", "best"),
    step_interval=100)``
    """

    name, collective = "evaluation", True

    def __init__(self, run_eval: RunEval, tune_on: str, dest: Any) -> None:
        if tune_on not in run_eval.datasets:
            known = ", ".join(map(repr, run_eval.datasets)) or "none"
            raise ValueError(f"there is no dataset {tune_on!r} to tune on; there are {known}")
        self.run_eval, self.tune_on, self.dest = run_eval, tune_on, Path(dest)
        self._best = _BestCheckpoint(self.dest)  # rank 0 alone uses it

    def add_result_processor(self, processor: ResultProcessor) -> Self:
        """Add a processor as :meth:`RunEval.add_result_processor` does; it runs before the model is
        saved.
        """
        self.run_eval.add_result_processor(processor)
        return self

    def __call__(self, loop: Any, *_: Any, **__: Any) -> KeepBestResults:
        with ranks_of(loop, self.run_eval.comm, "RunEvalKeepBest") as ranks:
            results = self.run_eval.run(loop, ranks)
            path, best = _from_rank_0(
                ranks, lambda: self._best.save_if_better(results[self.tune_on], loop)
            )
            return KeepBestResults(results, best, path)

    def load_best(self, model: nn.Module) -> nn.Module:
        """Load the best parameters and buffers into ``model`` and return it. Call it on each rank
        that needs them.

        Raises
        ------
        FileNotFoundError
            If no model has been saved yet.
        """
        checkpoint = Checkpointer(self.dest).read()
        if checkpoint is None:
            raise FileNotFoundError(f"{self.dest} contains no model: none has been saved yet")
        model.load_state_dict(checkpoint["model"])
        return model


class _BestCheckpoint(BestModel):
    """The best model's checkpoint in a folder, and its result in a file beside it."""

    def __init__(self, dest: Path) -> None:
        super().__init__(is_better=lambda result, best: result.is_better_than(best))
        self.dest = dest
        self.path: Path | None = None

    def save_if_better(self, result: EvalResults, loop: Any) -> tuple[Path | None, EvalResults]:
        """Save the model if it is the best so far; return its checkpoint or None, and the best
        result.
        """
        if self.value is None:
            self.value = self._read_best(result)
        self.model = loop
        return self.path if self.update(result) else None, self.value

    def _store_best(self, value: EvalResults) -> None:
        dump_pytree_json(value)  # raise before writing anything if the result cannot be written
        state = getattr(self.model, "state", self.model)
        parts = {"model": module_of(self.model), "optimizer": getattr(state, "opt", None)}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        self.path = Checkpointer(self.dest).write(states, self.model.step)
        write_pytree_json(self.dest / "results.json", value)

    def _read_best(self, like: EvalResults) -> EvalResults | None:
        """Return the best result of an earlier process, or None."""
        try:
            return read_pytree_json(self.dest / "results.json", like)
        except FileNotFoundError:
            return None
        except ValueError as error:
            warnings.warn(
                f"{error}; ignoring it and taking this model as the best so far", stacklevel=2
            )
            return None


def ranks_of(loop: Any, comm: Any, call: str) -> RankGroup:
    """Return the ranks of a loop, or the ranks of ``comm`` for a state without ``ranks``."""
    ranks = getattr(loop, "ranks", None)
    return RankGroup.from_comm(comm if ranks is None else ranks, call)


def _from_rank_0(ranks: RankGroup, f: Callable[[], Any]) -> Any:
    """Call ``f()`` on rank 0 and return its value on all ranks."""
    if ranks.is_single:
        return f()
    return pickle.loads(
        ranks.allgather(ranks.guard(lambda: pickle.dumps(f())) if ranks.rank == 0 else None)[0]
    )
