"""Digests of data: short texts that differ if the data differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import product

import numpy as np

from fluxutils_py.data.arrays import is_nonblocking
from fluxutils_py.data.blocks import Rectangle, block_slices
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.sequence_windows import SequenceWindows
from fluxutils_py.data.series import SeriesArray
from fluxutils_py.data.weights import SampleWeight

WHOLE = 1 << 26  # bytes: files that are no larger are read whole
STEPS = 8  # of each place that a sample is taken from
DIGITS = 12  # of a digest that are kept: 48 bits, no defence against forgery


def digest_series(s: SeriesArray, rows: Segments) -> str | None:
    """Digest all values of the segments; return None if reading them would take too long.

    It reads arrays in memory of any size, and arrays in files of up to 64 MiB. Memory order and
    byte order do not matter. It takes about 1 s per GB.
    """
    n_bytes = s.F * s.N * s.T * s.dtype.itemsize
    if not is_nonblocking(s.array) and n_bytes > WHOLE:
        return None
    return _digest_blocks(s.stored_block, block_slices(s.N, s.T, s.F), rows)


def digest_sample(
    s: SeriesArray,
    rows: Segments,
    places: int = 8,
) -> str:
    """Digest a sample of the values: 8 steps at each place of a grid over series and time.

    The grid is evenly spaced, from the first series to the last and from the first step to the
    last, with all features.
    """
    series = _evenly_spaced(s.N - 1, places)
    steps = _evenly_spaced(max(0, s.T - STEPS), places)
    rectangles = product(
        [slice(n, n + 1) for n in series],
        [slice(t, min(t + STEPS, s.T)) for t in steps],
    )
    return _digest_blocks(s.stored_block, rectangles, rows)


def _evenly_spaced(last: int, places: int) -> list[int]:
    # fewer if there are fewer places
    return sorted({i * last // (places - 1) for i in range(places)})


def digest_weight(weight: SampleWeight | None, rows: Segments) -> str | None:
    """Digest the weights of all steps of the segments, as they were given; return None if there are
    none.
    """
    if weight is None:
        return None
    rectangles = block_slices(weight.n_series, weight.n_steps)
    return _digest_blocks(lambda n, t: weight.block(n, t).astype(float)[None], rectangles, rows)


def digest_arrays(*arrays: np.ndarray) -> str:
    """Digest arrays with their shapes and types, whatever their memory order and byte order."""
    digest = hashlib.sha256()
    for a in arrays:
        digest.update(f"{a.shape} {a.dtype.newbyteorder('=')}".encode())
        digest.update(_bytes(a))
    return digest.hexdigest()[:DIGITS]


def _digest_blocks(
    read: Callable[[slice, slice], np.ndarray],
    rectangles: Iterable[Rectangle],
    rows: Segments,
) -> str:
    digest = hashlib.sha256()
    for series, steps in rectangles:
        live = rows.coverage_mask(series, steps)
        if live is not None and not live.any():
            continue
        block = read(series, steps)  # (F, B, S)
        if live is not None:  # what is never read, such as padding, may be anything
            block = np.where(live, block, block.dtype.type(0))
        # contiguous where that is the fast layout
        digest.update(_bytes(block.transpose(2, 1, 0)))
    return digest.hexdigest()[:DIGITS]


def _bytes(a: np.ndarray) -> memoryview:
    native = np.ascontiguousarray(a, a.dtype.newbyteorder("="))
    return native.reshape(-1).view(np.uint8).data


# -- the arrays of a fit ---------------------------------------------------------------------------


def named_windows(
    windows: SequenceWindows, validation: SequenceWindows | None
) -> list[tuple[str, SequenceWindows]]:
    """Return the windows of training and of validation, if any, each after a prefix for names."""
    both = [("", windows)]
    return both if validation is None else [*both, ("validation ", validation)]


def named_arrays(
    windows: SequenceWindows, validation: SequenceWindows | None
) -> Iterator[tuple[str, SeriesArray, SequenceWindows]]:
    """Yield name, array and windows of all inputs and targets."""
    for part, of_part in named_windows(windows, validation):
        for name, arrays in (("x", of_part.x), ("y", of_part.y)):
            for i, s in enumerate(arrays):
                place = f"[{i}]" if len(arrays) > 1 else ""
                yield f"{part}{name}{place}", s, of_part


def shapes_and_digests(
    windows: SequenceWindows, validation: SequenceWindows | None
) -> dict[str, str]:
    """Return shape, type and digest of each array of a fit, as a model card shows them.

    The digest is of the corners of the array, which costs next to nothing; sources whose blocks are
    computed or unpacked are not read for it.
    """
    texts = {}
    for name, s, w in named_arrays(windows, validation):
        words = [f"{(s.F, s.N, s.T)} {s.dtype.newbyteorder('=')}"]
        if is_nonblocking(s.array):
            words.append(f"digest {digest_sample(s, w.of_rank(w.segments), places=2)}")
        texts[name] = ", ".join(words)
    return texts
