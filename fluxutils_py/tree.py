"""Nested lists, tuples and dicts of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The path and value of everything in a tree that is no container; modules stand for their state.

    >>> list(leaves({"a": [1, 2], "b": 3}))
    [('a/0', 1), ('a/1', 2), ('b', 3)]
    """
    if isinstance(tree, nn.Module):
        tree = tree.state_dict()
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, f"{path}/{key}" if path else str(key))


def map_tree(f: Callable[..., Any], *trees: Any) -> Any:
    """``f`` of the leaves of trees of one structure; None is a leaf.

    >>> map_tree(lambda a, b: a + b, (1, {"k": [2]}), (10, {"k": [20]}))
    (11, {'k': [22]})
    """
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: map_tree(f, *(t[key] for t in trees)) for key in first}
    if isinstance(first, list | tuple):
        found = [map_tree(f, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*found) if hasattr(first, "_fields") else type(first)(found)
    return f(*trees)


def as_tensor(value: Any) -> Tensor | None:
    """A leaf that holds numbers as a tensor in main memory, detached; None for any other."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic | int | float | complex) and np.asarray(value).dtype.kind in "fiubc":
        return torch.as_tensor(np.ascontiguousarray(value)).reshape(np.shape(value))
    return None
