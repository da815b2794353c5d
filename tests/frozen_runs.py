"""Bits of runs of many kinds, for changes that must change none.

``python -m tests.frozen_runs --write`` notes them, as digests, for the processor and the versions
of this machine; ``python -m tests.frozen_runs`` compares, and names what differs.
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    SequenceClassifier,
    SequenceFeatures,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    Spec,
    h5mmap,
    h5save,
    net2vec,
    seqloss,
)
from fluxutils_py.nn import GRU, LRU, LSTM, TCN, MinGRU
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training import Checkpointer, EveryNSteps
from tests.plain_networks import LagRegressor

FILE = Path(__file__).parent / "golden" / "runs.json"
F, N, T = 3, 11, 47


def machine():
    """What the bits depend on besides the source."""
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}, {kernels}"


class Data:
    def __init__(self, dtype="float32"):
        rng = np.random.default_rng(7)
        self.x = rng.standard_normal((F, N, T)).astype(dtype)
        self.y = (self.x.cumsum(2).mean(0, keepdims=True) / 3).astype(dtype)
        self.labels = (self.y[0] > 0).astype(int) + (self.y[0] > 1)
        self.of_series = np.array(["high", "low"])[(self.y[0].mean(1) > 0).astype(int)]
        self.lengths = rng.integers(9, T + 1, N)
        self.weight = rng.random((N, T))
        self.holes = self.y.copy()
        self.holes[0, rng.random((N, T)) < 0.3] = np.nan
        self.two = np.concatenate([self.holes, self.x[:1] ** 2])


def network(layer=LSTM, n_out=1, n_hidden=5, dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(layer(F, n_hidden), nn.Linear(n_hidden, n_out)).to(dtype)


def trained(est, x, *methods):
    """Parameters, losses and predictions."""
    losses = np.array(est.loss_curve_, dtype=float)
    found = [net2vec(est), losses, est.predict(x)]
    return [*found, *(getattr(est, method)(x) for method in methods)]


def plain(model, loss=nn.functional.mse_loss, dtype="float32", classifier=False, **spec):
    spec = Spec(**{"epochs": 3, "batchsize": 4, "seqsize": 10, **spec})
    kind = EstimatorClassifier if classifier else Estimator
    return kind(model, loss, None, spec, random_state=0, verbose=False)


def ready(kind=SequenceRegressor, **settings):
    # ranks share the work of one
    batchsize = 4 * get_communicator("auto").size
    usual = {"hidden_size": 5, "epochs": 3, "batchsize": batchsize, "seqsize": 10, "cell": "lstm"}
    return kind(**{**usual, "random_state": 0, "verbose": False, **settings})


RUNS = {}


def run(function):
    RUNS[function.__name__] = function
    return function


@run
def lstm(d):
    est = plain(network()).fit(d.x, d.y)
    return [*trained(est, d.x), est.score(d.x, d.y)]


@run
def float64_shuffled_weighted(_):
    d = Data("float64")
    model = network(GRU, dtype=torch.float64)
    est = plain(model, seqloss(nn.MSELoss()), shuffle=True, clip=0.5)
    return trained(est.fit(d.x, d.y, d.weight), d.x)


@run
def two_outputs_with_holes(d):
    est = plain(network(n_out=2), seqloss(nn.L1Loss()), burn_in=3, accumulate=2)
    return trained(est.fit(d.x, d.two), d.x)


@run
def overlap_of_windows(d):
    est = plain(network(TCN), overlap=6, shuffle=True)
    return trained(est.fit(d.x, d.y), d.x)


@run
def folds(d):
    x, y = d.x.reshape(F, 1, -1), d.y.reshape(1, 1, -1)
    return trained(plain(network(), rebatch=True, burn_in=2).fit(x, y), x)


@run
def unequal_series(d):
    x = [d.x[:, n, :length] for n, length in enumerate(d.lengths)]
    y = [d.y[:, n, :length] for n, length in enumerate(d.lengths)]
    est = plain(network()).fit(x, y)
    return [
        net2vec(est),
        *est.predict(x),
        *est.predict(d.x, lengths=d.lengths, return_state=True)[1],
    ]


@run
def held_out_and_early_stopping(d):
    est = ready(early_stopping=True, spec={"patience": 1}, epochs=6, lr=0.05)
    return [*trained(est.fit(d.x, d.y), d.x), *(h["validation_loss"] for h in est.history_)]


@run
def given_validation_and_schedule(d):
    est = plain(network(), epochs=4, patience=2, lr_schedule="onecycle")
    est.fit(d.x, d.y, validation_data=(d.x[:, :4], d.y[:, :4]))
    return [*trained(est, d.x), *(h["validation_loss"] for h in est.history_)]


@run
def scheduler_of_epochs(d):
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    return trained(plain(network(), lr_schedule=halve).fit(d.x, d.y), d.x)


@run
def labels_of_steps(d):
    est = ready(SequenceClassifier, class_weight="balanced").fit(d.x, d.labels)
    return trained(est, d.x, "predict_proba")


@run
def labels_of_series(d):
    est = plain(network(n_out=2), None, classifier=True).fit(d.x, d.of_series)
    return [net2vec(est), est.predict(d.x) == "low", est.predict_proba(d.x)]


@run
def exact_gradients(d):
    model = nn.Sequential(LRU(F, 4), MinGRU(4, 5), nn.Linear(5, 1))
    return trained(plain(model, gradient="exact", seqsize=4).fit(d.x, d.y), d.x)


@run
def bfloat16(d):
    return trained(plain(network(), precision="bfloat16").fit(d.x, d.y), d.x)


@run
def parts_of_a_fit(d):
    est = plain(network(), max_updates=7)
    for part in (slice(0, 5), slice(5, N)):
        est.partial_fit(d.x[:, part], d.y[:, part])
    return trained(est, d.x)


@run
def mapped_files(d):
    with tempfile.TemporaryDirectory() as folder:
        x, y, out = (f"{folder}/{name}.h5" for name in "xyo")
        for path, values in ((x, d.x), (y, d.y), (out, np.zeros_like(d.y))):
            h5save(path, {"a": values})
        est = plain(network(), shuffle=True).fit(h5mmap(x, "a"), h5mmap(y, "a"))
        est.predict(h5mmap(x, "a"), out=h5mmap(out, "a", mode="r+"))
        return [net2vec(est), np.array(h5mmap(out, "a"))]


@run
def resumed(d):
    class Stop(Exception):
        pass

    class Ending:
        def __init__(self, at):
            self.at = at

        def on_step(self, loop):
            if loop.step == self.at:
                raise Stop

    with tempfile.TemporaryDirectory() as folder:
        saving = Checkpointer(folder, trigger=EveryNSteps(2))
        est = plain(network(), shuffle=True)
        try:
            est.set_params(callbacks=[saving, Ending(7)]).fit(d.x, d.y)
        except Stop:
            est = plain(network(), shuffle=True)
            est.set_params(callbacks=[Checkpointer(folder, trigger=EveryNSteps(2))])
            return trained(est.fit(d.x, d.y), d.x)
    raise AssertionError("the first run was to end early")


@run
def stream_with_intervals_and_alarms(d):
    est = ready(level=80, epochs=5).fit(d.x, d.y)
    running = est.stream(N, interval=0.8, alarm=50)
    found = []
    for t in range(T):
        found.append(running.step(d.x[:, :, t]))
        running.observe(d.y[:, :, t])
    parts = zip(*found, strict=True)
    return [*trained(est, d.x), *map(np.stack, parts), *est.predict_interval(d.x)]


@run
def stream_that_learns(d):
    est = plain(network()).fit(d.x, d.y)
    running = est.stream(N, learn=0.01)
    found = []
    for t in range(T):
        found.append(running.step(d.x[:, :, t]))
        running.observe(d.y[:, :, t])
    return [np.stack(found), *running.state]


@run
def stream_of_a_pipeline(d):
    from sklearn.pipeline import make_pipeline

    from fluxutils_py import samples, stream

    x = d.x.copy()
    x[0, 2, 5:9] = np.nan
    steps = SequenceImputer(), SequenceScaler(), SequenceFeatures(lags=[1, 3])
    pipe = make_pipeline(*steps, ready()).fit(samples(x), samples(d.y))
    running = stream(pipe, N)
    return [pipe.predict(samples(x)), np.stack([running.step(x[:, :, t]) for t in range(T)])]


@run
def linear(d):
    est = LagRegressor(n_lags=3, verbose=False).fit(d.x, d.holes)
    return [net2vec(est), est.predict(d.x)]


@run
def default_regressor(d):
    est = SequenceRegressor(random_state=0, verbose=False, max_updates=60).fit(d.x, d.y)
    return [net2vec(est), est.predict(d.x), est.cell_]


@run
def default_classifier(d):
    est = SequenceClassifier(random_state=0, verbose=False, max_updates=60).fit(d.x, d.labels)
    return [net2vec(est), est.predict_proba(d.x)]


@run
def default_classifier_of_series(d):
    est = SequenceClassifier(random_state=0, verbose=False, max_updates=60).fit(d.x, d.of_series)
    return [est.predict_proba(d.x)]


@run
def two_ranks(_):
    """What the first of two ranks has, which trains and predicts with the other one."""
    beside = Path(sys.executable).parent  # in a virtual environment that need not be activated
    mpirun = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    program = [sys.executable, "-m", "tests.frozen_runs", "--as-rank"]
    done = subprocess.run(
        [*command, *program], capture_output=True, text=True, timeout=240, check=True
    )
    return [done.stdout]


def as_rank():
    d = Data()
    found = [
        run(d)
        for run in (lstm, labels_of_steps, held_out_and_early_stopping, exact_gradients, linear)
    ]
    if get_communicator("auto").rank == 0:
        print(*map(digest, found))


def digest(parts):
    """Hash the bits of arrays, tensors, numbers and texts."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().numpy()
        if isinstance(part, str):
            part = part.encode()
        else:
            a = np.ascontiguousarray(part)
            part = f"{a.dtype} {a.shape}".encode() + a.tobytes()
        total.update(part)
    return total.hexdigest()[:16]


def digests(names=None):
    """The digest of each run, by name; of one that fails, the error."""
    found = {}
    torch.set_num_threads(1)
    for name in names or RUNS:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = digest(RUNS[name](Data()))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.as_rank:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        as_rank()
        return 0
    found = digests(arguments.names)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if arguments.write:
        known[machine()] = {**known.get(machine(), {}), **found}
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        print(json.dumps(found, indent=1))
        return 0
    expected = known.get(machine())
    if expected is None:
        print(f"nothing is noted for {machine()}")
        return 2
    bad = {name: value for name, value in found.items() if value != expected.get(name)}
    for name, value in bad.items():
        print(f"{name}: {value}, before {expected.get(name)}")
    print(f"{len(found)} runs, {len(bad)} differ")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
