"""Arrays of any kind as tensors."""

import itertools

import numpy as np
import pytest
import torch

from fluxutils_py.nn import native_kernels
from fluxutils_py.nn.kernels.library import library_in_use
from fluxutils_py.training.minibatch import copy_window, gathered, to_tensor

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
    "not aligned": lambda x: (
        np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    ),
}


@pytest.fixture(autouse=True, params=["native", "torch"])
def way(request):
    """With the library, where there is one, and without."""
    with native_kernels(request.param == "native"):
        yield request.param


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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("source", "target"), [("f4", "f4"), ("f8", "f4"), ("f8", "f8")])
def test_windows_longer_and_wider_than_the_blocks_of_the_copy(source, target, order, rng):
    dtype = torch.float32 if target == "f4" else torch.float64
    for shape in [
        (300, 7, 10),
        (129, 131, 3),
        (5, 260, 33),
        (1, 70, 1),
        (257, 1, 65),
        (128, 64, 1),
    ]:
        whole = rng.normal(size=[n + 3 for n in shape]).astype(source)
        whole = np.ascontiguousarray(whole.transpose(order)).transpose(np.argsort(order))
        values = whole[2 : 2 + shape[0], 1 : 1 + shape[1], 3 : 3 + shape[2]]
        for view in (values, values[:, ::-1], values[:, :, ::-1]):
            assert np.array_equal(to_tensor(view, dtype, CPU).numpy(), view.astype(target))


def test_the_library_copies_what_runs_along_steps_or_series_and_nothing_else(way):
    x = np.arange(4 * 5 * 6, dtype="f4").reshape(4, 5, 6)
    for order in ORDERS:
        values = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        out = np.full((4, 5, 6), -1, "f4")
        done = copy_window(out, values)
        assert done == (way == "native" and library_in_use() is not None and order[-1] != 2)
        assert np.array_equal(out, values if done else np.full_like(out, -1))
    assert not copy_window(np.empty((2, 5, 6), "f4"), x[::2])
    assert not copy_window(
        np.empty((4, 5, 6), "f4"), x.astype("f2").transpose(1, 0, 2).copy().transpose(1, 0, 2)
    )


def test_several_threads_copy_what_one_does(rng):
    x = rng.normal(size=(20, 300, 400)).astype("f4").transpose(2, 1, 0)
    one, three = np.empty(x.shape, "f4"), np.empty(x.shape, "f4")
    if copy_window(one, x, threads=1):
        assert copy_window(three, x, threads=3)
        assert np.array_equal(one, x)
        assert np.array_equal(three, x)


def test_what_is_in_one_piece_is_not_gathered_again(rng):
    x = rng.normal(size=(7, 6, 5))
    for order in ORDERS:
        piece = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        assert gathered(piece) is piece
        part = gathered(piece[1:4, 2:5])
        assert part.base is not None
        assert np.array_equal(part, piece[1:4, 2:5])
        assert not np.shares_memory(part, piece)
