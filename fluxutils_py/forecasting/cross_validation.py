"""Cross-validate forecasts by walking forward in time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.base import clone

from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.baselines import baseline_forecasts
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.forecaster_settings import ForecasterSettings
from fluxutils_py.forecasting.history import forecasts_along, start_history
from fluxutils_py.forecasting.model_fitting import fit_panel
from fluxutils_py.forecasting.outputs import forecast_values, key_columns
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.frames.frames import Frame, make_frame, require, with_arrow_types
from fluxutils_py.frames.panel import Panel
from fluxutils_py.parallel import RankGroup
from fluxutils_py.validation import check_integer

KNOWN = 2_000  # the baselines use at most so many last values


@dataclass(frozen=True)
class Walk:
    """The windows of a cross-validation.

    Attributes
    ----------
    n_windows, step_size : int
    refit : bool or None
        As in ``Forecaster.cross_validation``.

    Raises
    ------
    ValueError
        If a number is below 1.
    """

    n_windows: int
    step_size: int
    refit: bool | None

    def __post_init__(self) -> None:
        check_integer("n_windows", self.n_windows, 1)
        check_integer("step_size", self.step_size, 1)

    def steps_behind(self, h: int) -> np.ndarray:
        """Return the number of steps after each cutoff: (W,), in order of time."""
        return h + self.step_size * np.arange(self.n_windows - 1, -1, -1)


def cross_validate(
    settings: ForecasterSettings,
    fitted: FittedForecaster | None,
    ranks: RankGroup,
    panel: Panel,
    walk: Walk,
) -> Any:
    """Implement ``Forecaster.cross_validation``; ``fitted`` is given if ``walk.refit`` is None."""
    h = int(settings.h)
    behind = walk.steps_behind(h)
    cutoffs = np.maximum(panel.lengths[:, None] - behind, 0)  # (N, W); 0: the series has not begun
    least = 1 if walk.refit is None else 2  # training needs a step and the one after it
    _require_long_series(panel, cutoffs[:, 0], int(behind[0]), least)
    _require_truth(panel, settings.target_col, cutoffs, h)
    first_step = np.zeros(panel.n_series, int)
    parts: list[dict[str, np.ndarray]] = []
    forecasts: Iterator[np.ndarray] = iter(())
    for cutoff in cutoffs.T:
        # cut before anything is computed: no value after the cutoff can be seen
        past = panel.cut(first_step, cutoff)
        if walk.refit or fitted is None:
            fitted = fit_panel(clone(settings), ranks, past).fitted
        if walk.refit:
            forecasts = _forecast_at_cutoff(fitted, panel, past, cutoff)
        elif not parts:  # one pass over the series serves all cutoffs
            fitted.require_modelled(panel.cut(first_step, cutoffs[:, -1]))
            windows = fitted.windows(panel)
            forecasts = forecasts_along(fitted.models, windows, cutoffs - 1, fitted.quantiles)
        values = next(forecasts)
        columns = window_columns(fitted, panel, cutoff, values)
        parts.append(columns | _baseline_columns(fitted, past))
    return frame_of_windows(panel, settings.time_col, parts)


def _require_long_series(
    panel: Panel,
    cutoff: np.ndarray,
    behind: int,
    least: int,
) -> None:
    """Raise DataError if no series has ``least`` steps before the first cutoff; warn of those that
    have fewer.
    """
    short = np.flatnonzero(cutoff < least)
    if len(short) == panel.n_series:
        raise DataError(
            f"no series is long enough: the windows take {behind} steps from the end of each, and "
            f"the longest series has {panel.lengths.max()}; use fewer windows, or a smaller "
            "step_size"
        )
    if len(short):
        warn(
            f"{len(short)} of {panel.n_series} series are too short for the first window, which "
            f"takes {behind} steps from the end of each (series {panel.ids[short[0]]!r} has "
            f"{panel.lengths[short[0]]})"
        )


def _require_truth(panel: Panel, target: str, cutoffs: np.ndarray, h: int) -> None:
    """Raise DataError if a window has no value in any series."""
    for cutoff in cutoffs.T:
        series = np.flatnonzero(cutoff)
        truth = cut_horizon(panel, series, cutoff[series], h).values[target]
        if np.isnan(truth).all():
            n = int(series[0])
            raise DataError(
                f"no series has a value of {target!r} in the {h} steps after "
                f"{panel.time_text(n, cutoff[n] - 1)} (series {panel.ids[n]!r}) to compare "
                "forecasts with; leave out rows of times that are still to be forecast"
            )


def _forecast_at_cutoff(
    fitted: FittedForecaster,
    panel: Panel,
    past: Panel,
    cutoff: np.ndarray,
) -> Iterator[np.ndarray]:
    """Yield the forecasts (N, 1 + quantiles, h) at one cutoff, NaN for series that have not
    begun.
    """
    h = fitted.h
    series = np.flatnonzero(cutoff)
    future = cut_horizon(panel, series, cutoff[series], h)
    ahead = fitted.covariates.steps(future, "futr").reshape(-1, len(series), h)
    history = start_history(fitted.models, fitted.windows(past), past)
    values = np.full((panel.n_series, len(fitted.names), h), np.nan)
    # a series may end within the horizon: its covariates are then the mean, 0
    values[series] = forecast_values(fitted, history, np.nan_to_num(ahead))
    yield values


def window_columns(
    fitted: FittedForecaster,
    panel: Panel,
    cutoff: np.ndarray,
    forecasts: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return keys, truth and forecasts (N, 1 + quantiles, h) after the ``cutoff[n]`` first steps of
    each series, for those that have begun.
    """
    h = fitted.h
    target = fitted.columns.target
    series = np.flatnonzero(cutoff)
    future = cut_horizon(panel, series, cutoff[series], h)
    # the keys are those of the h steps after the end of a panel
    empty = replace(future, lengths=np.zeros_like(future.lengths))
    columns = key_columns(fitted, empty, h)
    last_known = panel.times(series, cutoff[series] - 1)
    columns["cutoff"] = np.repeat(last_known, h)
    columns[target] = future.values[target]
    columns |= {name: forecasts[series, i].ravel() for i, name in enumerate(fitted.names)}
    return columns


