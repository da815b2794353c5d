"""Save and load whatever is fitted, as files that contain data, never code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from sklearn import preprocessing
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator import persistence
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.serialization import full_name
from fluxutils_py.inputs.inputs import InputLayout
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training.plain_files import (
    SETTING_TYPES,
    array_from_plain,
    array_to_plain,
    dataclass_from_plain,
    dataclass_to_plain,
    plain_or_none,
    read_file,
    write_file,
)
from fluxutils_py.transformers.imputer import SequenceImputer
from fluxutils_py.transformers.scaler import SequenceScaler
from fluxutils_py.transformers.sequence_features import SequenceFeatures
from fluxutils_py.transformers.winsor_scaler import WinsorScaler
from fluxutils_py.versions import installed_version

KIND = "fluxutils_py fitted objects"
FORMAT = 1
FORECASTER_KIND = "fluxutils_py forecaster"  # as in forecaster_files.py, which is slow to load
TRANSFORMERS = {
    cls.__name__: cls
    for cls in (
        *(SequenceFeatures, SequenceScaler, SequenceImputer, WinsorScaler, SimpleImputer),
        *(preprocessing.StandardScaler, preprocessing.RobustScaler, preprocessing.MinMaxScaler),
        *(preprocessing.MaxAbsScaler, preprocessing.Normalizer, preprocessing.FunctionTransformer),
        *(preprocessing.PowerTransformer, preprocessing.QuantileTransformer),
        *(preprocessing.PolynomialFeatures, preprocessing.OneHotEncoder),
        *(preprocessing.OrdinalEncoder, ColumnTransformer),
    )
}
DEPTH = 20  # of pipelines in each other; Python's stack ends before a long file does


@undisturbed()
def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Write something fitted to one file, which holds no code and is never half-written.

    :func:`load` reads it.

    Parameters
    ----------
    obj : estimator, forecaster, transformer, Pipeline, TransformedTargetRegressor, or search
        An estimator or forecaster of this package, in the format of its own ``save``; its
        transformers; of scikit-learn, scalers, ``SimpleImputer``, encoders, a
        ``FunctionTransformer`` of a function of NumPy, and a ``ColumnTransformer`` of these;
        pipelines of these. Of a search, such as ``GridSearchCV``, the file holds
        ``best_estimator_``, ``best_params_`` and ``best_score_``.
    path : str or path-like
        Its folder must exist. An existing file is replaced. On several ranks, only rank 0 writes.

    Raises
    ------
    TypeError
        If a part is of another kind; the message names the part. Nothing is written.
    sklearn.exceptions.NotFittedError
        Before ``fit``.

    Examples
    --------
    >>> import tempfile
    >>> import fluxutils_py
    >>> from fluxutils_py import SequenceRegressor, SequenceScaler, samples
    >>> from sklearn.pipeline import make_pipeline
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> pipe = make_pipeline(SequenceScaler(), SequenceRegressor(4, epochs=1)).fit(
    ...     samples(x), samples(x[:1])
    ... )
    >>> folder = tempfile.TemporaryDirectory()
    >>> fluxutils_py.save(pipe, f"{folder.name}/pipe.pt")
    >>> again = fluxutils_py.load(f"{folder.name}/pipe.pt")
    >>> np.array_equal(again.predict(x), pipe.predict(x))
    True
    >>> folder.cleanup()
    """
    if isinstance(obj, Estimator | _forecaster_class()):
        # in the format that the load of its class reads as well
        obj.save(path)
        return
    content = {
        "kind": KIND,
        "format": FORMAT,
        # for whoever wonders why another version cannot read the file
        "versions": {name: installed_version(name) for name in ("fluxutils_py", "scikit-learn")},
        "object": _describe(obj, type(obj).__name__),
    }
    if get_communicator("auto").rank == 0:
        write_file(path, content)


