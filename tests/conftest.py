"""What all tests share.

What takes long to import is imported in functions: pytest-xdist's controller reads this file too,
before it starts workers.
"""

import functools
import gc
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from itertools import combinations
from pathlib import Path

# One thread: the models are small, and two threads that wait for each other are slow where the
# cores are shared. Before torch is imported, so that it holds for its worker threads and for
# programs that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# What scikit-learn asks for before it dispatches to other array libraries. Before scipy is
# imported.
os.environ["SCIPY_ARRAY_API"] = "1"

import pytest
from _pytest.doctest import DoctestModule

# What one process has compiled the others read, whatever is asked for elsewhere: the workers of
# pytest-xdist would rewrite every test again in each run, and hundreds of programs compile the
# package, which takes a sixth of the time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Python's readline leaves the width of the terminal here, and tqdm before 4.68 cuts bars to it.
os.environ.pop("COLUMNS", None)

TESTS = Path(__file__).parent
# ``pytest`` alone does not put the root there, as ``python -m pytest`` does: processes that tests
# start take this path, and find helpers of the tests by it
if str(TESTS.parent) not in sys.path:
    sys.path.append(str(TESTS.parent))
# whose examples in docstrings take seconds
SLOW_EXAMPLES = ("model_export.py",)

# programs that tests start, not modules to import here
collect_ignore_glob = ["programs/*", "*/programs/*"]


