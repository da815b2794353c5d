"""Evaluation within training: that training does not notice, and that the best model is kept."""

import copy
import json
import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.bobbin import EvalResults, EvalTask, RunEval, RunEvalKeepBest, TrainTask
from fluxutils_py.errors import DataError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel.communicator import SingleProcessComm
from fluxutils_py.training import Checkpointer, InMemory, Loop, Map, StepInfo, StopTraining
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.triggers import EveryNSteps


@dataclass(frozen=True)
class Loss(EvalResults):
    total: float = 0.0
    n: int = 0

    def reduce(self, other):
        return Loss(self.total + other.total, self.n + other.n)

    def is_better_than(self, other):
        return self.total * other.n < other.total * self.n


class SquaredOutput(EvalTask):
    def create_eval_results(self, dataset_name):
        return Loss()

    def evaluate(self, batch, state):
        batch = batch[0] if isinstance(batch, tuple | list) else batch
        torch.rand(2)  # of the user's own
        y = state.model(batch)
        return Loss(y.square().sum().item(), y.numel())


# -- training does not notice --------------------------------------------------------------------------


def recurrent(n_in):
    torch.manual_seed(5)
    return nn.Sequential(LSTM(n_in, 4), nn.Dropout(0.3), nn.Linear(4, 1))


def evaluation(n_in):
    """Of batches of other sizes, in an order that is drawn from torch's own generator."""
    series = torch.randn(5, 3, n_in, generator=torch.Generator().manual_seed(1))
    windows = [torch.randn(6, n, n_in, generator=torch.Generator().manual_seed(n)) for n in (3, 7)]
    loader = DataLoader(TensorDataset(series), batch_size=2, shuffle=True)
    return RunEval(SquaredOutput(), {"loader": loader, "windows": windows})


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [Spec(2, 3, 4, shuffle=True), Spec(2, 3, 4, overlap=3, accumulate=2, burn_in=1)]
)
def test_fitting_with_evaluation_after_each_step_is_fitting_without(spec):
    x = np.random.default_rng(0).normal(size=(2, 7, 11)).astype("f4")
    results = []
    action = evaluation(2).add_result_processor(lambda found, loop: results.append(found))
    fitted = []
    for callbacks in ([], [action]):
        est = Estimator(recurrent(2), spec=spec, random_state=0, callbacks=callbacks)
        fitted.append(est.fit(x, x.mean(0, keepdims=True)))
    alone, watched = fitted
    np.testing.assert_array_equal(net2vec(watched), net2vec(alone))
    assert watched.loss_curve_ == alone.loss_curve_
    assert len({found["windows"] for found in results}) > 1
    assert all(found["loader"].n == 5 * 3 for found in results)


class Windows:
    """Series of 10 steps, 4 at a time; state is carried on."""

    name, spec = "windows", None

    def __init__(self):
        self.x = torch.randn(10, 5, 3, generator=torch.Generator().manual_seed(2))

    def reset(self):
        pass

    def __iter__(self):
        for start in (0, 4, 8):
            x = self.x[start : start + 4]
            yield Minibatch((x,), (x.sum(-1, keepdim=True),), first=start == 0)


@pytest.mark.parametrize(
    "data", [Windows, lambda: Map(Windows(), lambda b: replace(b, first=True))]
)
def test_training_with_evaluation_after_each_step_is_training_without(data):
    trained = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = recurrent(3)
        trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam)
        loop = Loop(trainer)
        if watched:
            loop.hooks.attach(evaluation(3))
        loop.run_epochs(data(), 3)
        trained.append((net2vec(model), loop.history, torch.get_rng_state()))
    (alone, history, rng), (vector, watched_history, watched_rng) = trained
    assert torch.equal(torch.as_tensor(alone), torch.as_tensor(vector))
    assert [r["loss"] for r in history] == [r["loss"] for r in watched_history]
    assert torch.equal(rng, watched_rng)


# -- the action ----------------------------------------------------------------------------------------


class State:
    """That of a loop of the user's own."""

    def __init__(self, step, weight):
        self.step, self.model = step, nn.Linear(1, 1, bias=False)
        self.model.weight.data.fill_(weight)


ONES = {"dev": [torch.ones(3, 1), torch.ones(1, 1)], "test": [torch.full((2, 1), 2.0)]}


def test_it_returns_and_logs_and_hands_on_the_results(caplog):
    seen = []
    action = SquaredOutput().make_cron_action(ONES)
    assert action.add_result_processor(lambda *args: seen.append(args)) is action
    state = State(7, 3.0)
    with caplog.at_level(logging.INFO, "fluxutils_py"):
        found = action(state, StepInfo(1.0), something="else")
    assert found == {"dev": Loss(36.0, 4), "test": Loss(72.0, 2)}
    assert seen == [(found, state)]
    assert caplog.messages == [
        "step 7, dev: Loss(total=36.0, n=4)",
        "step 7, test: Loss(total=72.0, n=2)",
    ]


