"""The errors of this package, and how it warns.

Each error also inherits the builtin that a caller would catch, so ``except ValueError`` continues
to work. Errors of torch, NumPy, h5py and scikit-learn pass through as they are.
"""

import sys
import warnings

__all__ = [
    "DataError",
    "ExportError",
    "FluxUtilsError",
    "H5DataError",
    "LoadError",
    "RankError",
    "RemoteError",
    "ShapeError",
    "SingleStepWarning",
    "SpecError",
]


class FluxUtilsError(Exception):
    """Base of every error class of this package; catch it to catch them all.

    The package never raises it directly, only the classes below, or a builtin where that says more
    (``FloatingPointError`` for a loss that is not finite, ``FileNotFoundError`` for
    a missing file).
    """


class ShapeError(FluxUtilsError, ValueError):
    """Array or tensor sizes do not fit each other, or do not fit the model.

    The message gives the shapes that were passed, the sizes that differ and the remedy.
    """


class DataError(FluxUtilsError, ValueError):
    """Data have fitting shapes but contents that cannot be used.

    Examples are NaN inputs at live steps, targets of an impossible dtype, or weights that are all
    zero. The message says where the first offending value is.
    """


class H5DataError(DataError):
    """A dataset in an HDF5 file, or the file, cannot be used as asked.

    The message names the file, the dataset, the reason and the remedy. A missing file raises
    ``FileNotFoundError`` instead.
    """


class SpecError(FluxUtilsError, ValueError):
    """A hyper-parameter is missing, misspelt or out of range.

    The message names the field, the value that it has and, where one is close enough, the name that
    was probably meant.
    """


class LoadError(FluxUtilsError, ValueError):
    """A saved file or state does not belong to the object that it is loaded into.

    The message names the part that does not fit (the parameter, the state, the format version) and
    both sides of the disagreement. The object is left as it was.
    """


class RankError(FluxUtilsError, ValueError):
    """The ranks of one run were not given the same thing to do.

    Raised on every rank, before anything is changed. The message names what differs, and its value
    on each rank.
    """


class RemoteError(FluxUtilsError, RuntimeError):
    """Another rank failed; raised on the ranks that did not, in the same step. The message has the
    rank and its error.

    The rank that failed raises its own error. Model and parameters are alike on all ranks
    afterwards, and training can be started again.
    """


class SingleStepWarning(UserWarning):
    """Rows of a matrix or data frame are taken for series of one step each: a recurrent model
    carries nothing from row to row.

    The message says how to give the rows, or the columns, as steps.
    """


class ExportError(FluxUtilsError, ValueError):
    """A model cannot be exported, or an exported file does not give what the model gives.

    The message names the module, or the output that differs, and the remedy.
    """


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Show a warning at the line outside this package whose call led to it."""
    # A fixed stacklevel would point to the wrong line as soon as a function is split or merged.
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module_name: str) -> bool:
    # a function that a context manager decorates is called from contextlib
    return module_name.startswith("fluxutils_py.") or module_name == "contextlib"
