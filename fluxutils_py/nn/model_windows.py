"""Run a model over a window: in one call if the model can, else step by step."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.copying import deep_copy, shallow_copy
from fluxutils_py.nn.recurrent import Recur, unwrapped_recurrent
from fluxutils_py.nn.states import recurrent_layers, reset

Outputs = Tensor | tuple[Tensor, ...]
Run = Callable[[nn.Module, Sequence[Tensor]], Outputs]

_modes: weakref.WeakKeyDictionary[nn.Module, str] = (
    weakref.WeakKeyDictionary()
)  # "steps", "windows" or "either"

_known_to_reset: weakref.WeakSet[nn.Module] = (
    weakref.WeakSet()
)  # models that declare a mode and were tried


def run_window(model: nn.Module, xs: Tensor | Sequence[Tensor]) -> Outputs:
    """Return the model's outputs for a window, and carry its state through.

    Parameters
    ----------
    model : nn.Module
        Called as ``model(x)``, or ``model(*xs)`` for several inputs, with whole windows ``(S, B,
        F)`` if
        :func:`takes_windows`, else with one step ``(B, F)`` after another.
    xs : Tensor of shape (S, B, F), or a tuple of such

    Returns
    -------
    Tensor of shape (S, B, G), or a tuple of such
    """
    inputs = (xs,) if isinstance(xs, Tensor) else tuple(xs)
    if takes_windows(model, inputs):
        return _run_whole(model, inputs)
    return _run_stepwise(model, inputs)


def takes_windows(model: nn.Module, xs: Sequence[Tensor]) -> bool:
    """Whether the model takes a whole window ``(S, B, F)`` instead of its steps ``(B, F)`` one by
    one.

    A whole window through a fused ``nn.LSTM`` is four to five times faster than its steps. An
    attribute ``takes_windows`` of the model decides. Without it, the model is tried out once, on a
    copy with disturbed parameters and three steps of disturbed data: if both ways give the same
    numbers, windows are safe. The answer is remembered as long as the model lives, even if it gets
    the attribute later. The trial, which also asks whether :func:`reset` knows all the state,
    changes neither the model nor its state nor the random generators.

    Raises
    ------
    ShapeError
        If the model runs neither way, or both ways with different results; then only its author
        knows which is right. If it keeps a state outside :class:`Recur` from one call to the next.
    """
    return window_mode(model, xs) != "steps"


def needs_context(model: nn.Module, xs: Sequence[Tensor]) -> bool:
    """Whether a model without recurrent state must see the steps before a window in the same call.

    This holds for a model without :class:`Recur` layers that has ``takes_windows = True`` or cannot
    run on single steps: a causal convolution, attention over the window. Arguments and errors are
    those of :func:`takes_windows`.
    """
    return not recurrent_layers(model) and window_mode(model, xs) == "windows"


@contextmanager
def context_steps(model: nn.Module, steps: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, put these steps (k, B, F) before each window of a model; outputs are of the
    window alone.
    """
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
    """Return how to call a model: with ``"steps"``, with ``"windows"``, or with ``"either"`` for
    the same result.

    Arguments and errors are those of :func:`takes_windows`.
    """
    mode = cached_window_mode(model)
    if mode is None:
        mode = _modes[model] = _try_both(model, xs)
    elif model not in _modes and model not in _known_to_reset:
        _require_reset_of_declared(model, xs, mode)
        _known_to_reset.add(model)
    return mode


def _require_reset_of_declared(model: nn.Module, xs: Sequence[Tensor], mode: str) -> None:
    """Raise if a model that declares its mode keeps a state that :func:`reset` does not know."""
    run = _run_whole if mode == "windows" else _run_stepwise
    with _trial(model, xs, 3) as (trial, sample):
        outputs, _ = _try_run(run, trial, sample)
        if outputs is not None:
            _require_reset(model, xs, trial, sample, run, outputs)


def cached_window_mode(model: nn.Module) -> str | None:
    """Return the :func:`window_mode` of a model that declares it or was tried out; else None."""
    mode = _modes.get(
        model
    )  # first: to say that it lacks an attribute takes a module longer, at every step
    if mode is not None:
        return mode
    declared = getattr(model, "takes_windows", None)
    return ("windows" if declared else "steps") if isinstance(declared, bool) else None


