"""Save and load whatever is fitted, as files that contain data, never code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sklearn import preprocessing
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator import persistence
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.serialization import PLAIN, full_name, plain_value
from fluxutils_py.inputs.inputs import InputLayout
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training.plain_files import read_file, write_file
from fluxutils_py.transformers.imputer import SequenceImputer
from fluxutils_py.transformers.scaler import SequenceScaler
from fluxutils_py.transformers.winsor_scaler import WinsorScaler
from fluxutils_py.versions import installed_version

KIND, FORMAT = "fluxutils_py fitted objects", 1
TRANSFORMERS = {
    cls.__name__: cls
    for cls in (
        *(SequenceScaler, SequenceImputer, WinsorScaler, SimpleImputer),
        *(preprocessing.StandardScaler, preprocessing.RobustScaler, preprocessing.MinMaxScaler),
        *(preprocessing.MaxAbsScaler, preprocessing.Normalizer, preprocessing.FunctionTransformer),
        *(
            preprocessing.PowerTransformer,
            preprocessing.QuantileTransformer,
            preprocessing.PolynomialFeatures,
        ),
    )
}
DEPTH = 20  # of pipelines in each other


def save(obj: Any, path: Any) -> None:
    """Write something fitted to one file that holds no code, and is never half-written; see
    :func:`load`.

    Parameters
    ----------
    obj : estimator, transformer, Pipeline or TransformedTargetRegressor
        An estimator of this package; :class:`SequenceScaler`, :class:`SequenceImputer`,
        :class:`WinsorScaler`; scalers, ``SimpleImputer``, and a ``FunctionTransformer`` of a
        function of NumPy, of scikit-learn; pipelines of these.
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
    if isinstance(obj, Estimator):
        obj.save(path)
        return
    content = {
        "kind": KIND,
        "format": FORMAT,
        "versions": {name: installed_version(name) for name in ("fluxutils_py", "scikit-learn")},
        "object": _describe(obj, type(obj).__name__),
    }
    if get_communicator("auto").rank == 0:
        write_file(path, content)


