"""Predictions for inputs of any form, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.lazy import select
from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.collectives import gather_rows, require_same_inputs
from fluxutils_py.estimator.inputs import Inputs, read_inputs
from fluxutils_py.estimator.output import PredictionWriter
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.estimator.target_codec import Transform
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.predictor import Prediction, Predictor


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

    Views of time steps are walked through run by run, each from the state that its context left.

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
        self._runs = inputs.contiguous_runs()
        if state is not None and len(self._runs) > 1:
            raise ValueError(
                f"state is where one stretch of time goes on, but the steps of x have {len(self._runs) - 1} gaps; "
                "predict each stretch by itself"
            )
        self._last, self._n_context = self._predictor(self._runs[0], state)  # errors come before the first block

    def __iter__(self) -> Iterator[Prediction]:
        for i, run in enumerate(self._runs):
            if i > 0:
                self._last, self._n_context = self._predictor(run, None)
            for p in self._last:
                yield from self._placed(p, run)

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

    def _predictor(self, run: slice, state: Any) -> tuple[Predictor, int]:
        """For a run of steps, and how many steps of context come before it: none where a state is given."""
        arrays, n_context = self.inputs.with_context(run)
        if state is not None and n_context:
            arrays, n_context = tuple(select(a, None, range(n_context, a.shape[2])) for a in arrays), 0
        x = tuple(SeriesArray(a, s.name) for a, s in zip(arrays, self.inputs.series, strict=True))
        rows = Segments.from_lengths(x[0].N, x[0].T, self.inputs.lengths, self.inputs.starts)
        seqsize = int(self.spec.seqsize or x[0].T)
        overlap = int(self.spec.overlap)
        windows = SequenceWindows(
            x, batchsize=int(self.spec.batchsize), seqsize=seqsize, overlap=overlap, segments=rows
        )
        windows.check()
        part = array_split_slice(x[0].N, self.ranks.size, self.ranks.rank)
        return Predictor(self.model, windows, state, part, self.keep_state), n_context

    def _placed(self, p: Prediction, run: slice) -> Iterator[Prediction]:
        """The part of a block that comes after the context, where it stands in the inputs."""
        skip = max(0, self._n_context - p.steps.start)
        y = tuple(v[skip:] for v in p.y)
        if len(y[0]) == 0:
            return
        if self.transform is not None:
            y = tuple(self.transform(v) for v in y)
        start = run.start + p.steps.start + skip - self._n_context
        yield Prediction(y, p.series, slice(start, start + len(y[0])))


def _one(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray]:
    if len(outputs) != 1:
        raise ShapeError(f"the model gives {len(outputs)} outputs; one target per series is for models of one output")
    return (outputs[0],)
