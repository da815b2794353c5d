"""Five tasks after the protocol of GIFT-Eval, a public board of forecasters, each by the Forecaster's
defaults and the seasonal naive forecast.

The tasks are M4 Hourly (48 hours ahead) and ETTh1: 48, 480 and 720 hours ("short", "medium", "long")
and, of its whole days, 30 days ahead. As on the board, a tenth of each series is forecast, in
windows that follow each other up to its end: as many as hold it, at most 20; one of M4. A forecaster
is trained once, on what comes before the first window, and reads the past of each window. Each of
the series of ETTh1 counts by itself.

MASE is that of the median: the mean absolute error of a window in units of the mean absolute change
of its past over a season, 24 steps of hours and one of days. CRPS is the sum of the pinball losses of
the levels .1 to .9, each twice, over the sum of the absolute values, averaged over the levels. The
80 % band covers the values between the levels .1 and .9, the 50 % band those between straight lines
at .25 and .75. Of a forecast without levels, all of them are the forecast.

What differs from the board: its hours of ETT are sums of quarters of an hour, and those of
``ETTh1.csv`` are one of them, which is noisier. So compare the ratio to the seasonal naive forecast,
which is in brackets; the board's best pretrained models have .55, .81, .78, .90 and .92 of theirs,
in the order of the tasks above (result files of August 2026). M4 is the same data.

Settings are chosen on ``--part validation``: all that comes before the first window of any task of
these series, with the windows at its end. Seconds are those of processor time, with ``--threads``.
``--quick`` trains for a few steps.

``--peers PYTHON`` adds NeuralForecast's NHITS and PatchTST with the same levels (1,000 steps, their
default, but at most ``--peer-seconds``; the past is four horizons, at most 512 steps) and
statsforecast's AutoETS, fitted on the last ``PEER_PAST`` steps before each window.

    python benchmarks/bench_gift.py --data DIRECTORY [--rounds 1] [--part test] [--threads 2]
    [--tasks short medium] [--peers PYTHON]
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from bench_m4 import read
from common import Report, Table, parse, parser
from neuralforecast_peers import add_arguments, peers

from fluxutils_py.forecasting import Forecaster

LEVELS = tuple(k / 10 for k in range(1, 10))
PEERS = "NHITS", "PatchTST", "AutoETS"
PEER_STEPS = 1000
PEER_PAST = 500  # values; more take statsforecast minutes per series
SHARE, MOST_WINDOWS = 0.1, 20  # of each series that is forecast, and in how many windows


@dataclass(frozen=True)
class Task:
    """Series of equal frequency, and what is to be forecast of them."""

    series: list[np.ndarray]
    h: int
    freq: str
    season: int  # of the seasonal naive forecast and the MASE
    n_windows: int

    @property
    def first_ends(self) -> list[int]:
        """Where the past of the first window ends, of each series."""
        return [len(y) - self.n_windows * self.h for y in self.series]

    def truncated(self, n_steps: int) -> "Task":
        """The task on what comes before the last ``n_steps``."""
        series = [y[: len(y) - n_steps] for y in self.series]
        return Task(series, self.h, self.freq, self.season, self.n_windows)


def windows(n_steps: int, h: int) -> int:
    """As many windows as hold a tenth of a series, at most 20."""
    return int(np.clip(np.ceil(SHARE * n_steps / h), 1, MOST_WINDOWS))


def read_tasks(folder: str, part: str) -> dict[str, Task]:
    """The five tasks by name."""
    past, future = read(folder, part)
    m4 = [np.concatenate(both) for both in zip(past, future, strict=True)]
    tasks = {"m4_hourly": Task(m4, 48, "h", 24, 1)}
    hours = pd.read_csv(Path(folder) / "ETTh1.csv").drop(columns="date").to_numpy().T
    n_days = hours.shape[1] // 24
    days = hours[:, : 24 * n_days].reshape(len(hours), n_days, 24).mean(2)
    ett = {}
    for name, h in {"short": 48, "medium": 480, "long": 720}.items():
        ett[f"ett1 H {name}"] = Task([*hours], h, "h", 24, windows(hours.shape[1], h))
    ett["ett1 D"] = Task([*days], 30, "D", 1, windows(n_days, 30))
    if part == "validation":
        tested = max(task.n_windows * task.h for task in ett.values() if task.freq == "h")
        for name, task in ett.items():
            steps = tested if task.freq == "h" else tested // 24
            ett[name] = task.truncated(steps)
    return tasks | ett


def frame(task: Task) -> pd.DataFrame:
    """A long frame; the dates of all series begin on the same day."""
    parts = [
        pd.DataFrame(
            {
                "unique_id": f"{i:04d}",
                "ds": pd.date_range("2016-07-01", periods=len(y), freq=task.freq),
                "y": y,
            }
        )
        for i, y in enumerate(task.series)
    ]
    return pd.concat(parts, ignore_index=True)


def truth(task: Task) -> np.ndarray:
    """The values of the windows: (N, W, h)."""
    n_test = task.n_windows * task.h
    return np.stack([y[-n_test:].reshape(task.n_windows, task.h) for y in task.series])


def scales(task: Task) -> np.ndarray:
    """The mean absolute change over a season in the past of each window: (N, W)."""
    change = [np.abs(y[task.season :] - y[: -task.season]) for y in task.series]
    ends = [first + task.h * np.arange(task.n_windows) for first in task.first_ends]
    return np.array(
        [[c[: end - task.season].mean() for end in at] for c, at in zip(change, ends, strict=True)]
    )


def scores(task: Task, levels: np.ndarray) -> dict[str, float]:
    """Scores of the levels (9, N, W, h) of a forecast."""
    y = truth(task)
    q = np.array(LEVELS)[:, None, None, None]
    error = y - levels
    pinball = np.maximum(q * error, (q - 1) * error).sum((1, 2, 3))
    middle = levels[len(LEVELS) // 2]
    quartiles = [(levels[i] + levels[i + 1]) / 2 for i in (1, 6)]
    return {
        "MASE": float((np.abs(y - middle).mean(2) / scales(task)).mean()),
        "CRPS": float((2 * pinball / np.abs(y).sum()).mean()),
        "80 %": float(((y >= levels[0]) & (y <= levels[-1])).mean()),
        "50 %": float(((y >= quartiles[0]) & (y <= quartiles[1])).mean()),
    }


def seasonal_naive(task: Task) -> np.ndarray:
    """Levels (9, N, W, h), all the same."""
    found = np.empty(truth(task).shape)
    for i, (y, first) in enumerate(zip(task.series, task.first_ends, strict=True)):
        for w in range(task.n_windows):
            past = y[: first + w * task.h]
            found[i, w] = np.resize(past[-task.season :], task.h)
    return np.repeat(found[None], len(LEVELS), 0)


def ours(task: Task, **settings: object) -> tuple[np.ndarray, float, str]:
    """Levels (9, N, W, h) of a Forecaster, seconds of processor time, and what it chose."""
    df = frame(task)
    age = df.groupby("unique_id").cumcount(ascending=False)
    began = time.process_time()
    fc = Forecaster(task.h, freq=task.freq, quantiles=LEVELS, verbose=False, **settings)
    fc.fit(df[age >= task.n_windows * task.h])
    found = fc.cross_validation(df, task.n_windows, refit=None, quantiles=LEVELS)
    seconds = time.process_time() - began
    found = found.sort_values(["unique_id", "cutoff", "ds"])
    columns = found[[f"Forecaster-q{q:g}" for q in LEVELS]].to_numpy()
    levels = columns.T.reshape(len(LEVELS), len(task.series), task.n_windows, task.h)
    return levels, seconds, str(getattr(fc, "network_", ""))


def theirs(
    task: Task, python: str, seconds: float, threads: int, steps: int
) -> Iterator[tuple[str, np.ndarray, float]]:
    """Name, levels (9, N, W, h) and seconds of processor time of each peer."""
    found = peers(
        python,
        task.series,
        task.h,
        task.n_windows * task.h,
        input_size=min(4 * task.h, 512),
        seconds=seconds,
        threads=threads,
        models=PEERS,
        steps=steps,
        step_size=task.h,
        levels=LEVELS,
        season=task.season,
        most_past=PEER_PAST,
    )
    for name, values, took in found:
        # levels of NeuralForecast may cross
        yield name, np.sort(np.moveaxis(values, -1, 0), 0), took


def row(name: str, found: Mapping[str, float], naive: float, seconds: str) -> list[str]:
    """A row of a table; the ratio to the seasonal naive forecast in brackets."""
    mase = f"{found['MASE']:.3f} ({found['MASE'] / naive:.3f})"
    return [
        name,
        mase,
        f"{found['CRPS']:.4f}",
        f"{found['80 %']:.1%}",
        f"{found['50 %']:.1%}",
        seconds,
    ]


def main() -> None:
    made = parser(__doc__, rounds=1)
    made.add_argument(
        "--data", required=True, help="folder with ETTh1.csv and the files M4-Hourly-*.csv"
    )
    made.add_argument("--part", choices=["test", "validation"], default="test")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--tasks", nargs="+", metavar="TASK", help="the last word of each")
    add_arguments(made, 240)
    args = parse(made)
    torch.set_num_threads(args.threads)
    report = Report(__doc__, args)
    settings = {"max_steps": 20} if args.quick else {}
    for name, task in read_tasks(args.data, args.part).items():
        if args.tasks is not None and name.split()[-1] not in args.tasks:
            continue
        title = (
            f"{name}, {args.part}, {len(task.series)} series, {task.h} steps ahead in "
            f"{task.n_windows} windows, {args.threads} threads"
        )
        columns = ["forecast", "MASE (of naive)", "CRPS", "in 80 %", "in 50 %", "seconds"]
        table = Table(title, columns)
        found = scores(task, seasonal_naive(task))
        naive = found["MASE"]
        table.rows.append(row("seasonal naive", found, naive, ""))
        for seed in range(args.rounds):
            levels, seconds, chosen = ours(task, random_state=seed, **settings)
            said = f"**fluxutils_py, seed {seed}**"
            if chosen:
                said += f", {chosen}"
            table.rows.append(row(said, scores(task, levels), naive, f"{seconds:.0f}"))
            print(table.rows[-1], flush=True)
        if args.peers is not None:
            steps = 20 if args.quick else PEER_STEPS
            for peer, levels, seconds in theirs(
                task, args.peers, args.peer_seconds, args.threads, steps
            ):
                table.rows.append(row(peer, scores(task, levels), naive, f"{seconds:.0f}"))
                print(table.rows[-1], flush=True)
        report.add(table)
    if args.peers is None:
        report.leave_out("NeuralForecast and statsforecast", "--peers is not given")


if __name__ == "__main__":
    main()
