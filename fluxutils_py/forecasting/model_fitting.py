"""Train the networks of a forecaster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.fitted_forecaster import (
    FittedForecaster,
    array_shape,
    warn_long_horizon,
    warn_short_series,
)
from fluxutils_py.forecasting.forecaster_settings import (
    SEGMENTS,
    ForecasterSettings,
    cell_of,
    columns_of,
    sorted_quantiles,
)
from fluxutils_py.forecasting.held_out_end import HeldOutEnd, walk_held_out_end
from fluxutils_py.forecasting.history import History
from fluxutils_py.forecasting.network_choice import (
    candidate_networks,
    network_errors_of,
    with_network,
)
from fluxutils_py.forecasting.network_size import with_size
from fluxutils_py.forecasting.origin_windows import OriginArray, Origins
from fluxutils_py.forecasting.panel_windows import (
    ArrayFNT,
    ArraySource,
    Channels,
    PackedSeries,
    PanelWindows,
    WindowArray,
)
from fluxutils_py.forecasting.segment_model import SegmentModel, segment_length
from fluxutils_py.inputs.frequency import Frequency
from fluxutils_py.inputs.panel import Panel, panel_of
from fluxutils_py.parallel import RankGroup
from fluxutils_py.sklearn_callbacks import hooks_of
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.make_optimizer import adamw

MOST_EPOCHS = 16  # at most so many passes over the data, or FEW_STEPS steps, whichever is more
FEW_STEPS = 300
PIECE = 8  # a piece of a long series has at least so many windows
# of a network of segments: neighbouring origins are alike, so that of a window of batchsize times
# seqsize steps one in SPARSE is enough for a step of the optimizer
SPARSE = 36
LONG = 96  # horizons above it teach more with each origin, and need fewer steps


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
    network_errors : dict of str to float
        Error of each kind of network on the end of the training part, relative to that of the
        seasonal naive forecast; empty if there was no choice.
    shape : tuple or None
        Numbers of features and series of an array.
    origin : History, or windows and panel
        The ends of the series, or the arguments from which ``start_history`` computes them.
    """

    fitted: FittedForecaster
    frequency: Frequency | None
    loss: Any
    loss_curve: list[float]
    network_errors: dict[str, float]
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
    features = choose_features(
        source, int(settings.h), season, settings.lag, settings.input_size, settings.transform
    )
    loss = settings.loss
    if loss == "auto":
        loss = "smape" if features.log else "mae"
    # these losses compare values, for which they add the seasonal naive forecast
    base = loss == ("mase" if features.log else "smape")
    channels = covariates.channels(features.h, features.n_inputs, base)
    fitted = FittedForecaster(features, channels, covariates, settings)
    sized = with_size(settings, int(source.lengths.sum()))
    sized.callbacks = [*as_callbacks(settings.callbacks), *hooks_of(settings)]
    kinds = candidate_networks(settings, source, features, covariates)
    candidates = {kind: with_network(fitted, kind, source.lengths) for kind in kinds}
    ends: dict[str, HeldOutEnd | None] = {}
    if len(kinds) > 1:
        for kind, candidate in candidates.items():
            made = planned_updates(sized, kind, source.lengths, features.h, ranks)
            of_kind = candidate.windows(series)
            ends[kind] = _held_out_end(sized, kind, of_kind, loss, ranks, made)
    network_errors = network_errors_of(ends, loss, ranks)
    kind = min(network_errors, key=network_errors.__getitem__, default=kinds[0])
    _say_choice(settings, ranks, kind, network_errors)
    fitted = candidates[kind]
    windows = fitted.windows(series)
    est = fit_models(sized, kind, windows, loss, ranks)
    fitted = replace(fitted, models=list(est.model_.members))
    if settings.calibrate:
        if kind not in ends:
            made = est.fitted_parts_.n_steps
            ends[kind] = _held_out_end(sized, kind, windows, loss, ranks, made)
        correction = _correction_of(ends[kind], sorted_quantiles(settings), loss, ranks)
        fitted = replace(fitted, correction=correction)
        windows = replace(windows, correction=correction)
    loss_curve = [value / len(fitted.models) for value in est.loss_curve_]
    panel = panel_of(series)
    warn_long_horizon(features.h, source.lengths)
    warn_short_series(features.season, source.lengths, panel)
    origin = (windows, panel)
    return Fit(fitted, frequency, loss, loss_curve, network_errors, array_shape(series), origin)


