"""Run a model over a window: in one call if the model can, else step by step."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.copying import deep_copy, shallow_copy
from fluxutils_py.nn.recurrent import (
    GRU,
    LSTM,
    RNN,
    TORCH_LAYERS,
    Recur,
    unwrapped_recurrent,
)
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.torch_private import version_of

Outputs = Tensor | tuple[Tensor, ...]
Tensors = Sequence[Tensor]
Run = Callable[[nn.Module, Tensors], Outputs]
Attempt = tuple[Tensor, ...] | Exception  # the outputs of a trial, or the error that it raised

OUTPUT_ALONE = (
    "recurrent layers of fluxutils_py.nn return their output alone, not a tuple with a state: "
    "y = self.gru(x), where torch has y = self.gru(x)[0] or y, h = self.gru(x)"
)

TRIAL_STEPS = 3  # a first one, one that follows it, and one after that

# a chain of these gives the same for a window as for its steps, and reset() knows its state
STEPWISE = frozenset(
    {
        nn.Sequential,
        nn.Linear,
        nn.Identity,
        nn.Dropout,
        nn.Tanh,
        nn.Sigmoid,
        nn.ReLU,
        nn.LeakyReLU,
        nn.ELU,
        nn.GELU,
        nn.SiLU,
        nn.Softplus,
        LSTM,
        GRU,
        RNN,
    }
)

# "steps", "windows" or "either" of the models that were tried out
_modes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def run_window(model: nn.Module, xs: Tensor | Tensors) -> Outputs:
    """Return the model's outputs for a window, and carry its state through.

    Parameters
    ----------
    model : nn.Module
        Called as ``model(x)``, or ``model(*xs)`` for several inputs, with whole windows ``(S, B,
        F)`` if :func:`takes_windows`, else with one step ``(B, F)`` after another.
    xs : Tensor of shape (S, B, F), or a tuple of such

    Returns
    -------
    Tensor of shape (S, B, G), or a tuple of such
    """
    inputs = as_tuple(xs)
    run = _run_whole if takes_windows(model, inputs) else _run_stepwise
    return run(model, inputs)


def takes_windows(model: nn.Module, xs: Tensors) -> bool:
    """Return whether the model takes a whole window ``(S, B, F)`` instead of its steps ``(B, F)``
    one by one.

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


def needs_context(model: nn.Module, xs: Tensors) -> bool:
    """Return whether a model without recurrent state must see the steps before a window in the same
    call.

    This holds for a model without :class:`Recur` layers that has ``takes_windows = True`` or cannot
    run on single steps: a causal convolution, attention over the window. Arguments and errors are
    those of :func:`takes_windows`.
    """
    return not recurrent_layers(model) and window_mode(model, xs) == "windows"


