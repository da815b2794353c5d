"""Read and write files of plain data and tensors; reading them runs no code."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import LoadError
from fluxutils_py.files import atomic_write
from fluxutils_py.parallel.launcher import detect_launcher
from fluxutils_py.training.file_checks import check_archive, check_content

OF_RANK_0 = (
    "; rank 0 writes what is saved, and the others wait for it with "
    "get_communicator('auto').barrier(), called on all ranks, before they read"
)

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))


def write_file(path: Any, content: dict[str, Any]) -> None:
    """Write plain data and tensors to a file: to a temporary file first, so that the file is never
    half-written.

    Parameters
    ----------
    path : str or path-like
        Its folder must exist. An existing file is replaced.
    content : dict
        Numbers, strings, None, lists, tuples, dicts and tensors.
    """
    with atomic_write(check_path(path)) as f:
        torch.save(content, f)


def read_file(
    path: Any, kind: str | tuple[str, ...], device: Any = "cpu", *, format: int | None = None
) -> dict[str, Any]:
    """Read a file that :func:`write_file` wrote. It accepts only plain data and tensors, so no code
    can run.

    Parameters
    ----------
    path : str or path-like
    kind : str or tuple of str
        Required value of the entry ``"kind"``, or those that it may have.
    device : str or torch.device
        Device of the tensors.
    format : int, optional
        Required value of the entry ``"format"``.

    Raises
    ------
    FileNotFoundError
    LoadError
        If the file is of another kind or format, is damaged, or holds more than plain data.
    """
    path = check_path(path)
    kinds = (kind,) if isinstance(kind, str) else kind
    kind = " or ".join(kinds)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file{'' if detect_launcher() is None else OF_RANK_0}"
        )
    try:
        sizes = check_archive(path, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it did not write
            content = torch.load(path, map_location=device, weights_only=True)
        check_content(content, sizes, path, torch.device(device).type)
    except (LoadError, PermissionError, FileNotFoundError):  # the last: it was removed since
        raise
    except Exception as error:  # torch may raise any error for a damaged file
        reason = (str(error).splitlines() or [""])[0]
        raise LoadError(
            f"{path} is damaged or no {kind} file ({type(error).__name__}: {reason})"
        ) from None
    if not isinstance(content, dict) or content.get("kind") not in kinds:
        raise LoadError(f"{path} is no {kind} file")
    found = content.get("format")
    if format is not None and found != format:
        way_out = (
            "update fluxutils_py"
            if isinstance(found, int) and found > format
            else "write the file again"
        )
        raise LoadError(f"{path} has format {found}, this version reads {format}: {way_out}")
    return content


def check_path(path: Any) -> Path:
    """Return the argument ``path`` of a function as a ``Path``.

    Raises
    ------
    TypeError, ValueError
        If it is not a path, or is empty.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the name of a file, got {path!r}")
    if not os.fspath(path):
        raise ValueError(f"path must be the name of a file, got {path!r}")
    return Path(path)


def to_plain_data(value: Any, where: str) -> Any:
    """Convert ``value`` to plain data: NumPy scalars to Python numbers, tensors to the CPU without
    unused storage.

    Raises
    ------
    TypeError
        For other types; the message names the place.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.layout != torch.strided:  # an accumulated sparse gradient
            return value
        return (
            value.clone()
            if value.untyped_storage().nbytes() > value.numel() * value.element_size()
            else value
        )
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Counter):  # MultiStepLR has one
        return value
    if isinstance(value, Mapping):
        return {
            to_plain_data(k, f"a key of {where}"): to_plain_data(v, f"{where}[{k!r}]")
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        parts = [to_plain_data(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, set | frozenset):
        return {to_plain_data(v, where) for v in value}
    raise TypeError(
        f"{where} is a {type(value).__name__}: a checkpoint holds numbers, strings, tensors, and "
        "lists and mappings of them"
    )
