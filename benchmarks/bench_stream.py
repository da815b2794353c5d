"""How long one step takes as data come in: a stream, and ``predict`` called for each step, beside
the bare model.

The bare model is an ``nn.LSTM`` and a linear head of torch that are given each step under
``torch.inference_mode``, the state carried by hand. A stream takes the step as a NumPy array of
shape (F, N), looks for missing values, and returns an array; so does the stream of a pipeline with
a scaler, whose inputs are scaled back first. "without the kernels" is the same stream as torch
computes it, step by step. ``predict`` is given the state of the
step before and returns the next one. All take turns at each step, and must give the same numbers to
rounding. So must the files that ``est.export`` writes, run with their state by onnxruntime and by
torch. The ratio is that of a round's medians to that of the bare model; the columns p50 and p99 are
over all steps, in microseconds.

The last table is of a stream by itself, one series, in a loop of its steps and nothing else, so that it
finds its caches warm, and of the bare model in such a loop: microseconds per step.

    python benchmarks/bench_stream.py [--rounds 9] [--hidden 16 64 128] [--series 1 100 1000]
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from common import Report, Table, interleaved, parse, parser, ratios, spread
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn

from fluxutils_py import Estimator, SequenceScaler, stream
from fluxutils_py.exporting.export_files import ExportedModel
from fluxutils_py.nn import LSTM, native_kernels

BASE = "bare model"
N_FEATURES = 3


class Bare:
    """The layers of torch, with a state that is carried by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.lstm, self.head = copy.deepcopy(model[0].module), copy.deepcopy(model[1])
        self.state: tuple[Tensor, Tensor] | None = None

    def step(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y, self.state = self.lstm(x, self.state)
            return self.head(y)


class EachStep:
    """``predict``, called for each step with the state of the one before."""

    def __init__(self, est: Estimator) -> None:
        self.est, self.state = est, None

    def step(self, x: np.ndarray) -> np.ndarray:
        y, self.state = self.est.predict(x, state=self.state, return_state=True)
        return y


class ByTorch:
    """A stream without the native kernels."""

    def __init__(self, est: Estimator, n_series: int) -> None:
        self.live = est.stream(n_series)

    def step(self, x: np.ndarray) -> np.ndarray:
        with native_kernels(False):
            return self.live.step(x)


def by_turns(
    work: dict[str, tuple[Callable[[object], object], list[object]]], rounds: int
) -> dict[str, list[np.ndarray]]:
    """The seconds of each step of each round; at each step all take turns, each round begins with
    another one.
    """
    names = list(work)
    taken: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for r in range(rounds):
        gc.collect()
        order = names[r % len(names) :] + names[: r % len(names)]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for t in range(len(work[BASE][1])):
            for name in order:
                step, xs = work[name]
                began = time.perf_counter()
                step(xs[t])
                seconds[name].append(time.perf_counter() - began)
        for name in names:
            taken[name].append(np.array(seconds[name]))
    return taken


def compare(n_hidden: int, n_series: int, report: Report, rounds: int, n_steps: int) -> None:
    x = np.random.default_rng(0).normal(size=(n_steps, N_FEATURES, n_series)).astype("f4")
    model = nn.Sequential(LSTM(N_FEATURES, n_hidden), nn.Linear(n_hidden, 1))
    few = np.ascontiguousarray(x[:5].transpose(1, 2, 0))  # (F, N, T)
    est = Estimator(model, spec={"epochs": 1, "batchsize": 256, "seqsize": 5}, verbose=False).fit(
        few, few[:1]
    )
    tensors = [torch.tensor(step.T[None].copy()) for step in x]  # (1, N, F)
    bare = [Bare(est.model_) for _ in range(2)]
    live, each, slow = est.stream(n_series), EachStep(est), ByTorch(est, n_series)
    scaler = SequenceScaler().fit(few)
    piped = stream(make_pipeline(scaler, est), n_series)
    unscaled = [scaler.inverse_transform(step[:, :, None])[:, :, 0] for step in x]
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for format, contender in {
            "onnx": "exported, onnxruntime",
            "torch": "exported, torch",
        }.items():
            try:
                est.export(f"{folder}/{format}", format)
                files[contender] = ExportedModel(f"{folder}/{format}", n_series)
            except ImportError as error:
                report.leave_out(f"{contender}, LSTM({n_hidden}), {n_series} series", str(error))
    windows = [np.ascontiguousarray(step.T[None]) for step in x]
    work = {
        BASE: (bare[0].step, tensors),
        "bare model again (A/A)": (bare[1].step, tensors),
        "stream": (live.step, list(x)),
        "stream of a pipeline": (piped.step, unscaled),
        "stream without the kernels": (slow.step, list(x)),
        "predict, one step per call": (each.step, [step[:, :, None] for step in x]),
        **{contender: (file.run, windows) for contender, file in files.items()},
    }
    last = {
        name: np.asarray([step(v) for v in xs][-1]).reshape(-1) for name, (step, xs) in work.items()
    }
    # and all are warm
    apart = {name: float(np.abs(y - last[BASE]).max()) for name, y in last.items()}
    assert max(apart.values()) < 1e-5, apart
    taken = by_turns(work, rounds)
    medians = {
        name: [float(np.median(seconds)) for seconds in found] for name, found in taken.items()
    }
    columns = [
        "contender",
        f"ratio of p50 to {BASE} (range)",
        "p50, us",
        "p99, us",
        "outputs apart",
    ]
    table = Table(f"LSTM({n_hidden}) and a linear head, {n_series} series", columns)
    for name, found in medians.items():
        p50, p99 = (f"{1e6 * np.percentile(np.concatenate(taken[name]), p):.0f}" for p in (50, 99))
        table.rows.append(
            [name, spread(ratios(found, medians[BASE])), p50, p99, f"{apart[name]:.1e}"]
        )
    report.add(table)


def alone(n_hidden: int, rounds: int, n_steps: int) -> list[str]:
    """A row: microseconds of a step in a loop of its own, of a stream and of the bare model."""
    xs = list(np.random.default_rng(0).normal(size=(n_steps, N_FEATURES, 1)).astype("f4"))
    model = nn.Sequential(LSTM(N_FEATURES, n_hidden), nn.Linear(n_hidden, 1))
    few = np.stack(xs[:5], axis=2)  # (F, N, T)
    est = Estimator(model, spec={"epochs": 1, "batchsize": 1, "seqsize": 5}, verbose=False).fit(
        few, few[:1]
    )
    loops = {
        "stream": (est.stream(1).step, xs),
        BASE: (Bare(est.model_).step, [torch.tensor(x.T[None].copy()) for x in xs]),
    }
    taken = interleaved({name: partial(loop_of, *loop) for name, loop in loops.items()}, rounds)
    return [str(n_hidden), *(spread([1e6 * t / n_steps for t in taken[name]], 1) for name in loops)]


def loop_of(step: Callable[[object], object], xs: list[object]) -> float:
    """Seconds of the second time through: the first one warms up."""
    for x in xs:
        step(x)
    began = time.perf_counter()
    for x in xs:
        step(x)
    return time.perf_counter() - began


def main() -> None:
    made = parser(__doc__, rounds=9)
    made.add_argument("--hidden", type=int, nargs="+", default=[16, 64, 128])
    made.add_argument("--series", type=int, nargs="+", default=[1, 100, 1000])
    args = parse(made)
    report = Report(__doc__, args)
    for n_hidden in args.hidden:
        for n_series in args.series:
            compare(n_hidden, n_series, report, args.rounds, 5 if args.quick else 200)
    report.add(
        Table(
            "one series, in a loop of steps alone",
            ["units", "stream, us (range)", f"{BASE}, us (range)"],
            [alone(n_hidden, args.rounds, 10 if args.quick else 2000) for n_hidden in args.hidden],
        )
    )


if __name__ == "__main__":
    main()
