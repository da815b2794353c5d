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
from fluxutils_py.data.filling import last_positions
from fluxutils_py.nn import LSTM
from fluxutils_py.training.checkpoint_tables import checkpoint_report

# in steps
WINDOW = 16  # of training
DAY = 24  # after which the made data repeat
STORY = "The last pulse, some night before, sets which way the flow runs by day"
MISSING = ("", "na", "n/a", "null", "none")
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
    """Return the numeric columns of a CSV file, (T, C), and their names.

    A missing value is that of the row before.
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
    """Return the cells of a CSV file without its empty rows."""
    try:
        # Excel writes a byte order mark
        with open(path, newline="", encoding="utf-8-sig") as file:
            return [row for row in csv.reader(file) if row]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from None


def read_column(cells: Sequence[str]) -> np.ndarray | None:
    """Return the numbers in cells of text, missing ones filled in; None if there is anything but
    numbers, or none at all.
    """
    try:
        numbers = [math.nan if cell.strip().lower() in MISSING else float(cell) for cell in cells]
    except ValueError:
        return None
    column = np.array(numbers)
    present = np.isfinite(column)
    if not present.any():
        return None
    # before the first value there is none to repeat: the first itself
    places = np.maximum(last_positions(present), present.argmax())
    return column[places]


def prepare(
    values: np.ndarray,
    columns: list[str],
    horizon: int,
) -> Data:
    """Split 60/20/20 in time and standardise."""
    n = len(values)
    needed = 10 * (WINDOW + horizon)
    if n < needed:
        raise ValueError(f"{n} rows are too few: a horizon of {horizon} needs at least {needed}")
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
    data: Data,
    horizon: int,
    epochs: int,
    seed: int,
) -> tuple[Estimator, np.ndarray, dict[str, np.ndarray]]:
    """Return a fitted estimator, the truth, and the forecasts of each method: (horizon, C, T), NaN
    where there is no truth.
    """
    n, c = data.values.shape
    x = data.values.T[:, None]  # (C, 1, T): one series
    truth = np.full((horizon * c, 1, n), np.nan, "float32")
    for k in range(horizon):
        truth[k * c : (k + 1) * c, 0, : n - k - 1] = data.values[k + 1 :].T
    naive = np.tile(x, (horizon, 1, 1))
    # the model learns this, so that its zero is the naive forecast
    difference = truth - naive

    def targets(start: int, stop: int) -> np.ndarray:
        """Return the targets that are all in the rows from start to stop, NaN elsewhere."""
        steps = np.arange(stop)
        inside = (steps >= start - 1) & (steps < stop - horizon)
        return np.where(inside, difference[:, :, :stop], np.nan)

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
    validation = (x[:, :, :stop], targets(end, stop))
    est.fit(x[:, :, :end], targets(0, end), validation_data=validation)

    n_windows = -(-n // WINDOW)
    padded = np.full((c, 1, n_windows * WINDOW), np.nan, "float32")
    padded[:, :, :n] = x
    # every window is a separate series, and begins with the zero state
    alone = est.predict(padded.reshape(c, n_windows, WINDOW))
    reset = alone.reshape(len(naive), 1, -1)[:, :, :n]
    by_method = {STATEFUL: naive + est.predict(x), RESET: naive + reset, NAIVE: naive}
    shape = (horizon, c, n)
    by_method = {name: values.reshape(shape) for name, values in by_method.items()}
    return est, truth.reshape(shape), by_method


def table(
    data: Data,
    truth: np.ndarray,
    by_method: dict[str, np.ndarray],
) -> dict[str, float]:
    """Print the errors on the last part, and return them."""
    horizon, c, n = truth.shape
    test = slice(data.test_start - 1, n - horizon)  # every forecast of rows of the last part
    mse = {}
    for name, values in by_method.items():
        errors = (values - truth)[:, :, test]
        mse[name] = float((errors**2).mean())
    ahead = "next step" if horizon == 1 else f"next {horizon} steps"
    title = f"forecast of the {ahead}, {c} column{'s' * (c > 1)}, {test.stop - test.start} times"
    width = max(map(len, (title, *mse)))
    print(f"| {title:{width}} |    MSE |\n|{'-' * (width + 2)}|-------:|")
    for name, value in mse.items():
        print(f"| {name:{width}} | {value:6.4f} |")
    return mse


# -- picture ---------------------------------------------------------------------------------------


def make_figure(path: str) -> Any:
    """Return an empty figure that can be saved as ``path``; None without matplotlib."""
    try:
        from matplotlib.figure import Figure  # an extra
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    # tested before the training, which takes a while
    endings = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:] not in endings:
        raise ValueError(
            f"cannot write {path}: a picture's name ends in one of {', '.join(sorted(endings))}"
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
    by_method: dict[str, np.ndarray],
) -> None:
    """Draw the last column where the last part is liveliest, in its units, and the loss curve."""
    horizon, _, n = truth.shape
    last = data.values[:, -1]
    size = min(8 * DAY, n - data.test_start)
    begin = max(range(data.test_start, n - size + 1), key=lambda t: last[t : t + size].var())
    steps = np.arange(begin, begin + size)

    def plot(values: np.ndarray, **style: Any) -> None:
        left.plot(steps, values * data.scale[-1] + data.mean[-1], **style)

    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    plot(last[steps], label="truth", color="0.82", lw=5, solid_joinstyle="round")
    plot(by_method[RESET][-1, -1, steps - horizon], label=RESET, color="tab:orange", lw=1.2)
    plot(by_method[STATEFUL][-1, -1, steps - horizon], label=STATEFUL, color="tab:blue", lw=1.6)
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
        est, truth, by_method = forecasts(data, args.horizon, args.epochs, args.seed)
    table(data, truth, by_method)
    if figure is None:
        print("No picture: matplotlib is not installed; pip install matplotlib")
    else:
        draw(figure, title, data, est, truth, by_method)
        figure.savefig(args.out, dpi=150)
        print(f"Picture: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
