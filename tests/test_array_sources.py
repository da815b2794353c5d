"""The table of array sources in docs/guide/data.md: each row's code gives the array that was stored."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from fluxutils_py import Estimator, from_frame, h5mmap, h5save

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "data.md"
ROWS = re.findall(
    r"^\| ([^|]+) \| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE
)
SPEC = {"epochs": 1, "batchsize": 2, "seqsize": 7}
ROWS_OF_ONE_SERIES = ("frame.", "pq.")


@pytest.fixture(scope="module")
def values():
    x = np.random.default_rng(0).normal(size=(2, 5, 23)).astype("float32")
    x[:, 1, 4:9] = np.nan
    return x


def write_numpy(x):
    np.save("x.npy", x)
    return {"np": np}


def write_hdf5(x):
    h5save("x.h5", {"x": x})
    with h5py.File("plain.h5", "w") as file:
        file["x"] = x
    return {"h5mmap": h5mmap, "h5py": h5py}


def write_zarr(x):
    import dask.array
    import zarr

    zarr.create_array("x.zarr", data=x, chunks=(2, 3, 10))
    return {"zarr": zarr, "dask": dask}


def write_netcdf(x):
    import netCDF4
    import xarray

    for path, dims in (
        ("x.nc", ("variable", "station", "time")),
        ("t.nc", ("time", "station", "variable")),
    ):
        with netCDF4.Dataset(path, "w") as file:
            for name, size in zip(("variable", "station", "time"), x.shape, strict=True):
                file.createDimension(name, size)
            stored = file.createVariable("x", "f4", dims, fill_value=9.96921e36)
            stored[:] = np.ma.masked_invalid(x if path == "x.nc" else x.T)
    return {"netCDF4": netCDF4, "xarray": xarray}


def write_torch(x):
    import torch

    torch.save(torch.tensor(x), "x.pt")
    return {"torch": torch}


def write_jax(x):
    jax = pytest.importorskip("jax")  # 600 MB, and in no extra
    pytest.importorskip("jax.numpy")
    np.save("x.npy", x)
    return {"jax": jax, "np": np}


def write_frame(x):
    import polars

    return {"frame": polars.DataFrame({"a": x[0, 0], "b": x[1, 0]})}


def write_long_frame(x):
    import polars

    df = polars.DataFrame(
        {
            "id": np.repeat(np.arange(x.shape[1]), x.shape[2]),
            "t": np.tile(np.arange(x.shape[2]), x.shape[1]),
            "a": x[0].ravel(),
            "b": x[1].ravel(),
        }
    )
    return {"from_frame": from_frame, "df": df.sample(fraction=1, shuffle=True, seed=0)}


def write_parquet(x):
    import pyarrow
    import pyarrow.parquet as pq

    pq.write_table(pyarrow.table({"a": x[0, 0], "b": x[1, 0]}), "x.parquet")
    return {"pq": pq}


WRITERS = {
    "np.load": write_numpy,
    "h5mmap": write_hdf5,
    "h5py.File": write_hdf5,
    "zarr.open_array": write_zarr,
    "dask.array": write_zarr,
    "xarray.open_dataset": write_netcdf,
    "netCDF4.Dataset": write_netcdf,
    "torch.load": write_torch,
    "jax.numpy": write_jax,
    "frame.to_numpy": write_frame,
    "from_frame(df": write_long_frame,
    "pq.read_table": write_parquet,
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("source", "code"), [row[:2] for row in ROWS], ids=[row[0] for row in ROWS]
)
@pytest.mark.filterwarnings(
    "ignore:numpy.ndarray size changed:RuntimeWarning"
)  # netCDF4's, harmless by NumPy
def test_the_code_of_a_row_gives_what_was_stored(source, code, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (writer,) = [write for start, write in WRITERS.items() if code.startswith(start)]
    array = eval(code, writer(values))
    expected = values[:, :1] if code.startswith(ROWS_OF_ONE_SERIES) else values
    assert tuple(array.shape) == expected.shape
    y = np.where(np.isnan(expected[:1]), np.nan, expected.mean(0, keepdims=True)).astype("float32")
    ours, plain = (Estimator(spec=SPEC, random_state=0).fit(x, y) for x in (array, expected))
    np.testing.assert_array_equal(ours.predict(array), plain.predict(expected))
    assert ours.score(array, y) == plain.score(expected, y)


def test_the_table_has_all_sources():
    assert len(ROWS) == 13
