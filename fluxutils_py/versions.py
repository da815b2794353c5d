"""Print the versions of the package and its libraries."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

import torch

from fluxutils_py.nn.kernels.library import kernels_in_use, n_threads

PACKAGES = ("fluxutils_py", "torch", "scikit-learn", "numpy", "h5py", "mpi4py")


def show_versions() -> None:
    """Print the versions that matter, and whether recurrent layers use the native kernels here, and
    if not, why.

    Examples
    --------
    >>> show_versions()  # doctest: +ELLIPSIS
    fluxutils_py      ...
    recurrent layers  ...
    """
    lines = {name: installed_version(name) for name in PACKAGES}
    lines["Python"] = platform.python_version()
    lines["platform"] = f"{platform.system()} {platform.machine()}"
    lines["threads"] = f"{torch.get_num_threads()} of torch, {n_threads()} of the native kernels"
    lines["recurrent layers"] = kernels_in_use()
    for name, value in lines.items():
        print(f"{name:<18}{value}")


@functools.cache  # reading the metadata takes milliseconds, and each checkpoint names versions
def installed_version(package: str) -> str:
    """The version of a package, or "not installed"; looked up once."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
