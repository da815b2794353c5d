"""A checkpoint of one number of ranks goes on with any other, and ends as one process that was
never stopped.
"""

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

PROGRAMS = Path(__file__).parent / "programs"
TOLERANCE = {"single": 2e-6}


@pytest.fixture(scope="module")
def found(ran):
    with np.load(ran("elastic", 4) / "found.npz") as file:
        return dict(file)


CASES = ["everything", "overlapping", "exact", "folded", "single", "ready_made"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "weak", "trainer", "task"])
def test_fits_that_go_on_with_every_other_number_of_ranks_end_as_one_process(found, case):
    ended, whole = found[f"{case} elastic"], found[f"{case} whole"]
    assert ended.shape == whole.shape
    assert np.isfinite(whole).all()
    scale = np.maximum(1, np.abs(whole))
    assert (np.abs(ended - whole) <= TOLERANCE.get(case, 1e-12) * scale).all(), np.abs(
        ended - whole
    ).max()


def test_batches_of_each_ranks_own_need_as_many_ranks(ran):
    said = json.loads((ran("elastic", 4) / "said.json").read_text())["per_rank"]
    assert said.endswith(
        "does not fit, its loop: the checkpoint is of 2 ranks with separate batches "
        "(batches='per_rank'), and here 1 is: start as many"
    )


def test_rank_0_says_once_how_large_the_minibatches_are(ran):
    first, *others = json.loads((ran("elastic", 4) / "said.json").read_text())["lines"]
    line, *epochs = first.splitlines()
    assert line == "3 ranks share minibatches of 8 series (batchsize=8, scaling='strong')"
    # verbose=True shows those, "auto" does not
    assert [epoch.split(":")[0] for epoch in epochs] == ["epoch 1"]
    assert others == [""] * 3


@pytest.mark.slow
def test_a_fit_that_is_killed_goes_on_with_the_ranks_that_are_left(
    tmp_path, mpirun_command, python, monkeypatch
):
    """One kill; ``python tests/mpi/programs/elastic_fit.py FOLDER 20`` kills twenty times."""
    monkeypatch.syspath_prepend(PROGRAMS)
    how = {"seed": 2, "mpirun": mpirun_command, "numbers": (2, 3), "python": python}
    found = importlib.import_module("elastic_fit").kills(tmp_path, 1, **how)
    ranks, steps = zip(*found["reached"], strict=True)
    assert all(a != b for a, b in itertools.pairwise(ranks))
    assert list(steps) == sorted(steps)
    assert 0 < steps[0] <= steps[-2] < found["steps"]
    assert found["apart"] <= 1e-12
