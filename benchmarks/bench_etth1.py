"""ETTh1, all seven series, the next 24 and 96 hours: the Forecaster's defaults against published
scores and peers.

Hourly data of an electricity transformer (Zhou et al., Informer, AAAI 2021; file from
github.com/zhouhaoyi/ETDataset). The common protocol: 12, 4 and 4 months of 30 days for training,
validation and test, standardised with the training months, every start in the test months scored on
all series and hours. Trained on the training months alone. The Forecaster has its defaults, which
were chosen on other data (see bench_m4.py) but for the network of segments, on the validation months;
nothing was chosen on the test months, and
``--part validation`` scores the validation months, for trying things out. A seed per round.

``--peers PYTHON`` adds NeuralForecast's NHITS, DLinear and LSTM (see neuralforecast_peers.py),
trained on the same months and threads with their defaults but for an input of a week of hours, the
robust scaler, and as many steps as the Forecaster may make; a row says where a model was cut short,
after ``--peer-seconds``. Fails unless the mean MSE of the seeds at 24 hours is at most LIMIT.
``--quick`` makes a twentieth of the steps, and checks nothing.

    python benchmarks/bench_etth1.py --data ETTh1.csv [--rounds 3] [--part test] [--threads 2]
    [--peers PYTHON]
"""

import sys
import time

import numpy as np
import pandas as pd
import torch
from common import Report, Table, parse, parser
from neuralforecast_peers import STEPS, add_arguments, peers

from fluxutils_py.forecasting import Forecaster

HORIZONS, C, DAY = (24, 96), 7, 24  # hours ahead, series, season
TRAIN, VAL, TEST = (30 * DAY * months for months in (12, 16, 20))  # where each part ends
LIMIT = 0.35
PUBLISHED = {24: {"LSTMa (Informer paper)": (0.650, 0.624), "Informer": (0.577, 0.549)}, 96: {}}


def read(path):
    """The first 20 months, standardised with the first 12, as a long frame; and the times."""
    wide = pd.read_csv(path, parse_dates=["date"]).iloc[:TEST]
    assert wide.shape == (TEST, C + 1), (
        f"{path} has {wide.shape} hours and columns, expected {(TEST, C + 1)} at least"
    )
    z = wide.drop(columns="date")
    z = (z - z[:TRAIN].mean()) / z[:TRAIN].std(ddof=0)
    return z.assign(ds=wide.date).melt("ds", var_name="unique_id", value_name="y"), wide.date


def span(part):
    """Where a part that is scored begins and ends."""
    return (VAL, TEST) if part == "test" else (TRAIN, VAL)


# one network, and no other to choose from
ONE = {"n_models": 1, "network": "recurrent", "calibrate": False}


def score(df, times, h, part, **settings):
    """MSE and MAE over every start of a part whose hours lie in it, of the forecast and of the
    seasonal naive one.
    """
    begin, end = span(part)
    began = time.perf_counter()
    fc = Forecaster(h, DAY, "h", verbose=False, **settings).fit(df[df.ds < times[TRAIN]])
    seconds = time.perf_counter() - began
    starts = end - begin - h + 1
    found = fc.cross_validation(
        df[df.ds <= times[end - 1]], n_windows=starts, step_size=1, refit=None
    )
    assert len(found) == C * h * starts
    hours = (found.ds - found.cutoff) // pd.Timedelta(hours=1)
    day_before = found.ds - pd.to_timedelta(-(-hours // DAY), unit="D")
    naive = found[["unique_id"]].assign(ds=day_before).merge(df, "left").y
    errors = [(forecast - found.y).to_numpy() for forecast in (found.Forecaster, naive)]
    return [(float((e**2).mean()), float(np.abs(e).mean())) for e in errors], seconds


def score_peers(df, times, h, part, python, **settings):
    """Name, MSE, MAE and seconds of each of NeuralForecast's models."""
    begin, end = span(part)
    series = [y.to_numpy() for _, y in df[df.ds <= times[end - 1]].groupby("unique_id").y]
    truth = np.stack([np.lib.stride_tricks.sliding_window_view(y[begin:], h) for y in series])
    more = {"input_size": 7 * DAY, "n_validation": begin - TRAIN, **settings}
    for name, values, seconds in peers(python, series, h, end - begin, **more):
        e = values - truth
        yield name, float((e**2).mean()), float(np.abs(e).mean()), seconds


def main():
    made = parser(__doc__, rounds=3)
    made.add_argument(
        "--data", required=True, help="ETTh1.csv, from github.com/zhouhaoyi/ETDataset"
    )
    made.add_argument("--part", choices=["test", "validation"], default="test")
    made.add_argument("--threads", type=int, default=2)
    add_arguments(made, seconds=60)
    args = parse(made)
    torch.set_num_threads(args.threads)
    steps = STEPS // 20 if args.quick else STEPS
    report = Report(__doc__, args)
    df, times = read(args.data)
    means = {}
    for h in HORIZONS:
        title = f"ETTh1, {args.part}, {C} series, {h} hours ahead, {args.threads} threads"
        table = Table(title, ["forecast", "MSE", "MAE", "seconds"])
        for name, (mse, mae) in PUBLISHED[h].items():
            table.rows.append([f"{name}, published", f"{mse:.3f}", f"{mae:.3f}", ""])
        results = []
        for seed in range(args.rounds):
            ((mse, mae), naive), seconds = score(
                df, times, h, args.part, max_steps=steps, random_state=seed, **ONE
            )
            if seed == 0:
                table.rows.append(["seasonal naive, 24 h", *(f"{v:.4f}" for v in naive), ""])
            results.append((mse, mae, seconds))
            table.rows.append(
                [f"fluxutils_py, seed {seed}", f"{mse:.4f}", f"{mae:.4f}", f"{seconds:.0f}"]
            )
            print(table.rows[-1], flush=True)
        mse, mae, seconds = np.mean(results, 0)
        means[h] = mse
        mean = [f"**{mse:.4f}**", f"**{mae:.4f}**", f"{seconds:.0f}"]
        table.rows.append([f"**fluxutils_py, mean of {len(results)}**", *mean])
        shorter = {"max_steps": steps} if args.quick else {}
        ((mse, mae), _), seconds = score(df, times, h, args.part, random_state=0, **shorter)
        table.rows.append(
            ["**fluxutils_py, defaults**", f"**{mse:.4f}**", f"**{mae:.4f}**", f"{seconds:.0f}"]
        )
        print(table.rows[-1], flush=True)
        if args.peers is not None:
            settings = {"seconds": args.peer_seconds, "threads": args.threads, "steps": steps}
            for name, mse, mae, seconds in score_peers(
                df, times, h, args.part, args.peers, **settings
            ):
                table.rows.append([name, f"{mse:.4f}", f"{mae:.4f}", f"{seconds:.0f}"])
                print(table.rows[-1], flush=True)
        report.add(table)
    if args.peers is None:
        report.leave_out("NeuralForecast", "--peers is not given")
    if means[24] > LIMIT and not args.quick and args.part == "test":
        sys.exit(f"mean MSE {means[24]:.4f} at 24 hours is not at most {LIMIT}")


if __name__ == "__main__":
    main()
