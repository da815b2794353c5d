"""Save forecasters to files of plain data, and load them."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from fluxutils_py.errors import DataError, LoadError
from fluxutils_py.estimator.bounded_building import build_bounded
from fluxutils_py.estimator.building import build_model, check_device
from fluxutils_py.estimator.persistence import read_dtype
from fluxutils_py.forecasting.covariates import Covariate, Covariates
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.frames import require
from fluxutils_py.forecasting.frequency import Frequency
from fluxutils_py.forecasting.history import History
from fluxutils_py.forecasting.model_fitting import make_network
from fluxutils_py.forecasting.panel import Panel
from fluxutils_py.forecasting.panel_windows import Channels
from fluxutils_py.training.plain_files import read_file, write_file

KIND, FORMAT = "fluxutils_py forecaster", 2
PLAIN = (bool, int, float, str, type(None))
NOT_STORED = ("callbacks", "device", "comm")  # code, or specific to a machine
CODE = ("cell", "model", "loss", "freq")  # stored only if they are plain data


def save_forecaster(fc: Any, path: Any) -> None:
    """Write a fitted forecaster; see ``Forecaster.save``."""
    _require_plain_labels(fc)
    settings = {k: v for k, v in fc.get_params(deep=False).items() if k not in NOT_STORED}
    settings = {
        k: list(v) if isinstance(v, tuple | list | np.ndarray) else v for k, v in settings.items()
    }
    content = {
        "kind": KIND,
        "format": FORMAT,
        "settings": {k: _to_plain(v) for k, v in settings.items() if _is_plain(v)},
        "code": [k for k in CODE if not _is_plain(settings[k])],
        "features": asdict(fc.features_),
        "channels": asdict(fc.channels_),
        "covariates": {
            k: [_to_plain(asdict(c)) for c in getattr(fc.covariates_, k)]
            for k in ("hist", "futr", "stat")
        },
        "frequency": None if fc.frequency_ is None else asdict(fc.frequency_),
        "loss_name": fc.loss_name_ if isinstance(fc.loss_name_, str) else None,
        "loss_curve": fc.loss_curve_,
        "models": [{k: v.detach() for k, v in model.state_dict().items()} for model in fc.models_],
        "dtype": str(next(fc.models_[0].parameters()).dtype).removeprefix("torch."),
        "shape": fc._shape,
        "history": _plain_history(fc._history),
    }
    write_file(path, content)


def _require_plain_labels(fc: Any) -> None:
    """Raise DataError, before a file is written, if it could not be read: ids and categories must
    be plain data.
    """
    labels = {} if fc._history.panel is None else {fc.id_col: fc._history.panel.ids}
    for kind in ("hist", "futr", "stat"):
        labels.update(
            {
                c.name: c.categories
                for c in getattr(fc.covariates_, kind)
                if c.categories is not None
            }
        )
    for column, values in labels.items():
        odd = [v for v in values if not isinstance(_to_plain(v), PLAIN)]
        if odd:
            raise DataError(
                f"column {column!r} holds {type(odd[0]).__name__} such as {odd[0]!r}, and a file "
                "holds text, numbers and booleans only; convert the column before fit, as with "
                ".astype(str)"
            )


def load_forecaster(cls: Any, path: Any, arguments: dict[str, Any]) -> Any:
    """Read a forecaster; see ``Forecaster.load``."""
    c = read_file(path, KIND, format=FORMAT)
    missing = [k for k in c["code"] if k not in arguments]
    if missing:
        raise LoadError(
            f"{path} does not hold the forecaster's {' and '.join(missing)}, which is code of its "
            f"author's; give it: {cls.__name__}.load(path, {missing[0]}=...)"
        )
    fc = cls(**{**c["settings"], **arguments})
    try:
        fc.features_ = _load_features(c["features"])
        channels: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in c["channels"].items()
        }
        fc.channels_ = Channels(**channels)
        kinds = {
            k: tuple(_load_covariate(one) for one in c["covariates"][k])
            for k in ("hist", "futr", "stat")
        }
        fc.covariates_ = Covariates(**kinds)
        fc.frequency_ = None if c["frequency"] is None else Frequency(**c["frequency"])
        fc.loss_name_ = fc.loss if c["loss_name"] is None else c["loss_name"]
        fc.loss_curve_, dtype = c["loss_curve"], read_dtype(c["dtype"], path)
        fc._shape = None if c["shape"] is None else tuple(c["shape"])
        fc.models_ = []
        for stored in c["models"]:
            model = build_bounded(
                lambda: build_model(make_network(fc, fc.channels_), None, None, dtype, None),
                stored,
                path,
            )
            model = model.to(check_device(fc.device))
            model.load_state_dict(stored)
            fc.models_.append(model.eval())
        fc._origin = _load_history(c["history"], fc.frequency_)
    except LoadError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise LoadError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return fc


def _load_features(content: dict[str, Any]) -> Features:
    """Read the features; files of 0.1.0 lack the smallest scale, and those of logarithms have a
    unit of 1.
    """
    if "smallest_scale" in content:
        return Features(**content)
    if content["log"]:
        return Features(**{**content, "unit": math.exp(-2.5)}, smallest_scale=0.002)
    return Features(**content, smallest_scale=1e-6 * content["unit"])


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(v, (*PLAIN, np.generic)) for v in value)
    return isinstance(value, (*PLAIN, np.generic))


def _to_plain(value: Any) -> Any:
    """Return the numbers and text of Python for those of NumPy and for subclasses of them."""
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration: its value, not its name
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def _load_covariate(content: dict[str, Any]) -> Covariate:
    categories = content["categories"]
    return Covariate(**{**content, "categories": None if categories is None else tuple(categories)})


def _plain_history(history: History) -> dict[str, Any]:
    panel = history.panel
    return {
        **{
            k: torch.from_numpy(np.array(getattr(history, k)))
            for k in ("tail", "lengths", "static")
        },
        "states": history.states,
        "panel": None
        if panel is None
        else {
            "ids": [_to_plain(i) for i in panel.ids],
            "first": torch.from_numpy(np.array(panel.first)),
            "zone": panel.zone,
            "backend": panel.backend,
            "types": {k: repr(v) for k, v in panel.types.items()},
        },
    }


def _load_history(content: dict[str, Any], frequency: Frequency | None) -> History:
    arrays = {k: content[k].numpy() for k in ("tail", "lengths", "static")}
    stored, panel = content["panel"], None
    if stored is not None and frequency is not None:
        ids = np.empty(len(stored["ids"]), object)
        ids[:] = stored["ids"]
        types = {k: _parse_type(v) for k, v in stored["types"].items()}
        where = stored["zone"], types, stored["backend"]
        panel = Panel(ids, stored["first"].numpy(), arrays["lengths"], {}, {}, frequency, *where)
    return History(**arrays, states=content["states"], panel=panel)


def _parse_type(text: str) -> Any:
    """Parse the ``repr`` of a data type of narwhals or pyarrow."""
    nw = require("narwhals")
    if found := re.fullmatch(r"DataType\((\w+)\)", text):
        return require("pyarrow").type_for_alias(found[1])
    if found := re.fullmatch(
        r"DictionaryType\(dictionary<values=(\w+), indices=(\w+), ordered=([01])>\)", text
    ):
        pa = require("pyarrow")
        kinds = [pa.type_for_alias(found[i]) for i in (2, 1)]
        return pa.dictionary(*kinds, ordered=found[3] == "1")
    found = re.fullmatch(r"Datetime\(time_unit='(\w+)', time_zone=(?:None|'([^']*)')\)", text)
    if found:
        return nw.Datetime(found[1], found[2])
    if found := re.fullmatch(r"Enum\(categories=(\[.*\])\)", text, re.DOTALL):
        return nw.Enum(ast.literal_eval(found[1]))
    if not re.fullmatch(r"Date|U?Int\d+|String|Categorical|Object", text):
        return nw.String()
    return getattr(nw, text)()
