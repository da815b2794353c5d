"""Save and load whatever is fitted, as files that contain data, never code."""

from __future__ import annotations

import copy
import io
import pydoc
import re
import zipfile
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator import persistence
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.inputs.inputs import InputLayout
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.parallel import get_communicator
from fluxutils_py.reporting.named_settings import plain_setting
from fluxutils_py.training.plain_files import read_file, write_file
from fluxutils_py.transformers import (
    SequenceFeatures,
    SequenceImputer,
    SequenceScaler,
    WinsorScaler,
)
from fluxutils_py.tree import children
from fluxutils_py.validation import require_package
from fluxutils_py.versions import installed_version

KIND = "fluxutils_py fitted objects"
FORMAT = 2  # 1: of 0.2.0
FORECASTER_KIND = "fluxutils_py forecaster"  # as in forecaster_files.py, which is slow to load
OF_SEARCHES = ("best_params_", "best_score_")


class EstimatorPlace:
    """Stands in what skops writes for an estimator of this package, which has its own format.

    Parameters
    ----------
    number : int
        Of the estimator in the file.
    is_fitted : bool
        False for an argument, such as ``regressor`` of a ``TransformedTargetRegressor``, of which
        the estimator is the fitted clone.
    """

    def __init__(self, number: int, is_fitted: bool) -> None:
        self.number = number
        self.is_fitted = is_fitted


# Beside the types that skops trusts: they hold data, and making them runs nothing of the file.
TRUSTED = (
    *(SequenceFeatures, SequenceImputer, SequenceScaler, WinsorScaler, InputLayout),
    *(EstimatorPlace, np.dtype, object),
)


@undisturbed()
def save(obj: Any, path: str | PathLike[str]) -> None:
    """Write something fitted to one file, which holds no code and is never half-written.

    :func:`load` reads it.

    Parameters
    ----------
    obj : estimator, forecaster, transformer, Pipeline, or search
        An estimator or forecaster of this package, in the format of its own ``save``. Anything
        else, such as a pipeline with such an estimator, is written by skops (the extra ``save``).
        Of a search, such as ``GridSearchCV``, the file holds ``best_estimator_``, ``best_params_``
        and ``best_score_``.
    path : str or path-like
        Its folder must exist. An existing file is replaced. On several ranks, only rank 0 writes.

    Raises
    ------
    TypeError
        If a part cannot be written, or not be found again, such as a ``lambda``; the message names
        it. Nothing is written.
    sklearn.exceptions.NotFittedError
        Before ``fit``.
    ImportError
        Without skops, if it is needed.

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
    best = _best_of(obj)
    check_is_fitted(best)
    fitted = {id(e): e for e in _parts_of(best, Estimator) if hasattr(e, "model_")}
    found: dict[str, Any] = {name: getattr(obj, name, None) for name in OF_SEARCHES}
    params = {name: plain_setting(v) for name, v in (found["best_params_"] or {}).items()}
    score = found["best_score_"]  # with refit=function there is none
    content = {
        "kind": KIND,
        "format": FORMAT,
        # for whoever wonders why another version cannot read the file
        "versions": {
            name: installed_version(name) for name in ("fluxutils_py", "scikit-learn", "skops")
        },
        "object": torch.frombuffer(_write_skops(best, list(fitted.values())), dtype=torch.uint8),
        "estimators": [persistence.estimator_content(est) for est in fitted.values()],
        "search": None if best is obj else [params, None if score is None else float(score)],
    }
    if get_communicator("auto").rank == 0:
        write_file(path, content)


@undisturbed()
def load(path: object, *, trusted: Sequence[str | type] = (), **arguments: Any) -> Any:
    """Read what :func:`save`, or ``save`` of an estimator or forecaster of this package, wrote.

    It runs no code from the file, so untrusted files are safe.

    Parameters
    ----------
    path : str or path-like
    trusted : list of str or type
        Classes and functions that the file may use beside those of scikit-learn and this package,
        such as your own, which must be importable. If a file needs more, the error names them.
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
        If the file holds nothing of this kind, types that are not trusted, or an estimator of your
        own class, which the message names: call its ``load``.
    ImportError
        Without skops, for files that it has written.

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
    if not isinstance(trusted, list | tuple | set):
        raise TypeError(f"load: trusted must be a list of names or types, got {trusted!r}")
    content = read_file(path, (persistence.KIND, KIND, FORECASTER_KIND))
    if content["kind"] == FORECASTER_KIND:
        return _forecaster_class().load(path, **arguments)
    if content["kind"] == persistence.KIND:
        return _load_estimator(content, path, arguments)
    estimators: list[Estimator] = []

    def build(described: dict[str, Any]) -> Estimator:
        estimators.append(_load_estimator(described, path, arguments))
        return estimators[-1]

    with persistence.errors_unless_given(arguments, path):
        if content["format"] == 1:
            from fluxutils_py.saving import old_files  # only now, as below

            made = old_files.read_object(content["object"], build)
        elif content["format"] == FORMAT:
            for described in content["estimators"]:
                build(described)
            made = _read_skops(content["object"].numpy().tobytes(), estimators, trusted)
            if content["search"] is not None:
                made.best_params_, made.best_score_ = content["search"]
        else:
            raise LoadError(
                f"{path} has format {content['format']}, this version reads {FORMAT}: update "
                "fluxutils_py"
            )
    if arguments and not estimators:
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
            f"{path} holds an estimator of the class {name}, which is not in fluxutils_py; if it "
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


