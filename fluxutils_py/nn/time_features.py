"""Layers without parameters that describe the recent past of each feature: lags, means, slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fluxutils_py.nn.linear_recurrence import linear_recurrence
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.sizes import check_features, set_sizes
from fluxutils_py.validation import check_integer

State = tuple[Tensor, ...]


class _TimeFeatures(nn.Module):
    """Base of the inner modules: they take windows, and their states have the series in axis 1."""

    takes_windows = True
    batch_dim = 1

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.n_in = n_in
        # tells the type and the device of states, as parameters would
        self.register_buffer("like", torch.empty(0), persistent=False)

    like: Tensor

    def first_state(self, n_series: int) -> State:
        """Return the state before the first step: zeros."""
        raise NotImplementedError

    def empty_state(self) -> State:
        return self.first_state(0)

    def forward(self, x: Tensor, state: State | Tensor | None = None) -> tuple[Tensor, State]:
        check_features(type(self).__name__.removeprefix("_"), x, self.n_in)
        if state is None:
            state = tuple(s.to(x.device, x.dtype) for s in self.first_state(x.shape[1]))
        elif isinstance(state, Tensor):  # as a state of one tensor is loaded
            state = (state,)
        return self.compute(x, state)

    def compute(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the outputs (S, B, n_out) and the new state."""
        raise NotImplementedError


