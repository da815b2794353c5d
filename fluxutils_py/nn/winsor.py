"""Winsorising: outliers are pulled in to the quantiles of 1 and 99 per cent, before features are normalised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError

QUANTILES = (0.01, 0.99)
BLOCK = 1 << 20  # values of an array that are read together
MANY = 64  # features, for which counts of digits of 16 bits would take much memory


class WinsorNorm(nn.Module):
    """Clamp each feature to its quantiles of 1 and 99 per cent, then to mean 0 and variance 1; NaN becomes 0.

    Parameters
    ----------
    n_features : int
        F; ``fit`` sets it.

    Attributes
    ----------
    lower, upper, mean, std : buffers of shape (F,), float64
        In ``state_dict()``. Before ``fit`` such that nothing but NaN is changed. ``std`` is 1 for constant features.

    Notes
    -----
    ``forward`` takes ``(..., F)``, such as a step ``(B, F)`` or a window ``(S, B, F)``, and keeps its type (integers
    become the default one). To be the first layer of a model, which then takes raw data: NaN inputs at live steps are
    an error in ``fit`` of an estimator, for which :class:`fluxutils_py.WinsorScaler` comes first.

    Source: ``WinsorNorm`` of FluxUtils.jl (where NaN becomes the mean, and constant features NaN).

    Examples
    --------
    >>> x = torch.randn(3, 40, 20)  # (F, N, T)
    >>> norm = WinsorNorm().fit(x)
    >>> norm(torch.full((2, 3), torch.nan))
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """

    lower: Tensor
    upper: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, n_features: int = 0) -> None:
        super().__init__()
        for name, value in (("lower", -math.inf), ("upper", math.inf), ("mean", 0.0), ("std", 1.0)):
            self.register_buffer(name, torch.full((n_features,), value, dtype=torch.float64))

    @property
    def n_features(self) -> int:
        return len(self.mean)

    def fit(self, x: Any) -> Self:
        """Learn the quantiles, and mean and standard deviation (of n - 1) of what is between them; NaN is left out.

        Parameters
        ----------
        x : array of shape (F, N, T)
            A tensor, NumPy array, memory map, h5py dataset, or anything else with a shape that takes three slices.
            Read in blocks of about a million values, a few times over; the quantiles are exact all the same (NumPy's
            default, type 7).

        Returns
        -------
        WinsorNorm
            Itself. A feature without any value gets bounds and mean 0.

        Raises
        ------
        ShapeError, DataError
            If ``x`` does not have three axes, is empty, or more than a hundredth of a feature is infinite. Nothing is
            changed then.
        """
        shape = tuple(x.shape)
        if len(shape) != 3 or 0 in shape:
            raise ShapeError(f"WinsorNorm is fitted on an array of shape (F, N, T), none of them 0, got {shape}")
        found = winsor_statistics(lambda: _blocks(x))
        for name, value in zip(("lower", "upper", "mean", "std"), found, strict=True):
            self.register_buffer(name, value.to(self.mean.device))
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.n_features:
            way_out = ": call fit first" if self.n_features == 0 else ""
            raise ShapeError(
                f"WinsorNorm has {self.n_features} features, the input has shape {tuple(x.shape)}{way_out}"
            )
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype())
        lower, upper, mean, std = (b.to(x.dtype) for b in (self.lower, self.upper, self.mean, self.std))
        return ((x.clamp(lower, upper) - mean) / std).masked_fill(x.isnan(), 0)

    def extra_repr(self) -> str:
        return f"{self.n_features}"


def winsor_statistics(passes: Callable[[], Iterable[Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantiles, mean and standard deviation of each feature, in bounded memory.

    ``passes()`` begins a pass over the data: blocks of shape (F, n) of a floating type, always the same. Returned are
    the bounds, and the mean and standard deviation (of n - 1) of the values clamped to them, as of
    :meth:`WinsorNorm.fit`.

    Notes
    -----
    An order statistic is found digit by digit, as in a radix sort: a pass counts how often each value of a digit of 16
    bits occurs among the numbers that begin with the digits known so far. So float32 takes three passes and float64
    five, the last for mean and variance (merged as in Chan, Golub & LeVeque 1983); of more than 64 features five and
    nine, with digits of 8 bits.
    """
    ranks = _Ranks()
    while not ranks.done:
        ranks.start_pass()
        for block in passes():
            ranks.count(block)
        ranks.end_pass()
    n = ranks.n
    low, high = ranks.values.view(-1, len(QUANTILES), 2).unbind(2)
    share, empty = ranks.share, (n == 0)[:, None]
    between = torch.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))  # as NumPy rounds
    bounds = torch.where(low == high, low, between).masked_fill(empty, 0)
    if not bounds.isfinite().all():
        f = int((~bounds.isfinite()).any(1).nonzero()[0])
        raise DataError(f"feature {f} is infinite in more than a hundredth of its values; use NaN for what is missing")
    lower, upper = bounds[:, :1], bounds[:, 1:]
    count, mean, squares = (torch.zeros(len(n), dtype=torch.float64) for _ in range(3))  # of distances from lower
    for block in passes():
        y = block.to(torch.float64, copy=True).clamp_(lower, upper).sub_(lower)  # small numbers: no digits are lost
        missing = y.isnan()
        more = y.shape[1] - missing.sum(1)
        block_mean = y.nansum(1) / more.clamp_min(1)
        y.sub_(block_mean[:, None]).masked_fill_(missing, 0)
        total = (count + more).clamp_min(1)
        away = block_mean - mean
        squares += y.square_().sum(1) + away.square() * count * more / total
        mean += away * more / total
        count += more
    std = (squares / (count - 1).clamp_min(1)).sqrt()
    return lower[:, 0].clone(), upper[:, 0].clone(), lower[:, 0] + mean, std.masked_fill(std == 0, 1)


