"""Fitting on a file larger than this machine's memory takes no more memory than on a small one."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from fluxutils_py import Estimator, Spec, h5create
from fluxutils_py.nn import LSTM

folder, n_steps = Path(sys.argv[1]), int(sys.argv[2])
F, N = 32, 2048

def anonymous():  # MiB that cannot be dropped; file pages can
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("RssAnon")).split()[1]) / 1024

class Watch:
    def __init__(self):
        self.peak, self.before = 0, anonymous()
    def on_step(self, loop):
        self.peak = max(self.peak, anonymous())
        if loop.step == 60:
            loop.stop()

x, y = (
    h5create(folder / f"{name}{n_steps}.h5", name, (n, N, n_steps), "f4", sparse=True)
    for name, n in (("x", F), ("y", 1))
)
warm = Watch()
model = nn.Sequential(LSTM(F, 16), nn.Linear(16, 1))
est = Estimator(model, None, None, Spec(1, 64, 64, shuffle=True), callbacks=warm, random_state=0)
est.fit(x, y)
out = h5create(folder / f"out{n_steps}.h5", "yhat", (1, 64, n_steps), "f4", sparse=True)
part = min(n_steps, 64 * 100)
est.predict(x[:, :64, :part], out=out[:, :, :part])
print(json.dumps({
    "growth": max(warm.peak, anonymous()) - warm.before,
    "bytes": x.nbytes,
    "on_disk": (folder / f"x{n_steps}.h5").stat().st_blocks * 512,
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs sparse files")
def test_anonymous_memory_does_not_grow_with_the_file(python, tmp_path):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {}
    for name, n_steps in (("small", 64 * 100), ("large", int(1.1 * memory) // (32 * 2048 * 4))):
        done = subprocess.run(
            [python, "-c", PROGRAM, str(tmp_path), str(n_steps)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])
    assert found["large"]["bytes"] > memory
    assert found["large"]["on_disk"] < 64 << 20  # sparse: what was never written takes no space
    assert found["large"]["growth"] < found["small"]["growth"] + 32
