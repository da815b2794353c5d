"""Functions of other shapes as callbacks, and the record of training as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class cb:
    """A callback that calls a function without arguments after every step, as ``cb=`` of Flux and PrayTools does.

    Examples
    --------
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> loop = Loop(lambda batch: StepInfo(2.0 * batch))
    >>> loop.hooks.attach(cb(lambda: print("a step")))
    >>> loop.hooks.attach(cby(lambda loss: print("its loss:", loss)))
    >>> loop.run_epochs([1.5], 1)
    a step
    its loss: 3.0
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.name = function, getattr(function, "__name__", "cb")
        _share_state(self, function)

    def on_step(self, loop: Any) -> None:
        self.function()


class cby:
    """A callback that calls a function with the loss after every step that has one, as ``cby=`` of PrayTools does."""

    def __init__(self, function: Callable[[float], Any]) -> None:
        self.function, self.name = function, getattr(function, "__name__", "cby")
        _share_state(self, function)

    def on_step(self, loop: Any) -> None:
        if loop.info.loss is not None:
            self.function(loop.info.loss)


def _share_state(hook: Any, function: Any) -> None:
    """What a function remembers, if it is an object that can say so, is saved with the hook."""
    if hasattr(function, "state_dict") and hasattr(function, "load_state_dict"):
        hook.state_dict, hook.load_state_dict = function.state_dict, function.load_state_dict


def history_table(history: Iterable[Mapping[str, Any]]) -> Any:
    """The records of epochs, such as ``Loop.history``, as a table: a row for each, a column for each quantity.

    Returns
    -------
    pandas.DataFrame or dict of list
        A frame if pandas is installed, else columns. What a record lacks is None there.

    Examples
    --------
    >>> table = history_table([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25, "lr": 0.1}])
    >>> list(table), list(table["loss"])
    (['epoch', 'loss', 'lr'], [0.5, 0.25])
    """
    records = list(history)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    try:
        import pandas  # type: ignore[import-untyped]  # its stubs are a package of their own
    except ImportError:
        return columns
    return pandas.DataFrame(columns)
