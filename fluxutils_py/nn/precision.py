"""The precision of a call: what surrounds it does not count, but bfloat16 or float16 by torch's
autocast, where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.nn.kernels.library import Library
from fluxutils_py.torch_private import has_autocast, n_function_modes, without_default_device

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}
KERNEL_WIDE = 32  # units from which the kernels' bfloat16 is
LOW = (torch.bfloat16, torch.float16)
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
# NumPy's own settings
NUMPY_ERRORS: dict[str, Any] = {
    "divide": "warn",
    "over": "warn",
    "under": "ignore",
    "invalid": "warn",
}


def check_precision(
    precision: object, name: str = "precision", error: type[Exception] = ValueError
) -> None:
    """Raise an error unless ``precision`` is one of :data:`PRECISIONS`."""
    if not (isinstance(precision, str) and precision in PRECISIONS):
        raise error(f"{name} must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")


def autocast(precision: str, device: torch.device) -> Any:
    """Return a context, also a decorator, in which torch computes matrix products and the like in
    ``precision``.

    It does not keep the converted weights: torch adds up the gradients of the uses of a kept weight
    in the low precision, and loses them if the first use was without gradients.
    """
    dtype = PRECISIONS[precision]
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast on a device."""
    if not torch.is_autocast_enabled(device.type):  # entering one takes several microseconds
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Compute what a call computes anywhere, whatever surrounds it; also a decorator.

    Inside, there is no autocast, no default device and no inference mode (gradients stay off), and
    NumPy raises no errors of arithmetic. All of these are of this thread alone. Torch's default
    dtype, which threads share, is for :func:`float32_by_default`.
    """
    contexts: list[AbstractContextManager[Any]] = []  # mostly none
    if torch.is_inference_mode_enabled():
        contexts += [torch.inference_mode(False), torch.no_grad()]
    if has_autocast():
        on = filter(torch.is_autocast_enabled, AUTOCAST_DEVICES)
        contexts += [torch.autocast(device, enabled=False) for device in on]
    if n_function_modes():
        contexts.append(without_default_device())
    raising = [kind for kind, action in np.geterr().items() if action == "raise"]
    if raising:
        contexts.append(np.errstate(**{kind: NUMPY_ERRORS[kind] for kind in raising}))
    if not contexts:
        yield
        return
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make new parameters float32, and draw them as such, whatever torch's default dtype is.

    The default is of the process: keep the block short.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def require_float32(params: Iterable[Tensor], precision: str) -> None:
    """Raise ValueError if parameters are not float32, to which alone ``precision`` applies."""
    if precision == "float32":
        return
    others = {p.dtype for p in params if p.is_floating_point() and p.dtype != torch.float32}
    if others:
        raise ValueError(
            f"precision={precision!r} computes with parameters of float32, the model has "
            f"{others.pop()}: convert it with model.float(), or leave out precision"
        )


def kernel_gains(library: Library, hidden_size: int, dtype: torch.dtype) -> bool:
    """Whether the native kernels compute a recurrent layer of this size, with inputs of this type,
    in bfloat16 under autocast.

    They do where the CPU multiplies bfloat16 (AVX512-BF16) and the layer is wide enough to gain.
    Nothing but the size counts: a series must not depend on the batch that it is in.
    """
    return (
        library.multiplies_bfloat16
        and hidden_size >= KERNEL_WIDE
        and dtype is not torch.float64
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
    )


def as_float32(value: Any) -> Any:
    """Return a tensor of bfloat16 or float16 as float32, anything else unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value
