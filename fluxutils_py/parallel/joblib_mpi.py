"""A backend for joblib that shares tasks, such as the fits of a search, among the ranks of
``mpirun``.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import joblib
import numpy as np
import torch
from joblib.parallel import (
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from fluxutils_py.errors import RankError, RemoteError
from fluxutils_py.parallel.communicator import describe_error
from fluxutils_py.parallel.launcher import alone, detect_launcher
from fluxutils_py.parallel.mpi import MPIComm, require_script_on_all_ranks
from fluxutils_py.parallel.rank_group import RankGroup

MESSAGE = 1 << 30  # largest number of bytes that are sent at once
# of a task: whether it failed, and its pickled result or error
Outcome = tuple[bool, bytes]
PLAIN = (bool, int, float, str, type(None), np.generic)


class MPIBackend(ParallelBackendBase):
    """Share the tasks of ``joblib.Parallel`` among the ranks of ``mpirun``:
    ``joblib.parallel_config("mpi")``.

    All ranks run the same script and call ``Parallel`` together. The tasks are those of rank 0.
    Each rank, rank 0 too, takes the next task when it has done one; then all ranks have all
    results, as if each had done everything. Inside a task, ``comm="auto"`` means this process
    alone. All ranks work, whatever ``n_jobs`` says. Without ``mpirun``, tasks run one after the
    other.

    Before the first task, rank 0 sends all tasks to all ranks, pickled together: an array in memory
    that they share travels once, a map of a file as its path. Functions of the script travel by
    name, lambdas by their code.

    Raises
    ------
    RankError
        From ``Parallel``, on all ranks, if their tasks differ: other candidates or other splits.
    Exception
        From ``Parallel``, on all ranks, what a task raised, with a note of its traceback; tasks not
        begun are dropped.
    """

    default_n_jobs = -1
    shares_ranks = True  # see launcher.in_shared_search
    supports_retrieve_callback = False

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        return _joblib_ranks().size

    def configure(self, n_jobs: int | None = 1, parallel: Any = None, **_: Any) -> int:
        n_ranks = self.effective_n_jobs(n_jobs)
        if n_ranks == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        parallel.pre_dispatch = "all"  # every rank knows all tasks before the first begins
        return n_ranks

    def get_nested_backend(self) -> tuple[Any, int | None]:
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None

    def start_call(self) -> None:
        self._tasks: list[Callable[[], Any]] = []
        self._callbacks: list[Callable[..., Any]] = []
        self._results: list[Any] | None = None

    stop_call = start_call

    def submit(self, func: Callable[[], Any], callback: Any = None) -> int:
        self._tasks.append(func)
        self._callbacks.append(callback)
        return len(self._tasks) - 1

    apply_async = submit  # its name before joblib 1.5

    def retrieve_result(self, out: int, timeout: float | None = None) -> Any:
        if self._results is None:
            self._results = share_tasks(self._tasks)
            for callback in self._callbacks:
                callback(None)
        return self._results[out]


def share_tasks(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call the tasks of rank 0 on all ranks; return the results in order, on every rank.

    Raises
    ------
    Exception
        See :class:`MPIBackend`.
    """
    global _shared
    with _joblib_ranks() as ranks, alone():
        _require_same_tasks(ranks, tasks)
        sent = _broadcast_pickle(ranks, tasks)
        if ranks.rank > 0:
            tasks = ranks.guard(pickle.loads, sent) or ()
        ranks.allgather()  # can all of them read the tasks?
        _shared = tasks
        try:
            with MPIComm.world().executor() as executor:
                outcomes = None
                if executor is not None:  # on rank 0; the others run tasks until it has all results
                    outcomes = ranks.guard(_run_tasks, executor, ranks, len(tasks))
        finally:
            _shared = ()
        outcomes = pickle.loads(_broadcast_pickle(ranks, outcomes))
        values = ranks.guard(lambda: [pickle.loads(content) for _, content in outcomes])
        ranks.allgather()  # can all of them read the results?
    values = values or []
    for (failed, _), value in zip(outcomes, values, strict=False):
        if failed:
            raise value
    return values


def _joblib_ranks() -> RankGroup:
    launcher = detect_launcher()
    if launcher == "torch":
        raise ValueError(
            'joblib.parallel_config("mpi") needs ranks that mpirun started, but torchrun started '
            "these; use mpirun -n 4 python script.py"
        )
    require_script_on_all_ranks()
    return RankGroup.from_comm(launcher, "joblib.Parallel")


