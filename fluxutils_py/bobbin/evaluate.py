"""Evaluate a task on batches and merge the results of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fluxutils_py.bobbin.results import EvalResults
from fluxutils_py.nn.parameters import module_of
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.minibatch import begins_series
from fluxutils_py.tree import tree_map

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


def eval_batches(
    task: Any, dataset_name: str, batches: Batches, *args: Any, comm: Any = "auto", **kwargs: Any
) -> Any:
    """Evaluate a task on one dataset and return its result; see :func:`eval_datasets`."""
    return eval_datasets(task, {dataset_name: batches}, *args, comm=comm, **kwargs)[dataset_name]


def eval_datasets(
    task: Any, datasets: Mapping[str, Batches], *args: Any, comm: Any = "auto", **kwargs: Any
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
        On every rank, if ``evaluate`` returns another type than ``create_eval_results`` on any
        rank.
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
        ranks.require_equal({"the datasets": list(datasets)})
        return {
            name: _evaluate_and_merge(task, name, batches, args, kwargs, ranks)
            for name, batches in datasets.items()
        }


def _evaluate_and_merge(
    task: Any,
    name: str,
    batches: Batches,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: RankGroup,
) -> EvalResults:
    """Return the merged result of all ranks, on every rank."""

    def evaluate_own() -> tuple[Any, str | None]:
        try:
            result = _evaluate_batches(task, name, batches, args, kwargs)
            return result if ranks.is_single else pickle.dumps(result), None
        except _WrongTypeError as error:  # all ranks raise it below, not only this one
            return None, str(error)

    def reduce_all(results: list[Any]) -> EvalResults:
        total, *others = results if ranks.is_single else map(pickle.loads, results)
        for other in others:
            total = _reduce_results(total, other)
        return _check_type(task.finalize_eval_results(total), EvalResults, "finalize_eval_results")

    gathered = ranks.allgather(ranks.guard(evaluate_own))
    wrong = [
        error if ranks.is_single else f"rank {rank}: {error}"
        for rank, (_, error) in enumerate(gathered)
        if error
    ]
    if wrong:
        ranks.raise_on_all(TypeError("; ".join(wrong)))
    total = ranks.guard(reduce_all, [result for result, _ in gathered])
    ranks.allgather()
    assert total is not None
    return total


def _evaluate_batches(
    task: Any, name: str, batches: Batches, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EvalResults:
    """Return the result of the batches of this rank."""
    total = _check_type(task.create_eval_results(name), EvalResults, "create_eval_results")
    kind, model = type(total), _model_of(args)
    with evaluation_mode(model):
        dataset = batches() if callable(batches) else batches
        if hasattr(dataset, "reset"):
            dataset.reset()
        for batch in dataset:
            if model is not None and begins_series(batch):
                reset(model)
            total = _reduce_results(
                total, _check_type(task.evaluate(batch, *args, **kwargs), kind, "evaluate")
            )
        return tree_map(lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v, total)


class _WrongTypeError(TypeError):
    pass


def _check_type(value: Any, kind: type[EvalResults], method: str) -> Any:
    if isinstance(value, kind):
        return value
    raise _WrongTypeError(
        f"{method} returned {type(value).__name__}; it must return {kind.__name__}"
    )


def _reduce_results(one: EvalResults, other: EvalResults) -> EvalResults:
    return _check_type(one.reduce(other), type(one), f"{type(one).__name__}.reduce")


def _model_of(args: tuple[Any, ...]) -> nn.Module | None:
    """Return the first argument if it is a model, else its model, else None."""
    try:
        return module_of(args[0])
    except (IndexError, TypeError):
        return None


@contextmanager
def evaluation_mode(model: nn.Module | None) -> Iterator[None]:
    """Disable gradients and evaluate; restore torch's generators and the model's mode and state on
    exit.
    """
    gpus = (
        {p.device for p in model.parameters() if p.device.type == "cuda"}
        if model is not None
        else ()
    )
    with (
        torch.random.fork_rng(devices=list(gpus)),
        torch.no_grad() if model is None else evaluating(model),
    ):
        yield
