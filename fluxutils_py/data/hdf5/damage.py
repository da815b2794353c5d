"""Check strings and lists in an HDF5 file before HDF5 reads them; damaged ones make it run forever."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import os
import struct
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

HEAP = b"GCOL\x01"  # how a global heap begins, in which HDF5 keeps strings of any length
WRAP = 1 << 64
LONGEST = 1 << 20  # bytes of a string in an attribute


def find_heap_damage(
    file: h5py.File, name: str, attributes: Sequence[str], values: bool = False
) -> str | None:
    """What is wrong with the heap that a dataset and some of its attributes, or its values too,
    need; None if nothing.

    HDF5 itself detects other damage.
    """
    if file.driver != "sec2" or file.id.get_create_plist().get_sizes() != (8, 8):
        return None
    guard = GuardedFile(file.id.get_vfd_handle(), file.userblock_size)
    try:
        with h5py.File(guard, "r") as guarded:
            dataset = guarded[name]
            for attribute in attributes:
                if h5py.h5a.exists(dataset.id, attribute.encode()):
                    count = dataset.attrs.get_id(attribute).get_space().get_simple_extent_npoints()
                    guard.require_short(attribute.encode() + b"\0", count)
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
    """HDF5 may keep hold of a guarded file that it failed to read, and would let go of it when
    Python is gone.

    Garbage goes first: HDF5 may crash when it closes the list of properties of a virtual dataset
    that is still held.
    """
    with contextlib.suppress(AttributeError, OSError):
        atexit.register(ctypes.CDLL(h5py.h5.__file__).H5close)  # which h5py does not give
        atexit.register(gc.collect)  # the last that is registered is the first to run


def read_attribute(dataset: h5py.Dataset, name: str) -> Any:
    """An attribute that holds text or numbers; None for any other, and where there is none of that
    name.

    HDF5 dies of some damaged types, which are then no strings any more but lists.
    """
    if not h5py.h5a.exists(dataset.id, name.encode()):
        return None
    kind = dataset.attrs.get_id(name).get_type()
    plain = isinstance(kind, h5py.h5t.TypeStringID | h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID)
    return dataset.attrs[name] if plain else None


class GuardedFile(io.RawIOBase):
    """A file for HDF5 to read from that fails where it would be read without end.

    HDF5 2.0 steps through a heap by the sizes of its objects, and hangs at a free object of size 0:
    a zero in the wrong place stops the process for good, and nothing can interrupt it. For a string
    it takes as much memory as the length beside its place in the heap says, up to 4 GB, before it
    compares the length of the string itself. And it takes the list of a virtual dataset's sources
    apart, and dies of it, before it looks at the checksum.
    """

    def __init__(self, descriptor: int, base: int) -> None:
        self.descriptor, self.size, self.place = descriptor, os.fstat(descriptor).st_size, 0
        self.base = base  # from which addresses in the file count
        self.seen: list[bytes] = []
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
        margin = (
            len(HEAP) - 1
        )  # HDF5 may have the first bytes already, or ask for the last ones later
        start = max(0, self.place - margin)
        around = os.pread(self.descriptor, n_read + self.place - start + margin, start)
        at = around.find(HEAP)
        while at >= 0:
            if self._has_no_end(start + at):
                self._fail_reading(f"the heap at byte {start + at} has no end")
            at = around.find(HEAP, at + 1)
        self.seen.append(around)
        self.place += n_read
        return n_read

    def require_short(self, name: bytes, count: int) -> None:
        """Check the lengths of the strings of an attribute whose message in the file was just read."""
        for block in self.seen:
            at = block.find(name)
            while at >= 0:
                for version, header, unit in ((1, 8, 8), (2, 8, 1), (3, 9, 1)):
                    if at >= header and block[at - header] == version:
                        sizes = struct.unpack_from("<HHH", block, at - header + 2)
                        data = at + sum(-(-size // unit) * unit for size in sizes)
                        is_strings = (
                            block[at + -(-sizes[0] // unit) * unit] & 15 == 9
                        )  # a type of any length
                        if sizes[0] == len(name) and is_strings:
                            self._require_short(block[data : data + 16 * count])
                at = block.find(name, at + 1)

    def _require_short(self, places: bytes) -> None:
        for length, _, _ in struct.iter_unpack("<IQI", places[: len(places) // 16 * 16]):
            if length > LONGEST:
                self._fail_reading(f"a string in an attribute is said to have {length} bytes")

    def _has_no_end(self, heap: int) -> bool:
        size = struct.unpack("<Q", os.pread(self.descriptor, 8, heap + 8).ljust(8, b"\0"))[0]
        if size > self.size - heap:
            return False  # HDF5 looks for that
        image, place = os.pread(self.descriptor, size, heap), 16
        while place + 16 <= len(image):
            index, length = struct.unpack_from("<H6xQ", image, place)
            step = length if index == 0 else (16 + (length + 7) // 8 * 8) % WRAP
            if not 0 < step < WRAP - place:
                return True
            if index and self._is_list_of_sources(heap, index):
                self._require_checksum(image[place + 16 : place + 16 + length], heap)
            place += step
        return False

    def _is_list_of_sources(self, heap: int, index: int) -> bool:
        """Whether a virtual dataset whose header was just read says that its sources are there."""
        place = struct.pack("<QI", heap - self.base, index)
        return any(
            bytes([version, 3]) + place in block for version in (4, 5) for block in self.seen
        )

    def _require_checksum(self, block: bytes, heap: int) -> None:
        if len(block) < 4 or lookup3(block[:-4]) != int.from_bytes(block[-4:], "little"):
            self._fail_reading(
                f"the list of sources in the heap at byte {heap} has a wrong checksum"
            )

    def _fail_reading(self, damage: str) -> None:
        self.damage = damage
        raise OSError(damage)


def lookup3(data: bytes) -> int:
    """The checksum of HDF5's metadata. Source: Bob Jenkins, lookup3.c, hashlittle, 2006."""
    mask = 0xFFFFFFFF
    a = b = c = (0xDEADBEEF + len(data)) & mask
    if not data:
        return c
    words = [
        int(word) for word in np.frombuffer(data.ljust(-(-len(data) // 12) * 12, b"\0"), "<u4")
    ]

    def rotated(x: int, k: int) -> int:
        return (x << k | x >> (32 - k)) & mask

    for i in range(0, len(words) - 3, 3):
        a, b, c = (a + words[i]) & mask, (b + words[i + 1]) & mask, (c + words[i + 2]) & mask
        for k in (4, 6, 8, 16, 19, 4):
            a, c = ((a - c) & mask) ^ rotated(c, k), (c + b) & mask
            a, b, c = b, c, a
    a, b, c = (a + words[-3]) & mask, (b + words[-2]) & mask, (c + words[-1]) & mask
    for k in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - rotated(b, k)) & mask
        a, b, c = b, c, a
    return b
