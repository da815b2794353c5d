"""Run a model over windows of some series with a separate state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn.model_windows import (
    cached_window_mode,
    output_remedy,
    prediction_copy,
    run_window,
    window_mode,
)
from fluxutils_py.nn.precision import as_float32, autocast
from fluxutils_py.nn.states import (
    assign_state,
    batch_dims,
    match_states,
    read_states,
    recurrent_layers,
    reset,
    states,
)
from fluxutils_py.steps.native_step import NativeStep, OutputForm, Scaler
from fluxutils_py.tree import tree_map


class InferenceSession:
    """Run a model over one window after another, down to single steps, without changing the model.

    The session's state is the recurrent state of the model. A model without recurrent state that
    must see windows (see :func:`needs_context`) gets its last ``overlap`` inputs again with each
    window; these are then its state.

    Parameters
    ----------
    model : nn.Module
        Not changed: a copy in evaluation mode with the same parameters does the work.
    sample : callable
        Returns some of the inputs, a sequence of Tensor (S, B, F), to try out a model whose mode is
        not known.
    overlap : int
    precision : {"float32", "bfloat16"}
        What the model computes in; outputs and states are float32.

    Attributes
    ----------
    mode : "steps", "windows" or "either"
        See :func:`window_mode`.
    needs_context : bool
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Callable[[], Sequence[Tensor]],
        overlap: int = 0,
        precision: str = "float32",
    ) -> None:
        self.mode = cached_window_mode(model) or window_mode(model, sample())
        self.model = prediction_copy(model)
        self.overlap = overlap
        self._is_low = precision != "float32"
        self._autocast = autocast(precision, next(model.parameters(), torch.empty(0)).device)
        self._layers = recurrent_layers(self.model)
        self.needs_context = self.mode == "windows" and not self._layers
        if any(layer.form is None and layer.empty_state() is None for layer in self._layers):
            with torch.no_grad():  # only a run tells what the state of such a module looks like
                run_window(self.model, tuple(torch.nan_to_num(x[:1]) for x in sample()))
            reset(self.model)
        self._empty: tuple[Tensor, ...] = ()
        if self.needs_context:
            self._empty = tuple(x.new_empty(0, 0, x.shape[2]) for x in sample())
        self._context: tuple[Tensor, ...] = ()  # the last inputs, (k, B, F)
        self._ages: Tensor | None = None  # of each series, how many of them there are; None: all k

    def run(self, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outputs (S, B, G) for the next window (S, B, F), and move the state on."""
        if not self.needs_context:
            return self._outputs(xs)
        n_steps = xs[0].shape[0]
        if self._context:
            xs = tuple(torch.cat(both) for both in zip(self._context, xs, strict=True))
        self._context = tuple(x[max(0, x.shape[0] - self.overlap) :] for x in xs)
        if self._ages is None:
            return tuple(o[-n_steps:] for o in self._outputs(xs))
        return self._run_by_age(xs, self._ages, n_steps)

    def advance(self, xs: tuple[Tensor, ...]) -> None:
        """Move the state on by a window whose outputs nobody needs.

        A model with a method ``advance(x)`` does that without computing them.
        """
        if xs[0].shape[0] == 0:
            return
        advance = getattr(self.model, "advance", None)
        if advance is None or self.needs_context:
            self.run(xs)
        else:
            advance(*xs)

    def _run_by_age(self, xs: tuple[Tensor, ...], ages: Tensor, n_steps: int) -> tuple[Tensor, ...]:
        """Return the outputs of the last steps, of each series with the inputs that it has."""
        outs: list[Tensor] = []
        # series that have seen as many steps are computed together
        for age in ages.unique().tolist():
            series = (ages == age).nonzero()[:, 0]
            part = self._outputs(tuple(x[-age - n_steps :, series] for x in xs))
            outs = outs or [o.new_empty(n_steps, xs[0].shape[1], o.shape[2]) for o in part]
            for out, o in zip(outs, part, strict=True):
                out[:, series] = o[-n_steps:]
        kept = self._context[0].shape[0]
        ages = (ages + n_steps).clamp(max=kept)
        self._ages = None if int(ages.min()) == kept else ages
        return tuple(outs)

    def _outputs(self, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        try:
            if self._is_low:
                with self._autocast:
                    out = tree_map(as_float32, run_window(self.model, xs))
            else:
                out = run_window(self.model, xs)
        except IndexError as error:  # of a table of symbols, such as an nn.Embedding
            values = [int(f(x)) for x in xs for f in (Tensor.min, Tensor.max)]
            raise DataError(
                f"x has integers from {min(values)} to {max(values)}, of which the model knows not "
                f"all ({error}): fit it with all symbols, or make others one of these"
            ) from error
        outs = (out,) if isinstance(out, Tensor) else out
        for o in outs:
            if o.dim() != 3:
                raise ShapeError(
                    f"the model gives outputs of shape {tuple(o.shape)} for a window; expected (S, "
                    f"B, G): {output_remedy(o.shape, xs[0].shape)}"
                )
        return outs

    def native_step(
        self,
        shape: tuple[int, int],
        scalers: Sequence[Scaler] = (),
        output: OutputForm | None = None,
    ) -> NativeStep | None:
        """Return what runs single steps of shape (F, N) natively, on the state of this session;
        None if only :meth:`run` can.

        Both may be called in turn: what one does to the state, the other goes on from.
        """
        if self._is_low or self.needs_context:
            return None
        return NativeStep(self.model, self._layers, shape, scalers, output)

    # -- the state ---------------------------------------------------------------------------------

    @property
    def state(self) -> list[Tensor]:
        """Copy of the state behind the next outputs: :func:`states`, or the last inputs (k, B, F)
        of each input.

        Inputs that a series has not seen, where others have seen more, are NaN.
        """
        if not self.needs_context:
            return [as_float32(s) for s in states(self.model)]
        kept = [x.clone() for x in self._context or self._empty]
        if self._ages is not None:
            k = kept[0].shape[0]
            unseen = torch.arange(k, device=kept[0].device)[:, None] < k - self._ages  # (k, B)
            for x in kept:
                if not x.is_floating_point():
                    raise DataError(
                        "some series have seen fewer inputs than others, and integer inputs have "
                        "no NaN to say so in the state; go on until all have seen as many as "
                        "overlap"
                    )
                x[unseen] = torch.nan
        return kept

    @property
    def batch_dims(self) -> list[int]:
        """Return the axis of the series for each tensor of the state."""
        return [1] * len(self._empty) if self.needs_context else batch_dims(self.model)

    def load(self, state: Any, n_series: int, series: slice | None = None) -> None:
        """Continue from a state of ``n_series`` series, or of some of them; None is the zero state.

        Raises
        ------
        ShapeError, DataError
            If the state does not fit this model and number of series. Nothing is changed then.
        """
        if state is None:
            for layer in self._layers:
                layer.reset()
            self._forget_context()
            return
        if self.needs_context:
            tensors = self._check_context(state)
            self._load_context(_some_series(tensors, self.batch_dims, n_series, series))
            return
        matched = match_states(self._layers, state, self.model)
        dims = [layer.batch_dim for layer, part in matched for _ in part]
        tensors = [t for _, part in matched for t in part]
        some = iter(_some_series(tensors, dims, n_series, series))
        for layer, part in matched:
            assign_state(layer, [next(some) for _ in part])

    def _forget_context(self) -> None:
        self._context = ()
        self._ages = None

    def reset(self, series: Tensor) -> None:
        """Restart some series, given as indices (n,).

        Raises
        ------
        DataError
            If the user's own module does not define its zero state.
        """
        for r in self._layers:
            if r.state is not None and r.empty_state() is None:
                raise DataError(
                    f"the zero state of {type(r.module).__name__} is not known, so that single "
                    "series cannot be reset: give it a method empty_state() if its first state is "
                    "zeros, or reset() all"
                )
        for r in self._layers:
            if r.state is not None:
                r.reset_series(series)
        if self._context:
            kept, n_series = self._context[0].shape[:2]
            if self._ages is None:
                self._ages = series.new_full((n_series,), kept)
            self._ages = self._ages.index_fill(0, series, 0)

    def _check_context(self, state: Any) -> list[Tensor]:
        tensors = read_states(state)
        shapes = [(t.dim(), *t.shape[2:], t.is_floating_point()) for t in tensors]
        expected = [(3, *e.shape[2:], e.is_floating_point()) for e in self._empty]
        if shapes != expected or len({t.shape[:2] for t in tensors}) > 1:
            raise ShapeError(
                "the state of this model is the last inputs (k, N, F) of each input, for F of "
                f"{[e.shape[2] for e in self._empty]} and the types of the inputs; got "
                f"{[(*t.shape, t.dtype) for t in tensors]}"
            )
        return tensors

    def _load_context(self, tensors: list[Tensor]) -> None:
        self._forget_context()
        if self.overlap and tensors[0].shape[0] and tensors[0].shape[1]:
            pairs = zip(tensors, self._empty, strict=True)
            given = [t[-self.overlap :].to(e.device, e.dtype, copy=True) for t, e in pairs]
            unseen = torch.stack([t.isnan().any(-1) for t in given]).any(0)  # (k, B)
            self._context = tuple(torch.nan_to_num(t) for t in given)
            if unseen.any():
                self._ages = given[0].shape[0] - unseen.sum(0)


def _some_series(
    tensors: list[Tensor], dims: list[int], n_series: int, series: slice | None
) -> list[Tensor]:
    """Return the state of some series, as views."""
    for i, (t, d) in enumerate(zip(tensors, dims, strict=True)):
        if t.shape[d] not in (0, n_series):
            raise ShapeError(f"state[{i}] is of {t.shape[d]} series, the input has {n_series}")
    if series is None:
        return tensors
    return [t[(slice(None),) * d + (series,)] for t, d in zip(tensors, dims, strict=True)]
