"""Check a file before torch reads it, and then the sizes of what torch has made of it.

torch itself trusts sizes in the file.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import LoadError
from fluxutils_py.torch_private import sparse_parts
from fluxutils_py.tree import flatten_with_paths

# The names that plain data and tensors need. torch allows more, but some of those allocate as much
# memory as a number in the file says.
NAMES = {
    "collections.OrderedDict",
    "collections.Counter",
    "_codecs.encode",
    "builtins.complex",
    "__builtin__.complex",
    "builtins.set",
    "__builtin__.set",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_sparse_tensor",
    "torch.serialization._get_layout",
    "torch.Size",
    "torch.device",
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
        raise LoadError(f"{path} is damaged or no {kind} file")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _check_members(members, path, kind)
        if archive.testzip() is not None:  # torch does not check; numbers may be wrong
            raise LoadError(f"{path} is damaged: a checksum in it is wrong")
        for member in members:
            if member.filename.endswith(".pkl"):
                _check_names(archive.read(member), path, kind)
        return sorted(m.file_size for m in members if "/data/" in m.filename and m.file_size)


def _check_members(members: list[zipfile.ZipInfo], path: Path, kind: str) -> None:
    """Compressed parts, or several at the same place, may hold any amount of data."""
    is_stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    is_larger = sum(member.file_size for member in members) > path.stat().st_size
    names = {member.filename for member in members}
    if not is_stored or is_larger or len(names) < len(members):
        raise LoadError(
            f"{path} is no {kind} file: it has parts that are compressed, overlap or have one "
            "name; write the file again"
        )


def _check_names(pickled: bytes, path: Path, kind: str) -> None:
    """Check the names of functions and classes in a pickle."""
    for opcode, argument, _ in pickletools.genops(io.BytesIO(pickled)):
        name = str(argument).replace(" ", ".")
        is_plain = name in NAMES or STORAGE.fullmatch(name) or DTYPE.fullmatch(name)
        # the others name what is then called too; torch uses none of them
        is_other = opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
        if is_other or (opcode.name == "GLOBAL" and not is_plain):
            raise LoadError(
                f"{path} is no {kind} file: it asks to run code ({name}), which is refused"
            )


def check_content(content: object, sizes: list[int], path: Path) -> None:
    """Raise LoadError unless the tensors that torch has read are those that the file holds, of
    these sizes in bytes, sorted: torch would read beyond the end of a smaller one.
    """
    storages: dict[int, int] = {}
    for _, leaf in flatten_with_paths(content):
        if isinstance(leaf, Tensor):
            parts = sparse_parts(leaf) if leaf.layout == torch.sparse_coo else [leaf]
            stored = [part.untyped_storage() for part in parts]
            storages |= {s.data_ptr(): s.nbytes() for s in stored if s.nbytes()}
    if sorted(storages.values()) != sizes:
        raise LoadError(
            f"{path} is damaged: its tensors are of other sizes than what it holds for them"
        )


def check_text_type(dtype: np.dtype, texts: np.ndarray) -> None:
    """Raise ValueError for a type of text that needs far more memory than texts from a file."""
    longest = max((len(text) for text in texts.flat), default=0)
    if dtype.itemsize // np.dtype(f"{dtype.kind}1").itemsize > max(1000, 100 * longest):
        raise ValueError(f"the type {dtype} is far longer than its longest text, of {longest}")
