"""Arrays of shape (F, N, T), read lazily, as minibatches for truncated backpropagation through time."""

from fluxutils_py.data.background import BackgroundDataLoader
from fluxutils_py.data.folding import Folds, rebatch
from fluxutils_py.data.hdf5 import h5mmap, h5save
from fluxutils_py.data.hdf5concat import h5concat
from fluxutils_py.data.hdf5create import h5create
from fluxutils_py.data.hdf5lazy import H5Lazy
from fluxutils_py.data.hdf5map import H5Map
from fluxutils_py.data.lazy import LazyArray
from fluxutils_py.data.parts import dividebatch, indbatch, minibatch, part
from fluxutils_py.data.rows import Rows
from fluxutils_py.data.sampling import balanced_sample, classindexes, initbatchprovider
from fluxutils_py.data.series import Series, as_series, require_aligned
from fluxutils_py.data.views import SamplesView, SequenceView, Stretch, TimestepsView, samples, timesteps
from fluxutils_py.data.weights import SampleWeight
from fluxutils_py.data.windows import Place, SequenceWindows, Window

__all__ = [
    "BackgroundDataLoader",
    "Folds",
    "H5Lazy",
    "H5Map",
    "LazyArray",
    "Place",
    "Rows",
    "SampleWeight",
    "SamplesView",
    "SequenceView",
    "SequenceWindows",
    "Series",
    "Stretch",
    "TimestepsView",
    "Window",
    "as_series",
    "balanced_sample",
    "classindexes",
    "dividebatch",
    "h5concat",
    "h5create",
    "h5mmap",
    "h5save",
    "indbatch",
    "initbatchprovider",
    "minibatch",
    "part",
    "rebatch",
    "require_aligned",
    "samples",
    "timesteps",
]
