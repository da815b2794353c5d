"""The README's Python blocks run, in order, as one program; its shell commands are what .ci/run
calls.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    assert program.count(".fit(") >= 4
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})


def test_ci_calls_the_test_command():
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert len(commands) == 2
    assert "-m fluxutils_py" in commands[0]
    assert "-m pytest" in commands[1]
    assert "python -m pytest" in (ROOT / ".ci" / "run").read_text()


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
