"""What is checked of a loss, and of the model behind it, before a gradient is taken."""

import pytest
import torch
from torch import nn

from fluxutils_py.training.gradient_step import as_scalar, require_gradient
from fluxutils_py.training.loss_checks import (
    call_without_batch_norm,
    require_no_batch_norm,
)


def test_a_loss_is_one_number():
    assert as_scalar(torch.ones(1)).shape == ()
    assert as_scalar(torch.tensor(2.0)).item() == 2.0
    with pytest.raises(TypeError, match=r"scalar tensor, got float"):
        as_scalar(1.0)
    with pytest.raises(ValueError, match=r"of shape \(2, 3\).*\.mean\(\)"):
        as_scalar(torch.ones(2, 3))


def test_a_loss_depends_on_the_parameters():
    p = nn.Parameter(torch.ones(2))
    require_gradient(p.sum())
    with pytest.raises(ValueError, match="does not depend on the model's parameters"):
        require_gradient(p.detach().sum())


def test_batch_normalisation_is_refused_where_a_batch_is_divided():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\).*divided over ranks: do this"):
        require_no_batch_norm(model, "ranks", "do this")
    require_no_batch_norm(model.eval(), "ranks", "do this")
    # of a model that is not known, when it runs; modules of other threads and times run on
    model.train()
    with pytest.raises(ValueError, match=r"\(BatchNorm1d\)"):
        call_without_batch_norm(model, torch.ones(4, 3), "ranks", "do this")
    assert model(torch.ones(4, 3)).shape == (4, 2)
