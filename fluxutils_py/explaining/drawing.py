"""What the displays have in common: axes, colours, dates, and columns of many steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.validation import require_package

# Okabe and Ito (2008): told apart by the colour-blind too. The order is of contrast.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
GREY = "0.4"


def new_axes(n_rows: int, height: float, purpose: str, **settings: Any) -> np.ndarray:
    """Return the axes of a new figure, one below the other, that share their steps."""
    pyplot = require_package("matplotlib.pyplot", "plot", purpose)
    _, axes = pyplot.subplots(
        n_rows,
        1,
        squeeze=False,
        sharex=True,
        figsize=(7.0, height),
        layout="constrained",
        **settings,
    )
    for ax in axes[:, 0]:
        ax.spines[["top", "right"]].set_visible(False)
    flat: np.ndarray = axes[:, 0]
    return flat


def format_times(ax: Any, times: Any) -> None:
    """Let the labels of dates be short, as the usual ones overlap in narrow panels."""
    if not np.issubdtype(np.asarray(times).dtype, np.datetime64):
        return
    dates = require_package("matplotlib.dates", "plot", "plot")
    locator = ax.xaxis.get_major_locator()
    ax.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


def legend_above(ax: Any, n_columns: int = 4) -> None:
    """Put a legend above the right end of the axes, where no line is."""
    ax.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=n_columns, borderaxespad=0.2
    )


def column_starts(n_steps: int, n_columns: int) -> np.ndarray:
    """Return the first steps of at most ``n_columns`` columns of equal width; the last may be
    narrower.
    """
    width = -(-n_steps // n_columns)
    return np.arange(0, n_steps, max(width, 1))
