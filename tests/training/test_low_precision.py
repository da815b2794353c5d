"""Steps in bfloat16, against loops of plain torch with autocast, bit for bit."""

import pytest
import torch
from torch import nn

from fluxutils_py.bobbin import TaskStep, TrainTask
from fluxutils_py.gomlx import Trainer
from fluxutils_py.praytools.functional import ptrain, train
from fluxutils_py.training import Loop, TrainState
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.gradient_step import BatchLoss


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def batches(n=13):
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(7, 3, generator=generator) for _ in range(n)]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def by_hand(model, opt, data, clip=None, accumulate=1):
    """The loop of torch's documentation."""
    for k, (x, y) in enumerate(data):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x).float() - y).square().mean()
        (loss / accumulate).backward()
        if (k + 1) % accumulate == 0 or k + 1 == len(data):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()


def adamw(params, fused=True):
    return torch.optim.AdamW(params, lr=0.05, fused=fused)


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.5, 1), (0.5, 2)])
def test_a_step_is_that_of_torch(defer, clip, accumulate):
    model, expected, data = net(), net(), batches(12)

    def mean_square(model, batch):
        return BatchLoss((model(batch[0]).float() - batch[1]).square().mean(), 7.0)

    step = BatchStep(
        mean_square,
        model,
        adamw(model.parameters()),
        clip=clip,
        accumulate=accumulate,
        precision="bfloat16",
        defer=defer,
    )
    assert all(float(step(batch).batch_loss) > 0 for batch in data)
    assert step.n_updates == 12 // accumulate
    by_hand(expected, adamw(expected.parameters()), data, clip, accumulate)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(
            p,
            q,
            rtol=0 if accumulate == 1 and clip is None else 1e-5,
            atol=0 if clip is None else 1e-7,
        )


class Squares(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        return (model(batch[0]).float() - batch[1]).square().mean()


def by_trainer(model, data, opt, **settings):
    trainer = Trainer(model, nn.MSELoss(), opt, **settings)
    Loop(trainer).run_epochs(data, 1)
    assert trainer.eval(data)["loss"] == pytest.approx(evaluated(model, data), rel=1e-6)


def evaluated(model, data):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return sum(nn.functional.mse_loss(model(x).float(), y).item() for x, y in data) / len(data)


def by_task(model, data, opt, **settings):
    Loop(
        TaskStep(Squares(model), TrainState(0, model, opt(model.parameters())), **settings)
    ).run_epochs(data, 1)


def by_function(model, data, opt, **settings):
    left = iter(data)
    train(
        lambda x, y: (model(x).float() - y).square().mean(),
        model,
        lambda: next(left),
        opt,
        100,
        **settings,
    )


def by_threads(model, data, opt, **settings):
    left = iter(data)
    ptrain(
        lambda x, y: (model(x).float() - y).square().mean(),
        model,
        lambda: next(left),
        opt,
        100,
        bs=2,
        **settings,
    )


@pytest.mark.parametrize("way", [by_trainer, by_task, by_function, by_threads])
def test_every_way_to_train_has_it(way):
    model, expected, data = net(), net(), batches()
    way(model, data, adamw, precision="bfloat16")
    by_hand(expected, adamw(expected.parameters()), data)
    near = 0.02 if way is by_threads else 0  # halves of a batch are rounded apart
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert (p - q).abs().max() <= near


def test_a_precision_needs_parameters_of_float32():
    with pytest.raises(ValueError, match=r"the model has torch.float64"):
        Trainer(net().double(), nn.MSELoss(), adamw, precision="bfloat16")
    with pytest.raises(ValueError, match=r"must be one of"):
        Trainer(net(), nn.MSELoss(), adamw, precision="float16")
