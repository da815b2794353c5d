"""The tables of the pages for users of other systems: every row's call gives what the other system
gives.

A row is ``| name there | `call` | `module` | what differs |``. Its call sees what the page's
programs above it define, and beside that only names of its module: both the call and the place of
its name are as the page says. The values are checked by ``tests/migration``: a row without a check
there fails.
"""

import ast
import functools
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("from_*.md"))
PROGRAM_OR_ROW = re.compile(
    r"^```python\n(?P<program>.*?)^```|^\|(?P<row> [^\n]*)\|$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Row:
    page: Path
    number: int
    programs: tuple[tuple[int, str], ...]  # the page's programs above it, with their lines
    there: str
    call: str
    module: str


def rows_of(page):
    """The rows of a page's tables, without their headers."""
    text = page.read_text("utf-8")
    programs, rows = [], []
    for part in PROGRAM_OR_ROW.finditer(text):
        line = text[: part.start()].count("\n") + 1
        if part["program"] is not None:
            programs.append((line, part["program"]))
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", part["row"])]
        if cells[1:3] != ["here", "module"]:
            rows.append(
                Row(
                    page, line, tuple(programs), cells[0], *(cell.strip("`") for cell in cells[1:3])
                )
            )
    return rows


def checks_of(page):
    """The checks of the rows of a page, by their calls."""
    return importlib.import_module(f"tests.migration.{page.stem}").checks


def run_call(row, names):
    """Run a row's call; return the value of its last statement if that is an expression."""
    code = ast.parse("\n" * (row.number - 1) + row.call)
    last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
    exec(compile(code, row.page.name, "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), row.page.name, "eval"), names)


ROWS = [row for page in PAGES for row in rows_of(page)]


@functools.cache
def defined(page, programs, folder):
    """What the programs define; run once in each process."""
    names = {"__name__": page.stem}
    for line, program in programs:
        exec(compile("\n" * line + program, page.name, "exec"), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where programs and calls write, such as the files that a later call reads."""
    return tmp_path_factory.mktemp("pages")


@pytest.mark.few
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page.stem}-{row.number}")
def test_the_call_of_a_row_gives_what_the_other_system_gives(row, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = dict(defined(row.page, row.programs, folder))
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
    check = checks_of(row.page).get(row.call)
    if check is None:
        pytest.fail(f"tests/migration/{row.page.stem}.py does not check the value of {row.call}")
    after = names | offered
    check(after, run_call(row, after))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_check_belongs_to_a_row(page):
    assert set(checks_of(page)) <= {row.call for row in ROWS if row.page == page}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_rows(page):
    assert sum(row.page == page for row in ROWS) >= 20
