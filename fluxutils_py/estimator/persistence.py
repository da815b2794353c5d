"""Estimators as files that hold data, never code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import numbers
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fluxutils_py.nn as own_nn
import fluxutils_py.optim as own_optim
from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.building import NotStored, build_model, optimizer_class
from fluxutils_py.estimator.spec import Spec, spec_fields
from fluxutils_py.estimator.targetscale import TargetScale
from fluxutils_py.nn import SeqLoss, seeded, seqloss
from fluxutils_py.optim import ChainedOptimizer, ChainFactory, load_exactly
from fluxutils_py.training import read_file, write_file

KIND, FORMAT = "fluxutils_py estimator", 1
PLAIN = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating)  # NumPy's are stored as Python's
NO_SETTINGS = ("model", "loss", "opt", "spec", "device", "callbacks")  # code, or for another machine
CODE = ("cell",)  # settings that may be classes: their names only
FITTED = (
    *("loss_", "loss_curve_", "validation_loss_curve_", "n_iter_", "history_"),
    *("n_features_in_", "n_outputs_", "_n_steps", "_n_inputs", "_form", "_per_series", "_y_ndim"),
)
ARRAYS = ("classes_", "feature_names_in_")  # of numbers or strings, if there


def save_estimator(est: Any, path: Any) -> None:
    """Write a fitted estimator; see ``Estimator.save``."""
    optimizer = getattr(est, "optimizer_", None)
    own = hasattr(est, "model") and est.model is not None  # else it is built from the settings
    content = {
        "kind": KIND,
        "format": FORMAT,
        "class": type(est).__name__,
        "model": describe_module(est.model_) if own else None,
        "model_name": _name(est.model) if own else None,
        "parameters": {k: v.detach() for k, v in est.model_.state_dict().items()},
        "dtype": str(next(est.model_.parameters()).dtype).removeprefix("torch."),
        "loss": describe_loss(getattr(est, "loss", None)),
        "opt": describe_opt(getattr(est, "opt", None)),
        "optimizer": None if optimizer is None else describe_optimizer(optimizer, est.model_),
        "spec": describe_spec(getattr(est, "spec", None)),
        "settings": {k: v for k in est._get_param_names() if k not in NO_SETTINGS and _is_plain(v := getattr(est, k))},
        "code": {k: _name(v) for k in CODE if callable(v := getattr(est, k, None))},
        "fitted": {k: _plain(getattr(est, k)) for k in FITTED},
        "arrays": {k: (_kind(a), a.tolist()) for k in ARRAYS if (a := getattr(est, k, None)) is not None},
        "target_scale": None if est._target_scale is None else est._target_scale.plain(),
        "grad": est.grad_,
        "generator": _plain(est._rng.bit_generator.state),
        "scheduler": None if est._scheduler is None else _plain(est._scheduler.state_dict()),
    }
    write_file(path, _plain(content))


def load_estimator(cls: Any, path: Any, arguments: dict[str, Any]) -> Any:
    """Read an estimator; see ``Estimator.load``."""
    known = cls._get_param_names()  # scikit-learn's
    if unknown := sorted(set(arguments) - set(known)):
        raise TypeError(f"load: unknown arguments {', '.join(unknown)}; {cls.__name__} takes {', '.join(known)}")
    c = read_file(path, KIND)
    if c.get("format") != FORMAT:
        raise LoadError(f"{path} has format {c.get('format')}, this version reads {FORMAT}; update fluxutils_py")
    if c.get("class") != cls.__name__:
        raise LoadError(f"{path} holds {c.get('class')}, not {cls.__name__}; use {c.get('class')}.load")
    with _reading(path), seeded(0):
        stored = {
            "model": None if c["model_name"] is None else _made(build_module, c["model"], "model", c["model_name"]),
            "loss": _made(build_loss, *c["loss"]),
            "opt": _made(build_opt, *c["opt"]),
            "spec": _made(build_spec, *c["spec"]),
            **{k: v for k, v in c["settings"].items() if k not in NO_SETTINGS},
            **{k: NotStored(k, what) for k, what in c["code"].items() if k in CODE},
        }
        stored = {k: v for k, v in stored.items() if k in known}
        fitted = {k: c["fitted"][k] for k in FITTED}
        generator, dtype = _generator(c["generator"]), getattr(torch, c["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise LoadError(f"{path} is damaged (no dtype: {c['dtype']!r})")
    est = cls(**{**stored, **arguments})
    asked = est._settings()
    if isinstance(asked.model, NotStored):
        raise LoadError(
            f"{path} holds the parameters of a model of its author's own, {c['model_name']}, not its code: "
            f"give the model too, {cls.__name__}.load(path, model=...)"
        )
    with seeded(0):
        model = build_model(asked.model, fitted["_n_inputs"], fitted["n_outputs_"], dtype, asked.device)
    with _reading(path):
        compare_parameters(c["parameters"], model.state_dict(), path)
        model.load_state_dict(c["parameters"])
        est.model_ = model.eval()
        vars(est).update(fitted)
        vars(est).update({k: np.array(v, dtype=d) for k, (d, v) in c["arrays"].items() if k in ARRAYS})
        est._target_scale = None if c["target_scale"] is None else TargetScale.from_plain(c["target_scale"])
        est.grad_ = c["grad"].to(next(model.parameters()).device)
        est._rng = generator
        _restore_optimizer(est, c, "opt" in arguments)
    return est


@contextlib.contextmanager
def _reading(path: Any) -> Iterator[None]:
    """Turn whatever a file of the wrong content leads to into a LoadError."""
    try:
        yield
    except LoadError as error:
        if str(path) in str(error):
            raise
        raise LoadError(f"{path}: {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise LoadError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _restore_optimizer(est: Any, c: dict[str, Any], new_opt: bool) -> None:
    """The optimizer with its moments and schedule; not if another is asked for, or its class is its author's."""
    est._scheduler = None
    if new_opt or c["optimizer"] is None:
        return
    cls = optimizer_class(c["optimizer"]["class"])
    if cls is None:
        return  # a later fit that goes on needs opt=, and says so
    params = list(est.model_.parameters())
    groups = [{"params": [params[i] for i in group]} for group in c["optimizer"]["groups"]]
    accepted = inspect.signature(cls).parameters
    est.optimizer_ = cls(groups, **{k: v for k, v in c["optimizer"]["defaults"].items() if k in accepted})
    if "links" in c["optimizer"]:
        est.optimizer_ = ChainedOptimizer(est.optimizer_, *map(_build_transforms, c["optimizer"]["links"]))
    spec = est._settings().spec
    factory = spec.get("scheduler") if isinstance(spec, dict) else getattr(spec, "scheduler", None)
    if c["scheduler"] is not None and factory is not None and not isinstance(factory, NotStored):
        est._scheduler = factory(est.optimizer_)
        est._scheduler.load_state_dict(c["scheduler"])
    load_exactly(est.optimizer_, c["optimizer"]["state"])  # last: to make a scheduler changes learning rates


