"""Tasks: the step equals plain torch's, randomness depends on seed and step alone, and training
resumes exactly.
"""

import copy
import logging
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import reset
from fluxutils_py.bobbin import (
    BaseTrainTask,
    CronTab,
    TaskStep,
    TrainTask,
    initialize_train_state,
)
from fluxutils_py.errors import LoadError
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, InMemory, Loop, StepInfo, TrainState


class Squares(TrainTask):
    """Mean squared error of (x, y)."""

    def compute_loss(self, model, batch, *, step, rng):
        x, y = batch
        return (model(x) - y).square().mean()


class Digits(TrainTask):
    """A recurrent model with dropout and noise, on whole series."""

    def compute_loss(self, model, batch, *, step, rng):
        (x,), (y,) = batch.inputs, batch.labels
        reset(model)
        noise = torch.randn(x.shape, generator=self.get_rng_dict(rng)["noise"])
        out = model((x + 0.1 * noise).transpose(0, 1))
        return nn.functional.mse_loss(out[-1], y), {"n": len(x), "out": out}


def data(n=23):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((n, 3), dtype="float32"))
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.25


def network():
    return nn.Sequential(LSTM(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))


class Killed(Exception):
    pass


def fail(loop):
    raise Killed


def digits(path=None, seed=4):
    task = Digits(network, required_rngs=["noise"])
    return task, task.initialize_train_state(seed, torch.optim.Adam, path)


def series(n=17):
    rng = np.random.default_rng(1)
    x, y = (torch.from_numpy(rng.standard_normal(s, dtype="float32")) for s in ((n, 6, 3), (n, 2)))
    return InMemory(x, y, batchsize=5, shuffle=True, random_state=3)


def same(a, b):
    return all(torch.equal(v, b[k]) for k, v in a.items())


# -- the step ------------------------------------------------------------------------------------------


def test_a_task_without_a_loss_says_what_to_define():
    state = TrainState(0, m := nn.Linear(1, 1), torch.optim.SGD(m.parameters()))
    with pytest.raises(NotImplementedError, match=r"^BaseTrainTask .*compute_loss\(self, mod"):
        BaseTrainTask().make_training_step_fn()(state, data(), 0)


