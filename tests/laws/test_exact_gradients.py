"""``gradient="exact"``: windows of any length have the gradient of the whole series.

One update per epoch, by ``accumulate``, beside a naive loop in float64 that goes through whole
series.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, SequenceRegressor, Spec, net2vec
from fluxutils_py.errors import SpecError
from fluxutils_py.nn import GRU, LRU, MinLSTM, Recur, SequenceStack

from .conftest import difference
from .differential import ours
from .differential.arrays import Place, make_data
from .differential.cases import draw, settle
from .differential.compare import Given, run
from .differential.loop import Oracle

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
BASE = {
    "n_series": 5,
    "n_steps": 21,
    "features": 3,
    "hidden": 3,
    "batchsize": 3,
    "accumulate": 100,
    "gradient": "exact",
}
FORMS = {
    "plain": {},
    "one step": {"seqsize": 1},
    "whole": {"seqsize": None},
    "lengths": {"lengths": True, "starts": True, "seqsize": 4},
    "weights": {"weights": "zeros", "seqsize": 5},
    "missing": {"missing": "stretch", "nan_inputs": True, "seqsize": 2},
    "burn-in": {"burn_in": 5, "seqsize": 4},
    "missing steps": {"missing": "steps", "seqsize": 3},
    "labels": {"outputs": "labels", "seqsize": 4},
    "one target": {"outputs": "last", "seqsize": 4},
    "steps": {"loss": "custom_steps", "seqsize": 4},
    "all": {"lengths": True, "weights": "steps", "missing": "outputs", "targets": 2, "burn_in": 3},
}


def whole_series(case, folder):
    """Both sides of a comparison, the naive one with whole series."""
    place = Place("C", folder)
    train = make_data(case, 1)
    given = Given(case, train, place)
    start = ours.Start()
    est = ours.build_estimator(case, [start])
    est.fit(given.x, given.y, given.weight, **given.ends)
    spec = ours.plain_spec({**case, "seqsize": None, "gradient": "truncated"})
    oracle = Oracle(
        ours.build_net(case),
        start.params,
        ours.criterion(case),
        ours.make_optimizer(case),
        spec,
        equal_lengths=case["loss"] == "custom_steps",
    )
    oracle.fit(train, case["epochs"])
    return est, oracle


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.filterwarnings("ignore:this fit makes")
@pytest.mark.parametrize("net", ["mingru", "minlstm", "lru"])
@pytest.mark.parametrize("form", FORMS)
def test_one_update_is_that_of_backpropagation_through_whole_series(net, form, tmp_path):
    for dtype, tolerance in TOLERANCE.items():
        case = settle({**BASE, **FORMS[form], "net": net, "dtype": dtype, "data": 3})
        est, oracle = whole_series(case, tmp_path)
        scale = 1 + oracle.gradient.abs().max()
        assert difference(est.grad_, oracle.gradient) < tolerance * scale
        assert est.loss_curve_ == pytest.approx(oracle.loss_curve, rel=10 * tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this fit makes")
def test_truncated_gradients_are_others(tmp_path):
    case = settle({**BASE, "net": "lru", "gradient": "truncated"})
    est, oracle = whole_series(case, tmp_path)
    assert difference(est.grad_, oracle.gradient) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("net", ["lru", "mingru", "minlstm", "mingru2"])
def test_fits_of_many_updates_equal_a_naive_loop(net):
    """More draws stand in test_differential.py."""
    assert draw(0).keys() == settle({}).keys()
    case = {"net": net, "gradient": "exact", "n_steps": 13, "seqsize": 2, "epochs": 2}
    assert not run(settle({**case, "burn_in": 3, "lengths": True, "validation": True}))


# -- fits ------------------------------------------------------------------------------------------

RNG = np.random.default_rng(4)
X = RNG.normal(size=(2, 6, 30))
Y = np.cumsum(X, 2).mean(0, keepdims=True)


def net(*layers):
    torch.manual_seed(0)
    made = [layer(2 if k == 0 else 4, 4) for k, layer in enumerate(layers)]
    return nn.Sequential(*made, nn.Linear(4, 1)).double()


def fit(model, x=X, y=Y, **spec):
    spec = {"epochs": 10, "batchsize": 6, "seqsize": 4, "gradient": "exact", **spec}
    opt = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
    return Estimator(model, None, opt, Spec(**spec), random_state=0).fit(x, y)


@pytest.mark.slow
def test_the_gradient_of_an_evaluation_is_exact():
    est = fit(net(LRU))
    loss, gradient = est.evaluate(X, Y, gradient=True)
    reference = fit(net(LRU))
    reference.set_params(spec__seqsize=30)
    whole_loss, whole = reference.evaluate(X, Y, gradient=True)
    assert loss == pytest.approx(whole_loss)
    # the mean over windows: 7 of 4 steps and one of 2
    assert difference(gradient, whole) > 1e-6
    est.set_params(spec__seqsize=5)
    assert difference(est.evaluate(X, Y, gradient=True)[1], whole) < 1e-12
    est.set_params(spec__gradient="truncated")
    assert difference(est.evaluate(X, Y, gradient=True)[1], whole) > 1e-3


@pytest.mark.slow
def test_validation_in_between_changes_nothing():
    est = fit(net(MinLSTM))
    spec = Spec(epochs=10, batchsize=6, seqsize=4, gradient="exact")
    opt = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
    watched = Estimator(net(MinLSTM), None, opt, spec, random_state=0)
    watched.fit(X, Y, validation_data=(X[:, :2], Y[:, :2]))
    assert torch.equal(net2vec(watched), net2vec(est))


@pytest.mark.slow
def test_series_are_not_cut_by_themselves():
    x, y = X.reshape(2, 1, 180), Y.reshape(1, 1, 180)
    assert fit(net(LRU), x, y, epochs=1).history_[0]["folds"] == 1
    assert fit(net(LRU), x, y, epochs=1, gradient="truncated").history_[0]["folds"] == 5
    assert fit(net(LRU), x, y, epochs=1, rebatch=True).history_[0]["folds"] == 6


@pytest.mark.slow
def test_layers_that_stay_truncated_are_named():
    with pytest.warns(UserWarning, match=r"gradient='exact'.*1 \(GRU\).*LRU, MinGRU and MinLSTM"):
        fit(net(LRU, GRU))
    with pytest.warns(UserWarning, match="gradient='exact' does nothing"):
        fit(nn.Sequential(nn.Linear(2, 1)).double())


class OwnCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.zeros(2))

    def forward(self, x, state):
        h = x if state is None else x + torch.sigmoid(self.rate) * state
        return h, h


@pytest.mark.slow
def test_a_layer_of_ones_own_stays_truncated():
    model = nn.Sequential(Recur(OwnCell()), nn.Linear(2, 1)).double()
    with pytest.warns(UserWarning, match=r"0 \(OwnCell\) stays truncated"):
        fit(model)


@pytest.mark.slow
def test_ready_made_estimators_take_it():
    small = {"hidden_size": 4, "epochs": 1, "batchsize": 1, "seqsize": 4, "random_state": 0}
    exact = SequenceRegressor(cell="mingru", spec={"gradient": "exact"}, **small).fit(X, Y)
    truncated = SequenceRegressor(cell="mingru", **small).fit(X, Y)
    assert isinstance(exact.model_, nn.Module)
    assert difference(net2vec(exact), net2vec(truncated)) > 1e-6
    assert any(isinstance(m, SequenceStack) for m in exact.model_.modules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient": "full"}, "'truncated' or 'exact', got 'full'"),
        ({"gradient": None}, "got None"),
        ({"gradient": "exact", "overlap": 2}, "overlap=2"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        fit(net(LRU), **settings)


def test_compiled_models_are_refused():
    est = Estimator(net(LRU), spec=Spec(gradient="exact", epochs=1), compile=True)
    with pytest.raises(SpecError, match=r"compile=True.*gradient='exact'"):
        est.fit(X, Y)
