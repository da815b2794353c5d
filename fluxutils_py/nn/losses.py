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
from torch.nn.modules.loss import _Loss

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn.kernels.modules import is_intercepted
from fluxutils_py.nn.model_windows import as_tuple, output_remedy, run_window
from fluxutils_py.nn.precision import as_float32

__all__ = ["seqloss"]

Loss = Callable[..., Tensor]
Tensors = Tensor | Sequence[Tensor]  # one input or output, or several

# criteria of torch, and their functions
Criteria = dict[type, object]
_CLASS_LOSSES: Criteria = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
_BINARY_LOSSES: Criteria = {
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}
# the outputs of these are values of the targets, in their unit
_VALUE_LOSSES: Criteria = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
}
# torch broadcasts the outputs and targets of these, which is never meant
_SAME_SHAPE: Criteria = (
    _VALUE_LOSSES
    | _BINARY_LOSSES
    | {
        nn.PoissonNLLLoss: F.poisson_nll_loss,
        nn.KLDivLoss: F.kl_div,
        nn.SoftMarginLoss: F.soft_margin_loss,
    }
)

SMALLEST = 1e-12  # weight of an output, above 0


class SeqLoss:
    """A torch criterion as a loss over windows; made by :func:`seqloss`."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        self.criterion = criterion
        core = _innermost_function(criterion)
        self.classes = _is_one_of(_CLASS_LOSSES, core)
        self.values = _is_one_of(_VALUE_LOSSES, core)
        # of torch's other losses, the outputs are scores or probabilities
        self.scores = _is_of_torch(core) and not self.values
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

    def divisors(self, ys: Tensors, ws: Tensor | None = None) -> list[float] | None:
        """Return what the mean over a window divides by, for each output; None if the criterion
        sums over the series.

        To add up means over parts of the series, call the loss of each part with its own divisors
        over those of all parts as ``factors``. Sums just add up.
        """
        if self._is_sum:
            return None
        targets = as_tuple(ys)
        weights = _weight_columns(targets, ws)
        divisors = self._own_divisors(targets, weights)
        # where single outputs are missing, divide all by the same number
        if divisors and weights[0] is not ws:
            divisors = [sum(divisors) / len(divisors)] * len(divisors)
        return divisors

    @property
    def _is_sum(self) -> bool:
        """Whether the criterion sums over the series."""
        return self._reduction in ("sum", "batchmean")

    def _own_divisors(
        self, targets: Sequence[Tensor], weights: Sequence[Tensor | None]
    ) -> list[float]:
        if not self.classes:
            return list(map(live_steps, targets, weights))
        shares = map(self._class_share, map(_as_rows, targets), map(_flat, weights))
        return [float(share.sum(dtype=torch.float64)) for share in shares]

    @property
    def is_mean_squared_error(self) -> bool:
        """Whether the loss is the mean of the squared errors of all outputs that count."""
        criterion = self.criterion
        if type(criterion) is nn.MSELoss:
            return criterion.reduction == "mean" and not is_intercepted(criterion)
        return criterion is F.mse_loss

    @property
    def elementwise(self) -> bool:
        """Whether the criterion gives one value per output, so that single outputs of a step can be
        masked.
        """
        if self.classes or self._same_shape:
            return self._same_shape
        zeros = torch.zeros(2, 3, 2)
        try:
            with torch.no_grad():
                each = unreduced(self.criterion)(zeros, zeros.clone())
                return bool(each.shape == zeros.shape)
        except Exception:  # a custom criterion may want other shapes
            return False

    def __call__(
        self,
        model: nn.Module,
        xs: Tensors,
        ys: Tensors,
        ws: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of ``model`` over one window as a scalar, and move the model's state on
        by the window.

        ``xs`` has shape ``(S, B, F)``, ``ys`` ``(S, B, G)``; several inputs or outputs are tuples.
        Weights ``ws`` have shape ``(S, B, 1)`` and are 0 for steps that do not count. Where single
        outputs do not count, they have shape ``(S, B, G)``, with the columns of all targets side by
        side.
        """
        members = getattr(model, "members", None)
        if members is not None and model.training:  # each learns by itself
            each = [self(member, xs, ys, ws) for member in members]
            return torch.stack(each).mean()
        # the loss is computed in float32, also of a model in low precision
        outs = tuple(map(as_float32, as_tuple(run_window(model, xs))))
        targets = as_tuple(ys)
        if len(outs) != len(targets):
            raise ShapeError(f"the model gives {len(outs)} outputs for {len(targets)} targets")
        weights = _weight_columns(targets, ws)
        output_loss = self._class_loss if self.classes else self._value_loss
        losses = list(map(output_loss, outs, targets, weights))
        if len(losses) == 1:
            return losses[0]
        # where single outputs are missing, means are over the same number
        if weights[0] is not ws and not self._is_sum:
            divisors = self._own_divisors(targets, weights)
            common = sum(divisors) / len(divisors) or 1.0  # 0 if nothing is live
            losses = [loss * (n / common) for loss, n in zip(losses, divisors, strict=True)]
        return torch.stack(losses).sum()

    def __repr__(self) -> str:
        return f"seqloss({getattr(self.criterion, '__name__', None) or repr(self.criterion)})"

    @property
    def knows_constants(self) -> bool:
        """Whether :meth:`loss_of_constant` has a formula for this loss."""
        if self.classes:
            smoothing = _criterion_setting(self.criterion, "label_smoothing", 0.0)
            return self._reduction == "mean" and not smoothing
        if not _is_one_of(_BINARY_LOSSES, _innermost_function(self.criterion)):
            return self.is_mean_squared_error
        names = ("weight", "pos_weight")
        weights = [_criterion_setting(self.criterion, name, None) for name in names]
        return self.is_mean and weights == [None, None]

    def target_sums(self, ys: Tensors, ws: Tensor | None) -> list[Tensor]:
        """Return sums over the targets of a window, one tensor of float64 for each output: weights,
        weighted targets and squares (3, G), or of labels the weight of each class up to the highest
        label (V,).
        """
        targets = as_tuple(ys)
        weights = _weight_columns(targets, ws)
        if self.classes:
            return list(map(self._label_sum, targets, weights))
        sums = []
        for y, w in zip(targets, weights, strict=True):
            values = y.double()
            each = torch.ones_like(values) if w is None else w.double().expand_as(values)
            weighted = each * values
            sums.append(torch.stack([each, weighted, weighted * values]).sum((1, 2)))
        return sums

    def _label_sum(self, y: Tensor, ws: Tensor | None) -> Tensor:
        rows = _as_rows(y)
        weights = _flat(ws)
        share = self._class_share(rows, weights).double()
        if weights is not None:
            share = share * weights
        if rows.is_floating_point():
            return share @ rows.double()
        return rows.clamp(min=0).bincount(share)  # what is ignored has no share

    def loss_of_constant(self, sums: Sequence[Tensor]) -> float:
        """Return the least loss that constant outputs have on targets with these sums: the variance
        of values, the entropy of labels.
        """
        if self.classes:
            return sum(float(torch.special.entr(n / n.sum()).sum()) for n in sums)
        losses = 0.0
        n_steps = 0.0
        for weight, total, squares in sums:
            mean = total / weight.clamp(min=SMALLEST)
            if self.is_mean_squared_error:
                each = squares - mean * total
            else:
                each = weight * (torch.special.entr(mean) + torch.special.entr(1 - mean))
            losses += float(each.mean())
            n_steps += float(weight.mean())
        return losses * len(sums) / n_steps

    # -- one output ------------------------------------------------------------------------------

    def _value_loss(self, out: Tensor, y: Tensor, ws: Tensor | None) -> Tensor:
        n_steps = y.shape[0]
        needed = "equal shapes (S, B, G)"
        fits = out.shape == y.shape
        # a function of one's own may compare (S, B, 9) with (S, B, 1), or scores with labels
        if not self._same_shape:
            needed = "outputs of the steps and series of the targets, (S, B, G)"
            fits = out.dim() >= y.dim() and out.shape[:2] == y.shape[:2]
        if not fits:
            raise ShapeError(
                f"the model gives {tuple(out.shape)} for targets of shape {tuple(y.shape)}: "
                f"{self!r} needs {needed}{_remedy_for_axes(out, y)}"
            )
        if self._same_shape and not y.is_floating_point():
            y = y.to(out.dtype)
        criterion = _match_output(self.criterion, out)
        if ws is None:  # the criterion's own reduction is faster
            loss = criterion(out, y)
            if self._reduction == "sum":
                return loss / n_steps
            return loss.mean() if loss.dim() else loss
        each = self._unreduced(criterion, out, y)
        if self._is_sum:
            return (_expand_weights(each, ws) * each).sum() / n_steps
        if ws.shape[-1] == 1:  # (S, B, 1): steps are masked as a whole
            each = each.flatten(2).mean(-1, keepdim=True) if each.dim() > 2 else each.unsqueeze(-1)
        return (each * ws).sum() / (ws != 0).sum().clamp(min=1)

    # -- one output of scores of classes ---------------------------------------------------------

    def _class_loss(self, out: Tensor, y: Tensor, ws: Tensor | None) -> Tensor:
        n_steps = y.shape[0]
        # scores (S, B, V) and integer targets (S, B, 1), or probabilities (S, B, V), as rows
        fits_labels = y.shape[2:] in ((1,), ())
        targets_fit = y.shape == out.shape if y.is_floating_point() else fits_labels
        if out.dim() != 3 or out.shape[:2] != y.shape[:2] or not targets_fit:
            raise ShapeError(
                f"{self!r} takes scores (S, B, V) and integer targets (S, B, 1) or probabilities "
                f"(S, B, V); the model gives {tuple(out.shape)} for targets of shape "
                f"{tuple(y.shape)}, {y.dtype}{_remedy_for_axes(out, y)}"
            )
        out = out.flatten(0, 1)
        y = _as_rows(y)
        criterion = _match_output(self.criterion, out)
        weights = _flat(ws)
        try:
            each = self._unreduced(criterion, out, y)
        except IndexError:  # torch's message names a single label
            if y.is_floating_point():
                raise
            labels = y[y != self.ignore_index]
            raise DataError(
                f"labels go from {int(labels.min())} to {int(labels.max())}, but the model gives "
                f"{out.shape[-1]} scores, for labels from 0; {self.ignore_index} marks steps that "
                "do not count"
            ) from None
        weighted = each if weights is None else _expand_weights(each, weights) * each
        if self._is_sum:
            return weighted.sum() / n_steps
        # as torch does: over the targets that count, by their class weights
        total = self._class_share(y, weights).to(each).sum()
        # where nothing is live, the loss is 0, not NaN
        return weighted.sum() / torch.where(total == 0, torch.ones_like(total), total)

    def _class_share(self, y: Tensor, ws: Tensor | None) -> Tensor:
        """Return how much each target counts in a mean."""
        if ws is None:
            share = torch.ones(y.shape[0], device=y.device)
        else:
            share = (ws != 0).to(ws.dtype)
        if y.is_floating_point():
            return share
        live = y != self.ignore_index
        share = share * live
        weight = self._class_weights
        if weight is not None:
            # clamped, because the criterion itself reports labels out of range
            labels = torch.where(live, y, 0).clamp(0, len(weight) - 1)
            share = share * weight.to(y.device)[labels]
        return share

    def _unreduced(self, f: Callable[..., Tensor], out: Tensor, y: Tensor) -> Tensor:
        each = unreduced(f)(out, y)
        n_axes = 1 if self.classes else 2  # of rows, or of steps and series
        if each.shape[:n_axes] != out.shape[:n_axes]:
            raise ShapeError(
                f"{self!r} cannot be weighted or masked: its criterion returns {tuple(each.shape)} "
                f"for outputs of shape {tuple(out.shape)}; give it a reduction argument, have it "
                "return one value per step, or pass a loss(model, xs, ys, ws)"
            )
        return each