def test_a_processor_may_stop_a_loop():
    calls = []

    def stop_at_four(results, loop):
        calls.append(loop.step)
        if loop.step == 4:
            raise StopTraining

    x = torch.randn(12, 1)
    action = (
        RunEval(SquaredOutput(), ONES)
        .add_result_processor(stop_at_four)
        .add_result_processor(stop_at_four)
    )
    loop = Loop(Trainer(nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD))
    loop.on_step("evaluate", action, trigger=EveryNSteps(2))
    loop.run_epochs(InMemory(x, x, batchsize=2), 3)
    assert loop.step == 4
    assert calls == [2, 2, 4, 4]
    action.add_result_processor(lambda results, state: (_ for _ in ()).throw(StopTraining))
    with pytest.raises(StopTraining):  # which a loop of one's own sees
        action(State(1, 1.0))


def test_a_task_may_stop_a_loop():
    class Stop(SquaredOutput):
        def evaluate(self, batch, loop):
            raise StopTraining

    x = torch.randn(12, 1)
    loop = Loop(Trainer(nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD))
    loop.hooks.attach(RunEval(Stop(), ONES))
    loop.run_epochs(InMemory(x, x, batchsize=2), 3)
    assert loop.step == 1


def test_what_can_be_gone_through_once_is_refused():
    with pytest.raises(DataError, match=r"'dev' .*only once.*use a list"):
        RunEval(SquaredOutput(), {"dev": (x for x in ONES["dev"])})


# -- the best ------------------------------------------------------------------------------------------


def weight_in(folder):
    model = nn.Linear(1, 1, bias=False)
    model.load_state_dict(Checkpointer(folder).read()["model"])
    return model.weight.item()


def keeper(folder):
    return RunEval(SquaredOutput(), ONES).keep_best_checkpoint("dev", folder)


def test_the_best_is_kept_over_a_restart(tmp_path):
    dest = tmp_path / "runs" / "best"
    action = keeper(dest)

    first = action(State(10, 2.0))
    assert first.eval_results == {"dev": Loss(16.0, 4), "test": Loss(32.0, 2)}
    assert first.current_best == Loss(16.0, 4)
    assert first.saved_train_state == Checkpointer(dest).latest()
    assert Checkpointer(dest).latest_step() == 10

    worse = action(State(20, 3.0))
    assert (worse.current_best, worse.saved_train_state) == (Loss(16.0, 4), None)
    assert worse.eval_results["dev"] == Loss(36.0, 4)
    equal = action(State(25, -2.0))
    assert equal.saved_train_state is None
    assert weight_in(dest) == 2

    restarted = keeper(dest)
    worse = restarted(State(30, 3.0))
    assert (worse.current_best, worse.saved_train_state) == (Loss(16.0, 4), None)
    assert weight_in(dest) == 2

    better = restarted(State(40, 1.0))
    assert better.current_best == Loss(4.0, 4)
    assert better.saved_train_state.name == "checkpoint-n0000002-step-00000040.pt"
    assert sorted(p.name for p in dest.iterdir()) == [
        "checkpoint-n0000002-step-00000040.json",
        "checkpoint-n0000002-step-00000040.pt",
        "results.json",
    ]
    assert json.loads((dest / "results.json").read_text()) == {"total": 4.0, "n": 4}
    assert weight_in(dest) == 1


def test_better_after_a_restart_is_better_than_what_was(tmp_path):
    keeper(tmp_path)(State(10, 2.0))
    better = keeper(tmp_path)(State(20, 1.0))
    assert (better.current_best, better.saved_train_state is None) == (Loss(4.0, 4), False)


@pytest.mark.parametrize("text", ['{"total": 4.0, "n"', "[1, 2]", '{"total": 4.0}', ""])
def test_a_result_that_cannot_be_read_is_passed_over_with_a_warning(tmp_path, text):
    keeper(tmp_path)(State(10, 1.0))
    (tmp_path / "results.json").write_text(text)
    with pytest.warns(UserWarning, match=r"results.json: .*; it is ignored"):
        found = keeper(tmp_path)(State(20, 2.0))
    assert found.current_best == Loss(16.0, 4)
    assert weight_in(tmp_path) == 2
    assert keeper(tmp_path)(State(30, 3.0)).current_best == Loss(16.0, 4)


@dataclass(frozen=True)
class Largest(EvalResults):
    """The largest outputs: fewer than two, of few data."""

    values: tuple = ()

    def reduce(self, other):
        return Largest(tuple(sorted(self.values + other.values)[-2:]))

    def is_better_than(self, other):
        return sum(self.values) < sum(other.values)


