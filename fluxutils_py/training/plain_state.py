"""Dicts and lists of plain data as parts of a checkpoint."""

from __future__ import annotations

from typing import Any

from fluxutils_py.training.plain_files import to_plain_data


class PlainState:
    """A dict or list of plain data with the methods of what checkpoints save and restore.

    Parameters
    ----------
    value : dict or list
        Restoring replaces its contents, and keeps it the same object.

    Examples
    --------
    >>> settings = {"lr": 0.01}
    >>> state = PlainState(settings)
    >>> saved = state.state_dict()
    >>> settings["lr"] = 0.5
    >>> state.load_state_dict(saved)
    >>> settings
    {'lr': 0.01}
    """

    def __init__(self, value: dict[Any, Any] | list[Any]) -> None:
        self.value: Any = value

    def state_dict(self) -> Any:
        """Return a copy of the data."""
        return to_plain_data(self.value, "the data")

    def load_state_dict(self, state: Any) -> None:
        """Replace the contents of the dict or list.

        Raises
        ------
        TypeError
            If the state is of the other kind. Nothing changes then.
        """
        container = dict if isinstance(self.value, dict) else list
        if not isinstance(state, container):
            raise TypeError(
                f"a {type(state).__name__} was saved, and a {container.__name__} is tracked; track "
                "the same kind"
            )
        # a copy, so that changes to the value never reach the checkpoint in memory
        copied = to_plain_data(state, "the data")
        self.value.clear()
        if isinstance(self.value, dict):
            self.value.update(copied)
        else:
            self.value.extend(copied)


def as_tracked(name: str, thing: Any) -> Any:
    """Return an object with ``state_dict`` and ``load_state_dict`` for a thing to be tracked.

    It is the thing itself if it has these methods, else a :class:`PlainState` of a dict or list.

    Raises
    ------
    TypeError
        For anything else, and for a dict or list that holds other data; the message says where.
    """
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return thing
    if isinstance(thing, dict | list):
        to_plain_data(thing, name)  # raises now rather than at the first checkpoint
        return PlainState(thing)
    raise TypeError(
        f"{name} cannot be tracked: a {type(thing).__name__} has no state_dict and "
        "load_state_dict, and is no dict or list of plain data; put a number or a text into a "
        f"dict, {name}={{...}}, which can be restored in place"
    )
