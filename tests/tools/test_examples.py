"""The gallery shows the notebooks as they are: docs/gallery.py has written their pages and
pictures.
"""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "gallery"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def gallery(load_script):
    return load_script("docs/gallery.py")


def test_each_page_is_its_notebook(gallery):
    assert [p.stem for p in NOTEBOOKS] == sorted(p.stem for p in PAGES.glob("*.md"))
    for path in NOTEBOOKS:
        stored = gallery.without_outputs((PAGES / f"{path.stem}.md").read_text("utf-8"))
        made = gallery.page(nbformat.read(path, as_version=4), path.stem)
        assert stored == made, f"run python docs/gallery.py {path.stem}"


def test_an_output_is_all_that_is_left_out(gallery):
    cell = nbformat.v4.new_code_cell("print(1)")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# One"), cell])
    bare = gallery.page(notebook, "one")
    cell.outputs = [
        nbformat.v4.new_output("stream", text="1\n"),
        nbformat.v4.new_output("stream", text="2\n"),
    ]
    full = gallery.page(notebook, "one")
    assert "```output\n1\n2\n```" in full
    assert gallery.without_outputs(full) == bare == gallery.without_outputs(bare)


def test_pictures_are_small_described_and_used():
    used = {}
    for page in PAGES.glob("*.md"):
        found = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8"))
        assert found, f"{page.name} has no picture"
        used |= {name: alt for alt, name in found}
    assert set(used) == {p.name for p in PAGES.glob("*.png")}
    assert all(len(alt) > 20 for alt in used.values())
    assert all((PAGES / name).stat().st_size < 60_000 for name in used)


def test_the_gallery_leads_to_each_page_by_a_picture():
    text = (ROOT / "docs" / "gallery.md").read_text("utf-8")
    linked = re.findall(r"\[!\[[^\]]+\]\(gallery/(\w+)-\d+\.png\)\]\(gallery/(\w+)\.md\)", text)
    assert linked == [(p.stem, p.stem) for p in NOTEBOOKS]
