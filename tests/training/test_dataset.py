"""Anything that can be gone through, as batches of inputs and labels."""

import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.gomlx.trainer import Trainer
from fluxutils_py.training import Batch, InMemory, Map, ReadAhead, Take
from fluxutils_py.training.dataset import Dataset, as_dataset
from fluxutils_py.training.minibatch import Minibatch, TensorBatches, as_minibatch

X, Y = torch.arange(21.0).reshape(7, 3), torch.arange(7)


def inputs(dataset):
    return [batch.inputs[0].tolist() for batch in dataset]


# -- what a batch is -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "n_inputs", "n_labels", "weight"),
    [
        (X, 1, 0, None),
        ((X,), 1, 0, None),
        ((X, Y), 1, 1, None),
        ([X, Y], 1, 1, None),
        (((X, X), Y), 2, 1, None),
        ((X, (Y, Y, Y)), 1, 3, None),
        ((X, Y, 5), 1, 1, 5),
        ({"a": X}, 1, 0, None),
    ],
)
def test_inputs_and_labels_are_always_tuples(item, n_inputs, n_labels, weight):
    batch = as_minibatch(item, "kind")
    assert (type(batch.inputs), type(batch.labels)) == (tuple, tuple)
    assert (len(batch.inputs), len(batch.labels), batch.weight, batch.kind) == (
        n_inputs,
        n_labels,
        weight,
        "kind",
    )
    assert batch.first is None
    assert as_minibatch(batch) is batch


@pytest.mark.parametrize("item", [(), (X, Y, None, 3)])
def test_a_tuple_of_another_length_is_refused(item):
    with pytest.raises(DataError) as caught:
        as_minibatch(item)
    assert all(
        part in str(caught.value)
        for part in ("(inputs, labels, weight)", f"got {len(item)} entries")
    )


def windows(y=True, **kwargs):
    x = np.random.default_rng(0).normal(size=(2, 5, 7)).astype("f4")
    target = x[:1].copy()
    target[0, 1, 2] = np.nan
    source = SequenceWindows(
        [SeriesArray(x, "x")], [SeriesArray(target, "y")], batchsize=3, seqsize=4, **kwargs
    )
    return TensorBatches(source, torch.float32, torch.device("cpu"))


def test_windows_carry_state_from_one_to_the_next():
    batches = [as_minibatch(batch) for batch in windows()]
    assert [batch.first for batch in batches] == [True, False, True, False]
    assert [tuple(batch.inputs[0].shape) for batch in batches] == [
        (4, 3, 2),
        (3, 3, 2),
        (4, 2, 2),
        (3, 2, 2),
    ]
    assert (batches[0].weight != 0).sum() == 11  # one step has no target
    assert [batch.n_live for batch in batches] == [11, 9, 8, 6]


@pytest.mark.parametrize("kwargs", [{"overlap": 2}, {"burn_in": 3}])
def test_windows_that_only_a_window_step_can_do_are_refused(kwargs):
    with pytest.raises(DataError) as caught:
        Trainer(torch.nn.Linear(2, 1), torch.nn.MSELoss(reduction="none")).eval(windows(**kwargs))
    assert all(part in str(caught.value) for part in ("overlap or burn_in", "WindowStep"))


# -- adapters ------------------------------------------------------------------------------------------


def test_an_iterable_is_a_dataset_of_every_pass():
    data = as_dataset(
        [(X[:2], Y[:2]), Minibatch((X[2:],), (Y[2:],), "own")], name="two", kind="common"
    )
    assert isinstance(data, Dataset)
    assert as_dataset(data) is data
    assert (data.name, len(data)) == ("two", 2)
    for _ in range(3):
        assert [batch.kind for batch in data] == ["common", "own"]
    assert as_dataset([1]).name == "list"


def test_a_loader_is_a_dataset():
    data = as_dataset(DataLoader(TensorDataset(X, Y), batch_size=3))
    assert len(data) == 3
    assert torch.equal(torch.cat([batch.inputs[0] for batch in data]), X)
    assert torch.equal(torch.cat([batch.labels[0] for batch in data]), Y)


def test_an_iterator_can_be_gone_through_once():
    data = as_dataset((x for x in X), name="stream")
    assert len(list(data)) == 7
    with pytest.raises(DataError) as caught:
        list(data)
    assert "dataset 'stream' is a generator" in str(caught.value)


# -- in memory -----------------------------------------------------------------------------------------


def test_batches_are_cut_from_memory_and_none_is_left_out():
    data = InMemory((X, X.numpy() + 1), Y, batchsize=3)
    assert len(data) == 3
    assert [tuple(v.shape for v in batch.inputs) for batch in data] == [((3, 3), (3, 3))] * 2 + [
        ((1, 3), (1, 3))
    ]
    assert torch.equal(torch.cat([batch.inputs[1] for batch in data]), X + 1)
    assert torch.equal(torch.cat([batch.labels[0] for batch in data]), Y)
    assert next(iter(data)).inputs[0].data_ptr() == X.data_ptr()  # a view
    assert (
        len(InMemory(X, batchsize=3, drop_last=True))
        == len(list(InMemory(X, batchsize=3, drop_last=True)))
        == 2
    )


