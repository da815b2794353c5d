"""Steps and evaluation of a trainer, against plain torch."""

import copy
import functools
import math

import pytest
import torch
from torch import nn

from fluxutils_py.gomlx import Trainer
from fluxutils_py.gomlx.running_metrics import EMAMetric, MeanMetric
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.states import states
from fluxutils_py.training import InMemory, Loop
from fluxutils_py.training.added_losses import add_loss, get_losses
from fluxutils_py.training.minibatch import Minibatch

mse = nn.MSELoss()


def data(n=103, **kwargs):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return InMemory(x, x.sum(1, keepdim=True).sin(), batchsize=10, **kwargs)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


class Penalized(nn.Module):
    """A model that adds two losses of its own."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = net() if inner is None else inner

    def forward(self, x):
        hidden = self.inner[:2](x)
        add_loss(0.1 * hidden.square())  # not reduced
        add_loss(0.01 * self.inner[0].weight.square().sum())
        return self.inner[2:](hidden)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- training ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_equals_a_plain_loop():
    model, plain = net(), net()
    trainer = Trainer(model, mse, torch.optim.Adam)
    Loop(trainer).run_epochs(data(), 3)
    optimizer, losses = torch.optim.Adam(plain.parameters()), []
    for batch in [*data(), *data(), *data()]:
        optimizer.zero_grad()
        loss = mse(plain(*batch.inputs), *batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert torch.equal(weights(model), weights(plain))
    assert trainer.optimizer.state_dict()["state"][0]["step"] == len(losses) == 33


@pytest.mark.parametrize("loss_fn", [mse, None])
def test_added_losses_give_the_gradient_of_the_sum(loss_fn):
    model, plain = Penalized(), net()
    trainer = Trainer(model, loss_fn, lambda params: torch.optim.SGD(params, lr=1.0))
    (batch,) = list(data(9))
    info = trainer.train_step(batch)
    hidden = plain[:2](*batch.inputs)
    total = 0.1 * hidden.square().mean() + 0.01 * plain[0].weight.square().sum()
    if loss_fn is not None:
        total = total + mse(plain[2:](hidden), *batch.labels)
    total.backward()
    assert info.loss == pytest.approx(total.item(), rel=1e-14)
    expected = [p.detach() - (0 if p.grad is None else p.grad) for p in plain.parameters()]
    for p, q in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(p, q, rtol=1e-13, atol=1e-15)


def test_evaluation_adds_losses_too_and_names_both():
    trainer = Trainer(Penalized(), mse)
    (batch,) = list(data(9))
    found = trainer.eval([batch])
    hidden = trainer.model.inner[:2](*batch.inputs)
    own = mse(trainer.model.inner[2:](hidden), *batch.labels).item()
    added = (
        0.1 * hidden.square().mean() + 0.01 * trainer.model.inner[0].weight.square().sum()
    ).item()
    assert found == pytest.approx({"loss": own + added, "loss_fn": own}, rel=1e-13)


def test_a_loss_of_all_cells_is_the_mean():
    whole, cells = (
        Trainer(net(), nn.MSELoss(reduction=r), torch.optim.Adam) for r in ("mean", "none")
    )
    for trainer in (whole, cells):
        Loop(trainer).run_epochs(data(), 1)
    assert torch.allclose(weights(whole.model), weights(cells.model), rtol=1e-13)


def test_weights_of_cells_leave_out_dead_ones():
    model, plain = net(), net()
    x, y = torch.randn(6, 4, 3, dtype=torch.float64), torch.randn(6, 4, 1, dtype=torch.float64)
    w = torch.rand(6, 4, 1, dtype=torch.float64)
    w[2:, 1] = 0
    y[2:, 1] = math.nan
    trainer = Trainer(
        model, nn.MSELoss(reduction="none"), lambda params: torch.optim.SGD(params, lr=1.0)
    )
    info = trainer.train_step(Minibatch((x,), (y.nan_to_num(),), weight=w))
    live = w.squeeze(-1) > 0
    loss = (w.squeeze(-1)[live] * (plain(x) - y).squeeze(-1)[live].square()).mean()
    loss.backward()
    assert info.loss == pytest.approx(loss.item(), rel=1e-13)
    assert info.n_live == live.sum() == 20
    expected = torch.cat([(p.detach() - p.grad).flatten() for p in plain.parameters()])
    assert torch.allclose(weights(model), expected, rtol=1e-12)
    with pytest.raises(
        ValueError,
        match=r"^the batch has weights.*loss .*Trainer",
    ):
        Trainer(model, mse, torch.optim.Adam).train_step(Minibatch((x,), (y,), weight=w))


def test_updates_after_each_step_constrain_parameters_and_not_its_loss():
    def max_norm(model):
        model[0].weight.copy_(torch.renorm(model[0].weight, 2, 0, 0.3))

    plain, norms, losses = Trainer(net(), mse, torch.optim.Adam), [], []
    trainer = Trainer(net(), mse, torch.optim.Adam).add_per_step_update(max_norm)
    loop = Loop(trainer)
    loop.on_step(
        "note", lambda loop: norms.append(trainer.model[0].weight.norm(dim=1).max().item())
    )
    loop.on_step("note", lambda loop: losses.append(loop.batch_loss))
    assert trainer.model[0].weight.norm(dim=1).max() > 0.4
    loop.run_epochs(data(), 1)
    assert max(norms) <= 0.3 + 1e-12
    assert losses[0] == plain.train_step(next(iter(data()))).loss
    before = weights(trainer.model)
    trainer.model[0].weight.data.mul_(9)
    trainer.eval(data())
    assert trainer.model[0].weight.norm() > 1  # not in evaluation
    assert torch.equal(weights(trainer.model)[15:], before[15:])


def test_an_update_of_the_same_name_replaces_the_other():
    calls = []
    trainer = Trainer(net(), mse, torch.optim.Adam)
    for n in range(3):
        trainer.add_per_step_update(
            lambda model, n=n: calls.append(n), "constraint" if n else "other"
        )
    trainer.train_step(next(iter(data())))
    assert calls == [0, 2]


def test_recurrent_layers_carry_state_only_where_the_dataset_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))
    x, y = torch.randn(6, 5, 3), torch.randn(6, 5, 1)
    kept = copy.deepcopy(model)
    trainer = Trainer(model, mse, lambda params: torch.optim.SGD(params, lr=0.0))
    first = trainer.train_step(Minibatch((x[:4],), (y[:4],))).loss
    second = trainer.train_step(Minibatch((x[4:],), (y[4:],), first=False)).loss
    whole = (kept(x) - y).square()
    assert first == pytest.approx(whole[:4].mean().item(), rel=1e-5)
    assert second == pytest.approx(whole[4:].mean().item(), rel=1e-5)
    before = states(model)
    assert not before[0].requires_grad
    trainer.eval([Minibatch((x,), (y,))])
    assert all(torch.equal(a, b) for a, b in zip(before, states(model), strict=True))
    assert trainer.train_step(Minibatch((x[:4],), (y[:4],))).loss == first


# -- metrics -------------------------------------------------------------------------------------------


def distance(prediction, label):
    return (prediction - label).abs()


def test_metrics_of_training_are_those_of_gomlx_and_ones_own():
    trainer = Trainer(
        Penalized(), mse, torch.optim.Adam, [EMAMetric(distance, new_example_weight=0.5)]
    )
    plain, optimizer, expected = Penalized(), None, []
    optimizer = torch.optim.Adam(plain.parameters())
    ema = [EMAMetric(), EMAMetric(), EMAMetric(new_example_weight=0.5)]
    loop, found = Loop(trainer), []
    loop.on_step("note", lambda loop: found.append(dict(loop.metrics)))
    loop.run_epochs(data(), 1)
    for batch in data():
        optimizer.zero_grad()
        x, y = batch.inputs[0], batch.labels[0]
        hidden = plain.inner[:2](x)
        prediction = plain.inner[2:](hidden)
        own = mse(prediction, y)
        total = own + 0.1 * hidden.square().mean() + 0.01 * plain.inner[0].weight.square().sum()
        total.backward()
        optimizer.step()
        for metric, value in zip(ema, (total, own, distance(prediction, y).mean()), strict=True):
            metric.update(value.item())
        names = ("batch_loss", "ema_loss", "ema_loss_fn", "distance")
        expected.append(dict(zip(names, (total.item(), *(m.compute() for m in ema)), strict=True)))
    assert len(found) == len(expected) == 11
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-12)
    assert trainer.train_metrics[3].compute() != 0
    assert [m.short_name for m in trainer.train_metrics] == ["loss+", "~loss+", "~loss", "distance"]
    assert [m.name for m in Trainer(net(), None).train_metrics] == ["batch_loss", "ema_loss"]


def test_metrics_begin_anew_with_each_run():
    trainer = Trainer(net(), mse, torch.optim.Adam)
    loop, counts = Loop(trainer), []
    loop.on_end("note", lambda loop: counts.append(trainer.train_metrics[1].count))
    loop.run_epochs(data(), 2)
    loop.run_epochs(data(), 1)
    assert counts == [22, 11]


def test_evaluation_weighs_short_batches_less():
    trainer = Trainer(nn.Identity(), nn.MSELoss(), None, eval_metrics=[MeanMetric(distance)])
    batches = [
        (torch.full((n, 1), v), torch.zeros(n, 1)) for v, n in ((1.0, 100), (2.0, 100), (9.0, 3))
    ]
    assert trainer.eval(batches)["distance"] == pytest.approx(1.6108, abs=1e-4)
    assert trainer.eval(batches)["loss"] == pytest.approx((100 + 400 + 243) / 203, rel=1e-6)
    windows = [(x[:, None].expand(-1, 7, -1), y[:, None].expand(-1, 7, -1)) for x, y in batches]
    assert trainer.eval(windows)["distance"] == pytest.approx(1.6108, abs=1e-4)  # time first
    weighed = [(*batch, w) for batch, w in zip(batches, (1, 1, 2), strict=True)]
    assert trainer.eval(weighed)["distance"] == pytest.approx((1 + 2 + 18) / 4, rel=1e-6)


def test_anything_that_updates_computes_and_resets_is_a_metric():
    class Largest:  # as those of torchmetrics
        def reset(self):
            self.value = torch.tensor(-math.inf)

        def update(self, prediction, target):
            assert not prediction.requires_grad
            self.value = torch.maximum(self.value, (prediction - target).max())

        def compute(self):
            return self.value

    largest = Largest()
    largest.reset()
    trainer = Trainer(net(), mse, torch.optim.Adam, [largest], [Largest()])
    found = trainer.eval(data())["Largest"]
    expected = max((trainer.model(b.inputs[0]) - b.labels[0]).max().item() for b in data())
    assert (type(found), found) == (float, pytest.approx(expected))
    loop = Loop(trainer)
    loop.run_epochs(data(), 1)
    assert loop.metrics["Largest"] > 0
    trainer.load_state_dict(trainer.state_dict())  # which it has no part in


def test_metrics_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"^metrics .*'distance', 'distance'"):
        Trainer(net(), mse, None, [MeanMetric(distance), EMAMetric(distance)])


def test_evaluation_leaves_the_model_as_it_was():
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 1)
    ).double()
    model[2].eval()  # frozen by the user
    model[0].register_forward_hook(
        lambda m, x, y: seen.append((m.training, torch.is_grad_enabled()))
    )
    seen, before = [], copy.deepcopy(model.state_dict())
    trainer = Trainer(model, mse, torch.optim.Adam)
    assert trainer.eval(data()) == trainer.eval(data())
    assert set(seen) == {(False, False)}
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_begins_at_the_beginning_and_needs_data():
    class Noted(InMemory):
        resets = 0

        def reset(self):
            self.resets += 1

    noted = Noted(torch.zeros(4, 3).double(), torch.zeros(4, 1).double(), batchsize=3, name="noted")
    trainer = Trainer(net(), mse)
    trainer.eval(noted)
    assert noted.resets == 1
    with pytest.raises(ValueError, match=r"^dataset 'list' has no batches"):
        trainer.eval([])


def test_a_run_of_evaluation_steps_accumulates():
    trainer = Trainer(net(), mse)
    found = [trainer.eval_step(batch) for batch in data()]
    assert found[-1] == trainer.eval(data())
    assert found[0] != found[-1]


# -- kinds of batches ----------------------------------------------------------------------------------


class Fork(nn.Module):
    """Treats kinds of batches apart, and takes several inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, spec, *inputs):
        return self.scale * (inputs[0] if spec == "one" else sum(inputs))


