"""A batch that gave NaN is run again as the trainer ran it (nonfinite_batch)."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, seqloss
from fluxutils_py.bobbin import BaseTrainTask
from fluxutils_py.nn import LSTM, Recur
from fluxutils_py.praytools.functional import itrain, ptrain, train, ttrain
from fluxutils_py.training import TrainState
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.nonfinite_batch import find_nonfinite


def found_in(model, batch, takes_kind=False, states=None):
    def run_again(batch):
        return model(batch.kind, *batch.inputs) if takes_kind else model(*batch.inputs)

    return find_nonfinite(model, batch, run_again, states)


class ByKind(nn.Module):
    """Divides by zero for one kind of batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, kind, x):
        return self.inner(x) / (0.0 if kind == "bad" else 1.0)


class Root(nn.Module):
    def forward(self, x):
        return (-1 - x.square()).sqrt()


def test_the_kind_of_the_batch_is_that_of_the_step():
    model, x = ByKind(), torch.ones(3, 2)
    found = [found_in(model, Minibatch((x,), kind=kind), True) for kind in "ab"]
    assert found == ["", ""]
    bad = found_in(model, Minibatch((x,), kind="bad"), True)
    assert bad == ", first given by the model (ByKind)"


def test_the_state_of_another_number_of_series_does_not_hinder():
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))
    model(torch.ones(4, 2))
    model.append(Root())
    found = found_in(model, Minibatch((torch.ones(5, 2),)), states=[None])
    assert found == ", first given by module '2' (Root)"
    assert model[0].state[0].shape[1] == 4


class Logarithm(nn.Module):
    def forward(self, x):
        return x.log()


class Counting(nn.Module):
    """A cell whose state counts its steps, and whose output is infinite at the state 5 alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x, count):
        count = x.new_zeros(len(x), 1) if count is None else count
        return self.weight * x[:, :1] / (count - 5), count + 1


class Squares(BaseTrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        torch.randn(3, generator=rng)
        return (model(batch[0]) - batch[1]).square().mean()


def broken():
    """A model whose second module takes the logarithm of a negative number."""
    model = nn.Sequential(nn.Linear(3, 2), Logarithm(), nn.Linear(2, 1))
    nn.init.constant_(model[0].weight, -1.0)
    nn.init.constant_(model[0].bias, 0.0)
    return model


def message_of(run, model):
    """The error of a training, which must leave parameters, modes and hooks as they were."""
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError) as caught:
        run()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


def sample():
    return torch.ones(5, 3), torch.zeros(5, 1)


@pytest.mark.parametrize(
    ("function", "prepare", "settings"),
    [
        (train, sample, {}),
        (train, sample, {"accumulate": 2}),
        (train, sample, {"precision": "bfloat16"}),
        (ptrain, sample, {"bs": 2}),
        (ptrain, lambda: (sample(), sample()), {"bs": None}),
        (ttrain, sample, {"n": 2}),
        (itrain, lambda: (sample(), sample()), {}),
    ],
)
def test_functions_that_train_name_the_module(function, prepare, settings):
    model = broken()

    def loss(x, y):
        return (model(x) - y).square().mean()

    message = message_of(
        lambda: function(loss, model, prepare, torch.optim.SGD, 3, **settings), model
    )
    assert message.startswith(
        "loss is nan at iteration 1, first given by module '1' (Logarithm); the parameters"
    )


def test_a_task_names_the_module():
    model = broken()
    state = TrainState(0, model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = Squares().make_training_step_fn()
    message = message_of(lambda: step(state, sample(), 7), model)
    assert message.startswith("loss is nan, first given by module '1' (Logarithm)")
    nonfinite_inputs = torch.full((5, 3), torch.nan), torch.zeros(5, 1)
    assert "first given" not in message_of(lambda: step(state, nonfinite_inputs, 7), model)


@pytest.mark.parametrize("settings", [{}, {"callbacks": [lambda loop: None]}])
def test_fit_names_the_module(settings):
    x = np.ones((3, 5, 7), np.float32)  # (F, N, T)
    spec = {"epochs": 2, "batchsize": 3, "seqsize": 4, "overlap": 1}
    est = Estimator(
        model=broken(), loss=seqloss(nn.MSELoss()), spec=spec, verbose=False, comm=None, **settings
    )
    with pytest.raises(FloatingPointError, match=r"steps 0 to 4 .*module '1' \(Logar"):
        est.fit(x, x[:1])


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_window_is_run_again_from_the_state_with_which_it_began(overlap):
    x = np.ones((3, 2, 11), np.float32)
    model = nn.Sequential(Recur(Counting()), nn.Identity())
    spec = {"epochs": 1, "batchsize": 2, "seqsize": 4, "overlap": overlap}
    est = Estimator(model=model, loss=seqloss(nn.MSELoss()), spec=spec, verbose=False, comm=None)
    with pytest.raises(
        FloatingPointError,
        match=r"steps 4 to [78] .*'0\.\w+' \(Counting\)",
    ):
        est.fit(x, x[:1])


def test_the_parameter_without_a_finite_gradient_is_named():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    nn.init.zeros_(model[1].weight)

    def loss(x, y):
        return model(x).abs().sqrt().mean()  # the derivative of the root is infinite at 0

    message = message_of(lambda: train(loss, model, sample, torch.optim.SGD, 3), model)
    assert message.startswith(
        "gradient norm is nan at iteration 1, in the gradient of parameter '1.weight'; "
    )


def test_a_loss_is_computed_again_only_after_a_failure_and_draws_as_if_it_had_not_been():
    # the global generator, as users' losses call it
    model, calls, drawing = (
        nn.Linear(3, 1),
        [],
        np.random.mtrand,
    )

    def loss(x, y):
        calls.append(drawing.random())
        return (model(x) - y).square().mean() * (float("nan") if len(calls) >= 3 else 1.0)

    drawing.seed(11)
    with pytest.raises(FloatingPointError, match="iteration 3"):
        train(loss, model, sample, torch.optim.SGD, 5)
    drawn = np.random.RandomState(11).random(4)
    assert calls == list(drawn)  # three steps, and the third once more
    assert drawing.random() == drawn[3]
