"""Save and load estimators as files that contain data, never code."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.building import NotStored, build_model, check_device, require_stored
from fluxutils_py.estimator.fitted_parts import FitChoice, FittedParts
from fluxutils_py.estimator.nested_parameters import parameter_names
from fluxutils_py.estimator.serialization import (
    LOSSES,
    OPTIMIZERS,
    deserialize,
    deserialize_module,
    deserialize_optimizer,
    deserialize_spec,
    full_name,
    restore_argument,
    serialize_module,
    serialize_optimizer,
    serialize_spec,
    try_serialize,
)
from fluxutils_py.estimator.spec import read_spec
from fluxutils_py.estimator.streams.conformal import Calibration, read_levels
from fluxutils_py.inputs.inputs import InputLayout
from fluxutils_py.inputs.target_codec import TargetCodec, TargetScale
from fluxutils_py.nn.losses import seqloss
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.nn.ready_made import WithIntervals
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.optim import load_optimizer_state
from fluxutils_py.training.plain_files import (
    SETTING_TYPES,
    dataclass_from_plain,
    dataclass_to_plain,
    plain_or_none,
    read_file,
    write_file,
)

KIND = "fluxutils_py estimator"
FORMAT = 2
# Arguments that are code, or specific to a machine.
NO_SETTINGS = ("model", "loss", "opt", "spec", "device", "callbacks")
CODE = ("cell",)  # settings that may be classes, stored by name
WITH_KEYWORDS = ("model", "loss", "opt", *CODE)  # of which a partial has settings
# Settings of ready-made estimators in files of 0.2.0 that are now fields of their spec, or of what
# a fit has chosen. Others that are gone say how to train, and matter no more.
NOW_IN_SPEC = (
    *("lr_schedule", "shuffle", "overlap", "burn_in", "clip", "rebatch", "precision", "gradient"),
)
NOW_CHOSEN = ("n_lags", "input_noise", "scale_input")
FITTED = (
    *("loss_", "loss_curve_", "validation_loss_curve_", "n_iter_", "history_"),
    *("n_features_in_", "n_outputs_"),
)


@undisturbed()
def save_estimator(est: BaseEstimator, path: object) -> None:
    """Save a fitted estimator; see ``Estimator.save``."""
    if isinstance(est.model_, WithIntervals):
        raise TypeError("interval_estimator_ is part of an estimator: save that estimator")
    write_file(path, estimator_content(est))


def estimator_content(est: BaseEstimator) -> dict[str, Any]:
    """Return what a file holds of a fitted estimator, as plain data and tensors."""
    attributes = vars(est)
    arguments = est.get_params(deep=False)
    model = arguments.get("model")  # None: built from the settings
    optimizer = attributes.get("optimizer_")
    parts = est.fitted_parts_
    scheduler = parts.scheduler
    content = {
        "kind": KIND,
        "format": FORMAT,
        "class": type(est).__name__,
        "model": None if model is None else (serialize_module(est.model_), full_name(model)),
        "loss": try_serialize(arguments.get("loss")),
        "opt": try_serialize(arguments.get("opt")),
        "spec": serialize_spec(arguments.get("spec")),
        "settings": {k: v for k, v in arguments.items() if k not in NO_SETTINGS and _is_plain(v)},
        "code": {k: full_name(arguments[k]) for k in CODE if callable(arguments.get(k))},
        "keywords": _all_keywords(arguments),
        "parameters": {k: v.detach() for k, v in est.model_.state_dict().items()},
        "dtype": str(next(est.model_.parameters()).dtype).removeprefix("torch."),
        "optimizer": None if optimizer is None else serialize_optimizer(optimizer, est.model_),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "fitted": {**{k: getattr(est, k) for k in FITTED}, "_n_steps": parts.n_steps},
        "layout": dataclass_to_plain(parts.layout),
        "longest": parts.longest,
        "codec": dataclass_to_plain(parts.codec),
        "choice": None if parts.choice is None else asdict(parts.choice),
        "data": parts.data,
        # None is no dataclass, and stays
        "calibration": dataclass_to_plain(parts.calibration),
        "intervals": parts.interval_parameters,
        "grad": est.grad_,
        "generator": parts.rng.bit_generator.state,
    }
    # hooks may have put anything into the history
    plain: dict[str, Any] = plain_or_none(content)
    return plain


def code_to_give(est: BaseEstimator) -> dict[str, str]:
    """Return the arguments without which the file of a fitted estimator cannot be loaded: code of
    its author, each with its name.
    """
    arguments = est.get_params(deep=False)
    model = arguments.get("model")
    code = {k: arguments[k] for k in CODE if callable(arguments.get(k))}
    if model is not None and serialize_module(est.model_) is None:
        code["model"] = model
    return {argument: _source_of(value) for argument, value in code.items()}


def _source_of(code: Any) -> str:
    """Return how to write a class, a function or an instance, without the settings of a file."""
    name = full_name(code).rpartition(".")[2]
    if not name.isidentifier():  # a lambda
        return "..."
    if isinstance(code, nn.Module):
        return f"{name}(...)"
    keywords = _keywords_of(code)
    if keywords is None or not keywords["others"]:
        return name
    return f"partial({name}, {', '.join(f'{k}=...' for k in keywords['others'])})"


@undisturbed()
def load_estimator(cls: type[BaseEstimator], path: object, arguments: dict[str, Any]) -> Any:
    """Load an estimator; see ``Estimator.load``."""
    check_arguments(cls, arguments)
    # after the arguments: a misspelt one should not cost the time to read a large file
    content = read_file(path, KIND, format=FORMAT)
    name = content.get("class")
    if name != cls.__name__:
        raise LoadError(f"{path} holds {name}, not {cls.__name__}; use {name}.load")
    return estimator_of(cls, content, path, arguments)


def check_arguments(cls: type[BaseEstimator], arguments: Mapping[str, object]) -> list[str]:
    """Return the names of a class's arguments; raise TypeError if others are given."""
    known = parameter_names(cls)
    if unknown := sorted(set(arguments) - set(known)):
        raise TypeError(
            f"load: unknown arguments {', '.join(unknown)}; {cls.__name__} takes {', '.join(known)}"
        )
    return known


