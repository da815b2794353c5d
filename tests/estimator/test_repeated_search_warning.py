"""Under several ranks, a search that each of them repeats says so, once."""

import re
import warnings

import joblib
import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV, cross_val_score

from fluxutils_py import samples
from fluxutils_py.estimator import data_warnings as repeated_search_warning
from fluxutils_py.parallel.joblib_mpi import MPIBackend
from fluxutils_py.parallel.launcher import alone
from tests.plain_networks import plain_regressor

X = np.random.default_rng(0).normal(size=(2, 10, 7))
Y = X[:1]
SMALL = {"hidden_size": 2, "epochs": 1, "random_state": 0, "verbose": False}
MESSAGE = r'each of 2 ranks repeats this search by itself.*joblib\.parallel_config\("mpi"\)'


@pytest.fixture
def rank_of_two(monkeypatch):
    """Set what mpirun sets for one of two ranks; ``comm="auto"`` would now wait for the other."""

    def set_rank(rank):
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))

    monkeypatch.setattr(repeated_search_warning, "_is_said", False)
    return set_rank


def search(**settings):
    est = plain_regressor(**SMALL, **settings)
    return cross_val_score(est, samples(X), samples(Y), cv=2)


@pytest.mark.slow
def test_rank_0_says_once_that_a_search_is_repeated(rank_of_two):
    rank_of_two(0)
    grid = GridSearchCV(plain_regressor(comm=None, **SMALL), {"epochs": [1, 2]}, cv=2)
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        grid.fit(samples(X), samples(Y))
    assert len([w for w in caught if re.match(MESSAGE, str(w.message))]) == 1
    grid.fit(samples(X), samples(Y))


def test_jobs_of_a_rank_repeat_it(rank_of_two):
    rank_of_two(0)
    with joblib.parallel_config("threading", n_jobs=2), pytest.warns(UserWarning, match=MESSAGE):
        search()


def test_other_ranks_stay_silent(rank_of_two):
    rank_of_two(1)
    search(comm=None)


def test_a_fit_outside_of_searches_is_not_repeated(rank_of_two):
    rank_of_two(0)
    plain_regressor(comm=None, **SMALL).fit(X, Y)


@pytest.mark.slow
def test_shared_tasks_are_not_repeated(rank_of_two):
    rank_of_two(0)
    with alone():  # inside a task
        search()
    with joblib.parallel_config(MPIBackend()), joblib.parallel_config("sequential"), alone():
        search()


def test_one_process_repeats_nothing(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", MESSAGE)
        with joblib.parallel_config("mpi"):
            search()
