"""Run a model again on a batch that gave NaN, to name the module where it began."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fluxutils_py.nn.first_nonfinite import first_nonfinite, is_finite
from fluxutils_py.nn.recurrent import State
from fluxutils_py.nn.states import restore


def find_nonfinite(
    model: nn.Module,
    batch: object,
    run: Callable[[Any], Any],
    states: Sequence[State | None] | None = None,
) -> str:
    """Call ``run(batch)``, and return where a number first was not finite, as the end of a clause.

    It is empty if the model gives finite numbers, or if the batch has others already. Recurrent
    layers begin with ``states``, by default with their present ones. States, buffers and random
    generators are as before afterwards.
    """
    if not is_finite(getattr(batch, "inputs", batch)):
        return ""

    def again() -> None:
        if states is not None:
            restore(model, states)
        run(batch)

    # the global generators of Python and NumPy, which a user's loss may draw from
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002  # the generator that old code draws from
    try:
        # Compiled code calls no hooks, by which the first module is found.
        with torch.compiler.set_stance("force_eager"):
            return first_nonfinite(model, again)
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002  # as above


def find_nonfinite_gradient(model: nn.Module) -> str:
    """Return the first parameter, in the order of the backward pass, whose gradient is not finite,
    in such words.
    """
    for name, p in reversed(list(model.named_parameters())):
        if p.grad is None:
            continue
        values = p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        if not is_finite(values):
            return f", in the gradient of parameter {name!r}"
    return ""