def _held_out_end(
    settings: ForecasterSettings,
    kind: str,
    windows: PanelWindows,
    loss: object,
    ranks: RankGroup,
    made: int,
) -> HeldOutEnd | None:
    """Return what networks of a kind, like those of a fit of ``made`` updates, show on the held-out
    end; None for a short history.

    They are trained with fewer updates where many were made: errors far from any training data
    change little then.
    """
    most = max(min(made, FEW_STEPS), made // 2)
    # callbacks are of the networks that are kept
    quiet = copy(settings)
    quiet.callbacks = None
    quiet.verbose = False

    def fit(shortened: PanelWindows) -> list[nn.Module]:
        return list(fit_models(quiet, kind, shortened, loss, ranks, most).model_.members)

    return walk_held_out_end(windows, len(settings.quantiles), fit)


def _correction_of(
    end: HeldOutEnd | None,
    quantiles: tuple[float, ...],
    loss: object,
    ranks: RankGroup,
) -> Correction | None:
    if end is None:
        return None
    correction = learn_correction(end, quantiles, squared=loss == "mse")
    # hosts differ in their last digits
    arrays = [np.asarray(a) for a in (correction.weights, correction.spread, correction.offsets)]
    ranks.broadcast([torch.from_numpy(a) for a in arrays])
    return Correction(arrays[0], float(arrays[1]), arrays[2])


def _say_choice(
    settings: ForecasterSettings,
    ranks: RankGroup,
    kind: str,
    errors: Mapping[str, float],
) -> None:
    """Print which kind of network was chosen, and the errors that decided, if ``verbose`` is
    true.
    """
    # "auto" is of progress bars
    if settings.verbose is True and ranks.rank == 0:
        said = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
        if said:
            said = f" (errors of the seasonal naive forecast's on the end of the series: {said})"
        print(f"network={kind!r}{said}")


class StopAfter:
    """Stop training after so many updates."""

    def __init__(self, most: int) -> None:
        self.most = most

    def on_step(self, loop: Loop) -> None:
        if loop.step >= self.most:
            loop.stop()


def make_network(
    settings: ForecasterSettings,
    kind: str,
    features: Features,
    channels: Channels,
) -> Callable[[], DirectModel | SegmentModel]:
    """Return a callable that makes a network of a forecaster, for inputs with these channels."""
    assert settings.hidden_size is not None
    if kind == SEGMENTS:
        return partial(
            SegmentModel,
            features,
            segment_length(features.season),
            sorted_quantiles(settings),
            int(settings.hidden_size),
            float(settings.dropout),
        )
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
    settings: ForecasterSettings,
    kind: str,
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
    x: WindowArray | OriginArray
    y: WindowArray | OriginArray
    # in a file, neighbouring series are read together; origins lie apart in any case
    shuffle = windows.source.in_memory or kind == SEGMENTS
    passes = _passes(settings, kind, lengths, features.h, ranks)
    if kind == SEGMENTS:
        first = np.minimum(features.input_size // 2, lengths // 4)
        # the last step has no target
        origins = Origins(first, lengths - 1, passes.n_windows * passes.whole)
        x, y = (OriginArray(windows, origins, content) for content in ("inputs", "targets"))
    else:
        x = WindowArray(windows, "inputs")
        y = WindowArray(windows, "targets", warmup_of(windows))
    est = Estimator(
        partial(Ensemble, make_network(settings, kind, features, windows.channels), n_models),
        criterion,
        optimizer,
        passes.spec(settings, shuffle, most_updates),
        comm=ranks,
        scaling=settings.scaling,
        n_jobs=settings.n_jobs,
        device=settings.device,
        callbacks=callbacks,
        random_state=settings.random_state,
        verbose=settings.verbose,
    )
    # not est.fit, which warns of few updates: their number is chosen here
    # a mask of no step would only cost time
    same_length = kind == SEGMENTS or (lengths == lengths[0]).all()
    run_fit(est, FitRequest(x, y, lengths=None if same_length else lengths))
    for member in est.model_.members:
        # no series has targets so far ahead
        member.forget_steps(int(lengths.max()) - 1)
    return est


class Passes(NamedTuple):
    """How training goes through the data.

    Attributes
    ----------
    epochs : int
    n_windows : int
        Updates per epoch.
    batchsize, seqsize : int
        Of one rank.
    whole : int
        The batchsize of all ranks together.
    """

    epochs: int
    n_windows: int
    batchsize: int
    seqsize: int
    whole: int

    def spec(self, settings: ForecasterSettings, shuffle: bool, most_updates: int | None) -> Spec:
        """Return the spec of a fit, whose learning rate follows one cycle over all updates."""
        epochs = self.epochs
        n_updates = epochs * self.n_windows
        if most_updates is not None and most_updates < n_updates:
            n_updates = most_updates
            epochs = -(-n_updates // self.n_windows)
        return Spec(
            epochs=epochs,
            batchsize=self.batchsize,
            seqsize=self.seqsize,
            shuffle=shuffle,
            # bounds the joint norm of all networks' gradients
            clip=math.sqrt(settings.n_models),
            # one more step than there are: the scheduler raises an error after its last one
            scheduler=partial(OneCycleLR, max_lr=float(settings.lr), total_steps=n_updates + 1),
            schedule_every="step",
        )


def planned_updates(
    settings: ForecasterSettings,
    kind: str,
    lengths: np.ndarray,
    h: int,
    ranks: RankGroup,
) -> int:
    """Return how many updates a fit makes if nothing ends it early."""
    passes = _passes(settings, kind, lengths, h, ranks)
    return passes.epochs * passes.n_windows


def _passes(
    settings: ForecasterSettings,
    kind: str,
    lengths: np.ndarray,
    h: int,
    ranks: RankGroup,
) -> Passes:
    batchsize = int(settings.batchsize)
    seqsize = int(settings.seqsize)
    assert settings.max_steps is not None
    if kind == SEGMENTS:
        batchsize = max(1, batchsize * seqsize // SPARSE)
        seqsize = 1
        whole = whole_batchsize(batchsize, settings.scaling, ranks.size)
        updates = max(1, round(settings.max_steps / 2 / math.sqrt(max(1.0, h / LONG))))
        n_windows = min(updates, -(-int(lengths.sum()) // whole))
        most = MOST_EPOCHS
    else:
        whole = whole_batchsize(batchsize, settings.scaling, ranks.size)
        updates = settings.max_steps
        n_windows = steps_per_epoch(lengths, whole, seqsize)
        most = max(MOST_EPOCHS, -(-FEW_STEPS // n_windows))  # more passes overfit
    epochs = min(most, max(1, round(updates / n_windows)))
    return Passes(epochs, n_windows, batchsize, seqsize, whole)


def steps_per_epoch(lengths: np.ndarray, batchsize: int, seqsize: int) -> int:
    """Return the maximal number of windows per epoch, over all orders of the series."""
    rows = Segments.from_lengths(len(lengths), int(lengths.max()), lengths).fold(
        batchsize, PIECE * seqsize
    )
    longest = np.sort(rows.length)[::-1][: -(-len(rows) // batchsize)]
    return int(np.sum(-(-longest // seqsize)))
