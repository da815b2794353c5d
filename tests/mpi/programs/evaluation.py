"""Evaluation by several ranks: results are those of one process, and an error on one is an error on
all.

Every rank runs all cases; what each returned or raised is written by rank 0 for the test to read.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.bobbin import (
    EvalResults,
    EvalTask,
    RunEval,
    assert_replica_integrity,
    eval_batches,
    eval_datasets,
    gather_from_processes,
)
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import RankGroup, get_communicator
from fluxutils_py.training import InMemory, Loop, StopTraining
from fluxutils_py.training.triggers import EveryNSteps

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
folder = Path()
rng = np.random.default_rng(0)
DATA = [rng.integers(1000, size=n) for n in (4, 1, 7, 2, 2, 9, 3, 5)]  # 8 batches


@dataclass(frozen=True)
class Found(EvalResults):
    """Sums, exactly, and everything in the order in which it was merged."""

    total: int = 0
    mean: torch.Tensor | None = None
    order: str = ""

    def reduce(self, other):
        both = [m for m in (self.mean, other.mean) if m is not None]
        return Found(
            self.total + other.total, sum(both) if both else None, self.order + other.order
        )

    def is_better_than(self, other):
        return self.total < other.total


class Unpicklable(str):
    def __reduce__(self):
        raise TypeError("not to be sent")


class Task(EvalTask):
    """Fails on one rank, where it is told to."""

    def __init__(self, fails="", error=None, only=1):
        self.fails, self.error, self.only = fails, error, only

    def may_fail(self, where):
        if rank == self.only and where == self.fails:
            raise OSError("disk on fire") if self.error is None else self.error

    def create_eval_results(self, dataset_name):
        self.may_fail("create")
        return Found(order=Unpicklable() if rank == self.only and self.fails == "sending" else "")

    def evaluate(self, batch, *state):
        self.may_fail("evaluate")
        if rank == self.only and self.fails == "type":
            return {"total": 0}
        mean = torch.as_tensor(batch).double().mean()
        return Found(int(batch.sum()), mean, f"{len(batch)} ") if not state else Found(1)

    def finalize_eval_results(self, results):
        self.may_fail("finalize")
        return results


def batches(fails=False):
    for batch in DATA[2 * rank : 2 * rank + 2]:
        if fails and rank == 1:
            raise OSError("disk on fire")
        yield batch


def plain(result):
    if isinstance(result, dict):
        return [plain(r) for r in result.values()]
    if not isinstance(result, Found):
        return result
    return [result.total, None if result.mean is None else result.mean.item(), result.order]


def share(counts):
    """This rank's of the batches, which are given out in order."""
    counts = [*counts[: size - 1], sum(counts[size - 1 :])]
    start = sum(counts[:rank])
    return DATA[start : start + counts[rank]]


def outcome(call):
    try:
        return plain(call())
    except BaseException as caught:  # SystemExit is a case too
        return f"{type(caught).__name__}: {caught}"


# -- within training -----------------------------------------------------------------------------------


def train(action, before=None, steps=4):
    """How many steps a loop makes whose action fails or stops; each rank has data of its own."""
    torch.manual_seed(0)
    x = torch.randn(6, 2)
    model = nn.Linear(2, 1)
    error = None
    with RankGroup.from_comm("auto", "train") as ranks:
        loop = Loop(Trainer(model, nn.MSELoss(), torch.optim.SGD, comm=ranks), ranks)
        if before is not None:
            loop.on_step("before", before)
        loop.on_step("evaluate", action, trigger=EveryNSteps(2))
        try:
            loop.run_epochs(InMemory(x, x[:, :1], batchsize=1), 2)
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
            if not ranks.error_is_shared:
                raise
    return error, loop.step


def at_four(error):
    def act(results, loop):
        if loop.step == 4 and rank == 1:
            raise error

    return act


def stop_at_four(results, loop):
    if loop.step == 4 and rank == 1:
        loop.stop()


def fail_at_four(loop):
    if loop.step == 4 and rank == 1:
        raise OSError("disk on fire")


class FourthFails(Task):
    def evaluate(self, batch, state):
        if state.step == 4:
            self.may_fail("evaluate")
        return Found(1)


def run_eval(task=None, processor=None):
    action = RunEval(task or Task(), {"dev": DATA[: 2 - rank]})  # rank 2 has none
    return action if processor is None else action.add_result_processor(processor)


class Outputs(Task):
    def evaluate(self, batch, state):
        torch.rand(2)
        return Found(1, state.model(batch).double().sum())


