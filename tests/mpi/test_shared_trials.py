"""Trials of Optuna on several ranks, by ``fluxutils_py.training.optuna_pruning``."""


def test_ranks_train_a_trial_together_and_rank_0_prunes_it(ran):
    ran("shared_trials", 2)
