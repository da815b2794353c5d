"""Save forecasters to files of plain data, and load them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import asdict, fields, is_dataclass, replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, LoadError
from fluxutils_py.estimator.building import build_model, check_device
from fluxutils_py.estimator.persistence import build_bounded, load_errors, read_dtype
from fluxutils_py.exporting.export_files import Path
from fluxutils_py.forecasting.fitted_state import FittedState, History
from fluxutils_py.forecasting.forecaster_settings import ForecasterSettings
from fluxutils_py.forecasting.model_fitting import make_network
from fluxutils_py.forecasting.read_series import STEPS
from fluxutils_py.frames.frames import require
from fluxutils_py.training.plain_files import read_file, write_file

KIND = "fluxutils_py forecaster"
FORMAT = 3
OF_0_2_0 = 2  # the format of files of 0.2.0
PLAIN = (bool, int, float, str, type(None))
NOT_STORED = ("callbacks", "device", "comm")  # code, or specific to a machine
CODE = ("network", "loss", "freq")  # stored only if they are plain data
GROUPS = ("hist", "futr", "stat")  # of covariates

T = TypeVar("T")


def save_forecaster(
    path: Path, settings: ForecasterSettings, state: FittedState, history: History
) -> None:
    """Write a fitted forecaster; see ``Forecaster.save``."""
    _require_plain_labels(state, history)
    arguments = _stored_arguments(settings)
    head = state.models[0].head
    assert isinstance(head, nn.Linear)
    loss = state.loss_name if isinstance(state.loss_name, str) else None
    # values are in the tail, and networks need their settings
    types = {name: repr(dtype) for name, dtype in history.panel.types.items()}
    panel = replace(history.panel, values={}, static={}, types=types)
    content = {
        "kind": KIND,
        "format": FORMAT,
        "settings": {k: _to_plain(v) for k, v in arguments.items() if _is_plain(v)},
        "code": code_arguments(settings),
        "state": _to_plain(replace(state, models=(), loss_name=loss)),
        "models": [{k: v.detach() for k, v in m.state_dict().items()} for m in state.models],
        "hidden_size": head.in_features,
        "dtype": str(head.weight.dtype).removeprefix("torch."),
        "history": _to_plain(replace(history, panel=panel)),
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


def _require_plain_labels(state: FittedState, history: History) -> None:
    """Raise DataError, before a file is written, if it could not be read: ids and categories must
    be plain data.
    """
    labels: dict[str, Iterable[Any]] = {state.columns.id: history.panel.ids}
    for covariate in state.channels.covariates:
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
    arguments: Mapping[str, Any],
    class_name: str,
) -> dict[str, Any]:
    """Read the file of a forecaster; LoadError if ``arguments`` lack the code that it does not
    hold.
    """
    content = read_file(path, KIND)
    with load_errors(path):
        if content["format"] == OF_0_2_0:
            content = _of_0_2_0(content, path)
        if content["format"] != FORMAT:
            raise LoadError(
                f"{path} has format {content['format']}, this version reads {FORMAT}: update "
                "fluxutils_py"
            )
        # before the constructor, whose errors would not say that a file lacks code
        missing = [name for name in content["code"] if name not in arguments]
    if missing:
        raise LoadError(
            f"{path} does not hold the forecaster's {' and '.join(missing)}, which is its author's "
            f"code; give it: {class_name}.load(path, {missing[0]}=...)"
        )
    return content


def load_state(
    content: dict[str, Any], settings: ForecasterSettings, path: Path
) -> tuple[FittedState, History]:
    """Return what a file holds besides the settings; see ``Forecaster.load``."""
    with load_errors(path):
        state = _from_plain(FittedState, content["state"])
        history = _from_plain(History, content["history"])
        types = {k: _parse_type(v) for k, v in history.panel.types.items()}
        history.panel = replace(history.panel, types=types)
        if state.loss_name is None:  # code, which the user gives again
            state = replace(state, loss_name=settings.loss)
        sized = copy(settings)
        sized.hidden_size = settings.hidden_size or int(content["hidden_size"])
        dtype = read_dtype(content["dtype"], path)

        def build() -> nn.Module:
            return build_model(make_network(sized, state), None, None, dtype, None)

        device = check_device(settings.device)
        models = []
        for stored in content["models"]:
            # before memory is used: the sizes in the file may be wrong
            model = build_bounded(build, stored, path).to(device)
            models.append(model.eval())
        return replace(state, models=tuple(models)), history


# -- plain data ------------------------------------------------------------------------------------


def _is_plain(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(v, (*PLAIN, np.generic)) for v in values)


def _to_plain(value: Any) -> Any:
    """Return dataclasses as dicts of their fields, arrays as tensors, and the numbers and text of
    Python for those of NumPy and for subclasses of them.

    Other values stay: :func:`_require_plain_labels` names their column.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy())  # a view of a large array would be stored whole
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_to_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration: its value, not its name
    return value


