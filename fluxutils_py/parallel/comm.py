"""Who takes part in a fit: so far one process, rank 0 of 1."""

from __future__ import annotations

from typing import Protocol


class Communicator(Protocol):
    """What the training loop asks of the processes it runs on."""

    rank: int
    size: int


class SoloComm:
    """One process: rank 0 of 1."""

    rank = 0
    size = 1


def get_communicator(comm: object) -> Communicator:
    """The communicator that an estimator's ``comm`` argument names.

    ``"auto"`` and None are one process. Training over several ranks is not part of this version.

    Raises
    ------
    NotImplementedError
        For ``"mpi"``, ``"torch"`` or a communicator of more than one rank.
    ValueError
        For anything else.
    """
    if comm is None or comm == "auto":
        return SoloComm()
    if comm in ("mpi", "torch") or getattr(comm, "size", 1) != 1:
        raise NotImplementedError(f"comm={comm!r}: this version trains in one process; use comm='auto' or None")
    if hasattr(comm, "rank") and hasattr(comm, "size"):
        return comm
    raise ValueError(f"comm must be 'auto', None, 'mpi', 'torch' or a communicator, got {comm!r}")