def _remedy_for_axes(out: Tensor, y: Tensor) -> str:
    return f"; {output_remedy(out.shape, y.shape)}" if out.dim() < y.dim() else ""


def _flat(ws: Tensor | None) -> Tensor | None:
    return None if ws is None else ws.reshape(-1)


def _as_rows(y: Tensor) -> Tensor:
    """Return labels (S * B,), or probabilities (S * B, V)."""
    return y.flatten(0, 1) if y.is_floating_point() else y.reshape(-1).long()


def needs_equal_shapes(f: object) -> bool:
    """Whether a callable is a criterion of torch that compares outputs and targets one by one."""
    return _is_one_of(_SAME_SHAPE, _innermost_function(f))


def require_equal_shapes(f: object, out: object, y: object) -> None:
    """Raise ShapeError if a criterion of torch were to broadcast outputs and targets, such as (B,
    1) and (B,).
    """
    if not (isinstance(out, Tensor) and isinstance(y, Tensor)):
        return
    if out.shape != y.shape and needs_equal_shapes(f):
        name = getattr(f, "__name__", type(f).__name__)
        raise ShapeError(
            f"{name} is given predictions of shape {tuple(out.shape)} and labels of shape "
            f"{tuple(y.shape)}, which torch would broadcast: give both the same shape, as "
            "labels.unsqueeze(-1) does"
        )


