"""The step of the loop that fits a model of fixed features in one pass."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.auto.closed_form_fit import FixedTask
from fluxutils_py.auto.closed_form_step import ClosedFormStep
from fluxutils_py.data import SequenceWindows
from fluxutils_py.inputs import as_series
from fluxutils_py.nn.closed_form_model import lag_model
from fluxutils_py.nn.losses import as_loss
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training import Loop
from fluxutils_py.training.minibatch import TensorBatches

F, N, T = 2, 7, 30


def fitted(labels):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(F, N, T))
    y = (x[:1] > 0).astype(int) if labels else x.sum(0, keepdims=True) + rng.normal(size=(1, N, T))
    windows = SequenceWindows(as_series(x, "x"), as_series(y, "y"), batchsize=3, seqsize=8)
    batches = TensorBatches(windows, torch.float64, torch.device("cpu"))
    model = lag_model(F, 2 if labels else 1, 2).double()
    loss = as_loss(nn.CrossEntropyLoss() if labels else nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = ClosedFormStep(
        model,
        loss,
        optimizer,
        comm=RankGroup(),
        task=FixedTask(n_classes=2 if labels else None),
    )
    loop = Loop(step, RankGroup())
    loop.run_epochs([batches], 1)
    outputs = model(torch.from_numpy(x).permute(2, 1, 0)).detach()
    return step, loop, outputs, torch.from_numpy(y).permute(2, 1, 0)


@pytest.mark.parametrize("labels", [False, True])
def test_one_epoch_of_one_step_fits_the_model(labels):
    step, loop, outputs, y = fitted(labels)
    assert step.n_updates == 1
    assert loop.epoch == 1
    if labels:
        train_loss = nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten())
        assert (outputs.argmax(2) == y[..., 0]).double().mean() > 0.9
    else:
        train_loss = nn.functional.mse_loss(outputs, y)
    # that of rows that were left out is larger
    assert train_loss < loop.history[0]["loss"] < 1.5 * train_loss


def test_the_gradient_of_such_an_epoch_is_zero():
    step, *_ = fitted(labels=False)
    assert (step.mean_gradient() == 0).all()
