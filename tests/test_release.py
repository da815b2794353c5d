"""A release says the same of itself in all files, and the matrix covers what the metadata promise."""

import ast
import configparser
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import fluxutils_py
from tests import missing_extras

ROOT = Path(__file__).resolve().parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", "utf-8")


def text_of(name):
    return (ROOT / name).read_text("utf-8")


def lines(value):
    """Lines of a list in setup.cfg, without comments."""
    return [line for line in value.splitlines() if line and not line.startswith("#")]


def from_noxfile(name):
    """A constant of noxfile.py, which imports nox."""
    for node in ast.parse(text_of("noxfile.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"no {name} in noxfile.py")


def test_version_and_date_are_those_of_the_changelog():
    version, date = re.search(
        r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", text_of("CHANGELOG.md"), re.MULTILINE
    ).groups()
    cited = dict(re.findall(r'^([\w-]+): "?([^"\n]+)"?$', text_of("CITATION.cff"), re.MULTILINE))
    assert (cited["version"], cited["date-released"]) == (version, date)
    assert fluxutils_py.__version__ == version
    assert SETUP["metadata"]["version"] == "attr: fluxutils_py.__version__"
    assert cited["license"] == SETUP["metadata"]["license_expression"]


def test_names_that_moved_are_where_the_changelog_says():
    rows = re.findall(
        r"^\| `(fluxutils_py\S*)`.* \| (`.*`) \| `(\S+)` \|$", text_of("CHANGELOG.md"), re.M
    )
    assert len(rows) == 10
    for before, names, now in rows:
        room = importlib.import_module(now)
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(room, name), f"{now}.{name}"
            if importlib.util.find_spec(before) is not None:
                assert name not in importlib.import_module(before).__all__, f"{before}.{name}"


def test_lowest_constraints_are_the_bounds_of_the_metadata():
    bounds = dict(line.split(">=") for line in lines(SETUP["options"]["install_requires"]))
    lowest = {}
    for line in lines(text_of("constraints-lowest.txt")):
        name, version = re.match(r"([\w-]+)==([\d.]+)", line).groups()
        lowest.setdefault(name, Version(version))
    of_tests = {"pytest": Version("8.2"), "pyparsing": Version("3.2.5")}
    assert lowest == {name: Version(bound) for name, bound in bounds.items()} | of_tests


def test_every_extra_of_users_is_among_those_of_the_tests():
    extras = SETUP["options.extras_require"]
    (of_tests,) = re.findall(r"^fluxutils_py\[(.*)\]$", extras["test"], re.MULTILINE)
    assert set(of_tests.split(",")) == set(extras) - {"peers", "test", "docs", "dev"}


def test_the_matrix_has_every_python_and_extra_of_the_metadata():
    classified = re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$", SETUP["metadata"]["classifiers"], re.M
    )
    pythons = from_noxfile("PYTHONS")
    assert classified == pythons
    assert SETUP["options"]["python_requires"] == f">={pythons[0]}"
    tests = from_noxfile("TESTS_OF_EXTRAS")
    assert set(tests) == set(SETUP["options.extras_require"]) - from_noxfile("OF_DEVELOPERS")
    assert [path for paths in tests.values() for path in paths if not (ROOT / path).exists()] == []


def test_the_workflow_runs_what_a_change_has_to_pass_and_each_session():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(text_of(".github/workflows/ci.yml"))["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["check"]["steps"]]
    setup, *_, last = jobs["matrix"]["steps"][1:]
    assert sorted(setup["with"]["python-version"].split()) == from_noxfile("PYTHONS")
    assert last["run"] == 'nox --error-on-missing-interpreters --session "${{ matrix.session }}"'


def test_the_source_distribution_takes_along_what_tests_read():
    manifest = text_of("MANIFEST.in")
    folders = ("csrc", "tests", "docs", "notebooks", "benchmarks", ".ci", ".github")
    assert [name for name in folders if f"graft {name}\n" not in manifest] == []


def test_an_import_by_a_test_of_what_is_not_installed_skips_it(monkeypatch):
    monkeypatch.setattr(missing_extras, "MISSING", {"no_such_package"})
    finder = missing_extras.SkipImports()
    with pytest.raises(pytest.skip.Exception, match=r"needs no_such_package\.part"):
        finder.find_spec("no_such_package.part")
    assert finder.find_spec("another_package") is None
    names = {"finder": finder}
    exec(compile("found = finder.find_spec('no_such_package')", "of_a_library.py", "exec"), names)
    assert names["found"] is None  # what catches ImportError goes on doing so
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    try:
        assert importlib.util.find_spec("no_such_package") is None  # it asks, and imports nothing
    except pytest.skip.Exception:
        pytest.fail("a question was taken for an import")
