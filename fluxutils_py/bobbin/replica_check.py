"""Compare and gather the values that ranks hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fluxutils_py.parallel.communicator import describe_by_rank
from fluxutils_py.parallel.rank_group import RankGroup
from fluxutils_py.tree import as_tensor, named_leaves, tree_map

__all__ = ["gather_from_jax_processes"]

PIECE = 1 << 22  # values per comparison


def assert_replica_integrity(
    tree: Any, *, atol: float = 1e-5, rtol: float = 1e-5, comm: Any = "auto"
) -> None:
    """Raise an error on every rank unless all ranks hold the same values. All ranks must call it.

    Parameters
    ----------
    tree : Any
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
        found = [(path, value, as_tensor(value)) for path, value in named_leaves(tree)]
        outline = [
            (p, repr(v) if t is None else f"shape {tuple(t.shape)} of {t.dtype}")
            for p, v, t in found
        ]
        for difference in _first_difference(ranks.allgather(outline)):
            ranks.raise_on_all(AssertionError(f"ranks hold different things: {difference}"))
        worst: tuple[str, str, float] | None = None
        for path, _, t in found:
            if (
                t is not None
                and t.numel()
                and (far := _distance_from_first(t, ranks, atol, rtol)) is not None
            ):
                worst = worst or (path, f"shape {tuple(t.shape)}", far)
        differing = {
            rank: answer for rank, answer in enumerate(ranks.allgather(worst)) if answer is not None
        }
        if differing:
            text = "; ".join(
                f"rank {r}: {path} ({shape}) by {far:.3g}"
                for r, (path, shape, far) in differing.items()
            )
            ranks.raise_on_all(AssertionError(f"replicas differ from rank 0, {text}"))


def gather_from_processes(tree: Any, *, comm: Any = "auto") -> list[Any]:
    """Return a list of the values of all ranks, in rank order, on every rank. All ranks must call
    it.

    Parameters
    ----------
    tree : Any
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
        return ranks.allgather(
            tree_map(lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v, tree)
        )


gather_from_jax_processes = gather_from_processes


def _first_difference(outlines: list[list[tuple[str, str]]]) -> list[str]:
    """Describe the first entry that differs between ranks; empty if all are equal."""
    for i in range(max(map(len, outlines))):
        entries = [f"{o[i][0]}, {o[i][1]}" if i < len(o) else "nothing" for o in outlines]
        if len(set(entries)) > 1:
            return [describe_by_rank(entries)]
    return []


def _distance_from_first(
    t: torch.Tensor, ranks: RankGroup, atol: float, rtol: float
) -> float | None:
    """Return the distance of this rank's values from rank 0's values; None if within the tolerance."""
    worst, flat = None, t.reshape(-1)
    for piece in flat.split(PIECE):
        first = piece.clone()
        ranks.broadcast([first])
        a, b = (
            v.to(torch.complex128 if v.is_complex() else torch.float64).numpy()
            for v in (piece, first)
        )
        if not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            far = np.abs(a - b)
            worst = max(
                worst or 0.0,
                float(np.where(np.isnan(far), np.inf, far)[~((a != a) & (b != b))].max()),
            )
    return worst
