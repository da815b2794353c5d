"""fluxutils_py.data.segments: series of several ranks in one order."""

from fractions import Fraction

import numpy as np
import pytest

from fluxutils_py.data import SequenceWindows
from fluxutils_py.data.segments import Segments, SeriesShards
from fluxutils_py.inputs import as_series

COUNTS = [(5, 20, 12), (0, 7), (7, 0, 0), (1, 1, 1), (3, 9, 6)]


def shards_of(counts, rank=0):
    whole = [
        Segments.from_lengths(n, 43, 40 - np.arange(n), np.full(n, r % 3))
        for r, n in enumerate(counts)
    ]
    return SeriesShards.of(whole, rank)


@pytest.mark.parametrize("counts", COUNTS)
def test_series_are_spread_evenly_in_the_documented_order(counts):
    places = [(Fraction(2 * j + 1, 2 * n), r, j) for r, n in enumerate(counts) for j in range(n)]
    shards = shards_of(counts)
    assert list(zip(shards.owner, shards.local, strict=True)) == [
        (r, j) for _, r, j in sorted(places)
    ]
    assert shards.counts == counts
    assert (shards.all_series.length == 40 - shards.local).all()
    assert (shards.all_series.start == shards.owner % 3).all()
    assert shards.n_steps == max(40 - j + r % 3 for _, r, j in places)
    for size in (1, 4, 8):  # in every minibatch each rank has its proportion, up to one series
        for i in range(0, len(places), size):
            owner = shards.owner[i : i + size]
            for rank, n in enumerate(counts):
                assert abs((owner == rank).sum() - len(owner) * n / len(places)) < 2


@pytest.mark.parametrize("counts", COUNTS)
def test_the_rows_of_all_ranks_make_up_the_whole(counts):
    rng = np.random.default_rng(0)
    rows = shards_of(counts).all_series[rng.permutation(sum(counts))[:11]]
    n_rows = 0
    for rank in range(len(counts)):
        shards = shards_of(counts, rank)
        own = shards.of_rank(rows)
        at = [i for i, n in enumerate(rows.series) if shards.owner[n] == rank]
        # in the same order
        assert own.series.tolist() == [shards.local[rows.series[i]] for i in at]
        assert own.start.tolist() == rows.start[at].tolist()
        assert own.length.tolist() == rows.length[at].tolist()
        n_rows += len(own)
    assert n_rows == len(rows)


def test_values_of_ranks_are_put_in_the_common_order():
    shards = shards_of((2, 0, 3))
    # the second rank has a stand-in
    values = [
        np.array([10, 11]),
        np.array([99]),
        np.array([30, 31, 32]),
    ]
    found = shards.in_common_order(values)
    assert found.tolist() == [
        (10, 0, 30)[r] + j for r, j in zip(shards.owner, shards.local, strict=True)
    ]


@pytest.mark.parametrize("counts", COUNTS)
def test_shuffling_keeps_the_places_of_each_rank(counts):
    shards, n = shards_of(counts), sum(counts)
    x = as_series(np.zeros((1, max(counts), 43)), "x")
    windows = SequenceWindows(x, batchsize=8, seqsize=10, segments=shards.all_series, shards=shards)
    drawn = np.random.default_rng(3).permutation(n)
    windows.shuffle(np.random.default_rng(3))
    order = np.concatenate([i.segments.series for i in windows.indices() if i.first])
    assert sorted(order) == list(range(n))
    assert (shards.owner[order] == shards.owner).all()
    for rank in range(len(counts)):  # each in the order that was drawn
        assert order[shards.owner == rank].tolist() == [i for i in drawn if shards.owner[i] == rank]
