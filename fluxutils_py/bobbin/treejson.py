"""Write and read trees as JSON that keeps dtypes, shapes and values to the last bit.

The text is standard JSON, without bare NaN. Dicts, modules (their ``state_dict``), dataclasses and
named tuples become objects, lists and tuples become lists, and arrays become objects as in bobbin::

    {"__array__": true, "dtype": "float32", "data": [[1.0, "NaN"], [0.5, "-Infinity"]]}

Tensors use ``__tensor__`` and NumPy scalars ``__scalar__`` instead, empty arrays store their
``shape`` too, and complex numbers are pairs. A dict with non-string keys (numbers, booleans, None),
or with one of these names as a key, becomes a list of pairs, ``{"__items__": [[key, value],
...]}``. Keys keep their order, while flax sorts them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import LoadError
from fluxutils_py.files import atomic_write
from fluxutils_py.training.file_checks import check_text_type
from fluxutils_py.tree import as_tensor, children, is_sequence, rebuild

__all__ = [
    "dump_pytree_json",
    "parse_pytree_json",
    "read_pytree_json_file",
    "write_pytree_json_file",
]

ARRAYS = ("__array__", "__tensor__", "__scalar__")
MARKS = {*ARRAYS, "__float__", "__complex__", "__items__"}
KEYS = (str, int, float, bool, type(None))


def dump_pytree_json(tree: object) -> str:
    """Return a tree as JSON text in one line.

    Parameters
    ----------
    tree : Any
        Dicts, lists, tuples, named tuples, dataclasses and modules, with None, strings, Python's
        numbers, and arrays, tensors and NumPy scalars of numbers, booleans or text.

    Raises
    ------
    TypeError
        If a value or key has another type, such as ``numpy.longdouble``; the message names its
        path.

    Notes
    -----
    Source: ``dump_pytree_json`` of bobbin, which loses the dtype of 0-d arrays and the shape of
    empty ones.

    Examples
    --------
    >>> dump_pytree_json({"x": np.array([1, 2]), "y": None})
    '{"x": {"__array__": true, "dtype": "int64", "data": [1, 2]}, "y": null}'
    """
    return json.dumps(_encode_value(tree, ""), allow_nan=False)


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
        path.

    Examples
    --------
    >>> text = dump_pytree_json({"x": (1, 2.5)})
    >>> parse_pytree_json(text), parse_pytree_json(text, {"x": (0, 0)})
    ({'x': [1, 2.5]}, {'x': (1, 2.5)})
    """
    try:
        stored = json.loads(text)
        decoded = _decode_value(stored, "")
    except LoadError:  # a ValueError too, but one that names the path
        raise
    except ValueError as error:
        raise LoadError(f"not JSON: {error}") from error
    except RecursionError:
        raise LoadError("its lists and objects are nested too deeply") from None
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


def _encode_value(value: object, path: str) -> Any:
    """Convert a value to JSON data."""
    # exact types: a subclass, such as numpy.float64 of float, would come back as its base
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        number = _tensor_data(torch.tensor(value, dtype=torch.float64))
        return number if isinstance(number, float) else {"__float__": number}
    if type(value) is complex:
        return {"__complex__": _tensor_data(torch.tensor(value, dtype=torch.complex128))}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _encode_array(value, path)
    items = children(value)
    if items is None:
        raise TypeError(
            f"{path or 'the tree'}: JSON cannot hold a value of {type(value)}; leave it out or "
            "convert it"
        )
    if is_sequence(value):
        return [_encode_value(item, f"{path}/{i}") for i, item in items.items()]
    return _encode_items(items, path)


def _encode_items(items: dict[Any, Any], path: str) -> dict[str, Any]:
    """Convert the items of a mapping, a named tuple, a dataclass or a module."""
    # an infinite or NaN key could be written, but JSON has no number for it
    for key in items:
        if type(key) not in KEYS or (type(key) is float and not np.isfinite(key)):
            raise TypeError(
                f"{path or 'the tree'}: JSON cannot hold the key {key!r} of {type(key)}; use a "
                "string"
            )
    entries = {key: _encode_value(item, f"{path}/{key}") for key, item in items.items()}
    if all(type(key) is str for key in entries) and MARKS.isdisjoint(entries):
        return entries
    return {"__items__": [[key, item] for key, item in entries.items()]}


def _encode_array(value: Tensor | np.ndarray | np.generic, path: str) -> dict[str, Any]:
    try:
        if not isinstance(value, Tensor) and value.dtype.kind == "U":  # torch has no text
            content = {"dtype": value.dtype.str, "data": value.tolist()}
        else:
            tensor: Any = as_tensor(value)  # None has no dtype
            dtype = str(tensor.dtype).removeprefix("torch.")
            content = {"dtype": dtype, "data": _tensor_data(tensor)}
    except (AttributeError, TypeError, RuntimeError):  # of a type that torch does not have
        raise TypeError(
            f"{path or 'the tree'}: JSON cannot hold {type(value)} of {value.dtype}; convert it"
        ) from None
    stored = {_array_mark(value): True, **content}
    if not np.prod(value.shape):
        # nested lists of no elements do not tell the shape
        stored["shape"] = list(value.shape)
    return stored


def _array_mark(value: object) -> str:
    if isinstance(value, Tensor):
        return "__tensor__"
    return "__array__" if isinstance(value, np.ndarray) else "__scalar__"


