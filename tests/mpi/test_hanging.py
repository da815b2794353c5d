"""A rank that hangs in the middle of training is named by the others, and ends the job if that is
wanted.
"""

import json
import re
import textwrap
import time

import pytest

PROGRAM = """
import sys, time
import numpy as np
from fluxutils_py import Estimator
from fluxutils_py.parallel import MPIComm, TorchComm

def hook(loop):
    if loop.rank == 1 and loop.step == 3:
        print("hangs at", time.time(), flush=True)
        time.sleep(1000)

kind = {"mpi": MPIComm, "torch": TorchComm}[sys.argv[1]]
x = np.random.default_rng(0).standard_normal((1, 6, 20))
spec = dict(epochs=2, batchsize=2, seqsize=5)
Estimator(spec=spec, comm=kind(patience=0.7, abort_after=2), callbacks=hook, verbose=False).fit(x, x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_a_rank_that_hangs_is_named_by_all_others_and_ends_the_job(
    request, start, python, torchrun, tmp_path, kind
):
    program = tmp_path / "script.py"
    program.write_text(textwrap.dedent(PROGRAM))
    launch = (
        torchrun(3)
        if kind == "torch"
        else [*request.getfixturevalue("mpirun_command"), "-n", 3, python]
    )
    code, out, err = start([*launch, program, kind], timeout=300)
    ended = time.time()
    assert code == {"mpi": 75, "torch": 1}[kind], err  # torchrun has one status for all failures
    seconds = ended - float(re.search(r"hangs at ([\d.]+)", out)[1])
    assert seconds < 25, f"the job ended {seconds:.0f} s after a rank began to hang"
    waits = r"has been waiting in fit, training step 4, for \d+ s, for rank 1 \(process \d+ on .+?\)\. A rank that"
    for rank in (0, 2):
        assert re.search(rf"RuntimeWarning: rank {rank} {waits}", err), err
    assert re.search(rf"fluxutils_py ends the job: rank [02] {waits}", err), err


CASES = {  # where a rank hangs, and where the others then wait
    "loss": "fit, training step 3,",
    "loss of rank 0": "fit, training step 3,",
    "reading": r"fit, training step \d+,",
    "validation": r"fit, training step \d+,",
    "hook": r"fit, training step \d+,",
    "hook at the start": "fit",
    "hook of epochs": r"fit, training step \d+,",
    "checkpoint": r"fit, training step \d+,",
    "prediction": "predict",
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_hangs_is_named_by_all_others_wherever_it_hangs(ran, case):
    told = json.loads((ran("hangs", 3) / "found.json").read_text())
    hanging, warned = told["found"][case]
    where = re.escape(
        f", for rank {hanging} ({told['places'][hanging]}). A rank that is missing hangs, or is "
        "busy"
    )
    for rank, texts in enumerate(warned):
        if rank == hanging:
            assert not texts
        else:
            assert re.search(
                rf"^rank {rank} has been waiting in {CASES[case]} for \d+ s{where}", texts[-1]
            ), texts
