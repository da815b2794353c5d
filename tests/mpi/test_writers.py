"""Of several ranks, rank 0 prints and writes for all, also by hooks that a user gives to every
rank.
"""

import json

import pytest


@pytest.fixture(scope="module")
def found(ran):
    folder = ran("writers", 2)
    return {**json.loads((folder / "found.json").read_text()), "folder": folder}


def test_one_rank_shows_the_progress_bar(found):
    first, second = found["bar"]
    assert "epoch=2" in first
    assert second == ""


def test_one_rank_logs_a_line_per_epoch(found):
    first, second = found["log"]
    assert [line.partition(":")[0] for line in first] == ["epoch 1", "epoch 2"]
    assert second == []


def test_one_rank_shows_the_accuracies_of_a_selector_and_both_select(found):
    # 2 epochs of 2 minibatches of 3 windows: 12 steps
    first, second = found["shown"]
    assert first == ["accuracy 0.5, the best so far 0.5"] * 12
    assert second == []


def test_one_rank_prints_the_table_and_both_evaluate(found):
    first, second = found["table"]
    assert len(first) == 1
    assert second == []
    assert found["evaluated"] == [["all"], ["all"]]


def test_one_rank_exports(found):
    assert found["exported"] == [["of the method", "of the function"], []]


def test_callbacks_of_scikit_learn_are_called_on_one_rank_and_stop_both(found):
    first, second = found["watched"]
    shape = [1, 7, 11]
    assert first == [["setup", ["epoch", shape], ["fit", shape], "teardown"], 1]
    assert second == [[], 1]


def test_one_rank_tracks(found):
    first, second = found["tracked"]
    assert first[-1] == 12
    assert second == []


def test_ranks_that_work_alone_each_print_and_write(found):
    assert found["alone"][0] == found["alone"][1]
    assert all(n > 0 for n in found["alone"][1])
