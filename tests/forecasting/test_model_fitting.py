"""How many steps are made, and from when on there are targets."""

from functools import partial

import numpy as np
import pytest
import torch.nn.functional as F
from torch import nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.forecaster_settings import collective_settings
from fluxutils_py.forecasting.model_fitting import steps_per_epoch


@pytest.mark.parametrize("batchsize", [1, 4, 48])
def test_steps_of_an_epoch_are_never_more_than_said(rng, batchsize):
    lengths = rng.integers(1, 90, size=11)
    x = SeriesArray(np.zeros((1, 11, 90)), "x")
    segments = Segments.from_lengths(11, 90, lengths)
    windows = SequenceWindows((x,), batchsize=batchsize, seqsize=20, segments=segments)
    most = steps_per_epoch(lengths, batchsize, 20)
    for seed in range(20):
        windows.shuffle(np.random.default_rng(seed))
        assert len(windows) <= most
    assert most <= len(windows) + 5


@pytest.mark.slow
def test_about_as_many_steps_are_made_as_asked_for(rng, small):
    x = rng.normal(size=(1, 96, 192)) + 50
    fc = Forecaster(3, season_length=1, **{**small, "max_steps": 12}).fit(x)
    assert len(fc.loss_curve_) == 3  # of 2 x 2 windows
    short = Forecaster(3, season_length=1, **{**small, "max_steps": 10_000}).fit(x[:, :2, :9])
    assert len(short.loss_curve_) == 300
    long = Forecaster(3, season_length=1, **{**small, "max_steps": 10_000, "batchsize": 4}).fit(
        x[:, :44]
    )
    assert len(long.loss_curve_) == 16


def test_settings_that_ranks_compare_are_the_same_text_in_every_process():
    """Texts of functions and objects would hold addresses; what only concerns a rank is left out."""

    def made(loss, network, **settings):
        return collective_settings(
            Forecaster(3, quantiles=np.array([0.1, 0.9]), loss=loss, network=network, **settings)
        )

    def same(n_in, n_out):
        return nn.Identity()

    one = made(
        partial(F.huber_loss, delta=2.0),
        same,
        device="cpu",
        random_state=1,
        callbacks=[print],
    )
    two = made(partial(F.huber_loss, delta=2.0), same, verbose=False, comm=None, freq=None)
    assert one == two
    assert not any(" at 0x" in text for text in one.values())
    assert made("mae", nn.LSTM) != made("mae", nn.GRU)
    assert (one["quantiles"], one["h"], one["seqsize"]) == ("[0.1 0.9]", "3", "96")
    assert not {"comm", "device", "callbacks", "random_state"} & set(one)
