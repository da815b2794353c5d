"""Optimizers and schedulers from the forms that users give."""

from functools import partial

import numpy as np
import pytest
import torch

from fluxutils_py.optim import Clip
from fluxutils_py.training.make_optimizer import make_optimizer, make_scheduler


def params():
    return [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize(
    ("opt", "kind"),
    [
        (None, torch.optim.AdamW),
        (torch.optim.SGD, torch.optim.SGD),
        (partial(torch.optim.Adam, lr=np.float32(0.5)), torch.optim.Adam),
        (lambda p: torch.optim.SGD(p, lr=0.5), torch.optim.SGD),
    ],
    ids=["None", "class", "partial", "function"],
)
def test_each_form_makes_an_optimizer(opt, kind):
    made = make_optimizer(opt, params())
    assert type(made) is kind
    assert type(made.param_groups[0]["lr"]) is float


def test_an_instance_stays():
    optimizer = torch.optim.SGD(params())
    assert make_optimizer(optimizer, params()) is optimizer


@pytest.mark.parametrize(
    ("opt", "error", "message"),
    [
        (Clip(0.5), TypeError, r"combine it with an optimizer by fluxutils_py\.optim\.Chain"),
        ("adam", TypeError, "opt must be an optimizer class"),
        (torch.nn.Linear, TypeError, "opt must be an optimizer class"),
        (lambda p: 3, TypeError, "must make a torch optimizer, it made int"),
        (torch.optim.LBFGS, ValueError, "LBFGS runs the model several times a step"),
    ],
    ids=["transform", "text", "another class", "another result", "closure"],
)
def test_what_is_none_is_refused(opt, error, message):
    with pytest.raises(error, match=message):
        make_optimizer(opt, params())


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match=r"^the model has no trainable parameters"):
        make_optimizer(None, [])


def test_schedulers():
    optimizer = torch.optim.SGD(params(), lr=1.0)
    scheduler = make_scheduler(partial(torch.optim.lr_scheduler.StepLR, step_size=np.int64(1), gamma=0.5), optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match=r"it made 3$"):
        make_scheduler(lambda optimizer: 3, optimizer)
    with pytest.raises(TypeError, match=r"got 'cosine'$"):
        make_scheduler("cosine", optimizer)
