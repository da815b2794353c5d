"""Build the model and the optimizer from an estimator's arguments."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from fluxutils_py.errors import DataError
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.precision import float32_by_default
from fluxutils_py.nn.recurrent import wrap_recurrent
from fluxutils_py.optim import ChainedOptimizer
from fluxutils_py.training.make_optimizer import make_optimizer, with_python_numbers

# Arguments of a model that are filled in: the numbers of features of inputs, and of outputs.
INPUT_SIZES = ("n_in", "n_features")
OUTPUT_SIZES = ("n_out", "n_outputs")
SIZES = (*INPUT_SIZES, *OUTPUT_SIZES)


class NotStored:
    """Placeholder for an argument with user code, which files do not store; see ``load``."""

    def __init__(self, argument: str, code_name: str) -> None:
        self.argument = argument
        self.code_name = code_name

    def __call__(self, *_: Any) -> Any:
        # inside a spec, as its schedule, it is found out only here
        require_stored(**{self.argument: self})

    def __repr__(self) -> str:
        return f"<{self.argument} {self.code_name!r}, not stored>"


def require_stored(**arguments: Any) -> None:
    """Raise ValueError if an argument is a placeholder for code that its file did not store."""
    for name, value in arguments.items():
        if isinstance(value, NotStored):
            argument = name.partition(".")[0]  # spec.lr_schedule is given as spec
            raise ValueError(
                f"the file of this estimator does not hold its {name} "
                f"({value.code_name}), which is its author's code; give it: "
                f"fluxutils_py.load(path, {argument}=...) or est.set_params({argument}=...)"
            )


def require_single_input_and_output(model_name: str, n_in: object, n_out: object) -> None:
    """Raise DataError unless there is one input and one output."""
    if isinstance(n_in, tuple) or isinstance(n_out, tuple):
        raise DataError(
            f"{model_name} is for one input and one output; several need a custom model"
        )


def default_model(n_in: int, n_out: int, n_hidden: int = 32) -> nn.Module:
    """Build the default model: one stateful LSTM layer and a linear head."""
    return nn.Sequential(LSTM(n_in, n_hidden), nn.Linear(n_hidden, n_out))


def build_model(
    model: object, n_in: Any, n_out: Any, dtype: torch.dtype | None, device: object
) -> nn.Module:
    """Build a model: copy an instance, or call a class or function.

    Parameters
    ----------
    model : nn.Module, class, callable or None
        Arguments of a class or callable named ``n_in`` or ``n_features``, ``n_out`` or
        ``n_outputs`` are filled in.
    n_in, n_out : int, or tuple of int for several inputs or outputs
    dtype : torch.dtype or None
        Floating type of the parameters; None leaves them as they are.
    device : str, torch.device or None
        None leaves the model where it is.

    Raises
    ------
    TypeError
        If ``model`` has another type, needs other arguments, or makes something other than a
        module.
    ValueError
        If the device does not exist.
    """
    require_stored(model=model)
    if model is None:
        require_single_input_and_output("model=None", n_in, n_out)
        with float32_by_default():
            built: Any = default_model(n_in, n_out)
    elif isinstance(model, nn.Module):
        # fit never changes what the user holds
        built = deep_copy(model)
    elif callable(model):
        with float32_by_default():  # so that random_state alone says what is drawn
            built = _call_with_sizes(model, n_in, n_out)
    else:
        raise TypeError(
            "model must be a torch module, a class or function that makes one, or None; got "
            f"{model!r}"
        )
    built = wrap_recurrent(built)
    return built.to(device=check_device(device), dtype=dtype)


def _call_with_sizes(model: Callable[..., Any], n_in: object, n_out: object) -> nn.Module:
    """Call a class or function that makes a model, with those sizes that it takes."""
    model = with_python_numbers(model)
    # before the call, whose TypeError would not say what is filled in
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {
        p.name
        for p in parameters_of(model) or []
        if p.default is p.empty and p.kind not in variable
    }
    if unknown := required - set(SIZES):
        raise TypeError(
            f"model={model!r} has required arguments that are not supplied: "
            f"{', '.join(sorted(unknown))}. Only n_in and n_out (numbers of features) are filled "
            "in; give the others defaults, or use functools.partial."
        )
    sizes = {**dict.fromkeys(INPUT_SIZES, n_in), **dict.fromkeys(OUTPUT_SIZES, n_out)}
    takes = _open_arguments(model)
    built = model(**{name: size for name, size in sizes.items() if name in takes})
    if not isinstance(built, nn.Module):
        raise TypeError(f"model={model!r} must make a torch module, it made {type(built).__name__}")
    return built


def build_optimizer(opt: object, model: object, built: nn.Module) -> Optimizer:
    """Build the optimizer of ``built``: call a class or function, or rebind an instance.

    ``model`` is the user's ``model`` argument. An optimizer instance must hold its parameters; it
    is rebound by their positions and keeps its groups and settings. None is AdamW, fused where
    torch offers it.

    Raises
    ------
    TypeError, ValueError
        If ``opt`` has another type, holds other parameters, or needs a closure.
    """
    require_stored(opt=opt)
    given = rebind(opt, model, built) if isinstance(opt, Optimizer) else opt
    optimizer = make_optimizer(given, [p for p in built.parameters() if p.requires_grad])
    # a function may ignore its argument, and train the copy that the user holds
    allowed = {id(p) for p in built.parameters()}
    if any(id(p) not in allowed for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"opt={opt!r} made an optimizer of other parameters than the ones it was given"
        )
    return optimizer


def check_device(device: object) -> torch.device | None:
    """Return the torch device with this name; None stays None.

    Raises
    ------
    ValueError
        If torch does not know the device, or this machine does not have it.
    """
    if device is None:
        return None
    remedy = 'give "cpu", "cuda", "cuda:1", "mps" or the like, or None for the model\'s device'
    # searches hand on texts and numbers of NumPy
    name: Any = device.item() if isinstance(device, np.generic) else device
    try:
        resolved = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is no device of torch; {remedy}") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        no_build = "this torch is built without CUDA"
        cause = "torch sees no GPU here" if torch.version.cuda else no_build
        raise ValueError(f"device={device!r}, but {cause}; {remedy}")
    try:  # the index may be of a device that this machine lacks
        torch.zeros(1, device=resolved).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device={device!r} cannot be used: {str(error).splitlines()[0]}; {remedy}"
        ) from None
    return resolved


def rebind(opt: Optimizer, model: object, built: nn.Module) -> Optimizer:
    """Return an optimizer like ``opt`` for ``built``, a copy of ``model``.

    Each group has the parameters at the same positions.
    """
    remedy = "give the class and its settings instead: functools.partial(torch.optim.AdamW, lr=...)"
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"an optimizer instance needs a model instance, whose parameters it holds; {remedy}"
        )
    at = parameter_places(model)
    params = list(built.parameters())
    groups = []
    for group in opt.param_groups:
        if any(id(p) not in at for p in group["params"]):
            raise ValueError(
                f"the {type(opt).__name__} given as opt holds parameters that are not the model's: "
                f"build it from model.parameters() of the same model; {remedy}"
            )
        # copied, as a learning rate may be a tensor, which schedules change in place
        settings = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        groups.append({**settings, "params": [params[at[id(p)]] for p in group["params"]]})
    return optimizer_like(opt, groups)


def parameter_places(model: nn.Module) -> dict[int, int]:
    """Return the place of each parameter in a model, by its ``id``."""
    return {id(p): i for i, p in enumerate(model.parameters())}


def optimizer_like(like: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer with the same class and settings for other parameter groups."""
    if isinstance(like, ChainedOptimizer):
        return ChainedOptimizer(optimizer_like(like.inner, groups), like.before, like.after)
    return type(like)(groups, **optimizer_arguments(like))


