"""How a rank waits, tried on ranks that are made up; real ones are in tests/mpi/test_hanging.py."""

import contextlib
import copy
import os
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from fluxutils_py.parallel import launched_comm
from fluxutils_py.parallel.communicator import SingleProcessComm
from fluxutils_py.parallel.launched_comm import LaunchedComm
from fluxutils_py.parallel.mpi import MPIComm
from fluxutils_py.parallel.torch_distributed import TorchComm


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that a look or a sleep moves on, however busy the machine is."""
    now = [0.0]

    def monotonic():
        now[0] += 1e-5
        return now[0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(launched_comm, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))


class Late(LaunchedComm):
    """Rank 0 of 3, which has company: rank 1 waits as it does, rank 2 comes after some looks."""

    launcher, rank, size = "none", 0, 3

    def __init__(self, looks=0, *, can_announce=True, **settings):
        super().__init__(**settings)
        self.looks, self.can_announce, self.announced, self.ended = 0, can_announce, [], None
        self.allgather(None)  # the first meeting
        self.looks = looks

    def request(self):
        looks = iter(range(self.looks))
        return lambda: next(looks, None) is None

    def is_open(self):
        return True

    def _start_connecting(self):
        return self.request()

    def _start_allreduce(self, t):
        t.mul_(self.size)
        return self.request()

    def _start_broadcast(self, t, root):
        if root == self.rank:
            self.sent = t.clone()
        t.copy_(self.sent)  # the others have the same
        return self.request()

    def _start_allgather(self, own, everything):
        everything.view(self.size, -1)[:] = own
        return self.request()

    @contextlib.contextmanager
    def _announce_wait(self, n):
        self.announced.append(n)
        yield

    def _announced_ranks(self, n):
        return {1} if self.can_announce else None

    def _abort_job(self, missing):
        self.ended = missing
        raise SystemExit(launched_comm.STATUS)


def in_fit(comm):
    comm.describe_wait = lambda: ("fit", "Advice")
    return comm


@pytest.mark.parametrize(
    ("can_announce", "who"), [(True, r"rank 2 \(process \d+ on .+\)"), (False, "other ranks")]
)
def test_a_rank_that_waits_for_long_warns_which_ranks_are_missing(can_announce, who):
    comm = in_fit(Late(10**9, patience=0.03, can_announce=can_announce, abort_after=0.1))
    with pytest.warns(RuntimeWarning) as told, pytest.raises(SystemExit):
        comm.barrier()
    assert len(told) > 1
    assert all(
        re.fullmatch(rf"rank 0 has been waiting in fit for 0 s, for {who}\. Advice", str(w.message))
        for w in told
    )
    assert comm.announced == [comm._n_waits]  # once, in the collective that it waits in


@pytest.mark.filterwarnings("ignore:rank 0")
def test_abort_after_ends_the_job_and_says_why(capsys):
    comm = in_fit(Late(10**9, patience=0.02, abort_after=0.05))
    with pytest.raises(SystemExit, match="75"):
        comm.allreduce_(torch.ones(2))
    assert [process for _, process in comm.ended] == [os.getpid()]
    err = capsys.readouterr().err
    assert err.startswith(
        "fluxutils_py ends the job: rank 0 has been waiting in fit for 0 s, for rank 2 (process "
    )
    assert err.endswith(". Advice (abort_after=0.05)\n")


@pytest.mark.slow
def test_outside_of_calls_a_rank_waits_as_long_as_it_takes_and_in_silence():
    comm = Late(200, patience=0.01, abort_after=0.01)
    comm.barrier()
    comm.describe_wait = lambda: None
    comm.barrier()
    assert comm.ended is None


def test_where_all_ranks_are_waiting_the_network_is_suspected():
    # an idle machine polls for .05 s before it looks
    comm = in_fit(Late(10**9, patience=0.03, abort_after=0.2))
    comm._announced_ranks = lambda n: {1, 2}
    told = "for 0 s, though all ranks are there, so the network may be down"
    with pytest.warns(RuntimeWarning, match=told), pytest.raises(SystemExit):
        comm.barrier()


def test_collectives_that_are_complete_soon_say_nothing():
    comm = in_fit(Late(60, patience=0.5))  # more looks than in a row
    t = torch.ones(2)
    comm.allreduce_(t)
    comm.broadcast_(t)
    assert t.tolist() == [3, 3]
    assert comm.announced == []


@pytest.mark.parametrize("at_once", [launched_comm.GATHERED_AT_ONCE, 100])
@pytest.mark.parametrize("size", [0, 400, 485, 486, 487, 488, 489, 5000])
def test_objects_of_any_size_are_gathered(monkeypatch, size, at_once):
    monkeypatch.setattr(launched_comm, "GATHERED_AT_ONCE", at_once)
    comm, obj = Late(), b"x" * size
    assert comm.allgather(obj) == [obj] * 3


def test_memory_of_a_collective_outlives_an_error_while_waiting():
    comm = Late(10**9)

    def interrupted():
        raise KeyboardInterrupt

    before = len(launched_comm._abandoned)
    comm._start_allreduce = lambda t: lambda: interrupted()
    with pytest.raises(KeyboardInterrupt):
        comm.barrier()
    assert len(launched_comm._abandoned) == before + 1
    launched_comm._abandoned.clear()


@pytest.mark.parametrize(
    ("setting", "variable"),
    [("patience", "FLUXUTILS_PATIENCE"), ("abort_after", "FLUXUTILS_ABORT_AFTER")],
)
def test_settings_come_from_arguments_or_the_environment(monkeypatch, setting, variable):
    monkeypatch.delenv(variable, raising=False)
    assert getattr(Late(), setting) == {"patience": 60, "abort_after": None}[setting]
    monkeypatch.setenv(variable, "2.5")
    assert getattr(Late(), setting) == 2.5
    assert getattr(Late(**{setting: 4}), setting) == 4
    for bad in ("soon", "0", "nan"):
        monkeypatch.setenv(variable, bad)
        told = f"{setting} must be a number of seconds above 0, got {variable}='{bad}' in the environment"
        with pytest.raises(ValueError, match=re.escape(told)):
            Late()
    with pytest.raises(ValueError, match=rf"{setting} .*got -1"):
        Late(**{setting: -1})


@pytest.mark.parametrize("kind", [MPIComm, TorchComm])
def test_without_a_launcher_a_copy_from_elsewhere_is_one_process(kind):
    comm = kind.__new__(kind)  # without starting MPI
    assert copy.deepcopy(comm) is comm
    assert isinstance(pickle.loads(pickle.dumps(comm)), SingleProcessComm)
