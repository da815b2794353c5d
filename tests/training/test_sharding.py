"""Batches divided over ranks."""

import numpy as np
import pytest
import torch

from fluxutils_py.data.segments import Segments
from fluxutils_py.data.sequence_windows import WindowIndex
from fluxutils_py.errors import ShapeError
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.sharding import digest, n_observations, shard

X = torch.arange(33.0).reshape(11, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_shares_are_all_observations_in_order(size):
    batch = {"x": X, "y": X.numpy()[:, :1], "name": "a", "one": torch.ones(1, 2)}
    parts = [shard(batch, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([p["x"] for p in parts]), X)
    assert np.array_equal(np.concatenate([p["y"] for p in parts]), X.numpy()[:, :1])
    assert {p["name"] for p in parts} == {"a"}
    assert all(p["one"].shape == (1, 2) for p in parts)
    assert max(len(p["x"]) for p in parts) - min(len(p["x"]) for p in parts) <= 1


def test_a_rank_without_observations_has_none():
    assert [shard((X[:2],), rank, 3) is None for rank in range(3)] == [False, False, True]


def test_what_cannot_be_divided_says_the_remedy():
    with pytest.raises(
        ShapeError,
        match=r"arrays .*4, 11 observations along axis 0",
    ):
        shard((X, X[:4]), 0, 2)
    with pytest.raises(ShapeError, match=r"a str, .*2 ranks"):
        shard("text", 0, 2)


def test_a_minibatch_keeps_what_its_parts_weigh():
    batch = Minibatch((X,), (X[:, :1],), weight=22.0)
    assert [batch.shard(rank, 2).weight for rank in range(2)] == [12.0, 10.0]
    weights = torch.rand(11, 1)
    parts = [Minibatch((X,), (X[:, :1],), weight=weights).shard(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([p.weight for p in parts]), weights)
    assert n_observations((X, X.T), axis=5) == 0


def test_a_window_is_divided_by_series():
    x, weights = torch.randn(4, 5, 3), torch.rand(4, 5, 1)
    index = WindowIndex(Segments.from_lengths(5, 9), 2, 6, 0, False, False, True, None)
    batch = Minibatch((x, x + 1), (x[..., :1],), weight=weights, index=index)
    parts = [batch.shard(rank, 2) for rank in range(2)]
    assert [p.index.segments.series.tolist() for p in parts] == [[0, 1, 2], [3, 4]]
    for whole, of_parts in [
        (x, [p.inputs[0] for p in parts]),
        (x + 1, [p.inputs[1] for p in parts]),
        (x[..., :1], [p.labels[0] for p in parts]),
        (weights, [p.weight for p in parts]),
    ]:
        assert torch.equal(torch.cat(of_parts, 1), whole)
    assert batch.shard(5, 6) is None


def test_digests_tell_batches_apart():
    big = torch.randn(300, 70)
    other = big.clone()
    other[0] += 1
    found = {digest(b) for b in ((X,), (X.double(),), (X, X), (X + 1,), X.T, big, other, "a", None)}
    assert len(found) == 9
