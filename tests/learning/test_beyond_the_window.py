"""Recall at lags that no window reaches is learnt with exact gradients, and not with truncated
ones.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import MinGRU

H = 8


def flagged_signs(lag, n_series, random_seed):
    """Random signs, of which a flag marks the first; it is asked from ``lag`` steps later on."""
    rng = np.random.default_rng(random_seed)
    signs = rng.choice([-1.0, 1.0], size=(n_series, lag + 20))
    flags = np.zeros_like(signs)
    flags[:, 0] = 1
    y = np.full((1, n_series, lag + 20), np.nan)
    y[0, :, lag:] = signs[:, :1]
    return np.stack([signs, flags]).astype("float32"), y.astype("float32")


def error(lag, gradient, epochs):
    torch.manual_seed(0)
    layer = MinGRU(2, H)
    nn.init.constant_(layer.module.linear.bias[:H], -5)  # gates that are almost closed
    model = nn.Sequential(layer, nn.Linear(H, 1))
    spec = Spec(
        epochs=epochs, batchsize=64, seqsize=10, clip=1.0, lr_schedule="cosine", gradient=gradient
    )
    opt = partial(torch.optim.Adam, lr=0.1)
    est = Estimator(model, None, opt, spec, random_state=0).fit(*flagged_signs(lag, 256, 0))
    x, y = flagged_signs(lag, 64, 1)
    return float(np.nanmean((est.predict(x) - y) ** 2))


@pytest.mark.slow
def test_recall_over_200_steps_in_windows_of_10():
    assert error(200, "exact", 15) < 0.05
    assert error(200, "truncated", 15) > 0.9
