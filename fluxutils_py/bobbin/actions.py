"""Actions of bobbin, which take the training state, as hooks of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_state(action: Callable[..., Any]) -> Callable[[Any], Any]:
    """Turn bobbin's ``action(train_state, step_info=...)`` into a hook for a :class:`Loop` or a
    ``CronTab`` in one.

    In your own ``for`` loop, ``CronTab.run(train_state, step_info=info)`` calls these actions
    without this adapter.
    """

    def hook(loop: Any) -> Any:
        return action(loop.state, step_info=loop.step_info)

    hook.__name__ = getattr(action, "__name__", type(action).__name__)
    return hook
