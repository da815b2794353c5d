"""Means and scales of features, computed block by block, and standardisation with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fluxutils_py.data import LazyArray
from fluxutils_py.data.blocks import BLOCK, block_slices
from fluxutils_py.errors import DataError
from fluxutils_py.exporting.steps import InitialState

# a standard deviation below this share of the mean is rounding error
CONSTANT = 10 * np.finfo(float).eps
PARTS = 8  # of a block of values, which are summed one after the other, in the cache

# Values (F, B, S) and their weights (B, S) or (F, B, S); None: all count the same.
WeightedBlock = tuple[np.ndarray, np.ndarray | None]


class FeatureModule(nn.Module):
    """A function of the features of a step: of blocks (F, n, t) of NumPy, for any n and t, and of
    tensors (B, F), for export.

    Without a state, a module also takes windows (S, B, F). With one, it uses earlier steps, so that
    its blocks must be whole series, and it has what
    :class:`fluxutils_py.exporting.graph.Graph` expects of ``steps``: ``initial`` and ``n_outputs``.

    Parameters
    ----------
    **values : array of F numbers
        They become buffers of shape (F,), float64.

    Attributes
    ----------
    arrays : dict of ndarray of shape (F, 1, 1)
        The same numbers for blocks, of the type in which they were given.
    keeps_features, fills_gaps : bool
        Whether each feature stays in its place; whether there is a number for NaN, so that padding
        is kept from it.
    """

    keeps_features = True
    fills_gaps = False
    initial: tuple[InitialState, ...] = ()
    n_outputs = 1

    def __init__(self, **values: ArrayLike) -> None:
        super().__init__()
        self.arrays = {name: np.ravel(value)[:, None, None] for name, value in values.items()}
        for name, value in values.items():
            buffer = torch.tensor(np.ravel(value), dtype=torch.float64)
            self.register_buffer(name, buffer)

    def transform_block(self, block: np.ndarray) -> np.ndarray:
        """Return the result for a block, as a new array."""
        floats = torch.from_numpy(as_floats(block))
        return self(floats.permute(2, 1, 0)).permute(2, 1, 0).numpy()

    # -- with a state: of what is not in files, and step by step -----------------------------------

    def over(self, array: Any, first: np.ndarray) -> LazyArray:
        """Return the result for an array (F, N, T) or (F, T), computed when it is read; its series
        begin at the steps ``first``, and anything is before.
        """
        return LazyArray(array, functions=(self.transform_block,))

    def empty_state(self, n_series: int) -> list[Tensor]:
        """Return the state before the first step."""
        # float64 for all types of data, so that a stored state fits any later stream
        return [first.of(n_series).double() for first in self.initial]

    def step(self, x: np.ndarray, state: Sequence[Tensor]) -> tuple[np.ndarray, list[Tensor]]:
        """Return the result (P, N) for the next step (F, N), and the new state."""
        floats = torch.from_numpy(as_floats(x).T)
        with torch.no_grad():
            result = self(floats, *state)
        y, *new = result if self.initial else (result,)
        return y.T.numpy(), new

    def forget(self, state: Sequence[Tensor], series: slice | np.ndarray) -> list[Tensor]:
        """Return a state in which some series are before their first step."""
        kept = [t.clone() for t in state]  # the caller may have stored the state
        for t, empty in zip(kept, self.empty_state(1), strict=True):
            t[:, series] = empty
        return kept


class Affine(FeatureModule):
    """Compute ``(x - center) / scale``, or ``x * scale + center``, in float64.

    Tensors keep their type, or get ``dtype``; blocks become :func:`float_type`.
    """

    center: Tensor
    scale: Tensor

    def __init__(
        self,
        center: ArrayLike,
        scale: ArrayLike,
        inverse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(center=center, scale=scale)
        self.inverse = inverse
        self.dtype = dtype

    def transform_block(self, block: np.ndarray) -> np.ndarray:
        center, scale = self.arrays.values()
        out = np.empty_like(block, float_type(block.dtype), subok=False)
        # NumPy computes in float64 and rounds to float32, so a large mean costs no digits
        if self.inverse:
            scaled = np.multiply(block, scale, dtype=float)
            np.add(scaled, center, out=out, casting="same_kind")
        else:
            np.subtract(block, center, out=out, casting="same_kind")
            np.divide(out, scale, out=out, casting="same_kind")
        return out

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype if self.dtype is None else self.dtype
        x = x.double()
        if self.inverse:
            y = x * self.scale + self.center
            return y.to(dtype)
        # rounded after the subtraction too, as blocks are
        centered = (x - self.center).to(dtype)
        y = centered.double() / self.scale
        return y.to(dtype)

    def inverted(self) -> Affine:
        return Affine(self.center, self.scale, not self.inverse)


class Moments(NamedTuple):
    """The count (or total weight), the mean, and the sum of squared deviations from it.

    They are numbers, or arrays with one value per feature.
    """

    count: Any
    mean: Any
    squares: Any

    @property
    def variance(self) -> Any:
        """Mean squared deviation; 0 without values."""
        # squares are below 0 only for invalid weights, which are rejected later
        return np.maximum(self.squares, 0) / np.where(self.count > 0, self.count, 1)

    def scale(self, name: str, names: np.ndarray | None = None) -> np.ndarray:
        """Return the divisor of each feature: its standard deviation, or 1 if it is constant up to
        rounding.

        Raises
        ------
        DataError
            If values are so large that their squares are not finite; ``name`` is theirs, and
            ``names`` are those of features.
        """
        scale: np.ndarray = np.sqrt(self.variance)
        is_too_large = ~np.isfinite(scale) & np.isfinite(self.count)
        if is_too_large.any():
            raise DataError(
                f"feature {feature_text(is_too_large.argmax(), names)} of {name} has values that "
                "are too large to be squared, above about 1e154: divide them first"
            )
        is_constant = scale <= CONSTANT * abs(self.mean)
        return np.where(is_constant, 1.0, scale)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of two parts together, without cancellation.

        Source: Chan, Golub & LeVeque (1983), The American Statistician 37(3).
        """
        count = self.count + other.count
        divisor = np.where(count > 0, count, 1)
        share = other.count / divisor
        distance = other.mean - self.mean
        between = distance * (self.count * share) * distance
        return Moments(
            count=count,
            mean=self.mean + distance * share,
            squares=self.squares + other.squares + between,
        )


