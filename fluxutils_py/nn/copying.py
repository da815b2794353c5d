"""Copy a model deeply, or with shared parameters."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.recurrent import Recur

IMMUTABLE = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type,
        range,
        torch.dtype,
        torch.device,
        torch.Size,
        types.FunctionType,
        types.BuiltinFunctionType,
    }
)
SPECIAL = frozenset(
    {
        "__copy__",
        "__deepcopy__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__slots__",
        "train",
        "eval",
    }
)
INTERNAL = frozenset(nn.Module().__dict__)
INTERNAL_RNN = INTERNAL | {
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
    "_all_weights",
}
MEMORY = frozenset({"state", "_mark", "_marked", "sensitivity"})  # of a Recur

_plain: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def deep_copy(model: nn.Module, shared: Sequence[Tensor] = ()) -> nn.Module:
    """Make a deep copy that shares some tensors.

    Tensors that a model keeps in its attributes, such as attention weights, may have a graph, which
    torch refuses to copy: they are detached in the copy.
    """
    twin = _cloned(model, {id(t): t for t in shared})
    if twin is not None:
        return twin
    memo: dict[int, Any] = {id(t): t for t in shared}
    for m in model.modules():
        for value in vars(m).values():
            for t in _tensors_with_graph(value):
                memo.setdefault(id(t), t.detach())
    twin = copy.deepcopy(model, memo)
    if not shared:
        for m in twin.modules():
            if isinstance(m, nn.RNNBase):
                # cuDNN wants them in one piece, and warns; on the CPU it does nothing
                m.flatten_parameters()
    return twin


def _cloned(model: nn.Module, memo: dict[int, Any]) -> nn.Module | None:
    """Make a deep copy several times faster than ``copy.deepcopy``, of a model that is made of
    plain attributes and carries no state; None for others.
    """
    if any(m.state is not None for m in model.modules() if isinstance(m, Recur)):
        return None
    twin = shallow_copy(model)
    if twin is None:
        return None
    for m in twin.modules():
        for named in (m.named_parameters, m.named_buffers):
            for name, t in list(named(recurse=False, remove_duplicate=False)):
                setattr(m, name, copy.deepcopy(t, memo))
    return twin


def _tensors_with_graph(value: object) -> Iterator[Tensor]:
    """Yield the tensors of an attribute, or of the collection in it, that have a graph."""
    items: Iterable[object] = (value,)
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    for item in items:
        if isinstance(item, Tensor) and not item.is_leaf:
            yield item


def shallow_copy(model: nn.Module, training: bool | None = None) -> nn.Module | None:
    """Make a copy that shares parameters and buffers and has no recurrent state, at a tenth of the
    cost of a deep copy.

    Return None if it might differ from a deep copy: if a module has hooks, custom methods to be
    copied or to change its mode, or attributes other than numbers, texts, functions, and lists,
    tuples, sets and dicts of them. ``training`` is the mode of the copy; None keeps that of the
    model.
    """
    return _copy_shallow(model, training, {})


def _copy_shallow(
    module: nn.Module, training: bool | None, made: dict[int, nn.Module]
) -> nn.Module | None:
    existing = made.get(id(module))  # a module that stands in several places
    if existing is not None:
        return existing
    content = _copied_attributes(module) if _copies_plainly(type(module)) else None
    if content is None:
        return None
    twin = made[id(module)] = object.__new__(type(module))
    children = content["_modules"]  # a copy of the dict: the original keeps its modules
    # not named_children, which leaves out None and shows a module used twice once
    for name, child in children.items():
        if child is not None:
            children[name] = _copy_shallow(child, training, made)
            if children[name] is None:
                return None
    if training is not None:
        content["training"] = training
    twin.__dict__.update(content)
    if isinstance(twin, Recur):
        twin.reset()
    return twin


def _copied_attributes(module: nn.Module) -> dict[str, Any] | None:
    """Return the attributes for a copy of one module; None if one is not immutable plain data."""
    internal = INTERNAL_RNN if isinstance(module, nn.RNNBase) else INTERNAL
    unchecked = MEMORY if isinstance(module, Recur) else frozenset()
    content: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":  # it calls the original
            continue
        if name in internal:
            if value and name.endswith("_hooks"):
                return None
            content[name] = value.copy() if isinstance(value, dict | list | set) else value
        elif type(value) in IMMUTABLE or name in unchecked:
            content[name] = value
        else:
            content[name] = _copy_collection(value)
            if content[name] is None:
                return None
    return content


def _copy_collection(value: Any) -> Any:
    """Copy a collection of immutable values or of such collections; None for anything else."""
    if type(value) is dict:
        items = _copy_collection(list(value.items()))
        return None if items is None else dict(items)
    if type(value) not in (list, tuple, set, frozenset):
        return None
    copied = [v if type(v) in IMMUTABLE else _copy_collection(v) for v in value]
    # None is also a copy of None
    same = all(v is not None or given is None for v, given in zip(copied, value, strict=True))
    return type(value)(copied) if same else None


def _copies_plainly(module_class: type) -> bool:
    """Return whether copying a module of this class means copying its attributes."""
    plain = _plain.get(module_class)
    if plain is None:
        known = (object, nn.Module, Recur, nn.RNNBase)
        others = [c for c in module_class.__mro__ if c not in known]
        plain = all(SPECIAL.isdisjoint(vars(c)) for c in others)
        _plain[module_class] = plain
    return plain
