"""Describe any value as texts by name, to compare ranks with each other and with checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.nn import Recur
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.training.plain_files import PLAIN_TYPES
from fluxutils_py.tree import children

# their functions and modules are described by name
LIBRARIES = (
    "torch",
    "numpy",
    "fluxutils_py",
)
# Values that are shown by their text. Files hold others (see plain_files): no NumPy scalars.
PLAIN = (*PLAIN_TYPES, np.generic, torch.dtype, torch.Size)
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
    description = _Description()
    description.add(name, value)
    return description.texts


def describe_modules(name: str, module: nn.Module) -> dict[str, str]:
    """Describe a module like :func:`describe`, without the values of parameters and buffers."""
    description = _Description()
    description.add_modules(name, module)
    return description.texts


class _Description:
    """Collects texts by name.

    An argument ``memory`` says that a container or an object may be working memory, which a fit
    changes as it runs.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._within: list[int] = []  # functions in progress, which may refer to each other

    def add(
        self,
        name: str,
        value: Any,
        memory: bool = False,
    ) -> None:
        if id(value) in self._within:
            return
        self._within.append(id(value))
        try:
            self._add_value(name, value, memory)
        finally:
            self._within.pop()

    def add_modules(self, name: str, module: nn.Module) -> None:
        for path, m in module.named_modules():
            where = f"{name}.{path}" if path else name
            self.texts[where] = type(m).__qualname__
            is_library = _of_library(type(m))
            if not is_library:
                self._add_code(f"{where}.forward", type(m).forward)
            for key, value in _attributes(m).items():
                is_cache = is_library and key.startswith("_")
                if not is_cache and not isinstance(value, Tensor | nn.Module):
                    self.add(
                        f"{where}.{key}",
                        value,
                        memory=not _is_setting(value),
                    )

    def _add_value(self, name: str, value: Any, memory: bool) -> None:
        if isinstance(value, PLAIN):
            self.texts[name] = text(value)
        elif isinstance(value, Tensor | np.ndarray):
            self.texts[name] = _array_text(value)
        elif isinstance(value, functools.partial):
            self.add(name, value.func, memory)
            arguments: dict[Any, Any] = {
                **dict(enumerate(value.args)),
                **value.keywords,
            }
            self._add_each(name, arguments, memory)
        elif isinstance(value, SeqLoss):
            # as its criterion, so that both ways to give a loss are the same
            self.add(name, value.criterion)
        elif isinstance(value, types.MethodType):
            self.add(name, value.__func__, memory)
            self.add(f"{name}.__self__", value.__self__, memory)
        elif isinstance(
            value,
            type | types.FunctionType | types.BuiltinFunctionType | np.ufunc,
        ):
            self._add_callable(name, value)
        elif isinstance(value, nn.Module):
            self.add_modules(name, value)
            tensors = dict(value.named_buffers()) | dict(value.named_parameters())
            self._add_each(name, tensors, memory)
        elif isinstance(value, tuple):
            self._add_sequence(name, value, memory)
        elif dataclasses.is_dataclass(value):
            self.texts[name] = type(value).__qualname__
            self._add_each(name, children(value) or {}, memory=True)
        elif not memory:
            self._add_container(name, value)

    def _add_callable(self, name: str, f: Any) -> None:
        self.texts[name] = getattr(f, "__qualname__", repr(f))
        # a library's code changes from version to version, and a checkpoint shall survive that
        if isinstance(f, types.FunctionType) and not _of_library(f):
            self._add_code(name, f)

    def _add_container(self, name: str, value: Any) -> None:
        if isinstance(value, list):
            self._add_sequence(name, value, memory=False)
        elif isinstance(value, set | frozenset):
            # the order of a set differs from process to process
            self._add_sequence(name, sorted(value, key=repr), memory=False)
        else:
            self.texts[name] = type(value).__qualname__
            is_mapping = isinstance(value, Mapping)
            parts = value if is_mapping else getattr(value, "__dict__", {})
            self._add_each(name, parts, memory=True)

    def _add_each(self, name: str, values: Mapping[Any, Any], memory: bool) -> None:
        for key, value in values.items():
            self.add(f"{name}.{key}", value, memory)

    def _add_sequence(self, name: str, values: Sequence[Any], memory: bool) -> None:
        if _all_plain(values):
            self.texts[name] = f"({', '.join(map(text, values))})"
            return
        self.texts[name] = f"{len(values)} things"
        self._add_each(name, dict(enumerate(values)), memory)

    def _add_code(self, name: str, f: Any) -> None:
        code = getattr(f, "__code__", None)
        if code is None:
            return
        content = repr(_code_content(code)).encode()
        self.texts[f"the code of {name}"] = digest_arrays(np.frombuffer(content, np.uint8))
        defaults = {
            **dict(enumerate(f.__defaults__ or ())),
            **(f.__kwdefaults__ or {}),
        }
        self._add_each(name, defaults, memory=True)
        for variable, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
            try:
                self.add(
                    f"{name}.{variable}",
                    cell.cell_contents,
                    memory=True,
                )
            except ValueError:  # an empty closure cell
                continue


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module has beyond those of every module, and beyond a state."""
    skipped = OF_MODULES | OF_RECUR if isinstance(module, Recur) else OF_MODULES
    return {key: value for key, value in vars(module).items() if key not in skipped}


def _array_text(value: Tensor | np.ndarray) -> str:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    # the same on machines of another byte order
    dtype = array.dtype.newbyteorder("=")
    return f"{tuple(array.shape)} {dtype} {digest_arrays(array)}"


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
    return (
        code.co_code,
        code.co_names,
        constants,
        code.co_argcount,
        code.co_kwonlyargcount,
    )


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
