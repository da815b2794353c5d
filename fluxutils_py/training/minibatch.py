"""One batch of inputs and labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

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
        Always tuples, also of one. Labels may be none.
    kind : hashable or anything with a repr, optional
        What kind of batch it is, for models that treat kinds apart. A :class:`Trainer` keeps one executor for each.
    weight : float or Tensor, optional
        How much the batch counts in means over several, or what its elements weigh (0: not at all); the latter can be
        broadcast to an unreduced loss. Of a window ``(S, B, 1)``, or ``(S, B, G)`` where single outputs are missing.
    first : bool, optional
        Whether it begins a group of series, so that recurrent layers forget their state before it. None: it does not
        say, see ``stateful`` of :class:`GradientStep`.
    index : WindowIndex, optional
        Of a window: where it lies. Its tensors are ``(S, B, F)``.
    n_live : float
        Of a window: steps that count.
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
        """The inputs as a loss over windows wants them: a tuple only for several."""
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs

    @property
    def y(self) -> Any:
        """The labels in the same way."""
        return self.labels[0] if len(self.labels) == 1 else self.labels

    def shard(self, rank: int, size: int, axis: int = 0) -> Minibatch | None:
        """A rank's share of the examples or series, see :func:`shard`; None if that is none."""
        axis = axis if self.index is None else 1
        weight = self.weight if isinstance(self.weight, Tensor) else None
        whole = self.inputs, self.labels, weight
        part = shard(whole, rank, size, axis)
        if part is None:
            return None
        inputs, labels, weight = part
        n_whole = n_observations(whole, axis)
        if self.weight is not None and weight is None:
            weight = self.weight * n_observations(part, axis) / n_whole
        index = self.index
        if index is not None:
            index = replace(index, segments=index.segments[array_split_slice(n_whole, size, rank)])
        return replace(self, inputs=inputs, labels=labels, weight=weight, index=index, n_live=0)


def as_minibatch(item: Any, kind: Any = None) -> Minibatch:
    """A :class:`Minibatch` of what an iterable gives.

    Parameters
    ----------
    item : Minibatch, Tensor, tuple or list
        A pair is inputs and labels, a triple inputs, labels and weight, each of the first two a tensor or a tuple of
        them; anything else, such as a tensor or a mapping, is an input without labels.
    kind : hashable, optional
        Of what is no minibatch yet.

    Raises
    ------
    DataError
        For a tuple of another length.
    """
    if isinstance(item, Minibatch):
        return item
    if not isinstance(item, tuple | list):
        return Minibatch((item,), (), kind)
    if len(item) not in (1, 2, 3):
        raise DataError(
            f"a batch is (inputs,), (inputs, labels) or (inputs, labels, weight), got {len(item)} things; put several "
            "inputs or labels into tuples of their own"
        )
    labels = as_tuple(item[1]) if len(item) > 1 else ()
    return Minibatch(as_tuple(item[0]), labels, kind, item[2] if len(item) > 2 else None)


def begins_series(batch: Any, stateful: bool = False) -> bool:
    """Whether recurrent layers forget their state before a batch: as its ``first`` says, else unless ``stateful``."""
    first = getattr(batch, "first", None)
    return first if isinstance(first, bool) else not stateful


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A tuple or list as a tuple, anything else as a tuple of one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)
