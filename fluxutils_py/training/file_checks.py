"""Check a file that torch shall read before anything in it is made, and what was made of it.

torch itself takes sizes from the file: a few bytes may ask for any amount of memory or time.
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

PICKLES = (
    5  # one after the other, in files of old versions of torch, which this package never wrote
)
DEPTH = 100  # of containers in each other
# what plain data and tensors ask for; the others that torch allows take memory by a number in the
# file
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
            for _ in range(PICKLES):  # says what it asks for, or that it is damaged
                _check_names(file, path, kind)
        raise LoadError(f"{path} is damaged or no {kind} file")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        for member in members:
            if (
                member.compress_type != zipfile.ZIP_STORED
                or member.file_size != member.compress_size
            ):
                raise LoadError(
                    f"{path} is no {kind} file: its part {member.filename} is compressed, which "
                    "may hold any amount of data; write the file again"
                )
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise LoadError(f"{path} is damaged: its parts are larger than the file")
        if len({member.filename for member in members}) < len(members):
            raise LoadError(f"{path} is damaged: two of its parts have one name")
        if archive.testzip() is not None:  # torch does not check; numbers may be wrong
            raise LoadError(f"{path} is damaged: a checksum in it is wrong")
        for member in members:
            if member.filename.endswith(".pkl"):
                _check_names(io.BytesIO(archive.read(member)), path, kind)
        return sorted(m.file_size for m in members if "/data/" in m.filename and m.file_size)


def _check_names(pickled: BinaryIO, path: Path, kind: str) -> None:
    """Check the names of functions and classes in a pickle."""
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in (
                "STACK_GLOBAL",
                "INST",
                "EXT1",
                "EXT2",
                "EXT4",
            ):  # torch writes none of these
                raise LoadError(f"{path} is no {kind} file")
            name = str(argument).replace(" ", ".") if opcode.name == "GLOBAL" else None
            if name is not None and not (
                name in NAMES or STORAGE.fullmatch(name) or DTYPE.fullmatch(name)
            ):
                raise LoadError(
                    f"{path} is no {kind} file: it asks to run code ({name}), which is refused"
                )
    except LoadError:
        raise
    except Exception:  # not a pickle, or damaged
        raise LoadError(f"{path} is damaged or no {kind} file") from None


def check_content(content: Any, sizes: list[int], path: Path, device: str) -> None:
    """Check that what was made of a file is no larger than the file, and that every part can be
    visited.

    Parameters
    ----------
    content : Any
    sizes : list of int
        Of the tensors in the file, in bytes, sorted.
    path : Path
    device : str
        Where all tensors should be; on ``"meta"`` they have no memory.

    Raises
    ------
    LoadError
        If tensors claim other memory than the file has, or share or repeat it without end; if
        containers lie too deep in each other or within themselves.
    """
    storages: dict[int, int] = {}
    seen: dict[int, int] = {}  # depth at which an object was met
    waiting = [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEPTH:
            raise LoadError(
                f"{path} is damaged: its lists and dicts lie more than {DEPTH} deep in each other"
            )
        if isinstance(value, Tensor):
            _check_tensor(value, storages, path, device)
            continue
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
    parts = [value._indices(), value._values()] if value.layout == torch.sparse_coo else [value]
    for part in parts:
        known = type(part) in (Tensor, torch.nn.Parameter) and part.layout == torch.strided
        if not known or part.device.type != device or part.is_quantized:
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
    """Raise ValueError for a type of text that takes far more memory than texts from a file need."""
    longest = max((len(text) for text in texts.flat), default=0)
    if dtype.itemsize // np.dtype(f"{dtype.kind}1").itemsize > max(1000, 100 * longest):
        raise ValueError(f"the type {dtype} is far longer than its longest text, of {longest}")
