"""ETTh1, all seven series, the next 24 and 96 hours: the Forecaster through its public API against published forecasts.

Hourly data of an electricity transformer (Zhou et al., Informer, AAAI 2021; file from github.com/zhouhaoyi/ETDataset).
The common protocol: 12, 4 and 4 months of 30 days for training, validation and test, standardised with the training
months, every start in the test months scored on all series and hours. Trained on the training months alone. Few series
of a long past are soon learnt by heart: the settings that differ from the defaults were chosen on the validation months
at 24 hours (``--part validation``), never on the test months. float32, a seed per round. Fails unless the mean MSE of
the seeds at 24 hours is at most LIMIT.

    python benchmarks/bench_etth1.py --data ETTh1.csv [--rounds 3] [--part test] [--threads 1]
"""

import sys
import time

import numpy as np
import pandas as pd
import torch
from common import Report, Table, parse, parser

from fluxutils_py.forecasting import Forecaster

HORIZONS, C, DAY = (24, 96), 7, 24  # hours ahead, series, season
TRAIN, VAL, TEST = (30 * DAY * months for months in (12, 16, 20))  # where each part ends
SETTINGS = {"max_steps": 200, "n_models": 4, "dropout": 0.4, "input_size": 48}
LIMIT = 0.35
PUBLISHED = {24: {"LSTMa (Informer paper)": (0.650, 0.624), "Informer": (0.577, 0.549)}, 96: {}}


def read(path):
    """The first 20 months, standardised with the first 12, as a long frame; and the times."""
    wide = pd.read_csv(path, parse_dates=["date"]).iloc[:TEST]
    assert wide.shape == (TEST, C + 1), f"{path} has {wide.shape} hours and columns, expected {(TEST, C + 1)} at least"
    z = wide.drop(columns="date")
    z = (z - z[:TRAIN].mean()) / z[:TRAIN].std(ddof=0)
    return z.assign(ds=wide.date).melt("ds", var_name="unique_id", value_name="y"), wide.date


def score(df, times, h, part, steps, seed):
    """MSE and MAE over every start of a part whose hours lie in it, of the forecast and of the seasonal naive one."""
    begin, end = (VAL, TEST) if part == "test" else (TRAIN, VAL)
    began = time.perf_counter()
    settings = {**SETTINGS, "max_steps": steps}
    fc = Forecaster(h, DAY, "h", random_state=seed, verbose=False, **settings).fit(df[df.ds < times[TRAIN]])
    seconds = time.perf_counter() - began
    starts = end - begin - h + 1
    found = fc.cross_validation(df[df.ds <= times[end - 1]], n_windows=starts, step_size=1, refit=None)
    assert len(found) == C * h * starts
    errors = [(found[name] - found.y).to_numpy() for name in ("Forecaster", "SeasonalNaive")]
    return [(float((e**2).mean()), float(np.abs(e).mean())) for e in errors], seconds


def main():
    made = parser(__doc__, rounds=3)
    made.add_argument("--data", required=True, help="ETTh1.csv, from github.com/zhouhaoyi/ETDataset")
    made.add_argument("--part", choices=["test", "validation"], default="test")
    made.add_argument("--threads", type=int, default=1)
    args = parse(made)
    torch.set_num_threads(args.threads)
    report = Report(__doc__, args)
    df, times = read(args.data)
    means = {}
    for h in HORIZONS:
        table = Table(f"ETTh1, {args.part}, {C} series, {h} hours ahead", ["forecast", "MSE", "MAE", "seconds"])
        for name, (mse, mae) in PUBLISHED[h].items():
            table.rows.append([f"{name}, published", f"{mse:.3f}", f"{mae:.3f}", ""])
        results = []
        for seed in range(args.rounds):
            steps = SETTINGS["max_steps"] // (20 if args.quick else 1)
            ((mse, mae), naive), seconds = score(df, times, h, args.part, steps, seed)
            if seed == 0:
                table.rows.append(["seasonal naive, 24 h", *(f"{v:.4f}" for v in naive), ""])
            results.append((mse, mae, seconds))
            table.rows.append([f"fluxutils_py, seed {seed}", f"{mse:.4f}", f"{mae:.4f}", f"{seconds:.0f}"])
        mse, mae, seconds = np.mean(results, 0)
        table.rows.append([f"**mean of {len(results)}**", f"**{mse:.4f}**", f"**{mae:.4f}**", f"{seconds:.0f}"])
        means[h] = mse
        report.add(table)
    if means[24] > LIMIT and not args.quick and args.part == "test":
        sys.exit(f"mean MSE {means[24]:.4f} at 24 hours is not at most {LIMIT}")


if __name__ == "__main__":
    main()
