"""Break the package in one place at a time, and see whether the tests notice.

``python -m tests.tools.mutate --seed 1 --number 60`` draws 60 lines of the package and breaks each
in a copy: an operator is exchanged, a condition negated, a number changed, an argument or a
statement left out, the wrong name returned. For each it runs the tests, the nearest first, until
one fails. A breakage that survives shows a test that is missing, or code that nothing needs.
``--list`` only shows what was drawn, and ``--only 7 tests/laws`` runs other tests for one.

A seed draws the same lines again while they stay as they are, whatever changes elsewhere: lines are
ordered by a digest of the seed and their text. What reads the same to every caller is in
``EQUIVALENT``, with the reason, and is not drawn. Types, docstrings and the words of messages are
not broken, nor is ``csrc/``.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fluxutils_py"
# for the tests near a breakage; ten times as many for the whole suite. What takes longer hangs:
# caught
SECONDS = 300

# path, the line, the broken line: why no caller can tell them apart
EQUIVALENT: dict[tuple[str, str, str], str] = {}

SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
}
OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
# arguments that only change what is printed
WORDS = {
    "help",
    "description",
    "metavar",
    "stacklevel",
}


class Breakage(NamedTuple):
    """Text that replaces the bytes ``start:stop`` of a line (from 1)."""

    line: int
    start: int
    stop: int
    text: str

    def apply(self, source: str) -> str:
        """The source with the breakage."""
        lines = source.encode().split(b"\n")
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.text.encode() + line[self.stop :]
        return b"\n".join(lines).decode()


class Breaker(ast.NodeVisitor):
    """Collect the breakages of a file, all but those in types, docstrings and messages."""

    def __init__(self, source: str):
        self.lines = source.encode().split(b"\n")
        self.found: list[Breakage] = []
        self.names: list[str] = []  # of the function around, in the order in which they get values
        self.visit(ast.parse(source))

    def replace(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> None:
        """Replace a node that stands on one line; ``{}`` in the text is what stands there."""
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            old = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            self.add(node.lineno, node.col_offset, node.end_col_offset, text.replace("{}", old))

    def swap(self, left: ast.expr, operator: ast.AST, right: ast.expr) -> None:
        """Exchange the operator between two nodes."""
        if type(operator) in SWAPS:
            old, new = SWAPS[type(operator)]
            start = left.end_col_offset if left.end_lineno == right.lineno else 0
            between = self.lines[right.lineno - 1][start : right.col_offset].decode()
            if (place := between.find(old)) >= 0:
                start = (start or 0) + len(between[:place].encode())
                self.add(right.lineno, start, start + len(old), new)

    def add(self, *breakage) -> None:
        self.found.append(Breakage(*breakage))

    def generic_visit(self, node: ast.AST) -> None:
        """Visit what lies inside, but no types."""
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, arguments = self.names, node.args
        self.names = [
            a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ]
        self.generic_visit(node)
        self.names = outer

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names = [*(n for n in self.names if n != node.id), node.id]

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            self.swap(left, operator, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap(left, node.op, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.swap(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and node.lineno == node.operand.lineno:
            self.add(node.lineno, node.col_offset, node.operand.col_offset, "")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        # these have breakages of their own
        if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            self.replace(node.test, "not ({})")
        self.generic_visit(node)

    visit_IfExp = visit_While = visit_If

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace(node, str(2 * node.value or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if called == "warn":
            return
        if called in OTHER_FUNCTION and isinstance(node.func, ast.Name):
            self.replace(node.func, OTHER_FUNCTION[called])
        for keyword in node.keywords:
            if (
                keyword.arg is not None
                and keyword.arg not in WORDS
                and keyword.lineno == keyword.end_lineno
            ):
                rest = self.lines[keyword.lineno - 1][keyword.end_col_offset :]
                comma = re.match(rb",? ?", rest)
                self.add(
                    keyword.lineno,
                    keyword.col_offset,
                    keyword.end_col_offset + (comma.end() if comma else 0),
                    "",
                )
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in WORDS:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            self.replace(node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return
        if all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
            self.replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace(node, "pass")  # and leave its message alone

    def visit_Continue(self, node: ast.Continue | ast.Break | ast.Delete) -> None:
        self.replace(node, "pass")

    visit_Break = visit_Delete = visit_Continue

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Formatted text is for people."""

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Name) and (
            others := [n for n in self.names if n != node.value.id]
        ):
            self.replace(node, f"return {others[-1]}")
        elif isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            first, second = (ast.unparse(e) for e in node.value.elts)
            self.replace(node, f"return {second}, {first}")
        elif node.value is not None:
            self.replace(node, "return None")
        self.generic_visit(node)


