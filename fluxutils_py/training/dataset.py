"""Datasets: passes over batches of inputs and labels from any iterable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.data import BackgroundDataLoader
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.training.generator_state import (
    get_generator_state,
    set_generator_state,
    start_epoch_order,
)
from fluxutils_py.training.loop import iterate_from
from fluxutils_py.training.minibatch import Minibatch, as_minibatch, as_tuple
from fluxutils_py.validation import check_integer

__all__ = ["Dataset"]

Pass = Iterator[Minibatch]


class Dataset:
    """Passes over the batches of any iterable: an iteration is one pass of :class:`Minibatch`.

    An object of yours with ``name``, ``kind``, ``reset()`` and iteration is a dataset as well.
    ``__len__`` is the number of batches in a pass. To resume in the middle of a pass it may have
    ``skip(n)``, an iterator over a pass without its first ``n`` batches, and ``state_dict`` and
    ``load_state_dict``, which restore the order of the pass. This class stores torch's default
    generator and ``data.generator`` for that.

    Source: ``Dataset`` of gomlx ``train``.
    """

    def __init__(self, data: object, name: str, kind: object = None) -> None:
        self.data: Any = data
        self.name = name
        self.kind = kind
        self._spent = False  # whether an iterator, which has only one pass, was used
        self._began: dict[str, Any] | None = None  # generator states at the start of the last pass

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Pass:
        return self.skip(0)

    def skip(self, n: int) -> Pass:
        """Return an iterator over one pass without its first ``n`` batches."""
        if self._spent:
            raise DataError(
                f"dataset {self.name!r} is a {type(self.data).__name__}, which can be iterated "
                "over only once; give a list, or an object that can be iterated over again"
            )
        # a list can be read again, an iterator is used up
        self._spent = isinstance(self.data, Iterator)
        generators = {"default": torch.default_generator}
        if (generator := getattr(self.data, "generator", None)) is not None:
            generators["own"] = generator
        # When skipping, the default generator is set back to the pass's start, but only here.
        with torch.random.fork_rng(devices=[], enabled=n > 0):
            if n and self._began is not None:
                for name, g in generators.items():
                    set_generator_state(g, self._began[name])
            self._began = {name: get_generator_state(g) for name, g in generators.items()}
            rest = iterate_from(self.data, n)
        return (
            replace(batch, kind=self.kind if batch.kind is None else batch.kind)
            for batch in map(as_minibatch, rest)
        )

    def reset(self) -> None:
        """Start again at the first batch: nothing to do, as each pass does."""

    def state_dict(self) -> dict[str, Any]:
        generator = getattr(self.data, "generator", None)
        # as loaders of torchdata have it
        inner = getattr(self.data, "state_dict", None)
        return {
            "began": self._began,
            "own": None if generator is None else get_generator_state(generator),
            "data": None if inner is None else inner(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._began = state["began"]
        if state["own"] is not None:
            set_generator_state(self.data.generator, state["own"])
        if state["data"] is not None:
            self.data.load_state_dict(state["data"])


def as_dataset(data: Any, name: str | None = None, kind: object = None) -> Any:
    """Return ``data`` as a :class:`Dataset`, unchanged if it is one.

    Parameters
    ----------
    data : iterable
        Items that :func:`as_minibatch` takes: a list, a ``torch.utils.data.DataLoader``,
        ``TensorBatches``.
    name : str, optional
        By default the name of its class.
    kind : hashable, optional
        Kind of the batches that have none.
    """
    if all(hasattr(data, part) for part in ("name", "kind", "reset", "__iter__")):
        return data
    return Dataset(data, name or type(data).__name__, kind)


class _PassThrough(Dataset):
    """Another dataset, each pass of which goes through a function: ``through(rest, n)`` gets the
    source's pass from item ``n * size`` on.
    """

    def __init__(
        self,
        source: object,
        through: Callable[[Iterator[Any], int], Pass],
        size: int = 1,
        length: Callable[[int], int] = int,
    ) -> None:
        data = as_dataset(source)
        super().__init__(data, data.name, data.kind)
        self._through = through
        self._size = size
        self._length = length

    def __len__(self) -> int:
        return self._length(len(self.data))

    def skip(self, n: int) -> Pass:
        return self._through(iterate_from(self.data, n * self._size), n)

    def reset(self) -> None:
        self.data.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict() if hasattr(self.data, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.data, "load_state_dict"):  # a user's own may have no state
            self.data.load_state_dict(state)


def Take(source: object, n: int) -> Dataset:
    """Return the first ``n`` batches of each pass over another dataset, which may be infinite.

    Examples
    --------
    >>> [batch.inputs for batch in Take(range(100), 3)]
    [(0,), (1,), (2,)]
    """

    def through(rest: Pass, skipped: int) -> Pass:
        return islice(rest, max(n - skipped, 0))

    return _PassThrough(source, through, length=lambda known: min(n, known))


def Map(
    source: object, fn: Callable[[Minibatch], Any], *, workers: int = 0, ordered: bool = True
) -> Dataset:
    """Return a dataset with ``fn`` applied to each batch of another; ``fn`` returns a
    :class:`Minibatch` or its parts.

    With ``workers`` above 0, ``fn`` runs ahead in that many threads; the order of the batches stays
    the same. With ``ordered=False`` a batch comes as soon as it is ready; such a pass cannot be
    resumed in its middle.

    Examples
    --------
    >>> [batch.inputs for batch in Map([1, 2], lambda batch: 10 * batch.inputs[0])]
    [(10,), (20,)]
    """

    def apply(batch: Minibatch) -> Minibatch:
        return as_minibatch(fn(batch), batch.kind)

    def ahead(rest: Pass) -> Pass:
        # a slow batch then does not leave the others idle
        options: Any = {"n": 2 * workers, "workers": workers, "ordered": ordered}
        with BackgroundDataLoader.map(apply, rest, **options) as loader:
            yield from loader

    def through(rest: Pass, skipped: int) -> Pass:
        if not workers:
            return map(apply, rest)
        if skipped and not ordered:
            raise DataError(
                "a dataset that yields batches as they become ready cannot be resumed within a "
                "pass; set ordered=True"
            )
        return ahead(rest)

    return _PassThrough(source, through)


def Batch(
    source: object, batchsize: int, *, stack: bool = True, drop_last: bool = False
) -> Dataset:
    """Return a dataset of batches of ``batchsize`` items of another, whose items are single
    examples.

    Parameters
    ----------
    source : dataset
    batchsize : int
    stack : bool
        False: items are batches already, joined along their first axis, so that a batch holds more
        of them.
    drop_last : bool
        Drop a smaller last batch.

    Raises
    ------
    DataError
        In a pass, if items of a batch have weights or differ in their kind.

    Notes
    -----
    Source: ``Batch`` of gomlx ``data``.

    Examples
    --------
    >>> examples = [(torch.tensor([i]), torch.tensor(i)) for i in range(5)]
    >>> [batch.y.tolist() for batch in Batch(examples, 2)]
    [[0, 1], [2, 3], [4]]
    """
    join = torch.stack if stack else torch.cat

    def through(rest: Pass, skipped: int) -> Pass:
        while items := list(islice(rest, batchsize)):
            if len(items) == batchsize or not drop_last:
                yield join_batches(items, join)

    return _PassThrough(source, through, batchsize, lambda n: n_batches(n, batchsize, drop_last))


def ReadAhead(source: object, n: int = 1, *, device: str | torch.device | None = None) -> Dataset:
    """Return a dataset that reads another in a background thread, up to ``n`` batches ahead; on a
    device, if you name one.
    """

    def through(rest: Pass, skipped: int) -> Pass:
        if device is not None:
            rest = (batch.to(device) for batch in rest)
        # One worker: an iterator cannot be shared, and the order stays.
        with BackgroundDataLoader(lambda: next(rest), n, workers=1) as ahead:
            yield from ahead

    return _PassThrough(source, through)


def n_batches(n: int, batchsize: int, drop_last: bool) -> int:
    """Return into how many batches ``n`` examples divide, with or without a smaller last one."""
    return n // batchsize if drop_last else -(-n // batchsize)  # rounded up


def join_batches(items: Sequence[Minibatch], join: Callable[[list[Tensor]], Tensor]) -> Minibatch:
    """Join batches to one, tensor by tensor.

    Raises
    ------
    DataError
        If there are none, or they have weights or differ in their kind.
    """
    if len({repr(item.kind) for item in items}) != 1 or any(i.weight is not None for i in items):
        raise DataError(
            f"batches to be joined must be of one kind, without weights; got {len(items)} of them"
        )

    def joined(parts: list[tuple[Any, ...]]) -> tuple[Tensor, ...]:
        columns = zip(*parts, strict=True)
        return tuple(join([torch.as_tensor(v) for v in column]) for column in columns)

    inputs = joined([item.inputs for item in items])
    return replace(items[0], inputs=inputs, labels=joined([item.labels for item in items]))


# -- in memory -------------------------------------------------------------------------------------


class InMemory(Dataset):
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
        super().__init__(None, name, kind)
        self.rng = np.random.default_rng(random_state)
        sizes = [len(v) for v in (*self.inputs, *self.labels)]
        if not sizes or len(set(sizes)) > 1 or not sizes[0]:
            raise ShapeError(
                f"inputs and labels must have equally many examples, at least 1, got {sizes}"
            )
        self.n = sizes[0]
        self._per_pass = n_batches(self.n, self.batchsize, drop_last)
        if not self._per_pass:
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

    def __len__(self) -> int:
        if self.infinite:  # the error of len() for what has no length, which a loop expects
            raise TypeError(f"dataset {self.name!r} is infinite: it has no length")
        return self._per_pass

    def skip(self, n: int) -> Pass:
        # To skip within a pass is to repeat its order: the generator goes back to its start.
        self._began = start_epoch_order(self.rng, self._began, n)
        # Lazily: each order is drawn when its pass begins, and an infinite dataset has no end.
        passes = count() if self.infinite else range(1)
        orders = (self._draw_order() for _ in passes)
        starts = range(0, self._per_pass * self.batchsize, self.batchsize)
        cuts = [slice(start, start + self.batchsize) for start in starts]
        indices = ((cut if order is None else order[cut] for cut in cuts) for order in orders)
        for chosen in islice(chain.from_iterable(indices), n, None):
            yield Minibatch(
                tuple(v[chosen] for v in self.inputs),
                tuple(v[chosen] for v in self.labels),
                self.kind,
            )

    def _draw_order(self) -> Tensor | None:
        if not self.shuffle:
            return None
        if self.replacement:
            return torch.from_numpy(self.rng.integers(self.n, size=self.n))
        return torch.from_numpy(self.rng.permutation(self.n))

    def state_dict(self) -> dict[str, Any]:
        return {"rng": get_generator_state(self.rng), "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_generator_state(self.rng, state["rng"])
        self._began = state["began"]
