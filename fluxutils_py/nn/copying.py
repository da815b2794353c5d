"""Copy a model deeply, or with shared parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fluxutils_py.nn.recurrent import Recur

# modules of torch and of this package, whose attributes a forward pass does not change
PLAIN = ("torch.nn.modules.", "fluxutils_py.nn.")


def deep_copy(model: nn.Module, shared: Sequence[Tensor] = ()) -> nn.Module:
    """Make a deep copy that shares some tensors.

    Tensors that a model keeps in its attributes, such as attention weights, may have a graph, which
    torch refuses to copy: they are detached in the copy.
    """
    memo: dict[int, Any] = {id(t): t for t in shared}
    for m in model.modules():
        for value in vars(m).values():
            if type(value) is OrderedDict and not value:
                # of hooks: a dozen in each module, which take half of the time of a copy
                memo[id(value)] = OrderedDict()
                continue
            for t in _tensors_with_graph(value):
                memo.setdefault(id(t), t.detach())
    twin = copy.deepcopy(model, memo)
    if not shared:
        for m in twin.modules():
            if isinstance(m, nn.RNNBase):
                # cuDNN wants them in one piece, and warns; on the CPU it does nothing
                m.flatten_parameters()
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


def shallow_copy(model: nn.Module) -> nn.Module | None:
    """Make a copy in evaluation mode that shares parameters and buffers and has no recurrent state,
    at a tenth of the cost of a deep copy.

    Return None if it might differ from a deep copy: if a module is neither of torch nor of this
    package, or has hooks.
    """
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    return _copy_modules(model, {}) if all(map(_copies_plainly, modules)) else None


def _copies_plainly(module: nn.Module) -> bool:
    """Return whether the attributes of a module may be shared with a copy."""
    content = vars(module)
    hooks = [name for name, value in content.items() if name.endswith("_hooks") and value]
    return type(module).__module__.startswith(PLAIN) and not hooks and "forward" not in content


def _copy_modules(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:  # a module that stands in several places
        return made[id(module)]
    twin = made[id(module)] = object.__new__(type(module))
    content: dict[str, Any] = {**vars(module), "training": False}
    content.pop("_compiled_call_impl", None)  # it calls the original
    for name in ("_parameters", "_buffers", "_modules"):
        content[name] = content[name].copy()
    # not named_children, which leaves out None and shows a module used twice once
    children = content["_modules"]
    for name, child in children.items():
        if child is not None:
            children[name] = _copy_modules(child, made)
    twin.__dict__.update(content)
    if isinstance(twin, Recur):
        twin.reset()
    return twin
