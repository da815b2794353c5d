"""Gradients of a mean squared error by the native kernels alone, beside those of torch's graph."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fluxutils_py import Estimator
from fluxutils_py.nn import GRU, LSTM, RNN, MinGRU, native_kernels
from fluxutils_py.nn.kernels.library import library_in_use
from fluxutils_py.training import window_step

pytestmark = pytest.mark.skipif(library_in_use() is None, reason="there are no native kernels")

SPEC = {"epochs": 2, "batchsize": 3, "seqsize": 7, "rebatch": False}


@pytest.fixture
def recorded(monkeypatch):
    """Whether each window of a fit was computed without a graph."""
    found = []
    plain = window_step.recorded_squared_error

    def call(*arguments):
        loss = plain(*arguments)
        found.append(loss is not None)
        return loss

    monkeypatch.setattr(window_step, "recorded_squared_error", call)
    return found


def make_data(n_in, n_out, n_series=5, n_steps=23, dtype="float32"):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n_in, n_series, n_steps)).astype(dtype)
    return x, rng.normal(size=(n_out, n_series, n_steps)).astype(dtype)


def fit(model, data, loss=None, **spec):
    loss = nn.MSELoss() if loss is None else loss
    est = Estimator(model, loss, None, {**SPEC, **spec}, random_state=0, verbose=False)
    return est.fit(*data)


def with_graph(model):
    """Return the model with a function that sees its outputs, as torch's graph needs."""
    model.register_forward_hook(lambda *_: None)
    return model


def assert_same_fit(est, expected):
    tolerance = {"rtol": 1e-5, "atol": 1e-7}
    np.testing.assert_allclose(est.loss_curve_, expected.loss_curve_, rtol=1e-6)
    np.testing.assert_allclose(est.grad_, expected.grad_, **tolerance)
    pairs = zip(est.model_.parameters(), expected.model_.parameters(), strict=True)
    for p, q in pairs:
        np.testing.assert_allclose(p.detach(), q.detach(), **tolerance)
    last = [layer.state for layer in (est.model_[0], expected.model_[0])]
    torch.testing.assert_close(last[0], last[1])


MODELS = {
    "lstm": lambda n_in, n_out: [LSTM(n_in, 8), nn.Linear(8, n_out)],
    "gru, gru": lambda n_in, n_out: [GRU(n_in, 5), GRU(5, 3), nn.Linear(3, n_out, bias=False)],
    "two layers": lambda n_in, n_out: [nn.LSTM(n_in, 4, num_layers=2), nn.Linear(4, n_out)],
    "no bias": lambda n_in, n_out: [RNN(n_in, 1, bias=False), nn.Linear(1, n_out)],
    "relu": lambda n_in, n_out: [nn.RNN(n_in, 6, nonlinearity="relu"), nn.Linear(6, n_out)],
    "cell": lambda n_in, n_out: [nn.LSTMCell(n_in, 33), LSTM(33, 2), nn.Linear(2, n_out)],
}


