import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.tree import (
    as_tensor,
    flatten_leading_axes,
    flatten_with_paths,
    named_leaves,
    nested_vars_to_paths,
    split_leading_axis,
    summarize_shape,
    total_dimensionality,
    tree_map,
    unshard,
)

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Pair:
    x: Any
    y: Any

    def __post_init__(self):
        assert not isinstance(self.x, str)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    derived: Any = field(init=False, default=7)


def params():
    """The tree of bobbin's own test."""
    layers = (OrderedDict(weight=np.zeros((3, 3)), bias=np.zeros(3)), {"scale": np.zeros(3)})
    return {"params": {"Layers": layers}, "dataclass": Pair([1.0, 2.0, 3.0], "abc")}


def test_paths_are_those_of_bobbin():
    assert nested_vars_to_paths(params()) == {
        "params": {
            "Layers": (
                {"weight": "/params/Layers/0/weight", "bias": "/params/Layers/0/bias"},
                {"scale": "/params/Layers/1/scale"},
            )
        },
        "dataclass": unchecked(
            ["/dataclass/x/0", "/dataclass/x/1", "/dataclass/x/2"], "/dataclass/y"
        ),
    }


def unchecked(x, y):
    pair = Pair(0, 0)
    object.__setattr__(pair, "x", x)
    object.__setattr__(pair, "y", y)
    return pair


def test_the_separator_reaches_every_level():
    tree = {"a": [{"b": 1}], "c": Point(2, 3)}
    assert nested_vars_to_paths(tree, pathsep="::") == {
        "a": [{"b": "::a::0::b"}],
        "c": Point("::c::x", "::c::y"),
    }
    assert list(flatten_with_paths(tree, pathsep="::")) == [
        ("::a::0::b", 1),
        ("::c::x", 2),
        ("::c::y", 3),
    ]


def test_is_leaf_stops_the_walk_at_containers_too():
    tree = {"e": [Pair(1, 2), {"k": Pair(3, 4)}]}
    pair = lambda node: isinstance(node, Pair)  # noqa: E731 short
    assert list(flatten_with_paths(tree, is_leaf=pair)) == [
        ("/e/0", Pair(1, 2)),
        ("/e/1/k", Pair(3, 4)),
    ]
    assert nested_vars_to_paths(tree, is_leaf=pair) == {"e": ["/e/0", {"k": "/e/1/k"}]}
    assert nested_vars_to_paths(tree, is_leaf=lambda node: node is tree) == ""


def test_order_of_keys_is_kept_and_keys_need_not_be_text():
    tree = {"b": 1, 3: 2, "a/b": 3, None: {}}
    assert [path for path, _ in flatten_with_paths(tree)] == ["/b", "/3", "/a/b"]
    assert list(nested_vars_to_paths(tree)) == ["b", 3, "a/b", None]


def test_a_leaf_alone_has_the_empty_path():
    assert list(flatten_with_paths(5)) == [("", 5)]
    assert list(named_leaves(5)) == [("", 5)]
    assert list(flatten_with_paths(Pair)) == [("", Pair)]  # the class, not an instance


def test_leaves_have_paths_and_modules_stand_for_their_state():
    tree = [nn.Linear(2, 1), {"k": (1, None)}]
    assert [path for path, _ in named_leaves(tree)] == ["0/weight", "0/bias", "1/k/0", "1/k/1"]
    assert nested_vars_to_paths(tree) == [
        {"weight": "/0/weight", "bias": "/0/bias"},
        {"k": ("/1/k/0", "/1/k/1")},
    ]


def test_trees_keep_their_containers():
    assert tree_map(lambda a, b: a * b, {"k": (1, [2])}, {"k": (3, [4])}) == {"k": (3, [8])}
    assert tree_map(lambda a: a * 2, [Point(1, 2), Pair(3, 4), ()]) == [Point(2, 4), Pair(6, 8), ()]
    assert tree_map(lambda a: a + 1, torch.Size([2, 3])) == (3, 4)


def test_a_dataclass_is_rebuilt_whatever_its_constructor_says():
    given = Slotted(1)
    found = tree_map(str, given)
    assert (found.x, found.derived) == ("1", "7")
    assert (given.x, given.derived) == (1, 7)
    assert nested_vars_to_paths(Pair(1, 2)) == unchecked("/x", "/y")


def test_a_module_is_a_leaf_where_a_tree_is_rebuilt():
    model = nn.Linear(2, 1)
    assert tree_map(lambda leaf: leaf is model, [model, 1]) == [True, False]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"a": [1, 2, 3]}, "[0, 1] where tree 1 has one of [0, 1, 2]"),
        ({"a": 5}, "[0, 1] where tree 1 has a leaf"),
    ],
)
def test_trees_of_other_structure_are_refused(other, told):
    with pytest.raises(ValueError, match=rf"^tree_map: tree 0 .*{re.escape(told)}$"):
        tree_map(lambda a, b: a, {"a": [1, 2]}, other)


def test_only_numbers_are_compared_as_tensors():
    assert as_tensor("text") is None
    assert as_tensor(None) is None
    assert as_tensor(2.5).item() == 2.5
    assert as_tensor(True).item() is True
    assert as_tensor(np.float32(0.5)).shape == ()


