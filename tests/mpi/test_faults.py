"""An error on one rank is an error on every rank, in the same step; nothing hangs, and all go on."""

import json
import re

import pytest

WAY_OUT = "the parameters are as before this step. Lower the learning rate, set clip, or look for extreme values in the data"
SAME = "every rank must be given the same arguments and run the same versions"
SHARDED = ". If each rank is to train on its own series, call fit(..., sharded=True)"
BOOM, FIRE = "Boom: here", "OSError: disk on fire"
NAN_LOSS = f"loss is nan at steps 10 to 20 of series 8 to 9; {WAY_OUT}"
NAN_GRADIENT = f"FloatingPointError: gradient norm on rank 1 is nan, in the gradient of parameter '1.bias'; {WAY_OUT}"

# what rank 1 raises, and how many updates of the 9 per epoch there are in the model; the others
# raise a RemoteError
ONE_FAILS = {
    "loss": (BOOM, 4),
    "first step": (BOOM, 0),
    "accumulating": (BOOM, 2),
    "interrupt in the loss": ("KeyboardInterrupt: SIGINT", 4),
    "interrupt": ("KeyboardInterrupt: SIGINT", 4),
    "terminate": ("SystemExit: 143", 4),
    "exit": ("SystemExit: 3", 4),
    "on_start": (BOOM, 0),
    "on_step": (BOOM, 4),
    "last step of an epoch": (BOOM, 9),
    "last step": (BOOM, 18),
    "on_epoch": (BOOM, 9),
    "on_end": (BOOM, 18),
    "on_close": (BOOM, 18),
    "refit": (BOOM, 18),  # the earlier fit stays
    "refit interrupted": ("KeyboardInterrupt: SIGINT", 4),
    "optimizer": (BOOM, 3),
    "reading": (FIRE, None),
    "reading at the start": (FIRE, 0),
    "validation": (FIRE, None),
    "arguments": ("ShapeError: x has 7 time steps and y has 30 .*", 0),
    "no model": ("TypeError: model must be a torch module.*", 0),
    "predict": ("ShapeError: x has 2 features per step, but Estimator was fitted on 3.*", 0),
    "predict reading": (FIRE, 0),
    "score": ("ShapeError: x has 13 series and y has 3 .*", 0),
}
NO_TEXT = "Mute: Mute()"
# what all raise
REST, HERE = "on ranks 0 and 2", f"on rank 1; {SAME}"
WEIGHT = "module.weight_ih_l0"
ALL_FAIL = {
    "nan gradient": (NAN_GRADIENT, 4),
    "nan gradient accumulated": (NAN_GRADIENT, 2),
    "other model": (
        f"parameter 0: 0.{WEIGHT} (16, 3) torch.float64 {REST}, 0.{WEIGHT} (20, 3) torch.float64 "
        f"{HERE}",
        0,
    ),
    "other order": (
        f"parameter 0: 0.{WEIGHT} (16, 3) torch.float64 {REST}, 1.{WEIGHT} (16, 3) torch.float64 "
        f"{HERE}",
        0,
    ),
    "other dtype": (f"the dtype of x: float64 {REST}, float32 {HERE}{SHARDED}", 0),
    "other spec": (f"spec.batchsize: 2 {REST}, 3 {HERE}", 0),
    "other sizes": (f"the shape of x: (3, 13, 30) {REST}, (3, 12, 30) {HERE}{SHARDED}", 0),
    "other optimizer": (f"lr: 0.001 {REST}, 0.1 {HERE}", 0),
    "other validation": (f"the shape of validation x: (3, 13, 30) {REST}, none {HERE}{SHARDED}", 0),
    "other epochs": (f"epochs: 2 {REST}, 5 {HERE}", 0),
    "other epochs of fit": (f"epochs: 2 {REST}, 3 {HERE}", 0),
    "other method": (f"epochs: 2 {REST}, 1 {HERE}", 0),
    "other return_state": (f"return_state: False {REST}, True {HERE}", 0),
    "other gradient": (f"gradient: False {REST}, True {HERE}", 0),
    "other call": (
        f"RankError: ranks call different things: score {REST}, predict on rank 1; call the same "
        "on every rank",
        0,
    ),
}
ALONE = {
    "nan loss",
    "loss of two",
    "other data",
    "other checkpoints",
    "other triggers",
    "other hooks",
}
ALONE |= {"error without text", "error of any length"}
# no error: how many updates
STOPPED = {
    **{"stop": 4, "loop.stop()": 4, "stop while accumulating": 2, "stop on_epoch": 9},
    **{"own hooks": 18, "own verbosity": 18},  # what one rank has alone
}


