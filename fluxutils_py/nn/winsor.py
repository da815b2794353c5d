"""Winsorising: clamp each feature to its 1 and 99 per cent quantiles, then standardise it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError

QUANTILES = (0.01, 0.99)
# names, and values before ``fit``, which change nothing
STATISTICS = {
    "lower": -math.inf,
    "upper": math.inf,
    "mean": 0.0,
    "std": 1.0,
}
BLOCK = 1 << 20  # values to read at once
# more features than this use digits of 8 bits: counts of 16-bit digits would take much memory
MANY = 64


class WinsorNorm(nn.Module):
    """Clamp each feature to its 1 and 99 per cent quantiles, then standardise it; NaN becomes 0.

    Parameters
    ----------
    n_features : int
        F; ``fit`` sets it.

    Attributes
    ----------
    lower, upper, mean, std : buffers of shape (F,), float64
        Part of ``state_dict()``. Before ``fit``, they change nothing but NaN. ``std`` is 1 for
        constant features.

    Notes
    -----
    ``forward`` takes ``(..., F)``, such as a step ``(B, F)`` or a window ``(S, B, F)``, and keeps
    its floating type; integers become torch's default type. Use it as the first layer of a model,
    which then takes raw data. NaN inputs at live steps are an error in ``fit`` of an estimator: put
    :class:`fluxutils_py.WinsorScaler` before it instead.

    Source: ``WinsorNorm`` of FluxUtils.jl, where NaN becomes the mean and constant features become
    NaN.

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
        for name, value in STATISTICS.items():
            values = torch.full((n_features,), value, dtype=torch.float64)
            self.register_buffer(name, values)

    @property
    def n_features(self) -> int:
        return len(self.mean)

    def fit(self, x: Any) -> Self:
        """Learn the quantiles, and the mean and standard deviation (of n - 1) of the clamped
        values; NaN is left out.

        Parameters
        ----------
        x : array of shape (F, N, T)
            A tensor, NumPy array, memory map, h5py dataset, or anything else with a shape that
            takes three slices. It is read a few times, in blocks of about a million values. The
            quantiles are exact (NumPy's default, type 7).

        Returns
        -------
        WinsorNorm
            Itself. A feature without values gets bounds and mean 0.

        Raises
        ------
        ShapeError, DataError
            If ``x`` does not have three axes or is empty, or if more than a hundredth of a feature
            is infinite. The module is left unchanged.
        """
        shape = tuple(x.shape)
        if len(shape) != 3 or 0 in shape:
            raise ShapeError(
                f"WinsorNorm is fitted on a non-empty array of shape (F, N, T), got {shape}"
            )
        device = self.mean.device
        statistics = winsor_statistics(lambda: _blocks(x))
        for name, value in zip(STATISTICS, statistics, strict=True):
            self.register_buffer(name, value.to(device))
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.n_features:
            remedy = ": call fit first" if self.n_features == 0 else ""
            raise ShapeError(
                f"WinsorNorm has {self.n_features} features, the input has shape "
                f"{tuple(x.shape)}{remedy}"
            )
        if not x.is_floating_point():
            x = x.to(torch.float32)
        lower, upper, mean, std = (getattr(self, name).to(x.dtype) for name in STATISTICS)
        standard = (x.clamp(lower, upper) - mean) / std
        return standard.masked_fill(x.isnan(), 0)

    def extra_repr(self) -> str:
        return f"{self.n_features}"


def winsor_statistics(
    passes: Callable[[], Iterable[Tensor]],
    add_up: Callable[[Tensor], Tensor] = lambda counts: counts,
    merge: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] = lambda *moments: moments,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute quantiles, mean and standard deviation of each feature, in bounded memory.

    ``passes()`` begins a pass over the data, in blocks of shape (F, n) of one floating type.
    Returns the lower and upper bounds, and the mean and standard deviation (of n - 1) of the values
    clamped to them.

    If other ranks have more data, ``add_up`` adds up counts of all ranks, and ``merge`` merges
    number, mean and sum of squared distances from it.

    Notes
    -----
    Each pass finds one more digit of every order statistic, as in a radix sort: it counts how often
    each value of the next 16 bits occurs among the numbers that begin with the digits known so far.
    So float32 takes three passes and float64 five, the last one for mean and variance (merged as in
    Chan, Golub & LeVeque 1983). With more than 64 features, digits have 8 bits, and it takes five
    and nine passes.
    """
    values, share, n = _order_statistics(passes, add_up)
    # interpolated between the order statistics on both sides
    low, high = values.view(-1, len(QUANTILES), 2).unbind(2)
    span = high - low
    # from the nearer side, to round as NumPy does
    between = torch.where(share < 0.5, low + span * share, high - span * (1 - share))
    # where both are the same infinity, the span is NaN
    bounds = torch.where(low == high, low, between).masked_fill(n[:, None] == 0, 0)
    infinite = ~bounds.isfinite().all(1)
    if infinite.any():  # the clamped values would have no mean
        f = int(infinite.nonzero()[0])
        raise DataError(
            f"feature {f} is infinite in more than a hundredth of its values; use NaN for what is "
            "missing"
        )
    lower, upper = bounds.split(1, 1)
    count, mean, squares = merge(*_moments(passes, lower, upper))
    std = (squares / (count - 1).clamp_min(1)).sqrt()
    lower = lower[:, 0]
    return (
        lower.clone(),  # views of one tensor, which would keep each other in memory
        upper[:, 0].clone(),
        lower + mean,
        std.masked_fill(std == 0, 1),
    )


def _moments(
    passes: Callable[[], Iterable[Tensor]],
    lower: Tensor,
    upper: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, mean and sum of squared distances from it of the clamped values, less
    ``lower``: on small numbers, no digits are lost.
    """
    n_features = len(lower)
    count, mean, squares = torch.zeros(3, n_features, dtype=torch.float64)
    for block in passes():
        # in place, because a block is large; of a copy, because it may be the user's data
        y = block.to(torch.float64, copy=True)
        y.clamp_(lower, upper)
        y.sub_(lower)
        missing = y.isnan()
        n_block = y.shape[1] - missing.sum(1)
        block_mean = y.nansum(1) / n_block.clamp_min(1)
        y.sub_(block_mean[:, None])
        y.masked_fill_(missing, 0)
        within = y.square_().sum(1)
        # Chan et al.: distances from the common mean, of this block and of those before
        away = block_mean - mean
        total = (count + n_block).clamp_min(1)
        squares += within + away.square() * count * n_block / total
        mean += away * n_block / total
        count += n_block  # last: both lines above need the number before
    return count, mean, squares


