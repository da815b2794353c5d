"""The step of a task, against a loop in plain torch."""

import copy

import pytest
import torch
from torch import nn

from fluxutils_py.training import TrainTask
from fluxutils_py.training.task_step import TaskStep, as_generator, draw


class Squares(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        x, y = batch
        noise = torch.randn(x.shape, generator=rng, dtype=x.dtype)
        return (model(x + 0.1 * noise) - y).square().mean(), {"noise": noise.sum()}


def test_steps_equal_a_plain_loop():
    task = Squares(nn.Linear(3, 1).double())
    state = task.initialize_train_state(0, torch.optim.Adam)
    model = copy.deepcopy(state.model)
    optimizer = torch.optim.Adam(model.parameters())
    batches = [(torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)) for _ in range(4)]
    step = TaskStep(task, state, seed=5)
    for k, (x, y) in enumerate(batches):
        info = step.train_step((x, y))
        rng = as_generator(5, k)
        draw(rng)  # the seed of torch's global generator, for dropout
        noise = torch.randn(x.shape, generator=rng, dtype=x.dtype)
        loss = (model(x + 0.1 * noise) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert info.batch_loss == pytest.approx(loss.item(), abs=1e-12)
        assert info.metrics["noise"].item() == noise.sum().item()
    assert step.step == state.step == 4
    for p, q in zip(state.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_random_numbers_depend_on_seed_step_and_rank_alone():
    numbers = {draw(as_generator(seed, step, rank)) for seed in (0, 1) for step in (0, 1) for rank in (0, 1)}
    assert len(numbers) == 8
    assert draw(as_generator(1, 2, 3)) == draw(as_generator(1, 2, 3))
    own = torch.Generator()
    assert as_generator(own, 1) is own
