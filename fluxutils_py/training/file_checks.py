"""Check a file before torch reads it, and then what torch has made of it.

torch itself trusts sizes in the file: a few bytes may ask for any amount of memory or time.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import LoadError
from fluxutils_py.torch_private import sparse_parts

# Old versions of torch wrote so many pickles one after the other; this package never did.
PICKLES = 5
DEPTH = 100  # of containers in each other
# The names that plain data and tensors need. torch allows more, but some of those allocate as much
# memory as a number in the file says.
NAMES = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode"),
    *("builtins.complex", "__builtin__.complex", "builtins.set", "__builtin__.set"),
    *(
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_sparse_tensor",
    ),
    *("torch.serialization._get_layout", "torch.Size", "torch.device"),
}
STORAGE = re.compile(r"torch\.(cuda\.)?[A-Z][A-Za-z0-9]*Storage")
DTYPE = re.compile(r"torch\.(u?int|float|complex|bfloat)\d+|torch\.bool")


def check_archive(path: Path, kind: str) -> list[int]:
    """Check a file without making anything of it, and return the sizes of its tensors, in bytes.

    Raises
    ------
    LoadError
        If it is none that :func:`write_file` writes, if a checksum is wrong or a part compressed,
        or if it asks for more than plain data.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            # this raises first if a pickle asks to run code, which is the more useful message
            for _ in range(PICKLES):
                _check_names(file, path, kind)
        raise LoadError(f"{path} is damaged or no {kind} file")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _check_members(members, path, kind)
        # after the sizes, since it reads every part
        if archive.testzip() is not None:  # torch does not check; numbers may be wrong
            raise LoadError(f"{path} is damaged: a checksum in it is wrong")
        for member in members:
            if member.filename.endswith(".pkl"):
                _check_names(io.BytesIO(archive.read(member)), path, kind)
        return sorted(m.file_size for m in members if "/data/" in m.filename and m.file_size)


def _check_members(members: list[zipfile.ZipInfo], path: Path, kind: str) -> None:
    """Check that the parts of an archive are as large as they claim, and have separate names."""
    for member in members:
        is_stored = member.compress_type == zipfile.ZIP_STORED
        if not is_stored or member.file_size != member.compress_size:
            raise LoadError(
                f"{path} is no {kind} file: its part {member.filename} is compressed, which may "
                "hold any amount of data; write the file again"
            )
    # several entries may point at the same bytes
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise LoadError(f"{path} is damaged: its parts are larger than the file")
    if len({member.filename for member in members}) < len(members):
        raise LoadError(f"{path} is damaged: two of its parts have one name")


def _check_names(pickled: BinaryIO, path: Path, kind: str) -> None:
    """Check the names of functions and classes in a pickle."""
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            # other ways to name something that is then called; torch uses none of them
            if opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                raise LoadError(f"{path} is no {kind} file")
            if opcode.name != "GLOBAL":
                continue
            name = str(argument).replace(" ", ".")
            if name not in NAMES and not STORAGE.fullmatch(name) and not DTYPE.fullmatch(name):
                raise LoadError(
                    f"{path} is no {kind} file: it asks to run code ({name}), which is refused"
                )
    except LoadError:
        raise
    except Exception:  # not a pickle, or damaged
        raise LoadError(f"{path} is damaged or no {kind} file") from None


def check_content(content: object, sizes: list[int], path: Path, device: str) -> None:
    """Check that the content of a file is no larger than the file, and can be walked through.

    Parameters
    ----------
    content : object
        What torch has read.
    sizes : list of int
        Sizes of the tensors in the file, in bytes, sorted.
    path : Path
    device : str
        Where all tensors should be; on ``"meta"`` they have no memory.

    Raises
    ------
    LoadError
        If tensors claim other memory than the file has, or repeat it without end, or if containers
        are nested too deep or contain themselves.
    """
    storages: dict[int, int] = {}
    seen: dict[int, int] = {}  # depth at which an object was met
    waiting: list[tuple[Any, int]] = [(content, 0)]
    while waiting:  # not recursive: a file may nest deeper than Python's stack
        value, depth = waiting.pop()
        if depth > DEPTH:
            raise LoadError(
                f"{path} is damaged: its lists and dicts are nested more than {DEPTH} deep"
            )
        if isinstance(value, Tensor):
            _check_tensor(value, storages, path, device)
            continue
        # again only if met deeper than before: a container within itself ends at DEPTH, and one
        # that is shared many times takes little time
        if not isinstance(value, Mapping | list | tuple | set) or seen.get(id(value), -1) >= depth:
            continue
        seen[id(value)] = depth
        parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        waiting += [
            (part, depth + 1) for part in parts if not isinstance(part, int | float | str | bytes)
        ]
    if device != "meta" and sorted(storages.values()) != sizes:
        raise LoadError(
            f"{path} is damaged: its tensors are of other sizes than what it holds for them"
        )


def _check_tensor(value: Tensor, storages: dict[int, int], path: Path, device: str) -> None:
    """Check a tensor, and add the size of its memory to ``storages``, by address."""
    parts = [value]
    if value.layout == torch.sparse_coo:
        parts = sparse_parts(value)
    for part in parts:
        is_saved_class = type(part) in (Tensor, torch.nn.Parameter)
        is_plain = is_saved_class and part.layout == torch.strided and not part.is_quantized
        if not is_plain or part.device.type != device:
            raise LoadError(f"{path} is damaged: it holds a tensor of a kind that is never saved")
        storage = part.untyped_storage()
        if part.numel() * part.element_size() > storage.nbytes():
            raise LoadError(
                f"{path} is damaged: a tensor of shape {tuple(part.shape)} has {storage.nbytes()} "
                "bytes in it"
            )
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()


def check_text_type(dtype: np.dtype, texts: np.ndarray) -> None:
    """Raise ValueError for a type of text that needs far more memory than texts from a file."""
    longest = max((len(text) for text in texts.flat), default=0)
    if dtype.itemsize // np.dtype(f"{dtype.kind}1").itemsize > max(1000, 100 * longest):
        raise ValueError(f"the type {dtype} is far longer than its longest text, of {longest}")