@pytest.mark.parametrize("spec", [{}, {"clip": 0.1, "accumulate": 2}, {"batchsize": 5}])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_the_graph(name, sizes, spec, recorded):
    dtype = "float64" if sizes[0] == 1 else "float32"
    data = make_data(*sizes, dtype=dtype)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(*MODELS[name](*sizes)).to(getattr(torch, dtype))

    est = fit(make(), data, **spec)
    n_groups = -(-5 // spec.get("batchsize", 3))
    assert recorded == [True] * (2 * n_groups * 4)  # windows of 7, 7, 7 and 2 steps
    assert_same_fit(est, fit(with_graph(make()), data, **spec))
    assert not any(recorded[2 * n_groups * 4 :])


def frozen(model):
    model[0].module.weight_hh_l0.requires_grad_(False)


def watched_inside(model):
    model[0].module.register_forward_hook(lambda *_: None)


def double(p):
    p.grad *= 2


def parametrized(model):
    parametrize.register_parametrization(model[-1], "weight", nn.Tanh())


def tied(model):
    model[0].module.bias_hh_l0 = model[0].module.bias_ih_l0


@pytest.mark.parametrize("change", [frozen, watched_inside, parametrized, tied])
def test_a_model_with_more_to_it_has_a_graph(change, recorded):
    data = make_data(2, 1)
    ests = []
    for also in (lambda model: model, with_graph):
        torch.manual_seed(0)
        model = nn.Sequential(LSTM(2, 4), nn.Linear(4, 1))
        change(model)
        ests.append(fit(also(model), data))
    assert not any(recorded)
    assert_same_fit(*ests)


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("register_hook", lambda grad: 2 * grad),
        ("register_post_accumulate_grad_hook", double),
    ],
)
def test_functions_that_wait_for_a_gradient_get_it(method, function, recorded):
    data = make_data(2, 1)
    ests = []
    for also in (lambda model: model, with_graph):
        torch.manual_seed(0)
        est = fit(also(nn.Sequential(LSTM(2, 4), nn.Linear(4, 1))), data)
        getattr(est.model_[-1].bias, method)(function)  # a copy of the model has none
        recorded.clear()
        ests.append(est.set_params(warm_start=True).fit(*data))
        assert recorded
        assert not any(recorded)
    assert_same_fit(*ests)


class Doubled(LSTM):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Doubled(2, 4)],
        lambda: [LSTM(2, 4, trainable_init=True)],
        lambda: [MinGRU(2, 4)],
        lambda: [LSTM(2, 4), nn.Dropout(0.2)],
        lambda: [nn.LSTM(2, 4, num_layers=2, dropout=0.2)],
        lambda: [nn.Linear(2, 4)],
    ],
)
def test_other_layers_have_a_graph(layers, recorded):
    fit(nn.Sequential(*layers(), nn.Linear(4, 1)), make_data(2, 1))
    assert recorded
    assert not any(recorded)


@pytest.mark.parametrize(
    ("loss", "spec", "n_recorded"),
    [
        (nn.MSELoss(reduction="sum"), {}, 0),
        (nn.L1Loss(), {}, 0),
        (lambda model, x, y: (model(x) - y).square().mean(), {}, 0),
        (nn.MSELoss(), {"precision": "bfloat16"}, 0),
        (nn.MSELoss(), {"overlap": 2}, 0),
        (nn.MSELoss(), {"burn_in": 7, "seqsize": 7}, 2 * 2 * 3),
    ],
)
def test_windows_of_which_more_is_wanted_have_a_graph(loss, spec, n_recorded, recorded):
    fit(nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)), make_data(2, 1), loss, **spec)
    assert sum(recorded) == n_recorded


def test_windows_without_some_targets_have_a_graph_and_others_do_not(recorded):
    x, y = make_data(2, 1)
    y[:, 4, 20] = np.nan
    ests = []
    for also in (lambda model: model, with_graph):
        torch.manual_seed(0)
        ests.append(fit(also(nn.Sequential(LSTM(2, 4), nn.Linear(4, 1))), (x, y)))
    assert sum(recorded) == 2 * (2 * 4 - 1)
    assert_same_fit(*ests)


def test_there_is_a_graph_where_torch_is_asked_to_compute_or_to_look(recorded):
    data = make_data(2, 1)
    with native_kernels(False):
        fit(nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)), data)
    with torch.autograd.set_detect_anomaly(True):
        fit(nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)), data)
    assert recorded
    assert not any(recorded)


def test_a_loss_that_is_not_finite_names_its_window_and_keeps_the_state(recorded):
    x, y = make_data(2, 1)
    y[:, 3, 8] = 1e30  # its square is infinite in float32
    model = nn.Sequential(LSTM(2, 4), nn.Linear(4, 1))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"loss is inf at steps 7 to 14 of series 3 to 4"):
        fit(model, (x, y), epochs=1)
    assert recorded[-1] is False
    assert any(recorded)
    assert len(before) == len(list(model.parameters()))
