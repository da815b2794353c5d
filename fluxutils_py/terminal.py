"""Whether somebody is watching, on a terminal or in a notebook."""

from __future__ import annotations

import sys

__all__ = ["in_notebook", "shows_progress"]


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
