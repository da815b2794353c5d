"""Saved estimators of any class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.persistence import read_estimator


def load(path: Any, **arguments: Any) -> Any:
    """Read an estimator that ``est.save(path)`` wrote, of whichever class of this package it is.

    Parameters
    ----------
    path : str or path-like
    **arguments
        As in :meth:`Estimator.load`: constructor arguments in place of those in the file.

    Returns
    -------
    Estimator
        Of the class that was saved, such as :class:`SequenceClassifier`.

    Raises
    ------
    FileNotFoundError
    LoadError
        If the file is no estimator, or one of a class of your own, which is named: use its own ``load``. As with
        :meth:`Estimator.load`, no code from the file runs.

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
    name = read_estimator(path).get("class")
    classes = {c.__name__: c for c in _classes(Estimator) if c.__module__.partition(".")[0] == "fluxutils_py"}
    if name not in classes:
        raise LoadError(
            f"{path} holds an estimator of the class {name}, which is none of fluxutils_py; if it is your own, import "
            f"it and use {name}.load(path)"
        )
    return classes[name].load(path, **arguments)


def _classes(cls: type[Estimator]) -> Iterator[type[Estimator]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _classes(below)
