"""Ranks that evaluate together find what one process finds, or fail together."""

import json

import numpy as np
import pytest

rng = np.random.default_rng(0)
DATA = [rng.integers(1000, size=n) for n in (4, 1, 7, 2, 2, 9, 3, 5)]
SERIAL = [int(sum(b.sum() for b in DATA)), sum(b.mean() for b in DATA), "4 1 7 2 2 9 3 5 "]
NAME = "checkpoint-n{:07d}-step-{:08d}.pt".format
FIRE = "OSError: disk on fire"
WRONG_TYPE = "TypeError: evaluate returned dict; it must return Found, as create_eval_results does"
SAME = "every rank must be given the same arguments and run the same versions"

# what rank 1 raises; the others raise a RemoteError
ONE_FAILS = {
    "create": FIRE,
    "evaluate": FIRE,
    "batches": FIRE,
    "function": FIRE,
    "finalize": FIRE,
    "exit": "SystemExit: 3",
    "sending": "TypeError: not to be sent",
    "second dataset": FIRE,
    "type": WRONG_TYPE,
}
# what all raise
ALL_FAIL = {
    "names": "RankError: ranks disagree about the datasets: ['a'] on {others}, ['a', 'b'] on rank 1; "
    + SAME,
    "order": "RankError: ranks disagree about the datasets: ['a', 'b'] on {others}, ['b', 'a'] on rank 1; "
    + SAME,
}
# what rank 1 raises in a training loop, or nothing, and after how many steps the loop has ended on
# all ranks
TRAINING = {
    "training": (None, 12),
    "evaluate in training": (FIRE, 4),
    "stop in evaluate": ("StopTraining: enough", 4),
    "processor": (FIRE, 4),
    "stop in processor": (None, 4),
    "loop.stop in processor": (None, 4),
    "hook before": (FIRE, 4),
}


@pytest.fixture(scope="module", params=[1, 2, 3])
def run(request, ran):
    """The number of ranks, what they found, and the folder that they wrote to."""
    folder = ran("evaluation", request.param)
    return request.param, json.loads((folder / "found.json").read_text()), folder


@pytest.mark.slow
@pytest.mark.parametrize("case", ["3 5 0", "0 3 5", "0 0 8"])
def test_any_numbers_of_batches_give_what_one_process_gives(run, case):
    n, found, _ = run
    total, mean, order = found[case][0]
    assert (total, order) == (SERIAL[0], SERIAL[2])
    assert mean == pytest.approx(SERIAL[1], rel=1e-15)
    assert found[case] == [found[case][0]] * n  # on every rank, to the last bit


def test_of_several_datasets_too(run):
    n, found, _ = run
    assert [[r[0], r[2]] for r in found["several"][0]] == [[SERIAL[0], SERIAL[2]]] * 2
    assert found["several"] == [found["several"][0]] * n


def test_without_any_batch_there_is_the_result_of_no_data(run):
    n, found, _ = run
    assert found["none"] == [[0, None, ""]] * n


def test_a_rank_may_evaluate_alone(run):
    n, found, _ = run
    assert [order for *_, order in found["alone"]] == ["", "4 ", "4 1 "][:n]


@pytest.mark.parametrize("case", ONE_FAILS)
def test_an_error_on_one_rank_is_an_error_on_all(run, case):
    n, found, _ = run
    own = ONE_FAILS[case]
    if n > 1:
        assert found[case] == [
            own if rank == 1 else f"RemoteError: rank 1: {own}" for rank in range(n)
        ]


@pytest.mark.parametrize("case", ALL_FAIL)
def test_what_is_found_together_is_raised_by_all(run, case):
    n, found, _ = run
    if n > 1:
        assert (
            found[case]
            == [ALL_FAIL[case].format(others="rank 0" if n == 2 else "ranks 0 and 2")] * n
        )


@pytest.mark.parametrize("case", TRAINING)
def test_a_loop_ends_on_all_ranks_in_the_same_step(run, case):
    n, found, _ = run
    if n > 1:
        own, steps = TRAINING[case]
        others = None if own is None else f"RemoteError: rank 1: {own}"
        assert found[case] == [[own if rank == 1 else others, steps] for rank in range(n)]


def test_a_fit_is_not_disturbed(run):
    n, found, _ = run
    windows = -(-7 // (2 * n)) * 3  # groups of 2n series, each in 3 windows
    assert found["fit"] == [2 * windows] * n


def test_ranks_agree_about_the_best_and_the_first_writes_it(run):
    n, found, folder = run
    saved = [NAME(1, 1), False, NAME(2, 3), False, NAME(3, 5)]
    if n > 1:  # of one rank without data all results are equal
        assert found["best"] == [saved] * n
        assert [path.name for path in (folder / "best").iterdir()] == ["0"]
    assert (folder / "best" / "0" / "results.json").exists()


def test_a_folder_that_cannot_be_written_is_an_error_on_all(run):
    n, found, _ = run
    first, *others = found["unreadable folder"]
    assert first.startswith("NotADirectoryError")
    assert others == [f"RemoteError: rank 0: {first}"] * (n - 1)


def test_every_case_is_looked_at(run):
    known = {
        "3 5 0",
        "0 3 5",
        "0 0 8",
        "several",
        "none",
        "alone",
        "fit",
        "best",
        "unreadable folder",
    }
    assert set(run[1]) == {*ONE_FAILS, *ALL_FAIL, *TRAINING, *known}
