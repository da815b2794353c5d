import json
import math
import re
import struct
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.bobbin.treejson import (
    dump_pytree_json,
    parse_pytree_json,
    read_pytree_json_file,
    write_pytree_json_file,
)
from fluxutils_py.errors import LoadError

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Pair:
    x: Any
    y: Any = None

    def __post_init__(self):
        assert not isinstance(self.x, dict)


def back(tree, template=None):
    """A tree written and read, through a reader of JSON that knows no NaN."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = dump_pytree_json(tree)
    json.loads(text, parse_constant=refuse)
    return parse_pytree_json(text, template)


def same(a, b):
    """The same kind, dtype, shape and bytes; a NaN is a NaN."""
    if isinstance(a, torch.Tensor):
        shapes = (a.shape, a.dtype, type(a)) == (b.shape, b.dtype, type(b))
        return shapes and _bytes(a) == _bytes(b)
    if isinstance(a, np.ndarray | np.generic) and a.dtype.kind in "fc":
        return (type(a), a.dtype, a.shape) == (type(b), b.dtype, b.shape) and same(
            *map(torch.tensor, (a, b))
        )
    return (type(a), a.dtype, a.shape, a.tobytes()) == (type(b), b.dtype, b.shape, b.tobytes())


def _bytes(tensor):
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if not (tensor.is_complex() or tensor.is_floating_point()):
        return bytes(tensor.untyped_storage())
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    nan = parts.double().isnan().numpy()
    bits = np.frombuffer(bytes(parts.untyped_storage()), f"u{parts.itemsize}").reshape(nan.shape)
    return np.where(nan, 0, bits).tobytes(), nan.tobytes()


def any_bits(dtype, n=211):
    """Random bytes taken as numbers: subnormals, infinities, NaN of every sign and payload."""
    bits = np.random.default_rng(5).integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        bits = bits % 2
    return torch.frombuffer(bytearray(bits.tobytes()), dtype=dtype).clone()


TORCH = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype):
    given = any_bits(dtype)
    assert same(back(given), given)
    assert same(back(given[:0].reshape(0, 3)), given[:0].reshape(0, 3))
    for i in range(5):
        assert same(back(given[i].clone()), given[i].clone())
    matrix = given[:210].reshape(14, 15).T
    assert same(back(matrix), matrix.contiguous())


@pytest.mark.parametrize(
    "name", ["?", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8"]
)
def test_arrays_of_every_dtype_come_back_bit_for_bit(name):
    bits = np.random.default_rng(6).integers(0, 256, 30 * np.dtype(name).itemsize, dtype=np.uint8)
    given = (bits % 2).view(bool) if name == "?" else bits.view(name)
    matrix = given[:30].reshape(5, 6).T
    assert same(back(matrix), matrix)
    assert same(back(given[0]), given[0])  # a scalar
    assert same(back(np.array(given[0])), np.array(given[0]))
    assert same(back(given[:0].reshape(2, 0, 3)), given[:0].reshape(2, 0, 3))


def test_extreme_integers_are_exact():
    given = np.array([0, 2**64 - 1, 2**53 + 1], dtype=np.uint64)
    assert same(back(given), given)
    assert back(10**30) == 10**30


def test_arrays_in_foreign_byte_order_come_back_in_native_order():
    assert same(back(np.array([1.5, 2.0], dtype=">f4")), np.array([1.5, 2.0], dtype="f4"))


def test_parameters_come_back_as_tensors_without_gradient():
    found = back(nn.Parameter(torch.ones(2)))
    assert type(found) is torch.Tensor
    assert not found.requires_grad


@pytest.mark.parametrize(
    "value", [None, True, False, 0, -3, 0.1, -0.0, 1e-320, 5e300, "", "NaN", "\ud800\u0000", "/"]
)
def test_plain_values_come_back(value):
    found = back({"k": [value]})["k"][0]
    assert (type(found), repr(found)) == (type(value), repr(value))


def test_numbers_that_json_has_not_come_back():
    for value in (math.nan, math.inf, -math.inf):
        assert struct.pack("d", back(value)) == struct.pack("d", value)


def test_the_text_is_that_of_bobbin():
    tree = {"elem1": Pair(np.array([1, 2]), np.array([3, 4])), "elem2": Pair(5, None)}
    assert json.loads(dump_pytree_json(tree)) == {
        "elem1": {
            "x": {"__array__": True, "data": [1, 2], "dtype": "int64"},
            "y": {"__array__": True, "data": [3, 4], "dtype": "int64"},
        },
        "elem2": {"x": 5, "y": None},
    }


def test_what_bobbin_wrote_is_read():
    text = '{"x": {"__array__": true, "dtype": "float32", "data": [NaN, 1.0, -Infinity]}, "y": NaN}'
    found = parse_pytree_json(text.encode())
    assert same(found["x"], np.array([np.nan, 1.0, -np.inf], dtype=np.float32))
    assert math.isnan(found["y"])


def tree():
    return {
        "z": (1, [Point(torch.tensor([1.5]), "s")]),
        "a": Pair([True], ()),
        "e": {},
    }


def test_without_a_template_containers_are_dicts_and_lists():
    found = back(tree())
    assert found["z"][1][0].pop("x").item() == 1.5
    assert found == {"z": [1, [{"y": "s"}]], "a": {"x": [True], "y": []}, "e": {}}
    assert list(found) == ["z", "a", "e"]


def test_with_a_template_containers_are_those_of_the_template():
    found = back(tree(), tree())
    assert found == tree()
    assert isinstance(found["z"], tuple)
    assert isinstance(found["z"][1][0], Point)
    assert isinstance(found["a"], Pair)
    assert found["a"].y == ()


def test_a_template_gives_structure_and_no_values():
    given = {"a": torch.zeros(2, 3), "b": 1}
    found = back(given, {"a": torch.ones(5, dtype=torch.int8), "b": "text"})
    assert same(found["a"], given["a"])
    assert found["b"] == 1


def test_an_array_is_a_tensor_where_the_template_has_one():
    found = back([np.ones(2, "f4"), np.float32(2)], [torch.zeros(1)] * 2)
    assert same(found[0], torch.ones(2))
    assert same(found[1], torch.tensor(2.0))


def test_none_and_empty_containers_in_a_template_stand_for_more():
    given = {"a": Pair((1, 2), [3]), "b": (1, 2), "c": {"d": 5}, "e": [Pair(1)]}
    found = back(given, {"a": None, "b": (), "c": {}, "e": []})
    assert found == {
        "a": {"x": [1, 2], "y": [3]},
        "b": (1, 2),
        "c": {"d": 5},
        "e": [{"x": 1, "y": None}],
    }


def test_the_order_of_a_template_is_kept():
    assert list(back({"b": 1, "a": 2}, {"a": 0, "b": 0})) == ["a", "b"]


def test_a_module_is_written_as_its_state_and_loads_back():
    model, other = nn.LSTM(3, 2), nn.LSTM(3, 2)
    other.load_state_dict(back(model))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert list(back({"m": model}, {"m": other})["m"]) == list(model.state_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": [{1, 2}]}, r"^/a/0: JSON .*value .*'set'"),
        (b"x", r"^the tree: JSON .*value .*'bytes'"),
        (1j, r"^the tree: JSON .*value .*'complex'"),
        ({"a": {3: 3}}, r"^/a: JSON .*key 3"),
        ([{"__array__": 1}], r"^/0: JSON .*key '__array__'"),
        ({"d": np.zeros(2, "M8[s]")}, r"^/d: JSON .*ndarray"),
        (np.array(["a"]), r"^the tree: JSON .*ndarray"),
        ([torch.ones(2) * 1j], r"^/0: JSON .*Tensor"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_path(given, message):
    with pytest.raises(TypeError, match=message):
        dump_pytree_json(given)


@pytest.mark.parametrize(
    ("given", "template", "message"),
    [
        ([1, 2], (1, 2, 3), r"^the tree: .*\[0, 1, 2\].*\[0, 1\]$"),
        ({"r": {"x": 1}}, {"r": Pair(0)}, r"^/r: .*\['x', 'y'\] .*\['x'\]$"),
        ({"r": {"k": 1}}, {"r": 5}, r"^/r: .*\[\] .*\['k'\]$"),
        ([[1]], [{}], r"^/0: .*\[\] .*\[0\]$"),
        ([None], [[1]], r"^/0: .*\[0\] .*\[\]$"),
    ],
)
def test_another_structure_than_the_templates_is_refused_by_path(given, template, message):
    with pytest.raises(LoadError, match=message):
        back(given, template)


def array(**entries):
    return json.dumps({"a": [{"__array__": True, "dtype": "int8", "data": [1], **entries}]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        array(dtype="int9"),
        array(dtype="nn"),
        array(dtype=5),
        array(data=[[1], [2, 3]]),
        array(data=["x"], dtype="float16"),
        array(data=[300]),
        array(data=[1, 2], shape=[3]),
        '{"__tensor__": true}',
        '{"a": [{"__float__": [1, 2]}]}',
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_malformed_text_is_refused(text):
    with pytest.raises(LoadError, match=r"^malformed: "):
        parse_pytree_json(text)


def test_files_are_written_whole_and_read_back(tmp_path):
    path = tmp_path / "results.json"
    write_pytree_json_file(path, Pair(torch.tensor([1.5, math.nan]), "\u00e9"))
    found = read_pytree_json_file(str(path), Pair(0))
    assert isinstance(found, Pair)
    assert same(found.x, torch.tensor([1.5, math.nan]))
    with pytest.raises(TypeError):
        write_pytree_json_file(path, {"k": object()})
    assert read_pytree_json_file(path)["y"] == "\u00e9"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_errors_name_the_file(tmp_path):
    path = Path(tmp_path / "r.json")
    path.write_text("[1]")
    message = f"^{re.escape(str(path))}: the tree: .*keys"
    with pytest.raises(LoadError, match=message):
        read_pytree_json_file(path, 5)
    with pytest.raises(FileNotFoundError):
        read_pytree_json_file(tmp_path / "none.json")
