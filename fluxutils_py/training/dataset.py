"""Datasets: passes over batches of inputs and labels from any iterable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fluxutils_py.data import BackgroundDataLoader
from fluxutils_py.errors import DataError
from fluxutils_py.training.generator_state import get_generator_state, set_generator_state
from fluxutils_py.training.loop import iterate_from, known_length
from fluxutils_py.training.minibatch import Minibatch, as_minibatch
from fluxutils_py.validation import check_integer

__all__ = ["Dataset"]


@runtime_checkable
class Dataset(Protocol):
    """Protocol of the data of a :class:`Loop` and a :class:`Trainer`: an iteration is one pass of
    :class:`Minibatch`.

    Optional methods: ``__len__``, the number of batches in a pass. To resume in the middle of a
    pass: ``skip(n)``, an iterator over a pass without its first ``n`` batches, and ``state_dict``
    and ``load_state_dict``, which restore the order of the pass. Source: ``Dataset`` of gomlx
    ``train``.
    """

    name: str
    kind: Any

    def __iter__(self) -> Iterator[Minibatch]: ...

    def reset(self) -> None:
        """Start again at the first batch. The loop calls this after every epoch."""


def as_dataset(data: object, name: str | None = None, kind: object = None) -> Dataset:
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
    if isinstance(data, Dataset):
        return data
    return _IterableDataset(data, name or type(data).__name__, kind)


def n_batches(n: int, batchsize: int, drop_last: bool) -> int:
    """Return into how many batches ``n`` examples divide, with or without a smaller last one."""
    return n // batchsize if drop_last else -(-n // batchsize)  # rounded up


def join_tensors(
    items: Sequence[tuple[Any, ...]], join: Callable[[list[Tensor]], Tensor]
) -> tuple[Tensor, ...]:
    """Join the tensors that several batches have at the same place."""
    columns = zip(*items, strict=True)
    return tuple(join([torch.as_tensor(v) for v in column]) for column in columns)


class _DerivedDataset:
    """Base class of datasets that wrap another dataset."""

    def __init__(self, source: object, name: str | None = None) -> None:
        self.source = as_dataset(source)
        self.name = name or self.source.name
        self.kind = self.source.kind

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # a TypeError, if it has none, is right

    def __iter__(self) -> Iterator[Minibatch]:
        return self.skip(0)

    def skip(self, n: int) -> Iterator[Minibatch]:
        """Return an iterator over one pass without its first ``n`` batches."""
        raise NotImplementedError

    def reset(self) -> None:
        self.source.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict() if hasattr(self.source, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.source, "load_state_dict"):  # a list, for example, has no state
            self.source.load_state_dict(state)


class _IterableDataset:
    """Dataset over any iterable. To repeat a pass, it stores torch's default generator and
    ``data.generator``.
    """

    def __init__(self, data: object, name: str, kind: object) -> None:
        if not isinstance(data, Iterable):
            raise TypeError(f"a dataset must be iterable, got {type(data).__name__}")
        self.data: Any = data
        self.name = name
        self.kind = kind
        self._spent = False  # whether an iterator, which has only one pass, was used
        self._began: dict[str, Any] | None = None  # generator states at the start of the last pass

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Minibatch]:
        return self.skip(0)

    def skip(self, n: int) -> Iterator[Minibatch]:
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
        return self._minibatches(rest)

    def _minibatches(self, rest: Iterator[Any]) -> Iterator[Minibatch]:
        for item in rest:
            batch = as_minibatch(item)
            if batch.kind is None and self.kind is not None:
                batch = replace(batch, kind=self.kind)
            yield batch

    def reset(self) -> None:
        """Do nothing: each pass starts at the first batch."""

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


class Take(_DerivedDataset):
    """The first ``n`` batches of each pass over another dataset, which may be infinite.

    Examples
    --------
    >>> [batch.inputs for batch in Take(range(100), 3)]
    [(0,), (1,), (2,)]
    """

    def __init__(self, source: object, n: int, name: str | None = None) -> None:
        super().__init__(source, name)
        self.n = check_integer("n", n, 0)

    def __len__(self) -> int:
        length = known_length(self.source)
        return self.n if length is None else min(self.n, length)

    def skip(self, n: int) -> Iterator[Minibatch]:
        return islice(iterate_from(self.source, n), max(self.n - n, 0))


class Map(_DerivedDataset):
    """Dataset with ``fn`` applied to each batch of another; ``fn`` returns a :class:`Minibatch` or
    its parts.

    With ``workers`` above 0, ``fn`` runs ahead in that many threads; the order of the batches stays
    the same. With ``ordered=False`` a batch comes as soon as it is ready; such a pass cannot be
    resumed in its middle.

    Examples
    --------
    >>> [batch.inputs for batch in Map([1, 2], lambda batch: 10 * batch.inputs[0])]
    [(10,), (20,)]
    """

    def __init__(
        self,
        source: object,
        fn: Callable[[Minibatch], Any],
        *,
        workers: int = 0,
        ordered: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name)
        self.fn = fn
        self.workers = check_integer("workers", workers, 0)
        self.ordered = ordered

    def skip(self, n: int) -> Iterator[Minibatch]:
        if n and self.workers and not self.ordered:
            raise DataError(
                f"dataset {self.name!r} yields batches as they become ready: which {n} were seen "
                "before is unknown; set ordered=True to resume a pass"
            )
        return self._mapped(n)  # not a generator itself: the error comes at the call

    def _mapped(self, n: int) -> Iterator[Minibatch]:
        rest = iterate_from(self.source, n)
        if not self.workers:
            yield from map(self._apply_fn, rest)
            return
        n_ahead = 2 * self.workers  # a slow batch then does not leave the others idle
        with BackgroundDataLoader.map(
            self._apply_fn, rest, n=n_ahead, workers=self.workers, ordered=self.ordered
        ) as ahead:
            yield from ahead

    def _apply_fn(self, batch: Minibatch) -> Minibatch:
        return as_minibatch(self.fn(batch), batch.kind)


class Batch(_DerivedDataset):
    """Dataset of batches of ``batchsize`` items of another, whose items are single examples.

    Parameters
    ----------
    source : dataset
    batchsize : int
    stack : bool
        False: items are batches already, joined along their first axis, so that a batch holds more
        of them.
    drop_last : bool
        Drop a smaller last batch.
    name : str, optional

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

    def __init__(
        self,
        source: object,
        batchsize: int,
        *,
        stack: bool = True,
        drop_last: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name)
        self.batchsize = check_integer("batchsize", batchsize, 1)
        self.stack = stack
        self.drop_last = drop_last

    def __len__(self) -> int:
        return n_batches(super().__len__(), self.batchsize, self.drop_last)

    def skip(self, n: int) -> Iterator[Minibatch]:
        rest = iterate_from(self.source, n * self.batchsize)  # the source counts examples
        while items := list(islice(rest, self.batchsize)):
            if len(items) == self.batchsize or not self.drop_last:
                yield self._joined(items)

    def _joined(self, items: list[Minibatch]) -> Minibatch:
        first = items[0]
        if any(item.weight is not None or item.kind != first.kind for item in items):
            raise DataError(
                f"items of dataset {self.name!r} must be of one kind and without weights to make a "
                "batch"
            )
        join = torch.stack if self.stack else torch.cat
        inputs = join_tensors([item.inputs for item in items], join)
        labels = join_tensors([item.labels for item in items], join)
        return replace(first, inputs=inputs, labels=labels)


class ReadAhead(_DerivedDataset):
    """Dataset that reads another in a background thread, up to ``n`` batches ahead; on a device, if
    you name one.
    """

    def __init__(
        self,
        source: object,
        n: int = 1,
        name: str | None = None,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(source, name)
        self.n = check_integer("n", n, 1)
        self.device = device

    def skip(self, n: int) -> Iterator[Minibatch]:
        rest = iterate_from(self.source, n)
        if self.device is not None:
            rest = (batch.to(self.device) for batch in rest)
        # One worker: an iterator cannot be shared, and the order stays.
        with BackgroundDataLoader(lambda: next(rest), self.n, workers=1) as ahead:
            yield from ahead
