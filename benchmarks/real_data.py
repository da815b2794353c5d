"""Real data sets, as one would hand them to an estimator: ``load("GunPoint", folder)``.

Each comes with its training and test part, the lengths of its series, and the metric that judges
predictions. Nothing here knows of any model. What the files are, and under which licences, stands
beside them; the splits are the usual ones:

- GunPoint, ArrowHead, BasicMotions, JapaneseVowels, ItalyPowerDemand (UCR and UEA archives, ``ucr/``):
  a label per series, the archive's split, accuracy.
- cmapss (NASA, FD001, ``cmapss/``): the remaining life of an engine at each cycle, at most 125; root
  mean squared error at the last cycle of each of the hundred test engines.
- occupancy1, occupancy2 (UCI, ``occupancy/``): whether somebody is in the room, a label per minute;
  macro F1 on either test file, each a series of its own.
- nab_* (Numenta Anomaly Benchmark, ``nab/``): the next value of a series. Trained on the first 60 %.
- etth1_6, etth1_24 (ETDataset, ``ETTh1.csv``): oil temperature in 6 and 24 hours from seven series.
  Trained on the first 12 months of 30 days, judged on the months 17 to 20, in degrees.
- m4 (``M4-Hourly-*.csv``): the next hour of every fourth hourly series of the M4 competition, each
  divided by the mean of its training part; judged on the 48 hours of the test part.
- wikipedia (``wikipedia_traffic_daily.csv``): the next day's logarithm of the views of ten pages.
  Trained on the first 450 of 550 days.
- air_quality (UCI, ``air_quality.csv``): carbon monoxide, in mg/m3, of an hour from eight sensors that drift; a
  sensor without a value has its last. Trained on the first 70 %.
- bikes (UCI, ``bike_hour.csv``): the logarithm of the bikes rented in an hour from its weather and calendar.
  Trained on the first 70 %.
- republic (``republic.txt``): the next character of a book, read in 32 parts side by side. Trained on
  the first 90 %, judged on the last 5 %, in bits per character; what lies between is for choices.

Errors of the next value (nab, m4, wikipedia) are divided by those of the forecast "as now".
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from sklearn.metrics import accuracy_score, f1_score

Kind = Literal["labels of series", "labels of steps", "numbers of steps", "characters"]


@dataclass(frozen=True)
class Metric:
    """How predictions are judged.

    ``function(y_test, predicted)`` returns a number. Predictions have the shape of ``y_test``; for
    bits per character they are the probabilities of all characters, (K, N, T). Where ``y_test`` is
    NaN, nothing is judged.
    """

    name: str
    function: Callable[[np.ndarray, np.ndarray], float]
    larger_is_better: bool

    def __call__(self, y: np.ndarray, predicted: np.ndarray) -> float:
        return float(self.function(y, predicted))


@dataclass(frozen=True, eq=False)
class RealData:
    """A data set in two parts, for ``fit(x_train, y_train, lengths=train_lengths)``.

    Attributes
    ----------
    name : str
    kind : str
        What the targets are. They decide between a regressor and a classifier.
    x_train, x_test : array of shape (F, N, T)
        Zeros behind the end of a series. Characters are integers, all others float32. Where the
        test part continues the training series, ``x_test`` begins with their training steps.
    y_train, y_test : array of shape (N,) or (1, N, T)
        Labels of series, or a target for each step; NaN where there is none.
    train_lengths, test_lengths : array of int, shape (N,)
    metric : Metric
    """

    name: str
    kind: Kind
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    train_lengths: np.ndarray
    test_lengths: np.ndarray
    metric: Metric

    @property
    def is_classification(self) -> bool:
        return self.kind != "numbers of steps"

    @property
    def per_series(self) -> bool:
        return self.kind == "labels of series"

    def score(self, predicted: np.ndarray) -> float:
        """Judge predictions for ``x_test``."""
        return self.metric(self.y_test, predicted)


# -- metrics -----------------------------------------------------------------------------------------


def rmse(y: np.ndarray, predicted: np.ndarray, unit: float = 1.0) -> float:
    """Root mean squared error over the steps that have a target, in units of ``unit``."""
    judged = np.isfinite(y)
    return np.sqrt(np.mean((predicted[judged] - y[judged]) ** 2)) / unit


def macro_f1(y: np.ndarray, predicted: np.ndarray) -> float:
    return f1_score(y.ravel(), predicted.ravel(), average="macro")


def bits(y: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean of ``-log2 p`` of what came, for integer ``y`` (1, N, T)."""
    came = np.take_along_axis(probabilities, y, axis=0)
    return -np.log2(np.maximum(came, 1e-12)).mean()


