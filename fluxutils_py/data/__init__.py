"""Arrays of shape (F, N, T), read lazily, as minibatches for truncated backpropagation through time."""

from fluxutils_py.data.rows import Rows, rebatch
from fluxutils_py.data.series import Series, as_series, require_aligned
from fluxutils_py.data.weights import SampleWeight
from fluxutils_py.data.windows import SequenceWindows, Window

__all__ = ["Rows", "SampleWeight", "SequenceWindows", "Series", "Window", "as_series", "rebatch", "require_aligned"]