def test_steps_equal_a_loop_by_hand():
    x, y = data()
    task = Squares(nn.Linear(3, 1))
    state = task.initialize_train_state(0, lambda p: torch.optim.Adam(p, lr=0.01))
    by_hand = copy.deepcopy(task.model)
    opt = torch.optim.Adam(by_hand.parameters(), lr=0.01)
    step = task.make_training_step_fn()
    for k in range(7):
        returned, info = step(state, (x, y), 0)
        loss = (by_hand(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        assert info == StepInfo(loss.item(), x.numel())
        assert returned is state
        assert state.step == k + 1
    assert same(state.model.state_dict(), by_hand.state_dict())
    assert all(p.grad is None for p in state.model.parameters())


def test_buffers_are_updated_without_any_compilation():
    task = Squares(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    state = task.initialize_train_state(0, torch.optim.SGD)
    state.model.eval()
    x, y = data()
    task.make_training_step_fn()(state, (x + 7, y), 0)
    assert torch.allclose(state.extra_vars["0.running_mean"], 0.1 * (x + 7).mean(0))
    assert state.extra_vars["0.num_batches_tracked"] == 1


def test_what_else_a_loss_returns_is_in_the_info_without_a_graph():
    task, state = digits()
    _, info = task.make_training_step_fn()(state, next(iter(series())), 0)
    assert info.metrics["n"] == 5
    assert not info.metrics["out"].requires_grad


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (1.0, r"^the loss .*scalar tensor, got float"),
        (
            torch.zeros(2),
            r"^the loss .*\(2,\); .*\.mean\(\)",
        ),
        (
            torch.zeros(()),
            r"^the loss .*parameters: .*without detach",
        ),
    ],
)
def test_what_is_no_loss_is_refused(found, told):
    class Wrong(BaseTrainTask):
        def compute_loss(self, model, batch, *, step, rng):
            return found

    model = nn.Linear(1, 1)
    state = TrainState(0, model, torch.optim.SGD(model.parameters()))
    with pytest.raises((TypeError, ValueError), match=told):
        Wrong().make_training_step_fn()(state, None if found is None else 1, 0)
    assert state.step == 0


@pytest.mark.parametrize("where", ["loss", "gradient norm"])
def test_a_step_that_is_not_finite_changes_no_parameter(where):
    class Bad(TrainTask):
        def compute_loss(self, model, batch, *, step, rng):
            out = model(batch).sum()
            return out * math.inf if where == "loss" else (out - out.detach()).sqrt()

    state = Bad(nn.Linear(3, 1)).initialize_train_state(0, torch.optim.Adam)
    before = copy.deepcopy(state.state_dict())
    with pytest.raises(FloatingPointError, match=f"^{where} is "):
        Bad(nn.Linear(3, 1)).make_training_step_fn()(state, data()[0], 0)
    assert same(state.model.state_dict(), before["model"])
    assert state.opt_state == before["opt"]
    assert state.step == 0


def test_recurrent_layers_go_on_from_batch_to_batch_and_are_cut_off():
    class Windows(TrainTask):
        def compute_loss(self, model, batch, *, step, rng):
            return model(batch).square().mean()

    x = torch.randn(6, 4, 3)
    task = Windows(LSTM(3, 5))
    state = task.initialize_train_state(0, lambda p: torch.optim.SGD(p, lr=0.0))
    step = task.make_training_step_fn(stateful=True)
    first, second = (step(state, part, 0)[1].loss for part in (x[:2], x[2:]))
    whole = task.model(x)
    assert first == pytest.approx(whole[:2].square().mean().item(), rel=1e-6)
    assert second == pytest.approx(whole[2:].square().mean().item(), rel=1e-6)
    assert all(
        not s.requires_grad
        for layer in state.model.modules()
        if hasattr(layer, "state")
        for s in layer.state
    )


# -- random numbers ------------------------------------------------------------------------------------


def test_generators_by_name_are_reproducible_and_do_not_touch_each_other():
    task = Squares(nn.Linear(1, 1), required_rngs=["dropout", "noise"])
    one, two = task.get_rng_dict(7), task.get_rng_dict(7, ["augment"])
    assert list(one) == ["dropout", "noise"]
    assert list(two) == ["dropout", "noise", "augment"]
    torch.rand(10, generator=two["dropout"])  # of no influence on the others
    draws = {name: torch.rand(1000, generator=g) for name, g in two.items()}
    assert torch.equal(torch.rand(1000, generator=one["noise"]), draws["noise"])
    apart = np.corrcoef([v.numpy() for v in draws.values()]) - np.eye(3)
    assert abs(apart).max() < 0.15
    assert not torch.equal(
        torch.rand(9, generator=task.get_rng_dict(8)["noise"]), draws["noise"][:9]
    )


def test_generators_of_one_generator_differ_each_time():
    task, rng = Squares(nn.Linear(1, 1), required_rngs=["a"]), torch.Generator().manual_seed(0)
    first, second = (torch.rand(9, generator=task.get_rng_dict(rng)["a"]) for _ in range(2))
    assert not torch.equal(first, second)
    again = torch.rand(9, generator=task.get_rng_dict(torch.Generator().manual_seed(0))["a"])
    assert torch.equal(first, again)


def test_a_step_depends_on_seed_and_step_alone_and_leaves_the_global_generator():
    batch = next(iter(series()))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    losses = []
    for disturbed in (False, True):
        task, state = digits()
        step = task.make_training_step_fn()
        for k in range(3):
            if disturbed:
                torch.rand(k + 1)
            loss = step(state, batch, 11)[1].loss
        losses.append(loss)
        if not disturbed:
            assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]


def test_steps_have_numbers_of_their_own():
    drawn = []

    class Draws(TrainTask):
        def compute_loss(self, model, batch, *, step, rng):
            drawn.append((torch.rand((), generator=rng).item(), torch.rand(()).item()))
            return model.weight.sum()

    task = Draws(nn.Linear(2, 1))
    state, step = task.initialize_train_state(0, torch.optim.SGD), task.make_training_step_fn()
    for _ in range(5):
        step(state, torch.ones(2), 3)
    assert len({number for pair in drawn for number in pair}) == 10


# -- beginning -----------------------------------------------------------------------------------------


def test_a_seed_decides_the_weights_that_are_made_here():
    (_, a), (_, b), (_, c) = digits(seed=1), digits(seed=1), digits(seed=2)
    assert same(a.model_vars, b.model_vars)
    assert not same(a.model_vars, c.model_vars)


def test_a_module_is_copied_with_its_weights():
    model = nn.Linear(3, 1)
    state = Squares(model).initialize_train_state(0, torch.optim.SGD)
    assert same(state.model.state_dict(), model.state_dict())
    assert state.model is not model
    assert state.opt.param_groups[0]["params"][0] is state.model.weight