@contextmanager
def context_steps(model: nn.Module, steps: Tensors) -> Iterator[None]:
    """Put these steps (k, B, F) before each window of a model inside the block; outputs are those
    of the window alone.
    """
    k = steps[0].shape[0]

    def prepend(_: nn.Module, xs: Tensors) -> Tensors:
        return tuple(map(torch.cat, zip(steps, xs, strict=True)))

    def cut(_: nn.Module, __: Tensors, out: Outputs) -> Outputs:
        return out[k:] if isinstance(out, Tensor) else tuple(o[k:] for o in out)

    hooks = [model.register_forward_pre_hook(prepend), model.register_forward_hook(cut)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def window_mode(model: nn.Module, xs: Tensors) -> str:
    """Return how to call a model: with ``"steps"``, with ``"windows"``, or with ``"either"`` for
    the same result.

    Arguments and errors are those of :func:`takes_windows`.
    """
    mode = cached_window_mode(model)
    if mode is None:
        twin = outputs = None
        # the layer inside an LSTM is its own affair
        layers = [m for m in model.modules() if not isinstance(m, TORCH_LAYERS)]
        if all(type(m) in STEPWISE for m in layers):
            twin = shallow_copy(model, training=False)
        if twin is not None:
            with torch.no_grad():
                outputs = _attempt(_run_whole, twin, [x[:TRIAL_STEPS] for x in xs])
        # what does not run on a window is tried out, which tells why
        runs = isinstance(outputs, tuple) and all(y.dim() == 3 for y in outputs)
        mode = _modes[model] = "either" if runs else _try_both(model, xs)
    return mode


def takes_gaps(model: nn.Module) -> bool:
    """Return whether steps without input are to reach a model as NaN, for which it has values."""
    return any(getattr(module, "takes_gaps", False) for module in model.modules())


def gap_value_of(model: nn.Module) -> float | None:
    """Return what a model gets for a step without input: zeros, or NaN if it takes them; None if it
    takes NaN in single features, too.
    """
    if any(getattr(module, "fills_gaps", False) for module in model.modules()):
        return None
    return math.nan if takes_gaps(model) else 0.0


def cached_window_mode(model: nn.Module) -> str | None:
    """Return the :func:`window_mode` of a model that declares it or was tried out; else None."""
    # first, because a module takes longer to say that it lacks an attribute, at every step
    mode = _modes.get(model)
    if mode is not None:
        return mode
    declared = getattr(model, "takes_windows", None)
    if not isinstance(declared, bool):
        return None
    return "windows" if declared else "steps"


def prediction_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that shares parameters and buffers, but starts with a
    separate zero state.

    Predictions with it do not change the model, even from several threads.
    """
    twin = shallow_copy(model, training=False)
    if twin is None:  # it has attributes that a forward pass might change, or that refer to modules
        shared = [*model.parameters(), *model.buffers()]
        twin = reset(deep_copy(model, shared)).eval()
    if model in _modes:
        _modes[twin] = _modes[model]
    return twin


def _try_both(model: nn.Module, xs: Tensors) -> str:
    """Return the :func:`window_mode` of a model by running it both ways."""
    with _trial(model, xs) as (twin, sample):
        whole = _attempt(_run_whole, twin, sample)
        steps = _attempt(_run_stepwise, twin, sample)
        run = _run_whole
        outputs = whole
        if isinstance(whole, Exception):
            if isinstance(steps, Exception):
                raise _neither_way(model, xs, whole, steps) from steps
            run = _run_stepwise
            outputs = steps
        before = _kept_tensors(twin)
        again = _attempt(run, twin, sample)
        # first, since a state that reset() does not know may be why the two ways differ; a model
        # that depends on random numbers, or on a count of its calls, keeps no state of a series
        if not _equal_outputs(again, outputs) and _kept_tensors(twin) != before:
            bare_layers = unwrapped_recurrent(model)
            layer = "the layer whose state it keeps"
            if bare_layers:
                layer = f"its recurrent layer {bare_layers[0]!r}"
            raise ShapeError(
                f"the model {type(model).__name__} gives other outputs when it is called a second "
                "time with the same inputs, although reset(model) comes between the calls: it "
                "keeps a state in an attribute, which nothing resets between series, saves or "
                f"shards. Build {layer} as Recur(...), and use its output alone "
                "(y = self.rnn(x)): Recur keeps the state"
            )
        if isinstance(whole, Exception):
            mode = "steps"
        elif isinstance(steps, Exception):
            mode = "windows"
        elif _equal_outputs(whole, steps):
            mode = "either"
        else:
            raise _different_ways(model, sample[0].shape, whole)
        suspect = _batch_first_layer(model)
        if suspect and _equal_outputs(again, outputs):  # else it depends on more than its inputs
            alone = _attempt(run, twin, [x[:, -1:] for x in sample])
            _require_series_apart(model, suspect, outputs, alone)
    return mode


def _neither_way(
    model: nn.Module,
    xs: Tensors,
    whole_error: Exception,
    steps_error: Exception,
) -> ShapeError:
    shapes = ", ".join(str(tuple(x.shape)) for x in xs)
    remedy = (
        "Windows have time first and features last; a layer with others, such as nn.Conv1d, needs "
        "x.permute(1, 2, 0); or use fluxutils_py.nn.CausalConv1d"
    )
    if recurrent_layers(model) and "values to unpack" in str(whole_error):
        remedy = f"The {OUTPUT_ALONE}"
    return ShapeError(
        f"the model {type(model).__name__} runs neither on a window (S, B, F) = {shapes} "
        f"({whole_error}) nor on its steps (B, F) ({steps_error}). {remedy}"
    )


def _different_ways(model: nn.Module, window: torch.Size, whole: Attempt) -> ShapeError:
    remedy = (
        "set the class attribute takes_windows = True (it is meant to see whole windows) or "
        "False (single steps)"
    )
    bare_layers = unwrapped_recurrent(model)
    flat = None
    if not isinstance(whole, Exception):
        flat = next((out.shape for out in whole if out.dim() < 3), None)
    if bare_layers:
        remedy = (
            f"its recurrent layer {bare_layers[0]!r} sits outside Recur, so its state is lost "
            "between calls: build it as Recur(...) and use its output alone (y = self.rnn(x)), or "
            f"{remedy}"
        )
    elif flat is not None:
        remedy = (
            f"it gives outputs of shape {tuple(flat)} for a window of {tuple(window)}; "
            f"expected (S, B, G): {output_remedy(flat, window)}"
        )
    return ShapeError(
        f"the model {type(model).__name__} gives other results for a window (S, B, F) than for its "
        f"steps (B, F): {remedy}"
    )


def output_remedy(shape: torch.Size, window: torch.Size) -> str:
    """Return how to change a model whose outputs for a window (S, B, ...) have less than three
    axes.
    """
    if shape == window[:2]:
        return "end the model with an output axis, as nn.Linear(..., 1) has"
    return (
        "return the outputs of all steps, not h[:, -1] alone, and build recurrent layers with "
        "batch_first=False: windows have time first, then series. Or, if a layer's result is taken "
        f"apart: {OUTPUT_ALONE}"
    )


def _kept_tensors(model: nn.Module) -> list[tuple[int, int]]:
    """Return identities and versions of the tensors that modules keep, other than parameters and
    the state of Recur.
    """
    kept: list[object] = list(model.buffers())
    for m in model.modules():
        if isinstance(m, Recur):
            continue
        for value in vars(m).values():
            kept += value if isinstance(value, list | tuple) else [value]
    # the version: writing into a tensor leaves its identity as it is
    return [(id(t), version_of(t)) for t in kept if isinstance(t, Tensor)]


def _batch_first_layer(model: nn.Module) -> str:
    """Return the name and the class of a layer that may take series for steps; "" if none may."""
    for name, m in model.named_modules():
        if getattr(m, "batch_first", False) is True:
            return f"{name or 'it'!r} ({type(m).__name__})"
    return ""


def _require_series_apart(
    model: nn.Module, suspect: str, together: Attempt, alone: Attempt
) -> None:
    """Raise if the last series has other outputs alone than among others: a layer takes series for
    steps.
    """
    if isinstance(together, Exception) or isinstance(alone, Exception):
        return
    if any(y.dim() < 3 for y in together):
        return
    if not _equal_outputs(alone, tuple(y[:, -1:] for y in together)):
        raise ShapeError(
            f"the model {type(model).__name__} gives a series other outputs alone than together "
            f"with others: {suspect} has batch_first=True and takes series for steps, because "
            "windows come as (S, B, F), time first. Build it with batch_first=False"
        )


@contextmanager
def _trial(model: nn.Module, xs: Tensors) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield a disturbed copy of a model, and disturbed steps of a few series to run it on; inside
    the block, torch's generators are forked and there are no gradients.
    """
    devices = sorted({x.device.index or 0 for x in xs if x.is_cuda})
    # a separate generator, and no wait for threads that have borrowed the global ones: they may
    # wait for this one
    generator = torch.Generator().manual_seed(0)
    # in inference mode tensors would have no versions, which tell whether a model keeps a state
    rng = torch.random.fork_rng(devices=devices)
    with rng, torch.inference_mode(False), torch.no_grad():
        twin = deep_copy(model).eval()
        # so that zero heads and fresh batch statistics hide no difference
        for t in [*twin.parameters(), *twin.buffers()]:
            if t.is_floating_point():
                t.add_(0.1 * torch.rand(t.shape, generator=generator).to(t))
        # the number of series differs from that of features, to tell axes apart
        n_features = {x.shape[2] for x in xs}
        n_series = next(n for n in itertools.count(4) if n not in n_features)
        yield twin, [_disturbed_steps(x, n_series, generator) for x in xs]


def _attempt(run: Run, twin: nn.Module, sample: Tensors) -> Attempt:
    """Run a copy of a model from its initial state."""
    try:
        # copies, because a model may change its inputs
        return as_tuple(run(reset(twin), [x.clone() for x in sample]))
    except Exception as error:  # whatever the user's model raises: the other way may work
        return error


def _disturbed_steps(x: Tensor, n_series: int, generator: torch.Generator) -> Tensor:
    """Return a few steps, and as many series, of ``x`` with disturbed values."""
    # where there are fewer, they are repeated: each is disturbed in another way
    steps = [min(t, x.shape[0] - 1) for t in range(TRIAL_STEPS)]
    series = [n % x.shape[1] for n in range(n_series)]
    x = x[steps][:, series]
    if not x.is_floating_point():  # indices of classes may not change
        return x
    noise = torch.randn(x.shape, generator=generator)
    return torch.nan_to_num(x) + noise.to(x)


def as_tuple(outputs: Tensor | Tensors) -> tuple[Tensor, ...]:
    """Return the inputs or outputs of a model as a tuple, also if it has only one."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _equal_outputs(a: Attempt, b: Attempt) -> bool:
    """Return whether both ran, with equal outputs."""
    if isinstance(a, Exception) or isinstance(b, Exception):
        return False
    return len(a) == len(b) and all(
        u.shape == v.shape and _equal_values(u, v) for u, v in zip(a, b, strict=True)
    )


def _equal_values(u: Tensor, v: Tensor) -> bool:
    """Return whether values are equal to rounding, relative to their variation: with a large bias,
    all values look equal.
    """
    if not v.is_floating_point():
        return u.equal(v)
    finite = u.isfinite() & v.isfinite()
    if not finite.all():  # a model that has diverged gives no numbers in any way
        u = u.where(finite, 0)
        v = v.where(finite, 0)
    largest = float(v.abs().max())
    rounding = 16 * torch.finfo(v.dtype).eps * largest
    spread = float((v - v.mean(0)).abs().max())
    if not math.isfinite(spread):  # the differences overflow
        spread = largest
    return torch.allclose(u, v, rtol=0, atol=1e-3 * spread + rounding)


def _run_whole(model: nn.Module, inputs: Tensors) -> Outputs:
    """Return the outputs of one call for the whole window."""
    return _check_outputs(model(*inputs))


def _run_stepwise(model: nn.Module, inputs: Tensors) -> Outputs:
    """Return the outputs of one call per step, stacked."""
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
