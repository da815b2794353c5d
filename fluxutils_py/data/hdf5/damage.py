"""Check strings and lists in an HDF5 file before HDF5 reads them: damaged ones may hang it.

The check is part of opening any dataset, also a plain numeric one: h5py stores the attribute
``axes`` as a string of variable length, and HDF5 reads the list of sources of a virtual dataset
while it opens it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np

HEAP = b"GCOL\x01"  # how a global heap begins, in which HDF5 keeps strings of any length
HEADER = 16  # bytes of a heap's header, and of that of each object in it
WRAP = 1 << 64  # HDF5 adds sizes modulo this number
STRING = 16  # bytes of an attribute for each string: its length, the heap, and its index there
LONGEST = 1 << 20  # bytes of a string in an attribute
READABLE = h5py.h5t.TypeStringID | h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID

# Version of the message of an attribute, bytes before its name, unit in which its parts are padded.
ATTRIBUTE_MESSAGES = ((1, 8, 8), (2, 8, 1), (3, 9, 1))
VARIABLE_LENGTH = 9  # class of a type, in the lower half of its first byte


def find_heap_damage(
    file: h5py.File,
    name: str,
    attributes: Sequence[str],
    values: bool = False,
) -> str | None:
    """Return the damage of the heap that a dataset and some of its attributes, or its values too,
    need; None if it is sound.

    HDF5 itself detects other damage.
    """
    # other drivers have no descriptor to read from, other sizes another layout
    if file.driver != "sec2" or file.id.get_create_plist().get_sizes() != (8, 8):
        return None
    guard = GuardedFile(file.id.get_vfd_handle(), file.userblock_size)
    try:
        with h5py.File(guard, "r") as guarded:
            dataset = guarded[name]
            for attribute in attributes:
                key = attribute.encode()
                if h5py.h5a.exists(dataset.id, key):
                    space = dataset.attrs.get_id(attribute).get_space()
                    guard.require_short(key + b"\0", space.get_simple_extent_npoints())
                    read_attribute(dataset, attribute)
            if values:
                dataset[()]
    except (KeyError, OSError, RuntimeError, TypeError, UnicodeError, ValueError):
        if guard.damage is not None or not _is_missing(file, name):
            _close_before_python_ends()
    return guard.damage


def _is_missing(file: h5py.File, name: str) -> bool:
    try:
        return name not in file
    except (OSError, RuntimeError, ValueError):
        return False


@functools.cache
def _close_before_python_ends() -> None:
    """Have HDF5 close its files at exit.

    It may keep a guarded file that it failed to read, and would call its methods when Python is
    gone. Garbage goes first: HDF5 may crash when it closes the list of properties of a virtual
    dataset that is still held.
    """
    with contextlib.suppress(AttributeError, OSError):
        atexit.register(ctypes.CDLL(h5py.h5.__file__).H5close)  # h5py does not offer it
        atexit.register(gc.collect)  # the last that is registered is the first to run


def read_attribute(dataset: h5py.Dataset, name: str) -> Any:
    """Return an attribute that holds text or numbers; None for any other, and if there is none of
    that name.

    HDF5 crashes on some damaged types, for instance strings whose type now reads as a list.
    """
    if not h5py.h5a.exists(dataset.id, name.encode()):
        return None
    stored_type = dataset.attrs.get_id(name).get_type()
    if not isinstance(stored_type, READABLE):
        return None
    return dataset.attrs[name]


class GuardedFile(io.RawIOBase):
    """A file for HDF5 to read from that fails where HDF5 would read without end.

    HDF5 2.0 steps through a heap by the sizes of its objects, and hangs at a free object of size 0:
    a zero in the wrong place stops the process for good, and nothing can interrupt it. For a string
    it allocates as much memory as the attribute says, up to 4 GB, before it compares the length of
    the string itself. And it decodes the list of a virtual dataset's sources, and crashes, before
    it looks at the checksum.
    """

    def __init__(self, descriptor: int, base: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.place = 0
        self.base = base  # from which addresses in the file count
        self.seen: list[bytes] = []  # all that was read, in which messages are looked up
        self.damage: str | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n_read = os.preadv(self.descriptor, [buffer], self.place)
        # HDF5 may have the first bytes of a heap already, or ask for the last ones later
        margin = len(HEAP) - 1
        start = max(0, self.place - margin)
        around = os.pread(self.descriptor, n_read + self.place - start + margin, start)
        for at in _occurrences(around, HEAP):
            if self._has_no_end(start + at):
                self._fail_reading(f"the heap at byte {start + at} has no end")
        self.seen.append(around)
        self.place += n_read
        return n_read

    def require_short(self, name: bytes, count: int) -> None:
        """Check the lengths of the strings of an attribute whose message was just read."""
        for block in self.seen:
            for at in _occurrences(block, name):
                for begin in _values_of_attribute(block, at, len(name)):
                    self._require_short_strings(block[begin : begin + STRING * count])

    def _require_short_strings(self, places: bytes) -> None:
        n_whole = len(places) // STRING  # the block may end within the attribute
        for length, _, _ in struct.iter_unpack("<IQI", places[: n_whole * STRING]):
            if length > LONGEST:
                self._fail_reading(f"a string in an attribute is said to have {length} bytes")

    def _has_no_end(self, heap: int) -> bool:
        size = int.from_bytes(os.pread(self.descriptor, 8, heap + 8), "little")
        if size > self.size - heap:
            return False  # HDF5 looks for that
        image = os.pread(self.descriptor, size, heap)
        place = HEADER
        while place + HEADER <= len(image):
            index, length = struct.unpack_from("<H6xQ", image, place)
            padded = (length + 7) // 8 * 8
            step = (HEADER + padded) % WRAP
            if index == 0:  # the free object, whose length includes the header
                step = length
            if not 0 < step < WRAP - place:
                return True
            if index and self._is_list_of_sources(heap, index):
                begin = place + HEADER
                self._require_checksum(image[begin : begin + length], heap)
            place += step
        return False

    def _is_list_of_sources(self, heap: int, index: int) -> bool:
        """Whether a virtual dataset whose header was just read says that its sources are there."""
        place = struct.pack("<QI", heap - self.base, index)
        for version in (4, 5):
            message = bytes([version, 3]) + place  # 3: a virtual layout
            if any(message in block for block in self.seen):
                return True
        return False

    def _require_checksum(self, block: bytes, heap: int) -> None:
        checksum = int.from_bytes(block[-4:], "little")
        if len(block) < 4 or lookup3(block[:-4]) != checksum:
            self._fail_reading(
                f"the list of sources in the heap at byte {heap} has a wrong checksum"
            )

    def _fail_reading(self, damage: str) -> None:
        self.damage = damage
        raise OSError(damage)


def _values_of_attribute(
    block: bytes,
    at: int,
    n_name: int,
) -> Iterator[int]:
    """Yield where the values of an attribute begin whose name is at a place of a block, for each
    version of a message with strings of any length that it may be.
    """
    for version, header, unit in ATTRIBUTE_MESSAGES:
        if at < header or block[at - header] != version:
            continue
        lengths = struct.unpack_from("<HHH", block, at - header + 2)  # of name, type and space
        padded = [-(-length // unit) * unit for length in lengths]
        type_class = block[at + padded[0]] & 15
        if lengths[0] == n_name and type_class == VARIABLE_LENGTH:
            yield at + sum(padded)


def _occurrences(block: bytes, part: bytes) -> Iterator[int]:
    at = block.find(part)
    while at >= 0:
        yield at
        at = block.find(part, at + 1)


MASK = 0xFFFFFFFF


def lookup3(data: bytes) -> int:
    """Return the checksum of HDF5's metadata. Source: Bob Jenkins, lookup3.c, hashlittle, 2006."""
    start = (0xDEADBEEF + len(data)) & MASK
    if not data:
        return start
    state = (start, start, start)
    padded = data.ljust(-(-len(data) // 12) * 12, b"\0")
    words: list[int] = np.frombuffer(padded, "<u4").tolist()
    for i in range(0, len(words) - 3, 3):
        state = _add(state, words[i : i + 3])
        for k in (4, 6, 8, 16, 19, 4):
            state = _mix(*state, k)
    state = _add(state, words[-3:])
    for k in (14, 11, 25, 16, 4, 14, 24):
        state = _mix_last(*state, k)
    return state[1]


State = tuple[int, int, int]


def _add(state: State, words: Sequence[int]) -> State:
    a, b, c = ((old + word) & MASK for old, word in zip(state, words, strict=True))
    return a, b, c


# The three numbers change places after each step, so that all steps have one formula.
def _mix(
    a: int,
    b: int,
    c: int,
    k: int,
) -> State:
    mixed = ((a - c) & MASK) ^ _rotated(c, k)
    return b, (c + b) & MASK, mixed


def _mix_last(
    a: int,
    b: int,
    c: int,
    k: int,
) -> State:
    mixed = ((c ^ b) - _rotated(b, k)) & MASK
    return b, mixed, a


def _rotated(x: int, k: int) -> int:
    return (x << k | x >> (32 - k)) & MASK
