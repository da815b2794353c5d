"""A model as a header of C99: its weights, its state, and one step of one series.

The header holds those functions of ``step.h`` that the model needs, which the native kernels run
too, and calls them in the order of the operations of a :class:`StepProgram`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch

from fluxutils_py.exporting.c_source import check_prefix, definitions, needed, resolved, table

# of NumPy, or torch, and of math.h
FUNCTIONS = {
    "abs": "fabs",
    "absolute": "fabs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctanh": "atanh",
    "ceil": "ceil",
    "cos": "cos",
    "cosh": "cosh",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "floor": "floor",
    "log": "log",
    "log10": "log10",
    "log1p": "log1p",
    "log2": "log2",
    "sin": "sin",
    "sinh": "sinh",
    "sqrt": "sqrt",
    "tan": "tan",
    "tanh": "tanh",
    "trunc": "trunc",
}


class Transform(NamedTuple):
    """What happens to the features of a step before a model, or to its outputs after it.

    Attributes
    ----------
    kind : str
        "standardize" (mean, scale), "winsorize" (lower, upper, mean, scale), "fill" (values),
        "forward_fill" (values before the first), "unscale" (mean, scale), "clone", or one of
        FUNCTIONS.
    values : tuple of ndarray of shape (F,), float64
    """

    kind: str
    values: tuple[np.ndarray, ...] = ()


class Description(NamedTuple):
    """What the comment of a header says of its model, and what its outputs are.

    Attributes
    ----------
    title : str
        The classes of the model.
    feature_names : list of str, optional
    classes : ndarray of shape (K,), optional
        Of a classifier: its outputs are then probabilities.
    notes : sequence of str
        Further lines.
    """

    title: str
    feature_names: list[str] | None = None
    classes: np.ndarray | None = None
    notes: Sequence[str] = ()



class CHeader:
    """A model as a header of C.

    Parameters
    ----------
    program : StepProgram
    before, after : sequence of Transform
        Of inputs and of outputs.
    description : Description
    prefix : str
        What the names in the header begin with.
    quantize : bool
        Whether the weights of products have 8 bits, with a scale for each row.

    Attributes
    ----------
    operations : list
        Those of the program, with the weights that the file has.
    """

    def __init__(
        self,
        program: StepProgram,
        before: Sequence[Transform],
        after: Sequence[Transform],
        description: Description,
        prefix: str,
        quantize: bool,
    ) -> None:
        self.program = program
        self.before = list(before)
        self.after = list(after)
        self.description = description
        self.prefix = prefix
        self.quantize = quantize
        self.real = "double" if program.dtype == np.float64 else "float"
        is_wide = any(t.kind == "unstandardize" and t.is_wide for t in after)
        self.output = "double" if is_wide else self.real
        self._tables: list[str] = []
        self._fields: list[str] = []  # of the state
        self._starts: list[str] = []  # statements of reset
        self._n_table_bytes = 0
        self._n_state_bytes = 0

    def text(self) -> str:
        """Return the whole header."""
        statements = [*self._inputs(), *self._model(), *self._outputs()]
        own = "\n\n".join(
            [
                *self._tables,
                f"typedef struct {{\n{_indented(self._fields or ['char none;'])}\n}} @_state;",
                self._function(
                    "Starts a series.", "void", "reset(@_state *state)", self._reset_statements()
                ),
                self._function(
                    _RETURNED,
                    "int",
                    f"step(@_state *state, const {self.real} *x, {self.output} *y)",
                    statements,
                ),
                *self._label(),
            ]
        )
        parts = [
            self._comment(),
            "#ifndef @@_H\n#define @@_H\n\n#include <math.h>\n#include <stdint.h>",
            '#ifdef __FAST_MATH__\n#error "-ffast-math breaks the rounding and the checks for NaN"\n'
            "#endif",
            f"#define @@_N_IN {self.program.n_in}\n#define @@_N_OUT {self.program.n_out}",
            *self._functions_for(own),
            own,
            "#endif /* @@_H */",
        ]
        text = "\n\n".join(parts) + "\n"
        text = re.sub(r"\bSTEP_(?=\w)", "@@_", text)
        text = re.sub(r"\bstep_(?=\w)", "@_", text)
        return text.replace("@@", self.prefix.upper()).replace("@", self.prefix)

    def _functions_for(self, code: str) -> list[str]:
        """Return what the code needs of step.h."""
        text = files("fluxutils_py.exporting").joinpath("step.h").read_text("utf-8")
        is_double = self.real == "double"
        text = resolved(text, {"STEP_DOUBLE": is_double, "STEP_DECLARED": True})
        text = re.sub(r"STEP_MATH\((\w+)\)", r"\1" if is_double else r"\1f", text)
        text = re.sub(r"^#define (real|STEP_MATH)\b.*\n", "", text, flags=re.MULTILINE)
        # as a type: before a name, a pointer or a parenthesis
        text = re.sub(r"\breal(?=[ )*])", self.real, text)
        roots = Definition(frozenset(), code).uses()
        return [d.text for d in needed(definitions(text), roots)]

    def _table(self, name: str, values: np.ndarray) -> str:
        """Define a table of numbers; return its name in C."""
        self._tables.append(table(f"@_{name}", values))
        self._n_table_bytes += values.nbytes
        return f"@_{name}"

    def _real_table(self, name: str, values: np.ndarray) -> str:
        return self._table(name, values.astype(self.program.dtype))

    def _state(self, name: str, kind: str, start: np.ndarray) -> str:
        """Add an array to the state; return it in C."""
        n = start.size
        self._fields.append(f"{kind} {name}[{n}];")
        self._n_state_bytes += n * (8 if kind == "double" else 4)
        if np.any(start):  # as NaN is
            values = self._table(f"start_{name}", start.astype(kind.replace("float", "float32")))
            self._starts.append(f"for (i = 0; i < {n}; i++) state->{name}[i] = {values}[i];")
        else:
            self._starts.append(f"for (i = 0; i < {n}; i++) state->{name}[i] = 0;")
        return f"state->{name}"

    # -- one step ---------------------------------------------------------------------------------

    def _inputs(self) -> list[str]:
        """Return the statements that put the inputs of the model in front of ``v``."""
        n = "@@_N_IN"
        refused = ["for (i = 0; i < @@_N_OUT; i++) y[i] = NAN;", "return status;"]
        lines = [f"{self.real} v[{self.program.n_values}];", "int i, status;"]
        if not self.before:
            lines.append(f"status = step_read(x, v, {n});")
        else:
            lines.insert(0, f"double in[{n}];")
            lines.append(f"step_widen(x, in, {n});")
            for k, transform in enumerate(self.before):
                lines += self._transform(transform, f"in{k}", "in", n)
            lines += [f"step_narrow(in, v, {n});", f"status = step_read(v, v, {n});"]
        return [*lines, "if (status < 0) {", *(f"    {line}" for line in refused), "}"]

    def _transform(self, transform: Transform, name: str, array: str, n: str) -> list[str]:
        """Return the statements of a transform of ``n`` doubles in place."""
        kind = transform.kind
        if kind in FUNCTIONS:
            return [f"for (i = 0; i < {n}; i++) {array}[i] = {FUNCTIONS[kind]}({array}[i]);"]
        tables = [self._table(f"{name}_{k}", v) for k, v in enumerate(transform.values)]
        if kind != "forward_fill":
            return [f"step_{kind}({', '.join([array, *tables])}, {n});"]
        # before the state changes
        refused = "for (i = 0; i < @@_N_OUT; i++) y[i] = NAN;"
        last = self._state(f"last_{name}", "double", np.full(len(transform.values[0]), np.nan))
        return [
            f"if (step_any_infinite({array}, {n})) {{",
            f"    {refused}",
            "    return -1;",
            "}",
            f"step_forward_fill({array}, {last}, {tables[0]}, {n});",
        ]

    def _model(self) -> list[str]:
        """Return the calls of all operations."""
        calls: list[str] = []
        for k, operation in enumerate(self.program.operations):
            calls += self._operation(operation, k)
        return calls

    def _operation(self, o: Operation, k: int) -> list[str]:
        source, target, other = f"v + {o.source}", f"v + {o.target}", f"v + {o.other}"
        match o.kind:
            case "dense":
                return [self._product(f"w{k}", o.w, source, target, self._bias(o, k))]
            case "cell":
                return self._cell(o, k)
            case "diagonal":
                h = self._state(f"h{k}", self.real, o.h)
                factors = self._real_table(f"lambda{k}", o.w)
                return [
                    f"step_diagonal({factors}, {source}, {h}, {o.n_out // 2});",
                    f"step_copy({h}, {target}, {o.n_out});",
                ]
            case "activation":
                name = f"STEP_{o.cell.upper()}"
                alpha = number(o.alpha, self.real)
                return [f"step_activate({name}, {alpha}, {source}, {target}, {o.n_out});"]
            case "gated":
                return [f"step_gated({source}, {target}, {o.n_out});"]
            case "add":
                return [f"step_add({source}, {other}, {target}, {o.n_out});"]
            case "layer_norm":
                tables = f"{self._real_table(f'w{k}', o.w)}, {self._bias(o, k)}"
                eps = number(o.alpha, self.real)
                return [f"step_layer_norm({source}, {tables}, {target}, {eps}, {o.n_out});"]
        tables = f"{self._real_table(f'w{k}', o.w)}, {self._bias(o, k)}"
        return [f"step_scale_shift({source}, {tables}, {target}, {o.n_out});"]

    def _cell(self, o: Operation, k: int) -> list[str]:
        """Return the calls of the two products of a cell, and of the cell itself."""
        H = o.n_out
        h = self._state(f"h{k}", self.real, o.h)
        states = [h] if o.c is None else [h, self._state(f"c{k}", self.real, o.c)]
        sums = f"v + {o.other}"
        calls = [self._product(f"w{k}", o.w, f"v + {o.source}", sums, self._bias(o, k))]
        if o.w_h is not None:
            of_h = f"v + {o.other + (o.rows - o.h_rows) * H}"
            calls.append(self._product(f"u{k}", o.w_h, h, of_h))
        arguments = [sums, *states]
        name = o.cell
        if name == "hfgru":
            arguments.append(number(o.alpha, self.real))
        elif o.alpha == 0 and name in ("sgru", "mgu"):
            name += "_parabolic"
        calls.append(f"step_{name}({', '.join(arguments)}, {H});")
        calls.append(f"step_copy({h}, v + {o.target}, {H});")
        return calls

    def _bias(self, o: Operation, k: int) -> str:
        return self._real_table(f"b{k}", o.bias)

    def _product(
        self, name: str, w: np.ndarray, x: str, target: str, bias: str | None = None
    ) -> str:
        """Return the call that adds the product with a matrix (n_in, n_products) to ``target``, or
        puts it there with a bias.
        """
        n_in, n_products = w.shape
        suffix = ""
        if self.quantize:
            suffix = "_int8"
            rows, scale = quantized(w)
            tables = [self._table(name, rows), self._real_table(f"{name}_scale", scale)]
        else:
            tables = [self._real_table(name, w)]
        sizes = f"{n_in}, {n_products}"
        if bias is None:
            return f"step_add_products{suffix}({x}, {', '.join(tables)}, {target}, {sizes});"
        tables.append(bias)
        n_out = ""
        return f"step_dense{suffix}({x}, {', '.join(tables)}, {target}, {sizes}, {n_out});"

    def _outputs(self) -> list[str]:
        """Return the statements that write ``y``."""
        n = "@@_N_OUT"
        found = f"v + {self.program.output}"
        if self.description.classes is not None:
            lines = [f"step_softmax({found}, y, {n});"]
            return [*lines, f"for (i = 0; status && i < {n}; i++) y[i] = NAN;", "return status;"]
        value = f"v[{self.program.output} + i]"
        lines = []
        if self.after:
            lines = [f"step_widen({found}, out, {n});"]
            for k, transform in enumerate(self.after):
                lines += self._transform(transform, f"out{k}", "out", n)
            value = f"({self.output})out[i]"
        lines.append(f"for (i = 0; i < {n}; i++) y[i] = status ? ({self.output})NAN : {value};")
        return [*lines, "return status;"]

    def _label(self) -> list[str]:
        """Return a function that gives the label, of a classifier."""
        classes = self.description.classes
        if classes is None:
            return []
        match classes.dtype.kind:
            case "f":
                kind = "double"
                values = [number(c, "double") for c in classes.tolist()]
            case "i" | "u" | "b":
                kind = "long long"
                values = [f"{int(c)}LL" for c in classes.tolist()]
            case _:
                kind = "const char *"
                values = [string(str(c)) for c in classes.tolist()]
        return [
            self._function(
                "The label of the most probable class.",
                kind,
                f"label(const {self.real} *probabilities)",
                [
                    f"static {kind.replace('*', '*const')} labels[] = {{{', '.join(values)}}};"
                    if kind == "const char *"
                    else f"static const {kind} labels[] = {{{', '.join(values)}}};",
                    f"return labels[step_argmax(probabilities, {len(values)})];",
                ],
            )
        ]