def compare_parameters(stored: dict[str, Any], wanted: dict[str, Any], path: Any) -> None:
    """Raise LoadError naming each parameter or buffer that is missing, left over or of another shape."""
    faults = [f"{k}: in the file, not in the model" for k in stored if k not in wanted]
    faults += [f"{k}: in the model, not in the file" for k in wanted if k not in stored]
    faults += [
        f"{k}: {tuple(v.shape)} in the file, {tuple(wanted[k].shape)} in the model"
        for k, v in stored.items()
        if k in wanted and v.shape != wanted[k].shape
    ]
    if faults:
        raise LoadError(f"{path} does not fit the model:\n  " + "\n  ".join(faults))


# -- modules as recipes ---------------------------------------------------------------------------------


def describe_module(module: nn.Module) -> Any:
    """A recipe of plain data that :func:`build_module` makes the same module from; None if there is none.

    Modules of torch.nn and fluxutils_py.nn have one if their constructor's arguments can be read back from their
    attributes, which is tried out.
    """
    try:
        recipe = _describe(module)
        with seeded(0):
            again = build_module(recipe)
    except (LoadError, TypeError, ValueError, AttributeError):
        return None
    alike = _outline(again) == _outline(module) and repr(again) == repr(module)
    return recipe if alike else None


def build_module(recipe: Any) -> nn.Module:
    """The module of a recipe. Only classes of torch.nn and fluxutils_py.nn, and only plain arguments.

    Raises
    ------
    LoadError
        If the recipe asks for anything else.
    """
    try:
        cls = _module_class(recipe["class"])
        children = [build_module(child) for child in recipe["children"]]
        if cls is nn.Sequential:
            return nn.Sequential(OrderedDict(zip(recipe["names"], children, strict=True)))
        if cls is own_nn.Recur:
            return own_nn.Recur(*children)
        module = cls(**_check_plain(recipe["arguments"]))
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
    if cls in (nn.Sequential, own_nn.Recur):
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
        recipe["arguments"][name] = value is not None if name == "bias" and not isinstance(value, bool) else value
    _check_plain(recipe["arguments"])
    return recipe


def _outline(module: nn.Module) -> list[Any]:
    """Names and shapes of parameters and buffers; shared parameters show as names that are missing."""
    return [
        *((name, t.shape) for name, t in module.state_dict().items()),
        *((name, p.requires_grad) for name, p in module.named_parameters()),
    ]


def _class_name(cls: type) -> str:
    for prefix, place in (("fluxutils_py.nn", own_nn), ("torch.nn", nn)):
        if getattr(place, cls.__name__, None) is cls:
            return f"{prefix}.{cls.__name__}"
    raise LoadError(f"{cls.__name__} is user code")


def _module_class(full_name: str) -> type[nn.Module]:
    prefix, _, name = full_name.rpartition(".")
    place = {"fluxutils_py.nn": own_nn, "torch.nn": nn}.get(prefix)
    found = getattr(place, name, None)
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


