"""Parts of a batch for several ranks, against numpy.array_split."""

import numpy as np
import pytest
import torch

from fluxutils_py.errors import ShapeError
from fluxutils_py.training.sharding import digest, n_observations, shard


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_are_those_of_array_split(size):
    x, y = torch.arange(12.0).reshape(6, 2), np.arange(6)
    batch = {"x": x, "y": (y, "text"), "one": torch.ones(1, 3)}
    parts = [shard(batch, rank, size) for rank in range(size)]
    assert [p is None for p in parts] == [size > 6 and rank == 6 for rank in range(size)]
    for part, expected in zip(parts, np.array_split(x.numpy(), size), strict=True):
        if part is not None:
            np.testing.assert_array_equal(part["x"], expected)
            assert part["y"][1] == "text"
            assert part["one"].shape == (1, 3)  # goes to every rank


def test_another_axis():
    part = shard(torch.arange(10).reshape(2, 5), 1, 2, axis=1)
    assert part.tolist() == [[3, 4], [8, 9]]


def test_arrays_of_different_lengths_are_an_error():
    with pytest.raises(ShapeError, match="have 3, 4 observations along axis 0"):
        n_observations((np.zeros(3), np.zeros(4)))


def test_a_batch_without_arrays_cannot_be_divided():
    with pytest.raises(ShapeError, match="holds no arrays that 2 ranks could divide"):
        shard({"text": "a"}, 0, 2)


def test_digests_tell_values_shapes_and_types_apart():
    a = np.arange(6, dtype="float32")
    others = [a + 1, a.reshape(2, 3), a.astype("float64"), [a], {"a": a}]
    assert digest(a) == digest(a.copy()) == digest(np.ascontiguousarray(np.stack([a, a], 1)[:, 0]))
    assert len({digest(other) for other in [a, *others]}) == 6
    assert digest(torch.from_numpy(a)) < 1 << 24
