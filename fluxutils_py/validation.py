"""Check arguments, and import optional packages."""

from __future__ import annotations

import importlib
import numbers
import operator
from typing import Any

import numpy as np

# what to install for an extra; right in a clone and elsewhere
EXTRAS = {
    "forecast": "pandas narwhals pyarrow utilsforecast",
    "export": "onnx onnxscript onnxruntime",
    "plot": "matplotlib",
    "save": "skops",
}


def require_package(name: str, extra: str | None, purpose: str) -> Any:
    """Import an optional package's module, or raise ImportError that says what to install: the
    packages of the extra, or, of a tool that is in none, the package alone.
    """
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)  # a module of it may be loaded already
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {package}, which is not installed: pip install "
            f"{package if extra is None else EXTRAS[extra]}"
        ) from error


def check_integer(
    name: str,
    value: Any,
    minimum: int | None = None,
    *,
    optional: bool = False,
    error: type[Exception] | None = None,
) -> Any:
    """Return the value as a Python integer; accepts NumPy integers, but not booleans.

    Parameters
    ----------
    name : str
        Name of the value in the message.
    value : Any
    minimum : int, optional
    optional : bool
        Whether to accept None and return it.
    error : type of exception, optional
        Exception to raise in place of TypeError (not an integer) and ValueError (too small).

    Examples
    --------
    >>> check_integer("batchsize", 0, 1)
    Traceback (most recent call last):
    ValueError: batchsize must be a positive integer, got 0
    """
    if value is None and optional:
        return None
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and (minimum is None or number >= minimum):
        return number
    usual = {None: "an integer", 1: "a positive integer"}
    expected = usual.get(minimum, f"an integer of at least {minimum}")
    if optional:
        expected += " or None"
    error = error or (TypeError if number is None else ValueError)
    raise error(f"{name} must be {expected}, got {value!r}")


def check_positive(
    name: str, value: Any, *, optional: bool = False, error: type[Exception] = ValueError
) -> None:
    """Raise ``error`` unless the value is a number above 0; rejects NaN, accepts infinity."""
    if value is None and optional:
        return
    # "not above", as nothing compares with NaN
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > 0:
        raise error(
            f"{name} must be a positive number{' or None' if optional else ''}, got {value!r}"
        )