@pytest.fixture(scope="module")
def found(ran):
    return json.loads((ran("faults", 3) / "found.json").read_text())


@pytest.mark.parametrize("case", ONE_FAILS)
def test_the_rank_that_fails_raises_its_error_and_the_others_say_whose_it_is(found, case):
    error, updates = ONE_FAILS[case]
    (first, n), (own, _), (last, _) = found[case]
    assert re.fullmatch(error, own)
    assert first == last == f"RemoteError: rank 1: {own}"
    assert n == updates if updates is not None else n > 0
    assert {n for _, n in found[case]} == {n}


@pytest.mark.parametrize("case", ALL_FAIL)
def test_what_is_decided_together_is_raised_by_all(found, case):
    error, updates = ALL_FAIL[case]
    if "Error: " not in error:
        error = f"RankError: ranks disagree about {error}"
    assert found[case] == [[error, updates]] * 3


def test_a_loss_that_is_not_finite_on_one_rank_is_the_same_error_on_all(found):
    others, own = (
        [f"FloatingPointError: rank 1: {NAN_LOSS}", 4],
        [f"FloatingPointError: {NAN_LOSS}", 4],
    )
    assert found["nan loss"] == [others, own, others]


def test_of_two_ranks_that_fail_each_raises_its_own_error_and_the_third_names_both(found):
    assert found["loss of two"] == [
        [f"RemoteError: rank 1: {BOOM}; rank 2: {BOOM}", 4],
        [BOOM, 4],
        [BOOM, 4],
    ]


def test_other_data_on_each_rank_are_noticed(found):
    errors = {error for error, _ in found["other data"]}
    assert len(errors) == 1
    digest = r"[0-9a-f]{12} on rank"
    told = rf"ranks disagree about the values of x \(digest of some\): {digest} 0, {digest} 1, {digest} 2; {SAME}"
    assert re.fullmatch(f"RankError: {told}{re.escape(SHARDED)}", errors.pop())


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("other checkpoints", r"none on ranks 0 and 2, each time on rank 1"),
        (
            "other triggers",
            r"'Together' on_step: EveryNSteps .*2.* on ranks 0 and 2, EveryNSteps .*3.* on rank 1",
        ),
        ("other hooks", r"'Together' on_step: EveryNSteps .*2.* on ranks 0 and 2, none on rank 1"),
    ],
)
def test_what_ranks_would_not_do_together_is_raised_by_all(found, case, named):
    assert len({(error, n) for error, n in found[case]}) == 1
    error, updates = found[case][0]
    assert re.match(f"RankError: ranks disagree about .*{named}", error)
    assert updates == 0


def test_errors_without_a_text_or_with_an_endless_one_reach_the_others(found):
    (first, _), (own, _), (last, n) = found["error without text"]
    assert own == "Mute without text"
    assert first == last == f"RemoteError: rank 1: {NO_TEXT}"
    assert n == 4
    (first, _), (own, _), (last, n) = found["error of any length"]
    assert first == last
    assert first.startswith("RemoteError: rank 1: Boom: !!!")
    assert len(first) < 20_000 < len(own)
    assert n == 4


@pytest.mark.parametrize("case", STOPPED)
def test_one_rank_that_stops_stops_all_after_the_same_step(found, case):
    assert found[case] == [[None, STOPPED[case]]] * 3


def test_every_case_is_looked_at(found):
    assert set(found) == {*ONE_FAILS, *ALL_FAIL, *STOPPED, *ALONE}
