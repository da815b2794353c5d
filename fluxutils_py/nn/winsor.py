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
        lower = self.lower.to(x.dtype)
        upper = self.upper.to(x.dtype)
        mean = self.mean.to(x.dtype)
        std = self.std.to(x.dtype)
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
    ranks = _Ranks()
    while not ranks.done:
        ranks.start_pass()
        for block in passes():
            ranks.count(block)
        ranks.end_pass(add_up)
    lower, upper = _quantiles(ranks)
    moments = _moments(passes, lower, upper)
    count, mean, squares = merge(*moments)
    n_free = (count - 1).clamp_min(1)
    variance = squares / n_free
    std = variance.sqrt()
    lower = lower[:, 0]
    return (
        lower.clone(),  # views of one tensor, which would keep each other in memory
        upper[:, 0].clone(),
        lower + mean,
        std.masked_fill(std == 0, 1),
    )


def _quantiles(ranks: _Ranks) -> tuple[Tensor, Tensor]:
    """Interpolate the quantiles, (F, 1) each, between the order statistics on both sides.

    Raises
    ------
    DataError
        If one is infinite: the clamped values would have no mean.
    """
    pairs = ranks.values.view(-1, len(QUANTILES), 2)
    low, high = pairs.unbind(2)
    share = ranks.share
    span = high - low
    # from the nearer side, to round as NumPy does
    from_low = low + span * share
    from_high = high - span * (1 - share)
    between = torch.where(share < 0.5, from_low, from_high)
    # where both are the same infinity, the span is NaN
    bounds = torch.where(low == high, low, between)
    empty = ranks.n[:, None] == 0
    bounds = bounds.masked_fill(empty, 0)
    infinite = ~bounds.isfinite().all(1)
    if infinite.any():
        f = int(infinite.nonzero()[0])
        raise DataError(
            f"feature {f} is infinite in more than a hundredth of its values; use NaN for what is "
            "missing"
        )
    lower, upper = bounds.split(1, 1)
    return lower, upper


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


