"""Results of evaluations: merged, compared, shown, saved."""

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from fluxutils_py.bobbin import EvalResults, tpmap
from fluxutils_py.bobbin.treejson import (
    dump_pytree_json,
    parse_pytree_json,
    read_pytree_json_file,
    write_pytree_json_file,
)
from fluxutils_py.errors import ShapeError


class Pair(NamedTuple):
    loss: torch.Tensor
    n: np.ndarray


@dataclass(frozen=True)
class Sums(EvalResults):
    value: torch.Tensor
    parts: dict

    def reduce(self, other):
        add = tree_map(
            torch.add,
            (self.parts["a"], self.parts["b"][0]),
            (other.parts["a"], other.parts["b"][0]),
        )
        return Sums(self.value + other.value, {"a": add[0], "b": [add[1]]})


@dataclass(frozen=True)
class Text(EvalResults):
    text: str = ""

    def reduce(self, other):
        return Text(self.text + other.text)


@dataclass(frozen=True)
class Everything(EvalResults):
    loss: float
    n: int
    done: bool
    name: str
    best: float | None
    confusion: np.ndarray
    pair: Pair
    scores: tuple


EVERYTHING = Everything(
    1 / 3,
    7,
    True,
    "dev",
    None,
    np.arange(6, dtype="i2").reshape(2, 3),
    Pair(torch.tensor(0.1), np.ones(3)),
    (1.5, 2),
)


def test_shards_are_merged():
    x = torch.arange(6.0).reshape(2, 3)
    shards = torch.stack([0 * x, x, 2 * x, 3 * x])
    merged = Sums(shards, {"a": shards[:, 0], "b": [shards[:, 1, 1]]}).unshard_and_reduce()
    assert torch.equal(merged.value, 6 * x)
    assert torch.equal(merged.parts["a"], 6 * x[0])
    assert merged.parts["b"][0] == 6 * x[1, 1]


def test_shards_are_merged_in_their_order():
    shards = Text(np.array(["first, ", "second, ", "third"]))
    assert shards.unshard_and_reduce().text == "first, second, third"


def test_what_tpmap_gives_is_merged():
    x = torch.arange(12.0).reshape(6, 2)
    sums = tpmap(lambda x: x.sum(0), "batch", ["shard"], devices=3)(x)
    assert torch.equal(Sums(sums, {"a": sums, "b": [sums]}).unshard_and_reduce().value, x.sum(0))


def test_values_without_a_leading_axis_cannot_be_merged():
    with pytest.raises(ShapeError):
        Sums(torch.ones(3), {"a": torch.ones(3), "b": [torch.tensor(1.0)]}).unshard_and_reduce()
    with pytest.raises(ShapeError):
        Sums(torch.ones(3), {"a": torch.ones(3), "b": [torch.ones(2)]}).unshard_and_reduce()


def test_results_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Text("a").text = "b"


def test_a_subclass_that_is_no_frozen_dataclass_says_so():
    class Forgot(EvalResults):
        n: int = 0

    class ForgotBelow(Text):
        n: int = 0

    for cls in (Forgot, ForgotBelow):
        with pytest.raises(
            TypeError,
            match=rf"^{cls.__name__} .*EvalResults: .*@dataclass\(frozen=True\)",
        ):
            cls()
    with pytest.raises(TypeError, match="non-frozen dataclass from a frozen"):

        @dataclass
        class Thawed(EvalResults):
            n: int = 0


def test_a_frozen_dataclass_with_slots_will_do():
    @dataclass(frozen=True, slots=True)
    class Slotted(EvalResults):
        n: int = 3

        def reduce(self, other):
            return Slotted(self.n + other.n)

    assert Slotted().reduce(Slotted(4)) == Slotted(7)


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda r: r.reduce(r), "reduce(other)"),
        (lambda r: r.is_better_than(r), "is_better_than(other)"),
        (
            lambda r: r.write_to_tensorboard(None, None),
            "write_to_tensorboard(state, writer)",
        ),
    ],
)
def test_what_a_subclass_lacks_is_named(call, missing):
    with pytest.raises(NotImplementedError) as caught:
        call(EVERYTHING)
    assert str(caught.value) == f"Everything does not define {missing}"


def test_the_log_message_has_the_fields():
    shown = "Everything(loss=0.3333333333333333, n=7, done=True, name='dev', best=None, confusion="
    assert EVERYTHING.to_log_message().startswith(shown)


def test_results_travel_and_can_be_copied():
    for other in (pickle.loads(pickle.dumps(EVERYTHING)), copy.deepcopy(EVERYTHING)):
        assert dump_pytree_json(other) == dump_pytree_json(EVERYTHING)


def test_results_come_back_from_json(tmp_path):
    like = Everything(
        0.0, 0, False, "", None, np.zeros(0, "i2"), Pair(torch.zeros(()), np.zeros(0)), (0.0, 0)
    )
    write_pytree_json_file(tmp_path / "results.json", EVERYTHING)
    found = read_pytree_json_file(tmp_path / "results.json", like)
    assert isinstance(found, Everything)
    assert (found.loss, found.n, found.done, found.name, found.best) == (
        1 / 3,
        7,
        True,
        "dev",
        None,
    )
    assert found.confusion.dtype == np.int16
    np.testing.assert_array_equal(found.confusion, [[0, 1, 2], [3, 4, 5]])
    assert isinstance(found.pair, Pair)
    assert torch.equal(found.pair.loss, torch.tensor(0.1))
    assert found.scores == (1.5, 2)
    assert parse_pytree_json(dump_pytree_json(Text("ä")), Text()) == Text("ä")
