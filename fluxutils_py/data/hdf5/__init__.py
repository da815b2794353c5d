"""Arrays in HDF5 files: mapped into memory or read piece by piece, saved, created, and joined."""

from fluxutils_py.data.hdf5.concat import h5concat
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.h5map import H5Map
from fluxutils_py.data.hdf5.mapping import h5load, h5mmap
from fluxutils_py.data.hdf5.writing import h5create, h5save

__all__ = ["H5Lazy", "H5Map", "h5concat", "h5create", "h5load", "h5mmap", "h5save"]
