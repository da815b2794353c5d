"""Train the networks of a forecaster."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, RankError
from fluxutils_py.estimator import Estimator, Spec
from fluxutils_py.estimator.building import build_model
from fluxutils_py.estimator.estimator_settings import as_callbacks
from fluxutils_py.estimator.fit_data import FitRequest
from fluxutils_py.estimator.fitting import run_fit
from fluxutils_py.estimator.minibatch_size import whole_batchsize
from fluxutils_py.forecasting.correction import Correction
from fluxutils_py.forecasting.correction_choice import learn_correction
from fluxutils_py.forecasting.covariates import Covariates
from fluxutils_py.forecasting.direct_model import (
    DirectModel,
    Ensemble,
    ForecastLoss,
    recurrent_body,
)
from fluxutils_py.forecasting.feature_choice import (
    choose_features,
    season_within,
    usual_season,
)
from fluxutils_py.forecasting.fitted_forecaster import (
    FittedForecaster,
    array_shape,
    warn_long_horizon,
    warn_short_series,
)
from fluxutils_py.forecasting.forecaster_settings import (
    ForecasterSettings,
    cell_of,
    columns_of,
    sorted_quantiles,
)
from fluxutils_py.forecasting.held_out_end import walk_held_out_end
from fluxutils_py.forecasting.history import History
from fluxutils_py.forecasting.network_size import SizedSettings, with_size
from fluxutils_py.forecasting.panel_windows import (
    ArrayFNT,
    ArraySource,
    Channels,
    PackedSeries,
    PanelWindows,
    WindowArray,
)
from fluxutils_py.inputs.frequency import Frequency
from fluxutils_py.inputs.panel import Panel, panel_of
from fluxutils_py.parallel import RankGroup
from fluxutils_py.sklearn_callbacks import hooks_of
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.make_optimizer import adamw

MOST_EPOCHS = 16  # at most so many passes over the data, or FEW_STEPS steps, whichever is more
FEW_STEPS = 300
MODELS_HELD_OUT = 2  # at most: two forecast nearly as well as more
PIECE = 8  # a piece of a long series has at least so many windows


class Fit(NamedTuple):
    """What a forecaster keeps of a fit, or a file of a forecaster.

    Attributes
    ----------
    fitted : FittedForecaster
    frequency : Frequency or None
    loss : str or callable
        The loss of the point forecast, chosen if it was "auto".
    loss_curve : list of float
        Loss per epoch, averaged over the networks.
    shape : tuple or None
        Numbers of features and series of an array.
    origin : History, or windows and panel
        The ends of the series, or the arguments from which ``start_history`` computes them.
    """

    fitted: FittedForecaster
    frequency: Frequency | None
    loss: Any
    loss_curve: list[float]
    shape: tuple[int, int] | None
    origin: History | tuple[PanelWindows, Panel | None]


def fit_panel(settings: ForecasterSettings, ranks: RankGroup, series: Panel | ArrayFNT) -> Fit:
    """Choose features and train networks on a panel, or on an array, which all ranks have."""
    require_same_series(ranks, series)
    covariates = Covariates()
    frequency = None
    source: PackedSeries | ArraySource
    if isinstance(series, Panel):
        covariates = Covariates.of(series, columns_of(settings))
        frequency = series.frequency
        source = PackedSeries(series.values[settings.target_col][None], series.lengths)
    else:
        source = ArraySource(series)
    if settings.season_length is None:
        season = season_within(usual_season(frequency), int(source.lengths.max()))
    else:
        season = int(settings.season_length)
    transform = settings.transform
    if transform == "auto" and settings.loss == "mse":
        transform = "none"  # the mean of logarithms is not the logarithm of the mean
    features = choose_features(
        source, int(settings.h), season, settings.lag, settings.input_size, transform
    )
    loss = settings.loss
    if loss == "auto":
        loss = "smape" if features.log else "mae"
    # these losses compare values, for which they add the seasonal naive forecast
    base = loss == ("mase" if features.log else "smape")
    channels = covariates.channels(features.h, features.n_inputs, base)
    fitted = FittedForecaster(features, channels, covariates, settings)
    windows = fitted.windows(series)
    sized = with_size(settings, int(source.lengths.sum()))
    sized.callbacks = [*as_callbacks(settings.callbacks), *hooks_of(settings)]
    est = fit_models(sized, windows, loss, ranks)
    fitted = replace(fitted, models=list(est.model_.members))
    if settings.calibrate:
        correction = _held_out_correction(sized, windows, loss, ranks, est)
        fitted = replace(fitted, correction=correction)
        windows = replace(windows, correction=correction)
    loss_curve = [value / len(fitted.models) for value in est.loss_curve_]
    panel = panel_of(series)
    warn_long_horizon(features.h, source.lengths)
    warn_short_series(features.season, source.lengths, panel)
    return Fit(fitted, frequency, loss, loss_curve, array_shape(series), (windows, panel))


def _held_out_correction(
    settings: SizedSettings,
    windows: PanelWindows,
    loss: object,
    ranks: RankGroup,
    est: Estimator,
) -> Correction | None:
    """Return what networks like those of a fit show on the held-out end; None for a short history.

    They are fewer, and trained with fewer updates where many were made, for the sake of time.
    """
    made = est.fitted_parts_.n_steps
    most = max(min(made, FEW_STEPS), made // 2)
    # callbacks are of the networks that are kept
    quiet = copy(settings)
    quiet.callbacks = None
    quiet.verbose = False
    quiet.n_models = min(int(settings.n_models), MODELS_HELD_OUT)

    def fit(shortened: PanelWindows) -> list[nn.Module]:
        return list(fit_models(quiet, shortened, loss, ranks, most).model_.members)

    quantiles = sorted_quantiles(settings)
    end = walk_held_out_end(windows, len(quantiles), fit)
    if end is None:
        return None
    correction = learn_correction(end, quantiles, squared=loss == "mse")
    # hosts differ in their last digits
    arrays = [np.asarray(a) for a in (correction.weights, correction.spread, correction.offsets)]
    ranks.broadcast([torch.from_numpy(a) for a in arrays])
    return Correction(arrays[0], float(arrays[1]), arrays[2])


class StopAfter:
    """Stop training after so many updates."""

    def __init__(self, most: int) -> None:
        self.most = most

    def on_step(self, loop: Loop) -> None:
        if loop.step >= self.most:
            loop.stop()


def make_network(settings: SizedSettings, channels: Channels) -> Callable[[], DirectModel]:
    """Return a callable that makes the network of a forecaster, for inputs with these channels."""
    if settings.model is None:
        body = recurrent_body(cell_of(settings.cell), int(settings.num_layers))
    else:
        body = partial(_custom_body, settings.model)
    return partial(
        DirectModel,
        body,
        channels,
        sorted_quantiles(settings),
        int(settings.hidden_size),
        float(settings.dropout),
    )


def _custom_body(model: object, n_in: int, n_out: int) -> nn.Module:
    return build_model(model, n_in, n_out, None, None)


def warmup_of(windows: PanelWindows) -> np.ndarray:
    """Return the first step of each series with targets: after one long season, or a quarter of a
    short series.
    """
    lengths = windows.source.lengths
    return np.minimum(windows.features.lag, lengths // 4)


def require_same_series(ranks: RankGroup, series: Panel | ArrayFNT) -> None:
    """Raise :class:`RankError` on every rank unless all have the same series, before anything is
    chosen by them.
    """
    if ranks.is_single:
        return
    try:
        ranks.require_equal(_traits(series))
    except RankError as error:
        raise RankError(
            f"{error}. A forecaster has no sharded=True, since what it chooses depends on all "
            "series (transform, lags, scales): give all of them on every rank, such as an array "
            "(F, N, T) that maps a file, or set comm=None to fit a separate forecaster on each "
            "rank"
        ) from None


def _traits(series: Panel | ArrayFNT) -> dict[str, object]:
    if isinstance(series, Panel):
        return {
            "the number of series": series.n_series,
            "the ids of the series (digest)": digest_arrays(series.ids.astype(str)),
            "the times of the series (digest)": digest_arrays(series.first, series.lengths),
            "the frequency": series.frequency.text,
            "the values of the series (digest)": _digest_columns(series.values),
            "the static covariates (digest)": _digest_columns(series.static),
        }
    # not the values: the array may be larger than memory
    return {
        "the shape of the array": tuple(series.shape),
        "its type": series.dtype,
        "whether it is in memory": type(series) is np.ndarray,
    }


def _digest_columns(columns: dict[str, np.ndarray]) -> str:
    # the bytes of objects are addresses: categories are compared as text
    arrays = [v.astype(str) if v.dtype == object else v for v in columns.values()]
    return digest_arrays(*map(np.asarray, arrays))


def fit_models(
    settings: SizedSettings,
    windows: PanelWindows,
    loss: object,
    ranks: RankGroup,
    most_updates: int | None = None,
) -> Estimator:
    """Train an :class:`Ensemble` of ``n_models`` networks, which differ in initial weights and
    dropout.

    All networks train on the same windows: cutting these takes a third of the time of one network's
    step. They make at most ``most_updates``.

    Raises
    ------
    DataError
        If no series has two steps.
    """
    lengths = windows.source.lengths
    if lengths.max() < 2:
        raise DataError("there is nothing to learn from: no series has two steps")
    features = windows.features
    n_models = int(settings.n_models)
    criterion = ForecastLoss(loss, features.h, sorted_quantiles(settings), features.log, n_models)
    callbacks = as_callbacks(settings.callbacks)
    if most_updates is not None:
        callbacks = [*callbacks, StopAfter(most_updates)]
    optimizer = partial(adamw, lr=float(settings.lr), weight_decay=float(settings.weight_decay))
    est = Estimator(
        partial(Ensemble, make_network(settings, windows.channels), n_models),
        criterion,
        optimizer,
        _training_spec(settings, windows, ranks, most_updates),
        comm=ranks,
        scaling=settings.scaling,
        n_jobs=settings.n_jobs,
        device=settings.device,
        callbacks=callbacks,
        random_state=settings.random_state,
        verbose=settings.verbose,
    )
    x = WindowArray(windows, "inputs")
    y = WindowArray(windows, "targets", warmup_of(windows))
    # not est.fit, which warns of few updates: their number is chosen here
    # a mask of no step would only cost time
    same_length = (lengths == lengths[0]).all()
    run_fit(est, FitRequest(x, y, lengths=None if same_length else lengths))
    for member in est.model_.members:
        # no series has targets so far ahead
        member.forget_steps(int(lengths.max()) - 1)
    return est


def _training_spec(
    settings: SizedSettings,
    windows: PanelWindows,
    ranks: RankGroup,
    most_updates: int | None,
) -> Spec:
    """Return the spec of the fit, whose learning rate follows one cycle over all steps."""
    batchsize = int(settings.batchsize)
    seqsize = int(settings.seqsize)
    whole = whole_batchsize(batchsize, settings.scaling, ranks.size)
    n_steps = steps_per_epoch(windows.source.lengths, whole, seqsize)
    most = max(MOST_EPOCHS, -(-FEW_STEPS // n_steps))  # more passes overfit
    epochs = min(most, max(1, round(settings.max_steps / n_steps)))
    n_updates = epochs * n_steps
    if most_updates is not None and most_updates < n_updates:
        n_updates = most_updates
        epochs = -(-n_updates // n_steps)
    return Spec(
        epochs=epochs,
        batchsize=batchsize,
        seqsize=seqsize,
        shuffle=windows.source.in_memory,  # in a file, neighbouring series are read together
        clip=math.sqrt(settings.n_models),  # bounds the joint norm of all networks' gradients
        # one more step than there are: the scheduler raises an error after its last one
        scheduler=partial(OneCycleLR, max_lr=float(settings.lr), total_steps=n_updates + 1),
        schedule_every="step",
    )


def steps_per_epoch(lengths: np.ndarray, batchsize: int, seqsize: int) -> int:
    """Return the maximal number of windows per epoch, over all orders of the series."""
    rows = Segments.from_lengths(len(lengths), int(lengths.max()), lengths).fold(
        batchsize, PIECE * seqsize
    )
    longest = np.sort(rows.length)[::-1][: -(-len(rows) // batchsize)]
    return int(np.sum(-(-longest // seqsize)))
