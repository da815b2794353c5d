"""Save and load estimators as files that contain data, never code."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.building import NotStored, build_model
from fluxutils_py.estimator.inputs import InputLayout
from fluxutils_py.estimator.nested_parameters import parameter_names
from fluxutils_py.estimator.serialization import (
    LOSSES,
    OPTIMIZERS,
    PLAIN,
    deserialize,
    deserialize_module,
    deserialize_optimizer,
    deserialize_spec,
    full_name,
    plain_value,
    restore_argument,
    serialize_module,
    serialize_optimizer,
    serialize_spec,
    try_serialize,
)
from fluxutils_py.estimator.target_codec import TargetCodec, TargetScale
from fluxutils_py.nn.losses import seqloss
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.optim import load_optimizer_state
from fluxutils_py.training.plain_files import read_file, write_file

KIND, FORMAT = "fluxutils_py estimator", 2
NO_SETTINGS = ("model", "loss", "opt", "spec", "device", "callbacks")  # code, or specific to a machine
CODE = ("cell",)  # settings that may be classes, stored by name
FITTED = (
    *("loss_", "loss_curve_", "validation_loss_curve_", "n_iter_", "history_"),
    *("n_features_in_", "n_outputs_", "_n_steps"),
)


def save_estimator(est: Any, path: Any) -> None:
    """Save a fitted estimator; see ``Estimator.save``."""
    optimizer, arguments = getattr(est, "optimizer_", None), est.get_params(deep=False)
    own = arguments.get("model")  # None: built from the settings
    content = {
        "kind": KIND,
        "format": FORMAT,
        "class": type(est).__name__,
        "model": None if own is None else (serialize_module(est.model_), full_name(own)),
        "loss": try_serialize(arguments.get("loss")),
        "opt": try_serialize(arguments.get("opt")),
        "spec": serialize_spec(arguments.get("spec")),
        "settings": {k: v for k, v in arguments.items() if k not in NO_SETTINGS and _is_plain(v)},
        "code": {k: full_name(arguments[k]) for k in CODE if callable(arguments.get(k))},
        "parameters": {k: v.detach() for k, v in est.model_.state_dict().items()},
        "dtype": str(next(est.model_.parameters()).dtype).removeprefix("torch."),
        "optimizer": None if optimizer is None else serialize_optimizer(optimizer, est.model_),
        "scheduler": None if est._scheduler is None else est._scheduler.state_dict(),
        "fitted": {k: getattr(est, k) for k in FITTED},
        "layout": _to_plain(est._layout),
        "codec": _to_plain(est._codec),
        "grad": est.grad_,
        "generator": est._rng.bit_generator.state,
    }
    write_file(path, plain_value(content))


def load_estimator(cls: Any, path: Any, arguments: dict[str, Any]) -> Any:
    """Load an estimator; see ``Estimator.load``."""
    known = parameter_names(cls)
    if unknown := sorted(set(arguments) - set(known)):
        raise TypeError(f"load: unknown arguments {', '.join(unknown)}; {cls.__name__} takes {', '.join(known)}")
    c = read_estimator(path)
    if c.get("class") != cls.__name__:
        raise LoadError(f"{path} holds {c.get('class')}, not {cls.__name__}; use {c.get('class')}.load")
    with _load_errors(path), seeded(0):
        stored = _stored_arguments(c)
        fitted = {k: c["fitted"][k] for k in FITTED}
        layout, codec = _from_plain(InputLayout, c["layout"]), _from_plain(TargetCodec, c["codec"])
        generator, dtype = _restore_generator(c["generator"]), getattr(torch, c["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise LoadError(f"{path} is damaged (no dtype: {c['dtype']!r})")
    est = cls(**{**{k: v for k, v in stored.items() if k in known}, **arguments})
    settings = est._resolved_params()
    if isinstance(settings.model, NotStored):
        raise LoadError(
            f"{path} holds the parameters of a model of its author's own, {settings.model.what}, not its code: "
            f"give the model too, {cls.__name__}.load(path, model=...)"
        )
    with seeded(0):
        model = build_model(settings.model, layout.features, fitted["n_outputs_"], dtype, settings.device)
    with _load_errors(path):
        compare_parameters(c["parameters"], model.state_dict(), path)
        model.load_state_dict(c["parameters"])
        est.model_ = model.eval()
        vars(est).update(fitted)
        est._layout, est._codec, est._rng = layout, codec, generator
        if layout.names is not None:
            est.feature_names_in_ = layout.names
        if codec.classes is not None:
            est.classes_ = codec.classes
        est.grad_ = c["grad"].to(next(model.parameters()).device)
        _restore_optimizer(est, c, "opt" in arguments)
    return est


def _stored_arguments(c: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments from a file, with placeholders for user code."""
    builders = {
        "model": deserialize_module,
        "loss": lambda config: seqloss(deserialize(config, LOSSES)),
        "opt": lambda config: deserialize(config, OPTIMIZERS),
    }
    return {
        **{k: restore_argument(c[k], k, build) for k, build in builders.items()},
        "spec": deserialize_spec(c["spec"]),
        **{k: v for k, v in c["settings"].items() if k not in NO_SETTINGS},
        **{k: NotStored(k, what) for k, what in c["code"].items() if k in CODE},
    }


