"""Copy a model deeply, or with shared parameters."""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict
from collections.abc import Sequence
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
    }
    | {types.FunctionType, types.BuiltinFunctionType}
)
COPYING = (
    "__copy__",
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__slots__",
)
SPECIAL = frozenset({*COPYING, "train", "eval"})
INTERNAL = frozenset(nn.Module().__dict__)
INTERNAL_RNN = INTERNAL | {
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
    "_all_weights",
}
MEMORY = frozenset({"state", "_mark", "_marked"})  # of a Recur

_plain: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def deep_copy(model: nn.Module, shared: Sequence[Tensor] = ()) -> nn.Module:
    """Make a deep copy that shares some tensors.

    Tensors that a model keeps in its attributes, such as attention weights, may have a graph, which
    torch refuses to copy: they are detached in the copy.
    """
    memo: dict[int, Any] = {id(t): t for t in shared}
    for kept in (value for m in model.modules() for value in vars(m).values()):
        if (
            type(kept) is OrderedDict and not kept
        ):  # of hooks: a dozen in each module, half of the time of a copy
            memo[id(kept)] = OrderedDict()
            continue
        inside = (
            kept.values()
            if isinstance(kept, dict)
            else kept
            if isinstance(kept, list | tuple)
            else (kept,)
        )
        memo |= {
            id(t): t.detach()
            for t in inside
            if isinstance(t, Tensor) and not t.is_leaf and id(t) not in memo
        }
    twin = copy.deepcopy(model, memo)
    if not shared:
        for m in twin.modules():
            if isinstance(m, nn.RNNBase):
                # cuDNN wants them in one piece, and warns; on the CPU it does nothing
                m.flatten_parameters()
    return twin


def shallow_copy(model: nn.Module, training: bool | None = None) -> nn.Module | None:
    """Make a copy that shares parameters and buffers and has no recurrent state, at a tenth of the
    cost of a deep copy.

    Return None if it might differ from a deep copy: if a module has hooks, its own way to be copied
    or to change its mode, or attributes other than numbers, texts, functions, and lists, tuples,
    sets and dicts of them. ``training`` is the mode of the copy; None keeps that of the model.
    """
    return _copy_shallow(model, training, {})


def _copy_shallow(
    module: nn.Module, training: bool | None, made: dict[int, nn.Module]
) -> nn.Module | None:
    existing = made.get(id(module))  # a module that stands in several places
    if existing is not None:
        return existing
    if not _copies_plainly(type(module)):
        return None
    internal = INTERNAL_RNN if isinstance(module, nn.RNNBase) else INTERNAL
    content: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name == "_compiled_call_impl":  # it calls the original
            continue
        if name in internal:
            if value and name.endswith("_hooks"):
                return None
            content[name] = value.copy() if isinstance(value, dict | list | set) else value
        elif type(value) in IMMUTABLE or (isinstance(module, Recur) and name in MEMORY):
            content[name] = value
        elif (copied := _copy_collection(value)) is not None:
            content[name] = copied
        else:
            return None
    twin = made[id(module)] = object.__new__(type(module))
    for name, child in module._modules.items():
        if child is not None:
            copied = _copy_shallow(child, training, made)
            if copied is None:
                return None
            content["_modules"][name] = copied
    if training is not None:
        content["training"] = training
    twin.__dict__.update(content)
    if isinstance(twin, Recur):
        twin.reset()
    return twin


def _copy_collection(value: Any) -> Any:
    """Copy a collection of immutable values or of such collections; return None for anything else."""
    if type(value) is dict:
        items = _copy_collection(list(value.items()))
        return None if items is None else dict(items)
    if type(value) not in (list, tuple, set, frozenset):
        return None
    copied = [v if type(v) in IMMUTABLE else _copy_collection(v) for v in value]
    same = all(v is not None or given is None for v, given in zip(copied, value, strict=True))
    return type(value)(copied) if same else None


def _copies_plainly(kind: type) -> bool:
    """Whether copying a module of this class means copying its attributes."""
    plain = _plain.get(kind)
    if plain is None:
        own = [c for c in kind.__mro__ if c not in (object, nn.Module, Recur, nn.RNNBase)]
        plain = _plain[kind] = all(SPECIAL.isdisjoint(vars(c)) for c in own)
    return plain
