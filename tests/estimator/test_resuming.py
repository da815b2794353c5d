"""What a checkpoint of a fit holds; that a fit resumes bit for bit is law 8."""

import numpy as np
import pytest

from fluxutils_py import Estimator
from fluxutils_py.errors import LoadError
from fluxutils_py.training import Checkpointer, EveryNSteps

X = np.random.default_rng(0).normal(size=(2, 7, 11))


def make(folder, **settings):
    spec = {"epochs": 2, "batchsize": 3, "seqsize": 4}
    return Estimator(
        spec=spec, callbacks=Checkpointer(folder), random_state=0, verbose=False, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [True, False])
def test_a_fit_that_goes_on_says_where(verbose, tmp_path, capsys):
    def interrupt(loop):
        if loop.step == 7:  # of 9 in an epoch
            raise KeyboardInterrupt

    def begin(epochs, *callbacks):
        saves = Checkpointer(tmp_path, trigger=EveryNSteps(4))
        spec = {"epochs": epochs, "batchsize": 3, "seqsize": 4}
        return Estimator(
            spec=spec, callbacks=[saves, *callbacks], random_state=0, verbose=verbose
        ).fit(X, X[:1])

    with pytest.raises(KeyboardInterrupt):
        begin(2, interrupt)
    assert "continues" not in capsys.readouterr().err
    begin(2)
    assert ("continues at step 4, in epoch 1" in capsys.readouterr().err) == verbose
    begin(2)  # done
    assert "continues" not in capsys.readouterr().err
    begin(3)
    assert ("continues at step 18, in epoch 3" in capsys.readouterr().err) == verbose


@pytest.mark.slow
def test_a_checkpoint_of_other_data_is_refused_and_named(tmp_path):
    make(tmp_path).fit(X, X[:1])
    with pytest.raises(
        LoadError,
        match=r"values of y .*: .* -> .*call fit",
    ):
        make(tmp_path).fit(X, X[1:])
    assert make(tmp_path).fit(X, X[:1]).n_iter_ == 2
