"""The base class of evaluation results: merge, compare, log and save them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Self

from fluxutils_py.tree import as_tensor, unshard


@dataclass(frozen=True)
class EvalResults:
    """Base class of evaluation results: a frozen dataclass that merges with results of other data.

    Decorate each subclass with ``@dataclass(frozen=True)``. If its fields hold numbers, tensors,
    arrays, strings, and lists, tuples and mappings of them,
    :func:`fluxutils_py.bobbin.treejson.write_pytree_json` writes it to JSON. Ranks exchange results
    by pickle, so define the class at the top level of a module.

    A subclass must define :meth:`reduce`. Define :meth:`is_better_than` to keep the best model, and
    :meth:`write_to_tensorboard` to write results to TensorBoard.

    Raises
    ------
    TypeError
        If the class of the new object is not itself a dataclass.

    Notes
    -----
    Results merge in batch order within a rank, then in rank order. :meth:`reduce` must be
    associative; it need not be commutative. Source: ``EvalResults`` of bobbin.

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
        if (
            "__dataclass_fields__" not in cls.__dict__
        ):  # it would inherit the base's fields and ignore new ones
            raise TypeError(
                f"{cls.__name__} is a subclass of EvalResults: write @dataclass(frozen=True) above "
                "it"
            )
        return super().__new__(cls)

    def reduce(self, other: Self) -> Self:
        """Return the results of both data; the data of ``self`` come first."""
        raise_undefined(self, "reduce(other)", "merges two results")

    def unshard_and_reduce(self) -> Self:
        """Merge results that are stacked along the leading axis of every value, as ``tpmap``
        returns them.

        Raises
        ------
        ShapeError
            If a value has no leading axis, or the axes differ in length.
        """
        return functools.reduce(lambda one, other: one.reduce(other), unshard(self))

    def is_better_than(self, other: Self) -> bool:
        """Return whether this result is better than another result of the same data, so that its
        model is kept.

        Comparisons with NaN are False. To let the next result replace a NaN loss, write
        ``self.loss < other.loss or other.loss != other.loss``.
        """
        raise_undefined(self, "is_better_than(other)", "says which of two is better")

    def to_log_message(self) -> str:
        """Return a line for the log; by default the fields, with shapes instead of arrays."""
        return ", ".join(f"{f.name} {_format_value(getattr(self, f.name))}" for f in fields(self))

    def write_to_tensorboard(self, state: Any, writer: Any) -> None:
        """Write the results to a summary writer, at step ``state.step``."""
        raise_undefined(
            self, "write_to_tensorboard(state, writer)", "writes results to a summary writer"
        )


def raise_undefined(thing: Any, method: str, what: str) -> NoReturn:
    """Raise NotImplementedError for a method that the subclass must define."""
    raise NotImplementedError(f"{type(thing).__name__} does not define {method}, which {what}")


def _format_value(value: Any) -> str:
    numbers = as_tensor(value)
    if numbers is None:
        return str(value)
    if numbers.numel() != 1:
        return f"of shape {tuple(numbers.shape)}"
    number = numbers.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)
