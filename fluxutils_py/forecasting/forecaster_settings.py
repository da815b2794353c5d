"""Hold and check the settings of a forecaster, and derive column names from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.sequence_estimators import CELLS
from fluxutils_py.forecasting.direct_model import LOSSES
from fluxutils_py.forecasting.features import TRANSFORMS
from fluxutils_py.frames.panel import Columns
from fluxutils_py.sklearn_callbacks import CallbackSupport
from fluxutils_py.validation import check_integer, check_positive

POSITIVE_INTEGERS = (
    "h",
    "num_layers",
    "batchsize",
    "seqsize",
)
RECURRENT, SEGMENTS = "recurrent", "segments"
NETWORKS = (RECURRENT, SEGMENTS)
# what a rank may choose for itself, since it does not change what is trained
OF_RANK = (
    "comm",
    "device",
    "callbacks",
    "random_state",
    "verbose",
    "id_col",
    "time_col",
    "target_col",
    "alias",
)


class ForecasterSettings(CallbackSupport, BaseEstimator):
    """The arguments of a :class:`Forecaster`, as its attributes: see there."""

    def __init__(
        self,
        h: int,
        season_length: int | None = None,
        freq: Any = None,
        *,
        quantiles: Sequence[float] = (),
        calibrate: bool = True,
        lag: Any = "auto",
        input_size: int | None = None,
        transform: str = "auto",
        loss: Any = "auto",
        network: str = "auto",
        cell: Any = "lstm",
        model: Any = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        dropout: float = 0.1,
        n_models: int | None = None,
        max_steps: int | None = None,
        batchsize: int = 48,
        seqsize: int = 96,
        lr: float = 4e-3,
        weight_decay: float = 1e-3,
        n_iter_no_change: int | None = None,
        warm_start: bool = False,
        hist_exog_list: Sequence[str] = (),
        futr_exog_list: Sequence[str] = (),
        stat_exog_list: Sequence[str] = (),
        id_col: str = "unique_id",
        time_col: str = "ds",
        target_col: str = "y",
        alias: str = "Forecaster",
        comm: Any = "auto",
        scaling: str = "weak",
        device: Any = None,
        callbacks: Any = None,
        random_state: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.h = h
        self.season_length = season_length
        self.freq = freq
        self.quantiles = quantiles
        self.calibrate = calibrate
        self.lag = lag
        self.input_size = input_size
        self.transform = transform
        self.loss = loss
        self.network = network
        self.cell = cell
        self.model = model
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.dropout = dropout
        self.n_models = n_models
        self.max_steps = max_steps
        self.batchsize = batchsize
        self.seqsize = seqsize
        self.lr = lr
        self.weight_decay = weight_decay
        self.n_iter_no_change = n_iter_no_change
        self.warm_start = warm_start
        self.hist_exog_list = hist_exog_list
        self.futr_exog_list = futr_exog_list
        self.stat_exog_list = stat_exog_list
        self.id_col = id_col
        self.time_col = time_col
        self.target_col = target_col
        self.alias = alias
        self.comm = comm
        self.scaling = scaling
        self.device = device
        self.callbacks = callbacks
        self.random_state = random_state
        self.verbose = verbose


# Python names it in the error for an argument that is missing.
ForecasterSettings.__init__.__qualname__ = "Forecaster.__init__"


def check_settings(settings: ForecasterSettings) -> None:
    """Raise SpecError, which names the parameter, if a setting of a forecaster is invalid."""
    for name in POSITIVE_INTEGERS:
        check_integer(name, getattr(settings, name), 1, error=SpecError)
    for name in (
        "season_length",
        "input_size",
        "hidden_size",
        "max_steps",
        "n_models",
        "n_iter_no_change",
    ):
        check_integer(name, getattr(settings, name), 1, optional=True, error=SpecError)
    check_positive("lr", settings.lr, error=SpecError)
    if not isinstance(settings.calibrate, bool | np.bool_):
        raise SpecError(f"calibrate must be True or False, got {settings.calibrate!r}")
    if settings.lag not in ("auto", None):
        check_integer("lag", settings.lag, 1, error=SpecError)
    if settings.transform not in ("auto", *TRANSFORMS):
        raise SpecError(f"transform must be 'auto', 'log' or 'none', got {settings.transform!r}")
    _check_loss(settings.loss)
    _check_network(settings)
    # before the quantiles are counted and the names are compared
    _check_list("quantiles", settings.quantiles, "numbers")
    for name in ("hist_exog_list", "futr_exog_list", "stat_exog_list"):
        _check_list(name, getattr(settings, name), "columns")
    _check_alias(settings)
    _check_quantiles(settings.quantiles)
    # a model replaces the layers of a cell
    if settings.model is None:
        cell_of(settings.cell)


def _check_loss(loss: object) -> None:
    # a name or a function, before the fit has taken time
    if isinstance(loss, str):
        valid = loss in ("auto", *LOSSES)
    else:
        valid = callable(loss) and not isinstance(loss, type)  # a class is not yet a criterion
    if not valid:
        raise SpecError(
            f"loss must be 'auto', {', '.join(map(repr, LOSSES))} or a criterion of torch, got "
            f"{loss!r}"
        )


def _check_network(settings: ForecasterSettings) -> None:
    if settings.network not in ("auto", *NETWORKS):
        raise SpecError(
            f"network must be 'auto', {' or '.join(map(repr, NETWORKS))}, got {settings.network!r}"
        )
    names = ", ".join(f"{name}={value!r}" for name, value in recurrent_settings(settings).items())
    if settings.network == SEGMENTS and names:
        raise SpecError(
            f"{names} is of recurrent networks, and network='segments' has none of it; leave it "
            "out, or set network='recurrent'"
        )


def recurrent_settings(settings: ForecasterSettings) -> dict[str, Any]:
    """Return the settings that only recurrent networks have and that are not the defaults."""
    defaults = signature(type(settings)).parameters
    names = ("lag", "input_size", "cell", "model", "num_layers")
    values = {name: getattr(settings, name) for name in names}
    return {k: v for k, v in values.items() if not _is_default(v, defaults[k].default)}


def _is_default(value: object, default: object) -> bool:
    # not by == of any values: arrays and modules have another one
    return value is default or (isinstance(value, str) and value == default)


def _check_list(name: str, value: object, items: str) -> None:
    # a string is iterable too, but a single column is most often a slip
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(f"{name} must be a list of {items}, got {value!r}")


def _check_alias(settings: ForecasterSettings) -> None:
    # a forecast in such a column would overwrite it
    used = (settings.id_col, settings.time_col, settings.target_col, "cutoff")
    if not isinstance(settings.alias, str) or settings.alias in used:
        raise SpecError(
            f"alias must be a name other than {', '.join(map(repr, used))}, got {settings.alias!r}"
        )


def _check_quantiles(quantiles: Sequence[float]) -> None:
    valid = [q for q in quantiles if isinstance(q, float | np.floating) and 0 < q < 1]
    # compared as the columns name them
    names = {quantile_column("", q) for q in valid}
    if len(valid) < len(quantiles) or len(names) < len(valid):
        raise SpecError(
            f"quantiles must be different numbers between 0 and 1, got {quantiles!r}; columns "
            "have six digits"
        )


def cell_of(cell: object) -> Callable[..., Any]:
    """Return the recurrent layer for a name, or a class unchanged; SpecError for anything else."""
    # checked before a network is built, where an error would not name the parameter
    layer = CELLS.get(cell) if isinstance(cell, str) else cell
    if not callable(layer):
        raise SpecError(f"cell must be one of {', '.join(CELLS)}, or a class, got {cell!r}")
    return layer


def course_of_fit(settings: ForecasterSettings) -> dict[str, str]:
    """Return the settings that decide what is trained and how, by name, as texts that ranks
    compare.

    Callbacks are compared by the fits of the networks.
    """
    values = settings.get_params(deep=False)
    return {name: _describe(value) for name, value in values.items() if name not in OF_RANK}


def _describe(value: object) -> str:
    """Return a text that is the same in every process; of code only its name."""
    if isinstance(value, list | tuple | np.ndarray):
        return str([_describe(v) for v in value])
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    # an address in memory differs from process to process
    if callable(value) and " at 0x" in repr(value):
        return type(value).__name__
    return str(value)


def sorted_quantiles(settings: ForecasterSettings) -> tuple[float, ...]:
    """Return the quantiles in the order of the networks' outputs."""
    return tuple(sorted(map(float, settings.quantiles)))


