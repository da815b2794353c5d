"""Windows as batches."""

import threading

import numpy as np
import pytest
import torch

from fluxutils_py.data import SampleWeight, SequenceWindows, SeriesArray, h5mmap, h5save
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.sequence_windows import WindowIndex
from fluxutils_py.inputs import as_series
from fluxutils_py.training.minibatch import TensorBatches

CPU = torch.device("cpu")


def windows(n_inputs=1, n_targets=1, **kwargs):
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype("f4")
    labels = np.arange(35).reshape(1, 5, 7)
    return SequenceWindows(
        [SeriesArray(x, "x"), SeriesArray(labels, "x")][:n_inputs],
        [SeriesArray(2 * x, "y"), SeriesArray(labels, "y")][:n_targets],
        batchsize=2,
        seqsize=3,
        **kwargs,
    )


def test_batches_are_the_windows_as_tensors():
    source = windows()
    batches = TensorBatches(source, torch.float64, CPU)
    assert len(batches) == len(source) == len(list(batches))
    for batch, w in zip(batches, source, strict=True):
        assert np.array_equal(batch.x.numpy(), w.x[0].astype("f8"))
        assert np.array_equal(batch.y.numpy(), w.y[0].astype("f8"))
        assert batch.x.dtype == batch.y.dtype == torch.float64
        assert batch.weight is None
        assert (batch.index.start, batch.index.last) == (w.index.start, w.index.last)


def test_only_several_arrays_are_a_tuple():
    (batch, *_) = TensorBatches(windows(2, 2), torch.float32, CPU)
    assert [t.dtype for t in batch.x] == [torch.float32, torch.int64]
    assert [t.dtype for t in batch.y] == [torch.float32, torch.int64]
    assert [tuple(t.shape) for t in batch.x] == [(3, 2, 3), (3, 2, 1)]
    (batch, *_) = TensorBatches(windows(1, 0), torch.float32, CPU)
    assert isinstance(batch.x, torch.Tensor)
    assert batch.y == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_and_masks_take_the_type_of_the_model(dtype):
    weight = SampleWeight(np.arange(5), 5, 7)
    for source in (
        windows(weight=weight),
        windows(segments=Segments.from_lengths(5, 7, np.array([7, 2, 5, 1, 7]))),
    ):
        for batch, w in zip(TensorBatches(source, dtype, CPU), source, strict=True):
            assert (batch.weight is None) == (w.w is None)
            if batch.weight is not None:
                assert batch.weight.dtype == dtype
                assert np.array_equal(batch.weight.numpy(), w.w)


def test_each_pass_is_shuffled_anew():
    batches = TensorBatches(windows(), torch.float32, CPU, np.random.default_rng(3))
    orders = [
        [int(s) for b in batches if b.index.first for s in b.index.segments.series]
        for _ in range(4)
    ]
    assert all(sorted(o) == [0, 1, 2, 3, 4] for o in orders)
    assert len({tuple(o) for o in orders}) > 1
    again = TensorBatches(windows(), torch.float32, CPU, np.random.default_rng(3))
    assert [int(s) for b in again if b.index.first for s in b.index.segments.series] == orders[0]


def test_the_next_window_of_a_map_is_announced_before_one_is_worked_on(tmp_path, monkeypatch):
    h5save(tmp_path / "x.h5", {"x": np.random.default_rng(0).normal(size=(2, 5, 17)).astype("f4")})
    windows = SequenceWindows(
        as_series(h5mmap(tmp_path / "x.h5", "x"), "x"), batchsize=2, seqsize=5
    )
    events = []

    def note(name):
        real = getattr(SequenceWindows, name)

        def noted(self, *arguments):
            at = (
                arguments[0]
                if name == "read"
                else WindowIndex(*arguments, 0, False, False, True, None)
            )
            events.append((name, at.segments.series[0], at.start))
            return real(self, *arguments)

        monkeypatch.setattr(SequenceWindows, name, noted)

    note("prefetch")
    note("read")
    places = [(p.segments.series[0], p.start) for p in windows.indices()]
    assert (
        len(list(TensorBatches(windows, torch.float32, torch.device("cpu")))) == len(places) == 12
    )
    expected = [("prefetch", *places[0])]
    for place, following in zip(places, [*places[1:], None], strict=True):
        expected += ([("prefetch", *following)] if following else []) + [("read", *place)]
    assert events == expected


def test_lazy_arrays_are_read_in_another_thread_and_errors_come_at_their_window(tmp_path):
    class Lazy:
        shape, dtype = (2, 5, 17), np.dtype("f4")

        def __init__(self):
            self.threads, self.data = (
                set(),
                np.random.default_rng(0).normal(size=self.shape).astype("f4"),
            )

        def __getitem__(self, key):
            if key[2].start >= 10:
                raise OSError("the disk is gone")
            self.threads.add(threading.current_thread())
            return self.data[key]

    lazy = Lazy()
    windows = SequenceWindows(as_series(lazy, "x"), batchsize=2, seqsize=5)
    got = []

    def walk():
        for batch in TensorBatches(windows, torch.float32, CPU):
            got.append(batch.index.start)
            assert np.array_equal(
                batch.x.numpy(), lazy.data[:, :2, got[-1] : got[-1] + 5].transpose(2, 1, 0)
            )

    with pytest.raises(OSError, match="the disk is gone"):
        walk()
    assert got == [0, 5]
    assert threading.main_thread() not in lazy.threads
    assert not any(t.is_alive() for t in lazy.threads)


def test_windows_for_another_device_are_made_one_ahead_in_another_thread(monkeypatch):
    source, readers = windows(), []
    real = SequenceWindows.read

    def noted(self, place):
        readers.append(threading.current_thread())
        return real(self, place)

    monkeypatch.setattr(SequenceWindows, "read", noted)
    batches = TensorBatches(source, torch.float32, torch.device("meta"))
    assert [b.x.shape for b in batches] == [
        (p.stop - p.start, len(p.segments), 3) for p in source.indices()
    ]
    assert threading.main_thread() not in readers
    assert not any(t.is_alive() for t in readers)
    assert all(b.x.device.type == "cpu" for b in TensorBatches(source, torch.float32, CPU))
    assert threading.main_thread() in readers
