"""One batch of inputs and labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.data.sequence_windows import WindowIndex
from fluxutils_py.errors import DataError
from fluxutils_py.training.sharding import n_observations, shard

__all__ = ["Minibatch", "as_minibatch"]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """A batch of examples, or a window of several series.

    Attributes
    ----------
    inputs, labels : tuple of Tensor
        Always tuples, even of one tensor. Labels may be empty.
    kind : hashable or anything with a repr, optional
        Kind of batch, for models that treat kinds differently. A :class:`Trainer` keeps one
        executor for each.
    weight : float or Tensor, optional
        Float: weight of the batch in means over several. Tensor: weights of its elements,
        broadcastable to an unreduced loss; 0 excludes an element. For windows ``(S, B, 1)``, or
        ``(S, B, G)`` if single outputs are missing.
    first : bool, optional
        Whether it begins a group of series, so that recurrent layers forget their state before it.
        None: see ``stateful`` of :class:`GradientStep`.
    index : WindowIndex, optional
        For windows: the place in the data. Tensors of windows are ``(S, B, F)``.
    n_live : float
        For windows: number of steps that count.
    """

    inputs: tuple[Any, ...]
    labels: tuple[Any, ...] = ()
    kind: Any = None
    weight: Any = None
    first: bool | None = None
    index: WindowIndex | None = None
    n_live: float = 0

    @property
    def x(self) -> Any:
        """Inputs as a loss over windows takes them: one tensor, or a tuple of several."""
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs

    @property
    def y(self) -> Any:
        """Labels as a loss over windows takes them: one tensor, or a tuple of several."""
        return self.labels[0] if len(self.labels) == 1 else self.labels

    def to(self, device: str | torch.device) -> Minibatch:
        """Return the batch with its tensors and modules on a device."""
        return replace(
            self,
            inputs=tuple(_move_to(v, device) for v in self.inputs),
            labels=tuple(_move_to(v, device) for v in self.labels),
            # a number has no device and stays
            weight=_move_to(self.weight, device),
        )

    def shard(self, rank: int, size: int, axis: int = 0) -> Minibatch | None:
        """Return a rank's share of the examples or series, None if empty; see :func:`shard`."""
        if self.index is not None:
            axis = 1  # windows are (S, B, F)
        # a number belongs to the whole batch, see below
        weight = self.weight if isinstance(self.weight, Tensor) else None
        whole = self.inputs, self.labels, weight
        part = shard(whole, rank, size, axis)
        if part is None:
            return None
        inputs, labels, weight = part
        n_whole = n_observations(whole, axis)
        if self.weight is not None and weight is None:  # a number, of the whole batch
            weight = self.weight * n_observations(part, axis) / n_whole
        index = self.index
        if index is not None:  # the place of this rank's series
            rows = array_split_slice(n_whole, size, rank)
            index = replace(index, segments=index.segments[rows])
        return replace(
            self,
            inputs=inputs,
            labels=labels,
            weight=weight,
            index=index,
            n_live=0,  # not known of a part
        )


def as_minibatch(item: object, kind: object = None) -> Minibatch:
    """Convert an item of a dataset to a :class:`Minibatch`.

    Parameters
    ----------
    item : Minibatch, Tensor, tuple or list
        A tuple or list is ``(inputs,)``, ``(inputs, labels)`` or ``(inputs, labels, weight)``:
        tensors or tuples of tensors. Anything else, such as a tensor or a mapping, is an input
        without labels.
    kind : hashable, optional
        Kind of the batch; ignored for a Minibatch.

    Raises
    ------
    DataError
        If a tuple has another length.
    """
    if isinstance(item, Minibatch):
        return item
    if not isinstance(item, tuple | list):
        return Minibatch((item,), (), kind)
    if len(item) not in (1, 2, 3):
        raise DataError(
            f"a batch is (inputs,), (inputs, labels) or (inputs, labels, weight), got {len(item)} "
            "entries; give several inputs or labels as a tuple"
        )
    labels = as_tuple(item[1]) if len(item) > 1 else ()
    weight = item[2] if len(item) > 2 else None
    return Minibatch(as_tuple(item[0]), labels, kind, weight)


def begins_series(batch: object, stateful: bool = False) -> bool:
    """Return whether recurrent layers forget their state before a batch: its ``first``, else ``not
    stateful``.
    """
    first = getattr(batch, "first", None)
    # a data frame has a method of this name
    return first if isinstance(first, bool) else not stateful


def require_parts(batch: Minibatch) -> None:
    """Raise DataError or ValueError unless a batch has all parts that a model needs."""
    index = batch.index
    if index is not None and (
        index.n_overlap or index.next_start is not None or not index.has_loss
    ):
        raise DataError(
            "windows with overlap or burn_in need a WindowStep, which an Estimator trains with"
        )
    if not batch.inputs:
        raise ValueError("the batch has no inputs; a model needs at least one")
    if any(v is None for v in (*batch.inputs, *batch.labels)):
        raise ValueError(
            "an input or label of the batch is None; leave it out, and give such batches another "
            "kind"
        )


def require_same_arity(
    batch: Minibatch,
    sizes: tuple[int, int],
    earlier: tuple[int, int],
) -> None:
    """Raise ValueError if a batch has other numbers of inputs and labels than earlier batches of
    its kind.
    """
    if sizes != earlier:
        raise ValueError(
            f"kind {batch.kind!r} came with {earlier[0]} inputs and {earlier[1]} labels before, "
            f"now with {sizes[0]} and {sizes[1]}; give batches of another kind another name"
        )


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return a tuple or list as a tuple, anything else as a tuple of one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _move_to(value: Any, device: str | torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor | nn.Module) else value
