"""Compute one step of a forecaster in torch: values in, forecasts in the series' units out."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.exporting import InitialState, ModelStep
from fluxutils_py.forecasting.covariates import Covariate, Covariates
from fluxutils_py.forecasting.direct_model import Ensemble
from fluxutils_py.forecasting.features import LARGEST, SEASONS_BACK, Features, Past
from fluxutils_py.forecasting.panel_windows import Channels


class StepState(NamedTuple):
    """What a step keeps of the steps before it, besides the states of the networks.

    Attributes
    ----------
    values : Tensor of shape (2, B, K)
        The last values, as they came and with missing ones filled in.
    age : Tensor of shape (B,)
        Steps since the last value that was not filled in from it; NaN before the first.
    past : Tensor of shape (B, n), optional
        The last past covariates.
    known : Tensor of shape (B, n, season), optional
        Each covariate known ahead at the last season's steps.
    """

    values: Tensor
    age: Tensor
    past: Tensor | None = None
    known: Tensor | None = None

    def present(self) -> tuple[Tensor, ...]:
        """Return the tensors that the forecaster has."""
        return tuple(tensor for tensor in self if tensor is not None)


class CovariateInputs(NamedTuple):
    """Covariates of one step as channels of the networks: at this step, and at the next ones."""

    current: list[Tensor]
    ahead: list[Tensor]


class ForecastStep(nn.Module):
    """Features, networks and inverse of one step: ``step(*inputs, *states)`` returns ``(*forecasts,
    *next_states)``.

    Inputs are the value of each series, ``(B, 1)``, and, where the forecaster has them, its
    covariates: past, static, and known ahead, numbers before codes of categories in each. The last
    are ``(B, n * (1 + h))``: each at this step and at the next ``h``. NaN is a missing value.

    Parameters
    ----------
    models : sequence of nn.Module
    features : Features
    channels : Channels
    covariates : Covariates
        Their means and scales.
    n_quantiles : int

    Attributes
    ----------
    inputs : dict of str to int
        Names and numbers of features of the inputs.
    initial : tuple of InitialState
        The tensors of a :class:`StepState`, then the states of the networks.
    n_outputs : int
        The point forecast and each quantile, ``(B, h)``.

    Notes
    -----
    The formulas are those of :class:`Features`, on the values that the state holds.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        features: Features,
        channels: Channels,
        covariates: Covariates,
        n_quantiles: int,
    ) -> None:
        super().__init__()
        self.features = features
        self.channels = channels
        self.n_models = len(models)
        self.n_outputs = 1 + n_quantiles
        sizes = {
            "past": channels.n_past,
            "static": channels.n_static,
            "known": channels.n_ahead * (1 + channels.h),
        }
        self.inputs = {"y": 1, **{name: n for name, n in sizes.items() if n}}
        self._register_scales("past", covariates.hist)
        self._register_scales("static", covariates.stat)
        self._register_scales("known", covariates.futr, times=1 + channels.h)
        self.dtype = next(models[0].parameters()).dtype
        self.network = self._network_step(models)
        # enough for every feature, and for the seasons from which a missing value is filled in
        self.n_kept = max(features.reach, SEASONS_BACK * features.season) + 1
        states = self._initial_states()
        self.n_states = len(states)
        self.initial = (*states, *self.network.initial)

    def _register_scales(self, name: str, group: tuple[Covariate, ...], times: int = 1) -> None:
        means = [covariate.mean for covariate in group]
        scales = [covariate.scale for covariate in group]
        self.register_buffer(f"mean_{name}", _repeat_values(means, times))
        self.register_buffer(f"scale_{name}", _repeat_values(scales, times))

    def _network_step(self, models: Sequence[nn.Module]) -> ModelStep:
        networks = iter(models)
        ensemble = Ensemble(lambda: next(networks), len(models))
        # a separate generator: an export must not change the user's random numbers
        generator = torch.Generator().manual_seed(0)
        example = torch.randn(4, 2, self.channels.total, generator=generator)
        return ModelStep(ensemble, [example.to(self.dtype)])

    def _initial_states(self) -> list[InitialState]:
        """Return the tensors of a :class:`StepState` before the first step: nothing is known."""

        def missing(*shape: int) -> Tensor:
            return torch.full(shape, torch.nan, dtype=torch.float64)

        channels = self.channels
        states = [InitialState(missing(2, 1, self.n_kept), 1), InitialState(missing(1), 0)]
        if channels.n_past:
            states.append(InitialState(missing(1, channels.n_past), 0))
        if channels.n_ahead:
            states.append(InitialState(missing(1, channels.n_ahead, self.features.season), 0))
        return states

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n_inputs = len(self.inputs)
        xs = self._scaled_inputs(tensors[:n_inputs])
        state = self._named_state(tensors[n_inputs : n_inputs + self.n_states])
        network_states = tensors[n_inputs + self.n_states :]
        state = self._next_state(state, xs)
        z, filled = state.values.unbind()
        past = self.features.statistics(StepPast(z, filled))
        inputs = self._network_inputs(past, self._covariate_inputs(xs, state))
        out, *next_states = self.network(inputs, *network_states)
        return (*self._forecasts(past, out).unbind(-2), *state.present(), *next_states)

    def _scaled_inputs(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        xs = dict(zip(self.inputs, tensors, strict=True))
        for name in [*xs][1:]:  # all but y, in order: a graph is traced
            xs[name] = (xs[name] - getattr(self, f"mean_{name}")) / getattr(self, f"scale_{name}")
        return xs

    def _named_state(self, tensors: Sequence[Tensor]) -> StepState:
        values, age, *others = tensors
        past = others.pop(0) if self.channels.n_past else None
        known = others.pop(0) if self.channels.n_ahead else None
        return StepState(values, age, past, known)

    def _next_state(self, state: StepState, xs: dict[str, Tensor]) -> StepState:
        """Return the state with the values and covariates of this step."""
        values, age = self._append_value(state, xs["y"])
        past = state.past
        if past is not None:
            past = torch.where(xs["past"].isnan(), past, xs["past"])
        known = state.known
        if known is not None:
            current = self._unflattened_known(xs)[..., :1]
            current = torch.where(current.isnan(), known[..., -1:], current)
            known = torch.cat([known[..., 1:], current], -1)
        return StepState(values, age, past, known)

    def _append_value(self, state: StepState, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and age of the state after one more value, filled in if it is missing.

        The rule is that of ``Features.past``: from the last seasons, else from the last value.
        """
        new = y.log() if self.features.log else y  # (B, 1)
        given, filled_in = state.values.unbind()
        filled = new
        for back in range(1, SEASONS_BACK + 1):
            at = self.n_kept - back * self.features.season
            filled = torch.where(filled.isnan(), given.narrow(1, at, 1), filled)
        missing = filled.isnan()
        age = torch.where(missing.squeeze(1), state.age + 1, 0.0)
        near = (age <= self.features.memory).unsqueeze(1)
        last = torch.where(near, filled_in.narrow(1, -1, 1), torch.nan)
        filled = torch.where(missing, last, filled)
        earlier = state.values.narrow(2, 1, self.n_kept - 1)
        return torch.cat([earlier, torch.stack([new, filled])], -1), age

    def _unflattened_known(self, xs: dict[str, Tensor]) -> Tensor:
        """Return the covariates known ahead, at this step and at the next h: (B, n, 1 + h)."""
        return xs["known"].unflatten(-1, (self.channels.n_ahead, 1 + self.channels.h))

    def _covariate_inputs(self, xs: dict[str, Tensor], state: StepState) -> CovariateInputs:
        current: list[Tensor] = []
        ahead: list[Tensor] = []
        if state.past is not None:
            current += state.past.unbind(-1)
        if "static" in xs:
            current += xs["static"].unbind(-1)
        if state.known is not None:
            current += state.known[..., -1].unbind(-1)
            # of the values that the seasonal naive forecast repeats, the last one is the current
            offsets = self.features.season - 1 + self.features.counterparts()
            before = state.known[..., torch.from_numpy(offsets)]
            later = self._unflattened_known(xs)[..., 1:]
            ahead.append(torch.cat([later, before], -1).flatten(-2))
        return CovariateInputs(current, ahead)

    def _network_inputs(self, past: Past[Tensor], covariates: CovariateInputs) -> Tensor:
        """Return the channels of the networks in the order of :class:`Channels`: (B, channels)."""
        features = torch.cat(list(self.features.input_columns(past)), -1)
        features = features.clamp(-LARGEST, LARGEST)
        features = torch.where(features.isnan() | ~past.known[:, :, None], 0.0, features)
        parts = [features.squeeze(1)]
        if covariates.current:
            ordered = self.channels.in_order(covariates.current)
            parts.append(torch.stack(ordered, -1).nan_to_num())
        parts += [channels.nan_to_num() for channels in covariates.ahead]
        # base and scale, which only the loss in training reads
        n_unused = self.channels.h * self.channels.base + 1
        parts.append(torch.zeros_like(past.level).expand(-1, n_unused))
        return torch.cat(parts, -1).to(self.dtype)

    def _forecasts(self, past: Past[Tensor], out: Tensor) -> Tensor:
        """Return the forecasts (B, outputs, h) in the units of the series; NaN where no value is
        known.
        """
        mean = out.double().unflatten(-1, (self.n_models, -1)).mean(-2)
        z = past.naive + past.scale[:, :, None] * mean.unflatten(-1, (self.n_outputs, -1))
        y = z.exp() if self.features.log else z
        return torch.where(past.known[:, :, None], y, torch.nan)


class StepPast:
    """Past of one step in torch, as :class:`PastValues` with S = 1.

    Parameters
    ----------
    z, filled : Tensor of shape (B, K)
        The last values, the current one last, as they came and with missing ones filled in.
    """

    xp: ModuleType = torch

    def __init__(self, z: Tensor, filled: Tensor) -> None:
        self.z = z
        self.filled = filled
        self.n_kept = filled.shape[1]

    def recent(self, n: int) -> Tensor:
        return self.filled.narrow(1, self.n_kept - n, n).unsqueeze(1)

    def at(self, offsets: np.ndarray) -> Tensor:
        positions = torch.from_numpy(self.n_kept - 1 + offsets)
        return self.filled.index_select(1, positions).unsqueeze(1)

    def back(self, n: int) -> Tensor:
        return self.filled.narrow(1, self.n_kept - 1 - n, 1)

    def mean(self, n: int, back: int = 0) -> Tensor:
        return _known_mean(self.filled, self.n_kept - back, n)

    def mean_change(self, back: int, n: int) -> Tensor:
        n_changes = self.n_kept - back
        change = (self.z.narrow(1, back, n_changes) - self.z.narrow(1, 0, n_changes)).abs()
        return _known_mean(change, n_changes, n)

    def any_missing(self, values: Tensor) -> bool:
        return True  # a traced graph has one way through, for all values


def _repeat_values(values: Sequence[float], times: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(times)


def _known_mean(values: Tensor, stop: int, n: int) -> Tensor:
    """Return the mean (B, 1) of the values that are known among the ``n`` before column ``stop``;
    NaN if none is.
    """
    start = max(0, stop - n)
    part = values.narrow(1, start, max(0, stop) - start)
    known = ~part.isnan()
    return torch.where(known, part, 0.0).sum(-1, keepdim=True) / known.sum(-1, keepdim=True)
