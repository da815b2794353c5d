"""Threads that share out work: order, torch's own threads, errors, random numbers."""

import functools
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import (
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
)

from fluxutils_py.praytools.threads import Threads


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_results_come_in_order_and_each_thread_has_its_items(n):
    with Threads(n) as threads:
        found = threads.map(lambda i: (i, threading.get_ident()), range(5))
    assert [i for i, _ in found] == [0, 1, 2, 3, 4]
    assert found[0][1] == threading.get_ident()
    for i, ident in found:
        assert (ident == threading.get_ident()) == (i % n == 0)


def test_threads_work_at_the_same_time():
    barrier = threading.Barrier(3, timeout=300)
    with Threads(3) as threads:
        assert sorted(threads.map(lambda _: barrier.wait(), range(3))) == [0, 1, 2]


@pytest.mark.usefixtures("two_torch_threads")
def test_torch_runs_on_one_core_in_each_and_has_its_threads_back_afterwards():
    with Threads(3) as threads:
        assert threads.map(lambda _: torch.get_num_threads(), range(3)) == [1, 1, 1]
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [2]


@pytest.mark.usefixtures("two_torch_threads")
def test_one_thread_starts_and_sets_nothing():
    before = threading.active_count()
    with Threads(1) as threads:
        assert (
            threads.map(lambda _: (torch.get_num_threads(), threading.active_count()), range(3))
            == [(2, before)] * 3
        )


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_is_raised_when_all_have_stopped_and_no_thread_is_left(failing):
    before, ended = threading.active_count(), []

    def work(i):
        if i == failing:
            raise KeyError(i)
        time.sleep(0.02)
        ended.append(i)

    with Threads(3) as threads:
        with pytest.raises(KeyError, match=str(failing)):
            threads.map(work, range(3))
        assert sorted(ended) == [i for i in range(3) if i != failing]
        raised = threading.active_count()
    assert raised > before
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


def test_of_several_errors_the_first_threads_is_raised():
    def work(i):
        time.sleep(0.02 * (3 - i))
        raise KeyError(i)

    for _ in range(3):
        with pytest.raises(KeyError, match="0"), Threads(3) as threads:
            threads.map(work, range(3))


def test_gradient_mode_and_autocast_are_those_of_the_caller():
    def modes(_):
        return torch.is_grad_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with Threads(2) as threads:
        assert threads.map(modes, range(2)) == [(True, torch.float32)] * 2
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert threads.map(modes, range(2)) == [(False, torch.bfloat16)] * 2
        assert threads.map(modes, range(2)) == [(True, torch.float32)] * 2


def draws():
    """What draws random numbers, in the ways that torch has."""
    lstm, x = nn.LSTM(3, 4, 2, dropout=0.5), torch.randn(5, 2, 3)
    return {
        "dropout": lambda: nn.functional.dropout(torch.ones(50)),
        "dropout1d": lambda: nn.functional.dropout1d(torch.ones(2, 50, 1)),
        "alpha_dropout": lambda: nn.functional.alpha_dropout(torch.ones(50), training=True),
        "lstm": lambda: lstm(x)[0],
        "attention": lambda: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "rrelu": lambda: nn.functional.rrelu(-torch.ones(50), training=True),
        "rand": lambda: torch.rand(50),
        "randn": lambda: torch.randn(50),
        "randn_like": lambda: torch.randn_like(torch.ones(50)),
        "rand_like": lambda: torch.rand_like(torch.ones(50)),
        "randint": lambda: torch.randint(1000, (50,)),
        "randint with low": lambda: torch.randint(5, 1000, (50,)),
        "randint_like": lambda: torch.randint_like(torch.ones(50), 1000),
        "randperm": lambda: torch.randperm(50),
        "normal": lambda: torch.normal(torch.zeros(50), 1.0),
        "normal of a size": lambda: torch.normal(0.0, 1.0, (50,)),
        "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
        "exponential": lambda: torch.empty(50).exponential_(),
        "gamma": lambda: torch.distributions.Gamma(torch.tensor(2.0), 1.0).rsample((50,)),
        "gumbel": lambda: nn.functional.gumbel_softmax(torch.zeros(50)),
    }


@pytest.mark.parametrize(
    ("kind", "idempotent"), [*((kind, True) for kind in draws()), ("rand", False)]
)
def test_random_numbers_are_the_same_in_every_run_and_differ_between_items(kind, idempotent):
    draw = draws()[kind]

    def run():
        torch.manual_seed(3)
        with Threads(2) as threads:
            found = [
                v
                for _ in range(2)
                for v in threads.map(lambda _: draw(), range(3), idempotent=idempotent)
            ]
        return torch.stack([v.detach() for v in found]), torch.get_rng_state()

    first, state = run()
    assert all(not torch.equal(first[i], first[j]) for i in range(6) for j in range(i))
    for _ in range(5):
        again, again_state = run()
        assert torch.equal(again, first)
        assert torch.equal(again_state, state)  # and so is what the caller draws afterwards


def test_without_random_numbers_the_generator_stays():
    before = torch.get_rng_state()
    with Threads(2) as threads:
        threads.map(lambda i: torch.ones(3) * i, range(4), idempotent=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_given_by_the_user_is_used():
    def draw(seed):
        return torch.rand(5, generator=torch.Generator().manual_seed(seed))

    with Threads(2) as threads:
        found = threads.map(draw, range(3))
    assert all(torch.equal(v, draw(i)) for i, v in enumerate(found))


def test_dropout_that_is_computed_anew_in_the_backward_pass_is_refused():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(4, requires_grad=True)

    def work(_):
        y = checkpoint(lambda x: nn.functional.dropout(x * 2), x, use_reentrant=False)
        return torch.autograd.grad(y.sum().square(), x)

    with pytest.raises(RuntimeError) as error, Threads(2) as threads:
        threads.map(work, range(2))
    assert all(
        part in str(error.value)
        for part in ("aten.bernoulli_.float", "backward pass", "one thread")
    )


def test_threads_that_overlap_leave_no_mode_behind():
    # torch.compile asks for these flags, and skips everything under a mode
    barrier = threading.Barrier(2, timeout=300)

    def call(i, first):
        barrier.wait()
        if i != first:
            time.sleep(0.002)

    with Threads(2) as threads:
        for turn in range(20):  # which one enters first is chance
            threads.map(functools.partial(call, first=turn % 2), range(2))
    assert not is_in_torch_dispatch_mode()
    assert not is_in_any_mode_without_ignore_compile_internals()
