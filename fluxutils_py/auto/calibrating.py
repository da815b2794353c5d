"""Find the errors of a model on data that are held out from its fit, for conformal prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import nn

from fluxutils_py.data import SequenceWindows
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import ShapeError, SpecError
from fluxutils_py.estimator.spec import Spec
from fluxutils_py.estimator.streams.conformal import Calibration
from fluxutils_py.inputs.target_codec import TargetCodec
from fluxutils_py.nn.model_windows import gap_value_of
from fluxutils_py.training.predictor import Predictor


@dataclass(frozen=True)
class HeldOut:
    """Data that a fit has not seen, with the steps before them, through which a state runs.

    Attributes
    ----------
    windows : SequenceWindows
        The held-out part, with encoded targets; one segment for each of its series.
    whole : Segments
        The segments to run through, from their start.
    codec : TargetCodec
    spec : Spec
    """

    windows: SequenceWindows
    whole: Segments
    codec: TargetCodec
    spec: Spec

    def calibration(self, model: nn.Module) -> Calibration:
        """Return the errors of a model; rows of the result are the held-out series, in order."""
        if len(self.windows.y) != 1:
            raise SpecError(f"level needs one array y; got {len(self.windows.y)} arrays")

        def errors_that_count(target: np.ndarray, out: np.ndarray, w: np.ndarray) -> np.ndarray:
            return np.where(w[:, :, None] > 0, self._errors(target, out), np.nan)

        errors = self.collect(model, errors_that_count)
        of_every_series = errors.shape[1] == self.windows.x[0].N and not self.codec.per_series
        if self.codec.per_series:
            errors = _last_known(errors)
        return Calibration.of(errors, of_every_series)

    def collect(self, model: nn.Module, values: Callable[..., np.ndarray]) -> np.ndarray:
        """Return an array (K, M, S) of the held-out steps of M series, NaN where a series has
        fewer: the last steps of all stand side by side.

        ``values(target, out, weight)`` makes (S, B, K) from encoded targets (S, B, G), outputs and
        weights (S, B) of a block.
        """
        held = self.windows.of_rank(self.windows.segments)
        n_series = self.windows.x[0].N
        first = np.full(n_series, np.iinfo(int).max)
        last = np.full(n_series, -1)
        np.minimum.at(first, held.series, held.start)
        np.maximum.at(last, held.series, held.start + held.length)
        chosen = np.flatnonzero(last >= 0)
        row_of = np.cumsum(last >= 0) - 1
        n_steps = int((last - first)[chosen].max())
        rows = self.windows.of_rank(self.whole)
        rows = rows[np.isin(rows.series, chosen)]
        collected: np.ndarray | None = None
        for found, series, steps in self._blocks(model, rows, values):
            if collected is None:
                collected = np.full((found.shape[2], len(chosen), n_steps), np.nan)
            is_held = (steps >= first[series]) & (steps < last[series])
            s, b = np.nonzero(is_held)
            n = series[b]
            # by the end: the last steps of all series stand side by side
            place = n_steps - (last[n] - steps[s, b])
            collected[:, row_of[n], place] = found[s, b].T
        assert collected is not None
        return collected

    def _blocks(
        self, model: nn.Module, segments: Segments, values: Callable[..., np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the values (S, B, K) of some rows, the series (B,) of the rows, and the steps
        (S, B) of the arrays.
        """
        (y,) = self.windows.y
        weight = self.windows.weight
        for out, rows, start in outputs_of(model, self.windows, segments, self.spec):
            stop = start + len(out)
            target = y.read(rows, start, stop)
            steps = np.arange(start, stop)[:, None]
            w = ((steps >= self.windows.burn_in) & (steps < rows.length)).astype(float)
            if weight is not None:
                w *= weight.read(rows, start, stop)
            yield values(target, out, w), rows.series, steps + rows.start

    def _errors(self, target: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Return the errors (S, B, G) of outputs in the units of the user, NaN without a target."""
        if self.codec.classes is not None:
            label = target[:, :, 0].astype(int)
            n_classes = len(self.codec.classes)
            known = (label >= 0) & (label < n_classes)
            probabilities = self.codec.decoders()["predict_proba"](out)
            at = np.where(known, label, 0)[:, :, None]
            error = 1 - np.take_along_axis(probabilities, at, axis=2)
            return np.where(known[:, :, None], error, np.nan)
        if target.shape[2] != out.shape[2]:
            raise ShapeError(
                f"level: the model gives {out.shape[2]} outputs, but y has {target.shape[2]}"
            )
        error = target.astype(np.float64) - out
        error[~np.isfinite(error)] = np.nan
        return error if self.codec.scale is None else error * self.codec.scale.scale


def outputs_of(
    model: nn.Module, windows: SequenceWindows, rows: Segments, spec: Spec
) -> Iterator[tuple[np.ndarray, Segments, int]]:
    """Run a model over rows of the inputs of windows, from the start of each; yield block by block
    its outputs (S, B, G), the rows (B), and the first step, which counts from the start of a row.
    """
    windows = SequenceWindows(
        windows.x,
        batchsize=spec.batchsize,
        seqsize=spec.seqsize or rows.max_length,
        overlap=spec.overlap,
        segments=rows,
    )
    windows.gap_value = gap_value_of(model)
    windows.check()
    part = slice(0, len(rows))
    predictor = Predictor(model, windows, part=part, precision=spec.precision)
    predictor.n_steps = rows.max_length  # not those of the whole series
    for p in predictor:
        (out,) = p.y
        yield out, rows[p.series], p.steps.start


def _last_known(errors: np.ndarray) -> np.ndarray:
    """Return the last error of each series (G, M, 1), where one step of each has a target."""
    is_known = ~np.isnan(errors).all(0)  # (M, S)
    n_steps = errors.shape[2]
    at = np.where(is_known.any(1), n_steps - 1 - is_known[:, ::-1].argmax(1), 0)
    return np.take_along_axis(errors, at[None, :, None], axis=2)