def prediction_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that shares parameters and buffers, but starts with a
    separate zero state.

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
    with _trial(model, xs, 3) as (trial, sample):
        whole, whole_error = _try_run(_run_whole, trial, sample)
        steps, steps_error = _try_run(_run_stepwise, trial, sample)
        run, outputs = (_run_stepwise, steps) if whole is None else (_run_whole, whole)
        if outputs is not None:
            _require_reset(model, xs, trial, sample, run, outputs)
        mode = None
        if whole is not None and (steps is None or _equal_outputs(whole, steps)):
            mode = "windows" if steps is None else "either"
            _require_series_apart(model, trial, sample, _run_whole, whole)
        elif whole is None and steps is not None:
            mode = "steps"
            _require_series_apart(model, trial, sample, _run_stepwise, steps)
    if mode is not None:
        return mode
    if whole is None and steps is None:
        shapes = ", ".join(str(tuple(x.shape)) for x in xs)
        raise ShapeError(
            f"the model {type(model).__name__} runs neither on a window (S, B, F) = {shapes} "
            f"({whole_error}) nor on its steps (B, F) ({steps_error}). Windows have time first and "
            "features last; a layer with others, as nn.Conv1d, needs x.permute(1, 2, 0); or take "
            "fluxutils_py.nn.CausalConv1d"
        ) from steps_error
    remedy = "set the class attribute takes_windows = True (it is meant to see whole windows) or False (single steps)"
    lost = unwrapped_recurrent(model)
    if lost:
        remedy = (
            f"its recurrent layer {lost[0]!r} sits outside Recur, so its state is lost between "
            f"calls: build it as Recur(...) and use its output alone (y = self.rnn(x)), or {remedy}"
        )
    raise ShapeError(
        f"the model {type(model).__name__} gives other results for a window (S, B, F) than for its "
        f"steps (B, F): {remedy}"
    )


def _require_reset(
    model: nn.Module,
    xs: Sequence[Tensor],
    trial: nn.Module,
    sample: Sequence[Tensor],
    run: Run,
    outputs: tuple[Tensor, ...],
) -> None:
    """Raise if the model keeps a state that :func:`reset` does not know, and the next series would
    start from.

    ``outputs`` are those of an earlier run of the trial on the sample.
    """
    again, _ = _try_run(run, trial, sample)
    if again is not None and _equal_outputs(again, outputs):
        return
    with _trial(model, xs, len(sample[0])) as (fresh, _):
        kept = _kept_tensors(fresh)
        first, _ = _try_run(run, fresh, sample)
        keeps_tensors = _kept_tensors(fresh) != kept
        second, _ = _try_run(run, fresh, sample)
    with _trial(model, xs, len(sample[0])) as (fresh, _):
        torch.rand(())  # outputs that are drawn are drawn anew
        repeated, _ = _try_run(run, fresh, sample)
    if first is None or repeated is None or not _equal_outputs(first, repeated):
        return  # random outputs
    if second is not None and _equal_outputs(first, second):
        return
    if not keeps_tensors:
        return  # it goes by a number, such as a count of its calls, which belongs to no series
    names = unwrapped_recurrent(model)
    layer = f"its recurrent layer {names[0]!r}" if names else "the layer whose state it keeps"
    raise ShapeError(
        f"the model {type(model).__name__} gives other outputs when it is called a second time "
        "with the same inputs, although reset(model) lies between the calls: it keeps a state in "
        f"an attribute, which nothing resets between series, saves or shards. Build {layer} as "
        "Recur(...), and use its output alone (y = self.rnn(x)): Recur keeps the state"
    )


def _kept_tensors(model: nn.Module) -> list[tuple[int, int]]:
    """Return identities and versions of the tensors that modules keep beside parameters and the
    state of Recur.
    """
    kept: list[Any] = list(model.buffers())
    for m in model.modules():
        if isinstance(m, Recur):
            continue
        for value in vars(m).values():
            kept += value if isinstance(value, list | tuple) else [value]
    return [(id(t), t._version) for t in kept if isinstance(t, Tensor)]


def _require_series_apart(
    model: nn.Module,
    trial: nn.Module,
    sample: Sequence[Tensor],
    run: Run,
    together: tuple[Tensor, ...],
) -> None:
    """Warn if the last series has other outputs alone than among others, or raise if a layer takes
    them for steps.
    """
    alone, _ = _try_run(run, trial, [x[:, -1:] for x in sample])
    if alone is None or any(y.dim() < 3 for y in together):
        return
    if _equal_outputs(alone, tuple(y[:, -1:] for y in together)):
        return
    again, _ = _try_run(run, trial, sample)
    if again is None or not _equal_outputs(
        again, together
    ):  # it goes by something else than its inputs
        return
    mixes = f"the model {type(model).__name__} gives a series other outputs alone than together with others"
    for name, m in model.named_modules():
        if getattr(m, "batch_first", False) is True:
            raise ShapeError(
                f"{mixes}: {name or 'it'!r} ({type(m).__name__}) has batch_first=True and takes "
                "series for steps, because windows come as (S, B, F), time first. Build it with "
                "batch_first=False"
            )
    warnings.warn(
        f"{mixes}: what it predicts depends on which series are in a minibatch. Windows come as "
        "(S, B, F), time first; compute each series of axis 1 by itself, unless you mean to mix "
        "them",
        stacklevel=5,
    )


