"""The graph of an exported model: a pure function of inputs and state over any number of steps and
series.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.steps import N_SERIES, ContextWindow, InitialState
from fluxutils_py.nn.kernels import native_kernels

N_STEPS = 5  # of examples; another number than N_SERIES


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
        :class:`InitialState`, ``n_outputs`` the number of outputs;
        :class:`ModelStep` is one. They become the body of a scan over time.
    window : ContextWindow, optional
        In place of ``steps``, for a model that takes whole windows.
    gaps : bool
        Whether a series without input at a step (all its features are NaN after ``before``) counts
        as zeros there, and its outputs are NaN before ``after``; as in ``Estimator.predict``.

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
        window: ContextWindow | None = None,
        gaps: bool = False,
    ) -> None:
        self.inputs = examples = [x.expand(N_STEPS, N_SERIES, -1).clone() for x in inputs]
        stateful: Any = steps if window is None else [window]
        self.initial: tuple[InitialState, ...] = tuple(s for m in stateful for s in m.initial)
        states = [s.of(N_SERIES) for s in self.initial]
        if (
            window is not None and states
        ):  # an example of 2 steps, for torch takes 0 and 1 for constants
            states = [x.new_zeros(2, N_SERIES, x.shape[2]) for x in examples]
        with quiet_exporters(), native_kernels(False), torch.no_grad():
            leading, trailing = _Chain(before), _Chain(after)
            if window is None:
                chain = _StepChain(steps, len(self.initial))
                passed = leading(*examples)
                core: nn.Module = _Scan(
                    chain, [_zero_gaps(x) if gaps else x for x in passed], states, self.initial
                )
            else:
                core = window
            whole = _Whole(leading, core, trailing, len(inputs), gaps)
            self.program = _export_program(
                whole, [*examples, *states], _free_axes(len(inputs), self.initial, window is None)
            )
            if window is not None:  # torch guards against one step in all, which is no special case
                self.program._guards_code = [
                    g for g in self.program._guards_code if not g.endswith("!= 1")
                ]
            _forget_sources(self.program)
            found = self.program.module()(*examples, *states)
        self.programs = [core.program if isinstance(core, _Scan) else self.program]
        self.outputs = list(found[: len(found) - len(states)])


class _Chain(nn.Module):
    """Modules without a state, one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        for part in self.parts:
            found = part(*xs)
            xs = (found,) if isinstance(found, Tensor) else tuple(found)
        return xs


class _StepChain(nn.Module):
    """Modules that compute one step, one after the other, with the states of all."""

    def __init__(self, parts: Sequence[nn.Module], n_states: int) -> None:
        super().__init__()
        self.parts, self.n_states = nn.ModuleList(parts), n_states

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(tensors) - self.n_states
        xs, states = tensors[:n], list(tensors[n:])
        following: list[Tensor] = []
        part: Any
        for part in self.parts:
            k = len(part.initial)
            found = part(*xs, *states[:k])
            found = (found,) if isinstance(found, Tensor) else found
            states = states[k:]
            xs = found[: part.n_outputs]
            following += found[part.n_outputs :]
        return (*xs, *following)


class _Scan(nn.Module):
    """A chain of steps over a window, as the higher-order operator ``scan`` of torch.

    The step is traced first, and the scan runs over its graph: that is flat and made of torch's
    operators only.
    """

    def __init__(
        self,
        chain: _StepChain,
        xs: Sequence[Tensor],
        states: Sequence[Tensor],
        initial: Sequence[InitialState],
    ) -> None:
        super().__init__()
        self.idle = not states  # a scan needs a state
        self.program = program = _export_program(
            chain, [*(x[0] for x in xs), *states], _free_axes(len(xs), initial)
        )
        held = {**program.state_dict, **program.constants}
        names = [
            s.target for s in program.graph_signature.input_specs if s.kind.name != "USER_INPUT"
        ]
        for i, name in enumerate(names):
            value = held[name]
            self.register_buffer(
                f"weight_{i}", value.detach() if isinstance(value, Tensor) else value
            )
        self.n_weights, self.n_states = len(names), len(states)
        self._step = [program.graph_module]  # in a list: its parts are no submodules

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        from torch._higher_order_ops.scan import scan_op

        n = len(tensors) - self.n_states
        xs, states = list(tensors[:n]), list(tensors[n:])
        if self.idle:
            states = [xs[0].new_zeros(1)]
        n_states = len(states)

        def body(*given: Tensor) -> list[Tensor]:
            carried, now = given[:n_states], given[n_states : n_states + n]
            found = self._step[0](*given[n_states + n :], *now, *(() if self.idle else carried))
            n_out = len(found) - self.n_states
            following = carried if self.idle else found[n_out:]
            # a scan returns no tensor that it was given, and states in the memory order that they
            # had
            return [
                t.clone(memory_format=torch.contiguous_format) for t in (*following, *found[:n_out])
            ]

        weights = tuple(getattr(self, f"weight_{i}") for i in range(self.n_weights))
        found = scan_op(body, states, xs, weights)
        return (*found[n_states:], *(() if self.idle else found[:n_states]))


