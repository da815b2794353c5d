"""The private names of torch that this package reads, all in one place.

The test of this file names the versions of torch for which they are known to work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._device import DeviceContext

# Getters of C rather than functions: threads read them for each buffer of each step.

# Counts the changes of a tensor in place.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# The user's functions around the call of a module: before and after it.
call_hooks_of: Callable[[nn.Module], tuple[Any, Any]] = attrgetter(
    "_forward_pre_hooks", "_forward_hooks"
)
# The user's functions that wait for the gradient of a tensor, or None.
gradient_hooks_of: Callable[[Tensor], tuple[Any, Any]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
# The user's functions around a step of an optimizer.
step_hooks_of: Callable[[Optimizer], tuple[Any, Any]] = attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)
# The tensor that a tensor is a view of, or None.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
# The arguments of an operation, each with a ``name``.
arguments_of: Callable[[Any], Any] = attrgetter("_schema.arguments")


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, but without what ``torch.compile`` has put in its place."""
    return module._call_impl(*args, **kwargs)


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Return indices and values of a sparse tensor as they are stored.

    The public methods refuse a tensor that is not coalesced, as a file may hold.
    """
    return [tensor._indices(), tensor._values()]


def note_nonfinite(number: Tensor, found: Tensor, one: Tensor) -> None:
    """Set ``found`` to ``one``, float32 scalars, if a number is NaN or infinite, without waiting
    for it: one kernel for what takes public operations six.
    """
    torch._amp_foreach_non_finite_check_and_unscale_([number], found, one)


def note_optimizer_call(optimizer: Optimizer) -> None:
    """Mark an optimizer as called, although it was not: its step was skipped, or restored.

    Else the schedulers of torch warn that they were called first.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers set it


@torch.no_grad()
def step_fused_adamw(optimizer: Optimizer) -> bool:
    """Step torch's fused AdamW by its kernel alone: around it, ``optimizer.step()`` takes ten times
    as long where the model is small.

    Returns False, and does nothing, unless all is as usual: one group of parameters of one type on
    the CPU, all with dense gradients; ``step`` has run before, and nothing else waits for its call.
    """
    if not _is_plain_adamw(optimizer):
        return False
    group = optimizer.param_groups[0]
    params = group["params"]
    grads = [p.grad for p in params]
    states: list[Any] = [optimizer.state.get(p) for p in params]
    if not all(states) or any(_is_unusual(g, params[0].dtype) for g in grads):
        return False
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        _count_steps(states),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
    note_optimizer_call(optimizer)
    return True


def _is_plain_adamw(optimizer: Optimizer) -> bool:
    """Return whether a step is what torch's fused AdamW does, and has no hooks; the function by
    which torch's schedulers note the call may be in its place.
    """
    group, *others = optimizer.param_groups
    return (
        type(optimizer) is torch.optim.AdamW
        and group["fused"]
        and not (group["amsgrad"] or others)
        and not any(step_hooks_of(optimizer))
        and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
        and getattr(optimizer.step, "_wrapped_by_lr_sched", "step" not in vars(optimizer))
    )


def _is_unusual(grad: Tensor | None, dtype: torch.dtype) -> bool:
    return grad is None or grad.dtype is not dtype or not grad.is_cpu or grad.is_sparse


def _count_steps(states: list[Any]) -> list[Tensor]:
    """Count one more step of each parameter; one operation does, as they are views of one tensor,
    which they become here.
    """
    steps = [state["step"] for state in states]
    count = base_of(steps[0])
    if count is None or len(count) != len(steps) or any(base_of(n) is not count for n in steps):
        count = torch.stack(steps)
        for k, state in enumerate(states):
            state["step"] = count[k]
    count += 1
    return [state["step"] for state in states]


# Whether there is autocast on any kind of device in this thread.
has_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
# How many function modes there are on the stack of this thread, default devices among them.
n_function_modes: Callable[[], int] = _C._len_torch_function_stack


def has_other_modes_than_devices() -> bool:
    """Return whether a function mode other than a default device is on the stack."""
    stack = map(_C._get_function_stack_at, range(n_function_modes()))
    return any(type(mode) is not DeviceContext for mode in stack)


@contextmanager
def without_default_device() -> Iterator[None]:
    """Take default devices (``torch.set_default_device``, ``with torch.device``) off the stack of
    function modes of this thread for a while; others stay.
    """
    modes = [_C._pop_torch_function_stack() for _ in range(n_function_modes())][::-1]
    others = [mode for mode in modes if type(mode) is not DeviceContext]
    _push_modes(others)
    try:
        yield
    finally:
        for _ in others:
            _C._pop_torch_function_stack()
        _push_modes(modes)


def _push_modes(modes: list[Any]) -> None:
    for mode in modes:
        _C._push_on_torch_function_stack(mode)
