"""The step of a task (task_step) in a loop by hand."""

import torch
from torch import nn

from fluxutils_py.bobbin.train_task import BaseTrainTask
from fluxutils_py.training.train_state import TrainState


class Tree(BaseTrainTask):
    """Returns anything beside the loss."""

    def __init__(self, aux):
        self.aux = aux

    def compute_loss(self, model, batch, *, step, rng):
        out = model(batch)
        return out.square().mean(), self.aux(out)


def test_what_a_task_returns_beside_the_loss_may_be_any_tree_or_nothing():
    x = torch.randn(4, 3)
    for aux, expected in (
        (lambda out: None, {}),
        (lambda out: {"n": 4}, {"n": 4}),
        (lambda out: (1, [2]), {"aux": (1, [2])}),
    ):
        model = nn.Linear(3, 1)
        state = TrainState(0, model, torch.optim.SGD(model.parameters(), 0.1))
        _, info = Tree(aux).make_training_step_fn()(state, x, 0)
        assert info.metrics == expected
        assert info.loss_aux_out == info.metrics


def test_one_step_function_takes_one_state_after_another():
    step, x = Tree(lambda out: None).make_training_step_fn(), torch.randn(4, 3)
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        state = TrainState(0, model, torch.optim.SGD(model.parameters(), 0.1))
        weight = model.weight.detach().clone()
        (step(state, x, 0), step(state, None, 0))
        assert state.step == 1
        assert not torch.equal(model.weight, weight)