def read_estimator(path: Any) -> dict[str, Any]:
    """Return the content of a file that :func:`save_estimator` wrote."""
    return read_file(path, KIND, format=FORMAT)


@contextlib.contextmanager
def _load_errors(path: Any) -> Iterator[None]:
    """Turn any error that wrong content in a file causes into a LoadError."""
    try:
        yield
    except LoadError as error:
        if str(path) in str(error):
            raise
        raise LoadError(f"{path}: {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise LoadError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _restore_optimizer(est: Any, c: dict[str, Any], new_opt: bool) -> None:
    """Restore the optimizer with its moments and schedule, unless the user gives another or the file has none."""
    est._scheduler = None
    if new_opt or c["optimizer"] is None:
        return
    est.optimizer_ = deserialize_optimizer(c["optimizer"], est.model_)
    spec = est._resolved_params().spec
    factory = spec.get("scheduler") if isinstance(spec, dict) else getattr(spec, "scheduler", None)
    if c["scheduler"] is not None and factory is not None and not isinstance(factory, NotStored):
        est._scheduler = factory(est.optimizer_)
        est._scheduler.load_state_dict(c["scheduler"])
    load_optimizer_state(est.optimizer_, c["optimizer"]["state"])  # last: a new scheduler changes learning rates


def compare_parameters(stored: dict[str, Any], wanted: dict[str, Any], path: Any) -> None:
    """Raise a LoadError that names each parameter or buffer that is missing, left over or has another shape."""
    faults = [f"{k}: in the file, not in the model" for k in stored if k not in wanted]
    faults += [f"{k}: in the model, not in the file" for k in wanted if k not in stored]
    faults += [
        f"{k}: {tuple(v.shape)} in the file, {tuple(wanted[k].shape)} in the model"
        for k, v in stored.items()
        if k in wanted and v.shape != wanted[k].shape
    ]
    if faults:
        raise LoadError(f"{path} does not fit the model:\n  " + "\n  ".join(faults))


def _to_plain(value: Any) -> Any:
    """Convert a dataclass of arrays and plain values to plain data."""
    if dataclasses.is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return {"dtype": "O" if value.dtype.kind in "OT" else value.dtype.str, "values": value.tolist()}
    return value.str if isinstance(value, np.dtype) else value


def _from_plain(cls: Any, packed: dict[str, Any]) -> Any:
    values = dict(packed)
    for name, value in packed.items():
        if isinstance(value, dict):
            is_array = "values" in value
            values[name] = np.array(value["values"], value["dtype"]) if is_array else _from_plain(TargetScale, value)
    return cls(**values)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(v, PLAIN) for pair in value.items() for v in pair)
    return isinstance(value, PLAIN)


def _restore_generator(state: dict[str, Any]) -> np.random.Generator:
    generator = np.random.default_rng()
    generator.bit_generator.state = state
    return generator
