"""Predict for inputs in any form, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.lazy import select
from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.data.ragged import RaggedArray, as_ragged
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, RankError, ShapeError
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator, input_schema
from fluxutils_py.estimator.gathering import gather_parts, gather_rows, memmap_location
from fluxutils_py.estimator.same_fit import require_same_inputs
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.inputs.inputs import Inputs, read_inputs, without_padding
from fluxutils_py.inputs.labelled_arrays import split_labels, with_labels
from fluxutils_py.inputs.sharded_data import is_empty
from fluxutils_py.inputs.target_codec import TargetCodec, Transform
from fluxutils_py.nn.model_windows import gap_value_of
from fluxutils_py.nn.states import have_begun
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import describe_by_rank
from fluxutils_py.parallel.rank_group import ranks_of_call
from fluxutils_py.training.predictor import Prediction, Predictor

Outputs = list[tuple[int, np.dtype]]  # number of features and type of each


def run_predict(
    est: BaseSeriesEstimator,
    method: str,
    x: object,
    out: object,
    state: list[Tensor] | None,
    return_state: bool,
    lengths: object,
    starts: object,
    sharded: bool,
) -> Any:
    """Return the predictions of all ranks in the form of the inputs; with ``return_state``, also
    the state.

    ``method`` is "predict" or, for classifiers, "predict_proba", ...; for other arguments see
    ``Estimator.predict``.
    """
    settings = est.resolved_params()
    with ranks_of_call(settings.comm, "predict", sharded) as ranks:
        check_is_fitted(est, "model_")  # inside, so that an error on one rank reaches all
        if sharded and not ranks.is_single:
            own: Any = (None, None) if return_state else None
            if not is_empty(x):
                arguments = (est, method, x, out, state, return_state, lengths, starts)
                own = run_predict(*arguments, sharded=False)
            ranks.allgather()  # each rank predicts alone, but an error on one reaches all
            return own
        ranks.require_equal(
            {
                "the method": method,
                "return_state": bool(return_state),
                "state": "none" if state is None else "given",
            }
        )
        parts = est.fitted_parts_
        schema = input_schema(est, settings, parts)
        labels, out = _labels_for(x, out)
        inputs = read_inputs(x, schema, starts=starts, lengths=lengths, padded=False)
        if lengths is starts is None:
            # where series go on before or after them, steps without input are gaps
            begun = have_begun(est.model_, state, inputs.N)
            inputs = without_padding(inputs, ~begun, ended=not return_state)
        spec = read_spec(settings.spec)
        decode = parts.codec.decoders()[method]
        is_last = parts.codec.per_series and inputs.form != "timesteps"
        blocks = BlockPredictor(
            est.model_, inputs, spec, ranks, state, decode, return_state, ends_only=is_last
        )
        result = (_predict_last_steps if is_last else _predict_steps)(blocks, out)
        if out is None:
            result = _as_rows(result, inputs, parts.codec, method)
        result = result if labels is None else with_labels(result, labels)
        return (result, blocks.state()) if return_state else result


def _labels_for(x: object, out: object) -> tuple[Any | None, object]:
    """Return the array whose labels predictions shall have, if ``out`` asks for that, and ``out``
    if it is an array.
    """
    return split_labels(x, out) if isinstance(out, str) else (None, out)


def _as_rows(result: Any, inputs: Inputs, codec: TargetCodec, method: str) -> Any:
    """Return predictions as the rows of the inputs; tuples and lists have no such form."""
    if not isinstance(result, np.ndarray):
        return result
    return codec.as_vector(inputs.to_rows(result), method)


def _predict_last_steps(blocks: BlockPredictor, out: object) -> np.ndarray:
    if out is not None:
        raise ValueError(
            "out is for predictions of every step, but this estimator predicts one per series"
        )
    return blocks.last_steps()


def _predict_steps(blocks: BlockPredictor, out: object) -> Any:
    inputs = blocks.inputs
    lengths = inputs.series[0].array.lengths if inputs.is_list else None
    writer = PredictionWriter(out, inputs.N, inputs.T, inputs.starts, lengths)
    for prediction in blocks:
        writer.write(prediction)
    writer.complete(blocks.ranks)
    return writer.result()


class BlockPredictor:
    """Iterable over the outputs of a model for inputs, in blocks of series and steps.

    Predicts views of time steps run by run, each from the state after its context.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    inputs : Inputs
    spec : Spec
        Gives batchsize, seqsize and overlap.
    ranks : RankGroup
        The ranks that share the series; each predicts its part of them.
    state : list of Tensor, optional
        Initial state, in place of the zero state and any context.
    transform : callable, optional
        Function that is applied to each block of outputs (S, B, G).
    keep_state : bool
        Whether :meth:`state` will be called.
    ends_only : bool
        Whether only the outputs at the last step of each series are asked for, which then needs an
        input.

    Raises
    ------
    ShapeError, DataError, ValueError
        On construction, if inputs and state do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        spec: Spec,
        ranks: RankGroup,
        state: list[Tensor] | None = None,
        transform: Transform | None = None,
        keep_state: bool = False,
        ends_only: bool = False,
    ) -> None:
        self.model = model
        self.ends_only = ends_only
        self.inputs = inputs
        self.spec = spec
        self.transform = transform
        self.keep_state = keep_state
        self.ranks = ranks
        # before windows are cut, which each rank does for its part alone
        if not ranks.is_single:
            require_same_inputs(ranks, inputs)
        self._runs = inputs.contiguous_runs()
        if state is not None and len(self._runs) > 1:
            raise ValueError(
                f"state continues one run of steps, but the steps of x have {len(self._runs) - 1} "
                "gaps; predict each run separately"
            )
        # made here rather than in __iter__, so that errors come before the first block
        self._predictor, self._n_context = self._predictor_of(self._runs[0], state)

    def __iter__(self) -> Iterator[Prediction]:
        for i, run in enumerate(self._runs):
            if i > 0:
                self._predictor, self._n_context = self._predictor_of(run, None)
            for p in self._predictor:
                yield from self._place_in_inputs(p, run)

    def state(self) -> list[Tensor]:
        """Return the state at the end of the last run."""
        return self._predictor.state(self.ranks)

    def last_steps(self) -> np.ndarray:
        """Return the outputs at the last step of each series, (N, G)."""
        last = self.inputs.local_series().length - 1  # counted from the start of each series
        outputs: np.ndarray | None = None
        for p in self:
            if len(p.y) != 1:
                raise ShapeError(
                    f"the model gives {len(p.y)} outputs; one target per series is for models of "
                    "one output"
                )
            (y,) = p.y
            if outputs is None:
                outputs = np.full((self.inputs.N, y.shape[2]), _no_output(y.dtype), y.dtype)
            # blocks are of the same steps for all series, which end at different ones
            at = last[p.series] - p.steps.start
            ending = np.flatnonzero((at >= 0) & (at < len(y)))
            outputs[p.series.start + ending] = y[at[ending], ending]
        return gather_rows(outputs, self.ranks)

    def _predictor_of(self, run: slice, state: list[Tensor] | None) -> tuple[Predictor, int]:
        """Return the predictor of a run of steps, and how many steps before the run only warm up
        its state.
        """
        arrays, n_context = self.inputs.with_context(run)
        if state is not None and n_context:
            # the state is that before the run: steps of context would move it
            arrays = tuple(select(a, None, range(n_context, a.shape[2])) for a in arrays)
            n_context = 0
        names = [s.name for s in self.inputs.series]
        x = tuple(SeriesArray(a, name) for a, name in zip(arrays, names, strict=True))
        n_series = x[0].N
        n_steps = x[0].T
        windows = SequenceWindows(
            x,
            batchsize=self.spec.batchsize,
            seqsize=self.spec.seqsize or n_steps,
            overlap=self.spec.overlap,
            segments=Segments.from_lengths(
                n_series, n_steps, self.inputs.lengths, self.inputs.starts
            ),
            one_target=self.ends_only,
        )
        windows.gap_value = gap_value_of(self.model)
        windows.check()
        part = None
        if not self.ranks.is_single:
            part = array_split_slice(n_series, self.ranks.size, self.ranks.rank)
        predictor = Predictor(
            self.model,
            windows,
            state,
            part,
            self.keep_state,
            self.spec.precision,
            self.ends_only,
        )
        return predictor, n_context

    def _place_in_inputs(self, p: Prediction, run: slice) -> Iterator[Prediction]:
        """Yield the part of a block after the context, with its steps in the inputs."""
        skip = max(0, self._n_context - p.steps.start)
        y = tuple(v[skip:] for v in p.y)
        if len(y[0]) == 0:
            return  # all of the block is context
        if self.transform is not None:
            y = tuple(self.transform(v) for v in y)
        start = run.start + p.steps.start + skip - self._n_context
        yield Prediction(y, p.series, slice(start, start + len(y[0])))