def estimator_of(
    cls: type[BaseEstimator], content: dict[str, Any], path: object, arguments: dict[str, Any]
) -> Any:
    """Return the estimator of which a file holds this content."""
    known = check_arguments(cls, arguments)
    if content.get("format") != FORMAT:
        raise LoadError(
            f"{path} has format {content.get('format')}, this version reads {FORMAT}: write the "
            "file again"
        )
    loader = "fluxutils_py" if cls.__module__.startswith("fluxutils_py.") else cls.__name__
    # building a module draws its first weights
    with load_errors(path), seeded(0):
        stored = _stored_arguments(content, path)
        attributes = _fitted_attributes(content, path)
        dtype = read_dtype(content["dtype"], path)
        parameters = content["parameters"]
        code = _stored_code(content)
    arguments = {k: code[k].fill(v, path) if k in code else v for k, v in arguments.items()}
    est = cls(**{**{k: v for k, v in stored.items() if k in known}, **arguments})
    # settings depend on what the fit has chosen
    est.fitted_parts_ = attributes["fitted_parts_"]
    with errors_unless_given(arguments, path):
        settings = est.resolved_params()
    if isinstance(settings.model, NotStored):
        raise LoadError(
            f"{path} holds the parameters of its author's own model, "
            f"{code['model']}, not its code: give the model too, {loader}.load(path, model=...)"
        )
    require_stored(**{name: getattr(est, name, None) for name in CODE})
    # before a model is built
    device = check_device(settings.device)
    n_in = est.fitted_parts_.layout.features
    build = partial(build_model, settings.model, n_in, attributes["n_outputs_"], dtype, None)
    with errors_unless_given(arguments, path):
        try:
            model = build_bounded(build, parameters, path).to(device)
        except LoadError as error:
            raise LoadError(f"{error}\nThe model of the file is {code['model']}.") from None
    with load_errors(path):
        est.model_ = model.eval()
        vars(est).update(attributes)
        _restore_intervals(est, content.get("intervals"))  # of 0.2.0: None
        est.grad_ = content["grad"].to(next(model.parameters()).device)
        if "opt" not in arguments and content["optimizer"] is not None:
            _restore_optimizer(est, content)
    return est


def _fitted_attributes(content: dict[str, Any], path: object) -> dict[str, Any]:
    """Return attributes of the estimator by name, without the model and the optimizer."""
    attributes = {k: content["fitted"][k] for k in FITTED}
    layout = dataclass_from_plain(InputLayout, content["layout"])
    # files of 0.2.0 know no weights of classes
    plain_codec = {"class_weight": None, **content["codec"]}
    codec = dataclass_from_plain(TargetCodec, plain_codec, nested=TargetScale)
    generator = np.random.default_rng()
    generator.bit_generator.state = content["generator"]
    n_steps = content["fitted"]["_n_steps"]
    # without the scheduler, which is restored with the optimizer
    chosen = content["choice"]
    if _is_flat(content["settings"]):
        chosen = _choice_of_flat(chosen, content["settings"])
    if chosen is not None:
        # files of 0.2.0 lack some
        chosen = dataclass_from_plain(FitChoice, {**asdict(FitChoice("")), **chosen})
    data = {str(name): str(text) for name, text in content["data"].items()}
    longest = int(content["longest"])
    errors = content["calibration"]
    calibration = None if errors is None else dataclass_from_plain(Calibration, errors)
    if calibration is not None and np.ndim(calibration.errors) != 3:
        raise LoadError(f"{path} is damaged (errors of a calibration are not (G, M, S))")
    attributes["fitted_parts_"] = FittedParts(
        layout, codec, generator, None, n_steps, chosen, data, calibration, longest
    )
    if layout.names is not None:
        attributes["feature_names_in_"] = layout.names
    if codec.classes is not None:
        attributes["classes_"] = codec.classes
    return attributes


