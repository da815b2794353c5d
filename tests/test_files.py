"""Files that are whole or not there."""

import os
import stat

import pytest

from fluxutils_py.files import atomic_path, atomic_write


def write_path(path, data):
    with atomic_path(path) as new, open(new, "wb") as file:
        file.write(data)


def write_handle(path, data):
    with atomic_write(path) as file:
        file.write(data)


@pytest.mark.parametrize("write", [write_path, write_handle])
def test_the_new_file_takes_the_place_of_the_old_one(tmp_path, write):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with open(path, "rb") as old:
        write(path, b"new")
        assert old.read() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("write", [write_path, write_handle])
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path, write):
    before = os.umask(0o027)
    try:
        write(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_link_leads_to_the_new_file(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "link").symlink_to("a")
    write_handle(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_a_file_that_fails(tmp_path, error):
    (tmp_path / "a").write_bytes(b"old")

    def fail():
        with atomic_write(tmp_path / "a") as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_data_are_on_the_disk_before_the_name_and_then_the_name(tmp_path, monkeypatch):
    events = []

    def fsync(descriptor):
        status = os.fstat(descriptor)
        events.append(("fsync", "folder" if stat.S_ISDIR(status.st_mode) else status.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (events.append("replace"), replace(*names)))
    write_handle(tmp_path / "a", b"12345")
    assert events == [("fsync", 5), "replace", ("fsync", "folder")]
