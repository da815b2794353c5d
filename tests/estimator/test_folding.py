"""Folding never eats the memory: which series a fit folds, into how many pieces, and that every
default learns.
"""

import re

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, EstimatorRegressor, SequenceRegressor, Spec
from fluxutils_py.data import rebatch
from fluxutils_py.estimator.fit_data import read_data, spec_of_call
from fluxutils_py.inputs.inputs import Schema
from fluxutils_py.nn import LSTM
from fluxutils_py.reporting import ProgressBar
from tests.plain_networks import plain_regressor


def delayed(n_series, n_steps, seed=0):
    """White noise, and the same one step later: unknowable without a memory."""
    x = np.random.default_rng(seed).normal(size=(1, n_series, n_steps))
    return x, np.concatenate([np.zeros((1, n_series, 1)), x[:, :, :-1]], 2)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("estimator", [Estimator, EstimatorRegressor, SequenceRegressor])
@pytest.mark.parametrize("shape", [(1, 200), (2, 100)])
def test_every_estimator_as_it_stands_learns_to_remember(estimator, shape):
    x, y = delayed(*shape)
    assert estimator(random_state=0).fit(x, y).score(x, y) > 0.95


@pytest.mark.slow
def test_a_longer_series_too():
    x, y = delayed(1, 500)
    assert plain_regressor(random_state=0).fit(x, y).score(x, y) > 0.95


def small(**spec):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(1, 2), nn.Linear(2, 1))
    return Estimator(model, None, None, Spec(**{"epochs": 2, **spec}), verbose=False)


def most_pieces(n_series, n_steps, batchsize, seqsize):
    """The rule, tried out: the largest number of pieces whose shortest keeps 8 windows."""
    shortest = {n: n_steps // n for n in range(1, batchsize // n_series + 1)}
    found = [n for n, steps in shortest.items() if steps >= 8 * seqsize]
    return max(found, default=1)


@pytest.mark.few
@pytest.mark.parametrize(("n_series", "n_steps", "batchsize", "seqsize"), [
    (1, 200, 256, 1), (1, 199, 256, 3), (3, 97, 16, 2), (3, 97, 16, 6), (3, 97, 16, 7), (3, 96, 16, 6), (5, 97, 9, 1),
    (5, 97, 10, 1), (1, 97, 256, None), (1, 15, 256, 1), (1, 16, 256, 1), (2, 97, 7, 2),
])  # fmt: skip
def test_the_pieces_of_a_fit(n_series, n_steps, batchsize, seqsize):
    seen = []

    def look(model, xs, ys, ws):
        seen.append(int((ws != 0).sum(1).amax()))
        return (model(xs) * ws).mean()

    x, y = delayed(n_series, n_steps)
    est = small(batchsize=batchsize, seqsize=seqsize).set_params(loss=look).fit(x, y)
    expected = 1 if seqsize is None else most_pieces(n_series, n_steps, batchsize, seqsize)
    assert [record["folds"] for record in est.history_] == [expected, expected]
    assert max(seen) == min(batchsize, n_series * expected)


def test_series_of_other_lengths_are_cut_by_their_own():
    x, y = delayed(3, 97)
    est = small(batchsize=16, seqsize=4).fit(x, y, lengths=[97, 70, 33])
    rows = est_rows(est, x, y, [97, 70, 33])
    assert rows == [(0, 33), (0, 32), (0, 32), (1, 35), (1, 35), (2, 33)]
    assert est.history_[0]["folds"] == 3


def est_rows(est, x, y, lengths):
    settings = est.resolved_params()
    data = read_data(settings, Schema("Estimator"), x, y, lengths=lengths, is_fit=True)
    spec = spec_of_call(settings, None, True)
    segments = data.cut(settings, spec, spec.batchsize).windows.segments
    return list(zip(segments.series.tolist(), segments.length.tolist(), strict=True))


def test_steps_to_burn_in_do_not_count_as_memory():
    x, y = delayed(1, 97)
    # of 48 and 49 steps
    assert small(batchsize=256, seqsize=2, burn_in=40).fit(x, y).history_[0]["folds"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "folds"), [("auto", 3), (True, 32), (False, 1), (np.True_, 32)]
)
def test_the_setting(setting, folds):
    x, y = delayed(1, 97)
    assert small(batchsize=32, seqsize=4, rebatch=setting).fit(x, y).history_[-1]["folds"] == folds
    est = plain_regressor(2, epochs=1, batchsize=32, seqsize=4, rebatch=setting).fit(x, y)
    assert est.history_[-1]["folds"] == folds


def test_the_guard_of_the_reference():
    x, y = delayed(2, 16)
    # T <= n
    assert small(batchsize=32, seqsize=4, rebatch=True).fit(x, y).history_[-1]["folds"] == 1
    assert small(batchsize=30, seqsize=4, rebatch=True).fit(x, y).history_[-1]["folds"] == 15
    assert rebatch(x, 32) is x
    assert rebatch(x, 30).shape == (1, 30, 2)


@pytest.mark.parametrize("setting", ["yes", 1, None, "False"])
def test_anything_else_is_an_error(setting):
    message = rf"^spec.rebatch must be 'auto', True or False, got {setting!r}$"
    with pytest.raises(ValueError, match=message):
        small(rebatch=setting).fit(*delayed(1, 20))
    with pytest.raises(ValueError, match=message):
        plain_regressor(rebatch=setting).fit(*delayed(1, 20))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["line", "bar"])
def test_whoever_watches_is_told_how_many(how, capsys):
    x, y = delayed(1, 97)
    watching = {"verbose": how == "line", "callbacks": ProgressBar() if how == "bar" else None}
    small(batchsize=32, seqsize=4).set_params(**watching).fit(x, y)
    assert re.search(r"epoch=2, folds=3, loss=|epoch 2: .*folds 3, ", capsys.readouterr().err)
    small(batchsize=32, seqsize=4, rebatch=False).set_params(**watching).fit(x, y)
    assert "folds" not in capsys.readouterr().err
