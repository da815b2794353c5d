"""Every notebook runs from top to bottom, and its page in the documentation shows what it prints."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS, f"no notebooks in {FOLDER}"


@pytest.fixture
def client(python, monkeypatch):
    """Runs notebooks, each in a kernel of its own."""
    beside = Path(sys.executable).parent  # where mpirun is; the kernel has another executable
    monkeypatch.setenv("PATH", f"{beside}{os.pathsep}{os.environ['PATH']}")

    class Client(NotebookClient):
        def create_kernel_manager(self):
            manager = super().create_kernel_manager()
            manager.kernel_spec.argv[0] = python
            return manager

    return Client


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_prints_what_its_page_shows(path, client, load_script):
    examples = load_script("docs/examples.py")
    notebook = nbformat.read(path, as_version=4)
    assert examples.run(notebook, client, timeout=600) == [], "it leaves files behind"
    stored = (examples.PAGES / f"{path.stem}.md").read_text("utf-8")
    made = examples.page(notebook, path.stem, {})
    assert examples.printed(made) == examples.printed(stored), (
        f"run python docs/examples.py {path.stem}"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), (
                f"clear the outputs of cell {cell.id!r}"
            )
