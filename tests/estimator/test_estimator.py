"""The way from ``est.fit(x, y)`` to ``optimizer.step()``, as a reader follows it."""

import sys
from pathlib import Path

import numpy as np
import torch

import fluxutils_py
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.spec import Settings

PACKAGE = Path(fluxutils_py.__file__).parent
FEWEST = 6  # files, at most


def test_fit_reaches_the_optimizer_in_six_files_and_never_goes_back():
    walk = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            frame, files = sys._getframe(1), []
            while frame is not None:
                if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                    files.append(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())
                frame = frame.f_back
            walk[:] = [f for i, f in enumerate(files[::-1]) if i == 0 or f != files[::-1][i - 1]]
            return super().step(closure)

    x = np.random.default_rng(0).normal(size=(2, 7, 11))
    Estimator(opt=lambda params: Watched(params, lr=0.1), spec={"epochs": 1}, verbose=False).fit(
        x, x[:1]
    )
    steps = [f for f in walk if not f.startswith("parallel/")]  # the guard of the ranks calls back
    assert steps[0] == "estimator/estimator.py"
    assert len(set(steps)) <= FEWEST, steps
    first = {f: steps.index(f) for f in steps}
    assert [first[f] for f in steps] == sorted(first[f] for f in steps), (
        f"it goes back and forth: {walk}"
    )


def test_a_subclass_with_fewer_arguments_has_the_others_by_default():
    class Flat(Estimator):
        def __init__(self, lr=0.1, spec=None):
            super().__init__(opt=lambda params: torch.optim.SGD(params, lr), spec=spec)
            self.lr = lr

    settings = Settings.from_estimator(Flat(spec={"epochs": 3}), n_timesteps=5)
    assert (settings.spec, settings.target, settings.n_timesteps) == ({"epochs": 3}, "auto", 5)
    assert not settings.is_classifier
    x = np.random.default_rng(0).normal(size=(2, 7, 11))
    assert Flat(spec={"epochs": 1}).fit(x, x[:1]).predict(x).shape == (1, 7, 11)
