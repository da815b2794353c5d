"""Run the steps of a model in one native call each, with packed weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import _C, Tensor, nn
from torch.nn.modules import module as hooks

from fluxutils_py.nn.kernels.library import VERSION, Library, library_in_use
from fluxutils_py.nn.kernels.modules import PLAIN
from fluxutils_py.nn.kernels.recurrence import kernel_error
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.nn.recurrent import Recur, State
from fluxutils_py.steps.operations import Operation, Scaler
from fluxutils_py.steps.step_program import StateTensor, StepProgram, step_program
from fluxutils_py.torch_private import has_other_modes_than_devices, n_function_modes, version_of

# Products of all series of a step. With more, kernels for windows are faster, which read the
# weights once for several series (benchmarks/bench_stream.py).
MOST_PRODUCTS = 1_600_000
# A call of more lets other threads of Python run, which takes a microsecond.
SHORT_CALL = 300_000
NOT_FINITE = 4  # as csrc/kernels.h numbers what a call returns
ALIGNMENT = 64  # bytes, of a line of the cache

# fluxutils_step_call, fluxutils_step_operation and fluxutils_step_scaler of csrc/kernels.h
_CALL = Struct("18q")
_OPERATION = Struct("11qd5q")
_SCALER = Struct("5q")


SCALERS = ("standardize", "winsorize", "fill", "round")  # as csrc/kernels.h numbers them


class OutputForm(NamedTuple):
    """What is made of the outputs of the model.

    ``method`` is one of :data:`METHODS`. "scaled" is ``outputs * scale + mean`` in float64, rounded
    to ``dtype``, float32 or float64; "label" is the place of the largest score, "difference" the
    second score minus the first of two; probabilities are those of ``outputs - mean``.
    """

    method: str = "raw"
    mean: np.ndarray = np.empty(0)
    scale: np.ndarray = np.empty(0)
    dtype: Any = None
    n_outputs: int | None = None  # that the model must have


# with their numbers in csrc/kernels.h; a scaled output of float64 has the next one
METHODS = {
    "raw": 0,
    "scaled": 1,
    "label": 3,
    "probabilities": 4,
    "log_probabilities": 5,
    "difference": 6,
}


class NativeStep:
    """Runs single steps of a model natively, on the state that its recurrent layers hold.

    The layers' state then lies in memory that is written in place at each step. Any other state
    that they get, by a reset, a load, or a step that torch computes, is copied there at the next
    step. Weights are packed once, and again when a parameter has another place in memory or another
    version; a change that torch does not count, as ``p.data.add_(1)``, needs a new stream.

    Parameters
    ----------
    model : nn.Module
        In evaluation mode; see :func:`fluxutils_py.steps.step_program.program_of`.
    layers : sequence of Recur
        All that the model has.
    shape : (F, N)
        Features and series of a step.
    scalers : sequence of Scaler
    output : OutputForm
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Recur],
        shape: tuple[int, int],
        scalers: Sequence[Scaler] = (),
        output: OutputForm | None = None,
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self.shape = shape
        self.scalers = list(scalers)
        self.output = output or OutputForm()
        first = next(model.parameters(), None)
        self._dtype = None if first is None else str(first.dtype).removeprefix("torch.")
        self._packed: PackedStep | None = None
        self._is_possible = first is not None

    def __getstate__(self) -> dict[str, Any]:
        # a copy packs its own weights: addresses hold in this one only
        return {**self.__dict__, "_packed": None}

    def run(self, x: np.ndarray) -> np.ndarray | None:
        """Return the outputs (G, N) for the next step, a new array, and move the state on.

        Return None, with nothing changed, if the ordinary way has to compute this step, or to say
        what is wrong with it: a number whose square may be too large (where normalisations of torch
        have rules of their own), an infinity, or a single NaN.

        Parameters
        ----------
        x : ndarray of shape (F, N)
            Real numbers. A series that is all NaN gets zeros; its outputs are those of NaN.
        """
        # a transform or a hook of torch would not see what is computed here
        if is_watched():
            return None
        packed = self._packed
        library = library_in_use()
        if packed is None or packed.library is not library or not packed.is_current():
            packed = self._pack(library)
            if packed is None:
                return None
        if not packed.hold_states():
            return None
        packed.x[...] = x
        code = packed.call(packed.address)
        if code == 0:
            return packed.y.copy()
        if code == NOT_FINITE:
            return None
        raise kernel_error(code)

    @property
    def gap(self) -> np.ndarray | None:
        """Which series (N,) had no input at the last step; None if all had."""
        if self._packed is None:
            return None
        marks = self._packed.gaps
        return marks.astype(bool) if 1 in marks.tolist() else None

    @undisturbed()  # a default device would seem to intercept the model
    def _pack(self, library: Library | None) -> PackedStep | None:
        self._packed = None
        if library is None or not self._is_possible:
            return None
        program = step_program(self.model, self.shape[0])
        # what cannot run now never will, but for a switch of the kernels
        if program is None or not self._fits(program):
            self._is_possible = False
            return None
        self._packed = PackedStep(library, program, self.layers, self)
        return self._packed

    def _fits(self, program: StepProgram) -> bool:
        n_products = sum(op.n_products for op in program.operations)
        return (
            program.dtype == self._dtype  # else the model was converted since
            and n_products * self.shape[1] <= MOST_PRODUCTS
            and self.output.n_outputs in (None, program.n_out)
            and all(len(s.mean) == self.shape[0] for s in self.scalers)
        )


