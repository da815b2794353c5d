"""Memory that kernels use again and again for what they save."""

import gc
import os
import threading
from collections import deque

import numpy as np
import pytest
import torch

from fluxutils_py.nn import LSTM
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels import recurrence as saved_values
from fluxutils_py.nn.kernels.recurrence import LARGEST, MOST_SPARE, SMALLEST, empty_saved

N = SMALLEST // 4 + 3  # float32


@pytest.fixture(autouse=True)
def spare(monkeypatch):
    blocks = deque(maxlen=MOST_SPARE)
    monkeypatch.setattr(saved_values, "_spare", blocks)
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_serves_again_once_nothing_refers_to_it(spare, dtype):
    first, second = empty_saved(2 * N, dtype), empty_saved(2 * N, dtype)
    assert first.shape == (2 * N,)
    assert first.dtype is dtype
    assert not spare
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    view = first[5:]
    del first, second
    assert len(spare) == 1  # a view holds the other
    assert empty_saved(N + 1, dtype).data_ptr() in places  # not less than half of a block
    del view
    assert len(spare) == 2
    assert {t.data_ptr() for t in [empty_saved(2 * N, dtype), empty_saved(2 * N, dtype)]} <= places


def test_only_blocks_of_middle_sizes_are_kept_and_few_of_them(spare):
    for n in (1, SMALLEST // 4 - 1, LARGEST // 4 + 1):
        empty_saved(n, torch.float32)
    assert not spare
    tensors = [empty_saved(N, torch.float32) for _ in range(MOST_SPARE + 3)]
    del tensors
    assert len(spare) == MOST_SPARE


def test_threads_never_share_a_block():
    wrong = []

    def write(number):
        for _ in range(200):
            t = empty_saved(N, torch.float32)
            t[::4096] = number
            if not (t[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Python 3.12 warns of forks beside threads
def test_a_forked_process_has_memory_of_its_own():
    mine = empty_saved(N, torch.float32).fill_(1)
    child = os.fork()
    if not child:
        mine.fill_(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (mine == 1).all()


@pytest.mark.slow
@pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())
def test_graphs_that_live_at_the_same_time_do_not_disturb_each_other(spare):
    torch.manual_seed(0)
    layer, xs = LSTM(3, 40), torch.randn(5, 50, 40, 3)
    weights = list(layer.parameters())

    def loss(x):
        layer.reset()
        return layer(x).square().sum()

    one_by_one = [torch.autograd.grad(loss(x), weights) for x in xs]
    losses = [loss(x) for x in xs]
    for value, expected in zip(losses, one_by_one, strict=True):
        for _ in range(2):  # the graph is kept for a second time
            for found, g in zip(
                torch.autograd.grad(value, weights, retain_graph=True), expected, strict=True
            ):
                np.testing.assert_array_equal(found.numpy(), g.numpy())
    gc.collect()
    n_before = len(spare)
    del losses, value
    gc.collect()
    assert n_before < len(spare) <= MOST_SPARE