def pytest_configure(config):
    """Naming files or single tests, without ``-m``, asks for all of them, slow ones too."""
    by_name = all("::" in arg or arg.endswith((".py", ".md")) for arg in config.args)
    is_asked = any(arg.startswith("-m") for arg in config.invocation_params.args)
    if config.args_source is config.ArgsSource.ARGS and by_name and not is_asked:
        config.option.markexpr = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Choose tests: those of the first tier, which are not slow, and those of everything.

    Of the combinations of several parameters, the first tier runs each value once, or one of them if
    the test is marked ``few``, and everything a covering of all pairs, or each value once if the test
    is marked ``apart``. Exports, programs under mpirun and notebooks come first, so that the workers
    of pytest-xdist end together: one of them begins with all, and what they have in common is made
    once.
    """
    matrices = {}
    for item in items:
        if row := values_by_axis(item):
            rows = matrices.setdefault((item.parent, item.originalname), {})
            rows[item] = row
    left_out = set()
    for tests in matrices.values():
        rows = list(tests.values())
        kept = first = range(len(rows))
        if len(rows[0]) > 1:
            apart = next(iter(tests)).get_closest_marker("apart")
            kept = covering(rows, 1 if apart else 2)
            first = [kept[i] for i in covering([rows[i] for i in kept], 1)]
            left_out.update(test for i, test in enumerate(tests) if i not in set(kept))
        if next(iter(tests)).get_closest_marker("few"):
            first = first[:1]
        for i, test in enumerate(tests):
            if i not in set(first):
                test.add_marker("slow")
    for item in items:
        # programs of ranks, which take a minute, are run once for all tests that ask for them
        if item.path.name in SLOW_EXAMPLES or "ran" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    config.hook.pytest_deselected(items=list(left_out))
    long = {
        TESTS / "exporting" / "test_running.py",  # one test of it takes minutes
        TESTS / "mpi",
        TESTS / "laws" / "test_law8_resume.py",
        TESTS / "test_notebooks.py",
    }
    items[:] = sorted(
        (item for item in items if item not in left_out),
        key=lambda item: long.isdisjoint((item.path, item.path.parent)),
    )


def values_by_axis(item):
    """What stands in each ``parametrize`` of a test, and in each fixture with parameters."""
    if not hasattr(item, "callspec"):
        return ()
    # by identity: values need not be hashable, and the tests of a function share them
    left = {name: id(value) for name, value in item.callspec.params.items()}
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(tuple(left.pop(name.strip(), None) for name in names))
    return (*axes, *left.values())


def covering(rows, n_together):
    """Return positions of rows that hold all that any one or two columns hold (together).

    Most faults that depend on parameters depend on one or two of them. Greedy and deterministic:
    the row with the most that is still missing comes next; of several, where single values are
    meant, the one whose values were chosen least.

    Parameters
    ----------
    rows : list of tuple
        Each as long as the others.
    n_together : 1 or 2

    Returns
    -------
    list of int
        In ascending order.
    """
    held = [frozenset(combinations(enumerate(row), n_together)) for row in rows]
    missing = frozenset().union(*held)
    chosen, uses = [], Counter()
    while missing:
        best = max(
            range(len(rows)),
            key=lambda i: (len(held[i] & missing), -sum(uses[each] for each in held[i]), -i),
        )
        chosen.append(best)
        uses.update(held[best] if n_together == 1 else ())
        missing -= held[best]
    return sorted(chosen)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no examples in docstrings, which looking for takes a second in each process."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave modules and tests, which all stay, out of garbage collections: each would take a third
    of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    """At the end they are taken apart as ever: extensions report objects that are left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same global generators, whichever tests ran before it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  scikit-learn still draws from the global generator
    # torch.manual_seed formats the stack for devices that may come later
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def power_does_not_fail():
    """Files are not forced to the disk, which is slow and helps when the power fails only; see
    test_files.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def rng():
    """A NumPy generator of its own for each test."""
    import numpy as np

    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def load_script():
    """Import a Python file that belongs to no package, by its path from the root of the repository."""

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, TESTS.parent / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


PRELOADED = TESTS / "programs" / "preloaded_python.py"
# the last: the first optimizer imports it
MODULES = (
    "fluxutils_py",
    "sklearn.model_selection",
    "torch._dynamo",
)


@pytest.fixture(scope="session")
def python():
    """An executable to start programs with: Python, which has imported the package already where it
    can be forked.

    For programs that are not about imports or the start of Python, which start ``sys.executable``,
    nor about its end, for which there is ``finalized_python``.
    """
    if sys.platform != "linux":
        yield sys.executable
        return
    import fluxutils_py

    folder = Path(tempfile.mkdtemp())
    for executable in (folder / "finalized", folder / "python"):
        executable.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {PRELOADED} start "$0" "$@"\n')
        executable.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, PRELOADED, "serve", str(listener.fileno()), *MODULES],
            stdin=subprocess.PIPE,  # its end is the server's
            env={
                **os.environ,
                "PYTHONPATH": str(Path(fluxutils_py.__file__).parents[1]),
            },  # checkout or wheel
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    yield str(executable)
    server.stdin.close()
    server.wait(timeout=300)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def finalized_python(python):
    """As ``python``; takes its modules apart at the end, as Python does."""
    return python if python == sys.executable else str(Path(python).with_name("finalized"))


@pytest.fixture
def forked_workers(python, monkeypatch):
    """Workers that joblib starts are forked from a Python that has imported the package.

    They end with the test: idle ones end after five minutes by themselves, and a task that comes at
    that moment is lost.
    """
    from joblib.externals.loky import get_reusable_executor

    monkeypatch.setattr(sys, "executable", python)
    yield
    get_reusable_executor().shutdown(wait=True, kill_workers=True)


@pytest.fixture(scope="session")
def onnx_operators_once():
    """All exports share one table of the operators that torch.onnx knows, for which it parses the
    source of each.
    """
    name = "torch.onnx._internal.exporter._registration"
    try:
        found = importlib.import_module(name)
    except (
        ModuleNotFoundError
    ):  # another version of torch, or no onnxscript, which tests that need it say
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(found.ONNXRegistry.from_torchlib)
        patch.setattr(found.ONNXRegistry, "from_torchlib", staticmethod(read))
        yield


@pytest.fixture(autouse=True)
def threads_of_torch_as_before():
    """What a test sets, such as the program of a benchmark, does not slow down those after it."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if before and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def two_torch_threads():
    """torch computes with two threads."""
    import torch

    torch.set_num_threads(2)


@pytest.fixture
def no_thread_stays():
    """Threads that a test starts have ended when it has; those that other tests left, of joblib, do
    not count.
    """
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


# -- event files as TensorBoard reads them ------------------------------------------------------------


@pytest.fixture(scope="session")
def accumulated():
    """``accumulated(folder)``: TensorBoard's own reader, with all that it found."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    everything = dict.fromkeys(accumulator.DEFAULT_SIZE_GUIDANCE, 0)
    return lambda folder: accumulator.EventAccumulator(
        str(folder), size_guidance=everything
    ).Reload()


@pytest.fixture(scope="session")
def scalars(accumulated):
    """``scalars(folder)``: the steps and values of each tag."""

    def read(folder):
        found = accumulated(folder)
        return {
            tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]
        }

    return read
