"""Arrays in zarr stores: predictions written there are those of memory, and xarray opens them."""

import numpy as np
import pytest
import xarray
import zarr

from fluxutils_py import Estimator
from fluxutils_py.data import zarrcreate
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
    assert chunks in (None, stored.chunks)
    with xarray.open_zarr(tmp_path / "a.zarr", consolidated=False, chunks=None) as opened:
        assert opened["yhat"].dims == ("feature", "series", "time")
        np.testing.assert_array_equal(opened["yhat"], est.predict(x))


def test_what_is_there_is_kept(tmp_path):
    path = tmp_path / "a.zarr"
    zarrcreate(path, "g/x", (1, 2, 3))[:] = 5
    zarrcreate(path, "y", (1, 2, 3))
    for name, shape, options in (
        ("g/x", (1, 2, 3), {}),
        ("g/x", (1, 2, 4), {"exist_ok": True}),
        ("g", (1, 2, 3), {"exist_ok": True}),
    ):
        with pytest.raises(DataError, match=rf"'{name}' already.*exist_ok=True"):
            zarrcreate(path, name, shape, **options)
    assert (zarrcreate(path, "g/x", (1, 2, 3), exist_ok=True)[:] == 5).all()
    assert set(zarr.open_group(path, mode="r")) == {"g", "y"}
