"""Every way to train but the estimators, on several ranks of which one fails, leaves, or has fewer
batches.

Every rank runs all cases; what each returned or raised is written by rank 0 for the test to read.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Adam

from fluxutils_py.bobbin import TaskStep, TrainTask, assert_replica_integrity, gather_from_processes
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn.parameters import net2vec
from fluxutils_py.parallel import get_communicator
from fluxutils_py.praytools.functional import itrain, ptrain, train, ttrain
from fluxutils_py.training import Checkpointer, EveryNSteps, Loop, StepInfo

comm = get_communicator("auto")
rank, size = comm.rank, comm.size
folder = Path()
mse = nn.functional.mse_loss


class Squares(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        return mse(model(batch[0]), batch[1])


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batches(n, rows, seed):
    torch.manual_seed(seed)
    xs = [torch.randn(rows, 3, dtype=torch.float64) for _ in range(n)]
    return [(x, x.sin().sum(1, keepdim=True)) for x in xs]


def own(r):
    """The batches of a rank, each of its own size: 4 on rank 0, 3 on the others."""
    return batches(3 + (r == 0), 5 - r, r)


def together():
    """What one process would be given in place of those."""
    per_rank = [own(r) for r in range(size)]
    return [
        tuple(map(torch.cat, zip(*(b[k] for b in per_rank if k < len(b)), strict=True)))
        for k in range(4)
    ]


def in_a_loop_of_its_own(model, data, **settings):
    task = Squares(model)
    state = task.initialize_train_state(0, lambda params: Adam(params, lr=0.1))
    step_fn = task.make_training_step_fn(**settings)
    for batch in data:
        state, _ = step_fn(state, batch, 0)
    # until here others may go on
    gather_from_processes("the next collective", comm=settings.get("comm", "auto"))
    model.load_state_dict(state.model.state_dict())


def distance():
    """From what one process makes of all batches, beginning with the model of rank 0."""
    model, expected = network(rank), network(0)
    in_a_loop_of_its_own(model, own(rank), batches="per_rank")
    in_a_loop_of_its_own(expected, together(), comm=None)
    assert_replica_integrity(model, atol=0, rtol=0)
    return abs(net2vec(model) - net2vec(expected)).max().item() < 1e-12


def unequal_samples(function):
    # raises StopIteration
    model, prepare = (
        network(0),
        iter(batches(3 + (rank == 0), 7, 0)).__next__,
    )
    function(lambda x, y: mse(model(x), y), model, prepare, SGD(model.parameters(), lr=0.1), 9)


# -- failures ------------------------------------------------------------------------------------------


def at(n, action, only=1):
    calls = []

    def hook(loop=None):
        calls.append(loop)
        if len(calls) == n and rank == only:
            action()

    return hook


def boom():
    raise OSError("disk on fire")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def with_hook(action, n=3, save=None):
    model = network(0)
    trainer = Trainer(model, mse, SGD)
    loop = Loop(trainer)
    loop.on_step("fails", at(n, action))
    if save is not None:
        checkpoints = Checkpointer(folder / save, keep=9).track(
            model=model, optimizer=trainer.optimizer, loop=loop
        )
        action = checkpoints.save if save != "wrapped" else lambda loop: checkpoints.save(loop)
        loop.on_step("save", action, trigger=EveryNSteps(1))
    try:
        loop.run_epochs(batches(4, 7, 0), 2)
    finally:
        assert_replica_integrity(model, atol=0, rtol=0)
    return loop.step


def in_samples(way, action, n=3):
    model, data, fails = network(0), batches(9, 7, 0), at(n, action)
    loss, opt = lambda x, y: mse(model(x), y), SGD(model.parameters(), lr=0.1)
    numbers = iter(range(99))

    def prepare():
        fails()
        k = next(numbers)
        return [data[k % 9], data[(k + 1) % 9]] if way is itrain else data[k % 9]

    way(loss, model, prepare, opt, 9, **({"n": 1} if way is ttrain else {}))


def in_loss(action):
    model, fails = network(0), at(3, action)

    def loss(prediction, y):
        fails()
        return mse(prediction, y)

    Loop(Trainer(model, loss, SGD)).run_epochs(batches(4, 7, 0), 2)


def in_batches(action):
    fails = at(3, action)

    def data():
        for batch in batches(4, 7, 0):
            fails()
            yield batch

    Loop(Trainer(network(0), mse, SGD)).run_epochs(data(), 1)


def a_function(n_batches, loss=1.0):
    loop = Loop(lambda batch: StepInfo(loss))
    loop.run_epochs(range(n_batches), 1)
    return loop.step


def saving_every_step():
    """Rank 0 alone writes, in a loop of one's own and in a Loop."""
    task = Squares(network(rank))
    state = task.initialize_train_state(0, SGD)
    step_fn, save = task.make_training_step_fn(), task.make_checkpoint_saver(folder / "own", keep=3)
    for batch in batches(5, 7, 0):
        state, _ = step_fn(state, batch, 0)
        save(state)
    loop = Loop(TaskStep(task, state))
    loop.on_step("save", task.make_checkpoint_saver(folder / "loop", keep=3))
    loop.run_epochs(batches(5, 7, 0), 1)
    comm.barrier()
    parts = {"model": network(5), "loop": Loop(lambda batch: None)}
    Checkpointer(folder / "parts").track(**parts).save(loop)
    assert Checkpointer(folder / "parts").track(**parts).restore()
    again = task.initialize_train_state(0, SGD, folder / "loop")
    assert again.step == state.step == 10
    assert torch.equal(net2vec(again.model), net2vec(state.model))
    return [sorted(p.name[-6:] for p in (folder / name).glob("*.pt")) for name in ("own", "loop")]


def logging_every_step():
    lines, logger = [], logging.getLogger("every way")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addFilter(lambda record: lines.append(record.getMessage()))
    task = Squares(network(0))
    loop = Loop(TaskStep(task, task.initialize_train_state(0, SGD)))
    loop.on_step("log", task.make_log_writer(logger))
    loop.run_epochs(batches(4, 7, 0), 1)
    return len(lines)


CASES = {
    "own loop": distance,
    "unequal own loop": lambda: in_a_loop_of_its_own(network(0), batches(3 + (rank == 0), 7, 0)),
    **{f"unequal {f.__name__}": lambda f=f: unequal_samples(f) for f in (train, ptrain)},
    **{
        f"prepare {f.__name__}": lambda f=f: in_samples(f, boom)
        for f in (train, ptrain, ttrain, itrain)
    },
    "exit in prepare": lambda: in_samples(train, lambda: sys.exit(3)),
    "loss": lambda: in_loss(boom),
    "exit in loss": lambda: in_loss(lambda: sys.exit(3)),
    "interrupt in loss": lambda: in_loss(interrupt),
    "batches": lambda: in_batches(boom),
    "hook": lambda: with_hook(boom),
    "exit in hook": lambda: with_hook(lambda: sys.exit(0)),
    "hook beside save": lambda: with_hook(boom, save="beside"),
    "save in a function": lambda: with_hook(boom, 9, save="wrapped"),
    "function": lambda: a_function(3 + (rank == 0)),
    "nan of a function": lambda: a_function(4, float("nan") if rank == 1 else 1.0),
    "saving": saving_every_step,
    "logging": logging_every_step,
}


def outcome(call):
    try:
        return call()
    except BaseException as caught:  # SystemExit and KeyboardInterrupt are cases too
        return f"{type(caught).__name__}: {caught}"


def main(to):
    global folder
    folder, found = to, {}
    for name, case in CASES.items():
        found[name] = gather_from_processes(outcome(case))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
