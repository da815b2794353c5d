"""Learn from single steps of a model natively: the step, the gradient and the update in one call.

Gradients go backwards through the operations of the model's step program, and diagonal layers carry
the sensitivity of their state to their parameters, as :mod:`fluxutils_py.nn.sensitivities` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fluxutils_py.nn import kernels
from fluxutils_py.nn.kernels import VERSION, Library
from fluxutils_py.nn.native import kernel_error
from fluxutils_py.nn.recurrent import Recur, Sensitivity
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.steps.native_step import (
    NOT_FINITE,
    SHORT_CALL,
    NativeStep,
    PackedStep,
    is_watched,
)
from fluxutils_py.steps.step_program import (
    Activation,
    CellStep,
    Dense,
    Diagonal,
    Fade,
    Gated,
    LayerNormalization,
    OfTwo,
    Operation,
    ScaleShift,
    StepProgram,
    Sum,
    step_program,
)

NOT_LEARNT = 5  # as csrc/kernels.h numbers what a call returns
DIAGONAL_CELLS = (9, 10)  # MinGRU and MinLSTM
SMOOTH = ("relu", "tanh", "sigmoid", "silu", "leaky_relu")  # activations with a slope there
OF_SGD, OF_ADAM, OF_ADAMW = 0, 1, 2
# settings of an optimizer that change its formula, and their values where it is the plain one
PLAIN_SETTINGS = {
    "amsgrad": False,
    "maximize": False,
    "nesterov": False,
    "dampening": 0,
    "capturable": False,
    "differentiable": False,
}

# fluxutils_learn_operation, fluxutils_learn_parameter and fluxutils_learn_call of csrc/kernels.h
_OPERATION = Struct("14q")
_PARAMETER = Struct("3q5d5q")
_CALL = Struct("9qdq2d")
_TRUTH = 6  # where the address of the truth is
_RESULTS = _CALL.size // 8 - 2  # where loss and norm are


class Target(NamedTuple):
    """What outputs are compared with: ``(truth - mean) / scale``, by squared errors; or the place
    of a class, by cross-entropy. Both arrays are (G,).
    """

    mean: np.ndarray
    scale: np.ndarray
    is_class: bool = False


class NativeLearning:
    """Runs steps of a model natively, and updates its parameters after each.

    Parameters of the model get memory in the order of the step program, as views that torch reads
    and writes as before, and are updated there. So are the state and the sensitivity of its layers,
    and the memory of the optimizer: what torch computes in between, this goes on from. Only
    :meth:`forget` has to be called if torch has changed parameters, or if an optimizer or a model
    has loaded others.

    Parameters
    ----------
    model : nn.Module
        In evaluation mode.
    shape : (F, N)
        Features and series of a step.
    optimizer : Optimizer
    clip : float or None
        The largest norm of a gradient.
    target : Target

    Attributes
    ----------
    problem : (str, float) or None
        What was not finite in the last step, "loss" or "gradient norm", and its value.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, int],
        optimizer: Optimizer,
        clip: float | None,
        target: Target,
    ) -> None:
        self.problem: tuple[str, float] | None = None
        self._model = model
        self._step = NativeStep(model, recurrent_layers(model), shape)
        self._optimizer = optimizer
        self._clip = clip or 0.0
        self._target = target
        self._program: StepProgram | None = None
        self._is_possible = True
        self._packed: _PackedLearning | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a copy has parameters elsewhere
        return {**self.__dict__, "_packed": None, "_program": None}

    def forget(self) -> None:
        """Note that parameters or the memory of the optimizer are no longer what they were."""
        self._packed = None
        self._program = None

    def program(self) -> StepProgram | None:
        """Return the program of the model, whose arrays follow what is learnt; None if it has
        something that cannot be learnt natively.
        """
        library = kernels.library()
        if self._program is None and self._is_possible and library is not None:
            self._program = self._new_program(library)
            self._is_possible = self._program is not None
            if self._program is not None:
                # what follows from parameters is computed in one way, whoever needs it first
                self._packed = self._pack(library, self._program)
        return self._program

    def _new_program(self, library: Library) -> StepProgram | None:
        program = step_program(self._model, self._step.shape[0])
        if program is None or library.learn is None or program.n_out != len(self._target.mean):
            return None
        if not _can_learn(program, self._model, self._optimizer) or not _has_slopes(program):
            return None
        program = _sharing(program)
        lay_out_memory(self._optimizer)
        return program

    def _pack(self, library: Library, program: StepProgram) -> _PackedLearning:
        step = PackedStep(library, program, self._step.layers, self._step, True)
        return _PackedLearning(step, self._step.layers, self._optimizer, self._clip, self._target)

    def run(self, x: np.ndarray, truth: np.ndarray) -> bool:
        """Move the model on by a step, and update its parameters from the truth.

        Return False, with nothing changed, if the ordinary way has to do it.

        Parameters
        ----------
        x : ndarray of shape (F, N)
            A series that is all NaN gets zeros.
        truth : ndarray of shape (G, N), of classes (1, N)
            NaN where it is unknown.
        """
        if is_watched():
            return False
        program, library = self.program(), kernels.library()
        if program is None or library is None:
            return False
        packed = self._packed
        if packed is None or packed.step.library is not library:
            packed = self._packed = self._pack(library, program)
        if not packed.hold_states():
            return False
        packed.step.x[...] = x
        packed.truth[...] = truth
        code = packed.call(packed.address)
        self.problem = None
        if code == NOT_LEARNT:
            loss, norm = packed.results.tolist()
            is_loss = loss - loss != 0
            self.problem = ("loss", loss) if is_loss else ("gradient norm", norm)
        elif code == NOT_FINITE:
            packed.step.release_states()
            return False
        elif code:
            raise kernel_error(code)
        return True


