"""``fluxutils_py.load`` finds the class of a saved estimator."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import fluxutils_py
from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceRegressor,
)
from fluxutils_py.errors import LoadError
from fluxutils_py.nn import LSTM

X = np.random.default_rng(0).normal(size=(2, 7, 11))
LABELS = np.where(X[0, :, -1] > 0, "up", "down")


def small(kind, **settings):
    return (
        kind(4, epochs=1, random_state=0, **settings)
        if "Sequence" in kind.__name__
        else kind(spec={"epochs": 1})
    )


@pytest.mark.parametrize(
    "kind",
    [Estimator, EstimatorRegressor, EstimatorClassifier, SequenceRegressor, SequenceClassifier],
)
def test_each_class_is_found(kind, tmp_path):
    est = small(kind).fit(X, LABELS if "Classifier" in kind.__name__ else X[:1])
    est.save(tmp_path / "model.pt")
    loaded = fluxutils_py.load(tmp_path / "model.pt")
    assert type(loaded) is kind
    assert np.array_equal(loaded.predict(X), est.predict(X))


def test_arguments_go_to_the_constructor(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))

        def forward(self, x):
            return self.net(x)

    est = Estimator(Own(), spec={"epochs": 1}, random_state=0).fit(X, X[:1])
    est.save(tmp_path / "model.pt")
    loaded = fluxutils_py.load(tmp_path / "model.pt", model=Own, verbose=False)
    assert np.array_equal(loaded.predict(X), est.predict(X))
    assert loaded.verbose is False


class Mine(SequenceRegressor):
    pass


@pytest.mark.slow
def test_a_class_of_ones_own_is_named(tmp_path):
    Mine(4, epochs=1).fit(X, X[:1]).save(tmp_path / "model.pt")
    with pytest.raises(LoadError) as caught:
        fluxutils_py.load(tmp_path / "model.pt")
    assert all(part in str(caught.value) for part in (f"{tmp_path}/model.pt", "Mine.load(path)"))
    assert type(Mine.load(tmp_path / "model.pt")) is Mine


def test_what_is_no_estimator_is_refused(tmp_path):
    torch.save({"kind": "something"}, tmp_path / "other.pt")
    with pytest.raises(LoadError, match="no fluxutils_py estimator or "):
        fluxutils_py.load(tmp_path / "other.pt")
    with pytest.raises(FileNotFoundError, match="no such file"):
        fluxutils_py.load(tmp_path / "missing.pt")
    with pytest.raises(TypeError, match=re.escape("path must be the name of a file, got ''")):
        fluxutils_py.load("")


@pytest.mark.few
@pytest.mark.parametrize("device", ["warp9", "cuda:77"])
def test_a_device_that_there_is_not_is_named(device, tmp_path):
    small(SequenceRegressor).fit(X, X[:1]).save(tmp_path / "model.pt")
    for load in (fluxutils_py.load, SequenceRegressor.load):
        with pytest.raises(ValueError, match=f"^device='{device}'"):
            load(tmp_path / "model.pt", device=device)


@pytest.mark.parametrize("path", ["", None])
def test_a_path_to_save_to_is_named(path):
    est = small(SequenceRegressor).fit(X, X[:1])
    with pytest.raises(
        (TypeError, ValueError), match=re.escape(f"path must be the name of a file, got {path!r}")
    ):
        est.save(path)