ACCURACY = Metric("accuracy", accuracy_score, larger_is_better=True)
MACRO_F1 = Metric("macro F1", macro_f1, larger_is_better=True)
BITS = Metric("bits per character", bits, larger_is_better=False)


def relative_rmse(y: np.ndarray, naive: np.ndarray) -> Metric:
    """Root mean squared error over that of a naive forecast."""
    unit = rmse(y, naive)
    return Metric("RMSE; as now = 1", partial(rmse, unit=unit), larger_is_better=False)


# -- one label per series ----------------------------------------------------------------------------


def read_ts(path: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """The series of a ``.ts`` file, each (F, T_i), and their labels."""
    series, labels = [], []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip().lower() == "@data":
                break
        for line in lines:
            if line.strip():
                *features, label = line.strip().split(":")
                series.append(np.array([f.split(",") for f in features], dtype=np.float32))
                labels.append(label)
    return series, np.array(labels)


def padded(series: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Series (F, T_i) as one array (F, N, T) with zeros behind their ends, and their lengths."""
    lengths = np.array([s.shape[1] for s in series])
    x = np.zeros((len(series[0]), len(series), lengths.max()), dtype=series[0].dtype)
    for n, s in enumerate(series):
        x[:, n, : lengths[n]] = s
    return x, lengths


def archive(name: str, folder: Path) -> RealData:
    train, y_train = read_ts(folder / "ucr" / f"{name}_TRAIN.ts")
    test, y_test = read_ts(folder / "ucr" / f"{name}_TEST.ts")
    x_train, train_lengths = padded(train)
    x_test, test_lengths = padded(test)
    return RealData(
        name,
        "labels of series",
        x_train,
        y_train,
        x_test,
        y_test,
        train_lengths,
        test_lengths,
        ACCURACY,
    )


# -- a label or number per step ----------------------------------------------------------------------

LIFE = 125  # cycles; more cannot be told from the sensors of a new engine


def engines(path: Path) -> list[np.ndarray]:
    """Settings and sensors of each engine, (24, T_i)."""
    table = np.loadtxt(path)
    return [table[table[:, 0] == unit, 2:].T.astype(np.float32) for unit in np.unique(table[:, 0])]


def cmapss(folder: Path) -> RealData:
    folder = folder / "cmapss"
    x_train, train_lengths = padded(engines(folder / "train_FD001.txt"))
    x_test, test_lengths = padded(engines(folder / "test_FD001.txt"))
    y_train = np.full((1, *x_train.shape[1:]), np.nan, dtype=np.float32)
    for n, length in enumerate(train_lengths):
        y_train[0, n, :length] = np.minimum(LIFE, np.arange(length)[::-1])
    y_test = np.full((1, *x_test.shape[1:]), np.nan, dtype=np.float32)
    left = np.loadtxt(folder / "RUL_FD001.txt")
    y_test[0, np.arange(len(left)), test_lengths - 1] = np.minimum(LIFE, left)
    metric = Metric("RMSE at the last cycle", rmse, larger_is_better=False)
    return RealData(
        "cmapss",
        "numbers of steps",
        x_train,
        y_train,
        x_test,
        y_test,
        train_lengths,
        test_lengths,
        metric,
    )


def minutes(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Five sensors (5, 1, T), and whether the room was occupied (1, 1, T)."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    table = np.array([row[-6:] for row in rows], dtype=np.float32).T
    return table[:5, None], table[5:, None].astype(int)


def occupancy(name: str, test: str, folder: Path) -> RealData:
    x_train, y_train = minutes(folder / "occupancy" / "datatraining.txt")
    x_test, y_test = minutes(folder / "occupancy" / test)
    lengths = [np.array([x.shape[2]]) for x in (x_train, x_test)]
    return RealData(name, "labels of steps", x_train, y_train, x_test, y_test, *lengths, MACRO_F1)


# -- what comes next ---------------------------------------------------------------------------------


def forecast(
    name: str,
    series: np.ndarray,
    values: np.ndarray,
    ends: np.ndarray,
    judged_from: np.ndarray,
    ahead: int = 1,
    lengths: np.ndarray | None = None,
    metric: Metric | None = None,
) -> RealData:
    """A regression of what comes ``ahead`` steps later, trained on the beginning of the series.

    Parameters
    ----------
    series : array of shape (F, N, T)
        Inputs.
    values : array of shape (N, T)
        What is predicted.
    ends : array of int, shape (N,)
        Where the training part of each series ends. No training target lies behind it.
    judged_from : array of int, shape (N,)
        The first step to be predicted.
    lengths : array of int, shape (N,), optional
    metric : Metric, optional
        By default errors over those of the forecast "as now".
    """
    n_series, n_steps = values.shape
    lengths = np.full(n_series, n_steps) if lengths is None else lengths
    later = np.full((1, n_series, n_steps), np.nan, dtype=np.float32)
    later[0, :, : n_steps - ahead] = values[:, ahead:]
    predicted_step = np.arange(n_steps) + ahead

    def only(first: np.ndarray, end: np.ndarray) -> np.ndarray:
        inside = (predicted_step >= first[:, None]) & (predicted_step < end[:, None])
        return np.where(inside, later, np.float32(np.nan))

    y_test = only(judged_from, lengths)
    cut = ends.max()
    x_train = series[:, :, :cut] * (np.arange(cut) < ends[:, None])
    return RealData(
        name,
        "numbers of steps",
        x_train.astype(np.float32),
        only(np.zeros_like(ends), ends)[:, :, :cut],
        series.astype(np.float32),
        y_test,
        ends,
        lengths,
        metric or relative_rmse(y_test, values[None]),
    )


def column(path: Path, name: str) -> np.ndarray:
    """A column of numbers of a CSV file with a header."""
    with path.open(encoding="utf-8", newline="") as file:
        return np.array([float(row[name]) for row in csv.DictReader(file)])


def nab(name: str, file: str, folder: Path) -> RealData:
    values = column(folder / "nab" / f"{file}.csv", "value")[None]
    end = np.array([values.shape[1] * 6 // 10])
    return forecast(name, values[None], values, end, end)


def etth1(name: str, hours: int, folder: Path) -> RealData:
    month = 30 * 24
    path = folder / "ETTh1.csv"
    with path.open(encoding="utf-8") as file:
        names = file.readline().strip().split(",")[1:]
    table = np.stack([column(path, n)[: 20 * month] for n in names])
    end, judged_from = np.array([12 * month]), np.array([16 * month])
    metric = Metric("RMSE, degrees", rmse, larger_is_better=False)
    oil = table[names.index("OT")]
    return forecast(name, table[:, None], oil[None], end, judged_from, ahead=hours, metric=metric)


def m4(folder: Path, every: int = 4) -> RealData:
    parts = []
    for part in ("train", "test"):
        with (folder / f"M4-Hourly-{part}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1::every]
        parts.append([np.array([v for v in row[1:] if v], dtype=float) for row in rows])
    scaled = [
        np.concatenate([a, b])[None] / a.mean() for a, b in zip(*parts, strict=True)
    ]  # each (1, T_i)
    series, lengths = padded(scaled)
    ends = np.array([len(a) for a in parts[0]])
    return forecast("m4", series, series[0], ends, ends, lengths=lengths)


def wikipedia(folder: Path) -> RealData:
    views: dict[str, list[float]] = {}
    path = folder / "wikipedia_traffic_daily.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            views.setdefault(row["Page"], []).append(float(row["value"]))
    values = np.log1p(np.array(list(views.values())))
    ends = np.full(len(values), values.shape[1] * 9 // 11)
    return forecast("wikipedia", values[None], values, ends, ends)


def now(name: str, inputs: np.ndarray, values: np.ndarray, metric: str) -> RealData:
    """A regression of what goes with the inputs (F, T) of the same step, values (T,), on the first 70 %."""
    end = np.array([len(values) * 7 // 10])
    x, y = (a[:, None].astype(np.float32) for a in (inputs, values[None]))
    y_test = np.where(np.arange(len(values)) < end, np.float32(np.nan), y)
    return RealData(
        name,
        "numbers of steps",
        x[:, :, : end[0]],
        y[:, :, : end[0]],
        x,
        y_test,
        end,
        np.array([len(values)]),
        Metric(metric, rmse, larger_is_better=False),
    )


def air_quality(folder: Path) -> RealData:
    sensors = [f"PT08.S{i}({gas})" for i, gas in enumerate(("CO", "NMHC", "NOx", "NO2", "O3"), 1)]
    with (folder / "air_quality.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter=";") if row["Date"]]
    names = [*sensors, "T", "RH", "AH", "CO(GT)"]
    table = np.array([[float(row[name].replace(",", ".")) for row in rows] for name in names])
    table[table == -200] = np.nan
    *inputs, values = table
    filled = []
    for sensor in inputs:
        last = np.maximum.accumulate(np.where(np.isnan(sensor), 0, np.arange(len(sensor))))
        filled.append(sensor[last])
    return now("air_quality", np.array(filled), values, "RMSE, mg/m3")


def bikes(folder: Path) -> RealData:
    path = folder / "bike_hour.csv"
    plain = ("holiday", "workingday", "weathersit", "temp", "hum", "windspeed")
    hour, weekday = column(path, "hr") / 24, column(path, "weekday") / 7
    waves = [
        f(2 * np.pi * k * t)
        for t, k in ((hour, 1), (hour, 2), (weekday, 1))
        for f in (np.sin, np.cos)
    ]
    inputs = np.stack([*waves, *(column(path, name) for name in plain)])
    return now("bikes", inputs, np.log1p(column(path, "cnt")), "RMSE of the logarithm")


def republic(folder: Path, n_parts: int = 32) -> RealData:
    text = (folder / "republic.txt").read_text("utf-8")
    train, test = text[: len(text) * 9 // 10], text[len(text) * 19 // 20 :]
    # a character that the training part lacks is read as a blank
    number = {c: i for i, c in enumerate(sorted(set(train) | {" "}))}
    numbers = [np.array([number.get(c, number[" "]) for c in part]) for part in (train, test)]

    def parts(symbols: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        length = (len(symbols) - 1) // n
        x = symbols[: n * length].reshape(1, n, length)
        y = symbols[1 : n * length + 1].reshape(1, n, length)
        return x, y, np.full(n, length)

    x_train, y_train, train_lengths = parts(numbers[0], n_parts)
    x_test, y_test, test_lengths = parts(numbers[1], 1)
    return RealData(
        "republic",
        "characters",
        x_train,
        y_train,
        x_test,
        y_test,
        train_lengths,
        test_lengths,
        BITS,
    )


# -- all of them -------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[Path], RealData]] = {
    "GunPoint": partial(archive, "GunPoint"),
    "ArrowHead": partial(archive, "ArrowHead"),
    "BasicMotions": partial(archive, "BasicMotions"),
    "JapaneseVowels": partial(archive, "JapaneseVowels"),
    "ItalyPowerDemand": partial(archive, "ItalyPowerDemand"),
    "occupancy1": partial(occupancy, "occupancy1", "datatest.txt"),
    "occupancy2": partial(occupancy, "occupancy2", "datatest2.txt"),
    "cmapss": cmapss,
    "etth1_6": partial(etth1, "etth1_6", 6),
    "etth1_24": partial(etth1, "etth1_24", 24),
    "nab_ambient": partial(nab, "nab_ambient", "ambient_temperature_system_failure"),
    "nab_latency": partial(nab, "nab_latency", "ec2_request_latency_system_failure"),
    "nab_machine": partial(nab, "nab_machine", "machine_temperature_system_failure"),
    "nab_taxi": partial(nab, "nab_taxi", "nyc_taxi"),
    "nab_cpu": partial(nab, "nab_cpu", "rds_cpu_utilization_e47b3b"),
    "m4": m4,
    "wikipedia": wikipedia,
    "air_quality": air_quality,
    "bikes": bikes,
    "republic": republic,
}


def load(name: str, folder: str | Path) -> RealData:
    """A data set from a folder that holds the files of all.

    Raises
    ------
    FileNotFoundError
        If the folder has not the files of this one.
    ValueError
        If there is no set of that name.
    """
    if name not in LOADERS:
        raise ValueError(f"there is no data set {name!r}; there are {', '.join(LOADERS)}")
    return LOADERS[name](Path(folder))