def _tensor_data(tensor: Tensor) -> Any:
    """Return elements as nested lists, with text for values that JSON numbers cannot express."""
    if tensor.is_complex():
        return _tensor_data(torch.view_as_real(tensor.resolve_conj()))
    if not tensor.is_floating_point():
        return tensor.tolist()
    # float64 holds each shorter type exactly, bfloat16 too, which NumPy lacks
    values = tensor.resolve_neg().double().numpy()
    data = values.astype(object)
    data[np.isposinf(values)] = "Infinity"
    data[np.isneginf(values)] = "-Infinity"
    data[np.isnan(values)] = "NaN"
    return data.tolist()


def _decode_value(stored: object, path: str) -> Any:
    """Convert JSON data to values, with dicts and lists as containers."""
    if isinstance(stored, list):
        return [_decode_value(item, f"{path}/{i}") for i, item in enumerate(stored)]
    if not isinstance(stored, dict):
        return stored
    marks = MARKS & stored.keys()
    if not marks:
        return {key: _decode_value(item, f"{path}/{key}") for key, item in stored.items()}
    mark = marks.pop()
    try:
        return _decode_marked(mark, stored, path)
    except LoadError:  # raised further inside, with the path
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise LoadError(f"{path or 'the tree'}: malformed {mark}: {error}") from error


def _decode_marked(
    mark: str,
    stored: dict[str, Any],
    path: str,
) -> Any:
    if mark == "__items__":
        return {key: _decode_value(item, f"{path}/{key}") for key, item in stored[mark]}
    if mark in ARRAYS:
        return _decode_array(mark, stored)
    dtype = torch.complex128 if mark == "__complex__" else torch.float64
    return _tensor(stored[mark], dtype).item()


def _decode_array(mark: str, stored: dict[str, Any]) -> Any:
    if not {mark, "dtype", "data"} <= stored.keys() <= {mark, "dtype", "data", "shape"}:
        raise TypeError(
            f"expected dtype, data and perhaps shape, got {sorted(stored.keys() - {mark})}"
        )
    dtype = stored["dtype"]
    data = stored["data"]
    shape = stored.get("shape")
    if isinstance(dtype, str) and dtype[1:2] == "U":
        texts = _elements(data, (str,))
        # a wrong width would cut the texts, a huge one fill the memory
        check_text_type(np.dtype(dtype), texts)
        array = (texts if shape is None else texts.reshape(shape)).astype(dtype)
    else:
        tensor = _tensor(data, getattr(torch, dtype, None), shape)
        if mark == "__tensor__":
            return tensor
        array = tensor.numpy()
    return array if mark == "__array__" else array[()]  # a NumPy scalar


def _tensor(
    data: object,
    dtype: object,
    shape: list[int] | None = None,
) -> Tensor:
    """Invert :func:`_tensor_data`."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError("not a dtype of torch")
    if dtype.is_complex:  # pairs of real and imaginary part
        real_shape = None if shape is None else [*shape, 2]
        return torch.view_as_complex(_tensor(data, dtype.to_real(), real_shape))
    if dtype.is_floating_point:
        tensor = torch.from_numpy(_elements(data, (float, int, str)).astype(np.float64)).to(dtype)
    else:
        integers = _elements(data, (bool,) if dtype is torch.bool else (int,)).tolist()
        with np.errstate(over="raise"):  # NumPy would wrap numbers that are too large
            tensor = torch.from_numpy(np.array(integers, dtype=str(dtype).removeprefix("torch.")))
    return tensor if shape is None else tensor.reshape(shape)


def _elements(data: object, types: tuple[type, ...]) -> np.ndarray:
    """Return nested lists as an array of objects, which must have one of these types."""
    elements = np.array(data, dtype=object)
    # lists of different lengths stay among the elements, and are refused here
    for item in elements.flat:
        if type(item) not in types:
            expected = " or ".join(t.__name__ for t in types)
            raise TypeError(f"expected {expected} in lists of one length, got {item!r}")
    return elements


def _fit_template(
    parsed: Any,
    template: object,
    path: str,
) -> Any:
    """Convert a parsed tree to the containers of the template."""
    if template is None:
        return parsed
    target = children(template)
    source = children(parsed)
    if target is None and source is None:
        return _fit_leaf(parsed, template)
    if target is None or source is None or isinstance(parsed, list) is not is_sequence(template):
        raise _misfit(parsed, template, path)
    if _matches_any_length(template, target):
        return tuple(parsed) if isinstance(template, tuple) else parsed
    if source.keys() != target.keys():
        raise _misfit(parsed, template, path)
    values = (_fit_template(source[key], value, f"{path}/{key}") for key, value in target.items())
    return rebuild(template, values)


def _matches_any_length(template: object, target: dict[Any, Any]) -> bool:
    # a dataclass or module without fields is not meant as a wildcard
    return not target and (is_sequence(template) or isinstance(template, Mapping))


def _fit_leaf(parsed: object, template: object) -> Any:
    """Return an array of numbers as a tensor if the template has one."""
    if isinstance(template, Tensor) and isinstance(parsed, np.ndarray | np.generic):
        return parsed if parsed.dtype.kind == "U" else as_tensor(parsed)
    return parsed


def _misfit(
    parsed: object,
    template: object,
    path: str,
) -> LoadError:
    return LoadError(
        f"{path or 'the tree'}: expected {_describe(template)} as in the template, got "
        f"{_describe(parsed)}"
    )


def _describe(node: object) -> str:
    items = children(node)
    if items is None:
        return "a leaf"
    return f"a list of {len(items)}" if is_sequence(node) else f"the keys {list(items)}"