class _Held(NamedTuple):
    """A recurrent layer, and the state that it has while its steps are native."""

    layer: Recur
    state: State
    tensors: list[Tensor]
    initial: list[Tensor]  # for a batch of 1


class PackedStep:
    """Weights, states and the table of a call, in memory of this process."""

    def __init__(
        self,
        library: Library,
        program: StepProgram,
        layers: list[Recur],
        step: NativeStep,
    ) -> None:
        self.library = library
        self.program = program
        self._tensors = program.tensors
        self._versions = list(map(version_of, program.tensors))
        self._addresses = [t.data_ptr() for t in program.tensors]
        n_series = step.shape[1]
        self.state_tensors = [_new_state(s, n_series) for s in program.states]
        self._held = list(_held_layers(program, layers, self.state_tensors))
        self._kept: list[np.ndarray] = []  # what addresses in the table point to
        self.x = np.empty(step.shape)
        self.gaps = np.zeros(n_series, np.int64)
        self.y = _new_outputs(step.output, program, n_series)
        n_products = sum(op.n_products for op in program.operations)
        is_short = n_products * n_series <= SHORT_CALL
        self.call = library.short_step if is_short else library.step
        self.places, self.room = _value_places(program)
        self.address = self.address_of(_table(self, program, step))

    def is_current(self) -> bool:
        """Whether all parameters are as they were when they were packed."""
        tensors = self._tensors
        if list(map(version_of, tensors)) != self._versions:
            return False
        return [t.data_ptr() for t in tensors] == self._addresses

    def hold_states(self) -> bool:
        """Copy states that others have set to where the steps are computed; False if one does not
        fit.
        """
        for held in self._held:  # no generator: this is a part of each step
            if held.layer.state is not held.state and not _take_state(held):
                return False
        return True

    def state_address(self, index: int, op: Operation) -> int:
        """Return the address of an operation's states of all series in a tensor."""
        t = self.state_tensors[index]
        return t.data_ptr() + op.place * self.x.shape[1] * op.n_out * t.element_size()

    def address_of(self, array: np.ndarray) -> int:
        """Return the address of an array, which is kept."""
        self._kept.append(array)
        return array.ctypes.data

    def aligned_address(self, array: np.ndarray) -> int:
        """Return the address of a copy that begins with a line of the cache."""
        room = np.empty(array.nbytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self.address_of(room[start:])


def is_watched() -> bool:
    """Whether hooks of all modules or modes of torch intercept what is computed here.

    A default device does not: no tensor is made.
    """
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or _C._len_torch_dispatch_stack()
        or (n_function_modes() and has_other_modes_than_devices())
    )


def _new_state(state: StateTensor, n_series: int) -> Tensor:
    shape = list(state.initial.shape)
    shape.insert(state.batch_axis, n_series)
    return torch.from_numpy(np.empty(shape, state.initial.dtype))


def _held_layers(
    program: StepProgram, layers: list[Recur], tensors: list[Tensor]
) -> Iterator[_Held]:
    for index, layer in enumerate(layers):
        pairs = [(s, t) for s, t in zip(program.states, tensors, strict=True) if s.layer == index]
        own = [t for _, t in pairs]
        initial = [torch.from_numpy(np.expand_dims(s.initial, s.batch_axis)) for s, _ in pairs]
        yield _Held(layer, own[0] if len(own) == 1 else tuple(own), own, initial)


