"""Arrays in zarr stores: predictions written there are those of memory, and xarray opens them."""

import numpy as np
import pytest
import xarray
import zarr

from fluxutils_py import Estimator
from fluxutils_py.data import zarr_stores, zarrcreate
from fluxutils_py.errors import DataError

SPEC = {"epochs": 1, "batchsize": 2, "seqsize": 7}


@pytest.mark.few
@pytest.mark.parametrize("chunks", [None, (1, 2, 5)])
def test_predictions_written_there_are_those_of_memory(chunks, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 5, 23)).astype("float32")
    est = Estimator(spec=SPEC, random_state=0).fit(x, x[:1])
    out = zarrcreate(tmp_path / "a.zarr", "yhat", (1, 5, 23), chunks=chunks)
    assert est.predict(x, out=out) is out
    stored = zarr.open_array(tmp_path / "a.zarr" / "yhat", mode="r")
    np.testing.assert_array_equal(stored[:], est.predict(x))
    assert stored.chunks == (chunks or (1, 5, 23))
    with xarray.open_zarr(tmp_path / "a.zarr", consolidated=False, chunks=None) as opened:
        assert opened["yhat"].dims == ("feature", "series", "time")
        np.testing.assert_array_equal(opened["yhat"], est.predict(x))


def test_chunks_are_of_one_mebibyte(tmp_path):
    array = zarrcreate(tmp_path / "a.zarr", "x", (4, 1000, 100_000), "float64")
    assert array.chunks == (4, 256, 128)
    assert array.dtype == np.float64


def test_what_is_there_is_kept_unless_it_shall_be_replaced(tmp_path):
    path = tmp_path / "a.zarr"
    zarrcreate(path, "x", (1, 2, 3))[:] = 5
    zarrcreate(path, "y", (1, 2, 3))
    with pytest.raises(DataError, match=r"'x'.*exist_ok=True.*overwrite=True"):
        zarrcreate(path, "x", (1, 2, 3))
    with pytest.raises(DataError, match="'x'"):
        zarrcreate(path, "x", (1, 2, 4), exist_ok=True)
    assert (zarrcreate(path, "x", (1, 2, 3), exist_ok=True)[:] == 5).all()
    assert (zarrcreate(path, "x", (1, 2, 4), overwrite=True)[:] == 0).all()
    assert set(zarr.open_group(path, mode="r")) == {"x", "y"}
    with pytest.raises(DataError, match=r"chunks=\(1, 2\)"):
        zarrcreate(path, "z", (1, 2, 3), chunks=(1, 2))


def test_what_another_process_makes_meanwhile_is_opened(tmp_path, monkeypatch):
    path, before = tmp_path / "a.zarr", zarr_stores._move_into_store

    for name, value in (("x", 4), ("y", 0)):

        def late(*arguments):
            monkeypatch.setattr(zarr_stores, "_move_into_store", before)
            zarrcreate(path, f"g{value}/x", (1, 2, 3))[:] = 4  # noqa: B023
            return before(*arguments)

        monkeypatch.setattr(zarr_stores, "_move_into_store", late)
        assert (zarrcreate(path, f"g{value}/{name}", (1, 2, 3))[:] == value).all()
        assert (zarrcreate(path, f"g{value}/x", (1, 2, 3), exist_ok=True)[:] == 4).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr"]


def test_a_folder_that_holds_no_array_is_not_replaced_unasked(tmp_path):
    path = tmp_path / "a.zarr"
    zarrcreate(path, "x", (1, 2, 3))
    (path / "y").mkdir()
    (path / "y" / "notes").write_text("mine")
    with pytest.raises(DataError, match=r"y is a folder without an array.*overwrite=True"):
        zarrcreate(path, "y", (1, 2, 3))
    assert (path / "y" / "notes").read_text() == "mine"
    with pytest.raises(DataError, match=r"array 'x', .*'x/z'"):
        zarrcreate(path, "x/z", (1, 2, 3))
    zarrcreate(path, "y", (1, 2, 3), overwrite=True)
    assert not (path / "y" / "notes").exists()