def _best_of(obj: Any) -> Any:
    """Return the best estimator of a search, and anything else as it is."""
    name = type(obj).__name__
    if hasattr(obj, "best_estimator_"):
        return obj.best_estimator_
    if hasattr(obj, "cv_results_"):
        raise TypeError(
            f"{name} has no best_estimator_, the part of a search that a file holds: fit it with "
            "refit=True"
        )
    if hasattr(obj, "get_params") and {"estimator", "refit"} <= set(obj.get_params(deep=False)):
        raise NotFittedError(f"{name} is not fitted: call fit first")
    return obj


def _parts_of(obj: object, cls: type) -> Iterator[Any]:
    """Yield the parts of a fitted object that are of a class."""
    if isinstance(obj, cls):
        yield obj
        return
    inner = vars(obj) if isinstance(obj, BaseEstimator) else children(obj)
    for part in (inner or {}).values():
        yield from _parts_of(part, cls)


def _write_skops(obj: Any, fitted: list[Estimator]) -> bytearray:
    """Return what skops makes of an object with places for its fitted estimators."""
    skops = require_package("skops.io", "save", "to save anything but an estimator")
    places = {id(est): _place_of(est, fitted) for est in _parts_of(obj, Estimator)}
    try:
        # deepcopy takes a place for the copy of an estimator
        data = skops.dumps(copy.deepcopy(obj, places))
        names = skops.get_untrusted_types(data=data)
    except Exception as error:
        raise TypeError(
            f"{type(obj).__name__} cannot be saved without pickle ({type(error).__name__}: "
            f"{error}): leave out the part that it names"
        ) from error
    if lost := [name for name in names if pydoc.locate(name) is None]:
        raise TypeError(
            f"{type(obj).__name__} holds {', '.join(lost)}, which load could not find by name: "
            "use a class or function at the top level of a module"
        )
    return bytearray(data)


def _place_of(est: Estimator, fitted: list[Estimator]) -> EstimatorPlace:
    name = type(est).__name__
    # a class of the user cannot be found again by its name alone
    if not type(est).__module__.startswith("fluxutils_py."):
        raise TypeError(f"{name} is a class of your own: save it alone, with its own save")
    settings = _settings_text(est)
    for number, other in enumerate(fitted):
        if other is est or (not hasattr(est, "model_") and _settings_text(other) == settings):
            return EstimatorPlace(number, other is est)
    raise NotFittedError(
        f"{name} is not fitted, and has other settings than the fitted estimators beside it: save "
        "the fitted ones alone"
    )


def _settings_text(est: Estimator) -> str:
    # clones of an object have other addresses
    return re.sub(r" at 0x\w+", "", f"{type(est)} {est.get_params()}")


def _read_skops(data: bytes, estimators: list[Estimator], trusted: Sequence[str | type]) -> Any:
    """Return the object of which skops has written these bytes, with its estimators in place."""
    skops = require_package("skops.io", "save", "to load anything but an estimator")
    errors = require_package("skops.io.exceptions", "save", "to load anything but an estimator")
    # only now: it takes a tenth of a second
    from sklearn.compose import make_column_selector

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(part.file_size for part in archive.infolist()) > len(data):
                raise LoadError("its parts are larger than the file")
        made = skops.loads(data, trusted=[*TRUSTED, make_column_selector, *trusted])
        places = {id(place): place for place in _parts_of(made, EstimatorPlace)}
        filled = {
            key: estimators[place.number] if place.is_fitted else clone(estimators[place.number])
            for key, place in places.items()
        }
        return copy.deepcopy(made, filled)
    except LoadError:
        raise
    except errors.UntrustedTypesFoundException as error:
        raise LoadError(
            f"{error}\nIf you trust the author of the file, and each of these: "
            "fluxutils_py.load(path, trusted=[...])"
        ) from error
    except Exception as error:  # skops may raise any error for a damaged file
        raise LoadError(f"it is damaged ({type(error).__name__}: {error})") from error
