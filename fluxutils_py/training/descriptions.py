"""Describe any value as texts by name, to compare ranks with each other and with checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.nn import Recur
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.training.plain_files import PLAIN_TYPES
from fluxutils_py.tree import children

Texts = Iterator[tuple[str, str]]  # by name
# their functions and modules are described by name
LIBRARIES = ("torch", "numpy", "fluxutils_py")
# Values that are shown by their text. Files hold others (see plain_files): no NumPy scalars.
PLAIN = (*PLAIN_TYPES, np.generic, torch.dtype, torch.Size)
CALLABLES = (
    functools.partial,
    SeqLoss,
    type,
    np.ufunc,
    types.MethodType,
    types.FunctionType,
    types.BuiltinFunctionType,
)
OF_MODULES = frozenset(vars(nn.Module()))
# attributes that hold its state
OF_RECUR = frozenset(("state", "form", "_mark", "_marked", "sensitivity", "carries_sensitivity"))


def describe(name: str, value: Any) -> dict[str, str]:
    """Describe a setting and the settings nested in it as texts by name.

    Numbers, strings and containers of them are described by value; tensors and arrays by a digest;
    user functions by a digest of their compiled code, and by their defaults and closures; modules
    by their class, the code of their ``forward``, and the attributes that are settings; other
    objects by their class and plain attributes.

    Leaves out global variables that a function reads, and possible working memory: lists, mappings
    and objects in closures and in attributes of objects, and tensors in attributes of modules.
    """
    return dict(_texts(name, value, False, ()))


def describe_modules(name: str, module: nn.Module) -> dict[str, str]:
    """Describe a module like :func:`describe`, without the values of parameters and buffers."""
    return dict(_module_texts(name, module, ()))


# Below, ``memory`` says that a container or an object may be working memory, which a fit changes as
# it runs; ``within`` are the values being described, which may refer to each other.


def _texts(name: str, value: Any, memory: bool, within: tuple[int, ...]) -> Texts:
    if id(value) in within:
        return
    within = (*within, id(value))
    if isinstance(value, PLAIN):
        yield name, text(value)
    elif isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        # the same on machines of another byte order
        dtype = array.dtype.newbyteorder("=")
        yield name, f"{tuple(array.shape)} {dtype} {digest_arrays(array)}"
    elif isinstance(value, CALLABLES):
        yield from _callable_texts(name, value, memory, within)
    elif isinstance(value, nn.Module):
        yield from _module_texts(name, value, within)
        tensors = dict(value.named_buffers()) | dict(value.named_parameters())
        yield from _each(name, tensors, memory, within)
    elif dataclasses.is_dataclass(value) and not isinstance(value, tuple):
        yield name, type(value).__qualname__
        yield from _each(name, children(value) or {}, True, within)
    elif isinstance(value, tuple) or not memory:
        yield from _container_texts(name, value, memory, within)


def _callable_texts(name: str, value: Any, memory: bool, within: tuple[int, ...]) -> Texts:
    if isinstance(value, functools.partial):
        yield from _texts(name, value.func, memory, within)
        arguments: dict[Any, Any] = {**dict(enumerate(value.args)), **value.keywords}
        yield from _each(name, arguments, memory, within)
    elif isinstance(value, SeqLoss):
        # as its criterion, so that both ways to give a loss are the same
        yield from _texts(name, value.criterion, False, within)
    elif isinstance(value, types.MethodType):
        yield from _texts(name, value.__func__, memory, within)
        yield from _texts(f"{name}.__self__", value.__self__, memory, within)
    else:
        yield name, getattr(value, "__qualname__", repr(value))
        # a library's code changes from version to version, and a checkpoint shall survive that
        if isinstance(value, types.FunctionType) and not _of_library(value):
            yield from _code_texts(name, value, within)


def _each(name: str, values: Mapping[Any, Any], memory: bool, within: tuple[int, ...]) -> Texts:
    for key, value in values.items():
        yield from _texts(f"{name}.{key}", value, memory, within)


def _container_texts(name: str, value: Any, memory: bool, within: tuple[int, ...]) -> Texts:
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # the order of a set differs from process to process
    if not isinstance(value, tuple | list):
        yield name, type(value).__qualname__
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        yield from _each(name, parts, True, within)
    elif _all_plain(value):
        yield name, f"({', '.join(map(text, value))})"
    else:
        yield name, f"{len(value)} things"
        yield from _each(name, dict(enumerate(value)), memory, within)


def _module_texts(name: str, module: nn.Module, within: tuple[int, ...]) -> Texts:
    for path, m in module.named_modules():
        where = f"{name}.{path}" if path else name
        yield where, type(m).__qualname__
        is_library = _of_library(type(m))
        if not is_library:
            yield from _code_texts(f"{where}.forward", type(m).forward, within)
        # beyond those of every module, and beyond a state
        skipped = OF_MODULES | OF_RECUR if isinstance(m, Recur) else OF_MODULES
        for key, value in vars(m).items():
            is_cache = is_library and key.startswith("_")
            if not (is_cache or key in skipped or isinstance(value, Tensor | nn.Module)):
                yield from _texts(f"{where}.{key}", value, not _is_setting(value), within)


def _code_texts(name: str, f: Any, within: tuple[int, ...]) -> Texts:
    code = getattr(f, "__code__", None)
    if code is None:
        return
    content = repr(_code_content(code)).encode()
    yield f"the code of {name}", digest_arrays(np.frombuffer(content, np.uint8))
    defaults = {**dict(enumerate(f.__defaults__ or ())), **(f.__kwdefaults__ or {})}
    yield from _each(name, defaults, True, within)
    for variable, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty closure cell
            yield from _texts(f"{name}.{variable}", cell.cell_contents, True, within)


def text(value: Any) -> str:
    """Return a number or string as text, the same for equal values of different types."""
    if isinstance(value, np.generic):
        value = value.item()
    # 1 and 1.0 are the same setting; larger floats are not exact integers
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return repr(value)


def _code_content(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a function does, without its location or the names of its variables."""
    constants = [
        _code_content(c) if isinstance(c, types.CodeType) else _sorted_constant(c)
        for c in code.co_consts
    ]
    return code.co_code, code.co_names, constants, code.co_argcount, code.co_kwonlyargcount


def _sorted_constant(constant: object) -> object:
    # "x in {...}" has a frozenset in the code, in an order that differs from process to process
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _of_library(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in LIBRARIES


def _is_setting(value: object) -> bool:
    """Whether an attribute of a module is a container of plain values."""
    if not isinstance(value, Mapping | list | set | frozenset):
        return False
    return _all_plain(value.values() if isinstance(value, Mapping) else value)


def _all_plain(values: Iterable[object]) -> bool:
    return all(isinstance(v, PLAIN) for v in values)
