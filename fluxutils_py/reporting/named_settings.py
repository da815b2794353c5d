"""Name the settings of an estimator, those inside of others too, as plain values."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

LONGEST = 200  # characters of a text


def named_settings(obj: Any) -> dict[str, Any]:
    """Return the parameters of an estimator by name, such as ``spec__epochs``.

    Numbers, booleans and None stay; other values become short texts: classes and functions their
    names, everything else its ``repr`` on one line. Where the parts of a value are listed by name,
    the value itself is left out.

    Examples
    --------
    >>> from fluxutils_py import Estimator
    >>> settings = named_settings(Estimator(spec={"epochs": 3, "batchsize": 8, "seqsize": 5}))
    >>> settings["spec__epochs"], settings["verbose"], "spec" in settings
    (3, 'auto', False)
    """
    parameters: Mapping[str, Any] = obj.get_params(deep=True)
    whole = {name.rpartition("__")[0] for name in parameters if "__" in name}
    return {
        name: plain_setting(value)
        for name, value in sorted(parameters.items())
        if name not in whole
    }


def plain_setting(value: Any) -> Any:
    """Return a number, a boolean, None, or a text of at most 200 characters."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        text = value
    elif isinstance(value, type) or hasattr(value, "__qualname__"):
        # the repr of a function has its address, which differs from run to run
        text = value.__qualname__
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
