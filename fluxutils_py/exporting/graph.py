"""The graph of an exported model: a pure function of inputs and state over any number of steps and
series.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.steps import N_SERIES, InitialState
from fluxutils_py.nn.kernels.library import native_kernels
from fluxutils_py.nn.model_windows import as_tuple

N_STEPS = 5  # of examples; another number than N_SERIES, to tell the axes apart
Tensors = tuple[Tensor, ...]
Gaps = Literal["zeros", "kept"] | None


class Graph:
    """A chain of modules over windows, some of which carry a state, as a program of torch.export.

    Parameters
    ----------
    inputs : sequence of Tensor of shape (F,)
        Their numbers of features and types; the values do not matter, but should be valid (class
        indices).
    before, after : sequence of nn.Module
        Modules without a state, each called with all outputs of the one before, for windows ``(S,
        B, F)``: for example a scaler, and the inverse of the scale of targets.
    steps : sequence of nn.Module
        Modules between them that compute one step: ``module(*inputs, *states)`` returns
        ``(*outputs, *next_states)``. Their attribute ``initial`` is a tuple of
        :class:`InitialState`, ``n_outputs`` the number of outputs; :class:`ModelStep` is one. A
        module without ``initial`` has no state, such as a function of numbers. They become the body
        of a scan over time.
    gaps : "zeros", "kept" or None
        Whether a series without input at a step (all its features are NaN after ``before``) counts
        as zeros there, or is left to the model, and its outputs are NaN before ``after``; as in
        ``Estimator.predict``. None: such steps are as any other.

    Attributes
    ----------
    program : torch.export.ExportedProgram
        Takes ``(*inputs, *states)`` and returns ``(*outputs, *next_states)``; the numbers of steps
        and series, S and B, are free.
    initial : tuple of InitialState
        Of all ``steps``, in order.
    inputs, outputs : list of Tensor
        Examples, with N_STEPS steps and N_SERIES series.

    Raises
    ------
    ExportError
        If torch cannot trace the modules; the message names the module.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        before: Sequence[nn.Module] = (),
        steps: Sequence[nn.Module] = (),
        after: Sequence[nn.Module] = (),
        *,
        gaps: Gaps = None,
    ) -> None:
        self.inputs = [x.expand(N_STEPS, N_SERIES, -1).clone() for x in inputs]
        self.initial = tuple(s for part in steps for s in initial_of(part))
        states = [s.of(N_SERIES) for s in self.initial]
        with quiet_exporters(), native_kernels(False), torch.no_grad():
            leading = _Chain(before)
            xs = leading(*self.inputs)
            scan = _Scan(_Chain(steps), xs, states, self.initial)
            whole = _Whole(leading, scan, _Chain(after), len(inputs), gaps)
            axes = _free_axes(len(inputs), self.initial, ["steps"])
            examples = [*self.inputs, *states]
            self.program = _export_program(whole, examples, axes)
            _forget_sources(self.program)
            results = self.program.module()(*examples)
        self.outputs = list(results[: len(results) - len(states)])


def initial_of(module: nn.Module) -> tuple[InitialState, ...]:
    """Return the initial state of a module that computes one step; nothing if it has no state."""
    initial: tuple[InitialState, ...] = getattr(module, "initial", ())
    return initial


