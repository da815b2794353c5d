"""docs/export.md: its consumers run in a process that has neither this package nor what they do not
import.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "export.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, onnx_operators_once):
    """A folder with the files that the first block of the page writes."""
    made = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        exec(compile(BLOCKS[0], "export.md", "exec"), {"__name__": "export"})
    return made


@pytest.mark.parametrize(
    ("block", "absent"),
    [(1, ["fluxutils_py", "torch", "sklearn"]), (2, ["fluxutils_py", "sklearn", "onnxruntime"])],
)
def test_a_consumer_needs_nothing_of_this_package(block, absent, folder):
    code = BLOCKS[block]
    imported = {
        name
        for line in re.findall(r"^import (.*)$", code, re.MULTILINE)
        for name in line.split(", ")
    }
    assert imported == {"json", "numpy as np", "onnxruntime" if block == 1 else "torch"}
    program = f"import sys\nfor name in {absent}:\n    sys.modules[name] = None\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_consumer_has_ten_lines():
    assert sum(1 for line in BLOCKS[1].splitlines() if line and not line.startswith("assert")) <= 11
