"""Compile the parts of a model that torch can speed up, for the time of a training."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fluxutils_py.errors import SpecError, warn
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.torch_private import call_uncompiled

# largest number of compiled versions of a function: for sizes, modes, and states with and without
# gradient
GRAPHS = 64
OF_TORCH = ("torch.nn.", "fluxutils_py.nn.")


def compile_arguments(compile: object) -> dict[str, Any] | None:
    """Return the keyword arguments for ``torch.compile`` from a ``compile`` argument; None: do not
    compile.

    Raises
    ------
    SpecError
        If it is neither a bool nor a mapping of arguments that ``torch.compile`` has.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return {}
    parameters = inspect.signature(torch.compile).parameters
    known = [name for name in parameters if name not in ("model", "disable")]
    if not isinstance(compile, Mapping) or not set(compile) <= set(known):
        raise SpecError(
            "compile must be True, False, or a dict of arguments of torch.compile "
            f"({', '.join(known)}); got {compile!r}"
        )
    return dict(compile)


def parts_to_compile(model: nn.Module) -> list[nn.Module]:
    """Return the largest parts of a model without recurrent layers, and the user's modules inside
    custom recurrent layers.

    A part is more than one layer of torch: a module that the user wrote, or a container of several
    modules. Recurrent layers themselves keep their state in Python and call native kernels, so they
    stay as they are.
    """
    if isinstance(model, Recur):
        return [] if _is_of_torch(model.module) else parts_to_compile(model.module)
    if not any(isinstance(m, Recur | nn.RNNBase | nn.RNNCellBase) for m in model.modules()):
        several = sum(not isinstance(m, nn.Sequential) for m in model.modules()) > 1
        return [model] if several or not _is_of_torch(model) else []
    return [part for child in dict.fromkeys(model.children()) for part in parts_to_compile(child)]


@contextlib.contextmanager
def compiled(model: nn.Module, arguments: Mapping[str, Any] | None) -> Iterator[None]:
    """Compile the parts of a model by ``torch.compile(part, **arguments)`` inside the block; None:
    nothing.

    Each part is compiled when it is first called, and again for sizes of another kind. If that
    fails, the part runs uncompiled, with a warning. Copies and pickles of the model are never
    compiled.

    Warns
    -----
    UserWarning
        If compiling fails, such as without a C++ compiler, or if there is nothing to compile.
    """
    if arguments is None:
        yield
        return
    parts = parts_to_compile(model)
    if not parts:
        warn(
            f"compile changes nothing: {type(model).__name__} has only recurrent layers, which "
            "run as native kernels, and single layers around them. Put what is to be compiled "
            "together into a separate module, such as nn.Sequential"
        )
        yield
        return
    import torch._dynamo  # takes seconds

    try:
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            for part in parts:  # where torch looks for it
                vars(part)["_compiled_call_impl"] = _compiled_call(part, arguments)
            yield
    finally:
        for part in parts:
            vars(part).pop("_compiled_call_impl", None)


def _compiled_call(part: nn.Module, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the compiled call of a module, or its usual one if that cannot be compiled."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # a function around it, because torch does not compile the methods of its classes
        return call_uncompiled(part, *args, **kwargs)

    fastest: Any = torch.compile(run, **arguments)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal fastest
        try:
            return fastest(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            fastest = run  # do not try again with each window
            name = type(part).__name__
            warn(f"{name} trains uncompiled, since compiling it failed: {_reason(error)}")
            return run(*args, **kwargs)

    return call


def _reason(error: Exception) -> str:
    """Return why a module cannot be compiled, in one line."""
    text = str(error)
    if "InvalidCxxCompiler" in text:
        return "there is no C++ compiler that works (install g++ or clang, or set the variable CXX)"
    lines = (text.strip() or type(error).__name__).splitlines()
    return " ".join(lines[:2])


def _is_of_torch(module: nn.Module) -> bool:
    name = type(module).__module__
    return name.startswith(OF_TORCH) or name == "fluxutils_py.nn"