def seqloss(f: Callable[..., Tensor]) -> SeqLoss:
    """Make a loss over windows, ``loss(model, xs, ys[, ws])``, from any torch criterion.

    Parameters
    ----------
    f : callable
        A criterion ``f(yhat, y)``: a ``torch.nn`` loss module, a ``torch.nn.functional`` loss, or a
        custom function. Cross-entropy and negative log-likelihood take scores ``(S, B, V)``
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
        When called, if outputs and targets differ in shape (torch would broadcast them); a custom
        function may compare any features, of the steps and series of the targets. If weights are
        given for a criterion that returns only a single number.

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
    # such as GaussianNLLLoss, whose third argument would get the targets
    is_of_torch = isinstance(loss, _Loss) and hasattr(nn, type(loss).__name__)
    if required > 2 and is_of_torch:
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


def live_steps(ys: Tensors, ws: Tensor | None) -> float:
    """Count the live steps of a window; where some outputs are missing, a step counts by the
    fraction that is there.
    """
    targets = as_tuple(ys)
    if ws is None:
        return float(targets[0].shape[0] * targets[0].shape[1])
    columns = [w for w in _weight_columns(targets, ws) if w is not None]
    return sum(float(w.count_nonzero()) / w.shape[-1] for w in columns) / len(columns)


def _weight_columns(targets: Sequence[Tensor], ws: Tensor | None) -> Sequence[Tensor | None]:
    """Return the weights of each target: all of them, or the columns of the target where single
    outputs are missing.
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
    required = 0
    most = 0.0
    function = f.forward if isinstance(f, nn.Module) else f
    for p in _signature_parameters(function).values():
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