class _Lags(_TimeFeatures):
    """The state is the last ``max(lags)`` inputs."""

    def __init__(self, n_in: int, lags: Sequence[int]) -> None:
        super().__init__(n_in)
        self.lags = lags

    def first_state(self, n_series: int) -> State:
        return (self.like.new_zeros(max(self.lags), n_series, self.n_in),)

    def compute(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        S = len(x)
        n_past = max(self.lags)
        both = torch.cat([state[0], x])
        outputs = [both[n_past - lag : n_past - lag + S] for lag in self.lags]
        # a clone, because a view would keep the whole window in memory
        return torch.cat(outputs, 2), (both[S:].clone(),)


class LastValues(_TimeFeatures):
    """Inputs with the last value before each NaN in its place, then 1 for NaN and 0 for others. The
    state is the last values, (1, B, F): 0 before the first.
    """

    def first_state(self, n_series: int) -> State:
        return (self.like.new_zeros(1, n_series, self.n_in),)

    def compute(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        missing = x.isnan()
        if len(x) == 1:
            filled = torch.where(missing, state[0], x)
        else:
            steps = torch.arange(len(x), device=x.device)[:, None, None]
            last = torch.where(missing, -1, steps).cummax(0).values
            filled = x.nan_to_num().gather(0, last.clamp(min=0))
            filled = torch.where(last < 0, state[0], filled)
        return torch.cat([filled, missing.to(x.dtype)], 2), (filled[-1:].clone(),)


class _ExponentialMeans(_TimeFeatures):
    """The state is the sum of weighted inputs (1, B, spans F), and of the weights."""

    factors: Tensor

    def __init__(self, n_in: int, spans: Sequence[int]) -> None:
        super().__init__(n_in)
        shares = 2 / (torch.tensor(spans, dtype=torch.float64) + 1)
        self.register_buffer("factors", (1 - shares).repeat_interleave(n_in), persistent=False)

    def first_state(self, n_series: int) -> State:
        sums = self.like.new_zeros(1, n_series, len(self.factors))
        return sums, sums.clone()

    def compute(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        factors = self.factors.to(x.dtype)
        repeated = x.repeat(1, 1, len(factors) // self.n_in)
        sums = linear_recurrence(factors, (1 - factors) * repeated, state[0][0])
        weights = linear_recurrence(factors, (1 - factors).expand_as(repeated), state[1][0])
        return sums / weights, (sums[-1:].clone(), weights[-1:].clone())


class _RollingStatistics(_TimeFeatures):
    """The state is the last ``max(spans) - 1`` inputs, and the number of steps so far (1, B, 1)."""

    def __init__(self, n_in: int, spans: Sequence[int]) -> None:
        super().__init__(n_in)
        self.spans = spans

    def first_state(self, n_series: int) -> State:
        past = self.like.new_zeros(max(self.spans) - 1, n_series, self.n_in)
        return past, self.like.new_zeros(1, n_series, 1)

    def compute(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        S = len(x)
        past, t = state
        both = torch.cat([past, x])
        if S == 1:
            n = t[0] + 1  # (B, 1)
            newest = [_describe_last(both[-span:], n.clamp(max=span)) for span in self.spans]
            return torch.cat(newest, 1)[None], (both[1:].clone(), t + 1)
        # (steps, B, 1): 0 before the start
        counts = (torch.arange(len(both), device=x.device)[:, None, None] >= len(past) - t).to(x)
        parts = [_Part(counts, both * counts, torch.zeros_like(both), torch.zeros_like(both))]
        while 2 ** len(parts) <= max(self.spans):
            size = 2 ** (len(parts) - 1)
            parts.append(parts[-1].ending(size).after(parts[-1].ending(0, size), size))
        outputs = []
        for span in self.spans:
            # the last ``span`` steps before each of this window, from parts of 1, 2, 4, ... steps
            whole: _Part | None = None
            size = 0
            for i, part in enumerate(parts):
                if span & 2**i:
                    piece = part.ending(len(part.n) - S - size, size)
                    whole = piece if whole is None else whole.after(piece, size)
                    size += 2**i
            assert whole is not None
            outputs.extend(whole.describe())
        return torch.cat(outputs, 2), (both[S:].clone(), t + S)


def _describe_last(window: Tensor, n: Tensor) -> Tensor:
    """Return mean, deviation and slope (B, 3 F) of the last ``n`` steps (B, 1) of a window.

    For a single step, this is less to do than to put parts together.
    """
    # 0 for the newest step, below -n before the start
    places = torch.arange(1 - len(window), 1, dtype=window.dtype, device=window.device)
    live = (places[:, None, None] > -n).to(window.dtype)
    mean = (window * live).sum(0) / n
    away = (window - mean) * live
    moment = ((places[:, None, None] + (n - 1) / 2) * away).sum(0)
    return torch.cat(_Part(n, mean, away.square().sum(0), moment).describe(), 1)


class _Part(NamedTuple):
    """Some steps before each step, and sums over the live ones among them.

    Parts are put together without cancellation, so that a constant has a deviation of 0. Source:
    Chan, Golub & LeVeque (1983), The American Statistician 37(3).
    """

    n: Tensor  # (S, B, 1), number of live steps
    mean: Tensor  # (S, B, F)
    squares: Tensor  # (S, B, F), of distances from the mean
    moment: Tensor  # (S, B, F), of products of these with distances from the middle in time

    def ending(self, first: int, before_last: int = 0) -> _Part:
        """Return the same for some of the steps."""
        return _Part(*(part[first : len(part) - before_last] for part in self))

    def after(self, earlier: _Part, size: int) -> _Part:
        """Return this part of ``size`` steps and the one just before it together."""
        n = self.n + earlier.n
        share = self.n / n.clamp(min=1)
        both = share * earlier.n
        apart = self.mean - earlier.mean
        # live steps end a part; if the earlier one has any, all of this one are live
        between = size + (earlier.n - self.n) / 2
        return _Part(
            n,
            earlier.mean + share * apart,
            # not by the square, which may be too large for a number where ``both`` is 0
            earlier.squares + self.squares + both * apart * apart,
            earlier.moment + self.moment + both * between * apart,
        )

    def describe(self) -> list[Tensor]:
        """Return mean, deviation and slope (S, B, F)."""
        n = self.n
        slope = self.moment / (n * (n.square() - 1) / 12).clamp(min=1e-3)
        return [self.mean, _root(self.squares / n), slope]


def _root(variance: Tensor) -> Tensor:
    """Return the square root, whose gradient at 0 is 0."""
    is_constant = variance == 0
    return variance.masked_fill(is_constant, 1).sqrt().masked_fill(is_constant, 0)


class _RunningStatistics(_TimeFeatures):
    """The state is the number of steps so far (1, B, 1), and of each feature (1, B, F): the first
    value, the last, the largest, the smallest; sums of distances from the first, of their squares,
    and of absolute changes.
    """

    def first_state(self, n_series: int) -> State:
        of_features = self.like.new_zeros(1, n_series, self.n_in)
        return of_features[..., :1].clone(), *(of_features.clone() for _ in range(7))

    def compute(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        t, first, last, largest, smallest, sums, squares, changes = state
        is_new = t == 0
        first, last, largest, smallest = (
            torch.where(is_new, x[:1], value) for value in (first, last, largest, smallest)
        )
        steps = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)
        numbers = t + steps[:, None, None]
        # distances from the first value: a high level costs no digits
        away = x - first
        sums = sums + away.cumsum(0)
        squares = squares + away.square().cumsum(0)
        changes = changes + x.diff(dim=0, prepend=last).abs().cumsum(0)
        # files of single steps know no running extremes
        highest, lowest = (x, x) if len(x) == 1 else (x.cummax(0).values, x.cummin(0).values)
        largest = torch.maximum(largest, highest)
        smallest = torch.minimum(smallest, lowest)
        mean = sums / numbers
        variance = (squares / numbers - mean.square()).clamp(min=0)
        mean_change = changes / (numbers - 1).clamp(min=1)
        every_first = first.expand_as(x)
        described = (first + mean, _root(variance), largest, smallest, x, every_first, mean_change)
        y = torch.cat([*described, numbers.log()], 2)
        new = (numbers, every_first, x, largest, smallest, sums, squares, changes)
        return y, tuple(part[-1:].clone() for part in new)


def _check_spans(layer: nn.Module, name: str, spans: Sequence[int], least: int) -> tuple[int, ...]:
    checked = tuple(check_integer(f"{type(layer).__name__}: {name}", s, least) for s in spans)
    if not checked:
        raise ValueError(f"{type(layer).__name__}: {name} must hold at least one integer, got none")
    return checked


class Lags(Recur):
    """Earlier values of each feature.

    Parameters
    ----------
    n_in : int
        F, number of features.
    lags : sequence of int
        How many steps ago, from 0 for the step itself.

    Attributes
    ----------
    n_out : int
        F times the number of lags: all features for the first lag, then for the second, ...

    Raises
    ------
    TypeError, ValueError
        If a number is not an integer or too small; the message names it.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. Values
    before the start are zeros.

    Examples
    --------
    >>> x = torch.arange(1.0, 6)[:, None, None]  # (S, B, F)
    >>> Lags(1, [0, 2])(x)[:, 0].T
    tensor([[1., 2., 3., 4., 5.],
            [0., 0., 1., 2., 3.]])
    """

    n_in: int

    def __init__(self, n_in: int, lags: Sequence[int]) -> None:
        set_sizes(self, n_in=n_in)
        self.lags = _check_spans(self, "lags", lags, 0)
        super().__init__(_Lags(self.n_in, self.lags))
        self.n_out = self.n_in * len(self.lags)


class _OverSpans(Recur):
    """A Recur around features of several spans, which it builds itself."""

    _inner: ClassVar[Callable[..., _TimeFeatures]]
    per_span: ClassVar[int] = 1  # outputs of each feature
    n_in: int

    def __init__(self, n_in: int, spans: Sequence[int] = (5, 20, 80)) -> None:
        set_sizes(self, n_in=n_in)
        self.spans = _check_spans(self, "spans", spans, 1)
        super().__init__(self._inner(self.n_in, self.spans))
        self.n_out = self.per_span * self.n_in * len(self.spans)


class ExponentialMeans(_OverSpans):
    """Exponentially weighted means of each feature over several spans.

    Parameters
    ----------
    n_in : int
        F, number of features.
    spans : sequence of int
        A value's weight falls by the factor ``1 - 2 / (span + 1)`` with each step.

    Attributes
    ----------
    n_out : int
        F times the number of spans: all features for the first span, then for the second, ...

    Raises
    ------
    TypeError, ValueError
        If a number is not an integer or below 1; the message names it.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    weights of the steps so far add up to 1, as those of ``ewm(span=..., adjust=True)`` of pandas:
    the first output is the first value.

    Examples
    --------
    >>> x = torch.tensor([0.0, 1, 1, 1])[:, None, None]  # (S, B, F)
    >>> ExponentialMeans(1, [3])(x).flatten()
    tensor([0.0000, 0.6667, 0.8571, 0.9333])
    """

    _inner = _ExponentialMeans


class RollingStatistics(_OverSpans):
    """Mean, standard deviation and slope of each feature over its last steps, for several spans.

    Parameters
    ----------
    n_in : int
        F, number of features.
    spans : sequence of int
        Numbers of steps. Near the start, there are fewer.

    Attributes
    ----------
    n_out : int
        3 F times the number of spans: for the first span, the means of all features, their
        deviations (of n) and their slopes per step by least squares; then for the second, ...

    Raises
    ------
    TypeError, ValueError
        If a number is not an integer or below 1; the message names it.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    slope of a single step is 0.

    Examples
    --------
    >>> x = torch.tensor([1.0, 3, 5, 7])[:, None, None]  # (S, B, F)
    >>> RollingStatistics(1, [3])(x)[:, 0].T
    tensor([[1.0000, 2.0000, 3.0000, 5.0000],
            [0.0000, 1.0000, 1.6330, 1.6330],
            [0.0000, 2.0000, 2.0000, 2.0000]])
    """

    _inner = _RollingStatistics
    per_span = 3


class RunningStatistics(Recur):
    """Statistics of each feature over all steps so far.

    Parameters
    ----------
    n_in : int
        F, number of features.

    Attributes
    ----------
    n_out : int
        7 F + 1: of all features the mean, the standard deviation (of n), the largest value, the
        smallest, the last, the first, and the mean absolute change from step to step; then the
        logarithm of the number of steps.

    Raises
    ------
    TypeError, ValueError
        If ``n_in`` is not an integer or below 1.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``.

    Examples
    --------
    >>> x = torch.tensor([1.0, 3, 2])[:, None, None]  # (S, B, F)
    >>> RunningStatistics(1)(x)[-1]
    tensor([[2.0000, 0.8165, 3.0000, 1.0000, 2.0000, 1.0000, 1.5000, 1.0986]])
    """

    n_in: int

    def __init__(self, n_in: int) -> None:
        set_sizes(self, n_in=n_in)
        super().__init__(_RunningStatistics(self.n_in))
        self.n_out = 7 * self.n_in + 1
