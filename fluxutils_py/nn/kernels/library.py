"""Load the library of native kernels if this machine can run it, and switch it on and off.

It is built from ``csrc/`` when the package is installed and there is a C++ compiler, and loaded
when a recurrent layer is first used. Without it, everything works with torch's layers, only slower,
and a warning says so: pip shows no output of a build that succeeds, as one without kernels does.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fluxutils_py.errors import warn

VERSION = 6  # of the interface that csrc/kernels.h declares
PATH = Path(__file__).parents[1] / "_kernels.so"  # beside this folder
SWITCH = "FLUXUTILS_KERNELS"
ISAS = {"avx2": 1, "avx512": 2, "neon": 3}
AVX512_BF16 = 4  # beside avx512: it multiplies bfloat16
OFF = ("0", "off", "false", "no")
ON = ("", "1", "on", "true", "yes")
# How many processes a launcher has started (Open MPI; MPICH, Intel MPI, srun; MVAPICH; srun
# --mpi=pmix; torchrun): each has the cores that it is given already.
N_RANKS = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "LOCAL_WORLD_SIZE",
)


class Library:
    """The loaded library and the instruction set to use."""

    def __init__(self, path: Path, wanted: str = "") -> None:
        lib = ctypes.CDLL(str(path))  # lets go of Python's lock during a call
        int32 = ctypes.c_int32
        int64 = ctypes.c_int64
        address = ctypes.c_void_p
        call = ctypes.c_char_p  # the bytes of a structure
        version = _function(lib, "fluxutils_version")()
        if version != VERSION:
            raise OSError(
                f"{path.name} is of version {version}, expected {VERSION}: install the package "
                "again"
            )
        isa = _function(lib, "fluxutils_isa", int32)
        self.isa: int = isa(ISAS.get(wanted, 0))
        if self.isa < 0:
            raise OSError(f"this processor lacks {wanted or 'AVX2'}")
        # whether calls of type BFLOAT16 are computed
        self.multiplies_bfloat16: bool = (
            self.isa == ISAS["avx512"] and isa(AVX512_BF16) == AVX512_BF16
        )
        self.forward = _function(lib, "fluxutils_forward", call)
        self.backward = _function(lib, "fluxutils_backward", call)
        self.linear_forward = _function(lib, "fluxutils_linear_forward", call)
        self.linear_backward = _function(lib, "fluxutils_linear_backward", call)
        self.causal_kernels = _function(lib, "fluxutils_causal_kernels", call)
        self.slopes = _function(lib, "fluxutils_slopes", call)
        # a step takes a structure that stays where it is, by its address
        self.step = _function(lib, "fluxutils_step", address)
        # keeps Python's lock, which takes longer to let go of than a short call
        self.short_step = _function(ctypes.PyDLL(str(path)), "fluxutils_step", address)
        self.kept_per_output = functools.cache(_function(lib, "fluxutils_kept_per_output", int32))
        self.copy_window = _function(
            lib, "fluxutils_copy_window", address, int64, address, *[int64] * 8
        )
        openmp = _openmp_of_torch()
        if openmp is not None:
            lib.fluxutils_use_openmp.argtypes = [address]
            lib.fluxutils_use_openmp.restype = None
            lib.fluxutils_use_openmp(openmp)

    @property
    def isa_name(self) -> str:
        return next(name for name, number in ISAS.items() if number == self.isa)


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    """Return a function of the library that takes these types and returns an integer."""
    function = library[name]
    function.argtypes = list(arguments)
    function.restype = ctypes.c_int32
    return function


def _openmp_of_torch() -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP library that torch uses; None if torch
    uses another one.
    """
    home = Path(torch.__file__).parent
    for path in (
        *home.glob("lib/libgomp*.so*"),
        *home.with_name("torch.libs").glob("libgomp*.so*"),
    ):
        try:
            loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # not loaded by this process
            continue
        return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value
    return None


class _Use:
    """The kernels in use in this process; there is one instance."""

    def __init__(self) -> None:
        self.loaded = False
        self.library: Library | None = None
        self.reason = ""  # why there is no library
        self.enabled = True  # by native_kernels()
        self.alone = False  # whether other processes have the other cores

    def load(self) -> None:
        """Load the library if it is to be used, once per process."""
        self.loaded = True
        self.library = None
        self.reason = ""
        self.alone = multiprocessing.parent_process() is not None or any(
            os.environ.get(name, "1") not in ("", "1") for name in N_RANKS
        )
        wanted = os.environ.get(SWITCH, "").strip().lower()
        if wanted in OFF:
            self.reason = f"{SWITCH}={wanted}"
            return  # as asked: nothing to warn of
        try:
            if wanted not in ISAS and wanted not in ON:
                raise OSError(f"{SWITCH} is {wanted!r}, expected 0, 1 or one of {', '.join(ISAS)}")
            if not PATH.exists():
                raise OSError(
                    f"{PATH.name} is missing: it is built by pip install on x86-64 and 64-bit ARM "
                    "where there is a C++ compiler; pip install -v shows why a build left it out"
                )
            self.library = Library(PATH, wanted if wanted in ISAS else "")
        except (OSError, AttributeError) as error:
            self.reason = str(error)
            warn(
                f"no native kernels, torch's recurrent layers are used, which are slower: {error} "
                f"({SWITCH}=0 says that this is meant)",
                RuntimeWarning,
            )


_use = _Use()


def _load_again() -> None:
    _use.loaded = False


if hasattr(os, "register_at_fork"):
    # the child may be one of several worker processes, which share the cores
    os.register_at_fork(after_in_child=_load_again)


def library_in_use() -> Library | None:
    """Return the library, or None if torch's layers are to be used."""
    if not _use.loaded:
        _use.load()
    return _use.library if _use.enabled else None


def supports(isa: str) -> bool:
    """Whether the library has kernels for an instruction set, and this processor has it."""
    try:
        return Library(PATH, isa).isa_name == isa
    except (OSError, AttributeError):  # AttributeError: the library is of another version
        return False


def n_threads() -> int:
    """Return the threads for a call: as many as torch has, or one if other processes use the other
    cores.
    """
    return 1 if _use.alone else torch.get_num_threads()


def kernels_in_use() -> str:
    """Describe the instruction set of the native kernels, or why torch's layers are used."""
    lib = library_in_use()
    if lib is not None:
        return f"native kernels, {lib.isa_name}"
    return f"torch's layers: {_use.reason or 'switched off by native_kernels(False)'}"


@contextmanager
def native_kernels(enabled: bool = True) -> Iterator[None]:
    """Let recurrent layers use the native kernels, or only torch's layers, inside a ``with`` block.

    It holds for the whole process, like ``torch.backends.mkldnn.flags``. The environment variable
    ``FLUXUTILS_KERNELS=0`` switches the kernels off from the start; this function then cannot bring
    them back.

    Parameters
    ----------
    enabled : bool

    Examples
    --------
    >>> from fluxutils_py.nn import LSTM
    >>> layer, x = LSTM(3, 5), torch.randn(7, 2, 3)
    >>> y = layer(x)
    >>> layer.reset()
    >>> with native_kernels(False):
    ...     torch.allclose(layer(x), y, atol=1e-6)
    True
    """
    before = _use.enabled
    _use.enabled = bool(enabled)
    try:
        yield
    finally:
        _use.enabled = before
