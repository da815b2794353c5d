"""Losses over windows: any torch criterion as a loss, with weights and masks."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.nn.precision import as_float32

__all__ = ["seqloss"]

Loss = Callable[..., Tensor]

_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_SAME_SHAPE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.PoissonNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss),
)
_SAME_SHAPE_FUNCTIONS = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.kl_div, F.soft_margin_loss),
)


class SeqLoss:
    """A torch criterion as a loss over windows; made by :func:`seqloss`."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        self.criterion = criterion
        core = _innermost_function(criterion)
        self.classes = isinstance(core, _CLASS_LOSSES) or core in _CLASS_FUNCTIONS
        self._same_shape = needs_equal_shapes(criterion)
        self._reduction = _criterion_setting(criterion, "reduction", "mean")
        self.ignore_index: int = _criterion_setting(criterion, "ignore_index", -100)
        self._class_weights: Tensor | None = _criterion_setting(criterion, "weight", None)

    @property
    def is_mean(self) -> bool:
        """Whether the loss of a window is the mean over its steps, so that means over windows can
        be joined.
        """
        return self._reduction == "mean" and not self.classes

    def divisors(self, ys: Any, ws: Tensor | None = None) -> list[float] | None:
        """Return what the mean over a window divides by, for each output; None if the criterion
        sums over the series.

        To add up means over parts of the series, call the loss of each part with its own divisors
        over those of all parts as ``factors``. Sums just add up.
        """
        if self._reduction in ("sum", "batchmean"):
            return None
        targets = (ys,) if isinstance(ys, Tensor) else ys
        weights = _weight_columns(targets, ws)
        divisors = [self._divisor(y, w) for y, w in zip(targets, weights, strict=True)]
        if (
            divisors and weights[0] is not ws
        ):  # single outputs are missing: divide all by the same number
            divisors = [sum(divisors) / len(divisors)] * len(divisors)
        return divisors

    def _divisor(self, y: Tensor, ws: Tensor | None) -> float:
        if not self.classes:
            return live_steps(y, ws)
        labels = y.flatten(0, 1) if y.is_floating_point() else y.reshape(-1).long()
        return float(
            self._class_share(labels, None if ws is None else ws.reshape(-1)).sum(
                dtype=torch.float64
            )
        )

    @property
    def elementwise(self) -> bool:
        """Whether the criterion gives one value per output, so that single outputs of a step can be
        masked.
        """
        if self.classes or self._same_shape:
            return self._same_shape
        try:
            with torch.no_grad():
                return bool(
                    unreduced(self.criterion)(torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)).shape
                    == (2, 3, 2)
                )
        except Exception:  # the user's own criterion may want other shapes
            return False

    def __call__(
        self,
        model: nn.Module,
        xs: Any,
        ys: Any,
        ws: Tensor | None = None,
        *,
        factors: list[float] | None = None,
    ) -> Tensor:
        """Return the loss of ``model`` over one window as a scalar, and move the model's state on
        by the window.

        ``xs`` has shape ``(S, B, F)``, ``ys`` ``(S, B, G)``; several inputs or outputs are tuples.
        Weights ``ws`` have shape ``(S, B, 1)`` and are 0 for steps that do not count. Where single
        outputs do not count, they have shape ``(S, B, G)``, with the columns of all targets side by
        side. ``factors`` multiply the losses of the outputs.
        """
        outs = run_window(model, xs)
        outs = tuple(map(as_float32, (outs,) if isinstance(outs, Tensor) else outs))
        targets = (ys,) if isinstance(ys, Tensor) else tuple(ys)
        if len(outs) != len(targets):
            raise ShapeError(f"the model gives {len(outs)} outputs for {len(targets)} targets")
        weights = _weight_columns(targets, ws)
        losses = [
            self._output_loss(out, y, w) for out, y, w in zip(outs, targets, weights, strict=True)
        ]
        if len(losses) > 1 and weights[0] is not ws and (common := self.divisors(ys, ws)):
            own = [self._divisor(y, w) for y, w in zip(targets, weights, strict=True)]
            losses = [one * (n / (common[0] or 1.0)) for one, n in zip(losses, own, strict=True)]
        if factors is not None:
            losses = [one * factor for one, factor in zip(losses, factors, strict=True)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def __repr__(self) -> str:
        return f"seqloss({getattr(self.criterion, '__name__', None) or repr(self.criterion)})"

    # -- one output ----------------------------------------------------------------------------------

    def _output_loss(self, out: Tensor, y: Tensor, ws: Tensor | None) -> Tensor:
        n_steps = y.shape[0]
        if self.classes:
            out, y = self._class_scores(out, y)
            ws = None if ws is None else ws.reshape(-1)
        else:
            if self._same_shape and out.shape != y.shape:
                raise ShapeError(
                    f"the model gives {tuple(out.shape)} for targets of shape {tuple(y.shape)}: "
                    f"{self!r} needs equal shapes (S, B, G)"
                    + (
                        "; end the model with an output axis, as nn.Linear(..., 1) has"
                        if out.dim() < y.dim()
                        else ""
                    )
                )
            if self._same_shape and not y.is_floating_point():
                y = y.to(out.dtype)
        criterion = _match_output(self.criterion, out)
        if ws is None and not self.classes:
            loss = criterion(out, y)
            if self._reduction == "sum":
                return loss / n_steps
            return loss.mean() if loss.dim() else loss
        try:
            each = self._unreduced(criterion, out, y)
        except IndexError:  # torch's own message names a single label
            if not self.classes or y.is_floating_point():
                raise
            raise DataError(
                f"labels go from {int(y.min())} to {int(y.max())}, but the model gives "
                f"{out.shape[-1]} scores: labels must be 0 to {out.shape[-1] - 1}, or "
                f"{self.ignore_index} for steps that do not count"
            ) from None
        if self._reduction in ("sum", "batchmean"):
            return (each if ws is None else _expand_weights(each, ws) * each).sum() / n_steps
        if self.classes:
            return self._class_mean(each, y, ws)
        assert ws is not None
        if ws.shape[-1] > 1:  # (S, B, G): outputs are masked by themselves
            return (each * ws).sum() / (ws != 0).sum().clamp(min=1)
        each = (
            each.flatten(2).mean(-1, keepdim=True) if each.dim() > 2 else each.unsqueeze(-1)
        )  # (S, B, 1)
        return (each * ws).sum() / (ws != 0).sum().clamp(min=1)

    def _class_scores(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (S, B, V) and integer targets (S, B, 1), or probabilities (S, B, V), as rows."""
        fits = out.dim() == 3 and out.shape[:2] == y.shape[:2]
        fits &= y.shape == out.shape if y.is_floating_point() else y.shape[2:] in ((1,), ())
        if not fits:
            raise ShapeError(
                f"{self!r} takes scores (S, B, V) and integer targets (S, B, 1) or probabilities "
                f"(S, B, V); the model gives {tuple(out.shape)} for targets of shape "
                f"{tuple(y.shape)}, {y.dtype}"
            )
        return out.flatten(0, 1), y.flatten(0, 1) if y.is_floating_point() else y.reshape(-1).long()

    def _class_mean(self, each: Tensor, y: Tensor, ws: Tensor | None) -> Tensor:
        """Average as torch does: over the targets that count, by their class weights."""
        total = self._class_share(y, ws).to(each).sum()
        total = torch.where(
            total == 0, torch.ones_like(total), total
        )  # nothing live: the loss is 0, not NaN
        return (each if ws is None else each * ws).sum() / total

    def _class_share(self, y: Tensor, ws: Tensor | None) -> Tensor:
        """Return how much each target counts in a mean."""
        share = torch.ones(y.shape[0], device=y.device) if ws is None else (ws != 0).to(ws.dtype)
        if not y.is_floating_point():
            live = y != self.ignore_index
            share = share * live
            weight = self._class_weights
            if weight is not None:  # the clamp: the criterion itself reports labels out of range
                share = (
                    share * weight.to(y.device)[torch.where(live, y, 0).clamp(0, len(weight) - 1)]
                )
        return share

    def _unreduced(self, f: Callable[..., Tensor], out: Tensor, y: Tensor) -> Tensor:
        each = unreduced(f)(out, y)
        if each.shape[: 1 if self.classes else 2] != out.shape[: 1 if self.classes else 2]:
            raise ShapeError(
                f"{self!r} cannot be weighted or masked: its criterion returns {tuple(each.shape)} "
                f"for outputs of shape {tuple(out.shape)}; give it a reduction argument, have it "
                "return one value per step, or pass a loss(model, xs, ys, ws)"
            )
        return each


def needs_equal_shapes(f: Any) -> bool:
    """Whether a callable is a criterion of torch that compares outputs and targets one by one."""
    core = _innermost_function(f)
    return isinstance(core, _SAME_SHAPE) or core in _SAME_SHAPE_FUNCTIONS


def require_equal_shapes(f: Any, out: Any, y: Any) -> None:
    """Raise ShapeError if a criterion of torch were to broadcast outputs and targets, such as (B,
    1) and (B,).
    """
    if (
        isinstance(out, Tensor)
        and isinstance(y, Tensor)
        and out.shape != y.shape
        and needs_equal_shapes(f)
    ):
        name = getattr(f, "__name__", type(f).__name__)
        raise ShapeError(
            f"{name} is given predictions of shape {tuple(out.shape)} and labels of shape "
            f"{tuple(y.shape)}, which torch would broadcast: give both one shape, as "
            "labels.unsqueeze(-1) does"
        )


def seqloss(f: Callable[..., Tensor]) -> SeqLoss:
    """Make a loss over windows, ``loss(model, xs, ys[, ws])``, from any torch criterion.

    Parameters
    ----------
    f : callable
        A criterion ``f(yhat, y)``: a ``torch.nn`` loss module, a ``torch.nn.functional`` loss, or a
        function of your own. Cross-entropy and negative log-likelihood take scores ``(S, B, V)``
        and integer targets ``(S, B, 1)``; all others take ``(S, B, G)`` for both.

    Returns
    -------
    SeqLoss
        ``loss(model, xs, ys, ws=None)``. ``xs`` has shape ``(S, B, F)``; with a tuple of several
        inputs, it calls ``model(*xs)``. ``ys`` has shape ``(S, B, G)``; with a tuple of several
        outputs, it adds their losses. The whole window goes through the model in one call if the
        model can.

        The loss is the mean over the window. With weights ``ws`` of shape ``(S, B, 1)``, it is the
        sum of weight times loss over the steps whose weight is not 0, divided by their number.
        Where single outputs of a step are missing, ``ws`` has shape ``(S, B, G)`` (several targets
        side by side), and the mean is over the outputs whose weight is not 0; with several targets,
        each sum is divided by the mean number of their live steps. A criterion that sums is summed
        over the series and averaged over the steps, as in FluxUtils.jl.

    Raises
    ------
    TypeError
        If ``f`` is not callable.
    ShapeError
        When called, if outputs and targets differ in shape (torch would broadcast them), or if
        weights are given for a criterion that returns only a single number.

    Notes
    -----
    Source: ``seqloss`` of FluxUtils.jl. The result is picklable if ``f`` is.

    Examples
    --------
    >>> from fluxutils_py.nn import LSTM
    >>> model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 1))
    >>> loss = seqloss(F.mse_loss)
    >>> loss(model, torch.zeros(7, 4, 3), torch.zeros(7, 4, 1)).shape
    torch.Size([])
    """
    if isinstance(f, SeqLoss):
        return f
    if isinstance(f, type) or not callable(f):
        built = f"; build it first: {f.__name__}()" if isinstance(f, type) else ""
        raise TypeError(f"seqloss takes a criterion f(yhat, y), got {f!r}{built}")
    return SeqLoss(f)


def as_loss(loss: Any) -> Loss:
    """Turn a user's ``loss`` argument into a loss over windows.

    None becomes mean squared error. A criterion of two arguments goes through :func:`seqloss`. A
    function of three or four, ``(model, xs, ys[, ws])``, is returned unchanged.
    """
    if loss is None:
        return _mean_squared_error()
    if isinstance(loss, SeqLoss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        return seqloss(loss)  # raises
    required, _ = positional_arguments(loss)
    if (
        required > 2
        and isinstance(loss, nn.modules.loss._Loss)
        and hasattr(nn, type(loss).__name__)
    ):
        name = type(loss).__name__
        raise TypeError(
            f"{name} takes more than (yhat, y), so it cannot be a loss by itself: write a "
            "criterion around it, such as def criterion(yhat, y): return gaussian(yhat[..., :1], "
            "y, yhat[..., 1:].exp()), for a mean and a variance"
        )
    return seqloss(loss) if required <= 2 else loss


@functools.cache
def _mean_squared_error() -> SeqLoss:
    return seqloss(F.mse_loss)


def takes_weights(loss: Loss) -> bool:
    """Whether a loss over windows has a fourth argument, the weights."""
    return isinstance(loss, SeqLoss) or positional_arguments(loss)[1] >= 4


def needs_weights(loss: Loss) -> bool:
    """Whether a loss over windows requires weights, even where there are none."""
    return not isinstance(loss, SeqLoss) and positional_arguments(loss)[0] >= 4


def live_steps(ys: Any, ws: Tensor | None) -> float:
    """Count the live steps of a window; where some outputs are missing, a step counts by the
    fraction that is there.
    """
    targets = (ys,) if isinstance(ys, Tensor) else ys
    if ws is None:
        return float(targets[0].shape[0] * targets[0].shape[1])
    shares = [
        float(w.count_nonzero()) / w.shape[-1]
        for w in _weight_columns(targets, ws)
        if w is not None
    ]
    return sum(shares) / len(shares)


def _weight_columns(targets: Sequence[Tensor], ws: Tensor | None) -> Sequence[Tensor | None]:
    """Return the weights of each target: all of them, or its own columns where single outputs are
    missing.
    """
    if ws is None or ws.dim() < 3 or ws.shape[-1] == 1:
        return [ws] * len(targets)
    sizes = [y.shape[-1] for y in targets]
    if sum(sizes) != ws.shape[-1]:
        raise ShapeError(
            f"ws has {ws.shape[-1]} columns; it needs one, or one for each of the {sum(sizes)} "
            "outputs in ys"
        )
    return [ws] if len(sizes) == 1 else ws.split(sizes, -1)


def positional_arguments(f: Callable[..., Any]) -> tuple[int, float]:
    """Return how many positional arguments a callable needs, and how many it takes at most."""
    required, most = 0, 0.0
    for p in _signature_parameters(f.forward if isinstance(f, nn.Module) else f).values():
        if p.kind is p.VAR_POSITIONAL:
            most = float("inf")
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            most += 1
            required += p.default is p.empty
    return required, most


def _signature_parameters(f: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(f).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {}


def _innermost_function(f: Any) -> Any:
    while isinstance(f, functools.partial):
        f = f.func
    return f


def _criterion_setting(f: Any, name: str, default: Any) -> Any:
    """Return a setting of a criterion: a module's attribute, a partial's keyword, or a function's
    default.
    """
    if isinstance(f, functools.partial):
        return f.keywords.get(name, default)
    if isinstance(f, nn.Module):
        return getattr(f, name, default)
    parameter = _signature_parameters(f).get(name)
    return (
        default if parameter is None or parameter.default is parameter.empty else parameter.default
    )


def _match_output(f: Any, out: Tensor) -> Any:
    """Return the criterion with its tensors, such as class weights, in the dtype and on the device
    of the output.
    """
    is_partial = isinstance(f, functools.partial)
    tensors = (
        f.keywords if is_partial else dict(f.named_buffers()) if isinstance(f, nn.Module) else {}
    )
    moved = {
        k: v.to(out)
        for k, v in tensors.items()
        if isinstance(v, Tensor)
        and v.is_floating_point()
        and (v.dtype, v.device) != (out.dtype, out.device)
    }
    if not moved:
        return f
    if is_partial:
        return functools.partial(f, **moved)
    shared = {id(p): p for p in f.parameters()}
    return copy.deepcopy(f, shared | {id(f.get_buffer(k)): v for k, v in moved.items()})


def unreduced(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the criterion without its reduction, if it has one."""
    if isinstance(f, nn.Module) and hasattr(f, "reduction"):
        other: Any = copy.copy(f)
        other.reduction = "none"
        return other
    return functools.partial(f, reduction="none") if "reduction" in _signature_parameters(f) else f


def _expand_weights(each: Tensor, ws: Tensor) -> Tensor:
    return ws.reshape(ws.shape[: min(ws.dim(), each.dim())] + (1,) * (each.dim() - ws.dim()))
