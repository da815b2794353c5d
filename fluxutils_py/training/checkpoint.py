"""Files that are either whole or not there, and that run no code when they are read."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.files import written_aside


def write_file(path: Any, content: dict[str, Any]) -> None:
    """Write plain data and tensors to a file: aside, then moved into place, so that it is never half-written.

    Parameters
    ----------
    path : str or path-like
        Its folder must exist. An existing file is replaced.
    content : dict
        Of numbers, strings, None, lists, tuples, dicts and tensors.
    """
    with written_aside(path) as f:
        torch.save(content, f)


def read_file(path: Any, kind: str, device: Any = "cpu") -> dict[str, Any]:
    """Read what :func:`write_file` wrote. Only plain data and tensors are accepted: no code in the file can run.

    Parameters
    ----------
    path : str or path-like
    kind : str
        What the content must call itself under ``"kind"``.
    device : str or torch.device
        Where tensors go.

    Raises
    ------
    FileNotFoundError
    LoadError
        If it is another kind of file, damaged, or asks for more than plain data.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders about pickles that it did not write
            content = torch.load(path, map_location=device, weights_only=True)
        if zipfile.is_zipfile(path) and _has_wrong_sum(path):  # torch does not look: numbers may have changed
            raise LoadError(f"{path} is damaged: a checksum in it is wrong")
    except LoadError:
        raise
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL:? (\S+)", str(error))
        if asked is None:
            raise LoadError(f"{path} is damaged or no {kind} file") from None
        raise LoadError(f"{path} is no {kind} file: it asks to run code ({asked[1]}), which is refused") from None
    except PermissionError:
        raise
    except Exception as error:  # there is no telling what torch raises for a damaged file
        reason = (str(error).splitlines() or [""])[0]
        raise LoadError(f"{path} is damaged or no {kind} file ({type(error).__name__}: {reason})") from None
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise LoadError(f"{path} is no {kind} file")
    return content


def _has_wrong_sum(path: Path) -> bool:
    with zipfile.ZipFile(path) as file:
        return file.testzip() is not None
