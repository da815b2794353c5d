"""The benchmarks are programs in a folder, not a package: their modules are imported as they import
each other.
"""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """``module(name)``: a module of the benchmarks; forgotten after the test, since their names are
    anybody's.
    """
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name, loaded in list(sys.modules.items()):
        if (getattr(loaded, "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]
