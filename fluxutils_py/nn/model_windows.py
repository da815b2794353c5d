"""Run a model over a window: in one call if the model can, else step by step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.copying import deep_copy, shallow_copy
from fluxutils_py.nn.recurrent import unwrapped_recurrent
from fluxutils_py.nn.states import recurrent_layers, reset

Outputs = Tensor | tuple[Tensor, ...]

_modes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # "steps", "windows" or "either"


def run_window(model: nn.Module, xs: Tensor | Sequence[Tensor]) -> Outputs:
    """Return the model's outputs for a window, and carry its state through.

    Parameters
    ----------
    model : nn.Module
        Called as ``model(x)``, or ``model(*xs)`` for several inputs, with whole windows ``(S, B, F)`` if
        :func:`takes_windows`, else with one step ``(B, F)`` after another.
    xs : Tensor of shape (S, B, F), or a tuple of such

    Returns
    -------
    Tensor of shape (S, B, G), or a tuple of such
    """
    inputs = (xs,) if isinstance(xs, Tensor) else tuple(xs)
    if takes_windows(model, inputs):
        return _check_outputs(model(*inputs))
    return _run_stepwise(model, inputs)


def takes_windows(model: nn.Module, xs: Sequence[Tensor]) -> bool:
    """Whether the model takes a whole window ``(S, B, F)`` instead of its steps ``(B, F)`` one by one.

    A whole window through a fused ``nn.LSTM`` is four to five times faster than its steps. An attribute
    ``takes_windows`` of the model decides. Without it, the model is tried out once, on a copy with disturbed parameters
    and three steps of disturbed data: if both ways give the same numbers, windows are safe. The answer is remembered as
    long as the model lives, even if it gets the attribute later. The trial changes neither the model nor its state nor
    the random generators.

    Raises
    ------
    ShapeError
        If the model runs neither way, or both ways with different results; then only its author knows which is right.
    """
    return window_mode(model, xs) != "steps"


def needs_context(model: nn.Module, xs: Sequence[Tensor]) -> bool:
    """Whether a model without recurrent state must see the steps before a window in the same call.

    This holds for a model without :class:`Recur` layers that has ``takes_windows = True`` or cannot run on single
    steps: a causal convolution, attention over the window. Arguments and errors are those of :func:`takes_windows`.
    """
    return not recurrent_layers(model) and window_mode(model, xs) == "windows"


@contextmanager
def context_steps(model: nn.Module, steps: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, put these steps (k, B, F) before each window of a model; outputs are of the window alone."""
    k = steps[0].shape[0]

    def prepend(_: nn.Module, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.cat(both) for both in zip(steps, xs, strict=True))

    def cut(_: nn.Module, __: tuple[Tensor, ...], out: Any) -> Any:
        return out[k:] if isinstance(out, Tensor) else tuple(o[k:] for o in out)

    hooks = model.register_forward_pre_hook(prepend), model.register_forward_hook(cut)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def window_mode(model: nn.Module, xs: Sequence[Tensor]) -> str:
    """Return how to call a model: with ``"steps"``, with ``"windows"``, or with ``"either"`` for the same result.

    Arguments and errors are those of :func:`takes_windows`.
    """
    mode = cached_window_mode(model)
    if mode is None:
        mode = _modes[model] = _try_both(model, xs)
    return mode


def cached_window_mode(model: nn.Module) -> str | None:
    """Return the :func:`window_mode` of a model that declares it or was tried out; else None."""
    mode = _modes.get(model)  # first: to say that it lacks an attribute takes a module longer, at every step
    if mode is not None:
        return mode
    declared = getattr(model, "takes_windows", None)
    return ("windows" if declared else "steps") if isinstance(declared, bool) else None


