"""How many steps are made, and from when on there are targets."""

import numpy as np
import pytest

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting import Forecaster
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


def test_about_as_many_steps_are_made_as_asked_for(rng, small):
    x = rng.normal(size=(1, 96, 192)) + 50
    fc = Forecaster(3, season_length=1, **{**small, "max_steps": 12}).fit(x)
    assert len(fc.loss_curve_) == 3  # of 2 x 2 windows
    short = Forecaster(3, season_length=1, **{**small, "max_steps": 10_000}).fit(x[:, :2, :9])
    assert len(short.loss_curve_) == 300
    long = Forecaster(3, season_length=1, **{**small, "max_steps": 10_000, "batchsize": 4}).fit(x[:, :44])
    assert len(long.loss_curve_) == 16
