"""Read the pipelines and transformers that 0.2.0 wrote, without skops."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sklearn import compose, impute, preprocessing
from sklearn.base import BaseEstimator, clone
from sklearn.pipeline import Pipeline

from fluxutils_py import transformers
from fluxutils_py.errors import LoadError
from fluxutils_py.inputs.inputs import InputLayout
from fluxutils_py.training.plain_files import array_from_plain, dataclass_from_plain

Read = Callable[[Any], Any]
Described = Mapping[str, Any]
PLACES = (preprocessing, impute, compose, transformers)
TYPES: dict[str, type] = {cls.__name__: cls for cls in (bool, int, float, str, object)}


def read_object(described: Any, build: Read) -> Any:
    """Return the object that a file describes; ``build`` makes an estimator of this package from
    what the file holds of it.

    Raises
    ------
    LoadError
        If the file names anything but transformers, functions and types of NumPy, and plain data.
    """

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        label = next(iter(value), None)
        if label == "estimator":
            return build(value[label])
        if label not in READERS:
            raise LoadError(f"it holds a value of the kind {label!r}, none of {', '.join(READERS)}")
        return READERS[label](value, read)

    return read(described)


def _read_each(settings: Described, read: Read) -> dict[str, Any]:
    return {name: read(value) for name, value in settings.items()}


def _set_fitted(made: Any, fitted: Described, read: Read) -> Any:
    for name, value in fitted.items():
        # a file must not replace a method, or a name that Python gives a meaning
        is_attribute = re.fullmatch(r"_?[a-z][a-z0-9_]*", name)
        if not is_attribute or callable(getattr(type(made), name, None)):
            raise LoadError(f"{name!r} is no attribute of a fitted {type(made).__name__}")
        setattr(made, name, read(value))
    return made


def _transformer(described: Described, read: Read) -> Any:
    name = described["transformer"]
    found = [vars(place)[name] for place in PLACES if name in place.__all__]
    if not found or not isinstance(found[0], type) or not issubclass(found[0], BaseEstimator):
        raise LoadError(f"it names {name!r}, which is no transformer that 0.2.0 wrote")
    made = found[0](**_read_each(described["settings"], read))
    return _set_fitted(made, described["fitted"], read)


def _pipeline(steps: Any, read: Read) -> Pipeline:
    return Pipeline([(name, read(step)) for name, step in steps])


def _targets(described: Described, read: Read) -> Any:
    parts = described["targets"]
    regressor = read(parts["regressor"])
    transformer = read(parts["transformer"])
    made = compose.TransformedTargetRegressor(
        clone(regressor),  # the constructor's argument is not fitted
        transformer=clone(transformer) if parts["given"] else None,
        **_read_each(parts["settings"], read),
    )
    made.regressor_ = regressor
    made.transformer_ = transformer
    return _set_fitted(made, parts["fitted"], read)


def _best(described: Described, read: Read) -> Any:
    best = read(described["search"]["best"])
    best.best_params_ = _read_each(described["search"]["params"], read)
    best.best_score_ = described["search"]["score"]
    return best


def _function(described: Described, read: Read) -> np.ufunc:
    function = getattr(np, described["function"], None)
    if not isinstance(function, np.ufunc):
        raise LoadError(f"it names {described['function']!r}, which is no ufunc of NumPy")
    return function


def _type(described: Described, read: Read) -> type:
    name = described["type"]
    # not getattr, which imports modules and warns for some names
    found = vars(np).get(name)
    if name in TYPES:
        return TYPES[name]
    if not isinstance(found, type) or not issubclass(found, np.generic):
        raise LoadError(f"it names {name!r}, which is no type of NumPy")
    return found


READERS: dict[str, Callable[[Described, Read], Any]] = {
    "transformer": _transformer,
    "pipeline": lambda v, read: _pipeline(v["pipeline"], read),
    "steps": lambda v, read: _pipeline(v["steps"], read),
    "targets": _targets,
    "search": _best,
    "object": lambda v, read: read(v["object"]),
    # nested lists do not tell the shape of an array without values
    "array": lambda v, read: array_from_plain(v["array"]).reshape(v["shape"]),
    "scalar": lambda v, read: array_from_plain(v["scalar"])[()],
    "tuple": lambda v, read: tuple(map(read, v["tuple"])),
    "list": lambda v, read: list(map(read, v["list"])),
    "dict": lambda v, read: {read(key): read(value) for key, value in v["dict"]},
    "slice": lambda v, read: slice(*map(read, v["slice"])),
    "dtype": lambda v, read: np.dtype(v["dtype"]),
    "type": _type,
    "layout": lambda v, read: dataclass_from_plain(InputLayout, v["layout"]),
    "selector": lambda v, read: compose.make_column_selector(**_read_each(v["selector"], read)),
    "function": _function,
}
