"""Convert modules, losses, optimizers and specs to plain data, and build them from it."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import fluxutils_py.nn as own_nn
import fluxutils_py.optim as own_optim
from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.building import NotStored, optimizer_arguments, parameter_places
from fluxutils_py.estimator.spec import Spec, spec_fields
from fluxutils_py.nn import cells, layers
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.optim import ChainedOptimizer, ChainFactory
from fluxutils_py.torch_private import call_hooks_of
from fluxutils_py.training.plain_files import SETTING_TYPES, plain_or_none

# arguments that no config has: they are the estimator's
MACHINE = ("device", "dtype")
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# -- modules ---------------------------------------------------------------------------------


def serialize_module(module: nn.Module) -> Any:
    """Return a config of plain data for :func:`deserialize_module`, or None if the module has none.

    Modules of torch.nn and fluxutils_py.nn have one if their attributes tell the constructor's
    arguments. To check this, the module is built once.
    """
    try:
        config = _describe_module(module)
        with seeded(0):
            # building draws initial weights, which must not move the global generators
            again = deserialize_module(config)
    # an attribute may be missing, or be no argument that builds the same layer
    except (LoadError, TypeError, ValueError, AttributeError):
        return None
    alike = _module_outline(again) == _module_outline(module) and repr(again) == repr(module)
    return config if alike else None


def deserialize_module(config: Any) -> nn.Module:
    """Build a module from a config of :func:`serialize_module`.

    The config may name only classes of torch.nn and fluxutils_py.nn, and plain arguments.

    Raises
    ------
    LoadError
        If the config contains anything else.
    """
    try:
        cls = _named(config["class"], MODULES)
        children = [deserialize_module(child) for child in config["children"]]
        if cls is nn.Sequential:
            return nn.Sequential(OrderedDict(zip(config["names"], children, strict=True)))
        if cls is own_nn.Recur:
            return own_nn.Recur(children[0], **_check_plain(config["arguments"]))
        cells = config.get("classes", {}).items()
        classes = {name: _named(cell, MODULES) for name, cell in cells}
        module: nn.Module = cls(**_check_plain(config["arguments"]), **classes)
        for name in config["frozen"]:
            module.get_parameter(name).requires_grad_(False)
        return module
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise LoadError(f"the file describes a model that cannot be built: {error}") from error


def _describe_module(module: nn.Module) -> dict[str, Any]:
    if any(call_hooks_of(module)):
        raise LoadError("hooks are user code")
    config: dict[str, Any] = {
        "class": _name_of(type(module), MODULES),
        "arguments": {},
        "children": [],
        "names": [],
    }
    # no subclass, which may compute something else
    if isinstance(module, own_nn.Recur) and type(module) is own_nn.Recur:
        config["arguments"]["trainable_init"] = module.trainable_init
        config["children"] = [_describe_module(module.module)]
        return config
    if type(module) is nn.Sequential:
        config["names"] = [name for name, _ in module.named_children()]
        config["children"] = [_describe_module(child) for child in module.children()]
        return config
    return config | _describe_layer(module)


def _describe_layer(module: nn.Module) -> dict[str, Any]:
    """Return the parts of a config that a module with plain arguments has."""
    config: dict[str, Any] = {
        "arguments": {},
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
    }
    values = {name: getattr(module, name) for name in _constructor_arguments(module)}
    # classes are arguments too, such as the cell of a SequenceStack
    classes = {name: _name_of(v, MODULES) for name, v in values.items() if isinstance(v, type)}
    if classes:
        config["classes"] = classes
    arguments = {name: v for name, v in values.items() if name not in classes}
    if not isinstance(arguments.get("bias", True), bool):
        # an attribute "bias" that is no flag is the parameter, or None for bias=False
        arguments["bias"] = arguments["bias"] is not None
    config["arguments"] = _check_plain(arguments)
    return config


def _constructor_arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments that describe a module, as of its attributes."""
    if isinstance(module, nn.RNNBase):  # its signature is (*args, **kwargs)
        names = [
            *("input_size", "hidden_size", "num_layers", "bias"),
            *("batch_first", "dropout", "bidirectional"),
        ]
        if isinstance(module, nn.LSTM):
            names.append("proj_size")
        if isinstance(module, nn.RNN):
            names.append("nonlinearity")
        return names
    return [
        name
        for name, p in signature(type(module)).parameters.items()
        if name not in MACHINE and name[0] != "_" and p.kind not in VARIABLE
    ]


