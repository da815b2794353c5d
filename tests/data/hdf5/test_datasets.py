"""fluxutils_py.data.hdf5.opening: datasets of h5py given as they are."""

import copy
import io
import os
import pickle

import h5py
import numpy as np
import pytest

from fluxutils_py import Estimator, h5concat, h5mmap, h5save, samples, timesteps
from fluxutils_py.data import LazyArray
from fluxutils_py.data.hdf5.opening import check_sources
from fluxutils_py.data.ragged import RaggedArray
from fluxutils_py.errors import DataError, H5DataError
from tests.plain_networks import plain_classifier

X = np.random.default_rng(0).normal(size=(3, 5, 7))


def write(path, x=X, **attributes):
    with h5py.File(path, "w") as f:
        f["x"] = x
        f["x"].attrs.update({"axes": "FNT"} | attributes)


def containers(dataset):
    return {
        "samples": samples(dataset),
        "timesteps": timesteps(dataset),
        "lazy": LazyArray(dataset, range(1, 4)),
        "labels": samples(dataset)[2:],
    }


def test_a_relative_name_is_refused_after_a_change_of_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    write(tmp_path / "e.h5")
    write(tmp_path / "run" / "e.h5", -X)
    monkeypatch.chdir(tmp_path)
    with h5py.File("e.h5", "r") as file:
        made = containers(file["x"])
        for name, value in made.items():
            for copied in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
                np.testing.assert_array_equal(np.asarray(copied), value, err_msg=name)
        monkeypatch.chdir(tmp_path / "run")
        for value in made.values():
            with pytest.raises(DataError, match=r"not found from here.* absolute path"):
                pickle.dumps(value)


def test_a_list_of_datasets_travels_by_name(tmp_path):
    with h5py.File(tmp_path / "l.h5", "w") as f:
        f["a"], f["b"] = X[:, 0], X[:, 1, :4]
    with h5py.File(tmp_path / "l.h5", "r") as f:
        sent = pickle.dumps(RaggedArray([f["a"], f["b"]], "x"))
    found = pickle.loads(sent)
    np.testing.assert_array_equal(found.arrays[0][:], X[:, 0])
    np.testing.assert_array_equal(found.arrays[1][:], X[:, 1, :4])


@pytest.mark.parametrize("other", [-X, X[:, :4]], ids=["values", "shape"])
def test_a_file_in_the_place_of_another_is_refused(tmp_path, other):
    write(tmp_path / "e.h5")
    with h5py.File(tmp_path / "e.h5", "r") as file:
        sent = pickle.dumps(samples(file["x"]))
        write(tmp_path / "new.h5", other)
        os.replace(tmp_path / "new.h5", tmp_path / "e.h5")
        with pytest.raises(H5DataError, match=r"e\.h5: this is not the file"):
            np.asarray(pickle.loads(sent))
        with pytest.raises(DataError, match=r"replaced.*h5mmap"):
            pickle.dumps(samples(file["x"]))


def test_what_another_process_cannot_open_is_refused_with_the_remedy(tmp_path):
    with h5py.File(io.BytesIO(), "w") as memory:
        memory["x"] = X
        with pytest.raises(DataError, match=r"'fileobj'.*h5mmap.*n_jobs=1"):
            pickle.dumps(samples(memory["x"]))
    write(tmp_path / "e.h5")
    with (
        h5py.File(tmp_path / "e.h5", "r+") as file,
        pytest.raises(DataError, match=r"mode='r\+'.*mode='r'"),
    ):
        pickle.dumps(samples(file["x"]))
    with h5py.File(tmp_path / "e.h5", "r") as file:
        view = samples(file["x"])
    with pytest.raises(DataError, match=r"closed.*h5mmap"):
        pickle.dumps(view)


def test_closed_datasets_are_named_wherever_they_are_given(tmp_path):
    write(tmp_path / "e.h5")
    with h5py.File(tmp_path / "e.h5", "r") as file:
        closed = file["x"]
    est = Estimator(spec={"epochs": 1, "batchsize": 5, "seqsize": 7})
    for x, y in ((closed, X), (X, closed), ((X, closed), X)):
        with pytest.raises(DataError, match=r"(x|y)\S* .*HDF5 .*closed.*h5mmap"):
            est.fit(x, y)
    with pytest.raises(DataError, match=r"sample_weight is in an HDF5 .*closed"):
        est.fit(X, X, sample_weight=closed)
    with pytest.raises(DataError, match=r"x\[1\] is in an HDF5 .*closed"):
        est.fit([X[:, 0], closed], [X[:, 0], X[:, 1]])
    with pytest.raises(DataError, match=r"y is in an HDF5 file that was closed"):
        plain_classifier(epochs=1).fit(X, closed)
    with pytest.raises(DataError, match="closed"):
        samples(closed)
    with pytest.raises(DataError, match="closed"):
        h5save(tmp_path / "out.h5", {"x": closed})


