"""Where the package runs: one command, ``nox``, from the root of the repository.

A session is an environment of its own: Python 3.11 to 3.14 with the newest and with the lowest
versions that setup.cfg allows, the lowest versions of the extras, no compiler, no extra, each
extra alone, the wheel and the source distribution, and which versions pip finds for each extra.
``nox --list`` names them; ``nox -s "tests-3.12(newest)" -- tests/nn`` runs one, with other tests
than all. Sessions whose Python is missing are skipped.

``pip install nox uv`` installs what this needs; without uv, pip makes the environments, more
slowly, and lowest_extras cannot run. What their environment variables say holds here too:
``UV_TORCH_BACKEND=cpu`` takes torch without CUDA, ``UV_CONSTRAINT=FILE`` holds versions fixed.
"""

import configparser
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "no"
os.environ.setdefault(
    "UV_COMPILE_BYTECODE", "1"
)  # as pip does: the tests start hundreds of processes

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
PYTEST = ["python", "-m", "pytest", "-n", "3", "--dist", "worksteal"]
WITHOUT_KERNELS = {"CXX": "false"}  # a compiler that always fails

# what each extra is for
TESTS_OF_EXTRAS = {
    "plot": ["tests/estimator/test_display.py", "tests/test_main.py"],
    "mpi": ["tests/parallel", "tests/mpi"],
    "tensorboard": ["tests/reporting", "tests/bobbin"],
    "pandas": ["tests/estimator/test_feature_names.py", "tests/inputs/test_inputs.py"],
    "forecast": ["tests/forecasting"],
    "hierarchy": ["tests/forecasting/test_hierarchy.py"],
    "frame": ["tests/inputs/test_frame_rows.py", "tests/inputs/test_frame_series.py"],
    "zarr": ["tests/data/test_zarr_stores.py"],
    "track": ["tests/reporting/test_track.py"],
    "export": ["tests/exporting", "tests/estimator/test_model_export.py"],
    "notebook": ["tests/test_notebooks.py"],
    "search": ["tests/estimator/test_dask_search.py", "tests/training/test_optuna_pruning.py"],
    "peers": ["tests/benchmarks"],
}
# what these tests import beyond the extra
MORE_FOR_TESTS = {
    "forecast": ["polars"],
    "hierarchy": ["polars"],
    "frame": ["polars"],
    "zarr": ["xarray"],
}
OF_DEVELOPERS = {"test", "docs", "dev"}


def extras() -> list[str]:
    """The extras of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).parent / "setup.cfg", "utf-8")
    return list(config["options.extras_require"])


if missing := set(extras()) - OF_DEVELOPERS - set(TESTS_OF_EXTRAS):
    raise ValueError(
        f"TESTS_OF_EXTRAS in noxfile.py lacks {sorted(missing)}, which are extras in setup.cfg"
    )


@nox.session(python=PYTHONS)
@nox.parametrize("versions", ["newest", "lowest"], ids=["newest", "lowest"])
def tests(session: nox.Session, versions: str) -> None:
    """The tests with the newest or the lowest versions that setup.cfg allows."""
    constraints = ["-c", "constraints-lowest.txt"] if versions == "lowest" else []
    session.install(*constraints, "-e", ".[test]")
    show_and_test(session, *session.posargs)


@nox.session(python=PYTHONS[0], venv_backend="uv")
def lowest_extras(session: nox.Session) -> None:
    """The tests with the lowest versions of what the extras need too, which uv finds."""
    lowest = ["--resolution", "lowest-direct", "-c", "constraints-lowest.txt"]
    session.install(*lowest, "-e", ".[test]")
    show_and_test(session, *session.posargs)


@nox.session(python=False)
def emulation(session: nox.Session) -> None:
    """The kernels for ARM under emulation, as ``.ci/run`` runs them; a line where tools lack."""
    session.run("tests/nn/emulation/run", *session.posargs, external=True)


@nox.session(python=PYTHONS[0])
def no_compiler(session: nox.Session) -> None:
    """The tests where the kernels cannot be built."""
    remove_kernels()
    session.install("-e", ".[test]", env=WITHOUT_KERNELS)
    session.run(
        "python", "-c", "from fluxutils_py.nn.kernels import library; assert library() is None"
    )
    show_and_test(session, *session.posargs)


@nox.session(python=PYTHONS[0])
def no_extra(session: nox.Session) -> None:
    """The tests that need no extra; the others are skipped, each with what it lacks."""
    session.install("-e", ".", "pytest", "pytest-xdist")
    import_everything(session)
    show_and_test(session, "-p", "tests.missing_extras", *session.posargs)


@nox.session(python=PYTHONS[0])
@nox.parametrize("extra", list(TESTS_OF_EXTRAS), ids=list(TESTS_OF_EXTRAS))
def extra(session: nox.Session, extra: str) -> None:
    """An extra alone: all modules can be imported, its tests pass."""
    session.install("-e", f".[{extra}]", "pytest", "pytest-xdist", *MORE_FOR_TESTS.get(extra, []))
    import_everything(session)
    show_and_test(
        session, "-p", "tests.missing_extras", *(session.posargs or TESTS_OF_EXTRAS[extra])
    )


@nox.session(python=PYTHONS[0])
def package(session: nox.Session) -> None:
    """A wheel and a source distribution, built in isolation; the tests of the one against the
    other, installed.
    """
    folder = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder))
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        if lacking := {"fluxutils_py/nn/_kernels.so", "fluxutils_py/py.typed"} - set(
            file.namelist()
        ):
            session.error(f"{wheel.name} lacks {sorted(lacking)}")
    with tarfile.open(sdist) as file:
        file.extractall(folder, filter="data")
    clone = folder / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(clone / "fluxutils_py")  # what is imported below is installed
    session.install(f"fluxutils_py[test] @ {wheel.as_uri()}")
    session.chdir(clone)
    show_and_test(session, *(session.posargs or ["tests"]))


@nox.session(python=PYTHONS)
def resolve(session: nox.Session) -> None:
    """Versions that fit each other exist for every extra; nothing is installed."""
    for name in extras():
        session.install("--dry-run", f".[{name}]")


def show_and_test(session: nox.Session, *arguments: str) -> None:
    """Say which versions are tested, then test."""
    session.run(
        "python",
        "-c",
        "import fluxutils_py; print(fluxutils_py.__file__); fluxutils_py.show_versions()",
    )
    session.run(*PYTEST, *arguments, env={"OMP_NUM_THREADS": "1"})


def import_everything(session: nox.Session) -> None:
    """Import each module of the package: none needs an extra before it is used."""
    session.run(
        "python",
        "-c",
        "import importlib, pkgutil, fluxutils_py\n"
        "names = [m.name for m in pkgutil.walk_packages(fluxutils_py.__path__, 'fluxutils_py.')]\n"
        "found = [importlib.import_module(n) for n in names if '._' not in n]\n"
        "print(len(found), 'modules')",
    )


def remove_kernels() -> None:
    """Remove the library that an earlier build has left in this clone."""
    for path in Path("fluxutils_py", "nn").glob("_kernels.so"):
        os.remove(path)
