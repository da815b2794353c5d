"""A grid search over a mapped file, in two processes, holds windows of it in memory and no more."""

import json
import subprocess
import sys

import pytest

# Small first: then its workers have imported everything, and take part in the large one too. Small
# holds more steps than a window: both searches need the same room for what they compute.
PROGRAM = """
import json, os, sys, threading
from pathlib import Path
import numpy as np
from sklearn.model_selection import GridSearchCV, KFold
from fluxutils_py import SequenceRegressor, h5create, h5mmap, samples

folder = Path(sys.argv[1])
F, N = 64, 1000

def note(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    anonymous = int(next(l for l in lines if l.startswith("RssAnon")).split()[1]) / 1024
    with open(folder / "notes", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "kind": kind, "anonymous": anonymous}) + "\\n")

class Watch:
    def on_step(self, loop):
        note("step")

def score(est, x, y):  # memory is noted from the side: no callback is called here
    done = threading.Event()
    def watch():
        while not done.wait(0.005):
            note("score")
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return est.score(x, y)
    finally:
        done.set()
        thread.join()

def make(n_steps):
    rng = np.random.default_rng(0)
    paths = [folder / f"{name}-{n_steps}.h5" for name in "xy"]
    x, y = (h5create(path, "a", (n, N, n_steps)) for path, n in zip(paths, (F, 1), strict=True))
    for t in range(n_steps):  # a step lies in one piece
        x[:, :, t] = rng.random((N, F), np.float32).T - 0.5
        y[0, :, t] = x[:, :, t].sum(0)
    return [h5mmap(path, "a") for path in paths]

def search(x, y, n_jobs):
    (folder / "notes").write_text("")
    est = SequenceRegressor(2, cell="rnn", epochs=1, batchsize=125, seqsize=32, random_state=0, callbacks=Watch())
    in_order, scattered = KFold(2), KFold(2, shuffle=True, random_state=0)
    cv = [next(in_order.split(np.empty(N))), next(scattered.split(np.empty(N)))]
    found = GridSearchCV(est, {"lr": [0.01, 0.1]}, cv=cv, scoring=score, refit=False, n_jobs=n_jobs)
    results = found.fit(samples(x), samples(y)).cv_results_
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    peaks = {}
    for n in notes:
        peaks[n["pid"]] = max(n["anonymous"], peaks.get(n["pid"], 0))
    return {
        "bytes": x.nbytes,
        "peaks": peaks,
        "steps": sum(n["kind"] == "step" for n in notes),
        "scores": [results[f"split{i}_test_score"].tolist() for i in range(2)],
    }

small = search(*make(220), 2)
x, y = make(700)
large = search(x, y, 2)
in_memory = search(np.array(x), np.array(y), None)
print(json.dumps({"small": small, "large": large, "in_memory": in_memory, "pid": os.getpid()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_of_a_grid_search_share_the_file(python, tmp_path):
    done = subprocess.run(
        [python, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    small, large, in_memory = found["small"], found["large"], found["in_memory"]
    assert large["bytes"] > 170 << 20
    # 2 candidates, 2 folds, 4 groups of 125 of the 500 series to train on, 22 windows of at most 32
    # of the 700 steps
    assert large["steps"] == in_memory["steps"] == 2 * 2 * 4 * 22
    assert str(found["pid"]) not in large["peaks"]
    # MiB that cannot be dropped, as pages can: two processes of one search differ by up to 40, a
    # copy would take 170
    assert max(large["peaks"].values()) < max(small["peaks"].values()) + 60
    assert large["scores"] == in_memory["scores"]
