"""A release says the same of itself in all files, and the matrix covers what the metadata promise."""

import ast
import configparser
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import fluxutils_py
from fluxutils_py import validation
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


def test_lowest_constraints_are_the_bounds_of_the_metadata():
    bounds = dict(line.split(">=") for line in lines(SETUP["options"]["install_requires"]))
    lowest = {}
    for line in lines(text_of("constraints-lowest.txt")):
        name, version = re.match(r"([\w-]+)==([\d.]+)", line).groups()
        lowest.setdefault(name, Version(version))
    of_tests = {"pytest": Version("8.2"), "pyparsing": Version("3.2.5")}
    assert lowest == {name: Version(bound) for name, bound in bounds.items()} | of_tests


EXTRAS = {name: lines(value) for name, value in SETUP["options.extras_require"].items()}


def test_messages_and_all_name_the_packages_of_the_extras():
    (of_users,) = re.findall(r"^fluxutils_py\[(.*)\]$", EXTRAS["all"][0])
    assert {*of_users.split(","), "all", "test", "docs", "dev"} == set(EXTRAS)
    packages = {n: " ".join(re.match(r"[\w-]+", r)[0] for r in EXTRAS[n]) for n in EXTRAS}
    assert {n: packages[n] for n in validation.EXTRAS} == validation.EXTRAS
    assert EXTRAS["test"][0] == "fluxutils_py[all]"


@pytest.mark.slow
def test_no_index_is_asked_for_this_package_and_every_extra_in_a_clone_exists():
    """Nobody has published it: what installs it does so in a clone."""
    folders = (".github", "benchmarks", "docs", "fluxutils_py", "notebooks")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*")]
    found = {}
    for path in (*ROOT.iterdir(), *(ROOT / ".ci").iterdir(), *paths):
        if path.suffix not in {"", ".ipynb", ".md", ".py", ".sh", ".txt", ".yml"} or path.is_dir():
            continue
        text = path.read_text("utf-8").replace("\\", "")
        asked = re.findall(r"fluxutils.py\[(?!\w+\] @ )|pip install fluxutils.*", text)
        extras = re.findall(r"""["' ]\.\[([\w,]+)\]["'\n]""", text)
        unknown = set(",".join(extras).split(",")) - {"", *EXTRAS}
        if asked or unknown:
            found[str(path.relative_to(ROOT))] = [*asked, *unknown]
    assert found == {}


def test_the_matrix_has_every_python_of_the_metadata():
    classified = re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$", SETUP["metadata"]["classifiers"], re.M
    )
    pythons = from_noxfile("PYTHONS")
    assert classified == pythons
    assert SETUP["options"]["python_requires"] == f">={pythons[0]}"


def workflow(name):
    """Its jobs, and what they run."""
    yaml = pytest.importorskip("yaml")
    made = yaml.safe_load(text_of(f".github/workflows/{name}.yml"))
    steps = {name: job["steps"] for name, job in made["jobs"].items()}
    return made, steps, [step["run"] for job in steps.values() for step in job if "run" in step]


def test_a_change_runs_five_sessions_with_kernels_that_are_built_once():
    made, steps, runs = workflow("ci")
    sessions = {
        node.name
        for node in ast.parse(text_of("noxfile.py")).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }
    chosen = json.loads(made["env"]["SESSIONS"])
    assert len(chosen) == 5
    assert {name.partition("-")[0] for name in chosen} <= sessions
    assert sum("build_ext" in run for run in runs) == 1
    _, setup, _, _, last = steps["session"]
    assert sorted(setup["with"]["python-version"].split()) == from_noxfile("PYTHONS")
    assert last["env"]["FLUXUTILS_BUILT_KERNELS"].endswith("build/_kernels.so")
    assert last["run"] == 'nox --error-on-missing-interpreters --session "${{ matrix.session }}"'


def test_a_release_is_tested_and_published_by_a_tag_alone():
    made, _, _ = workflow("release")
    assert made["jobs"]["publish"]["if"] == "github.event_name == 'push'"
    assert made["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert set(made["jobs"]["publish"]["needs"]) == {"sdist", "wheel"}
    assert made[True]["push"] == {"tags": ["v*"]}  # YAML reads "on" so
    settings = tomllib.loads(text_of("pyproject.toml"))["tool"]["cibuildwheel"]
    assert settings["environment"] == {"FLUXUTILS_REQUIRE_KERNELS": "1"}
    assert (ROOT / settings["test-command"].removeprefix("python {project}/")).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({"CXX": "false"}, False),
        ({"CXX": "false", "FLUXUTILS_REQUIRE_KERNELS": "1"}, None),
        ({"CXX": "false", "FLUXUTILS_BUILT_KERNELS": "setup.cfg"}, True),
        ({"FLUXUTILS_BUILT_KERNELS": "none.so", "FLUXUTILS_REQUIRE_KERNELS": "1"}, None),
    ],
)
def test_a_build_without_kernels_ends_or_fails_as_asked(settings, there, tmp_path):
    folders = ["--build-lib", str(tmp_path), "--build-temp", str(tmp_path / "temp")]
    library = tmp_path / "fluxutils_py" / "nn" / "_kernels.so"
    library.parent.mkdir(parents=True)
    library.touch()  # of an earlier build
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if there is None:
        assert done.returncode != 0
    else:
        assert done.returncode == 0, done.stderr
        assert library.exists() == there
        assert ("native kernels are left out" in done.stderr) != there


def test_the_source_distribution_takes_along_what_builds_and_the_tests():
    manifest = text_of("MANIFEST.in")
    assert re.findall(r"^graft (.*)$", manifest, re.M) == ["csrc", "tests"]


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
