"""Searches of scikit-learn whose fits the ranks share: all ranks have what one process finds."""

import contextlib
import time
import warnings
from functools import partial

import joblib
import numpy as np
import optuna
import torch
from sklearn.exceptions import FitFailedWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401  makes the next line work
from sklearn.model_selection import (
    GridSearchCV,
    HalvingGridSearchCV,
    KFold,
    RandomizedSearchCV,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline
from torch import nn

from fluxutils_py import (
    EstimatorRegressor,
    SequenceScaler,
    h5create,
    h5mmap,
    h5save,
    net2vec,
    samples,
)
from fluxutils_py.errors import RankError, RemoteError
from fluxutils_py.nn import GRU
from fluxutils_py.parallel import get_communicator, is_main_process, joblib_mpi, launcher
from fluxutils_py.parallel.launcher import alone
from fluxutils_py.training import OptunaPruning
from tests.plain_networks import plain_regressor

COMM = get_communicator("auto")
RANK, SIZE = COMM.rank, COMM.size
optuna.logging.set_verbosity(optuna.logging.WARNING)
F, N, T = 3, 37, 43


class Skip(nn.Module):
    """Of this script: its name must mean the same on all ranks."""

    def __init__(self, n_in, n_out, hidden=3):
        super().__init__()
        self.rnn, self.head = GRU(n_in, hidden), nn.Linear(n_in + hidden, n_out)

    def forward(self, x):
        return self.head(torch.cat([self.rnn(x), x], -1))


class Alone:
    """Checks that each fit of a search is one process's."""

    def on_start(self, loop):
        assert loop.ranks.size == (SIZE if launcher.in_shared_search() else 1)
        assert is_main_process() or launcher.in_shared_search()


def data(folder):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(F, N, T))  # float64: Adam magnifies rounding
    y = x.cumsum(2).mean(0, keepdims=True)
    if RANK == 0:
        h5save(folder / "data.h5", {"x": x, "y": y})
        wide = h5create(folder / "wide.h5", "x", (64, 400, 50), "f4")
        wide[:] = 1.0
    COMM.barrier()
    return samples(h5mmap(folder / "data.h5", "x")), samples(h5mmap(folder / "data.h5", "y"))


def searches(x, y):
    ready = plain_regressor(
        3, epochs=2, batchsize=16, seqsize=10, random_state=0, callbacks=Alone(), verbose=False
    )
    spec = {"epochs": 2, "batchsize": 16, "seqsize": 10}
    own = EstimatorRegressor(Skip, opt=torch.optim.Adam, spec=spec, random_state=0, verbose=False)
    pipe = make_pipeline(SequenceScaler(), own)
    grid = {"estimatorregressor__model__hidden": [2, 3], "estimatorregressor__opt__lr": [0.01, 0.1]}
    return {
        "grid": GridSearchCV(pipe, grid, cv=KFold(3)),
        "random": RandomizedSearchCV(
            ready, {"lr": [0.001, 0.01, 0.1], "seqsize": [5, 10]}, n_iter=3, cv=2, random_state=1
        ),
        "halving": HalvingGridSearchCV(
            ready,
            {"lr": [0.001, 0.01, 0.1]},
            resource="epochs",
            max_resources=4,
            cv=2,
            factor=2,
            random_state=0,
        ),
    }


def outcome(search):
    """Results of a fitted search, its choice, and the parameters of the refit."""
    results = {key: list(values) for key, values in search.cv_results_.items() if "time" not in key}
    return results, search.best_params_, net2vec(model(search))


def equal(found, plain):
    """Two outcomes."""
    assert found[:2] == plain[:2]
    torch.testing.assert_close(found[2], plain[2], rtol=0, atol=1e-9)


def model(search):
    return getattr(search.best_estimator_, "steps", [(0, search.best_estimator_)])[-1][1].model_


def same_on_all_ranks(value):
    texts = COMM.allgather(repr(value))
    assert len(set(texts)) == 1, texts
    return value


def sent(call):
    """How many bytes rank 0 pickles during a call, at most at once."""
    sizes, dumps = [0], joblib_mpi._dumps
    joblib_mpi._dumps = lambda value: (content := dumps(value), sizes.append(len(content)))[0]
    try:
        call()
    finally:
        joblib_mpi._dumps = dumps
    return max(sizes)


def total(view):
    return float(np.asarray(view).sum())


def where(i):
    time.sleep(0.05)
    return RANK, is_main_process(), get_communicator("auto").size


def fails_at_two(i):
    if i == 2:
        raise LookupError(f"no candidate {i}")
    return i


