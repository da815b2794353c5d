"""The documentation is read in an evening: words are counted, by page and in all.

A word is what ``wc -w`` counts. Of the examples, which are rendered notebooks, code and outputs do
not count.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MOST_IN_ALL = 28_000  # of the pages of the site, without the reference
MOST_OF_AN_EXAMPLE = 600
MOST_BYTES = 300_000  # of a page with its pictures
FOLDERS = ("start", "guide", "examples", "background", "coming_from")

MOST = {
    "README.md": 1000,
    "CONTRIBUTING.md": 800,
    "docs/index.md": 350,
    "docs/start/install.md": 450,
    "docs/start/csv_to_model.md": 800,
    "docs/start/which_estimator.md": 450,
    "docs/guide/windows_and_state.md": 2500,
    "docs/guide/data.md": 2000,
    "docs/guide/models_and_losses.md": 1500,
    "docs/guide/defaults.md": 1250,
    "docs/guide/sklearn.md": 1200,
    "docs/guide/streams.md": 1500,
    "docs/guide/save_and_export.md": 1500,
    "docs/guide/forecasting.md": 1800,
    "docs/guide/many_processes.md": 1500,
    "docs/guide/explain.md": 700,
    "docs/guide/trackers_and_callbacks.md": 600,
    "docs/examples/index.md": 350,
    "docs/background/benchmarks.md": 1500,
    "docs/background/comparison.md": 900,
    "docs/background/where_it_runs.md": 300,
    "docs/background/architecture.md": 1200,
    "docs/background/changelog.md": 50,
    "docs/coming_from/fluxutils_jl.md": 1750,
    "docs/coming_from/other_systems.md": 3400,
}
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def pages():
    """The pages of the site by name."""
    paths = [DOCS / "index.md", *(p for folder in FOLDERS for p in (DOCS / folder).rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path for path in sorted(paths)}


def is_example(name):
    return name.startswith("docs/examples/") and name not in MOST


def n_words(name):
    text = (ROOT / name).read_text("utf-8")
    return len((_CODE.sub("", text) if is_example(name) else text).split())


@pytest.mark.parametrize("name", MOST)
def test_a_page_is_short(name):
    assert n_words(name) <= MOST[name]


def test_examples_are_short():
    long = {name: n_words(name) for name in pages() if is_example(name)}
    assert {name: n for name, n in long.items() if n > MOST_OF_AN_EXAMPLE} == {}


def test_every_page_has_a_place_and_a_limit():
    every = {path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")}
    assert every == set(pages())
    assert [name for name in pages() if name not in MOST and not is_example(name)] == []


def test_all_pages_are_read_in_an_evening():
    words = {name: n_words(name) for name in pages()}
    assert sum(words.values()) <= MOST_IN_ALL, words


@pytest.mark.parametrize("name", pages())
def test_a_page_and_its_pictures_load_fast(name):
    text = pages()[name].read_text("utf-8")
    pictures = {pages()[name].parent / picture for picture in _PICTURE.findall(text)}
    assert len(text) + sum(picture.stat().st_size for picture in pictures) <= MOST_BYTES


def test_code_and_outputs_of_examples_do_not_count():
    text = "one two\n\n```python\nx = 1\n```\n\n```output\n1\n```\n\nthree\n"
    assert len(_CODE.sub("", text).split()) == 3
