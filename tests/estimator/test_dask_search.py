"""A grid search on a local cluster of dask finds what one process finds, and its workers map the
file themselves.
"""

import json
import subprocess

import pytest

pytest.importorskip("distributed")

PROGRAM = """
import json, os, pickle, sys
import joblib
import numpy as np
from distributed import Client, LocalCluster
from sklearn.model_selection import GridSearchCV, cross_val_score
from fluxutils_py import SequenceRegressor, h5mmap, h5save, samples

def score(est, x, y):
    note = {"kind": type(x.array).__name__, "path": x.array.filename, "pid": os.getpid()}
    with open(os.path.dirname(x.array.filename) + "/notes", "a") as file:
        file.write(json.dumps(note) + "\\n")
    return est.score(x, y)

if __name__ == "__main__":
    folder = sys.argv[1]
    values = np.random.default_rng(0).normal(size=(3, 37, 43)).astype("f4")
    h5save(f"{folder}/data.h5", {"x": values, "y": values.cumsum(2)[:1]})
    x, y = (samples(h5mmap(f"{folder}/data.h5", name)) for name in ("x", "y"))
    est = SequenceRegressor(2, cell="rnn", epochs=1, batchsize=8, seqsize=10, random_state=0, verbose=False)
    plain = GridSearchCV(est, {"lr": [0.01, 0.1]}, cv=2).fit(x, y)
    with LocalCluster(2, processes=True, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        with joblib.parallel_config("dask"):
            search = GridSearchCV(est, {"lr": [0.01, 0.1]}, cv=2, scoring=score).fit(x, y)
            try:
                cross_val_score(est.set_params(lr=-1.0), x, y, cv=2, error_score="raise")
            except ValueError as error:
                text = str(error)
    print(json.dumps({
        "plain": plain.cv_results_["mean_test_score"].tolist(),
        "found": search.cv_results_["mean_test_score"].tolist(),
        "same": bool((search.predict(x) == plain.predict(x)).all()),
        "error": text,
        "bytes": len(pickle.dumps((x[3:], y[3:]))),
        "pid": os.getpid(),
    }))
"""


@pytest.mark.slow
def test_a_local_cluster_finds_what_one_process_finds(python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [python, str(tmp_path / "program.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["found"] == found["plain"]
    assert found["same"]
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert len(notes) == 2 * 2
    assert {(n["kind"], n["path"]) for n in notes} == {("H5Map", str(tmp_path / "data.h5"))}
    assert found["pid"] not in {n["pid"] for n in notes}
    assert found["bytes"] < 2000  # the path, not 20 kB of values
    assert "lr must be a positive number" in found["error"]
