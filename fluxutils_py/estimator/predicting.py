"""Predict for inputs in any form, block by block."""

from __future__ import annotations

from collections.abc import Iterator
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
from fluxutils_py.estimator.collectives import (
    gather_parts,
    gather_rows,
    memmap_location,
    require_same_inputs,
)
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.inputs.inputs import Inputs, read_inputs
from fluxutils_py.inputs.sharded_data import is_empty, ranks_of_call
from fluxutils_py.inputs.target_codec import Transform
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import describe_by_rank
from fluxutils_py.training.predictor import Prediction, Predictor


def _given(argument: Any) -> str:
    return "none" if argument is None else "given"


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
    sharded: bool = False,
) -> Any:
    """Return the predictions of all ranks in the form of the inputs; with ``return_state``, also
    the state.

    ``method`` is "predict" or, for classifiers, "predict_proba", ...; for other arguments see
    ``Estimator.predict``.
    """
    settings = est._resolved_params()
    with ranks_of_call(settings.comm, "predict", sharded) as ranks:
        check_is_fitted(est, "model_")
        if sharded and not ranks.is_single:  # each rank predicts alone, but errors reach all
            alone = {
                "state": state,
                "lengths": lengths,
                "starts": starts,
                "return_state": return_state,
            }
            nothing = (None, None) if return_state else None
            own = nothing if is_empty(x) else run_predict(est, x, out, method, **alone)
            ranks.allgather()
            return own
        ranks.require_equal(
            {"the method": method, "return_state": bool(return_state), "state": _given(state)}
        )
        inputs, codec = (
            read_inputs(x, est._input_schema(), starts=starts, lengths=lengths),
            est._codec,
        )
        spec, decode = read_spec(settings.spec), codec.decoders()[method]
        predictor = BlockPredictor(est.model_, inputs, spec, state, decode, ranks, return_state)
        if codec.per_series and inputs.form != "timesteps":
            if out is not None:
                raise ValueError(
                    "out is for predictions of every step, but this estimator predicts one per "
                    "series"
                )
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
    """Iterable over the outputs of a model for inputs, in blocks of series and steps.

    Predicts views of time steps run by run, each from the state after its context.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    inputs : Inputs
    spec : Spec
        Gives batchsize, seqsize and overlap.
    state : list of Tensor, optional
        Initial state, in place of the zero state and any context.
    transform : callable, optional
        Function that is applied to each block of outputs (S, B, G).
    comm : RankGroup, optional
        The ranks that share the series; each predicts its part of them.
    keep_state : bool
        Whether :meth:`state` will be called.

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
                f"state continues one run of steps, but the steps of x have {len(self._runs) - 1} "
                "gaps; predict each run separately"
            )
        self._last, self._n_context = self._make_predictor(
            self._runs[0], state
        )  # errors come before the first block

    def __iter__(self) -> Iterator[Prediction]:
        for i, run in enumerate(self._runs):
            if i > 0:
                self._last, self._n_context = self._make_predictor(run, None)
            for p in self._last:
                yield from self._place_in_inputs(p, run)

    def state(self) -> list[Tensor]:
        """Return the state at the end of the last run."""
        return self._last.state(self.ranks)

    def last_steps(self) -> np.ndarray:
        """Return the outputs at the last step of each series, (N, G)."""
        n = self.inputs.N
        last = self.inputs.whole().length - 1  # counted from the start of each series
        outputs: np.ndarray | None = None
        for p in self:
            (y,) = _single_output(p.y)
            if outputs is None:
                outputs = np.empty((n, y.shape[2]), y.dtype)
            at = last[p.series] - p.steps.start
            here = np.flatnonzero((at >= 0) & (at < len(y)))
            outputs[p.series.start + here] = y[at[here], here]
        return gather_rows(outputs, self.ranks)

    def _make_predictor(self, run: slice, state: Any) -> tuple[Predictor, int]:
        """Return a predictor for a run of steps, and its number of context steps: 0 where a state
        is given.
        """
        arrays, n_context = self.inputs.with_context(run)
        if state is not None and n_context:
            arrays, n_context = (
                tuple(select(a, None, range(n_context, a.shape[2])) for a in arrays),
                0,
            )
        x = tuple(SeriesArray(a, s.name) for a, s in zip(arrays, self.inputs.series, strict=True))
        rows = Segments.from_lengths(x[0].N, x[0].T, self.inputs.lengths, self.inputs.starts)
        seqsize = int(self.spec.seqsize or x[0].T)
        overlap = int(self.spec.overlap)
        windows = SequenceWindows(
            x, batchsize=int(self.spec.batchsize), seqsize=seqsize, overlap=overlap, segments=rows
        )
        windows.check()
        part = array_split_slice(x[0].N, self.ranks.size, self.ranks.rank)
        return Predictor(
            self.model, windows, state, part, self.keep_state, self.spec.precision
        ), n_context

    def _place_in_inputs(self, p: Prediction, run: slice) -> Iterator[Prediction]:
        """Yield the part of a block after the context, with its steps in the inputs."""
        skip = max(0, self._n_context - p.steps.start)
        y = tuple(v[skip:] for v in p.y)
        if len(y[0]) == 0:
            return
        if self.transform is not None:
            y = tuple(self.transform(v) for v in y)
        start = run.start + p.steps.start + skip - self._n_context
        yield Prediction(y, p.series, slice(start, start + len(y[0])))


def _single_output(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray]:
    if len(outputs) != 1:
        raise ShapeError(
            f"the model gives {len(outputs)} outputs; one target per series is for models of one "
            "output"
        )
    return (outputs[0],)


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
        out: Any,
        n_series: int,
        n_steps: int,
        starts: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
    ) -> None:
        self._given, self.lengths = out, lengths
        self.out = out if lengths is None else as_ragged(out, "out")
        self.n_series, self.n_steps, self.starts = n_series, n_steps, starts
        self._several: bool | None = None
        self._targets: tuple[Any, ...] | None = None
        if out is not None:
            for name, target in self._named_outputs():
                self._check_out(name, target)

    def write(self, p: Prediction) -> None:
        """Write one block."""
        if self._targets is None:
            self._targets = self._open_targets(p)
        for target, y in zip(self._targets, p.y, strict=True):
            block = y.transpose(2, 1, 0)  # (S, B, G) -> (G, B, S)
            if self.starts is None:
                target[:, p.series, p.steps] = block
                continue
            if p.steps.start == 0:
                target[:, p.series, :] = np.nan if y.dtype.kind == "f" else y.dtype.type()
            for i, start in enumerate(self.starts[p.series]):
                steps = slice(start + p.steps.start, min(start + p.steps.stop, self.n_steps))
                n = p.series.start + i
                target[:, n : n + 1, steps] = block[
                    :, i : i + 1, : max(steps.stop - steps.start, 0)
                ]

    def complete(self, ranks: RankGroup) -> None:
        """Copy the predictions of all ranks, each for its part of the series, into the arrays of
        every rank.

        Ranks that map the same file have already written to it together, and only wait for each
        other.
        """
        if ranks.is_single:
            return
        files = (
            [None]
            if self.out is None
            else [memmap_location(target) for _, target in self._named_outputs()]
        )
        answers = ranks.allgather(
            (
                files,
                None if self._targets is None else [(t.shape[0], t.dtype) for t in self._targets],
            )
        )
        kinds = [kind for _, kind in answers if kind is not None]
        if any(kind != kinds[0] for kind in kinds):
            ranks.raise_on_all(
                RankError(
                    f"out differs: {describe_by_rank([str(k) for _, k in answers])}; give all "
                    "ranks one of a kind"
                )
            )
        if None not in files and all(f == files for f, _ in answers):
            for _, target in self._named_outputs():
                target.flush()
            ranks.allgather()
            return
        if self._targets is None:  # there are fewer series than ranks
            self._targets = (
                self._new_arrays(kinds[0])
                if self.out is None
                else tuple(_as_writable(t) for _, t in self._named_outputs())
            )
            self._several = len(self._targets) > 1
        for target in self._targets:
            gather_parts(target, 1, ranks)

    def result(self) -> Any:
        """Return ``out`` as the user gave it, or the new array, a tuple for several outputs."""
        if self.out is not None:
            return self._given
        assert self._targets is not None
        arrays = (
            self._targets if self.lengths is None else tuple(list(t.arrays) for t in self._targets)
        )
        return arrays if self._several else arrays[0]

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
        for a in getattr(target, "arrays", (target,)):
            if isinstance(a, np.ndarray) and not a.flags.writeable:
                raise DataError(f"{name} is read-only; open it with mode 'r+'")
        if getattr(getattr(target, "file", None), "mode", "r+") == "r":
            raise DataError(
                f"{name} belongs to a file that is open for reading only; open it with mode 'r+'"
            )

    def _open_targets(self, p: Prediction) -> tuple[Any, ...]:
        self._several = len(p.y) > 1
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
            numbers = (
                y.dtype.kind == "f"
            )  # labels must stay whole: NumPy would cut strings and wrap integers around
            # nor text or bytes, into which NumPy would write only as many digits as fit
            if isinstance(dtype, np.dtype) and not (
                np.can_cast(y.dtype, dtype, "same_kind") and dtype.kind in "fcO"
                if numbers
                else np.can_cast(y.dtype, dtype, "safe")
            ):
                way_out = "floating-point" if numbers else str(y.dtype)
                raise DataError(
                    f"{name} has dtype {dtype}, which cannot hold {y.dtype}; make it {way_out}"
                )
        return tuple(_as_writable(target) for _, target in named)

    def _new_arrays(self, kinds: list[tuple[int, Any]]) -> tuple[Any, ...]:
        """Allocate arrays in time-major memory for each number of features and type."""
        if self.lengths is not None:
            return tuple(
                RaggedArray([np.empty((t, n), d).T for t in self.lengths], "out") for n, d in kinds
            )
        return tuple(
            np.empty((self.n_steps, self.n_series, n), dtype).transpose(2, 1, 0)
            for n, dtype in kinds
        )


def _as_writable(target: Any) -> Any:
    """Return a NumPy view of a torch tensor; anything else unchanged."""
    return target.detach().numpy() if type(target).__module__.split(".")[0] == "torch" else target
