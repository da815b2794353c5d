"""Ranks of which one was given another setting get an error that names it, before anything is trained."""

import json

import pytest

NAMED = {  # what the message of each rank names
    "epochs": ("epochs: 2", "3"),
    "batchsize": ("batchsize", "2", "3"),
    "seqsize": ("seqsize", "4", "5"),
    "overlap": ("overlap",),
    "burn_in": ("burn_in",),
    "clip": ("clip",),
    "accumulate": ("accumulate",),
    "patience": ("patience",),
    "precision": ("precision",),
    "shuffle": ("shuffle",),
    "epochs of the call": ("epochs: 1", "2"),
    "validation x": ("validation x", "none"),
    "weights": ("weights", "none"),
    "checkpoint": ("preemption", "none"),
    "EveryNSteps": ("EveryNSteps", "2", "3"),
    "goes on": ("earlier", "True", "False"),
    "different things": ("score", "predict"),
    "return_state": ("return_state", "True", "False"),
    "sample_weight": ("sample_weight", "none", "given"),
    "gradient": ("gradient", "True", "False"),
    "steps": ("steps: 2", "3"),
}


@pytest.fixture(scope="module")
def folder(ran):
    return ran("unequal", 2)


@pytest.mark.parametrize("case", NAMED)
def test_a_setting_that_differs_between_ranks_is_named_on_both(folder, case):
    of_ranks = json.loads((folder / "found.json").read_text())[case]
    assert len(set(of_ranks)) == 1
    assert of_ranks[0].startswith("RankError: ranks ")
    assert "on rank 0" in of_ranks[0]
    assert "on rank 1" in of_ranks[0]
    for text in NAMED[case]:
        assert text in of_ranks[0]


def test_the_clock_of_rank_0_decides_when_ranks_save_by_time(folder):
    assert json.loads((folder / "found.json").read_text())["by time"] == ["none", "none"]
    assert len(json.loads((folder / "saved.json").read_text())) > 3


def test_ranks_refuse_batch_normalisation_also_where_parameters_alone_are_given(folder):
    for error in json.loads((folder / "found.json").read_text())["batch norm"]:
        assert "BatchNorm1d" in error