def breakages(source: str, line: int | None = None) -> list[tuple[Breakage, str, str]]:
    """The breakages of a file or a line that Python compiles to something else, with the line
    before and after.
    """
    found, same = [], ast.dump(ast.parse(source))
    for breakage in Breaker(source).found:
        broken = breakage.apply(source)
        if line in (None, breakage.line):
            with contextlib.suppress(SyntaxError):
                if ast.dump(ast.parse(broken)) != same:
                    old, new = (s.split("\n")[breakage.line - 1].strip() for s in (source, broken))
                    found.append((breakage, old, new))
    return found


class Drawn(NamedTuple):
    """A breakage of a file: the path from the root of the repository, and the line before and
    after.
    """

    path: str
    breakage: Breakage
    old: str
    new: str


def digest(*parts) -> bytes:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()


def draw(seed: int, number: int, root: Path = ROOT) -> list[Drawn]:
    """``number`` lines of the package, each with one breakage; every line that has any is as
    likely.
    """
    order: dict[bytes, tuple[str, str, int]] = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        source, path = file.read_text("utf-8"), file.relative_to(root).as_posix()
        seen: dict[str, int] = {}  # lines of one text are told apart by their order
        for line in sorted({b.line for b in Breaker(source).found}):
            text = source.split("\n")[line - 1].strip()
            seen[text] = seen.get(text, 0) + 1
            order[digest(seed, path, text, seen[text])] = path, source, line
    drawn: list[Drawn] = []
    for key, (path, source, line) in sorted(order.items()):
        if len(drawn) == number:
            break
        if found := breakages(source, line):
            one = Drawn(path, *min(found, key=lambda f: digest(key, f[2])))
            if (one.path, one.old, one.new) not in EQUIVALENT:
                drawn.append(one)
    return drawn


def near(path: str, root: Path = ROOT) -> list[str]:
    """The tests that say most about a module: its own, four others that name most of what is in it,
    and its examples.

    The examples come last, as in the whole suite: what nothing had imported before would be
    imported twice.
    """
    module, tests = Path(path).stem, root / "tests"
    own = tests / Path(path).parent.relative_to(PACKAGE) / f"test_{module}.py"
    public = re.findall(
        r"^(?:def|class) ([a-zA-Z]\w*)", (root / path).read_text("utf-8"), re.MULTILINE
    )
    words = re.compile(rf"\b(?:{'|'.join([module, *public])})\b")
    files = sorted(f for f in tests.rglob("test_*.py") if f != own and f.parent.name != "mpi")
    named = {f: len(set(words.findall(f.read_text("utf-8")))) for f in files}
    others = sorted(
        (f for f in named if named[f]), key=lambda f: (-named[f], f.parent != own.parent)
    )
    chosen = [*([own] if own.exists() else []), *others[:4]]
    return [*(f.relative_to(root).as_posix() for f in chosen), path]


def stages(path: str, root: Path = ROOT) -> list[tuple[list[str], float]]:
    """Which tests to run one after the other until some fail, and how many seconds they have."""
    floor = Path(path).parts[1]
    wide = [f"tests/{folder}" for folder in dict.fromkeys([floor, "estimator", "laws", "training"])]
    return [
        (near(path, root), SECONDS),
        ([folder for folder in wide if (root / folder).is_dir()], 5 * SECONDS),
        (["tests"], 10 * SECONDS),
    ]