def _no_output(dtype: np.dtype) -> Any:
    """Return what stands at steps that a series does not have."""
    return np.nan if dtype.kind == "f" else dtype.type()


class PredictionWriter:
    """Writes predictions into arrays of shape (G, N, T), given by the user or new.

    Parameters
    ----------
    out : array of shape (G, N, T), a tuple of such, or None
        Anything with ``shape`` that takes slices. None: new arrays in time-major memory.
    n_series, n_steps : int
    starts : ndarray of int, shape (N,), optional
        First step of each series, from which its predictions count. All other steps become NaN (0
        or an empty string for other types).
    lengths : ndarray of int, shape (N,), optional
        Lengths of series in separate arrays: ``out`` and the result are then lists of arrays (G,
        T_i).

    Raises
    ------
    ShapeError, DataError
        On construction, or at the first prediction before anything is written, if ``out`` has
        another shape, is read-only or cannot hold the type of the predictions.
    """

    def __init__(
        self,
        out: object,
        n_series: int,
        n_steps: int,
        starts: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
    ) -> None:
        self._given = out  # returned as it came, also where it is read as a ragged array
        self.out = out if lengths is None else as_ragged(out, "out")
        self.n_series = n_series
        self.n_steps = n_steps
        self.starts = starts
        self.lengths = lengths
        self._targets: tuple[Any, ...] | None = None
        if out is not None:
            # at once: a wrong array would otherwise be found after minutes of predicting
            for name, target in self._named_outputs():
                self._check_out(name, target)

    def write(self, p: Prediction) -> None:
        """Write one block."""
        if self._targets is None:  # only a prediction tells the number and type of outputs
            self._targets = self._open_targets(p)
        for target, y in zip(self._targets, p.y, strict=True):
            block = y.transpose(2, 1, 0)  # (S, B, G) -> (G, B, S)
            if self.starts is None:
                target[:, p.series, p.steps] = block
                continue
            if p.steps.start == 0:
                # blocks have steps that exist only: the others are set here, once per series
                target[:, p.series, :] = _no_output(y.dtype)
            self._write_from_starts(target, block, p)

    def _write_from_starts(self, target: Any, block: np.ndarray, p: Prediction) -> None:
        """Write a block (G, B, S) whose steps count from the start of each series."""
        assert self.starts is not None
        for i, start in enumerate(self.starts[p.series]):
            first = start + p.steps.start
            stop = min(start + p.steps.stop, self.n_steps)
            n_left = max(stop - first, 0)  # 0 where all of the block is after the last step
            n = p.series.start + i
            target[:, n : n + 1, first:stop] = block[:, i : i + 1, :n_left]

    def complete(self, ranks: RankGroup) -> None:
        """Copy the predictions of all ranks, each for its part of the series, into the arrays of
        every rank.

        Ranks that map the same file have already written to it together, and only wait for each
        other.
        """
        if ranks.is_single:
            return
        outputs = None
        if self._targets is not None:
            outputs = [(t.shape[0], t.dtype) for t in self._targets]
        files: list[Any] = [None]
        if self.out is not None:
            files = [memmap_location(target) for _, target in self._named_outputs()]
        files_of_ranks, outputs_of_ranks = zip(*ranks.allgather((files, outputs)), strict=True)
        outputs = _common_outputs(outputs_of_ranks, ranks)
        # one file for all ranks: each has written its part, and gathering would write it again
        if None not in files and all(others == files for others in files_of_ranks):
            for _, target in self._named_outputs():
                target.flush()
            ranks.allgather()
            return
        if self._targets is None:  # there are fewer series than ranks
            self._targets = self._without_predictions(outputs)
        for target in self._targets:
            gather_parts(target, 1, ranks)

    def result(self) -> Any:
        """Return ``out`` as the user gave it, or the new array, a tuple for several outputs."""
        if self.out is not None:
            return self._given
        assert self._targets is not None
        arrays: tuple[Any, ...] = self._targets
        if self.lengths is not None:
            arrays = tuple(list(t.arrays) for t in arrays)
        return arrays if len(arrays) > 1 else arrays[0]

    def _without_predictions(self, outputs: Outputs) -> tuple[Any, ...]:
        """Return the arrays of a rank that has predicted nothing, for what others have."""
        if self.out is None:
            return self._new_arrays(outputs)
        return tuple(_as_writable(target) for _, target in self._named_outputs())

    def _named_outputs(self) -> list[tuple[str, Any]]:
        if isinstance(self.out, tuple | list):
            return [(f"out[{i}]", o) for i, o in enumerate(self.out)]
        return [("out", self.out)]

    def _check_out(self, name: str, target: Any) -> None:
        shape = getattr(target, "shape", None)
        if shape is None or not hasattr(target, "__setitem__"):
            raise ShapeError(
                f"{name} must be an array of shape (G, N, T) that can be written to, got "
                f"{type(target).__name__}"
            )
        if len(shape) != 3 or tuple(shape[1:]) != (self.n_series, self.n_steps):
            raise ShapeError(
                f"{name} has shape {tuple(shape)}; expected (G, {self.n_series}, {self.n_steps}) = "
                "(outputs, series, time steps)"
            )
        if self.lengths is not None and not np.array_equal(
            getattr(target, "lengths", ()), self.lengths
        ):
            raise ShapeError(
                f"{name} must be a list of arrays (G, T_i), with the T_i of the series of x"
            )
        # a list of series is read as one array of several
        for a in getattr(target, "arrays", (target,)):
            if isinstance(a, np.ndarray) and not a.flags.writeable:
                raise DataError(f"{name} is read-only; open it with mode 'r+'")
        # an h5py dataset knows the file that it belongs to
        if getattr(getattr(target, "file", None), "mode", "r+") == "r":
            raise DataError(
                f"{name} belongs to a file that is open for reading only; open it with mode 'r+'"
            )

    def _open_targets(self, p: Prediction) -> tuple[Any, ...]:
        """Return the arrays to write to, after checking those of the user."""
        if self.out is None:
            return self._new_arrays([(y.shape[2], y.dtype) for y in p.y])
        named = self._named_outputs()
        if len(named) != len(p.y):
            raise ShapeError(f"out has {len(named)} arrays, the model gives {len(p.y)} outputs")
        for (name, target), y in zip(named, p.y, strict=True):
            if target.shape[0] != y.shape[2]:
                raise ShapeError(
                    f"{name} has shape {tuple(target.shape)}; expected ({y.shape[2]}, "
                    f"{self.n_series}, {self.n_steps})"
                )
            dtype = getattr(_as_writable(target), "dtype", None)
            if isinstance(dtype, np.dtype) and not _can_hold(dtype, y.dtype):
                remedy = "floating-point" if y.dtype.kind == "f" else str(y.dtype)
                if y.dtype.kind in "UO" and dtype.kind not in "UO":
                    remedy += ", or write predict_proba, or fit on integer labels, which files hold"
                raise DataError(
                    f"{name} has dtype {dtype}, which cannot hold {y.dtype}; make it {remedy}"
                )
        return tuple(_as_writable(target) for _, target in named)

    def _new_arrays(self, outputs: Outputs) -> tuple[Any, ...]:
        """Allocate arrays in time-major memory."""
        if self.lengths is None:
            return tuple(
                np.empty((self.n_steps, self.n_series, n), dtype).transpose(2, 1, 0)
                for n, dtype in outputs
            )
        return tuple(
            RaggedArray([np.empty((t, n), dtype).T for t in self.lengths], "out")
            for n, dtype in outputs
        )


def _common_outputs(of_ranks: Sequence[Outputs | None], ranks: RankGroup) -> Outputs:
    """Return the outputs of the first rank that has series; raise on all ranks if others differ.

    Ranks without series have None.
    """
    with_series = [outputs for outputs in of_ranks if outputs is not None]
    first = with_series[0] if with_series else []
    if any(outputs != first for outputs in with_series):
        described = describe_by_rank([str(outputs) for outputs in of_ranks])
        ranks.raise_on_all(
            RankError(f"out differs: {described}; give all ranks arrays of one shape and type")
        )
    return first


def _can_hold(dtype: np.dtype, of_predictions: np.dtype) -> bool:
    """Return whether an array of a type can hold predictions without damage."""
    if of_predictions.kind != "f":
        # labels must stay whole: NumPy would cut texts and wrap integers around
        return np.can_cast(of_predictions, dtype, "safe")
    # NumPy writes numbers into texts and bytes too, with only as many digits as fit
    return np.can_cast(of_predictions, dtype, "same_kind") and dtype.kind in "fcO"


def _as_writable(target: Any) -> Any:
    """Return a NumPy view of a torch tensor; anything else unchanged."""
    return target.detach().numpy() if isinstance(target, Tensor) else target
