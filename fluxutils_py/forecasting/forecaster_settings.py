"""Hold and check the settings of a forecaster, choose what they leave open by the amount of data,
and derive column names from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from fluxutils_py.auto.sequence_estimators import CELLS
from fluxutils_py.errors import SpecError
from fluxutils_py.forecasting.features import TRANSFORMS
from fluxutils_py.forecasting.networks import LOSSES
from fluxutils_py.frames.panel import Columns
from fluxutils_py.sklearn_callbacks import CallbackSupport
from fluxutils_py.validation import check_integer, check_positive

POINT = "Forecaster"  # column of the point forecast
RECURRENT, SEGMENTS = "recurrent", "segments"
# what a rank may choose for itself, since it does not change what is trained
OF_RANK = ("comm", "device", "callbacks", "random_state", "verbose")
# Chosen on the ends of training parts: 10 daily series of a year, 45 weekly ones of two years, 7
# daily ones of two years, 60 series of counts, hourly series. See benchmarks/EXPERIMENTS.md.
FEW_VALUES = 10_000  # of all series together, that larger networks overfit
SMALL = 32
LARGE = 96
VALUES_PER_STEP = 64  # of the optimizer
LEAST_STEPS = 100
MOST_STEPS = 1500
N_MODELS = 4  # the surest gain, whatever the data
MANY_VALUES = 50_000  # from which on four take more than four minutes


@dataclass(eq=False, repr=False)
class ForecasterSettings(CallbackSupport, BaseEstimator):
    """The arguments of a :class:`Forecaster`, as its attributes: see there."""

    h: int
    season_length: Any = None
    freq: Any = None
    _: KW_ONLY
    quantiles: Sequence[float] = ()
    calibrate: bool = True
    transform: str = "auto"
    loss: Any = "auto"
    network: Any = "auto"
    # numbers; None before with_size chooses them
    hidden_size: Any = None
    n_models: Any = None
    max_steps: Any = None
    batchsize: int = 48
    seqsize: int = 96
    lr: float = 4e-3
    hist_exog_list: Sequence[str] = ()
    futr_exog_list: Sequence[str] = ()
    stat_exog_list: Sequence[str] = ()
    comm: Any = "auto"
    device: Any = None
    callbacks: Any = None
    random_state: Any = None
    verbose: Any = "auto"


# Python names it in the error for an argument that is missing.
ForecasterSettings.__init__.__qualname__ = "Forecaster.__init__"


def check_settings(settings: ForecasterSettings) -> None:
    """Raise SpecError, which names the parameter, if a setting of a forecaster is invalid."""
    for name in ("h", "batchsize", "seqsize"):
        check_integer(name, getattr(settings, name), 1, error=SpecError)
    for name in ("hidden_size", "max_steps", "n_models"):
        check_integer(name, getattr(settings, name), 1, optional=True, error=SpecError)
    check_positive("lr", settings.lr, error=SpecError)
    if settings.transform not in ("auto", *TRANSFORMS):
        raise SpecError(f"transform must be 'auto', 'log' or 'none', got {settings.transform!r}")
    loss = settings.loss  # a name or a function; a class is not yet a criterion
    is_criterion = callable(loss) and not isinstance(loss, type)
    if loss not in ("auto", *LOSSES) if isinstance(loss, str) else not is_criterion:
        raise SpecError(
            f"loss must be 'auto', {', '.join(map(repr, LOSSES))} or a criterion of torch, got "
            f"{loss!r}"
        )
    season, long_season = seasons_of(settings)
    check_integer("season_length", season, 1, optional=True, error=SpecError)
    if long_season != "auto":
        check_integer("season_length", long_season, 1, optional=True, error=SpecError)
    _check_network(settings, long_season)
    # before the quantiles are counted and the names are compared
    _check_list("quantiles", settings.quantiles, "numbers")
    for name in ("hist_exog_list", "futr_exog_list", "stat_exog_list"):
        _check_list(name, getattr(settings, name), "columns")
    _check_quantiles(settings.quantiles)


def seasons_of(settings: ForecasterSettings) -> tuple[Any, Any]:
    """Return the season, None if it follows from the times, and the long season: "auto", a number
    of steps, or None for none.
    """
    given = settings.season_length
    if not isinstance(given, list | tuple | np.ndarray):
        return given, "auto"
    if len(given) not in (1, 2):
        raise SpecError(
            f"season_length must be one number, or a season and a long one, got {given!r}"
        )
    return given[0], given[1] if len(given) == 2 else None


def _check_network(settings: ForecasterSettings, long_season: object) -> None:
    network = settings.network
    names = ("auto", RECURRENT, SEGMENTS, *CELLS)
    if network not in names if isinstance(network, str) else not callable(network):
        raise SpecError(
            f"network must be one of {', '.join(map(repr, names))}, or a module or callable, got "
            f"{network!r}"
        )
    if isinstance(network, str) and network == SEGMENTS and long_season != "auto":
        raise SpecError(
            f"season_length={settings.season_length!r} gives a long season, which network="
            "'segments' does not have; give one number, or network='recurrent'"
        )


def kind_of(settings: ForecasterSettings) -> str:
    """Return the kind of networks that is asked for: "auto", "recurrent" or "segments"."""
    network = settings.network
    return network if isinstance(network, str) and network in ("auto", SEGMENTS) else RECURRENT


def _check_list(name: str, value: object, items: str) -> None:
    # a string is iterable too, but a single column is most often a slip
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(f"{name} must be a list of {items}, got {value!r}")


def _check_quantiles(quantiles: Sequence[float]) -> None:
    valid = [q for q in quantiles if isinstance(q, float | np.floating) and 0 < q < 1]
    # compared as the columns name them
    names = {quantile_column(q) for q in valid}
    if len(valid) < len(quantiles) or len(names) < len(valid):
        raise SpecError(
            f"quantiles must be different numbers between 0 and 1, got {quantiles!r}; columns "
            "have six digits"
        )


def with_size(settings: ForecasterSettings, n_values: int) -> ForecasterSettings:
    """Return a copy of settings in which size, number of networks and steps are chosen by the
    amount of data if None.
    """
    sized = copy(settings)  # shallow: callbacks are the user's
    if sized.hidden_size is None:
        sized.hidden_size = SMALL if n_values < FEW_VALUES else LARGE
    if sized.max_steps is None:
        sized.max_steps = min(max(n_values // VALUES_PER_STEP, LEAST_STEPS), MOST_STEPS)
    if sized.n_models is None:
        sized.n_models = N_MODELS if n_values < MANY_VALUES else N_MODELS // 2
    return sized


def collective_settings(settings: ForecasterSettings) -> dict[str, str]:
    """Return the settings that decide what is trained and how, by name, as texts that ranks
    compare.

    Callbacks are compared by the fits of the networks.
    """
    texts = {}
    for name, value in settings.get_params(deep=False).items():
        if callable(value):  # whose address in memory differs from process to process
            value = getattr(value, "__qualname__", type(value).__name__)
        if name not in OF_RANK:
            texts[name] = str(value)
    return texts


def sorted_quantiles(settings: ForecasterSettings) -> tuple[float, ...]:
    """Return the quantiles in the order of the networks' outputs."""
    return tuple(sorted(map(float, settings.quantiles)))