def prediction_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that shares parameters and buffers, but starts with a separate zero state.

    Predictions with it do not change the model, even from several threads.
    """
    twin = shallow_copy(model, training=False)
    return replica(model).eval() if twin is None else _with_mode(twin, model)


def replica(model: nn.Module) -> nn.Module:
    """Return a copy that shares parameters and buffers, but starts with a separate zero state."""
    twin = shallow_copy(model)
    if twin is None:  # it has attributes that a forward pass might change, or that refer to modules
        twin = reset(deep_copy(model, [*model.parameters(), *model.buffers()]))
    return _with_mode(twin, model)


def _with_mode(twin: nn.Module, model: nn.Module) -> nn.Module:
    """Return the copy, with the remembered window mode of the model."""
    if model in _modes:
        _modes[twin] = _modes[model]
    return twin


def _try_both(model: nn.Module, xs: Sequence[Tensor]) -> str:
    devices = sorted({x.device.index or 0 for x in xs if x.is_cuda})
    # a generator of our own, and no wait for threads that have borrowed the global ones: they may wait for this one
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        trial = deep_copy(model).eval()
        for t in [*trial.parameters(), *trial.buffers()]:
            if t.is_floating_point():  # so that zero heads and fresh batch statistics hide no difference
                t.add_(0.1 * torch.rand(t.shape, generator=generator).to(t))
        sample = _sample_steps(xs, generator)
        whole, whole_error = _try_run(lambda: _check_outputs(reset(trial)(*sample)))
        steps, steps_error = _try_run(lambda: _run_stepwise(reset(trial), sample))
    if whole is None and steps is None:
        shapes = ", ".join(str(tuple(x.shape)) for x in xs)
        raise ShapeError(
            f"the model {type(model).__name__} runs neither on a window (S, B, F) = {shapes} "
            f"({whole_error}) nor on its steps (B, F) ({steps_error})"
        ) from steps_error
    if whole is None or steps is None:
        return "windows" if steps is None else "steps"
    if _equal_outputs(whole, steps):
        return "either"
    lost = unwrapped_recurrent(model)
    cause = (
        f"its recurrent layer {lost[0]!r} sits outside Recur, so its state is lost between calls: build it as "
        "Recur(...) and use its output alone (y = self.rnn(x)), or s"
        if lost
        else "s"
    )
    raise ShapeError(
        f"the model {type(model).__name__} gives other results for a window (S, B, F) than for its steps (B, F): "
        f"{cause}"
        "et the class attribute takes_windows = True (it is meant to see whole windows) or False (single steps)"
    )


def _sample_steps(xs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return three steps of a few series; the number of series differs from that of features, to tell axes apart."""
    n_series, n_features = min(xs[0].shape[1], 4), {x.shape[2] for x in xs}
    fitting = [n for n in range(n_series, 0, -1) if n not in n_features]
    # too few: repeat them, for each is disturbed in another way
    n_series = fitting[0] if fitting else next(n for n in itertools.count(2) if n not in n_features)
    sample = []
    for x in xs:
        x = x[[min(t, x.shape[0] - 1) for t in range(3)]][:, [n % x.shape[1] for n in range(n_series)]]
        if x.is_floating_point():
            x = torch.nan_to_num(x) + torch.randn(x.shape, generator=generator).to(x)
        sample.append(x)
    return sample


def _try_run(run: Callable[[], Outputs]) -> tuple[tuple[Tensor, ...] | None, Exception | None]:
    try:
        out = run()
    except Exception as error:  # whatever the user's model raises: the other way may work
        return None, error
    return ((out,) if isinstance(out, Tensor) else out), None


def _equal_outputs(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(u.shape == v.shape and _equal_values(u, v) for u, v in zip(a, b, strict=True))


def _equal_values(u: Tensor, v: Tensor) -> bool:
    """Whether values are equal to rounding, relative to their variation: with a large bias, all values look equal."""
    if not v.is_floating_point():
        return u.equal(v)
    rounding = 16 * torch.finfo(v.dtype).eps * float(v.abs().max())
    return torch.allclose(u, v, rtol=0, atol=1e-3 * float((v - v.mean(0)).abs().max()) + rounding)


def _run_stepwise(model: nn.Module, inputs: Sequence[Tensor]) -> Outputs:
    outs = [_check_outputs(model(*step)) for step in zip(*inputs, strict=True)]
    if isinstance(outs[0], Tensor):
        return torch.stack(outs)  # type: ignore[arg-type]  # all are tensors if the first is
    return tuple(torch.stack(parts) for parts in zip(*outs, strict=True))


def _check_outputs(out: object) -> Outputs:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, tuple | list) and out and all(isinstance(o, Tensor) for o in out):
        return tuple(out)
    raise TypeError(f"the model must return a tensor or a tuple of tensors, got {type(out).__name__}")
