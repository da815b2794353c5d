"""Files that are whole or not there."""

import errno
import os
import resource
import signal
import stat
from contextlib import contextmanager

import pytest
import torch

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


@pytest.mark.parametrize("write", [write_path, write_handle])
def test_devices_pipes_and_folders_are_not_replaced(tmp_path, write):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "folder", tmp_path / "link", "/dev/null"):
        kind = stat.S_IFMT(os.stat(path).st_mode)
        with pytest.raises(OSError, match="give") as raised:
            write(path, b"new")
        assert raised.value.filename == os.fspath(path)
        assert stat.S_IFMT(os.stat(path).st_mode) == kind
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


@pytest.mark.parametrize("write", [write_path, write_handle])
def test_links_that_lead_back_to_themselves_are_refused(tmp_path, write):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="remove the link") as raised:
        write(tmp_path / "a", b"new")
    assert raised.value.errno == errno.ELOOP
    assert (tmp_path / "a").is_symlink()


@pytest.mark.parametrize(
    "name", ["x" * 241, "x" * 255, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 127]
)
def test_names_as_long_as_the_file_system_takes(tmp_path, name):
    for data in (b"one", b"two"):
        write_handle(tmp_path / name, data)
    assert (tmp_path / name).read_bytes() == b"two"
    assert os.listdir(tmp_path) == [name]


def test_longer_names_are_refused_before_anything_is_written(tmp_path):
    with (
        pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)),
        atomic_path(tmp_path / ("x" * 256)),
    ):
        pytest.fail("the block ran")
    assert os.listdir(tmp_path) == []


# -- what killed processes leave ------------------------------------------------------------------


def stop_while_writing(path, number):
    """Fork a process that gets a signal in the middle of writing, and return it once it has."""
    child = os.fork()
    if child == 0:
        with atomic_write(path) as file:
            file.write(b"half")
            os.kill(os.getpid(), number)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    return child


@pytest.mark.slow
def test_the_next_write_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path):
    stop_while_writing(tmp_path / "a.b", signal.SIGKILL)
    (other,) = os.listdir(tmp_path)
    living = stop_while_writing(tmp_path / "a", signal.SIGSTOP)
    stop_while_writing(tmp_path / "a", signal.SIGKILL)
    assert len(os.listdir(tmp_path)) == 3
    write_handle(tmp_path / "a", b"new")
    left = set(os.listdir(tmp_path))
    assert len(left) == 3
    assert {"a", other} < left
    os.kill(living, signal.SIGCONT)
    assert os.waitpid(living, 0)[1] == 0
    assert (tmp_path / "a").read_bytes() == b"half"  # the last to rename
    write_handle(tmp_path / "a.b", b"new")
    assert sorted(os.listdir(tmp_path)) == ["a", "a.b"]


@pytest.mark.slow
def test_a_number_that_was_given_to_another_process_is_no_sign_of_life(tmp_path):
    living = stop_while_writing(tmp_path / "a", signal.SIGSTOP)
    (name,) = os.listdir(tmp_path)
    host, process, began, rest = name.split("-")
    assert int(process) == living
    (tmp_path / "-".join((host, process, str(int(began) - 1), rest))).touch()
    write_handle(tmp_path / "a", b"new")
    assert sorted(os.listdir(tmp_path)) == sorted([name, "a"])
    os.kill(living, signal.SIGKILL)
    os.waitpid(living, 0)


@pytest.mark.slow
def test_of_other_machines_only_what_is_old_is_removed(tmp_path):
    stop_while_writing(tmp_path / "a", signal.SIGKILL)
    (name,) = os.listdir(tmp_path)
    kind, _, owner = name.rpartition(".a.")[2].partition("-")
    foreign = tmp_path / f".a.{int(kind, 16) ^ 1:08x}-{owner}"
    foreign.write_bytes(b"half")
    write_handle(tmp_path / "a", b"new")
    assert sorted(os.listdir(tmp_path)) == sorted([foreign.name, "a"])
    os.utime(foreign, (0, 0))
    write_handle(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_shall_be_new_replaces_none(tmp_path):
    def write():
        with atomic_path(tmp_path / "a", replace=False) as new, open(new, "wb") as file:
            file.write(b"mine")

    write()
    (tmp_path / "a").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        write()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["a"]


@contextmanager
def small_files(n_bytes):
    """No file grows beyond a size, as on a full disk; inside alone, as the output of the tests may
    be a file too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 500, 7680, 50_000])
def test_what_a_writer_makes_of_a_full_disk_is_the_error_of_the_disk(tmp_path, size):
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with (
        small_files(size),
        pytest.raises(OSError, match=r"a\.pt") as raised,
        atomic_write(path) as file,
    ):
        torch.save({"a": torch.zeros(100_000)}, file)
    assert raised.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.pt"]
