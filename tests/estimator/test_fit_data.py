"""A fit that is ready to run."""

import numpy as np

from fluxutils_py.estimator.fit_loop import FitLoop
from fluxutils_py.estimator.fitting import BegunFit
from tests.plain_networks import plain_regressor

X = np.random.default_rng(0).normal(size=(2, 6, 9))


def test_assembling_changes_nothing_of_the_estimator(monkeypatch):
    assembled = []
    monkeypatch.setattr(BegunFit, "train", lambda begun, training: assembled.append(training))
    est = plain_regressor(2, epochs=1, batchsize=2, verbose=False, random_state=0)
    before = dict(vars(est))
    est.fit(X, X[:1])
    assert vars(est) == before
    (training,) = assembled
    assert isinstance(training, FitLoop)
    assert not training.resume
    assert training.data.windows.batchsize == 2
    assert training.optimizer.param_groups[0]["params"] == list(training.model.parameters())
    assert [group["lr"] for group in training.groups] == [0.01]
