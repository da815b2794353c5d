"""Torch's global random generators, borrowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.RLock()


@contextmanager
def seeded(seed: int, devices: Sequence[Any] = ()) -> Iterator[None]:
    """Inside, torch's global generators start from ``seed``; afterwards they are as they were.

    Dropout and the initial weights of layers come from these, which all threads share. So one thread at a time is let
    in, and others wait: tools that fit in threads, as scikit-learn's do when one with ``n_jobs`` is inside another,
    get the numbers that they would get one after another. It may be nested.

    Parameters
    ----------
    seed : int
    devices : sequence of torch.device or int
        CUDA devices whose generators are borrowed too.

    Examples
    --------
    >>> with seeded(1):
    ...     a = torch.rand(2)
    >>> with seeded(1):
    ...     assert torch.equal(torch.rand(2), a)
    """
    with _lock, torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield
