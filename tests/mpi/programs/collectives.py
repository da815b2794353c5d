"""What two ranks do together besides training; every check raises where it fails."""

import pickle
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier, Spec, net2vec, samples
from fluxutils_py.bobbin import assert_replica_integrity, gather_from_processes
from fluxutils_py.errors import RemoteError
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import MPIComm, get_communicator

folder = Path()
world = MPI.COMM_WORLD
rank = world.rank
rng = np.random.default_rng(0)
x = rng.standard_normal((3, 7, 40))
y = x.mean(0, keepdims=True)
SPEC = Spec(epochs=1, batchsize=2, seqsize=20)


def est(model=None, **kw):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1)) if model is None else model
    return Estimator(model, spec=kw.pop("spec", SPEC), random_state=0, verbose=False, **kw)


def raises(error, call):
    try:
        call()
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("large", torch.tensor(2**53 + 1 + rank))

    def forward(self, x):
        return self.linear(self.norm(x.flatten(0, -2)).reshape(x.shape))


def statistics_of_batches_are_averaged_by_live_steps():
    # one window: rank 0 has series 0 to 3, rank 1 4 to 6
    m = est(Norm(), spec=Spec(1, 4, 40)).fit(x, y).model_
    parts = [x[:, :4].reshape(3, -1), x[:, 4:].reshape(3, -1)]
    stats = [(0.1 * p.mean(1), 0.9 + 0.1 * p.var(1, ddof=1)) for p in parts]
    mean, var = ((4 * a + 3 * b) / 7 for a, b in zip(*stats, strict=True))
    np.testing.assert_allclose(m.norm.running_mean, mean, atol=1e-12)
    np.testing.assert_allclose(m.norm.running_var, var, atol=1e-12)
    assert m.norm.num_batches_tracked == 1
    assert m.large == 2**53 + 1  # rank 0's, every digit
    assert torch.equal(m.mask, torch.tensor([0.0, -torch.inf]).double())
    assert_replica_integrity(m, atol=0, rtol=0)


def into_one_file_each_rank_writes_its_own_series():
    whole = good.predict(x)
    path = folder / "out.npy"
    if rank == 0:
        np.lib.format.open_memmap(path, "w+", float, (1, 7, 40))[:] = 5
    world.Barrier()
    out = np.lib.format.open_memmap(path, "r+")
    wrote = []

    class Watched(np.memmap):
        def __setitem__(self, key, value):
            wrote.append(key[1])
            super().__setitem__(key, value)

    good.predict(x, out=out.view(Watched))
    assert {(s.start, s.stop) for s in wrote} == ({(0, 4)} if rank == 0 else {(4, 7)})
    assert np.array_equal(np.load(path), whole)  # at once, on both ranks
    own = np.lib.format.open_memmap(folder / f"own{rank}.npy", "w+", float, (1, 7, 40))
    good.predict(x, out=own)  # files that differ: each rank gets the whole
    assert np.array_equal(own, whole)
    message = raises(
        ValueError, lambda: good.predict(x, out=np.empty((1, 7, 40), ["f8", "f4"][rank]))
    )
    kinds = "[(1, dtype('float64'))] on rank 0, [(1, dtype('float32'))] on rank 1"
    assert message.startswith(f"out differs: {kinds}; ")


def labels_of_any_type_are_passed_on():
    labels = np.array(["no", "yes"])[(y > 0).astype(int)]
    classifier = EstimatorClassifier(spec=SPEC, random_state=0, verbose=False).fit(x, labels)
    assert_replica_integrity([classifier.model_, classifier.predict(x).tolist()], atol=0, rtol=0)
    assert classifier.predict(x).shape == (1, 7, 40)
    one = EstimatorClassifier(spec=SPEC, random_state=0, verbose=False).fit(x, labels[0, :, -1])
    assert one.predict(x).shape == (7,)
    assert_replica_integrity(one.predict_proba(x), atol=0, rtol=0)
    assert one.predict(x[:, :1]).shape == (1,)  # fewer series than ranks


