"""Gathering on one rank, and places in files; tests/mpi gathers from several."""

import numpy as np

from fluxutils_py.estimator.fit_loop import device_of_rank
from fluxutils_py.estimator.gathering import gather_parts, gather_rows, memmap_location
from fluxutils_py.parallel import RankGroup


def test_one_rank_has_everything():
    values = np.arange(6.0).reshape(3, 2)
    assert gather_rows(values, RankGroup()) is values
    gather_parts(values, 0, RankGroup())
    np.testing.assert_array_equal(values, np.arange(6.0).reshape(3, 2))
    assert device_of_rank("cuda", RankGroup()) == "cuda"


def test_maps_of_one_place_in_a_file_have_one_location(tmp_path):
    path = tmp_path / "out.dat"
    maps = [np.memmap(path, "float32", mode, shape=(4, 3)) for mode in ("w+", "r+")]
    assert memmap_location(maps[0]) == memmap_location(maps[1])
    assert memmap_location(
        np.memmap(path, "float32", "r+", offset=12, shape=(3, 3))
    ) != memmap_location(maps[0])
    assert memmap_location(np.memmap(path, "float32", "c", shape=(4, 3))) is None  # a private copy
    assert memmap_location(np.zeros(3)) is None
