"""Predictions for inputs of any form, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.lazy import select
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.views import Stretch
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.collectives import gather_rows, require_same_inputs
from fluxutils_py.estimator.inputs import Inputs, read_inputs
from fluxutils_py.estimator.output import PredictionWriter
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.estimator.target_codec import Transform
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.predictor import Prediction, Predictor
from fluxutils_py.training.tensor_batches import rank_slice


def run_predict(
    est: Any,
    x: Any,
    out: Any,
    method: str,
    *,
    state: Any = None,
    lengths: Any = None,
    starts: Any = None,
    return_state: bool = False,
) -> Any:
    """Predictions in the form of the inputs, of all ranks; with ``return_state``, a pair of these and the state.

    ``method`` is "predict", or of classifiers "predict_proba", ...; other arguments as of ``Estimator.predict``.
    """
    settings = est._resolved_params()
    with RankGroup.from_comm(settings.comm, "predict") as ranks:
        check_is_fitted(est, "model_")
        inputs, codec = read_inputs(x, est._input_schema(), starts=starts, lengths=lengths), est._codec
        spec, decode = read_spec(settings.spec), codec.decoders()[method]
        predictor = BlockPredictor(est.model_, inputs, spec, state, decode, ranks, return_state)
        if codec.per_series and inputs.form != "timesteps":
            if out is not None:
                raise ValueError("out is for predictions of every step, but this estimator predicts one per series")
            result: Any = predictor.last_steps()
        else:
            lengths = inputs.lengths if inputs.is_list else None
            writer = PredictionWriter(out, inputs.N, inputs.T, inputs.starts, lengths)
            for prediction in predictor:
                writer.write(prediction)
            writer.complete(ranks)
            result = writer.result()
        if out is None and isinstance(result, np.ndarray):
            result = codec.as_vector(inputs.to_rows(result), method)
        return (result, predictor.state()) if return_state else result


class BlockPredictor:
    """What a model gives for inputs: iterate over it for blocks of series and steps.

    Views of time steps are walked through stretch by stretch, each from the state that its context left.

    Parameters
    ----------
    model : nn.Module
        Left as it is.
    inputs : Inputs
    spec : Spec
        Its batchsize and seqsize are used.
    state : list of Tensor, optional
        Where to go on, in place of the zero state and of any context.
    transform : callable, optional
        Of each block of outputs (S, B, G).
    comm : RankGroup, optional
        The ranks that share out the series; each gets the blocks of its own.
    keep_state : bool
        Whether :meth:`state` will be called.

    Raises
    ------
    ShapeError, DataError, ValueError
        On construction, if something does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        spec: Spec,
        state: Any = None,
        transform: Transform | None = None,
        comm: RankGroup | None = None,
        keep_state: bool = False,
    ) -> None:
        self.model, self.inputs, self.spec, self.transform = model, inputs, spec, transform
        self.keep_state = keep_state
        self.ranks = RankGroup() if comm is None else comm
        require_same_inputs(self.ranks, inputs)
        self._stretches = inputs.stretches()
        if state is not None and len(self._stretches) > 1:
            raise ValueError(
                f"state is where one stretch of time goes on, but the steps of x have {len(self._stretches) - 1} gaps; "
                "predict each stretch by itself"
            )
        if state is not None:
            self._stretches = [without_context(s) for s in self._stretches]
        self._ready = [self._predictor(s, state) for s in self._stretches[:1]]  # errors come before the first block
        self._last = self._ready[0]

    def __iter__(self) -> Iterator[Prediction]:
        for i, stretch in enumerate(self._stretches):
            predictor = self._last = self._ready[0] if i == 0 else self._predictor(stretch, None)
            for p in predictor:
                yield from self._placed(p, stretch)

    def state(self) -> list[Tensor]:
        """The state at the end of the last stretch."""
        return self._last.state(self.ranks)

    def last_steps(self) -> np.ndarray:
        """The outputs at the last step of each series, (N, G)."""
        n = self.inputs.N
        last = self.inputs.whole().length - 1  # counted from the start of each series
        found: np.ndarray | None = None
        for p in self:
            (y,) = _one(p.y)
            if found is None:
                found = np.empty((n, y.shape[2]), y.dtype)
            at = last[p.series] - p.steps.start
            here = np.flatnonzero((at >= 0) & (at < len(y)))
            found[p.series.start + here] = y[at[here], here]
        return gather_rows(found, n, self.ranks)

    def _predictor(self, stretch: Stretch, state: Any) -> Predictor:
        names = [s.name for s in self.inputs.series]
        x = tuple(SeriesArray(a, name) for a, name in zip(stretch.array, names, strict=True))
        rows = Segments.from_lengths(x[0].N, x[0].T, self.inputs.lengths, self.inputs.starts)
        seqsize = int(self.spec.seqsize or x[0].T)
        overlap = int(self.spec.overlap)
        windows = SequenceWindows(
            x, batchsize=int(self.spec.batchsize), seqsize=seqsize, overlap=overlap, segments=rows
        )
        windows.check()
        part = rank_slice(x[0].N, self.ranks.rank, self.ranks.size)
        return Predictor(self.model, windows, state, part, self.keep_state)

    def _placed(self, p: Prediction, stretch: Stretch) -> Iterator[Prediction]:
        """The part of a block that comes after the lead, where it stands in the inputs."""
        skip = max(0, stretch.lead - p.steps.start)
        y = tuple(v[skip:] for v in p.y)
        if len(y[0]) == 0:
            return
        if self.transform is not None:
            y = tuple(self.transform(v) for v in y)
        start = stretch.at.start + p.steps.start + skip - stretch.lead
        yield Prediction(y, p.series, slice(start, start + len(y[0])))


def without_context(stretch: Stretch) -> Stretch:
    """A stretch without the steps that warm the state."""
    if stretch.lead == 0:
        return stretch
    arrays = tuple(select(a, None, range(stretch.lead, a.shape[2])) for a in stretch.array)
    return Stretch(arrays, 0, stretch.at)


def _one(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray]:
    if len(outputs) != 1:
        raise ShapeError(f"the model gives {len(outputs)} outputs; one target per series is for models of one output")
    return (outputs[0],)
