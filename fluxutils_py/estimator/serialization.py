"""Modules, losses, optimizers and specs as recipes: plain data that they can be made from again."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fluxutils_py.nn as own_nn
import fluxutils_py.optim as own_optim
from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.building import NotStored, optimizer_class
from fluxutils_py.estimator.spec import Spec, spec_fields
from fluxutils_py.nn import cells, layers
from fluxutils_py.nn.losses import SeqLoss, seqloss
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.optim import ChainedOptimizer, ChainFactory

PLAIN = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating)  # NumPy's are stored as Python's


# -- modules as recipes ---------------------------------------------------------------------------------


def serialize_module(module: nn.Module) -> Any:
    """A recipe of plain data that :func:`deserialize_module` makes the same module from; None if there is none.

    Modules of torch.nn and fluxutils_py.nn have one if their constructor's arguments can be read back from their
    attributes, which is tried out.
    """
    try:
        recipe = _describe(module)
        with seeded(0):
            again = deserialize_module(recipe)
    except (LoadError, TypeError, ValueError, AttributeError):
        return None
    alike = _outline(again) == _outline(module) and repr(again) == repr(module)
    return recipe if alike else None


def deserialize_module(recipe: Any) -> nn.Module:
    """The module of a recipe. Only classes of torch.nn and fluxutils_py.nn, and only plain arguments.

    Raises
    ------
    LoadError
        If the recipe asks for anything else.
    """
    try:
        cls = _module_class(recipe["class"])
        children = [deserialize_module(child) for child in recipe["children"]]
        if cls is nn.Sequential:
            return nn.Sequential(OrderedDict(zip(recipe["names"], children, strict=True)))
        if cls is own_nn.Recur:
            return own_nn.Recur(children[0], **_check_plain(recipe["arguments"]))
        classes = {name: _module_class(cell) for name, cell in recipe.get("classes", {}).items()}
        module = cls(**_check_plain(recipe["arguments"]), **classes)
        for name in recipe["frozen"]:
            module.get_parameter(name).requires_grad_(False)
        return module
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise LoadError(f"the file describes a model that cannot be built: {error}") from error


def _describe(module: nn.Module) -> dict[str, Any]:
    cls = type(module)
    recipe: dict[str, Any] = {"class": _class_name(cls), "arguments": {}, "children": [], "names": []}
    if module._forward_hooks or module._forward_pre_hooks:
        raise LoadError("hooks are user code")
    if isinstance(module, own_nn.Recur) and cls is own_nn.Recur:
        recipe["arguments"]["trainable_init"] = module.trainable_init
        recipe["children"] = [_describe(module.module)]
        return recipe
    if cls is nn.Sequential:
        recipe["names"] = [name for name, _ in module.named_children()]
        recipe["children"] = [_describe(m) for m in module.children()]
        return recipe
    recipe["frozen"] = [name for name, p in module.named_parameters() if not p.requires_grad]
    names = [
        name
        for name, p in inspect.signature(cls).parameters.items()
        if name not in ("device", "dtype") and name[0] != "_" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if isinstance(module, nn.RNNBase):  # their signatures are (*args, **kwargs)
        names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]
        names += ["proj_size"] * isinstance(module, nn.LSTM) + ["nonlinearity"] * isinstance(module, nn.RNN)
    for name in names:
        value = getattr(module, name)
        if isinstance(value, type):  # the layer that a SequenceStack is made of
            recipe.setdefault("classes", {})[name] = _class_name(value)
            continue
        recipe["arguments"][name] = value is not None if name == "bias" and not isinstance(value, bool) else value
    _check_plain(recipe["arguments"])
    return recipe


def _outline(module: nn.Module) -> list[Any]:
    """Names and shapes of parameters and buffers; shared parameters show as names that are missing."""
    return [
        *((name, t.shape) for name, t in module.state_dict().items()),
        *((name, p.requires_grad) for name, p in module.named_parameters()),
    ]


_NAMESPACES = {
    "fluxutils_py.nn": own_nn,
    "fluxutils_py.nn.cells": cells,
    "fluxutils_py.nn.layers": layers,
    "torch.nn": nn,
}


def _class_name(cls: type) -> str:
    for prefix, place in _NAMESPACES.items():
        if getattr(place, cls.__name__, None) is cls:
            return f"{prefix}.{cls.__name__}"
    raise LoadError(f"{cls.__name__} is user code")


def _module_class(full_name: str) -> type[nn.Module]:
    prefix, _, name = full_name.rpartition(".")
    found = getattr(_NAMESPACES.get(prefix), name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise LoadError(f"{full_name!r} is no module of torch.nn or fluxutils_py.nn")
    return found


def _check_plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        if not all(isinstance(v, PLAIN) for v in (value if isinstance(value, tuple | list) else (value,))):
            raise LoadError(f"argument {name!r} is a {type(value).__name__}, not plain data")
    return dict(arguments)


# -- losses, optimizers and specs as recipes -------------------------------------------------------------
# each describe_* returns (recipe or None, argument, name); each build_* takes the recipe


def serialize_loss(loss: Any) -> tuple[Any, str, str]:
    """None, or a criterion of torch with plain settings (tensors too: class weights)."""
    if loss is None:
        return {"criterion": None}, "loss", "None"
    f = loss.criterion if isinstance(loss, SeqLoss) else loss
    keywords: dict[str, Any] = {}
    while isinstance(f, functools.partial) and not f.args:
        keywords, f = {**f.keywords, **keywords}, f.func
    recipe: Any = None
    if isinstance(f, nn.Module) and getattr(nn, type(f).__name__, None) is type(f):
        names = [n for n in inspect.signature(type(f)).parameters if n not in ("size_average", "reduce")]
        recipe = {"criterion": type(f).__name__, "arguments": {n: getattr(f, n) for n in names if hasattr(f, n)}}
    elif _loss_function(getattr(f, "__name__", "")) is f:
        recipe = {"criterion": f.__name__, "arguments": keywords}
    if recipe and not all(isinstance(v, (*PLAIN, torch.Tensor)) for v in recipe["arguments"].values()):
        recipe = None
    return recipe, "loss", full_name(f)


def deserialize_loss(recipe: Any) -> Any:
    name = recipe["criterion"]
    if name is None:
        return None
    function = _loss_function(name)
    if function is not None:
        return seqloss(functools.partial(function, **recipe["arguments"]) if recipe["arguments"] else function)
    cls = getattr(nn, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and name.endswith("Loss")):
        raise LoadError(f"the file names a loss {name!r}, which is no criterion of torch.nn")
    return seqloss(cls(**recipe["arguments"]))


def _loss_function(name: str) -> Any:
    is_loss = name.endswith("_loss") or name.startswith(("cross_entropy", "binary_cross_entropy", "kl_div"))
    return getattr(F, name, None) if is_loss else None


def serialize_opt(opt: Any) -> tuple[Any, str, str]:
    """None, or a class of torch.optim with plain settings, or a chain of one and transforms."""
    if opt is None:
        return {"class": None}, "opt", "None"
    if isinstance(opt, torch.optim.Optimizer):
        if len(opt.param_groups) > 1:  # belongs to the parameters of one model: a refit needs it again
            return None, "opt", full_name(opt)
        if isinstance(opt, ChainedOptimizer):
            return _describe_chain(opt.before, opt.inner, opt.after, {})
        accepted = inspect.signature(type(opt)).parameters
        opt = functools.partial(type(opt), **{k: v for k, v in opt.defaults.items() if k in accepted})
    f, keywords = (opt.func, opt.keywords) if isinstance(opt, functools.partial) and not opt.args else (opt, {})
    if isinstance(f, ChainFactory):
        return _describe_chain(f.before, f.optimizer, f.after, keywords)
    name = getattr(f, "__name__", "")
    plain = all(isinstance(v, (*PLAIN, tuple)) for v in keywords.values())
    recipe = {"class": name, "arguments": dict(keywords)} if optimizer_class(name) is f and plain else None
    return recipe, "opt", full_name(f)


def deserialize_opt(recipe: Any) -> Any:
    if recipe["class"] is None:
        return None
    if "links" in recipe:
        before, inner, after = recipe["links"]
        chain = ChainFactory(*deserialize_transforms(before), deserialize_opt(inner), *deserialize_transforms(after))
        return functools.partial(chain, **recipe["arguments"]) if recipe["arguments"] else chain
    cls = optimizer_class(recipe["class"])
    if cls is None:
        raise LoadError(f"the file names an optimizer {recipe['class']!r}, which is none of torch.optim")
    return functools.partial(cls, **recipe["arguments"]) if recipe["arguments"] else cls


def _describe_chain(before: Any, optimizer: Any, after: Any, keywords: dict[str, Any]) -> tuple[Any, str, str]:
    links = _describe_transforms(before), serialize_opt(optimizer)[0], _describe_transforms(after)
    plain = None not in links and all(isinstance(v, (*PLAIN, tuple)) for v in keywords.values())
    recipe = {"class": "Chain", "arguments": dict(keywords), "links": links}
    return recipe if plain else None, "opt", "fluxutils_py.optim.Chain"


def _describe_transforms(transforms: Iterable[Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and settings of transforms; None if one is user code."""
    if any(getattr(own_optim, type(t).__name__, None) is not type(t) for t in transforms):
        return None
    return [(type(t).__name__, dataclasses.asdict(t)) for t in transforms]


