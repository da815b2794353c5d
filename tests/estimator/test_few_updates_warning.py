"""A fit that is too short to learn says so, before it trains."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch

from fluxutils_py import Estimator
from fluxutils_py.data.sequence_windows import SequenceWindows
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.inputs import as_series


class CountingSGD(torch.optim.SGD):
    """Counts the steps of all its instances."""

    n_steps = 0

    def step(self, *arguments, **options):
        type(self).n_steps += 1
        return super().step(*arguments, **options)


@pytest.fixture
def updates(monkeypatch):
    """Fits, and returns the number of updates that were made, and those that were warned of."""
    monkeypatch.setattr(CountingSGD, "n_steps", 0)

    def fit(est, *data, **arguments):
        before = CountingSGD.n_steps
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            est.fit(*data, **arguments)
        messages = [
            str(w.message)
            for w in found
            if "updates" in str(w.message) or "update in" in str(w.message)
        ]
        assert all(w.filename == __file__ for w in found)
        return CountingSGD.n_steps - before, messages

    return fit


def counted(**spec):
    return Estimator(opt=partial(CountingSGD, lr=1e-3), spec=spec, random_state=0)


X = np.random.default_rng(0).normal(size=(2, 7, 23))  # (F, N, T): 7 series of 23 steps
STARTS = np.array([0, 9, 1, 0, 20, 0, 3])
LESS_THAN_50 = [  # settings, arguments of fit, minibatches with a loss in an epoch
    ({"epochs": 7, "batchsize": 3, "seqsize": 10}, {}, 3 * 3),  # 63 updates
    ({"epochs": 5, "batchsize": 3, "seqsize": 10}, {}, 3 * 3),
    ({"epochs": 3, "batchsize": 3, "seqsize": 10, "overlap": 4}, {}, 3 * 3),
    ({"epochs": 4, "batchsize": 3, "seqsize": 10, "burn_in": 4}, {}, 3 * 2),
    ({"epochs": 1}, {}, 1),
    ({"epochs": 2, "batchsize": 2, "seqsize": 5, "accumulate": 3}, {}, 4 * 5),
    ({"epochs": 80, "batchsize": 7, "seqsize": 5}, {"epochs": 3}, 5),
    ({"epochs": 2, "batchsize": 3, "seqsize": 5}, {"lengths": 23 - STARTS, "starts": STARTS}, 14),
    ({"epochs": 25, "batchsize": 4, "seqsize": None}, {}, 2),  # exactly 50
    ({"epochs": 49}, {}, 1),
    ({"epochs": 50}, {}, 1),
]


@pytest.mark.parametrize(("spec", "arguments", "n_windows"), LESS_THAN_50)
def test_fewer_than_fifty_updates_are_warned_of_with_the_number_that_an_optimizer_counts(
    updates, spec, arguments, n_windows
):
    n, messages = updates(counted(**spec), X, X[:1], **arguments)
    epochs = arguments.get("epochs", spec["epochs"])
    if n >= 50:
        assert not messages
        return
    (message,) = messages
    assert f" {n} update" in message
    assert f"(epochs={epochs}, minibatches per epoch: {n_windows}" in message
    assert ("accumulate=3" in message) == ("accumulate" in spec)
    assert message.endswith("set more epochs, or a smaller batchsize or seqsize")


@pytest.mark.parametrize("starts", [None, STARTS])
def test_with_one_target_per_series_only_windows_in_which_one_ends_make_updates(updates, starts):
    est = counted(epochs=3, batchsize=4, seqsize=6)
    lengths = None if starts is None else 23 - starts
    n, (message,) = updates(est, X, X[0, :, -1], starts=starts, lengths=lengths)
    assert n == 6 if starts is None else n > 6
    assert f" {n} updates in all" in message


def test_the_warning_of_few_updates_comes_before_training():
    est = counted(epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this fit makes 2 updates in all")
        with pytest.raises(UserWarning, match="2 updates"):
            est.fit(X, X[:1])
    assert not hasattr(est, "model_")


def test_windows_with_a_loss_are_counted_without_a_look_at_the_data():
    class Unread:
        shape, dtype = (2, 7, 23), np.dtype("float32")

        def __getitem__(self, key):
            raise AssertionError(f"{key} was read")

    windows = SequenceWindows(as_series(Unread(), "x"), batchsize=2, seqsize=3)
    assert windows.count_with_loss(most=100) == 4 * 8
    assert windows.count_with_loss(most=5) == 5


def test_fits_whose_length_the_user_did_not_set_are_not_warned_of(updates):
    est = counted(epochs=1)
    assert updates(est.set_params(warm_start=True), X, X[:1]) == (1, [])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this fit makes")
        counted(epochs=1).partial_fit(X, X[:1])
        Forecaster(h=2, max_steps=3, random_state=0).fit(X[:1])