def columns_of(
    settings: ForecasterSettings, id_col: str, time_col: str, target_col: str
) -> Columns:
    """Return the columns that a forecaster reads."""
    return Columns(
        id_col,
        time_col,
        target_col,
        tuple(settings.hist_exog_list),
        tuple(settings.futr_exog_list),
        tuple(settings.stat_exog_list),
    )


def quantile_column(q: float) -> str:
    """Return the column of a quantile, as NeuralForecast names it: by the level in per cent of the
    band that it bounds.

    Examples
    --------
    >>> [quantile_column(q) for q in (0.1, 0.5, 0.975)]
    ['Forecaster-lo-80', 'Forecaster-median', 'Forecaster-hi-95']
    """
    level = f"{abs(200 * q - 100):.6g}"
    if level == "0" or abs(q - 0.5) < 1e-9:
        return f"{POINT}-median"
    return f"{POINT}-{'lo' if q < 0.5 else 'hi'}-{level}"


def output_columns(
    trained: Sequence[float],
    level: Sequence[float] | None = None,
    quantiles: Sequence[float] | None = None,
) -> dict[str, int]:
    """Return the columns of forecasts that ``level`` or ``quantiles`` of ``Forecaster.predict`` ask
    for, and the number of each among the outputs of networks with the quantiles ``trained``.

    Raises
    ------
    SpecError
        If both are given, or a quantile was not trained.
    """
    asked = _asked_quantiles(trained, level, quantiles)
    number = {f"{q:.6g}": i for i, q in enumerate(trained, 1)}
    lacks = [q for q in asked.values() if f"{q:.6g}" not in number]
    if lacks:
        wanted = ", ".join(f"{q:.6g}" for q in sorted({*trained, *asked.values()}))
        raise SpecError(
            f"the quantile {lacks[0]:.6g} was not trained, only {(*trained,)}; give "
            f"quantiles=({wanted}) to the forecaster before fit"
        )
    return {POINT: 0} | {name: number[f"{q:.6g}"] for name, q in asked.items()}


def _asked_quantiles(
    trained: Sequence[float], level: Sequence[float] | None, quantiles: Sequence[float] | None
) -> dict[str, float]:
    """Return the columns that are asked for, and the quantile of each."""
    if level is not None and quantiles is not None:
        raise SpecError("level and quantiles both say which quantiles to return; give one of them")
    if quantiles is not None:
        _check_list("quantiles", quantiles, "numbers")
        return {f"{POINT}-q{q:g}": q for q in quantiles}
    if level is None:
        return {quantile_column(q): q for q in trained}
    _check_list("level", level, "numbers, such as [80, 90]")
    asked = {}
    for per_cent in level:
        asked[f"{POINT}-lo-{per_cent:g}"] = 0.5 - per_cent / 200
        asked[f"{POINT}-hi-{per_cent:g}"] = 0.5 + per_cent / 200
    return asked


def check_output_names(columns: Columns, outputs: Iterable[str]) -> None:
    """Raise SpecError if a column that cross-validation adds has the name of a column of the user,
    since one frame holds both.
    """
    equal = {columns.id, columns.time, columns.target} & {*outputs, "cutoff"}
    if equal:
        raise SpecError(f"forecasts have a column {equal.pop()!r}; rename this column of the data")