class _Chain(nn.Module):
    """Modules that compute one step, or have no state, one after the other, with the states of
    all.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.n_states = sum(len(initial_of(part)) for part in parts)

    def forward(self, *tensors: Tensor) -> Tensors:
        n_inputs = len(tensors) - self.n_states
        xs = tensors[:n_inputs]
        states = tensors[n_inputs:]
        next_states: list[Tensor] = []
        part: Any
        for part in self.parts:
            n = len(initial_of(part))
            results = as_tuple(part(*xs, *states[:n]))
            states = states[n:]
            # what a module without a state gives is all output
            n_outputs = part.n_outputs if n else len(results)
            xs = results[:n_outputs]
            next_states += results[n_outputs:]
        return (*xs, *next_states)


class _Scan(nn.Module):
    """A chain of steps over a window, as the higher-order operator ``scan`` of torch.

    The step is traced first, and the scan runs over its graph: that is flat and made of torch's
    operators only.
    """

    def __init__(
        self,
        chain: _Chain,
        xs: Sequence[Tensor],
        states: Sequence[Tensor],
        initial: Sequence[InitialState],
    ) -> None:
        super().__init__()
        self.n_states = len(states)
        first_steps = [x[0] for x in xs]
        axes = _free_axes(len(xs), initial, [])
        program = _export_program(chain, [*first_steps, *states], axes)
        self.n_weights = self._register_weights(program)
        # in a list, so that its parts are no submodules
        self._step = [program.graph_module]

    def _register_weights(self, program: Any) -> int:
        """Register the tensors that the step uses as buffers; return their number."""
        values = {**program.state_dict, **program.constants}
        names = [
            s.target for s in program.graph_signature.input_specs if s.kind.name != "USER_INPUT"
        ]
        for i, name in enumerate(names):
            value = values[name]
            if isinstance(value, Tensor):
                value = value.detach()
            self.register_buffer(f"weight_{i}", value)
        return len(names)

    def forward(self, *tensors: Tensor) -> Tensors:
        from torch._higher_order_ops.scan import scan_op

        n_inputs = len(tensors) - self.n_states
        xs = list(tensors[:n_inputs])
        states = list(tensors[n_inputs:])
        is_idle = not states
        if is_idle:  # a scan needs a state
            states = [xs[0].new_zeros(1)]
        n_carried = len(states)

        def body(*arguments: Tensor) -> list[Tensor]:
            carried = arguments[:n_carried]
            step_inputs = arguments[n_carried : n_carried + n_inputs]
            weights = arguments[n_carried + n_inputs :]
            step_states = () if is_idle else carried
            results = self._step[0](*weights, *step_inputs, *step_states)
            n_outputs = len(results) - self.n_states
            next_states = carried if is_idle else results[n_outputs:]
            # a scan returns no tensor that it was given, and states in the memory order that they
            # had
            tensors = (*next_states, *results[:n_outputs])
            return [t.clone(memory_format=torch.contiguous_format) for t in tensors]

        weights = tuple(getattr(self, f"weight_{i}") for i in range(self.n_weights))
        results = scan_op(body, states, xs, weights)
        next_states = () if is_idle else results[:n_carried]
        return (*results[n_carried:], *next_states)


class _Whole(nn.Module):
    """The modules before the scan, the scan, and the modules after it."""

    def __init__(
        self, before: nn.Module, core: nn.Module, after: nn.Module, n_inputs: int, gaps: Gaps
    ) -> None:
        super().__init__()
        self.before = before
        self.core = core
        self.after = after
        self.n_inputs = n_inputs
        self.gaps = gaps

    def forward(self, *tensors: Tensor) -> Tensors:
        xs = self.before(*tensors[: self.n_inputs])
        states = tensors[self.n_inputs :]
        gap = None
        if self.gaps is not None:
            gap = _gap(xs)
        if self.gaps == "zeros":
            xs = tuple(map(_zero_gaps, xs))
        results = as_tuple(self.core(*xs, *states))
        n_outputs = len(results) - len(states)
        outputs = results[:n_outputs]
        if gap is not None:
            outputs = tuple(_with_gap(o, gap) for o in outputs)
        return (*self.after(*outputs), *results[n_outputs:])


def _gap(xs: Sequence[Tensor]) -> Tensor | None:
    """Return where series have no input (S, B, 1): one of the floating inputs is all NaN."""
    gap = None
    for x in xs:
        if x.is_floating_point():
            missing = x.isnan().all(-1, keepdim=True)
            gap = missing if gap is None else gap | missing
    return gap


def _with_gap(output: Tensor, gap: Tensor) -> Tensor:
    return output.masked_fill(gap, torch.nan) if output.is_floating_point() else output


def _zero_gaps(x: Tensor) -> Tensor:
    """Return inputs with zeros where a series has none."""
    if not x.is_floating_point():
        return x
    missing = x.isnan().all(-1, keepdim=True)
    return x.masked_fill(missing, 0)


def _free_axes(
    n_inputs: int, initial: Sequence[InitialState], leading: list[str]
) -> dict[str, Any]:
    """Return the free axes of inputs and states, as torch.export wants them: those of series, of
    inputs also the axes that lead.
    """
    from torch.export import Dim

    series = Dim("series", min=1)
    of_input = dict(enumerate([*(Dim(name, min=1) for name in leading), series]))
    of_states = [{s.batch_axis: series} for s in initial]
    return {"tensors": (*[of_input] * n_inputs, *of_states)}


def _export_program(module: nn.Module, examples: Sequence[Tensor], axes: dict[str, Any]) -> Any:
    # copies, because torch takes examples that share memory for one input
    copies = tuple(x.clone() for x in examples)
    try:
        return torch.export.export(module, copies, dynamic_shapes=axes)
    except Exception as error:  # of torch, or of the user's module
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise ExportError(
            f"the model cannot be exported: {reason}; the whole message of torch is above. A "
            "step must be made of torch's operations, for any number of series"
        ) from error


def _forget_sources(program: Any) -> None:
    """Remove the lines of source code and the paths of their files, which torch writes to files of
    both formats.
    """
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Silence warnings and logs of torch and ONNX that a user cannot act on, and trace without
    lines of source code.

    The stack of each operation costs a sixth of the time, and files do not hold it; torch before
    2.13 always takes it.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    config: Any = torch.fx.config
    do_not_emit = getattr(config, "do_not_emit_stack_traces", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        config.do_not_emit_stack_traces = True
        try:
            yield
        finally:
            config.do_not_emit_stack_traces = do_not_emit
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
