"""Law 7: threads equal one thread, bit-identical from run to run: those of ``ptrain``, which divide
a minibatch, and those of the native kernels.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import FLSTM, GRU, LSTM, RNN, SMGU, TCN, CausalConv1d
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels import recurrence as native
from fluxutils_py.praytools import ptrain, train

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def drop_out(model, x, y):
    return nn.functional.mse_loss(nn.functional.dropout(model(x), 0.3), y)


def trained(function, loss=None, **settings):
    """Parameters after ten minibatches of 23 rows, and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    generator = torch.Generator().manual_seed(1)
    losses = []

    def sample():
        return tuple(torch.randn(23, n, generator=generator, dtype=torch.float64) for n in (4, 2))

    def of_model(x, y):
        return (loss or (lambda model, x, y: nn.functional.mse_loss(model(x), y)))(model, x, y)

    function(of_model, model, sample, sgd, 10, cby=losses.append, **settings)
    return net2vec(model), losses


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3, "clip": 0.1}])
@pytest.mark.parametrize("parts", [2, 5])
def test_threads_equal_one(parts, settings):
    found, losses = trained(ptrain, bs=parts, **settings)
    expected, of_one = trained(train, **settings)
    assert (found - expected).abs().max() < 1e-12
    assert losses == pytest.approx(of_one, rel=1e-12)
    assert torch.equal(found, trained(ptrain, bs=parts, **settings)[0])


def test_random_models_are_the_same_in_every_run():
    first, _ = trained(ptrain, drop_out, bs=3)
    for _ in range(5):
        assert torch.equal(first, trained(ptrain, drop_out, bs=3)[0])


# -- the native kernels ------------------------------------------------------------------------------------

LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN, "FLSTM": FLSTM, "SMGU": SMGU}
ISAS = [name for name in kernels.ISAS if kernels.supports(name)]
by_kernels = pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())


@pytest.mark.apart
@pytest.mark.slow
@by_kernels
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_and_instruction_sets_of_the_kernels_change_no_bit_of_a_fit(
    layer, dtype, rng, monkeypatch
):
    x = rng.normal(size=(3, 70, 41)).astype(dtype)
    y = np.roll(x[:2], 1, 2)
    model = torch.nn.Sequential(LAYERS[layer](3, 13, num_layers=2), torch.nn.Linear(13, 2))
    fitted = []
    for isa, n_threads in [(ISAS[0], 1), (ISAS[0], 2), *((isa, 5) for isa in ISAS)]:
        monkeypatch.setattr(kernels._use, "library", kernels.Library(kernels.PATH, isa))
        monkeypatch.setattr(native, "n_threads", lambda n=n_threads: n)
        fitted.append(
            Estimator(model, None, None, Spec(2, 70, 20, overlap=3), random_state=0).fit(x, y)
        )
    for other in fitted[1:]:
        assert torch.equal(net2vec(other), net2vec(fitted[0]))
        assert torch.equal(other.grad_, fitted[0].grad_)
        assert other.loss_curve_ == fitted[0].loss_curve_


@by_kernels
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_of_the_kernels_depend_on_no_other_series_and_on_no_cut_of_time(layer, rng):
    x = rng.normal(size=(3, 37, 43)).astype("float32")
    est = Estimator(LAYERS[layer](3, 2), None, None, Spec(1, 37, 43), random_state=0).fit(x, x[:2])
    whole, state = est.predict(x, return_state=True)
    for batchsize, seqsize in ((5, 43), (37, 1), (1, 7), (16, 10)):
        est.set_params(spec=Spec(1, batchsize, seqsize))
        again, last = est.predict(x, return_state=True)
        np.testing.assert_array_equal(again, whole)
        assert all(torch.equal(a, b) for a, b in zip(last, state, strict=True))
    np.testing.assert_array_equal(est.predict(x[:, [30, 4]]), whole[:, [30, 4]])


class ByEinsum(nn.Module):
    """A weight whose gradient autograd gives in another memory order."""

    takes_windows = True

    def __init__(self, F):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, F, 1))

    def forward(self, x):
        return torch.einsum("sbf,hfo->sbho", x, self.weight).sum(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda F: TCN(F, 4, 3), lambda F: CausalConv1d(F, 2, 3), ByEinsum],
    ids=["TCN", "CausalConv1d", "einsum"],
)
def test_the_default_optimizer_takes_gradients_in_any_memory_order(make):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 10, 40))
    torch.manual_seed(0)
    model = nn.Sequential(make(3), nn.LazyLinear(1)).double()
    model(torch.zeros(5, 2, 3, dtype=torch.float64))
    ends = []
    for opt in (None, torch.optim.AdamW):  # None is fused
        spec = Spec(epochs=2, batchsize=5, seqsize=20, overlap=8)
        est = Estimator(model, None, opt, spec, random_state=0).fit(x, x[:1])
        ends.append(net2vec(est))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)
