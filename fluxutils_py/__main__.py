"""Demonstrate what a stateful model gains, on made data or on a CSV file; list checkpoints.

    python -m fluxutils_py
    python -m fluxutils_py --data FILE.csv --horizon 24
    python -m fluxutils_py checkpoints FOLDER...

Trains a stateful LSTM to forecast all columns, and compares it on the last fifth of the rows with
the same model when its state is reset at every window, and with the last value as forecast. Prints
a table and draws a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import LSTM
from fluxutils_py.training.checkpoint_tables import checkpoint_report

WINDOW, DAY = 16, 24  # steps: what one window of training sees; the made data repeat after a day
STORY = "The last pulse, some night before, sets which way the flow runs by day"
MISSING = ("", "na", "n/a", "null", "none")
STATEFUL, RESET, NAIVE = (
    "stateful LSTM",
    f"same LSTM, reset every {WINDOW} steps",
    "naive: the last value",
)


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
    """Two columns, (T, 2), and their names: the ``light`` of day and night, and a ``flow``; see
    ``STORY``.

    Four nights in ten bring a pulse: what decides about a morning lies, on average, two and a half
    days back.
    """
    t = np.arange(n_steps)
    light = np.sin(2 * np.pi * t / DAY)
    pulse = np.zeros(n_steps)
    nights = np.arange(DAY // 2, n_steps - DAY // 2, DAY)
    nights = nights[rng.random(len(nights)) < 0.4]
    pulse[nights + rng.integers(1, DAY // 2, len(nights))] = rng.choice([-1.0, 1.0], len(nights))
    direction = pulse[np.maximum.accumulate(np.where(pulse != 0, t, 0))]
    flow = np.where(light > 0.6, direction, pulse)
    return np.stack([light, flow], 1) + 0.05 * rng.normal(size=(n_steps, 2)), ["light", "flow"]


def read_csv(path: str) -> tuple[np.ndarray, list[str]]:
    """The numeric columns of a CSV file, (T, C), and their names; where a value is missing, the one
    before it holds.
    """
    rows = read_rows(path)
    for i, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(f"{path} has {len(row)} cells in row {i} and {len(rows[0])} in row 1")
    columns = [(cells[0], read_column(cells[1:])) for cells in zip(*rows, strict=True)]
    numeric = [(name, v) for name, v in columns if v is not None]
    if not numeric:
        raise ValueError(
            f"{path} has no column of numbers below a header, with commas between columns"
        )
    return np.stack([v for _, v in numeric], 1), [name for name, _ in numeric]


def read_rows(path: str) -> list[list[str]]:
    """The cells of a CSV file without its empty rows."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return [row for row in csv.reader(file) if row]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from None


def read_column(cells: Sequence[str]) -> np.ndarray | None:
    """The numbers in cells of text, missing ones filled in; None if there is anything but numbers,
    or none at all.
    """
    try:
        v = np.array(
            [math.nan if cell.strip().lower() in MISSING else float(cell) for cell in cells]
        )
    except ValueError:
        return None
    present = np.isfinite(v)
    if not present.any():
        return None
    return v[np.maximum.accumulate(np.where(present, np.arange(len(v)), present.argmax()))]


def prepare(values: np.ndarray, columns: list[str], horizon: int) -> Data:
    """Split 60/20/20 in time and standardise."""
    n = len(values)
    needed = 10 * (WINDOW + horizon)
    if n < needed:
        raise ValueError(f"{n} rows are too few: a horizon of {horizon} needs at least {needed}")
    train_end, test_start = int(0.6 * n), int(0.8 * n)
    mean, scale = values[:train_end].mean(0), values[:train_end].std(0)
    scale[scale == 0] = 1
    return Data(
        ((values - mean) / scale).astype("float32"), columns, mean, scale, train_end, test_start
    )


# -- forecasts -------------------------------------------------------------------------------------


