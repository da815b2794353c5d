"""Dicts and lists of plain data in checkpoints (plain_state)."""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.training import Checkpointer

AT = SimpleNamespace(step=3)


def settings():
    return {
        "lr": 0.01,
        "sizes": [5, (7, 2)],
        "name": "a",
        4: None,
        "nested": {"on": True},
        "count": np.int64(3),
    }


def test_the_same_dict_and_list_get_their_saved_contents(tmp_path):
    params, order, model = settings(), [3, "b", [1.5]], torch.nn.Linear(3, 1)
    saves = Checkpointer(tmp_path).track(params=params, order=order, model=model)
    saves.save(AT)
    params["lr"], params["more"] = 7.0, 1
    params["sizes"].append(9)
    del params["name"]
    order[:] = []
    assert saves.restore()
    assert params == settings()
    assert list(params) == list(settings())
    assert type(params["count"]) is int
    assert type(params["sizes"][1]) is tuple
    assert order == [3, "b", [1.5]]


def test_another_process_finds_what_was_saved_whatever_it_begins_with(tmp_path):
    Checkpointer(tmp_path).track(params=settings(), weights=OrderedDict(a=torch.arange(5.0))).save(
        AT
    )
    params, weights = {"lr": 1e9, "unknown": 2}, OrderedDict()
    Checkpointer(tmp_path).track(params=params, weights=weights).load()
    assert params == settings()
    assert type(weights) is OrderedDict
    assert torch.equal(weights["a"], torch.arange(5.0))


def test_what_was_saved_does_not_change_with_the_dict(tmp_path):
    params = settings()
    saves = Checkpointer(tmp_path).track(params=params)
    saves.save(AT)
    saves.restore()
    params["nested"]["on"] = False
    assert saves.read()["params"]["nested"] == {"on": True}


def test_a_checkpoint_of_another_kind_changes_nothing(tmp_path):
    Checkpointer(tmp_path).track(model=[1], params=settings()).save(AT)
    params, model = {"lr": 5}, {"w": 1}
    with pytest.raises(LoadError, match=r"model: a list .* a dict "):
        Checkpointer(tmp_path).track(params=params, model=model).restore()
    assert params == {"lr": 5}
    assert model == {"w": 1}


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (0.01, r"lr cannot be tracked: a float .* put a number or a text into a dict, lr="),
        ("text", "lr cannot be tracked: a str "),
        ((1, 2), "lr cannot be tracked: a tuple "),
        ({"a": [1, object()]}, r"lr\['a'\]\[1\] is a object"),
        ([np.ones(3)], r"lr\[0\] is a ndarray"),
    ],
)
def test_what_cannot_be_restored_in_place_or_is_no_plain_data_is_refused(tmp_path, thing, message):
    saves = Checkpointer(tmp_path)
    with pytest.raises(TypeError, match=message):
        saves.track(model=torch.nn.Linear(1, 1), lr=thing)
    assert not saves.tracked
