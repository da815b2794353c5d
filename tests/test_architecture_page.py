"""docs/background/architecture.md says what is: its folders, and every file on the way of a fit."""

import re
from pathlib import Path

import fluxutils_py
from tests.house_counts import plain_fit, way_to_first_update

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(fluxutils_py.__file__).parent
PAGE = (ROOT / "docs" / "background" / "architecture.md").read_text("utf-8")
MOST_WORDS = 1200


def section(title):
    pattern = rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)"
    return re.search(pattern, PAGE, re.DOTALL | re.MULTILINE)[1]


def test_it_is_read_in_ten_minutes():
    assert len(PAGE.split()) <= MOST_WORDS


def test_every_file_that_it_names_exists():
    named = set(re.findall(r"\b((?:\w+/)+\w+\.(?:py|h))\b", PAGE))
    assert len(named) >= 40
    assert [
        path for path in named if not (PACKAGE / path).exists() and not (ROOT / path).exists()
    ] == []


def test_every_folder_is_named():
    folders = {p.parent.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("__init__.py")}
    missing = [folder for folder in folders - {"."} if f"{folder}/" not in section("Folders")]
    assert missing == []


def test_the_way_of_a_fit_names_every_file_that_a_plain_fit_enters():
    plain_fit()  # everything is imported
    journey, _ = way_to_first_update()
    files = {Path(f).relative_to(PACKAGE).as_posix() for f in journey.files}
    text = section("From `est.fit(x, y)` to the first update")
    assert [file for file in sorted(files) if f"`{file}`" not in text] == []