def _module_outline(module: nn.Module) -> list[Any]:
    """Return names and shapes of parameters and buffers, and which parameters are trainable.

    Missing names reveal shared parameters, which building the module again would separate.
    """
    return [
        *((name, t.shape) for name, t in module.state_dict().items()),
        *((name, p.requires_grad) for name, p in module.named_parameters()),
    ]


def _check_plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        # where a model runs is for the reader of a file to say
        if name in MACHINE:
            raise LoadError(f"argument {name!r} is not one that a file may give")
        values = value if isinstance(value, tuple | list) else (value,)
        if not all(isinstance(v, (*SETTING_TYPES, torch.Tensor)) for v in values):
            raise LoadError(f"argument {name!r} is a {type(value).__name__}, not plain data")
    return dict(arguments)


# -- losses, optimizers, schedulers and specs ----------------------------------------------------


# modules, and the base of those of their classes that a config may name; None: functions that are
# losses
PLACES: dict[str, tuple[ModuleType, type | None]] = {
    "fluxutils_py.nn": (own_nn, nn.Module),
    "fluxutils_py.nn.cells": (cells, nn.Module),
    "fluxutils_py.nn.layers": (layers, nn.Module),
    "torch.nn": (nn, nn.Module),
    "torch.nn.functional": (F, None),
    "torch.optim": (torch.optim, Optimizer),
    "torch.optim.lr_scheduler": (lr_scheduler, LRScheduler),
    "fluxutils_py.optim": (own_optim, own_optim.Transform),
}
MODULES = ("fluxutils_py.nn", "fluxutils_py.nn.cells", "fluxutils_py.nn.layers", "torch.nn")
LOSSES = ("torch.nn", "torch.nn.functional")
OPTIMIZERS = ("torch.optim", "fluxutils_py.optim")
SCHEDULERS = ("torch.optim.lr_scheduler",)
SETTINGS = (*LOSSES, *OPTIMIZERS, *SCHEDULERS)


def serialize(value: Any) -> Any:
    """Return the config of a loss, an optimizer or a scheduler; :func:`deserialize` inverts it.

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
    if isinstance(value, partial) and not value.args:
        config = serialize(value.func)  # a chain or another partial may have keywords already
        keywords = {**config.get("keywords", {}), **_check_plain(value.keywords)}
        return {**config, "keywords": keywords}
    if isinstance(value, ChainFactory | ChainedOptimizer):
        return {"chain": [serialize(link) for link in value.links]}
    if isinstance(value, Optimizer):
        if len(value.param_groups) > 1:
            raise LoadError("the parameter groups belong to the parameters of one model")
        keywords = _check_plain(optimizer_arguments(value))
        return {"name": _name_of(type(value)), "keywords": keywords}
    if isinstance(value, own_optim.Transform):
        name = _name_of(type(value))  # first: it refuses transforms that are no dataclasses
        fields = dataclasses.asdict(value)  # type: ignore[call-overload]
        return {"name": name, "made_with": fields}
    if isinstance(value, nn.Module):
        return {"name": _name_of(type(value)), "made_with": _check_plain(_loss_arguments(value))}
    return {"name": _name_of(value)}


def _loss_arguments(loss: nn.Module) -> dict[str, Any]:
    """Return the constructor's arguments of a torch criterion, without those that torch retired."""
    names = signature(type(loss)).parameters
    return {
        name: getattr(loss, name)
        for name in names
        if name not in ("size_average", "reduce") and hasattr(loss, name)
    }


def deserialize(
    config: Any,
    places: tuple[str, ...],
) -> Any:
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
        made = _named(str(config["name"]), places)
    if "made_with" in config:
        return made(**_check_plain(config["made_with"]))
    keywords = config.get("keywords")
    return partial(made, **_check_plain(keywords)) if keywords else made


def _named(
    full_name: str,
    places: tuple[str, ...],
) -> Any:
    """Return the class or function of this name in one of the places."""
    prefix, _, name = full_name.rpartition(".")
    if prefix in places:
        module, base = PLACES[prefix]
        made = getattr(module, name, None)
        # by name alone, a file could call anything in torch
        if _is_allowed(made, base):
            return made
    raise LoadError(f"the file names {full_name!r}, which is none of {' or '.join(places)}")


