"""M4 Hourly, the next 48 hours of 414 series: the Forecaster's defaults against published scores
and peers.

Series of the M4 competition (Makridakis, Spiliotis, Assimakopoulos 2020, Int. J. Forecasting 36(1),
54-74; files from github.com/Mcompetitions/M4-methods). The defaults of the Forecaster were chosen
on the validation part, the last 48 hours of the training file, never on the test file: ``--part
validation`` scores there. With the test part the validation hours belong to the past. sMAPE and
MASE as in the competition. One network of one seed stands beside the defaults: several networks,
the choice between two kinds, and what the held-out end corrects.

ES-RNN won the competition (Smyl 2020, Int. J. Forecasting 36(1), 75-85). Its row has the scores of
its submission, 118, as ``datasetsforecast.m4.M4Evaluation`` computes them from the competition's
file of its forecasts; SysIdentPy's page "M4 Benchmark" prints them.

``--peers PYTHON`` adds NeuralForecast's NHITS, DLinear and LSTM (see neuralforecast_peers.py),
trained on the same threads with their defaults but for an input of a week of hours, the robust
scaler, and as many steps as ours; a row says where a model was cut short, after ``--peer-seconds``.
Fails unless the bounds hold: sMAPE of one model at most 9.4 (mean of the seeds), of the
defaults at most 9.05, the coverage of their 80 % band 77 to 83 %, 90 seconds a network. ``--quick`` makes a
twentieth of the steps, and checks nothing.

    python benchmarks/bench_m4.py --data DIRECTORY [--rounds 3] [--part test] [--threads 2] [--peers
    PYTHON]
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import Report, Table, parse, parser
from neuralforecast_peers import STEPS, add_arguments, peers

from fluxutils_py.forecasting import Forecaster

H, DAY = 48, 24
LIMITS = {"one": 9.4, "defaults": 9.05, "coverage": (0.77, 0.83), "seconds": 90.0}
# one network, and no other to choose from
ONE = {"n_models": 1, "network": "recurrent", "calibrate": False}
PUBLISHED = {
    "ES-RNN, the competition's winner over all frequencies": ("9.328", "0.893"),
    "Doornik, the best entry for the hourly series": ("8.913", ""),
}


def read(folder, part):
    """The past and the future of each series: lists of arrays."""
    past, future = (
        [
            np.array([float(v) for v in line.rstrip().replace('"', "").split(",")[1:] if v])
            for line in lines[1:]
        ]
        for lines in (
            (Path(folder) / f"M4-Hourly-{name}.csv").read_text().splitlines()
            for name in ("train", "test")
        )
    )
    if part == "validation":
        past, future = [y[:-H] for y in past], [y[-H:] for y in past]
    return past, np.array(future)


def frame(past):
    """A long frame with integer times."""
    return pd.DataFrame(
        {
            "unique_id": np.repeat(
                [f"H{i + 1:03d}" for i in range(len(past))], [len(y) for y in past]
            ),
            "ds": np.concatenate([np.arange(len(y)) for y in past]),
            "y": np.concatenate(past),
        }
    )


def scores(forecast, truth, past):
    """sMAPE and MASE of forecasts (N, H), as in the competition."""
    smape = 200 * np.mean(np.abs(forecast - truth) / (np.abs(forecast) + np.abs(truth)))
    scale = np.array([np.abs(y[DAY:] - y[:-DAY]).mean() for y in past])
    return float(smape), float(np.mean(np.abs(forecast - truth) / scale[:, None]))


def forecast(df, **settings):
    """Columns of forecasts (N, H), and seconds of fit and predict."""
    began = time.perf_counter()
    fc = Forecaster(h=H, season_length=DAY, verbose=False, **settings).fit(df)
    found = fc.predict()
    seconds = time.perf_counter() - began
    names = [c for c in found if c not in ("unique_id", "ds")]
    return {name: found[name].to_numpy().reshape(-1, H) for name in names}, seconds


def main():
    made = parser(__doc__, rounds=3)
    made.add_argument(
        "--data", required=True, help="folder with M4-Hourly-train.csv and M4-Hourly-test.csv"
    )
    made.add_argument("--part", choices=["test", "validation"], default="test")
    made.add_argument("--threads", type=int, default=2)
    add_arguments(made, seconds=200)
    args = parse(made)
    torch.set_num_threads(args.threads)
    steps = STEPS // 20 if args.quick else STEPS
    report = Report(__doc__, args)
    past, truth = read(args.data, args.part)
    df = frame(past)
    table = Table(
        f"M4 Hourly, {args.part} part, {len(past)} series, {H} hours ahead, {args.threads} threads",
        ["forecast", "sMAPE", "MASE", "coverage of .1 to .9", "seconds"],
    )
    if args.part == "test":
        table.rows += [[name, *published, "", ""] for name, published in PUBLISHED.items()]
    naive = np.array([np.tile(y[-DAY:], H // DAY) for y in past])
    table.rows.append(
        ["seasonal naive, 24 h", *(f"{v:.3f}" for v in scores(naive, truth, past)), "", ""]
    )
    singles, seconds = [], []
    for seed in range(args.rounds):
        found, took = forecast(df, max_steps=steps, random_state=seed, **ONE)
        smape, mase = scores(found["Forecaster"], truth, past)
        singles.append(smape)
        seconds.append(took)
        table.rows.append(
            [f"fluxutils_py, seed {seed}", f"{smape:.3f}", f"{mase:.3f}", "", f"{took:.0f}"]
        )
        print(table.rows[-1], flush=True)
    spread = f"{statistics.mean(singles):.3f} (sd {np.std(singles):.3f})"
    table.rows.append(
        [
            f"**fluxutils_py, mean of {args.rounds}**",
            spread,
            "",
            "",
            f"{statistics.mean(seconds):.0f}",
        ]
    )
    quantiles = np.arange(1, 10) / 10
    shorter = {"max_steps": steps} if args.quick else {}
    found, took = forecast(df, random_state=0, quantiles=quantiles, **shorter)
    lower, upper = (found[f"Forecaster-{side}-80"] for side in ("lo", "hi"))
    assert (lower <= upper).all()
    covered = (truth >= lower) & (truth <= upper)
    smape, mase = scores(found["Forecaster"], truth, past)
    coverage = float(covered.mean())
    first, last = covered[:, 0].mean(), covered[:, -1].mean()
    said = f"{coverage:.1%} (first hour {first:.1%}, last {last:.1%})"
    table.rows.append(
        ["**fluxutils_py, defaults**", f"{smape:.3f}", f"{mase:.3f}", said, f"{took:.0f}"]
    )
    print(table.rows[-1], flush=True)
    if args.peers is None:
        report.leave_out("NeuralForecast", "--peers is not given")
    else:
        series = [np.concatenate(both) for both in zip(past, truth, strict=True)]
        settings = {
            "input_size": 7 * DAY,
            "seconds": args.peer_seconds,
            "threads": args.threads,
            "steps": steps,
        }
        for name, values, took in peers(args.peers, series, H, H, **settings):
            theirs = scores(values[:, 0], truth, past)
            table.rows.append([name, *(f"{v:.3f}" for v in theirs), "", f"{took:.0f}"])
            print(table.rows[-1], flush=True)
    report.add(table)
    if args.quick or args.part != "test":
        return
    low, high = LIMITS["coverage"]
    checks = {
        f"sMAPE of one model {statistics.mean(singles):.3f} at most {LIMITS['one']}": statistics.mean(
            singles
        )
        <= LIMITS["one"],
        f"sMAPE of the defaults {smape:.3f} at most {LIMITS['defaults']}": smape
        <= LIMITS["defaults"],
        f"coverage {coverage:.3f} from {low} to {high}": low <= coverage <= high,
        f"seconds of a model {max(seconds):.0f} at most {LIMITS['seconds']:.0f}": max(seconds)
        <= LIMITS["seconds"],
    }
    if failed := [text for text, held in checks.items() if not held]:
        sys.exit("not so: " + "; ".join(failed))


if __name__ == "__main__":
    main()
