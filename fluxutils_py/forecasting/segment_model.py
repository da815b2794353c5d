"""Forecast all steps of the horizon from segments of the past, each series by itself.

The last values are cut into segments of a season, which are the steps of a recurrent layer; its
state is the start of as many steps, all at once, one for each segment of the horizon.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from fluxutils_py.forecasting.direct_model import with_levels
from fluxutils_py.forecasting.features import Features
from fluxutils_py.nn.cells import gru_step
from fluxutils_py.nn.kernels.modules import run_module

SHORTEST, LONGEST = 12, 48  # steps per segment
MOST_SEGMENTS = 14  # of the past: two weeks of days
LEAST_SEGMENTS = 4


class SegmentSizes(NamedTuple):
    """Sizes of the segments of a :class:`SegmentModel`.

    Attributes
    ----------
    length : int
        Steps per segment.
    n_past : int
        Number of segments of the past.
    """

    length: int
    n_past: int

    @classmethod
    def of(cls, season: int, n_steps: int, h: int) -> SegmentSizes:
        """Return the sizes for series of about ``n_steps``, half of which are inputs at most."""
        length = segment_length(season)
        n_past = min(MOST_SEGMENTS, (n_steps - h) // (2 * length))
        # the inputs hold the season that the seasonal naive forecast repeats
        return cls(length, max(n_past, -(-season // length)))

    @property
    def input_size(self) -> int:
        """Number of last values that are inputs."""
        return self.length * self.n_past


def segment_length(season: int) -> int:
    """Return the season, or a multiple or the largest divisor of it of SHORTEST to LONGEST steps.

    Examples
    --------
    >>> [segment_length(season) for season in (1, 7, 12, 24, 96, 53)]
    [12, 14, 12, 24, 48, 24]
    """
    if season <= LONGEST:
        return season * -(-SHORTEST // season)
    divisors = [n for n in range(SHORTEST, LONGEST + 1) if season % n == 0]
    return max(divisors, default=24)


class SegmentModel(nn.Module):
    """Network that forecasts the next ``h`` steps and their quantiles from the last values alone.

    It has no state: each step's forecasts depend on its inputs, which hold all values that it
    reads.

    Parameters
    ----------
    features : Features
        Their ``input_size`` is a multiple of ``segment``.
    segment : int
        Steps per segment.
    quantiles : tuple of float
        In increasing order.
    hidden_size : int
    dropout : float
        Dropout of the recurrent layer's outputs.

    Notes
    -----
    Inputs and outputs are those of :class:`DirectModel`, of which it reads the last values only.
    Each series is normalised by its last value and its scale; a linear layer from the inputs is
    added. Lin et al. (2023), SegRNN, arXiv:2308.11200; Zeng et al. (2023), Are transformers
    effective for time series forecasting?, AAAI 37(9), 11121-11128.
    """

    counterparts: Tensor
    learnt: Tensor

    def __init__(
        self,
        features: Features,
        segment: int,
        quantiles: tuple[float, ...] = (),
        hidden_size: int = 96,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.h = features.h
        self.n_values = features.input_size
        self.segment = segment
        self.n_quantiles = len(quantiles)
        n_ahead = -(-self.h // segment)
        self.embedding = nn.Linear(segment, hidden_size)
        self.recurrent = nn.GRU(hidden_size, hidden_size)
        # what tells the segments of the horizon apart
        self.places = nn.Parameter(0.1 * torch.randn(n_ahead, hidden_size))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, segment * (1 + self.n_quantiles))
        self.skip = nn.Linear(self.n_values, self.h)
        # the network begins as one without the bypass
        nn.init.zeros_(self.skip.weight)
        nn.init.zeros_(self.skip.bias)
        if self.n_quantiles:
            with torch.no_grad():
                # the lowest one begins below the point forecast
                self.head.bias[segment : 2 * segment] = -1.0
        at = torch.from_numpy(self.n_values - 1 + features.counterparts())
        self.register_buffer("counterparts", at, persistent=False)
        self.register_buffer("learnt", torch.ones(self.h))

    def forget_steps(self, first: int) -> None:
        """Make the point forecasts from step ``first`` of the horizon the seasonal naive ones."""
        self.learnt[first:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        values = x[..., : self.n_values]
        rows = values.reshape(-1, self.n_values)
        centred = rows - rows[:, -1:]
        ahead = self.dropout(self._segments_ahead(centred))  # (segments, B, hidden)
        out = self.head(ahead)
        out = out.unflatten(-1, (1 + self.n_quantiles, self.segment))
        out = out.permute(1, 2, 0, 3).flatten(2)
        out = out[..., : self.h]  # (B, 1 + quantiles, h)
        naive = centred.index_select(1, self.counterparts)
        point = self.learnt * (out[:, 0] + self.skip(centred) - naive)
        if self.n_quantiles:
            point = with_levels(point, out[:, 1], softplus(out[:, 2:]).unbind(1))
        return point.reshape(*values.shape[:-1], -1)

    def _segments_ahead(self, centred: Tensor) -> Tensor:
        """Return a vector for each segment of the horizon: (segments, B, hidden)."""
        n_series = centred.shape[0]  # a graph is of any number, and len would fix it
        segments = centred.unflatten(1, (-1, self.segment)).transpose(0, 1)
        inputs = torch.relu(self.embedding(segments))
        last = self._run_recurrent(inputs, None)[-1]
        n_ahead = len(self.places)
        # one step from the same state for each segment, as of so many series
        places = self.places.repeat_interleave(n_series, 0)
        state = last.repeat(n_ahead, 1)
        after = self._run_recurrent(places[None], state[None])
        return after[0].unflatten(0, (n_ahead, n_series))

    def _run_recurrent(self, x: Tensor, state: Tensor | None) -> Tensor:
        if torch.compiler.is_exporting():
            return self._run_by_formula(x, state)
        by_kernel = run_module(self.recurrent, x, state)
        y, _ = self.recurrent(x, state) if by_kernel is None else by_kernel
        return y

    def _run_by_formula(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Do the same step by step: an exported graph has no layer for any number of series."""
        w_x, w_h, b_x, b_h = self.recurrent.all_weights[0]
        h = x.new_zeros(x.shape[1], self.recurrent.hidden_size) if state is None else state[0]
        outputs = []
        for of_x in linear(x, w_x, b_x).unbind(0):
            h = gru_step(of_x, linear(h, w_h, b_h), h)
            outputs.append(h)
        return torch.stack(outputs)
