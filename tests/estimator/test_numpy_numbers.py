"""NumPy's numbers and strings are as good as Python's, wherever a setting is one."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from fluxutils_py import Estimator, SequenceClassifier, SequenceRegressor, net2vec, samples
from fluxutils_py.nn import FLSTM, GRU, HFGRU, LSTM, MGU, RNN, SGRU, SMGU, Recur
from fluxutils_py.optim import ADAMW32
from tests.plain_networks import plain_regressor

RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, 7, 11))
Y = X[:1].copy()
LAYERS = (LSTM, GRU, RNN, FLSTM, SGRU, MGU, SMGU, HFGRU)
CELLS = [layer.__name__.lower() for layer in LAYERS]


def numpys(settings):
    kinds = {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}
    return {k: numpys(v) if isinstance(v, dict) else kinds[type(v)](v) for k, v in settings.items()}


def same(settings, kind, y, **others):
    """A fit with these settings, and one with NumPy's, which is saved and loaded too."""
    one = kind(**settings, **others).fit(X, y)
    other = kind(**numpys(settings), **others).fit(X, y)
    assert torch.equal(net2vec(one), net2vec(other))
    return other


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_regressors_take_them(cell, tmp_path):
    settings = {
        **{"hidden_size": 4, "num_layers": 2, "cell": cell, "dropout": 0.25, "lr": 0.01},
        **{"epochs": 2, "batchsize": 3, "seqsize": 5, "early_stopping": True},
        **{"warm_start": False, "random_state": 1, "verbose": False, "scale_target": True},
        "target": "auto",
        "spec": {"shuffle": True, "overlap": 1, "burn_in": 1, "clip": 1.0, "patience": 1},
    }
    est = same(settings, SequenceRegressor, Y)
    est.save(tmp_path / "model.pt")
    loaded = SequenceRegressor.load(tmp_path / "model.pt")
    assert np.array_equal(loaded.predict(X), est.predict(X))
    assert loaded.fit(X, Y).hidden_size == 4


@pytest.mark.parametrize("cell", CELLS)
def test_classifiers_take_them(cell):
    labels = (Y[0, :, -1] > 0).astype(int)
    weight = {np.int64(0): np.float32(1), np.int64(1): np.float32(2)}
    same(
        {"hidden_size": 4, "cell": cell, "epochs": 1, "random_state": 1},
        SequenceClassifier,
        labels,
        class_weight=weight,
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_take_them(layer):
    torch.manual_seed(0)
    one = layer(2, 3, 2, 0.25)
    torch.manual_seed(0)
    other = layer(np.int64(2), np.int32(3), np.int8(2), np.float32(0.25))
    assert repr(one) == repr(other)
    x = torch.ones(4, 5, 2)
    assert torch.equal(one.eval()(x), other.eval()(x))


class Net(nn.Module):
    def __init__(self, n_in, n_out, hidden=3):
        super().__init__()
        self.lstm, self.head = Recur(nn.LSTM(n_in, hidden)), nn.Linear(hidden, n_out)

    def forward(self, x):
        return self.head(self.lstm(x))


@pytest.mark.slow
def test_models_optimizers_schedules_and_specs_take_them(tmp_path):
    def make(number, small):
        halving = partial(lr_scheduler.StepLR, step_size=number(1), gamma=small(0.5))
        spec = {
            "epochs": number(2),
            "batchsize": number(3),
            "seqsize": number(4),
            "clip": small(0.5),
        }
        spec |= {"accumulate": number(2), "patience": number(1), "lr_schedule": halving}
        opt = partial(Adam, lr=small(0.25))
        return Estimator(
            partial(Net, hidden=number(4)), None, opt, spec, random_state=number(1)
        ).fit(X, Y)

    one, other = make(int, float), make(np.int64, np.float32)
    assert torch.equal(net2vec(one), net2vec(other))
    assert one.history_[-1]["lr"] == other.history_[-1]["lr"]
    for opt in (
        partial(SGD, lr=np.float32(0.5)),
        ADAMW32(np.float32(0.5), np.float32(0.25), np.float64(0.5)),
    ):
        Estimator(opt=opt, spec={"epochs": 1}).fit(X, Y).save(tmp_path / "model.pt")


@pytest.mark.slow
def test_grids_may_be_arrays():
    grid = {
        "hidden_size": np.array([2, 3]),
        "cell": np.array(["gru", "mgu"]),
        "spec__shuffle": np.array([True]),
    }
    search = GridSearchCV(plain_regressor(4, epochs=1), grid, cv=2, error_score="raise")
    search.fit(samples(X), samples(Y))
    assert search.best_estimator_.predict(X).shape == Y.shape
    clone(search.best_estimator_).fit(X, Y)
    own = {
        "model__hidden": np.array([2, 3]),
        "spec__seqsize": np.array([3, 4]),
        "opt__lr": np.array([0.5, 0.25], "f4"),
    }
    est = Estimator(Net, opt=Adam, spec={"epochs": 1, "batchsize": 4})
    GridSearchCV(est, own, cv=2, error_score="raise").fit(samples(X), samples(Y))
