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
        torch.complex64,
        torch.complex128,
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
    "name", ["?", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
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


def test_arrays_of_text_come_back():
    given = np.array([["a", "\u00e9\n"], ["", "NaN"]])
    assert same(back(given), given)
    assert same(back(given[:0]), given[:0])
    assert same(back(np.str_("abc")), np.str_("abc"))


def test_arrays_in_foreign_byte_order_come_back_in_native_order():
    assert same(back(np.array([1.5, 2.0], dtype=">f4")), np.array([1.5, 2.0], dtype="f4"))


def test_lazily_conjugated_and_negated_tensors_are_written_as_they_read():
    given = torch.tensor([1 + 2j, 3 - 4j])
    assert back(given.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert back(given.conj().imag).tolist() == [-2.0, 4.0]
    assert back(torch.tensor([1 + 2j], dtype=torch.complex128).conj().imag).tolist() == [-2.0]


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
    found = back(complex(-math.inf, math.nan))
    assert (type(found), repr(found)) == (complex, "(-inf+nanj)")
    assert repr(back(complex(-0.0, 1))) == repr(complex(-0.0, 1))


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
    found = back([np.ones(2, "f4"), np.float32(2), np.array(["a"])], [torch.zeros(1)] * 3)
    assert same(found[0], torch.ones(2))
    assert same(found[1], torch.tensor(2.0))
    assert found[2].tolist() == ["a"]


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


def test_an_optimizers_state_comes_back_and_loads():
    model = nn.Linear(3, 2)
    opt = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    found = back(opt.state_dict())
    assert list(found["state"]) == [0, 1]
    assert same(found["state"][1]["exp_avg"], opt.state_dict()["state"][1]["exp_avg"])
    torch.optim.Adam(model.parameters()).load_state_dict(found)


@pytest.mark.parametrize(
    "given",
    [
        {1: "a", "1": "b", None: "c", 2.5: [{True: 0}]},
        {"__array__": True, "dtype": "int64", "data": [1]},
        {"__items__": [[1, 2]]},
        {"a/b": {"": 1}, "a": {"b/": 2}},
        {0: {}},
    ],
)
def test_dicts_with_other_keys_come_back_and_are_not_taken_for_arrays(given):
    found = back([given])[0]
    assert found == given
    assert list(map(type, found)) == list(map(type, given))
    assert back([given], [given]) == [given]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"a": [{1, 2}]},
            r"^/a/0: JSON .*value .*'set'",
        ),
        (b"x", r"^the tree: JSON .*value .*'bytes'"),
        (
            {"a": {(1, 2): 3}},
            r"^/a: JSON .*\(1, 2\) .*'tuple'.*string",
        ),
        ({math.nan: 3}, r"^the tree: JSON .*nan .*'float'.*string"),
        (
            {"d": np.zeros(2, "M8[s]")},
            r"^/d: JSON .*ndarray'> .*datetime64\[s\]",
        ),
        (
            np.array([None]),
            r"^the tree: JSON .*ndarray'> .*object",
        ),
        (
            [torch.ones(2, 2).to_sparse()],
            r"^/0: JSON .*Tensor'> .*torch.float32",
        ),
        (
            [torch.ones(2, device="meta")],
            r"^/0: JSON .*Tensor'> .*torch.float32",
        ),
    ],
)
def test_what_json_cannot_hold_is_refused_by_path(given, message):
    with pytest.raises(TypeError, match=message):
        dump_pytree_json(given)


@pytest.mark.skipif(np.dtype("longdouble").itemsize == 8, reason="longdouble is double here")
def test_long_doubles_are_refused():
    with pytest.raises(TypeError, match=r"^the tree: .*numpy.longdouble.*float\d+"):
        dump_pytree_json(np.longdouble(1))