def test_every_pass_has_another_order_of_the_same_examples():
    data = InMemory(X, Y, batchsize=2, shuffle=True, random_state=0)
    passes = [torch.cat([batch.labels[0] for batch in data]) for _ in range(3)]
    assert all(torch.equal(order.sort().values, Y) for order in passes)
    assert len({tuple(order.tolist()) for order in passes}) == 3
    for batch in data:
        assert torch.equal(batch.inputs[0], X[batch.labels[0]])  # inputs and labels stay together
    again = InMemory(X, Y, batchsize=2, shuffle=True, random_state=0)
    assert torch.equal(torch.cat([batch.labels[0] for batch in again]), passes[0])


def test_endless_data_are_passes_one_after_the_other():
    data, finite = (
        InMemory(Y, batchsize=3, infinite=i, shuffle=True, random_state=4) for i in (True, False)
    )
    with pytest.raises(TypeError, match=r"^dataset 'in memory' .*no length$"):
        len(data)
    assert inputs(Take(data, 8)) == (inputs(finite) + inputs(finite) + inputs(finite))[:8]


def test_examples_must_be_equally_many():
    for arrays, sizes in (((X, Y[:3]), [7, 3]), ((), []), ((X[:0],), [0])):
        with pytest.raises(ShapeError) as caught:
            InMemory(arrays, batchsize=2)
        assert f"got {sizes}" in str(caught.value)
    with pytest.raises(ShapeError, match=r"^7 examples .*of 8; .*drop_last=False$"):
        InMemory(X, batchsize=8, drop_last=True)


# -- made of others ------------------------------------------------------------------------------------


def test_only_the_first_batches_of_each_pass():
    data = Take(InMemory(Y, batchsize=2), 3)
    assert inputs(data) == inputs(data) == [[0, 1], [2, 3], [4, 5]]
    assert (
        len(data),
        len(Take(InMemory(Y, batchsize=2), 9)),
    ) == (3, 4)
    assert inputs(data.skip(2)) == [[4, 5]]
    assert inputs(data.skip(3)) == []
    assert inputs(Take(data, 0)) == []


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_map_keeps_the_order(workers, no_thread_stays):
    data = Map(
        InMemory(X, Y, batchsize=2, kind="s"),
        lambda b: (b.inputs[0] * 2, b.labels),
        workers=workers,
    )
    assert len(data) == 4
    for _ in range(2):
        assert torch.equal(torch.cat([batch.inputs[0] for batch in data]), 2 * X)
    assert {batch.kind for batch in data} == {"s"}
    assert inputs(data.skip(3)) == [(2 * X[6:]).tolist()]


def test_reading_ahead_keeps_the_order(no_thread_stays):
    data, seen = ReadAhead(InMemory(X, batchsize=2), 2), []
    assert len(data) == 4
    assert inputs(data) == inputs(data) == inputs(InMemory(X, batchsize=2))
    thread = Map(
        InMemory(X, batchsize=2),
        lambda batch: (seen.append(threading.current_thread().name), batch)[1],
    )
    list(ReadAhead(thread))
    assert set(seen) == {"BackgroundDataLoader_0"}


def test_a_dataset_made_of_another_is_named_and_reset_with_it():
    class Noted:
        name, kind, resets = "noted", 3, 0

        def __iter__(self):
            return iter([Minibatch((1,))])

        def reset(self):
            self.resets += 1

    noted = Noted()
    for data in (Take(noted, 1), Map(noted, lambda b: b), ReadAhead(noted)):
        assert (data.name, data.kind) == ("noted", 3)
        data.reset()
        data.load_state_dict(data.state_dict())
    assert noted.resets == 3


def test_examples_become_batches_of_any_item():
    examples = [(torch.tensor([i, -i]), torch.tensor(i)) for i in range(7)]
    data = Batch(examples, 3)
    assert len(data) == 3
    assert [batch.y.tolist() for batch in data] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [tuple(batch.x.shape) for batch in data.skip(1)] == [(3, 2), (1, 2)]
    assert [batch.y.tolist() for batch in Batch(examples, 3, drop_last=True)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert len(Batch(examples, 3, drop_last=True)) == 2
    joined = Batch([torch.ones(2, 1), torch.ones(3, 1)], 2, stack=False)
    assert [tuple(batch.x.shape) for batch in joined] == [(5, 1)]
    with pytest.raises(DataError, match="weights"):
        list(Batch([(torch.ones(1), torch.ones(1), torch.ones(1))], 2))


def test_an_unordered_map_yields_what_is_ready_first():
    first_may_end = threading.Event()

    def load(batch):
        if batch.x == 0:
            assert first_may_end.wait(60)
        return batch

    data, found = Map(range(4), load, workers=2, ordered=False), []
    for batch in data:
        found.append(batch.x)
        first_may_end.set()
    assert found[0] == 1
    assert sorted(found) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="ordered"):
        data.skip(2)


def test_read_ahead_moves_batches_to_a_device():
    (batch,) = ReadAhead([torch.ones(2)], device="meta")
    assert batch.x.device.type == "meta"
