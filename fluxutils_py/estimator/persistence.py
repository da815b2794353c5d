"""Save and load estimators as files that contain data, never code."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.bounded_building import build_bounded, compare_parameters
from fluxutils_py.estimator.building import NotStored, build_model, check_device, require_stored
from fluxutils_py.estimator.fitted_parts import FittedParts
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
from fluxutils_py.inputs.inputs import InputLayout
from fluxutils_py.inputs.target_codec import TargetCodec, TargetScale
from fluxutils_py.nn.losses import seqloss
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.optim import load_optimizer_state
from fluxutils_py.training.file_checks import check_text_type
from fluxutils_py.training.plain_files import read_file, write_file

KIND, FORMAT = "fluxutils_py estimator", 2
NO_SETTINGS = (
    "model",
    "loss",
    "opt",
    "spec",
    "device",
    "callbacks",
)  # code, or specific to a machine
CODE = ("cell",)  # settings that may be classes, stored by name
FITTED = (
    *("loss_", "loss_curve_", "validation_loss_curve_", "n_iter_", "history_"),
    *("n_features_in_", "n_outputs_"),
)


def save_estimator(est: Any, path: Any) -> None:
    """Save a fitted estimator; see ``Estimator.save``."""
    write_file(path, estimator_content(est))


def estimator_content(est: Any) -> dict[str, Any]:
    """Return what a file holds of a fitted estimator, as plain data and tensors."""
    optimizer, arguments = getattr(est, "optimizer_", None), est.get_params(deep=False)
    parts = est.fitted_parts_
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
        "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
        "fitted": {**{k: getattr(est, k) for k in FITTED}, "_n_steps": parts.n_steps},
        "layout": to_plain(parts.layout),
        "codec": to_plain(parts.codec),
        "grad": est.grad_,
        "generator": parts.rng.bit_generator.state,
    }
    plain: dict[str, Any] = plain_value(content)
    return plain


def load_estimator(cls: Any, path: Any, arguments: dict[str, Any]) -> Any:
    """Load an estimator; see ``Estimator.load``."""
    check_arguments(cls, arguments)
    c = read_estimator(path)
    if c.get("class") != cls.__name__:
        raise LoadError(
            f"{path} holds {c.get('class')}, not {cls.__name__}; use {c.get('class')}.load"
        )
    return estimator_of(cls, c, path, arguments)


def check_arguments(cls: Any, arguments: dict[str, Any]) -> Any:
    """Return the names of a class's arguments; raise TypeError if others are given."""
    known = parameter_names(cls)
    if unknown := sorted(set(arguments) - set(known)):
        raise TypeError(
            f"load: unknown arguments {', '.join(unknown)}; {cls.__name__} takes {', '.join(known)}"
        )
    return known


def estimator_of(cls: Any, c: dict[str, Any], path: Any, arguments: dict[str, Any]) -> Any:
    """Return the estimator of which a file holds this content."""
    known = check_arguments(cls, arguments)
    if c.get("format") != FORMAT:
        raise LoadError(
            f"{path} has format {c.get('format')}, this version reads {FORMAT}: write the file "
            "again"
        )
    with load_errors(path), seeded(0):
        stored = _stored_arguments(c, path)
        fitted = {k: c["fitted"][k] for k in FITTED}
        n_steps = c["fitted"]["_n_steps"]
        layout, codec = from_plain(InputLayout, c["layout"]), from_plain(TargetCodec, c["codec"])
        generator, dtype = _restore_generator(c["generator"]), read_dtype(c["dtype"], path)
    est = cls(**{**{k: v for k, v in stored.items() if k in known}, **arguments})
    with contextlib.nullcontext() if arguments else load_errors(path):
        settings = est.resolved_params()
    if isinstance(settings.model, NotStored):
        raise LoadError(
            f"{path} holds the parameters of a model of its author's own, {settings.model.what}, "
            f"not its code: give the model too, {cls.__name__}.load(path, model=...)"
        )
    require_stored(**{name: getattr(est, name, None) for name in CODE})
    device = check_device(settings.device)
    with contextlib.nullcontext() if arguments else load_errors(path):
        model = _build(
            settings, layout, fitted, dtype, c["parameters"], path, "model" in arguments
        ).to(device)
    with load_errors(path):
        model.load_state_dict(c["parameters"])
        est.model_ = model.eval()
        vars(est).update(fitted)
        if layout.names is not None:
            est.feature_names_in_ = layout.names
        if codec.classes is not None:
            est.classes_ = codec.classes
        est.grad_ = c["grad"].to(next(model.parameters()).device)
        scheduler = _restore_optimizer(est, c, "opt" in arguments)
        est.fitted_parts_ = FittedParts(layout, codec, generator, scheduler, n_steps)
    return est


