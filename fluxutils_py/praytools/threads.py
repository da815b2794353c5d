"""Threads that share the work of one training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, Self, TypeVar

import torch
from torch._C import _current_graph_task_id
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from fluxutils_py.torch_private import arguments_of

DEVICES = ("cpu", "cuda")
T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """The calling thread and ``n - 1`` worker threads, which run during a ``with`` block.

    Within the block torch uses one core in each thread, the calling one included. Otherwise torch's
    thread pool keeps spinning after its work on cores that the workers need (on two cores, two
    threads took as long as one). At the end, even after an error, the workers stop and torch gets
    its number of threads back. ``n=1`` starts and sets nothing.

    Parameters
    ----------
    n : int

    Examples
    --------
    >>> with Threads(2) as threads:
    ...     threads.map(abs, [-1, 2, -3])
    [1, 2, 3]
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"there must be at least 1 thread, got {n}")
        self.n = n
        self._own_generators = False  # whether each call draws from a separate generator

    def __enter__(self) -> Threads:
        if self.n > 1:
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(1)  # for this thread; new threads take the number set last
            self._pool = ThreadPoolExecutor(self.n - 1, "fluxutils", torch.set_num_threads, (1,))
        return self

    def __exit__(self, *_: object) -> None:
        if self.n > 1:
            self._pool.shutdown()
            torch.set_num_threads(self._torch_threads)

    def map(self, fn: Callable[[T], R], items: Sequence[T], *, idempotent: bool = False) -> list[R]:
        """Compute ``[fn(item) for item in items]``, ``n`` items at a time.

        The calling thread takes the first item and every ``n``-th after it. All threads use its
        gradient mode and autocast. Errors are raised after all threads have stopped: an error of
        the calling thread first, else the first error of a worker.

        If ``fn`` draws random numbers from torch's default CPU generator, each item gets a separate
        generator, seeded from the default one. So the numbers are the same in every run, whichever
        thread is faster, but they differ from the numbers in one thread. This slows every operation
        a little. Set ``idempotent`` if ``fn`` may run twice for an item; then the cost arises only
        after ``fn`` draws numbers.
        """
        if self.n == 1 or len(items) == 1:
            return [fn(item) for item in items]
        before = torch.get_rng_state()
        if idempotent and not self._own_generators:
            results = self._distribute(fn, items)
            if torch.equal(before, torch.get_rng_state()):
                return results
            # threads drew numbers in random order: repeat with one generator per item
            torch.set_rng_state(before)
            self._own_generators = True
        seeds = torch.randint(2**63 - 1, (len(items),)).tolist()

        def call(i: int) -> R:
            with _SeededGenerator(torch.Generator().manual_seed(seeds[i])):
                return fn(items[i])

        return self._distribute(call, range(len(items)))

    def _distribute(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        n = min(self.n, len(items))
        with_gradients = torch.is_grad_enabled()
        types = {d: torch.get_autocast_dtype(d) for d in DEVICES if torch.is_autocast_enabled(d)}

        def work(first: int) -> list[R]:
            with ExitStack() as stack, torch.set_grad_enabled(with_gradients):
                for device, dtype in types.items():
                    stack.enter_context(torch.autocast(device, dtype))
                return [fn(item) for item in items[first::n]]

        others = [self._pool.submit(work, i) for i in range(1, n)]
        try:
            results = [work(0)]
        finally:
            wait(others)
        results += [other.result() for other in others]
        return [results[i % n][i // n] for i in range(len(items))]


class _SeededGenerator(TorchDispatchMode):
    """Use a separate random generator in this thread, in place of torch's default one, which all
    threads share.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    # The methods of TorchDispatchMode also set flags that all threads share: threads whose modes
    # overlap leave these set, and torch.compile then does nothing for the rest of the process.

    def __enter__(self) -> Self:
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            if _current_graph_task_id() != -1:  # in a backward pass
                raise RuntimeError(
                    f"{func} draws random numbers in the backward pass, as checkpointing does with "
                    "dropout: in several threads they would differ from the forward pass; use "
                    "one thread, or do without one of the two"
                )
            if all(argument.name != "generator" for argument in arguments_of(func)):
                overload = str(func).rpartition(".")[2]  # such as "aten.rand.default"
                name = "generator" if overload == "default" else f"{overload}_generator"
                func = getattr(func.overloadpacket, name)
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)