def test_missing_sources_are_refused_as_by_h5mmap(tmp_path):
    write(tmp_path / "a.h5")
    write(tmp_path / "b.h5")
    h5concat(tmp_path / "both.h5", [tmp_path / "a.h5", tmp_path / "b.h5"], 1)
    os.unlink(tmp_path / "b.h5")
    est = Estimator(spec={"epochs": 1, "batchsize": 5, "seqsize": 7})
    with h5py.File(tmp_path / "both.h5", "r") as file:
        for x, y in ((file["x"], np.zeros((1, 10, 7))), (np.zeros((1, 10, 7)), file["x"])):
            with pytest.raises(H5DataError, match=r"source files are missing: b\.h5"):
                est.fit(x, y)
        with pytest.raises(H5DataError, match=r"b\.h5"):
            samples(file["x"])
        with pytest.raises(H5DataError, match=r"b\.h5"):
            h5save(tmp_path / "out.h5", {"x": file["x"]})


def make_virtual(folder):
    with h5py.File(folder / "source.h5", "w") as file:
        file["x"] = np.arange(6.0)
    layout = h5py.VirtualLayout((6,), "float64")
    layout[:] = h5py.VirtualSource("source.h5", "x", (6,))
    with h5py.File(folder / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    return folder / "virtual.h5"


def test_missing_sources_are_named(tmp_path):
    path = make_virtual(tmp_path)
    with h5py.File(path) as file:
        check_sources(file["x"], "here")
    (tmp_path / "source.h5").unlink()
    with h5py.File(path) as file:
        with pytest.raises(H5DataError, match=r"^here.*source\.h5"):
            check_sources(file["x"], "here")
        assert not np.any(file["x"][:])  # what HDF5 itself would read
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["y"] = np.zeros(6)
    with (
        h5py.File(path) as file,
        pytest.raises(H5DataError, match=r"source\.h5: dataset 'x' .* y$"),
    ):
        check_sources(file["x"], "here")


def test_external_files_are_refused_with_the_remedy(tmp_path):
    X.tofile(tmp_path / "x.bin")
    with h5py.File(tmp_path / "e.h5", "w") as file:
        dataset = file.create_dataset(
            "x", X.shape, "f8", external=[(tmp_path / "x.bin", 0, X.nbytes)]
        )
        dataset.attrs["axes"] = "FNT"
        with pytest.raises(H5DataError, match=r"e\.h5: dataset '/x'.* external files.*h5save"):
            samples(file["x"])
    with pytest.raises(H5DataError, match=r"e\.h5: dataset 'x' is in external files.*h5save"):
        h5mmap(tmp_path / "e.h5", "x")


@pytest.mark.parametrize(
    "attributes",
    [
        {"_FillValue": 9.97e36},
        {"missing_value": np.array([-999])},
        {"scale_factor": 0.1},
        {"add_offset": 273.15},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunks", [None, (3, 5, 2)])
def test_attributes_of_netcdf_are_named_with_the_remedy(tmp_path, attributes, chunks):
    with h5py.File(tmp_path / "e.nc", "w") as f:
        f.create_dataset("x", data=X, chunks=chunks).attrs.update({"axes": "FNT"} | attributes)
    message = rf"{next(iter(attributes))}=.*xarray\.open_dataset\(.*e\.nc'\)\[\"x\"\]"
    with pytest.warns(UserWarning, match=message):
        h5mmap(tmp_path / "e.nc", "x")
    with pytest.warns(UserWarning, match=message):
        h5concat(tmp_path / "both.h5", [tmp_path / "e.nc"] * 2, 1)
    with h5py.File(tmp_path / "e.nc", "r") as file, pytest.warns(UserWarning, match=message):
        samples(file["x"])
    with h5py.File(tmp_path / "list.nc", "w") as f:
        f["x"] = X[0]
        f["x"].attrs.update(attributes)
    with (
        h5py.File(tmp_path / "list.nc", "r") as file,
        pytest.warns(UserWarning, match=message.replace("e\\.nc", "list.nc")),
    ):
        RaggedArray([file["x"], X[1]], "x")


@pytest.mark.parametrize(
    "attributes",
    [{"_FillValue": np.nan}, {"scale_factor": 1.0, "add_offset": 0}],
    ids=str,
)
def test_attributes_that_change_nothing_are_no_warning(tmp_path, attributes):
    write(tmp_path / "e.nc", **attributes)
    np.testing.assert_array_equal(h5mmap(tmp_path / "e.nc", "x"), X)
