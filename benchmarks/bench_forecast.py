"""What forecasting costs in memory and time, on made-up hourly series, h=48, with a week of lags:
76 inputs.

First table: a window of ``fit`` (48 series x 96 steps, LSTM(96), in memory), in units of the same
network's training step in a plain loop over tensors that are ready: the rest is the cutting of
lags, levels and targets. Second table: to take in a day of new rows with ``update`` and forecast
again, in units of a new ``predict`` on the whole series; the forecasts must be equal. Last table:
``n_models=4`` side by side in one pass, in units of four fits of one network each.

    python benchmarks/bench_forecast.py [--rounds 5]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import (
    Report,
    Table,
    interleaved,
    median,
    parse,
    parser,
    ratios,
    spread,
    stopwatch,
)

from fluxutils_py import loadstates, states
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.forecaster_settings import with_size
from fluxutils_py.forecasting.model_fitting import make_network
from fluxutils_py.forecasting.networks import ForecastLoss
from fluxutils_py.training import StopTraining
from fluxutils_py.training.make_optimizer import adamw

H, DAY, WEEK = 48, 24, 168
SETTINGS: dict[str, Any] = {
    "h": H,
    "season_length": (DAY, WEEK),
    "network": "recurrent",
    "n_models": 1,
    "calibrate": False,
    "random_state": 0,
    "verbose": False,
}


class Watch:
    """When each window ended; stops after so many windows."""

    def __init__(self, n: int) -> None:
        self.n, self.times = n, [time.perf_counter()]

    def on_step(self, loop: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > self.n:
            raise StopTraining


def panel(n_series: int, n_steps: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    t = np.arange(n_steps)
    level = rng.uniform(20, 200, (n_series, 1))
    y = level * (2 + np.sin(2 * np.pi * t / DAY) + 0.5 * np.sin(2 * np.pi * t / WEEK))
    y *= np.exp(0.1 * rng.standard_normal(y.shape))
    ids = np.repeat([f"s{i:04d}" for i in range(n_series)], n_steps)
    return pd.DataFrame({"unique_id": ids, "ds": np.tile(t, n_series), "y": y.ravel()})


def rows_of(seconds: Mapping[str, list[float]], base: str, scale: float = 1.0) -> list[list[str]]:
    return [
        [name, spread(ratios(taken, seconds[base])), f"{1e3 * scale * median(taken):.1f}"]
        for name, taken in seconds.items()
    ]


def window_table(df: pd.DataFrame, rounds: int, n_windows: int) -> Table:
    fc = Forecaster(**SETTINGS, max_steps=1).fit(df)
    B, S = fc.batchsize, fc.seqsize
    fitted = fc._fitted
    windows = fitted.windows(fc._read_known(df, None))
    rows = Segments(np.arange(B), np.full(B, WEEK), np.full(B, S))
    x, y = (
        torch.from_numpy(cut(rows, 0, S).swapaxes(0, 1).copy())
        for cut in (windows.inputs, windows.targets)
    )

    def by_hand() -> float:
        torch.manual_seed(0)
        model = make_network(with_size(fc, len(df)), fitted)().train()
        loss = ForecastLoss(fc.loss_name_, H, (), fc.features_.log)
        optimizer, times = adamw(model.parameters(), lr=1e-3), []
        for _ in range(n_windows + 1):
            began = time.perf_counter()
            optimizer.zero_grad()
            loss(model, x, y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loadstates(model, [t.detach() for t in states(model)])
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def by_fit() -> float:
        watch = Watch(n_windows + 1)
        Forecaster(**SETTINGS, callbacks=watch).fit(df)
        return statistics.median(np.diff(watch.times)[1:])

    turns: dict[str, Callable[[], float]] = {
        "plain loop": by_hand,
        "plain loop again (A/A)": by_hand,
        "fit": by_fit,
    }
    seconds = interleaved(turns, rounds)
    title = f"a window of {B} series x {S} steps"
    return Table(title, ["way", "time / plain loop (range)", "ms"], rows_of(seconds, "plain loop"))


def update_table(df: pd.DataFrame, rounds: int) -> Table:
    last = int(df.ds.max()) + 1
    days = {
        r: df[(df.ds >= last - DAY * (rounds - r)) & (df.ds < last - DAY * (rounds - r - 1))]
        for r in range(rounds)
    }
    past = {r: df[df.ds < last - DAY * (rounds - r - 1)] for r in range(rounds)}
    fc = Forecaster(**SETTINGS, max_steps=1).fit(df[df.ds < last - DAY * rounds])
    fc.predict()
    whole, updated, round_of = {}, {}, dict.fromkeys(("predict", "again", "update", "alone"), -1)

    def turn(name: str) -> float:
        round_of[name] += 1
        r = round_of[name]
        if name == "update":

            def act() -> None:
                fc.update(days[r])
                updated[r] = fc.predict()

        elif name == "alone":

            def act() -> None:
                fc.predict()

        else:

            def act() -> None:
                whole[r] = fc.predict(past[r])

        return stopwatch(act)

    names = {
        "predict(df), the whole series": "predict",
        "predict(df) again (A/A)": "again",
        "update with a day of rows, then predict()": "update",
        "predict() alone": "alone",
    }
    seconds = interleaved({label: partial(turn, name) for label, name in names.items()}, rounds)
    for r in range(rounds):
        np.testing.assert_allclose(updated[r].Forecaster, whole[r].Forecaster, rtol=1e-4)
    n = df.unique_id.nunique()
    title = f"new forecasts of {n} series of {last} steps"
    return Table(
        title, ["way", "time / predict(df) (range)", "ms"], rows_of(seconds, next(iter(names)))
    )


def models_table(df: pd.DataFrame, rounds: int, steps: int) -> Table:
    settings = {**SETTINGS, "max_steps": steps}

    def one_by_one() -> None:
        for seed in range(4):
            Forecaster(**{**settings, "random_state": seed}).fit(df)

    def side_by_side() -> None:
        Forecaster(**{**settings, "n_models": 4}).fit(df)

    ways = {
        "four fits": one_by_one,
        "four fits again (A/A)": one_by_one,
        "n_models=4": side_by_side,
    }
    seconds = interleaved({name: partial(stopwatch, way) for name, way in ways.items()}, rounds)
    return Table(
        "four networks", ["way", "time / four fits (range)", "ms"], rows_of(seconds, "four fits")
    )


def main() -> None:
    made = parser(__doc__, rounds=5)
    args = parse(made)
    report = Report(__doc__, args)
    df = panel(48, 500) if args.quick else panel(96, 1200)
    report.add(window_table(df, args.rounds, 3 if args.quick else 20))
    report.add(update_table(df, args.rounds))
    report.add(models_table(df, min(args.rounds, 3), 8 if args.quick else 26))


if __name__ == "__main__":
    main()
