"""The background loader: against plain loops, counts of calls, weak references to the items, and
lists of live threads.

Nothing here waits without a limit: a loader that hangs fails its test.
"""

import gc
import itertools
import multiprocessing
import signal
import subprocess
import threading
import time
import weakref

import numpy as np
import pytest

from fluxutils_py.data import BackgroundDataLoader
from fluxutils_py.praytools.class_balance import initbatchprovider

LIMIT_S = 20


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("BackgroundDataLoader")]


def soon(condition):
    """Whether it comes true within the limit."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@pytest.fixture(autouse=True)
def no_thread_stays_behind():
    if workers():  # of a test before, whose loops are garbage by now
        gc.collect()
        assert soon(lambda: not workers()), workers()
    yield
    end = time.monotonic() + 0.5
    while workers() and time.monotonic() < end:
        time.sleep(0.002)
    if workers():  # perhaps in the hands of an error
        gc.collect()
    assert soon(lambda: not workers()), workers()


class Counter:
    """Returns 0, 1, 2, ... and counts calls; ``gate`` holds them up."""

    def __init__(self, end=None, sleep=0.0):
        self.calls = 0
        self.running = 0
        self.most_running = 0
        self.end, self.sleep = end, sleep
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()
        self.threads = set()

    def __call__(self):
        with self.lock:
            number = self.calls
            self.calls += 1
            self.running += 1
            self.most_running = max(self.running, self.most_running)
            self.threads.add(threading.get_ident())
        time.sleep(self.sleep)
        assert self.gate.wait(LIMIT_S)
        with self.lock:
            self.running -= 1
        if self.end is not None and number >= self.end:
            raise StopIteration
        return number


class Item:
    """Something that weak references can point at."""


# -- what is delivered ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "n_workers"), [(1, 1), (1, None), (3, 1), (3, 2), (3, None), (30, 4)]
)
def test_items_are_those_of_a_plain_loop(n, n_workers):
    with BackgroundDataLoader(Counter(end=17), n, n_workers) as loader:
        got = list(loader)
    assert sorted(got) == list(range(17))  # nothing dropped, whichever thread met the end first
    if n_workers == 1 or n == 1:
        assert got == list(range(17))


def test_take_call_and_iteration_are_one_sequence():
    with BackgroundDataLoader(Counter(), 3, 1) as loader:
        assert [
            loader.take(),
            loader(),
            next(loader),
            loader.take(timeout=LIMIT_S),
            loader.take(0.5 * LIMIT_S),
        ] == [*range(5)]
        assert iter(loader) is loader
        assert list(itertools.islice(loader, 3)) == [5, 6, 7]


@pytest.mark.parametrize("n_workers", [1, 3])
def test_order_is_that_of_the_items_however_long_each_takes(n_workers):
    def slow_at_first(i):
        time.sleep(0.03 if i % 3 == 0 else 0.0)
        return -i

    got = list(BackgroundDataLoader.map(slow_at_first, range(20), n=5, workers=n_workers))
    assert got == [-i for i in range(20)]


def test_first_ready_comes_first_on_request():
    gate = threading.Event()

    def load(i):
        assert i > 0 or gate.wait(LIMIT_S)
        return i

    loader = BackgroundDataLoader.map(load, range(5), n=2, workers=2, ordered=False)
    assert [loader.take(LIMIT_S) for _ in range(4)] == [1, 2, 3, 4]
    gate.set()
    assert list(loader) == [0]


def test_items_of_a_map_are_drawn_in_order_by_the_thread_that_takes():
    me, drawn, ran = threading.get_ident(), [], set()

    def items():
        for i in range(9):
            assert threading.get_ident() == me
            drawn.append(i)
            yield i

    def fn(i):
        ran.add(threading.get_ident())
        return i * i

    loader = BackgroundDataLoader.map(fn, items(), n=3, workers=2)
    for i in range(9):
        assert drawn == list(range(min(i + 3, 9)))
        assert loader.take(LIMIT_S) == i * i
    assert me not in ran
    assert list(loader) == []


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_a_map_shorter_than_its_depth_is_whole(length):
    assert list(BackgroundDataLoader.map(str, range(length), n=7, workers=3)) == [
        str(i) for i in range(length)
    ]


def test_a_map_over_an_endless_iterator_draws_what_is_needed():
    count = itertools.count()
    with BackgroundDataLoader.map(float, count, n=2) as loader:
        assert list(itertools.islice(loader, 6)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert next(count) == 8  # 6 taken, 2 ahead


def test_batches_with_one_worker_are_reproducible(rng):
    x, t = rng.normal(size=(3, 40)), np.repeat([0, 1], 20)
    plain = initbatchprovider(x, t, 6, random_state=1)
    with BackgroundDataLoader(initbatchprovider(x, t, 6, random_state=1), n=4, workers=1) as loader:
        for _ in range(10):
            np.testing.assert_array_equal(loader()[0], plain()[0])


def test_several_threads_take_each_item_once():
    loader = BackgroundDataLoader.map(lambda i: i, range(300), n=5, workers=2)
    taken = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(loader)) for mine in taken]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert not any(t.is_alive() for t in threads)
    assert sorted(itertools.chain(*taken)) == list(range(300))
    assert all(mine == sorted(mine) for mine in taken)


# -- how far it works ahead ----------------------------------------------------------------------------


@pytest.mark.parametrize("n_workers", [1, None])
def test_calls_made_are_n_more_than_takes(n_workers):
    load = Counter()
    with BackgroundDataLoader(load, 4, n_workers) as loader:
        assert soon(lambda: load.calls == 4)
        for takes in range(1, 6):
            loader.take(LIMIT_S)
            assert soon(lambda: load.calls == takes + 4 and load.running == 0)  # noqa: B023  called within the loop
        time.sleep(0.05)
        assert load.calls == 9


@pytest.mark.parametrize(
    ("n", "n_workers", "most"), [(1, None, 1), (4, None, 4), (4, 2, 2), (2, 9, 2)]
)
def test_workers_are_the_calls_at_the_same_time(n, n_workers, most):
    load = Counter()
    load.gate.clear()
    with BackgroundDataLoader(load, n, n_workers):
        assert len(workers()) == most
        assert soon(lambda: load.running == most)
        time.sleep(0.02)
        assert load.most_running == most
        load.gate.set()
    assert len(load.threads) <= most
    assert threading.get_ident() not in load.threads


def test_loads_overlap_with_the_consumer():
    meeting = threading.Barrier(2, timeout=LIMIT_S)
    loads = BackgroundDataLoader.map(lambda i: i and meeting.wait(), range(8))
    for i, _ in enumerate(loads):
        if i < 7:
            meeting.wait()  # only if the next one is being loaded


@pytest.mark.parametrize(("n", "n_workers"), [(1, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("ordered", [True, False])
def test_never_more_than_n_items_are_alive(n, n_workers, ordered):
    alive, lock, most = weakref.WeakSet(), threading.Lock(), 0

    def load():
        nonlocal most
        item = Item()
        with lock:
            alive.add(item)
            most = max(most, len(alive))
        return item

    with BackgroundDataLoader(load, n, n_workers, ordered=ordered) as loader:
        for _ in range(50):
            loader.take(LIMIT_S)  # dropped at once
        assert soon(lambda: len(alive) == n)
    assert most <= n + 1  # the consumer may not yet have let go of the one just taken
    assert len(alive) == 0  # close drops the rest


def test_items_held_by_the_consumer_do_not_count():
    load = Counter()
    with BackgroundDataLoader(load, 2) as loader:
        held = [loader.take(LIMIT_S) for _ in range(10)]
        assert soon(lambda: load.calls == 12)
    assert sorted(held) == list(range(10))


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_workers", [1, 3])
@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_errors_come_at_the_take_of_their_item_and_the_loader_goes_on(kind, n_workers):
    def fn(i):
        if i % 4 == 2:
            raise kind(i)
        return i

    loader = BackgroundDataLoader.map(fn, range(9), n=3, workers=n_workers)
    got = []
    for i in range(9):
        if i % 4 == 2:
            with pytest.raises(kind) as caught:
                loader.take(LIMIT_S)
            assert caught.value.args == (i,)
            assert caught.traceback[-1].name == "fn"  # it shows where it went wrong
        else:
            got.append(loader.take(LIMIT_S))
    assert got == [0, 1, 3, 4, 5, 7, 8]
    with pytest.raises(StopIteration):
        loader.take(LIMIT_S)


def test_an_error_of_every_call_is_an_error_at_every_take():
    calls = itertools.count()

    def load():
        raise OSError(next(calls))

    with BackgroundDataLoader(load, 3, 1) as loader:
        for i in range(10):
            with pytest.raises(OSError, match=f"^{i}$"):
                loader.take(LIMIT_S)


def test_an_error_of_the_iterator_comes_after_the_items_before_it():
    def items():
        yield from "ab"
        raise LookupError("no more files")

    loader = BackgroundDataLoader.map(str.upper, items(), n=5)
    assert [loader.take(LIMIT_S), loader.take(LIMIT_S)] == ["A", "B"]
    with pytest.raises(LookupError, match=r"^no more files$"):
        loader.take(LIMIT_S)
    assert list(loader) == []


def test_an_iterator_that_fails_once_goes_on():
    class Items:
        i = -1

        def __iter__(self):
            return self

        def __next__(self):
            self.i += 1
            if self.i == 1:
                raise LookupError("one")
            if self.i >= 4:
                raise StopIteration
            return self.i

    loader = BackgroundDataLoader.map(str, Items(), n=2)
    assert loader.take(LIMIT_S) == "0"
    with pytest.raises(LookupError, match=r"^one$"):
        loader.take(LIMIT_S)
    assert list(loader) == ["2", "3"]


def test_stop_iteration_in_a_mapped_function_is_an_error_not_an_end():
    loader = BackgroundDataLoader.map(lambda i: next(iter(())), range(2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^fn raised StopIteration$"):
            loader.take(LIMIT_S)
    assert list(loader) == []


def test_the_end_stays_the_end():
    load = Counter(end=2)
    loader = BackgroundDataLoader(load, 3, 1)
    assert list(loader) == [0, 1]
    assert soon(lambda: not workers())  # without close
    for _ in range(3):
        assert list(loader) == []
        with pytest.raises(StopIteration):
            loader.take(timeout=0)
    loader.close()
    assert list(loader) == []
    assert load.calls == 3


def test_no_further_call_is_made_after_the_end():
    calls = []

    def load():
        calls.append(threading.get_ident())
        raise StopIteration

    assert list(BackgroundDataLoader(load, 8, 1)) == []
    assert soon(lambda: not workers())
    assert len(calls) == 1


def test_loaders_can_be_chained():
    first = BackgroundDataLoader(Counter(end=10), 2, 1)
    second = BackgroundDataLoader(first, 2, 1)
    assert list(BackgroundDataLoader.map(lambda i: 10 * i, second)) == [10 * i for i in range(10)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda f: BackgroundDataLoader(f, 0), ValueError, "n must be a positive integer, got 0"),
        (
            lambda f: BackgroundDataLoader(f, 2.0),
            TypeError,
            "n must be a positive integer, got 2.0",
        ),
        (
            lambda f: BackgroundDataLoader(f, True),
            TypeError,
            "n must be a positive integer, got True",
        ),
        (
            lambda f: BackgroundDataLoader(f, 2, 0),
            ValueError,
            "workers must be a positive integer, got 0",
        ),
        (lambda f: BackgroundDataLoader(3, 2), TypeError, "loadfun must be callable, got int"),
        (lambda f: BackgroundDataLoader.map(3, []), TypeError, "fn must be callable, got int"),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error) as caught:
        make(Counter())
    assert str(caught.value) == message


def test_a_map_over_no_iterable_is_refused():
    with pytest.raises(TypeError, match="itera"):
        BackgroundDataLoader.map(str, 3)


# -- timeouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.05, -1])
def test_a_timeout_loses_nothing(timeout):
    load = Counter()
    load.gate.clear()
    with BackgroundDataLoader(load, 2, 1) as loader:
        for _ in range(3):
            start = time.monotonic()
            with pytest.raises(TimeoutError) as caught:
                loader.take(timeout=timeout)
            assert max(0, timeout) <= time.monotonic() - start < LIMIT_S / 2
            assert (
                str(caught.value)
                == f"no item was ready within {timeout} s; the next take may get it"
            )
        load.gate.set()
        assert [loader.take(LIMIT_S) for _ in range(3)] == [0, 1, 2]
        assert soon(lambda: load.calls == 5 and load.running == 0)
        assert loader.take(timeout=0) == 3
        assert loader.take(timeout=float("inf")) == 4


@pytest.mark.skipif(
    not hasattr(signal, "pthread_kill"), reason="no signals to threads on this system"
)
def test_ctrl_c_interrupts_a_take_and_loses_nothing():
    load = Counter()
    load.gate.clear()
    with BackgroundDataLoader(load, 2, 1) as loader:
        timer = threading.Timer(
            0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        )
        # Python's own handler, whatever an earlier test in this process has left behind
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                loader.take()
            timer.join()
        finally:
            signal.signal(signal.SIGINT, handler)
        load.gate.set()
        assert [loader.take(LIMIT_S) for _ in range(4)] == [0, 1, 2, 3]


# -- ending --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("n_workers", [1, 3])
def test_close_ends_every_thread_and_may_be_repeated(taken, n_workers):
    load = Counter()
    loader = BackgroundDataLoader(load, 3, n_workers)
    for _ in range(taken):
        loader.take(LIMIT_S)
    loader.close()
    assert not workers()
    calls = load.calls
    loader.close()
    loader.close(wait=False)
    for take in (loader.take, loader, lambda: next(loader), lambda: loader.take(timeout=0)):
        with pytest.raises(
            RuntimeError,
            match="BackgroundDataLoader is closed",
        ):
            take()
    time.sleep(0.02)
    assert load.calls == calls <= taken + 3


def test_close_waits_for_the_load_under_way_and_makes_no_other_call():
    load = Counter()
    load.gate.clear()
    loader = BackgroundDataLoader(load, 5, 1)
    assert soon(lambda: load.running == 1)
    loader.close(wait=False)
    assert len(workers()) == 1
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    load.gate.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert not workers()
    assert load.calls == 1


def test_close_wakes_those_who_wait():
    load, errors = Counter(), []
    load.gate.clear()
    loader = BackgroundDataLoader(load, 2)

    def consumer():
        try:
            loader.take()
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=consumer) for _ in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.05)
    loader.close(wait=False)
    load.gate.set()
    for t in threads:
        t.join(LIMIT_S)
    assert errors == ["this BackgroundDataLoader is closed: no items can be taken from it"] * 3


def test_an_error_in_the_with_block_closes_and_passes_through():
    with pytest.raises(ZeroDivisionError), BackgroundDataLoader(Counter(), 2):
        1 / 0  # noqa: B018  raises, which is all it is for
    assert not workers()


def test_breaking_off_a_loop_ends_the_threads():
    for i in BackgroundDataLoader(Counter(), 4):
        if i == 3:
            break
    assert soon(lambda: not workers())


@pytest.mark.parametrize("n_workers", [1, 3])
def test_dropping_a_loader_drops_its_items_and_ends_its_threads_without_the_garbage_collector(
    n_workers,
):
    gc.disable()
    try:
        item_refs = []

        def load():
            item = Item()
            item_refs.append(weakref.ref(item))
            return item

        loader = BackgroundDataLoader(load, 3, n_workers)
        assert soon(lambda: len(item_refs) == 3)
        ref = weakref.ref(loader)
        del loader
        assert soon(lambda: ref() is None and not workers() and not any(r() for r in item_refs))
    finally:
        gc.enable()


def test_dropping_a_loader_during_a_load_ends_after_it():
    load = Counter()
    load.gate.clear()
    loader = BackgroundDataLoader(load, 5, 1)
    assert soon(lambda: load.running == 1)
    ref = weakref.ref(loader)
    del loader
    assert ref() is None  # nothing waits for the load
    load.gate.set()
    assert soon(lambda: not workers())
    assert load.calls == 1


@pytest.mark.slow
def test_a_loader_in_a_cycle_with_its_loadfun_is_collected():
    class Owner:
        def __init__(self, fails):
            self.fails = fails
            self.loader = BackgroundDataLoader(self.load, 2)

        def load(self):
            if self.fails:
                raise ValueError(self)
            return self

    for fails in (False, True):
        owner = Owner(fails)
        assert soon(lambda futures=owner.loader._futures: all(f.done() for f in futures))
        ref = weakref.ref(owner)
        del owner
        gc.collect()
        assert ref() is None
        assert soon(lambda: not workers())


def test_an_error_taken_keeps_nothing_alive():
    gc.disable()
    try:

        def fn(item):
            raise ValueError("no")

        refs = []

        def items():
            while True:
                item = Item()
                refs.append(weakref.ref(item))
                yield item
                del item

        loader = BackgroundDataLoader.map(fn, items(), n=2)
        try:
            loader.take(LIMIT_S)
        except ValueError as error:
            assert str(error) == "no"  # noqa: PT017  pytest.raises would keep the error
        else:
            pytest.fail("no error")
        assert refs[0]() is None
    finally:
        gc.enable()
        loader.close()


def test_what_is_mapped_is_not_kept_after_the_call():
    refs = []

    def make(_):
        item = Item()
        refs.append(weakref.ref(item))
        return item

    with BackgroundDataLoader.map(id, map(make, range(9)), n=3, workers=2):
        assert soon(lambda: len(refs) == 3 and not any(ref() for ref in refs))


def test_many_loaders_made_and_dropped():
    for i in range(100):
        loader = BackgroundDataLoader(Counter(), 2)
        if i % 2:
            loader.take(LIMIT_S)
        if i % 3 == 0:
            loader.close(wait=False)
    del loader
    assert soon(lambda: not workers())


@pytest.mark.slow
def test_the_garbage_collector_may_come_at_any_moment():
    thresholds = gc.get_threshold()
    gc.set_threshold(3)
    try:
        with BackgroundDataLoader(lambda: [[]], 3) as other:
            for _ in range(40):
                loader = BackgroundDataLoader(lambda: [[]], 3)
                loader.me = loader  # only the collector can free it
                loader.take(LIMIT_S)
                other.take(LIMIT_S)
                del loader
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert soon(lambda: not workers())


def run(python, program):
    """Standard output of a program with the loader in it."""
    start = "import os, sys, threading, time, warnings\nfrom fluxutils_py.data.background import BackgroundDataLoader\n"
    done = subprocess.run(
        [python, "-c", start + program], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [  # each prints 1
        # idle threads, items not taken; kept by a cycle; dropped
        "a = BackgroundDataLoader(lambda: 1, 3)\nprint(a.take())\n"
        "b = BackgroundDataLoader(lambda: 1, 3); b.me = b\n"
        "c = BackgroundDataLoader(lambda: 1, 3); del c",
        # loads under way, more asked for
        "a = BackgroundDataLoader(lambda: time.sleep(0.3) or 1, 5, 2)\nprint(a.take())",
        # a load under way comes to its end
        "a = BackgroundDataLoader(lambda: time.sleep(0.3) or os.write(1, b'1'), 1, "
        "1)\ntime.sleep(0.1)",
    ],
    ids=["idle", "loading", "finishing"],
)
def test_the_interpreter_exits(finalized_python, program):
    assert run(finalized_python, program) == "1"


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork on this system")
def test_a_forked_process_is_told_and_does_not_hang(python):
    out = run(
        python,
        "warnings.simplefilter('ignore')  # newer Pythons warn of forking with threads, which is "
        "the point here\na = BackgroundDataLoader(lambda: 7, 2)\nheld, release = "
        "threading.Event(), threading.Event()\ndef hold():\n    with a._taking:\n        "
        "held.set(), release.wait()\nthreading.Thread(target=hold).start()\nheld.wait()  # the "
        "worst moment\npid = os.fork()\nif pid == 0:\n    try:\n        a.take()\n    except "
        "RuntimeError as error:\n        print(str(error).replace(str(os.getppid()), "
        "'P').replace(str(os.getpid()), 'C'))\n    a.close()\n    b = "
        "BackgroundDataLoader.map(abs, [-1, -2])\n    print(list(b), flush=True)\n    "
        "sys.exit(0)\nrelease.set()\nassert os.waitpid(pid, 0)[1] == 0\nprint(a.take())\n",
    )
    assert out.splitlines() == [
        "this BackgroundDataLoader belongs to process P, its threads do not exist in process C "
        "forked off it; make a new one there",
        "[1, 2]",
        "7",
    ]


def test_loaders_are_not_pickled():
    with (
        BackgroundDataLoader(Counter(), 1) as loader,
        pytest.raises(TypeError, match="pickle"),
    ):
        multiprocessing.reduction.ForkingPickler.dumps(loader)


# -- all at once ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_errors_timeouts_and_consumers_delivers_each_item_once(seed):
    rng = np.random.default_rng(seed)
    n, n_workers, n_consumers = (int(v) for v in rng.integers(1, 6, 3))
    ordered, length = bool(seed % 2), 150
    delays, fails = rng.random(length) * 2e-3, rng.random(length) < 0.2

    def fn(i):
        time.sleep(delays[i])
        if fails[i]:
            raise ValueError(i)
        return i

    def items():
        for i in range(length):
            if i >= n:  # the first are drawn when it is made
                assert len(loader._futures) < n
            yield i

    loader = BackgroundDataLoader.map(fn, items(), n, n_workers, ordered=ordered)
    results = [[] for _ in range(n_consumers)]

    def consume(mine):
        while True:
            try:
                mine.append((loader.take(timeout=1e-3), True))
            except TimeoutError:
                continue
            except ValueError as error:
                mine.append((error.args[0], False))
            except StopIteration:
                return

    threads = [threading.Thread(target=consume, args=(mine,)) for mine in results]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert not any(t.is_alive() for t in threads)
    assert sorted(itertools.chain(*results)) == [(i, not fails[i]) for i in range(length)]
    if ordered:
        assert all(mine == sorted(mine) for mine in results)
    assert soon(lambda: not workers())


@pytest.mark.parametrize("seed", range(4))
def test_closing_at_any_moment_leaves_nothing(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        load = Counter(end=int(rng.integers(1, 30)), sleep=float(rng.random() * 1e-3))
        loader = BackgroundDataLoader(load, int(rng.integers(1, 6)))
        outcomes = []

        def consume(loader=loader, outcomes=outcomes):
            try:
                outcomes.append(len(list(loader)))
            except RuntimeError as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=consume) for _ in range(3)]
        for t in threads:
            t.start()
        time.sleep(float(rng.random() * 5e-3))
        loader.close()
        assert not workers()
        for t in threads:
            t.join(LIMIT_S)
        assert len(outcomes) == 3
