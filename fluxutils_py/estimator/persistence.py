"""Estimators as files that hold data, never code."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.building import NotStored, build_model, optimizer_class
from fluxutils_py.estimator.inputs import InputLayout
from fluxutils_py.estimator.nested_parameters import parameter_names
from fluxutils_py.estimator.serialization import (
    PLAIN,
    deserialize_loss,
    deserialize_module,
    deserialize_opt,
    deserialize_spec,
    deserialize_transforms,
    full_name,
    plain_value,
    serialize_loss,
    serialize_module,
    serialize_opt,
    serialize_optimizer,
    serialize_spec,
)
from fluxutils_py.estimator.target_codec import TargetCodec, TargetScale
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.optim import ChainedOptimizer, load_optimizer_state
from fluxutils_py.training.plain_files import read_file, write_file

KIND, FORMAT = "fluxutils_py estimator", 2
NO_SETTINGS = ("model", "loss", "opt", "spec", "device", "callbacks")  # code, or for another machine
CODE = ("cell",)  # settings that may be classes: their names only
FITTED = (
    *("loss_", "loss_curve_", "validation_loss_curve_", "n_iter_", "history_"),
    *("n_features_in_", "n_outputs_", "_n_steps"),
)


def save_estimator(est: Any, path: Any) -> None:
    """Write a fitted estimator; see ``Estimator.save``."""
    optimizer, arguments = getattr(est, "optimizer_", None), est.get_params(deep=False)
    own = hasattr(est, "model") and est.model is not None  # else it is built from the settings
    content = {
        "kind": KIND,
        "format": FORMAT,
        "class": type(est).__name__,
        "model": serialize_module(est.model_) if own else None,
        "model_name": full_name(est.model) if own else None,
        "parameters": {k: v.detach() for k, v in est.model_.state_dict().items()},
        "dtype": str(next(est.model_.parameters()).dtype).removeprefix("torch."),
        "loss": serialize_loss(getattr(est, "loss", None)),
        "opt": serialize_opt(getattr(est, "opt", None)),
        "optimizer": None if optimizer is None else serialize_optimizer(optimizer, est.model_),
        "spec": serialize_spec(getattr(est, "spec", None)),
        "settings": {k: v for k, v in arguments.items() if k not in NO_SETTINGS and _is_plain(v)},
        "code": {k: full_name(v) for k in CODE if callable(v := getattr(est, k, None))},
        "fitted": {k: plain_value(getattr(est, k)) for k in FITTED},
        "layout": {**vars(est._layout), "names": _array_to_list(est._layout.names)},
        "codec": {
            **vars(est._codec),
            "classes": _array_to_list(est._codec.classes),
            "scale": None if est._codec.scale is None else est._codec.scale.as_dict(),
        },
        "grad": est.grad_,
        "generator": plain_value(est._rng.bit_generator.state),
        "scheduler": None if est._scheduler is None else plain_value(est._scheduler.state_dict()),
    }
    write_file(path, plain_value(content))


def load_estimator(cls: Any, path: Any, arguments: dict[str, Any]) -> Any:
    """Read an estimator; see ``Estimator.load``."""
    known = parameter_names(cls)
    if unknown := sorted(set(arguments) - set(known)):
        raise TypeError(f"load: unknown arguments {', '.join(unknown)}; {cls.__name__} takes {', '.join(known)}")
    c = read_estimator(path)
    if c.get("class") != cls.__name__:
        raise LoadError(f"{path} holds {c.get('class')}, not {cls.__name__}; use {c.get('class')}.load")
    with _reading(path), seeded(0):
        stored = {
            "model": None
            if c["model_name"] is None
            else _made(deserialize_module, c["model"], "model", c["model_name"]),
            "loss": _made(deserialize_loss, *c["loss"]),
            "opt": _made(deserialize_opt, *c["opt"]),
            "spec": _made(deserialize_spec, *c["spec"]),
            **{k: v for k, v in c["settings"].items() if k not in NO_SETTINGS},
            **{k: NotStored(k, what) for k, what in c["code"].items() if k in CODE},
        }
        stored = {k: v for k, v in stored.items() if k in known}
        fitted = {k: c["fitted"][k] for k in FITTED}
        layout = InputLayout(**{**c["layout"], "names": _list_to_array(c["layout"]["names"])})
        scale = c["codec"]["scale"]
        codec = TargetCodec(
            **{
                **c["codec"],
                "classes": _list_to_array(c["codec"]["classes"]),
                "scale": None if scale is None else TargetScale.from_dict(scale),
            }
        )
        generator, dtype = _generator(c["generator"]), getattr(torch, c["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise LoadError(f"{path} is damaged (no dtype: {c['dtype']!r})")
    est = cls(**{**stored, **arguments})
    settings = est._resolved_params()
    if isinstance(settings.model, NotStored):
        raise LoadError(
            f"{path} holds the parameters of a model of its author's own, {c['model_name']}, not its code: "
            f"give the model too, {cls.__name__}.load(path, model=...)"
        )
    with seeded(0):
        model = build_model(settings.model, layout.features, fitted["n_outputs_"], dtype, settings.device)
    with _reading(path):
        compare_parameters(c["parameters"], model.state_dict(), path)
        model.load_state_dict(c["parameters"])
        est.model_ = model.eval()
        vars(est).update(fitted)
        est._layout, est._codec = layout, codec
        if layout.names is not None:
            est.feature_names_in_ = layout.names
        if codec.classes is not None:
            est.classes_ = codec.classes
        est.grad_ = c["grad"].to(next(model.parameters()).device)
        est._rng = generator
        _restore_optimizer(est, c, "opt" in arguments)
    return est


def read_estimator(path: Any) -> dict[str, Any]:
    """The content of a file that :func:`save_estimator` wrote."""
    content = read_file(path, KIND)
    if content.get("format") != FORMAT:
        raise LoadError(f"{path} has format {content.get('format')}, this version reads {FORMAT}; update fluxutils_py")
    return content


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
        est.optimizer_ = ChainedOptimizer(est.optimizer_, *map(deserialize_transforms, c["optimizer"]["links"]))
    spec = est._resolved_params().spec
    factory = spec.get("scheduler") if isinstance(spec, dict) else getattr(spec, "scheduler", None)
    if c["scheduler"] is not None and factory is not None and not isinstance(factory, NotStored):
        est._scheduler = factory(est.optimizer_)
        est._scheduler.load_state_dict(c["scheduler"])
    load_optimizer_state(est.optimizer_, c["optimizer"]["state"])  # last: to make a scheduler changes learning rates


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


def _made(build: Callable[[Any], Any], recipe: Any, argument: str, name: str) -> Any:
    return NotStored(argument, name) if recipe is None else build(recipe)


def _array_to_list(array: np.ndarray | None) -> tuple[str, list[Any]] | None:
    """An array of numbers or strings as its type and its values."""
    return None if array is None else ("O" if array.dtype.kind in "OT" else array.dtype.str, array.tolist())


def _list_to_array(stored: tuple[str, list[Any]] | None) -> np.ndarray | None:
    return None if stored is None else np.array(stored[1], dtype=stored[0])


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(v, PLAIN) for pair in value.items() for v in pair)
    return isinstance(value, PLAIN)


def _generator(state: dict[str, Any]) -> np.random.Generator:
    generator = np.random.default_rng()
    generator.bit_generator.state = state
    return generator
