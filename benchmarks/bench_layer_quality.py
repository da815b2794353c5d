"""What each layer of ``fluxutils_py.nn`` learns in the same processor time: four tasks, one thread,
one seed.

*Flip-flop*: hold the last of rare pulses of +1 and -1; windows of 20 steps, mean squared error on
new series. *Recall*: give out the random sign of 15 steps ago with windows of 10 steps, or of 200
steps ago with windows of 50 steps; 1 is what guessing gives, and all that a window alone can.
*ETTh1*: the next 24 hours of seven series, as ``bench_etth1.py``.

Every model is the layer and a linear head, trained with AdamW by ``Estimator`` until the time is
up; wide enough to do its best in that time among the widths that were tried.

    OMP_NUM_THREADS=1 python benchmarks/bench_layer_quality.py [--seconds 20] [--data ETTh1.csv]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import etth1_windows as etth1
import numpy as np
import torch
from common import Report, Table, parse, parser
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import (
    GRU,
    LRU,
    LSTM,
    TCN,
    CausalConv1d,
    MinGRU,
    MinLSTM,
    SequenceStack,
    SlidingWindowAttention,
)
from fluxutils_py.training import StopTraining

N_SERIES, N_ROWS = 64, 32
SMALL, WIDE = 32, 64  # units

Make = Callable[[int, int], nn.Module]


def attention(window: int) -> Make:
    return partial(SequenceStack, partial(SlidingWindowAttention, window=window))


LAYERS: dict[str, Make] = {
    "LSTM": LSTM,
    "GRU": GRU,
    "2 blocks of MinGRU": partial(SequenceStack, MinGRU),
    "2 blocks of MinLSTM": partial(SequenceStack, MinLSTM),
    "2 blocks of LRU": partial(SequenceStack, LRU),
    "2 blocks of LSTM": partial(SequenceStack, LSTM),
    "CausalConv1d, 201 steps": partial(CausalConv1d, kernel_size=201),
    "TCN, 6 levels": TCN,
    "2 blocks of attention, 64 steps": attention(64),
}
FAR = {  # where the memory must reach back 200 steps
    "2 blocks of LRU": partial(SequenceStack, partial(LRU, n_states=256, r_min=0.99, r_max=0.9999)),
    "2 blocks of attention, 64 steps": attention(256),
}


class UntilTimeIsUp:
    """Ends a fit after some seconds of processor time; the first step, which may try things out, is
    for free.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.steps = seconds, math.nan, 0

    def on_step(self, loop: Any) -> None:
        now = time.process_time()
        if self.steps == 0:
            self.began = now
        self.steps += 1
        if now - self.began > self.seconds:
            raise StopTraining


def fit(
    model: nn.Module,
    x: Any,
    y: Any,
    seconds: float,
    loss: Any = None,
    lr: float = 3e-3,
    **spec: Any,
) -> Estimator:
    until = UntilTimeIsUp(seconds)
    spec = {"epochs": 10**6, "batchsize": N_ROWS, "clip": 1.0, **spec}
    opt = partial(torch.optim.AdamW, lr=lr)
    est = Estimator(
        model, loss, opt, Spec(**spec), callbacks=[until], random_state=0, verbose=False
    )
    return est.fit(x, y)


def network(make: Make, n_in: int, n_out: int, units: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(make(n_in, units), nn.Linear(units, n_out))


def flip_flop(make: Make, seconds: float) -> float:
    def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        x = rng.choice([-1.0, 0.0, 1.0], p=[0.025, 0.95, 0.025], size=(1, N_SERIES, 1000)).astype(
            "float32"
        )
        x[:, :, 0] = rng.choice([-1, 1], size=(1, N_SERIES))
        at = np.maximum.accumulate(np.where(x != 0, np.arange(1000), 0), axis=2)
        return x, np.take_along_axis(x, at, 2)

    est = fit(network(make, 1, 1, SMALL), *data(0), seconds, seqsize=20)
    x, y = data(1)
    return float(((est.predict(x) - y) ** 2).mean())


def recall(lag: int, seqsize: int, overlap: int, make: Make, seconds: float) -> float:
    def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng(seed).choice([-1.0, 1.0], size=(1, 32, 400)).astype("float32")
        y = np.zeros_like(x)
        y[:, :, lag:] = x[:, :, :-lag]
        return x, y

    spec = {"seqsize": seqsize, "overlap": overlap, "burn_in": lag, "batchsize": 8}
    est = fit(network(make, 1, 1, SMALL // 2), *data(0), seconds, **spec)
    x, y = data(1)
    return float(((est.predict(x) - y)[:, :, lag:] ** 2).mean())


def electricity(path: str, make: Make, seconds: float) -> float:
    x, naive, truth = etth1.arrays(etth1.read(path))
    y = etth1.only(truth - naive, 0, etth1.TRAIN - etth1.H)[:, :, : etth1.TRAIN]
    model = network(make, len(x), len(y), WIDE)
    est = fit(
        model,
        x[:, :, : etth1.TRAIN],
        y,
        seconds,
        nn.L1Loss(),
        lr=1e-3,
        seqsize=24,
        batchsize=16,
        rebatch=True,
    )
    return etth1.errors(naive + est.predict(x), truth)[0]


def main() -> None:
    made = parser(__doc__, rounds=1)
    made.add_argument("--seconds", type=float, default=20, help="of each fit, of processor time")
    made.add_argument(
        "--data",
        help="ETTh1.csv, from github.com/zhouhaoyi/ETDataset; without it that task is left out",
    )
    made.add_argument("--only", nargs="+", help="tasks: flip-flop, recall-15, recall-200, ETTh1")
    args = parse(made)
    torch.set_num_threads(1)
    seconds = 0.2 if args.quick else args.seconds
    report = Report(__doc__, args)
    tasks: dict[str, Callable[[Make, float], float]] = {
        "flip-flop": flip_flop,
        "recall-15": partial(recall, 15, 10, 20),
        "recall-200": partial(recall, 200, 50, 200),
        "ETTh1": partial(electricity, args.data),
    }
    if args.data is None:
        del tasks["ETTh1"]
        report.leave_out("ETTh1", "--data is not given")
    tasks = {name: task for name, task in tasks.items() if name in (args.only or tasks)}
    table = Table(f"Error after {seconds:g} s of training", ["layer", *tasks])
    for name, make in LAYERS.items():
        row = [name]
        for task, learn in tasks.items():
            layer = FAR.get(name, make) if task == "recall-200" else make
            row.append(f"{learn(layer, seconds):.3f}")
            print(name, task, row[-1], flush=True)
        table.rows.append(row)
    report.add(table)


if __name__ == "__main__":
    main()
