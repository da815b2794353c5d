"""Agreement of ranks, of which this process is one and the other is made up; real ones are in
tests/mpi.
"""

import numpy as np
import pytest
import torch

from fluxutils_py.errors import RankError, RemoteError
from fluxutils_py.parallel.communicator import SingleProcessComm
from fluxutils_py.parallel.rank_group import END, RankGroup


class Recorded(SingleProcessComm):
    """Two ranks, of which the other one says what it is told to say."""

    size = 2

    def __init__(self, other):
        self.other = other

    def allgather(self, obj):
        return [obj, self.other(obj)]


def test_a_communicator_of_ones_own_carries_values_and_errors():
    with RankGroup(Recorded(lambda mine: (*mine[:3], "theirs"))) as ranks:
        assert ranks.allgather("mine") == ["mine", "theirs"]
    failed = Recorded(lambda mine: (mine[0], ("KeyError", "KeyError: 'k'"), False, None))
    with pytest.raises(RuntimeError, match=r"^rank 1: KeyError: 'k'$"), RankGroup(failed) as ranks:
        ranks.allgather()


def test_an_error_on_one_rank_alone_is_kept_for_the_next_collective_and_told_at_the_end():
    told, comm = [], Recorded(lambda mine: told.append(mine[1]) or mine)

    def kept():
        with RankGroup(comm) as ranks:
            assert ranks.guard(lambda: 1 / 0) is None
            assert ranks.is_leaving
            assert ranks.guard(lambda v: v + 1, 1) == 2
            ranks.allgather()

    def raised():
        with RankGroup(comm):
            raise KeyError("k")

    with pytest.raises(ZeroDivisionError):
        kept()
    with pytest.raises(KeyError):
        raised()
    assert told == [
        ("ZeroDivisionError", "ZeroDivisionError: division by zero"),
        ("KeyError", "KeyError: 'k'"),
    ]


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Mute(Silent):
    __repr__ = Silent.__str__


class Leaving(Silent):
    def __str__(self):
        raise KeyboardInterrupt


class NotText(Silent):
    def __str__(self):
        return 7


@pytest.mark.parametrize("kind", [Silent, Mute, Leaving, NotText])
def test_an_error_whose_text_cannot_be_made_still_reaches_the_other_ranks(kind):
    told, comm = [], Recorded(lambda mine: told.append(mine[1]) or mine)
    with pytest.raises(kind), RankGroup(comm):
        raise kind("x")
    ((name, text),) = told
    assert name == kind.__name__
    assert text.startswith(f"{kind.__name__}: ")


def test_of_an_error_with_a_huge_text_ranks_send_the_beginning():
    told, comm = [], Recorded(lambda mine: told.append(mine[1]) or mine)
    with pytest.raises(ValueError, match="a"), RankGroup(comm):
        raise ValueError("a" * 10**6)
    assert told[0][1].startswith("ValueError: aaaa")
    assert len(told[0][1]) < 11_000
    assert "990000 more" in told[0][1]


def test_a_broken_communicator_is_not_asked_again():
    def broken(mine):
        told.append(mine)
        raise OSError("cable")

    told = []
    with pytest.raises(OSError, match="cable"), RankGroup(Recorded(broken)) as ranks:
        ranks.allgather()
    assert len(told) == 1


def test_one_rank_alone_raises_at_once():
    with pytest.raises(ZeroDivisionError):
        RankGroup().guard(lambda: 1 / 0)


def test_broadcasting_keeps_every_bit_of_every_type():
    kept = [
        torch.tensor([2**53 + 1]),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(0),
    ]
    found = [t.clone() for t in kept]
    kept.append(torch.from_numpy(np.empty(0)))
    found.append(torch.from_numpy(np.empty(0)))  # of stride 0
    RankGroup(Recorded(lambda mine: mine)).broadcast(found)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, kept, strict=True))


def alike(mine):
    return mine


def test_a_group_stays_itself_and_may_be_entered_twice():
    ranks = RankGroup(Recorded(alike))
    with ranks, RankGroup.from_comm(ranks, "again") as again:
        assert again is ranks
        assert RankGroup.from_comm("auto", "nested").is_single
        with pytest.raises(RuntimeError, match=r"^nested is for all ranks"):
            RankGroup.from_comm("auto", "nested", allow_nested=False)
    assert RankGroup.from_comm(None, "alone").is_single


def test_an_error_in_an_inner_block_is_told_at_the_end_of_the_outer_one():
    told, ranks = [], None
    ranks = RankGroup(Recorded(lambda mine: told.append(mine[1]) or mine))
    with pytest.raises(KeyError), ranks, ranks:  # twice
        raise KeyError("k")
    assert told == [("KeyError", "KeyError: 'k'")]


def test_what_each_rank_runs_by_itself_may_not_call_all():
    ranks = RankGroup(Recorded(alike))
    assert ranks.guard(ranks.allgather) is None
    with pytest.raises(RuntimeError, match="each rank runs by itself"):
        ranks.allgather()
    with RankGroup(Recorded(alike)) as ranks:
        assert ranks.guard(ranks.allgather, 3, collective=True) == [3, 3]


def test_a_rank_that_ended_the_program_is_an_error_at_once_ever_after():
    ranks = RankGroup(Recorded(lambda mine: (END, None, False, None)), "predict")
    with (
        pytest.raises(RankError, match=r"predict on rank 0, .* on rank 1"),
        ranks,
    ):
        ranks.allgather()
    with pytest.raises(RankError, match=r"^fit is for all ranks, .*rank 1 "):
        RankGroup(ranks.comm, "fit").allgather()


class Leaves(Recorded):
    """The other rank takes ``n`` steps more than this one."""

    def __init__(self, n):
        super().__init__(alike)
        self.n = n


def test_a_rank_without_batches_takes_part_until_all_have_left():
    comm, steps = Leaves(2), []
    ranks = RankGroup(comm, "step")

    def step(batch):
        with ranks.step(lambda: step(None)):
            failed, stops = ranks.flags()
            others = batch is None and comm.n > 0
            comm.n -= others
            steps.append((batch, bool(others)))
            ranks.check_flags(failed, stops, (batch is not None) + others)

    step(1)
    assert RankGroup(comm, "save").allgather("value") == ["value", "value"]
    assert steps == [(1, False), (None, True), (None, True), (None, False)]
    assert RankGroup(comm, "save").allgather(0) == [0, 0]
    assert len(steps) == 4


def test_models_that_differ_are_refused_and_those_alike_become_rank_0s():
    named = {"weight": torch.ones(2, 3)}
    RankGroup(Recorded(alike)).broadcast_parameters(named)
    other = {"parameter 0": "weight (2, 4) torch.float32"}
    with pytest.raises(
        RankError,
        match=r"parameter 0: weight \(2, 3\) .*rank 0",
    ):
        RankGroup(Recorded(lambda mine: (*mine[:3], other))).broadcast_parameters(named)


def test_the_other_ranks_error_is_named():
    comm = Recorded(
        lambda mine: (mine[0], ("FloatingPointError", "FloatingPointError: nan"), False, None)
    )
    with pytest.raises(FloatingPointError, match=r"^rank 1: nan$"), RankGroup(comm) as ranks:
        ranks.check_flags(1, 0)
    assert not issubclass(RemoteError, FloatingPointError)
