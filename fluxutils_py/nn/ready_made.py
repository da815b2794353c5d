"""Models of the ready-made estimators: networks, alone or added to a linear model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fluxutils_py.nn.closed_form_model import (
    ClosedFormModel,
    InputScale,
    closed_form_parts,
    lag_model,
)
from fluxutils_py.nn.layers import GaussianNoise
from fluxutils_py.nn.recurrent import LSTM
from fluxutils_py.nn.time_features import ExponentialMeans

MEANS = (5, 20, 80)  # spans of the exponential means that a network sees beside its inputs
SYMBOL_SIZE = 32  # of the vector of a symbol
SYMBOL_SPREAD = 3.0  # of its first numbers: letters learn faster than with 1
LARGEST = 3.0  # standard deviations, at which inputs of the network of a sum are clamped

MakeCell = Callable[..., nn.Module]


class LinearPlusNetwork(nn.Module):
    """The sum of a linear model, fitted in closed form and then held still, and of a network that
    learns what it leaves.

    Parameters
    ----------
    linear : ClosedFormModel
        It standardises the inputs for both.
    cell : callable
        ``cell(n_in, n_out, num_layers, dropout)`` makes the layers of the network, which see the
        inputs and their exponential means, within three deviations. Where the second mean of an
        input is further away, the network fades, and from four deviations on adds nothing.
    hidden_size, num_layers : int
    dropout : float
        Of the outputs of the layers.
    input_noise : float
        Deviation of the noise that is added to the inputs in training.
    means : sequence of int
        Spans of the exponential means.
    gain : float
        Factor of what the network adds.
    """

    def __init__(
        self,
        linear: ClosedFormModel,
        cell: MakeCell,
        *,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        input_noise: float = 0.0,
        means: Sequence[int] = MEANS,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        n_in = linear.scale.n_out
        n_seen = n_in * (1 + len(means))
        self.n_fixed = linear.head.out_features + 1 + n_seen
        self.means = ExponentialMeans(n_in, means) if means else None
        self.noise = GaussianNoise(input_noise)
        between = dropout if num_layers > 1 else 0.0  # the dropout after the last is its own
        self.network = cell(n_seen, hidden_size, num_layers, between)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, linear.head.out_features)
        # the first step is that of the linear model
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum for inputs, or for what :meth:`compute_fixed` makes of them."""
        is_known = x.shape[-1] == self.n_fixed  # more than inputs have
        fixed = x.nan_to_num() if is_known else self.compute_fixed(x)
        n_seen = self.n_fixed - 1 - self.head.out_features
        linear, trust, seen = fixed.split([self.head.out_features, 1, n_seen], -1)
        added: Tensor = self.head(self.dropout(self.network(self.noise(seen))))
        # in training, it learns all that the linear model leaves
        gain = 1.0 if self.training else self.gain
        return linear + gain * trust * added

    def compute_fixed(self, x: Tensor) -> Tensor:
        """Return what does not learn, side by side: the output of the linear model, how much the
        network counts, and what it sees.
        """
        scaled = self.linear.scale(x)
        seen = scaled
        level = scaled
        if self.means is not None:
            means = self.means(scaled)
            seen = torch.cat([scaled, means], -1)
            n_in = scaled.shape[-1]
            level = means[..., n_in : 2 * n_in]
        # Where a level leaves what was seen, the linear model goes on, and a network knows nothing.
        trust = (LARGEST + 1 - level.abs().amax(-1, keepdim=True)).clamp(0, 1)
        y = self.linear.of_scaled(scaled)
        return torch.cat([y, trust, seen.clamp(-LARGEST, LARGEST)], -1)