def test_lazy_layers_learn_their_sizes_from_an_example_and_nothing_else_does():
    def make():
        return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.LazyLinear(2))

    state = Squares(make, (torch.ones(4, 3),)).initialize_train_state(3, torch.optim.SGD)
    assert state.params["2.weight"].shape == (2, 3)
    assert state.extra_vars["0.num_batches_tracked"] == 0
    assert state.model.training
    assert all(m.training for m in state.model.modules())
    with pytest.raises(
        ValueError,
        match=r"no sizes.*example_args$",
    ):
        Squares(make).initialize_train_state(3, torch.optim.SGD)


@pytest.mark.parametrize(
    ("model", "opt", "error", "told"),
    [
        (
            nn.Identity(),
            torch.optim.SGD,
            ValueError,
            r"^the model .*parameters: .*requires_grad",
        ),
        (
            nn.Linear(1, 1),
            "adam",
            TypeError,
            r"^opt .*torch.optim.AdamW.* got 'adam'$",
        ),
        (
            nn.Linear(1, 1),
            torch.optim.SGD(nn.Linear(1, 1).parameters()),
            TypeError,
            "^opt must be .*; got SGD",
        ),
    ],
)
def test_what_cannot_begin_says_why(model, opt, error, told):
    with pytest.raises(error, match=f"(?s){told}"):
        Squares(model).initialize_train_state(0, opt)


# -- the state -----------------------------------------------------------------------------------------


def test_a_state_shows_parameters_buffers_and_optimizer_and_comes_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    state = TrainState(3, model, torch.optim.Adam(model.parameters()))
    assert list(state.params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(state.extra_vars) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert list(state.model_vars) == [*state.params, *state.extra_vars]
    assert state.params["1.weight"] is model[1].weight
    Squares(model).make_training_step_fn()(state, data(), 0)
    other = copy.deepcopy(model)
    back = TrainState(0, other, torch.optim.Adam(other.parameters()))
    kept = copy.deepcopy(state.state_dict())
    assert list(kept) == ["step", "model", "opt"]
    back.load_state_dict(kept)
    Squares(model).make_training_step_fn()(state, data(), 0)
    Squares(model).make_training_step_fn()(back, data(), 0)
    assert back.step == state.step == 5
    assert same(back.model_vars, state.model_vars)


def test_a_model_is_called_with_other_parameters_without_a_trace():
    model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 2))
    state = TrainState(0, model, torch.optim.SGD(model.parameters()))
    x = torch.randn(4, 6, 3)
    model(x)
    before = [s.clone() for s in model[0].state]
    head = torch.zeros(2, 5, requires_grad=True)
    out = state.apply_fn({**state.model_vars, "1.weight": head}, x)
    assert torch.equal(out, model[1].bias.expand(4, 6, 2))
    assert all(torch.equal(a, b) for a, b in zip(model[0].state, before, strict=True))
    assert not torch.equal(model[1].weight, head)
    out.sum().backward()
    assert head.grad is not None


# -- going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_a_loop_of_ones_own_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, stop):
    batches = list(series())

    def run(state, task, until):
        step = task.make_training_step_fn()
        while state.step < until:
            state, _ = step(state, batches[state.step % len(batches)], 5)
        return state

    task, state = digits(tmp_path / "not there yet")
    whole = run(state, task, 9)
    task, state = digits()
    task.make_checkpoint_saver(tmp_path)(run(state, task, stop))
    task, back = digits(tmp_path, seed=99)
    assert back.step == stop
    assert same(run(back, task, 9).model_vars, whole.model_vars)


@pytest.mark.few
@pytest.mark.parametrize("stop", [2, 4, 7])
def test_a_loop_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, stop):
    def train(dir, end=None):
        task, state = digits()
        batches = series()
        loop = Loop(TaskStep(task, state, seed=5))
        saves = Checkpointer(dir).track(**state.parts(), loop=loop, data=batches)
        saves.restore()
        cron = CronTab().schedule(saves.save, at_step=stop)
        cron.schedule(fail, at_step=10**6 if end is None else end)
        loop.hooks.attach(cron)
        loop.run_epochs(batches, 3)
        return state, loop

    whole, _ = train(tmp_path / "a")
    with pytest.raises(Killed):
        train(tmp_path / "b", end=stop + 1)
    state, loop = train(tmp_path / "b")
    assert state.step == loop.step == whole.step == 12
    assert same(state.model_vars, whole.model_vars)