def describe_loss(loss: Any) -> tuple[Any, str, str]:
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
    return recipe, "loss", _name(f)


def build_loss(recipe: Any) -> Any:
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


def describe_opt(opt: Any) -> tuple[Any, str, str]:
    """None, or a class of torch.optim with plain settings, or a chain of one and transforms."""
    if opt is None:
        return {"class": None}, "opt", "None"
    if isinstance(opt, torch.optim.Optimizer):
        if len(opt.param_groups) > 1:  # belongs to the parameters of one model: a refit needs it again
            return None, "opt", _name(opt)
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
    return recipe, "opt", _name(f)


def build_opt(recipe: Any) -> Any:
    if recipe["class"] is None:
        return None
    if "links" in recipe:
        before, inner, after = recipe["links"]
        chain = ChainFactory(*_build_transforms(before), build_opt(inner), *_build_transforms(after))
        return functools.partial(chain, **recipe["arguments"]) if recipe["arguments"] else chain
    cls = optimizer_class(recipe["class"])
    if cls is None:
        raise LoadError(f"the file names an optimizer {recipe['class']!r}, which is none of torch.optim")
    return functools.partial(cls, **recipe["arguments"]) if recipe["arguments"] else cls


def _describe_chain(before: Any, optimizer: Any, after: Any, keywords: dict[str, Any]) -> tuple[Any, str, str]:
    links = _describe_transforms(before), describe_opt(optimizer)[0], _describe_transforms(after)
    plain = None not in links and all(isinstance(v, (*PLAIN, tuple)) for v in keywords.values())
    recipe = {"class": "Chain", "arguments": dict(keywords), "links": links}
    return recipe if plain else None, "opt", "fluxutils_py.optim.Chain"


def _describe_transforms(transforms: Iterable[Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and settings of transforms; None if one is user code."""
    if any(getattr(own_optim, type(t).__name__, None) is not type(t) for t in transforms):
        return None
    return [(type(t).__name__, dataclasses.asdict(t)) for t in transforms]


def _build_transforms(recipes: Any) -> list[Any]:
    found = []
    for name, arguments in recipes:
        cls = getattr(own_optim, name, None)
        if not isinstance(cls, type) or not issubclass(cls, own_optim.Transform):
            raise LoadError(f"the file names a transform {name!r}, which is none of fluxutils_py.optim")
        found.append(cls(**_check_plain(arguments)))
    return found


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer at work: its class, settings and moments, and the positions of its parameters in the model."""
    if isinstance(optimizer, ChainedOptimizer):
        links = _describe_transforms(optimizer.before), _describe_transforms(optimizer.after)
        content = describe_optimizer(optimizer.inner, model)
        return {**content, "links": links} if None not in links else {**content, "class": ""}
    at = {id(p): i for i, p in enumerate(model.parameters())}
    return {
        "class": type(optimizer).__name__ if optimizer_class(type(optimizer).__name__) is type(optimizer) else "",
        "groups": [[at[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        "defaults": _plain(optimizer.defaults),
        "state": optimizer.state_dict(),
    }


def describe_spec(spec: Any) -> tuple[Any, str, str]:
    """Its plain fields, as a Spec or a dict; a scheduler, if it is one of torch with plain settings."""
    if spec is None:
        return {"class": None}, "spec", "None"
    fields = spec_fields(spec)
    scheduler = fields.pop("scheduler", None)
    recipe: dict[str, Any] = {
        "class": "Spec" if isinstance(spec, Spec) else "dict",
        "fields": {k: _plain(v) for k, v in fields.items() if isinstance(v, (*PLAIN, numbers.Number))},
    }
    if scheduler is not None:
        f, keywords = (
            (scheduler.func, scheduler.keywords) if isinstance(scheduler, functools.partial) else (scheduler, {})
        )
        name = getattr(f, "__name__", repr(f))
        plain = _scheduler_class(name) is f and all(isinstance(v, (*PLAIN, tuple, list)) for v in keywords.values())
        recipe["scheduler"] = (name, dict(keywords) if plain else None)
    return recipe, "spec", _name(spec)


def build_spec(recipe: Any) -> Any:
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


def _made(build: Callable[[Any], Any], recipe: Any, argument: str, name: str) -> Any:
    return NotStored(argument, name) if recipe is None else build(recipe)


def _name(value: Any) -> str:
    cls = value if hasattr(value, "__qualname__") else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def _kind(array: np.ndarray) -> str:
    return "O" if array.dtype.kind in "OT" else array.dtype.str


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(v, PLAIN) for pair in value.items() for v in pair)
    return isinstance(value, PLAIN)


def _plain(value: Any) -> Any:
    """``value`` in Python's own types, tensors as they are; what is neither is left out as None."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (*PLAIN, torch.Tensor)):
        return value
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(v) for v in value) if type(value) in (list, tuple) else [_plain(v) for v in value]
    return None


def _generator(state: dict[str, Any]) -> np.random.Generator:
    generator = np.random.default_rng()
    generator.bit_generator.state = state
    return generator