def test_the_model_is_told_of_the_kind_and_given_all_inputs():
    x = torch.randn(5, 2)
    trainer = Trainer(
        Fork(), lambda prediction, label: (prediction - label).abs().sum(), takes_kind=True
    )
    assert trainer.eval([Minibatch((x, x), (x,), "one")])["loss"] == 0
    assert trainer.eval([Minibatch((x, x, x), (3 * x,), ["several"])])["loss"] == pytest.approx(
        0, abs=1e-5
    )


def test_several_predictions_and_labels_are_tuples():
    class Two(nn.Module):
        def forward(self, x):
            return x, 2 * x

    def loss(prediction, label):
        assert type(prediction) is type(label) is tuple
        return sum((p - q).square().mean() for p, q in zip(prediction, label, strict=True))

    x = torch.randn(5, 2)
    assert Trainer(Two(), loss).eval([((x,), (x, 2 * x))])["loss"] == 0


def test_an_executor_is_made_once_for_each_kind_and_mode():
    made, x = [], torch.randn(5, 2)
    trainer = Trainer(Fork(), mse, torch.optim.Adam, takes_kind=True)
    assert (
        trainer.on_exec_creation(
            lambda executor, mode: made.append((executor((x, x)).sum().item(), mode))
        )
        is trainer
    )
    for _ in range(3):
        for spec in ("one", ["not hashable"]):
            trainer.train_step(Minibatch((x, x), (x,), spec))
            trainer.eval_step(Minibatch((x, x), (x,), spec))
    assert [mode for _, mode in made] == ["train", "eval"] * 2
    assert made[0][0] == pytest.approx(x.sum().item(), rel=1e-4)


