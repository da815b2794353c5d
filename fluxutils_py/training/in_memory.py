"""Examples in memory as batches, and their mean and scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.training.dataset import as_dataset
from fluxutils_py.training.generator_state import get_generator_state, set_generator_state, start_epoch_order
from fluxutils_py.training.minibatch import Minibatch, as_tuple
from fluxutils_py.validation import check_integer


class InMemory:
    """Arrays or tensors, cut along their first axis into batches.

    Parameters
    ----------
    inputs, labels : array, Tensor, or tuple of them
        All with equally many examples. Arrays become tensors that share their memory.
    batchsize : int
    shuffle : bool
        Draw a new order for each pass.
    replacement : bool
        With ``shuffle``: draw each example independently of the others, so that a pass may have one several times and
        leave others out.
    infinite : bool
        Go on with another pass instead of ending: for ``run_steps``.
    drop_last : bool
        Leave out a last batch that is smaller.
    random_state : int or numpy.random.Generator, optional
        Where the orders come from.
    kind, name
        As in :class:`Dataset`.

    Raises
    ------
    ShapeError
        If they differ in their number of examples, or have none.
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
        inputs: Any,
        labels: Any = (),
        *,
        batchsize: int,
        shuffle: bool = False,
        replacement: bool = False,
        infinite: bool = False,
        drop_last: bool = False,
        random_state: Any = None,
        kind: Any = None,
        name: str = "in memory",
    ) -> None:
        self.inputs = tuple(torch.as_tensor(v) for v in as_tuple(inputs))
        self.labels = tuple(torch.as_tensor(v) for v in as_tuple(labels))
        if replacement and not shuffle:
            raise ValueError("replacement=True draws examples at random: set shuffle=True too")
        self.batchsize, self.shuffle, self.replacement = check_integer("batchsize", batchsize, 1), shuffle, replacement
        self.infinite, self.drop_last, self.kind, self.name = infinite, drop_last, kind, name
        self.rng = np.random.default_rng(random_state)
        sizes = [len(v) for v in (*self.inputs, *self.labels)]
        if not sizes or len(set(sizes)) > 1 or not sizes[0]:
            raise ShapeError(f"inputs and labels must have equally many examples, at least 1, got {sizes}")
        self.n = sizes[0]
        self._began: dict[str, Any] | None = None  # the generator at the beginning of the last pass
        if not self._per_pass():
            raise ShapeError(f"{self.n} examples make no batch of {self.batchsize}; set drop_last=False")

    @classmethod
    def from_dataset(cls, dataset: Iterable[Any], **settings: Any) -> InMemory:
        """One pass over a finite dataset, kept in memory; ``settings`` are those of the class.

        Raises
        ------
        DataError
            If the dataset has no batches, or batches of several kinds or with weights.
        """
        data = as_dataset(dataset)
        batches = list(data)
        data.reset()
        if not batches or any(b.kind != batches[0].kind or b.weight is not None for b in batches):
            raise DataError(
                f"dataset {data.name!r} must have batches of one kind, without weights, to be kept in memory; it has "
                f"{len(batches)} batches"
            )
        inputs, labels = (
            tuple(torch.cat([torch.as_tensor(v) for v in values]) for values in zip(*parts, strict=True))
            for parts in ([b.inputs for b in batches], [b.labels for b in batches])
        )
        return cls(inputs, labels, **{"kind": batches[0].kind, "name": data.name, **settings})

    def _per_pass(self) -> int:
        return self.n // self.batchsize if self.drop_last else -(-self.n // self.batchsize)

    def __len__(self) -> int:
        if self.infinite:
            raise TypeError(f"dataset {self.name!r} is infinite: it has no length")
        return self._per_pass()

    def __iter__(self) -> Iterator[Minibatch]:
        return self.skip(0)

    def skip(self, n: int) -> Iterator[Minibatch]:
        self._began = start_epoch_order(self.rng, self._began, n)
        for chosen in islice(self._choices(), n, None):
            yield Minibatch(tuple(v[chosen] for v in self.inputs), tuple(v[chosen] for v in self.labels), self.kind)

    def _choices(self) -> Iterator[Any]:
        """Which examples are in each batch."""
        passes = (self._order() for _ in (count() if self.infinite else range(1)))
        cuts = [slice(i * self.batchsize, (i + 1) * self.batchsize) for i in range(self._per_pass())]
        return chain.from_iterable((cut if order is None else order[cut] for cut in cuts) for order in passes)

    def _order(self) -> Tensor | None:
        if not self.shuffle:
            return None
        if self.replacement:
            return torch.from_numpy(self.rng.integers(self.n, size=self.n))
        return torch.from_numpy(self.rng.permutation(self.n))

    def reset(self) -> None:
        """Nothing to do: each pass begins anew."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": get_generator_state(self.rng), "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_generator_state(self.rng, state["rng"])
        self._began = state["began"]


def normalization(dataset: Iterable[Any], index: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of an input over a finite dataset, per feature.

    Parameters
    ----------
    dataset : iterable of batches
        What :func:`as_dataset` takes; it is gone through once.
    index : int
        Which of the inputs.

    Returns
    -------
    mean, std : Tensor of shape (F,), float64
        Over all axes but the last. Features that are constant have a standard deviation of 1, so that one can divide
        by it.

    Notes
    -----
    Source: ``Normalization`` of gomlx ``data``.

    Examples
    --------
    >>> normalization(InMemory(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), batchsize=1))
    (tensor([2., 5.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    data, n = as_dataset(dataset), 0
    mean, square = torch.zeros(()), torch.zeros(())
    for batch in data:
        x = torch.as_tensor(batch.inputs[index]).double()
        x = x.reshape(-1, x.shape[-1])
        n += len(x)
        delta = x.mean(0) - mean  # Chan et al. (1979): parts are joined without cancellation
        mean = mean + delta * len(x) / n
        square = square + (x - x.mean(0)).square().sum(0) + delta.square() * len(x) * (n - len(x)) / n
    data.reset()
    if not n:
        raise DataError(f"dataset {data.name!r} has no batches: there is no mean")
    std = (square / n).sqrt()
    return mean, torch.where(std > 0, std, 1.0)
