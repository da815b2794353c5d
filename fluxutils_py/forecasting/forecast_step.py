"""One step of a forecaster as a pure function in torch: values in, forecasts in the units of the
series out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.exporting import InitialState, ModelStep
from fluxutils_py.forecasting.covariates import Covariates
from fluxutils_py.forecasting.direct_model import Ensemble
from fluxutils_py.forecasting.features import LARGEST, SEASONS_BACK, Features
from fluxutils_py.forecasting.panel_windows import Channels


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
        The last values, as they came and with missing ones filled in, ``(2, B, K)``; the number of
        steps since the last value, ``(B,)``; the last covariates; then the states of the networks.
    n_outputs : int
        The point forecast and each quantile, ``(B, h)``.

    Notes
    -----
    The same definitions as :class:`Features`, for one step; their sums over the past are taken anew
    at each.
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
        self.features, self.channels, self.n_models = features, channels, len(models)
        c = channels
        n_past = c.hist + len(c.hist_categories)
        sizes = {
            "past": n_past,
            "static": c.stat + len(c.stat_categories),
            "known": c.n_ahead * (1 + c.h),
        }
        self.inputs = {"y": 1, **{name: n for name, n in sizes.items() if n}}
        dtype = next(models[0].parameters()).dtype
        networks = iter(models)
        ensemble = Ensemble(lambda: next(networks), len(models))
        example = torch.randn(4, 2, c.total, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.network, self.dtype = ModelStep(ensemble, [example]), dtype
        groups = (covariates.hist, 1), (covariates.stat, 1), (covariates.futr, 1 + c.h)
        for name, (group, times) in zip(sizes, groups, strict=True):
            self.register_buffer(f"mean_{name}", _repeat_values([of.mean for of in group], times))
            self.register_buffer(f"scale_{name}", _repeat_values([of.scale for of in group], times))
        self.n_outputs = 1 + n_quantiles
        self.n_kept = max(features.reach, SEASONS_BACK * features.season) + 1
        nan = torch.full((1, 1, 1), torch.nan, dtype=torch.float64)
        own = [
            InitialState(nan.expand(2, 1, self.n_kept).clone(), 1),
            InitialState(nan[0, 0].clone(), 0),
        ]
        if n_past:
            own.append(InitialState(nan[0].expand(1, n_past).clone(), 0))
        if c.n_ahead:  # each covariate at the last season's steps
            own.append(InitialState(nan.expand(1, c.n_ahead, features.season).clone(), 0))
        self.n_own = len(own)
        self.initial = (*own, *self.network.initial)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        f, c = self.features, self.channels
        xs = dict(zip(self.inputs, tensors, strict=False))
        for name in [*xs][1:]:
            xs[name] = (xs[name] - getattr(self, f"mean_{name}")) / getattr(self, f"scale_{name}")
        states = list(tensors[len(xs) :])
        own, of_network = states[: self.n_own], states[self.n_own :]
        values, age = self._append_value(own[0], own[1], xs["y"])
        following = [values, age]
        level, scale, naive, here, parts = self._compute_features(*values.unbind())
        now: list[Tensor] = []
        ahead: list[Tensor] = []
        if "past" in xs:
            past = torch.where(xs["past"].isnan(), own[2], xs["past"])
            following.append(past)
            now += past.unbind(-1)
        if "static" in xs:
            now += xs["static"].unbind(-1)
        if "known" in xs:
            known = xs["known"].unflatten(
                -1, (c.n_ahead, 1 + c.h)
            )  # at this step, and at the next h
            before = own[-1]
            current = torch.where(known[..., :1].isnan(), before[..., -1:], known[..., :1])
            before = torch.cat([before[..., 1:], current], -1)
            following.append(before)
            now += current[..., 0].unbind(-1)
            at = torch.from_numpy(f.season - 1 + f.counterparts())
            ahead = [torch.cat([known[..., 1:], before[..., at]], -1).flatten(-2)]
        ordered = [
            channel
            for _, channel in sorted(zip(c.positions, now, strict=True), key=lambda pair: pair[0])
        ]
        rest = [torch.stack(ordered, -1)] if ordered else []
        tail = torch.zeros_like(level).expand(-1, c.h * c.base + 1)  # for the loss in training
        x = torch.cat([parts, *(t.nan_to_num() for t in (*rest, *ahead)), tail], -1).to(self.dtype)
        found = self.network(x, *of_network)
        outputs = found[0].double().unflatten(-1, (self.n_models, -1)).mean(-2)
        z = naive.unsqueeze(-2) + scale.unsqueeze(-1) * outputs.unflatten(-1, (self.n_outputs, -1))
        y = torch.where(here.unsqueeze(-1), z.exp() if f.log else z, torch.nan)
        return (*y.unbind(-2), *following, *found[1:])

    def _append_value(self, values: Tensor, age: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last values with this one, and the steps since the last value that was not
        filled in from it.
        """
        f = self.features
        new = y.log() if f.log else y  # (B, 1)
        filled, (given, filled_in) = new, values.unbind()
        for back in range(1, SEASONS_BACK + 1):
            at = self.n_kept - back * f.season
            filled = torch.where(filled.isnan(), given.narrow(1, at, 1), filled)
        missing = filled.isnan().squeeze(1)
        age = torch.where(missing, age + 1, 0.0)
        last = torch.where((age <= f.memory).unsqueeze(1), filled_in.narrow(1, -1, 1), torch.nan)
        filled = torch.where(filled.isnan(), last, filled)
        return torch.cat(
            [values.narrow(2, 1, self.n_kept - 1), torch.stack([new, filled])], -1
        ), age

    def _compute_features(
        self, z: Tensor, filled: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return level, scale (B, 1), the seasonal naive forecast (B, h), whether there is a value,
        and the inputs.
        """
        f, K, last = self.features, self.n_kept, filled.narrow(1, -1, 1)
        here = ~last.isnan()
        level = _known_mean(filled, K, f.season)
        scale = self._compute_scale(z)
        season_before = filled.index_select(1, K - 1 + torch.from_numpy(f.counterparts()))
        naive = torch.where(season_before.isnan(), last, season_before)
        columns = [
            filled.narrow(1, K - f.input_size, f.input_size) - level,
            level - _known_mean(filled, K - f.lag, f.season),
            last - filled.narrow(1, K - 1 - f.season, 1),
            _known_mean(filled, K, f.lag) - level,
        ]
        columns = [torch.cat(columns, -1) / scale]
        columns.append((scale / f.unit).log())
        if f.lag > f.season:
            at = K - 1 + torch.from_numpy(f.counterparts(f.lag))
            turns = -(-np.arange(1, f.h + 1) // f.lag)
            levels = {
                turn: _known_mean(filled, K - turn * f.lag, f.season)
                for turn in map(int, np.unique(turns))
            }
            before = torch.cat([levels[turn] for turn in map(int, turns)], -1)
            columns.append((filled.index_select(1, at) - before - (naive - level)) / scale)
        x = torch.cat(columns, -1).clamp(-LARGEST, LARGEST)
        x = torch.where(x.isnan() | ~here, 0.0, x)
        return level, torch.where(here, scale, 1.0), torch.where(here, naive, 0.0), here, x

    def _compute_scale(self, z: Tensor) -> Tensor:
        f, K = self.features, self.n_kept
        changes = [
            (z.narrow(1, back, K - back) - z.narrow(1, 0, K - back)).abs() for back in (f.season, 1)
        ]
        seasonal, single = (_known_mean(change, change.shape[1], f.memory) for change in changes)
        scale = torch.where(seasonal.isnan(), single, seasonal)
        return torch.where(scale.isnan(), f.smallest_scale, scale.clamp(min=f.smallest_scale))


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