@undisturbed()
def load(path: object, **arguments: Any) -> Any:
    """Read what :func:`save`, or ``save`` of an estimator or forecaster of this package, wrote.

    It runs no code from the file, so files from strangers are safe.

    Parameters
    ----------
    path : str or path-like
    **arguments
        Constructor arguments of the estimator or forecaster to use instead of those in the file,
        such as ``model`` for a network of your own, also one in a pipeline or of a search; see
        :meth:`Estimator.load`.

    Returns
    -------
    object
        An instance of the class that was saved, such as :class:`SequenceClassifier` or
        ``Pipeline``. Of a search, the best estimator, with ``best_params_`` and ``best_score_``.

    Raises
    ------
    FileNotFoundError
    LoadError
        If the file holds nothing of this kind, or an estimator of your own class, which the message
        names: call its ``load``.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import fluxutils_py
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> est = fluxutils_py.SequenceRegressor(4, epochs=1).fit(x, x[:1])
    >>> folder = tempfile.TemporaryDirectory()
    >>> est.save(f"{folder.name}/model.pt")
    >>> again = fluxutils_py.load(f"{folder.name}/model.pt")
    >>> type(again).__name__, np.array_equal(again.predict(x), est.predict(x))
    ('SequenceRegressor', True)
    >>> folder.cleanup()
    """
    content = read_file(path, (persistence.KIND, KIND, FORECASTER_KIND))
    if content["kind"] == FORECASTER_KIND:
        return _forecaster_class().load(path, **arguments)
    if content["kind"] == persistence.KIND:
        return _load_estimator(content, path, arguments)
    if content.get("format") != FORMAT:
        raise LoadError(
            f"{path} has format {content.get('format')}, this version reads {FORMAT}: update "
            "fluxutils_py"
        )
    maker = _Maker(path, arguments)
    with persistence.load_errors(path):
        made = maker.make(content["object"])
    if arguments and not maker.has_estimator:
        raise TypeError(f"load: {path} holds no estimator that could take {', '.join(arguments)}")
    return made


def _load_estimator(content: dict[str, Any], path: object, arguments: dict[str, Any]) -> Any:
    name = content.get("class")
    classes = {
        c.__name__: c
        for c in _with_subclasses(Estimator)
        # a class of the user may have the same name
        if c.__module__.startswith("fluxutils_py.")
    }
    if name not in classes:
        raise LoadError(
            f"{path} holds an estimator of the class {name}, which is none of fluxutils_py; if it "
            f"is your own, import it and use {name}.load(path)"
        )
    return persistence.estimator_of(classes[name], content, path, arguments)


def _forecaster_class() -> Any:
    # only now: it takes a tenth of a second
    from fluxutils_py.forecasting.forecaster import Forecaster

    return Forecaster


