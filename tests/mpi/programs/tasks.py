"""A task trained on ranks with unequal batches ends as on one process with the whole; one that
fails, fails on all.
"""

import copy
from functools import partial

import torch
from torch import nn

from fluxutils_py.bobbin import TaskStep, TrainTask, assert_replica_integrity, gather_from_processes
from fluxutils_py.errors import RemoteError
from fluxutils_py.parallel import RankGroup, get_communicator
from fluxutils_py.training import Loop

SIZES = (5, 2, 4)  # series of a batch on each rank


class Squares(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        x, y = batch
        if x.shape[0] == 1:
            raise ZeroDivisionError("a batch of one")
        return (model(x) - y).square().mean(), {"rows": len(x)}


def batches(rank, size, n=6):
    """Of this rank, and of all together."""
    torch.manual_seed(0)
    whole = [(torch.randn(sum(SIZES[:size]), 3, dtype=torch.float64),) for _ in range(n)]
    whole = [(x, x.sin().sum(1, keepdim=True)) for (x,) in whole]
    parts = [tuple(v.split(list(SIZES[:size]))[rank] for v in batch) for batch in whole]
    return parts, whole


def network(*layers):
    torch.manual_seed(1)
    return nn.Sequential(*layers, nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def note(before, model, loop):
    before.update(copy.deepcopy(model.state_dict()))


def main(folder):
    n = get_communicator("auto").size
    with RankGroup.from_comm("mpi", "training") as ranks:
        assert ranks.size == n
        parts, whole = batches(ranks.rank, n)

        # as one process with the whole batch
        task = Squares(network())
        state = task.initialize_train_state(0, torch.optim.Adam)
        loop = Loop(TaskStep(task, state, comm=ranks, batches="per_rank"))
        loop.run_epochs(parts, 2)
        alone = task.initialize_train_state(0, torch.optim.Adam)
        one = Loop(TaskStep(task, alone, comm=None))
        one.run_epochs(whole, 2)
        for name, p in alone.params.items():
            torch.testing.assert_close(state.params[name], p, rtol=0, atol=1e-12)
        assert [
            abs(a["loss"] - b["loss"]) < 1e-12
            for a, b in zip(loop.history, one.history, strict=True)
        ] == [True] * 2
        assert loop.metrics == {"rows": SIZES[ranks.rank]}
        assert loop.step == state.step == 12

        # a rank without data, for once
        step = task.make_training_step_fn(comm=ranks, batches="per_rank")
        some = parts[0] if ranks.rank == 1 else None
        state, info = step(state, some, 0)
        alone, expected = task.make_training_step_fn(comm=None)(alone, ranks.allgather(some)[1], 0)
        assert abs(info.loss - expected.loss) < 1e-12
        torch.testing.assert_close(
            state.params["2.weight"], alone.params["2.weight"], rtol=0, atol=1e-12
        )
        state, info = step(state, None, 0)
        assert (info.loss, state.step) == (None, 13)  # no rank has a batch: no step

        # buffers become alike: the mean weighted by the batches
        task = Squares(network(nn.BatchNorm1d(3)))
        state = task.initialize_train_state(0, torch.optim.SGD)
        task.make_training_step_fn(comm=ranks, batches="per_rank")(state, parts[0], 0)
        mean = 0.1 * whole[0][0].mean(0)
        torch.testing.assert_close(state.extra_vars["0.running_mean"], mean, rtol=0, atol=1e-12)
        assert state.extra_vars["0.num_batches_tracked"] == 1
        found = state
    assert_replica_integrity(found.model, atol=0, rtol=0, comm="mpi")

    # what each rank draws is its own
    class Draw(TrainTask):
        def compute_loss(self, model, batch, *, step, rng):
            return model.weight.sum() * 0, {"drawn": torch.rand((), generator=rng).item()}

    with RankGroup.from_comm("mpi", "training") as ranks:
        task = Draw(nn.Linear(2, 1))
        _, info = task.make_training_step_fn(comm=ranks, batches="per_rank")(
            task.initialize_train_state(0, torch.optim.SGD), torch.ones(2), 3
        )
    assert len(set(gather_from_processes(info.metrics["drawn"], comm="mpi"))) == n

    # errors of one rank are of all, in the same step, and change no parameter
    for accident, error in (("nan", FloatingPointError), ("raise", ZeroDivisionError)):
        state = Squares(network()).initialize_train_state(0, torch.optim.Adam)
        before, told, rank = copy.deepcopy(state.model.state_dict()), None, -1
        try:
            with RankGroup.from_comm("mpi", "training") as ranks:
                rank = ranks.rank
                parts, _ = batches(rank, n)
                if rank == 1:
                    x, y = parts[3]
                    parts[3] = (x * torch.nan, y) if accident == "nan" else (x[:1], y[:1])
                loop = Loop(TaskStep(Squares(network()), state, comm=ranks, batches="per_rank"))
                loop.on_step("note", partial(note, before, state.model))
                loop.run_epochs(parts, 1)
        except Exception as e:
            told = e
        assert isinstance(told, error if accident == "nan" or rank == 1 else RemoteError), repr(
            told
        )
        assert loop.step == state.step == 3
        assert all(torch.equal(v, before[k]) for k, v in state.model.state_dict().items())