def frame_of_windows(panel: Panel, time_col: str, parts: Sequence[dict[str, np.ndarray]]) -> Any:
    """Return a frame of the columns of several windows, of the library of the panel."""
    # the cutoff tells the windows apart, as in frames of NeuralForecast
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    types = panel.types | {"cutoff": panel.types[time_col]}
    return make_frame(columns, types, panel.backend)


def _baseline_columns(fitted: FittedForecaster, past: Panel) -> dict[str, np.ndarray]:
    """Return the baselines after the end of each series of a panel."""
    target = fitted.columns.target
    baselines = baseline_forecasts(
        tail_values(past, target),
        fitted.h,
        fitted.features.season,
        first_values(past, target),
    )
    return {name: y.ravel() for name, y in baselines.items()}


def cut_horizon(
    panel: Panel,
    series: np.ndarray,
    cutoff: np.ndarray,
    h: int,
) -> Panel:
    """Return the ``h`` steps after the cutoff of each of some series."""
    start = np.zeros(panel.n_series, int)
    stop = np.zeros(panel.n_series, int)
    start[series] = cutoff
    stop[series] = cutoff + h
    return panel.cut(start, stop)


def tail_values(panel: Panel, column: str) -> np.ndarray:
    """Return the last values (N, K) of each series, NaN before its first step."""
    k = min(KNOWN, int(panel.lengths.max()))
    source = PackedSeries(panel.values[column][None], panel.lengths)
    return source.cut(np.arange(panel.n_series), panel.lengths - k, k)[0]


