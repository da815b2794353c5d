"""Explain a forecast by what its networks read at each step: lags, trends and covariates, and by
the simple forecasts beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.explaining.explanation import Explanation
from fluxutils_py.explaining.integrated_gradients import (
    check_explanation,
    completeness_error,
    integrate_path,
    window_size,
)
from fluxutils_py.explaining.path_gradients import Ends, PathGradients
from fluxutils_py.forecasting.correction import SOURCES
from fluxutils_py.forecasting.covariates import Covariates
from fluxutils_py.forecasting.direct_model import Ensemble
from fluxutils_py.forecasting.features import Past
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster, array_shape
from fluxutils_py.forecasting.forecaster_settings import SEGMENTS, sorted_quantiles
from fluxutils_py.forecasting.history import History
from fluxutils_py.forecasting.outputs import future_covariates
from fluxutils_py.forecasting.panel_windows import (
    ArrayFNT,
    Channels,
    PackedSeries,
    PanelWindows,
)
from fluxutils_py.frames.panel import Panel, panel_of, series_name, series_numbers
from fluxutils_py.steps.session import InferenceSession
from fluxutils_py.validation import check_integer


def explain_forecast(
    fitted: FittedForecaster,
    series: Panel | ArrayFNT,
    label: Any,
    step: int | None,
    output: float | None,
    futr_df: object,
    n_points: int | None,
) -> Explanation:
    """Implement ``Forecaster.explain_forecast`` for a panel or an array."""
    check_integer("n_points", n_points, 1, optional=True, error=SpecError)
    check_integer("step", step, 1, optional=True, error=SpecError)
    if step is not None and step > fitted.h:
        raise SpecError(f"step is {step}, but the forecaster forecasts {fitted.h} steps")
    number = _series_number(series, label)
    name = series_name(panel_of(series), number)
    # of an array all series, which are read when they are needed
    at = number
    if isinstance(series, Panel):
        at = 0
        windows = _windows_of_one(fitted, series, number, futr_df)
    else:
        windows = fitted.windows(series)
    n_steps = int(windows.source.lengths[at])
    rows = Segments(np.array([at]), np.array([n_steps - 1]), np.ones(1, int))
    past = windows.past(rows, 0, 1)
    if not past.known[0, 0]:
        raise DataError(
            f"series {name} has no value in its last "
            f"{fitted.features.memory} steps, and so no forecast to explain"
        )
    read = _PathEnds(windows, at, fitted.models)
    networks = iter(fitted.models)
    ensemble = Ensemble(lambda: next(networks), len(fitted.models)).eval()
    session = InferenceSession(ensemble, lambda: read(slice(0, min(3, n_steps))).inputs)
    of_segments = fitted.network == SEGMENTS
    # a network of segments has no state, and reads no steps but the last
    size = 1 if of_segments else window_size(ensemble, fitted.channels.total)
    first = n_steps - 1 if of_segments else 0
    parts = [slice(a, min(a + size, n_steps)) for a in range(first, n_steps, size)]
    score = _Score(fitted, step, output, past)
    integral = integrate_path(PathGradients(session, parts, read, score), n_points)
    (of_channels,) = integral.attributions
    values = _by_value(fitted, of_channels, n_steps) if of_segments else of_channels
    simple = score.simple_forecasts()
    # the simple forecasts are those at the last step
    beside = np.zeros((len(simple), n_steps))
    beside[:, -1] = list(simple.values())
    # base and scale are for the loss alone
    n_read = fitted.channels.total - 1 - fitted.h * fitted.channels.base
    names = [fitted.columns.target] if of_segments else channel_names(fitted)
    explanation = Explanation(
        attributions=np.concatenate([values[:n_read], beside]),
        steps=np.arange(n_steps),
        feature_names=(*names, *simple),
        value=integral.value + score.level + sum(simple.values()),
        baseline_value=integral.baseline_value + score.level,
        completeness=completeness_error(integral),  # the other parts are exact
        n_points=integral.n_points,
        series=number,
        step=n_steps - 1,
        output=f"{score.name} of {name}",
        explained="what the network reads: values in units of the series' scale, and covariates; "
        "and simple forecasts",
    )
    check_explanation(explanation)
    return explanation


def _by_value(fitted: FittedForecaster, of_channels: np.ndarray, n_steps: int) -> np.ndarray:
    """Return the attributions (C, 1) to the last values, the first channels, at the steps of these:
    (1, T).
    """
    n = min(fitted.features.input_size, n_steps)
    out = np.zeros((1, n_steps))
    # those before the first step are 0, as in the baseline
    out[0, -n:] = of_channels[fitted.features.input_size - n : fitted.features.input_size, 0]
    return out


def _windows_of_one(
    fitted: FittedForecaster,
    panel: Panel,
    number: int,
    futr_df: object,
) -> PanelWindows:
    """Return the windows of one series of a panel, with what is known ahead of its end."""
    only = np.arange(panel.n_series) == number
    one = panel.cut(0 * panel.lengths, np.where(only, panel.lengths, 0))
    windows = fitted.windows(one)
    end = History(np.empty((0, 1, 0)), one.lengths, np.empty((1, 0)), [], one)
    future = future_covariates(fitted, end, futr_df, fitted.h)
    if windows.ahead is None:
        return windows
    values = np.concatenate([windows.ahead.values, future[:, 0]], axis=1)
    return replace(windows, ahead=PackedSeries(values, one.lengths + fitted.h))


def _series_number(series: Panel | ArrayFNT, label: Any) -> int:
    if isinstance(series, Panel):
        if label is None and series.n_series == 1:
            return 0
        number = int(series_numbers([label], series.ids)[0])
        if number < 0:
            raise DataError(
                f"series must be an id such as {series.ids[0]!r}, one of {series.n_series}, got "
                f"{label!r}"
            )
        return number
    shape = array_shape(series)
    assert shape is not None
    n_features, n = shape
    pair = label if isinstance(label, tuple) else (0, 0 if label is None else label)
    f, i = (check_integer("series", k, 0, error=SpecError) for k in pair)
    if f >= n_features or i >= n:
        raise DataError(f"series is {label!r}, but the array has {n_features} features of {n}")
    return int(f * n + i)


class _PathEnds:
    """Reads the inputs of the networks for one series, and the baseline: 0.

    That is a series that stays at its level, of the usual scale, with covariates at their means.
    Categories have no mean, and stay.
    """

    def __init__(self, windows: PanelWindows, series: int, models: Any) -> None:
        self.windows = windows
        length = windows.source.lengths[series : series + 1]
        self.rows = Segments(np.array([series]), np.zeros(1, int), length)
        self.parameter = next(models[0].parameters())
        self.stays = torch.from_numpy(_code_channels(windows.channels))

    def __call__(self, steps: slice) -> Ends:
        values = self.windows.inputs(self.rows, steps.start, steps.stop)
        x = torch.from_numpy(np.ascontiguousarray(values.transpose(1, 0, 2)))
        x = x.to(self.parameter.device, self.parameter.dtype)
        baseline = torch.where(self.stays.to(x.device), x, torch.zeros_like(x))
        return Ends((x,), (baseline,))


def _code_channels(channels: Channels) -> np.ndarray:
    """Return which channels are no numbers that change on the path: codes, and those for the
    loss.
    """
    c = channels
    n_codes = len(c.categories)
    current = [False] * c.numeric + [True] * n_codes
    ahead = [False] * (2 * c.h * c.futr) + [True] * (2 * c.h * len(c.futr_categories))
    for_loss = [True] * (c.h * c.base + 1)
    return np.array([*current, *ahead, *for_loss])


class _Score:
    """The networks' part of the forecast that is explained, as a function of their outputs, and the
    other parts.

    In units of the transform, the forecast of a series that stays at its level is the level. Each
    source of the forecast adds its weight times how it differs from the level. The network is added
    to the seasonal naive forecast, whose weight is therefore that of both.

    Attributes
    ----------
    level : float
    name : str
    """

    def __init__(
        self,
        fitted: FittedForecaster,
        step: int | None,
        output: float | None,
        past: Past[np.ndarray],
    ) -> None:
        levels = sorted_quantiles(fitted.settings)
        if output is not None and output not in levels:
            raise SpecError(f"output must be None or one of the quantiles {levels}, got {output!r}")
        self.fitted = fitted
        self.past = past
        self.number = 0 if output is None else 1 + levels.index(output)
        self.sizes = (len(fitted.models), len(fitted.names), fitted.h)
        self.steps = slice(None) if step is None else slice(step - 1, step)
        self.level = float(past.level[0, 0])
        self.scale = float(past.scale[0, 0])
        when = f"mean of {fitted.h} steps" if step is None else f"step {step}"
        name = fitted.names[self.number]
        self.name = f"{f'log of {name}' if fitted.features.log else name}, {when},"
        # the output whose value each step has: known after the first call
        self.chosen = np.zeros(fitted.h, int)

    def __call__(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Return the networks' part (B,) for outputs (S, B, G)."""
        out = outputs[0][-1].double().unflatten(-1, self.sizes).mean(1)  # (B, 1 + Q, h)
        point = out[:, :1]
        # the networks detach the point forecast, on which quantiles stand, for training
        distance = out[:, 1:] - point.detach()
        correction = self.fitted.correction
        if correction is not None:
            distance = torch.as_tensor(correction.spread).to(out) * distance
            point = torch.as_tensor(correction.weights[0]).to(out) * point
        parts = torch.cat([point, point + distance], 1)
        # the first row has the inputs
        self.chosen = self._choose(distance[0].detach().cpu().numpy())
        at = torch.from_numpy(self.chosen).to(out.device).expand(len(out), 1, -1)
        return self.scale * parts.gather(1, at)[:, 0, self.steps].mean(-1)

    def _choose(self, distance: np.ndarray) -> np.ndarray:
        """Return which output is the forecast at each step: a quantile is never below those before
        it.
        """
        if self.number == 0 or self.fitted.correction is None:
            return np.full(self.fitted.h, self.number)
        levels = distance + self.fitted.correction.offsets
        return 1 + levels[: self.number].argmax(0)

    def simple_forecasts(self) -> dict[str, float]:
        """Return the parts of the seasonal naive forecast and, of corrected forecasts, of the
        others, and what calibration adds to a quantile; after the first call.
        """
        above = self.past.naive[0, 0] - self.level  # (h,)
        correction = self.fitted.correction
        parts = {SOURCES[1]: above}
        if correction is not None:
            parts[SOURCES[1]] = correction.weights[:2].sum(0) * above
            others = above + self.scale * self.fitted.features.baselines(self.past)[0, 0]
            parts |= zip(SOURCES[2:], correction.weights[2:] * others, strict=True)
        means = {f"simple forecast: {k}": float(v[self.steps].mean()) for k, v in parts.items()}
        if correction is not None and self.number:
            offsets = correction.offsets[self.chosen - 1, np.arange(self.fitted.h)]
            means["calibration"] = self.scale * float(offsets[self.steps].mean())
        return means


def channel_names(fitted: FittedForecaster) -> list[str]:
    """Return the names of the channels that the networks read, in order."""
    features = fitted.features
    y = fitted.columns.target
    n = features.input_size
    names = [f"{y} now" if i == 0 else f"{y} {i} before" for i in range(n - 1, -1, -1)]
    names += [
        f"level less that {features.lag} before",
        f"{y} now less {features.season} before",
        f"mean of {features.lag} less level",
        "size of changes",
    ]
    if features.lag > features.season:
        names += [f"{y} {features.lag} before step {k}" for k in range(1, features.h + 1)]
    names += _covariate_names(fitted.covariates, fitted.channels)
    return names


def _covariate_names(covariates: Covariates, channels: Channels) -> list[str]:
    current = [c.name for c in (*covariates.hist, *covariates.stat, *covariates.futr)]
    names = channels.in_order(current)
    steps = range(1, channels.h + 1)
    for c in covariates.futr:
        names += [f"{c.name} at step {k}" for k in steps]
        names += [f"{c.name} a season before step {k}" for k in steps]
    return names