def columns_of(settings: ForecasterSettings) -> Columns:
    """Return the columns that a forecaster reads."""
    return Columns(
        settings.id_col,
        settings.time_col,
        settings.target_col,
        tuple(settings.hist_exog_list),
        tuple(settings.futr_exog_list),
        tuple(settings.stat_exog_list),
    )


def quantile_column(alias: str, q: float) -> str:
    """Return the column of a quantile, as NeuralForecast names it: by the level in per cent of the
    band that it bounds.

    Examples
    --------
    >>> [quantile_column("NHITS", q) for q in (0.1, 0.5, 0.975)]
    ['NHITS-lo-80', 'NHITS-median', 'NHITS-hi-95']
    """
    level = f"{abs(200 * q - 100):.6g}"
    if level == "0" or abs(q - 0.5) < 1e-9:
        return f"{alias}-median"
    return f"{alias}-{'lo' if q < 0.5 else 'hi'}-{level}"


def column_names(settings: ForecasterSettings) -> list[str]:
    """Return the names of the columns with forecasts: of the point forecast, then each quantile."""
    alias = settings.alias
    return [alias, *(quantile_column(alias, q) for q in sorted_quantiles(settings))]


def output_columns(
    settings: ForecasterSettings,
    level: Sequence[float] | None = None,
    quantiles: Sequence[float] | None = None,
) -> dict[str, int]:
    """Return the columns of forecasts that ``level`` or ``quantiles`` of ``Forecaster.predict`` ask
    for, and the number of each among the outputs of the networks.

    Raises
    ------
    SpecError
        If both are given, or a quantile was not trained.
    """
    alias = settings.alias
    if level is not None and quantiles is not None:
        raise SpecError("level and quantiles both say which quantiles to return; give one of them")
    if level is None and quantiles is None:
        return {name: i for i, name in enumerate(column_names(settings))}
    asked: dict[str, float] = {}
    if level is not None:
        _check_list("level", level, "numbers, such as [80, 90]")
        for per_cent in level:
            asked[f"{alias}-lo-{per_cent:g}"] = 0.5 - per_cent / 200
            asked[f"{alias}-hi-{per_cent:g}"] = 0.5 + per_cent / 200
    if quantiles is not None:
        _check_list("quantiles", quantiles, "numbers")
        asked = {f"{alias}-q{q:g}": q for q in quantiles}
    trained = sorted_quantiles(settings)
    number = {f"{q:.6g}": i for i, q in enumerate(trained, 1)}
    lacks = [q for q in asked.values() if f"{q:.6g}" not in number]
    if lacks:
        raise SpecError(
            f"the quantile {lacks[0]:.6g} was not trained, only {trained}; give "
            f"quantiles=({', '.join(f'{q:.6g}' for q in sorted({*trained, *asked.values()}))}) to "
            "the forecaster before fit"
        )
    return {alias: 0} | {name: number[f"{q:.6g}"] for name, q in asked.items()}


def check_output_names(settings: ForecasterSettings, outputs: Iterable[str]) -> None:
    """Raise SpecError if a column that cross-validation adds has the name of a column of the user,
    since one frame holds both.
    """
    added = [*outputs, "cutoff"]
    for argument in ("id_col", "time_col", "target_col"):
        name = getattr(settings, argument)
        if name in added:
            raise SpecError(
                f"{argument}={name!r} is the name of a column that the forecasts have "
                f"({', '.join(added)}); rename the column of the data, or choose another alias"
            )