def _with_subclasses(cls: type[Estimator]) -> Iterator[type[Estimator]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _with_subclasses(below)


# -- to plain data -------------------------------------------------------------------------------


def _describe(obj: Any, where: str) -> dict[str, Any]:
    """Return what a file holds of a fitted object, at ``where`` among the parts of a whole."""
    if _is_search(obj):
        return {"search": _describe_search(obj, where)}
    if isinstance(obj, Estimator):
        check_is_fitted(obj, "model_")
        # a class of the user cannot be found again by its name alone
        if not type(obj).__module__.startswith("fluxutils_py."):
            raise TypeError(
                f"{where} is of your own class {type(obj).__name__}: save it alone, with its own "
                "save"
            )
        return {"estimator": persistence.estimator_content(obj)}
    # exact types: a subclass may have settings and methods that a file cannot restore
    if type(obj) is Pipeline:
        return {"pipeline": [_describe_step(name, step, where) for name, step in obj.steps]}
    if type(obj) is TransformedTargetRegressor:
        return {"targets": _describe_targets(obj, where)}
    if not _is_known_transformer(obj):
        raise TypeError(
            f"{where} is a {full_name(obj)}, which cannot be saved without pickle: a file holds "
            "estimators of fluxutils_py, Pipeline, TransformedTargetRegressor, "
            f"{', '.join(TRANSFORMERS)}; use one of these in its place, or keep it out of what is "
            "saved"
        )
    check_is_fitted(obj)
    return _describe_transformer(obj, where)


def _describe_transformer(obj: Any, where: str) -> dict[str, Any]:
    """Return what a file holds of a transformer, which among settings is not fitted."""
    settings = {k: _encode(v, f"{where}.{k}") for k, v in obj.get_params(deep=False).items()}
    fitted = _fitted_of(obj, where)
    return {"transformer": type(obj).__name__, "settings": settings, "fitted": fitted}


def _is_search(obj: Any) -> bool:
    """Return whether an object is a search, such as GridSearchCV or one of another library."""
    if hasattr(obj, "best_estimator_"):
        return True
    # one that is not fitted, or that has refitted nothing
    names = obj.get_params(deep=False) if hasattr(obj, "get_params") else {}
    return {"estimator", "refit"} <= set(names)


def _describe_search(obj: Any, where: str) -> dict[str, Any]:
    if not hasattr(obj, "best_estimator_"):
        if hasattr(obj, "cv_results_"):
            raise TypeError(
                f"{where} has no best_estimator_, which is what a file holds of a search: fit it "
                "with refit=True"
            )
        raise NotFittedError(f"{where}, a {type(obj).__name__}, is not fitted: call fit first")
    score = getattr(obj, "best_score_", None)  # with refit=function there is none
    return {
        "best": _describe(obj.best_estimator_, f"{where}.best_estimator_"),
        "params": {name: _encode_or_text(v) for name, v in obj.best_params_.items()},
        "score": None if score is None else float(score),
    }


def _encode_or_text(value: Any) -> Any:
    # only shown: the estimator has the value itself
    try:
        return _encode(value, "")
    except TypeError:
        return repr(value)


def _is_known_transformer(obj: object) -> bool:
    return TRANSFORMERS.get(type(obj).__name__) is type(obj)


def _describe_step(name: str, step: Any, where: str) -> tuple[str, Any]:
    if step is None or isinstance(step, str):  # "passthrough"
        return name, step
    return name, _describe(step, f"{where}[{name!r}]")


def _describe_targets(obj: TransformedTargetRegressor, where: str) -> dict[str, Any]:
    check_is_fitted(obj)
    settings = ("func", "inverse_func", "check_inverse")
    return {
        "regressor": _describe(obj.regressor_, f"{where}.regressor_"),
        "transformer": _describe(obj.transformer_, f"{where}.transformer_"),
        "given": obj.transformer is not None,
        "settings": {k: _encode(getattr(obj, k), f"{where}.{k}") for k in settings},
        "fitted": _fitted_of(obj, where, without=("regressor_", "transformer_")),
    }


def _fitted_of(obj: Any, where: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the attributes that ``fit`` has set; set_output is the reader's choice."""
    names = set(vars(obj)) - set(obj.get_params(deep=False)) - {*without, "_sklearn_output_config"}
    return {name: _encode(vars(obj)[name], f"{where}.{name}") for name in sorted(names)}


def _encode(value: Any, where: str) -> Any:
    """Return a setting or attribute as plain data; :func:`_decode` inverts it."""
    # before the plain types: np.float64 is a float of Python too, but has to come back as it was
    if isinstance(value, np.generic):
        return {"scalar": array_to_plain(np.array(value))}
    if isinstance(value, SETTING_TYPES):
        return value
    if isinstance(value, np.ndarray):
        return {"array": array_to_plain(value), "shape": value.shape}
    encoded = _encode_container(value, where) or _encode_object(value, where)
    if encoded is None:
        raise TypeError(
            f"{where} is a {full_name(value)}, which cannot be saved without pickle: a file holds "
            "numbers, texts, arrays, transformers such as StandardScaler, and functions of NumPy "
            "such as np.log1p"
        )
    return encoded


def _encode_container(value: Any, where: str) -> dict[str, Any] | None:
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_encode(v, where) for v in value]}
    if isinstance(value, dict):
        pairs = [(_encode(k, where), _encode(v, f"{where}[{k!r}]")) for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, slice):
        return {"slice": [_encode(part, where) for part in (value.start, value.stop, value.step)]}
    return None


def _encode_object(value: Any, where: str) -> dict[str, Any] | None:
    name = getattr(value, "__name__", "")
    if isinstance(value, np.ufunc) and getattr(np, name, None) is value:
        return {"function": name}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, type):
        return {"type": _type_name(value, where)}
    if isinstance(value, InputLayout):
        return {"layout": plain_or_none(dataclass_to_plain(value))}
    if _is_known_transformer(value):  # a PowerTransformer has a scaler
        return {"object": _describe_transformer(value, where)}
    if type(value) is make_column_selector:
        return {"selector": {k: _encode(v, f"{where}.{k}") for k, v in vars(value).items()}}
    if type(value) is Pipeline:  # of columns
        return {"steps": [(name, _encode(step, f"{where}.{name}")) for name, step in value.steps]}
    return None


def _type_name(value: type, where: str) -> str:
    """Return the name of a type of Python's or NumPy's numbers and texts."""
    if value in TYPES.values() or vars(np).get(value.__name__) is value:
        return value.__name__
    raise TypeError(f"{where} is the class {full_name(value)}: a file holds types of NumPy only")


# -- and back ------------------------------------------------------------------------------------


