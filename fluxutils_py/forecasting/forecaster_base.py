"""The data of forecasters: panels and arrays, windows of them, and the ends of series."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.covariates import filled_forward
from fluxutils_py.forecasting.forecaster_export import check_forecaster_export
from fluxutils_py.forecasting.frames import is_frame
from fluxutils_py.forecasting.history import History, start_history
from fluxutils_py.forecasting.outputs import format_time, require_same_static
from fluxutils_py.forecasting.panel import Columns, Panel, read_panel
from fluxutils_py.forecasting.panel_windows import PanelWindows
from fluxutils_py.forecasting.sources import ArraySource, PackedSeries
from fluxutils_py.inputs import as_series


def _id_type(label: Any) -> type:
    return str if isinstance(label, str) else type(label)


class ForecasterBase(BaseEstimator):
    """Base of :class:`Forecaster`: it reads data and keeps the history, from which forecasts start."""

    _origin: Any  # the history, or the arguments from which start_history computes it

    @property
    def _columns(self) -> Columns:
        lists = (tuple(names) for names in (self.hist_exog_list, self.futr_exog_list, self.stat_exog_list))
        return Columns(self.id_col, self.time_col, self.target_col, *lists)

    def _read(self, df: Any, static_df: Any, fitted: bool = False, zone: str | None = None) -> tuple[Panel | None, Any]:
        """Return ``(panel, None)`` for a frame, ``(None, array)`` for an array; ``zone`` as in read_panel."""
        if is_frame(df):
            if fitted and self.frequency_ is None:
                raise DataError("df is a data frame, but the forecaster was fitted on an array (F, N, T)")
            freq = self.frequency_ if fitted else self.freq
            panel = read_panel(df, self._columns, freq, static_df=static_df, zone=zone)
            known: Panel | None = self._history.panel if fitted else None
            if known is not None and (panel.zone is None) != (known.zone is None):
                raise DataError(f"the times of column {self.time_col!r} must have a time zone if those of fit had one")
            if fitted:
                self._require_modelled(panel)
            return panel, None
        if static_df is not None:
            raise DataError("static_df is for data frames; an array (F, N, T) has no static covariates")
        if isinstance(df, int | np.integer):
            raise TypeError(f"df={df} is no data: the number of steps to forecast is h of the constructor, {self.h}")
        if fitted and self.frequency_ is not None:
            raise DataError("df is an array, but the forecaster was fitted on a data frame")
        if self._columns.hist or self._columns.futr or self._columns.stat:
            raise DataError("covariates are columns of data frames; an array (F, N, T) has none")
        return None, as_series(df, "df")[0].array

    def _read_further(self, df: Any, static_df: Any) -> tuple[Panel | None, Any]:
        """Return what :meth:`_read` returns, for the steps after the stored series.

        Raises
        ------
        DataError
            If they cannot follow: the stored series would be unusable from then on.
        """
        known = self._history.panel
        panel, array = self._read(df, static_df, fitted=True, zone=None if known is None else known.zone)
        if panel is not None and known is not None:
            self._require_ids(panel.ids, known.ids)
            require_same_static(self, panel, static_df)
        if array is not None:
            self._require_finite(np.asarray(array[:, :, :]))
        return panel, array

    def _require_ids(self, ids: np.ndarray, known: np.ndarray) -> None:
        """Raise DataError if a new id is of a type that no stored one has: one column may not hold both."""
        stored, types = set(known), {_id_type(label) for label in known}
        odd = [label for label in ids if label not in stored and _id_type(label) not in types]
        if odd:
            raise DataError(
                f"column {self.id_col!r} of df holds {type(odd[0]).__name__} such as {odd[0]!r}, and held "
                f"{type(known[0]).__name__} such as {known[0]!r} when the forecaster was fitted; convert the ids"
            )

    def _require_modelled(self, panel: Panel) -> None:
        """Raise DataError, with series and time, if logarithms are modelled and a value has none."""
        if not self.features_.log:
            return
        values = panel.values[self.target_col]
        bad = np.flatnonzero(values <= 0)  # False for NaN
        if len(bad):
            series = np.searchsorted(np.cumsum(panel.lengths), bad[:1], side="right")
            time = panel.times(series, bad[:1] - panel.offsets[series])[0]
            raise DataError(
                f"column {self.target_col!r} of df is {values[bad[0]]:g} in series {panel.ids[series[0]]!r} at "
                f"{format_time(time)}; the values were positive when the forecaster was fitted, and are modelled by "
                "their logarithms: correct it, set NaN, or fit with transform='none'"
            )

    def _require_finite(self, values: np.ndarray) -> None:
        """Raise DataError if a value of an array (F, N, T) is infinite, or not positive where logarithms are."""
        bad = np.isinf(values)
        if self.features_.log:
            bad |= values <= 0
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            need = "finite and positive, as in fit" if self.features_.log else "finite"
            raise DataError(f"df[{', '.join(map(str, at))}] is {values[at]:g}; values must be {need}, or NaN")

    def _windows(self, panel: Panel | None, array: Any) -> PanelWindows:
        """Return the windows of a panel or an array, from its first step."""
        if panel is None:
            return PanelWindows(ArraySource(array), self.features_, self.channels_)
        hist, futr = (filled_forward(self.covariates_.steps(panel, kind), panel.lengths) for kind in ("hist", "futr"))
        source = PackedSeries(np.concatenate([panel.values[self.target_col][None], hist]), panel.lengths)
        ahead = PackedSeries(futr, panel.lengths) if len(futr) else None
        return PanelWindows(source, self.features_, self.channels_, self.covariates_.static(panel), ahead)

    def _tail_windows(self, tail: np.ndarray, static: np.ndarray) -> PanelWindows:
        """Return the windows of tails (C, N, K). Where only covariates are known ahead, other channels are NaN."""
        n_own, n = len(tail) - self.channels_.n_ahead, tail.shape[1]
        lengths = np.full(n, tail.shape[2])
        flat = tail.reshape(len(tail), -1)
        ahead = PackedSeries(flat[n_own:], lengths) if len(flat) > n_own else None
        return PanelWindows(PackedSeries(flat[:n_own], lengths), self.features_, self.channels_, static, ahead)

    @property
    def _history(self) -> History:
        """The ends of the series, from which forecasts start; computed on first use after a fit."""
        if isinstance(self._origin, tuple):
            self._origin = start_history(self.models_, *self._origin)
        return self._origin

    @property
    def ids_(self) -> np.ndarray:
        panel = self._history.panel
        return np.arange(self._history.n_series) if panel is None else panel.ids

    def _check_export(self, path: Any, df: Any, tolerance: float) -> float:
        return check_forecaster_export(self, path, df, tolerance)
