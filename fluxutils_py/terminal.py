"""Progress bars on terminals and in notebooks."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator

__all__ = ["in_notebook", "progress_bar", "shows_progress"]


def shows_progress(verbose: object) -> bool:
    """Whether to show progress: True, False, or ``"auto"`` for on a terminal and in a notebook.

    Raises
    ------
    ValueError
        If ``verbose`` is another string.
    """
    if isinstance(verbose, str):
        if verbose != "auto":
            raise ValueError(f"verbose must be 'auto', True or False, got {verbose!r}")
        return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    return bool(verbose)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    # not imported to find out: a kernel has loaded it
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", lambda: None)
    return getattr(get_shell(), "kernel", None) is not None


@contextlib.contextmanager
def progress_bar(
    verbose: object, title: str, total: int, unit: str
) -> Iterator[Callable[[int], object]]:
    """Show a progress bar for ``total`` units of work, if :func:`shows_progress` and the work takes
    over a second.

    Yields
    ------
    callable
        Call it with the number of units done since the last call.
    """
    if not shows_progress(verbose):
        yield lambda n: None
        return
    with warnings.catch_warnings():
        # tqdm warns when the notebook lacks widgets, then falls back to text
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    with tqdm(
        total=total, desc=title, unit=unit, unit_scale=unit == "B", delay=1, dynamic_ncols=True
    ) as bar:
        yield bar.update
