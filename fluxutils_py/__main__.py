"""Demonstrate what a stateful model gains, on made data or on a CSV file.

    python -m fluxutils_py
    python -m fluxutils_py --data FILE.csv

Trains a stateful LSTM to forecast all columns, and compares it on the last fifth of the rows with
the same model when its state is reset at every window, and with the last value as forecast. Prints
a table and draws a picture.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fluxutils_py import Estimator, LossCurveDisplay, Spec
from fluxutils_py.data.filling import last_positions
from fluxutils_py.nn import LSTM

# in steps
WINDOW = 16  # of training
DAY = 24  # after which the made data repeat
STORY = "The last pulse, some night before, sets which way the flow runs by day"
STATEFUL = "stateful LSTM"
RESET = f"same LSTM, reset every {WINDOW} steps"
NAIVE = "naive: the last value"


# -- data ------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Rows over time, standardised with the first ``train_end`` of them: as they were, ``values *
    scale + mean``.
    """

    values: np.ndarray  # (T, C) float32
    columns: list[str]
    mean: np.ndarray  # (C,)
    scale: np.ndarray  # (C,)
    train_end: int
    test_start: int


def made_data(n_steps: int, rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
    """Make two columns, (T, 2), and their names: the ``light`` of day and night, and a ``flow``;
    see ``STORY``.
    """
    t = np.arange(n_steps)
    light = np.sin(2 * np.pi * t / DAY)
    pulse = np.zeros(n_steps)
    night = DAY // 2
    nights = np.arange(night, n_steps - night, DAY)
    # four in ten: the pulse that decides about a morning is, on average, 2.5 days old
    nights = nights[rng.random(len(nights)) < 0.4]
    directions = rng.choice([-1.0, 1.0], len(nights))
    pulse[nights + rng.integers(1, night, len(nights))] = directions
    last_pulse = np.maximum(last_positions(pulse != 0), 0)
    flow = np.where(light > 0.6, pulse[last_pulse], pulse)
    noise = 0.05 * rng.normal(size=(n_steps, 2))
    return np.stack([light, flow], 1) + noise, ["light", "flow"]


def read_csv(path: str) -> tuple[np.ndarray, list[str]]:
    """Return the columns of numbers in a CSV file, (T, C), and their names.

    A missing value is that of the row before, and before the first value that one.
    """
    rows = np.genfromtxt(path, delimiter=",", names=True, encoding="utf-8-sig")
    columns = {}
    for name in rows.dtype.names or ():
        present = np.atleast_1d(np.isfinite(rows[name]))
        if present.any():  # else texts
            places = np.maximum(last_positions(present), present.argmax())
            columns[name] = rows[name][places]
    if not columns:
        raise ValueError("no column of numbers below a header, with commas between columns")
    return np.stack(list(columns.values()), 1), list(columns)


def prepare(values: np.ndarray, columns: list[str]) -> Data:
    """Split 60/20/20 in time and standardise."""
    n = len(values)
    if n < 10 * (WINDOW + 1):
        raise ValueError(f"{n} rows are too few: give at least {10 * (WINDOW + 1)}")
    train_end = int(0.6 * n)
    mean = values[:train_end].mean(0)
    scale = values[:train_end].std(0)
    scale[scale == 0] = 1  # a constant column
    standardised = ((values - mean) / scale).astype("float32")
    return Data(standardised, columns, mean, scale, train_end, test_start=int(0.8 * n))


# -- forecasts -------------------------------------------------------------------------------------


def network(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(LSTM(n_in, 32), nn.Linear(32, n_out))


def forecasts(
    data: Data, epochs: int, seed: int
) -> tuple[Estimator, np.ndarray, dict[str, np.ndarray]]:
    """Return a fitted estimator, the targets, and the forecasts of each method: (C, T), NaN where
    there is no target.
    """
    n, c = data.values.shape
    x = data.values.T[:, None]  # (C, 1, T): one series
    y_true = np.full_like(x, np.nan)
    y_true[:, :, :-1] = x[:, :, 1:]
    difference = y_true - x  # the model learns this, so that its zero is the naive forecast
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=epochs)
    est = Estimator(
        network,
        opt=functools.partial(torch.optim.AdamW, lr=0.01),
        # one long series: fit folds it into 8 rows
        spec=Spec(
            epochs=epochs, batchsize=8, seqsize=WINDOW, clip=0.1, patience=12, lr_schedule=cosine
        ),
        random_state=seed,
    )
    end = data.train_end
    stop = data.test_start
    # each part has the targets that are in it
    is_validation = np.arange(stop) >= end - 1
    validation = np.where(is_validation, difference[:, :, :stop], np.nan)
    validation[:, :, -1] = np.nan
    training = np.where(is_validation[:end], np.nan, difference[:, :, :end])
    est.fit(x[:, :, :end], training, validation_data=(x[:, :, :stop], validation))

    n_windows = -(-n // WINDOW)
    padded = np.full((c, 1, n_windows * WINDOW), np.nan, "float32")
    padded[:, :, :n] = x
    # every window is a separate series, and begins with the zero state
    reset = est.predict(padded.reshape(c, n_windows, WINDOW)).reshape(c, 1, -1)[:, :, :n]
    by_method = {STATEFUL: x + est.predict(x), RESET: x + reset, NAIVE: x}
    return est, y_true[:, 0], {name: values[:, 0] for name, values in by_method.items()}


def table(data: Data, y_true: np.ndarray, by_method: dict[str, np.ndarray]) -> None:
    """Print the errors on the last part."""
    c, n = y_true.shape
    test = slice(data.test_start - 1, n - 1)  # every forecast of rows of the last part
    title = f"forecast of the next step, {c} column{'s' * (c > 1)}, {test.stop - test.start} times"
    width = max(map(len, (title, *by_method)))
    print(f"| {title:{width}} |    MSE |\n|{'-' * (width + 2)}|-------:|")
    for name, values in by_method.items():
        mse = ((values - y_true)[:, test] ** 2).mean()
        print(f"| {name:{width}} | {mse:6.4f} |")


# -- picture ---------------------------------------------------------------------------------------


def make_figure(path: str) -> Any:
    """Return an empty figure, saved as ``path``; None without matplotlib.

    Raises OSError or ValueError, before training, if it cannot be saved.
    """
    try:
        from matplotlib.figure import Figure  # an extra
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.savefig(path)
    return figure


def draw(
    figure: Any,
    title: str,
    data: Data,
    est: Estimator,
    by_method: dict[str, np.ndarray],
) -> None:
    """Draw the last column where the last part is liveliest, in its units, and the loss curve."""
    n = len(data.values)
    last = data.values[:, -1]
    size = min(8 * DAY, n - data.test_start)
    begin = max(range(data.test_start, n - size + 1), key=lambda t: last[t : t + size].var())
    steps = np.arange(begin, begin + size)

    def plot(values: np.ndarray, **style: Any) -> None:
        left.plot(steps, values * data.scale[-1] + data.mean[-1], **style)

    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    plot(last[steps], label="target", color="0.82", lw=5, solid_joinstyle="round")
    plot(by_method[RESET][-1, steps - 1], label=RESET, color="tab:orange", lw=1.2)
    plot(by_method[STATEFUL][-1, steps - 1], label=STATEFUL, color="tab:blue", lw=1.6)
    left.set(
        xlabel="time step", ylabel=f"{data.columns[-1]}, 1 step ahead", xlim=(steps[0], steps[-1])
    )
    left.set_title(title, loc="left")
    left.legend(
        loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3, frameon=False, borderaxespad=0
    )

    curves = LossCurveDisplay(
        loss_curve=est.loss_curve_, validation_loss_curve=est.validation_loss_curve_
    )
    curves.plot(right)
    right.set(ylabel="mean squared error", ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)


# -- command ---------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fluxutils_py",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", help="a CSV file, one row per time step, in place of made data")
    parser.add_argument("--out", default="forecast.png", help="where to draw")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data, at most")
    parser.add_argument("--steps", type=int, default=12_000, help="length of made data")
    parser.add_argument("--seed", type=int, default=0, help="of made data and training")
    args = parser.parse_args(argv)
    if min(args.epochs, args.steps) < 1:
        parser.error("--epochs and --steps must be at least 1")
    try:
        rng = np.random.default_rng(args.seed)
        made = made_data(args.steps, rng) if args.data is None else read_csv(args.data)
        data = prepare(*made)
        figure = make_figure(args.out)
    except (OSError, ValueError) as error:
        print(f"fluxutils_py: {error}; see --data and --out", file=sys.stderr)
        return 1
    title = STORY if args.data is None else f"Forecast of {Path(args.data).name}"
    print(f"{title}.")
    est, y_true, by_method = forecasts(data, args.epochs, args.seed)
    table(data, y_true, by_method)
    if figure is None:
        print("No picture: matplotlib is not installed; pip install matplotlib")
    else:
        draw(figure, title, data, est, by_method)
        figure.savefig(args.out, dpi=150)
        print(f"Picture: {args.out}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # windows this small gain nothing from more, which wait for each other
    sys.exit(main())
