"""What the variables of launchers say."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fluxutils_py.parallel.launcher import detect_launcher, local_rank

VARIABLES = [
    "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK",
    "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpi"),
        ({"PMI_SIZE": "2"}, "mpi"),
        ({"PMI_SIZE": ""}, None),
        ({"PMIX_RANK": "0"}, None),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "3"}, "mpi"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, "torch"),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2"}, None),
        (
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "PMI_SIZE": "2"},
            "torch",
        ),  # srun started torchrun
    ],
)
def test_launchers_are_known_by_their_variables(monkeypatch, variables, launcher):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert detect_launcher() == launcher


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"LOCAL_RANK": "1"}, 1),
        ({"SLURM_LOCALID": "3"}, 3),
    ],
)
def test_the_place_on_the_machine_is_known(monkeypatch, variables, rank):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_rank() == rank


def test_other_threads_have_no_launcher(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(detect_launcher).result() is None
