"""A model as a C99 header: its weights, its state, and one step of one series.

The header holds ``step.h``, whose functions the native kernels run too, and calls them in the order
of the operations of a :class:`StepProgram`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from fluxutils_py.errors import ExportError
from fluxutils_py.steps.operations import Names, Operation, Scaler
from fluxutils_py.steps.step_program import StepProgram

# of NumPy or torch, and of math.h
FUNCTIONS = {"abs": "fabs", "absolute": "fabs"} | {
    name: name.replace("arc", "a")
    for name in (
        *("arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh"),
        *("cos", "cosh", "sin", "sinh", "tan", "tanh", "sqrt"),
        *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2"),
        *("ceil", "floor", "trunc"),
    )
}
# C99 rounds what it stores; C++ may keep more digits, on the x87 units of old x86 processors
GUARDS = """\
#ifdef __FAST_MATH__
#error "-ffast-math breaks rounding and checks for NaN"
#endif
#if defined(__cplusplus) && defined(__FLT_EVAL_METHOD__)
#if __FLT_EVAL_METHOD__ > 0
#error "numbers keep more digits than their type: compile as C99, or with -msse2 -mfpmath=sse"
#endif
#endif"""
MISSING = "for (i = 0; i < @@_N_OUT; i++) y[i] = NAN;"
RETURNED = (
    "Computes the outputs of the next step. Returns 0; 1 if all inputs are missing (NaN): then all "
    "outputs\n * are NaN, and the state moves on as with zeros; -1 if one is infinite, or missing "
    "among others: then all\n * outputs are NaN, and the state stays."
)


class Description(NamedTuple):
    """What a header says of its model, and what its outputs are.

    Attributes
    ----------
    title : str
        In a few words.
    is_wide : bool
        Whether outputs are doubles, whatever the type of the model.
    feature_names : list of str, optional
    classes : ndarray of shape (K,), optional
        Of a classifier, whose outputs are probabilities.
    notes : tuple of str
        Further lines.
    class_weight : ndarray of shape (K,), optional
        What the scores of the model are weighted by; probabilities are not.
    """

    title: str
    is_wide: bool = False
    feature_names: list[str] | None = None
    classes: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    class_weight: np.ndarray | None = None


