"""Fixed causal convolution kernels whose outputs are pooled as a series goes on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations
from struct import Struct
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn.kernels.library import VERSION, Library, library_in_use, n_threads
from fluxutils_py.nn.kernels.modules import PLAIN, is_transformed
from fluxutils_py.nn.kernels.recurrence import TYPES, kernel_error
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.sizes import check_features, set_sizes
from fluxutils_py.torch_private import version_of
from fluxutils_py.validation import check_integer

TAPS = 9  # of a kernel, of which three weigh 2 and six -1
TRIPLES = tuple(combinations(range(TAPS), 3))  # those that weigh 2: the 84 kernels
MOST_DILATIONS = 32
MOST_CHANNELS = 9  # that one kernel adds up
# what biases are learnt from: more series or positions change nothing that can be measured
MOST_SERIES = 64
MOST_POSITIONS = 4000
GOLDEN = (math.sqrt(5) + 1) / 2
# fluxutils_causal_call of csrc/kernels.h: version, type, isa, threads; S, B, F, past, dilations,
# biases; pointers
_CALL = Struct("22q")
BLOCK = 1 << 22  # comparisons with biases to hold at once
READ = 1 << 16  # steps of a series to read at once

State = tuple[Tensor, Tensor, Tensor, Tensor]


Dilation = tuple[int, int]  # and how many biases each of its 84 kernels has


def plan_dilations(length: int, per_kernel: int) -> list[Dilation]:
    """Spread the biases of a kernel over dilations, in equal steps of their logarithm.

    The largest dilation is that whose nine taps still fit into ``length`` steps.
    """
    most = max(0.0, math.log2(max(1, length - 1) / (TAPS - 1)))
    n = min(MOST_DILATIONS, per_kernel)
    steps = [math.floor(2 ** (most * i / max(1, n - 1))) for i in range(n)]
    values = sorted(set(steps))
    counts = [steps.count(d) * per_kernel // n for d in values]
    # small dilations get what rounding left over
    for i in range(per_kernel - sum(counts)):
        counts[i % len(counts)] += 1
    return list(zip(values, counts, strict=True))


def draw_channels(n_kernels: int, n_in: int) -> Tensor:
    """Draw which inputs each kernel adds up, (n_kernels, n_in) of 0 and 1, from torch's generator.

    The logarithm of their number is uniform, so that most kernels see few inputs.
    """
    most = math.log2(min(n_in, MOST_CHANNELS) + 1)
    numbers = (2 ** (torch.rand(n_kernels) * most)).long().clamp_(1, min(n_in, MOST_CHANNELS))
    # the first of a random order of the inputs
    ranks = torch.rand(n_kernels, n_in).argsort(1).argsort(1)
    return (ranks < numbers[:, None]).to(torch.uint8)


class _Kernels(nn.Module):
    """Inner module of :class:`CausalKernels`.

    The state holds the last inputs (n_past, B, F), and in float64 the number of steps so far
    (1, B, 1), how often each bias was exceeded (1, B, biases), and the sum of the numbers of the
    steps at which it was. All are integers: their sums are exact in any order.
    """

    takes_windows = True
    batch_dim = 1

    channels: Tensor  # for as many dilations as there may be
    biases: Tensor
    dilations: Tensor  # (MOST_DILATIONS, 2) of int64, filled up with zeros

    def __init__(self, n_in: int, per_kernel: int) -> None:
        super().__init__()
        self.n_in = n_in
        self.per_kernel = per_kernel
        # of one size, whatever the length of series, so that state dicts of all fit
        n_kernels = len(TRIPLES) * MOST_DILATIONS
        self.register_buffer("channels", draw_channels(n_kernels, n_in))
        n_biases = len(TRIPLES) * per_kernel
        self.register_buffer("biases", torch.zeros(n_biases))
        dilations = torch.zeros(MOST_DILATIONS, 2, dtype=torch.int64)
        self.register_buffer("dilations", dilations)
        self._plan: tuple[tuple[int, int], list[Dilation]] | None = None
        self.set_length(1)

    def set_length(self, length: int) -> None:
        """Choose the dilations for series of so many steps."""
        plan = plan_dilations(length, self.per_kernel)
        self.dilations.zero_()
        self.dilations[: len(plan)] = torch.tensor(plan, dtype=torch.int64)

    @property
    def plan(self) -> list[Dilation]:
        """The dilations, read from their buffer, which a state dict may have changed."""
        if self._plan is not None and torch.compiler.is_compiling():
            return self._plan[1]  # a traced buffer has no values
        version = (self.dilations.data_ptr(), version_of(self.dilations))
        if self._plan is None or self._plan[0] != version:
            numbers = self.dilations[self.dilations[:, 0] > 0].tolist()
            self._plan = version, [(dilation, n) for dilation, n in numbers]
        return self._plan[1]

    @property
    def n_past(self) -> int:
        """The number of earlier inputs that the largest dilation needs."""
        return (TAPS - 1) * self.plan[-1][0]

    def empty_state(self) -> State:
        return self.first_state(self.biases.new_empty(1, 0, self.n_in))

    def first_state(self, x: Tensor) -> State:
        """Return the state before the first step, for the series of ``x`` (S, B, F)."""
        B = x.shape[1]
        counts = x.new_zeros(1, B, len(self.biases), dtype=torch.float64)
        return x.new_zeros(self.n_past, B, self.n_in), counts[..., :1].clone(), counts, counts

    def convolve(self, both: Tensor) -> Iterator[Tensor]:
        """Yield the outputs (S, B, 84) of the kernels of each dilation; ``both`` are the past and
        the inputs, (n_past + S, B, F).

        Every output is the same chain of additions, whatever the shapes: an output that a product
        of matrices rounds in another way in another batch could pass a bias there and not here.
        """
        S = both.shape[0] - self.n_past
        first, second, third = torch.tensor(TRIPLES, device=both.device).T
        for i, (dilation, _) in enumerate(self.plan):
            channels = self.channels[i * len(TRIPLES) : (i + 1) * len(TRIPLES)]
            which = torch.arange(len(TRIPLES), device=both.device)
            if self.n_in == 1:  # all kernels have the same sums
                channels = channels[:1]
                which = torch.zeros_like(which)
            needed = both[self.n_past - (TAPS - 1) * dilation :]
            factors = channels.T.to(needed.dtype)
            sums = needed[..., :1] * factors[0]  # (S + 8 dilation, B, kernels)
            for f in range(1, self.n_in):
                sums = sums + needed[..., f : f + 1] * factors[f]
            taps = torch.stack([sums[k * dilation : k * dilation + S] for k in range(TAPS)])
            nine = taps[0]
            for k in range(1, TAPS):
                nine = nine + taps[k]
            taps = taps.permute(0, 3, 1, 2)  # (taps, kernels, S, B)
            three = taps[first, which] + taps[second, which] + taps[third, which]
            yield (3 * three).permute(1, 2, 0) - nine[..., which]

    def hits(self, both: Tensor) -> Tensor:
        """Return whether the kernels' outputs exceed their biases, (S, B, biases)."""
        parts = []
        start = 0
        for outputs, (_, n) in zip(self.convolve(both), self.plan, strict=True):
            stop = start + n * len(TRIPLES)
            biases = self.biases[start:stop].to(both.dtype).view(len(TRIPLES), n)
            parts.append((outputs[..., None] > biases).flatten(2))
            start = stop
        return torch.cat(parts, 2)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        ys: list[Tensor] = []
        state = self.advance(x, state, ys)
        return torch.cat(ys) if len(ys) > 1 else ys[0], state

    def advance(self, x: Tensor, state: State | None, ys: list[Tensor] | None = None) -> State:
        """Return the state after the steps of ``x`` (S, B, F); add outputs to ``ys``, if given, and
        else compute none.
        """
        check_features("CausalKernels", x, self.n_in)
        with torch.no_grad():  # a step function has no gradient
            state = state or self.first_state(x)
            library = None  # if it computes these tensors
            tensors = (x, *state, self.biases)
            is_plain = all(type(t) in PLAIN and t.is_cpu for t in tensors)
            if is_plain and x.dtype in TYPES and x.numel() and not is_transformed():
                library = library_in_use()
            if library is not None:
                y = None
                if ys is not None:
                    y = x.new_empty(*x.shape[:2], 2 * len(self.biases))
                    ys.append(y)
                return self._native(library, x, state, y)
            for block in self._blocks(x):
                past, t, counts, weighted = state
                both = torch.cat([past, block])
                hits = self.hits(both).to(torch.float64)
                # of the steps, (S, B, 1), from 1
                steps = torch.arange(1, len(block) + 1, dtype=torch.float64, device=x.device)
                numbers = t.to(torch.float64) + steps[:, None, None]
                so_far = counts + hits.cumsum(0)
                late = weighted + (hits * numbers).cumsum(0)
                if ys is not None:
                    features = torch.cat([so_far / numbers, 2 * late / numbers.square()], -1)
                    ys.append(features.to(x.dtype))
                # clones, because views would keep the whole window in memory
                past = both[len(block) :].clone()
                state = past, t + len(block), so_far[-1:].clone(), late[-1:].clone()
        return state

    def _native(self, library: Library, x: Tensor, state: State, y: Tensor | None) -> State:
        """Return the state after ``x``, and write the outputs of each step into ``y``."""
        # these names keep copies alive until the kernel has read them
        x = x.contiguous()
        past = state[0].to(x.dtype).contiguous()
        counts = [s.to(torch.float64).contiguous() for s in state[1:]]
        biases = self.biases.to(x.dtype)
        t, hits, weighted = counts
        new = (
            torch.empty_like(past),
            t + len(x),
            torch.empty_like(hits),
            torch.empty_like(weighted),
        )
        numbers = (*x.shape, self.n_past, len(self.plan), len(biases))
        tensors = (self.dilations, self.channels, biases, x, past, *counts, y)
        outputs = (new[0], *new[2:])
        addresses = [0 if t is None else t.data_ptr() for t in (*tensors, *outputs)]
        head = (VERSION, TYPES[x.dtype], library.isa, n_threads())
        code = library.causal_kernels(_CALL.pack(*head, *numbers, *addresses))
        if code:
            raise kernel_error(code)
        return new

    def _blocks(self, x: Tensor) -> Sequence[Tensor]:
        """Divide a window by time so that its comparisons fit into memory."""
        if len(x) == 1:  # the number of series of a step in a file is not known
            return [x]
        most = max(1, BLOCK // (x.shape[1] * len(self.biases)))
        return [x[start : start + most] for start in range(0, len(x), most)]


class CausalKernels(Recur):
    """Random features of a series: how often the outputs of fixed causal convolutions have exceeded
    biases so far, and how late.

    Parameters
    ----------
    n_in : int
        F, number of input features. They should be standardised.
    length : int or None
        Number of steps that a typical series has, which the largest kernels span. None: the median
        length of the series in :meth:`fit_biases`; until then kernels have no gaps.
    size : int
        Approximate number of outputs: two for each bias, and the same number of biases for each of
        84 kernels.

    Attributes
    ----------
    n_out : int
        Number of outputs, 9912 by default.
    module.biases : buffer of shape (n_out / 2,)
        0 before :meth:`fit_biases`.
    module.channels : buffer of shape (32 * 84, F), uint8
        Which inputs each kernel of each dilation adds up.
    module.dilations : buffer of shape (32, 2), int64
        The dilations, and how many biases each of their kernels has; then zeros.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer, or below 1; the message names it.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. At each
    step, the first half of the outputs is the share of steps so far at which the kernel's output
    was above the bias, the second half ``2 sum(t hit) / t ** 2``: below the share if hits came
    early, above it if they came late. Inputs before the start are zeros. The layer has no
    parameters and no gradient: train a head on its outputs. :meth:`advance` moves the state on
    without the outputs.

    The kernels have nine taps, three of which weigh 2 and six -1, and up to 32 dilations; each adds
    up a random subset of the inputs, drawn from torch's generator by the constructor. Convolutions,
    counts and sums are exact or in a fixed order, so that windows, single steps and batches of any
    size give the same bits.

    Source: Dempster, Schmidt & Webb (2021), "MiniRocket: a very fast (almost) deterministic
    transform for time series classification", arXiv:2012.08791, whose convolutions are centred and
    whose pooling needs the whole series.

    Examples
    --------
    >>> x = torch.randn(3, 20, 50)  # (F, N, T)
    >>> layer = CausalKernels(3, length=50, size=500).fit_biases(x)
    >>> windows = x.permute(2, 1, 0)  # (T, N, F)
    >>> layer(windows).shape
    torch.Size([50, 20, 336])
    """

    module: _Kernels
    n_in: int
    size: int

    def __init__(self, n_in: int, length: int | None = None, size: int = 10_000) -> None:
        set_sizes(self, n_in=n_in, size=size)
        self.length = check_integer("CausalKernels: length", length, 1, optional=True)
        per_kernel = max(1, self.size // (2 * len(TRIPLES)))
        super().__init__(_Kernels(self.n_in, per_kernel))
        if self.length is not None:
            self.module.set_length(self.length)
        self.n_out = 2 * len(TRIPLES) * per_kernel

    def fit_biases(self, x: Any, lengths: Sequence[int] | None = None) -> Self:
        """Learn the biases: quantiles of each kernel's own output over training series.

        Parameters
        ----------
        x : array of shape (F, N, T)
            A tensor, NumPy array, memory map, h5py dataset, or anything else with a shape that
            takes three slices. At most 64 of its series are read, in blocks of time, and at most
            4000 of their steps are kept.
        lengths : sequence of N int, optional
            Number of steps of each series, if not T.

        Returns
        -------
        CausalKernels
            Itself.

        Raises
        ------
        ShapeError, DataError
            If ``x`` does not have shape (F, N, T) or is empty, if ``lengths`` does not fit it, or
            if a kernel's output is not finite. Nothing is changed then.
        """
        shape = tuple(x.shape)
        if len(shape) != 3 or 0 in shape or shape[0] != self.n_in:
            raise ShapeError(
                f"CausalKernels takes its biases from a non-empty array of shape ({self.n_in}, N, "
                f"T), got {shape}"
            )
        _, N, T = shape
        checked = [T] * N if lengths is None else [int(n) for n in lengths]
        if len(checked) != N or not all(1 <= n <= T for n in checked):
            raise ShapeError(
                f"lengths must be {N} integers from 1 to {T}, one for each series, got {lengths}"
            )
        before = self.module.dilations.clone()
        if self.length is None:
            self.module.set_length(int(statistics.median(checked)))
        outputs = torch.cat(list(self._chosen_outputs(x, checked)))
        if not outputs.isfinite().all():
            self.module.dilations.copy_(before)
            raise DataError(
                "CausalKernels: outputs of the kernels are not finite; x has NaN or infinity, "
                "which need a scaler or an imputer before this layer"
            )
        biases = quantiles(outputs, [n for _, n in self.module.plan])
        self.reset()  # a state of other dilations has another size
        self.module.biases.copy_(biases)
        return self

    def _chosen_outputs(self, x: Any, lengths: list[int]) -> Iterator[Tensor]:
        """Yield outputs (steps, kernels) at some steps of some series."""
        N = len(lengths)
        n_past = self.module.n_past
        chosen = [i * N // min(N, MOST_SERIES) for i in range(min(N, MOST_SERIES))]
        total = sum(lengths[i] for i in chosen)
        places = torch.arange(total)
        if total > MOST_POSITIONS:
            # places that neither follow a period of the data nor depend on a generator
            golden = torch.arange(MOST_POSITIONS, dtype=torch.float64) * GOLDEN % 1
            places = (golden * total).long().unique()
        before = 0
        for i in chosen:
            T = lengths[i]
            of_series = places[(places >= before) & (places < before + T)] - before
            before += T
            for start in range(0, T, READ):
                steps = of_series[(of_series >= start) & (of_series < start + READ)] - start
                if not len(steps):
                    continue
                first = max(0, start - n_past)
                values = torch.as_tensor(x[:, i : i + 1, first : min(T, start + READ)])
                block = values.detach().to(self.module.biases).permute(2, 1, 0)
                missing = block.new_zeros(n_past - (start - first), 1, self.n_in)
                both = torch.cat([missing, block])
                yield torch.cat([outputs[steps, 0] for outputs in self.module.convolve(both)], 1)

    def advance(self, x: Tensor) -> None:
        """Move the state on by a window (S, B, F), as a call does, without computing outputs."""
        state: Any = self.state
        if state is not None:
            self._check_batch(state, x.shape[1])
        self.state = self.module.advance(x, state)

    def extra_repr(self) -> str:
        return f"{self.n_in}, {self.length}, size={self.size}"


def quantiles(outputs: Tensor, biases_per_kernel: Sequence[int]) -> Tensor:
    """Return biases: quantiles of the outputs (steps, dilations * 84), at places that fill 0 to 1
    evenly however many are used.
    """
    # by NumPy, whose sort of floats is several times faster
    ordered = torch.from_numpy(np.sort(outputs.T.contiguous().cpu().numpy(), axis=1)).double()
    last = len(outputs) - 1
    parts = []
    number = 0
    for i, n in enumerate(biases_per_kernel):
        of_dilation = ordered[i * len(TRIPLES) : (i + 1) * len(TRIPLES)]
        places = torch.arange(number + 1, number + 1 + n * len(TRIPLES), dtype=torch.float64)
        number += n * len(TRIPLES)
        at = (places * GOLDEN % 1).view(len(TRIPLES), n) * last
        below = at.floor().long()
        low = of_dilation.gather(1, below)
        high = of_dilation.gather(1, (below + 1).clamp(max=last))
        parts.append((low + (high - low) * (at - below)).flatten())
    return torch.cat(parts).to(outputs.dtype)
