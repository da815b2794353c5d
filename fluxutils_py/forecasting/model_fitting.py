"""Train the networks of a forecaster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from fluxutils_py.auto.sequence_estimators import CELLS
from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, RankError, warn
from fluxutils_py.estimator import Estimator, Spec
from fluxutils_py.estimator.building import build_model
from fluxutils_py.estimator.fitting import run_fit
from fluxutils_py.forecasting.calibration import HeldOutEnd, learn_correction, walk_held_out_end
from fluxutils_py.forecasting.correction import Correction
from fluxutils_py.forecasting.covariates import Covariates
from fluxutils_py.forecasting.direct_model import (
    DirectModel,
    Ensemble,
    ForecastLoss,
    recurrent_body,
)
from fluxutils_py.forecasting.feature_choice import (
    choose_features,
    find_season,
    season_within,
    usual_season,
)
from fluxutils_py.forecasting.fitted_state import (
    FittedState,
    warn_little_learnt,
    warn_long_horizon,
    warn_short_series,
)
from fluxutils_py.forecasting.forecaster_settings import (
    RECURRENT,
    SEGMENTS,
    ForecasterSettings,
    seasons_of,
    sorted_quantiles,
)
from fluxutils_py.forecasting.network_choice import (
    best_network,
    candidate_networks,
    network_errors_of,
    with_network,
)
from fluxutils_py.forecasting.network_size import SizedSettings, with_size
from fluxutils_py.forecasting.panel_windows import (
    OriginArray,
    Origins,
    PackedSeries,
    PanelWindows,
    WindowArray,
)
from fluxutils_py.forecasting.read_series import equal_weights, target_weights, training_part
from fluxutils_py.forecasting.segment_model import SegmentModel, segment_length
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
LONG = 96  # horizons above it teach more with each origin, and need fewer steps


def fit_panel(
    settings: ForecasterSettings,
    columns: Columns,
    ranks: RankGroup,
    panel: Panel,
    val_size: int = 0,
) -> tuple[FittedState, PanelWindows]:
    """Choose features and train networks on a panel, which all ranks have; return what was learnt
    and the windows of the panel.
    """
    require_same_series(ranks, panel)
    _require_two_steps(panel)
    # all that is chosen or learnt is so from this part alone
    training = training_part(panel, val_size)
    fitted = choose_inputs(settings, columns, training)
    lengths = training.lengths
    sized = with_size(settings, int(lengths.sum()))
    sized.callbacks = [*as_callbacks(settings.callbacks), *hooks_of(settings)]
    candidates = _candidates(settings, fitted, training, panel, val_size)
    chosen = _choose_network(sized, candidates, ranks)
    data = chosen.data
    est = fit_models(sized, data, ranks)
    correction = None
    if settings.calibrate:
        end = chosen.end
        if end is None:
            end = _held_out_end(sized, data, ranks, est.fitted_parts_.n_steps)
        correction = _correction_of(end, data.fitted, ranks)
    n_models = int(sized.n_models)
    fitted = replace(
        data.fitted,
        models=tuple(est.model_.members),
        correction=correction,
        loss_curve=tuple(value / n_models for value in est.loss_curve_),
        validation_loss_curve=tuple(value / n_models for value in est.validation_loss_curve_),
        network_errors=chosen.errors,
    )
    warn_long_horizon(fitted.h, lengths)
    warn_short_series(fitted.features.season, lengths, training.ids)
    warn_little_learnt(correction, int(sized.max_steps))
    return fitted, replace(data.whole, correction=correction)


def choose_inputs(settings: ForecasterSettings, columns: Columns, panel: Panel) -> FittedState:
    """Return a state without networks: features, and the conversion of covariates."""
    covariates = Covariates.of(panel, columns)
    source = PackedSeries(panel.values[columns.target][None], panel.lengths)
    season, long_season = seasons_of(settings)
    if season is None:
        season = season_within(usual_season(panel.frequency), int(source.lengths.max()))
        if season == 1 and (found := find_season(source)) is not None:
            warn(
                f"season_length is 1, since the times do not say how long a season is, but the "
                f"values repeat every {found} steps; set season_length={found}, or 1 if that is "
                "meant"
            )
    loss = settings.loss
    transform = settings.transform
    if transform == "auto" and loss == "mse":
        transform = "none"  # the mean of logarithms is not the logarithm of the mean
    features = choose_features(
        source, int(settings.h), int(season), long_season, transform, panel.ids
    )
    # these losses compare values, for which they add the seasonal naive forecast
    base = loss == "mase" if features.log else loss == "smape"
    channels = covariates.channels(features.h, features.n_inputs, base)
    if loss == "auto":
        loss = "smape" if features.log else "mae"
    quantiles = sorted_quantiles(settings)
    return FittedState(features, channels, covariates, columns, quantiles, panel.frequency, loss)


@dataclass(frozen=True)
class LearningData:
    """What networks learn from, and are validated on.

    Attributes
    ----------
    fitted : FittedState
        Without networks; its ``network`` says of which kind they are.
    windows : PanelWindows
        Of the training part.
    whole : PanelWindows
        Of the whole series.
    weights : PackedSeries or None
        Of the targets, see ``target_weights``.
    validation : tuple or None
        Inputs and targets of the whole series, with targets only in the part that is held out.
    """

    fitted: FittedState
    windows: PanelWindows
    whole: PanelWindows
    weights: PackedSeries | None = None
    validation: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls,
        fitted: FittedState,
        training: Panel,
        panel: Panel,
        val_size: int,
    ) -> LearningData:
        windows = fitted.windows(training)
        weights = target_weights(training)
        if not val_size:
            return cls(fitted, windows, windows, weights)
        of_all = target_weights(panel)
        # both or none: they are channels of the targets
        if weights is not None and of_all is None:
            of_all = equal_weights(panel)
        if of_all is not None and weights is None:
            weights = equal_weights(training)
        whole = fitted.windows(panel)
        lengths = whole.source.lengths
        # the first forecast that is validated is that at the end of the training part
        first = np.maximum(lengths - val_size - 1, 0)
        if fitted.network == SEGMENTS:
            origins = Origins(first, lengths - 1)
            at_origins = (
                OriginArray(whole, origins, "inputs"),
                OriginArray(whole, origins, "targets", of_all),
            )
            return cls(fitted, windows, whole, weights, at_origins)
        x = WindowArray(whole, "inputs")
        y = WindowArray(whole, "targets", first, weights=of_all)
        return cls(fitted, windows, whole, weights, (x, y, None, lengths))


def _candidates(
    settings: ForecasterSettings,
    fitted: FittedState,
    training: Panel,
    panel: Panel,
    val_size: int,
) -> list[LearningData]:
    """Return what each kind of network that can be used learns from."""
    data = LearningData.of(fitted, training, panel, val_size)
    source = data.windows.source
    is_weighted = data.weights is not None or data.validation is not None
    candidates = []
    for kind in candidate_networks(settings, source, fitted, is_weighted):
        if kind != fitted.network:
            other = with_network(fitted, kind, source.lengths)
            candidates.append(LearningData.of(other, training, panel, val_size))
        else:
            candidates.append(data)
    return candidates


class _Choice(NamedTuple):
    """Data of the kind of network that was chosen, what the held-out end showed of it (None if
    there was no choice, or no end), and the errors of all kinds.
    """

    data: LearningData
    end: HeldOutEnd | None
    errors: dict[str, float]


def _choose_network(
    settings: SizedSettings, candidates: list[LearningData], ranks: RankGroup
) -> _Choice:
    ends: dict[str, HeldOutEnd | None] = {}
    if len(candidates) > 1:
        for data in candidates:
            made = planned_updates(settings, data, ranks)
            ends[data.fitted.network] = _held_out_end(settings, data, ranks, made)
    errors = network_errors_of(ends, candidates[0].fitted.loss_name, ranks)
    best = best_network(errors) if errors else candidates[0].fitted.network
    _say_choice(settings, ranks, best, errors)
    (data,) = (data for data in candidates if data.fitted.network == best)
    return _Choice(data, ends.get(best), errors)


def _held_out_end(
    settings: SizedSettings, data: LearningData, ranks: RankGroup, made: int
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
    # callbacks are of the networks that are kept
    quiet = copy(settings)
    quiet.callbacks = None
    quiet.verbose = False
    quiet.n_models = min(int(settings.n_models), MODELS_HELD_OUT)

    def fit(shortened: PanelWindows) -> list[nn.Module]:
        part = replace(data, windows=shortened, validation=None)
        est = fit_models(quiet, part, ranks, most)
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
    settings: SizedSettings, fitted: FittedState
) -> Callable[[], DirectModel | SegmentModel]:
    """Return a callable that makes a network of a forecaster, of its kind and for its inputs."""
    if fitted.network == SEGMENTS:
        return partial(
            SegmentModel,
            fitted.features,
            segment_length(fitted.features.season),
            fitted.quantiles,
            int(settings.hidden_size),
            DROPOUT,
        )
    network = settings.network
    if isinstance(network, str):
        # a file may say that "auto" chose recurrent networks
        body = recurrent_body(CELLS["lstm" if network in ("auto", RECURRENT) else network], 1)
    else:
        body = partial(_custom_body, network)
    return partial(
        DirectModel,
        body,
        fitted.channels,
        fitted.quantiles,
        int(settings.hidden_size),
        DROPOUT,
    )


def _custom_body(model: object, n_in: int, n_out: int) -> nn.Module:
    return build_model(model, n_in, n_out, None, None)


def warmup_of(windows: PanelWindows) -> np.ndarray:
    """Return the first step of each series with targets: after one long season, or a quarter of a
    short series.
    """
    lengths = windows.source.lengths
    return np.minimum(windows.features.lag, lengths // 4)


def require_same_series(ranks: RankGroup, panel: Panel) -> None:
    """Raise :class:`RankError` on every rank unless all have the same series, before anything is
    chosen by them.
    """
    if ranks.is_single:
        return
    try:
        ranks.require_equal(_traits(panel))
    except RankError as error:
        raise RankError(
            f"{error}. A forecaster has no sharded=True, since what it chooses depends on all "
            "series (transform, lags, scales): give all of them on every rank, or set comm=None to "
            "fit a separate forecaster on each rank"
        ) from None


def _require_two_steps(panel: Panel) -> None:
    """Raise DataError if no series has two steps."""
    if panel.lengths.max() >= 2:
        return
    came = ""
    if panel.shape is not None:
        came = f"; the array has shape (F, N, T) = {(*panel.shape, int(panel.lengths[0]))}"
        if panel.n_series > 1:
            came += ", T steps of N series: transpose it if the steps come first, as with "
            came += "df.transpose(2, 1, 0)"
    raise DataError(f"there is nothing to learn from: no series has two steps{came}")


def _traits(panel: Panel) -> dict[str, object]:
    return {
        "the number of series": panel.n_series,
        "the ids of the series (digest)": digest_arrays(panel.ids.astype(str)),
        "the times of the series (digest)": digest_arrays(panel.first, panel.lengths),
        "the frequency": panel.frequency.text,
        "the values of the series (digest)": _digest_columns(panel.values),
        "the static covariates (digest)": _digest_columns(panel.static),
    }


def _digest_columns(columns: dict[str, np.ndarray]) -> str:
    # the bytes of objects are addresses: categories are compared as text
    arrays = [v.astype(str) if v.dtype == object else v for v in columns.values()]
    return digest_arrays(*map(np.asarray, arrays))


def fit_models(
    settings: SizedSettings,
    data: LearningData,
    ranks: RankGroup,
    most_updates: int | None = None,
) -> Estimator:
    """Train an :class:`Ensemble` of ``n_models`` networks, which differ in initial weights and
    dropout.

    All networks train on the same windows: cutting these takes a third of the time of one network's
    step. They make at most ``most_updates``.
    """
    windows = data.windows
    lengths = windows.source.lengths
    features = windows.features
    n_models = int(settings.n_models)
    fitted = data.fitted
    criterion = ForecastLoss(fitted.loss_name, features.h, fitted.quantiles, features.log)
    callbacks = as_callbacks(settings.callbacks)
    if most_updates is not None:
        callbacks = [*callbacks, StopAfter(most_updates)]
    optimizer = partial(adamw, lr=float(settings.lr), weight_decay=WEIGHT_DECAY)
    model = partial(Ensemble, make_network(settings, fitted), n_models)
    passes = _passes(settings, data, ranks)
    x, y = _inputs_and_targets(data, passes)
    of_segments = data.fitted.network == SEGMENTS
    est = Estimator(
        model,
        criterion,
        optimizer,
        passes.spec(settings, data, most_updates),
        comm=ranks,
        device=settings.device,
        callbacks=callbacks,
        random_state=settings.random_state,
        verbose=settings.verbose,
    )
    # not est.fit, which warns of few updates: their number is chosen here
    # a mask of no step would only cost time
    same_length = of_segments or (lengths == lengths[0]).all()
    run_fit(est, x, y, lengths=None if same_length else lengths, validation_data=data.validation)
    for member in est.model_.members:
        # no series has targets so far ahead
        member.forget_steps(int(lengths.max()) - 1)
    return est


def _inputs_and_targets(
    data: LearningData, passes: Passes
) -> tuple[WindowArray | OriginArray, WindowArray | OriginArray]:
    windows = data.windows
    if data.fitted.network != SEGMENTS:
        y = WindowArray(windows, "targets", warmup_of(windows), weights=data.weights)
        return WindowArray(windows, "inputs"), y
    lengths = windows.source.lengths
    first = np.minimum(windows.features.input_size // 2, lengths // 4)
    # the last step has no target
    origins = Origins(first, lengths - 1, passes.n_windows * passes.whole)
    of_origins = OriginArray(windows, origins, "targets", data.weights)
    return OriginArray(windows, origins, "inputs"), of_origins


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

    def spec(self, settings: SizedSettings, data: LearningData, most_updates: int | None) -> Spec:
        """Return the spec of a fit, whose learning rate follows one cycle over all updates, and
        which validation loss stops early.
        """
        epochs = self.epochs
        n_updates = epochs * self.n_windows
        if most_updates is not None and most_updates < n_updates:
            n_updates = most_updates
            epochs = -(-n_updates // self.n_windows)
        patience = None
        if data.validation is not None:
            # a rate of one cycle rises first: the loss may rise with it
            patience = max(3, epochs // 4)
        return Spec(
            epochs=epochs,
            patience=patience,
            batchsize=self.batchsize,
            seqsize=self.seqsize,
            shuffle=True,
            # bounds the joint norm of all networks' gradients
            clip=math.sqrt(settings.n_models),
            # one more step than there are: the scheduler raises an error after its last one
            lr_schedule=(
                "step",
                partial(OneCycleLR, max_lr=float(settings.lr), total_steps=n_updates + 1),
            ),
        )


def planned_updates(settings: SizedSettings, data: LearningData, ranks: RankGroup) -> int:
    """Return how many updates a fit makes if nothing ends it early."""
    passes = _passes(settings, data, ranks)
    return passes.epochs * passes.n_windows


def _passes(settings: SizedSettings, data: LearningData, ranks: RankGroup) -> Passes:
    lengths = data.windows.source.lengths
    batchsize = int(settings.batchsize)
    seqsize = int(settings.seqsize)
    if data.fitted.network == SEGMENTS:
        batchsize = max(1, batchsize * seqsize // SPARSE)
        seqsize = 1
        whole = batchsize * ranks.size
        updates = max(1, round(settings.max_steps / 2 / math.sqrt(max(1.0, data.fitted.h / LONG))))
        n_windows = min(updates, -(-int(lengths.sum()) // whole))
        most = MOST_EPOCHS
    else:
        whole = batchsize * ranks.size
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
