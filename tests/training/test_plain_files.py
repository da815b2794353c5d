"""Files that are whole or not there, and from which no code runs."""

import contextlib
import functools
import math
import os
import pickle
import random
import stat
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from fluxutils_py.errors import LoadError
from fluxutils_py.training import plain_files
from fluxutils_py.training.plain_files import read_file, write_file

KIND = "test"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


def content(**others):
    return {
        "kind": KIND,
        "numbers": [0, -1, 2**80, 0.1, math.inf, True, None, 1 + 2j],
        "text": {"": "ä\n", "nested": ({"a": []}, ())},
        "tensors": OrderedDict(
            a=torch.randn(3, 2), b=torch.arange(4), c=torch.tensor(2.5, dtype=torch.float64)
        ),
        "strange": [
            torch.empty(0, 2),
            torch.ones(3, dtype=torch.bfloat16),
            torch.tensor([True]),
            torch.randn(4, 2).t(),
        ],
        **others,
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


# -- writing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_given", [Path, str])
def test_what_was_written_is_read(path, as_given):
    written = content()
    write_file(as_given(path), written)
    assert same(read_file(as_given(path), KIND), written)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_is_replaced(path):
    write_file(path, content(version=1))
    write_file(path, content(version=2))
    assert read_file(path, KIND)["version"] == 2
    assert os.listdir(path.parent) == [path.name]


def test_a_path_without_a_folder_is_in_the_current_one(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    write_file(path.name, content())
    assert read_file(path.name, KIND)["kind"] == KIND


def test_a_file_is_for_whom_the_umask_says(path):
    old = os.umask(0o027)
    try:
        write_file(path, content())
    finally:
        assert os.umask(old) == 0o027  # left as it was
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "nowhere" / "model.pt", content())


def failing(error):
    """Stands for any function; torch.save has written something before it fails."""

    def fail(*args):
        if hasattr(args[-1], "write"):
            args[-1].write(b"half of it")
        raise error

    return fail


FAILURES = {
    "content that cannot be pickled": (
        None,
        None,
        content(function=lambda: 0),
        (pickle.PicklingError, AttributeError),
    ),
    "a full disk": (torch, ("save", failing(OSError("no space left"))), content(), OSError),
    "an interrupt": (torch, ("save", failing(KeyboardInterrupt())), content(), KeyboardInterrupt),
    "a failing disk": (os, ("fsync", failing(OSError("I/O error"))), content(), OSError),
    "a failing move": (os, ("replace", failing(OSError("no such device"))), content(), OSError),
}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_while_writing_leaves_the_folder_as_it_was(path, monkeypatch, failure, existing):
    where, patch, written, error = FAILURES[failure]
    if existing:
        write_file(path, content(version=1))
        before = path.read_bytes()
    with monkeypatch.context() as patched:
        if where is not None:
            patched.setattr(where, *patch)
        with pytest.raises(error):
            write_file(path, written)
    assert os.listdir(path.parent) == ([path.name] if existing else [])
    if existing:
        assert path.read_bytes() == before


def test_the_old_file_is_there_until_the_new_one_is_whole(path, monkeypatch):
    write_file(path, content(version=1))
    replace, seen = os.replace, []

    def look(aside, target):
        seen.append(
            (
                read_file(path, KIND)["version"],
                read_file(aside, KIND)["version"],
                Path(aside).parent,
            )
        )
        replace(aside, target)

    monkeypatch.setattr(os, "replace", look)
    write_file(path, content(version=2))
    # in the same folder, so that the move is one step of the file system
    assert seen == [(1, 2, path.parent)]


# -- reading -------------------------------------------------------------------------------------------


def test_tensors_go_to_a_device(path):
    write_file(path, content())
    assert read_file(path, KIND, "meta")["tensors"]["a"].device.type == "meta"


def test_a_missing_file_is_missing(path):
    with pytest.raises(FileNotFoundError, match=r"model\.pt: no such file$"):
        read_file(path, KIND)


def test_ranks_are_told_that_rank_0_may_not_have_written_the_file(path, monkeypatch):
    monkeypatch.setattr(plain_files, "detect_launcher", lambda: "mpi")
    with pytest.raises(FileNotFoundError, match=r"model\.pt: no such file; .*barrier\(\)"):
        read_file(path, KIND)


@pytest.mark.parametrize(
    "other",
    [{"kind": "another"}, {}, {"kind": None}, [], "text", torch.zeros(3), {"kinds": KIND}, None, 3],
)
def test_a_file_of_another_kind_is_refused(path, other):
    torch.save(other, path)
    with pytest.raises(LoadError, match=r"model\.pt is no test file, its kind is "):
        read_file(path, KIND)


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, trap):
        self.trap = str(trap)

    def __reduce__(self):
        return open, (self.trap, "w")


