"""Steps of layers that describe the past give what torch gives for whole windows."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import reset
from fluxutils_py.nn import (
    CausalKernels,
    ExponentialMeans,
    Lags,
    RollingStatistics,
    RunningStatistics,
    native_kernels,
)
from fluxutils_py.nn.closed_form_model import ClosedFormModel, InputScale, kernel_model, lag_model
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.ready_made import LinearPlusNetwork, MeanModel
from fluxutils_py.nn.recurrent import LSTM
from fluxutils_py.steps.native_step import Scaler
from fluxutils_py.steps.session import InferenceSession
from fluxutils_py.steps.step_program import program_of, step_program

F = 3
S = 41


def fitted_kernels(size=800):
    layer = CausalKernels(F, size=size)
    return layer.fit_biases(torch.randn(F, 6, 50))


def with_kernels():
    model = kernel_model(F, 2, 600)
    model.layers[0].fit_biases(torch.randn(F, 6, 30))
    return model


def sum_of_both(means=(2, 5)):
    return LinearPlusNetwork(
        lag_model(F, 2, 4, True), lambda n_in, n, *_: LSTM(n_in, n), hidden_size=5, means=means,
        gain=0.7,
    )  # fmt: skip


def headed(layer):
    return nn.Sequential(layer, nn.Linear(layer.n_out, 2))


MODELS = {
    "lags": lambda: headed(Lags(F, [0, 3, 1])),
    "no past": lambda: headed(Lags(F, [0])),
    "means": lambda: headed(ExponentialMeans(F, [1, 2, 30])),
    "rolling": lambda: headed(RollingStatistics(F, [1, 2, 17])),
    "only now": lambda: headed(RollingStatistics(F, [1])),
    "running": lambda: headed(RunningStatistics(F)),
    "kernels": lambda: headed(fitted_kernels()),
    "few kernels": lambda: headed(fitted_kernels(1)),
    "closed form": lambda: lag_model(F, 2, 5, True),
    "kernels and statistics": with_kernels,
    "sum": sum_of_both,
    "sum without means": lambda: sum_of_both(()),
    "mean": lambda: MeanModel([lag_model(F, 2, 5), lag_model(F, 2, 2), sum_of_both()]),
}


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, InputScale):
            module.mean.copy_(torch.tensor([0.5, -0.1, 0.0]))
            module.scale.copy_(torch.tensor([2.0, 0.3, 1.0]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.to(dtype).eval()


def inputs_of(n_series, dtype):
    xs = torch.randn(S, n_series, F, dtype=dtype)
    xs[20:30] = xs[20]
    return xs


def windows_of(model, xs):
    with native_kernels(False), torch.no_grad():
        return reset(copy.deepcopy(model))(xs)


@pytest.mark.skipif(kernels.library_in_use() is None, reason="the kernels are not in use")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n_series", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_native_steps_and_their_states(name, n_series, dtype):
    model = made(name, dtype)
    xs = inputs_of(n_series, dtype)
    wanted = windows_of(model, xs)
    bound = 3e-5 if dtype == torch.float32 else 1e-11

    def session():
        return InferenceSession(model, lambda: [torch.zeros(3, 4, F, dtype=dtype)])

    live = session()
    step = live.native_step((F, n_series))
    other = session()
    # torch goes on where native steps were, and these where torch was
    found = [step.run(x.T) for x in xs[:20].double().numpy()]
    with native_kernels(False):
        other.run((xs[:20],))
        for got, expected in zip(live.state, other.state, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        found += [y.T for y in live.run((xs[20:25],))[0].detach().numpy()]
    found += [step.run(x.T) for x in xs[25:].double().numpy()]
    ys = np.stack([y.T for y in found])
    assert ys.dtype == str(dtype).removeprefix("torch.")
    np.testing.assert_allclose(ys, wanted, rtol=0, atol=bound * max(1, wanted.abs().max()))


@pytest.mark.skipif(kernels.library_in_use() is None, reason="the kernels are not in use")
def test_what_is_missing_is_a_mean_and_what_was_rounded_stays_so():
    model = made("closed form")
    model.scale.mean.fill_(1e4)
    model.scale.scale.fill_(0.01)
    session = InferenceSession(model, lambda: [torch.zeros(3, 4, F)])
    step = session.native_step((F, 1), [Scaler("standardize", np.full(F, 7.0), np.full(F, 3.0))])
    xs = 7 + 3 * (1e4 + 0.01 * torch.randn(5, 1, F, dtype=torch.float64))
    xs[2] = torch.nan
    # numbers of float32 are .001 apart there, a tenth of a deviation
    wanted = windows_of(model, ((xs - 7) / 3).float()).detach().numpy()
    ys = np.stack([step.run(x.T).T for x in xs.numpy()])
    assert np.isnan(ys[2]).all()
    live = [0, 1, 3, 4]
    np.testing.assert_allclose(ys[live], wanted[live], rtol=1e-5, atol=1e-5)


class Other(ClosedFormModel):
    pass


def other_scale(model):
    next(m for m in model.modules() if isinstance(m, InputScale)).mean.add_(1)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Other(F, 1, [Lags(F, [1])]),
        lambda: nn.Sequential(nn.Linear(F, F), lag_model(F, 1, 2)),
        lambda: MeanModel([lag_model(F, 1, 2), nn.Linear(F, 1)]),
        lambda: MeanModel([nn.Linear(F, 1), lag_model(F, 1, 2)]),
        lambda: MeanModel([lag_model(F, 1, 2), other_scale(lag_model(F, 1, 2))]),
        lambda: headed(Lags(F + 1, [1])),
    ],
)
def test_other_models_have_no_program(make):
    assert step_program(make().eval(), F) is None


def test_a_program_knows_all_that_it_depends_on():
    model = made("kernels and statistics")
    tensors = {id(t) for t in program_of(model, F).tensors}
    scale, kernel = model.scale, model.layers[0].module
    used = [scale.mean, scale.scale, kernel.biases, kernel.channels, kernel.dilations]
    assert {id(t) for t in [*used, *model.parameters()]} <= tensors
