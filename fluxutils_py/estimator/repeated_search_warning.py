"""Warn if every rank repeats a search."""

from __future__ import annotations

import sys
import warnings

from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.joblib_mpi import is_active
from fluxutils_py.parallel.launcher import is_alone, launched

_is_said = False


def warn_repeated_search(ranks: RankGroup) -> None:
    """Warn on rank 0, once, if a fit for scikit-learn's model selection runs by itself on each of several ranks.

    This is so with ``comm=None``, and in the processes and threads of ``n_jobs``. With ``comm="auto"`` and without
    ``n_jobs``, nothing is repeated: all ranks train each candidate together.
    """
    global _is_said
    _, rank, size = launched()
    if _is_said or not ranks.is_single or size == 1 or rank or is_alone() or is_active() or not _in_model_selection():
        return
    _is_said = True
    warnings.warn(
        f"each of {size} ranks repeats this search by itself: it fits the same candidates on the same folds. To share "
        'them out, search inside a block: with joblib.parallel_config("mpi"): search.fit(x, y). If each rank '
        "searches in data of its own, this warning does not matter",
        stacklevel=2,
    )


def _in_model_selection() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").startswith("sklearn.model_selection."):
            return True
        frame = frame.f_back
    return False