def _from_plain(kind: type[T], content: dict[str, Any]) -> T:
    """Return the dataclass that :func:`_to_plain` took apart."""
    hints = get_type_hints(kind)
    return kind(**{name: _as_type(hints[name], value) for name, value in content.items()})


def _as_type(hint: Any, value: Any) -> Any:
    """Return a value of a file as the type of a field."""
    if get_origin(hint) in (UnionType, Union):
        if value is None:
            return None
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is tuple:
        return tuple(_as_type(get_args(hint)[0], v) for v in value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _from_plain(hint, value)
    if hint is np.ndarray:
        return value.numpy() if isinstance(value, Tensor) else np.array(value, object)
    return value


def _parse_type(text: str) -> Any:
    """Parse the ``repr`` of a data type of narwhals; one of pyarrow, in files of 0.2.0, is text."""
    nw = require("narwhals")
    if match := re.fullmatch(r"Datetime\(time_unit='(\w+)', time_zone=(?:None|'([^']*)')\)", text):
        return nw.Datetime(match[1], match[2])
    if match := re.fullmatch(r"Enum\(categories=(\[.*\])\)", text, re.DOTALL):
        return nw.Enum(ast.literal_eval(match[1]))
    # the text comes from a file: no other attribute of narwhals may be looked up by it
    if re.fullmatch(r"Date|U?Int\d+|String|Categorical|Object", text):
        return getattr(nw, text)()
    return nw.String()


# -- files of 0.2.0 --------------------------------------------------------------------------------


# fields of the state that a file of 0.2.0 has under the same names
SAME = (
    "features",
    "correction",
    "loss_name",
    "loss_curve",
    "network",
    "network_errors",
)


def _of_0_2_0(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file of 0.2.0 as files have it now."""
    old = content["settings"]
    settings = _settings_of_0_2_0(old, content)
    covariates = content["covariates"]
    for covariate in (c for group in GROUPS for c in covariates[group]):
        if covariate.pop("from_time"):  # what the calendar made is given as columns now
            settings["futr_exog_list"] = [*settings["futr_exog_list"], covariate["name"]]
    panel = _panel_of_0_2_0(content, path)
    columns = {group: settings[f"{group}_exog_list"] for group in GROUPS}
    columns |= {"id": old["id_col"], "time": old["time_col"], "target": old["target_col"]}
    state = {name: content[name] for name in SAME}
    sizes = {name: content["channels"][name] for name in ("h", "history")}
    state |= {"channels": sizes | covariates, "columns": columns}
    state["frequency"] = panel["frequency"]
    state["quantiles"] = sorted(map(float, settings["quantiles"]))
    code = [*content["code"], *(["model"] if old["num_layers"] > 1 else [])]
    return {
        "format": FORMAT,
        "settings": settings,
        "code": sorted({"network" if name in ("cell", "model") else name for name in code}),
        "state": state,
        "models": content["models"],
        "hidden_size": content["hidden_size"],
        "dtype": content["dtype"],
        "history": content["history"] | {"panel": panel},
    }


def _panel_of_0_2_0(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the ids and times of the series, which an array had not."""
    lengths = content["history"]["lengths"]
    panel = content["history"]["panel"]
    frequency = content["frequency"]
    if frequency is None or panel is None:
        frequency = asdict(STEPS)
        panel = {"ids": list(range(len(lengths))), "first": torch.zeros_like(lengths)}
        panel |= {"zone": None, "backend": "pandas", "types": {}}
    elif len(frequency.pop("times")):
        raise LoadError(f"{path}: freq={frequency['text']!r} is not supported any more: fit again")
    panel |= {"lengths": lengths, "values": {}, "static": {}, "frequency": frequency}
    return panel | {"shape": content["shape"]}


def _settings_of_0_2_0(old: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forecaster of 0.2.0 as they are given now."""
    names = ForecasterSettings(h=1).get_params(deep=False)
    settings = {name: value for name, value in old.items() if name in names}
    if old["lag"] != "auto":
        season = old["season_length"] or content["features"]["season"]
        settings["season_length"] = [season] if old["lag"] is None else [season, old["lag"]]
    if old["network"] != "segments" and old.get("cell", "lstm") != "lstm":
        settings["network"] = old["cell"]
    return settings
