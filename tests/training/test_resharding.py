"""``training/resharding.py``: states of rows are joined in the order of ranks and cut as
numpy.array_split cuts.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import states
from fluxutils_py.errors import LoadError
from fluxutils_py.nn import GRU, LSTM, Recur
from fluxutils_py.nn.states import snapshot
from fluxutils_py.training.resharding import (
    mean_of_buffers,
    require_shared_batches,
    reshard,
    reshard_rows,
    state_of_rank,
)


def model():
    torch.manual_seed(0)
    return nn.Sequential(LSTM(3, 4, num_layers=2), GRU(4, 5), nn.Linear(5, 1))


def after(x):
    m = model()
    m(x)
    return snapshot(m), states(m)


@pytest.mark.parametrize("before", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_rows_of_any_number_of_ranks_are_cut_for_any_other(before, size):
    x = torch.randn(6, 7, 3)  # 7 rows: uneven, and none on some of 9 ranks
    parts = [after(p)[0] if p.shape[1] else snapshot(model()) for p in map_split(x, before)]
    for rank, rows in enumerate(np.array_split(np.arange(7), size)):
        found = reshard_rows(model(), parts, rank, size)
        if not len(rows):
            assert found == [None, None]
            continue
        (h, c), g = found
        whole = after(x)[1]
        for got, want in zip(
            (h, c, g if isinstance(g, torch.Tensor) else g[0]), whole, strict=True
        ):
            torch.testing.assert_close(got, want[:, rows], atol=1e-6, rtol=0)


def map_split(x, n):
    return [x[:, rows] for rows in np.array_split(np.arange(x.shape[1]), n)]


def test_ranks_without_states_are_left_out():
    m = nn.Sequential(Recur(nn.GRUCell(2, 1)))
    assert reshard_rows(m, [[], []], 0, 2) == []
    assert reshard_rows(m, [[None], [None]], 0, 2) == [None]
    (rows,) = reshard_rows(m, [[torch.arange(3.0)[:, None]], []], 1, 2)
    assert rows.tolist() == [[2.0]]


def test_without_a_method_each_rank_has_its_own_and_new_ones_that_of_the_first():
    assert [reshard(object(), ["a", "b"], rank, 4) for rank in range(4)] == ["a", "b", "a", "a"]
    assert state_of_rank(["a", "b"], 1) == "b"


def test_a_method_of_the_thing_decides():
    class Adds:
        def reshard_state_dict(self, states, rank, size):
            return sum(states) + 100 * rank + 1000 * size

    assert reshard(Adds(), [1, 2], 3, 4) == 4303


def test_buffers_become_their_weighted_mean_and_integers_those_of_the_first():
    parts = [{"m": torch.tensor([v, 7.0]), "n": torch.tensor(n)} for v, n in ((1.0, 3), (4.0, 5))]
    found = mean_of_buffers(parts, [1, 2])
    assert found["m"].tolist() == [3.0, 7.0]
    assert found["m"].dtype == torch.float32
    assert found["n"].item() == 3
    assert mean_of_buffers(parts, [0, 0])["m"].tolist() == [2.5, 7.0]
    assert mean_of_buffers(parts[:1], [0])["m"] is parts[0]["m"]  # to the bit


def test_batches_of_each_ranks_own_cannot_be_divided_anew():
    require_shared_batches("same", 2, 3)
    require_shared_batches(None, 2, 3)
    with pytest.raises(
        LoadError,
        match=r"1 rank with separate batches .*3 are: ",
    ):
        require_shared_batches("per_rank", 1, 3)
