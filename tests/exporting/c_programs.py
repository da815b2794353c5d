"""Compile exported C headers and run steps through them: on this machine, and for ARM under
emulation.
"""

import shutil
import subprocess

import numpy as np
import pytest

STRICT = ["-O2", "-Wall", "-Wextra", "-Werror", "-pedantic"]
# how to compile, what has to be installed for it, and how to run
TARGETS = {
    "c": (["cc", "-std=c99"], [], []),
    "c++": (["c++", "-std=c++11", "-x", "c++"], [], []),
    "arm": (
        ["arm-linux-gnueabihf-gcc", "-std=c99", "-static"],
        ["qemu-arm"],
        ["qemu-arm"],
    ),
}

MAIN = """
#include <stdio.h>
#include "{header}"

int main(void) {{
    static {p}_state state;
    {real} x[{P}_N_IN];
    {out} y[{P}_N_OUT];
    int t = 0, k;
    {p}_reset(&state);
    while (fread(x, sizeof x, 1, stdin) == 1) {{
        if (++t == RESET_AT) {p}_reset(&state);
        (void){p}_step(&state, x, y);
        for (k = 0; k < {P}_N_OUT; k++) fwrite(&y[k], sizeof y[k], 1, stdout);
    }}
    return 0;
}}
"""


def require(target):
    """Skip a test where the compiler or the emulator of a target is missing."""
    compiler, tools, _ = TARGETS[target]
    for tool in [compiler[0], *tools]:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")


def build(target, source, folder, *options):
    """Compile the text of a main file in a folder of headers; return how to run it."""
    require(target)
    compiler, _, runner = TARGETS[target]
    main = folder / "main.c"
    main.write_text(source)
    program = folder / f"main_{target.replace('+', 'p')}"
    command = [*compiler, *STRICT, *options, str(main), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[:4000]
    return [*runner, str(program)]


def run_steps(target, header, xs, prefix="model", *, reset_at=-1, out=None, options=()):
    """Return the outputs (T, G) of a header for the steps xs (T, F), whose type is that of its
    numbers; ``out`` that of its outputs.
    """
    names = {"float32": "float", "float64": "double"}
    out = np.dtype(out or xs.dtype)
    source = MAIN.format(
        header=header.name,
        p=prefix,
        P=prefix.upper(),
        real=names[xs.dtype.name],
        out=names[out.name],
    )
    command = build(target, source, header.parent, f"-DRESET_AT={reset_at}", *options)
    done = subprocess.run(command, input=xs.tobytes(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return np.frombuffer(done.stdout, out).reshape(len(xs), -1)
