"""What it costs to cut windows from files, and to train from them.

First table: one window of B=64 series, S=64 steps, F=32 features, float32, as the contiguous (S, B,
F) tensor that a model gets, for random windows of a warm file; in units of a memcpy of as many
bytes (in one piece, from random places of the same mapped file), timed by turns with it. Every way
must give the same numbers. Where it says "one core", as the background thread of a fit does it.

Second table: epochs of F=32, N=256, T=1024, LSTM(128), b=64, s=64 from an array in memory, from a
warm map, and from a cold one (the file dropped from the page cache, which is verified),
interleaved, in units of the first. All must end with the same weights.

    python benchmarks/bench_windows.py [--rounds 7] [--folder DIR]
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from common import Report, Table, interleaved, median, parse, parser, ratios, spread, stopwatch
from torch import nn

from fluxutils_py import Estimator, Spec, h5mmap, h5save, net2vec
from fluxutils_py.data import SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.nn import LSTM
from fluxutils_py.training.minibatch import to_tensor

F, N, T, B, S = 32, 1024, 1024, 64, 64
CPU = torch.device("cpu")
# the groups of series, as an epoch has them
ROWS = {n: Segments.from_lengths(N, T)[n : n + B] for n in range(0, N, B)}


def ways(folder: Path) -> dict[str, Callable[[int, int], torch.Tensor]]:
    """Functions of (first series, first step) that give the window there."""
    x = np.random.default_rng(0).standard_normal((T, N, F), dtype=np.float32).transpose(2, 1, 0)
    for order in ("TNF", "NTF", "FNT"):
        h5save(folder / f"{order}.h5", {"x": x}, axes=order)

    def ours(array: object, background: bool = False) -> Callable[[int, int], torch.Tensor]:
        series = SeriesArray(array, "x")
        return lambda n, t: to_tensor(
            series.read(ROWS[n], t, t + S), torch.float32, CPU, background=background
        )

    dataset = h5py.File(folder / "TNF.h5", "r")["x"]

    def hyperslab(n: int, t: int) -> torch.Tensor:
        out = np.empty((S, B, F), np.float32)
        dataset.read_direct(out, np.s_[t : t + S, n : n + B])
        return torch.from_numpy(out)

    mapped = h5mmap(folder / "TNF.h5", "x")

    def dataloader(
        n: int, t: int
    ) -> torch.Tensor:  # one series an item, collated: what a user of DataLoader has
        items = [torch.from_numpy(np.array(mapped[:, k, t : t + S].T)) for k in range(n, n + B)]
        (batch,) = torch.utils.data.DataLoader(items, batch_size=B)  # type: ignore[arg-type]  # a list is a dataset
        return batch.transpose(0, 1)

    return {
        "array in memory, (T, N, F)": ours(x),
        "array in memory, (F, N, T) in C order": ours(np.ascontiguousarray(x)),
        "mapped HDF5, (T, N, F)": ours(mapped),
        "mapped HDF5, (T, N, F), one core": ours(mapped, background=True),
        "mapped HDF5, (N, T, F)": ours(h5mmap(folder / "NTF.h5", "x")),
        "mapped HDF5, (F, N, T)": ours(h5mmap(folder / "FNT.h5", "x")),
        "h5py hyperslab, (T, N, F)": hyperslab,
        "torch DataLoader over the map": dataloader,
    }


def window_table(folder: Path, rounds: int, n_places: int) -> Table:
    cut = ways(folder)
    rng = np.random.default_rng(1)
    places = [
        (int(rng.integers(0, N // B)) * B, int(rng.integers(0, T // S)) * S)
        for _ in range(n_places)
    ]
    file = h5mmap(folder / "TNF.h5", "x").transpose(2, 1, 0).reshape(-1).view(np.ndarray)
    pieces = [
        slice(k, k + S * B * F)
        for k in rng.integers(0, file.size - S * B * F, len(places)).tolist()
    ]
    target = np.empty(S * B * F, np.float32)
    for name, way in cut.items():  # warms the files, too
        reference = cut["array in memory, (T, N, F)"]
        for n, t in places:
            assert torch.equal(way(n, t), reference(n, t)), name
    found: dict[str, list[float]] = {name: [] for name in cut}
    for _ in range(rounds):
        for name, way in cut.items():
            memcpy = statistics.median(
                stopwatch(np.copyto, target, file[piece]) for piece in pieces
            )
            taken = statistics.median(stopwatch(way, n, t) for n, t in places)
            found[name].append(taken / memcpy)
    aims = {"mapped HDF5, (T, N, F)": "2.0", "mapped HDF5, (F, N, T)": "10"}
    rows = [[name, spread(each, 1), aims.get(name, "")] for name, each in found.items()]
    return Table(
        "window of 64 series x 64 steps x 32 features, warm",
        ["from", "time / memcpy (range)", "aim"],
        rows,
    )


def drop_from_cache(path: Path) -> float:
    """Drop a file from the page cache; returns the share of its pages that stayed."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = path.stat().st_size
        with mmap.mmap(f.fileno(), size, access=mmap.ACCESS_COPY) as m:
            there = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            anchor = ctypes.c_char.from_buffer(m)
            ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), there
            )
            del anchor
            return sum(v & 1 for v in there) / len(there)


def epoch_table(folder: Path, rounds: int, n_steps: int) -> Table:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n_steps, 256, F), dtype=np.float32).transpose(2, 1, 0)
    path = folder / "epoch.h5"
    h5save(path, {"x": x, "y": x.mean(0, keepdims=True)})
    y = np.array(h5mmap(path, "y").transpose(2, 1, 0)).transpose(2, 1, 0)
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(F, 128), nn.Linear(128, 1))
    vectors = {}

    def epoch(name: str, *data: object) -> None:
        est = Estimator(model, None, None, Spec(epochs=1, batchsize=64, seqsize=64), verbose=False)
        vectors[name] = net2vec(est.fit(*data))

    stayed = [0.0]

    def turn(name: str) -> float:
        if name == "cold map":
            gc.collect()  # a file that is mapped stays in memory
            stayed.append(drop_from_cache(path))
        if name.endswith("map"):
            return stopwatch(lambda: epoch(name, h5mmap(path, "x"), h5mmap(path, "y")))
        return stopwatch(epoch, name, x, y)

    turns = {
        name: partial(turn, name)
        for name in ("memory", "memory again (A/A)", "warm map", "cold map")
    }
    for warm in turns.values():
        warm()
    seconds = interleaved(turns, rounds)
    assert all(torch.equal(v, vectors["memory"]) for v in vectors.values())
    aims = {"warm map": "1.05", "cold map": "1.5"}
    table = Table("an epoch", ["from", "time / from memory (range)", "seconds", "aim"])
    for name, taken in seconds.items():
        cells = [
            spread(ratios(taken, seconds["memory"])),
            f"{median(taken):.3f}",
            aims.get(name, ""),
        ]
        table.rows.append([name, *cells])
    table.notes.append(
        "Share of the file that stayed in the page cache when it was dropped: at most "
        f"{max(stayed):.1%}."
    )
    return table


def main() -> None:
    made = parser(__doc__, rounds=7)
    made.add_argument(
        "--folder", help="on the disk to be measured; by default the folder for temporary files"
    )
    args = parse(made)
    report = Report(__doc__, args)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report.add(window_table(Path(folder), args.rounds, 3 if args.quick else 60))
        report.add(epoch_table(Path(folder), args.rounds, 128 if args.quick else 1024))


if __name__ == "__main__":
    main()
