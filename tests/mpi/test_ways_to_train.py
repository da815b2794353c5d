"""Every way to train, on several ranks: as one process, or refused, or failing on all of them."""

import json

import pytest

FIRE = "OSError: disk on fire"
DIFFERENT = (
    "RankError: ranks were given different batches, or unequally many: give every rank the same "
    "ones (draw or shuffle them with one seed), of which each computes its share; or set "
    "batches='per_rank', if each rank has separate batches"
)
REFUSED = (
    "RuntimeError: training is for all ranks, but called in a hook or function that each rank runs "
    "by itself: a rank that fails would be missing. Make it a collective hook of the loop, or call "
    "it after the run"
)
# what rank 1 raises; the others raise a RemoteError
ONE_FAILS = {
    **{f"prepare {name}": FIRE for name in ("train", "ptrain", "ttrain", "itrain")},
    "exit in prepare": "SystemExit: 3",
    "loss": FIRE,
    "exit in loss": "SystemExit: 3",
    "interrupt in loss": "KeyboardInterrupt: SIGINT",
    "batches": FIRE,
    "hook": FIRE,
    "exit in hook": "SystemExit: 0",
    "hook beside save": FIRE,
}
# what all return or raise
ALIKE = {
    "own loop": True,
    "unequal own loop": DIFFERENT,
    "unequal train": DIFFERENT,
    "unequal ptrain": DIFFERENT,
    "save in a function": REFUSED,
    "function": 4,
    "saving": [["003.pt", "004.pt", "005.pt"], ["008.pt", "009.pt", "010.pt"]],
}


def test_ranks_train_as_one_process(ran):
    ran("ways_to_train", 3)


@pytest.fixture(scope="module")
def found(ran):
    return json.loads((ran("failing_ways", 3) / "found.json").read_text())


@pytest.mark.parametrize("case", ONE_FAILS)
def test_an_error_on_one_rank_is_one_on_all(found, case):
    own = ONE_FAILS[case]
    others = [f"RemoteError: rank 1: {own}"] * (len(found[case]) - 1)
    assert found[case] == [others[0], own, *others[1:]]


@pytest.mark.parametrize("case", ALIKE)
def test_ranks_return_or_raise_alike(found, case):
    assert found[case] == [ALIKE[case]] * len(found[case])


def test_a_loss_of_a_function_that_is_not_finite_on_one_rank_is_an_error_on_all(found):
    others, own = (
        "FloatingPointError: rank 1: the loss of step 1 is nan",
        "FloatingPointError: the loss of step 1 is nan",
    )
    assert found["nan of a function"] == [
        own if rank == 1 else others for rank in range(len(found["loss"]))
    ]


def test_rank_0_logs(found):
    assert found["logging"] == [4] + [0] * (len(found["logging"]) - 1)


def test_every_case_is_looked_at(found):
    assert set(found) == {*ONE_FAILS, *ALIKE, "nan of a function", "logging"}
