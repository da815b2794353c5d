"""Programs of torch as ONNX, without tracing them again where every operator has its counterpart."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import numpy as np
import torch
from torch import fx

Table = dict[Any, Callable[..., Any]]


def convert(program: Any, **names: Any) -> Any:
    """Return the ONNX model of a program of ``torch.export``.

    ``torch.onnx.export`` decomposes operators into simpler ones, and traces all of the program again for that, which is
    half of its time. A program without operators to decompose goes in as it is.
    """
    options = {**names, "dynamo": True, "verbose": False, "custom_translation_table": _translations()}
    try:
        made = torch.onnx.export(_Undecomposed(program), **options)
    except Exception:  # an operator that is converted only after another one was decomposed; else it raises again
        made = torch.onnx.export(program, **options)
    assert made is not None
    return made.model_proto


class _Undecomposed(torch.export.ExportedProgram):
    """A copy of a program that decomposes itself only if it must."""

    def __init__(self, program: Any) -> None:
        self.__dict__ = copy(program.__dict__)
        self._graph_module = deepcopy(program.graph_module)  # the conversion changes it in place

    def run_decompositions(self, decomp_table: Any = None, *args: Any, **kwargs: Any) -> Any:
        parts = [m for m in self.graph_module.modules() if isinstance(m, fx.GraphModule)]
        targets = {node.target for m in parts for node in m.graph.nodes if node.op == "call_function"}
        if decomp_table is None or any(t in decomp_table or _needs_tracing(t) for t in targets):
            return super().run_decompositions(decomp_table, *args, **kwargs)
        return self


def _needs_tracing(operator: Any) -> bool:
    """Return whether an operator changes tensors in place, is made of others, or runs a graph and is no scan."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return str(operator) != "scan"
    if operator is torch.ops.aten.batch_norm.default:  # only tracing takes it apart
        return True
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable


def _translations() -> Table:
    """Return ONNX for simple operators of torch that have no counterpart of their own there."""
    from onnxscript import ir
    from onnxscript import opset18 as op

    def constant(value: float, like: Any) -> Any:
        exact: Any = ir.tensor(value, dtype=like.dtype)
        return op.Constant(value=exact)

    def square(x: Any) -> Any:
        return op.Mul(x, x)

    def rsub(x: Any, other: float, alpha: float = 1.0) -> Any:
        return op.Sub(constant(other, x), x if alpha == 1 else op.Mul(x, constant(alpha, x)))

    def to(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: str = "") -> Any:
        return op.Cast(x, to=dtype)

    def both(x: Any, other: Any) -> Any:
        return op.And(x, other) if x.dtype == ir.DataType.BOOL else op.BitwiseAnd(x, other)

    def either(x: Any, other: Any) -> Any:
        return op.Or(x, other) if x.dtype == ir.DataType.BOOL else op.BitwiseOr(x, other)

    def nan_to_num(x: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
        largest = float(np.finfo(x.dtype.numpy()).max)
        y = op.Where(op.IsNaN(x), constant(nan or 0.0, x), x)
        for of, value, default in ((np.inf, posinf, largest), (-np.inf, neginf, -largest)):
            y = op.Where(op.Equal(x, constant(of, x)), constant(default if value is None else value, x), y)
        return y

    aten = torch.ops.aten
    return {
        aten.square.default: square,
        aten.rsub.Scalar: rsub,
        aten.to.dtype: to,
        aten.nan_to_num.default: nan_to_num,
        aten.__and__.Tensor: both,
        aten.__or__.Tensor: either,
    }