def load(path: Any, **arguments: Any) -> Any:
    """Read what :func:`save`, or ``save`` of an estimator of any class of this package, wrote.

    It runs no code from the file, so files from strangers are safe.

    Parameters
    ----------
    path : str or path-like
    **arguments
        Constructor arguments of the estimator to use instead of those in the file; see
        :meth:`Estimator.load`.

    Returns
    -------
    object
        An instance of the class that was saved, such as :class:`SequenceClassifier` or
        ``Pipeline``.

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
    content = read_file(path, (persistence.KIND, KIND))
    if content["kind"] == persistence.KIND:
        return _load_estimator(content, path, arguments)
    if content.get("format") != FORMAT:
        raise LoadError(
            f"{path} has format {content.get('format')}, this version reads {FORMAT}: update "
            "fluxutils_py"
        )
    used: list[str] = []
    with persistence.load_errors(path):
        made = _make(content["object"], path, arguments, used, 0)
    if arguments and not used:
        raise TypeError(f"load: {path} holds no estimator that could take {', '.join(arguments)}")
    return made


def _load_estimator(content: dict[str, Any], path: Any, arguments: dict[str, Any]) -> Any:
    name = content.get("class")
    classes = {
        c.__name__: c
        for c in _with_subclasses(Estimator)
        if c.__module__.startswith("fluxutils_py.")
    }
    if name not in classes:
        raise LoadError(
            f"{path} holds an estimator of the class {name}, which is none of fluxutils_py; if it "
            f"is your own, import it and use {name}.load(path)"
        )
    return persistence.estimator_of(classes[name], content, path, arguments)


def _with_subclasses(cls: type[Estimator]) -> Iterator[type[Estimator]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _with_subclasses(below)


# -- to plain data -------------------------------------------------------------------------------------------


def _describe(obj: Any, where: str) -> dict[str, Any]:
    """Return what a file holds of an object, at ``where`` among the parts of a whole."""
    if isinstance(obj, Estimator):
        check_is_fitted(obj, "model_")
        if not type(obj).__module__.startswith("fluxutils_py."):
            raise TypeError(
                f"{where} is of your own class {type(obj).__name__}: save it alone, with its own "
                "save"
            )
        return {"estimator": persistence.estimator_content(obj)}
    if type(obj) is Pipeline:
        return {"pipeline": [_describe_step(name, step, where) for name, step in obj.steps]}
    if type(obj) is TransformedTargetRegressor:
        check_is_fitted(obj)
        settings = ("func", "inverse_func", "check_inverse")
        return {
            "targets": {
                "regressor": _describe(obj.regressor_, f"{where}.regressor_"),
                "transformer": _describe(obj.transformer_, f"{where}.transformer_"),
                "given": obj.transformer is not None,
                "settings": {k: _encode(getattr(obj, k), f"{where}.{k}") for k in settings},
                "fitted": _fitted_of(obj, where, ("regressor_", "transformer_")),
            }
        }
    if TRANSFORMERS.get(type(obj).__name__) is not type(obj):
        raise TypeError(
            f"{where} is a {full_name(obj)}, which cannot be saved without pickle: a file holds "
            "estimators of fluxutils_py, Pipeline, TransformedTargetRegressor, "
            f"{', '.join(TRANSFORMERS)}"
        )
    check_is_fitted(obj)
    settings_of = {k: _encode(v, f"{where}.{k}") for k, v in obj.get_params(deep=False).items()}
    return {
        "transformer": type(obj).__name__,
        "settings": settings_of,
        "fitted": _fitted_of(obj, where),
    }


def _describe_step(name: str, step: Any, where: str) -> tuple[str, Any]:
    plain = step is None or isinstance(step, str)
    return name, step if plain else _describe(step, f"{where}[{name!r}]")


def _fitted_of(obj: Any, where: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    names = set(vars(obj)) - set(obj.get_params(deep=False)) - {*without, "_sklearn_output_config"}
    return {name: _encode(vars(obj)[name], f"{where}.{name}") for name in sorted(names)}


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        return {"scalar": persistence.array_to_plain(np.array(value))}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, np.ndarray):
        return {"array": persistence.array_to_plain(value), "shape": value.shape}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_encode(v, where) for v in value]}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, InputLayout):
        return {"layout": plain_value(persistence.to_plain(value))}
    name = getattr(value, "__name__", "")
    if isinstance(value, np.ufunc) and getattr(np, name, None) is value:
        return {"function": name}
    if TRANSFORMERS.get(type(value).__name__) is type(value):  # a PowerTransformer has a scaler
        return {"object": _describe(value, where)}
    raise TypeError(
        f"{where} is a {full_name(value)}, which cannot be saved without pickle: a file holds "
        "numbers, texts, arrays and functions of NumPy such as np.log1p"
    )


# -- and back ------------------------------------------------------------------------------------------------


def _make(
    described: dict[str, Any], path: Any, arguments: dict[str, Any], used: list[str], depth: int
) -> Any:
    if depth > DEPTH:
        raise LoadError(f"its pipelines lie more than {DEPTH} deep in each other")
    if "estimator" in described:
        used.append("estimator")
        return _load_estimator(described["estimator"], path, arguments)
    if "pipeline" in described:
        steps = [
            (
                name,
                _make(dict(step), path, arguments, used, depth + 1)
                if isinstance(step, Mapping)
                else step,
            )
            for name, step in described["pipeline"]
        ]
        return Pipeline(steps)
    if "targets" in described:
        return _make_targets(described["targets"], path, arguments, used, depth)
    cls = TRANSFORMERS.get(described["transformer"])
    if cls is None:
        raise LoadError(
            f"it names {described['transformer']!r}, which is none of {', '.join(TRANSFORMERS)}"
        )
    made = cls(**{name: _decode(value) for name, value in described["settings"].items()})
    return _set_fitted(made, described["fitted"])


def _make_targets(
    described: dict[str, Any], path: Any, arguments: dict[str, Any], used: list[str], depth: int
) -> Any:
    parts = (described[k] for k in ("regressor", "transformer"))
    regressor, transformer = (_make(part, path, arguments, used, depth + 1) for part in parts)
    settings = {name: _decode(value) for name, value in described["settings"].items()}
    given = clone(transformer) if described["given"] else None
    made = TransformedTargetRegressor(clone(regressor), transformer=given, **settings)
    made.regressor_, made.transformer_ = regressor, transformer
    return _set_fitted(made, described["fitted"])


def _set_fitted(made: Any, fitted: dict[str, Any]) -> Any:
    for name, value in fitted.items():
        if not re.fullmatch(r"_?[a-z][a-z0-9_]*", name) or callable(
            getattr(type(made), name, None)
        ):
            raise LoadError(f"{name!r} is no attribute of a fitted {type(made).__name__}")
        setattr(made, name, _decode(value))
    return made


def _decode(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    ((kind, content), *shape) = value.items()
    if kind == "scalar":
        return persistence.read_array(content)[()]
    if kind == "array":
        return persistence.read_array(content).reshape(shape[0][1])
    if kind in ("tuple", "list"):
        parts = [_decode(part) for part in content]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dtype":
        return np.dtype(content)
    if kind == "layout":
        return persistence.from_plain(InputLayout, content)
    if kind == "object":
        return _make(content, "", {}, [], 0)
    function = getattr(np, content, None) if kind == "function" else None
    if not isinstance(function, np.ufunc):
        raise LoadError(f"it names {content!r}, which is no function of NumPy for single numbers")
    return function
