"""The tool that breaks the package, on sources and a package of a few lines."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import mutate

SOURCE = '''"""Not 1 < 2."""
__all__ = ["f"]


def f(x: dict[1, 2], y=2.5, *, flag=True):
    """Nor -3."""
    if x and flag:
        raise ValueError(f"{x + 1} > {y}", 4)
    x.y = g(x, key=y, help="5")
    return x
'''


def test_what_runs_is_broken_and_what_is_read_by_people_is_not():
    broken = {(breakage.line, new) for breakage, _, new in mutate.breakages(SOURCE)}
    assert broken == {
        (5, "def f(x: dict[1, 2], y=5.0, *, flag=True):"),
        (5, "def f(x: dict[1, 2], y=2.5, *, flag=False):"),
        (7, "if x or flag:"),
        (7, "if not (x and flag):"),
        (8, "pass"),
        (9, "pass"),
        (9, 'x.y = g(x, help="5")'),
        (10, "return flag"),
    }


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("a = b is not c", {"a = b is c"}),
        ("a = 'é' in b <= c", {"a = 'é' not in b <= c", "a = 'é' in b < c"}),
        ("a = (b + c) * d", {"a = (b - c) * d", "a = (b + c) / d"}),
        ("a = not b", {"a = b"}),
        ("a = b[-1]", {"a = b[1]", "a = b[-2]"}),
        ("a = b if c else d", {"a = b if not (c) else d"}),
        (
            "a = min(all(b), c=d)",
            {"a = max(all(b), c=d)", "a = min(any(b), c=d)", "a = min(all(b), )"},
        ),
        ("a += b", {"pass"}),
        ("del a", {"pass"}),
        ("a(b)", {"pass"}),
        ("warn('a', b=1)", {"pass"}),
        ("a: int = b | c", set()),
    ],
)
def test_each_kind_of_breakage(line, broken):
    assert {new for _, _, new in mutate.breakages(line)} == broken


def test_an_operator_at_the_beginning_of_a_line_is_broken_there():
    assert [(b.line, new) for b, _, new in mutate.breakages("a = (\n    b\n    and c\n)")] == [
        (3, "or c")
    ]


def test_sources_of_one_size_are_not_taken_for_each_other(tmp_path):
    for second, source in enumerate(("a = 1\n", "a = 2\n")):
        mutate.write(tmp_path / "one.py", source, second)
        spec = importlib.util.spec_from_file_location("one", tmp_path / "one.py")
        module = importlib.util.module_from_spec(spec)
        # reads what it compiled before, if that is of the same second and size
        spec.loader.exec_module(module)
        assert module.a == second + 1
        assert os.path.exists(spec.cached)


def package(folder, source):
    path = folder / "fluxutils_py" / "part" / "one.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "fluxutils_py" / "__init__.py").touch()  # comes before one that is installed
    path.write_text(source)
    return folder


def test_a_seed_draws_the_same_lines_whatever_changes_elsewhere(tmp_path, monkeypatch):
    lines = [f"a{i} = b + {i}" for i in range(50)]
    first = mutate.draw(3, 9, package(tmp_path, "\n".join(lines)))
    assert len({d.breakage.line for d in first}) == 9
    assert first != mutate.draw(4, 9, tmp_path)
    undrawn = next(i for i in range(50) if i + 1 not in {d.breakage.line for d in first})
    lines[undrawn] = "pass"
    again = mutate.draw(3, 9, package(tmp_path, "\n".join(["# more", *lines])))
    assert [d.breakage.line for d in again] == [d.breakage.line + 1 for d in first]
    monkeypatch.setitem(
        mutate.EQUIVALENT, (first[4].path, first[4].old, first[4].new), "for a reason"
    )
    fewer = mutate.draw(3, 9, tmp_path)
    assert fewer[:8] == again[:4] + again[5:]
    assert len(fewer) == 9


def test_some_of_those_drawn_are_listed(monkeypatch, capsys):
    drawn = [
        mutate.Drawn(f"{name}.py", mutate.Breakage(i, 0, 1, ""), "old", "new")
        for i, name in enumerate("abcd", 1)
    ]
    monkeypatch.setattr(mutate, "draw", lambda seed, number: drawn[: number if seed == 5 else 0])
    monkeypatch.setattr(
        sys,
        "argv",
        ["mutate", "--seed", "5", "--number", "3", "--list", "--only", "3,1,4", "tests/laws"],
    )
    assert mutate.main() == 0
    assert (
        capsys.readouterr().out
        == "  1 a.py:1\n    - old\n    + new\n  3 c.py:3\n    - old\n    + new\n"
    )


def test_a_breakage_that_no_test_sees_survives(tmp_path):
    package(tmp_path, "def clip(x, top=3):\n    if x > top:\n        return top\n    return x\n")
    # to import quickly
    for name in (
        "h5py",
        "torch/__init__",
        "torch/_dynamo",
        "sklearn/__init__",
        "sklearn/model_selection",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    near = tmp_path / "tests" / "part" / "test_one.py"
    near.parent.mkdir(parents=True)
    near.write_text(
        "from fluxutils_py.part.one import clip\n\n\ndef test_clip():\n    assert clip(2) == 2\n"
    )
    near.with_name("test_more.py").write_text(
        near.read_text().replace("2", "5", 1).replace("2", "3")
    )
    (tmp_path / "tests" / "tools").mkdir()
    shutil.copy(mutate.__file__, tmp_path / "tests" / "tools")
    command = [sys.executable, "-m", "tests.tools.mutate", "--number", "9"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))} | {
        "PYTHONPATH": ""
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    blocks = done.stdout.split("fluxutils_py/part/one.py:")[1:]
    caught = {
        b.split("+ ")[1].split("\n")[0]: b.split("\n")[3].split("(")[0].strip() for b in blocks
    }
    assert caught == {
        "def clip(x, top=4):": "caught by tests/part/test_more.py::test_clip",
        "if x >= top:": "SURVIVED",
        "return x": "caught by tests/part/test_more.py::test_clip",
        "return top": "caught by tests/part/test_one.py::test_clip",
    }, done.stderr
    assert "3 of 4 caught; survivors: [" in done.stdout
    assert done.returncode == 1
    assert (
        Path(tmp_path, "fluxutils_py/part/one.py")
        .read_text()
        .startswith("def clip(x, top=3):\n    if x > top:")
    )
