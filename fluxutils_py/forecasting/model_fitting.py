"""Train the networks of a forecaster."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, RankError, SpecError
from fluxutils_py.estimator import Estimator, Spec
from fluxutils_py.estimator.building import build_model
from fluxutils_py.estimator.fit_data import FitRequest
from fluxutils_py.estimator.fitting import run_fit
from fluxutils_py.estimator.minibatch_size import whole_batchsize
from fluxutils_py.estimator.sequence_estimators import CELLS
from fluxutils_py.forecasting.direct_model import (
    DirectModel,
    Ensemble,
    ForecastLoss,
    recurrent_body,
)
from fluxutils_py.forecasting.panel import Panel
from fluxutils_py.forecasting.panel_windows import Channels, PanelWindows, WindowArray
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.make_optimizer import adamw

MOST_EPOCHS = 16  # at most so many passes over the data, or FEW_STEPS steps, whichever is more
FEW_STEPS = 300
OF_RANK = (
    "comm",
    "n_jobs",
    "device",
    "callbacks",
    "random_state",
    "verbose",
    "id_col",
    "time_col",
    "target_col",
    "alias",
)
PIECE = 8  # a piece of a long series has at least so many windows


def make_network(forecaster: Any, channels: Channels) -> Any:
    """Return a callable that makes the network of a forecaster, for inputs with these channels."""
    body = (
        recurrent_body(cell_of(forecaster.cell), int(forecaster.num_layers))
        if forecaster.model is None
        else partial(_own_body, forecaster.model)
    )
    quantiles = tuple(sorted(map(float, forecaster.quantiles)))
    sizes = int(forecaster.hidden_size), float(forecaster.dropout)
    return partial(DirectModel, body, channels, quantiles, *sizes)


def cell_of(cell: Any) -> Any:
    """Return the recurrent layer for a name, or a class unchanged; SpecError for anything else."""
    if isinstance(cell, str):
        if cell not in CELLS:
            raise SpecError(f"cell must be one of {', '.join(CELLS)}, or a class, got {cell!r}")
        return CELLS[cell]
    if not callable(cell):
        raise SpecError(f"cell must be one of {', '.join(CELLS)}, or a class, got {cell!r}")
    return cell


def _own_body(model: Any, n_in: int, n_out: int) -> nn.Module:
    return build_model(model, n_in, n_out, None, None)


def warmup_of(windows: PanelWindows) -> np.ndarray:
    """Return the first step of each series with targets: after one long season, or a quarter of a
    short series.
    """
    lengths = np.asarray(windows.source.lengths)
    return np.minimum(windows.features.lag, lengths // 4)


def course_of_fit(forecaster: Any) -> dict[str, str]:
    """Return the settings that decide what is trained and how, by name, as texts that ranks
    compare.

    Callbacks are compared by the fits of the networks.
    """
    settings = forecaster.get_params(deep=False)
    return {name: _describe(value) for name, value in settings.items() if name not in OF_RANK}


def _describe(value: Any) -> str:
    """Return a text that is the same in every process; of code only its name."""
    if isinstance(value, list | tuple | np.ndarray):
        return str([_describe(v) for v in value])
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return type(value).__name__ if callable(value) and " at 0x" in repr(value) else str(value)


def require_same_panel(ranks: RankGroup, panel: Panel | None, array: Any) -> None:
    """Raise :class:`RankError` on every rank unless all have the same series, before anything is
    chosen by them.
    """
    if ranks.is_single:
        return
    if panel is None:
        told = {
            "the shape of the array": tuple(array.shape),
            "its type": array.dtype,
            "whether it is in memory": type(array) is np.ndarray,
        }
    else:
        values, static = (
            [np.asarray(v if v.dtype != object else v.astype(str)) for v in columns.values()]
            for columns in (panel.values, panel.static)
        )
        told = {
            "the number of series": panel.n_series,
            "the ids of the series (digest)": digest_arrays(panel.ids.astype(str)),
            "the times of the series (digest)": digest_arrays(panel.first, panel.lengths),
            "the frequency": panel.frequency.text,
            "the values of the series (digest)": digest_arrays(*values),
            "the static covariates (digest)": digest_arrays(*static),
        }
    try:
        ranks.require_equal(told)
    except RankError as error:
        raise RankError(
            f"{error}. A forecaster has no sharded=True, since what it chooses depends on all "
            "series (transform, lags, scales): give all of them on every rank, such as an array "
            "(F, N, T) that maps a file, or set comm=None to fit a forecaster of its own on each "
            "rank"
        ) from None


def fit_models(forecaster: Any, windows: PanelWindows, loss: Any, ranks: RankGroup) -> Estimator:
    """Train an :class:`Ensemble` of ``n_models`` networks, which differ in initial weights and
    dropout.

    All networks train on the same windows: cutting these takes a third of the time of one network's
    step.

    Raises
    ------
    DataError
        If no series has two steps.
    """
    lengths = np.asarray(windows.source.lengths)
    if lengths.max() < 2:
        raise DataError("there is nothing to learn from: no series has two steps")
    quantiles = tuple(sorted(map(float, forecaster.quantiles)))
    n_models = int(forecaster.n_models)
    criterion = ForecastLoss(loss, windows.features.h, quantiles, windows.features.log, n_models)
    in_memory = windows.source.in_memory
    batchsize, seqsize = int(forecaster.batchsize), int(forecaster.seqsize)
    whole = whole_batchsize(batchsize, forecaster.scaling, ranks.size)
    n_steps = steps_per_epoch(lengths, whole, seqsize)
    most = max(MOST_EPOCHS, -(-FEW_STEPS // n_steps))  # more passes overfit
    epochs = min(most, max(1, round(forecaster.max_steps / n_steps)))
    lr = float(forecaster.lr)
    spec = Spec(
        epochs=epochs,
        batchsize=batchsize,
        seqsize=seqsize,
        shuffle=in_memory,  # in a file, neighbouring series are read together
        clip=math.sqrt(n_models),  # bounds the joint norm of all networks' gradients
        scheduler=partial(OneCycleLR, max_lr=lr, total_steps=epochs * n_steps + 1),
        schedule_every="step",
    )
    est = Estimator(
        partial(Ensemble, make_network(forecaster, windows.channels), n_models),
        criterion,
        partial(adamw, lr=lr, weight_decay=float(forecaster.weight_decay)),
        spec,
        comm=ranks,
        scaling=forecaster.scaling,
        n_jobs=forecaster.n_jobs,
        device=forecaster.device,
        callbacks=forecaster.callbacks,
        random_state=forecaster.random_state,
        verbose=forecaster.verbose,
    )
    x, y = WindowArray(windows, "inputs"), WindowArray(windows, "targets", warmup_of(windows))
    # not est.fit, which warns of few updates: their number is chosen here
    same_length = (lengths == lengths[0]).all()
    run_fit(est, FitRequest(x, y, lengths=None if same_length else lengths))
    for member in est.model_.members:
        member.forget_steps(int(lengths.max()) - 1)
    return est


def steps_per_epoch(lengths: np.ndarray, batchsize: int, seqsize: int) -> int:
    """Return the maximal number of windows per epoch, over all orders of the series."""
    rows = Segments.from_lengths(len(lengths), int(lengths.max()), lengths).fold(
        batchsize, PIECE * seqsize
    )
    longest = np.sort(rows.length)[::-1][: -(-len(rows) // batchsize)]
    return int(np.sum(-(-longest // seqsize)))
