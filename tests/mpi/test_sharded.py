"""Each rank has files of its own series only; together they train as one process that has all
series.
"""

import functools
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "programs" / "sharded.py"


@functools.cache
def program():
    spec = importlib.util.spec_from_file_location("sharded", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHARDS = [(0, 7), (5, 20, 12), (5, 0, 12)]


def ranks(counts):
    """Two ranks are those of torchrun."""
    return "torchrun" if len(counts) == 2 else len(counts)


def read(ran, counts, suffix):
    return ran("sharded", ranks(counts)) / f"{'-'.join(map(str, counts))}{suffix}"


@functools.cache
def in_one_process(counts):
    return program().results(counts)


@pytest.mark.slow
@pytest.mark.parametrize("counts", SHARDS)
def test_ranks_with_series_of_their_own_are_one_process_with_all_series(ran, counts):
    found, expected = np.load(read(ran, counts, ".npz")), in_one_process(counts)
    assert set(found.files) == set(expected)
    bad = {}
    for name, value in expected.items():
        assert found[name].shape == np.shape(value), name
        apart = np.nanmax(np.abs(found[name] - value))
        # Adam makes more of what the sums of a closed form over ranks have rounded
        tolerance = 1e-11 if name.startswith("sums") else 1e-12
        if (
            not apart <= tolerance * max(1.0, np.nanmax(np.abs(value)))
            or (np.isnan(found[name]) != np.isnan(value)).any()
        ):
            bad[name] = apart
    assert not bad


@pytest.mark.parametrize("counts", SHARDS)
def test_no_rank_can_read_files_of_another(ran, counts):
    for rank, n in enumerate(counts):
        files = list(
            (ran("sharded", ranks(counts)) / f"of-rank-{rank}").glob(
                f"{'-'.join(map(str, counts))}-*.h5"
            )
        )
        assert len(files) == (3 if n else 0)


@pytest.mark.parametrize("counts", SHARDS)
def test_what_does_not_fit_is_an_error_on_every_rank(ran, counts):
    last = len(counts) - 1
    others = "rank 0" if last == 1 else "ranks 0 and 1"
    of_x = "separate series, of the same features and types"
    expected = {
        "features": f"ranks disagree about the features of x: 3 on {others}, 2 on rank {last}; .*{of_x}",
        "dtype": f"ranks disagree about the dtype of x: float64 on {others}, float32 on rank {last}; .*{of_x}",
        "no weights": f"about the presence of sample_weight: not given on {others}, given on rank {last}",
        # as the rank numbers its series
        "NaN": "DataError: x is nan at feature 0, series 0, step 3",
        "nothing": "DataError: no rank has any series: x is None, or without series, everywhere",
        "not all": rf"different things: fit on {others}, fit\(sharded=True\) on rank {last}",
        "not said": r"about the shape of x: .* on rank 1.*call fit\(..., sharded=True\)",
        "rows": r"ValueError: sharded=True divides series over ranks: give x as an array \(F, N, T\)",
        "validation": f"about whether validation_data are given: False on {others}, True on rank {last}",
        "settings": "ranks disagree about early_stopping",
        "prediction": "ShapeError: x has 2 features per step, but Estimator was fitted on 3",
        "flag": r"TypeError: sharded must be True \(each rank has its own series\) or False, got 'yes'",
    }
    if counts == (0, 7):  # one rank has series: they agree
        for name in ("features", "dtype", "no weights"):
            del expected[name]
    for rank, (said, _) in enumerate(json.loads(read(ran, counts, ".json").read_text())):
        for name, text in expected.items():
            assert re.search(text, said[name]), (rank, name, said[name])


@pytest.mark.parametrize("counts", SHARDS)
def test_a_fit_goes_on_with_the_same_series_only(ran, counts):
    found = [of_rank for _, of_rank in json.loads(read(ran, counts, ".json").read_text())]
    change = f"the series of each rank (sharded=True): {', '.join(map(str, counts))} -> none"
    assert change in found[-1]["alone"]  # one process, and the last rank's series only
    for of_rank in found:
        assert "after five steps" in of_rank["broken"]
        assert of_rank["same"]
        assert of_rank["epochs"] == 3
        less = ", ".join(map(str, (*counts[:-1], counts[-1] - 1)))
        change = f"the series of each rank (sharded=True): {', '.join(map(str, counts))} -> {less}"
        assert "LoadError" in of_rank["refused"]
        assert (
            f"{change}; the order of the series and their states belong to the ranks"
            in of_rank["refused"]
        )
        assert "continue with as many ranks, each with the series that it had" in of_rank["refused"]
