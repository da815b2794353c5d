"""Evaluate tasks on the batches of all ranks, as hooks of a loop too; keep the best model. Results
merge, compare and can be logged; a sample merges too.
"""

from __future__ import annotations

import functools
import heapq
import logging
import operator
import os
import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.bobbin.treejson import (
    dump_pytree_json,
    read_pytree_json_file,
    write_pytree_json_file,
)
from fluxutils_py.bobbin.writers import MultiDirectorySummaryWriter
from fluxutils_py.errors import DataError, warn
from fluxutils_py.nn.seeding import gpus_of
from fluxutils_py.nn.states import evaluating, module_of, reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.checkpointer import Checkpointer
from fluxutils_py.training.hooks import StopTraining
from fluxutils_py.training.minibatch import begins_series
from fluxutils_py.tree import as_tensor, named_leaves, tree_map, unshard
from fluxutils_py.validation import check_integer

T = TypeVar("T")


@dataclass(frozen=True)
class EvalResults:
    """Base class of evaluation results: a frozen dataclass that merges with results of other data.

    Decorate each subclass with ``@dataclass(frozen=True)``. If its fields hold numbers, tensors,
    arrays, strings, and lists, tuples and mappings of them,
    :func:`fluxutils_py.bobbin.write_pytree_json_file` writes it to JSON. Ranks exchange
    results by pickle, so define the class at the top level of a module.

    A subclass must define :meth:`reduce`. Define :meth:`is_better_than` to keep the best model, and
    :meth:`write_to_tensorboard` to write results to TensorBoard.

    Raises
    ------
    TypeError
        If the class of the new object is not itself a dataclass.

    Notes
    -----
    Results merge in batch order within a rank, then in rank order. :meth:`reduce` must be
    associative; it need not be commutative. Source: ``EvalResults`` of bobbin.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Accuracy(EvalResults):
    ...     right: int = 0
    ...     n: int = 0
    ...
    ...     def reduce(self, other):
    ...         return Accuracy(self.right + other.right, self.n + other.n)
    ...
    ...     def is_better_than(self, other):
    ...         return self.right * other.n > other.right * self.n
    >>> merged = Accuracy(3, 4).reduce(Accuracy(5, 8))
    >>> merged.to_log_message()
    'Accuracy(right=8, n=12)'
    >>> merged.is_better_than(Accuracy(1, 2))
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # without the decorator it would inherit the base's fields and ignore new ones
        if "__dataclass_fields__" not in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} is a subclass of EvalResults: write @dataclass(frozen=True) above "
                "it"
            )
        return super().__new__(cls)

    def reduce(self, other: Self) -> Self:
        """Return the results of both data; the data of ``self`` come first."""
        raise_undefined(self, "reduce(other)")

    def unshard_and_reduce(self) -> Self:
        """Merge results that are stacked along the leading axis of every value, as ``tpmap``
        returns them.

        Raises
        ------
        ShapeError
            If a value has no leading axis, or the axes differ in length.
        """
        return functools.reduce(lambda one, other: one.reduce(other), unshard(self))

    def is_better_than(self, other: Self) -> bool:
        """Return whether this result is better than another result of the same data, so that its
        model is kept.

        Comparisons with NaN are False. To let the next result replace a NaN loss, write
        ``self.loss < other.loss or other.loss != other.loss``.
        """
        raise_undefined(self, "is_better_than(other)")

    def to_log_message(self) -> str:
        """Return a line for the log, by default the fields and their values."""
        return str(self)

    def write_to_tensorboard(self, state: Any, writer: Any) -> None:
        """Write the results to a summary writer, at step ``state.step``."""
        raise_undefined(self, "write_to_tensorboard(state, writer)")


def on_cpu(leaf: object) -> object:
    """Return a tensor detached and in main memory, any other value as it is."""
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def raise_undefined(thing: object, method: str) -> NoReturn:
    """Raise NotImplementedError for a method that the subclass must define."""
    raise NotImplementedError(f"{type(thing).__name__} does not define {method}")


@dataclass(frozen=True)
class SampledSet(Collection[T]):
    """Uniform sample, without replacement, of at most ``max_size`` of all elements added.

    Each added element draws a priority, uniform in [0, 1); the set keeps the elements with the
    smallest priorities. A :meth:`union` keeps the priorities, so samples of parts (minibatches,
    ranks) unite to a uniform sample of the whole, even if the parts differ in size. Sets are
    immutable: :meth:`add` and :meth:`union` return new sets.

    Elements are sorted by priority, so the first k are a uniform sample too. An element added twice
    counts twice.

    Parameters
    ----------
    max_size : int
        Maximum number of elements, at least 1.
    values : iterable
        The first elements.
    priorities : sequence of float
        Priorities of ``values``, of which the smallest are kept. By default they are drawn afresh,
        from the operating system; for a reproducible sample, draw them yourself:
        ``found.union(SampledSet(10, [x], [rng.random()]))``. Ranks must draw different numbers.

    Attributes
    ----------
    max_size, values, priorities
        The fields of this frozen dataclass; ``values`` and ``priorities`` are tuples.

    Raises
    ------
    TypeError, ValueError
        If ``max_size`` is no integer of at least 1, or values and priorities differ in number.

    Notes
    -----
    Source: ``SampledSet`` of bobbin, which draws from NumPy's global generator.

    Examples
    --------
    >>> first = SampledSet(2, ["a", "b", "c"], [0.3, 0.9, 0.1])
    >>> list(first.union(SampledSet(2, ["d", "e"], [0.2, 0.5])))
    ['c', 'd']
    """

    max_size: int
    values: Any = ()  # sequences, which the set keeps as tuples
    priorities: Any = ()

    def __post_init__(self) -> None:
        check_integer("max_size", self.max_size, 1)
        rng = random.SystemRandom()  # ranks, copies and forked processes draw other numbers
        pairs: Iterable[tuple[float, T]] = ((rng.random(), x) for x in self.values)
        if len(self.priorities):
            pairs = zip(self.priorities, self.values, strict=True)
        # no list of all pairs: the values may not fit in memory
        smallest = heapq.nsmallest(self.max_size, pairs, key=operator.itemgetter(0))
        # not by assignment: the dataclass is frozen
        vars(self)["values"] = tuple(x for _, x in smallest)
        vars(self)["priorities"] = tuple(float(priority) for priority, _ in smallest)

    def add(self, x: T) -> SampledSet[T]:
        """Return a new set with ``x`` added."""
        return self.union([x])

    def union(self, iterable: Iterable[T]) -> SampledSet[T]:
        """Return a new set of the same ``max_size`` with all elements of another set or an iterable
        added.

        Raises ValueError for a set with a smaller ``max_size``, which may have dropped elements of
        the joint sample.
        """
        n = self.max_size
        other = iterable if isinstance(iterable, SampledSet) else SampledSet(n, iterable)
        if other.max_size < n:
            raise ValueError(
                f"a sample of at most {other.max_size} cannot be united into one of {n}; give both "
                "the same max_size"
            )
        return SampledSet(n, self.values + other.values, self.priorities + other.priorities)

    def __iter__(self) -> Iterator[T]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, x: object) -> bool:
        return x in self.values


# -- tasks ----------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

Batches = Iterable[Any] | Callable[[], Iterable[Any]]
ResultProcessor = Callable[[dict[str, EvalResults], Any], Any]


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
        raise_undefined(self, "create_eval_results(dataset_name)")

    def evaluate(self, batch: Any, *args: Any, **kwargs: Any) -> EvalResults:
        """Return the result of one batch; :func:`eval_datasets` passes its other arguments on.

        Each rank calls this for its batches only. Do not call collectives in it: ranks may have
        different numbers of batches.
        """
        raise_undefined(self, "evaluate(batch, ...)")

    def finalize_eval_results(self, results: EvalResults) -> EvalResults:
        """Return the final results, given the merged results of all ranks; by default unchanged.
        All ranks call it.
        """
        return results

    def make_cron_action(
        self,
        datasets: Mapping[str, Batches],
        *,
        tensorboard_root_path: str | os.PathLike[str] | None = None,
        comm: object = "auto",
    ) -> RunEval:
        """Return a hook that runs this task in a training loop: a :class:`RunEval`."""
        return RunEval(self, datasets, tensorboard_root_path, comm=comm)


def eval_batches(
    task: EvalTask,
    dataset_name: str,
    batches: Batches,
    *args: Any,
    comm: object = "auto",
    **kwargs: Any,
) -> Any:
    """Evaluate a task on one dataset and return its result; see :func:`eval_datasets`."""
    return eval_datasets(task, {dataset_name: batches}, *args, comm=comm, **kwargs)[dataset_name]


def eval_datasets(
    task: EvalTask,
    datasets: Mapping[str, Batches],
    *args: Any,
    comm: object = "auto",
    **kwargs: Any,
) -> dict[str, Any]:
    """Evaluate a task on several datasets and return the results by name.

    Each rank merges the results of its batches. Then every rank merges the results of all ranks, in
    rank order, so that all ranks return the same. The number of batches may differ between ranks
    and may be 0. The data are not divided for you: give each rank its part, such as
    ``batches[rank::size]``. A batch on two ranks counts twice.

    Parameters
    ----------
    task : EvalTask
    datasets : mapping of str to iterable or callable
        Batches, or a function without arguments that returns them. If the batches have a method
        ``reset()``, it is called first. All ranks must give the same names in the same order.
    *args, **kwargs
        Passed to :meth:`EvalTask.evaluate` after the batch. If the first is a model or has one (a
        loop, an estimator), the model is in evaluation mode, and its recurrent layers reset their
        state before each batch, except before a ``Minibatch`` that continues a series.
    comm : "auto", "mpi", "torch", None, a communicator or a RankGroup
        The ranks that evaluate together; see :class:`fluxutils_py.Estimator`.

    Returns
    -------
    dict of str to EvalResults
        The results by dataset name. Their tensors are on the CPU.

    Raises
    ------
    TypeError
        If ``evaluate`` returns another type than ``create_eval_results``, on its rank.
    RankError
        If the dataset names differ between ranks.
    RemoteError
        On the other ranks, if evaluation fails on one rank. The failing rank raises the original
        error.

    Notes
    -----
    Evaluation computes no gradients and restores the model's mode, its recurrent state and torch's
    random generators. It does not restore other generators: do not evaluate on the same shuffling
    dataset object that you train on.
    """
    with RankGroup.from_comm(comm, "eval_datasets") as ranks:
        # a rank with other datasets would wait in another collective for ever
        ranks.require_equal({"the datasets": list(datasets)})
        results = {}
        for name, data in datasets.items():
            own: Any = ranks.guard(_evaluate, task, name, data, args, kwargs)
            of_ranks = [own]
            if not ranks.is_single:
                # pickled here, so that a value that cannot be is an error of this rank
                pickled = ranks.allgather(ranks.guard(pickle.dumps, own))
                of_ranks = [pickle.loads(text) for text in pickled]
            merged = reduce(lambda one, other: one.reduce(other), of_ranks)
            results[name] = ranks.guard(task.finalize_eval_results, merged)
            ranks.allgather()  # has finalize_eval_results failed on any rank?
        return results


def _evaluate(
    task: EvalTask, name: str, batches: Batches, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EvalResults:
    """Return the result of the batches of this rank."""
    total = task.create_eval_results(name)
    model = None
    with suppress(IndexError, TypeError):  # the first argument is the state in a loop
        model = module_of(args[0])
    mode: Any = torch.no_grad() if model is None else evaluating(model)
    # the task may draw random numbers, which must not shift those of training
    with torch.random.fork_rng(devices=[] if model is None else gpus_of(model)), mode:
        dataset = batches() if callable(batches) else batches
        if hasattr(dataset, "reset"):
            dataset.reset()
        for batch in dataset:
            if model is not None and begins_series(batch):
                reset(model)
            result = task.evaluate(batch, *args, **kwargs)
            if not isinstance(result, type(total)):
                raise TypeError(
                    f"evaluate returned {type(result).__name__}; it must return "
                    f"{type(total).__name__}, as create_eval_results does"
                )
            total = total.reduce(result)
        # ranks may have different devices
        return tree_map(on_cpu, total)


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
    >>> from dataclasses import dataclass
    >>> from torch import nn
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

    name = "evaluation"
    collective = True

    def __init__(
        self,
        task: EvalTask,
        datasets: Mapping[str, Batches],
        tensorboard_root_path: str | os.PathLike[str] | None = None,
        *,
        comm: object = "auto",
    ) -> None:
        for name, batches in datasets.items():
            if isinstance(batches, Iterator) and not hasattr(batches, "reset"):
                raise DataError(
                    f"dataset {name!r} can be iterated over only once, and would seem empty at the "
                    "second evaluation; use a list, or a function that returns the batches"
                )
        self.task = task
        self.datasets = dict(datasets)
        self.comm = comm
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
        it may raise :class:`StopTraining`.
        """
        self._processors.append(processor)
        return self

    def keep_best_checkpoint(self, tune_on: str, dest: str | os.PathLike[str]) -> RunEvalKeepBest:
        """Return a hook that evaluates, then saves the model in folder ``dest`` if it is the best
        on one dataset.
        """
        return RunEvalKeepBest(self, tune_on, dest)

    def __call__(self, loop: Any, *_: Any, **__: Any) -> dict[str, EvalResults]:
        with ranks_of(loop, self.comm) as ranks:
            return self.run(loop, ranks)

    def run(self, loop: Any, ranks: RankGroup) -> dict[str, EvalResults]:
        """Evaluate on these ranks and call the result processors; return the results by name."""
        results = eval_datasets(self.task, self.datasets, loop, comm=ranks)
        # a processor may write files, which can fail on one rank alone
        ranks.guard(self._process_results, results, loop, ranks.rank)
        ranks.allgather()  # has a processor failed, or stopped the loop, on any rank?
        return results

    def _process_results(self, results: dict[str, EvalResults], loop: Any, rank: int) -> None:
        if rank == 0:
            for name, result in results.items():
                logger.info("step %d, %s: %s", loop.step, name, result.to_log_message())
        for processor in self._processors:
            try:
                processor(results, loop)
            except StopTraining:  # the other processors still run
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
    in the folder is better than its result says, never worse. Load the best
    model by ``model.load_state_dict(Checkpointer(dest).read()["model"])``.
    ``TrainTask.initialize_train_state`` resumes from the folder.

    Source: ``RunEvalKeepBest`` of bobbin, which returns the saved state instead of the checkpoint's
    path, and whose ranks may disagree about the best result after a restart.

    Examples
    --------
    ``CronTab().schedule(task.make_cron_action(datasets).keep_best_checkpoint("dev", "best"),
    step_interval=100)``
    """

    name = "evaluation"
    collective = True

    def __init__(self, run_eval: RunEval, tune_on: str, dest: str | os.PathLike[str]) -> None:
        if tune_on not in run_eval.datasets:
            known = [*run_eval.datasets]
            raise ValueError(f"there is no dataset {tune_on!r} to tune on; there are {known}")
        self.run_eval = run_eval
        self.tune_on = tune_on
        self.dest = Path(dest)
        self._best: EvalResults | None = None  # rank 0 alone uses it

    def __call__(self, loop: Any, *_: Any, **__: Any) -> KeepBestResults:
        with ranks_of(loop, self.run_eval.comm) as ranks:
            results = self.run_eval.run(loop, ranks)
            # rank 0 decides for all, by its file
            decide = partial(self._save_if_better, results[self.tune_on], loop)
            decided = None if ranks.rank else ranks.guard(decide)
            best, path = ranks.allgather(decided)[0]
            return KeepBestResults(results, best, path)

    def _save_if_better(self, result: EvalResults, loop: Any) -> tuple[EvalResults, Path | None]:
        """Save the model if it is the best so far; return the best result and the checkpoint."""
        path = self.dest / "results.json"
        # read late: only a result of this run tells which types the file has
        if self._best is None and path.exists():
            self._best = self._read_best(path, result)
        if self._best is not None and not result.is_better_than(self._best):
            return self._best, None
        dump_pytree_json(result)  # raise before writing anything if the result cannot be written
        optimizer = getattr(getattr(loop, "state", loop), "opt", None)
        states = {"model": module_of(loop).state_dict()}
        if optimizer is not None:
            states["optimizer"] = optimizer.state_dict()
        # the result last: a process killed in between leaves a model better than its result
        checkpoint = Checkpointer(self.dest).write(states, loop.step)
        write_pytree_json_file(path, result)
        self._best = result
        return result, checkpoint

    def _read_best(self, path: Path, result: EvalResults) -> EvalResults | None:
        """Return the best result of the folder; None, with a warning, if it cannot be read."""
        best: EvalResults
        try:
            best = read_pytree_json_file(path, result)
        except ValueError as error:
            # its sequences may have other lengths than this result's: those of no data fit all
            empty = self.run_eval.task.create_eval_results(self.tune_on)
            try:
                best = read_pytree_json_file(path, empty)
            except ValueError:
                warn(f"{error}; it is ignored, and this model counts as the best so far")
                return None
        return best


def ranks_of(loop: object, comm: object) -> RankGroup:
    """Return the ranks of a loop, or the ranks of ``comm`` for a state without ``ranks``."""
    return RankGroup.from_comm(getattr(loop, "ranks", None) or comm, "an evaluation")


# -- values of ranks -------------------------------------------------------------------------------


def assert_replica_integrity(
    tree: object,
    *,
    atol: float = 1e-5,
    rtol: float = 1e-5,
    comm: object = "auto",
) -> None:
    """Raise an error on every rank unless all ranks hold the same values. All ranks must call it.

    Parameters
    ----------
    tree : object
        A model, or nested lists, tuples and dicts of tensors, arrays and other values.
    atol, rtol : float
        Tolerance against the numbers of rank 0, as in ``numpy.testing.assert_allclose``. With 0,
        numbers must be equal to the last bit, except for the sign of zeros. NaN equals NaN.
    comm : "auto", "mpi", "torch", None or Communicator
        The processes; see :class:`fluxutils_py.Estimator`.

    Raises
    ------
    AssertionError
        If values differ; the message names ranks, path and shape of the first difference.
    RuntimeError
        In a callback of a ``fit`` on several ranks.

    Notes
    -----
    Rank 0 sends its values array by array; no rank collects all values. Source:
    ``assert_replica_integrity`` of bobbin.

    Examples
    --------
    >>> assert_replica_integrity({"weights": torch.zeros(3), "step": 5})
    """
    with RankGroup.from_comm(comm, "assert_replica_integrity", allow_nested=False) as ranks:
        leaves = [(path, value, as_tensor(value)) for path, value in named_leaves(tree)]
        # structure first: a comparison of values is a collective for each array
        outline = [(path, repr(v) if t is None else (t.shape, t.dtype)) for path, v, t in leaves]
        _require_equal(ranks.allgather(outline), ranks)
        distant = [
            f"{path} (shape {tuple(tensor.shape)})"
            for path, _, tensor in leaves
            if tensor is not None and not _is_close_to_first(tensor, ranks, atol, rtol)
        ]
        found = ranks.allgather(distant)
        if any(found):
            texts = [f"rank {rank}: {paths[0]}" for rank, paths in enumerate(found) if paths]
            message = f"replicas differ from rank 0, {'; '.join(texts)}"
            ranks.raise_on_all(AssertionError(message))


def gather_from_processes(tree: object, *, comm: object = "auto") -> list[Any]:
    """Return a list of the values of all ranks, in rank order, on every rank. All ranks must call
    it.

    Parameters
    ----------
    tree : object
        Any picklable value. Tensors come back detached, on the CPU.
    comm : "auto", "mpi", "torch", None or Communicator

    Notes
    -----
    Source: ``gather_from_jax_processes`` of bobbin.

    Examples
    --------
    >>> gather_from_processes({"loss": 0.5})
    [{'loss': 0.5}]
    """
    with RankGroup.from_comm(comm, "gather_from_processes", allow_nested=False) as ranks:
        # another rank may not have the device, and a graph cannot be pickled
        return ranks.allgather(tree_map(on_cpu, tree))


gather_from_jax_processes = gather_from_processes


def _require_equal(outlines: list[Any], ranks: RankGroup) -> None:
    for rank, other in enumerate(outlines):
        for mine, theirs in zip_longest(outlines[0], other):
            if mine != theirs:
                message = f"ranks hold different things: {mine} on rank 0, {theirs} on {rank}"
                ranks.raise_on_all(AssertionError(message))


def _is_close_to_first(t: torch.Tensor, ranks: RankGroup, atol: float, rtol: float) -> bool:
    first = t.clone()
    ranks.broadcast([first])
    exact = torch.complex128 if t.is_complex() else torch.float64
    mine, theirs = (v.to(exact).numpy() for v in (t, first))
    return np.allclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
