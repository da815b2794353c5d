"""Running statistics of BatchNorm, computed anew (batch_statistics), against NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import DataError
from fluxutils_py.gomlx.batch_statistics import normalization, recompute_batch_norm
from fluxutils_py.training import InMemory, Take

ROWS = np.random.default_rng(0).normal(5, 3, size=(37, 3))


def stats(x):
    return x.mean(0), x.var(0, ddof=1)


@pytest.mark.parametrize("batchsize", [5, 36, 37])
def test_statistics_of_layers_after_each_other_are_those_of_all_data(batchsize):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)
    ).double()
    x = torch.randn(37, 3, dtype=torch.float64) * 5 + 3
    model(x[:9])
    recompute_batch_norm(model, InMemory(x, batchsize=batchsize))
    mean, var = stats(x.numpy())
    np.testing.assert_allclose(model[0].running_mean, mean)
    np.testing.assert_allclose(model[0].running_var, var)
    scaled = (x.numpy() - mean) / np.sqrt(var + model[0].eps)
    hidden = scaled @ model[1].weight.detach().numpy().T + model[1].bias.detach().numpy()
    np.testing.assert_allclose(model[3].running_mean, stats(hidden)[0], atol=1e-12)
    np.testing.assert_allclose(model[3].running_var, stats(hidden)[1])
    assert model.training


def test_channels_of_images_come_second():
    x = torch.randn(6, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    model = nn.BatchNorm2d(2)
    recompute_batch_norm(model, [x[:1], x[1:]])
    flat = x.movedim(1, -1).reshape(-1, 2).numpy()
    np.testing.assert_allclose(model.running_mean, flat.mean(0), atol=1e-6)
    np.testing.assert_allclose(model.running_var, flat.var(0, ddof=1), rtol=1e-5)


def test_no_data_are_refused_and_models_without_batch_norm_left_alone():
    model = nn.BatchNorm1d(1)
    for data in [], [torch.ones(1, 1)]:
        with pytest.raises(DataError):
            recompute_batch_norm(model, data)
    assert model.running_var.item() == 1.0
    recompute_batch_norm(nn.Linear(1, 1), [torch.ones(1, 1)])


def test_mean_and_scale_are_those_of_numpy():
    mean, std = normalization(InMemory(ROWS, batchsize=5))
    np.testing.assert_allclose(mean, ROWS.mean(0), rtol=1e-14)
    np.testing.assert_allclose(std, ROWS.std(0), rtol=1e-13)
    with pytest.raises(DataError, match="has no batches: there is no mean"):
        normalization(Take(InMemory(ROWS, batchsize=5), 0))


@pytest.mark.parametrize("axes", [(), (-1,), (0,), (-1, 1)])
def test_normalization_of_independent_axes_is_that_of_numpy(axes):
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = [x] if 0 in axes else [x[:1], x[1:]]
    mean, std = normalization(data, 0, axes)
    over = tuple(k for k in range(3) if k not in {a % 3 for a in axes})
    np.testing.assert_allclose(mean, x.numpy().mean(over))
    np.testing.assert_allclose(std, x.numpy().std(over))
