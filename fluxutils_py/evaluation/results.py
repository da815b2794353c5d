"""Results of evaluations that can be merged, compared, shown and saved."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Self

from fluxutils_py.tree import as_tensor, unshard


@dataclass(frozen=True)
class EvalResults:
    """Base of the results of evaluating some data: a frozen dataclass whose values can be merged with others.

    A subclass is a ``@dataclass(frozen=True)`` too. If its fields hold numbers, tensors, arrays, strings, and lists,
    tuples and mappings of them, it can be written to JSON and read back: see
    :func:`fluxutils_py.treejson.write_pytree_json`. It is pickled for other ranks: its class stands at the top of a
    module.

    What a subclass defines: :meth:`reduce` always; :meth:`is_better_than` to keep the best model;
    :meth:`write_to_tensorboard` to be written there.

    Raises
    ------
    TypeError
        When one is made of a subclass that is no dataclass itself.

    Notes
    -----
    Results are merged in the order of the batches, those of a rank before those of the next; :meth:`reduce` must be
    associative, but need not be commutative. Source: ``EvalResults`` of bobbin.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Accuracy(EvalResults):
    ...     right: int = 0
    ...     n: int = 0
    ...
    ...     def reduce(self, other):
    ...         return Accuracy(self.right + other.right, self.n + other.n)
    ...
    ...     def is_better_than(self, other):
    ...         return self.right * other.n > other.right * self.n
    >>> merged = Accuracy(3, 4).reduce(Accuracy(5, 8))
    >>> merged.to_log_message()
    'right 8, n 12'
    >>> merged.is_better_than(Accuracy(1, 2))
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "__dataclass_fields__" not in cls.__dict__:  # it has those of its base, and its own would be passed over
            raise TypeError(f"{cls.__name__} is a subclass of EvalResults: write @dataclass(frozen=True) above it")
        return super().__new__(cls)

    def reduce(self, other: Self) -> Self:
        """The results of the data of both, this one's coming first."""
        raise_undefined(self, "reduce(other)", "merges two results")

    def unshard_and_reduce(self) -> Self:
        """Merge results that lie one after the other along a leading axis of every value, as ``tpmap`` gives them.

        Raises
        ------
        ShapeError
            If a value has no leading axis, or they differ in length.
        """
        return functools.reduce(lambda one, other: one.reduce(other), unshard(self))

    def is_better_than(self, other: Self) -> bool:
        """Whether the model of these results is to be kept rather than that of others, of the same data.

        A comparison with NaN is False: for a model whose loss is NaN to give way to the next, write
        ``self.loss < other.loss or other.loss != other.loss``.
        """
        raise_undefined(self, "is_better_than(other)", "says which of two is better")

    def to_log_message(self) -> str:
        """A line for the log; by default the fields, arrays by their shapes."""
        return ", ".join(f"{f.name} {_shown(getattr(self, f.name))}" for f in fields(self))

    def write_to_tensorboard(self, state: Any, writer: Any) -> None:
        """Write to a summary writer what shall be seen there, at step ``state.step``."""
        raise_undefined(self, "write_to_tensorboard(state, writer)", "writes results to a summary writer")


def raise_undefined(thing: Any, method: str, what: str) -> NoReturn:
    """Raise the error of a base class's method that a subclass ought to have replaced."""
    raise NotImplementedError(f"{type(thing).__name__} does not define {method}, which {what}")


def _shown(value: Any) -> str:
    numbers = as_tensor(value)
    if numbers is None:
        return str(value)
    if numbers.numel() != 1:
        return f"of shape {tuple(numbers.shape)}"
    number = numbers.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)
