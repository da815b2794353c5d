"""Check what a loss and its model give before a gradient is taken."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
OWN_BATCHES = "set batches='per_rank', or use nn.LayerNorm"  # the remedy for ranks
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def require_no_batch_norm(model: nn.Module, workers: str, remedy: str) -> None:
    """Raise ValueError if a model in training mode normalises over a batch that workers divide."""
    for name, module in model.named_modules():
        # In evaluation mode it uses stored statistics, and changes nothing.
        if isinstance(module, BATCH_NORMS) and module.training:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) normalises over the whole minibatch, which is "
                f"divided over {workers}: {remedy}"
            )


@contextlib.contextmanager
def watching_modules(check: Callable[[nn.Module], None]) -> Iterator[Callable[[], None]]:
    """Call ``check(module)`` before a module runs in a thread that has called the function yielded
    here.

    So modules are found whose parameters alone were given. An error of ``check`` ends the call
    before the module runs.
    """
    watched: set[int] = set()

    # The hook is global, for modules of every thread; only threads that have asked are watched.
    def before(module: nn.Module, inputs: object) -> None:
        if threading.get_ident() in watched:
            check(module)

    handle = nn.modules.module.register_module_forward_pre_hook(before)
    try:
        yield lambda: watched.add(threading.get_ident())
    finally:
        handle.remove()


def call_without_batch_norm(
    compute: Callable[[Any], T],
    batch: object,
    workers: str,
    remedy: str,
) -> T:
    """Return ``compute(batch)``; raise ValueError before a module runs that normalises over a
    divided batch.
    """

    def check(module: nn.Module) -> None:
        require_no_batch_norm(module, workers, remedy)

    with watching_modules(check) as watch:
        watch()
        return compute(batch)


def as_params(params: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a module, or the given parameters, as a list."""
    return list(params.parameters() if isinstance(params, nn.Module) else params)
