"""What the documents say of missing targets and inputs."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.data.lazy import LazyArray
from fluxutils_py.nn import LSTM
from tests.plain_networks import plain_regressor

N, T = 6, 11


@pytest.fixture
def x(rng):
    return rng.normal(size=(2, N, T))


@pytest.mark.parametrize("shape", [(N,), (N, 2)])
@pytest.mark.parametrize("estimator", [Estimator(), plain_regressor(2)])
def test_one_target_per_series_may_not_be_nan_even_at_weight_0(x, rng, shape, estimator):
    y, weight = rng.normal(size=shape), np.ones(N)
    y[2], weight[2] = np.nan, 0
    with pytest.raises(ValueError, match=r"^Input y contains NaN"):
        estimator.fit(x, y, weight)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = LSTM(1, 3), LSTM(1, 3), nn.Linear(3, 1)

    def forward(self, u, v):
        return self.head(self.a(u) + self.b(v))


def test_a_missing_one_of_several_inputs(x, rng):
    u, v, y = x[:1], x[1:].copy(), rng.normal(size=(1, N, T))
    est = Estimator(Sum(), None, None, Spec(1, 4, 5)).fit((u, v), y)
    v[0, 2, 4] = np.nan
    found, zeroed = est.predict((u, v)), est.predict((u, np.nan_to_num(v)))
    assert np.argwhere(np.isnan(found)).tolist() == [[0, 2, 4]]
    there = ~np.isnan(found)
    np.testing.assert_array_equal(found[there], zeroed[there])
    with pytest.raises(ValueError, match=r"^x\[1\] .*feature 0, series 2, step 4"):
        est.fit((u, v), y)


def test_windows_without_a_live_step_do_not_accumulate(x, rng):
    """Two of four windows of the only group have targets: with accumulate=2 they make one step
    together.
    """
    y = rng.normal(size=(1, N, T))
    y[:, :, 3:6] = y[:, :, 9:] = np.nan
    torch.manual_seed(0)
    lstm, head = nn.LSTM(2, 3).double(), nn.Linear(3, 1).double()
    est = Estimator(nn.Sequential(lstm, head), None, None, Spec(1, N, 3, accumulate=2))
    est.set_params(opt=lambda p: torch.optim.SGD(p, lr=0.1))
    est.fit(x, y)
    params = [*lstm.parameters(), *head.parameters()]
    opt, state, total = torch.optim.SGD(params, lr=0.1), None, 0.0
    for t in (0, 3, 6, 9):
        out, state = lstm(torch.tensor(x[:, :, t : t + 3].transpose(2, 1, 0)), state)
        state = tuple(s.detach() for s in state)
        if t in (0, 6):
            total = (
                total
                + ((head(out) - torch.tensor(y[:, :, t : t + 3].transpose(2, 1, 0))) ** 2).mean()
                / 2
            )
    total.backward()
    opt.step()
    expected = torch.cat([p.detach().reshape(-1) for p in params])
    assert torch.allclose(net2vec(est), expected, rtol=0, atol=1e-14)


def test_the_axes_of_a_lazy_array_are_in_the_order_of_numpy(x):
    lazy = LazyArray(x)
    assert lazy[0, :, [2, 1, 7]].shape == (3, N)
    np.testing.assert_array_equal(lazy[0, :, [2, 1, 7]], x[0, :, [2, 1, 7]])


def test_inputs_of_steps_without_a_target_move_the_state(x, rng):
    y = rng.normal(size=(1, N, T))
    y[:, :, :5] = np.nan
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))
    other = x.copy()
    other[:, :, :5] += 1
    fits = [Estimator(model, None, None, Spec(1, N, 4)).fit(a, y) for a in (x, other, x)]
    assert torch.equal(net2vec(fits[0]), net2vec(fits[2]))
    assert not torch.equal(net2vec(fits[0]), net2vec(fits[1]))