def _take_state(held: _Held) -> bool:
    """Copy the state of a layer to its place, and give it to the layer."""
    state = held.layer.state
    given: Sequence[Tensor] = held.initial
    if state is not None:
        given = (state,) if isinstance(state, Tensor) else state
        expected = [(t.shape, t.dtype) for t in held.tensors]
        if [(t.shape, t.dtype) for t in given] != expected:
            return False  # what is wrong with it, the ordinary way says
        if not all(type(t) in PLAIN and t.is_cpu for t in given):
            return False
    with torch.no_grad():
        for t, value in zip(held.tensors, given, strict=True):
            t.copy_(value)
    object.__setattr__(held.layer, "state", held.state)  # as Recur sets it
    return True


def _new_outputs(output: OutputForm, program: StepProgram, n_series: int) -> np.ndarray:
    n_outputs = program.n_out
    dtype: Any = program.dtype
    if output.method == "scaled":
        dtype = output.dtype
    if output.method == "label":
        dtype = np.int64
    if output.method in ("label", "difference"):
        n_outputs = 1
    return np.empty((n_outputs, n_series), dtype)


def _table(packed: PackedStep, program: StepProgram, step: NativeStep) -> np.ndarray:
    """Return the structure of the call, with the scalers and operations behind it."""
    n_features, n_series = step.shape
    itemsize = program.dtype.itemsize
    scalers = [*step.scalers]
    if program.moments is not None:  # of numbers as the model gets them
        scalers += [Scaler("round"), program.moments]
    operations = b"".join(
        _pack_operation(packed, op, i + 1) for i, op in enumerate(program.operations)
    )
    described = b"".join(_pack_scaler(packed, s) for s in scalers)
    table = np.empty(_CALL.size + len(described) + len(operations), np.uint8)
    start = table.ctypes.data + _CALL.size
    values = np.zeros(packed.room * itemsize, np.uint8)
    mean = step.output.mean if len(step.output.mean) else np.zeros(program.n_out)
    method = METHODS[step.output.method]
    if step.output.method == "scaled" and np.dtype(step.output.dtype) == np.float64:
        method += 1
    head = _CALL.pack(
        VERSION,
        int(itemsize == 8),
        n_series,
        n_features,
        program.n_out,
        len(scalers),
        len(program.operations),
        method,
        start,
        start + len(described),
        packed.x.ctypes.data,
        packed.aligned_address(np.empty((n_series, n_features))),
        packed.gaps.ctypes.data,
        packed.aligned_address(values),
        packed.places[-1],
        packed.aligned_address(np.asarray(mean, float)),
        packed.aligned_address(np.asarray(step.output.scale, float)),
        packed.y.ctypes.data,
    )
    table[:] = np.frombuffer(head + described + operations, np.uint8)
    return table


def _value_places(program: StepProgram) -> tuple[list[int], int]:
    """Return where each value of a step begins, and how many numbers all take: also the room of
    operations, behind their results, and a second output behind the last.
    """
    sizes = [program.n_in]
    for op in program.operations:
        room = op.room(program.size_of(op.source))
        sizes.append(_whole_lines(op.n_out) + room)
    sizes[-1] += 2 * program.n_out
    starts = np.cumsum([0, *map(_whole_lines, sizes)]).tolist()
    return starts[:-1], starts[-1]


def _whole_lines(n: int) -> int:
    return math.ceil(n / 16) * 16


def _pack_scaler(packed: PackedStep, scaler: Scaler) -> bytes:
    arrays = (scaler.mean, scaler.scale, scaler.lower, scaler.upper)
    addresses = [packed.aligned_address(np.asarray(a, float)) for a in arrays]
    return _SCALER.pack(SCALERS.index(scaler.kind), *addresses)


def _pack_operation(packed: PackedStep, op: Operation, value: int) -> bytes:
    """Return an operation as ``fluxutils_step_operation``."""
    places = packed.places
    n_in = packed.program.size_of(op.source)
    other = places[value] + _whole_lines(op.n_out)  # its room
    if len(op.sources) > 1:
        other = places[op.sources[1]] + op.first
    # an empty array has an address, too
    n_past = len(packed.state_tensors[op.states[0]]) if op.states else 0
    states = [packed.state_address(s, op) for s in op.states]
    pointers = (
        op.w,
        op.w_h,
        op.bias,
        np.array(states, np.int64),
        np.array(op.numbers, np.int32),
    )
    return _OPERATION.pack(
        op.kind,
        op.cell,
        places[op.source],
        other,
        places[value],
        n_in,
        op.n_out,
        op.rows,
        op.w.shape[-1] // op.n_out,  # for a cell
        op.w_h.shape[-1] // op.n_out,
        n_past,
        op.alpha,
        *map(packed.aligned_address, pointers),
    )