class Awkward(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def awkward(i):
    raise Awkward(i, "lock")


class OnlyOnRank0:
    """Like a map of a file that another machine does not have."""

    def __reduce__(self):
        return read, ()


def read():
    if RANK == 1:
        raise FileNotFoundError("data.h5")
    return OnlyOnRank0()


def raised(call, context=None):
    try:
        with context or joblib.parallel_config("mpi"):
            call()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def tasks(f, n=6, *args):
    return joblib.Parallel()(joblib.delayed(f)(i, *args) for i in range(n))


class AfterTwoEpochs(optuna.pruners.BasePruner):
    """Prunes all trials but the first."""

    def prune(self, study, trial):
        return trial.number > 0 and trial.last_step == 2


class Broken(optuna.trial.FixedTrial):
    def report(self, value, step):
        raise OSError("study.log")


def shared_trials(x, y):
    """Trials that all ranks train together, as docs/scaling.md has it; rank 0 has the study."""
    x, y = np.asarray(x.array)[:, :9], np.asarray(y.array)[:, :9]  # 9 series
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
        same_on_all_ranks(net2vec(est).tolist())
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
    error = raised(partial(est.fit, x, y), contextlib.nullcontext())
    assert type(error) is (OSError if RANK == 0 else RemoteError)
    assert str(error) == ("study.log" if RANK == 0 else "rank 0: OSError: study.log")


def main(folder):
    x, y = data(folder)
    shared_trials(x, y)
    for name, search in searches(x, y).items():
        with joblib.parallel_config("mpi"):
            search.fit(x, y)
        with alone():
            plain = outcome(searches(x, y)[name].fit(x, y)) if RANK == 0 else None
        equal(outcome(search), COMM.allgather(plain)[0])
        same_on_all_ranks(net2vec(model(search)))

    # an instance has other weights on each rank: those of rank 0 count, for all fits; a lambda
    # travels by its code
    torch.manual_seed(RANK)
    spec = {"epochs": 1, "batchsize": 8, "seqsize": 10}
    own = EstimatorRegressor(nn.Sequential(GRU(F, 3), nn.Linear(3, 1)), spec=spec, verbose=False)
    with joblib.parallel_config("mpi"):
        scores = cross_val_score(own, x, y, cv=3, scoring=lambda est, a, b: est.score(a, b) + 1)
    same_on_all_ranks(scores.tolist())
    first = COMM.allgather(own)[0]
    with alone():
        np.testing.assert_allclose(scores - 1, cross_val_score(first, x, y, cv=3), rtol=1e-5)

    # all ranks work, each as a process of its own, and all have all results
    with joblib.parallel_config("mpi"):
        places = tasks(where, 6 * SIZE)
    assert {rank for rank, *_ in same_on_all_ranks(places)} == set(range(SIZE))
    assert {tuple(rest) for _, *rest in places} == {(True, 1)}

    # a map travels as its path, an array once for all tasks
    wide = samples(h5mmap(folder / "wide.h5", "x"))
    with joblib.parallel_config("mpi"):
        of_map = sent(lambda: joblib.Parallel()(joblib.delayed(total)(wide[i:]) for i in range(5)))
        array = np.ones(100_000)
        shared = sent(lambda: joblib.Parallel()(joblib.delayed(np.sum)(array) for _ in range(5)))
    if RANK == 0:
        assert of_map < 20_000 < wide.array.nbytes, of_map
        assert array.nbytes < shared < 1.1 * array.nbytes, shared

    # an error arrives with its text on all ranks, and the ranks go on
    error = raised(partial(tasks, fails_at_two))
    assert (type(error), str(error)) == (LookupError, "no candidate 2")
    assert "raised in task 2 on rank" in error.__notes__[0]
    assert "fails_at_two" in error.__notes__[0]
    error = raised(partial(tasks, awkward))
    assert type(error) is RemoteError
    assert "Awkward" in str(error)
    assert "and lock" in str(error)
    wrong = plain_regressor(lr=-1.0, verbose=False)
    error = raised(partial(cross_val_score, wrong, x, y, cv=2, error_score="raise"))
    assert "lr must be a positive number" in str(error)
    with warnings.catch_warnings(record=True) as caught, joblib.parallel_config("mpi"):
        warnings.simplefilter("always", FitFailedWarning)
        warnings.filterwarnings("ignore", "this fit makes [0-9]+ updates? in all")
        half = GridSearchCV(wrong, {"lr": [-1.0, 0.1], "epochs": [1]}, cv=2).fit(x, y)
    assert np.isnan(half.cv_results_["mean_test_score"]).tolist() == [True, False]
    assert "lr must be a positive number" in str(caught[0].message)

    # ranks that search for different things
    np.random.seed(RANK)  # noqa: NPY002  what scikit-learn draws from without a random_state
    drawn = RandomizedSearchCV(
        plain_regressor(epochs=1), {"lr": np.logspace(-4, -1, 1000)}, n_iter=2, cv=2
    )
    error = raised(partial(drawn.fit, x, y))
    assert type(error) is RankError
    assert "ranks disagree about task" in str(error)
    assert "random_state" in str(error)
    error = raised(partial(cross_val_score, own, x, y, cv=KFold(2, shuffle=True)))
    assert type(error) is RankError
    error = raised(partial(tasks, where, 2 + (RANK == SIZE - 1)))
    assert type(error) is RankError
    assert "task 2 of 2" in str(error)

    # a rank that cannot read the tasks
    error = raised(partial(tasks, isinstance, 3, OnlyOnRank0()))
    if RANK == 1:
        assert type(error) is FileNotFoundError
    else:
        assert (type(error), str(error)) == (RemoteError, "rank 1: FileNotFoundError: data.h5")
    with joblib.parallel_config("mpi"):
        assert tasks(fails_at_two, 2) == [0, 1]  # they go on