def test_there_are_exactly_so_many_executors():
    trainer = Trainer(net(), mse, torch.optim.Adam, max_kinds=4)
    (batch,) = list(data(5))
    for spec in range(3):
        trainer.train_step(Minibatch(batch.inputs, batch.labels, spec))
    trainer.eval_step(Minibatch(batch.inputs, batch.labels, 0))
    with pytest.raises(RuntimeError) as caught:
        trainer.eval_step(Minibatch(batch.inputs, batch.labels, 1))
    assert str(caught.value) == (
        "kind 1 in mode 'eval' is one more than max_kinds=4: a kind stands for many batches, not "
        "for one; use fewer, or raise max_kinds"
    )
    trainer.train_step(Minibatch(batch.inputs, batch.labels, 2))
    assert Trainer(net()).max_kinds == 20


def test_a_trainer_can_be_moved_with_what_its_optimizer_remembers():
    trainer = Trainer(net(), mse, torch.optim.Adam)
    Loop(trainer).run_epochs(data(), 1)
    twin = Trainer(copy.deepcopy(trainer.model), mse, torch.optim.Adam)
    twin.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    assert twin.to("cpu") is twin
    for t in (trainer, twin):
        Loop(t).run_epochs(data(), 1)
    assert torch.equal(weights(trainer.model), weights(twin.model))


