"""Training on a file of 10 GiB takes no more memory than on a small one."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, threading
from pathlib import Path
from fluxutils_py import h5create
from fluxutils_py.forecasting import Forecaster, held_out_end

held_out_end.MOST_SERIES = 32  # fewer than usual, for the sake of time
path, n_steps = Path(sys.argv[1]), int(sys.argv[2])

def anonymous():  # MiB that cannot be dropped; file pages can
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("RssAnon")).split()[1]) / 1024

def watch(peak, ended):  # the held-out end as well, which callbacks do not see
    while not ended.wait(0.02):
        peak[0] = max(peak[0], anonymous())

def stop(loop):
    if loop.step == 20:
        loop.stop()

x = h5create(path, "x", (1, 4096, n_steps), "f4", sparse=True)
settings = {"lag": 168, "hidden_size": 8, "n_models": 1, "random_state": 0, "verbose": False}
before = anonymous()
peak, ended = [before], threading.Event()
thread = threading.Thread(target=watch, args=(peak, ended))
thread.start()
fc = Forecaster(48, 24, callbacks=stop, **settings).fit(x)
ended.set()
thread.join()
print(json.dumps({"growth": peak[0] - before, "bytes": x.nbytes, "inputs": fc.features_.n_inputs}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs sparse files")
def test_memory_does_not_grow_with_the_file(python, tmp_path):
    found = {}
    for name, n_steps in (("small", 4_000), ("large", 10 * 2**30 // (4 * 4096))):
        command = [python, "-c", PROGRAM, str(tmp_path / f"{name}.h5"), str(n_steps)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])
    assert found["large"]["bytes"] == 10 * 2**30
    assert found["large"]["inputs"] == 76
    assert found["large"]["growth"] < found["small"]["growth"] + 64