def _can_learn(program: StepProgram, model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether the kernels know all gradients of a program, and its optimizer."""
    if any(layer.trainable_init for layer in recurrent_layers(model)):
        return False
    kept = [p for op in program.operations for p in op.parameters if p is not None]
    ids = set(map(id, kept))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    # each stands in one place, and all that is trained in one that the kernels know
    return len(ids) == len(kept) and trained <= ids and _knows(optimizer, trained)


def _knows(optimizer: Optimizer, trained: set[int]) -> bool:
    """Return whether the kernels know an optimizer, and it updates these parameters, by id."""
    groups = optimizer.param_groups
    updated = {id(p) for group in groups for p in group["params"]}
    is_known = type(optimizer) in (SGD, Adam, AdamW) and all(map(_is_plain, groups))
    return is_known and trained <= updated


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer has no setting that changes its formula."""
    plain = {name: group.get(name, value) for name, value in PLAIN_SETTINGS.items()}
    return type(group["lr"]) is float and plain == PLAIN_SETTINGS


def _is_trained(op: Operation) -> bool:
    return any(p is not None and p.requires_grad for p in op.parameters)


def _passing(program: StepProgram) -> list[bool]:
    """Return for each value whether something is trained at or below it."""
    passing = [False]
    for op in program.operations:
        below = passing[op.source] or (isinstance(op, OfTwo) and passing[op.other])
        passing.append(below or _is_trained(op))
    return passing


def _has_slopes(program: StepProgram) -> bool:
    """Return whether the kernels know the gradients of all operations that have one."""
    passing = _passing(program)
    pairs = zip(program.operations, passing[1:], strict=True)
    return all(_has_slope(op, passing) for op, has_gradient in pairs if has_gradient)


def _has_slope(op: Operation, passing: Sequence[bool]) -> bool:
    match op:
        case CellStep():
            return op.number in DIAGONAL_CELLS and None not in op.parameters
        case Activation():
            return op.function in SMOOTH
        case Diagonal():
            # of torch's parameters, the kernels read these
            return all(p is not None and p.is_contiguous() for p in op.parameters)
        case Fade():
            return not passing[op.other]
    return isinstance(op, Dense | LayerNormalization | Gated | Sum | ScaleShift)


def _sharing(program: StepProgram) -> StepProgram:
    """Let the parameters of a model be views of the arrays of its program."""
    operations = []
    for op in program.operations:
        shared = op
        if isinstance(op, Dense) and op.is_wide:
            shared = replace(op, weight=np.asfortranarray(op.weight))  # as its kernel reads it
        operations.append(shared)
        arrays = _weights(shared)
        for p, array in zip(shared.parameters, arrays, strict=False):
            if p is not None:
                p.data = torch.from_numpy(array)
    return replace(program, operations=tuple(operations))


def _weights(op: Operation) -> tuple[np.ndarray, ...]:
    """Return the arrays of an operation as its parameters have them; none if torch's are read."""
    match op:
        case Dense():
            return op.weight.T, op.bias
        case CellStep():
            return op.weight_x.T, op.bias
        case LayerNormalization():
            return op.weight, op.bias
    return ()


class _PackedLearning:
    """The table of a call, and what it points to."""

    def __init__(
        self,
        step: PackedStep,
        layers: Sequence[Recur],
        optimizer: Optimizer,
        clip: float,
        target: Target,
    ) -> None:
        self.step = step
        n_series = step.x.shape[1]
        self._sensitivities: list[tuple[Recur, Sensitivity]] = []
        self._gradients: dict[int, Tensor] = {}
        program = step.program
        passing = _passing(program)
        operations = b"".join(
            self._pack_operation(op, layers, passing) for op in program.operations
        )
        trained = [
            (p, isinstance(op, Dense) and k == 0)
            for op in program.operations
            for k, p in enumerate(op.parameters)
            if p is not None and p.requires_grad
        ]
        parameters = b"".join(self._pack_parameter(p, optimizer, w) for p, w in trained)
        self.truth = np.empty((1 if target.is_class else program.n_out, n_series))
        call = _CALL.pack(
            VERSION,
            int(target.is_class),
            len(trained),
            step.address,
            step.address_of(np.frombuffer(operations, np.int64)),
            step.address_of(np.frombuffer(parameters, np.int64)),
            0,
            step.address_of(np.array(target.mean, float)),
            step.address_of(np.array(target.scale, float)),
            clip,
            step.aligned_address(np.empty(step.room, program.dtype)),
            0.0,
            0.0,
        )
        table = np.array(np.frombuffer(call, np.int64))
        self.address = step.address_of(table)
        self.results = table[_RESULTS:].view(np.float64)
        library: Any = step.library
        n_numbers = n_series * sum(p.numel() for p, _ in trained)
        is_short = n_numbers <= SHORT_CALL // 8  # each is read and written several times
        self.call = library.short_learn if is_short else library.learn
        self.call(self.address)  # what follows from parameters
        table[_TRUTH] = step.address_of(self.truth)

    def hold_states(self) -> bool:
        """Copy states and sensitivities that others have set to where they are computed; False if
        one does not fit.
        """
        step = self.step
        if not step.hold_states():
            step.release_states()
            return False
        for layer, held in self._sensitivities:
            if layer.sensitivity is held:
                continue
            given = layer.sensitivity
            for k, t in enumerate(held):
                t.zero_() if given is None else t.copy_(given[k])
            layer.sensitivity = held
        return True

    def _pack_operation(self, op: Operation, layers: Sequence[Recur], passing: list[bool]) -> bytes:
        """Return what an operation needs as ``fluxutils_learn_operation``."""
        operations = self.step.program.operations
        has_gradient = passing[operations.index(op) + 1]
        source = op.source
        gradients = [0] * 4
        recurrent = [0] * 7
        if isinstance(op, Diagonal):
            source = operations[source - 1].source  # before its products
        if _is_trained(op):
            gradients = self._new_gradients(op)
        if has_gradient and isinstance(op, CellStep | Diagonal):
            recurrent = self._pack_recurrent(op, layers)
        to_other = isinstance(op, OfTwo) and passing[op.other]
        return _OPERATION.pack(has_gradient, passing[source], to_other, *gradients, *recurrent)

    def _new_gradients(self, op: Operation) -> list[int]:
        """Return the addresses of gradients, in the strides of their parameters."""
        addresses = [0] * 4
        carries = isinstance(op, CellStep | Diagonal)
        for k, p in enumerate(op.parameters):
            if p is not None and (carries or p.requires_grad):
                self._gradients[id(p)] = torch.empty_like(p.detach())
                addresses[k] = self._gradients[id(p)].data_ptr()
        return addresses

    def _pack_recurrent(self, op: CellStep | Diagonal, layers: Sequence[Recur]) -> list[int]:
        """Return the addresses of sensitivities, of parameters, and of room."""
        step = self.step
        sensitivities, parameters = [0] * 2, [0] * 4
        n_rows = op.rows if isinstance(op, CellStep) else 1
        room = np.empty((1 + 3 * n_rows) * op.n_out, step.program.dtype)
        if isinstance(op, Diagonal):
            parameters = [p.data_ptr() for p in op.parameters if p is not None]
        if _is_trained(op):
            layer = layers[step.program.states[op.states[0]].layer]
            module: Any = layer.module
            held = module.first_sensitivity(step.x.shape[1], False)
            self._sensitivities.append((layer, held))
            sensitivities = [t.data_ptr() for t in held]
        return [*sensitivities, *parameters, step.aligned_address(room)]

    def _pack_parameter(self, p: Tensor, optimizer: Optimizer, is_written: bool) -> bytes:
        """Return a parameter and its optimizer as ``fluxutils_learn_parameter``."""
        group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
        kind, names = OF_ADAM, ["exp_avg", "exp_avg_sq"]
        if type(optimizer) is SGD:
            kind, names = OF_SGD, ["momentum_buffer"] if group["momentum"] else []
        elif group.get("decoupled_weight_decay", type(optimizer) is AdamW):
            kind = OF_ADAMW
        state = optimizer.state[p]
        for name in names:
            if state.get(name) is None:
                state[name] = torch.zeros_like(p.detach())
        addresses = [state[name].data_ptr() for name in names] + [0] * (2 - len(names))
        n_updates = 0
        if kind != OF_SGD:
            state["step"] = torch.tensor(float(state.get("step", 0.0)), dtype=torch.float32)
            n_updates = state["step"].data_ptr()
        beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), 0.0))
        return _PARAMETER.pack(
            kind,
            p.numel(),
            is_written,
            group["lr"],
            group["weight_decay"],
            beta1,
            beta2,
            group.get("eps", 0.0),
            p.data_ptr(),
            self._gradients[id(p)].data_ptr(),
            *addresses,
            n_updates,
        )


def lay_out_memory(optimizer: Optimizer) -> None:
    """Give what an optimizer remembers of each parameter the strides of the parameter: fused ones
    walk through memory.
    """
    for p, memory in optimizer.state.items():
        for name, value in memory.items():
            is_like = isinstance(value, Tensor) and value.shape == p.shape
            if is_like and value.stride() != p.stride():
                memory[name] = torch.empty_like(p.detach()).copy_(value)
