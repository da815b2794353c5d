"""Cross-validate forecasts by walking forward in time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.baselines import baseline_forecasts
from fluxutils_py.forecasting.frames import Frame, is_frame, make_frame, require, with_arrow_types
from fluxutils_py.forecasting.history import forecasts_along, start_history
from fluxutils_py.forecasting.model_fitting import course_of_fit
from fluxutils_py.forecasting.outputs import check_output_names, column_names, forecast_values
from fluxutils_py.forecasting.panel import Panel, read_panel
from fluxutils_py.parallel import RankGroup
from fluxutils_py.validation import check_integer

KNOWN = 2_000  # the baselines use at most so many last values


def cross_validate(
    fc: Any,
    ranks: RankGroup,
    df: Any,
    n_windows: int,
    step_size: int | None,
    refit: bool | None,
    static_df: Any,
) -> Any:
    """Implement ``Forecaster.cross_validation``."""
    step_size = int(fc.h) if step_size is None else step_size
    for name, value in (("n_windows", n_windows), ("step_size", step_size)):
        check_integer(name, value, 1)
    walk = {"n_windows": n_windows, "step_size": step_size, "refit": refit}
    ranks.require_equal(walk | course_of_fit(fc))
    if not is_frame(df):
        raise DataError(
            "cross_validation takes a data frame; of an array (F, N, T), cut off steps and predict"
        )
    if refit is None:
        check_is_fitted(fc, "models_")
    check_output_names(fc)
    panel = read_panel(
        df, fc._columns, fc.freq if refit is not None else fc.frequency_, static_df=static_df
    )
    behind = int(fc.h) + step_size * np.arange(
        n_windows - 1, -1, -1
    )  # (W,) steps after each cutoff
    cutoffs = np.maximum(panel.lengths[:, None] - behind, 0)  # (N, W); 0: the series has not begun
    _require_long_series(panel, cutoffs[:, 0], int(behind[0]), least=1 if refit is None else 2)
    none = np.zeros(panel.n_series, int)
    parts: list[dict[str, Any]] = []
    values: Iterator[np.ndarray] = iter(())
    fitted = fc if refit is None else None
    for cutoff in cutoffs.T:
        past = panel.cut(none, cutoff)
        if refit or fitted is None:
            fitted = clone(fc)._fit_panel(ranks, past)
        if refit:
            values = _forecast_at_cutoff(fitted, panel, past, cutoff)
        elif not parts:  # one pass over the series serves all cutoffs
            fitted._require_modelled(panel.cut(none, cutoffs[:, -1]))
            windows = fitted._windows(panel, None)
            values = forecasts_along(fitted.models_, windows, cutoffs - 1, len(fc.quantiles))
        parts.append(_frame_columns(fitted, panel, past, cutoff, next(values)))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return make_frame(columns, panel.types | {"cutoff": panel.types[fc.time_col]}, panel.backend)


def _require_long_series(panel: Panel, cutoff: np.ndarray, behind: int, least: int) -> None:
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
        warnings.warn(
            f"{len(short)} of {panel.n_series} series are too short for the first window, which "
            f"takes {behind} steps from the end of each (series {panel.ids[short[0]]!r} has "
            f"{panel.lengths[short[0]]})",
            stacklevel=4,
        )


def _forecast_at_cutoff(
    fc: Any, panel: Panel, past: Panel, cutoff: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the forecasts (N, 1 + quantiles, h) at one cutoff, NaN for series that have not begun."""
    h, series = int(fc.h), np.flatnonzero(cutoff)
    future = panel.cut(*_horizon_spans(panel, series, cutoff[series], h))
    ahead = fc.covariates_.steps(future, "futr").reshape(-1, len(series), h)
    found = np.full((panel.n_series, 1 + len(fc.quantiles), h), np.nan)
    found[series] = forecast_values(
        fc, start_history(fc.models_, fc._windows(past, None), past), np.nan_to_num(ahead)
    )
    yield found


