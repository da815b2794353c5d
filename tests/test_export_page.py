"""docs/guide/save_and_export.md: its consumers run in a process that has neither this package nor what they do not
import.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "save_and_export.md").read_text("utf-8")
PAGE = PAGE.partition("\n## Export\n")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(MAIN,) = re.findall(r"^```c\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(COMPILED,) = re.findall(r"^cc (.*?) -lm -o main && ./main < x.txt$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, onnx_operators_once):
    """A folder with the files that the first block of the page writes."""
    made = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        exec(compile(BLOCKS[0], "save_and_export.md", "exec"), {"__name__": "export"})
    return made


@pytest.mark.slow
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
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_a_consumer_has_ten_lines():
    assert (
        sum(
            1
            for line in BLOCKS[1].splitlines()
            if line and not line.strip().startswith(("assert", "#"))
        )
        <= 11
    )


@pytest.fixture(scope="module", params=["float32", "float64"])
def c_folder(request, tmp_path_factory):
    """A folder with the C header and the steps that the block of the page writes, for each type."""
    made = tmp_path_factory.mktemp("c")
    assert '.astype("float32")' in BLOCKS[3]
    block = BLOCKS[3].replace("float32", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        exec(compile(block, "save_and_export.md", "exec"), {"__name__": "export"})
    kind = {"float32": "float", "float64": "double"}[request.param]
    assert f"typedef {kind} model_input;" in (made / "model.h").read_text("utf-8")
    (made / "main.c").write_text(MAIN)
    return made


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "runner"),
    [("cc", []), ("arm-linux-gnueabihf-gcc", ["qemu-arm", "-L", "/usr/arm-linux-gnueabihf"])],
)
def test_the_program_in_c_reads_steps_and_gives_predictions(compiler, runner, c_folder):
    for tool in [compiler, *runner[:1]]:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
    command = [compiler, *COMPILED.split(), *strict, "-lm", "-o", "main"]
    done = subprocess.run(command, cwd=c_folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with open(c_folder / "x.txt") as steps:
        run = [*runner, "./main"]
        said = subprocess.run(run, cwd=c_folder, stdin=steps, capture_output=True, timeout=300)
    assert said.returncode == 0, said.stderr
    found = np.loadtxt(said.stdout.splitlines())
    wanted = np.loadtxt(c_folder / "wanted.txt")
    assert found.shape == wanted.shape == (200,)
    assert abs(found - wanted).max() < 1e-5 * max(1, abs(wanted).max())


def test_the_program_in_c_has_twenty_lines():
    assert sum(1 for line in MAIN.splitlines() if line) <= 20
