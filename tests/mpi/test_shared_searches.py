"""Searches whose fits the ranks of mpirun share, by joblib's backend of
``fluxutils_py.parallel.joblib_mpi``.
"""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_find_what_one_process_finds(ran, n):
    ran("shared_searches", n)


@pytest.mark.slow
def test_no_rank_waits_for_one_that_died_in_a_task(mpirun_command, start, python):
    status, out, err = start(
        [*mpirun_command, "-n", 2, python, PROGRAMS / "dying_task.py"], timeout=300
    )
    assert status not in (0, None), out + err


@pytest.mark.slow
def test_only_rank_0_runs_the_script(mpirun_command, start, python):
    program = (
        "import joblib, fluxutils_py\nwith joblib.parallel_config('mpi'): joblib.Parallel()([])"
    )
    command = [*mpirun_command, "-n", 2, python, "-m", "mpi4py.futures", "-c", program]
    status, _, err = start(command, timeout=300)
    assert status != 0
    assert "runs the script on rank 0 only" in err