def _order_statistics(
    passes: Callable[[], Iterable[Tensor]], add_up: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the order statistics on both sides of each quantile, one more digit in each pass.

    Returns
    -------
    values : Tensor of shape (F, 4)
    share : Tensor of shape (F, 2)
        Where each quantile is between its two, 0..1.
    n : Tensor of shape (F,)
        Numbers of values.
    """
    counts, dtype = _count_digits(passes(), 0, None)
    counts = add_up(counts)  # (F, 1, digits): in the first pass, all begin alike
    n = counts.sum((1, 2))
    quantiles = torch.tensor(QUANTILES, dtype=torch.float64)
    positions = quantiles * (n - 1).clamp_min(0)[:, None]  # (F, 2)
    below = positions.floor()
    both = torch.stack([below, positions.ceil()], 2)
    # of each order statistic among the values that begin with its digits known so far, (F, 4)
    rank = both.long().flatten(1)
    n_digits = counts.shape[2]
    # keys have a sign, places of counts have none
    prefix = _next_digit(counts.expand(-1, rank.shape[1], -1), rank) - n_digits // 2
    digit = n_digits.bit_length() - 1
    for place in range(1, 8 * dtype.itemsize // digit):
        counts = add_up(_count_digits(passes(), place, prefix)[0])
        prefix = (prefix << digit) + _next_digit(counts, rank)
    keys = prefix.to(_integer_type(dtype))
    values = (keys ^ _inverted_bits(keys)).view(dtype)
    return values.double(), positions - below, n


def _next_digit(counts: Tensor, rank: Tensor) -> Tensor:
    """Return the next digit of each order statistic, from the counts (F, 4, digits) of those that
    begin like it; take the smaller ones off its rank, in place.
    """
    up_to = counts.cumsum(2).contiguous()
    digit = torch.searchsorted(up_to, rank[:, :, None], right=True)
    digit = digit.clamp_max(counts.shape[2] - 1)  # of features without values
    smaller = up_to.gather(2, digit) - counts.gather(2, digit)
    rank -= smaller[:, :, 0]
    return digit[:, :, 0]


def _count_digits(
    blocks: Iterable[Tensor], place: int, prefix: Tensor | None
) -> tuple[Tensor, torch.dtype]:
    """Count how often each digit at a place occurs in blocks (F, n), among the numbers that begin
    like each order statistic, or among all (None); return also the type of the numbers.
    """
    counts = torch.empty(0)
    dtype = torch.float64
    for block in blocks:
        values = block if block.dtype in (torch.float32, torch.float64) else block.double()
        if not counts.numel():
            dtype = values.dtype
            n_digits = 1 << (8 if len(values) > MANY else 16)
            n_ranks = 1 if prefix is None else prefix.shape[1]
            counts = torch.zeros(len(values), n_ranks, n_digits, dtype=torch.int64)
        digit = n_digits.bit_length() - 1
        shift = 8 * dtype.itemsize - digit * (place + 1)
        for f, row in enumerate(values):
            # integers in the order of the numbers: their bits, of negative ones inverted but for
            # the sign
            bits = row[~row.isnan()].view(_integer_type(dtype))
            keys = (bits ^ _inverted_bits(bits)) >> shift
            if prefix is None:
                # keys have a sign, bincount takes no negative numbers
                counts[f, 0] += torch.bincount(keys + n_digits // 2, minlength=n_digits)
                continue
            beginnings = keys >> digit
            # order statistics close to each other begin alike: each prefix is counted once
            for known in prefix[f].unique():
                digits = keys[beginnings == known] & n_digits - 1
                counts[f, prefix[f] == known] += torch.bincount(digits, minlength=n_digits)
    return counts, dtype


def _integer_type(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else torch.int64


def _inverted_bits(bits: Tensor) -> Tensor:
    """Return the bits to invert: all but the sign, where the sign is set. (A shift is faster than
    ``where``.)
    """
    info = torch.iinfo(bits.dtype)
    return (bits >> info.bits - 1) & info.max


def _blocks(x: Any) -> Iterator[Tensor]:
    """Read an (F, N, T) array in blocks (F, n) of some steps of all series."""
    F, N, T = x.shape
    size = max(1, BLOCK // (F * N))
    for start in range(0, T, size):
        part = x[:, :, start : start + size]
        # copied, because torch warns of memory that is read-only
        block = part.detach().cpu() if isinstance(part, Tensor) else torch.tensor(part)
        yield block.reshape(F, -1)