def run(tests: list[str], folder: Path, seconds: float, log: Path, marks: str = "") -> str | None:
    """Run tests of a folder until one fails, and name that one; None if all pass."""
    # of a process that has imported the libraries, which takes longer than most of the tests
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            os.chdir(folder)
            sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
            os.environ["PYTHONPATH"] = str(folder)  # for programs that tests start
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            import pytest

            code = pytest.main(
                [*["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfE", "-m"], marks, *tests]
            )
            sys.stdout.flush()
            os._exit(int(code))
        finally:
            os._exit(99)
    end, status = time.monotonic() + seconds, None
    try:
        while status is None:
            if time.monotonic() > end:
                return f"(nothing after {seconds:.0f} s)"
            time.sleep(0.1)
            ended, found = os.waitpid(child, os.WNOHANG)
            status = found if ended else None
    finally:  # also what the tests have left behind, and after an interrupt
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
    code, text = os.waitstatus_to_exitcode(status), log.read_text("utf-8", "replace")
    if code == 99 or re.search("^ERROR: .*not found: ", text, re.MULTILINE):
        raise RuntimeError(f"pytest ran no tests:\n{text}")
    if code in (0, 5):  # all pass; there are none
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return failed[0] if failed else f"(pytest ended with {code})"


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tests", nargs="*", help="these alone, in place of the nearest and then all"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=60, help="how many lines")
    parser.add_argument("--only", type=numbers, help="these of them, from 1, with commas between")
    parser.add_argument(
        "--stages",
        type=int,
        default=3,
        help="1: near tests alone; 2: and those of the floor; 3: and all",
    )
    parser.add_argument(
        "--first-tier", action="store_true", help="of the tests, only those that pytest alone runs"
    )
    parser.add_argument("--list", action="store_true", help="show what is drawn, and run nothing")
    arguments = parser.parse_args()
    drawn = list(enumerate(draw(arguments.seed, arguments.number), 1))
    drawn = [d for d in drawn if arguments.only is None or d[0] in arguments.only]
    survivors, failed = [], set()
    marks = "not slow" if arguments.first_tier else ""
    if not arguments.list:
        prepare()
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        if not arguments.list:
            shutil.copytree(
                ROOT,
                copy,
                ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "build", "*.egg-info"),
                symlinks=True,
            )
        for number, (path, breakage, old, new) in drawn:
            print(f"{number:3} {path}:{breakage.line}\n    - {old}\n    + {new}", flush=True)
            if arguments.list:
                continue
            source, began, by = (copy / path).read_text("utf-8"), time.monotonic(), None
            write(copy / path, breakage.apply(source), second=2 * number)
            for tests, seconds in (
                [(arguments.tests, 10 * SECONDS)]
                if arguments.tests
                else stages(path)[: arguments.stages]
            ):
                if by := run(tests, copy, seconds, Path(temporary) / "log", marks):
                    break
            write(copy / path, source, second=2 * number + 1)
            failed |= {by} if by and "::" in by else set()
            survivors += [] if by else [number]
            print(
                f"    {f'caught by {by}' if by else 'SURVIVED'} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
        if not arguments.list:
            print(
                f"{len(drawn) - len(survivors)} of {len(drawn)} caught; survivors: "
                f"{survivors or 'none'}"
            )
        if failed and (by := run(sorted(failed), copy, 10 * SECONDS, Path(temporary) / "log")):
            print(f"{by} fails on the whole package, too")
            return 2
    return bool(survivors)


def write(path: Path, source: str, second: int) -> None:
    """Write a file as of a second of its own: by that and its size Python tells whether it is
    compiled already.
    """
    path.write_text(source, "utf-8")
    os.utime(path, (second, second))


def prepare() -> None:
    """Import once what every run needs, but nothing of the package."""
    os.nice(10)
    # ends the tests, too, and removes the copy
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ["OMP_NUM_THREADS"] = os.environ["SCIPY_ARRAY_API"] = (
        "1"  # as tests/conftest.py has it
    )
    for library in ("h5py", "pytest", "sklearn.model_selection", "torch._dynamo"):
        importlib.import_module(library)


if __name__ == "__main__":
    sys.exit(main())
