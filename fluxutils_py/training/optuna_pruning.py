"""Let a trial of Optuna stop an unpromising fit."""

from __future__ import annotations

from typing import Any

from fluxutils_py.training.early_stopping import monitored_loss
from fluxutils_py.training.loop import Loop


class OptunaPruning:
    """Report the loss of each epoch to a trial of Optuna, and end the fit if its pruner says so.

    It reports the validation loss if there is one, else the training loss; negated in a study that
    maximises. A pruned fit raises ``optuna.TrialPruned``, which ``study.optimize`` catches. The
    estimator then keeps its training so far or, if the fit was to replace an earlier one, the
    earlier fit.

    Parameters
    ----------
    trial : optuna.Trial
        On several ranks, the trial of rank 0 decides for all; the other ranks may pass None.

    Notes
    -----
    Source: the pruning callbacks of optuna-integration, which has them for other packages.

    Examples
    --------
    >>> import numpy as np
    >>> import optuna
    >>> from fluxutils_py import SequenceRegressor
    >>> x = np.random.default_rng(0).normal(size=(2, 20, 30))  # (F, N, T)
    >>> y = x.cumsum(2)[:1]
    >>> def objective(trial):
    ...     lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    ...     est = SequenceRegressor(
    ...         4, lr=lr, epochs=3, random_state=0, callbacks=OptunaPruning(trial)
    ...     )
    ...     return est.fit(x, y, validation_data=(x, y)).validation_loss_curve_[-1]
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    >>> study.optimize(objective, n_trials=3)
    >>> len(study.trials[0].intermediate_values)
    3
    """

    name = "Optuna's pruning"
    priority = 10.0  # after the record of the epoch is complete
    collective = True

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_epoch(self, loop: Loop) -> None:
        value = monitored_loss(loop.record)
        epoch = loop.record["epoch"]
        is_pruned = False
        if loop.ranks.rank == 0 and value is not None:
            # A study that maximizes prunes low values: a loss has to be turned around.
            direction = getattr(getattr(self.trial, "study", None), "direction", None)
            is_maximized = getattr(direction, "name", "") == "MAXIMIZE"
            self.trial.report(-value if is_maximized else value, epoch)
            is_pruned = bool(self.trial.should_prune())
        if loop.ranks.allgather(is_pruned)[0]:
            from optuna import TrialPruned

            raise TrialPruned(f"pruned after epoch {epoch} with a loss of {value:g}")
