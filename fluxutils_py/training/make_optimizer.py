"""Make optimizers and schedulers from classes, functions or instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fluxutils_py.optim import Transform


def make_optimizer(opt: object, params: Sequence[Tensor]) -> Optimizer:
    """Make an optimizer for parameters.

    Parameters
    ----------
    opt : optimizer class, functools.partial, callable, torch.optim.Optimizer or None
        A class or callable is called with the parameters; an instance is returned unchanged. None:
        AdamW.
    params : sequence of Tensor

    Raises
    ------
    TypeError
        If ``opt`` has another type, or does not return an optimizer.
    ValueError
        If there are no parameters, or the optimizer runs the model itself (``LBFGS``).
    """
    if not params:
        raise ValueError(
            "the model has no trainable parameters: set requires_grad on those to be learnt"
        )
    if opt is None:
        return adamw(params)
    if isinstance(opt, Transform):
        raise TypeError(
            f"opt={opt!r} changes gradients only: combine it with an optimizer by "
            f"fluxutils_py.optim.Chain, as in opt=Chain({opt!r}, torch.optim.AdamW)"
        )
    optimizer: Any = opt
    if not isinstance(opt, Optimizer):
        # other classes are callable too: one given by mistake would raise an obscure error
        if not (issubclass(opt, Optimizer) if isinstance(opt, type) else callable(opt)):
            raise TypeError(
                "opt must be an optimizer class such as torch.optim.AdamW, a functools.partial of "
                f"one, a function of the parameters, an optimizer, or None; got {opt!r}"
            )
        optimizer = _made_of(opt, params, "opt")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"opt={opt!r} must make a torch optimizer, it made {type(optimizer).__name__}"
        )
    # a closure would run the window again from the state that the first run left behind
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS runs the model several times a step, which a carried state forbids; use AdamW"
        )
    return optimizer


def make_scheduler(
    scheduler: Callable[[Any], Any],
    optimizer: Optimizer | None,
    name: str = "scheduler",
) -> Any:
    """Return ``scheduler(optimizer)``, after checking that it is a learning-rate scheduler.

    Raises
    ------
    TypeError
        If it is not a scheduler; ``name`` is that of the argument.
    """
    # without an optimizer, there is nothing whose rate it could change
    if not callable(scheduler) or optimizer is None:
        raise TypeError(
            f"{name} must make a torch learning-rate scheduler of the optimizer, got {scheduler!r}"
        )
    made = _made_of(scheduler, optimizer, name)
    if not hasattr(made, "step"):
        raise TypeError(f"{name} must make a torch learning-rate scheduler, it made {made!r}")
    return made


def _made_of(make: Any, argument: object, name: str) -> Any:
    """Return ``make(argument)``; an error of missing arguments says how to give them."""
    try:
        return with_python_numbers(make)(argument)
    except TypeError as error:
        error.add_note(
            f"{name} is called with one argument; give it others by functools.partial, as in "
            "partial(torch.optim.SGD, lr=0.1)"
        )
        raise


def begin_schedule(scheduler: object, n_left: int | None) -> None:
    """Tell a scheduler how many of its steps are left, if it has ``begin_run``.

    The schedule of ``cosine(cycles=1)`` has it.
    """
    # the schedulers of torch have none
    begin = getattr(scheduler, "begin_run", None)
    if begin is not None:
        begin(n_left)


def adamw(params: Any, lr: float = 1e-3, **settings: Any) -> Optimizer:
    """Return AdamW, fused if torch supports it for the device and type."""
    # torch has no public test of this: it raises for devices and types without a fused kernel
    try:
        return torch.optim.AdamW(params, lr, fused=True, **settings)
    except RuntimeError:
        return torch.optim.AdamW(params, lr, **settings)


def with_python_numbers(f: Any) -> Any:
    """Return ``f``; in a partial, replace NumPy numbers by Python numbers.

    Searches draw NumPy numbers, and torch accepts Python's only.
    """
    if not isinstance(f, partial):
        return f
    arguments = [_python_number(v) for v in f.args]
    keywords = {k: _python_number(v) for k, v in f.keywords.items()}
    return partial(f.func, *arguments, **keywords)


def _python_number(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
