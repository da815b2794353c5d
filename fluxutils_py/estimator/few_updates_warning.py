"""Warn about a fit that is too short to learn."""

from __future__ import annotations

from fluxutils_py.data.sequence_windows import SequenceWindows
from fluxutils_py.errors import warn

ENOUGH = 50  # updates; from fewer, a network seldom learns


def warn_few_updates(windows: SequenceWindows, epochs: int, accumulate: int) -> None:
    """Warn if a fit of so many epochs over these windows plans fewer than ``ENOUGH`` updates, but
    some.

    Nothing is read, and no more windows are counted than would be enough.
    """
    n_windows = windows.count_with_loss(most=ENOUGH * accumulate)
    n_updates = epochs * -(-n_windows // accumulate)
    if not 0 < n_updates < ENOUGH:
        return
    plural = "s" if n_updates > 1 else ""
    over = "" if accumulate == 1 else f", accumulate={accumulate}"
    warn(
        f"this fit makes {n_updates} update{plural} in all (epochs={epochs}, minibatches per "
        f"epoch: {n_windows}{over}); fewer than {ENOUGH} are seldom enough to learn from: set "
        "more epochs, or a smaller batchsize or seqsize"
    )
