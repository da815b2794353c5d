"""Read and write files of plain data and tensors; reading them runs no code."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import LoadError
from fluxutils_py.files import atomic_write
from fluxutils_py.parallel.launcher import detect_launcher
from fluxutils_py.training.file_checks import check_archive, check_content, check_text_type
from fluxutils_py.tree import children

OF_RANK_0 = (
    "; rank 0 writes what is saved, and the others wait for it with "
    "get_communicator('auto').barrier(), called on all ranks, before they read"
)

PYTHON_SCALARS = (bool, int, float, str, type(None))
# What a config may give as an argument; NumPy's numbers are stored as Python's.
SETTING_TYPES = (*PYTHON_SCALARS, np.bool_, np.integer, np.floating)
PLAIN_TYPES = (*PYTHON_SCALARS, complex, bytes)

Made = TypeVar("Made")


def write_file(path: Any, content: dict[str, Any]) -> None:
    """Write plain data and tensors to a file, which is never half-written.

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
    """Read a file that :func:`write_file` wrote.

    Only plain data and tensors are accepted, so no code can run.

    Parameters
    ----------
    path : str or path-like
    kind : str or tuple of str
        Required value of the entry ``"kind"``, or the values that it may have.
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
    expected = " or ".join(kinds)
    if not path.exists():
        hint = "" if detect_launcher() is None else OF_RANK_0
        raise FileNotFoundError(f"{path}: no such file{hint}")
    content = _load_checked(path, expected, device)
    if not isinstance(content, dict) or content.get("kind") not in kinds:
        found = content.get("kind") if isinstance(content, dict) else None
        raise LoadError(
            f"{path} is no {expected} file, its kind is {found!r}; fluxutils_py.load reads "
            "estimators, pipelines and forecasters"
        )
    if format is not None and content.get("format") != format:
        raise LoadError(
            f"{path} has format {content.get('format')}, this version reads {format}: update "
            "fluxutils_py, or write the file again"
        )
    return content


def _load_checked(path: Path, kind: str, device: Any) -> object:
    """Return the content of a file of plain data and tensors, no larger than the file."""
    try:
        sizes = check_archive(path, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it did not write
            content: object = torch.load(path, map_location=device, weights_only=True)
        if torch.device(device).type != "meta":
            check_content(content, sizes, path)
        return content
    except (LoadError, PermissionError, FileNotFoundError):  # the last: it was removed since
        raise
    except Exception as error:  # torch may raise any error for a damaged file
        reason = (str(error).splitlines() or [""])[0]
        raise LoadError(
            f"{path} is damaged or no {kind} file ({type(error).__name__}: {reason})"
        ) from None


def check_path(path: object) -> Path:
    """Return the argument ``path`` of a function as a ``Path``.

    Raises
    ------
    TypeError
        If it is not a path, or is empty.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise TypeError(f"path must be the name of a file, got {path!r}")
    return Path(path)


# -- contents of files -----------------------------------------------------------------------


def to_plain_data(value: Any, where: str) -> Any:
    """Convert ``value`` to plain data.

    NumPy scalars become Python numbers; tensors move to the CPU, without unused storage.

    Raises
    ------
    TypeError
        For other types; the message names the place.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Tensor):
        return _compact_tensor(value)
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


def _compact_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU; torch would save all the memory of which it is a view."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:  # an accumulated sparse gradient
        return tensor
    n_bytes = tensor.numel() * tensor.element_size()
    return tensor.clone() if tensor.untyped_storage().nbytes() > n_bytes else tensor


def plain_or_none(value: Any) -> Any:
    """Convert ``value`` to Python's types; tensors stay unchanged, anything else becomes None.

    Where :func:`to_plain_data` raises, this leaves out: an estimator can be saved whatever hooks
    have put into its history.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (*SETTING_TYPES, bytes, Tensor)):
        return value
    if isinstance(value, Mapping):
        return {k: plain_or_none(v) for k, v in value.items()}
    if type(value) is tuple:
        return tuple(plain_or_none(v) for v in value)
    if isinstance(value, list | tuple):
        return [plain_or_none(v) for v in value]
    return None


def dataclass_to_plain(value: Any) -> Any:
    """Convert a dataclass of arrays (of numbers, texts or times), plain values and other such
    dataclasses to plain data.

    Raises
    ------
    TypeError
        If an array holds other objects.
    """
    if dataclasses.is_dataclass(value):
        fields = (children(value) or {}).items()
        return {name: dataclass_to_plain(field) for name, field in fields}
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "Mm":  # as numbers: Python's own times know microseconds at most
            return {"dtype": value.dtype.str, "values": value.astype(np.int64).tolist()}
        kinds = (*SETTING_TYPES, bytes)
        for odd in value.ravel().tolist():
            if not isinstance(odd, kinds):
                raise TypeError(
                    f"{odd!r} of the type {type(odd).__name__} cannot be saved: a file holds "
                    "labels and names that are numbers or texts; fit with str(label) in its place"
                )
        dtype = "O" if value.dtype.kind in "OT" else value.dtype.str
        return {"dtype": dtype, "values": value.tolist()}
    return value.str if isinstance(value, np.dtype) else value


def dataclass_from_plain(
    cls: type[Made], packed: Mapping[str, Any], nested: type | None = None
) -> Made:
    """Invert :func:`dataclass_to_plain`; ``nested`` is the class of dataclasses in ``cls``, if any.

    Raises
    ------
    LoadError
        If the fields are others.
    """
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a dataclass
    if set(packed) != names:
        raise LoadError(
            f"{cls.__name__} has {', '.join(sorted(names))}, and the file gives {sorted(packed)}"
        )
    values = dict(packed)
    for name, value in packed.items():
        if isinstance(value, dict) and "values" in value:
            values[name] = array_from_plain(value)
        elif isinstance(value, dict):
            if nested is None:
                raise LoadError(f"{name} of {cls.__name__} cannot be a dict")
            values[name] = dataclass_from_plain(nested, value)
    return cls(**values)


def array_from_plain(packed: Mapping[str, Any]) -> np.ndarray:
    """Invert :func:`dataclass_to_plain` of an array; raise LoadError for a type that it never
    writes.
    """
    values = packed["values"]
    dtype = np.dtype(packed["dtype"])
    if dtype.kind not in "OfiubUSMm" or dtype.shape:
        raise LoadError(f"an array cannot have the type {packed['dtype']!r}")
    if dtype.kind in "US":  # the type, not the texts, says how much memory each one gets
        check_text_type(dtype, np.array(values, object))
    return np.array(values, dtype)
