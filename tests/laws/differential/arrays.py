"""Data of a case: values for the oracle, and the same in whatever memory a user may have them."""

from pathlib import Path

import h5py
import numpy as np
import torch

from .cases import CLASSIFIERS
from .loop import Data

N_WORDS, N_LABELS, IGNORED = 5, 3, -7
GARBAGE = {"i": 99, "f": 7e3}  # past the ends of series
NAMES = np.array(["ash", "birch", "cedar", "no class"])  # the last only where there is no loss
# targets within the burn-in
WILD = {"number": 3e4, "label": 99, "class": N_LABELS}
NC_FILL = 9.969209968386869e36  # NC_FILL_FLOAT of NetCDF


def make_data(case, seed, more_series=0, more_steps=0):
    """Random :class:`Data`. Its last step of series 0 always counts, so that there is something to
    learn from.
    """
    rng = np.random.default_rng([case["data"], seed])
    N, T = case["n_series"] + more_series, case["n_steps"] + more_steps
    if case["inputs"] == "words":
        x = (rng.integers(0, N_WORDS, (1, N, T)).astype(float),)
        memory = np.cumsum(x[0], 2) / (1 + np.arange(T))
    else:
        x = rng.normal(size=(case["features"], N, T)).astype(case["dtype"]).astype(float)
        memory = np.cumsum(x.mean(0, keepdims=True), 2)
        x = (x[:1], x[1:]) if case["inputs"] == "two" else (x,)
    if case["outputs"] == "labels":
        y = rng.integers(0, N_LABELS, (1, N, T)).astype(float)
        y.reshape(-1)[-N_LABELS:] = np.arange(N_LABELS)[-y.size :]  # each occurs, and counts
    else:
        y = np.sin(memory + np.arange(case["targets"])[:, None, None]) + 0.3 * rng.normal(
            size=(case["targets"], N, T)
        )
        if case["far"]:
            y = 50 + 4 * y
        y = y.astype(case["y_dtype"] or case["dtype"]).astype(float)

    starts, lengths = np.zeros(N, int), np.full(N, T)
    if case["starts"]:
        starts = rng.integers(0, T, N)
        lengths = T - starts
    if case["lengths"] or case["listed"]:
        lengths = rng.integers(1, lengths + 1)
    starts[0], lengths[0] = 0, T
    if case["listed"]:
        starts[:] = 0

    w = None
    if case["weights"] == "series":
        w = np.broadcast_to(rng.uniform(0.2, 5, (N, 1)), (N, T)).copy()
    elif case["weights"]:
        w = rng.uniform(0.2, 5, (N, T))
        if case["weights"] == "zeros":
            w[rng.random((N, T)) < 0.3] = 0
            w[0, -1] = 1

    dead = np.zeros((N, T), bool)
    if case["missing"] == "steps":
        dead = rng.random((N, T)) < 0.3
    elif case["missing"] == "stretch":
        begin = int(rng.integers(0, T))
        dead[:, begin : begin + int(rng.integers(1, T + 1))] = True
        dead[rng.integers(0, N)] ^= True
    dead[0, -1] = False
    y[:, dead] = np.nan
    if case["missing"] == "outputs":
        y[rng.random(y.shape) < 0.3] = np.nan
        y[0, 0, -1] = 0.5
    if case["nan_inputs"]:
        gone = dead & (rng.random((N, T)) < 0.6)
        gone[0, 0] = False  # one series has steps behind the burn-in, however the others begin
        for a in x:
            a[:, gone] = np.nan
    if case["wild"] and (seed == 1 or case["estimator"] not in CLASSIFIERS):
        t = np.arange(T)
        first = (t >= starts[:, None]) & (t < (starts + case["burn_in"])[:, None])
        of_kind = WILD["number"]
        if case["outputs"] == "labels":
            of_kind = WILD["class" if case["estimator"] in CLASSIFIERS else "label"]
        for a in y if seed < 4 else ():
            a[first & ~np.isnan(a)] = of_kind
    if case["outputs"] == "last":
        last = starts + lengths - 1
        kept = y[:, np.arange(N), last]
        y[:] = np.nan
        y[:, np.arange(N), last] = kept
    given = starts, lengths
    are_told = not case["listed"] and (case["starts"] or case["lengths"])
    if case["nan_inputs"] and not are_told:
        starts, lengths = without_padding(x, starts, lengths)
    y = (y[:1], y[1:]) if case["outputs"] == "two" else (y,)
    return Data(x, y, starts, lengths, w, given)


