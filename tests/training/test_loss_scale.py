"""Steps in bfloat16 and float16, against loops of plain torch with autocast and GradScaler, bit for
bit.
"""

import copy

import pytest
import torch
from torch import nn

from fluxutils_py.bobbin import TaskStep, TrainTask
from fluxutils_py.gomlx import Trainer
from fluxutils_py.praytools.functional import ptrain, train
from fluxutils_py.training import Loop, TrainState
from fluxutils_py.training.function_step import FunctionStep
from fluxutils_py.training.gradient_step import MOST_SKIPPED, BatchLoss, LossScale

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def batches(n=13, far=100):
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(7, 3, generator=generator) for _ in range(n)]
    # far away: gradients overflow float16 at first
    return [(x, far * x.sum(1, keepdim=True)) for x in xs]


def by_hand(model, opt, data, precision, clip=None, accumulate=1):
    """The loop of torch's documentation."""
    scaler, scales = torch.amp.GradScaler("cpu", enabled=precision == "float16"), []
    for k, (x, y) in enumerate(data):
        with torch.autocast("cpu", LOW[precision]):
            loss = (model(x).float() - y).square().mean()
        scaler.scale(loss / accumulate).backward()
        if (k + 1) % accumulate == 0 or k + 1 == len(data):
            scaler.unscale_(opt)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def adamw(params, fused=True):
    return torch.optim.AdamW(params, lr=0.05, fused=fused)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.5, 1), (0.5, 2)])
def test_a_step_is_that_of_torch_and_skips_what_overflows(precision, defer, clip, accumulate):
    model, expected, data = net(), net(), batches(12)
    mean_square = lambda batch: BatchLoss((model(batch[0]).float() - batch[1]).square().mean(), 7.0)  # noqa: E731
    opt = adamw(model.parameters())
    step = FunctionStep(
        mean_square, opt, model, clip=clip, accumulate=accumulate, precision=precision, defer=defer
    )
    losses, scales = [], []
    for batch in data:
        losses.append(step(batch).batch_loss)
        scales.append(None if step._scale is None else float(step._scale.value))
    assert all(float(loss) > 0 for loss in losses)
    assert step.n_updates == 12 // accumulate
    expected_scales = by_hand(
        expected, adamw(expected.parameters()), data, precision, clip, accumulate
    )
    if precision == "float16":
        assert scales == expected_scales
        assert scales[-1] < 2.0**16  # some were skipped
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
    assert trainer.eval(data)["loss"] == pytest.approx(
        evaluated(model, data, settings["precision"]), rel=1e-6
    )


def evaluated(model, data, precision):
    with torch.no_grad(), torch.autocast("cpu", LOW[precision]):
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


@pytest.mark.few
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("way", [by_trainer, by_task, by_function, by_threads])
def test_every_way_to_train_has_it(way, precision):
    model, expected = net(), net()
    # parts of a batch overflow elsewhere than the whole
    data = batches(far=0.1 if way is by_threads else 100)
    way(model, data, adamw, precision=precision)
    by_hand(expected, adamw(expected.parameters()), data, precision)
    near = 0.02 if way is by_threads else 0  # halves of a batch are rounded apart
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert (p - q).abs().max() <= near


@pytest.mark.slow
def test_a_loss_that_is_infinite_and_too_many_gradients_are_errors():
    p = nn.Parameter(torch.ones(2))
    step = FunctionStep(
        lambda k: BatchLoss((p * k).sum()), adamw([p]), params=[p], precision="float16"
    )
    step(torch.tensor(1.0))
    after = p.detach().clone()
    with pytest.raises(FloatingPointError, match=r"^loss is inf"):
        step(torch.tensor(torch.inf))
    step.discard()
    infinite = FunctionStep(
        lambda k: BatchLoss((p - p.detach()).abs().sqrt().sum()), adamw([p]), precision="float16"
    )
    for _ in range(MOST_SKIPPED - 1):
        assert infinite(1).batch_loss == 0
    with pytest.raises(FloatingPointError, match=f"{MOST_SKIPPED} updates .*bfloat16"):
        infinite(1)
    late = FunctionStep(
        lambda k: BatchLoss((p - p.detach()).abs().sqrt().sum()),
        adamw([p]),
        precision="float16",
        defer=True,
    )
    infos = [late(1) for _ in range(MOST_SKIPPED)]
    with pytest.raises(FloatingPointError, match="updates in a row"):
        [float(info.batch_loss) for info in infos]
    assert torch.equal(p, after)


def test_the_scale_grows_as_that_of_torch_and_goes_with_a_copy_of_its_state(monkeypatch):
    import fluxutils_py.training.gradient_step as loss_scale

    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scale, p = LossScale(torch.device("cpu")), nn.Parameter(torch.zeros(1))
    scaler, opt = torch.amp.GradScaler("cpu", growth_interval=3), torch.optim.SGD([p], lr=0.0)
    for k, bad in enumerate([0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]):
        if k == 9:
            state, scale = copy.deepcopy(scale.state_dict()), LossScale(torch.device("cpu"))
            scale.load_state_dict(state)
        gradient = torch.tensor([torch.inf if bad else 6.0])
        scaler.scale(torch.ones(()))  # makes its tensors
        p.grad = gradient.clone()
        scaler.unscale_(opt)
        scaler.step(opt)
        before = float(scale.value)
        scale.unscale_(gradient)
        scaler.update()
        assert gradient.item() == (0 if bad else 6 / before)
        assert float(scale.value) == scaler.get_scale()


def test_a_precision_needs_parameters_of_float32():
    with pytest.raises(ValueError, match=r"the model has torch.float64"):
        Trainer(net().double(), nn.MSELoss(), adamw, precision="bfloat16")
    with pytest.raises(ValueError, match=r"must be one of"):
        Trainer(net(), nn.MSELoss(), adamw, precision="half")
