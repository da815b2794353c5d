"""Who takes part in a fit: one process, whatever the argument that says so."""

from types import SimpleNamespace

import pytest

from fluxutils_py.parallel import SoloComm, get_communicator


@pytest.mark.parametrize("comm", ["auto", None])
def test_one_process_is_rank_0_of_1(comm):
    found = get_communicator(comm)
    assert isinstance(found, SoloComm)
    assert (found.rank, found.size) == (0, 1)


def test_a_communicator_of_one_is_taken_as_it_is():
    for comm in (SoloComm(), SimpleNamespace(rank=0, size=1)):
        assert get_communicator(comm) is comm


@pytest.mark.parametrize("comm", ["mpi", "torch", SimpleNamespace(rank=1, size=2)])
def test_more_than_one_rank_is_not_there_yet(comm):
    with pytest.raises(NotImplementedError, match=r"this version trains in one process; use comm='auto' or None"):
        get_communicator(comm)


@pytest.mark.parametrize("comm", ["Auto", "", 4, True, [], SimpleNamespace(size=1), SimpleNamespace(rank=0)])
def test_anything_else_is_refused(comm):
    with pytest.raises(ValueError, match="comm must be 'auto', None, 'mpi', 'torch' or a communicator, got"):
        get_communicator(comm)