def one_rank_alone_may_predict_in_a_callback_and_save():
    path = folder / "model.flux"
    seen = []

    def callback(loop):
        e = loop.shared_data["estimator"]
        if loop.rank == 1:
            seen.append(e.predict(x).shape)
        e.save(path)

    told = raises(
        RuntimeError, lambda: est(callbacks=lambda loop: assert_replica_integrity(1)).fit(x, y)
    )
    assert told == (
        "assert_replica_integrity is for all ranks, but within another call of theirs, such as in "
        "a callback of fit, a rank that fails would be missing; call it afterwards"
    )
    e = est(callbacks=callback).fit(x, y)
    assert seen == [(1, 7, 40)] * (4 * rank)
    world.Barrier()
    assert [p.name for p in folder.glob("*.flux")] == ["model.flux"]
    e.save(path)
    world.Barrier()
    assert torch.equal(net2vec(Estimator.load(path)), net2vec(e))
    failing = est(
        callbacks=lambda loop: loop.rank == 0 and good.save(folder / "nowhere" / "model.flux")
    )
    raises(FileNotFoundError if rank == 0 else RemoteError, lambda: failing.fit(x, y))


def a_fitted_estimator_is_pickled_cloned_and_searched():
    again = pickle.loads(pickle.dumps(good))
    assert np.array_equal(again.predict(x), good.predict(x))
    assert clone(good).comm == "auto"
    grid = {"spec": [SPEC, Spec(2, 2, 20)]}
    search = GridSearchCV(est(), grid, cv=2, error_score="raise").fit(samples(x), samples(y))
    scores = search.cv_results_["mean_test_score"].tolist()
    assert gather_from_processes(scores) == [scores] * 2
    if rank == 1:  # its workers are no ranks, though they inherit the variables of one
        workers = GridSearchCV(est(), grid, cv=2, error_score="raise", n_jobs=2, refit=False)
        workers.fit(samples(x), samples(y))


def a_communicator_of_some_ranks_and_one_of_ones_own():
    alone = MPIComm(world.Split(rank))
    assert (alone.rank, alone.size) == (0, 1)
    two = MPIComm(world.Split(0, -rank))  # the other way round
    assert (two.rank, two.size) == (1 - rank, 2)
    e = est(comm=two).fit(x, y)
    assert clone(e).comm is two
    assert pickle.loads(pickle.dumps(two)) is get_communicator("auto")
    assert_replica_integrity(e.model_, atol=0, rtol=0)
    assert torch.allclose(net2vec(e), net2vec(good), atol=1e-12)


def differences_are_found_on_every_rank():
    a, b = np.zeros((2, 3)), torch.ones(4)
    assert_replica_integrity({"a": a + 1e-6 * rank, "b": [b, "text", None]})
    if rank == 1:
        b[2] += 0.01
    told = raises(AssertionError, lambda: assert_replica_integrity({"a": a, "b": [b]}))
    assert told == "replicas differ from rank 0, rank 1: b/0 (shape (4,))"
    told = raises(AssertionError, lambda: assert_replica_integrity([a[rank:]]))
    assert told.startswith("ranks hold different things: ('0', (torch.Size([2, 3]), ")
    assert told.endswith("('0', (torch.Size([1, 3]), torch.float64)) on 1")
    raises(AssertionError, lambda: assert_replica_integrity([np.nan, 1.0][rank]))
    assert_replica_integrity(np.nan)
    assert gather_from_processes({"rank": [rank]}) == [{"rank": [0]}, {"rank": [1]}]


def a_rank_that_is_late_is_named():
    for _ in range(2):  # the first meeting of a communicator, and a later one
        comm = patient
        if rank == 1:
            time.sleep(0.9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            est(comm=comm).fit(x, y)
        told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert (len(told) >= 1) == (rank == 0), told
        if rank == 0:
            assert (
                "Under several ranks all of them call fit; for one rank alone, set comm=None"
                in told[0]
            )
            assert told[0].startswith("rank 0 has been waiting in fit for ")
            assert " s, for rank 1" in told[0]


patient = MPIComm(patience=0.3)
good = est().fit(x, y)


def main(to):
    global folder
    folder = to
    for check in (
        a_rank_that_is_late_is_named,
        statistics_of_batches_are_averaged_by_live_steps,
        into_one_file_each_rank_writes_its_own_series,
        labels_of_any_type_are_passed_on,
        one_rank_alone_may_predict_in_a_callback_and_save,
        a_fitted_estimator_is_pickled_cloned_and_searched,
        a_communicator_of_some_ranks_and_one_of_ones_own,
        differences_are_found_on_every_rank,
    ):
        check()
        get_communicator(
            "auto"
        ).barrier()  # which sleeps, unlike MPI's own: one rank searches alone for a while
