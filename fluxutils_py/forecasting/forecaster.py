"""Forecast many series with one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self

import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import DataError, ShapeError, SpecError, warn
from fluxutils_py.estimator.spec import explains_arguments
from fluxutils_py.exporting.export_files import check_format
from fluxutils_py.forecasting.fitted_state import (
    FittedState,
    History,
    forecasts_along,
    start_history,
    warn_short_series,
)
from fluxutils_py.forecasting.forecaster_export import check_forecaster_export, export_forecaster
from fluxutils_py.forecasting.forecaster_files import load_state, read_forecaster, save_forecaster
from fluxutils_py.forecasting.forecaster_settings import (
    ForecasterSettings,
    check_output_names,
    check_settings,
    collective_settings,
    columns_of,
    output_columns,
    sorted_quantiles,
)
from fluxutils_py.forecasting.model_fitting import fit_panel
from fluxutils_py.forecasting.outputs import (
    extended_history,
    forecast_any,
    forecast_frame,
    key_columns,
    require_frame,
    score_forecasts,
)
from fluxutils_py.forecasting.read_series import read_series
from fluxutils_py.frames.frames import is_frame, make_frame
from fluxutils_py.frames.panel import Columns, Panel, read_panel
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.parallel import RankGroup, get_communicator
from fluxutils_py.sklearn_callbacks import begin_fit, nothing, run_with_callbacks
from fluxutils_py.validation import check_integer


@explains_arguments
class Forecaster(ForecasterSettings):
    """Forecast many series and their quantiles with one network, from a long data frame or an (F,
    N, T) array.

    The network reads each series normalised by its past, and learns how the next ``h`` steps differ
    from the seasonal naive forecast.

    Parameters
    ----------
    h : int
        Number of steps to forecast.
    season_length : int, or pair of int, optional
        Steps per season. None: chosen by ``freq``: a day of hours, a week of days, a year of
        months; 1 for integers. Values a long season before each forecast step become inputs too;
        the long season is the multiple of the season, up to 8, that best explains the errors of the
        seasonal naive forecast. A pair, such as ``(24, 168)``, gives both, ``(24,)`` no long one.
    freq : str or int, optional
        Time between two steps: an alias of pandas ("h", "15min", "D", "W", "MS", "ME", "B"), or an
        integer for integer times. None: inferred.
    quantiles : sequence of float
        Levels between 0 and 1 to forecast in addition to the point forecast. The quantiles never
        cross.
    calibrate : bool
        Whether to correct the forecasts by errors on held-out data: where there is enough history,
        networks trained without the end of each series (at most a fifth of its steps) forecast it
        from many origins. Their errors decide how wide the quantiles are, and at each step of the
        horizon the weights between networks, seasonal naive forecast, last value, drift and means;
        see ``correction_``. The networks that are kept are trained on all data. False: the
        networks' own forecasts, in about two thirds of the time.
    transform : "auto", "log" or "none"
        Whether to model the logarithms of the values. "auto": if all values are positive, and the
        loss is not "mse", which asks for means.
    loss : "auto", "smape", "mae", "mse" or a criterion of torch
        Loss of the point forecast. Errors are in units of each series' scale, the mean absolute
        difference from a season before, of the modelled values (logarithms, see ``transform``).
        "smape" adds half of "mae" to the symmetric percentage error. "auto": "smape" for
        logarithms, else "mae". The pinball loss of the quantiles is added.
    network : "auto", "recurrent", "segments", name of a layer, module, class or callable
        "recurrent": an LSTM reads each series step by step, with lags as inputs; "gru", "mingru"
        and the other names of ``cell`` in :class:`fluxutils_py.SequenceRegressor` are other
        recurrent layers. "segments": a recurrent layer reads segments of the last values, a season
        each, and forecasts segments of the horizon, for long horizons; it knows no covariates.
        "auto": "recurrent" or "segments", the one with the smaller error on the end of the training
        part, which is held out for this (segments where they differ by less than 2 %), or the only
        one that can be used. See ``network_``. A module, class or callable replaces the recurrent
        layers: it maps windows ``(S, B, n_in)`` to ``(S, B, n_out)``. A class or callable gets the
        arguments ``n_in`` and ``n_out`` (``hidden_size``). The forecaster adds the output heads and
        a linear bypass. Memory between windows must be in layers with a state, such as those of
        ``fluxutils_py.nn``.
    hidden_size : int, optional
        Width of the recurrent layers. None: 32 for fewer than 10,000 values in all series, else 96.
    n_models : int, optional
        Number of networks, which differ in initial weights and dropout; their forecasts are
        averaged. None: 4, or 2 from 50,000 values on.
    max_steps : int, optional
        Approximate number of optimizer steps, limited to 16 passes over the data or 300 steps,
        whichever is more. None: one per 64 values of all series, at least 100 and at most 1500.
    batchsize, seqsize : int
        Series and time steps per window.
    lr : float
        Peak learning rate of the one-cycle schedule of AdamW.
    hist_exog_list, futr_exog_list, stat_exog_list : sequence of str
        Columns with covariates: known only up to the forecast; also known ahead (pass them to
        ``predict``); one value per series. Columns that are neither numeric nor boolean are
        categories, which become embeddings; a category not seen in training has an embedding of
        zeros, with a warning.
    comm, device, callbacks, random_state, verbose
        As in :class:`fluxutils_py.Estimator`.

    Attributes
    ----------
    state_ : FittedState
        All that was learnt; its fields are the attributes below.
    features_ : Features
        Settings chosen from the data: ``season``, ``lag``, ``input_size``, ``log``.
    frequency_ : Frequency
    loss_name_ : str or callable
    models_ : tuple of nn.Module
    network_ : str
        The kind of the networks, "recurrent" or "segments".
    network_errors_ : dict of str to float
        What ``network="auto"`` compared: the mean absolute (for ``loss="mse"`` squared) error of
        each kind on the end of the training part, relative to that of the seasonal naive forecast.
        Empty if there was no choice.
    loss_curve_ : tuple of float
        Training loss per epoch, averaged over the networks.
    correction_ : Correction or None
        ``weights`` (sources, h) of ``SOURCES`` in the point forecast, ``offsets`` and ``spread`` of
        the quantiles, in units of each series' scale, and ``trust``, the share of these that comes
        from the held-out end. None if ``calibrate`` is false or the history is too short. ``fit``
        warns if the network's weight there, averaged over the horizon, is below 0.1.
    history_ : History
        Ends of the series, from which ``predict`` forecasts.
    ids_ : ndarray
        Ids of the series that ``predict`` forecasts; numbers from 0 if the forecaster was fitted on
        an array.

    Notes
    -----
    One network makes direct multi-horizon forecasts for all series, each normalised by its past:
    Salinas et al. (2020), Int. J. Forecasting 36(3), 1181-1191; Wen et al. (2017),
    arXiv:1711.11053. It models the residuals of a seasonal forecast, and several networks are
    averaged: Smyl (2020), Int. J. Forecasting 36(1), 75-85.

    Examples
    --------
    >>> import numpy as np
    >>> t = np.arange(60)
    >>> y = 10 + np.sin(2 * np.pi * t / 12) + 0.01 * np.random.default_rng(0).normal(size=60)
    >>> fc = Forecaster(h=6, season_length=12, max_steps=5, random_state=0).fit(
    ...     y[None, None]
    ... )  # (F, N, T)
    >>> fc.predict().shape
    (1, 1, 6)
    """

    # -- fit and predict ---------------------------------------------------------------------------

    def fit(
        self,
        df: object,
        y: object = None,
        *,
        static_df: object = None,
        sample_weight: str | None = None,
        id_col: str = "unique_id",
        time_col: str = "ds",
        target_col: str = "y",
    ) -> Self:
        """Train on a panel of series.

        Parameters
        ----------
        df : data frame of pandas, polars or pyarrow, or array of shape (F, N, T)
            A frame has one row per series and time, in any order. Series may differ in length and
            start, and may lack values (null or NaN) and times; rows without a value after the last
            value of all series give a warning, since forecasts begin after them. In an array, each
            feature of each series counts as one series, at integer times from 0.
        y : None
            Ignored; for scikit-learn.
        static_df : data frame, optional
            One row per series with the columns of ``stat_exog_list``. None: ``df`` holds these
            columns.
        sample_weight : str, optional
            Column of ``df`` with the weight of each value as a target, in every forecast of it.
            Weights are scaled to mean 1 over values of weight above 0. A value of weight 0 has no
            part in the loss, and is an input like others.
        id_col, time_col, target_col : str
            Columns of ``df`` with ids, times and targets.

        Returns
        -------
        Forecaster
            Itself.

        Raises
        ------
        DataError
            If the data cannot be used. The message names column and row.
        RankError
            If ranks have different settings or series. A forecaster needs all series on every rank.
        SpecError, ShapeError
            If a parameter or argument has an invalid value or shape. The message names it. An
            earlier fit stays in any case.
        """
        keys = (id_col, time_col, target_col)
        run_with_callbacks(self, lambda: self._fit(df, keys, static_df, sample_weight))
        return self

    def _fit(
        self,
        df: object,
        keys: tuple[str, str, str],
        static_df: object,
        sample_weight: str | None,
    ) -> None:
        with undisturbed(), RankGroup.from_comm(self.comm, "Forecaster.fit") as ranks:
            check_settings(self)
            columns = columns_of(self, *keys)
            panel = read_series(
                df, columns, self.freq, static_df=static_df, sample_weight=sample_weight
            )
            ranks.require_equal(collective_settings(self))
            end_fit = nothing
            if ranks.rank == 0:
                end_fit = begin_fit(self, df, n_epochs=None, fitted=None)
            # before any attribute changes: after an error the earlier fit stays
            state, windows = fit_panel(self, columns, ranks, panel)
            history = start_history(state.models, windows, panel)
        self.state_ = state
        self.history_ = history
        end_fit()

    @undisturbed()
    def predict(
        self,
        df: object = None,
        *,
        h: int | None = None,
        level: Sequence[float] | None = None,
        quantiles: Sequence[float] | None = None,
        futr_df: object = None,
        static_df: object = None,
    ) -> Any:
        """Forecast the next ``h`` steps of each series.

        Parameters
        ----------
        df : as in :meth:`fit`, optional
            Series to forecast, with any ids, each from its end. The network first reads all their
            past. None: the series of ``fit`` and :meth:`update`.
        h : int, optional
            Number of steps, the first ones of the trained horizon. None: all.
        level : sequence of float, optional
            Bands to return, in per cent, such as [80, 90]: columns ``Forecaster-lo-80`` and
            ``Forecaster-hi-80``, which are the trained quantiles 0.1 and 0.9.
        quantiles : sequence of float, optional
            Trained quantiles to return, as columns ``Forecaster-q0.1``. Without ``level`` and
            ``quantiles``: all, with the names of their bands, and ``Forecaster-median``.
        futr_df : data frame, optional
            Covariates known ahead, at all forecast times; see :meth:`make_future_dataframe`.
        static_df : data frame, optional
            As in :meth:`fit`, with ``df`` only.

        Returns
        -------
        data frame, or array of shape (F, N, h)
            For a frame, a frame of the same library with the id, the time, the forecast, and one
            column per quantile. For an array, an array; with quantiles, a dict of arrays by column
            name. Every rank has all of it.
        """
        fitted = self._fitted
        outputs = output_columns(fitted.quantiles, level, quantiles)
        history = self._history_of(df, static_df)
        values = forecast_any(fitted, history, futr_df, h)
        return forecast_frame(fitted, history.panel, values, outputs)

    @undisturbed()
    def update(self, df: object, *, static_df: object = None) -> Self:
        """Append new observations without training; the network reads only the new steps.

        Parameters
        ----------
        df : as in :meth:`fit`
            Rows that follow the stored series, and new series. For an array, the next steps of all
            series.
        static_df : data frame, optional
            As in :meth:`fit`. Those of stored series stay as they are.

        Returns
        -------
        Forecaster
            Itself. Its ``predict()`` now equals ``predict(df)`` with the whole series.

        Raises
        ------
        DataError, ShapeError
            If rows overlap the stored series or follow so late that stored values no longer count,
            if a static covariate of a stored series changes, or if rows cannot be used.
            Nothing changes then.
        """
        fitted = self._fitted
        history = self.history_
        known = history.panel
        panel = self._read_known(df, static_df, known.zone)
        if panel.shape is not None:
            if panel.shape != known.shape:
                raise ShapeError(
                    f"df has shape {(*panel.shape, int(panel.lengths[0]))}; expected (F, N, T) "
                    f"with {known.shape} features and series"
                )
            panel = replace(panel, first=known.lengths)  # its steps follow
        # one column of a frame may not hold both: the stored series would be unusable from then on
        types = {type(label) for label in panel.ids} - {type(label) for label in known.ids}
        if types:
            raise DataError(
                f"column {fitted.columns.id!r} of df holds {types.pop().__name__}, and held "
                f"{type(known.ids[0]).__name__} when the forecaster was fitted; convert the ids"
            )
        longer, series = extended_history(fitted, history, panel)
        self.history_ = longer
        warn_short_series(fitted.features.season, longer.lengths[series], longer.panel.ids[series])
        return self

    def make_future_dataframe(self, h: int | None = None) -> Any:
        """Return a frame of the ids and times that :meth:`predict` forecasts, with the same ``h``,
        to add the covariates known ahead to.
        """
        fitted = self._fitted
        panel = require_frame(self.history_)
        n_steps = check_integer("h", h, 1, optional=True) or fitted.h
        return make_frame(key_columns(fitted, panel, n_steps), panel.types, panel.backend)

    def cross_validation(
        self,
        df: object,
        n_windows: int = 1,
        step_size: int | None = None,
        *,
        h: int | None = None,
        refit: bool | None = False,
        level: Sequence[float] | None = None,
        quantiles: Sequence[float] | None = None,
        static_df: object = None,
        id_col: str = "unique_id",
        time_col: str = "ds",
        target_col: str = "y",
    ) -> Any:
        """Forecast the last part of each series, walking forward in time.

        This forecaster does not change.

        Parameters
        ----------
        df, static_df, id_col, time_col, target_col : as in :meth:`fit`, but data frames only
        n_windows : int
            Number of forecasts of ``h`` steps; the last one covers the last ``h`` steps.
        step_size : int, optional
            Steps between one forecast and the next. None: ``h``.
        h : int, optional
            Number of steps to forecast. None: that of the forecaster.
        refit : bool or None
            True: train for each window. False: train once, on the data before the first window.
            None: do not train, use this forecaster, which was fitted on earlier data or other
            series; each rank may do so by itself. On the data of its fit, the errors are in-sample.
        level, quantiles : as in :meth:`predict`

        Returns
        -------
        data frame
            With id, time, ``cutoff`` (the last known time), target, the forecast and its quantiles:
            ``utilsforecast.evaluation.evaluate`` scores it.

        Raises
        ------
        DataError
            If no series is long enough, or the ``h`` steps of a window have no value in any series.
        """
        comm = None if refit is None else self.comm  # forecasts need no other ranks
        with undisturbed(), RankGroup.from_comm(comm, "Forecaster.cross_validation") as ranks:
            settings = self if h is None else clone(self).set_params(h=h)
            check_settings(settings)
            fitted = self._fitted if refit is None else None
            if fitted is not None and settings.h != fitted.h:
                raise SpecError(
                    f"refit=None takes the networks of the fit, which forecast {fitted.h} steps, "
                    f"not h={h}; leave h out, or train with refit=False"
                )
            step_size = int(settings.h) if step_size is None else step_size
            check_integer("n_windows", n_windows, 1)
            if refit not in (True, False, None):
                raise SpecError(f"refit must be True, False or None, got {refit!r}")
            check_integer("step_size", step_size, 1)
            trained = sorted_quantiles(self) if fitted is None else fitted.quantiles
            outputs = output_columns(trained, level, quantiles)
            walk = {"n_windows": n_windows, "step_size": step_size, "refit": refit}
            ranks.require_equal(walk | collective_settings(settings))
            columns = columns_of(self, id_col, time_col, target_col)
            if fitted is not None:
                columns = fitted.columns
            check_output_names(columns, outputs)
            freq = self.freq if fitted is None else fitted.frequency
            panel = read_panel(df, columns, freq, static_df=static_df)
            return cross_validate(
                settings, fitted, columns, ranks, panel, n_windows, step_size, bool(refit), outputs
            )

    @undisturbed()
    def score(self, df: object, y: object = None) -> float:
        """Return the negative mean absolute error of the forecasts, in units of each series' scale.

        ``df`` holds the steps after the stored series. Rows of other series and times are ignored;
        DataError if no row is left.
        """
        return score_forecasts(self._fitted, self.history_, df)

    @undisturbed()
    def export(self, path: str | PathLike[str], format: str = "onnx") -> None:
        """Write the forecaster to a file that runs without this package: from values in to
        forecasts out.

        Of several ranks only rank 0 writes; the others return at once.

        The file is a graph of one step or a window, like that of :func:`fluxutils_py.export`, with
        normalisation, lags, networks and inverse, so that it forecasts in the units of the series.
        A consumer gives it the values of a series from the first step on, in pieces of any length,
        and the state that the previous piece returned.

        Parameters
        ----------
        path : str or path-like
        format : "onnx" or "torch"
            An ONNX file, which needs ``pip install onnx onnxscript onnxruntime``, or a program of
            ``torch.export``.

        Notes
        -----
        Inputs are ``y`` (S, B, 1), NaN where missing, and, with covariates, ``past``, ``static``
        and ``known``; outputs are the columns of :meth:`predict`, each (S, B, h): the forecasts
        after every step. The metadata name the covariates, and the categories in the order of their
        codes, from 1. All numbers are float64.
        """
        check_format(format)
        export_forecaster(self._fitted, path, format, type(self).__name__, self.comm)

    @undisturbed()
    def check_export(
        self, path: str | PathLike[str], df: object, tolerance: float | None = None
    ) -> float:
        """Compare forecasts of an exported file with those of :meth:`predict`, after every step;
        see :func:`fluxutils_py.check_export`.
        """
        panel = self._read_known(df, None)
        return check_forecaster_export(
            self._fitted, path, panel, 1e-5 if tolerance is None else tolerance
        )

    @undisturbed()
    def save(self, path: str | PathLike[str]) -> None:
        """Write networks, settings, and the ends of the series to a file of plain data.

        Of several ranks only rank 0 writes; the others return at once.
        """
        state = self._fitted
        if get_communicator(self.comm).rank == 0:
            save_forecaster(path, self, state, self.history_)

    @classmethod
    @undisturbed()
    def load(cls, path: str | PathLike[str], **arguments: Any) -> Self:
        """Load a forecaster that :meth:`save` wrote, without running code from the file.

        ``arguments`` replace stored ones. A custom ``network`` or ``loss`` is not stored:
        pass it again. Raises FileNotFoundError if there is no such file, and LoadError if it holds
        no forecaster.
        """
        # before the constructor, which needs the code that the file lacks
        content = read_forecaster(path, arguments, cls.__name__)
        forecaster = cls(**{**content["settings"], **arguments})
        forecaster.state_, forecaster.history_ = load_state(content, forecaster, path)
        return forecaster

    # -- data --------------------------------------------------------------------------------------

    @property
    def _fitted(self) -> FittedState:
        check_is_fitted(self, "state_")
        return self.state_

    def _read_known(self, df: object, static_df: object, zone: str | None = None) -> Panel:
        """Return series of the kind of those of ``fit``; ``zone`` as in :func:`read_panel`."""
        fitted = self._fitted
        known = self.history_.panel
        if is_frame(df) and known.shape is not None:
            raise DataError(
                "df is a data frame, but the forecaster was fitted on an array (F, N, T)"
            )
        # with the frequency of fit: that of a few new rows may look like another
        panel = read_series(df, fitted.columns, fitted.frequency, static_df=static_df, zone=zone)
        if panel.shape is not None and known.shape is None:
            raise DataError("df is an array, but the forecaster was fitted on a data frame")
        # a time without a zone cannot be compared with one that has one
        if (panel.zone is None) != (known.zone is None):
            raise DataError(
                f"the times of column {fitted.columns.time!r} must have a time zone if those of "
                "fit had one"
            )
        # raises DataError where a value has no logarithm, before anything is taken
        fitted.features.forward(panel.values[fitted.columns.target])
        return panel

    def _history_of(self, df: object, static_df: object) -> History:
        """Return the ends of the series to forecast; None: the stored ones."""
        fitted = self._fitted
        # not ignored: the forecasts would look as if they had used it
        if df is None and static_df is not None:
            raise DataError(
                "static_df is given without df: the static covariates of the stored series are "
                "those of fit; give df, or leave static_df out"
            )
        if df is None:
            return self.history_
        panel = self._read_known(df, static_df)
        history = start_history(fitted.models, fitted.windows(panel), panel)
        warn_short_series(fitted.features.season, history.lengths, panel.ids)
        return history

    @property
    def ids_(self) -> np.ndarray:
        return self.history_.panel.ids

    # -- what was learnt ---------------------------------------------------------------------------

    features_ = property(lambda self: self.state_.features)
    frequency_ = property(lambda self: self.state_.frequency)
    loss_name_ = property(lambda self: self.state_.loss_name)
    network_ = property(lambda self: self.state_.network)
    models_ = property(lambda self: self.state_.models)
    correction_ = property(lambda self: self.state_.correction)
    loss_curve_ = property(lambda self: self.state_.loss_curve)
    network_errors_ = property(lambda self: self.state_.network_errors)


# -- walking forward in time -----------------------------------------------------------------------


def cross_validate(
    settings: ForecasterSettings,
    fitted: FittedState | None,
    columns: Columns,
    ranks: RankGroup,
    panel: Panel,
    n_windows: int,
    step_size: int,
    refit: bool,
    outputs: Mapping[str, int],
) -> Any:
    """Implement ``Forecaster.cross_validation``; ``fitted`` are networks that are not trained here,
    and ``outputs`` the columns of forecasts with the number of each among the networks' outputs.
    """
    h = int(settings.h)
    behind = h + step_size * np.arange(n_windows - 1, -1, -1)
    cutoffs = np.maximum(panel.lengths[:, None] - behind, 0)  # (N, W); 0: the series has not begun
    short = np.flatnonzero(cutoffs[:, 0] == 0)
    if len(short) == panel.n_series:
        raise DataError(
            f"no series is long enough: the windows take {behind[0]} steps from the end of each, "
            f"and the longest series has {panel.lengths.max()}; use fewer windows, or a smaller "
            "step_size"
        )
    if len(short):
        warn(
            f"{len(short)} of {panel.n_series} series are too short for the first window, which "
            f"takes {behind[0]} steps from the end of each (series {panel.ids[short[0]]!r} has "
            f"{panel.lengths[short[0]]})"
        )
    first_step = np.zeros(panel.n_series, int)
    parts: list[dict[str, np.ndarray]] = []
    # one pass over the series serves all cutoffs of the same networks
    for group in np.split(cutoffs, n_windows, axis=1) if refit else [cutoffs]:
        made = fitted
        if made is None:
            # cut before anything is chosen: no value after the cutoff can be seen
            past = panel.cut(first_step, group[:, 0])
            made, _ = fit_panel(clone(settings), columns, ranks, past)
        windows = made.windows(panel)
        forecasts = forecasts_along(made, windows, group - 1)
        for cutoff, values in zip(group.T, forecasts, strict=True):
            parts.append(_window_columns(made, panel, cutoff, values, outputs))
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    types = panel.types | {"cutoff": panel.types[columns.time]}
    return make_frame(found, types, panel.backend)


def _window_columns(
    fitted: FittedState,
    panel: Panel,
    cutoff: np.ndarray,
    forecasts: np.ndarray,
    outputs: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Return keys, targets and forecasts (N, 1 + quantiles, h) after the ``cutoff[n]`` first steps
    of each series, for those that have begun.
    """
    h = fitted.h
    target = fitted.columns.target
    series = np.flatnonzero(cutoff)
    future = panel.cut(cutoff, np.where(cutoff > 0, cutoff + h, 0))
    # the keys are those of the h steps after the end of a panel
    empty = replace(future, lengths=np.zeros_like(future.lengths))
    columns = key_columns(fitted, empty, h)
    # the cutoff tells the windows apart, as in frames of NeuralForecast
    columns["cutoff"] = np.repeat(panel.times(series, cutoff[series] - 1), h)
    columns[target] = future.values[target]
    return columns | {name: forecasts[series, i].ravel() for name, i in outputs.items()}
