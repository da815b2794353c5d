"""Trees of nested dicts, lists, tuples, named tuples and dataclasses, with arrays and other values
as leaves.

Dicts keep their order. Every other value is a leaf, including None. A module counts as its
``state_dict`` where a tree is only read, and as a leaf where a tree is rebuilt. See
:mod:`fluxutils_py.bobbin.treejson` to write trees to files.

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
    """Whether the node is a list, or a tuple without names."""
    return isinstance(node, list) or (isinstance(node, tuple) and not hasattr(node, "_fields"))


def children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, index or field name; None for a leaf."""
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
        object.__setattr__(new, name, value)
    return new


def flatten_with_paths(
    tree: Any, pathsep: str = "/", is_leaf: IsLeaf | None = None
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
    items = None if is_leaf is not None and is_leaf(tree) else children(tree)
    if items is None:
        yield "", tree
        return
    for key, value in items.items():
        for path, leaf in flatten_with_paths(value, pathsep, is_leaf):
            yield f"{pathsep}{key}{path}", leaf


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield leaves like :func:`flatten_with_paths`, with paths that do not begin with the
    separator.

    >>> list(named_leaves({"a": [1, 2], "b": 3}))
    [('a/0', 1), ('a/1', 2), ('b', 3)]
    """
    for path, leaf in flatten_with_paths(tree):
        yield path[1:], leaf


def nested_vars_to_paths(tree: Any, pathsep: str = "/", is_leaf: IsLeaf | None = None) -> Any:
    """Replace each leaf by its path; for the arguments see `flatten_with_paths`.

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
    """Apply ``f`` to the leaves of trees with equal structure; None and modules are leaves.

    Raises ValueError if keys, lengths or fields of the trees differ.

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
            raise ValueError(
                f"tree_map: tree 0 has a container of {list(items)} where tree {i} has {text}"
            )
        others.append(other)
    return rebuild(
        first,
        (tree_map(f, value, *(other[key] for other in others)) for key, value in items.items()),
    )


def as_tensor(value: Any) -> Tensor | None:
    """Return a numeric leaf as a detached tensor in main memory; None for any other leaf."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic | int | float | complex):
        array = np.asarray(value)
        if array.dtype.kind in "fiubc":
            # torch rejects foreign byte order and warns of read-only memory
            return torch.as_tensor(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    return None


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape of an array, () for a number, None for anything else."""
    if isinstance(leaf, int | float | complex):
        return ()
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def total_dimensionality(tree: Any) -> int:
    """Count the numbers in a tree; None, text and other objects count 0.

    A module counts its ``state_dict``: parameters and buffers, shared ones under each of their
    names.

    >>> total_dimensionality({"w": torch.zeros(2, 3), "b": 0.5, "name": None})
    7
    """
    return sum(
        int(np.prod(shape))
        for _, leaf in flatten_with_paths(tree)
        if (shape := _shape(leaf)) is not None
    )


def summarize_shape(tree: Any) -> str:
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
    """Split a tree of stacked arrays along their leading axis into a list of trees of views. None
    stays None.

    Source: ``unshard`` of bobbin. Raises ShapeError if the tree has no array, or leading axes are
    missing or differ in length.

    >>> unshard({"a": torch.tensor([1, 2]), "b": None})
    [{'a': tensor(1), 'b': None}, {'a': tensor(2), 'b': None}]
    """
    lengths = {
        path: _leading(path, leaf) for path, leaf in flatten_with_paths(tree) if leaf is not None
    }
    if not lengths:
        raise ShapeError("unshard: the tree holds no arrays")
    first, size = next(iter(lengths.items()))
    for path, length in lengths.items():
        if length != size:
            raise ShapeError(
                f"unshard: {_path_name(first)} has {size} rows, {_path_name(path)} has {length}"
            )
    return [
        tree_map(lambda leaf, i=i: None if leaf is None else leaf[i], tree) for i in range(size)
    ]


def split_leading_axis(n: int, tree: Any) -> Any:
    """Reshape arrays ``(n * m, ...)`` to ``(n, m, ...)``, as views where the memory order allows.
    None stays None.

    Source: ``split_leading_axis`` of bobbin. Raises ShapeError, naming the leaf, if ``n`` does not
    divide an axis.

    >>> split_leading_axis(2, {"x": torch.arange(4)})
    {'x': tensor([[0, 1],
            [2, 3]])}
    """
    if n < 1:
        raise ValueError(f"split_leading_axis: expected at least 1 group; got {n}")
    for path, leaf in flatten_with_paths(tree):
        if leaf is not None and _leading(path, leaf) % n:
            raise ShapeError(
                f"{_path_name(path)} has {len(leaf)} rows, which do not divide into {n} groups"
            )
    return tree_map(
        lambda x: None if x is None else x.reshape((n, len(x) // n, *x.shape[1:])), tree
    )


def flatten_leading_axes(tree: Any, num_leading_axes: int = 2) -> Any:
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
        return x.reshape((int(np.prod(x.shape[:num_leading_axes])), *x.shape[num_leading_axes:]))

    return tree_map(lambda x: None if x is None else flat(x), tree)


def _leading(path: str, leaf: Any) -> int:
    """Return the length of the leading axis."""
    shape = _shape(leaf)
    if not shape:
        description = "shape ()" if shape == () else repr(leaf)
        raise ShapeError(f"{_path_name(path)} has no leading axis: {description}")
    return shape[0]


def _path_name(path: str) -> str:
    return path or "the tree"
