"""What several ranks agree on before they work together."""

from __future__ import annotations

import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.estimator.fingerprint import sample_digests, shared_identity
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.launcher import local_rank
from fluxutils_py.training.tensor_batches import rank_slice

CHUNK = 1 << 23  # values that are passed on together


def require_same_fit(training: Any) -> None:
    """Raise on every rank unless all ranks have assembled the same fit; then give all the model of rank 0.

    A rank is told apart by what it would compute: model, optimizer, spec, sizes and a sample of the data, versions.

    Raises
    ------
    RankError
        Naming the first thing that differs, and what it is on each rank.
    """
    ranks, data, model = training.ranks, training.data, training.model
    if ranks.is_single:
        return
    ranks.require_equal(
        {
            "the version of fluxutils_py": _version(),
            "the version of torch": torch.__version__,
            "the epochs so far": training.loop.epoch,
            **shared_identity(training),
            **sample_digests(data),
            "the scale of the targets": str(data.codec.scale),
            "hooks that all ranks need": [data.validation is not None, training.scheduler is not None],
        }
    )
    ranks.broadcast(list(model.parameters()) + list(model.buffers()))
    n = len(data.windows.segments)
    if n < ranks.size and ranks.rank == 0:
        warnings.warn(f"{ranks.size} ranks share {n} series: some have nothing to do", UserWarning, stacklevel=5)


def require_same_inputs(ranks: RankGroup, inputs: Any) -> None:
    """Raise on every rank unless all ranks were given inputs of the same sizes."""
    ranks.require_equal(
        {f"the shape of {s.name}": (s.F, s.N, s.T) for s in inputs.series}
        | {"the form of x": inputs.form}
        | {"the starts and lengths": digest_arrays(*(a for a in (inputs.starts, inputs.lengths) if a is not None))}
    )


def gather_rows(values: np.ndarray | None, n: int, ranks: RankGroup) -> np.ndarray:
    """An array of which each rank has filled its share of the ``n`` rows (axis 0), filled by all.

    A rank without rows may give None. Every rank gets the whole, of the type that the first has.
    """
    if ranks.is_single:
        assert values is not None
        return values
    shape, dtype = ranks.allgather(None if values is None else (values.shape, values.dtype))[0]
    if values is None:
        values = np.zeros(shape, dtype)
    for rank in range(ranks.size):
        rows = rank_slice(n, rank, ranks.size)
        _pass_on(values, [(rows,)], rank, ranks)
    return values


def gather_series(targets: tuple[Any, ...], n_series: int, n_steps: int, ranks: RankGroup) -> None:
    """Have arrays (G, N, T), of which each rank has filled its share of the series, filled by all."""
    for target in targets:
        for rank in range(ranks.size):
            series = rank_slice(n_series, rank, ranks.size)
            step = max(1, CHUNK // max(1, target.shape[0] * (series.stop - series.start)))
            places = [(slice(None), series, slice(t, min(t + step, n_steps))) for t in range(0, n_steps, step)]
            _pass_on(target, places, rank, ranks)


def _pass_on(target: Any, places: list[Any], root: int, ranks: RankGroup) -> None:
    """Copy parts of an array from one rank to the others."""
    for place in places:
        mine = np.ascontiguousarray(target[place])
        if mine.dtype.kind == "O":
            mine = ranks.comm.allgather(mine if ranks.rank == root else None)[root]
        elif mine.size:
            ranks.comm.broadcast_(torch.from_numpy(mine.reshape(-1).view(np.uint8)), root)
        if ranks.rank != root:
            target[place] = mine


def memmap_location(target: Any) -> tuple[Any, ...] | None:
    """Where in which file the memory of an array lies, for ranks to see that they write to the same; None for none."""
    if not isinstance(target, np.memmap) or target.filename is None or target.mode == "c":
        return None
    return os.path.realpath(target.filename), target.offset, target.shape, target.strides


def device_of_rank(device: Any, ranks: RankGroup) -> Any:
    """The device of this rank: of several ranks with ``device="cuda"``, each takes a GPU of its machine in turn."""
    if ranks.is_single or device is None or str(device) != "cuda" or torch.cuda.device_count() < 2:
        return device
    return f"cuda:{local_rank() % torch.cuda.device_count()}"


def _version() -> str:
    try:
        return version("fluxutils_py")
    except PackageNotFoundError:
        return "not installed"