def _name_of(
    f: object,
    places: tuple[str, ...] = SETTINGS,
) -> str:
    """Invert :func:`_named`."""
    name = getattr(f, "__name__", "")
    for prefix in places:
        module, base = PLACES[prefix]
        if getattr(module, name, None) is f and _is_allowed(f, base):
            return f"{prefix}.{name}"
    raise LoadError(f"{full_name(f)} is user code")


def _is_allowed(f: object, base: type | None) -> bool:
    """Return whether a file may name a class with this base, or, without one, a function."""
    if base is not None:
        return isinstance(f, type) and issubclass(f, base) and f is not base
    name = getattr(f, "__name__", "")
    others = ("cross_entropy", "binary_cross_entropy", "kl_div")
    return name.endswith("_loss") or name.startswith(others)


def serialize_spec(spec: Any) -> dict[str, Any] | None:
    """Return the plain fields of a spec of any form, and the config of its scheduler, if any."""
    if spec is None:
        return None
    fields = spec_fields(spec)
    schedule = fields.get("lr_schedule")
    scheduler = None
    if callable(schedule):
        scheduler = schedule
        fields["schedule_every"] = "epoch"
    elif isinstance(schedule, tuple):
        fields["schedule_every"], scheduler = schedule
    plain = {
        k: plain_or_none(v)
        for k, v in fields.items()
        if isinstance(v, (*SETTING_TYPES, numbers.Number))
    }
    return {
        "is_spec": isinstance(spec, Spec),
        "fields": plain,
        "scheduler": try_serialize(scheduler),
    }


def deserialize_spec(config: Any) -> Any:
    """Invert :func:`serialize_spec`: return a ``Spec``, or the fields of a spec of another form."""
    if config is None:
        return None
    fields = dict(config["fields"])
    every = fields.pop("schedule_every", "epoch")
    if config["scheduler"] is not None:
        scheduler = restore_argument(
            config["scheduler"],
            "spec.lr_schedule",
            lambda c: deserialize(c, SCHEDULERS),
        )
        fields["lr_schedule"] = scheduler if every == "epoch" else (every, scheduler)
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
    stored: tuple[object, str] | None,
    argument: str,
    build: Callable[[Any], Any],
) -> Any:
    """Invert :func:`try_serialize`, with a placeholder for user code, which files do not store."""
    if stored is None:
        return None
    config, name = stored
    return NotStored(argument, name) if config is None else build(config)


# -- optimizer state -----------------------------------------------------------------------------


def serialize_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
) -> dict[str, Any] | None:
    """Return class, settings, moments and parameter positions of an optimizer.

    None if it is user code.
    """
    chain = optimizer
    if not isinstance(chain, ChainedOptimizer):
        # a chain without links, so that both are written alike
        chain = ChainedOptimizer(optimizer)
    inner = chain.inner
    index = parameter_places(model)
    try:
        return {
            "name": _name_of(type(inner)),
            "links": [
                [serialize(t) for t in transforms] for transforms in (chain.before, chain.after)
            ],
            "groups": [[index[id(p)] for p in group["params"]] for group in inner.param_groups],
            "defaults": plain_or_none(optimizer_arguments(inner)),
            "state": inner.state_dict(),
        }
    except LoadError:
        return None


def deserialize_optimizer(
    config: dict[str, Any],
    model: nn.Module,
) -> Optimizer:
    """Invert :func:`serialize_optimizer`, without the moments."""
    params = list(model.parameters())
    groups = [{"params": [params[i] for i in group]} for group in config["groups"]]
    optimizer = deserialize({"name": config["name"]}, OPTIMIZERS)(groups, **config["defaults"])
    links = [[deserialize(t, OPTIMIZERS) for t in transforms] for transforms in config["links"]]
    before, after = links
    return ChainedOptimizer(optimizer, before, after) if before or after else optimizer


# -- values --------------------------------------------------------------------------------------


def full_name(value: Any) -> str:
    """Return the name, with the module, of a class, a function, or the class of an instance."""
    value = value.criterion if isinstance(value, SeqLoss) else value
    while isinstance(value, partial):
        value = value.func
    cls = value if hasattr(value, "__qualname__") else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
