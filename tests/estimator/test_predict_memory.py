"""How much memory predictions into a file take, whatever the size of the data."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import numpy as np, torch
from torch import nn
from fluxutils_py import Estimator
from fluxutils_py.nn import LSTM

torch.set_num_threads(1)
F = 8

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024

def growth(n_hidden, n_series, n_steps, time_major):
    shape = (n_steps, n_series, F) if time_major else (F, n_series, n_steps)
    np.memmap(sys.argv[1] + "/x", "f4", "w+", shape=shape)[:] = 1
    x = np.memmap(sys.argv[1] + "/x", "f4", "r", shape=shape)
    out = np.memmap(sys.argv[1] + "/out", "f4", "w+", shape=(n_steps, n_series, 1)).transpose(2, 1, 0)
    model = nn.Sequential(LSTM(F, n_hidden), nn.Linear(n_hidden, 1))
    few = np.ones((F, 4, 60), "f4")
    est = Estimator(model, spec={"epochs": 1, "batchsize": 256, "seqsize": 50}, comm=None).fit(few, few[:1])
    est.predict(few)
    before = anonymous()
    found, over = [before], threading.Event()

    def watch():
        while not over.wait(0.001):
            found.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    est.predict(x.transpose(2, 1, 0) if time_major else x, out)
    over.set()
    watcher.join()
    return max(*found, anonymous()) - before

print(max(growth(128, 300, 307, True), growth(10, 1037, 401, False), growth(10, 1, 70001, True)))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the account of a process is the Linux kernel's"
)
def test_predictions_into_a_map_take_little_memory(python, tmp_path):
    done = subprocess.run(
        [python, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 32  # MiB
