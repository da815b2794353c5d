"""Every notebook runs from top to bottom."""

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
def test_notebook_runs_without_an_error(path, client, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not list(tmp_path.iterdir()), "it leaves files behind"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), (
                f"clear the outputs of cell {cell.id!r}"
            )
