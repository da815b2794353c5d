"""Save forecasters to files of plain data, and load them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, LoadError
from fluxutils_py.estimator.bounded_building import build_bounded
from fluxutils_py.estimator.building import build_model, check_device
from fluxutils_py.estimator.persistence import read_dtype
from fluxutils_py.exporting.export_files import Path
from fluxutils_py.forecasting.correction import SOURCES, Correction
from fluxutils_py.forecasting.covariates import Covariate, Covariates
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.forecaster_settings import ForecasterSettings
from fluxutils_py.forecasting.history import History
from fluxutils_py.forecasting.model_fitting import Fit, make_network
from fluxutils_py.forecasting.network_size import size_of, with_size
from fluxutils_py.forecasting.panel_windows import Channels
from fluxutils_py.forecasting.reading import STEPS
from fluxutils_py.frames.frames import require
from fluxutils_py.frames.frequency import Frequency
from fluxutils_py.frames.panel import Panel
from fluxutils_py.training.plain_files import read_file, write_file

KIND = "fluxutils_py forecaster"
FORMAT = 2
PLAIN = (bool, int, float, str, type(None))
NOT_STORED = ("callbacks", "device", "comm")  # code, or specific to a machine
CODE = ("cell", "model", "loss", "freq")  # stored only if they are plain data
GROUPS = ("hist", "futr", "stat")  # of covariates
ARRAYS = ("tail", "lengths", "static")  # of a history


def save_forecaster(
    path: Path,
    fit: Fit,
    history: History,
) -> None:
    """Write a fitted forecaster; see ``Forecaster.save``."""
    fitted = fit.fitted
    _require_plain_labels(fitted, history)
    arguments = _stored_arguments(fitted.settings)
    dtype = next(fitted.models[0].parameters()).dtype
    content = {
        "kind": KIND,
        "format": FORMAT,
        "settings": {k: _to_plain(v) for k, v in arguments.items() if _is_plain(v)},
        "code": code_arguments(fitted.settings),
        "features": asdict(fitted.features),
        "channels": asdict(fitted.channels),
        "covariates": _to_plain(asdict(fitted.covariates)),
        "frequency": asdict(fit.frequency),
        "correction": _plain_correction(fitted.correction),
        "loss_name": fit.loss if isinstance(fit.loss, str) else None,
        "loss_curve": fit.loss_curve,
        "validation_loss_curve": fit.validation_loss_curve,
        "network": fitted.network,
        "network_errors": fit.network_errors,
        "models": [{k: v.detach() for k, v in m.state_dict().items()} for m in fitted.models],
        "hidden_size": size_of(fitted.models[0]),
        "dtype": str(dtype).removeprefix("torch."),
        "history": _plain_history(history),
    }
    write_file(path, content)


def code_arguments(settings: ForecasterSettings) -> list[str]:
    """Return the names of the arguments that a file does not hold, as they are code."""
    arguments = _stored_arguments(settings)
    return [name for name in CODE if not _is_plain(arguments[name])]


def _stored_arguments(settings: ForecasterSettings) -> dict[str, Any]:
    """Return the arguments of the constructor that a file holds, sequences as lists."""
    arguments = settings.get_params(deep=False)
    return {
        name: list(value) if isinstance(value, tuple | list | np.ndarray) else value
        for name, value in arguments.items()
        if name not in NOT_STORED
    }


def _require_plain_labels(fitted: FittedForecaster, history: History) -> None:
    """Raise DataError, before a file is written, if it could not be read: ids and categories must
    be plain data.
    """
    labels: dict[str, Iterable[Any]] = {fitted.columns.id: history.panel.ids}
    for group in GROUPS:
        for covariate in getattr(fitted.covariates, group):
            labels[covariate.name] = covariate.categories or ()
    for column, values in labels.items():
        odd = [v for v in values if not isinstance(_to_plain(v), PLAIN)]
        if odd:
            raise DataError(
                f"column {column!r} holds {type(odd[0]).__name__} such as {odd[0]!r}, and a file "
                "holds text, numbers and booleans only; convert the column before fit, as with "
                ".astype(str)"
            )


def read_forecaster(
    path: Path,
    arguments: dict[str, Any],
    class_name: str,
) -> dict[str, Any]:
    """Read the file of a forecaster; LoadError if ``arguments`` lack the code that it does not
    hold.
    """
    content = read_file(path, KIND, format=FORMAT)
    with _damage_is_an_error(path):
        content = _current(content, path)
    # before the constructor, whose errors would not say that a file lacks code
    missing = [name for name in content["code"] if name not in arguments]
    if missing:
        raise LoadError(
            f"{path} does not hold the forecaster's {' and '.join(missing)}, which is code of its "
            f"author's; give it: {class_name}.load(path, {missing[0]}=...)"
        )
    return content


def _current(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file of 0.2.0 as files have it now."""
    settings = content["settings"]
    settings.pop("calendar", None)
    settings.pop("n_jobs", None)
    # what the calendar made is given as a column now
    for covariate in content["covariates"]["futr"]:
        if covariate.pop("from_time", False):
            settings["futr_exog_list"] = [*settings["futr_exog_list"], covariate["name"]]
    for covariate in content["covariates"]["hist"] + content["covariates"]["stat"]:
        covariate.pop("from_time", None)
    frequency = content["frequency"]
    if frequency is None:  # of an array, which was no panel
        n = len(content["history"]["lengths"])
        frequency = content["frequency"] = asdict(STEPS)
        content["history"]["panel"] = {
            "ids": list(range(n)),
            "first": torch.zeros(n, dtype=torch.int64),
            "zone": None,
            "backend": "pandas",
            "types": {},
            "shape": content["shape"],
        }
    if len(frequency.pop("times", ())):
        raise LoadError(
            f"{path}: its freq={frequency['text']!r} is not supported any more: fit again, with "
            "numbers of the times in a column of integers"
        )
    return content