class CHeader:
    """A model as a C header.

    Parameters
    ----------
    program : StepProgram
    before, after : sequence of Scaler
        Of inputs and of outputs. Beside its kinds, "unstandardize" (mean, scale), "forward_fill"
        (``mean``: the values before the first), and FUNCTIONS.
    description : Description
    prefix : str
        What the names in the header begin with.
    quantize : bool
        Whether the weights of products have 8 bits.
    """

    def __init__(
        self,
        program: StepProgram,
        before: Sequence[Scaler],
        after: Sequence[Scaler],
        description: Description,
        prefix: str,
        quantize: bool,
    ) -> None:
        self.program = program
        self.before = before
        self.after = after
        self.description = description
        self.prefix = prefix
        self.quantize = quantize
        self.real = "double" if program.dtype == np.float64 else "float"
        self.output = "double" if description.is_wide else self.real
        self._tables: list[str] = []
        self._fields: list[tuple[str, str, int]] = []  # of the state: type, name, length
        self._starts: list[str] = []  # statements that begin a series
        self._n_table_bytes = 0
        self._state_names: list[str] = []
        self._room = _Room(program)

    def text(self) -> str:
        """Return the whole header."""
        # of names in it: @ is the prefix, @@ the prefix in capitals
        own = self._own_code()
        sizes = f"#define @@_N_IN {self.program.n_in}\n#define @@_N_OUT {self.program.n_out}"
        parts = ["#ifndef @@_H\n#define @@_H", GUARDS, self._functions(), sizes, own]
        text = "\n\n".join([*parts, "#endif /* @@_H */"]) + "\n"
        text = text.replace("@@", self.prefix.upper()).replace("@", self.prefix)
        return f"{self._comment()}\n{text}"

    def _own_code(self) -> str:
        """Return the code that is of this model alone."""
        for k, state in enumerate(self.program.states):
            kind = "double" if state.initial.dtype == np.float64 else "float"
            self._state_names.append(self._add_state(f"state{k}", kind, state.initial))
        step = [*self._inputs(), *self._model(), *self._outputs()]
        fields = [f"{kind} {name}[{n}];" for kind, name, n in self._fields]
        if not fields:  # C has no empty structures
            fields = ["char none;"]
            self._starts.append("state->none = 0;")
            step.insert(0, "(void)state;")
        reset = self._starts if fields[0] == "char none;" else ["int i;", *self._starts]
        types = f"typedef {self.real} @_input;\ntypedef {self.output} @_output;"
        inputs = "const @_input *x, @_output *y"
        label = self._label()  # adds a table
        parts = [
            *self._tables,
            "typedef struct {\n" + "\n".join(f"    {f}" for f in fields) + "\n} @_state;",
            types,
            function("Starts a series.", "void @_reset(@_state *state)", reset),
            function(RETURNED, f"int @_step(@_state *state, {inputs})", step),
            *label,
        ]
        return "\n\n".join(parts)

    def _functions(self) -> str:
        """Return step.h for the type of the model, whose functions compilers leave out if nothing
        calls them.
        """
        folder = files("fluxutils_py.exporting")
        numbers = folder.joinpath("step_numbers.h").read_text("utf-8")
        text = folder.joinpath("step.h").read_text("utf-8")
        text = text.replace('#include "step_numbers.h"', numbers)
        for word, written in (("real", self.real), ("STEP_", "@@_STEP_"), ("step_", "@_step_")):
            text = text.replace(word, written)
        return f"#define @@_STEP_DOUBLE\n{text}" if self.real == "double" else text

    # -- tables and states -------------------------------------------------------------------------

    def _table(self, name: str, values: np.ndarray) -> str:
        """Define a table of numbers; return its name."""
        self._tables.append(table(f"@_{name}", values))
        self._n_table_bytes += values.nbytes
        return f"@_{name}"

    def _constants(self, name: str, values: np.ndarray) -> str:
        """Define a table of floats of the model's type, or of integers."""
        if values.dtype.kind == "f":
            return self._table(name, values.astype(self.program.dtype))
        return self._table(name, values.astype(np.int32) if values.itemsize > 1 else values)

    def _add_state(self, name: str, kind: str, initial: np.ndarray) -> str:
        """Add an array to the state; return it as step and reset write it."""
        if not initial.size:  # C has no empty arrays
            return "0"
        self._fields.append((kind, name, initial.size))
        start = "0"
        if np.isnan(initial).all():
            start = "NAN"
        elif initial.any():
            start = f"{self._constants(f'initial_{name}', initial)}[i]"
        self._starts.append(f"for (i = 0; i < {initial.size}; i++) state->{name}[i] = {start};")
        return f"state->{name}"

    # -- one step ----------------------------------------------------------------------------------

    def _inputs(self) -> list[str]:
        """Return the statements that read and check the inputs of the model."""
        n = "@@_N_IN"
        first = self._room.of_value(0)
        variables = [f"{self.real} v[{self._room.size}];", "int i, status;"]
        if self.after:
            variables.insert(0, "double out[@@_N_OUT];")
        if self.before:
            variables.insert(0, f"double in[{n}];")
            lines = [f"@_step_widen(x, in, {n});"]
            for k, scaler in enumerate(self.before):
                lines += self._scaler(scaler, f"input{k}", "in", n)
            lines.append(f"@_step_narrow(in, {first}, {n});")
        else:
            lines = [f"@_step_copy(x, {first}, {n});"]
        lines.append(f"status = @_step_check({first}, {n});")
        return [*variables, *lines, "if (status < 0) {", f"    {MISSING}", "    return -1;", "}"]

    def _scaler(self, scaler: Scaler, name: str, array: str, n: str) -> list[str]:
        """Return the statements of a scaler of ``n`` doubles in place."""
        kind = scaler.kind
        if kind == "round":
            return [f"for (i = 0; i < {n}; i++) {array}[i] = ({self.real}){array}[i];"]
        if kind in FUNCTIONS:
            return [f"for (i = 0; i < {n}; i++) {array}[i] = {FUNCTIONS[kind]}({array}[i]);"]
        arrays = (scaler.lower, scaler.upper, scaler.mean, scaler.scale)
        given = filter(len, arrays)
        tables = [self._table(f"{name}_{k}", values) for k, values in enumerate(given)]
        if kind != "forward_fill":
            return [f"@_step_{kind}({', '.join([array, *tables])}, {n});"]
        last = self._add_state(f"last_{name}", "double", np.full(self.program.n_in, np.nan))
        return [
            # now, because the state is about to change
            f"if (@_step_any_infinite({array}, {n})) {{",
            f"    {MISSING}",
            "    return -1;",
            "}",
            f"@_step_forward_fill({array}, {last}, {tables[0]}, {n});",
        ]

    def _model(self) -> list[str]:
        """Return the calls of all operations."""
        calls: list[str] = []
        for k, operation in enumerate(self.program.operations):
            calls += operation.c(self._names(operation, k))
        return calls

    def _names(self, o: Operation, k: int) -> Names:
        """Return what operation k finds in C."""
        other = self._room.of_operation(k)
        if len(o.sources) > 1:
            other = self._room.of_value(o.sources[1])
        return Names(
            self._room.of_value(o.source),
            self._room.of_value(k + 1),
            other,
            [_at(self._state_names[s], o.place * o.n_out) for s in o.states],
            self.program.size_of(o.source),
            len(self.program.states[o.states[0]].initial) if o.states else 0,
            lambda name, values: self._constants(f"{name}{k}", values),
            lambda value: number(value, self.real),
            self.quantize,
        )

    def _outputs(self) -> list[str]:
        """Return the statements that write the outputs."""
        n = "@@_N_OUT"
        found = self._room.of_value(len(self.program.operations))
        if self.description.classes is not None:
            lines = [f"@_step_softmax({found}, y, {n});"]
            if self.description.class_weight is not None:
                table = self._constants("log_weight", np.log(self.description.class_weight))
                lines = [
                    f"for (i = 0; i < {n}; i++) y[i] = ({found})[i] - {table}[i];",
                    f"@_step_softmax(y, y, {n});",
                ]
        elif self.after:
            lines = [f"@_step_widen({found}, out, {n});"]
            for k, scaler in enumerate(self.after):
                lines += self._scaler(scaler, f"output{k}", "out", n)
            lines.append(f"for (i = 0; i < {n}; i++) y[i] = ({self.output})out[i];")
        else:
            lines = [f"@_step_copy({found}, y, {n});"]
        return [*lines, "if (status > 0) {", f"    {MISSING}", "}", "return status;"]

    def _label(self) -> list[str]:
        """Return a function that gives the label, of a classifier."""
        classes = self.description.classes
        if classes is None:
            return []
        labels = classes.tolist()
        if classes.dtype.kind in "iub":
            kind = element = "long long "
            values = [f"{int(c)}LL" for c in labels]
        elif classes.dtype.kind == "f":
            kind = element = "double "
            values = [number(c, "double") for c in labels]
        else:
            kind = "const char *"
            element = "char *const "
            values = [string(str(c)) for c in labels]
        n = len(values)
        statements = [f"static const {element}labels[] = {{{', '.join(values)}}};"]
        weight = self.description.class_weight
        if weight is None:
            statements.append(f"return labels[@_step_argmax(probabilities, {n})];")
        else:
            table = self._constants("class_weight", weight)
            statements += [
                f"@_output weighted[{n}];",
                "int i;",
                f"for (i = 0; i < {n}; i++)",
                f"    weighted[i] = probabilities[i] * {table}[i];",
                f"return labels[@_step_argmax(weighted, {n})];",
            ]
        signature = f"{kind}@_label(const @_output *probabilities)"
        return [function(self._label_is(), signature, statements)]

    def _label_is(self) -> str:
        if self.description.class_weight is None:
            return "The label of the most probable class."
        return "The label of the class with the largest product of probability and class_weight."

    # -- the comment at the start ------------------------------------------------------------------

    def _comment(self) -> str:
        p = self.prefix
        n_in, n_out = f"{p.upper()}_N_IN", f"{p.upper()}_N_OUT"
        about = self.description
        gives = "outputs" if about.classes is None else "probabilities"
        lines = [
            f"{p}: {about.title}, one step of one series at a time.",
            "",
            f"    static {p}_state state;  // {self._state_bytes()} bytes",
            f"    {p}_reset(&state);       // at the start of a series",
            f"    {p}_step(&state, x, y);  // {p}_input x[{n_in}], of type {self.real}; "
            f"{p}_output y[{n_out}]: {gives}, {self.output}",
        ]
        if about.classes is not None:
            lines.append(f"    {p}_label(y);            // {self._label_is()}")
        lines += [
            "",
            "C99 or C++11, with no library but that of math.h and no memory but what the caller "
            "gives; tables",
            f"take {self._n_table_bytes} bytes of constants, a step {self._stack_bytes()} bytes of "
            "stack and a few for its calls.",
        ]
        if about.feature_names is not None:
            lines.append(f"Inputs: {', '.join(map(string, about.feature_names))}.")
        if about.classes is not None:
            lines.append(f"Classes: {', '.join(string(str(c)) for c in about.classes.tolist())}.")
        lines += about.notes
        text = "\n".join(f" * {line}".rstrip() for line in lines)
        # nothing in it may end it
        text = text.replace("*/", "* /").replace("/*", "/ *")
        return f"/*{text.removeprefix(' *')}\n */"

    def _state_bytes(self) -> int:
        sizes = {"double": 8, "float": 4}
        n_bytes = sum(n * sizes[kind] for kind, _, n in self._fields)
        widest = max((sizes[kind] for kind, _, _ in self._fields), default=1)
        # a whole number of the widest, as all compilers for which a float has 4 bytes round up
        return -(-n_bytes // widest) * widest or 1

    def _stack_bytes(self) -> int:
        n_doubles = self.program.n_in * bool(self.before) + self.program.n_out * bool(self.after)
        return self._room.size * np.dtype(self.program.dtype).itemsize + 8 * n_doubles


def _at(array: str, place: int) -> str:
    return f"{array} + {place}" if place else array


class _Room:
    """Where the values of a program are: in a state, or in an array ``v`` for those that are
    needed at the same time.
    """

    def __init__(self, program: StepProgram) -> None:
        self.size = 0
        self._used: list[tuple[int, int, int]] = []  # start, end, and the operation that ends it
        self._values = [""] * (1 + len(program.operations))
        self._own: dict[int, str] = {}  # of operations, beside their results
        last_uses = _last_uses(program)
        self._values[0] = f"v + {self._take(program.n_in, -1, last_uses[0])}"
        for k, o in enumerate(program.operations):
            n_room = o.room(program.size_of(o.source))
            if n_room:
                self._own[k] = f"v + {self._take(n_room, k, k)}"
            if o.result_is_state:
                self._values[k + 1] = _at(f"state->state{o.states[0]}", o.place * o.n_out)
            else:
                self._values[k + 1] = f"v + {self._take(o.n_out, k, last_uses[k + 1])}"

    def of_value(self, i: int) -> str:
        """Return value i in C."""
        return self._values[i]

    def of_operation(self, k: int) -> str:
        """Return the room of operation k beside its result in C; an empty text if it has none."""
        return self._own.get(k, "")

    def _take(self, n: int, first: int, last: int) -> int:
        """Return the first place for n numbers from operation ``first`` to ``last``."""
        start = 0
        for used_start, used_end, used_last in sorted(self._used):
            is_free = used_last < first or used_start >= start + n or used_end <= start
            if not is_free:
                start = used_end
        self._used.append((start, start + n, last))
        self.size = max(self.size, start + n)
        return start


def _last_uses(program: StepProgram) -> list[int]:
    """Return the last operation that reads each value; the output is read after all."""
    found = list(range(-1, len(program.operations)))  # what nothing reads is still written
    for k, o in enumerate(program.operations):
        for source in o.sources:
            found[source] = k
    found[-1] = len(program.operations)
    return found


# -- text of C: names, tables of numbers, texts and functions --------------------------------------

WIDTH = 100  # columns of a table
# of C99 and of C++: a header for both must use neither
KEYWORDS = """
alignas alignof and asm auto bool break case catch char class const continue default delete do
double else enum explicit extern false float for friend goto if inline int long main mutable
namespace new not operator or private protected public register restrict return short signed
sizeof static struct switch template this throw true try typedef typename union unsigned using
virtual void volatile while xor
"""
_TYPES = {
    "float32": "float",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int32": "int",
}


def check_prefix(prefix: object) -> str:
    """Return a prefix of names in C; raise ExportError if it cannot be one."""
    if not isinstance(prefix, str) or not re.fullmatch(r"[A-Za-z]\w*", prefix, re.ASCII):
        raise ExportError(
            f"prefix must begin with a letter and contain only letters, digits and _, got "
            f"{prefix!r}"
        )
    if prefix in KEYWORDS.split() or prefix.endswith("_"):
        raise ExportError(
            f"prefix must not be a word of C nor end with _, got {prefix!r}; use for example "
            f"{prefix.strip('_') + '_model'!r}"
        )
    return prefix


def table(name: str, values: np.ndarray) -> str:
    """Return the definition of a constant array: of float, double, int or char, by the type of
    the values. It holds all their digits.
    """
    flat = np.ravel(values)
    kind = _TYPES[flat.dtype.name]
    lines = [f"static const {kind} {name}[{max(flat.size, 1)}] = {{"]
    line = "   "
    for value in flat.tolist() or [0]:
        text = f" {number(value, kind)},"
        if len(line) + len(text) > WIDTH:
            lines.append(line)
            line = "   "
        line += text
    return "\n".join([*lines, line, "};"])


def number(value: float, kind: str) -> str:
    """Return a finite number as a constant of C of a type, with all its digits."""
    if kind not in ("float", "double"):
        return str(value)
    if not np.isfinite(value):
        raise ExportError(f"a weight of the model is {value}: fit it on data without such numbers")
    digits, suffix = (".9g", "f") if kind == "float" else (".17g", "")
    text = format(value, digits)
    if not re.search("[.e]", text):
        text += ".0"
    return text + suffix


def string(text: str) -> str:
    """Return a text as a constant of C, in UTF-8."""
    escaped = ""
    for byte in text.encode():
        # ? because of trigraphs; @ stands for the prefix in a header
        is_plain = 32 <= byte < 127 and chr(byte) not in '"\\?@'
        escaped += chr(byte) if is_plain else f"\\{byte:03o}"
    return f'"{escaped}"'


def function(comment: str, signature: str, statements: Sequence[str]) -> str:
    """Return the definition of a function."""
    body = "\n".join(f"    {s}" for s in statements)
    return f"/* {comment} */\nstatic inline {signature} {{\n{body}\n}}"
