"""The examples show the notebooks as they are: docs/examples.py has written their pages and pictures."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "examples"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
INDEX = PAGES / "index.md"


@pytest.fixture(scope="module")
def examples(load_script):
    return load_script("docs/examples.py")


def test_each_page_is_its_notebook(examples):
    assert [p.stem for p in NOTEBOOKS] == sorted(p.stem for p in PAGES.glob("*.md") if p != INDEX)
    for path in NOTEBOOKS:
        stored = examples.without_outputs((PAGES / f"{path.stem}.md").read_text("utf-8"))
        made = examples.page(nbformat.read(path, as_version=4), path.stem)
        assert stored == made, f"run python docs/examples.py {path.stem}"


def test_an_output_is_all_that_is_left_out(examples):
    cell = nbformat.v4.new_code_cell("print(1)")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# One"), cell])
    bare = examples.page(notebook, "one")
    cell.outputs = [
        nbformat.v4.new_output("stream", text="1\n"),
        nbformat.v4.new_output("stream", text="2\n"),
    ]
    full = examples.page(notebook, "one")
    assert "```output\n1\n2\n```" in full
    assert examples.without_outputs(full) == bare == examples.without_outputs(bare)


def test_pictures_are_small_described_and_used():
    used = {}
    for page in PAGES.glob("*.md"):
        found = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8"))
        assert found, f"{page.name} has no picture"
        if page != INDEX:
            used |= {name: alt for alt, name in found}
    assert set(used) == {p.name for p in PAGES.glob("*.png")}
    assert all(len(alt) > 20 for alt in used.values())
    assert all((PAGES / name).stat().st_size < 60_000 for name in used)


def test_the_index_leads_to_each_page_by_a_picture():
    text = INDEX.read_text("utf-8")
    linked = re.findall(r"\[!\[[^\]]+\]\((\w+)-\d+\.png\)\]\((\w+)\.md\)", text)
    assert linked == [(p.stem, p.stem) for p in NOTEBOOKS]


def test_what_is_printed_is_compared_but_for_numbers_and_what_varies(examples):
    page = "```python\n1\n```\n\n```output\nR2 0.91  of 3\n```\n\n```text\nhere\n```\n"
    assert examples.printed(page) == ["R0 0 of 0"]
    assert examples.printed(page.replace("0.91  of", "nan of")) == examples.printed(page)
    assert examples.printed(page.replace("of", "and")) != examples.printed(page)
    table = "```output\n x  -1.5\n```\n"
    assert examples.printed(table) == examples.printed(table.replace(" -1.5", "2e-07"))