def deserialize_transforms(recipes: Any) -> list[Any]:
    found = []
    for name, arguments in recipes:
        cls = getattr(own_optim, name, None)
        if not isinstance(cls, type) or not issubclass(cls, own_optim.Transform):
            raise LoadError(f"the file names a transform {name!r}, which is none of fluxutils_py.optim")
        found.append(cls(**_check_plain(arguments)))
    return found


def serialize_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer at work: its class, settings and moments, and the positions of its parameters in the model."""
    if isinstance(optimizer, ChainedOptimizer):
        links = _describe_transforms(optimizer.before), _describe_transforms(optimizer.after)
        content = serialize_optimizer(optimizer.inner, model)
        return {**content, "links": links} if None not in links else {**content, "class": ""}
    at = {id(p): i for i, p in enumerate(model.parameters())}
    return {
        "class": type(optimizer).__name__ if optimizer_class(type(optimizer).__name__) is type(optimizer) else "",
        "groups": [[at[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        "defaults": plain_value(optimizer.defaults),
        "state": optimizer.state_dict(),
    }


def serialize_spec(spec: Any) -> tuple[Any, str, str]:
    """Its plain fields, as a Spec or a dict; a scheduler, if it is one of torch with plain settings."""
    if spec is None:
        return {"class": None}, "spec", "None"
    fields = spec_fields(spec)
    scheduler = fields.pop("scheduler", None)
    recipe: dict[str, Any] = {
        "class": "Spec" if isinstance(spec, Spec) else "dict",
        "fields": {k: plain_value(v) for k, v in fields.items() if isinstance(v, (*PLAIN, numbers.Number))},
    }
    if scheduler is not None:
        f, keywords = (
            (scheduler.func, scheduler.keywords) if isinstance(scheduler, functools.partial) else (scheduler, {})
        )
        name = getattr(f, "__name__", repr(f))
        plain = _scheduler_class(name) is f and all(isinstance(v, (*PLAIN, tuple, list)) for v in keywords.values())
        recipe["scheduler"] = (name, dict(keywords) if plain else None)
    return recipe, "spec", full_name(spec)


def deserialize_spec(recipe: Any) -> Any:
    if recipe["class"] is None:
        return None
    fields = dict(recipe["fields"])
    if "scheduler" in recipe:
        name, keywords = recipe["scheduler"]
        cls = _scheduler_class(name)
        known = cls is not None and keywords is not None
        fields["scheduler"] = functools.partial(cls, **keywords) if known else NotStored("spec.scheduler", name)
    return Spec(**fields) if recipe["class"] == "Spec" else fields


def _scheduler_class(name: str) -> Any:
    found = getattr(torch.optim.lr_scheduler, name, None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler) else None


# -- values ----------------------------------------------------------------------------------------------


def full_name(value: Any) -> str:
    cls = value if hasattr(value, "__qualname__") else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def plain_value(value: Any) -> Any:
    """``value`` in Python's own types, tensors as they are; what is neither is left out as None."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (*PLAIN, torch.Tensor)):
        return value
    if isinstance(value, Mapping):
        return {k: plain_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(plain_value(v) for v in value)
            if type(value) in (list, tuple)
            else [plain_value(v) for v in value]
        )
    return None
