"""Warn about a fit that is too short to learn."""

from __future__ import annotations

from fluxutils_py.errors import warn
from fluxutils_py.estimator.assembled_fit import FitPlan

ENOUGH = 50  # updates; from fewer, a network seldom learns


def warn_few_updates(plan: FitPlan, accumulate: int) -> None:
    """Warn if a fit plans fewer than ``ENOUGH`` updates, but some."""
    if not 0 < plan.updates < ENOUGH:
        return
    plural = "s" if plan.updates > 1 else ""
    over = "" if accumulate == 1 else f", accumulate={accumulate}"
    warn(
        f"this fit makes {plan.updates} update{plural} in all (epochs={plan.epochs}, minibatches "
        f"per epoch: {plan.windows}{over}); fewer than {ENOUGH} are seldom enough to learn from: "
        "set more epochs, or a smaller batchsize or seqsize"
    )
