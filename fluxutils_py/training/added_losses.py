"""Losses that a model adds as it computes, such as penalties on parameters or activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["add_loss", "get_losses"]

# Of a context, not of the process: the threads that divide a batch each have their own list.
_losses: ContextVar[list[Tensor] | None] = ContextVar("losses added in this step", default=None)


def add_loss(loss: Tensor) -> None:
    """Add a term to the loss of the current step, both to the optimized and to the reported loss.

    Call it in the ``forward`` of a model, any number of times. Evaluation includes the term too.

    Parameters
    ----------
    loss : Tensor
        Term of any shape; its mean is added.

    Raises
    ------
    RuntimeError
        Outside a step of a :class:`Trainer`, where it would have no effect; also in a thread that
        the model started.

    Notes
    -----
    Source: ``AddLoss`` of gomlx.

    Examples
    --------
    >>> import torch
    >>> class Penalized(torch.nn.Linear):
    ...     def forward(self, x):
    ...         add_loss(0.01 * self.weight.square().sum())
    ...         return super().forward(x)
    """
    added = _losses.get()
    if added is None:
        raise RuntimeError(
            "add_loss has no effect outside a step of a Trainer: call it in the model"
        )
    added.append(loss.mean())


def get_losses() -> Tensor | None:
    """Return the sum of the losses that :func:`add_loss` added in this step; None without any."""
    added = _losses.get()
    return sum(added[1:], added[0]) if added else None


@contextmanager
def collected_losses() -> Iterator[None]:
    """Begin a step in which :func:`add_loss` and :func:`get_losses` work, separate from others."""
    token = _losses.set([])
    try:
        yield
    finally:
        _losses.reset(token)