@np.errstate(over="ignore", invalid="ignore")  # the scale says so where it matters
def moments(
    blocks: Iterable[WeightedBlock],
    n_features: int,
) -> Moments:
    """Return the moments of each feature, (F,), whatever the memory order of the blocks.

    Parameters
    ----------
    blocks : iterable of WeightedBlock
        NaN does not count. All have weights of as many axes, or none has.
    n_features : int
    """
    origin = np.full((n_features, 1), np.nan)  # of each feature, a value that occurs
    total = Moments(np.zeros(n_features, int), *np.zeros((2, n_features)))
    for part in _parts(blocks, n_features):
        values, weight = part[:n_features], part[n_features:]
        if np.isnan(origin).any():
            counted = np.where(weight > 0, values, np.nan) if len(weight) else values
            largest = np.fmax.reduce(counted, 1, keepdims=True, initial=np.nan)
            origin = np.where(np.isnan(origin), largest, origin)
        # differences are small, so their sums lose no digits; for a constant they are exactly 0
        values -= origin
        # weights (F, n) or (1, n), or (0, n): all count the same
        count = np.full(len(values), values.shape[1])
        added = values.sum(1)
        if np.isnan(added).any():
            is_known = ~np.isnan(values)
            # without the steps that have no values, as if they were not there
            some = is_known.any(0)
            if not some.all():
                rows = values, is_known, weight
                values, is_known, weight = (np.compress(some, row, axis=1) for row in rows)
            weight = is_known * weight if len(weight) else is_known
        if len(weight):
            np.copyto(values, 0, where=~(weight > 0))
            count = weight.sum(1)
            added = (weight * values).sum(1)
        mean = added / np.where(count > 0, count, 1)
        values -= mean[:, None]
        np.square(values, out=values)
        if len(weight):
            values *= weight
        total = total.merge(Moments(count, mean, values.sum(1)))
    count, distance, squares = total
    # a feature without values has no origin; its mean is 0
    origin = np.nan_to_num(origin[:, 0])
    return Moments(count, distance + origin, squares)


def _parts(blocks: Iterable[WeightedBlock], n_features: int) -> Iterator[np.ndarray]:
    """Yield values, with their weights as further rows, (F, n), (F + 1, n) or (2 F, n): pieces of
    large blocks, and small ones together. The next ones overwrite them.
    """
    width = max(1, BLOCK // (PARTS * n_features))
    parts = np.empty((n_features, 0))
    stop = 0
    for block, weight in blocks:
        _, n_series, n_steps = block.shape
        rows = [block] if weight is None else [block, weight.reshape(-1, n_series, n_steps)]
        if not parts.size:
            parts = np.empty((sum(map(len, rows)), width))
        for series, steps in block_slices(n_series, n_steps, PARTS * n_features):
            pieces = [array[:, series, steps] for array in rows]
            size = pieces[0][0].size
            if stop + size > width:
                yield parts[:, :stop]
                stop = 0
            start, stop = stop, stop + size
            # in C order, so that the sums do not depend on the memory order
            out = parts[:, start:stop].reshape(-1, *pieces[0].shape[1:])
            np.concatenate(pieces, out=out)
    yield parts[:, :stop]


def feature_text(feature: int | np.integer, names: np.ndarray | None) -> str:
    """Return the name of a feature, or its number, for messages."""
    return str(feature) if names is None else repr(names[feature])


def as_floats(block: np.ndarray) -> np.ndarray:
    """Copy an array as floating-point numbers of :func:`float_type`, in the same memory order."""
    return block.astype(float_type(block.dtype), subok=False)


def float_type(dtype: np.dtype) -> type[np.float32] | type[np.float64]:
    """Return the type in which to compute: float32 for short floats, else float64."""
    is_short = dtype.kind == "f" and dtype.itemsize <= 4
    return np.float32 if is_short else np.float64
