"""docs/architecture.md says what is: its files, its walk from fit to the optimizer, its words."""

import re
from pathlib import Path

import pytest

import fluxutils_py

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(fluxutils_py.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def section(title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[
        1
    ]


def rows(title):
    """The rows of a section's table: a list of cells each."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_every_file_that_it_names_exists():
    named = set(re.findall(r"\b((?:\w+/)+\w+\.py)\b", PAGE))
    assert len(named) >= 15
    assert [
        path for path in named if not (PACKAGE / path).exists() and not (ROOT / path).exists()
    ] == []


@pytest.mark.slow
def test_the_list_of_files_is_that_of_the_package(load_script):
    rooms = load_script("docs/rooms.py")
    rooms.PACKAGE = PACKAGE
    assert section("Files").strip() == rooms.rooms().strip(), "run python docs/rooms.py"


def test_the_walk_of_fit_goes_forward_through_six_files():
    paths = [cells[0].strip("`") for cells in rows("From `est.fit(x, y)` to `optimizer.step()`")]
    assert len(paths) <= 6
    modules = ["fluxutils_py." + path.removesuffix(".py").replace("/", ".") for path in paths]
    texts = [(PACKAGE / path).read_text("utf-8") for path in paths]

    def imports(i, j):
        folder, _, stem = modules[j].rpartition(".")
        names = re.findall(r"^class (\w+)", texts[j], re.MULTILINE)
        direct = (
            rf"from {re.escape(modules[j])} import|from {re.escape(folder)} import .*\b{stem}\b"
        )
        through = rf"from {re.escape(folder)} import .*\b({'|'.join(names) or stem})\b"
        return re.search(rf"^({direct}|{through})", texts[i], re.MULTILINE)

    for j in range(1, len(paths)):
        assert any(imports(i, j) for i in range(j)), f"nothing above {paths[j]} imports it"
        assert not any(imports(j, i) for i in range(j)), f"{paths[j]} leads back"
    assert "optimizer.step()" in texts[-1]


def test_the_glossary_has_forty_words_that_the_package_uses():
    words = [word.strip() for cells in rows("Glossary") for word in cells[0].split(",")]
    assert len(rows("Glossary")) <= 40
    assert len(set(words)) == len(words)
    text = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py")).lower()
    assert [
        w
        for w in words
        if not re.search(re.sub(r"\W", r"[\\W_]?", re.escape(w).replace("\\", "")), text)
    ] == []