# -- on each rank ----------------------------------------------------------------------------------

_shared: Sequence[Callable[[], Any]] = ()  # the tasks of the call in progress


def _run_task(i: int) -> Outcome:
    """Call a task; this runs on any rank."""
    try:
        return False, _dumps(_shared[i]())
    except BaseException as error:
        error.add_note(
            f"raised in task {i} on rank {MPIComm.world().rank}:\n{traceback.format_exc()}"
        )
        return True, _dumps_error(error)


def _run_tasks(executor: Executor, ranks: RankGroup, n: int) -> list[Outcome]:
    """Run the tasks: the other ranks from the first one on, this rank from the last one on."""
    futures = [executor.submit(_run_task, i) for i in range(n)]
    on_this_rank: dict[int, Outcome] = {}
    for i in reversed(range(n)):
        # what this rank can cancel, no other has begun: run it here, or drop it after an error
        if not futures[i].cancel():
            continue
        failed = any(has_failed for has_failed, _ in on_this_rank.values())
        if not (failed or _any_failed(futures) or ranks.flags()[0]):
            on_this_rank[i] = _run_task(i)
    outcomes = []
    for i, future in enumerate(futures):
        if i in on_this_rank:
            outcomes.append(on_this_rank[i])
        elif not future.cancelled():
            outcomes.append(future.result())
    return outcomes


def _any_failed(futures: Sequence[Future[Outcome]]) -> bool:
    """Return whether a task that is done has failed."""
    done = (future for future in futures if future.done() and not future.cancelled())
    return any(future.result()[0] for future in done)


# -- messages --------------------------------------------------------------------------------------


def _broadcast_pickle(ranks: RankGroup, value: object) -> bytes:
    """Return the pickle of rank 0's value, on every rank."""
    content = ranks.guard(_dumps, value) if ranks.rank == 0 else None
    n = ranks.allgather(None if content is None else len(content))[0]
    buffer = torch.empty(n, dtype=torch.uint8)
    if content is not None:
        buffer.numpy()[:] = np.frombuffer(content, np.uint8)
    for part in buffer.split(MESSAGE):
        ranks.call_comm(ranks.comm.broadcast_, part)
    return buffer.numpy().tobytes() if content is None else content


def _dumps(value: object) -> bytes:
    """Pickle by name what the script defines, since all ranks run it; else, such as for a lambda,
    by code.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            import cloudpickle
        except ImportError:  # before joblib 1.6, which brings it as a separate package
            from joblib.externals import cloudpickle
        return cloudpickle.dumps(value)


def _dumps_error(error: BaseException) -> bytes:
    try:
        content = _dumps(error)
        pickle.loads(content)  # an error with a custom constructor may not come back
        return content
    except Exception:
        substitute = RemoteError(describe_error(error))
        for note in error.__notes__:
            substitute.add_note(note)
        return _dumps(substitute)


def _require_same_tasks(ranks: RankGroup, tasks: Sequence[Any]) -> None:
    """Raise RankError on all ranks if tasks differ in plain arguments or integer arrays:
    candidates, folds.
    """
    outlines = [
        [_plain_outline((f.__name__, args, kwargs)) for f, args, kwargs in task.items]
        for task in tasks
    ]
    answers = ranks.allgather([joblib.hash(outline) for outline in outlines])
    different = next(_differences(answers), None)
    if different is None:
        return
    texts = ranks.allgather(str(outlines[different])[:500] if different < len(outlines) else "none")
    other = next(r for r, text in enumerate(texts) if answers[r] != answers[0])
    ranks.raise_on_all(
        RankError(
            f"ranks disagree about task {different} of {len(answers[0])}: {texts[0]} on rank 0, "
            f"{texts[other]} on rank {other}. Every rank runs the same script: draw candidates and "
            "splits with a random_state that all share"
        )
    )


def _differences(answers: Sequence[Sequence[str]]) -> Iterator[int]:
    """Yield the indices of tasks that differ between ranks."""
    for i in range(max(map(len, answers))):
        if len({answer[i] if i < len(answer) else "" for answer in answers}) > 1:
            yield i


def _plain_outline(value: object) -> Any:
    """Return the plain data inside arguments.

    Estimators and data are left out: those of rank 0 count.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and value.ndim == 1:
        return value
    if isinstance(value, dict):
        return {str(k): _plain_outline(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_outline(v) for v in value]
    return type(value).__name__


joblib.register_parallel_backend("mpi", MPIBackend)