def _build(
    settings: Any,
    layout: Any,
    fitted: dict[str, Any],
    dtype: Any,
    stored: Any,
    path: Any,
    own: bool,
) -> torch.nn.Module:
    """Build the model; one that the caller gives may be of any size, those that a file describes
    have its own.
    """
    sizes = layout.features, fitted["n_outputs_"]
    if own:
        with seeded(0):
            model = build_model(settings.model, *sizes, dtype, None)
        compare_parameters(stored, model.state_dict(), path)
        return model
    return build_bounded(lambda: build_model(settings.model, *sizes, dtype, None), stored, path)


def read_dtype(name: Any, path: Any) -> torch.dtype:
    """Return the dtype of parameters with this name.

    Raises
    ------
    LoadError
        If a file gives another.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise LoadError(f"{path} is damaged (no dtype of parameters: {name!r})")
    return dtype


def _stored_arguments(c: dict[str, Any], path: Any) -> dict[str, Any]:
    """Return the constructor's arguments from a file, with placeholders for user code."""
    builders = {
        "model": lambda config: build_bounded(
            lambda: deserialize_module(config), c["parameters"], path
        ),
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
def load_errors(path: Any) -> Iterator[None]:
    """Turn any error that wrong content in a file causes into a LoadError."""
    try:
        yield
    except LoadError as error:
        if str(path) in str(error):
            raise
        raise LoadError(f"{path}: {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise LoadError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _restore_optimizer(est: Any, c: dict[str, Any], new_opt: bool) -> Any:
    """Restore the optimizer with its moments, unless the user gives another or the file has none;
    return its schedule.
    """
    if new_opt or c["optimizer"] is None:
        return None
    est.optimizer_ = deserialize_optimizer(c["optimizer"], est.model_)
    spec = est.resolved_params().spec
    scheduler = None
    factory = spec.get("scheduler") if isinstance(spec, dict) else getattr(spec, "scheduler", None)
    if c["scheduler"] is not None and factory is not None and not isinstance(factory, NotStored):
        scheduler = factory(est.optimizer_)
        scheduler.load_state_dict(c["scheduler"])
    load_optimizer_state(
        est.optimizer_, c["optimizer"]["state"]
    )  # last: a new scheduler changes learning rates
    return scheduler


def to_plain(value: Any) -> Any:
    """Convert a dataclass of arrays and plain values to plain data."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return array_to_plain(value)
    return value.str if isinstance(value, np.dtype) else value


def array_to_plain(array: np.ndarray) -> dict[str, Any]:
    if array.dtype.kind in "Mm":  # as numbers: Python's own times know microseconds at most
        return {"dtype": array.dtype.str, "values": array.astype(np.int64).tolist()}
    kept = (*PLAIN, bytes)
    if odd := [value for value in array.ravel().tolist() if not isinstance(value, kept)]:
        raise TypeError(
            f"{odd[0]!r} of the type {type(odd[0]).__name__} cannot be saved: a file holds labels "
            "and names that are numbers or texts; fit with str(label) in its place"
        )
    return {"dtype": "O" if array.dtype.kind in "OT" else array.dtype.str, "values": array.tolist()}


def from_plain(cls: Any, packed: dict[str, Any]) -> Any:
    if set(packed) != (expected := {f.name for f in dataclasses.fields(cls)}):
        raise LoadError(
            f"{cls.__name__} has {', '.join(sorted(expected))}, and the file gives {sorted(packed)}"
        )
    values = dict(packed)
    for name, value in packed.items():
        if isinstance(value, dict):
            values[name] = (
                read_array(value) if "values" in value else from_plain(TargetScale, value)
            )
    return cls(**values)


def read_array(packed: dict[str, Any]) -> np.ndarray:
    """Return an array, of a type no larger than its values."""
    values, dtype = packed["values"], np.dtype(packed["dtype"])
    if dtype.kind not in "OfiubUSMm" or dtype.shape:
        raise LoadError(f"an array cannot have the type {packed['dtype']!r}")
    if dtype.kind in "US":
        check_text_type(dtype, np.array(values, object))
    return np.array(values, dtype)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(v, PLAIN) for pair in value.items() for v in pair)
    return isinstance(value, PLAIN)


def _restore_generator(state: dict[str, Any]) -> np.random.Generator:
    generator = np.random.default_rng()
    generator.bit_generator.state = state
    return generator