def load_fit(
    content: dict[str, Any],
    settings: ForecasterSettings,
    path: Path,
) -> Fit:
    """Return what a file holds besides the settings; see ``Forecaster.load``."""
    with _damage_is_an_error(path):
        return _load_fit(content, settings, path)


@contextmanager
def _damage_is_an_error(path: Path) -> Iterator[None]:
    """Raise LoadError for whatever a damaged entry leads to."""
    try:
        yield
    except LoadError:
        raise
    # a missing key, a wrong type, shape or number
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise LoadError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _load_fit(
    content: dict[str, Any],
    settings: ForecasterSettings,
    path: Path,
) -> Fit:
    # the lists of a file are tuples here
    sizes: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in content["channels"].items()
    }
    channels = Channels(**sizes)
    dtype = read_dtype(content["dtype"], path)
    as_fitted = copy(settings)
    if as_fitted.hidden_size is None:
        as_fitted.hidden_size = int(content["hidden_size"])
    sized = with_size(as_fitted, 0)
    fitted = FittedForecaster(
        _load_features(content["features"]),
        channels,
        _load_covariates(content["covariates"]),
        settings,
        correction=_load_correction(content["correction"], channels.h, len(settings.quantiles)),
        network=content["network"],
    )

    def build() -> nn.Module:
        return build_model(make_network(sized, fitted), None, None, dtype, None)

    models = [_load_network(stored, settings, build, path) for stored in content["models"]]
    fitted = replace(fitted, models=models)
    frequency = Frequency(**content["frequency"])
    # None: the loss is code, which the user gives again
    loss = settings.loss if content["loss_name"] is None else content["loss_name"]
    return Fit(
        fitted,
        frequency,
        loss,
        content["loss_curve"],
        content["validation_loss_curve"],
        content["network_errors"],
        origin=_load_history(content["history"], frequency),
    )


def _load_network(
    stored: dict[str, Tensor],
    settings: ForecasterSettings,
    build: Callable[[], nn.Module],
    path: Path,
) -> nn.Module:
    # before memory is used: the sizes in the file may be wrong
    model = build_bounded(build, stored, path).to(check_device(settings.device))
    model.load_state_dict(stored)
    return model.eval()


def _load_features(content: dict[str, Any]) -> Features:
    # the lists of a file are tuples here
    return Features(**content | {"wander": tuple(content["wander"])})


