"""Sources of virtual and external datasets."""

import h5py
import numpy as np
import pytest

from fluxutils_py.data.hdf5.source_files import check_sources
from fluxutils_py.errors import H5DataError


def make_virtual(folder):
    with h5py.File(folder / "source.h5", "w") as file:
        file["x"] = np.arange(6.0)
    layout = h5py.VirtualLayout((6,), "float64")
    layout[:] = h5py.VirtualSource("source.h5", "x", (6,))
    with h5py.File(folder / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    return folder / "virtual.h5"


def test_sources_that_are_there_are_no_error(tmp_path):
    with h5py.File(make_virtual(tmp_path)) as file:
        check_sources(file["x"], "here")


def test_a_missing_source_is_named(tmp_path):
    path = make_virtual(tmp_path)
    (tmp_path / "source.h5").unlink()
    with h5py.File(path) as file:
        with pytest.raises(H5DataError, match=r"^here.*source\.h5"):
            check_sources(file["x"], "here")
        assert not np.any(file["x"][:])  # what HDF5 itself would read


def test_a_source_without_the_dataset_is_named(tmp_path):
    path = make_virtual(tmp_path)
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["y"] = np.zeros(6)
    with h5py.File(path) as file, pytest.raises(H5DataError, match=r"^here.*source\.h5"):
        check_sources(file["x"], "here")
