"""fluxutils_py.training.checkpointer: signals that announce the end lead to a checkpoint; of ranks:
tests/mpi.
"""

import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, net2vec
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, InMemory, Loop

NUMBERS = {"SIGTERM": 143, "SIGUSR1": 128 + signal.SIGUSR1}
X = np.random.default_rng(0).normal(size=(2, 37, 43))
Y = X[:1].cumsum(2)


def estimator(*callbacks):
    torch.manual_seed(1)
    model = nn.Sequential(LSTM(2, 3), nn.Dropout(0.2), nn.Linear(3, 1))
    spec = {"epochs": 2, "batchsize": 8, "seqsize": 10, "shuffle": True, "accumulate": 3}
    return Estimator(
        model, None, None, spec, callbacks=list(callbacks), random_state=0, comm=None, verbose=False
    )


def at_step(step, name, event="on_step"):
    """A callback that sends this process a signal after a step."""

    class Sender:
        pass

    def send(loop):
        if loop.step == step:
            os.kill(os.getpid(), getattr(signal, name))

    setattr(Sender, event, staticmethod(send))
    return Sender()


@pytest.fixture(autouse=True)
def default_handlers():
    before = {name: signal.getsignal(getattr(signal, name)) for name in NUMBERS}
    assert set(before.values()) == {signal.SIG_DFL}
    yield
    after = {name: signal.getsignal(getattr(signal, name)) for name in NUMBERS}
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_a_signal_leads_to_a_checkpoint_from_which_the_fit_goes_on(name, tmp_path, caplog):
    saves = Checkpointer(tmp_path)
    with pytest.raises(SystemExit) as error:
        estimator(saves, at_step(7, name)).fit(X, Y)
    assert error.value.code == NUMBERS[name]
    assert saves.latest_step() == 7  # of 2 * 5 * 5, in the middle of an epoch
    assert f"{name}: saved {saves.latest()}" in caplog.text
    resumed, uninterrupted = estimator(saves).fit(X, Y), estimator().fit(X, Y)
    assert torch.equal(net2vec(resumed), net2vec(uninterrupted))
    assert resumed.loss_curve_ == uninterrupted.loss_curve_


@pytest.mark.slow
def test_in_a_loop_of_any_kind(tmp_path):
    def train(*hooks):
        torch.manual_seed(0)
        data = InMemory(
            torch.randn(20, 3), torch.randn(20, 1), batchsize=8, shuffle=True, random_state=0
        )
        model = nn.Linear(3, 1)
        trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam, comm=None)
        loop = Loop(trainer)
        saves = Checkpointer(tmp_path).track(
            model=model, optimizer=trainer.optimizer, loop=loop, data=data
        )
        saves.restore()
        for hook in (saves, *hooks):
            loop.hooks.attach(hook)
        loop.run_epochs(data, 4)
        return model.weight

    with pytest.raises(SystemExit):
        train(at_step(5, "SIGUSR1"))
    resumed = train()
    for path in tmp_path.iterdir():
        path.unlink()
    assert torch.equal(resumed, train())


@pytest.mark.slow
def test_handlers_of_others_stay(tmp_path):
    found = []
    signal.signal(signal.SIGUSR1, lambda number, frame: found.append(number))
    try:
        estimator(Checkpointer(tmp_path), at_step(7, "SIGUSR1")).fit(X, Y)
        assert found == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_two_checkpointers_answer_once(tmp_path):
    saves = Checkpointer(tmp_path / "a"), Checkpointer(tmp_path / "b")
    with pytest.raises(SystemExit):
        estimator(*saves, at_step(7, "SIGTERM")).fit(X, Y)
    assert [c.latest_step() for c in saves] == [7, -1]


@pytest.mark.slow
def test_a_signal_after_the_last_step_is_for_the_program(tmp_path):
    """SIGUSR1 finds nothing left to save; SIGTERM still ends the program."""
    est = estimator(Checkpointer(tmp_path), at_step(50, "SIGUSR1", "on_end")).fit(X, Y)
    assert est.n_iter_ == 2
    found = []
    terminated = at_step(50, "SIGTERM", "on_end")
    child = os.fork()
    if child == 0:
        found = 1
        try:
            estimator(Checkpointer(tmp_path / "other"), terminated).fit(X, Y)
        finally:
            os._exit(found)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


@pytest.mark.slow
def test_other_threads_have_no_signals(tmp_path):
    found = []
    t = threading.Thread(target=lambda: found.append(estimator(Checkpointer(tmp_path)).fit(X, Y)))
    t.start()
    t.join(60)
    assert found[0].n_iter_ == 2
