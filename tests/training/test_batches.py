"""Arrays of any kind as tensors, and windows as batches."""

import itertools
import threading

import numpy as np
import pytest
import torch

from fluxutils_py.data import Place, Rows, SampleWeight, SequenceWindows, Series, as_series, h5mmap, h5save
from fluxutils_py.training.batches import TensorBatches, to_tensor

CPU = torch.device("cpu")
ORDERS = list(itertools.permutations(range(3)))
FLOATS = ["f2", "f4", "f8", "g", "?", ">f2", ">f4", ">f8"]
INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i2", ">i8"]


def array(dtype, order=(0, 1, 2), shape=(4, 3, 5)):
    x = (np.arange(np.prod(shape)) % 50).reshape(shape).astype(dtype)
    return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


def packed(dtype):
    """One field of records that are no multiple of its size."""
    records = np.zeros((4, 3, 5), [("flag", "u1"), ("value", dtype)])
    records["value"] = array(dtype)
    return records["value"]


def read_only(x):
    x = x.copy(order="K")
    x.flags.writeable = False
    return x


VIEWS = {
    "whole": lambda x: x,
    "steps reversed": lambda x: x[::-1],
    "series reversed": lambda x: x[:, ::-1],
    "features reversed": lambda x: x[:, :, ::-1],
    "every second": lambda x: x[::2, :, ::2],
    "one": lambda x: x[1:2, 2:3, 4:],
    "repeated": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "read-only": read_only,
    "not aligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
}


def check(values, dtype):
    before = values.copy()
    tensor = to_tensor(values, dtype, CPU)
    assert tensor.dtype == (torch.int64 if values.dtype.kind in "iu" else dtype)
    assert tensor.is_contiguous()
    assert tensor.tolist() == values.astype("f8" if dtype == torch.float64 else "f4").tolist()
    tensor.fill_(99)
    assert np.array_equal(values, before)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", [*FLOATS, *INTEGERS])
def test_any_array_becomes_a_contiguous_copy(kind, view):
    for order in ORDERS:
        check(VIEWS[view](array(kind, order)), torch.float64)
        check(VIEWS[view](array(kind, order)), torch.float32)


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i4"])
def test_a_field_of_records_becomes_a_contiguous_copy(kind):
    check(packed(kind), torch.float64)
    check(packed(kind).transpose(2, 1, 0), torch.float32)


def test_doubles_are_rounded_once_to_the_type_of_the_model():
    x = np.random.default_rng(0).normal(size=(6, 5, 4))
    for values in (x, x.transpose(2, 1, 0)):
        assert np.array_equal(to_tensor(values, torch.float32, CPU).numpy(), values.astype("f4"))


def test_values_that_are_no_numbers_stay():
    x = np.array([[[np.nan, np.inf, -np.inf, -0.0]]], "f4")
    assert np.array_equal(to_tensor(x, torch.float64, CPU).numpy(), x.astype("f8"), equal_nan=True)


def test_a_tensor_goes_to_its_device():
    assert to_tensor(array("f4"), torch.float32, torch.device("meta")).device.type == "meta"


# -- batches -------------------------------------------------------------------------------------------


def windows(n_inputs=1, n_targets=1, **kwargs):
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype("f4")
    labels = np.arange(35).reshape(1, 5, 7)
    return SequenceWindows(
        [Series(x, "x"), Series(labels, "x")][:n_inputs],
        [Series(2 * x, "y"), Series(labels, "y")][:n_targets],
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
        assert batch.w is None
        assert (batch.window.place.start, batch.window.place.last) == (w.place.start, w.place.last)


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
    for source in (windows(weight=weight), windows(rows=Rows.whole(5, 7, np.array([7, 2, 5, 1, 7])))):
        for batch, w in zip(TensorBatches(source, dtype, CPU), source, strict=True):
            assert (batch.w is None) == (w.w is None)
            if batch.w is not None:
                assert batch.w.dtype == dtype
                assert np.array_equal(batch.w.numpy(), w.w)


def test_each_pass_is_shuffled_anew():
    batches = TensorBatches(windows(), torch.float32, CPU, np.random.default_rng(3))
    orders = [[int(s) for b in batches if b.window.place.first for s in b.window.place.rows.series] for _ in range(4)]
    assert all(sorted(o) == [0, 1, 2, 3, 4] for o in orders)
    assert len({tuple(o) for o in orders}) > 1
    again = TensorBatches(windows(), torch.float32, CPU, np.random.default_rng(3))
    assert [int(s) for b in again if b.window.place.first for s in b.window.place.rows.series] == orders[0]


def test_the_next_window_of_a_map_is_announced_before_one_is_worked_on(tmp_path, monkeypatch):
    h5save(tmp_path / "x.h5", {"x": np.random.default_rng(0).normal(size=(2, 5, 17)).astype("f4")})
    windows = SequenceWindows(as_series(h5mmap(tmp_path / "x.h5", "x"), "x"), batchsize=2, seqsize=5)
    events = []

    def note(name):
        real = getattr(SequenceWindows, name)

        def noted(self, *arguments):
            at = arguments[0] if name == "read" else Place(*arguments, 0, False, False, True, None)
            events.append((name, at.rows.series[0], at.start))
            return real(self, *arguments)

        monkeypatch.setattr(SequenceWindows, name, noted)

    note("announce")
    note("read")
    places = [(p.rows.series[0], p.start) for p in windows.places()]
    assert len(list(TensorBatches(windows, torch.float32, torch.device("cpu")))) == len(places) == 12
    expected = [("announce", *places[0])]
    for place, following in zip(places, [*places[1:], None], strict=True):
        expected += ([("announce", *following)] if following else []) + [("read", *place)]
    assert events == expected


def test_lazy_arrays_are_read_in_another_thread_and_errors_come_at_their_window(tmp_path):
    class Lazy:
        shape, dtype = (2, 5, 17), np.dtype("f4")

        def __init__(self):
            self.threads, self.data = set(), np.random.default_rng(0).normal(size=self.shape).astype("f4")

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
            got.append(batch.window.place.start)
            assert np.array_equal(batch.x.numpy(), lazy.data[:, :2, got[-1] : got[-1] + 5].transpose(2, 1, 0))

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
    assert [b.x.shape for b in batches] == [(p.stop - p.start, len(p.rows), 3) for p in source.places()]
    assert threading.main_thread() not in readers
    assert not any(t.is_alive() for t in readers)
    assert all(b.x.device.type == "cpu" for b in TensorBatches(source, torch.float32, CPU))
    assert threading.main_thread() in readers