def read_dtype(name: object, path: object) -> torch.dtype:
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


def _stored_arguments(content: dict[str, Any], path: object) -> dict[str, Any]:
    """Return the constructor's arguments from a file, with placeholders for user code."""

    parameters = content["parameters"]
    builders = {
        "model": lambda c: build_bounded(lambda: deserialize_module(c), parameters, path),
        "loss": lambda config: seqloss(deserialize(config, LOSSES)),
        "opt": lambda config: deserialize(config, OPTIMIZERS),
    }
    spec = deserialize_spec(content["spec"])
    if _is_flat(content["settings"]):
        spec = _spec_of_flat(content["settings"])
    settings = dict(content["settings"])
    if settings.get("interval") is not None:  # of 0.2.0, as a share
        settings["level"] = round(100 * settings["interval"], 6)
    return {
        **{k: restore_argument(content[k], k, build) for k, build in builders.items()},
        "spec": spec,
        **{k: v for k, v in settings.items() if k not in NO_SETTINGS},
        **{k: NotStored(k, name) for k, name in content["code"].items() if k in CODE},
    }


def _is_flat(settings: dict[str, Any]) -> bool:
    """Return whether settings are those of a ready-made estimator of 0.2.0, without a spec."""
    return "n_iter_no_change" in settings