class _Maker:
    """Makes the objects that a file describes.

    Parameters
    ----------
    path : path-like
        Name of the file, for messages.
    arguments : dict
        Arguments of the caller for the estimator in the file.
    """

    def __init__(self, path: object, arguments: dict[str, Any]) -> None:
        self.path = path
        self.arguments = arguments
        self.has_estimator = False  # which could use the arguments

    def make(self, described: dict[str, Any], depth: int = 0) -> Any:
        """Return the object; ``depth`` is the number of objects around it."""
        if depth > DEPTH:
            raise LoadError(f"its pipelines are nested more than {DEPTH} deep")
        if "estimator" in described:
            self.has_estimator = True
            return _load_estimator(described["estimator"], self.path, self.arguments)
        if "pipeline" in described:
            return Pipeline(
                [(name, self._make_step(step, depth)) for name, step in described["pipeline"]]
            )
        if "targets" in described:
            return self._make_targets(described["targets"], depth)
        if "search" in described:
            return self._make_best(described["search"], depth)
        return _make_transformer(described)

    def _make_step(self, step: Any, depth: int) -> Any:
        if not isinstance(step, Mapping):
            return step
        return self.make(dict(step), depth + 1)

    def _make_best(self, described: dict[str, Any], depth: int) -> Any:
        best = self.make(described["best"], depth + 1)
        best.best_params_ = _decode_each(described["params"])
        best.best_score_ = described["score"]
        return best

    def _make_targets(self, described: dict[str, Any], depth: int) -> TransformedTargetRegressor:
        regressor = self.make(described["regressor"], depth + 1)
        transformer = self.make(described["transformer"], depth + 1)
        made = TransformedTargetRegressor(
            # the constructor's argument is not fitted
            clone(regressor),
            transformer=clone(transformer) if described["given"] else None,
            **_decode_each(described["settings"]),
        )
        made.regressor_ = regressor
        made.transformer_ = transformer
        return _set_fitted(made, described["fitted"])


def _make_transformer(described: dict[str, Any]) -> Any:
    cls = TRANSFORMERS.get(described["transformer"])
    if cls is None:
        raise LoadError(
            f"it names {described['transformer']!r}, which is none of {', '.join(TRANSFORMERS)}"
        )
    made = cls(**_decode_each(described["settings"]))
    return _set_fitted(made, described["fitted"])


def _decode_each(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: _decode(value) for name, value in settings.items()}


def _set_fitted(made: Any, fitted: dict[str, Any]) -> Any:
    for name, value in fitted.items():
        # a file must not replace a method, or a name that Python gives a meaning
        is_attribute = re.fullmatch(r"_?[a-z][a-z0-9_]*", name)
        if not is_attribute or callable(getattr(type(made), name, None)):
            raise LoadError(f"{name!r} is no attribute of a fitted {type(made).__name__}")
        setattr(made, name, _decode(value))
    return made


def _decode(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    (label, content), *shape = value.items()
    if label == "array":
        # nested lists do not tell the shape of an array without values
        return array_from_plain(content).reshape(shape[0][1])
    decode = DECODERS.get(label)
    if decode is None:
        raise LoadError(f"it holds a value of the kind {label!r}, none of {', '.join(DECODERS)}")
    return decode(content)


def _numpy_function(name: str) -> np.ufunc:
    function = getattr(np, name, None)
    if not isinstance(function, np.ufunc):
        raise LoadError(f"it names {name!r}, which is no function of NumPy for single numbers")
    return function


def _type_of_name(name: str) -> type:
    if name in TYPES:
        return TYPES[name]
    # not getattr, which imports modules and warns for some names
    found = vars(np).get(name)
    if not isinstance(found, type) or not issubclass(found, np.generic):
        raise LoadError(f"it names {name!r}, which is no type of NumPy")
    return found


TYPES: dict[str, type] = {cls.__name__: cls for cls in (bool, int, float, str, object)}
DECODERS: dict[str, Callable[[Any], Any]] = {
    "scalar": lambda content: array_from_plain(content)[()],
    "tuple": lambda content: tuple(_decode(part) for part in content),
    "list": lambda content: [_decode(part) for part in content],
    "dict": lambda content: {_decode(k): _decode(v) for k, v in content},
    "slice": lambda content: slice(*map(_decode, content)),
    "dtype": np.dtype,
    "type": _type_of_name,
    "layout": lambda content: dataclass_from_plain(InputLayout, content),
    "object": lambda content: _make_transformer(content),
    "selector": lambda content: make_column_selector(**_decode_each(content)),
    "steps": lambda content: Pipeline([(name, _decode(step)) for name, step in content]),
    "function": _numpy_function,
}