def test_recurrent_state_goes_on_from_a_checkpoint_too(tmp_path):
    class Windows(TrainTask):
        def compute_loss(self, model, batch, *, step, rng):
            return model(batch).square().mean()

    batches = list(torch.randn(10, 4, 3).split(2))

    def train(end=None, restored=False):
        task = Windows(lambda: LSTM(3, 5))
        state = task.initialize_train_state(0, torch.optim.Adam)
        loop = Loop(TaskStep(task, state))
        saves = Checkpointer(tmp_path).track(**state.parts(), loop=loop)
        assert saves.restore() == restored
        cron = CronTab().schedule(saves.save, at_step=3 if end else 10**6)
        loop.hooks.attach(cron.schedule(fail, at_step=end or 10**6))
        loop.run_epochs(batches, 2)
        return state

    whole = train()
    with pytest.raises(Killed):
        train(end=4)
    assert same(train(restored=True).model_vars, whole.model_vars)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    Checkpointer(tmp_path).track(other=nn.Linear(1, 1)).save(TrainState(1, nn.Linear(1, 1), None))
    path = Checkpointer(tmp_path).latest()
    told = rf"^{re.escape(str(path.parent))} .*\['other'\]; .*'model', 'optimizer'"
    with pytest.raises(LoadError, match=told):
        digits(tmp_path)
    task = Squares(nn.Linear(1, 1))
    task.make_checkpoint_saver(tmp_path)(task.initialize_train_state(0, torch.optim.SGD))
    with pytest.raises(LoadError, match="does not fit, its model: Error"):
        digits(tmp_path)


def test_a_checkpointer_that_tracks_nothing_saves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"nothing is tracked.*track\(model=model"):
        Checkpointer(tmp_path / "x").save(TrainState(1, nn.Linear(1, 1), None))
    assert not (tmp_path / "x").exists()


# -- logs ----------------------------------------------------------------------------------------------


def test_the_log_has_step_and_loss(caplog):
    task, state = digits()
    step = task.make_training_step_fn()
    cron = CronTab().schedule(task.make_log_writer(loglevel=logging.WARNING), step_interval=2)
    for batch in series():
        state, info = step(state, batch, 0)
        cron.run(state, info)
        last = info if state.step == 4 else None
    assert [r.getMessage() for r in caplog.records][1:] == [f"@step=4, loss={last.loss:f}"]
    assert {r.levelno for r in caplog.records} == {logging.WARNING}
    loop = Loop(TaskStep(task, state))
    logger = logging.getLogger("mine")
    loop.hooks.attach(CronTab().schedule(task.make_log_writer(logger, logging.ERROR), at_step=5))
    loop.run_epochs(series(), 1)
    assert [(r.name, r.getMessage()) for r in caplog.records][2:3] != []
    assert caplog.records[-1].name == "mine"
    assert caplog.records[-1].getMessage().startswith("@step=5, loss=")


# -- as bobbin calls them ------------------------------------------------------------------------------


@pytest.mark.parametrize("as_keyword", [False, True])
def test_example_arguments_may_be_arrays(as_keyword):
    x = np.zeros((5, 3), "float32")
    task = Squares(
        lambda: nn.LazyLinear(2),
        **({"example_kwargs": {"input": x}} if as_keyword else {"example_args": (x,)}),
    )
    assert task.initialize_train_state(0, torch.optim.SGD).params["weight"].shape == (2, 3)


def test_a_state_of_given_variables_and_of_a_checkpoint(tmp_path):
    """bobbin's function of this name, of which the task's method is a special case."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    given = {"0.bias": torch.tensor([1.0, 2.0]), "1.running_mean": torch.tensor([3.0, 4.0])}
    before = copy.deepcopy(model.state_dict())
    state = initialize_train_state(model, given, torch.optim.Adam, tmp_path / "none")
    expected = {**before, **given}
    assert all(torch.equal(v, expected[name]) for name, v in state.model_vars.items())
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    assert (state.step, type(state.opt)) == (0, torch.optim.Adam)
    assert state.opt.param_groups[0]["params"] == list(state.model.parameters())
    state = state.replace(step=5, params={"0.bias": torch.tensor([5.0, 6.0])})
    BaseTrainTask().make_checkpoint_saver(tmp_path)(state)
    restored = initialize_train_state(model, given, torch.optim.Adam, tmp_path)
    assert (restored.step, restored.params["0.bias"].tolist()) == (5, [5.0, 6.0])
    with pytest.raises(ValueError, match=r"'bias' .*only 0\.weight"):
        initialize_train_state(model, {"bias": given["0.bias"]}, torch.optim.Adam)