class _Ranks:
    """Find the order statistics on both sides of each quantile, (F, 4): one more digit of them in
    each pass.
    """

    n: Tensor  # values of each feature, (F,)
    share: Tensor  # where each quantile is between its order statistics, 0..1, (F, 2)
    rank: Tensor  # of each order statistic among the values that begin with its prefix, (F, 4)
    prefix: Tensor  # the digits of each order statistic that are known so far, (F, 4)
    values: Tensor  # the order statistics, once done, (F, 4)

    def __init__(self) -> None:
        self.passes = 0
        self.done = False

    def start_pass(self) -> None:
        self.counts = torch.empty(0)

    def count(self, block: Tensor) -> None:
        """Count how often each next digit occurs in a block (F, n)."""
        if block.dtype not in (torch.float32, torch.float64):
            block = block.double()
        if not self.counts.numel():
            self.dtype = block.dtype
            self.bits = block.element_size() * 8
            self.digit = 8 if len(block) > MANY else 16
            # in the first pass, all begin alike
            n_ranks = 2 * len(QUANTILES) if self.passes else 1
            shape = (len(block), n_ranks, 1 << self.digit)
            self.counts = torch.zeros(shape, dtype=torch.int64)
        n_known = self.digit * (self.passes + 1)
        shift = self.bits - n_known
        for f, row in enumerate(block):
            keys = _to_keys(row[~row.isnan()]) >> shift
            if self.passes == 0:
                self._count_first_digits(f, keys)
            else:
                self._count_next_digits(f, keys)

    def _count_first_digits(self, f: int, keys: Tensor) -> None:
        n_digits = 1 << self.digit
        # keys have a sign, bincount takes no negative numbers
        digits = keys + n_digits // 2
        self.counts[f, 0] += torch.bincount(digits, minlength=n_digits)

    def _count_next_digits(self, f: int, keys: Tensor) -> None:
        n_digits = 1 << self.digit
        prefixes = self.prefix[f]
        beginnings = keys >> self.digit
        # order statistics close to each other begin alike: each prefix is counted once
        for prefix in prefixes.unique():
            digits = keys[beginnings == prefix] & n_digits - 1
            counts = torch.bincount(digits, minlength=n_digits)
            self.counts[f, prefixes == prefix] += counts

    def end_pass(self, add_up: Callable[[Tensor], Tensor]) -> None:
        self.counts = add_up(self.counts)
        first = self.passes == 0
        if first:
            self._place_quantiles()
        n_digits = self.counts.shape[2]
        n_ranks = self.rank.shape[1]
        # all (F, 4, digits); the first pass counted once for all four
        counts = self.counts.expand(-1, n_ranks, -1)
        up_to = counts.cumsum(2).contiguous()
        digit = torch.searchsorted(up_to, self.rank[:, :, None], right=True)
        digit = digit.clamp_max(n_digits - 1)  # of features without values
        smaller = up_to.gather(2, digit) - counts.gather(2, digit)
        self.rank -= smaller[:, :, 0]
        if first:  # undo the shift of _count_first_digits
            digit -= n_digits // 2
        shifted = self.prefix << self.digit
        self.prefix = shifted + digit[:, :, 0]
        self.passes += 1
        if self.passes * self.digit == self.bits:
            values = _from_keys(self.prefix, self.dtype)
            self.values = values.double()
            self.done = True

    def _place_quantiles(self) -> None:
        """Find the ranks on both sides of each quantile, from the numbers of values."""
        self.n = self.counts.sum((1, 2))
        quantiles = torch.tensor(QUANTILES, dtype=torch.float64)
        last = (self.n - 1).clamp_min(0)
        # (F, 2)
        positions = quantiles * last[:, None]
        below = positions.floor()
        above = positions.ceil()
        self.share = positions - below
        both = torch.stack([below, above], 2)
        self.rank = both.long().flatten(1)
        self.prefix = torch.zeros_like(self.rank)


def _to_keys(x: Tensor) -> Tensor:
    """Return integers in the order of the floating numbers: their bits, inverted but for the sign
    if negative.
    """
    bits = x.view(_integer_type(x.dtype))
    return bits ^ _inverted_bits(bits)


def _from_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    keys = keys.to(_integer_type(dtype))
    bits = keys ^ _inverted_bits(keys)
    return bits.view(dtype)


def _integer_type(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else torch.int64


def _inverted_bits(bits: Tensor) -> Tensor:
    """Return the bits to invert: all but the sign, where the sign is set. (A shift is faster than
    ``where``.)
    """
    info = torch.iinfo(bits.dtype)
    sign = bits >> info.bits - 1
    return sign & info.max


def _blocks(x: Any) -> Iterator[Tensor]:
    """Read an (F, N, T) array in blocks (F, n): some steps of all series, or all steps of some, by
    memory order.
    """
    F, N, T = x.shape
    if isinstance(x, Tensor):
        strides = x.stride()
    else:
        # a dataset of HDF5 has none: its steps are contiguous
        strides = getattr(x, "strides", None) or (0, 0, 1)
    by_series = strides[2] < strides[1]
    n_outer = N if by_series else T
    n_inner = T if by_series else N
    outer_size = max(1, BLOCK // (F * n_inner))
    inner_size = n_inner if outer_size > 1 else max(1, BLOCK // F)
    for outer_start in range(0, n_outer, outer_size):
        outer = slice(outer_start, outer_start + outer_size)
        for inner_start in range(0, n_inner, inner_size):
            inner = slice(inner_start, inner_start + inner_size)
            if by_series:
                part = x[:, outer, inner]
            else:
                part = x[:, inner, outer]
            if isinstance(part, Tensor):
                block = part.detach().cpu()
            else:  # copied, because torch warns of memory that is read-only
                block = torch.tensor(part)
            yield block.reshape(F, -1)
