"""Optimizers and schedulers from what users give for them."""

import functools

import numpy as np
import pytest
import torch

from fluxutils_py.optim import Clip
from fluxutils_py.training.make_optimizer import make_optimizer, make_scheduler


def params():
    return [torch.zeros(3, requires_grad=True)]


def test_classes_partials_functions_and_instances_make_optimizers():
    ready = torch.optim.SGD(params())
    assert make_optimizer(ready, params()) is ready
    assert isinstance(make_optimizer(None, params()), torch.optim.AdamW)
    numbers = make_optimizer(functools.partial(torch.optim.Adam, lr=np.float32(0.5)), params())
    assert type(numbers.param_groups[0]["lr"]) is float
    assert isinstance(
        make_optimizer(lambda p: torch.optim.SGD(p, lr=0.1), params()), torch.optim.SGD
    )


@pytest.mark.parametrize(
    ("opt", "error", "message"),
    [
        (Clip(0.5), TypeError, "changes gradients only"),
        ("adam", TypeError, "^opt must be an optimizer class"),
        (lambda p: 3, TypeError, "must make a torch optimizer, it made int$"),
        (torch.optim.LBFGS, ValueError, "^LBFGS runs the model several times"),
    ],
)
def test_what_makes_no_optimizer_is_refused(opt, error, message):
    with pytest.raises(error, match=message):
        make_optimizer(opt, params())


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match=r"^the model has no trainable parameters"):
        make_optimizer(None, [])


def test_schedulers_are_made_of_the_optimizer():
    opt = torch.optim.SGD(params())
    made = make_scheduler(
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=np.int64(2)), opt
    )
    assert made.optimizer is opt
    for wrong in (3, lambda opt: 3):
        with pytest.raises(TypeError, match=r"^scheduler must make "):
            make_scheduler(wrong, opt)


def test_arguments_that_are_missing_are_named_with_partial():
    opt = torch.optim.SGD(params())
    with pytest.raises(TypeError, match="'T_max'") as caught:
        make_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR, opt, "spec.lr_schedule")
    assert "spec.lr_schedule is called with one argument" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="'clip'") as caught:
        make_optimizer(lambda p, clip: torch.optim.SGD(p), params())
    assert "opt is called with one argument" in caught.value.__notes__[0]
