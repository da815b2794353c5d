"""A model of fixed features and a linear head, which is fitted in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fluxutils_py.nn.causal_kernels import CausalKernels
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.time_features import (
    ExponentialMeans,
    Lags,
    LastValues,
    RollingStatistics,
    RunningStatistics,
)

FixedLayer = CausalKernels | ExponentialMeans | Lags | RollingStatistics | RunningStatistics

MOST_VALUES = 1 << 21  # of features that are held at once
N_LAGS = 24
SPANS = (4, 16, 64)  # of the exponential means beside the kernels
STATISTICS = (5, 20, 80)  # spans of the statistics beside the lags
# of the variance of all features, relative to that of the kernels' features
SHARE_OF_STATISTICS = 0.3


class InputScale(nn.Module):
    """Standardise inputs with buffers ``mean`` and ``scale``, (F,), float64; NaN becomes 0.

    If it ``fills_gaps``, NaN becomes the last value, and there are F more outputs that mark it.
    """

    mean: Tensor
    scale: Tensor
    takes_gaps = True  # steps without input as NaN

    def __init__(self, n_in: int, fills_gaps: bool = False) -> None:
        super().__init__()
        self.fills_gaps = fills_gaps
        self.n_out = 2 * n_in if fills_gaps else n_in
        self.fill = Recur(LastValues(n_in)) if fills_gaps else None
        self.register_buffer("mean", torch.zeros(n_in, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(n_in, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.standardize(x)
        return y.nan_to_num(nan=0.0) if self.fill is None else self.fill(y)

    def standardize(self, x: Tensor) -> Tensor:
        """Return standardised inputs, in which NaN stays."""
        # in float64, so that a high level costs no digits
        y = (x.double() - self.mean.double()) / self.scale.double()
        return y.to(_floating_type(x))


def _floating_type(x: Tensor) -> torch.dtype:
    """Return the type of standardised inputs."""
    return x.dtype if x.is_floating_point() else torch.float32


class ClosedFormModel(nn.Module):
    """Fixed layers side by side on standardised inputs, and a linear head on their outputs.

    Parameters
    ----------
    n_in, n_out : int
        Features of the input, outputs of the head.
    layers : iterable of layers without parameters
        Each takes the standardised inputs.
    relative : sequence of (sequence of float or Tensor), optional
        For each layer, the factor of its standardised features before the penalty of the head
        applies: a number, or one for each feature. Several such sequences are alternatives, from
        the simplest to the richest, among which the fit chooses. By default, all are 1.
    fills_gaps : bool
        See :class:`InputScale`. Layers see the values; marks of the present step are features
        themselves. Of earlier steps they are rare, and harm: a fit to air quality was 10 % worse.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    features of a window are computed in blocks of time, and never held all at once.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        layers: Iterable[FixedLayer],
        relative: Sequence[Sequence[float | Tensor]] | None = None,
        fills_gaps: bool = False,
    ) -> None:
        super().__init__()
        self.scale = InputScale(n_in, fills_gaps)
        layers = list(layers)
        self.layers = nn.ModuleList(layers)
        sizes = [layer.n_out for layer in layers]
        relative = relative or [[1.0] * len(sizes)]
        if fills_gaps:
            sizes.append(n_in)
            relative = [[*each, 1.0] for each in relative]
        self.n_features = sum(sizes)
        self.head = nn.Linear(self.n_features, n_out)
        self.relative = [
            torch.cat(
                [
                    torch.as_tensor(factor, dtype=torch.float64).expand(size)
                    for factor, size in zip(each, sizes, strict=True)
                ]
            )
            for each in relative
        ]

    @property
    def is_of_whole_series(self) -> bool:
        """Whether it has so many features that they are for ends of series, not for every step."""
        return any(isinstance(layer, CausalKernels) for layer in self.layers)

    def features(self, x: Tensor) -> Tensor:
        """Return the features of a step (B, P) or a window (S, B, P), and move the state on."""
        return self._features_of_scaled(self.scale(x))

    def _features_of_scaled(self, x: Tensor) -> Tensor:
        values, marks = self._parted(x)
        return torch.cat([*(layer(values) for layer in self.layers), *marks], -1)

    def _parted(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return standardised inputs as values and, where gaps are filled, their marks."""
        values, *marks = x.tensor_split(1 + self.scale.fills_gaps, -1)
        return values, tuple(marks)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_scaled(self.scale(x))

    def of_scaled(self, x: Tensor) -> Tensor:
        """Return the outputs for standardised inputs."""
        y: Tensor
        if x.dim() == 2 or len(x) == 1:
            y = self.head(self._features_of_scaled(x))
            return y
        most = max(1, MOST_VALUES // (x.shape[1] * self.n_features))
        starts = range(0, len(x), most)
        return torch.cat([self.head(self._features_of_scaled(x[i : i + most])) for i in starts])

    def advance(self, x: Tensor) -> None:
        """Move the state on by a window (S, B, F) whose outputs nobody needs."""
        values, _ = self._parted(self.scale(x))
        for layer in self.layers:
            if isinstance(layer, CausalKernels):
                layer.advance(values)
            else:
                layer(values)


def kernel_model(n_in: int, n_out: int, size: int = 10_000) -> ClosedFormModel:
    """Make causal kernels with about ``size`` features, and beside them statistics of the
    whole past.
    """
    kernels = CausalKernels(n_in, None, size)
    statistics = RunningStatistics(n_in)
    means = ExponentialMeans(n_in, SPANS)
    n_others = statistics.n_out + means.n_out
    others = math.sqrt(SHARE_OF_STATISTICS * kernels.n_out / n_others)
    return ClosedFormModel(n_in, n_out, [kernels, statistics, means], [[1.0, others, others]])


def lag_model(
    n_in: int,
    n_out: int,
    n_lags: int = N_LAGS,
    has_statistics: bool = False,
    fills_gaps: bool = False,
) -> ClosedFormModel:
    """Make a linear model of the last ``n_lags`` steps, which trusts a step the less the longer it
    is ago.

    With ``has_statistics``, it may also use exponential means, and means, deviations and slopes of
    the last steps.
    """
    lags = Lags(n_in, range(n_lags))
    ages = torch.arange(n_lags, dtype=torch.float64).repeat_interleave(n_in)
    trust = (1 + ages).rsqrt()
    if not has_statistics:
        return ClosedFormModel(n_in, n_out, [lags], [[trust]], fills_gaps)
    layers: list[FixedLayer] = [
        lags,
        ExponentialMeans(n_in, STATISTICS),
        RollingStatistics(n_in, STATISTICS),
    ]
    relative: list[list[float | Tensor]] = [[trust, 0.0, 0.0], [trust, 1.0, 1.0]]
    return ClosedFormModel(n_in, n_out, layers, relative, fills_gaps)


def series_features(model: ClosedFormModel, xs: Tensor, ends: Tensor) -> Tensor:
    """Return the features (n, P) at single steps of a window (S, B, F), and move the state on.

    ``ends`` are n pairs of step and series, (n, 2); what lies between the steps is not computed.
    """
    features = xs.new_empty(len(ends), model.n_features, dtype=_floating_type(xs))
    start = 0
    for step in ends[:, 0].unique().tolist():
        if step > start:
            model.advance(xs[start:step])
        at_step = model.features(xs[step])
        chosen = ends[:, 0] == step
        features[chosen] = at_step[ends[chosen, 1]]
        start = step + 1
    if start < len(xs):
        model.advance(xs[start:])
    return features


def closed_form_parts(model: nn.Module) -> Iterator[ClosedFormModel]:
    """Yield the parts of a model that are fitted in closed form."""
    for module in model.modules():
        if isinstance(module, ClosedFormModel):
            yield module


def is_closed_form(model: nn.Module) -> bool:
    """Return whether all that a model learns is fitted in closed form."""
    parts = getattr(model, "members", [model])
    return all(isinstance(part, ClosedFormModel) for part in parts)