def plain_pickle(content, path):
    path.write_bytes(pickle.dumps(content))


def legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("written_by", [torch.save, plain_pickle, legacy])
def test_a_malicious_file_is_refused_and_does_not_run(path, tmp_path, written_by):
    trap = tmp_path / "trap"
    written_by({"kind": KIND, "innocent": Malicious(trap)}, path)
    with pytest.raises(LoadError, match=r"model\.pt is"):
        read_file(path, KIND)
    assert not trap.exists()
    if written_by is not plain_pickle:  # it would have worked elsewhere
        torch.load(path, weights_only=False)["innocent"].close()
    else:
        pickle.loads(path.read_bytes())["innocent"].close()
    assert trap.exists()


@pytest.mark.parametrize(
    "code", [nn.Linear(2, 1), functools.partial(print, 1), print, random.Random(0), nn.Linear]
)
def test_objects_other_than_data_are_refused(path, code):
    torch.save({"kind": KIND, "code": code}, path)
    with pytest.raises(LoadError, match=r"model\.pt .*run code \(\S+\)"):
        read_file(path, KIND)


def refused(path, data):
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"model\.pt is (damaged or )?no test file"):
        read_file(path, KIND)


def test_a_file_that_was_cut_off_is_refused(path):
    write_file(path, content())
    whole = path.read_bytes()
    for n in {*range(0, len(whole), 97), 1, 2, 3, 4, 30, len(whole) - 1, len(whole) - 22}:
        refused(path, whole[:n])


STRANGERS = {
    "nothing": b"",
    "zeros": bytes(99),
    "a text": b"a text\n" * 50,
    "the beginning of a pickle": b"\x80",
    "a pickle without content": b"\x80\x02",
    "an empty pickle": b"\x80\x02.",
    "another pickle": pickle.dumps({"kind": "another"}),
    "a pickle that was cut off": pickle.dumps({"kind": KIND}, 2)[:-1],
    "the beginning of an archive": b"PK\x03\x04",
    "an empty archive": b"PK\x05\x06" + bytes(18),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(99),
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_what_torch_never_wrote_is_refused(path, data):
    refused(path, data)


@pytest.mark.slow
def test_random_bytes_are_refused(path):
    for _ in range(300):
        refused(path, random.randbytes(random.randrange(60)))


@pytest.mark.slow
def test_a_damaged_index_is_refused(path):
    write_file(path, content())
    with zipfile.ZipFile(path) as archive:
        pickled = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        members = {n: archive.read(n) for n in archive.namelist()}
    for _ in range(100):
        data = bytearray(members[pickled])
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        with zipfile.ZipFile(path, "w") as archive:
            for name, member in members.items():
                archive.writestr(name, bytes(data) if name == pickled else member)
        # a flipped bit in a number is none that a reader could see
        with contextlib.suppress(LoadError):
            read_file(path, KIND)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(LoadError, match="is damaged or no test file"):
        read_file(tmp_path, KIND)


@pytest.mark.parametrize("path", [None, 3, b"model.pt", ""])
def test_what_is_no_path_is_said_to_be_none(path):
    for call in (lambda: write_file(path, {}), lambda: read_file(path, "kind")):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert str(caught.value) == f"path must be the name of a file, got {path!r}"