class _Whole(nn.Module):
    """The modules before the scan, the scan, and the modules after it."""

    def __init__(
        self, before: nn.Module, core: nn.Module, after: nn.Module, n_inputs: int, gaps: bool
    ) -> None:
        super().__init__()
        self.before, self.core, self.after, self.n_inputs, self.gaps = (
            before,
            core,
            after,
            n_inputs,
            gaps,
        )

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        xs, states = self.before(*tensors[: self.n_inputs]), tensors[self.n_inputs :]
        gap = None
        if self.gaps:
            for x in xs:
                if x.is_floating_point():
                    missing = x.isnan().all(-1, keepdim=True)
                    gap = missing if gap is None else gap | missing
            xs = tuple(_zero_gaps(x) for x in xs)
        found = self.core(*xs, *states)
        found = (found,) if isinstance(found, Tensor) else tuple(found)
        n = len(found) - len(states)
        outputs, following = found[:n], found[n:]
        if gap is not None:
            outputs = tuple(
                o.masked_fill(gap, torch.nan) if o.is_floating_point() else o for o in outputs
            )
        return (*self.after(*outputs), *following)


def _zero_gaps(x: Tensor) -> Tensor:
    """Return inputs with zeros where a series has none."""
    return x.masked_fill(x.isnan().all(-1, keepdim=True), 0) if x.is_floating_point() else x


def _free_axes(n_inputs: int, initial: Sequence[InitialState], scan: bool | None = None) -> Any:
    """Return the free axes of inputs and states, as torch.export wants them: of a step, a scan, or
    another window.
    """
    from torch.export import Dim

    series = Dim("series", min=1)
    of_inputs = {0: series} if scan is None else {0: Dim("steps", min=1), 1: series}
    past = {0: Dim("context", min=0)} if scan is False else {}
    return {
        "tensors": tuple([of_inputs] * n_inputs + [{s.batch_axis: series, **past} for s in initial])
    }


def _export_program(module: nn.Module, examples: Sequence[Tensor], axes: Any) -> Any:
    try:
        # each example has its own memory: torch takes equal ones for one input
        return torch.export.export(module, tuple(x.clone() for x in examples), dynamic_shapes=axes)
    except Exception as error:  # of torch, or of the user's module
        name = _failing_module(module, error)
        reason = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise ExportError(
            f"{name} cannot be exported: {reason}; the whole message of torch is above. A step "
            "must be made of torch's operations, for any number of series"
        ) from error


def _forget_sources(program: Any) -> None:
    """Remove the lines of source code and the paths of their files, which torch writes to files of
    both formats.
    """
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


def _failing_module(module: nn.Module, error: BaseException | None) -> str:
    """Return the name of the innermost module in whose ``forward`` an error was raised, as the
    user's model has it.
    """
    names = {id(m): name for name, m in module.named_modules()}
    found: nn.Module | None = None
    while error is not None and found is None:
        trace = error.__traceback__
        while trace is not None:
            me = trace.tb_frame.f_locals.get("self")
            if isinstance(me, nn.Module) and id(me) in names and names[id(me)]:
                found = me
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    if found is None:
        return "the model"
    return f"{_own_name(names[id(found)])} ({type(found).__name__})"


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
    emit = getattr(config, "do_not_emit_stack_traces", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        config.do_not_emit_stack_traces = True
        try:
            yield
        finally:
            config.do_not_emit_stack_traces = emit
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def module_of_operator(graph: Graph, operator: str) -> str | None:
    """Return the name of the first module that uses an operator, such as ``aten.fft_r2c.default``;
    None if unknown.
    """
    name = operator.split(".")[1]
    with quiet_exporters():
        programs = [*graph.programs, *(p.run_decompositions() for p in graph.programs)]
    for program in programs:
        for node in program.graph.nodes:
            # torch.special.x is aten.special_x, of which ONNX gets prims.x
            if str(node.target).rpartition(".")[0].endswith(name) and (
                stack := node.meta.get("nn_module_stack")
            ):
                path, kind = list(stack.values())[-1]
                return f"{_own_name(str(path))} ({str(kind).rpartition('.')[2]})"
    return None


def _own_name(path: str) -> str:
    """Return the path of a module in the user's model, from that in the graph."""
    return repr(path.partition("model.")[2] or path)
