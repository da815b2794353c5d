"""Write and read trees as JSON that keeps dtypes, shapes and values to the last bit.

The text is standard JSON, without bare NaN. Dicts, modules (their ``state_dict``), dataclasses and
named tuples become objects, lists and tuples become lists, and arrays become objects as in bobbin::

    {"__array__": true, "dtype": "float32", "data": [[1.0, "NaN"], [0.5, "-Infinity"]]}

Tensors use ``__tensor__`` and NumPy scalars ``__scalar__`` instead, empty arrays store their
``shape`` too. A number that is NaN or infinite becomes ``{"__float__": "NaN"}``. Keys are strings;
they keep their order, while flax sorts them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import LoadError
from fluxutils_py.files import atomic_write
from fluxutils_py.tree import as_tensor, children, is_sequence, rebuild

ARRAYS = ("__array__", "__tensor__", "__scalar__")
MARKS = {*ARRAYS, "__float__"}


def dump_pytree_json(tree: object) -> str:
    """Return a tree as JSON text in one line.

    Parameters
    ----------
    tree : Any
        Dicts, lists, tuples, named tuples, dataclasses and modules, with None, strings, integers,
        floats, and arrays, tensors and NumPy scalars of real numbers or booleans.

    Raises
    ------
    TypeError
        If a value or key has another type; the message names its path.

    Notes
    -----
    Source: ``dump_pytree_json`` of bobbin, which loses the dtype of 0-d arrays and the shape of
    empty ones.

    Examples
    --------
    >>> dump_pytree_json({"x": np.array([1, 2]), "y": None})
    '{"x": {"__array__": true, "dtype": "int64", "data": [1, 2]}, "y": null}'
    """
    return json.dumps(_encode(tree, ""), allow_nan=False)


def parse_pytree_json(text: str | bytes, template: object = None) -> Any:
    """Parse a tree that :func:`dump_pytree_json` wrote.

    Parameters
    ----------
    text : str or bytes
        Output of bobbin is accepted too, including bare NaN; its lists are dicts.
    template : Any
        Tree with the expected structure and any values. Containers take the types of the template:
        named tuples, tuples, dataclasses (without calling ``__init__``); a module gives a dict for
        ``load_state_dict``. Dtypes and shapes come from the text. Arrays become tensors where the
        template has tensors. None matches anything, an empty dict, list or tuple matches one of any
        length.

    Returns
    -------
    Any
        Without a template, containers are dicts and lists. Tensors are in main memory.

    Raises
    ------
    LoadError
        If the text is malformed, or its structure differs from the template; the message names the
        path in it.

    Examples
    --------
    >>> text = dump_pytree_json({"x": (1, 2.5)})
    >>> parse_pytree_json(text), parse_pytree_json(text, {"x": (0, 0)})
    ({'x': [1, 2.5]}, {'x': (1, 2.5)})
    """
    try:
        decoded = json.loads(text, object_hook=_decode)
    except Exception as error:  # of many kinds, from JSON to a dtype that is none
        raise LoadError(f"malformed: {error}") from error
    return _fit_template(decoded, template, "")


def write_pytree_json_file(path: str | os.PathLike[str], tree: object) -> None:
    """Write a tree to a file atomically; see :func:`dump_pytree_json`."""
    text = dump_pytree_json(tree)  # first: an error must not touch the file
    with atomic_write(path) as f:
        f.write(text.encode("ascii"))


def read_pytree_json_file(path: str | os.PathLike[str], template: object = None) -> Any:
    """Read a tree from a file; see :func:`parse_pytree_json`. Raises FileNotFoundError if it is
    missing.
    """
    text = Path(path).read_bytes()
    try:
        return parse_pytree_json(text, template)
    except LoadError as error:
        raise LoadError(f"{os.fspath(path)}: {error}") from error


def _encode(value: Any, path: str) -> Any:
    """Convert a value to JSON data."""
    # exact types: a subclass, such as numpy.float64 of float, would come back as its base
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        number = _finite_or_text(value)
        return number if number is value else {"__float__": number}
    items = children(value)
    if items is None:
        return _encode_array(value, path)
    if is_sequence(value):
        return [_encode(item, f"{path}/{i}") for i, item in items.items()]
    return {_checked(key, path): _encode(item, f"{path}/{key}") for key, item in items.items()}


def _checked(key: object, path: str) -> object:
    if type(key) is not str or key in MARKS:
        raise TypeError(f"{path or 'the tree'}: JSON cannot hold the key {key!r}; use another")
    return key


def _encode_array(value: Any, path: str) -> dict[str, Any]:
    is_array = isinstance(value, Tensor | np.ndarray | np.generic)
    tensor = as_tensor(value) if is_array else None
    if tensor is None or tensor.is_complex():
        raise TypeError(
            f"{path or 'the tree'}: JSON cannot hold a value of {type(value)}; leave it out or "
            "convert it"
        )
    mark = "__array__" if isinstance(value, np.ndarray) else "__scalar__"
    stored = {
        "__tensor__" if isinstance(value, Tensor) else mark: True,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        # as float64, which holds each shorter type exactly
        "data": _finite_or_text(tensor.tolist()),
    }
    if not tensor.numel():
        # nested lists of no elements do not tell the shape
        stored["shape"] = list(tensor.shape)
    return stored


def _finite_or_text(data: Any) -> Any:
    """Return nested lists of numbers, with text for those that JSON cannot express."""
    if isinstance(data, list):
        return [_finite_or_text(item) for item in data]
    return data if math.isfinite(data) else json.dumps(data)


def _decode(stored: dict[str, Any]) -> Any:
    """Return the number or array that an object of JSON stands for, or else the object."""
    if "__float__" in stored:
        return float(stored["__float__"])
    mark = next((mark for mark in ARRAYS if mark in stored), None)
    if mark is None:
        return stored
    dtype = getattr(torch, stored["dtype"])
    numbers = np.array(stored["data"], np.float64 if dtype.is_floating_point else stored["dtype"])
    tensor = torch.from_numpy(numbers).to(dtype).reshape(stored.get("shape", numbers.shape))
    if mark == "__tensor__":
        return tensor
    return tensor.numpy() if mark == "__array__" else tensor.numpy()[()]


def _fit_template(parsed: Any, template: Any, path: str) -> Any:
    """Convert a parsed tree to the containers of the template."""
    if template is None:
        return parsed
    target = children(template)
    source = children(parsed)
    if target is None and source is None:
        return _fit_leaf(parsed, template)
    if target == {} and _is_open(parsed, template):
        return tuple(parsed) if isinstance(template, tuple) else parsed
    if target is None or source is None or source.keys() != target.keys():
        raise _misfit(path, target, source)
    items = target.items()
    return rebuild(template, (_fit_template(source[k], v, f"{path}/{k}") for k, v in items))


def _fit_leaf(parsed: Any, template: object) -> Any:
    is_array = isinstance(parsed, np.ndarray | np.generic)
    return as_tensor(parsed) if is_array and isinstance(template, Tensor) else parsed


def _misfit(path: str, *trees: Mapping[Any, Any] | None) -> LoadError:
    expected, got = ([*(items or ())] for items in trees)
    return LoadError(
        f"{path or 'the tree'}: expected the keys {expected} as in the template, got {got}"
    )


def _is_open(parsed: object, template: object) -> bool:
    """Return whether an empty container stands for one of its kind of any length."""
    kind = list | tuple if is_sequence(template) else Mapping
    return isinstance(template, kind) and isinstance(parsed, kind)
