"""Seed torch's global random generators for a while, and put them back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_lock = threading.RLock()


@contextmanager
def seeded(seed: int, devices: Sequence[Any] = ()) -> Iterator[None]:
    """Start torch's global generators from ``seed`` inside the block, and restore them afterwards.

    Dropout and the initial weights of layers draw from these generators, which all threads share.
    So one thread at a time may enter, and the others wait: fits in several threads, as scikit-learn
    runs them when one search with ``n_jobs`` is inside another, draw the numbers that they would
    draw one after another. Blocks may be nested.

    Parameters
    ----------
    seed : int
    devices : sequence of torch.device or int
        CUDA devices whose generators are seeded and restored too.

    Examples
    --------
    >>> with seeded(1):
    ...     a = torch.rand(2)
    >>> with seeded(1):
    ...     assert torch.equal(torch.rand(2), a)
    """
    with _lock, torch.random.fork_rng(devices=list(devices)):
        if not _built_for_devices():
            # There is no other generator. torch.manual_seed would keep, for each kind of device
            # that may come later, the seed and the formatted stack: a millisecond, and memory that
            # is not given back.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


def gpus_of(model: nn.Module) -> list[torch.device]:
    """Return the CUDA devices of a model, whose generators its calls may draw from."""
    devices = {p.device for p in model.parameters()}
    return [device for device in devices if device.type == "cuda"]


def _built_for_devices() -> bool:
    """Tell whether torch may know others than the CPU, without waking a driver: processes can still
    be forked.
    """
    return torch.accelerator.current_accelerator() is not None
