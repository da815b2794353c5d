"""Divide the state that several ranks saved over another number of ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.errors import LoadError
from fluxutils_py.nn.recurrent import State, map_state
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.parallel.communicator import mean_of_buffers as mean_of_buffers  # as states are


def reshard(
    thing: object,
    states: Sequence[Any],
    rank: int,
    size: int,
) -> Any:
    """Return the state of ``thing`` for one of ``size`` ranks, from its states on the ranks that
    saved it.

    Uses ``thing.reshard_state_dict(states, rank, size)`` if there is such a method, else
    :func:`state_of_rank`.

    Notes
    -----
    torch.distributed.checkpoint calls this load-time resharding.
    """
    method = getattr(thing, "reshard_state_dict", None)
    return state_of_rank(states, rank) if method is None else method(states, rank, size)


def state_of_rank(states: Sequence[Any], rank: int) -> Any:
    """Return the state that this rank saved; that of rank 0 if there was no such rank."""
    return states[rank if rank < len(states) else 0]


def require_shared_batches(batches: str | None, n_saved: int, size: int) -> None:
    """Raise :class:`LoadError` if each rank has its own batches, since their states cannot be
    divided anew.
    """
    if batches == "per_rank":
        raise LoadError(
            f"the checkpoint is of {n_saved} rank{'s' * (n_saved > 1)} with separate batches "
            f"(batches='per_rank'), and here {size} {'are' if size > 1 else 'is'}: start as many"
        )


def reshard_rows(
    model: nn.Module,
    states: Sequence[Sequence[State | None]],
    rank: int,
    size: int,
) -> list[State | None]:
    """Return this rank's rows of recurrent states, from the states that each rank saved for its own
    rows.

    Parameters
    ----------
    model : nn.Module
    states : sequence over ranks
        For each rank, in rank order, the state of each recurrent layer as of :func:`snapshot`;
        None, or nothing at all, from ranks without rows. Rows of consecutive ranks follow each
        other in the minibatch. Sensitivities are divided alike.
    rank, size : int
        The rank gets rows as in ``numpy.array_split``; None if it gets none.
    """
    known = [part for part in states if part]  # ranks without rows saved nothing
    layers = recurrent_layers(model) if known else []
    rows: list[State | None] = []
    for layer, of_ranks in zip(layers, zip(*known, strict=True), strict=True):
        parts = [s for s in of_ranks if s is not None]
        whole = layer.joined(parts) if parts else None
        rows.append(None)
        if whole is not None:
            first = whole if isinstance(whole, Tensor) else whole[0]
            share = array_split_slice(first.shape[layer.batch_dim], size, rank)
            # else there are more ranks than rows
            if share.start < share.stop:
                where = (slice(None),) * layer.batch_dim + (share,)
                rows[-1] = map_state(operator.itemgetter(where), whole)
    return rows
