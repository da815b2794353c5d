"""The library of native kernels: found or not, switched on or off, in threads and in forked
processes.
"""

import importlib.metadata
import os
import subprocess
import warnings

import pytest
import torch

from fluxutils_py import show_versions
from fluxutils_py.nn import LSTM, native_kernels
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels.library import kernels_in_use

ISAS = [name for name in kernels.ISAS if kernels.supports(name)]
built = pytest.mark.skipif(not ISAS, reason="the kernels are not built")

X = torch.linspace(-1, 1, 7 * 20 * 3).reshape(7, 20, 3)


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not used the kernels yet; the variable that switches them off is not
    set.
    """
    monkeypatch.setattr(kernels, "_use", kernels._Use())
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    return monkeypatch


def in_a_process(python, program, **environment):
    """What a program prints."""
    done = subprocess.run(
        [python, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**{k: v for k, v in os.environ.items() if k != kernels.SWITCH}, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def backward_of(y):
    return type(y.grad_fn).__name__


@built
def test_layers_use_the_kernels_without_being_asked(fresh):
    assert backward_of(LSTM(3, 5)(X)) == "_RecurrenceBackward"
    assert kernels_in_use() == f"native kernels, {ISAS[-1] if 'neon' not in ISAS else 'neon'}"


@built
def test_the_context_manager_switches_them_off_and_back(fresh):
    layer = LSTM(3, 5)
    with native_kernels(False):
        assert backward_of(layer(X)) != "_RecurrenceBackward"
        assert kernels_in_use() == "torch's layers: switched off by native_kernels(False)"
        with native_kernels():
            assert backward_of(layer(X)) == "_RecurrenceBackward"
        assert backward_of(layer(X)) != "_RecurrenceBackward"
    assert backward_of(layer(X)) == "_RecurrenceBackward"


def test_the_environment_switches_them_off_for_good_and_without_a_word(fresh):
    fresh.setenv(kernels.SWITCH, "0")
    with native_kernels(True):  # a warning would be an error
        assert backward_of(LSTM(3, 5)(X)) != "_RecurrenceBackward"
    assert kernels_in_use() == "torch's layers: FLUXUTILS_KERNELS=0"


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_names_an_instruction_set(isa, fresh):
    fresh.setenv(kernels.SWITCH, isa)
    assert kernels_in_use() == f"native kernels, {isa}"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (
            "no library",
            "_kernels.so is missing: it is built by pip install on x86-64 and 64-bit ARM where",
        ),
        ("an old processor", "this processor lacks "),
        ("a damaged library", "file too short"),
        ("another library", "undefined symbol"),
        (
            "another version",
            f"_kernels.so is of version {kernels.VERSION}, expected 1: install the",
        ),
        (
            "an unknown word",
            "FLUXUTILS_KERNELS is 'sse9', expected 0, 1 or one of avx2, avx512, neon",
        ),
    ],
)
def test_whatever_is_missing_torchs_layers_are_used_and_one_warning_says_why(
    what, reason, fresh, tmp_path
):
    if what in ("an old processor", "another version") and not ISAS:
        pytest.skip("the kernels are not built")
    path = tmp_path / "_kernels.so"
    if what == "no library":
        fresh.setattr(kernels, "PATH", path)
    elif what == "an old processor":
        fresh.setenv(kernels.SWITCH, "avx2" if "neon" in ISAS else "neon")
    elif what == "a damaged library":
        path.write_bytes(b"\x7fELF")
        fresh.setattr(kernels, "PATH", path)
    elif what == "another library":
        import _ctypes

        fresh.setattr(kernels, "PATH", kernels.Path(_ctypes.__file__))
    elif what == "another version":
        fresh.setattr(kernels, "VERSION", 1)
    else:
        fresh.setenv(kernels.SWITCH, "sse9")
        if not ISAS:
            path.touch()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            assert backward_of(LSTM(3, 5)(X)) != "_RecurrenceBackward"
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert reason in str(warning.message)
    assert f"{kernels.SWITCH}=0" in str(warning.message)
    assert reason in kernels_in_use()


def test_show_versions_says_what_is_used(capsys):
    show_versions()
    lines = dict(
        line.split(maxsplit=1)
        for line in capsys.readouterr().out.splitlines()
        if "layers" not in line
    )
    assert lines["torch"] == importlib.metadata.version("torch")
    with native_kernels(False):
        show_versions()
    assert capsys.readouterr().out.splitlines()[-1].startswith("recurrent layers  torch's layers: ")


# -- threads -------------------------------------------------------------------------------------------


def test_as_many_threads_as_torch_has(fresh):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert kernels.n_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_thread_where_every_core_has_a_rank(variable, fresh):
    fresh.setattr(torch, "get_num_threads", lambda: 4)
    for ranks, threads in (("1", 4), ("2", 1)):
        fresh.setenv(variable, ranks)
        fresh.setattr(kernels, "_use", kernels._Use())
        kernels.library_in_use()
        assert kernels.n_threads() == threads


PROCESSES = """
import multiprocessing, os, time, torch
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.kernels import library as kernels
torch.set_num_threads(3)
torch.manual_seed(0)
layer, x = LSTM(10, 10), torch.randn(50, 400, 10)
weight = torch.randn(50, 400, 10)  # no operation of torch's is large enough for its threads, which forking breaks

def gradient():
    layer.reset()
    return torch.autograd.grad(layer(x), list(layer.parameters()), weight)

def threads_of_worker(_):
    kernels.library_in_use()
    return kernels.n_threads()

expected = gradient()  # starts the threads
print("threads", kernels.n_threads())
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(map(torch.equal, gradient(), expected)) else 1)
    children.append(child)
print("children", *[os.waitpid(c, 0)[1] for c in children], all(map(torch.equal, gradient(), expected)))
with multiprocessing.get_context("fork").Pool(1) as pool:
    print("worker", *pool.map(threads_of_worker, [None]))
before = time.process_time()
time.sleep(0.3)
print("idle", time.process_time() - before < 0.1)
"""


@pytest.mark.slow
@built
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_processes_have_threads_of_their_own_workers_one_and_those_that_wait_use_no_time(
    python,
):
    said = dict(line.split(maxsplit=1) for line in in_a_process(python, PROCESSES).splitlines())
    assert said == {"threads": "3", "children": "0 0 0 0 0 True", "worker": "1", "idle": "True"}