def _choice_of_flat(chosen: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a :class:`FitChoice`, some of which were arguments in 0.2.0."""
    if chosen is None:  # nothing was "auto"
        chosen = asdict(FitChoice("linear+lstm"))
    given = {k: settings[k] for k in NOW_CHOSEN if settings.get(k, "auto") != "auto"}
    return {"scale_input": True, **chosen, **given}


def _spec_of_flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a ready-made estimator of 0.2.0, whose fields were arguments."""
    spec = {name: settings[name] for name in NOW_IN_SPEC if name in settings}
    if settings["early_stopping"]:
        spec["patience"] = settings["n_iter_no_change"]
    return spec


@dataclass(frozen=True)
class StoredCode:
    """What a file holds of an argument that is code: its name and settings.

    Attributes
    ----------
    name : str
        With the module.
    keywords : dict
        Settings of a ``functools.partial`` of it, such as those that ``set_params`` has made, that
        are plain data.
    others : list of str
        Names of its other settings.
    """

    name: str
    keywords: dict[str, Any]
    others: list[str]

    def __str__(self) -> str:
        settings = [f"{k}={v!r}" for k, v in self.keywords.items()]
        settings += [f"{k}=..." for k in self.others]
        return self.name + f" with {', '.join(settings)}" * bool(settings)

    def fill(self, given: Any, path: object) -> Any:
        """Return a class or function that the caller gives, with the stored settings that the
        caller leaves open.

        An instance, and code of another name, are returned as they are.

        Raises
        ------
        LoadError
            If a setting that the file could not hold is left open: the default would be another.
        """
        # without the module, which is __main__ in a script
        short = self.name.rpartition(".")[2]
        is_instance = isinstance(given, nn.Module | Optimizer) or not callable(given)
        if is_instance or full_name(given).rpartition(".")[2] != short:
            return given
        keywords = given.keywords if isinstance(given, partial) else {}
        if lacking := [k for k in self.others if k not in keywords]:
            raise LoadError(
                f"{path} holds {self}, but not the values of {', '.join(lacking)}, which are no "
                f"plain data: give functools.partial({short}, {lacking[0]}=...)"
            )
        missing = {k: v for k, v in self.keywords.items() if k not in keywords}
        return partial(given, **missing) if missing else given


def _all_keywords(arguments: Mapping[str, object]) -> dict[str, Any]:
    return {name: _keywords_of(arguments.get(name)) for name in WITH_KEYWORDS}


def _keywords_of(value: object) -> dict[str, Any] | None:
    """Return the settings of a partial: plain ones, and the names of others; None without any."""
    if not isinstance(value, partial) or not value.keywords:
        return None
    keywords = {k: v for k, v in value.keywords.items() if _is_plain(v)}
    return {"plain": keywords, "others": [k for k in value.keywords if k not in keywords]}


def _stored_code(content: dict[str, Any]) -> dict[str, StoredCode]:
    """Return the names and settings of arguments whose code the file lacks; of the model in any
    case, as its parameters fit no other.
    """
    model = content["model"]
    names = {"model": "the default" if model is None else model[1], **content["code"]}
    for argument in ("loss", "opt"):
        stored = content[argument]
        if stored is not None and stored[0] is None:
            names[argument] = stored[1]
    found = {}
    for argument, name in names.items():
        keywords = content["keywords"].get(argument) or {"plain": {}, "others": []}
        plain = {str(k): v for k, v in keywords["plain"].items()}
        found[argument] = StoredCode(str(name), plain, list(map(str, keywords["others"])))
    return found


@contextlib.contextmanager
def load_errors(path: object) -> Iterator[None]:
    """Turn any error that wrong content in a file causes into a LoadError."""
    try:
        yield
    except LoadError as error:
        # some errors name the file already
        if str(path) in str(error):
            raise
        raise LoadError(f"{path}: {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise LoadError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def errors_unless_given(
    arguments: Mapping[str, object], path: object
) -> contextlib.AbstractContextManager[None]:
    """Turn errors into LoadErrors; with arguments from the caller, an error may come from these,
    and is shown as it is.
    """
    return contextlib.nullcontext() if arguments else load_errors(path)


def _restore_intervals(est: Any, parameters: dict[str, Tensor] | None) -> None:
    if parameters is None:
        return
    intervals = WithIntervals(
        est.n_features_in_, est.n_outputs_, levels=read_levels(est.level), center=est.model_
    ).to(next(est.model_.parameters()))
    if parameters.keys() != intervals.own_parameters().keys():
        raise LoadError(f"the file is damaged (parameters of intervals: {sorted(parameters)})")
    intervals.load_state_dict({**intervals.state_dict(), **parameters})
    est.fitted_parts_ = replace(est.fitted_parts_, intervals=intervals.eval())


def _restore_optimizer(est: BaseEstimator, content: dict[str, Any]) -> None:
    """Restore the optimizer with its moments, and the schedule if the file or the user has it."""
    optimizer = deserialize_optimizer(content["optimizer"], est.model_)
    est.optimizer_ = optimizer
    schedule = read_spec(est.resolved_params().spec).schedule
    # without its code the schedule cannot continue; a fit will ask for it
    make = None if schedule is None else schedule[1]
    if content["scheduler"] is not None and make is not None and not isinstance(make, NotStored):
        scheduler = make(optimizer)
        scheduler.load_state_dict(content["scheduler"])
        est.fitted_parts_ = replace(est.fitted_parts_, scheduler=scheduler)
    # last, because a new scheduler changes learning rates
    load_optimizer_state(optimizer, content["optimizer"]["state"])


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):  # such as class_weight
        return all(isinstance(v, SETTING_TYPES) for pair in value.items() for v in pair)
    if isinstance(value, list | tuple):  # such as level, or the widths of layers
        return all(map(_is_plain, value))
    return isinstance(value, SETTING_TYPES)


# -- a model no larger than what the file holds for it ---------------------------------------------

SPARE = 100  # parameters beside four for each stored tensor, that a model may make as it is built


def build_bounded(
    build: Callable[[], nn.Module], stored: dict[str, Tensor], path: object
) -> nn.Module:
    """Build a model for which a file holds parameters, with these.

    Shapes are compared before any memory is allocated.

    Parameters
    ----------
    build : callable
        Called twice: first with tensors that have shapes only (torch's device ``meta``).
    stored : dict of str to Tensor
        As of ``state_dict()``.
    path : path-like

    Raises
    ------
    LoadError
        If the model has other parameters, or far more of them.
    """
    thread = threading.get_ident()
    left = 4 * len(stored) + SPARE

    def count(*_: object) -> None:
        nonlocal left
        # the hook is global, and other threads may build models meanwhile
        left -= threading.get_ident() == thread
        if left < 0 and threading.get_ident() == thread:
            raise LoadError(f"{path} describes a model of far more parameters than it holds")

    hook = register_module_parameter_registration_hook(count)
    try:
        outline = None
        # it may look at values as it is built; what cannot be built, the next call will say
        with suppress(Exception), seeded(0), torch.device("meta"):
            outline = build()
        if outline is not None:
            _load_parameters(outline, stored, path)
        # once more, as what is built on the device meta has no values
        with seeded(0):
            model = build()
    finally:
        hook.remove()
    _load_parameters(model, stored, path)
    return model


def _load_parameters(model: nn.Module, stored: dict[str, Tensor], path: object) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it copies nothing to meta
            warnings.filterwarnings("error", "Casting complex")
            model.load_state_dict(stored)
    except (RuntimeError, AttributeError) as error:
        raise LoadError(f"{path} does not fit the model: {error}") from None
