"""Whether streams that go on learning after a fit are ahead of the model as it was fitted, and what
learning costs.

ETTh1: the oil temperature in 6 and 24 hours from seven series, fitted on the first 12 months and
judged on the months 17 to 20; the stream learns from month 13 on, each truth as many steps late as
the forecast looks ahead. "drift": a filter of one input and a share of another, which both turn
after the fit; "still": the same without a turn. The learning rate is that of learn=True. The cost
is processor time of a plain step, of a step of a stream that learns, and of taking in its truth.

    python benchmarks/bench_learn.py --data FOLDER
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench_intervals import oil
from common import Report, Table, parse, parser
from real_data import load, rmse
from torch import nn

from fluxutils_py import Estimator, SequenceRegressor
from fluxutils_py.nn import LRU, LSTM, MinGRU, MinLSTM

MONTH = 30 * 24


def learnt(
    est: SequenceRegressor, x: np.ndarray, y: np.ndarray, fitted: int, late: int
) -> np.ndarray:
    """What a stream predicts for the steps after the fit, each before its truth."""
    _, state = est.predict(x[:, :, :fitted], return_state=True)
    live = est.stream(x.shape[1], state, learn=True, delay=late)
    found = []
    for t in range(fitted, x.shape[2]):
        found.append(live.step(x[:, :, t]))
        if t - late >= fitted:
            live.observe(y[:, :, t - late])
    return np.stack(found, -1)


def row(name: str, est: SequenceRegressor, x: np.ndarray, y: np.ndarray, *place: int) -> list[str]:
    """Errors from ``judged`` on: of the fitted model, and of the stream."""
    fitted, judged, late = place
    frozen = est.predict(x)[:, :, judged:]
    found = learnt(est, x, y, fitted, late)[:, :, judged - fitted :]
    errors = [rmse(y[:, :, judged:], predicted) for predicted in (frozen, found)]
    return [name, str(est.cell), *(f"{e:.3f}" for e in errors), f"{errors[1] / errors[0]:.2f}"]


def etth1(hours: int, cell: str, folder: Path) -> list[str]:
    data = load(f"etth1_{hours}", folder)
    est = SequenceRegressor(cell=cell, random_state=0, verbose=False)
    est.fit(data.x_train, data.y_train, lengths=data.train_lengths)
    y = oil(folder, hours, data.x_test.shape[2])
    return row(f"ETTh1, {hours} hours", est, data.x_test, y, 12 * MONTH, 16 * MONTH, hours)


def made(name: str, drift: float, cell: str) -> list[str]:
    rng = np.random.default_rng(0)
    n, fitted = 3000, 1000
    x = rng.normal(size=(2, 2, n))
    slow = np.zeros((1, 2, n))
    for t in range(1, n):
        slow[:, :, t] = 0.8 * slow[:, :, t - 1] + 0.3 * np.tanh(x[:1, :, t])
    amount = drift * np.clip((np.arange(n) - fitted) / 1000, 0, None)
    y = slow * (1 + amount) + x[1:] * (0.5 - amount) + amount + 0.3 * rng.normal(size=(1, 2, n))
    est = SequenceRegressor(cell=cell, random_state=0, verbose=False)
    est.fit(x[:, :, :fitted], y[:, :, :fitted])
    return row(name, est, x, y, fitted, fitted, 0)


def seconds_of(function: Callable[[], object], n: int) -> float:
    began = time.process_time()
    for _ in range(n):
        function()
    return (time.process_time() - began) / n


def cost(layer: type[nn.Module], n_in: int, n_units: int, rounds: int) -> list[str]:
    """Microseconds, the least of the rounds, and the median of the ratios within a round."""
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(n_in, 1, 300)).astype("float32")
    model = nn.Sequential(layer(n_in, n_units), nn.Linear(n_units, 1))
    spec = {"epochs": 1, "batchsize": 1, "seqsize": 64}
    est = Estimator(model, spec=spec, random_state=0, verbose=False).fit(x, x[:1])
    plain, again, live = est.stream(1), est.stream(1), est.stream(1, learn=True)
    step, truth = np.ascontiguousarray(x[:, :, 0]), x[:1, :, 0].astype(float)
    n = 100
    taken: list[list[float]] = []
    for _ in range(rounds):
        live.reset()
        steps = [seconds_of(partial(s.step, step), n) for s in (plain, again, live)]
        taken.append([*steps, seconds_of(partial(live.observe, truth), n)])
    least = 1e6 * np.min(taken, axis=0)
    first, control, own, observed = np.array(taken).T
    ratios = [control / first, observed / first, (own + observed) / first]
    return [
        f"{layer.__name__}, {n_in} features, {n_units} units",
        *(f"{each:.1f}" for each in np.delete(least, 1)),
        *(f"{np.median(each):.2f}" for each in ratios),
    ]


def main() -> None:
    arguments = parser(__doc__, rounds=9)
    arguments.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="has ETTh1.csv"
    )
    args = parse(arguments)
    torch.set_num_threads(1)
    report = Report(__doc__, args)
    warnings.simplefilter("ignore", UserWarning)
    columns = ["series", "cell", "error as fitted", "error learning", "ratio"]
    errors = Table("Root mean squared errors", columns)
    errors.rows += [made("drift", 1.0, "mingru"), made("still", 0.0, "mingru")]
    if not args.quick:
        errors.rows += [made("drift", 1.0, "linear+lstm"), made("still", 0.0, "linear+lstm")]
        errors.rows += [
            etth1(hours, cell, args.data) for hours in (6, 24) for cell in ("mingru", "lru")
        ]
    report.add(errors)
    columns = ["layer", "plain step, us", "step that learns, us", "truth, us"]
    columns += ["control: another plain stream", "truth / plain step", "both / plain step"]
    costs = Table("One series: processor time", columns)
    for layer in (MinGRU, MinLSTM, LRU, LSTM):
        for sizes in ((10, 32), (3, 96)):
            costs.rows.append(cost(layer, *sizes, args.rounds))
    report.add(costs)


if __name__ == "__main__":
    main()
