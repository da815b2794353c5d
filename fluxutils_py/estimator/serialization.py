"""Convert modules, losses, optimizers and specs to plain data, and build them from it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import fluxutils_py.nn as own_nn
import fluxutils_py.optim as own_optim
from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.building import NotStored, optimizer_arguments
from fluxutils_py.estimator.spec import Spec, spec_fields
from fluxutils_py.nn import cells, layers
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.optim import ChainedOptimizer, ChainFactory

PLAIN = (
    bool,
    int,
    float,
    str,
    type(None),
    np.bool_,
    np.integer,
    np.floating,
)  # NumPy scalars are stored as Python's


# -- modules ---------------------------------------------------------------------------------


def serialize_module(module: nn.Module) -> Any:
    """Return a config of plain data for :func:`deserialize_module`, or None if the module has none.

    Modules of torch.nn and fluxutils_py.nn have one if their attributes give back the constructor's
    arguments. This builds the module once to check.
    """
    try:
        config = _describe_module(module)
        with seeded(0):
            again = deserialize_module(config)
    except (LoadError, TypeError, ValueError, AttributeError):
        return None
    alike = _module_outline(again) == _module_outline(module) and repr(again) == repr(module)
    return config if alike else None


def deserialize_module(config: Any) -> nn.Module:
    """Build a module from a config, which may name only classes of torch.nn and fluxutils_py.nn and
    plain arguments.

    Raises
    ------
    LoadError
        If the config contains anything else.
    """
    try:
        cls = _module_class(config["class"])
        children = [deserialize_module(child) for child in config["children"]]
        if cls is nn.Sequential:
            return nn.Sequential(OrderedDict(zip(config["names"], children, strict=True)))
        if cls is own_nn.Recur:
            return own_nn.Recur(children[0], **_check_plain(config["arguments"]))
        classes = {name: _module_class(cell) for name, cell in config.get("classes", {}).items()}
        module = cls(**_check_plain(config["arguments"]), **classes)
        for name in config["frozen"]:
            module.get_parameter(name).requires_grad_(False)
        return module
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise LoadError(f"the file describes a model that cannot be built: {error}") from error


def _describe_module(module: nn.Module) -> dict[str, Any]:
    cls = type(module)
    config: dict[str, Any] = {
        "class": _class_name(cls),
        "arguments": {},
        "children": [],
        "names": [],
    }
    if module._forward_hooks or module._forward_pre_hooks:
        raise LoadError("hooks are user code")
    if isinstance(module, own_nn.Recur) and cls is own_nn.Recur:
        config["arguments"]["trainable_init"] = module.trainable_init
        config["children"] = [_describe_module(module.module)]
        return config
    if cls is nn.Sequential:
        config["names"] = [name for name, _ in module.named_children()]
        config["children"] = [_describe_module(m) for m in module.children()]
        return config
    config["frozen"] = [name for name, p in module.named_parameters() if not p.requires_grad]
    names = [
        name
        for name, p in inspect.signature(cls).parameters.items()
        if name not in ("device", "dtype")
        and name[0] != "_"
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if isinstance(module, nn.RNNBase):  # its signature is (*args, **kwargs)
        names = [
            "input_size",
            "hidden_size",
            "num_layers",
            "bias",
            "batch_first",
            "dropout",
            "bidirectional",
        ]
        names += ["proj_size"] * isinstance(module, nn.LSTM) + ["nonlinearity"] * isinstance(
            module, nn.RNN
        )
    for name in names:
        value = getattr(module, name)
        if isinstance(value, type):  # the cell of a SequenceStack
            config.setdefault("classes", {})[name] = _class_name(value)
            continue
        config["arguments"][name] = (
            value is not None if name == "bias" and not isinstance(value, bool) else value
        )
    _check_plain(config["arguments"])
    return config


def _module_outline(module: nn.Module) -> list[Any]:
    """Return names and shapes of parameters and buffers; missing names reveal shared parameters."""
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
        if name in ("device", "dtype"):  # which no config has: they are the estimator's
            raise LoadError(f"argument {name!r} is none that a file may give")
        values = value if isinstance(value, tuple | list) else (value,)
        if not all(isinstance(v, (*PLAIN, torch.Tensor)) for v in values):
            raise LoadError(f"argument {name!r} is a {type(value).__name__}, not plain data")
    return dict(arguments)


# -- losses, optimizers, schedulers and specs --------------------------------------------------------------

# what a config may name: modules, and a test for their names
PLACES: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "torch.nn": (nn, lambda f: _is_class(f, nn.Module)),
    "torch.nn.functional": (F, lambda f: _is_loss(getattr(f, "__name__", ""))),
    "torch.optim": (torch.optim, lambda f: _is_class(f, torch.optim.Optimizer)),
    "torch.optim.lr_scheduler": (torch.optim.lr_scheduler, lambda f: _is_class(f, LRScheduler)),
    "fluxutils_py.optim": (own_optim, lambda f: _is_class(f, own_optim.Transform)),
}
LOSSES, OPTIMIZERS = ("torch.nn", "torch.nn.functional"), ("torch.optim", "fluxutils_py.optim")
SCHEDULERS = ("torch.optim.lr_scheduler",)


def serialize(value: Any) -> Any:
    """Return the config of a loss, an optimizer or a scheduler, from which :func:`deserialize`
    rebuilds it.

    The config is a dict of plain data: the name of a class or function of ``PLACES``, or the links
    of a chain; the ``keywords`` of a partial; or the arguments that an instance was ``made_with``.

    Raises
    ------
    LoadError
        If the value is user code, or has settings that are not plain data.
    """
    if value is None:
        return None
    if isinstance(value, SeqLoss):
        return serialize(value.criterion)
    if isinstance(value, functools.partial) and not value.args:
        config = serialize(value.func)
        return {
            **config,
            "keywords": {**config.get("keywords", {}), **_check_plain(value.keywords)},
        }
    if isinstance(value, ChainFactory):
        return {"chain": [serialize(link) for link in value.links]}
    if isinstance(value, ChainedOptimizer):
        return {"chain": [serialize(link) for link in (*value.before, value.inner, *value.after)]}
    if isinstance(value, torch.optim.Optimizer):
        if len(value.param_groups) > 1:
            raise LoadError("the parameter groups belong to the parameters of one model")
        return {"name": _name_of(type(value)), "keywords": _check_plain(optimizer_arguments(value))}
    if isinstance(value, own_optim.Transform):
        return {"name": _name_of(type(value)), "made_with": dataclasses.asdict(value)}  # type: ignore[call-overload]  # all are dataclasses
    if isinstance(value, nn.Module):
        names = [
            n
            for n in inspect.signature(type(value)).parameters
            if n not in ("size_average", "reduce")
        ]
        arguments = {n: getattr(value, n) for n in names if hasattr(value, n)}
        return {"name": _name_of(type(value)), "made_with": _check_plain(arguments)}
    return {"name": _name_of(value)}


def deserialize(config: Any, places: tuple[str, ...]) -> Any:
    """Invert :func:`serialize`, for names in these places only.

    Raises
    ------
    LoadError
        If the config names anything else.
    """
    if config is None:
        return None
    if "chain" in config:
        made: Any = ChainFactory(*(deserialize(link, places) for link in config["chain"]))
    else:
        prefix, _, name = str(config["name"]).rpartition(".")
        module, allows = PLACES[prefix] if prefix in places else (None, _is_loss)
        made = getattr(module, name, None)
        if made is None or not allows(made):
            raise LoadError(
                f"the file names {config['name']!r}, which is none of {' or '.join(places)}"
            )
    if "made_with" in config:
        return made(**_check_plain(config["made_with"]))
    keywords = config.get("keywords")
    return functools.partial(made, **_check_plain(keywords)) if keywords else made


def _name_of(f: Any) -> str:
    for prefix, (module, allows) in PLACES.items():
        name = getattr(f, "__name__", "")
        if name and getattr(module, name, None) is f and allows(f):
            return f"{prefix}.{name}"
    raise LoadError(f"{full_name(f)} is user code")


def _is_class(f: Any, base: type) -> bool:
    return isinstance(f, type) and issubclass(f, base) and f is not base


def _is_loss(name: str) -> bool:
    return name.endswith("_loss") or name.startswith(
        ("cross_entropy", "binary_cross_entropy", "kl_div")
    )


def serialize_spec(spec: Any) -> dict[str, Any] | None:
    """Return the plain fields of a spec of any form, and the config of its scheduler, if there is
    one.
    """
    if spec is None:
        return None
    fields = spec_fields(spec)
    scheduler = fields.pop("scheduler", None)
    plain = {
        k: plain_value(v) for k, v in fields.items() if isinstance(v, (*PLAIN, numbers.Number))
    }
    return {
        "is_spec": isinstance(spec, Spec),
        "fields": plain,
        "scheduler": try_serialize(scheduler),
    }


def deserialize_spec(config: Any) -> Any:
    if config is None:
        return None
    fields = dict(config["fields"])
    if config["scheduler"] is not None:
        fields["scheduler"] = restore_argument(
            config["scheduler"], "spec.scheduler", lambda c: deserialize(c, SCHEDULERS)
        )
    return Spec(**fields) if config["is_spec"] else fields


def try_serialize(value: Any) -> tuple[Any, str] | None:
    """Return the config of a value, None for user code, and its name; None for None."""
    if value is None:
        return None
    try:
        return serialize(value), full_name(value)
    except LoadError:
        return None, full_name(value)


def restore_argument(
    stored: tuple[Any, str] | None, argument: str, build: Callable[[Any], Any]
) -> Any:
    """Invert :func:`try_serialize`, with a placeholder for user code, which files do not store."""
    if stored is None:
        return None
    config, name = stored
    return NotStored(argument, name) if config is None else build(config)


# -- optimizer state ---------------------------------------------------------------------------------------


def serialize_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Any] | None:
    """Return class, settings, moments and parameter positions of an optimizer; None if it is user
    code.
    """
    chain: Any = (
        optimizer if isinstance(optimizer, ChainedOptimizer) else ChainedOptimizer(optimizer)
    )
    inner = chain.inner
    index = {id(p): i for i, p in enumerate(model.parameters())}
    try:
        return {
            "name": _name_of(type(inner)),
            "links": [
                [serialize(t) for t in transforms] for transforms in (chain.before, chain.after)
            ],
            "groups": [[index[id(p)] for p in group["params"]] for group in inner.param_groups],
            "defaults": plain_value(optimizer_arguments(inner)),
            "state": inner.state_dict(),
        }
    except LoadError:
        return None


def deserialize_optimizer(config: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Invert :func:`serialize_optimizer`, without the moments."""
    params = list(model.parameters())
    groups = [{"params": [params[i] for i in group]} for group in config["groups"]]
    optimizer = deserialize({"name": config["name"]}, OPTIMIZERS)(groups, **config["defaults"])
    before, after = (
        [deserialize(t, OPTIMIZERS) for t in transforms] for transforms in config["links"]
    )
    return ChainedOptimizer(optimizer, before, after) if before or after else optimizer


# -- values ----------------------------------------------------------------------------------------------


def full_name(value: Any) -> str:
    """Return the name, with the module, of a class, a function, or the class of an instance."""
    value = value.criterion if isinstance(value, SeqLoss) else value
    while isinstance(value, functools.partial):
        value = value.func
    cls = value if hasattr(value, "__qualname__") else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def plain_value(value: Any) -> Any:
    """Convert ``value`` to Python's types; tensors stay unchanged, anything else becomes None."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (*PLAIN, bytes, torch.Tensor)):
        return value
    if isinstance(value, Mapping):
        return {k: plain_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return (
            tuple(map(plain_value, value))
            if type(value) is tuple
            else [plain_value(v) for v in value]
        )
    return None
