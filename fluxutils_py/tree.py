"""Trees of nested dicts, lists, tuples, named tuples and dataclasses, with arrays and other values as leaves.

Dicts keep their order. Every other value is a leaf, None too. A module stands for its ``state_dict`` where a tree is
only read, and is a leaf where a tree is rebuild. To write trees to files see :mod:`fluxutils_py.treejson`.

Source: ``var_util``, ``array_util`` and ``pmap_util`` of bobbin, whose dicts are sorted by flax.
"""

from __future__ import annotations

import copy
import dataclasses
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


def is_sequence(node: Any) -> bool:
    """Is it a list or a tuple without names?"""
    return isinstance(node, list) or (isinstance(node, tuple) and not hasattr(node, "_fields"))


def children(node: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, index or name of field; None for a leaf."""
    if isinstance(node, nn.Module):
        return dict(node.state_dict())
    if isinstance(node, Mapping):
        return dict(node)
    if is_sequence(node):
        return dict(enumerate(node))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return None


def rebuild(node: Any, values: Iterable[Any]) -> Any:
    """A container like ``node`` with other values, in the order of its :func:`children`.

    A dataclass is copied and its fields are set, frozen or not, without a call of ``__init__`` or ``__post_init__``.
    Other mappings and modules become dicts, other tuples plain tuples.
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
        object.__setattr__(new, name, value)
    return new


def flatten_with_paths(tree: Any, pathsep: str = "/", is_leaf: IsLeaf | None = None) -> Iterator[tuple[str, Any]]:
    """The path and value of every leaf, in order.

    A path is one separator and key for each level, so that it begins with the separator; that of a tree that is a leaf
    itself is empty. Keys are written with ``str``, and a separator inside one is not escaped: where paths must tell
    leaves apart, choose a separator that no key contains.

    Parameters
    ----------
    tree : Any
    pathsep : str
    is_leaf : callable, optional
        ``is_leaf(node)`` says whether a container is to be taken as a leaf.

    Examples
    --------
    >>> list(flatten_with_paths({"a": [1, 2], "b": None}))
    [('/a/0', 1), ('/a/1', 2), ('/b', None)]
    """
    items = None if is_leaf is not None and is_leaf(tree) else children(tree)
    if items is None:
        yield "", tree
        return
    for key, value in items.items():
        for path, leaf in flatten_with_paths(value, pathsep, is_leaf):
            yield f"{pathsep}{key}{path}", leaf


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """As :func:`flatten_with_paths`, with paths that do not begin with the separator.

    >>> list(named_leaves({"a": [1, 2], "b": 3}))
    [('a/0', 1), ('a/1', 2), ('b', 3)]
    """
    for path, leaf in flatten_with_paths(tree):
        yield path[1:], leaf


def nested_vars_to_paths(tree: Any, pathsep: str = "/", is_leaf: IsLeaf | None = None) -> Any:
    """A tree of the same structure that has the path of each leaf in its place; arguments as for `flatten_with_paths`.

    A module becomes a dict.

    >>> nested_vars_to_paths({"params": (1, {"w": 2})}, pathsep=".")
    {'params': ('.params.0', {'w': '.params.1.w'})}
    """
    paths = (path for path, _ in flatten_with_paths(tree, pathsep, is_leaf))

    def fill(node: Any) -> Any:
        items = None if is_leaf is not None and is_leaf(node) else children(node)
        return next(paths) if items is None else rebuild(node, map(fill, items.values()))

    return fill(tree)


def tree_map(f: Callable[..., Any], *trees: Any) -> Any:
    """``f`` of the leaves of trees of one structure; None is a leaf, and so is a module.

    ValueError where the trees' keys, lengths or fields differ.

    >>> tree_map(lambda a, b: a + b, (1, {"k": [2]}), (10, {"k": [20]}))
    (11, {'k': [22]})
    """
    first = trees[0]
    if isinstance(first, nn.Module) or (items := children(first)) is None:
        return f(*trees)
    others = []
    for i, tree in enumerate(trees[1:], 1):
        other = children(tree)
        if other is None or other.keys() != items.keys():
            text = "a leaf" if other is None else f"one of {list(other)}"
            raise ValueError(f"tree_map: tree 0 has a container of {list(items)} where tree {i} has {text}")
        others.append(other)
    return rebuild(first, (tree_map(f, value, *(other[key] for other in others)) for key, value in items.items()))


def as_tensor(value: Any) -> Tensor | None:
    """A leaf that holds numbers as a tensor in main memory, detached; None for any other."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic | int | float | complex):
        array = np.asarray(value)
        if array.dtype.kind in "fiubc":
            # torch takes neither foreign byte order nor, without a warning, memory that may not be written to
            return torch.as_tensor(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    return None


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """The shape of an array, () of a number, None of anything else."""
    if isinstance(leaf, int | float | complex):
        return ()
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def total_dimensionality(tree: Any) -> int:
    """How many numbers a tree holds; None, text and other objects count 0.

    A module counts its ``state_dict``: parameters and buffers, each under every name that it has.

    >>> total_dimensionality({"w": torch.zeros(2, 3), "b": 0.5, "name": None})
    7
    """
    return sum(int(np.prod(shape)) for _, leaf in flatten_with_paths(tree) if (shape := _shape(leaf)) is not None)


def summarize_shape(tree: Any) -> str:
    """Shapes and dtypes as indented text, one line per key; other leaves are shown by their ``repr``.

    >>> print(summarize_shape({"w": torch.zeros(2, 3), "more": [5, None]}))
    w: (2, 3) dtype=float32
    more:
      0: () dtype=int64
      1: None
    """
    items = children(tree)
    if items is None:
        if (shape := _shape(tree)) is None:
            return repr(tree)
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


def unshard(tree: Any) -> list[Any]:
    """The trees that are stacked along the leading axis of the arrays of one; views. None stays None.

    Source: ``unshard`` of bobbin. ShapeError if the tree holds no array, or the arrays' leading axes are missing or
    not of one length.

    >>> unshard({"a": torch.tensor([1, 2]), "b": None})
    [{'a': tensor(1), 'b': None}, {'a': tensor(2), 'b': None}]
    """
    lengths = {path: _leading(path, leaf) for path, leaf in flatten_with_paths(tree) if leaf is not None}
    if not lengths:
        raise ShapeError("unshard: the tree holds no arrays")
    first, size = next(iter(lengths.items()))
    for path, length in lengths.items():
        if length != size:
            raise ShapeError(f"unshard: {_at(first)} has {size} rows, {_at(path)} has {length}")
    return [tree_map(lambda leaf, i=i: None if leaf is None else leaf[i], tree) for i in range(size)]


def split_leading_axis(n: int, tree: Any) -> Any:
    """Arrays of shape ``(n * m, ...)`` as ``(n, m, ...)``, views where the memory order allows. None stays None.

    Source: ``split_leading_axis`` of bobbin. ShapeError, naming the leaf, if ``n`` does not divide a leading axis.

    >>> split_leading_axis(2, {"x": torch.arange(4)})
    {'x': tensor([[0, 1],
            [2, 3]])}
    """
    if n < 1:
        raise ValueError(f"split_leading_axis: expected at least 1 group; got {n}")
    for path, leaf in flatten_with_paths(tree):
        if leaf is not None and _leading(path, leaf) % n:
            raise ShapeError(f"{_at(path)} has {len(leaf)} rows, which do not divide into {n} groups")
    return tree_map(lambda x: None if x is None else x.reshape((n, len(x) // n, *x.shape[1:])), tree)


def flatten_leading_axes(tree: Any, num_leading_axes: int = 2) -> Any:
    """Arrays with their first axes made one, the inverse of `split_leading_axis`; views where possible.

    Source: ``flatten_leading_axes`` of bobbin. ShapeError, naming the leaf, if an array has fewer axes.

    >>> flatten_leading_axes({"x": torch.zeros(2, 3, 5)})["x"].shape
    torch.Size([6, 5])
    """
    if num_leading_axes < 1:
        raise ValueError(f"flatten_leading_axes: expected at least 1 axis; got {num_leading_axes}")
    for path, leaf in flatten_with_paths(tree):
        shape = _shape(leaf)
        if leaf is not None and (shape is None or len(shape) < num_leading_axes):
            found = f"shape {shape}" if shape is not None else repr(leaf)
            raise ShapeError(f"{_at(path)} has no {num_leading_axes} leading axes: {found}")

    def flat(x: Any) -> Any:
        # the product, not -1: an array without elements has no size to infer
        return x.reshape((int(np.prod(x.shape[:num_leading_axes])), *x.shape[num_leading_axes:]))

    return tree_map(lambda x: None if x is None else flat(x), tree)


def _leading(path: str, leaf: Any) -> int:
    """The length of the leading axis."""
    shape = _shape(leaf)
    if not shape:
        found = "shape ()" if shape == () else repr(leaf)
        raise ShapeError(f"{_at(path)} has no leading axis: {found}")
    return shape[0]


def _at(path: str) -> str:
    return path or "the tree"
