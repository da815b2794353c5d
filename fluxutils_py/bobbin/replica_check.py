"""Compare and gather the values that ranks hold."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from fluxutils_py.bobbin.evaluation import on_cpu
from fluxutils_py.parallel.rank_group import RankGroup
from fluxutils_py.tree import as_tensor, named_leaves, tree_map


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
