"""Finding a dataset, and the order of its axes."""

import h5py
import numpy as np
import pytest

from fluxutils_py.data.hdf5.opening import (
    find_dataset,
    fnt_axes,
    open_file,
    read_axes,
    unmappable_reason,
)
from fluxutils_py.errors import H5DataError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["group/x"] = np.zeros((5, 3, 2))
        file["group/x"].attrs["axes"] = "TNF"
        file["other"] = np.zeros((5, 3, 2))
        file.create_dataset("chunked", data=np.zeros((4, 4)), chunks=(2, 2))
    return path


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.h5"):
        open_file(tmp_path / "none.h5")


def test_the_error_names_what_the_file_holds(path):
    with open_file(path) as file:
        assert find_dataset(file, path, "group/x").shape == (5, 3, 2)
        with pytest.raises(H5DataError, match=r"'group/y' cannot be opened .*'/group' holds x$"):
            find_dataset(file, path, "group/y")


def test_the_order_of_axes_is_noted_or_given(path):
    with open_file(path) as file:
        assert read_axes(file["group/x"], None, "here") == "TNF"
        assert read_axes(file["other"], "NTF", "here") == "NTF"
        with pytest.raises(H5DataError, match="axes"):
            read_axes(file["other"], None, "here")


@pytest.mark.parametrize("axes", ["TNF", "FNT", "NTF", "TFN"])
def test_transposing_gives_features_series_time(axes):
    array = np.zeros([{"F": 2, "N": 3, "T": 5}[letter] for letter in axes])
    assert array.transpose(fnt_axes(axes, 3)).shape == (2, 3, 5)


def test_contiguous_datasets_can_be_mapped(path):
    with open_file(path) as file:
        assert unmappable_reason(file["other"]) is None
        assert "chunked" in unmappable_reason(file["chunked"])