def _innermost_function(f: object) -> object:
    while isinstance(f, functools.partial):
        f = f.func
    return f


def _is_one_of(losses: Criteria, core: object) -> bool:
    return isinstance(core, tuple(losses)) or core in losses.values()


def _is_of_torch(core: object) -> bool:
    return str(getattr(core, "__module__", "")).startswith("torch.nn.")


def _criterion_setting(f: Loss, name: str, default: object) -> Any:
    """Return a setting of a criterion: a module's attribute, a partial's keyword, or a function's
    default.
    """
    if isinstance(f, functools.partial):
        return f.keywords.get(name, default)
    if isinstance(f, nn.Module):
        return getattr(f, name, default)
    parameter = _signature_parameters(f).get(name)
    if parameter is None or parameter.default is parameter.empty:
        return default
    return parameter.default


def _match_output(f: Loss, out: Tensor) -> Loss:
    """Return the criterion with its buffers, such as class weights, in the dtype and on the device
    of the output.
    """
    if not isinstance(f, nn.Module):
        return f
    memo: dict[int, Any] = {}
    for b in f.buffers():
        if b.is_floating_point() and (b.dtype, b.device) != (out.dtype, out.device):
            memo[id(b)] = b.to(out)
    if not memo:
        return f
    # a copy, for a criterion may serve several models; it shares its parameters, which are trained
    memo.update((id(p), p) for p in f.parameters())
    return copy.deepcopy(f, memo)


def unreduced(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the criterion without its reduction, if it has one."""
    if isinstance(f, nn.Module) and hasattr(f, "reduction"):
        twin: Any = copy.copy(f)
        twin.reduction = "none"
        return twin
    if "reduction" in _signature_parameters(f):
        return functools.partial(f, reduction="none")
    return f


def _expand_weights(each: Tensor, ws: Tensor) -> Tensor:
    """Return the weights with as many axes as the losses."""
    more_axes = (1,) * (each.dim() - ws.dim())
    return ws.reshape(ws.shape[: each.dim()] + more_axes)