def without_padding(x, starts, lengths):
    """Starts and lengths without the steps before and behind all input; rows without any stay."""
    has_input = ~np.isnan(np.concatenate(x)).all(0)
    starts, lengths = starts.copy(), lengths.copy()
    for n, present in enumerate(has_input):
        steps = np.flatnonzero(present[: starts[n] + lengths[n]])
        if len(steps):
            starts[n], lengths[n] = steps[0], steps[-1] + 1 - steps[0]
    return starts, lengths


class Duck:
    """A lazy array of another library: blocks come as they are when they are read, masked or of
    another dtype.
    """

    def __init__(self, values, dtype):
        self.values, self.shape, self.dtype = values, values.shape, np.dtype(dtype)

    def __getitem__(self, key):
        return self.values[key]


def cut(a, key):
    """A part of an array; of a lazy one, a lazy one."""
    return Duck(a.values[key], a.dtype) if isinstance(a, Duck) else a[key]


class Place:
    """Puts arrays into the memory that a case asks for."""

    def __init__(self, order, folder):
        self.order, self.folder, self._n = order, Path(folder), 0

    def __call__(self, a):
        self._n += 1
        path = self.folder / f"{id(self)}-{self._n}"
        return getattr(self, "_" + self.order)(a, path)

    def _C(self, a, path):
        return np.ascontiguousarray(a)

    def _F(self, a, path):
        return np.asfortranarray(a)

    def _time(self, a, path):
        """(T, N, F) in C order, transposed."""
        return np.ascontiguousarray(a.transpose(2, 1, 0)).transpose(2, 1, 0)

    def _series(self, a, path):
        """(N, T, F) in C order, transposed."""
        return np.ascontiguousarray(a.transpose(1, 2, 0)).transpose(2, 0, 1)

    def _reversed(self, a, path):
        return np.ascontiguousarray(a[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]

    def _strided(self, a, path):
        whole = np.full([2 * n + 1 for n in a.shape], 77, a.dtype)
        whole[1::2, 1::2, 1::2] = a
        return whole[1::2, 1::2, 1::2]

    def _memmap(self, a, path):
        made = np.memmap(path, a.dtype, "w+", shape=a.shape)
        made[:] = a
        made.flush()
        return np.memmap(path, a.dtype, "r", shape=a.shape)

    def _h5mmap(self, a, path):
        from fluxutils_py import h5mmap, h5save

        h5save(path, {"a": a})
        return h5mmap(path, "a")

    def _h5chunks(self, a, path):
        """What cannot be mapped, and is read lazily."""
        from fluxutils_py import h5mmap

        chunks = (min(2, a.shape[2]), 1, 1)
        with h5py.File(path, "w") as file:
            file.create_dataset("a", data=a.transpose(2, 1, 0), chunks=chunks, compression="gzip")
        return h5mmap(path, "a", axes="TNF")

    def _masked(self, a, path):
        """What is NaN, or past the ends of series, has a mask over a fill value, as netCDF4 gives
        it.
        """
        if a.dtype.kind != "f":
            return Duck(np.ma.MaskedArray(a, np.zeros(a.shape, bool)), a.dtype)
        mask = np.isnan(a) | (a == GARBAGE["f"])
        return Duck(np.ma.MaskedArray(np.where(mask, NC_FILL, a).astype(a.dtype), mask), a.dtype)

    def _tensor(self, a, path):
        return torch.tensor(np.ascontiguousarray(a))
