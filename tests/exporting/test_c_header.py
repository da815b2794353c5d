"""Headers of C: what a program needs of memory, and what the text holds."""

import platform
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.exporting.c_header import CHeader, Description, _Room
from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LRU,
    LSTM,
    BatchNorm,
    MinLSTM,
    SequenceStack,
    native_kernels,
)
from fluxutils_py.steps.operations import Scaler
from fluxutils_py.steps.step_program import program_of
from tests.exporting.c_programs import run_steps


def made(*layers, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*layers).to(dtype).eval()


def header(model, before=(), after=(), about=None):
    program = program_of(model, 3)
    return CHeader(program, before, after, about or Description("a model"), "m", False).text()


def outputs_of(model, xs):
    """What torch gives for steps (T, 3) of one series."""
    with native_kernels(False), torch.no_grad():
        return model(torch.from_numpy(xs)[:, None])[:, 0].numpy()


def layers():
    return [
        LSTM(3, 5, 2), SequenceStack(LRU, 5, 8, 2), nn.LeakyReLU(0.2), GRU(8, 4), nn.Linear(4, 9),
        FLSTM(9, 3), HFGRU(3, 4, alpha=0.3), MinLSTM(4, 3), nn.Linear(3, 2)
    ]  # fmt: skip


def test_values_that_are_needed_at_the_same_time_lie_apart():
    found = program_of(made(*layers()), 3)
    room = _Room(found)
    owner = [None] * room.size  # of each number in v, the value that it holds

    def place(i):
        text = room.of_value(i)
        return None if "state" in text else int(text.removeprefix("v + "))

    def write(start, n, name):
        assert start + n <= room.size
        owner[start : start + n] = [name] * n

    def check(i, n):
        if place(i) is not None:
            assert owner[place(i) : place(i) + n] == [i] * n

    sizes = [found.n_in, *(o.n_out for o in found.operations)]
    write(place(0), found.n_in, 0)
    for k, o in enumerate(found.operations):
        if own := room.of_operation(k):
            write(int(own.removeprefix("v + ")), o.room(sizes[o.source]), f"room {k}")
        if place(k + 1) is not None:
            write(place(k + 1), o.n_out, k + 1)
        # after the writes: a source must not lie where the result goes
        for source in o.sources:
            check(source, sizes[source])
    assert room.size < sum(sizes) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("c", torch.float32), ("c++", torch.float64), ("arm", torch.float32), ("arm", torch.float64)],
)
def test_many_layers_give_what_torch_gives(target, dtype, tmp_path, rng):
    model = made(*layers(), dtype=dtype)
    (tmp_path / "m.h").write_text(header(model))
    xs = rng.normal(size=(300, 3)).astype(str(dtype).removeprefix("torch."))
    wanted = outputs_of(model, xs)
    bound = 1e-5 if dtype is torch.float32 else 1e-12
    assert abs(run_steps(target, tmp_path / "m.h", xs, "m") - wanted).max() < bound


@pytest.mark.few
@pytest.mark.parametrize("target", ["c", "c++", "arm"])
def test_activations(target, tmp_path, rng):
    model = made(
        nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 9), nn.Tanh(), nn.Sigmoid(), nn.SiLU(),
        nn.LeakyReLU(0.3), nn.Linear(9, 9), nn.ELU(0.7), nn.Softplus(), nn.GELU(), BatchNorm(9)
    )  # fmt: skip
    (tmp_path / "m.h").write_text(header(model))
    xs = (5 * rng.normal(size=(300, 3))).astype("float32")
    wanted = outputs_of(model, xs)
    found = run_steps(target, tmp_path / "m.h", xs, "m")
    assert abs(found - wanted).max() < 1e-5 * abs(wanted).max()


@pytest.mark.slow
def test_transforms(tmp_path, rng):
    before = [
        Scaler("log1p"),
        Scaler("winsorize", np.full(3, 0.7), np.full(3, 0.3), np.zeros(3), np.full(3, 2.0)),
        Scaler("standardize", np.array([1, 2, 3.0]), np.array([1, 2, 4.0])),
    ]
    after = [
        Scaler("unstandardize", np.array([1e7, -1e7]), np.array([2.0, 3])),
        Scaler("absolute"),
    ]
    model = made(nn.Linear(3, 2))
    text = header(model, before, after, Description("a model", is_wide=True))
    assert "int m_step(m_state *state, const m_input *x, m_output *y)" in text
    assert "typedef float m_input;" in text
    assert "typedef double m_output;" in text
    (tmp_path / "m.h").write_text(text)
    xs = np.abs(rng.normal(size=(40, 3))).astype("float32")
    clipped = (np.clip(np.log1p(xs), 0, 2) - 0.7) / 0.3
    scaled = (clipped - [1, 2, 3]) / [1, 2, 4]
    wanted = abs(outputs_of(model.double(), scaled) * [2, 3] + [1e7, -1e7])
    outputs = run_steps("c", tmp_path / "m.h", xs, "m", out="float64")
    np.testing.assert_allclose(outputs, wanted, rtol=1e-13)  # as no float is


def test_names_of_a_header_begin_with_its_prefix():
    gru = header(made(GRU(3, 4)))
    assert "m_step_gru(" in gru
    assert "double v[" not in gru
    assert "double v[" in header(made(GRU(3, 4), dtype=torch.float64))
    assert not re.search(r"\b(step|STEP)_|@|\breal\b", gru)
    assert re.findall(r"^#(?:include|error).*", gru, re.MULTILINE) == [
        '#error "-ffast-math breaks rounding and checks for NaN"',
        '#error "numbers keep more digits than their type: compile as C99, or with '
        '-msse2 -mfpmath=sse"',
        "#include <math.h>",
        "#include <stdint.h>",
    ]
    macros = re.findall(r"^#define (\w+)", gru, re.MULTILINE)
    assert macros
    assert all(name.startswith("M_") for name in macros)


@pytest.mark.few
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["cc", "-ffast-math"], "-ffast-math breaks rounding"),
        (["c++", "-x", "c++", "-mfpmath=387"], "compile as C99"),
    ],
    ids=["fast_math", "x87"],
)
def test_what_would_break_its_rounding_does_not_compile(options, message, tmp_path):
    if shutil.which(options[0]) is None:
        pytest.skip(f"needs {options[0]}")
    if "387" in options[-1] and platform.machine() != "x86_64":
        pytest.skip("needs an x86 processor")
    (tmp_path / "m.h").write_text(header(made(LSTM(3, 4))))
    (tmp_path / "main.c").write_text('#include "m.h"\n')
    command = [*options, "-c", "main.c", "-o", "main.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86 processors")
def test_c99_rounds_where_the_processor_does_not(tmp_path, rng):
    model = made(*layers())
    (tmp_path / "m.h").write_text(header(model))
    xs = rng.normal(size=(100, 3)).astype("float32")
    outputs = run_steps("c", tmp_path / "m.h", xs, "m", options=["-mfpmath=387"])
    assert abs(outputs - outputs_of(model, xs)).max() < 1e-5


def test_the_comment_counts_bytes():
    text = header(made(LSTM(3, 4), nn.Linear(4, 2)), about=Description("x */ /* y"))
    # 4 units: weights of 4 gates with 3 + 4 inputs and a bias, then 4 weights and a bias
    assert f"take {4 * (16 * 8 + 2 * 5)} bytes of constants" in text
    assert "m_state state;  // 32 bytes" in text
    # inputs and sums; later the outputs lie in place of the inputs
    assert "a step 76 bytes of stack" in text
    assert text.startswith("/* m: x * / / * y, one step")