# -- mistakes ------------------------------------------------------------------------------------------

X, Y = torch.randn(4, 3).double(), torch.randn(4, 1).double()


@pytest.mark.parametrize(
    ("trainer", "batch", "message"),
    [
        (Trainer(net(), mse), (X, Y), "this Trainer has no optimizer: give it opt to train"),
        (
            Trainer(net(), mse, torch.optim.Adam),
            ((), Y),
            "the batch has no inputs; a model needs at least one",
        ),
        (
            Trainer(net(), mse, torch.optim.Adam),
            ((X, None), Y),
            "an input or label of the batch is None; leave it out, and give such batches another "
            "kind",
        ),
        (
            Trainer(net(), None, torch.optim.Adam),
            (X, Y),
            "there is no loss: give the Trainer a loss_fn, or call add_loss in the model",
        ),
        (
            Trainer(net(), lambda p, y: p.detach().mean(), torch.optim.Adam),
            (X, Y),
            "the loss does not depend on the model's parameters: compute it from the model's "
            "output, without detach, item or numpy",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(trainer, batch, message):
    with pytest.raises(ValueError, match=r".") as caught:
        trainer.train_step(batch)
    assert str(caught.value) == message


def test_a_loss_must_be_a_tensor():
    with pytest.raises(TypeError, match=r"^the loss must be a tensor, got float$"):
        Trainer(net(), lambda p, y: p.sum().item(), torch.optim.Adam).train_step((X, Y))


@pytest.mark.parametrize(
    ("loss_fn", "what"),
    [
        (lambda p, y: (p - y).square().mean() / 0, "loss is inf"),
        (lambda p, y: p.mean() * math.nan, "loss is nan"),
        (
            lambda p, y: (p.detach() - p).abs().sqrt().mean(),
            "gradient norm is nan, in the gradient of parameter '2.bias'",
        ),
    ],
)
def test_what_is_not_finite_changes_no_parameter(loss_fn, what):
    trainer = Trainer(net(), loss_fn, torch.optim.Adam)
    before = weights(trainer.model)
    with pytest.raises(FloatingPointError) as caught:
        trainer.train_step((X, Y))
    assert str(caught.value) == (
        f"{what}; the parameters are as before this step. Lower the learning rate, set clip, or "
        "look for extreme values in the data"
    )
    assert torch.equal(weights(trainer.model), before)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_losses_are_added_within_a_step_only():
    with pytest.raises(RuntimeError) as caught:
        Penalized()(X)
    assert (
        str(caught.value)
        == "add_loss has no effect outside a step of a Trainer: call it in the model"
    )
    assert get_losses() is None


def test_added_losses_do_not_leak_from_step_to_step():
    class Once(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            self.calls += 1
            assert get_losses() is None
            if self.calls != 2:
                add_loss(torch.tensor(7.0))
                add_loss(torch.tensor([1.0, 2.0]))
                assert get_losses() == 8.5
            if self.calls == 3:
                raise KeyError("boom")
            return self.inner(x)

    trainer = Trainer(Once(), lambda p, y: 0 * p.mean(), torch.optim.Adam)
    assert trainer.train_step((X, Y)).loss == 8.5
    assert trainer.train_step((X, Y)).loss == 0
    with pytest.raises(KeyError):
        trainer.train_step((X, Y))
    assert get_losses() is None
    with pytest.raises(RuntimeError):
        add_loss(X)
    assert trainer.train_step((X, Y)).loss == 8.5


@pytest.mark.parametrize("form", [list, tuple])
def test_a_list_of_one_prediction_is_this_prediction(form):
    """Models of gomlx return a slice of predictions, even of one."""

    class OfOne(nn.Linear):
        def forward(self, x):
            return form([super().forward(x)])

    x, y = torch.randn(7, 3), torch.randn(7, 1)
    found = []
    for make in OfOne, nn.Linear:
        torch.manual_seed(0)
        trainer = Trainer(
            make(3, 1),
            nn.MSELoss(),
            torch.optim.SGD,
            [MeanMetric(nn.L1Loss(), "mae")],
        )
        metrics = trainer.train_step((x, y)).metrics
        found.append([metrics["batch_loss"], metrics["mae"], trainer.eval_step((x, y))["loss"]])
    assert found[0] == found[1]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("opt", "expected"),
    [
        # where the gradient is finite, or nowhere in a parameter with an element that is not
        (functools.partial(torch.optim.SGD, lr=1.0), ([3.0, 4.0], 4.0)),
        (functools.partial(torch.optim.Adam, lr=1.0, eps=0.0), ([4.0, 4.0], 4.0)),
    ],
)
def test_clip_nan_drops_what_is_not_finite_of_a_gradient_as_gomlx_does(opt, expected, accumulate):
    class Roots(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor([4.0, 4.0]))
            self.b = nn.Parameter(torch.tensor(5.0))

        def forward(self, x):
            # the derivative of sqrt at 0 is infinite, times 0 it is NaN
            return self.a[0] + (0 * self.a[1]).sqrt() + self.b + 0 * x.sum()

    def train(**settings):
        model = Roots()
        trainer = Trainer(model, lambda p, y: p, opt, accumulate=accumulate, **settings)
        for _ in range(accumulate):
            trainer.train_step((torch.ones(2, 1), torch.ones(2, 1)))
        return model

    model = train(clip_nan=True)
    assert (model.a.tolist(), model.b.item()) == expected
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        train()
    with pytest.raises(FloatingPointError, match="loss is nan"):  # as gomlx's loop says
        Trainer(Roots(), lambda p, y: p * torch.nan, opt, clip_nan=True).train_step(
            (torch.ones(2, 1), torch.ones(2, 1))
        )
