"""Law 8 under mpirun: one of the ranks is killed, its fellows are ended with it, and all go on from
the checkpoint.

``tests/laws/test_law8_resume.py`` does the same with ranks of torch.distributed, 20 times.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fluxutils_py.training import Checkpointer

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "laws" / "programs" / "resume.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.slow
def test_a_fit_of_which_one_rank_after_the_other_is_killed_ends_as_if_it_had_not_been(
    tmp_path, mpirun_command, start, python
):
    folder = Checkpointer(tmp_path / "killed")
    command = [*mpirun_command, "-n", "2", python, str(PROGRAM), str(tmp_path), "mpi"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    reached = []
    for rank, until in enumerate((10, 29)):
        with subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, **quiet) as process:
            try:
                deadline = time.monotonic() + 120
                while folder.latest_step() < until:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                os.kill(int((tmp_path / f"process-{rank}").read_text()), signal.SIGKILL)
                assert process.wait(timeout=300) != 0
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert folder.read() is not None
        reached.append(folder.latest_step())
    status, out, err = start(command)
    assert status == 0, out + err
    assert reached[0] < reached[1] < 72
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"same": True, "steps": 72}] * 2
