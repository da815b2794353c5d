"""Compile a C header with the compiler of this machine, and run series through it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fluxutils_py.errors import ExportError, LoadError, ShapeError

COMPILERS = ("cc", "gcc", "clang")
BEGINNING = "/* "  # of the comment with which a header begins
# Reads the numbers of series and steps, and all inputs; writes all outputs.
# @ stands for the prefix, @@ for the prefix in capitals.
PROGRAM = """\
#include <stdio.h>
#include "header.h"

int main(void) {
    static @_state state;
    @_input x[@@_N_IN];
    @_output y[@@_N_OUT];
    double sizes[2], value;
    int b, t, i;
    if (fread(sizes, sizeof sizes, 1, stdin) != 1) return 1;
    for (b = 0; b < sizes[0]; b++) {
        @_reset(&state);
        for (t = 0; t < sizes[1]; t++) {
            for (i = 0; i < @@_N_IN; i++) {
                if (fread(&value, sizeof value, 1, stdin) != 1) return 1;
                x[i] = (@_input)value;
            }
            (void)@_step(&state, x, y);
            for (i = 0; i < @@_N_OUT; i++) {
                value = (double)y[i];
                fwrite(&value, sizeof value, 1, stdout);
            }
        }
    }
    return 0;
}
"""


def is_header(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as a C header does."""
    with open(path, "rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING.encode()


def run_header(path: str | os.PathLike[str], x: np.ndarray) -> np.ndarray:
    """Return the outputs (T, N, G) of a header for whole series (F, N, T); of a classifier the
    probabilities.

    Raises
    ------
    LoadError
        If the file is no header of this package.
    ShapeError
        If it takes another number of features.
    ExportError
        If there is no C compiler, or it cannot compile the header.
    """
    text = Path(path).read_text("utf-8")
    prefix = text.removeprefix(BEGINNING).partition(":")[0]
    size = f"#define {prefix.upper()}_N_IN "
    if size not in text:
        raise LoadError(f"{path} is no C header that fluxutils_py exported")
    n_features = int(text.partition(size)[2].split()[0])
    if len(x) != n_features:
        raise ShapeError(f"{path} takes {n_features} features, x has {len(x)}")
    main = PROGRAM.replace("@@", prefix.upper()).replace("@", prefix)
    n_series, n_steps = x.shape[1:]
    sizes = np.array([n_series, n_steps], float)
    given = sizes.tobytes() + x.transpose(1, 2, 0).astype(float).tobytes()
    results = _compile_and_run(path, {"header.h": text, "main.c": main}, given)
    return np.frombuffer(results).reshape(n_series, n_steps, -1).transpose(1, 0, 2)


def _compile_and_run(path: object, sources: dict[str, str], given: bytes) -> bytes:
    with TemporaryDirectory() as folder:
        for name, text in sources.items():
            Path(folder, name).write_text(text, "utf-8")
        command = [*_find_compiler(), "-std=c99", "-O2", "main.c", "-o", "main", "-lm"]
        compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if compiled.returncode:
            reason = "\n".join(compiled.stderr.splitlines()[:10])
            raise ExportError(f"{path} does not compile, {shlex.join(command)} says:\n{reason}")
        done = subprocess.run([str(Path(folder, "main"))], input=given, capture_output=True)
    if done.returncode:
        raise ExportError(f"{path}, compiled, ended with code {done.returncode}")
    return done.stdout


def _find_compiler() -> list[str]:
    """Return the C compiler of CC, or one that is installed."""
    for command in (os.environ.get("CC", ""), *COMPILERS):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise ExportError(
        "a C header is checked by running it, and there is no C compiler, such as "
        f"{', '.join(COMPILERS)}: install one, or name yours in the environment variable CC"
    )
