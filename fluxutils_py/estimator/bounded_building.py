"""Build the model that a file describes, no larger than what the file holds for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.errors import LoadError
from fluxutils_py.nn.seeding import seeded


def build_bounded(
    build: Callable[[], nn.Module], stored: dict[str, Tensor], path: object
) -> nn.Module:
    """Build a model for which a file holds parameters, no larger than these.

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
        If the model has other parameters.
    """
    with seeded(0), torch.device("meta"):
        try:
            outline: nn.Module | None = build()
        except Exception:
            # it looks at values as it is built, or cannot be built, which the next call will say
            outline = None
    if outline is not None:
        compare_parameters(stored, outline.state_dict(), path)
    # once more, as what is built on the device meta has no values
    with seeded(0):
        model = build()
    compare_parameters(stored, model.state_dict(), path)
    return model


def compare_parameters(stored: dict[str, Any], wanted: dict[str, Any], path: object) -> None:
    """Raise a LoadError that names each parameter or buffer that does not fit the model.

    It may be missing, left over, or of another shape or type of number.
    """
    faults = [f"{k}: in the file, not in the model" for k in stored if k not in wanted]
    faults += [f"{k}: in the model, not in the file" for k in wanted if k not in stored]
    faults += [
        f"{k}: {_outline(v)} in the file, {_outline(wanted[k])} in the model"
        for k, v in stored.items()
        if k in wanted
        and (
            not isinstance(v, Tensor) or v.shape != wanted[k].shape or _kind(v) != _kind(wanted[k])
        )
    ]
    if faults:
        raise LoadError(f"{path} does not fit the model:\n  " + "\n  ".join(faults))


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else "integer"


def _outline(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = _kind(value)
    return f"{tuple(value.shape)}" + f" of {kind} numbers" * (kind != "floating")