@pytest.mark.parametrize(
    ("given", "template", "message"),
    [
        (
            [1, 2],
            (1, 2, 3),
            r"^the tree: .*list of 3 .*list of 2$",
        ),
        (
            {"r": {"x": 1}},
            {"r": Pair(0)},
            r"^/r: .*\['x', 'y'\] .*keys \['x'\]$",
        ),
        ({"r": {"k": 1}}, {"r": 5}, r"^/r: .*leaf .*keys \['k'\]$"),
        ({"r": [3]}, {"r": [[]]}, r"^/r/0: .*list of 0 .*leaf$"),
        ([[1]], [{}], r"^/0: .*keys \[\] .*list of 1$"),
        ([{0: 1}], [[5]], r"^/0: .*list of 1 .*keys \[0\]$"),
        ([None], [[1]], r"^/0: .*list of 1 .*leaf$"),
    ],
)
def test_another_structure_than_the_templates_is_refused_by_path(given, template, message):
    with pytest.raises(LoadError, match=message):
        back(given, template)


def array(**entries):
    return json.dumps({"a": [{"__array__": True, "dtype": "int8", "data": [1], **entries}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^not JSON: .*line 1 column 1"),
        (array(dtype="int9"), r"^/a/0: malformed __array__: .*dtype of"),
        (array(dtype="nn"), r"^/a/0: malformed __array__: .*dtype of"),
        (
            array(data=[1.5]),
            r"^/a/0: .*__array__: .*int .* 1\.5$",
        ),
        (
            array(data=[[1], [2, 3]]),
            r"^/a/0: .*__array__: .*int .* \[1\]$",
        ),
        (
            array(data=[True]),
            r"^/a/0: .*__array__: .*int .* True$",
        ),
        (
            array(data=["1"], dtype="bool"),
            r"^/a/0: .*__array__: .*bool .* '1'$",
        ),
        (
            array(data=["x"], dtype="float16"),
            r"^/a/0: .*__array__: .*float: 'x'$",
        ),
        (
            array(more=1),
            r"^/a/0: .*__array__: .*shape.*'more'\]$",
        ),
    ],
)
def test_malformed_text_is_refused_by_path(text, message):
    with pytest.raises(LoadError, match=message):
        parse_pytree_json(text)


@pytest.mark.parametrize(
    "text",
    [
        array(data=[300]),
        array(data=[1, 2], shape=[3]),
        array(data=[], shape="x"),
        array(dtype=5),
        array(dtype="<Ux"),
        array(dtype="float32", data=["NaN:zz"]),
        array(dtype="float32", data=["NaN:fffffffff"]),
        array(dtype="complex64", data=[[1, 2, 3]]),
        array(dtype="quint8"),
        '{"a": [{"__float__": [1, 2]}]}',
        '{"a": [{"__items__": 5}]}',
        '{"a": [{"__items__": [[[1], 2]]}]}',
        '{"a": [{"__complex__": "x"}]}',
    ],
)
def test_any_malformed_entry_is_refused_by_path(text):
    with pytest.raises(LoadError, match=r"^/a/0: malformed __"):
        parse_pytree_json(text)


def test_an_error_inside_other_keys_names_its_own_path():
    with pytest.raises(LoadError, match=r"^/3/k: malformed __array__: .*dtype"):
        parse_pytree_json(
            '{"__items__": [[3, {"k": {"__array__": true, "dtype": "x", "data": 1}}]]}'
        )


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
    message = f"^{re.escape(str(path))}: the tree: .*leaf .*list of 1$"
    with pytest.raises(LoadError, match=message):
        read_pytree_json_file(path, 5)
    with pytest.raises(FileNotFoundError):
        read_pytree_json_file(tmp_path / "none.json")


def test_texts_take_no_more_memory_than_a_file_has():
    stored = '{"__array__": true, "dtype": "<U200000000", "data": ["a", "b"]}'
    with pytest.raises(LoadError, match="U200000000"):
        parse_pytree_json(stored)
    roomy = np.array(["a", "bc"], "<U300")
    assert parse_pytree_json(dump_pytree_json(roomy)).dtype == roomy.dtype


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000]
)
def test_lists_in_lists_without_end_are_an_error_of_loading(text):
    with pytest.raises(LoadError, match="deep"):
        parse_pytree_json(text)
