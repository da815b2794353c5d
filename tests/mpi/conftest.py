"""Start programs under mpirun, with a time limit that kills them all."""

import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fluxutils_py

PROGRAMS = Path(__file__).parent / "programs"
TOGETHER = {  # programs that one mpirun runs, by number of ranks, and one torchrun of two ranks
    "torchrun": ["law6", "sharded"],
    2: ["law6", "collectives", "event_files", "forecasting", "unequal", "writers", "shared_trials"],
    3: [
        "law6",
        "evaluation",
        "tasks",
        "ways_to_train",
        "failing_ways",
        "faults",
        "sharded",
        "hangs",
    ],
    4: ["elastic"],
}
NEEDED = {"event_files": "tensorboard", "forecasting": "pandas", "shared_trials": "optuna"}
# the package, in this checkout or where it is installed, and the tests
PYTHONPATH = os.pathsep.join(
    str(Path(file).resolve().parents[n]) for file, n in [(fluxutils_py.__file__, 1), (__file__, 2)]
)


@functools.cache
def launcher():
    """mpirun with flags that let more ranks run than there are cores, and as root; None if it does
    not work here.
    """
    beside = Path(sys.executable).parent  # in a virtual environment that need not be activated
    mpirun = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpirun is None:
        return None
    # Open MPI, MPICH
    for flags in (
        ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
        [],
    ):
        done = subprocess.run([mpirun, *flags, "-n", "2", "true"], capture_output=True, timeout=300)
        if done.returncode == 0:
            return [mpirun, *flags]
    return None


def run(command, timeout, environment=None):
    """Run a command in a process group of its own, which does not outlive it; returns status,
    stdout, stderr.
    """
    # cores are shared
    ours = {
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    env = {**os.environ, **ours, **(environment or {})}
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        out, err = started.communicate()
        raise AssertionError(
            f"still running after {timeout} s:\n{out[-3000:]}\n{err[-6000:]}"
        ) from None
    return started.returncode, out, err


@pytest.fixture(scope="session")
def start():
    """``start(command, timeout=300)``: run a command; it and its children are killed when the time
    is over.
    """
    return lambda command, timeout=240, **environment: run(
        [str(c) for c in command], timeout, environment
    )


@pytest.fixture(scope="session")
def mpirun_command():
    """How mpirun is called here."""
    pytest.importorskip("mpi4py")
    if launcher() is None:
        pytest.skip("no mpirun that can start programs")
    return launcher()


@pytest.fixture(scope="session")
def torchrun(python):
    """``torchrun(n)``: how torchrun is called here, for n ranks."""
    return lambda n: [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(n),
    ]


@pytest.fixture(scope="session")
def mpirun(mpirun_command, python):
    """``mpirun(program, n, *args)``: run a program of programs/ on n ranks; it must end well, and
    in time.
    """

    def started(program, n, *args, timeout=240, status=0):
        command = [*mpirun_command, "-n", str(n), python, PROGRAMS / program, *args]
        code, out, err = run([str(c) for c in command], timeout)
        assert code == status, (
            f"{program} on {n} ranks ended with {code}\n{out[-3000:]}\n{err[-6000:]}"
        )
        return out, err

    return started


@pytest.fixture(scope="session")
def ran(request, start, torchrun, tmp_path_factory):
    """``ran(program, n)``: the folder of a program of TOGETHER that ran on n ranks, once for all
    tests and workers.
    """

    def run_all(n, *args):
        if n == "torchrun":
            code, out, err = start([*torchrun(2), PROGRAMS / "run_all.py", *args])
            assert code == 0, f"{out[-3000:]}\n{err[-6000:]}"
        else:
            request.getfixturevalue("mpirun")("run_all.py", n, *args, timeout=600)

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(program, n):
        if n != "torchrun":
            request.getfixturevalue("mpirun_command")  # skips the test if there is none
        if program in NEEDED:
            pytest.importorskip(NEEDED[program])
        folder = base / f"ranks-{n}"
        with open(base / f"ranks-{n}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                programs = [name for name in TOGETHER[n] if find_spec(NEEDED.get(name, "pytest"))]
                for name in programs:
                    (folder / name).mkdir(parents=True)
                try:
                    run_all(n, folder, *programs)
                except AssertionError as error:
                    (folder / "failed").write_text(str(error))
        if not (folder / program / "done").exists():
            pytest.fail((folder / "failed").read_text())
        return folder / program

    return folder_of