def fitting_is_not_disturbed():
    x = rng.standard_normal((2, 7, 11))
    seen, fitted = [], []
    action = RunEval(Outputs(), {"dev": [torch.ones(3, 2 + rank, 2).double()] * rank})
    action.add_result_processor(lambda results, loop: seen.append(results["dev"]))
    for callbacks in ([], [action]):
        torch.manual_seed(0)
        model = nn.Sequential(LSTM(2, 4), nn.Dropout(0.3), nn.Linear(4, 1)).double()
        est = Estimator(
            model, spec=Spec(2, 2, 4), random_state=0, verbose=False, callbacks=callbacks
        )
        fitted.append(est.fit(x, x.mean(0, keepdims=True)))
    assert torch.equal(net2vec(fitted[0]), net2vec(fitted[1]))
    assert fitted[0].loss_curve_ == fitted[1].loss_curve_
    assert {r.total for r in seen} == {sum(range(size))}
    assert_replica_integrity([[r.mean for r in seen]], atol=0, rtol=0)
    return len(seen)


class State:
    """That of a loop of the user's own."""

    def __init__(self, step, weight):
        self.step, self.model = step, nn.Linear(1, 1, bias=False)
        self.model.weight.data.fill_(weight)


class Weight(Task):
    def evaluate(self, batch, state):
        return Found(int(state.model.weight.item()))


def keep_best(dest):
    def keeper():
        return Weight().make_cron_action({"dev": DATA[:rank]}).keep_best_checkpoint("dev", dest)

    n = sum(range(size))
    action, found = keeper(), []
    for step, weight in ((1, 5), (2, 7), (3, 4)):
        found.append(action(State(step, weight)))
    action = keeper()  # of another process
    for step, weight in ((4, 6), (5, 3)):
        found.append(action(State(step, weight)))
    assert [f.current_best.total for f in found] == [5 * n, 5 * n, 4 * n, 4 * n, 3 * n]
    assert [f.eval_results["dev"].total for f in found] == [5 * n, 7 * n, 4 * n, 6 * n, 3 * n]
    return [f.saved_train_state is not None and f.saved_train_state.name for f in found]


def an_unreadable_folder():
    path = folder / "file"
    if rank == 0:
        path.write_text("no folder")
    MPI.COMM_WORLD.Barrier()
    RunEval(Task(), {"dev": DATA[:1]}).keep_best_checkpoint("dev", path)(State(1, 2.0))


CASES = {
    "3 5 0": lambda: eval_batches(Task(), "dev", share([3, 5, 0])),
    "0 3 5": lambda: eval_batches(Task(), "dev", share([0, 3, 5])),
    "0 0 8": lambda: eval_batches(Task(), "dev", share([0, 0, 8])),
    "none": lambda: eval_batches(Task(), "dev", []),
    "several": lambda: eval_datasets(Task(), {"a": share([1, 1, 6]), "b": share([2, 6, 0])}),
    "alone": lambda: eval_batches(Task(), "dev", DATA[:rank], comm=None),
    "create": lambda: eval_batches(Task("create"), "dev", batches()),
    "evaluate": lambda: eval_batches(Task("evaluate"), "dev", batches()),
    "batches": lambda: eval_batches(Task(), "dev", batches(fails=True)),
    "function": lambda: eval_batches(Task(), "dev", lambda: batches(fails=True)),
    "finalize": lambda: eval_batches(Task("finalize"), "dev", batches()),
    "exit": lambda: eval_batches(Task("evaluate", SystemExit(3)), "dev", batches()),
    "sending": lambda: eval_batches(Task("sending"), "dev", [] if rank == 1 else batches()),
    "type": lambda: eval_batches(Task("type"), "dev", batches()),
    "second dataset": lambda: eval_datasets(Task(), {"a": batches(), "b": batches(fails=True)}),
    "names": lambda: list(
        eval_datasets(Task(), {"a": batches()} | ({"b": batches()} if rank == 1 else {}))
    ),
    "order": lambda: list(eval_datasets(Task(), dict.fromkeys("ab" if rank != 1 else "ba", DATA))),
    "training": lambda: train(run_eval()),
    "evaluate in training": lambda: train(run_eval(FourthFails("evaluate"))),
    "stop in evaluate": lambda: train(run_eval(FourthFails("evaluate", StopTraining("enough")))),
    "processor": lambda: train(run_eval(None, at_four(OSError("disk on fire")))),
    "stop in processor": lambda: train(run_eval(None, at_four(StopTraining()))),
    "loop.stop in processor": lambda: train(run_eval(None, stop_at_four)),
    "hook before": lambda: train(run_eval(), fail_at_four),
    "unreadable folder": an_unreadable_folder,
    "fit": fitting_is_not_disturbed,
    "best": lambda: keep_best(
        folder / "best" / str(rank)
    ),  # folders that differ: only rank 0's is written
}


def main(to):
    global folder
    folder, found = to, {}
    for name, case in CASES.items():
        found[name] = gather_from_processes(outcome(case))
        again = eval_batches(Task(), "dev", batches())  # the same communicator goes on working
        assert again.total == sum(int(b.sum()) for b in DATA[: 2 * size]), name
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    assert get_communicator("auto").size == size
