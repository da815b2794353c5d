"""Losses, optimizers and schedulers as plain data, and back."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.serialization import (
    LOSSES,
    OPTIMIZERS,
    SCHEDULERS,
    deserialize,
    deserialize_module,
    serialize,
    serialize_module,
)
from fluxutils_py.nn import GRU
from fluxutils_py.optim import Chain, Clip, ClipNorm


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


@pytest.mark.parametrize("loss", [
    None, nn.functional.huber_loss, functools.partial(nn.functional.huber_loss, delta=0.3), nn.HuberLoss(delta=0.3),
    nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.8]), ignore_index=-7),
])  # fmt: skip
def test_losses_come_back(loss):
    config = serialize(loss)
    again = deserialize(config, LOSSES)
    assert plain(config)
    assert type(again) is type(loss)
    if isinstance(loss, nn.Module):
        assert repr(again) == repr(loss)
    if isinstance(loss, nn.CrossEntropyLoss):
        scores, labels = torch.randn(5, 2), torch.tensor([0, 1, -7, 1, 0])
        assert again(scores, labels) == loss(scores, labels)
    if isinstance(loss, functools.partial):
        assert (again.func, again.keywords) == (loss.func, loss.keywords)


def test_optimizers_come_back():
    p = nn.Parameter(torch.tensor([3.0, -2.0]))
    for opt in (
        AdamW,
        functools.partial(SGD, lr=0.1, momentum=0.9),
        Chain(Clip(0.5), functools.partial(SGD, lr=0.1), ClipNorm(0.01)),
        SGD([p], lr=0.2, nesterov=True, momentum=0.5),
    ):
        config = serialize(opt)
        assert plain(config)
        ends = []
        for make in (opt, deserialize(config, OPTIMIZERS)):
            q = nn.Parameter(p.detach().clone())
            optimizer = (
                type(opt)([q], **opt.defaults)
                if isinstance(make, torch.optim.Optimizer)
                else make([q])
            )
            q.grad = torch.tensor([1.0, -4.0])
            optimizer.step()
            ends.append(q.detach())
        assert torch.equal(*ends)


def test_a_scheduler_comes_back_and_each_kind_stays_in_its_place():
    config = serialize(functools.partial(lr_scheduler.StepLR, step_size=3))
    assert deserialize(config, SCHEDULERS).keywords == {"step_size": 3}
    with pytest.raises(LoadError, match=r"StepLR', .*none of torch.optim or"):
        deserialize(config, OPTIMIZERS)


@pytest.mark.parametrize(
    "value", [lambda params: None, functools.partial(SGD, lr=lambda: 3), nn.Module, "sgd"]
)
def test_user_code_is_refused(value):
    with pytest.raises(LoadError):
        serialize(value)


def test_modules_that_hold_code_have_no_config():
    model = nn.Sequential(GRU(2, 3), nn.Linear(3, 1))
    assert repr(deserialize_module(serialize_module(model))) == repr(model)

    class Mine(nn.Linear):
        pass

    assert serialize_module(nn.Sequential(Mine(2, 3))) is None
    model[1].register_forward_hook(lambda *_: None)
    assert serialize_module(model) is None
