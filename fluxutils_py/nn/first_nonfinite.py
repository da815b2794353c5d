"""Find the module of a model that first gives a number that is NaN or infinite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fluxutils_py.nn.seeding import gpus_of
from fluxutils_py.nn.states import restore, sensitivities, snapshot
from fluxutils_py.tree import tree_map


@torch.no_grad()
def first_nonfinite(model: nn.Module, run: Callable[[], object]) -> str:
    """Call ``run()``, which calls the model; return where a number first was not finite, as the end
    of a clause.

    State, buffers and torch's random numbers are as before afterwards. An error of ``run`` ends the
    search.
    """
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            return f": parameter {name!r} is not finite"
    places: list[str] = []  # a list, because hooks cannot return a result
    states = snapshot(model)
    carried = sensitivities(model)
    buffers = [(b, b.clone()) for b in model.buffers()]  # such as the means of BatchNorm
    # hooks stay on the modules that the model itself calls, in their order
    hooks = []
    for name, m in model.named_modules():
        hooks.append(m.register_forward_hook(partial(_note_place, places, name)))
    gpus = gpus_of(model)
    try:
        # the error of ``run`` is not raised: the caller is about to raise another one
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=gpus):
            run()
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
        restore(model, states, carried)
    return places[0] if places else ""


def _note_place(
    places: list[str],
    name: str,
    module: nn.Module,
    inputs: object,
    output: object,
) -> None:
    """Add the module to ``places`` if it is the first whose output is not finite."""
    if places or is_finite(output):
        return
    place = f"module {name!r}" if name else "the model"
    verb = "first given by" if is_finite(inputs) else "already in the input of"
    places.append(f", {verb} {place} ({type(module).__name__})")


def is_finite(values: object) -> bool:
    """Return whether all numbers in a tree of tensors are finite."""
    finite: list[bool] = []

    def note(value: object) -> object:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            finite.append(bool(value.isfinite().all()))
        return value

    tree_map(note, values)
    return all(finite)
