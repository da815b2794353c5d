"""Compare and gather the values that ranks hold."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from fluxutils_py.bobbin.results import on_cpu
from fluxutils_py.parallel.communicator import describe_by_rank
from fluxutils_py.parallel.rank_group import RankGroup
from fluxutils_py.tree import as_tensor, named_leaves, tree_map

__all__ = ["gather_from_jax_processes"]

PIECE = 1 << 22  # values per comparison


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
    Rank 0 sends its values piece by piece; no rank collects all values. Source:
    ``assert_replica_integrity`` of bobbin.

    Examples
    --------
    >>> assert_replica_integrity({"weights": torch.zeros(3), "step": 5})
    """
    with RankGroup.from_comm(comm, "assert_replica_integrity", allow_nested=False) as ranks:
        if ranks.is_single:
            return
        leaves = list(named_leaves(tree))
        outline = [(path, _describe_leaf(value)) for path, value in leaves]
        # structure first: a comparison of values is a collective for each array
        difference = _first_difference(ranks.allgather(outline))
        if difference is not None:
            ranks.raise_on_all(AssertionError(f"ranks hold different things: {difference}"))
        mine = _first_distant_array(leaves, ranks, atol, rtol)
        texts = enumerate(ranks.allgather(mine))
        differing = [f"rank {rank}: {text}" for rank, text in texts if text is not None]
        if differing:
            message = f"replicas differ from rank 0, {'; '.join(differing)}"
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


def _describe_leaf(value: object) -> str:
    tensor = as_tensor(value)
    return repr(value) if tensor is None else f"shape {tuple(tensor.shape)} of {tensor.dtype}"


def _first_difference(outlines: list[list[tuple[str, str]]]) -> str | None:
    """Describe the first entry that differs between ranks; None if all are equal."""
    for entries in zip_longest(*outlines):
        texts = ["nothing" if entry is None else ", ".join(entry) for entry in entries]
        if len(set(texts)) > 1:
            return describe_by_rank(texts)
    return None


def _first_distant_array(
    leaves: list[tuple[str, Any]],
    ranks: RankGroup,
    atol: float,
    rtol: float,
) -> str | None:
    """Describe this rank's first array that is too far from that of rank 0; None if there is none.

    Compares all arrays even so, since each comparison is a collective.
    """
    first = None
    for path, value in leaves:
        tensor = as_tensor(value)
        if tensor is None or not tensor.numel():
            continue
        distance = _distance_from_first(tensor, ranks, atol, rtol)
        if distance is not None and first is None:
            first = f"{path} (shape {tuple(tensor.shape)}) by {distance:.3g}"
    return first


def _distance_from_first(
    t: torch.Tensor, ranks: RankGroup, atol: float, rtol: float
) -> float | None:
    """Return the distance of this rank's values from those of rank 0; None within the tolerance."""
    exact = torch.complex128 if t.is_complex() else torch.float64
    worst = None
    # in pieces: the copies in float64 of a large layer would not fit in memory
    for piece in t.reshape(-1).split(PIECE):
        first = piece.clone()
        ranks.broadcast([first])
        mine = piece.to(exact).numpy()
        theirs = first.to(exact).numpy()
        if not np.allclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True):
            # NaN on both ranks is equal; on one alone it is infinitely far
            different = ~(np.isnan(mine) & np.isnan(theirs))
            distance = np.abs(mine - theirs)[different]
            distance[np.isnan(distance)] = np.inf
            worst = max(worst or 0.0, float(distance.max()))
    return worst
