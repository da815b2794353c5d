"""ETTh1, all seven series, the next 24 hours: a stateful LSTM through the public API against published forecasts.

Hourly data of an electricity transformer (Zhou et al., Informer, AAAI 2021; file from github.com/zhouhaoyi/ETDataset).
The common protocol: 12, 4 and 4 months of 30 days for training, validation and test, standardised with the training
months, every start in the test months scored on all series and hours. The LSTM sees how each series changed against
the day before, and learns by how much the next 24 hours will differ from the last 24: the seasonal naive forecast is
what it gives when it outputs zero. One CPU thread, float32, a seed per round. Fails unless the mean MSE of the seeds is
below LIMIT.

    python benchmarks/bench_etth1.py --data ETTh1.csv [--rounds 3]
"""

import functools
import sys
import time

import numpy as np
import torch
from common import Report, Table, parse, parser
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import LSTM

H, C, DAY = 24, 7, 24  # hours ahead, series, season
TRAIN, VAL, TEST = (30 * DAY * months for months in (12, 16, 20))  # where each part ends
LIMIT = 0.41
PUBLISHED = {"LSTMa (Informer paper)": (0.650, 0.624), "Informer": (0.577, 0.549)}


def read(path):
    """The first 20 months, standardised with the first 12: (T, C) float32."""
    z = np.loadtxt(path, delimiter=",", skiprows=1, usecols=range(1, C + 1))[:TEST]
    assert z.shape == (TEST, C), f"{path} has {z.shape} hours and series, expected at least {(TEST, C)}"
    return ((z - z[:TRAIN].mean(0)) / z[:TRAIN].std(0)).astype("float32")


def arrays(z):
    """Inputs (C, 1, T), seasonal naive forecast and truth (H * C, 1, T) of the H hours after each hour.

    Where the truth lies beyond the data it is NaN: such steps carry no loss.
    """
    padded = np.concatenate([np.repeat(z[:1], DAY, 0), z])  # a first day for the lags to reach into
    x = z - padded[:-DAY]  # change against the day before
    naive = np.concatenate([padded[k + 1 : k + 1 + TEST] for k in range(DAY)], 1)  # hour t+k: as hour t+k-24
    truth = np.full((TEST, H * C), np.nan, "float32")
    truth[:-H] = np.concatenate([z[k : k + TEST - H] for k in range(1, H + 1)], 1)
    return tuple(a.T[:, None] for a in (x, naive, truth))


def only(y, start, stop):
    """Targets of the hours ``start`` to ``stop``, NaN elsewhere."""
    kept = np.full_like(y, np.nan)
    kept[:, :, start:stop] = y[:, :, start:stop]
    return kept


def network(n_in, n_out):
    """Called by ``fit`` with the sizes of the data, so that its initial weights come from ``random_state``."""
    return nn.Sequential(LSTM(n_in, 64), nn.Linear(64, n_out))


def run(seed, x, y):
    """Fit on the training months, stop by the validation months; returns the estimator and all its predictions."""
    est = Estimator(
        network,
        nn.L1Loss(),
        functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-2),
        Spec(epochs=40, batchsize=16, seqsize=24, clip=1.0, patience=5),  # one series: folded into 16 rows
        random_state=seed,
        verbose=False,
    )
    # forecasts that reach into the next part belong to neither; the state is warmed over what lies before
    train = x[:, :, :TRAIN], only(y, 0, TRAIN - H)[:, :, :TRAIN]
    val = x[:, :, :VAL], only(y, TRAIN, VAL - H)[:, :, :VAL]
    est.fit(*train, validation_data=val)
    return est, est.predict(x)


def errors(forecast, truth):
    """MSE and MAE over every start from the last validation hour on whose 24 hours lie in the test months."""
    starts = slice(VAL - 1, TEST - H)
    e = (forecast - truth)[:, 0, starts]
    assert e.shape == (H * C, 2857), e.shape
    assert np.isfinite(e).all()
    return float((e**2).mean()), float(np.abs(e).mean())


def main():
    made = parser(__doc__, rounds=3)
    made.add_argument("--data", required=True, help="ETTh1.csv, from github.com/zhouhaoyi/ETDataset")
    args = parse(made)
    torch.set_num_threads(1)
    report = Report(__doc__, args)

    x, naive, truth = arrays(read(args.data))
    table = Table(
        f"ETTh1, {C} series, horizon {H}, {TRAIN}/{VAL - TRAIN}/{TEST - VAL} hours",
        ["forecast", "MSE", "MAE", "seconds", "epochs"],
    )
    for name, (mse, mae) in PUBLISHED.items():
        table.rows.append([f"{name}, published", f"{mse:.3f}", f"{mae:.3f}", "", ""])
    mse, mae = errors(naive, truth)
    table.rows.append(["seasonal naive, 24 h", f"{mse:.4f}", f"{mae:.4f}", "", ""])
    results = []
    for seed in range(args.rounds):
        began = time.perf_counter()
        est, residual = run(seed, x, truth - naive)
        seconds = time.perf_counter() - began
        mse, mae = errors(naive + residual, truth)
        results.append((mse, mae, seconds))
        table.rows.append(
            [f"fluxutils_py, seed {seed}", f"{mse:.4f}", f"{mae:.4f}", f"{seconds:.0f}", str(est.n_iter_)]
        )
    mse, mae, seconds = np.mean(results, 0)
    name = f"**fluxutils_py, mean of {len(results)}**"
    table.rows.append([name, f"**{mse:.4f}**", f"**{mae:.4f}**", f"{seconds:.0f}", ""])
    report.add(table)
    if mse >= LIMIT:
        sys.exit(f"mean MSE {mse:.4f} is not below {LIMIT}")


if __name__ == "__main__":
    main()
