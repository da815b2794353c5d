"""Where the package runs: one command, ``nox``, from the root of the repository.

A session is an environment of its own: the checks of the source, the tests with the newest versions
on Python 3.11 to 3.14, with the lowest versions that setup.cfg allows, without kernels, and without
extras, and the wheel and the source distribution. ``nox --list`` names them; ``nox -s newest-3.12
-- tests/nn`` runs one, with other tests than all. Sessions whose Python is missing are skipped.

``pip install nox uv`` installs what this needs; without uv, pip makes the environments, more
slowly, and ``lowest`` cannot run. What their environment variables say holds here too:
``UV_TORCH_BACKEND=cpu`` takes torch without CUDA, ``UV_CONSTRAINT=FILE`` holds versions fixed. The
kernels are built once for all sessions of a run, or taken from ``FLUXUTILS_BUILT_KERNELS``.
"""

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "no"
# as pip does: the tests start hundreds of processes
os.environ.setdefault("UV_COMPILE_BYTECODE", "1")

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
PYTEST = ["python", "-m", "pytest", "-n", "3", "--dist", "worksteal"]  # the first tier
EVERYTHING = ["-m", ""]
LIBRARY = Path("fluxutils_py", "nn", "_kernels.so")
WITH_KERNELS = {"FLUXUTILS_REQUIRE_KERNELS": "1"}
WITHOUT_KERNELS = {
    "CXX": "false",  # a compiler that always fails
    "FLUXUTILS_BUILT_KERNELS": "",
    "FLUXUTILS_REQUIRE_KERNELS": "",
}
# the source distribution has no pages, notebooks and benchmarks, which other tests read
TESTS_OF_PACKAGE = ["tests/nn", "tests/data", "tests/saving", "tests/forecasting"]


@nox.session(python=PYTHONS[0])
def checks(session: nox.Session) -> None:
    """Style, types, documentation and native code, with the versions of constraints.txt."""
    install(session, "-c", "constraints.txt", "-e", ".[dev]")
    session.run(".ci/checks", external=True)


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """All tests with the newest versions of other packages."""
    install(session, "-e", ".[test]")
    show_and_test(session, *EVERYTHING, *session.posargs)


@nox.session(python=PYTHONS[0], venv_backend="uv")
def lowest(session: nox.Session) -> None:
    """The first tier of tests with the lowest versions that setup.cfg allows, those of extras too."""
    versions = ["--resolution", "lowest-direct", "-c", "constraints-lowest.txt"]
    install(session, *versions, "-e", ".[test]")
    show_and_test(session, *session.posargs)


@nox.session(python=PYTHONS[0])
def no_kernels(session: nox.Session) -> None:
    """All tests where the kernels cannot be built, which a warning tells."""
    LIBRARY.unlink(missing_ok=True)  # of another session in this clone
    session.install("-e", ".[test]", env=WITHOUT_KERNELS)
    program = (
        "import warnings; from fluxutils_py.nn.kernels.library import library_in_use\n"
        "with warnings.catch_warnings(record=True) as caught: assert library_in_use() is None\n"
        "assert 'FLUXUTILS_KERNELS=0' in str(caught[0].message)"
    )
    session.run("python", "-c", program)
    show_and_test(session, *EVERYTHING, *session.posargs)


@nox.session(python=PYTHONS[0])
def no_extras(session: nox.Session) -> None:
    """The tests that need no extra; the others are skipped, each with what it lacks."""
    install(session, "-e", ".", "pytest", "pytest-xdist")
    program = (
        "import importlib, pkgutil, fluxutils_py\n"
        "names = [m.name for m in pkgutil.walk_packages(fluxutils_py.__path__, 'fluxutils_py.')]\n"
        "found = [importlib.import_module(n) for n in names if '._' not in n]\n"
        "print(len(found), 'modules')"
    )
    session.run("python", "-c", program)  # no module needs an extra before it is used
    show_and_test(session, "-p", "tests.missing_extras", *session.posargs)


@nox.session(python=PYTHONS[0])
def package(session: nox.Session) -> None:
    """A wheel and a source distribution, built in isolation as for a release; tests of the one
    against the other, installed.
    """
    folder = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder), env=WITH_KERNELS)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        if lacking := {str(LIBRARY), "fluxutils_py/py.typed"} - set(file.namelist()):
            session.error(f"{wheel.name} lacks {sorted(lacking)}")
    with tarfile.open(sdist) as file:
        file.extractall(folder, filter="data")
    clone = folder / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(clone / "fluxutils_py")  # what is imported below is installed
    session.install(f"fluxutils_py[test] @ {wheel.as_uri()}")
    session.chdir(clone)
    session.run("python", "tests/smoke.py")
    show_and_test(session, *(session.posargs or TESTS_OF_PACKAGE))


def install(session: nox.Session, *arguments: str) -> None:
    """Install with the kernels, which are compiled once in a run."""
    if not os.environ.get("FLUXUTILS_BUILT_KERNELS"):
        session.install("setuptools>=77")
        session.run("python", "setup.py", "build_ext", "--inplace", env=WITH_KERNELS)
        built = Path("build", LIBRARY.name).resolve()
        shutil.copy(LIBRARY, built)
        os.environ["FLUXUTILS_BUILT_KERNELS"] = str(built)
    session.install(*arguments, env=WITH_KERNELS)


def show_and_test(session: nox.Session, *arguments: str) -> None:
    """Say which versions are tested, then test."""
    session.run(
        "python",
        "-c",
        "import fluxutils_py; print(fluxutils_py.__file__); fluxutils_py.show_versions()",
    )
    session.run(*PYTEST, *arguments, env={"OMP_NUM_THREADS": "1"})
