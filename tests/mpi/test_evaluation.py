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
    "names": "RankError: ranks disagree about the datasets: ['a'] on ranks 0 and 2, ['a', 'b'] on rank 1; "
    + SAME,
    "order": "RankError: ranks disagree about the datasets: ['a', 'b'] on ranks 0 and 2, ['b', 'a'] on rank 1; "
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


N = 3


@pytest.fixture(scope="module")
def folder(ran):
    """The folder that the ranks wrote to."""
    return ran("evaluation", N)


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["3 5 0", "0 3 5", "0 0 8"])
def test_any_numbers_of_batches_give_what_one_process_gives(found, case):
    total, mean, order = found[case][0]
    assert (total, order) == (SERIAL[0], SERIAL[2])
    assert mean == pytest.approx(SERIAL[1], rel=1e-15)
    assert found[case] == [found[case][0]] * N  # on every rank, to the last bit


def test_of_several_datasets_too(found):
    assert [[r[0], r[2]] for r in found["several"][0]] == [[SERIAL[0], SERIAL[2]]] * 2
    assert found["several"] == [found["several"][0]] * N


def test_without_any_batch_there_is_the_result_of_no_data(found):
    assert found["none"] == [[0, None, ""]] * N


def test_a_rank_may_evaluate_alone(found):
    assert [order for *_, order in found["alone"]] == ["", "4 ", "4 1 "][:N]


@pytest.mark.parametrize("case", ONE_FAILS)
def test_an_error_on_one_rank_is_an_error_on_all(found, case):
    own = ONE_FAILS[case]
    assert found[case] == [own if rank == 1 else f"RemoteError: rank 1: {own}" for rank in range(N)]


@pytest.mark.parametrize("case", ALL_FAIL)
def test_what_is_found_together_is_raised_by_all(found, case):
    assert found[case] == [ALL_FAIL[case]] * N


@pytest.mark.parametrize("case", TRAINING)
def test_a_loop_ends_on_all_ranks_in_the_same_step(found, case):
    own, steps = TRAINING[case]
    others = None if own is None else f"RemoteError: rank 1: {own}"
    assert found[case] == [[own if rank == 1 else others, steps] for rank in range(N)]


def test_a_fit_is_not_disturbed(found):
    windows = -(-7 // (2 * N)) * 3  # groups of 2 N series, each in 3 windows
    assert found["fit"] == [2 * windows] * N


def test_ranks_agree_about_the_best_and_the_first_writes_it(found, folder):
    saved = [NAME(1, 1), False, NAME(2, 3), False, NAME(3, 5)]
    assert found["best"] == [saved] * N
    assert [path.name for path in (folder / "best").iterdir()] == ["0"]
    assert (folder / "best" / "0" / "results.json").exists()


def test_a_folder_that_cannot_be_written_is_an_error_on_all(found):
    first, *others = found["unreadable folder"]
    assert first.startswith("NotADirectoryError")
    assert others == [f"RemoteError: rank 0: {first}"] * (N - 1)


def test_every_case_is_looked_at(found):
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
    assert set(found) == {*ONE_FAILS, *ALL_FAIL, *TRAINING, *known}