def _plain_correction(correction: Correction | None) -> dict[str, Any] | None:
    if correction is None:
        return None
    arrays = asdict(correction)
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _load_correction(content: dict[str, Any] | None, h: int, n_quantiles: int) -> Correction | None:
    if content is None:
        return None
    correction = Correction(**{name: tensor.numpy() for name, tensor in content.items()})
    shapes = {name: tuple(tensor.shape) for name, tensor in content.items()}
    of_steps = {"spread": (h,), "trust": (h,)}
    if shapes != of_steps | {"weights": (len(SOURCES), h), "offsets": (n_quantiles, h)}:
        raise ValueError(f"the correction has shapes {shapes}")
    return correction


def _is_plain(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(v, (*PLAIN, np.generic)) for v in values)


def _to_plain(value: Any) -> Any:
    """Return the numbers and text of Python for those of NumPy and for subclasses of them.

    Other values stay: :func:`_require_plain_labels` names their column. ``to_plain_data`` of
    ``training/plain_files.py`` would refuse them, and subclasses of text such as enumerations.
    """
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration: its value, not its name
    for plain_type in (bool, int, float):  # in this order: a boolean is an integer too
        if isinstance(value, plain_type):
            return plain_type(value)
    return value


def _load_covariates(content: dict[str, Any]) -> Covariates:
    return Covariates(**{group: tuple(map(_load_covariate, content[group])) for group in GROUPS})


def _load_covariate(content: dict[str, Any]) -> Covariate:
    categories = content["categories"]
    if categories is not None:
        categories = tuple(categories)
    return Covariate(**content | {"categories": categories})


def _plain_history(history: History) -> dict[str, Any]:
    # copies: a view of a large array would be stored with all of it
    arrays = {name: torch.from_numpy(np.array(getattr(history, name))) for name in ARRAYS}
    return {**arrays, "states": history.states, "panel": _plain_panel(history.panel)}


def _plain_panel(panel: Panel) -> dict[str, Any]:
    return {
        "ids": [_to_plain(i) for i in panel.ids],
        "first": torch.from_numpy(np.array(panel.first)),
        "zone": panel.zone,
        "backend": panel.backend,
        "types": {k: repr(v) for k, v in panel.types.items()},
        "shape": panel.shape,
    }


def _load_history(content: dict[str, Any], frequency: Frequency) -> History:
    arrays = {name: content[name].numpy() for name in ARRAYS}
    panel = _load_panel(content["panel"], arrays["lengths"], frequency)
    return History(**arrays, states=content["states"], panel=panel)


def _load_panel(
    content: dict[str, Any],
    lengths: np.ndarray,
    frequency: Frequency,
) -> Panel:
    return Panel(
        np.array(content["ids"], object),
        content["first"].numpy(),
        lengths,
        values={},
        static={},
        frequency=frequency,
        zone=content["zone"],
        types={k: _parse_type(v) for k, v in content["types"].items()},
        backend=content["backend"],
        shape=content.get("shape"),
    )


def _parse_type(text: str) -> Any:
    """Parse the ``repr`` of a data type of narwhals or pyarrow."""
    nw = require("narwhals")
    if match := re.fullmatch(r"DataType\((\w+)\)", text):
        return require("pyarrow").type_for_alias(match[1])
    if match := re.fullmatch(
        r"DictionaryType\(dictionary<values=(\w+), indices=(\w+), ordered=([01])>\)", text
    ):
        pa = require("pyarrow")
        # with the type of the codes, without which columns cannot be joined
        values, indices = (pa.type_for_alias(match[i]) for i in (1, 2))
        return pa.dictionary(indices, values, ordered=match[3] == "1")
    if match := re.fullmatch(r"Datetime\(time_unit='(\w+)', time_zone=(?:None|'([^']*)')\)", text):
        return nw.Datetime(match[1], match[2])
    if match := re.fullmatch(r"Enum\(categories=(\[.*\])\)", text, re.DOTALL):
        return nw.Enum(ast.literal_eval(match[1]))
    # the text comes from a file: no other attribute of narwhals may be looked up by it
    if re.fullmatch(r"Date|U?Int\d+|String|Categorical|Object", text):
        return getattr(nw, text)()
    return nw.String()
