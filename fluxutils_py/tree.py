"""Trees of nested dicts, lists, tuples, named tuples and dataclasses, with arrays and other values
as leaves.

Dicts keep their order. Every other value is a leaf, including None. A module counts as its
``state_dict`` where a tree is only read, and as a leaf where a tree is rebuilt. See
:mod:`fluxutils_py.bobbin` to write trees to files.

Source: ``var_util``, ``array_util`` and ``pmap_util`` of bobbin, whose dicts are sorted by flax.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError

__all__ = [
    "flatten_leading_axes",
    "flatten_with_paths",
    "named_leaves",
    "nested_vars_to_paths",
    "split_leading_axis",
    "summarize_shape",
    "total_dimensionality",
    "tree_map",
    "unshard",
]

IsLeaf = Callable[[Any], bool]


def is_sequence(node: object) -> bool:
    """Whether the node is a list, or a tuple without names."""
    if isinstance(node, tuple):
        return not hasattr(node, "_fields")
    return isinstance(node, list)


def children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, index or field name; None for a leaf."""
    if isinstance(node, nn.Module):
        return dict(node.state_dict())
    if isinstance(node, Mapping):
        return dict(node)
    if is_sequence(node):
        return dict(enumerate(node))
    if isinstance(node, tuple):
        # public in spite of the name, which leaves all others to the fields
        names = node._fields  # type: ignore[attr-defined]
        return dict(zip(names, node, strict=True))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return None


def rebuild(node: Any, values: Iterable[Any]) -> Any:
    """Return a container like ``node`` with other values, in the order of its :func:`children`.

    Copies a dataclass and sets its fields, frozen or not, without calling ``__init__`` or
    ``__post_init__``. Other mappings and modules become dicts, other tuples plain tuples.
    """
    if is_sequence(node):
        return list(values) if isinstance(node, list) else tuple(values)
    if isinstance(node, tuple):
        return type(node)(*values)
    named = dict(zip(children(node) or {}, values, strict=True))
    if isinstance(node, nn.Module | Mapping):
        return named
    new = copy.copy(node)
    for name, value in named.items():
        # the setter of a frozen dataclass refuses
        object.__setattr__(new, name, value)
    return new