class LargestOutputs(SquaredOutput):
    def create_eval_results(self, dataset_name):
        return Largest()

    def evaluate(self, batch, state):
        return Largest(tuple(state.model(batch).square().flatten().tolist()))


def test_a_best_result_of_another_length_is_read_after_a_restart(tmp_path):
    def keeping(n):
        run = RunEval(LargestOutputs(), {"dev": [torch.ones(n, 1)]})
        return run.keep_best_checkpoint("dev", tmp_path)

    assert keeping(2)(State(10, 1.0)).current_best == Largest((1.0, 1.0))
    worse = keeping(1)(State(20, 3.0))
    assert (worse.current_best, worse.saved_train_state) == (Largest((1.0, 1.0)), None)
    assert weight_in(tmp_path) == 1


class Task(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        return model(batch).square().mean()


def test_training_goes_on_from_the_best_checkpoint(tmp_path):
    task = Task(lambda: nn.Linear(1, 1))
    state, step = task.initialize_train_state(0, torch.optim.Adam), task.make_training_step_fn()
    for _ in range(3):
        step(state, torch.ones(4, 1), 0)
    assert keeper(tmp_path)(state).saved_train_state is not None
    again = task.initialize_train_state(1, torch.optim.Adam, checkpoint_path=tmp_path)
    assert again.step == 3
    for s in (state, again):
        step(s, torch.ones(4, 1), 0)
    assert torch.equal(state.model.weight, again.model.weight)


def test_an_error_while_saving_leaves_the_best_that_was(tmp_path, monkeypatch):
    action = keeper(tmp_path)
    action(State(10, 2.0))

    def full(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as m:
        m.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"^no space left$"):
            action(State(20, 1.0))
    assert weight_in(tmp_path) == 2
    assert action(State(30, 1.5)).current_best == Loss(9.0, 4)  # the one at step 20 was not kept
    assert weight_in(tmp_path) == 1.5


@dataclass(frozen=True)
class Odd(Loss):
    thing: object = None


def test_results_that_cannot_be_written_are_an_error_before_anything_is(tmp_path):
    class Task(SquaredOutput):
        def finalize_eval_results(self, results):
            return Odd(thing=object())

    with pytest.raises(TypeError):
        Task().make_cron_action(ONES).keep_best_checkpoint("dev", tmp_path / "best")(State(1, 1.0))
    assert not (tmp_path / "best").exists()


def test_other_ranks_follow_and_write_nothing(tmp_path):
    class Second(SingleProcessComm):
        """Rank 1 of 2, to whom rank 0 tells what a process alone would find."""

        rank, size, answers = 1, 2, ()

        def allgather(self, obj):
            return [self.answers.pop(0), obj]

    said = []

    class First(Second):
        rank = 0

        def allgather(self, obj):
            said.append(obj)
            return [obj, obj]

    def act(comm, dest, weight):
        run = RunEval(SquaredOutput(), ONES, comm=comm)
        return RunEvalKeepBest(run, "dev", dest)(State(5, weight))

    by_first = act(First(), tmp_path / "first", 2.0)
    second = Second()
    second.answers = said
    by_second = act(second, tmp_path / "second", 2.0)
    assert by_second == by_first
    assert by_first.saved_train_state == tmp_path / "first" / "checkpoint-n0000001-step-00000005.pt"
    assert by_first.current_best == Loss(32.0, 8)  # of both
    assert not (tmp_path / "second").exists()


def test_there_must_be_such_a_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"no dataset 'train' .*'dev', 'test'"):
        RunEval(SquaredOutput(), ONES).keep_best_checkpoint("train", tmp_path)


@pytest.mark.slow
def test_a_fit_keeps_the_best_of_its_steps(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 7, 11)).astype("f4")
    vectors, losses = [], []

    class Task(SquaredOutput):
        def finalize_eval_results(self, results):
            losses.append(results.total)
            return results

    action = (
        Task()
        .make_cron_action({"dev": [torch.ones(4, 3, 2)]})
        .keep_best_checkpoint("dev", tmp_path)
    )
    est = Estimator(recurrent(2), spec=Spec(3, 3, 4), random_state=0)
    est.callbacks = [action, lambda loop: vectors.append(copy.deepcopy(loop.model).state_dict())]
    est.fit(x, x.mean(0, keepdims=True))
    best = vectors[int(np.argmin(losses))]
    kept = Checkpointer(tmp_path).read()["model"]
    assert len(losses) == len(vectors) > np.argmin(losses) + 1
    for name, value in best.items():
        assert torch.equal(kept[name], value)