def first_values(panel: Panel, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the first value of each series that is not missing, and how many steps before the last
    step it is.
    """
    values = panel.values[column]
    known = np.flatnonzero(~np.isnan(values))
    series = np.repeat(np.arange(panel.n_series), panel.lengths)[known]
    series, begin = np.unique(series, return_index=True)
    first = np.full(panel.n_series, np.nan)
    first[series] = values[known[begin]]
    age = np.zeros(panel.n_series, int)
    age[series] = np.cumsum(panel.lengths)[series] - 1 - known[begin]
    return first, age


def evaluate(
    df: Any,
    metrics: Any = None,
    *,
    train_df: Any = None,
    models: Any = None,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
    agg_fn: str | None = None,
    **settings: Any,
) -> Any:
    """Score all forecasts in a frame with the losses of utilsforecast.

    Parameters
    ----------
    df : data frame
        The result of :meth:`Forecaster.cross_validation`, or forecasts joined with the truth.
    metrics : list of callables, optional
        Functions of ``utilsforecast.losses``. None: smape, mae and rmse, and for each pair of
        quantiles that form a band, such as those of .1 and .9, the share of truths inside of it,
        as ``coverage_level80``. ``mase`` needs ``train_df`` and a season:
        ``functools.partial(mase, seasonality=24)``.
    train_df : data frame, optional
        Past values of the series, for scaled metrics.
    models : list of str, optional
        Columns with forecasts. None: all columns except keys, truth and quantiles.
    agg_fn : str, optional
        How to aggregate over the series, such as ``"mean"``. None: one row per series.
    **settings
        Further arguments of ``utilsforecast.evaluation.evaluate``.

    Returns
    -------
    data frame
        One row per series (and cutoff) and metric, one column per model; models without quantiles
        have no coverage. With ``agg_fn``, one row per metric (and cutoff): leave the column
        ``cutoff`` out, ``evaluate(df.drop(columns="cutoff"), agg_fn="mean")``, for one over all
        cutoffs.

    Raises
    ------
    DataError
        If a column is not there, or is taken for a forecast and holds no numbers. The message names
        it, and the argument that tells evaluate of it.
    ImportError
        Without utilsforecast, which the extra ``forecast`` installs.
    """
    losses = require("utilsforecast.losses")
    evaluation = require("utilsforecast.evaluation")
    frame = Frame(df, "df")
    frame.require({id_col: "id_col", target_col: "target_col"})
    if models is None:
        models = _forecast_columns(frame, {id_col, time_col, target_col, "cutoff"})
    # those that need neither a season nor past values
    if metrics is None:
        metrics = [losses.smape, losses.mae, losses.rmse, *_coverages(frame, models)]
    of_arrow = frame.backend == "pyarrow"  # which utilsforecast does not read
    scores = evaluation.evaluate(
        _as_pandas(df) if of_arrow else df,
        metrics,
        models=models,
        train_df=_as_pandas(train_df) if of_arrow else train_df,
        id_col=id_col,
        time_col=time_col,
        target_col=target_col,
        agg_fn=agg_fn,
        **settings,
    )
    if not of_arrow:
        return scores
    table = require("pyarrow").Table.from_pandas(scores, preserve_index=False)
    # pandas has changed the types of keys, which are to be joined with those of df
    keys = {id_col, "cutoff"} & set(table.column_names)
    return with_arrow_types(table, {name: df.schema.field(name).type for name in keys})


def _forecast_columns(frame: Frame, keys: set[str]) -> list[str]:
    # a quantile is no forecast of the mean, by which the losses would rank it
    names = frame.frame.columns
    found = [name for name in names if name not in keys and not _is_quantile(name, names)]
    for name in found:
        kind = frame.frame.schema[name]
        if not kind.is_numeric():
            raise DataError(
                f"column {name!r} of {frame.name} holds {kind}, and would be scored as a forecast; "
                f"say time_col={name!r} if it is the time, or drop it, or list the forecasts in "
                "models="
            )
    return found


def _coverages(frame: Frame, models: Sequence[str]) -> list[Any]:
    """Return a metric for each band of quantiles that a frame has, of any of the models: the share
    of truths inside of it.
    """
    names = frame.frame.columns
    bands: dict[str, dict[str, tuple[str, str]]] = {}
    for model in models:
        levels = {
            name: float(name.rpartition("-q")[2])
            for name in names
            if name.startswith(f"{model}-q") and _is_quantile(name, names)
        }
        for low, q in levels.items():
            for high, p in levels.items():
                if q < p and math.isclose(q + p, 1.0, abs_tol=1e-9):
                    bands.setdefault(f"{100 * (p - q):g}", {})[model] = (low, high)
    return [_coverage(level, edges) for level, edges in bands.items()]


def _coverage(level: str, edges: dict[str, tuple[str, str]]) -> Any:
    """Return a metric as utilsforecast calls it, of the columns that are the edges of bands."""
    nw = require("narwhals")

    def coverage(
        df: Any,
        models: Sequence[str],
        id_col: str = "unique_id",
        target_col: str = "y",
        cutoff_col: str = "cutoff",
    ) -> Any:
        data = nw.from_native(df)
        keys = [name for name in (id_col, cutoff_col) if name in data.columns]
        missing = nw.lit(None, nw.Float64)
        shares = [missing.alias(model) for model in models if model not in edges]
        for model, (low, high) in edges.items():
            inside = nw.col(target_col).is_between(nw.col(low), nw.col(high)).cast(nw.Float64)
            # a missing truth is neither inside nor outside
            known = nw.col(target_col) == nw.col(target_col)
            shares.append(nw.when(known).then(inside).otherwise(missing).alias(model))
        of_rows = data.select(*keys, *shares)
        of_series = of_rows.group_by(keys).agg(nw.col(*models).mean()).sort(keys)
        return of_series.select(*keys, *models).to_native()

    coverage.__name__ = f"coverage_level{level}"
    return coverage


def _as_pandas(table: Any) -> Any:
    """Return a table of pyarrow as a frame of pandas; other values unchanged."""
    return table.to_pandas() if hasattr(type(table), "to_pandas") else table


def _is_quantile(column: str, columns: Iterable[str]) -> bool:
    """Whether a column holds quantiles of another one: its name is the name of that one and a
    level.
    """
    model, mark, level = column.rpartition("-q")
    # as "%g" writes numbers below 1
    is_level = re.fullmatch(r"0?\.\d+|\d(\.\d+)?e-\d+", level) is not None
    return bool(mark) and is_level and model in columns


class WalkForwardSplit:
    """Split the rows of a long frame for walk-forward validation, as the ``cv`` of scikit-learn's
    searches.

    Parameters
    ----------
    h : int
        Number of times in each test set, which follows the training set.
    n_splits : int
    step_size : int, optional
        Times between one split and the next. None: ``h``.
    time_col : str

    Raises
    ------
    DataError
        From ``split``, if the first split has nothing to train on.

    Examples
    --------
    >>> import pandas as pd
    >>> df = pd.DataFrame(
    ...     {"unique_id": ["a"] * 5 + ["b"] * 5, "ds": [*range(5), *range(5)], "y": 1.0}
    ... )
    >>> for train, test in WalkForwardSplit(h=1, n_splits=2).split(df):
    ...     print(train, test)
    [0 1 2 5 6 7] [3 8]
    [0 1 2 3 5 6 7 8] [4 9]
    """

    def __init__(
        self,
        h: int,
        n_splits: int = 3,
        step_size: int | None = None,
        time_col: str = "ds",
    ) -> None:
        self.h = h
        self.n_splits = n_splits
        self.step_size = step_size
        self.time_col = time_col

    def get_n_splits(
        self,
        X: object = None,
        y: object = None,
        groups: object = None,
    ) -> int:
        return self.n_splits

    def split(
        self,
        X: object,
        y: object = None,
        groups: object = None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        column = Frame(X, "X").times(self.time_col)
        # over all series: a test set begins at one time, however long each series is
        times, at = np.unique(np.asarray(column.absolute), return_inverse=True)
        # by default no time is tested twice
        step = self.h if self.step_size is None else self.step_size
        for i in range(self.n_splits):
            begin = len(times) - self.h - step * (self.n_splits - 1 - i)
            if begin < 1:
                raise DataError(
                    f"{self.n_splits} splits of {self.h} times leave nothing to train on of "
                    f"{len(times)}"
                )
            train = at < begin
            test = (at >= begin) & (at < begin + self.h)
            yield np.flatnonzero(train), np.flatnonzero(test)
