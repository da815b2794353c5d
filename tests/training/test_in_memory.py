"""Data sets kept in memory, and their mean and scale."""

import numpy as np
import pytest
import torch

from fluxutils_py.errors import DataError
from fluxutils_py.training.dataset import InMemory
from fluxutils_py.training.minibatch import Minibatch

X = np.random.default_rng(0).normal(5, 3, size=(37, 3))


def test_a_data_set_is_kept_as_one():
    batches = [
        (torch.from_numpy(X[i : i + 5]), torch.from_numpy(X[i : i + 5, :1]))
        for i in range(0, 37, 5)
    ]
    data = InMemory.from_dataset(batches, batchsize=8)
    assert [len(b.inputs[0]) for b in data] == [8, 8, 8, 8, 5]
    assert np.array_equal(torch.cat([b.inputs[0] for b in data]).numpy(), X)
    assert np.array_equal(torch.cat([b.labels[0] for b in data]).numpy(), X[:, :1])


def test_what_has_weights_or_nothing_is_not_kept():
    for batches in ([], [Minibatch((torch.ones(2, 1),), weight=3.0)]):
        with pytest.raises(DataError, match="one kind, without weights"):
            InMemory.from_dataset(batches, batchsize=2)


def test_with_replacement_examples_repeat_and_a_pass_goes_on_exactly():
    def make():
        return InMemory(
            torch.arange(37), batchsize=10, shuffle=True, replacement=True, random_state=1
        )

    data = make()
    drawn = [b.inputs[0].tolist() for b in data]
    flat = [i for batch in drawn for i in batch]
    assert len(flat) == 37
    assert len(set(flat)) < 37  # 23 of 37 are expected
    state, again = data.state_dict(), make()
    again.load_state_dict(state)
    assert [b.inputs[0].tolist() for b in again.skip(2)] == drawn[2:]
    with pytest.raises(ValueError, match="set shuffle=True too"):
        InMemory(X, batchsize=2, replacement=True)


def test_single_examples_are_stacked_and_batches_joined():
    x = torch.arange(12.0).reshape(6, 2)
    examples = InMemory.from_dataset([(row, row.sum()) for row in x], batched=False, batchsize=4)
    assert examples.n == 6
    assert torch.equal(examples.inputs[0], x)
    assert torch.equal(examples.labels[0], x.sum(1))
    assert InMemory.from_dataset([(row, row) for row in x], batchsize=4).n == 12
