"""Builds the native kernels of ``csrc/`` where there is a C++ compiler. Everything else is in
setup.cfg.

The library has a plain C interface and is loaded with ctypes: one build serves all versions of
Python. Each instruction set has an object file of its own, from the same source; which one is used
is decided at run time.

Where the kernels cannot be built, the package is installed without them, and warns when it first
misses them, because pip shows no output of a build that succeeds. Two environment variables are for
releases and for continuous integration: ``FLUXUTILS_REQUIRE_KERNELS=1`` fails the build instead,
and ``FLUXUTILS_BUILT_KERNELS=FILE`` takes a library that was built before, in place of compiling.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("csrc")
STEP = Path("fluxutils_py/exporting")  # in the package, because exported files hold its headers
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-unwind-tables",
    "-fno-asynchronous-unwind-tables",
]
# A step has no bits to share with other lanes: sums and products may be fused, and loops that no
# trap can stop become vectors. -O2 with vectors is as fast here as -O3, and half as large.
FOR_STEPS = [
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "--param=vect-epilogues-nomask=0",
    "-ffp-contract=fast",
    "-fno-trapping-math",
    "-fno-math-errno",
]
X86 = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"],
}
# A unit of its own multiplies bfloat16; older compilers lack the instructions.
BFLOAT16 = [*X86["avx512"], "-mavx512bf16", "-Os"]  # 3 % slower than by -O2, and smaller
UNITS = {"x86_64": X86, "amd64": X86, "aarch64": {"neon": []}, "arm64": {"neon": []}}


class BuildKernels(build_ext):
    """One shared library without Python in it; where it cannot be built, it is left out, or the build
    fails.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # of no version of Python

    def build_extension(self, ext: Extension) -> None:
        path = Path(self.get_ext_fullpath(ext.name))
        try:
            if built := os.environ.get("FLUXUTILS_BUILT_KERNELS"):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(built, path)
            else:
                self.compile_kernels(path)
        except OSError as error:
            if os.environ.get("FLUXUTILS_REQUIRE_KERNELS", "") not in ("", "0"):
                raise
            path.unlink(missing_ok=True)  # of an earlier build in this folder
            print(
                f"fluxutils_py: native kernels are left out, torch's layers are used: {error}",
                file=sys.stderr,
            )

    def compile_kernels(self, path: Path) -> None:
        units = UNITS.get(platform.machine().lower())
        if units is None or sys.platform == "win32":
            raise OSError(f"there are none for {sys.platform} on {platform.machine()}")
        compiler = shlex.split(os.environ.get("CXX", "")) or [self.find_compiler()]
        flags = FLAGS + shlex.split(os.environ.get("CXXFLAGS", ""))
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        jobs = {name: (SOURCES / f"{name}.cpp", []) for name in ("copy", "dispatch", "threads")}
        lowest = next(iter(units.values()))
        known = [flag for flag in FOR_STEPS if accepts(compiler, [flag])]  # clang lacks some
        jobs["step"] = (SOURCES / "step.cpp", [*lowest, *known])
        for name, own in units.items():
            jobs[f"unit_{name}"] = (SOURCES / "unit.cpp", [*own, f"-DFLUXUTILS_UNIT=fk_{name}"])
        if units is X86 and accepts(compiler, BFLOAT16):
            own = [*BFLOAT16, "-DFLUXUTILS_UNIT=fk_avx512_bf16"]
            jobs["unit_avx512_bf16"] = (SOURCES / "unit_bfloat16.cpp", own)
            jobs["dispatch"] = (jobs["dispatch"][0], ["-DFLUXUTILS_BFLOAT16"])

        def compile_one(name: str) -> str:
            source, own = jobs[name]
            run([*compiler, *flags, *own, "-c", str(source), "-o", str(objects / f"{name}.o")])
            return str(objects / f"{name}.o")

        with ThreadPoolExecutor(2) as threads:
            compiled = list(threads.map(compile_one, jobs))
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")  # not into a library that a process has loaded
        strip = ["-s"] if sys.platform == "linux" else []  # the names of what is not exported
        run([*compiler, *flags, "-shared", *strip, *compiled, "-o", str(beside), "-pthread"])
        beside.replace(path)

    def find_compiler(self) -> str:
        for name in ("c++", "g++", "clang++"):
            if shutil.which(name):
                return name
        raise OSError("there is no C++ compiler (c++, g++ or clang++)")


class Wheel(bdist_wheel):
    """For any Python 3, of this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def accepts(compiler: list[str], flags: list[str]) -> bool:
    """Whether the compiler knows these flags; an empty file shows it."""
    command = [*compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            done.stderr.strip()[-200:],
        )
        raise OSError(f"{command[0]} fails: {said}")


setup(
    ext_modules=[
        Extension(
            "fluxutils_py.nn._kernels",
            sources=[str(p) for p in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(p) for p in [*sorted(SOURCES.glob("*.h")), *STEP.glob("*.h")]],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
