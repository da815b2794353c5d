"""Trials of Optuna that all ranks train together, as docs/guide/many_processes.md has it; rank 0 has the study."""

import numpy as np
import optuna
import pytest
import torch

from fluxutils_py import net2vec
from fluxutils_py.errors import RemoteError
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training import OptunaPruning
from tests.plain_networks import plain_regressor

COMM = get_communicator("auto")
RANK = COMM.rank
optuna.logging.set_verbosity(optuna.logging.WARNING)


class AfterTwoEpochs(optuna.pruners.BasePruner):
    """Prunes all trials but the first."""

    def prune(self, study, trial):
        return trial.number > 0 and trial.last_step == 2


class Broken(optuna.trial.FixedTrial):
    def report(self, value, step):
        raise OSError("study.log")


def main(folder):
    x = np.random.default_rng(0).normal(size=(3, 9, 43))  # float64: Adam magnifies rounding
    y = x.cumsum(2).mean(0, keepdims=True)
    settings = {
        "batchsize": 4,
        "seqsize": 10,
        "random_state": 0,
        "verbose": False,
    }
    study = optuna.create_study(pruner=AfterTwoEpochs()) if RANK == 0 else None
    for n in range(2):
        trial = study.ask() if RANK == 0 else None
        lr = COMM.allgather(trial.suggest_float("lr", 1e-3, 1e-1) if RANK == 0 else None)[0]
        est = plain_regressor(3, lr=lr, epochs=3, callbacks=OptunaPruning(trial), **settings)
        value, state = None, optuna.trial.TrialState.PRUNED
        try:
            value, state = est.fit(x, y, validation_data=(x, -y)).validation_loss_curve_[-1], None
        except optuna.TrialPruned as pruned:
            said = str(pruned)
        if RANK == 0:
            study.tell(trial, value, state)
        assert est.n_iter_ == (3, 2)[n]
        assert len(set(COMM.allgather(repr(net2vec(est).tolist())))) == 1
        whole = plain_regressor(3, lr=lr, epochs=(3, 2)[n], comm=None, **settings).fit(
            x, y, validation_data=(x, -y)
        )
        torch.testing.assert_close(net2vec(est), net2vec(whole), rtol=0, atol=1e-9)
        if RANK == 0:
            reported = study.trials[n].intermediate_values
            assert list(reported) == [1, 2, 3][: (3, 2)[n]]
            np.testing.assert_allclose(
                list(reported.values()), whole.validation_loss_curve_, rtol=1e-9
            )
    assert said == f"pruned after epoch 2 with a loss of {est.validation_loss_curve_[-1]:g}"
    if RANK == 0:
        assert [t.state.name for t in study.trials] == ["COMPLETE", "PRUNED"]

    est = plain_regressor(3, callbacks=OptunaPruning(Broken({}) if RANK == 0 else None), **settings)
    with pytest.raises(OSError if RANK == 0 else RemoteError) as caught:
        est.fit(x, y)
    assert str(caught.value) == ("study.log" if RANK == 0 else "rank 0: OSError: study.log")