def optimizer_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer that its class takes as arguments."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {k: v for k, v in optimizer.defaults.items() if k in accepted}


def make_generator(random_state: Any) -> np.random.Generator:
    """Return the generator for all randomness of a fit.

    The global generators are neither used nor changed.

    ``random_state`` is an int, a ``numpy.random.Generator`` or ``RandomState`` (draws one number
    from it), or None for fresh entropy.
    """
    # drawn from, so that a generator given to two fits gives two results
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(np.iinfo(np.int32).max))
    if isinstance(random_state, np.random.Generator):
        return np.random.default_rng(random_state.integers(2**63))
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError):
        raise ValueError(
            "random_state must be a non-negative int, a numpy RandomState or Generator, or None; "
            f"got {random_state!r}"
        ) from None


def parameters_of(f: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a class, function or partial.

    None if Python cannot tell: for some built-in functions, and a partial that cannot be called.
    """
    try:
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return None


def _open_arguments(f: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that a class, function or partial still takes."""
    closed = set()
    while isinstance(f, partial):
        closed |= set(f.keywords)
        f = f.func
    return {p.name for p in parameters_of(f) or []} - closed


def require_gradients(call: str) -> None:
    """Raise RuntimeError if gradients are switched off around a call that computes them."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            f"{call} needs gradients, but they are switched off by torch.no_grad(), "
            "torch.inference_mode() or torch.set_grad_enabled(False); call it outside of that "
            "block, or after torch.set_grad_enabled(True)"
        )