class _Ranks:
    """The order statistics on both sides of each quantile, (F, 4): one digit more is known after each pass."""

    def __init__(self) -> None:
        self.passes, self.done = 0, False

    def start_pass(self) -> None:
        self.counts = torch.empty(0)

    def count(self, block: Tensor) -> None:
        """Of each digit that may come next, how often it occurs in a block (F, n)."""
        block = block if block.dtype in (torch.float32, torch.float64) else block.double()
        if not self.counts.numel():
            self.dtype, self.bits = block.dtype, block.element_size() * 8
            self.digit = 8 if len(block) > MANY else 16
            n_ranks = 2 * len(QUANTILES) if self.passes else 1
            self.counts = torch.zeros(len(block), n_ranks, 1 << self.digit, dtype=torch.int64)
        shift, n_digits = self.bits - self.digit * (self.passes + 1), 1 << self.digit
        for f, row in enumerate(block):
            keys = _to_keys(row[~row.isnan()]) >> shift
            if self.passes == 0:
                self.counts[f, 0] += torch.bincount(keys + n_digits // 2, minlength=n_digits)  # the sign is in it
                continue
            beginnings = keys >> self.digit
            for prefix in self.prefix[f].unique():
                digits = keys[beginnings == prefix] & n_digits - 1
                self.counts[f, self.prefix[f] == prefix] += torch.bincount(digits, minlength=n_digits)

    def end_pass(self) -> None:
        if self.passes == 0:
            self.n = self.counts.sum((1, 2))
            at = torch.tensor(QUANTILES, dtype=torch.float64) * (self.n - 1).clamp_min(0)[:, None]  # (F, 2)
            self.share = at - at.floor()
            self.rank = torch.stack([at.floor(), at.ceil()], 2).long().flatten(1)  # (F, 4), among those of the prefix
            self.prefix = torch.zeros_like(self.rank)
        up_to = self.counts.cumsum(2).expand(-1, self.rank.shape[1], -1).contiguous()  # (F, 4, digits)
        digit = torch.searchsorted(up_to, self.rank[:, :, None], right=True)
        digit = digit.clamp_max(up_to.shape[2] - 1)  # of features without values
        self.rank -= (up_to.gather(2, digit) - self.counts.expand_as(up_to).gather(2, digit))[:, :, 0]
        if self.passes == 0:
            digit -= up_to.shape[2] // 2
        self.prefix = (self.prefix << self.digit) + digit[:, :, 0]
        self.passes += 1
        if self.passes * self.digit == self.bits:
            self.values, self.done = _from_keys(self.prefix, self.dtype).double(), True


def _to_keys(x: Tensor) -> Tensor:
    """Integers in the order of the floating numbers: their bits, those of negative numbers turned round."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    return bits ^ _turned(bits)


def _from_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    keys = keys.to(torch.int32 if dtype == torch.float32 else torch.int64)
    return (keys ^ _turned(keys)).view(dtype)


def _turned(bits: Tensor) -> Tensor:
    """Which bits to turn round: all but the sign, where that is set. (A shift is faster than ``where``.)"""
    info = torch.iinfo(bits.dtype)
    return (bits >> info.bits - 1) & info.max


def _blocks(x: Any) -> Iterator[Tensor]:
    """An (F, N, T) array in blocks (F, n): some steps of all series, or what lies closer together in memory."""
    F, N, T = x.shape
    strides = x.stride() if isinstance(x, Tensor) else getattr(x, "strides", None) or (0, 0, 1)
    by_series = strides[2] < strides[1]
    first, second = (N, T) if by_series else (T, N)
    n_first = max(1, BLOCK // (F * second))
    n_second = second if n_first > 1 else max(1, BLOCK // F)
    for a in range(0, first, n_first):
        for b in range(0, second, n_second):
            outer, inner = slice(a, a + n_first), slice(b, b + n_second)
            part = x[:, outer, inner] if by_series else x[:, inner, outer]
            block = (
                part.detach().cpu() if isinstance(part, Tensor) else torch.tensor(part)
            )  # a copy: maps may be read-only
            yield block.reshape(F, -1)
