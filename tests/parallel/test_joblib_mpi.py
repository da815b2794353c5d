"""joblib's backend "mpi" without ranks; tests/mpi/test_shared_searches.py has ranks."""

import subprocess
from concurrent.futures import Future
from types import SimpleNamespace

import joblib
import numpy as np
import pytest

from fluxutils_py.parallel import joblib_mpi, launcher
from fluxutils_py.parallel.rank_group import RankGroup


def test_one_process_does_one_task_after_the_other():
    done = []
    with joblib.parallel_config("mpi"):
        assert launcher.in_shared_search()
        assert (
            joblib.Parallel(n_jobs=3)(joblib.delayed(done.append)(i) for i in range(4))
            == [None] * 4
        )
    assert done == [0, 1, 2, 3]
    assert not launcher.in_shared_search()


def test_torchrun_is_refused(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with (
        joblib.parallel_config("mpi"),
        pytest.raises(ValueError, match="torchrun started these; use mpirun -n 4"),
    ):
        joblib.Parallel()(joblib.delayed(abs)(i) for i in range(4))


def test_tasks_are_compared_by_their_plain_arguments_and_folds():
    a = {"lr": 0.1, "cell": object(), "train": np.arange(3), "x": np.ones(3), "nested": [(1, "a")]}
    b = {**a, "cell": object(), "x": np.zeros(3)}
    assert joblib.hash(joblib_mpi._plain_outline(a)) == joblib.hash(joblib_mpi._plain_outline(b))
    for name, other in {
        "lr": 0.2,
        "train": np.arange(1, 4),
        "nested": [(1, "b")],
        "cell": 3,
    }.items():
        assert joblib.hash(joblib_mpi._plain_outline(a)) != joblib.hash(
            joblib_mpi._plain_outline({**a, name: other})
        ), name


def test_after_a_failure_no_further_task_begins(monkeypatch):
    done = []
    monkeypatch.setattr(joblib_mpi, "_shared", [lambda i=i: done.append(i) for i in range(5)])
    elsewhere = [Future() for _ in range(5)]
    elsewhere[0].set_result((True, b"failed on another rank"))
    elsewhere[1].set_result((False, b""))
    executor = SimpleNamespace(submit=lambda task, i: elsewhere[i])
    found = joblib_mpi._run_tasks(executor, RankGroup(), 5)
    assert found == [(True, b"failed on another rank"), (False, b"")]
    assert not done


def test_importing_the_package_registers_it_and_starts_nothing(python):
    program = (
        "import joblib, sys, fluxutils_py; assert not [m for m in sys.modules if "
        "m.startswith('mpi4py')]; joblib.parallel_config('mpi'); assert not [m for m in "
        "sys.modules if m.startswith('mpi4py')]"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
