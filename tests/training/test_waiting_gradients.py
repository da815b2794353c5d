"""Gradients that wait for more batches; tests/mpi/test_law6.py sums them over ranks."""

import torch
from torch import nn

from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import SingleProcessComm
from fluxutils_py.parallel.gradient_vector import DENSE, NONE, GradientVector
from fluxutils_py.training.gradient_step import WaitingGradients


class Twins(SingleProcessComm):
    """Two ranks that hold the same."""

    size = 2

    def __init__(self):
        self.sizes = []

    def allreduce_(self, t):
        self.sizes.append(t.numel())
        t.mul_(2)


def waiting(comm=None):
    layers = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)])
    vector = GradientVector(list(layers.parameters()), RankGroup(comm))
    return WaitingGradients(vector), vector, layers


def add(waits, vector, layers, value, n_live, factor):
    layers[0].weight.grad = torch.full((1, 2), value)
    vector.pack()
    waits.add(n_live, factor)


def test_the_mean_is_over_the_data_of_all_batches():
    waits, vector, layers = waiting()
    add(waits, vector, layers, 1.0, 3, 3)
    add(waits, vector, layers, 5.0, 1, 1)
    assert waits.n == 2
    assert waits.take_mean() == [DENSE, NONE]
    assert vector.values.tolist() == [2, 2, 0]
    assert waits.n == 0
    add(waits, vector, layers, 7.0, 2, 2)  # begins anew
    waits.take_mean()
    assert vector.values.tolist() == [7, 7, 0]


def test_ranks_sum_the_vector_once():
    comm = Twins()
    waits, vector, layers = waiting(comm)
    add(waits, vector, layers, 1.0, 4, 2)
    add(waits, vector, layers, 3.0, 4, None)  # no data on this rank
    add(waits, vector, layers, 3.0, 4, 2)
    assert comm.sizes == []
    assert waits.take_mean() == [DENSE, NONE]
    assert len(comm.sizes) == 1
    assert torch.allclose(vector.values, torch.tensor([4 / 3, 4 / 3, 0]))


def test_the_state_is_restored():
    waits, vector, layers = waiting()
    assert waits.state_dict() is None
    add(waits, vector, layers, 2.0, 2, 2)
    other, other_vector, _ = waiting()
    other.load_state_dict(waits.state_dict())
    assert other.take_mean() == waits.take_mean() == [DENSE, NONE]
    assert torch.equal(other_vector.values, vector.values)
    other.load_state_dict(None)
    assert other.n == 0


def test_another_number_of_ranks_has_the_same_sum():
    states = []
    for value in (1.0, 4.0):
        waits, vector, layers = waiting()
        add(waits, vector, layers, value, 4, 2)
        states.append(waits.state_dict())
    first, second = (WaitingGradients.reshard(states, rank) for rank in (0, 1))
    assert first[2].tolist() == [10, 10, 0]
    assert second[2].tolist() == [0, 0, 0]
    assert (first[:2], first[3], second[:2]) == ((1, 4), [DENSE, NONE], (1, 4))
    assert states[0][2].tolist() == [2, 2, 0]  # unchanged
    assert WaitingGradients.reshard([None, None], 0) is None
