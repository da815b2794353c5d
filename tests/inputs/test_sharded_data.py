"""fluxutils_py.inputs.sharded_data: what ranks with series of their own agree on; see also
tests/mpi.
"""

import threading

import numpy as np
import pytest

from fluxutils_py import samples
from fluxutils_py.errors import DataError, RankError
from fluxutils_py.inputs.inputs import Schema
from fluxutils_py.inputs.moments import Moments
from fluxutils_py.inputs.sharded_data import ShardedReader, is_empty, sharded_reader
from fluxutils_py.parallel import RankGroup

SCHEMA = Schema("Estimator")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 7, 11))


class Rank:
    """A rank in a thread."""

    def __init__(self, rank, size, shared, barrier):
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def allgather(self, value):
        self._shared[self.rank] = value
        self._barrier.wait(30)
        found = list(self._shared)
        self._barrier.wait(30)
        return found

    def barrier(self):
        self._barrier.wait(30)

    allreduce_ = broadcast_ = None


def on_ranks(f, arguments):
    """Call ``f(reader, argument)`` on as many ranks; returns results, or errors."""
    size = len(arguments)
    shared, barrier, found = [None] * size, threading.Barrier(size), [None] * size

    def run(rank):
        try:
            with RankGroup(Rank(rank, size, shared, barrier)) as ranks:
                found[rank] = f(ShardedReader(ranks), arguments[rank])
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    return found


def series(a):
    return [a[:, n, : 4 + n] for n in range(a.shape[1])]


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.astype("float32"),
        (X, X[:1].astype(int)),
        samples(X),
        series(X),
        (series(X), series(X[:2])),
    ],
)
def test_a_rank_without_series_gets_a_stand_in_of_the_form_that_the_others_have(x):
    full, empty = on_ranks(lambda reader, a: reader.inputs(a, SCHEMA), [x, None])
    assert empty.is_stand_in
    assert not full.is_stand_in
    for a, b in zip(full.series, empty.series, strict=True):
        assert (a.F, a.dtype, a.kind, a.name) == (b.F, b.dtype, b.kind, b.name)
    assert (empty.form, empty.is_list, empty.N, empty.local_series().length.tolist()) == (
        full.form,
        full.is_list,
        1,
        [0],
    )
    for inputs in (full, empty):
        assert inputs.shards.counts == (7, 0)
        assert inputs.all_series().length.tolist() == full.local_series().length.tolist()
    assert len(empty.of_rank(empty.all_series())) == 1
    assert full.of_rank(full.all_series()).series.tolist() == list(range(7))


@pytest.mark.parametrize("y", [X[:2], X[:1] > 0, RNG.normal(size=7), RNG.integers(0, 3, (7, 2))])
def test_targets_too(y):
    def read(reader, given):
        x, y = given
        inputs = reader.inputs(x, SCHEMA)
        return reader.targets(
            y, inputs, Schema("Estimator", target="auto" if np.ndim(y) != 2 else "series")
        )

    full, empty = on_ranks(read, [(X, y), (None, None)])
    assert (full.per_series, full.ndim) == (empty.per_series, empty.ndim)
    (a,), (b,) = full.series, empty.series
    assert (a.F, a.dtype, a.kind, b.N) == (b.F, b.dtype, b.kind, 1)


@pytest.mark.parametrize(
    ("others", "what"),
    [
        (X[:2], "the features of x: 3 on ranks 0 and 2, 2 on rank 1"),
        (X.astype("float32"), "the dtype of x: float64 on ranks 0 and 2, float32 on rank 1"),
        (samples(X), r"the form of x: an array on ranks 0 and 2, samples\(x\) on rank 1"),
        (series(X), "the form of x: an array on ranks 0 and 2, a list of series on rank 1"),
    ],
)
def test_differences_name_the_ranks(others, what):
    for error in on_ranks(lambda reader, a: reader.inputs(a, SCHEMA), [X, others, X]):
        with pytest.raises(RankError, match=what):
            raise error


def test_sums_labels_and_moments_are_of_all_ranks():
    def find(reader, given):
        inputs = reader.inputs(given, SCHEMA)
        first = 0 if given is None else given.shape[1]
        found = np.array(["a", "b"] if first == 7 else ["c"])
        classes, n_labels = reader.classes(lambda: (found, 9), inputs)
        assert n_labels == 18
        return (
            reader.total(first),
            classes.tolist(),
            reader.moments(Moments(np.array([first]), np.array([1.0 * first]), 0.0)),
        )

    total, classes, (count, mean, squares) = on_ranks(find, [X, None, X[:, :2]])[1]
    values = np.repeat([7.0, 2.0], [7, 2])
    assert (total, classes) == (9, ["a", "b", "c"])
    assert (count, mean, squares) == (
        9,
        pytest.approx(values.mean()),
        pytest.approx(9 * values.var()),
    )


def test_one_process_reads_as_ever():
    reader = sharded_reader(RankGroup())
    inputs = reader.inputs(X, SCHEMA)
    assert inputs.shards is None
    assert inputs.all_series().series.tolist() == list(range(7))
    assert reader.total(3) == 3
    with pytest.raises(DataError, match="x must be an array"):
        reader.inputs(None, SCHEMA)


@pytest.mark.parametrize("x", [None, [], X[:, :0], (X[:, :0], X[:, :0]), (None, None)])
def test_no_series(x):
    assert is_empty(x)
    for error in on_ranks(lambda reader, a: reader.inputs(a, SCHEMA), [x, x]):
        with pytest.raises(DataError, match="no rank has any series"):
            raise error


@pytest.mark.parametrize("x", [X, samples(X), series(X), (X, X), X[:, 0], ()])
def test_series(x):
    assert not is_empty(x)
