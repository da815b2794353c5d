"""Build the model that a file describes, no larger than what the file holds for it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fluxutils_py.errors import LoadError
from fluxutils_py.nn.seeding import seeded

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
