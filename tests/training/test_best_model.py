"""The callbacks of PrayTools, and the best model: what they note, print and keep."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.praytools import cb
from fluxutils_py.praytools.callbacks import bestmodelselector, initevalcby
from fluxutils_py.praytools.functional import train
from fluxutils_py.training import Loop, StepInfo

LOSSES = np.random.default_rng(0).uniform(size=2500)


def test_the_history_has_the_mean_of_each_thousand_losses():
    evaluate, history = initevalcby(1000)
    for loss in LOSSES:
        evaluate(loss)
    assert [record["step"] for record in history] == [1000, 2000]
    assert [record["loss"] for record in history] == pytest.approx(
        [LOSSES[:1000].mean(), LOSSES[1000:2000].mean()]
    )
    assert all(0 < record["seconds"] < 60 for record in history)


@pytest.mark.parametrize("steps", [20, 1000])
def test_the_mean_so_far_is_printed_in_the_first_steps_and_not_begun_anew(steps, capsys):
    evaluate, _ = initevalcby(steps)
    for loss in LOSSES[:500]:
        evaluate(loss)
    lines = [line.split(", seconds")[0] for line in capsys.readouterr().out.splitlines()]
    if steps == 1000:
        assert lines == [f"{n}: loss {LOSSES[:n].mean():.6g}" for n in range(20, 201, 20)]
    else:  # each is a record: no NaN between them
        assert lines == [f"{n}: loss {LOSSES[n - 20 : n].mean():.6g}" for n in range(20, 501, 20)]


def test_accuracies_are_noted_and_printed(capsys):
    found = iter([{"train": torch.tensor(0.5), "test": np.float32(0.25)}, None, 0.75])
    evaluate, history = initevalcby(2, lambda: next(found), None, nn.Linear(1, 1))
    for _ in range(6):
        evaluate(1.0)
    assert [{**record, "seconds": 0} for record in history] == [
        {"step": 2, "loss": 1.0, "train": 0.5, "test": 0.25, "seconds": 0},
        {"step": 4, "loss": 1.0, "seconds": 0},
        {"step": 6, "loss": 1.0, "accuracy": 0.75, "seconds": 0},
    ]
    assert capsys.readouterr().out.startswith("2: loss 1, train 0.5, test 0.25, seconds ")


def test_history_and_parameters_are_written_where_one_says(tmp_path):
    model = nn.Linear(2, 1)
    evaluate, history = initevalcby(3, lambda: 1, tmp_path / "results", model)
    kept = []
    for _ in range(7):
        evaluate(2.0)
        kept.append(model.weight.detach().clone())
        model.weight.data.add_(1)
    assert json.loads((tmp_path / "results" / "history.json").read_text()) == history
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        "history.json",
        "model_3.pt",
        "model_6.pt",
    ]
    for n in (3, 6):
        stored = torch.load(tmp_path / "results" / f"model_{n}.pt", weights_only=True)
        assert torch.equal(stored["weight"], kept[n - 1])
        nn.Linear(2, 1).load_state_dict(stored)


@pytest.mark.parametrize("steps", [0, -1])
def test_there_is_no_judging_every_zero_steps(steps):
    with pytest.raises(ValueError, match=f"^steps .*positive integer, got {steps}$"):
        initevalcby(steps)


# -- the best ------------------------------------------------------------------------------------------


def select(scores, **kwargs):
    model, found = nn.Linear(1, 1, bias=False), iter(scores)
    call, best = bestmodelselector(model, lambda: next(found), **kwargs)
    for i in range(100):
        model.weight.data.fill_(i)
        try:
            call()
        except StopIteration:
            break
    return model, call, best


@pytest.mark.parametrize(
    ("scores", "score", "at"),
    [
        ([-3, -1, -2], -1, 1),
        ([0.5, 0.5, 0.5], 0.5, 0),
        ([math.nan, -5, math.nan], -5, 1),
        ([torch.tensor(2.0), torch.tensor(3.0)], 3, 1),
    ],
)
def test_the_highest_score_is_kept_and_only_a_higher_one_replaces_it(scores, score, at):
    model, _, best = select(scores)
    assert best.value == score
    assert best.parameters["weight"].item() == at
    assert best.restore() is model
    assert model.weight.item() == at


def test_without_a_judgement_nothing_is_kept():
    model, _, best = select([math.nan])
    assert (best.value, best.parameters) == (None, None)
    before = model.weight.item()
    assert best.restore().weight.item() == before


def test_accuracies_are_printed_if_so_wished(capsys):
    select([1.0, 3.0, 2.0], show=True)
    assert capsys.readouterr().out.splitlines() == [
        "accuracy 1, the best so far 1",
        "accuracy 3, the best so far 3",
        "accuracy 2, the best so far 3",
    ]
    select([1.5])
    assert capsys.readouterr().out == ""


def test_it_serves_the_functions_of_praytools_and_the_loop():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(20, 3)

    def loss(x):
        return (model(x) - 1).square().mean()

    call, best = bestmodelselector(model, lambda: -loss(x).item())
    evaluate, history = initevalcby(5)
    train(loss, model, lambda: (x,), torch.optim.Adam, 11, cb=call, cby=evaluate)
    assert [record["step"] for record in history] == [5, 10]
    assert best.value == -loss(x).item()  # it fell at every step
    hook = cb(call)
    loop = Loop(lambda batch: StepInfo(1.0))
    loop.hooks.attach(hook)
    loop.run_steps([1], 1)
    assert loop.state_dict()["hooks"]["cb"]["value"] == best.value