def test_arrays_that_torch_does_not_take_as_they_are_become_tensors():
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    array.flags.writeable = False
    assert torch.equal(as_tensor(array), torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_dimensions_are_counted_as_bobbin_does():
    assert (
        total_dimensionality({"e1": Pair(np.array([1, 2]), np.array([3, 4])), "e2": Pair(5, None)})
        == 5
    )


@pytest.mark.parametrize(
    ("tree", "n"),
    [
        (torch.zeros(0, 3), 0),
        ("text", 0),
        (1j, 1),
        (nn.Linear(3, 2), 8),
        ([torch.tensor(1.0), True], 2),
    ],
)
def test_dimensions_of_single_leaves(tree, n):
    assert total_dimensionality(tree) == n


def test_shapes_are_summarized_as_bobbin_does():
    tree = {
        "elem1": Pair(np.array([1, 2], dtype=np.int32), np.array([3, 4], dtype=np.float32)),
        "elem2": Pair([5, np.array([1, 2], dtype=np.float32)], np.zeros((3, 3, 2))),
        "elem_none": None,
    }
    assert summarize_shape(tree) == (
        "elem1:\n"
        "  x: (2,) dtype=int32\n"
        "  y: (2,) dtype=float32\n"
        "elem2:\n"
        "  x:\n"
        "    0: () dtype=int64\n"
        "    1: (2,) dtype=float32\n"
        "  y: (3, 3, 2) dtype=float64\n"
        "elem_none: None"
    )


def test_tensors_text_and_empty_containers_are_summarized():
    assert summarize_shape(torch.zeros(0, 3, dtype=torch.bfloat16)) == "(0, 3) dtype=bfloat16"
    assert summarize_shape({"a": "x\ny", "b": [], 1: 2.5}) == "a: 'x\\ny'\nb:\n1: () dtype=float64"


def test_shards_are_the_rows_of_every_array():
    stacked = {"a": torch.arange(6.0).reshape(3, 2), "b": Pair(np.array([5, 6, 7]), None)}
    shards = unshard(stacked)
    assert [s["a"].tolist() for s in shards] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert [s["b"] for s in shards] == [Pair(5, None), Pair(6, None), Pair(7, None)]
    shards[1]["a"][0] = 9
    assert stacked["a"][1, 0] == 9


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": None, "b": []}, r"^unshard: .*no arrays"),
        ({"a": torch.tensor(1.0)}, r"^/a .*leading axis: .*\(\)"),
        ([np.zeros(3), "text"], r"^/1 .*leading axis: 'text'"),
        (5, r"^the tree .*leading axis: .*\(\)"),
        ({"a": np.zeros(3), "b": {"c": np.zeros((2, 3))}}, r"^unshard: /a .*3 rows, /b/c .*2$"),
    ],
)
def test_what_has_no_shards_is_refused(tree, message):
    with pytest.raises(ShapeError, match=message):
        unshard(tree)


def test_the_leading_axis_is_split_and_flattened_back():
    tree = {"a": torch.arange(30.0).reshape(6, 5), "b": [np.arange(3), None], "c": np.zeros((0, 7))}
    found = split_leading_axis(3, tree)
    assert found["a"].shape == (3, 2, 5)
    assert found["a"][1].tolist() == tree["a"][2:4].tolist()
    assert found["b"][0].shape == (3, 1)
    assert found["c"].shape == (3, 0, 7)
    back = flatten_leading_axes(found)
    assert torch.equal(back["a"], tree["a"])
    assert back["b"][0].tolist() == [0, 1, 2]
    assert back["b"][1] is None
    assert back["c"].shape == (0, 7)
    assert flatten_leading_axes(torch.zeros(2, 3, 5, 7), 3).shape == (30, 7)


def test_what_does_not_split_is_refused():
    with pytest.raises(ShapeError, match=r"^/x/1 has 5 rows.* 2 groups$"):
        split_leading_axis(2, {"x": [np.zeros(4), np.zeros(5)]})
    with pytest.raises(ShapeError, match=r"^/x has 5 examples.* 2 devices$"):
        split_leading_axis(
            2, {"x": np.zeros(5)}, leading_axis_name="examples", split_group_name="devices"
        )
    with pytest.raises(ShapeError, match=r"^/x has no leading axis: shape \(\)$"):
        split_leading_axis(2, {"x": 1.0})
    with pytest.raises(ValueError, match=r"^split_leading_axis: .*1 group; got 0$"):
        split_leading_axis(0, np.zeros(4))


def test_too_few_axes_are_refused():
    with pytest.raises(ShapeError, match=r"^/x has no 2 leading axes: shape \(3,\)$"):
        flatten_leading_axes({"x": np.zeros(3)})
    with pytest.raises(ShapeError, match=r"^/0 has no 2 leading axes: 'text'$"):
        flatten_leading_axes(["text"])
    with pytest.raises(ValueError, match=r"^flatten_leading_axes: .*1 axis; got 0$"):
        flatten_leading_axes(np.zeros(3), 0)
