"""The Python of the fixture ``python``, from tests/programs/preloaded_python.py, compared with a
real one.
"""

import json
import os
import signal
import subprocess
import sys
import time

import h5py
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the fixture gives a real one"
)

SHOW = """
import json, os, sys
sys.stdout.write(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "name": __name__, "said": sys.stdin.read(),
    "given": os.environ.get("GIVEN"), "home": os.environ.get("HOME"), "here": sorted(globals())[-3:],
}))
sys.stderr.write("to stderr")
sys.exit(7)
"""


def ends(executable, *arguments, **how):
    done = subprocess.run(
        [executable, *map(str, arguments)], capture_output=True, text=True, timeout=300, **how
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("way", ["-c", "file", "-m", "-u"])
def test_a_program_sees_what_it_sees_in_a_real_one(python, tmp_path, way):
    (tmp_path / "shown.py").write_text(SHOW)
    start = {
        "-c": ["-c", SHOW],
        "file": ["shown.py"],
        "-m": ["-m", "shown"],
        "-u": ["-u", tmp_path / "shown.py"],
    }[way]
    how = {"cwd": tmp_path, "env": {"GIVEN": "\udcff ä", "PATH": os.environ["PATH"]}, "input": "in"}
    real = ends(sys.executable, *start, "a b", "-c", **how)
    assert json.loads(real[1])["argv"][1:] == ["a b", "-c"]
    assert ends(python, *start, "a b", "-c", **how) == real


def test_its_program_has_the_package_at_once_and_mpi_not(python):
    program = (
        "import sys; print([m in sys.modules for m in ('torch', 'fluxutils_py', 'mpi4py')], torch)"
    )
    status, out, err = ends(python, "-c", program)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("NameError: name 'torch' is not defined")
    assert ends(python, "-c", program.replace(", torch)", ")"))[1] == "[True, True, False]\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_signals_go_to_the_program_and_its_end_by_a_signal_comes_back(python, number):
    program = "import os, signal, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([python, "-c", program], stdout=subprocess.PIPE, text=True) as started:
        child = int(started.stdout.readline())
        assert child != started.pid
        started.send_signal(number)
        assert started.wait(timeout=300) == -number
    deadline = time.monotonic() + 60
    # of one that was killed itself, the server ends the program
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_is_killed_at_any_moment_ends_no_other(python):
    for i in range(12):
        with subprocess.Popen([python, "-c", "import time; time.sleep(60)"]) as started:
            time.sleep(0.004 * i)
            started.kill()
    assert ends(python, "-c", "print('here')")[1] == "here\n"


def test_the_end_of_the_program_by_a_signal_is_that_of_the_process(python):
    assert ends(python, "-c", "import os; os.kill(os.getpid(), 9)")[0] == -signal.SIGKILL


def test_it_ends_after_what_is_registered(python, finalized_python):
    program = "import atexit, sys; atexit.register(print, 'registered'); sys.exit(3)"
    for executable in (sys.executable, finalized_python, python):
        assert ends(executable, "-c", program) == (3, "registered\n", "")


def test_a_file_that_the_program_leaves_open_is_whole(python, tmp_path):
    assert (
        ends(
            python,
            "-c",
            "import sys, h5py; f = h5py.File(sys.argv[1], 'w'); f['x'] = 7",
            tmp_path / "x",
        )[0]
        == 0
    )
    with h5py.File(tmp_path / "x") as file:
        assert file["x"][()] == 7


def test_a_program_handles_a_signal(python):
    program = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(33))
print("ready", flush=True)
while True:  # of a signal that comes just before it, one long sleep would not hear
    time.sleep(0.01)
"""
    with subprocess.Popen([python, "-c", program], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout.readline() == "ready\n"
        started.send_signal(signal.SIGUSR1)
        assert started.wait(timeout=300) == 33


def test_all_open_files_are_handed_over_under_their_numbers(python):
    reads, writes = os.pipe()
    program = f"import os; os.write({writes}, b'through the pipe')"
    assert subprocess.run([python, "-c", program], pass_fds=[writes], timeout=300).returncode == 0
    os.close(writes)
    with open(reads, "rb") as pipe:
        assert pipe.read() == b"through the pipe"


def test_workers_of_joblib_are_forked_and_know_functions_of_the_script(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
import joblib
import torch.multiprocessing

def where(i):
    return i, os.getpid(), "fluxutils_py" in sys.modules

if __name__ == "__main__":
    for backend in ("loky", "multiprocessing"):
        found = joblib.Parallel(2, backend=backend)(joblib.delayed(where)(i) for i in range(4))
        assert [i for i, *_ in found] == [0, 1, 2, 3], found
        assert os.getpid() not in {pid for _, pid, _ in found}
        assert all(imported for *_, imported in found), found  # where takes only what it names along
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(where, [7])[0][0] == 7
""")
    status, _, err = ends(python, script)
    assert status == 0, err


def test_options_that_it_does_not_know_start_a_real_one(python):
    assert ends(python, "-X", "utf8", "-c", "import sys; print('torch' in sys.modules)")[:2] == (
        0,
        "False\n",
    )
