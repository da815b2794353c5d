"""The tables of the pages for users of other systems: every row's call gives what the other system
gives.

A row is ``| name there | `call` | what differs |``, or ``| `call`, `call` | same | what differs |``
for calls that are the same in both. The head of the second column names the module of the calls,
unless what differs begins with "in `module`". A call sees what the programs above it define in the
part of the page on its system, and beside that only names of its module: both the call and the
place of its name are as the page says. The values are checked by ``tests/migration``: a row without
a check there fails.
"""

import ast
import functools
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "coming_from"
PROGRAM_OR_ROW = re.compile(
    r"^```python\n(?P<program>.*?)^```|^\|(?P<row> [^\n]*)\|$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Part:
    """A page, or the part of one that is about one system; its lines stay where they are."""

    system: str
    text: str


@dataclass(frozen=True)
class Row:
    part: Part
    number: int
    programs: tuple[tuple[int, str], ...]  # of the part, above the row, with their lines
    call: str
    module: str


def parts():
    """FluxUtils.jl has a page, the others a section of another page each."""
    yield Part("fluxutils_jl", (FOLDER / "fluxutils_jl.md").read_text("utf-8"))
    text = (FOLDER / "other_systems.md").read_text("utf-8")
    found = list(re.finditer(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    for section in found:
        above = "\n" * text[: section.start()].count("\n")
        yield Part(section[1].lower().replace(".", "_"), above + section[0])


def rows_of(part):
    """The rows of a part's tables, without their headers."""
    programs, rows, module = [], [], None
    for found in PROGRAM_OR_ROW.finditer(part.text):
        line = part.text[: found.start()].count("\n") + 1
        if found["program"] is not None:
            programs.append((line, found["program"]))
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", found["row"])]
        there, here, differs = cells
        if differs == "what differs":
            module = here.strip("`")
            continue
        own = re.match(r"in `([\w.]+)`", differs)
        calls = [here] if here != "same" else there.split("`, `")
        rows += [
            Row(part, line, tuple(programs), call.strip("`"), own[1] if own else module)
            for call in calls
        ]
    return rows


def checks_of(part):
    """The checks of the rows of a part, by their calls."""
    return importlib.import_module(f"tests.migration.from_{part.system}").checks


def run_call(row, names):
    """Run a row's call; return the value of its last statement if that is an expression."""
    code = ast.parse("\n" * (row.number - 1) + row.call)
    last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
    exec(compile(code, row.part.system, "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), row.part.system, "eval"), names)


PARTS = list(parts())
ROWS = [row for part in PARTS for row in rows_of(part)]


@functools.cache
def defined(system, programs, folder):
    """What the programs define; run once in each process."""
    names = {"__name__": system}
    for line, program in programs:
        exec(compile("\n" * line + program, system, "exec"), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where programs and calls write, such as the files that a later call reads."""
    return tmp_path_factory.mktemp("pages")


@pytest.mark.few
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.part.system}-{row.number}")
def test_the_call_of_a_row_gives_what_the_other_system_gives(row, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = dict(defined(row.part.system, row.programs, folder))
    module = importlib.import_module(row.module)
    code = ast.parse(row.call)
    loaded = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    offered = {name: getattr(module, name) for name in loaded - set(names) if hasattr(module, name)}
    known = [names[name] for name in loaded & set(names)]
    classes = {
        cls for value in known for cls in (*type(value).__mro__, *getattr(value, "__mro__", ()))
    }
    if not (
        offered
        or any(
            value is thing
            for value in (*known, *classes)
            for thing in (module, *vars(module).values())
        )
    ):
        pytest.fail(f"{row.module} offers nothing of {row.call}")
    check = checks_of(row.part).get(row.call)
    if check is None:
        pytest.fail(
            f"tests/migration/from_{row.part.system}.py does not check the value of {row.call}"
        )
    after = names | offered
    check(after, run_call(row, after))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.system)
def test_every_check_belongs_to_a_row(part):
    assert set(checks_of(part)) <= {row.call for row in ROWS if row.part == part}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.system)
def test_parts_have_rows(part):
    assert sum(row.part == part for row in ROWS) >= 20


def test_every_system_has_a_part():
    assert {part.system for part in PARTS} == {
        path.stem.removeprefix("from_")
        for path in (Path(__file__).parent / "migration").glob("from_*.py")
    }
