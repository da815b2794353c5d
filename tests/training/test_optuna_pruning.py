"""Trials of Optuna prune fits, and a killed study goes on."""

import json
import subprocess

import numpy as np
import pytest
import torch

from fluxutils_py import SequenceRegressor, net2vec
from fluxutils_py.training import OptunaPruning
from tests.plain_networks import plain_regressor

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

X = np.random.default_rng(0).normal(size=(2, 13, 11))
Y = X.cumsum(2)[:1]


class After(optuna.pruners.BasePruner):
    """Prunes after some epochs."""

    def __init__(self, epochs):
        self.epochs = epochs

    def prune(self, study, trial):
        return trial.last_step == self.epochs


def estimator(**settings):
    return plain_regressor(
        3,
        **{"epochs": 4, "batchsize": 8, "seqsize": 5, "random_state": 0, "verbose": False}
        | settings,
    )


def run(study, fit):
    """A study of one trial."""
    study.optimize(lambda trial: fit(OptunaPruning(trial)), n_trials=1)
    return study.trials[0]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("validated", [True, False])
def test_each_epoch_is_reported(direction, validated):
    ests = []

    def fit(pruning):
        est = estimator(callbacks=pruning).fit(
            X, Y, validation_data=(X[:, :5], Y[:, :5]) if validated else None
        )
        ests.append(est)
        return est.loss_

    trial = run(optuna.create_study(direction=direction), fit)
    losses = ests[0].validation_loss_curve_ if validated else ests[0].loss_curve_
    sign = -1 if direction == "maximize" else 1
    assert trial.intermediate_values == {i + 1: sign * loss for i, loss in enumerate(losses)}


@pytest.mark.slow
def test_a_pruned_fit_leaves_a_usable_estimator():
    est = estimator()

    def fit(pruning):
        return est.set_params(callbacks=pruning).fit(X, Y).loss_

    trial = run(optuna.create_study(pruner=After(2)), fit)
    assert (trial.state.name, list(trial.intermediate_values)) == ("PRUNED", [1, 2])
    short = estimator(epochs=2).fit(X, Y)
    assert est.n_iter_ == 2
    assert torch.equal(net2vec(est), net2vec(short))
    np.testing.assert_array_equal(est.predict(X), short.predict(X))


@pytest.mark.slow
def test_a_pruned_fit_puts_an_earlier_one_back():
    est = estimator(epochs=1).fit(X, Y)
    before, predicted = net2vec(est), est.predict(X)
    trial = run(
        optuna.create_study(pruner=After(2)),
        lambda pruning: est.set_params(epochs=4, callbacks=pruning).fit(X, Y, epochs=4).loss_,
    )
    assert trial.state.name == "PRUNED"
    assert torch.equal(net2vec(est), before)
    np.testing.assert_array_equal(est.predict(X), predicted)


@pytest.mark.slow
def test_a_trial_of_fixed_parameters_prunes_nothing():
    estimator(callbacks=OptunaPruning(optuna.trial.FixedTrial({}))).fit(X, Y)


# The recipe of docs/guide/many_processes.md, with a kill in the third epoch of trial 1.
STUDY = """
import json, os, sys
import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from fluxutils_py import SequenceRegressor
from fluxutils_py.training import Checkpointer, OptunaPruning

folder, kill = sys.argv[1], sys.argv[2] == "kill"
x = np.random.default_rng(0).normal(size=(2, 13, 11))
y = x.cumsum(2)[:1]
epochs = []

def objective(trial):
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    name = trial.user_attrs.get("folder", f"trial-{trial.number}")
    trial.set_user_attr("folder", name)

    def note(loop):
        epochs.append([trial.number, loop.epoch])
        if kill and trial.number == 1 and loop.epoch == 2:
            os._exit(9)

    class Note:
        def on_epoch(self, loop):
            note(loop)

    callbacks = [OptunaPruning(trial), Note(), Checkpointer(f"{folder}/{name}")]
    est = SequenceRegressor(3, cell="lstm", lr=lr, epochs=4, batchsize=8, seqsize=5, random_state=0, callbacks=callbacks)
    return est.fit(x, y).loss_

storage = JournalStorage(JournalFileBackend(f"{folder}/study.log"))
study = optuna.create_study(storage=storage, study_name="lr", load_if_exists=True, pruner=optuna.pruners.NopPruner())
for trial in study.get_trials(states=[TrialState.RUNNING]):  # of a process that was killed
    study.tell(trial.number, state=TrialState.FAIL)
    study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
done = len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
study.optimize(objective, n_trials=3 - done)
print(json.dumps({
    "states": [t.state.name for t in study.trials],
    "lr": [t.params["lr"] for t in study.trials],
    "values": [t.value for t in study.trials],
    "epochs": epochs,
}))
"""


@pytest.mark.slow
def test_a_killed_study_goes_on_in_the_middle_of_a_trial(python, tmp_path):
    def start(how):
        command = [python, "-c", STUDY, str(tmp_path), how]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    killed = start("kill")
    assert killed.returncode == 9, killed.stderr
    done = start("go on")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["states"] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert found["lr"][2] == found["lr"][1]
    # trial 2 goes on from two epochs
    assert found["epochs"] == [
        [2, 2],
        [2, 3],
        *([3, e] for e in range(4)),
    ]
    uninterrupted = SequenceRegressor(
        3, cell="lstm", lr=found["lr"][2], epochs=4, batchsize=8, seqsize=5, random_state=0
    ).fit(X, Y)
    assert found["values"][2] == uninterrupted.loss_
