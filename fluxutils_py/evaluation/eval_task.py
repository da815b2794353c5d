"""Evaluating a model on data: what to compute of a batch, and how to come from batches and ranks to one result."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fluxutils_py.evaluation.results import EvalResults, raise_undefined
from fluxutils_py.nn.parameters import module_of
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.minibatch import begins_series
from fluxutils_py.tree import tree_map

if TYPE_CHECKING:
    from fluxutils_py.evaluation.run_eval import RunEval

T = TypeVar("T")
Batches = Iterable[Any] | Callable[[], Iterable[Any]]


class EvalTask:
    """Base of what is to be found out about a model: how to begin, what a batch gives, how to end.

    Notes
    -----
    Source: ``EvalTask`` of bobbin, where ranks without a batch evaluate None.

    Examples
    --------
    >>> from dataclasses import dataclass
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

    def make_cron_action(self, datasets: Mapping[str, Batches], *, comm: Any = "auto") -> RunEval:
        """This task as an action of a training loop, see :class:`RunEval`."""
        from fluxutils_py.evaluation.run_eval import RunEval  # which is built on tasks

        return RunEval(self, datasets, comm=comm)


def eval_batches(
    task: EvalTask,
    dataset_name: str,
    batches: Batches,
    *args: Any,
    comm: Any = "auto",
    ranks: RankGroup | None = None,
    **kwargs: Any,
) -> EvalResults:
    """The result of a task over batches; of one dataset what :func:`eval_datasets` gives for several."""
    return eval_datasets(task, {dataset_name: batches}, *args, comm=comm, ranks=ranks, **kwargs)[dataset_name]


def eval_datasets(
    task: EvalTask,
    datasets: Mapping[str, Batches],
    *args: Any,
    comm: Any = "auto",
    ranks: RankGroup | None = None,
    **kwargs: Any,
) -> dict[str, EvalResults]:
    """The results of a task over several datasets, by name.

    Each rank merges the results of its own batches; what the ranks have found is then merged in their order, on each
    of them, so that all have the same. Numbers of batches may differ, and be 0. Nobody divides the data: give each rank
    its own, such as ``batches[rank::size]``; what two ranks have counts twice.

    Parameters
    ----------
    task : EvalTask
    datasets : mapping of str to iterable or callable
        Batches, or a function without arguments that returns them. ``batches.reset()`` is called first, if there is
        such a method. The same names in the same order on all ranks.
    *args, **kwargs
        For :meth:`EvalTask.evaluate`, behind the batch. If the first is a model, or has one (a loop, an estimator),
        that is in evaluation mode meanwhile. Its recurrent layers forget their state before each batch, but for a
        ``Minibatch`` that is not the first of its series.
    comm : "auto", "mpi", "torch", None or Communicator
        Which ranks; see :class:`fluxutils_py.Estimator`.
    ranks : RankGroup, optional
        Of a loop that runs: its ranks, instead of ``comm``.

    Returns
    -------
    dict of str to EvalResults
        With tensors in main memory.

    Raises
    ------
    TypeError
        On every rank, if on one of them the task returns something else than the results that it creates.
    RankError
        If ranks have different datasets.
    RemoteError
        On the other ranks, if evaluation fails on one, which raises its own error.

    Notes
    -----
    Evaluation leaves no trace: there are no gradients, and the model's mode and recurrent state, and torch's random
    generators, are afterwards as before. Other generators are not looked after: a dataset that shuffles should not be
    one that is trained on.
    """
    with resolve_ranks(comm, ranks, "eval_datasets") as ranks:
        ranks.require_equal({"the datasets": list(datasets)})
        return {name: _evaluated(task, name, batches, args, kwargs, ranks) for name, batches in datasets.items()}


def resolve_ranks(comm: Any, ranks: RankGroup | None, call: str) -> AbstractContextManager[RankGroup]:
    """The ranks that work together: those of a loop that runs, else those of ``comm``."""
    return RankGroup.from_comm(comm, call) if ranks is None else nullcontext(ranks)


def _evaluated(
    task: EvalTask, name: str, batches: Batches, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: RankGroup
) -> EvalResults:
    """The result of all ranks, on all."""
    pack, unpack = (_same, _same) if ranks.is_single else (pickle.dumps, pickle.loads)

    def own() -> tuple[Any, str | None]:
        try:
            return pack(_folded(task, name, batches, args, kwargs)), None
        except _WrongTypeError as error:  # all ranks shall raise it, not only this one
            return None, str(error)

    def merged(parts: list[Any]) -> EvalResults:
        total = unpack(parts[0])
        for part in parts[1:]:
            total = _reduced(total, unpack(part))
        return _checked(task.finalize_eval_results(total), EvalResults, "finalize_eval_results")

    told = ranks.allgather(ranks.guard(own))
    wrong = [error if ranks.is_single else f"rank {rank}: {error}" for rank, (_, error) in enumerate(told) if error]
    if wrong:
        ranks.raise_on_all(TypeError("; ".join(wrong)))
    found = ranks.guard(merged, [part for part, _ in told])
    ranks.allgather()
    assert found is not None
    return found


def _folded(task: EvalTask, name: str, batches: Batches, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EvalResults:
    """The result of the batches of this rank."""
    total = _checked(task.create_eval_results(name), EvalResults, "create_eval_results")
    kind, model = type(total), _model_of(args)
    with evaluation_mode(model):
        found = batches() if callable(batches) else batches
        if hasattr(found, "reset"):
            found.reset()
        for batch in found:
            if model is not None and begins_series(batch):
                reset(model)
            total = _reduced(total, _checked(task.evaluate(batch, *args, **kwargs), kind, "evaluate"))
        return tree_map(lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v, total)


class _WrongTypeError(TypeError):
    pass


def _checked(value: Any, kind: type[EvalResults], method: str) -> Any:
    if isinstance(value, kind):
        return value
    raise _WrongTypeError(f"{method} returned {type(value).__name__}; it must return {kind.__name__}")


def _reduced(one: EvalResults, other: EvalResults) -> EvalResults:
    return _checked(one.reduce(other), type(one), f"{type(one).__name__}.reduce")


def _same(value: T) -> T:
    return value


def _model_of(args: tuple[Any, ...]) -> nn.Module | None:
    """The first argument, if it is a model, or what it is a state of."""
    try:
        return module_of(args[0])
    except (IndexError, TypeError):
        return None


@contextmanager
def evaluation_mode(model: nn.Module | None) -> Iterator[None]:
    """Inside there are no gradients, and a model is in evaluation mode; torch's generators and it are put back."""
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"} if model is not None else ()
    with torch.random.fork_rng(devices=list(gpus)), torch.no_grad() if model is None else evaluating(model):
        yield