def _frame_columns(
    fc: Any, panel: Panel, past: Panel, cutoff: np.ndarray, found: np.ndarray
) -> dict[str, Any]:
    """Return keys, truth, forecasts and baselines of one window, for the series that have begun."""
    h, series = int(fc.h), np.flatnonzero(cutoff)
    n, cutoff, found = len(series), cutoff[series], found[series]
    future = panel.cut(*_horizon_spans(panel, series, cutoff, h))
    rows, steps = np.repeat(np.arange(n), h), np.repeat(cutoff, h) + np.tile(np.arange(h), n)
    columns: dict[str, Any] = {
        fc.id_col: past.ids[rows],
        fc.time_col: past.times(rows, steps),
        "cutoff": past.times(rows, np.repeat(cutoff, h) - 1),
        fc.target_col: future.values[fc.target_col],
    }
    columns.update({name: found[:, i].ravel() for i, name in enumerate(column_names(fc))})
    season, tail = fc.features_.season, tail_values(past, fc.target_col)
    made = baseline_forecasts(tail, h, season, first_values(past, fc.target_col))
    return columns | {name: y.ravel() for name, y in made.items()}


def _horizon_spans(
    panel: Panel, series: np.ndarray, cutoff: np.ndarray, h: int
) -> tuple[np.ndarray, np.ndarray]:
    start, stop = np.zeros(panel.n_series, int), np.zeros(panel.n_series, int)
    start[series], stop[series] = cutoff, cutoff + h
    return start, stop


def tail_values(panel: Panel, column: str) -> np.ndarray:
    """Return the last values (N, K) of each series, NaN before its first step."""
    k = min(KNOWN, int(panel.lengths.max()))
    out = np.full((panel.n_series, k), np.nan)
    for i, (offset, length) in enumerate(zip(panel.offsets, panel.lengths, strict=True)):
        n = min(k, length)
        out[i, k - n :] = panel.values[column][offset + length - n : offset + length]
    return out


def first_values(panel: Panel, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the first value of each series that is not missing, and how many steps it lies before
    the last step.
    """
    first = np.full(panel.n_series, np.nan)
    age = np.zeros(panel.n_series, int)
    for i, (offset, length) in enumerate(zip(panel.offsets, panel.lengths, strict=True)):
        values = panel.values[column][offset : offset + length]
        known = ~np.isnan(values)
        if known.any():
            at = int(known.argmax())
            first[i] = values[at]
            age[i] = length - 1 - at
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
        Functions of ``utilsforecast.losses``. None: smape, mae and rmse. ``mase`` needs
        ``train_df`` and a season: ``functools.partial(mase, seasonality=24)``.
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
        One row per series (and cutoff) and metric, one column per model. With ``agg_fn``, one row
        for all series.

    Raises
    ------
    ImportError
        Without utilsforecast, which the extra ``forecast`` installs.
    """
    losses, evaluation = require("utilsforecast.losses"), require("utilsforecast.evaluation")
    frame = Frame(df, "df")
    keys = {id_col, time_col, target_col, "cutoff"}
    if models is None:
        models = [
            c
            for c in frame.frame.columns
            if c not in keys and not _is_quantile(c, frame.frame.columns)
        ]
    of_arrow = frame.backend == "pyarrow"  # which utilsforecast does not read
    scores = evaluation.evaluate(
        _as_pandas(df) if of_arrow else df,
        [losses.smape, losses.mae, losses.rmse] if metrics is None else metrics,
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
    types = {
        name: df.schema.field(name).type
        for name in (id_col, "cutoff")
        if name in table.column_names
    }
    return with_arrow_types(table, types)


def _as_pandas(table: Any) -> Any:
    """Return a table of pyarrow as a frame of pandas; other values unchanged."""
    return table.to_pandas() if hasattr(type(table), "to_pandas") else table


def _is_quantile(column: str, columns: Iterable[str]) -> bool:
    """Whether a column holds quantiles of another one: its name is that of the other, and a level."""
    model, found, level = column.rpartition("-q")
    return (
        bool(found)
        and model in columns
        and re.fullmatch(r"0?\.\d+|\d(\.\d+)?e-\d+", level) is not None
    )


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
        self, h: int, n_splits: int = 3, step_size: int | None = None, time_col: str = "ds"
    ) -> None:
        self.h, self.n_splits, self.step_size, self.time_col = h, n_splits, step_size, time_col

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        return self.n_splits

    def split(
        self, X: Any, y: Any = None, groups: Any = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        times, at = np.unique(
            np.asarray(Frame(X, "X").times(self.time_col).absolute), return_inverse=True
        )
        step = self.h if self.step_size is None else self.step_size
        for i in range(self.n_splits):
            begin = len(times) - self.h - step * (self.n_splits - 1 - i)
            if begin < 1:
                raise DataError(
                    f"{self.n_splits} splits of {self.h} times leave nothing to train on of "
                    f"{len(times)}"
                )
            yield np.flatnonzero(at < begin), np.flatnonzero((at >= begin) & (at < begin + self.h))