def flatten_with_paths(
    tree: object, pathsep: str = "/", is_leaf: IsLeaf | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf, in order.

    A path has one separator and key per level, so it begins with the separator; the path of a tree
    that is a leaf is empty. Keys are written with ``str``, without escaping separators inside them:
    choose a separator that no key contains where paths must be unique.

    Parameters
    ----------
    tree : Any
    pathsep : str
    is_leaf : callable, optional
        ``is_leaf(node)`` says whether to treat a container as a leaf.

    Examples
    --------
    >>> list(flatten_with_paths({"a": [1, 2], "b": None}))
    [('/a/0', 1), ('/a/1', 2), ('/b', None)]
    """
    items = _inner(tree, is_leaf)
    if items is None:
        yield "", tree
        return
    for key, value in items.items():
        for path, leaf in flatten_with_paths(value, pathsep, is_leaf):
            yield f"{pathsep}{key}{path}", leaf


def named_leaves(tree: object) -> Iterator[tuple[str, Any]]:
    """Yield leaves like :func:`flatten_with_paths`, with paths that do not begin with the
    separator.

    >>> list(named_leaves({"a": [1, 2], "b": 3}))
    [('a/0', 1), ('a/1', 2), ('b', 3)]
    """
    for path, leaf in flatten_with_paths(tree):
        yield path[1:], leaf


def nested_vars_to_paths(tree: object, pathsep: str = "/", is_leaf: IsLeaf | None = None) -> Any:
    """Replace each leaf by its path; for the arguments see `flatten_with_paths`.

    A module becomes a dict.

    >>> nested_vars_to_paths({"params": (1, {"w": 2})}, pathsep=".")
    {'params': ('.params.0', {'w': '.params.1.w'})}
    """
    # both walks have one order, so that the paths come as the leaves do
    paths = (path for path, _ in flatten_with_paths(tree, pathsep, is_leaf))

    def fill(node: Any) -> Any:
        items = _inner(node, is_leaf)
        if items is None:
            return next(paths)
        return rebuild(node, map(fill, items.values()))

    return fill(tree)


def _inner(node: Any, is_leaf: IsLeaf | None) -> dict[Any, Any] | None:
    """Return the children of a node; None if it is, or counts as, a leaf."""
    if is_leaf is not None and is_leaf(node):
        return None
    return children(node)


def tree_map(f: Callable[..., Any], *trees: Any) -> Any:
    """Apply ``f`` to the leaves of trees with equal structure; None and modules are leaves.

    Raises ValueError if keys, lengths or fields of the trees differ.

    >>> tree_map(lambda a, b: a + b, (1, {"k": [2]}), (10, {"k": [20]}))
    (11, {'k': [22]})
    """
    first = trees[0]
    # a module cannot be rebuilt from what children() gives
    if isinstance(first, nn.Module) or (items := children(first)) is None:
        return f(*trees)
    columns = [items]
    for i, tree in enumerate(trees[1:], 1):
        other = children(tree)
        if other is None or other.keys() != items.keys():
            text = "a leaf" if other is None else f"one of {list(other)}"
            raise ValueError(
                f"tree_map: tree 0 has a container of {list(items)} where tree {i} has {text}"
            )
        columns.append(other)
    # by key: the order of another dict may differ
    values = [tree_map(f, *(column[key] for column in columns)) for key in items]
    return rebuild(first, values)


def as_tensor(value: object) -> Tensor | None:
    """Return a numeric leaf as a detached tensor in main memory; None for any other leaf."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic | int | float | complex):
        array = np.asarray(value)
        if array.dtype.kind in "fiubc":
            # torch rejects foreign byte order and warns of read-only memory
            native = array.dtype.newbyteorder("=")
            return torch.as_tensor(np.require(array, native, ["C", "W"]))
    return None


def _shape(leaf: object) -> tuple[int, ...] | None:
    """Return the shape of an array, () for a number, None for anything else."""
    if isinstance(leaf, int | float | complex):
        return ()
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def total_dimensionality(tree: object) -> int:
    """Count the numbers in a tree; None, text and other objects count 0.

    A module counts its ``state_dict``: parameters and buffers, shared ones under each of their
    names.

    >>> total_dimensionality({"w": torch.zeros(2, 3), "b": 0.5, "name": None})
    7
    """
    shapes = [_shape(leaf) for _, leaf in flatten_with_paths(tree)]
    return sum(math.prod(shape) for shape in shapes if shape is not None)


def summarize_shape(tree: object) -> str:
    """Return shapes and dtypes as indented text, one line per key; other leaves show their
    ``repr``.

    >>> print(summarize_shape({"w": torch.zeros(2, 3), "more": [5, None]}))
    w: (2, 3) dtype=float32
    more:
      0: () dtype=int64
      1: None
    """
    items = children(tree)
    if items is None:
        shape = _shape(tree)
        if shape is None:
            return repr(tree)
        # a number has no dtype
        dtype = tree.dtype if hasattr(tree, "dtype") else np.asarray(tree).dtype
        return f"{shape} dtype={str(dtype).removeprefix('torch.')}"
    lines: list[str] = []
    for key, value in items.items():
        text = summarize_shape(value)
        if children(value) is None:
            lines.append(f"{key}: {text}")
        else:
            lines += [f"{key}:", *("  " + line for line in text.splitlines())]
    return "\n".join(lines)


def unshard(tree: object) -> list[Any]:
    """Split a tree of stacked arrays along their leading axis into a list of trees of views. None
    stays None.

    Source: ``unshard`` of bobbin. Raises ShapeError if the tree has no array, or leading axes are
    missing or differ in length.

    >>> unshard({"a": torch.tensor([1, 2]), "b": None})
    [{'a': tensor(1), 'b': None}, {'a': tensor(2), 'b': None}]
    """
    lengths = _leading_lengths(tree)
    if not lengths:
        raise ShapeError("unshard: the tree holds no arrays")
    first, size = next(iter(lengths.items()))
    # torch and NumPy would only fail at the first row that is missing
    for path, length in lengths.items():
        if length != size:
            raise ShapeError(
                f"unshard: {_path_name(first)} has {size} rows, {_path_name(path)} has {length}"
            )
    return [_map_arrays(operator.itemgetter(i), tree) for i in range(size)]


def split_leading_axis(
    n: int,
    tree: object,
    *,
    leading_axis_name: str | None = None,
    split_group_name: str | None = None,
) -> Any:
    """Reshape arrays ``(n * m, ...)`` to ``(n, m, ...)``, as views where the memory order allows.
    None stays None. The names of the axis and the groups appear in the error message.

    Source: ``split_leading_axis`` of bobbin. Raises ShapeError, naming the leaf, if ``n`` does not
    divide an axis.

    >>> split_leading_axis(2, {"x": torch.arange(4)})
    {'x': tensor([[0, 1],
            [2, 3]])}
    """
    if n < 1:
        raise ValueError(f"split_leading_axis: expected at least 1 group; got {n}")
    # all before the first is reshaped, whose error would not name the leaf
    for path, length in _leading_lengths(tree).items():
        if length % n:
            raise ShapeError(
                f"{_path_name(path)} has {length} {leading_axis_name or 'rows'}, which do not "
                f"divide into {n} {split_group_name or 'groups'}"
            )
    return _map_arrays(lambda x: x.reshape((n, len(x) // n, *x.shape[1:])), tree)


def flatten_leading_axes(tree: object, num_leading_axes: int = 2) -> Any:
    """Merge the first axes of arrays, the inverse of `split_leading_axis`; returns views where
    possible.

    Source: ``flatten_leading_axes`` of bobbin. Raises ShapeError, naming the leaf, if an array has
    fewer axes.

    >>> flatten_leading_axes({"x": torch.zeros(2, 3, 5)})["x"].shape
    torch.Size([6, 5])
    """
    if num_leading_axes < 1:
        raise ValueError(f"flatten_leading_axes: expected at least 1 axis; got {num_leading_axes}")
    for path, leaf in flatten_with_paths(tree):
        shape = _shape(leaf)
        if leaf is not None and (shape is None or len(shape) < num_leading_axes):
            description = f"shape {shape}" if shape is not None else repr(leaf)
            raise ShapeError(
                f"{_path_name(path)} has no {num_leading_axes} leading axes: {description}"
            )

    def flat(x: Any) -> Any:
        # not -1: reshape cannot infer the size of an empty array
        n_rows = math.prod(x.shape[:num_leading_axes])
        return x.reshape((n_rows, *x.shape[num_leading_axes:]))

    return _map_arrays(flat, tree)


def _map_arrays(f: Callable[[Any], Any], tree: object) -> Any:
    return tree_map(lambda leaf: None if leaf is None else f(leaf), tree)


def _leading_lengths(tree: object) -> dict[str, int]:
    """Return the length of the leading axis of each array, by path."""
    lengths = {}
    for path, leaf in flatten_with_paths(tree):
        if leaf is None:
            continue
        shape = _shape(leaf)
        if not shape:
            description = "shape ()" if shape == () else repr(leaf)
            raise ShapeError(f"{_path_name(path)} has no leading axis: {description}")
        lengths[path] = shape[0]
    return lengths


def _path_name(path: str) -> str:
    return path or "the tree"
