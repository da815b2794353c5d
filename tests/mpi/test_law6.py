"""P ranks with batchsize b are one rank with batchsize P * b; under MPI and under
torch.distributed.
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "programs" / "law6.py"
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


@functools.cache
def program():
    spec = importlib.util.spec_from_file_location("law6", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def in_one_process(dtype, factor, case):
    return program().results(dtype, factor, None, cases=[case])


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, "torchrun"])
def test_ranks_train_as_one_process_with_a_larger_batch_or_with_the_same_one(ran, n):
    found = np.load(ran("law6", n) / "found.npz")
    launcher, size = ("torch", 2) if n == "torchrun" else ("mpi", n)
    expected = {
        name: value
        for dtype, scaling, cases in program().plan(launcher, size)
        for case in cases
        for name, value in in_one_process(dtype, 1 if scaling == "strong" else size, case).items()
    }
    assert set(found.files) == set(expected)
    bad = {}
    for name, value in expected.items():
        assert found[name].shape == np.shape(value), name
        apart = np.nanmax(np.abs(found[name] - value))
        scale = max(1.0, np.nanmax(np.abs(value)))  # sums over a window are large
        if "linear_and_network" in name:  # Adam makes more of what a sum over ranks has rounded
            scale *= 10
        if (
            not apart <= TOLERANCE[name.split()[0]] * scale
            or (np.isnan(found[name]) != np.isnan(value)).any()
        ):
            bad[name] = apart
    assert not bad


def apart(a, b):
    """Differences, relative to what training changed, to the gradient, and to the losses."""
    return {
        "parameters": np.abs(a["after"] - b["after"]).max()
        / np.abs(b["after"] - b["before"]).max(),
        "gradient": np.abs(a["gradient"] - b["gradient"]).max() / np.abs(b["gradient"]).max(),
        "losses": np.abs(a["losses"] / b["losses"] - 1).max(),
    }


def test_ranks_train_in_bfloat16_as_one_process_up_to_its_rounding(ran):
    found = np.load(ran("law6", 3) / "bfloat16.npz")
    one, exact = (
        program().in_precision(precision, 3, None) for precision in ("bfloat16", "float32")
    )
    differences = apart(found, one)  # another batchsize is 0.07 and more apart
    # each rank's part is rounded, and so was the one process's
    assert differences.pop("gradient") < 2**-7
    assert max(differences.values()) < 2**-8
    assert apart(found, exact)["gradient"] > 1e-4  # of float32, ranks would be within 1e-6


FIT = """
import sys
import numpy as np
import torch
from torch import nn
from fluxutils_py import Estimator, net2vec
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import get_communicator

rng = np.random.default_rng(1)
x = rng.normal(size=(3, 13, 23))
y = x.cumsum(2).mean(0, keepdims=True)
torch.manual_seed(0)
model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 1)).double()
spec = {"epochs": 3, "batchsize": int(sys.argv[1]), "seqsize": 5}
est = Estimator(model, spec=spec, random_state=0, verbose=False).fit(x, y, rng.random((13, 23)))
found = {"parameters": net2vec(est), "predictions": est.predict(x)}
if get_communicator("auto").rank == 0:
    np.savez(sys.argv[2], **found)
"""


def test_two_ranks_train_as_one_process_with_twice_the_batch(
    mpirun_command, start, python, tmp_path
):
    program = tmp_path / "fit.py"
    program.write_text(FIT)
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    for command in (
        [python, program, 8, one],
        [*mpirun_command, "-n", 2, python, program, 4, two],
    ):
        code, out, err = start(command)
        assert code == 0, out + err
    one, two = np.load(one), np.load(two)
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=0, atol=1e-12)
