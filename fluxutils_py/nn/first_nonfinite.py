"""Find the module of a model that first gives a number that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.states import restore, snapshot
from fluxutils_py.tree import tree_map


@torch.no_grad()
def first_nonfinite(model: nn.Module, run: Callable[[], Any]) -> str:
    """Call ``run()``, which calls the model; return where a number first was not finite, as the end
    of a clause.

    State, buffers and torch's random numbers are as before afterwards. An error of ``run`` ends the
    search.
    """
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            return f": parameter {name!r} is not finite"
    found: list[str] = []
    states, buffers = snapshot(model), [(b, b.clone()) for b in model.buffers()]
    handles = [
        m.register_forward_hook(partial(_look, found, name)) for name, m in model.named_modules()
    ]
    try:
        gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(gpus)):
            run()
    except Exception:  # the caller has an error of its own to raise
        return found[0] if found else ""
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
        restore(model, states)
    return found[0] if found else ""


def _look(found: list[str], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    if found or is_finite(output):
        return
    described = (
        f"module {name!r} ({type(module).__name__})"
        if name
        else f"the model ({type(module).__name__})"
    )
    verb = "first given by" if is_finite(inputs) else "already in the input of"
    found.append(f", {verb} {described}")


def is_finite(values: Any) -> bool:
    """Return whether all numbers in a tree of tensors are finite."""
    finite: list[bool] = []

    def note(value: Any) -> Any:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            finite.append(bool(value.isfinite().all()))
        return value

    tree_map(note, values)
    return all(finite)
