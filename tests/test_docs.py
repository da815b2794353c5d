"""The pages of the documentation: their Python blocks run, page by page, each page as one program.

A block of ``>>>`` lines is checked as a docstring's example is, any other is run. Shell commands
and Julia are not. The pages for users of other systems run in test_migration.py, with their tables,
the examples as notebooks in test_notebooks.py, and the half of save_and_export.md that exports in
test_export_page.py, its consumers without this package.
"""

import doctest
import re
from pathlib import Path

import pytest

import fluxutils_py

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUN_ELSEWHERE = ("coming_from", "examples")  # folders


def page_id(page):
    return page.relative_to(DOCS).with_suffix("").as_posix()


@pytest.mark.few
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name not in RUN_ELSEWHERE], ids=page_id
)
@pytest.mark.filterwarnings("ignore:::mlflow")  # hints of MLflow, and on import of its own types
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    if page.stem == "save_and_export":
        text, _, elsewhere = text.partition("\n## Export\n")
        assert elsewhere
    names = {"__name__": page.stem}
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        block, line = found[1], text[: found.start()].count("\n") + 1
        if block.startswith(">>>"):
            example = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), line)
            said: list[str] = []
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
                example, out=said.append, clear_globs=False
            )
            assert not said, "".join(said)
            names = example.globs
        else:
            exec(compile("\n" * line + block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_linked_files_exist(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        if "://" not in target:
            installed = Path(fluxutils_py.__file__).parents[1] / target.removeprefix("../")
            assert (page.parent / target).exists() or installed.exists(), target


@pytest.mark.parametrize(
    ("before", "code", "target"),
    [
        ("what PrayTools.jl, gomlx ", "train", None),
        ("as torch's ", "SummaryWriter", None),
        ("as torch\u2019s ", "SummaryWriter", None),
        ("Lightning\n", "Trainer(max_epochs=3)", None),
        ("call ", "train", "train"),
        ("the layers of torch, or ", "Trainer(model, loss)", "Trainer"),
        ("mygomlx ", "train", "train"),
        ("", "Estimator.fit", "Estimator.fit"),
        ("run ", "train.py", None),
        ("", "x + y", None),
    ],
)
def test_code_after_the_name_of_another_system_is_no_link(load_script, before, code, target):
    assert load_script("docs/code_links.py").named_target(code, before) == target
