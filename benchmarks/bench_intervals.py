"""How often the intervals of streams hold the truth, how wide they are, and what they cost.

ETTh1: the oil temperature in 6 and 24 hours from seven series, fitted on the first 12 months and
watched for the months 17 to 20; each truth comes as many steps late as the forecast looks ahead.
"drift": the slope of the truth changes and its noise grows after the fit. A fixed interval is that
of ``predict_interval``. The cost is that of a step with ``interval`` beside a plain one, by turns,
and, separately, of taking in its truth.

    python benchmarks/bench_intervals.py --data FOLDER
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import numpy as np
from common import Report, Table, parse, parser
from real_data import load

from fluxutils_py import SequenceRegressor

LEVEL = 0.9


def watch(est: SequenceRegressor, x: np.ndarray, y: np.ndarray, begin: int, late: int) -> list[str]:
    """Shares and widths of the steps from ``begin`` on that have a truth, adaptive and fixed."""
    live = est.stream(x.shape[1], interval=LEVEL)
    ends = []
    for t in range(x.shape[2]):
        ends.append(live.step(x[:, :, t])[1:])
        if t >= late:
            live.observe(y[:, :, t - late])
    low, high = np.stack(ends, axis=-1)
    _, fixed_low, fixed_high = est.predict_interval(x)
    known = ~np.isnan(y)
    known[:, :, :begin] = False
    cells = []
    for below, above in ((low, high), (fixed_low, fixed_high)):
        inside = (below <= y) & (y <= above)
        cells += [f"{inside[known].mean():.3f}", f"{(above - below)[known].mean():.2f}"]
    return cells


def etth1(hours: int, folder: Path) -> list[str]:
    """The stream also sees the months 13 to 16, between the fit and the months that count."""
    data = load(f"etth1_{hours}", folder)
    est = SequenceRegressor(level=100 * LEVEL, random_state=0, verbose=False)
    est.fit(data.x_train, data.y_train, lengths=data.train_lengths)
    month = 30 * 24
    whole = np.concatenate([data.y_train[:, :, : 12 * month], data.y_test[:, :, 12 * month :]], 2)
    truth = oil(folder, hours, data.x_test.shape[2])
    assert np.nanmax(np.abs(truth - whole)) < 1e-3
    return watch(est, data.x_test, truth, 16 * month, hours)


def oil(folder: Path, hours: int, n_steps: int) -> np.ndarray:
    """The oil temperature ``hours`` later, (1, 1, T); NaN where it lies beyond the data."""
    values = np.loadtxt(folder / "ETTh1.csv", delimiter=",", skiprows=1, usecols=7)[:n_steps]
    truth = np.full((1, 1, n_steps), np.nan)
    truth[0, 0, :-hours] = values[hours:]
    return truth


def drift() -> list[str]:
    rng = np.random.default_rng(0)
    n, fitted = 4000, 1000
    x = rng.normal(size=(1, 2, n))
    amount = np.clip((np.arange(n) - fitted) / 2000, 0, None)
    y = x * (1 + amount) + 2 * amount + 0.3 * (1 + 2 * amount) * rng.normal(size=x.shape)
    est = SequenceRegressor(cell="linear", level=100 * LEVEL).fit(
        x[:, :, :fitted], y[:, :, :fitted]
    )
    return watch(est, x[:, :, fitted:], y[:, :, fitted:], 0, 0)


def cost(n_series: int, rounds: int, n_steps: int) -> list[str]:
    """Microseconds of a plain step, of what an interval adds, and of a truth; least of the rounds."""
    x = np.random.default_rng(0).normal(size=(2, 100, 60))
    est = SequenceRegressor(32, cell="lstm", max_updates=50, level=100 * LEVEL, verbose=False)
    est.fit(x, x[:1].cumsum(2))
    step, truth = np.ascontiguousarray(x[:, :n_series, 0]), np.zeros((1, n_series))
    plain, live = est.stream(n_series), est.stream(n_series, interval=LEVEL)
    taken: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for seconds, function, argument in (
            (taken[0], plain.step, step),
            (taken[1], live.step, step),
            (taken[2], live.observe, truth),
        ):
            began = time.perf_counter()
            for _ in range(n_steps):
                function(argument)
            seconds.append((time.perf_counter() - began) / n_steps * 1e6)
    bare, with_interval, late = map(min, taken)
    return [f"{bare:.1f}", f"{with_interval - bare:.1f}", f"{late:.1f}"]


def main() -> None:
    made = parser(__doc__, rounds=40)
    made.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="has ETTh1.csv")
    args = parse(made)
    report = Report(__doc__, args)
    warnings.simplefilter("ignore", UserWarning)
    columns = ["series", "inside", "mean width", "inside, fixed", "mean width, fixed"]
    held = Table(f"Intervals of {LEVEL}", columns, [["drift", *drift()]])
    if not args.quick:
        held.rows += [[f"ETTh1, {h} hours", *etth1(h, args.data)] for h in (6, 24)]
    report.add(held)
    columns = ["series", "plain step, us", "interval adds, us", "observe, us"]
    costs = Table("LSTM of 32 units", columns)
    for n_series in (1, 10, 100):
        costs.rows.append([str(n_series), *cost(n_series, args.rounds, 200)])
    report.add(costs)


if __name__ == "__main__":
    main()
