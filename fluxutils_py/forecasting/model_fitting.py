"""Choose the kind of a forecaster's networks on the end of the training part, and train them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from fluxutils_py.auto.sequence_estimators import CELLS
from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, RankError, SpecError, warn
from fluxutils_py.estimator import Estimator, Spec
from fluxutils_py.estimator.building import build_model
from fluxutils_py.estimator.fit_loop import FitLoop
from fluxutils_py.estimator.fitting import begun_fit
from fluxutils_py.forecasting.calibration import HeldOutEnd, learn_correction, walk_held_out_end
from fluxutils_py.forecasting.channels import Channels, fit_covariates
from fluxutils_py.forecasting.feature_choice import choose_features, season_within, usual_season
from fluxutils_py.forecasting.features import Correction
from fluxutils_py.forecasting.fitted_state import FittedState, warn_short_series
from fluxutils_py.forecasting.forecaster_settings import (
    LEAST_STEPS,
    RECURRENT,
    SEGMENTS,
    ForecasterSettings,
    kind_of,
    seasons_of,
    sorted_quantiles,
    with_size,
)
from fluxutils_py.forecasting.networks import (
    DirectModel,
    Ensemble,
    ForecastLoss,
    SegmentModel,
    segment_length,
    segments_of_past,
)
from fluxutils_py.forecasting.panel_windows import (
    OriginArray,
    PackedSeries,
    PanelWindows,
    WindowArray,
)
from fluxutils_py.forecasting.read_series import target_weights
from fluxutils_py.frames.panel import Columns, Panel
from fluxutils_py.parallel import RankGroup
from fluxutils_py.reporting.progress import say_stage
from fluxutils_py.sklearn_callbacks import hooks_of
from fluxutils_py.training.hooks import as_callbacks
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.make_optimizer import adamw

MOST_EPOCHS = 16  # at most so many passes over the data, or FEW_STEPS steps, whichever is more
FEW_STEPS = 300
MODELS_HELD_OUT = 2  # at most: two forecast nearly as well as more
DROPOUT = 0.1
WEIGHT_DECAY = 1e-3
PIECE = 8  # a piece of a long series has at least so many windows
# of a network of segments: neighbouring origins are alike, so that of a window of batchsize times
# seqsize steps one in SPARSE is enough for a step of the optimizer
SPARSE = 36
LITTLE = 0.1  # weight of the networks in a forecast that others make
LONG = 96  # horizons above it teach more with each origin, and need fewer steps


def fit_panel(
    settings: ForecasterSettings,
    columns: Columns,
    ranks: RankGroup,
    panel: Panel,
) -> tuple[FittedState, PanelWindows]:
    """Choose features and train networks on a panel, which all ranks have; return what was learnt
    and the windows of the panel.
    """
    require_same_series(ranks, panel)
    if panel.lengths.max() < 2:
        raise DataError(
            f"there is nothing to learn from: none of {panel.n_series} series has two steps; an "
            "array is (F, N, T): transpose it if time comes first, as with df.transpose(2, 1, 0)"
        )
    fitted = choose_inputs(settings, columns, panel)
    lengths = panel.lengths
    weights = target_weights(panel)
    sized = with_size(settings, int(lengths.sum()))
    sized.callbacks = [*as_callbacks(settings.callbacks), *hooks_of(settings)]
    candidates = {}
    for kind in candidate_networks(settings, lengths, fitted, weights is not None):
        inputs = with_network(fitted, kind, lengths)
        candidates[kind] = LearningData(inputs, inputs.windows(panel), weights)
    ends: dict[str, HeldOutEnd | None] = {}
    if len(candidates) > 1:
        for kind, data in candidates.items():
            epochs, n_windows = passes_of(sized, data, ranks)
            ends[kind] = _held_out_end(sized, data, ranks, epochs * n_windows)
    errors = network_errors_of(ends, fitted.loss_name, ranks)
    best = best_network(errors) if errors else next(iter(candidates))
    data = candidates[best]
    est = fit_models(sized, data, ranks)
    correction = None
    if settings.calibrate:
        end = ends.get(best)
        if end is None:
            end = _held_out_end(sized, data, ranks, est.fitted_parts_.n_steps)
        correction = _correction_of(end, data.fitted, ranks)
    n_models = int(sized.n_models)
    fitted = replace(
        data.fitted,
        models=tuple(est.model_.members),
        correction=correction,
        loss_curve=tuple(value / n_models for value in est.loss_curve_),
        network_errors=errors,
    )
    warn_long_horizon(fitted.h, lengths)
    warn_short_series(fitted.features.season, lengths, panel.ids)
    warn_little_learnt(correction, int(sized.max_steps))
    return fitted, data.windows


def choose_inputs(settings: ForecasterSettings, columns: Columns, panel: Panel) -> FittedState:
    """Return a state without networks: features, and the conversion of covariates."""
    source = PackedSeries(panel.values[columns.target][None], panel.lengths)
    season, long_season = seasons_of(settings)
    if season is None:
        season = season_within(usual_season(panel.frequency), int(source.lengths.max()))
    loss = settings.loss
    transform = settings.transform
    if transform == "auto" and loss == "mse":
        transform = "none"  # the mean of logarithms is not the logarithm of the mean
    features = choose_features(source, int(settings.h), int(season), long_season, transform)
    if loss == "smape" and not features.log:
        raise SpecError(
            "loss='smape' compares logarithms, which are not modelled here; use loss='mae'"
        )
    channels = Channels(
        features.h,
        features.n_inputs,
        hist=fit_covariates(columns.hist, panel.values),
        stat=fit_covariates(columns.stat, panel.static),
        futr=fit_covariates(columns.futr, panel.values),
    )
    if loss == "auto":
        loss = "smape" if features.log else "mae"
    quantiles = sorted_quantiles(settings)
    return FittedState(features, channels, columns, quantiles, panel.frequency, loss)


@dataclass(frozen=True)
class LearningData:
    """What networks learn from.

    Attributes
    ----------
    fitted : FittedState
        Without networks; its ``network`` says of which kind they are.
    windows : PanelWindows
    weights : PackedSeries or None
        Of the targets, see ``target_weights``.
    """

    fitted: FittedState
    windows: PanelWindows
    weights: PackedSeries | None

    def inputs_and_targets(self, most_origins: int) -> tuple[WindowArray, WindowArray]:
        """Return what networks are trained on; those of segments, from at most so many origins."""
        windows = self.windows
        lengths = windows.source.lengths
        if self.fitted.network != SEGMENTS:
            # no targets in one long season, or a quarter of a short series
            first = np.minimum(windows.features.lag, lengths // 4)
            y = WindowArray(windows, "targets", first, weights=self.weights)
            return WindowArray(windows, "inputs"), y
        first = np.minimum(windows.features.input_size // 2, lengths // 4)
        # the last step has no target
        at_origins = partial(OriginArray, windows, first=first, stop=lengths - 1, most=most_origins)
        return at_origins("inputs"), at_origins("targets", weights=self.weights)


def _held_out_end(
    settings: ForecasterSettings, data: LearningData, ranks: RankGroup, made: int
) -> HeldOutEnd | None:
    """Return what networks like those of a fit of ``made`` updates show on the held-out end; None
    for a short history.

    They are fewer, and trained with fewer updates where many were made, for the sake of time.
    """
    most = max(min(made, FEW_STEPS), made // 2)
    say_stage(
        settings.verbose,
        ranks,
        f"trying network={data.fitted.network!r} on the end of the series, which is held out",
    )

    def stop_early(loop: Loop) -> None:
        # windows without a target count too, as in the schedule
        if loop.step >= most:
            loop.stop()

    # the user's callbacks are of the networks that are kept
    quiet = copy(settings)
    quiet.callbacks = stop_early
    quiet.verbose = False
    quiet.n_models = min(int(settings.n_models), MODELS_HELD_OUT)

    def fit(shortened: PanelWindows) -> list[nn.Module]:
        est = fit_models(quiet, replace(data, windows=shortened), ranks, most)
        return list(est.model_.members)

    return walk_held_out_end(data.windows, len(settings.quantiles), fit)


def _correction_of(
    end: HeldOutEnd | None, fitted: FittedState, ranks: RankGroup
) -> Correction | None:
    """Return what the held-out end teaches."""
    if end is None:
        return None
    learnt = learn_correction(end, fitted.quantiles, squared=fitted.loss_name == "mse")
    # hosts differ in their last digits
    arrays = (learnt.weights, learnt.spread, learnt.offsets, learnt.trust)
    ranks.broadcast([torch.from_numpy(a) for a in arrays])
    return learnt


def make_network(
    settings: ForecasterSettings, fitted: FittedState
) -> Callable[[], DirectModel | SegmentModel]:
    """Return a callable that makes a network of a forecaster, of its kind and for its inputs."""
    if fitted.network == SEGMENTS:
        return partial(
            SegmentModel,
            fitted.features,
            fitted.quantiles,
            int(settings.hidden_size),
            DROPOUT,
        )
    network = settings.network

    def body(n_in: int, n_out: int) -> nn.Module:
        if not isinstance(network, str):
            return build_model(network, n_in, n_out, None, None)
        # a file may say that "auto" chose recurrent networks
        cell = CELLS["lstm" if network in ("auto", RECURRENT) else network]
        return cell(n_in, n_out, 1, 0.0)

    return partial(
        DirectModel,
        body,
        fitted.channels,
        fitted.quantiles,
        int(settings.hidden_size),
        DROPOUT,
    )


def require_same_series(ranks: RankGroup, panel: Panel) -> None:
    """Raise :class:`RankError` on every rank unless all have the same series, before anything is
    chosen by them.
    """
    if ranks.is_single:
        return
    columns = [*panel.values.values(), *panel.static.values()]
    # the bytes of objects are addresses: labels are compared as text
    labels = [a.astype(str) if a.dtype == object else a for a in (panel.ids, *columns)]
    digest = digest_arrays(panel.first, panel.lengths, *labels)
    try:
        ranks.require_equal(
            {
                "the number of series": panel.n_series,
                "the frequency": panel.frequency.text,
                "the series (digest)": digest,
            }
        )
    except RankError as error:
        raise RankError(
            f"{error}. A forecaster has no sharded=True, since what it chooses depends on all "
            "series (transform, lags, scales): give all of them on every rank, or set comm=None to "
            "fit a separate forecaster on each rank"
        ) from None


def fit_models(
    settings: ForecasterSettings,
    data: LearningData,
    ranks: RankGroup,
    most_updates: int | None = None,
) -> Estimator:
    """Train an :class:`Ensemble` of ``n_models`` networks, which differ in initial weights and
    dropout.

    All networks train on the same windows: cutting these takes a third of the time of one network's
    step. They make at most ``most_updates``. Learning rates follow one cycle over all updates.
    """
    lengths = data.windows.source.lengths
    n_models = int(settings.n_models)
    fitted = data.fitted
    epochs, n_windows = passes_of(settings, data, ranks)
    batchsize, seqsize = _window_size(settings, fitted.network)
    x, y = data.inputs_and_targets(n_windows * batchsize * ranks.size)
    n_updates = epochs * n_windows
    if most_updates is not None and most_updates < n_updates:
        n_updates = most_updates
        epochs = -(-n_updates // n_windows)
    lr = float(settings.lr)
    spec = Spec(
        epochs=epochs,
        batchsize=batchsize,
        seqsize=seqsize,
        shuffle=True,
        # bounds the joint norm of all networks' gradients
        clip=math.sqrt(n_models),
        # one more step than there are: the scheduler raises an error after its last one
        lr_schedule=("step", partial(OneCycleLR, max_lr=lr, total_steps=n_updates + 1)),
    )
    est = Estimator(
        partial(Ensemble, make_network(settings, fitted), n_models),
        ForecastLoss(fitted.loss_name, fitted.h, fitted.quantiles),
        partial(adamw, lr=lr, weight_decay=WEIGHT_DECAY),
        spec,
        comm=ranks,
        device=settings.device,
        callbacks=settings.callbacks,
        random_state=settings.random_state,
        verbose=settings.verbose,
    )
    # not est.fit, which warns of few updates: their number is chosen here
    # a mask of no step would only cost time
    same_length = fitted.network == SEGMENTS or (lengths == lengths[0]).all()
    with begun_fit(est, x, y, lengths=None if same_length else lengths) as fit:
        fit.train(FitLoop(fit.cut(fit.settings), fit.ranks, fit.rng))
    for member in est.model_.members:
        # no series has targets so far ahead
        member.forget_steps(int(lengths.max()) - 1)
    return est


def _window_size(settings: ForecasterSettings, network: str) -> tuple[int, int]:
    """Return the series (or origins) of one rank, and the steps, in a window."""
    batchsize = int(settings.batchsize)
    seqsize = int(settings.seqsize)
    if network == SEGMENTS:
        return max(1, batchsize * seqsize // SPARSE), 1
    return batchsize, seqsize


def passes_of(
    settings: ForecasterSettings, data: LearningData, ranks: RankGroup
) -> tuple[int, int]:
    """Return how many epochs a fit makes if nothing ends it early, and its updates per epoch."""
    lengths = data.windows.source.lengths
    network = data.fitted.network
    whole = _window_size(settings, network)[0] * ranks.size
    if network == SEGMENTS:
        updates = max(1, round(settings.max_steps / 2 / math.sqrt(max(1.0, data.fitted.h / LONG))))
        n_windows = min(updates, -(-int(lengths.sum()) // whole))
        most = MOST_EPOCHS
    else:
        updates = settings.max_steps
        n_windows = steps_per_epoch(lengths, whole, int(settings.seqsize))
        most = max(MOST_EPOCHS, -(-FEW_STEPS // n_windows))  # more passes overfit
    return min(most, max(1, round(updates / n_windows))), n_windows


def steps_per_epoch(lengths: np.ndarray, batchsize: int, seqsize: int) -> int:
    """Return the maximal number of windows per epoch, over all orders of the series."""
    rows = Segments.from_lengths(len(lengths), int(lengths.max()), lengths).fold(
        batchsize, PIECE * seqsize
    )
    longest = np.sort(rows.length)[::-1][: -(-len(rows) // batchsize)]
    return int(np.sum(-(-longest // seqsize)))


def warn_long_horizon(h: int, lengths: np.ndarray) -> None:
    """Warn, in training, of a horizon that no series is longer than."""
    # in training, targets end with the series
    longest = int(lengths.max())
    if longest <= h:
        warn(
            f"no series is longer than the horizon of {h} steps (the longest has {longest}): "
            f"training does not see what comes {longest} or more steps later, which is forecast "
            "as the season before"
        )


def warn_little_learnt(correction: Correction | None, max_steps: int) -> None:
    """Warn where the networks have hardly a part in the forecasts, in the mean of the horizon."""
    # networks that were not trained do not show that there is nothing to learn
    if correction is None or max_steps < LEAST_STEPS:
        return
    # of what was learnt, before it was mixed with the network as it is
    learnt = float((1 - (1 - correction.weights[0]) / correction.trust).mean())
    if learnt < LITTLE:
        warn(
            f"the networks earned a weight of {learnt:.2f} on the held-out ends of the series, "
            "averaged over the horizon: nothing was learnt beyond simple forecasts, whose weights "
            "are in correction_. Covariates or more series may help; a random walk holds nothing "
            "more to learn"
        )


# -- the kind of networks --------------------------------------------------------------------------

# a recurrent network has all its outputs at each step: with more, its training takes minutes
MOST_OUTPUTS = 1_000
LEAST_SEGMENTS = 4  # of the past, of a network of segments
LEAST_LENGTH = 4_000  # of all series, without which segments have too little to learn from
NEAR = (
    1.02  # errors of segments, relative to the other kind's, that a held-out end cannot tell apart
)


def with_network(fitted: FittedState, kind: str, lengths: np.ndarray) -> FittedState:
    """Return what is fitted, with the features and channels of a kind of network."""
    if kind == fitted.network:
        return fitted
    of = fitted.features
    n_past = segments_of_past(of.season, int(np.median(lengths)), of.h)
    # other values are inputs, and the units of the outputs stay
    features = replace(of, lag=of.season, input_size=n_past * segment_length(of.season))
    channels = replace(fitted.channels, history=features.n_inputs)
    return replace(fitted, features=features, channels=channels, network=kind)


def candidate_networks(
    settings: ForecasterSettings,
    lengths: np.ndarray,
    fitted: FittedState,
    is_weighted: bool,
) -> list[str]:
    """Return the kinds of networks that can be used, the first of which needs no choice.

    ``is_weighted`` says whether targets have weights, or some of them only validate.

    Raises
    ------
    DataError
        If it is "segments" and there are covariates.
    """
    has_covariates = bool(fitted.channels.covariates)
    asked = kind_of(settings)
    if asked == SEGMENTS and has_covariates:
        raise DataError(
            "network='segments' reads the last values alone, but there are covariates; leave out "
            "hist_exog_list, futr_exog_list and stat_exog_list, or set network='recurrent'"
        )
    if asked != "auto":
        return [asked]
    features = fitted.features
    if (
        has_covariates
        or is_weighted
        or seasons_of(settings)[1] != "auto"
        or segments_of_past(features.season, int(np.median(lengths)), features.h) < LEAST_SEGMENTS
        or lengths.sum() < LEAST_LENGTH
    ):
        return [RECURRENT]
    if features.h * (1 + len(settings.quantiles)) > MOST_OUTPUTS:
        return [SEGMENTS]
    return [RECURRENT, SEGMENTS]


def network_errors_of(
    ends: Mapping[str, HeldOutEnd | None],
    loss: object,
    ranks: RankGroup,
) -> dict[str, float]:
    """Return the error of each kind of network on the held-out end, relative to that of the
    seasonal naive forecast; empty where the history is too short for one.
    """
    known = {kind: end for kind, end in ends.items() if end is not None}
    errors = np.array([relative_error(end, loss) for end in known.values()])
    # hosts differ in their last digits, and must choose the same
    ranks.broadcast([torch.from_numpy(errors)])
    return dict(zip(known, errors.tolist(), strict=True))


def best_network(errors: Mapping[str, float]) -> str:
    """Return the kind of network with the smallest error; segments, which train and forecast in a
    fifth of the time, where their error is near it.
    """
    return min(errors, key=lambda kind: errors[kind] / (NEAR if kind == SEGMENTS else 1.0))


def relative_error(end: HeldOutEnd, loss: object) -> float:
    """Return the mean error of the point forecasts relative to that of the seasonal naive ones."""
    power = 2 if loss == "mse" else 1
    # of the same steps: in units of the scale, the naive forecast's error is the target
    known = ~np.isnan(end.errors)
    own = np.abs(end.errors[known]) ** power
    naive = np.abs(end.targets[known]) ** power
    return float(own.mean() / max(naive.mean(), 1e-30))
