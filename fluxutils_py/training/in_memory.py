"""Datasets in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import ShapeError
from fluxutils_py.training.dataset import as_dataset, join_batches, n_batches
from fluxutils_py.training.generator_state import (
    get_generator_state,
    set_generator_state,
    start_epoch_order,
)
from fluxutils_py.training.minibatch import Minibatch, as_tuple
from fluxutils_py.validation import check_integer


class InMemory:
    """Dataset of arrays or tensors, split along their first axis into batches.

    Parameters
    ----------
    inputs, labels : array, Tensor, or tuple of them
        Each of shape (n_examples, ...). Arrays become tensors that share their memory.
    batchsize : int
        Number of examples per batch.
    shuffle : bool
        Draw a new order for each pass.
    replacement : bool
        With ``shuffle``: draw examples with replacement, so a pass may repeat some and omit others.
    infinite : bool
        Start another pass at the end of each, for ``run_steps``.
    drop_last : bool
        Drop a smaller last batch.
    random_state : int or numpy.random.Generator, optional
        Seed or generator of the orders.
    kind, name
        As in :class:`Dataset`.

    Raises
    ------
    ShapeError
        If inputs and labels differ in their number of examples, or do not fill a batch.
    ValueError
        If ``replacement`` is given without ``shuffle``.

    Notes
    -----
    Source: ``InMemory`` of gomlx ``data``.

    Examples
    --------
    >>> [tuple(batch.inputs[0].shape) for batch in InMemory(torch.zeros(7, 2), batchsize=3)]
    [(3, 2), (3, 2), (1, 2)]
    """

    def __init__(
        self,
        inputs: object,
        labels: object = (),
        *,
        batchsize: int,
        shuffle: bool = False,
        replacement: bool = False,
        infinite: bool = False,
        drop_last: bool = False,
        random_state: int | np.random.Generator | None = None,
        kind: object = None,
        name: str = "in memory",
    ) -> None:
        self.inputs = tuple(torch.as_tensor(v) for v in as_tuple(inputs))
        self.labels = tuple(torch.as_tensor(v) for v in as_tuple(labels))
        if replacement and not shuffle:
            raise ValueError("replacement=True draws examples at random: set shuffle=True too")
        self.batchsize = check_integer("batchsize", batchsize, 1)
        self.shuffle = shuffle
        self.replacement = replacement
        self.infinite = infinite
        self.drop_last = drop_last
        self.kind = kind
        self.name = name
        self.rng = np.random.default_rng(random_state)
        sizes = [len(v) for v in (*self.inputs, *self.labels)]
        if not sizes or len(set(sizes)) > 1 or not sizes[0]:
            raise ShapeError(
                f"inputs and labels must have equally many examples, at least 1, got {sizes}"
            )
        self.n = sizes[0]
        self._began: dict[str, Any] | None = None  # generator state at the start of the last pass
        if not self._per_pass():
            raise ShapeError(
                f"{self.n} examples make no batch of {self.batchsize}; set drop_last=False"
            )

    @classmethod
    def from_dataset(
        cls, dataset: Iterable[Any], *, batched: bool = True, **settings: Any
    ) -> InMemory:
        """Store one pass over a finite dataset in memory; ``settings`` are parameters of
        :class:`InMemory`.

        ``batched`` says whether an item of the dataset is a batch of examples, or else one example.

        Raises
        ------
        DataError
            If the dataset has no batches, or batches of several kinds or with weights.
        """
        data = as_dataset(dataset)
        batches = list(data)
        data.reset()  # the pass is over, for whoever reads it next
        joined = join_batches(batches, torch.cat if batched else torch.stack)
        # what the caller gives comes first
        settings.setdefault("kind", joined.kind)
        settings.setdefault("name", data.name)
        return cls(joined.inputs, joined.labels, **settings)

    def _per_pass(self) -> int:
        return n_batches(self.n, self.batchsize, self.drop_last)

    def __len__(self) -> int:
        if self.infinite:  # the error of len() for what has no length, which a loop expects
            raise TypeError(f"dataset {self.name!r} is infinite: it has no length")
        return self._per_pass()

    def __iter__(self) -> Iterator[Minibatch]:
        return self.skip(0)

    def skip(self, n: int) -> Iterator[Minibatch]:
        # To skip within a pass is to repeat its order: the generator goes back to its start.
        self._began = start_epoch_order(self.rng, self._began, n)
        for chosen in islice(self._batch_indices(), n, None):
            yield Minibatch(
                tuple(v[chosen] for v in self.inputs),
                tuple(v[chosen] for v in self.labels),
                self.kind,
            )

    def _batch_indices(self) -> Iterator[Any]:
        """Return an iterator over the examples of each batch, as indices or a slice."""
        # Lazily: each order is drawn when its pass begins, and an infinite dataset has no end.
        passes = count() if self.infinite else range(1)
        orders = (self._draw_order() for _ in passes)
        starts = range(0, self._per_pass() * self.batchsize, self.batchsize)
        cuts = [slice(start, start + self.batchsize) for start in starts]
        return chain.from_iterable(
            (cut if order is None else order[cut] for cut in cuts) for order in orders
        )

    def _draw_order(self) -> Tensor | None:
        if not self.shuffle:
            return None
        if self.replacement:
            order = self.rng.integers(self.n, size=self.n)
        else:
            order = self.rng.permutation(self.n)
        return torch.from_numpy(order)

    def reset(self) -> None:
        """Do nothing: each pass starts at the first batch."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": get_generator_state(self.rng), "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_generator_state(self.rng, state["rng"])
        self._began = state["began"]
