"""Arrays of shape (F, N, T), in memory or in HDF5 files, read lazily window by window."""

from fluxutils_py.data.background import BackgroundDataLoader
from fluxutils_py.data.folding import rebatch
from fluxutils_py.data.hdf5 import H5Lazy, H5Map, h5concat, h5create, h5load, h5mmap, h5save
from fluxutils_py.data.lazy import LazyArray as LazyArray
from fluxutils_py.data.parts import part
from fluxutils_py.data.sequence_windows import SequenceWindows
from fluxutils_py.data.series import SeriesArray as SeriesArray  # for other rooms
from fluxutils_py.data.views import SamplesView, TimestepsView, samples, timesteps
from fluxutils_py.data.weights import SampleWeight as SampleWeight  # for other rooms
from fluxutils_py.data.zarr_stores import zarrcreate

__all__ = [
    "BackgroundDataLoader",
    "H5Lazy",
    "H5Map",
    "SamplesView",
    "SequenceWindows",
    "TimestepsView",
    "h5concat",
    "h5create",
    "h5load",
    "h5mmap",
    "h5save",
    "part",
    "rebatch",
    "samples",
    "timesteps",
    "zarrcreate",
]