def cut_dependence(model: nn.Module, xs: Sequence[Tensor], overlap: int) -> str | None:
    """How the outputs of a model over windows depend on where series are cut, if it sees
    ``overlap`` steps before each.

    The model is tried out like in :func:`takes_windows`.

    Returns
    -------
    "later", "earlier" or None
        Whether outputs change with later steps, or with steps more than ``overlap`` before them.
    """
    n_steps = 2 * overlap + 8
    with _trial(model, xs, n_steps) as (trial, sample):
        parts = sample, [x[:-4] for x in sample], [x[-overlap - 4 :] for x in sample]
        whole, start, end = (_try_run(_run_whole, trial, part)[0] for part in parts)
        if whole is not None:
            _require_series_apart(model, trial, sample, _run_whole, whole)
    if whole is None or any(y.dim() < 1 or len(y) != n_steps for y in whole):
        return None
    if start is not None and not _equal_outputs(start, tuple(y[:-4] for y in whole)):
        return "later"
    if end is not None and not _equal_outputs(
        tuple(y[-4:] for y in end), tuple(y[-4:] for y in whole)
    ):
        return "earlier"
    return None


@contextmanager
def _trial(
    model: nn.Module, xs: Sequence[Tensor], n_steps: int
) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """A copy of the model with disturbed parameters, and steps of a few series with disturbed
    values.
    """
    devices = sorted({x.device.index or 0 for x in xs if x.is_cuda})
    # a generator of our own, and no wait for threads that have borrowed the global ones: they may
    # wait for this one
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        trial = deep_copy(model).eval()
        for t in [*trial.parameters(), *trial.buffers()]:
            if (
                t.is_floating_point()
            ):  # so that zero heads and fresh batch statistics hide no difference
                t.add_(0.1 * torch.rand(t.shape, generator=generator).to(t))
        # the number of series differs from that of features, to tell axes apart
        n_series = next(n for n in itertools.count(4) if n not in {x.shape[2] for x in xs})
        sample = []
        for (
            x
        ) in xs:  # where there are fewer, they are repeated, for each is disturbed in another way
            x = x[[min(t, x.shape[0] - 1) for t in range(n_steps)]][
                :, [n % x.shape[1] for n in range(n_series)]
            ]
            if x.is_floating_point():
                x = torch.nan_to_num(x) + torch.randn(x.shape, generator=generator).to(x)
            sample.append(x)
        yield trial, sample


def _try_run(
    run: Run, trial: nn.Module, sample: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...] | None, Exception | None]:
    try:
        out = run(reset(trial), [x.clone() for x in sample])  # which a model may change
    except Exception as error:  # whatever the user's model raises: the other way may work
        return None, error
    return ((out,) if isinstance(out, Tensor) else out), None


def _equal_outputs(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(
        u.shape == v.shape and _equal_values(u, v) for u, v in zip(a, b, strict=True)
    )


def _equal_values(u: Tensor, v: Tensor) -> bool:
    """Whether values are equal to rounding, relative to their variation: with a large bias, all
    values look equal.
    """
    if not v.is_floating_point():
        return u.equal(v)
    finite = u.isfinite() & v.isfinite()
    if not finite.all():  # a model that has diverged gives no numbers in any way
        u = u.where(finite, 0)
        v = v.where(finite, 0)
    rounding = 16 * torch.finfo(v.dtype).eps * float(v.abs().max())
    spread = float((v - v.mean(0)).abs().max())
    if not math.isfinite(spread):  # the differences overflow
        spread = float(v.abs().max())
    return torch.allclose(u, v, rtol=0, atol=1e-3 * spread + rounding)


def _run_whole(model: nn.Module, inputs: Sequence[Tensor]) -> Outputs:
    return _check_outputs(model(*inputs))


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
    raise TypeError(
        f"the model must return a tensor or a tuple of tensors, got {type(out).__name__}"
    )
