"""What MPI and torch.distributed have in common, tried on one that is neither."""

import contextlib
import copy
import pickle

import pytest

from fluxutils_py.parallel.communicator import LaunchedComm, SingleProcessComm, describe_by_rank, name_ranks
from fluxutils_py.parallel.mpi import MPIComm
from fluxutils_py.parallel.torch_distributed import TorchComm


class Late(LaunchedComm):
    """Rank 0 of 3, of which rank 2 comes to a barrier after some looks."""

    launcher, rank, size, patience = "none", 0, 3, 0.03
    name_server = True

    def __init__(self, looks):
        self.looks, self.keys = looks, []

    def is_open(self):
        return True

    def _start_barrier(self):
        self.keys.append(self._key(1))
        looks = iter(range(self.looks))
        return lambda: next(looks, None) is None

    @contextlib.contextmanager
    def _publish(self, key):
        self.keys.append(key)
        yield
        self.keys.remove(key)

    def _is_published(self, key):
        return self.name_server and key in self.keys


@pytest.mark.parametrize("name_server", [True, False])
def test_a_barrier_names_the_ranks_that_are_missing(name_server):
    comm, missing = Late(18), []
    comm.name_server = name_server
    comm.monitored_barrier(lambda ranks, seconds: missing.append((ranks, seconds)))
    assert {str(ranks) for ranks, _ in missing} == {"[2]" if name_server else "None"}
    assert missing[0][1] > comm.patience
    assert comm._key(0) not in comm.keys


def test_a_barrier_that_all_have_reached_says_nothing():
    comm, missing = Late(0), []
    comm.monitored_barrier(lambda *told: missing.append(told))
    assert missing == []


@pytest.mark.parametrize("kind", [MPIComm, TorchComm])
def test_without_a_launcher_a_copy_from_elsewhere_is_one_process(kind):
    comm = kind.__new__(kind)  # without starting MPI
    assert copy.deepcopy(comm) is comm
    assert isinstance(pickle.loads(pickle.dumps(comm)), SingleProcessComm)


def test_values_of_ranks_in_words():
    assert describe_by_rank([1, 2, 1, 1]) == "1 on ranks 0, 2 and 3, 2 on rank 1"
    assert name_ranks([2]) == "rank 2"