class WithIntervals(nn.Module):
    """A model that is held still, and a network that learns how far below and above its outputs
    targets lie.

    It returns the outputs of the model, then the lower and the upper ends of the first interval,
    those of the second, and so on: ``(1 + 2 * len(levels)) * n_out`` numbers. The distances of an
    interval are those of the one before and what the network adds.

    Parameters
    ----------
    n_in, n_out : int
        Of the model, whose targets are standardised.
    levels : sequence of float
        Of the intervals, in per cent, from the lowest.
    center : nn.Module
        The model. Its first :class:`InputScale`, if it has any, is for the network, too.
    """

    def __init__(
        self, n_in: int, n_out: int, *, levels: Sequence[float], center: nn.Module
    ) -> None:
        super().__init__()
        self.levels = tuple(levels)
        self.center = center
        self.n_out = n_out
        self.means = ExponentialMeans(n_in + n_out, MEANS)
        n_seen = (n_in + n_out) * (1 + len(MEANS))
        self.n_fixed = n_out + n_seen
        self.noise = GaussianNoise(0.1)
        self.network = LSTM(n_seen, 48)
        self.dropout = nn.Dropout(0.3)
        n_ends = 2 * len(levels) * n_out
        self.head = nn.Linear(48, n_ends)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, -1.0)  # distances of a third of the deviation of targets
        # from what the network adds to the distances of the ends with their signs
        of_level = torch.ones(len(levels), len(levels)).tril()
        signs = torch.eye(2 * n_out) * torch.tensor([-1.0, 1.0]).repeat_interleave(n_out)
        self.ends = nn.Linear(n_ends, n_ends).requires_grad_(False)
        self.ends.load_state_dict(
            {"weight": torch.kron(of_level, signs), "bias": torch.zeros(n_ends)}
        )

    @property
    def scale(self) -> InputScale | None:
        # not an attribute: torch would export its buffers twice
        return next((m for m in self.center.modules() if isinstance(m, InputScale)), None)

    def train(self, mode: bool = True) -> WithIntervals:
        super().train(mode)
        self.center.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs and ends for inputs, or for what :meth:`compute_fixed` makes of them."""
        is_known = x.shape[-1] == self.n_fixed  # more than inputs have
        fixed = x.nan_to_num() if is_known else self.compute_fixed(x)
        y, seen = fixed.split([self.n_out, self.n_fixed - self.n_out], -1)
        value = self.head(self.dropout(self.network(self.noise(seen))))
        added = -F.logsigmoid(-value)  # softplus, which onnxruntime lacks for float64
        distances = self.ends(added)
        n_ends = distances.shape[-1] // self.n_out
        return torch.cat([y, torch.cat([y] * n_ends, -1) + distances], -1)

    def compute_fixed(self, x: Tensor) -> Tensor:
        """Return what does not learn, side by side: the outputs, and what the network sees."""
        y = self.center(x)
        # where there is no input, its mean: what fills gaps has moved on with the model
        scaled = x if self.scale is None else self.scale.standardize(x).nan_to_num(nan=0.0)
        known = torch.cat([scaled, y], -1)
        seen = torch.cat([known, self.means(known)], -1)
        return torch.cat([y, seen.clamp(-LARGEST, LARGEST)], -1)

    @torch.no_grad()
    def set_distances(self, factor: Tensor, share: float, typical: Tensor) -> None:
        """Make distances ``factor`` times a weighted mean of what the network says and of the
        typical ones; both have shape (n_ends * n_out,), and ``share`` is the weight of the first.
        """
        signs = self.ends.weight.sum(1).sign()
        self.ends.bias.copy_(factor * (1 - share) * typical * signs)
        self.ends.weight.mul_((factor * share)[:, None])

    def own_parameters(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are not those of the model, by name."""
        states = self.state_dict()
        return {k: v for k, v in states.items() if not k.startswith("center.")}


class MeanModel(nn.Module):
    """The mean of the outputs of several models, each of which learns by itself."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


class MeanOfKernels(MeanModel):
    """The mean of models that can move on without outputs."""

    def advance(self, x: Tensor) -> None:
        for member in closed_form_parts(self):
            member.advance(x)


def plain_network(
    n_in: int,
    n_out: int,
    *,
    cell: MakeCell,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    input_noise: float = 0.0,
    scale_input: bool = False,
    n_symbols: int = 0,
    fills_gaps: bool = False,
) -> nn.Module:
    """Make recurrent layers and a linear head; in front of them vectors of ``n_symbols``."""
    before: list[nn.Module] = []
    if n_symbols:
        vectors = nn.Embedding(n_symbols, SYMBOL_SIZE)
        nn.init.normal_(vectors.weight, std=SYMBOL_SPREAD)
        before += [vectors, nn.Flatten(-2)]
        n_in = SYMBOL_SIZE
    elif scale_input:
        scale = InputScale(n_in, fills_gaps)
        before.append(scale)
        n_in = scale.n_out
    if input_noise:
        before.append(GaussianNoise(input_noise))
    layers = cell(n_in, hidden_size, num_layers, dropout)
    return nn.Sequential(*before, layers, nn.Linear(hidden_size, n_out))


def linear_plus_network(
    n_in: int,
    n_out: int,
    *,
    n_lags: int,
    has_statistics: bool,
    fills_gaps: bool = False,
    **network: object,
) -> LinearPlusNetwork:
    """Make the sum of a linear model of lags and of a network; see :class:`LinearPlusNetwork`."""
    linear = lag_model(n_in, n_out, n_lags, has_statistics, fills_gaps)
    return LinearPlusNetwork(linear, **network)  # type: ignore[arg-type]  # as its arguments


def mean_model(
    n_in: int, n_out: int, *, make: Callable[..., nn.Module], n_models: int
) -> MeanModel:
    """Make several models, with different first weights."""
    members = [make(n_in, n_out) for _ in range(n_models)]
    of_kernels = all(isinstance(member, ClosedFormModel) for member in members)
    return MeanOfKernels(members) if of_kernels else MeanModel(members)
