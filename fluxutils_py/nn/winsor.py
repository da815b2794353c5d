"""Winsorising: clamp each feature to its 1 and 99 per cent quantiles, then standardise it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError

QUANTILES = (0.01, 0.99)
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
        for name, value in (("lower", -math.inf), ("upper", math.inf), ("mean", 0.0), ("std", 1.0)):
            self.register_buffer(name, torch.full((n_features,), value, dtype=torch.float64))

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
            is infinite. Nothing is changed then.
        """
        shape = tuple(x.shape)
        if len(shape) != 3 or 0 in shape:
            raise ShapeError(
                f"WinsorNorm is fitted on a non-empty array of shape (F, N, T), got {shape}"
            )
        statistics = winsor_statistics(lambda: _blocks(x))
        for name, value in zip(("lower", "upper", "mean", "std"), statistics, strict=True):
            self.register_buffer(name, value.to(self.mean.device))
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.n_features:
            remedy = ": call fit first" if self.n_features == 0 else ""
            raise ShapeError(
                f"WinsorNorm has {self.n_features} features, the input has shape "
                f"{tuple(x.shape)}{remedy}"
            )
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype())
        lower, upper, mean, std = (
            b.to(x.dtype) for b in (self.lower, self.upper, self.mean, self.std)
        )
        return ((x.clamp(lower, upper) - mean) / std).masked_fill(x.isnan(), 0)

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
    n = ranks.n
    low, high = ranks.values.view(-1, len(QUANTILES), 2).unbind(2)
    share, empty = ranks.share, (n == 0)[:, None]
    # as NumPy rounds
    between = torch.where(
        share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share)
    )
    bounds = torch.where(low == high, low, between).masked_fill(empty, 0)
    if not bounds.isfinite().all():
        f = int((~bounds.isfinite()).any(1).nonzero()[0])
        raise DataError(
            f"feature {f} is infinite in more than a hundredth of its values; use NaN for what is "
            "missing"
        )
    lower, upper = bounds[:, :1], bounds[:, 1:]
    # of distances from lower
    count, mean, squares = (torch.zeros(len(n), dtype=torch.float64) for _ in range(3))
    for block in passes():
        # small numbers: no digits are lost
        y = block.to(torch.float64, copy=True).clamp_(lower, upper).sub_(lower)
        missing = y.isnan()
        more = y.shape[1] - missing.sum(1)
        block_mean = y.nansum(1) / more.clamp_min(1)
        y.sub_(block_mean[:, None]).masked_fill_(missing, 0)
        total = (count + more).clamp_min(1)
        away = block_mean - mean
        squares += y.square_().sum(1) + away.square() * count * more / total
        mean += away * more / total
        count += more
    count, mean, squares = merge(count, mean, squares)
    std = (squares / (count - 1).clamp_min(1)).sqrt()
    return (
        lower[:, 0].clone(),
        upper[:, 0].clone(),
        lower[:, 0] + mean,
        std.masked_fill(std == 0, 1),
    )


class _Ranks:
    """The order statistics on both sides of each quantile, (F, 4); each pass finds one more digit
    of them.
    """

    def __init__(self) -> None:
        self.passes, self.done = 0, False

    def start_pass(self) -> None:
        self.counts = torch.empty(0)

    def count(self, block: Tensor) -> None:
        """Count how often each next digit occurs in a block (F, n)."""
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
                # the sign is in it
                self.counts[f, 0] += torch.bincount(keys + n_digits // 2, minlength=n_digits)
                continue
            beginnings = keys >> self.digit
            for prefix in self.prefix[f].unique():
                digits = keys[beginnings == prefix] & n_digits - 1
                self.counts[f, self.prefix[f] == prefix] += torch.bincount(
                    digits, minlength=n_digits
                )

    def end_pass(self, add_up: Callable[[Tensor], Tensor]) -> None:
        self.counts = add_up(self.counts)
        if self.passes == 0:
            self.n = self.counts.sum((1, 2))
            # (F, 2)
            at = torch.tensor(QUANTILES, dtype=torch.float64) * (self.n - 1).clamp_min(0)[:, None]
            self.share = at - at.floor()
            # (F, 4), among those of the prefix
            self.rank = torch.stack([at.floor(), at.ceil()], 2).long().flatten(1)
            self.prefix = torch.zeros_like(self.rank)
        # (F, 4, digits)
        up_to = self.counts.cumsum(2).expand(-1, self.rank.shape[1], -1).contiguous()
        digit = torch.searchsorted(up_to, self.rank[:, :, None], right=True)
        digit = digit.clamp_max(up_to.shape[2] - 1)  # of features without values
        self.rank -= (up_to.gather(2, digit) - self.counts.expand_as(up_to).gather(2, digit))[
            :, :, 0
        ]
        if self.passes == 0:
            digit -= up_to.shape[2] // 2
        self.prefix = (self.prefix << self.digit) + digit[:, :, 0]
        self.passes += 1
        if self.passes * self.digit == self.bits:
            self.values, self.done = _from_keys(self.prefix, self.dtype).double(), True


def _to_keys(x: Tensor) -> Tensor:
    """Return integers in the order of the floating numbers: their bits, inverted but for the sign
    if negative.
    """
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    return bits ^ _inverted_bits(bits)


def _from_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    keys = keys.to(torch.int32 if dtype == torch.float32 else torch.int64)
    return (keys ^ _inverted_bits(keys)).view(dtype)


def _inverted_bits(bits: Tensor) -> Tensor:
    """Return the bits to invert: all but the sign, where the sign is set. (A shift is faster than
    ``where``.)
    """
    info = torch.iinfo(bits.dtype)
    return (bits >> info.bits - 1) & info.max


def _blocks(x: Any) -> Iterator[Tensor]:
    """Read an (F, N, T) array in blocks (F, n): some steps of all series, or all steps of some, by
    memory order.
    """
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
            # copied: may be read-only
            block = part.detach().cpu() if isinstance(part, Tensor) else torch.tensor(part)
            yield block.reshape(F, -1)
