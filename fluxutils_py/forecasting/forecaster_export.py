"""Export forecasters, as one step in torch: values in, forecasts in the series' units out; and
compare the files with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.export_files import (
    ExportedModel,
    Path,
    largest_difference,
    write_graph,
)
from fluxutils_py.exporting.graph import Graph
from fluxutils_py.exporting.steps import InitialState, ModelStep
from fluxutils_py.forecasting.channels import Covariate
from fluxutils_py.forecasting.features import LARGEST, SEASONS_BACK, Past
from fluxutils_py.forecasting.fitted_state import FittedState, forecasts_along
from fluxutils_py.forecasting.networks import Ensemble
from fluxutils_py.forecasting.panel_windows import PanelWindows
from fluxutils_py.frames.panel import Panel
from fluxutils_py.parallel import get_communicator

N_COMPARED = 24  # steps at which forecasts are compared


class ForecastStep(nn.Module):
    """Features, networks and inverse of one step: ``step(*inputs, *states)`` returns ``(*forecasts,
    *next_states)``.

    Inputs are the value of each series, ``(B, 1)``, and, where the forecaster has them, its
    covariates: past, static, and known ahead, numbers before codes of categories in each. The last
    are ``(B, n * (1 + h))``: each at this step and at the next ``h``. NaN is a missing value.

    Parameters
    ----------
    fitted : FittedState
        Trained, on the processor.

    Attributes
    ----------
    inputs : dict of str to int
        Names and numbers of features of the inputs.
    initial : tuple of InitialState
        The tensors that a step keeps of the steps before it: "values" (2, B, K), the last ones, as
        they came and with missing ones filled in; "age" (B,), steps since the last value that was
        not filled in from it, NaN before the first; "past" (B, n), the last past covariates;
        "known" (B, n, season), each covariate known ahead at the last season's steps. Then the
        states of the networks.
    n_outputs : int
        The point forecast and each quantile, ``(B, h)``.

    Notes
    -----
    The formulas are those of :class:`Features`, on the values that the state holds.
    """

    def __init__(self, fitted: FittedState) -> None:
        super().__init__()
        self.features = features = fitted.features
        self.channels = channels = fitted.channels
        self.correction = fitted.correction
        self.quantiles = fitted.quantiles
        self.n_models = len(fitted.models)
        self.n_outputs = len(fitted.names)
        self.inputs = {"y": 1}
        # enough for every feature, and for the seasons from which a missing value is filled in
        self.n_kept = max(features.reach, SEASONS_BACK * features.season) + 1
        self.kept: dict[str, tuple[int, ...]] = {"values": (2, 1, self.n_kept), "age": (1,)}
        for name, group in channels.groups.items():
            if not group:
                continue  # a graph has no inputs of size 0
            # those known ahead have a value now, and one at each of the next steps
            times = 1 + channels.h if name == "known" else 1
            for part in ("mean", "scale"):
                values = torch.tensor([getattr(c, part) for c in group], dtype=torch.float64)
                self.register_buffer(f"{part}_{name}", values.repeat_interleave(times))
            self.inputs[name] = len(group) * times
            if name == "past":
                self.kept[name] = (1, len(group))
            if name == "known":
                self.kept[name] = (1, len(group), features.season)
        self.dtype = next(fitted.models[0].parameters()).dtype
        self.network = self._network_step(fitted.models)
        # before the first step nothing is known
        states = [
            InitialState(
                torch.full(shape, torch.nan, dtype=torch.float64),
                batch_axis=1 if name == "values" else 0,
            )
            for name, shape in self.kept.items()
        ]
        self.initial = (*states, *self.network.initial)

    def _network_step(self, models: Sequence[nn.Module]) -> ModelStep:
        networks = iter(models)
        ensemble = Ensemble(lambda: next(networks), len(models))
        # a separate generator: an export must not change the user's random numbers
        generator = torch.Generator().manual_seed(0)
        n_channels = self.channels.total
        example = torch.randn(4, 2, n_channels, generator=generator)
        example = example.to(self.dtype)
        return ModelStep(ensemble, [example])

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        first_state = len(self.inputs)
        first_network = first_state + len(self.kept)
        xs = self._scaled_inputs(tensors[:first_state])
        kept = dict(zip(self.kept, tensors[first_state:first_network], strict=True))
        kept = self._next_kept(kept, xs)
        z, filled = kept["values"].unbind()
        past = StepPast(z, filled, 1)
        self.features.describe(past)
        inputs = self._network_inputs(past, xs, kept)
        out, *next_states = self.network(inputs, *tensors[first_network:])
        forecasts = self._forecasts(past, out)
        return (*forecasts.unbind(-2), *kept.values(), *next_states)

    def _scaled_inputs(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the inputs by name, with those known ahead as (B, n, 1 + h)."""
        xs = dict(zip(self.inputs, tensors, strict=True))
        # all but y, in order: a graph is traced
        for name in [*xs][1:]:
            mean = getattr(self, f"mean_{name}")
            scale = getattr(self, f"scale_{name}")
            xs[name] = (xs[name] - mean) / scale
        if "known" in xs:
            xs["known"] = xs["known"].unflatten(-1, (len(self.channels.futr), 1 + self.channels.h))
        return xs

    def _next_kept(self, kept: dict[str, Tensor], xs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is kept with the values and covariates of this step."""
        later = {}
        if "past" in kept:
            given = xs["past"]
            later["past"] = torch.where(given.isnan(), kept["past"], given)
        if "known" in kept:
            current = xs["known"][..., :1]
            last = kept["known"][..., -1:]
            current = torch.where(current.isnan(), last, current)
            later["known"] = torch.cat([kept["known"][..., 1:], current], -1)
        new = xs["y"]  # (B, 1)
        if self.features.log:
            new = new.log()
        filled, age = self._filled_in(kept["values"], kept["age"], new)
        both = torch.stack([new, filled])
        values = torch.cat([kept["values"].narrow(2, 1, self.n_kept - 1), both], -1)
        return {"values": values, "age": age, **later}

    def _filled_in(self, values: Tensor, age: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a value (B, 1), filled in where it is missing, and the next ``age``.

        The rule is that of ``Features.past``: from the last seasons, else from the last value.
        """
        # a value that was filled in counts for the last value only, as in training
        given, filled_in = values.unbind()
        filled = value
        for back in range(1, SEASONS_BACK + 1):
            at = self.n_kept - back * self.features.season
            earlier = given.narrow(1, at, 1)
            filled = torch.where(filled.isnan(), earlier, filled)
        missing = filled.isnan()
        older = age + 1
        is_older = missing.squeeze(1)
        age = torch.where(is_older, older, 0.0)
        # the age is NaN before the first value, and then nothing is near
        near = age <= self.features.memory
        last = filled_in.narrow(1, -1, 1)
        near = near.unsqueeze(1)
        last = torch.where(near, last, torch.nan)
        return torch.where(missing, last, filled), age

    def _network_inputs(
        self, past: StepPast, xs: dict[str, Tensor], kept: dict[str, Tensor]
    ) -> Tensor:
        """Return the channels of the networks in the order of :class:`Channels`: (B, channels)."""
        columns = list(self.features.input_columns(past))
        features = torch.cat(columns, -1)
        features = features.clamp(-LARGEST, LARGEST)
        known = past.known[:, :, None]
        unknown = ~known | features.isnan()
        features = torch.where(unknown, 0.0, features)
        parts = [features.squeeze(1)]
        current: list[Tensor] = []
        if "past" in kept:
            current += kept["past"].unbind(-1)
        if "static" in xs:
            current += xs["static"].unbind(-1)
        if "known" in kept:
            current += kept["known"][..., -1].unbind(-1)
        if current:
            covariates = torch.stack(self.channels.in_order(current), -1)
            parts.append(covariates.nan_to_num())
        if "known" in kept:
            # of the values that the seasonal naive forecast repeats, the last one is the current
            offsets = self.features.season - 1 + self.features.counterparts()
            before = kept["known"][..., torch.from_numpy(offsets)]
            ahead = torch.cat([xs["known"][..., 1:], before], -1)
            parts.append(ahead.flatten(-2).nan_to_num())
        # the scale, which only the loss in training reads
        parts.append(torch.zeros_like(past.level))
        return torch.cat(parts, -1).to(self.dtype)

    def _forecasts(self, past: StepPast, out: Tensor) -> Tensor:
        """Return the forecasts (B, outputs, h) in the units of the series; NaN where no value is
        known.
        """
        out = out.double()
        by_model = out.unflatten(-1, (self.n_models, -1))
        mean = by_model.mean(-2)
        mean = mean.unflatten(-1, (self.n_outputs, -1))
        return self.features.denormalised(mean, past, self.quantiles, self.correction)


class StepPast(Past):
    """Past of one step in torch: S is 1."""

    xp = torch

    def recent(self, n: int) -> Tensor:
        return self._last(self.filled, n).unsqueeze(1)

    def at(self, offsets: np.ndarray) -> Tensor:
        # index_select: a graph keeps it as one operation
        positions = torch.from_numpy(self.filled.shape[1] - 1 + offsets)
        return self.filled.index_select(1, positions).unsqueeze(1)

    def back(self, n: int) -> Tensor:
        return self._last(self.filled, 1, n)

    def mean(self, n: int, back: int = 0) -> Tensor:
        return self._mean_of_all(self._last(self.filled, n, back))

    def mean_of(self, values: Tensor, n: int) -> Tensor:
        return self._mean_of_all(self._last(values, n))

    def _last(self, values: Tensor, n: int, back: int = 0) -> Tensor:
        """Return ``n`` columns, or fewer, up to ``back`` columns before the last one."""
        stop = max(0, values.shape[1] - back)
        # narrow: slices with negative bounds would wrap around
        start = max(0, stop - n)
        return values.narrow(1, start, stop - start)

    def _mean_of_all(self, part: Tensor) -> Tensor:
        known = ~part.isnan()
        total = torch.where(known, part, 0.0).sum(-1, keepdim=True)
        return total / known.sum(-1, keepdim=True)

    def any_missing(self, values: Tensor) -> bool:
        return True  # a traced graph has one way through, for all values


def export_forecaster(
    fitted: FittedState,
    path: Path,
    format: str,
    class_name: str,
    comm: object,
) -> None:
    """Implement ``Forecaster.export``; ``class_name`` is that of the forecaster."""
    step = ForecastStep(fitted)
    # of one series: only their sizes and types matter
    inputs = [torch.ones(n, dtype=torch.float64) for n in step.inputs.values()]
    covariates = {
        name: [
            {"name": c.name, "categories": c.categories and [*map(str, c.categories)]}
            for c in group
        ]
        for name, group in fitted.channels.groups.items()
    }
    metadata = {
        "h": fitted.h,
        "season": fitted.features.season,
        "covariates": covariates,
        "estimator": class_name,
    }
    # the step is built on every rank: what cannot be exported is an error on all of them
    if get_communicator(comm).rank == 0:
        graph = Graph(inputs, steps=[step])
        write_graph(path, graph, format, list(step.inputs), fitted.names, metadata)


def check_forecaster_export(
    fitted: FittedState,
    path: Path,
    panel: Panel,
    tolerance: float,
) -> float:
    """Compare an exported file with its forecaster on some series; see ``check_export``.

    All steps go through the file, in windows of different lengths; the forecasts are compared at up
    to N_COMPARED steps of each series, its last one among them. Covariates known ahead count as
    missing after the end of a series.
    """
    windows = fitted.windows(panel)
    lengths = windows.source.lengths
    last = lengths[:, None] - 1
    origins = np.linspace(0, 1, N_COMPARED) * last
    # short series have fewer steps than are compared
    origins = np.unique(origins.astype(int), axis=1)
    file = ExportedModel(path, windows.n_series)
    inputs = _file_inputs(windows, int(lengths.max()))
    outputs = np.concatenate(file.run_series(*inputs), axis=-1)  # (T, N, outputs * h)
    want = np.stack(list(forecasts_along(fitted, windows, origins)))  # (W, N, outputs, h)
    got = outputs[origins.T, np.arange(len(lengths))].reshape(want.shape)
    # relative to the largest of each series: a value near 0 has few exact digits
    largest = np.nanmax(np.abs(want), axis=(2, 3), initial=1.0)[:, :, None, None]
    worst, (at, n, i, k) = largest_difference(got, want, largest)
    if worst > tolerance:
        raise ExportError(
            f"{path}: {fitted.names[i]} of series {panel.ids[n]!r} is {got[at, n, i, k]:.7g} "
            f"{k + 1} steps after step {origins[n, at]}, but the forecaster gives "
            f"{want[at, n, i, k]:.7g}: a relative difference of {worst:.1e}, above {tolerance:.1e}"
        )
    return worst


def _file_inputs(windows: PanelWindows, n_steps: int) -> list[np.ndarray]:
    """Return the inputs of an exported file in its units: (T, N, features) each."""
    channels = windows.channels
    series = np.arange(windows.n_series)
    first = np.zeros(len(series), int)
    y, *past = windows.source.cut(series, first, n_steps)
    inputs = [y.T[:, :, None]]
    if past:
        inputs.append(_unscaled(channels.hist, np.stack(past)).transpose(2, 1, 0))
    if channels.stat:
        # static covariates are inputs of every step of the file
        static = _unscaled(channels.stat, windows.static.T[:, :, None])
        inputs.append(np.repeat(static.transpose(2, 1, 0), n_steps, 0))
    if windows.ahead is not None:
        known = windows.ahead.cut(series, first, n_steps + channels.h)
        known = _unscaled(channels.futr, known)
        steps = sliding_window_view(known, 1 + channels.h, axis=2)  # (C, N, T, 1 + h)
        inputs.append(steps.transpose(2, 1, 0, 3).reshape(n_steps, len(series), -1))
    return inputs


def _unscaled(covariates: tuple[Covariate, ...], channels: np.ndarray) -> np.ndarray:
    """Return channels (C, N, T) as they were before the covariates scaled them."""
    scale = np.array([c.scale for c in covariates])
    mean = np.array([c.mean for c in covariates])
    return channels * scale[:, None, None] + mean[:, None, None]
