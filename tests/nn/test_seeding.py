"""Torch's generators are borrowed by one at a time and given back as they were."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fluxutils_py.nn.seeding import _built_for_devices, seeded


def expected(seed, n=4):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def test_numbers_inside_come_from_the_seed_and_those_after_go_on_as_before():
    torch.manual_seed(5)
    first = torch.rand(1)
    with seeded(7):
        assert torch.equal(torch.rand(4), expected(7))
    assert torch.equal(torch.cat([first, torch.rand(3)]), expected(5))


def test_generators_are_given_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(7):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    with ThreadPoolExecutor(1) as other:  # nobody holds them any more
        assert torch.equal(other.submit(draws, 3).result(10), expected(3))


@pytest.mark.skipif(_built_for_devices(), reason="seeds are for devices that may come later")
def test_no_seeds_pile_up_for_devices_that_are_not_there():
    before = len(torch.cuda._queued_calls)
    with seeded(7):
        assert torch.equal(torch.rand(4), expected(7))
    assert len(torch.cuda._queued_calls) == before


def test_one_may_be_inside_another():
    with seeded(1):
        first = torch.rand(2)
        with seeded(2):
            assert torch.equal(torch.rand(4), expected(2))
        assert torch.equal(torch.cat([first, torch.rand(2)]), expected(1))


def draws(seed):
    with seeded(seed):
        found = []
        for _ in range(4):
            found.append(torch.rand(1))
            time.sleep(0.001)  # another thread's turn
        return torch.cat(found)


def test_threads_draw_as_one_after_another():
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(draws, range(12)))
    assert torch.equal(torch.stack(found), torch.stack([expected(seed) for seed in range(12)]))
    assert torch.equal(torch.get_rng_state(), before)