def network(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(LSTM(n_in, 32), nn.Linear(32, n_out))


def forecasts(
    data: Data, horizon: int, epochs: int, seed: int
) -> tuple[Estimator, np.ndarray, dict[str, np.ndarray]]:
    """A fitted estimator, the truth, and what each method forecasts: (horizon, C, T), NaN where
    there is no truth.

    The model learns the difference from the last value, so that its zero is the naive forecast.
    """
    z, (n, c) = data.values, data.values.shape
    x = z.T[:, None]  # (C, 1, T): one series
    truth = np.full((horizon * c, 1, n), np.nan, "float32")
    for k in range(horizon):
        truth[k * c : (k + 1) * c, 0, : n - k - 1] = z[k + 1 :].T
    naive = np.tile(x, (horizon, 1, 1))

    def targets(
        start: int, stop: int
    ) -> np.ndarray:  # those that lie in the rows from start to stop, else NaN
        inside = (np.arange(stop) >= start - 1) & (np.arange(stop) < stop - horizon)
        return np.where(inside, (truth - naive)[:, :, :stop], np.nan)

    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=epochs)
    est = Estimator(
        network,
        opt=functools.partial(torch.optim.AdamW, lr=0.01),
        # one long series: fit folds it into 8 rows
        spec=Spec(
            epochs=epochs, batchsize=8, seqsize=WINDOW, clip=0.1, patience=12, scheduler=cosine
        ),
        random_state=seed,
    )
    a, b = data.train_end, data.test_start
    est.fit(x[:, :, :a], targets(0, a), validation_data=(x[:, :, :b], targets(a, b)))

    padded = np.full((c, 1, -(-n // WINDOW) * WINDOW), np.nan, "float32")
    padded[:, :, :n] = x
    alone = est.predict(padded.reshape(c, -1, WINDOW))  # every window is a series of its own
    reset = alone.reshape(len(naive), 1, -1)[:, :, :n]
    found = {STATEFUL: naive + est.predict(x), RESET: naive + reset, NAIVE: naive}
    return (
        est,
        truth.reshape(horizon, c, n),
        {name: f.reshape(horizon, c, n) for name, f in found.items()},
    )


def table(data: Data, truth: np.ndarray, found: dict[str, np.ndarray]) -> dict[str, float]:
    """Print the errors on the last part; returns them."""
    horizon, c, n = truth.shape
    test = slice(data.test_start - 1, n - horizon)  # every forecast of rows of the last part
    mse = {name: float(((f - truth)[:, :, test] ** 2).mean()) for name, f in found.items()}
    ahead = "next step" if horizon == 1 else f"next {horizon} steps"
    title = f"forecast of the {ahead}, {c} column{'s' * (c > 1)}, {test.stop - test.start} times"
    width = max(map(len, (title, *mse)))
    print(f"| {title:{width}} |    MSE |\n|{'-' * (width + 2)}|-------:|")
    for name, value in mse.items():
        print(f"| {name:{width}} | {value:6.4f} |")
    return mse


# -- picture ---------------------------------------------------------------------------------------


def make_figure(path: str) -> Any:
    """An empty figure that can be saved as ``path``; None without matplotlib."""
    try:
        from matplotlib.figure import Figure  # an extra
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:] not in kinds:
        raise ValueError(
            f"cannot write {path}: a picture's name ends in one of {', '.join(sorted(kinds))}"
        )
    if not Path(path).parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {Path(path).parent}")
    return figure


def draw(
    figure: Any,
    title: str,
    data: Data,
    est: Estimator,
    truth: np.ndarray,
    found: dict[str, np.ndarray],
) -> None:
    """The last column where the last part is liveliest, in its own units, and the loss curve."""
    horizon, _, n = truth.shape
    last = data.values[:, -1]
    size = min(8 * DAY, n - data.test_start)
    begin = max(range(data.test_start, n - size + 1), key=lambda t: last[t : t + size].var())
    steps = np.arange(begin, begin + size)

    def plot(values: np.ndarray, **how: Any) -> None:
        left.plot(steps, values * data.scale[-1] + data.mean[-1], **how)

    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    plot(last[steps], label="truth", color="0.82", lw=5, solid_joinstyle="round")
    plot(found[RESET][-1, -1, steps - horizon], label=RESET, color="tab:orange", lw=1.2)
    plot(found[STATEFUL][-1, -1, steps - horizon], label=STATEFUL, color="tab:blue", lw=1.6)
    ahead = f"{horizon} step{'s' * (horizon > 1)} ahead"
    left.set(xlabel="time step", ylabel=f"{data.columns[-1]}, {ahead}", xlim=(steps[0], steps[-1]))
    left.set_title(title, loc="left")
    left.legend(
        loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3, frameon=False, borderaxespad=0
    )

    epochs = np.arange(1, est.n_iter_ + 1)
    right.plot(epochs, est.loss_curve_, color="0.6", label="training")
    right.plot(epochs, est.validation_loss_curve_, color="tab:blue", label="validation")
    right.set(xlabel="epoch", ylabel="mean squared error", ylim=(0, None))
    right.locator_params(nbins=5)
    right.set_title("Loss curve", loc="left")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)


# -- command ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have torch use one thread.

    Windows this small gain nothing from more, which mostly wait for each other: on two cores that
    were busy with other things, the demonstration took minutes in place of seconds.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive.__name__ = "positive number"  # argparse says "invalid positive number value: ..."


def show_checkpoints(argv: Sequence[str]) -> int:
    """List the checkpoints in folders, and compare runs; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fluxutils_py checkpoints",
        description="List the checkpoints in folders: steps, sizes and losses; of several "
        "folders, compare the newest.",
    )
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="that a Checkpointer has written to"
    )
    args = parser.parse_args(argv)
    try:
        print(checkpoint_report(args.folders))
    except OSError as error:
        print(f"fluxutils_py: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration, or another command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["checkpoints"]:
        return show_checkpoints(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m fluxutils_py",
        description=(__doc__ or "").splitlines()[0],
        epilog="python -m fluxutils_py checkpoints FOLDER... lists checkpoints and compares runs",
    )
    parser.add_argument(
        "--data", metavar="FILE.csv", help="one row per time step; what is no number is skipped"
    )
    parser.add_argument(
        "--out", default="forecast.png", metavar="PICTURE", help="where to draw (%(default)s)"
    )
    parser.add_argument(
        "--horizon",
        type=positive,
        default=1,
        metavar="STEPS",
        help="steps to forecast (%(default)s)",
    )
    parser.add_argument(
        "--epochs", type=positive, default=30, help="passes over the data, at most (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive, default=12_000, help="length of made data (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of made data and training (%(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        rng = np.random.default_rng(args.seed)
        made = made_data(args.steps, rng) if args.data is None else read_csv(args.data)
        data = prepare(*made, args.horizon)
        figure = make_figure(args.out)
    except ValueError as error:
        print(f"fluxutils_py: {error}", file=sys.stderr)
        return 1
    title = STORY if args.data is None else f"Forecast of {Path(args.data).name}"
    print(f"{title}.")
    with one_thread():
        est, truth, found = forecasts(data, args.horizon, args.epochs, args.seed)
    table(data, truth, found)
    if figure is None:
        print("No picture: matplotlib is not installed; pip install 'fluxutils_py[plot]'")
    else:
        draw(figure, title, data, est, truth, found)
        figure.savefig(args.out, dpi=150)
        print(f"Picture: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
