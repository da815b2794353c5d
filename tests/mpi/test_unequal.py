"""Ranks of which one was given another setting get an error that names it, before anything is
trained.
"""

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
    "weights of shards": ("sample_weight", "not given", "given"),
    "validation of shards": ("validation_data", "False", "True"),
    "features of shards": ("features of x", "2", "3"),
    "scored weights of shards": ("sample_weight", "not given", "given"),
    "evaluated weights": ("sample_weight", "none", "given"),
    "evaluated weights of shards": ("sample_weight", "not given", "given"),
    "evaluated gradient of shards": ("gradient", "False", "True"),
    "with_mean": ("with_mean", "False", "True"),
    "with_std": ("with_std", "True", "'no'"),
    "weights of a scaler": ("sample_weight", "not given", "given"),
    "features of a scaler": ("features of x", "2", "3"),
    "features of a winsor scaler": ("features of x", "2", "3"),
    "different transformers": ("SequenceScaler.fit", "WinsorScaler.fit"),
    "strategy": ("strategy", "'mean'", "'ffill'"),
    "fill_value": ("fill_value: 0", "1"),
    "filled ahead": ("fill_value", "None", "7"),
    "features of an imputer": ("features of x", "2", "3"),
    "iterations of train": ("iterations: 3", "4"),
    "iterations of ptrain": ("iterations: 3", "4"),
    "accumulate of train": ("accumulate: 2", "3"),
    "precision of train": ("precision", "float32", "bfloat16"),
    "clip of train": ("clip", "None", "0.5"),
    "batches of train": ("batches", "same", "per_rank"),
    "optimizer of train": ("optimizer", "SGD", "Adam"),
    "lr of train": ("learning rates", "0.1", "1.1"),
    "tau of itrain": ("tau: 0", "0.5"),
    "axis of train": ("axis: 0", "1"),
    "batches of a task": ("batches of an epoch: 3", "4"),
    "steps of a task": ("steps: 2", "3"),
    "no steps": ("steps: 0", "2"),
    "last step of a task": ("steps: 0", "3"),
}
OF_FORECASTER = {
    "forecaster h": ("h: 2", "3"),
    "forecaster season_length": ("season_length: 7", "(7,)"),
    "forecaster freq": ("freq: 1", "None"),
    "forecaster quantiles": ("quantiles: ()", "0.1"),
    "forecaster transform": ("transform: none", "auto"),
    "forecaster loss": ("loss: mae", "L1Loss"),
    "forecaster network": ("network: lstm", "gru"),
    "forecaster hidden_size": ("hidden_size: 4", "5"),
    "forecaster n_models": ("n_models: 1", "2"),
    "forecaster max_steps": ("max_steps: 2", "300"),
    "forecaster batchsize": ("batchsize: 2", "3"),
    "forecaster seqsize": ("seqsize: 8", "9"),
    "forecaster lr": ("lr: 0.01", "0.02"),
    "forecaster futr_exog_list": ("futr_exog_list: ()", "promo"),
    "n_windows": ("n_windows: 1", "2"),
    "step_size": ("step_size: 2", "3"),
    "refit": ("refit: False", "True"),
    "refit=None": ("Forecaster.cross_validation on rank 0", "Forecaster.fit on rank 1"),
    "max_steps of a walk": ("max_steps: 2", "3"),
    "callbacks": ("preemption", "none"),
    "static": ("the series",),
    "inferred freq": ("the frequency: 1", "2"),
    "frame": ("the number of series",),
}


@pytest.fixture(scope="module")
def folder(ran):
    return ran("unequal", 2)


@pytest.mark.parametrize("case", NAMED | OF_FORECASTER)
def test_a_setting_that_differs_between_ranks_is_named_on_both(folder, case):
    if case in OF_FORECASTER:
        pytest.importorskip("pandas")
    of_ranks = json.loads((folder / "found.json").read_text())[case]
    assert len(set(of_ranks)) == 1
    assert of_ranks[0].startswith("RankError: ranks ")
    assert "on rank 0" in of_ranks[0]
    assert "on rank 1" in of_ranks[0]
    for text in (NAMED | OF_FORECASTER)[case]:
        assert text in of_ranks[0]


def test_functions_are_compared_by_name_and_forecasts_need_no_other_ranks(folder):
    pytest.importorskip("pandas")
    found = json.loads((folder / "found.json").read_text())
    assert [found["functions"], found["of its own"]] == [["none", "none"]] * 2


@pytest.mark.parametrize("case", ["iterations of own batches", "own batches of a task"])
def test_ranks_with_batches_of_their_own_may_have_unequally_many(folder, case):
    assert json.loads((folder / "found.json").read_text())[case] == ["none", "none"]


def test_the_clock_of_rank_0_decides_when_ranks_save_by_time(folder):
    assert json.loads((folder / "found.json").read_text())["by time"] == ["none", "none"]
    assert len(json.loads((folder / "saved.json").read_text())) > 3


def test_ranks_refuse_batch_normalisation_also_where_parameters_alone_are_given(folder):
    for error in json.loads((folder / "found.json").read_text())["batch norm"]:
        assert "BatchNorm1d" in error
