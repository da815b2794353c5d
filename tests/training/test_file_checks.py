"""fluxutils_py.training.file_checks: files that ask for more than they hold."""

import zipfile

import pytest
import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.training.plain_files import read_file, write_file

KIND = "test"


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def refused(path, telling):
    with pytest.raises(LoadError, match=rf"model\.pt is .*{telling}"):
        read_file(path, KIND)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


def test_compressed_parts_are_refused(path):
    write_file(path, {"kind": KIND, "a": torch.zeros(300_000)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    refused(path, "compressed")


def test_a_part_that_is_there_twice_is_refused(path):
    write_file(path, {"kind": KIND})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], b"")
    refused(path, "one name")


@pytest.mark.parametrize(
    "call",
    [
        Call(bytearray, 10**13),
        Call(torch.FloatTensor, 10**13),
        Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (3,), (1,), False),
    ],
    ids=["bytes", "tensor", "meta"],
)
def test_calls_that_take_memory_by_a_number_are_refused(path, call):
    torch.save({"kind": KIND, "a": call}, path)
    refused(path, "asks to run code")


def test_tensors_larger_than_their_part_are_refused(path):
    write_file(path, {"kind": KIND, "a": torch.zeros(100), "b": torch.zeros(77)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member[:12] if name.endswith("data/1") else member)
    refused(path, "")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_lists_in_themselves_are_refused(path):
    circle = []
    circle.append(circle)
    torch.save({"kind": KIND, "a": circle}, path)
    refused(path, "RecursionError")


def test_what_is_within_the_bounds_is_read(path):
    shared = torch.arange(6.0)
    sparse = torch.sparse_coo_tensor([[0, 2]], [3.0, 4.0], (5,), check_invariants=True)
    content = {
        "a": shared,
        "b": shared[::2],
        "c": torch.zeros(0),
        "n": nested(90),
        "p": torch.nn.Parameter(shared),
    }
    write_file(
        path, {"kind": KIND, **content, "s": sparse, "z": torch.tensor(1j), "i": torch.tensor(3)}
    )
    found = read_file(path, KIND)
    assert torch.equal(found["b"], torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal(found["s"].to_dense(), sparse.to_dense())
