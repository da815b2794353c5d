"""How well alarms of a stream find what people have labelled as anomalies, beside simple scores, on
five series of the Numenta Anomaly Benchmark and on 16 runs of a machine with eight sensors.

The model is a SequenceRegressor with ``cell="linear"`` and ``level``, which predicts the next
value from the values so far and the time of the day and week of the value to come; ``--cell auto``
takes the model that a fit chooses. It is fitted once, on the first 60 per cent of a series;
``stream(alarm=True)`` then runs over the rest, and each alarm is that of the residual just observed.
No label is seen. The area under the ROC curve is that of all
steps of the last 40 per cent, those within a labelled window against the others. Beside it:

- persistence: the absolute change from the step before,
- rolling z: the distance from the mean of the last 24, 96 or 288 steps in their deviations,
- ridge: the absolute residual of a linear model of the last 24 values.

The second table is the benchmark's own score, from ``nab_scorer.py``, on whole series after the
probation of 15 per cent. There the model is fitted anew on all that has passed after 15, 30, 45, 60,
75 and 90 per cent. Since each alarm outside of a window costs, detectors report onsets: all scores
that are not the largest of the last 2 per cent of the series count as 0.

The machine is the water loop of SKAB, whose valve is partly closed for some minutes (``skab/valve1``,
a row a second). The first 400 rows of a run are quiet; the lines of the page about machines with
several sensors fit one linear step there, and watch the rest. Beside it are the mean squared z-score
of the sensors, and principal components with 90 per cent of the variance: Hotelling's T2 and the
squared error Q, each over its 99 per cent quantile of the first 400 rows, added. Areas are those of
all later rows. An episode begins where a score exceeds a threshold that it has not exceeded for 30 s;
it is false outside of the fault. One threshold serves all runs.

``--choose`` compares settings of the alarm without any label: on residuals of the first 60 per cent
into which shifts, bursts, drifts and spikes were put.

    python benchmarks/bench_alarms.py --data FOLDER [--choose]
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nab_scorer
import numpy as np
from common import Report, Table, parse, parser
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score

from fluxutils_py import SequenceRegressor
from fluxutils_py.estimator.streams import residual_model
from fluxutils_py.estimator.streams.conformal import Calibration
from fluxutils_py.estimator.streams.residual_model import ResidualModel

FILES = {
    "ambient": "ambient_temperature_system_failure",
    "latency": "ec2_request_latency_system_failure",
    "machine": "machine_temperature_system_failure",
    "taxi": "nyc_taxi",
    "cpu": "rds_cpu_utilization_e47b3b",
}
TRAINED = 0.6
REFITS = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
LAGS = 24
QUIET = 400  # rows of a run of SKAB
GAP = 30  # rows between two episodes
HEARD = (0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True, eq=False)
class Labelled:
    """A series and the windows of its anomalies: values (T,), inputs (F, 1, T), and pairs of first
    and last steps.
    """

    name: str
    values: np.ndarray
    inputs: np.ndarray
    windows: list[tuple[int, int]]

    @property
    def in_window(self) -> np.ndarray:
        labels = np.zeros(len(self.values), bool)
        for first, last in self.windows:
            labels[first : last + 1] = True
        return labels


def read(name: str, folder: Path) -> Labelled:
    path = folder / f"{FILES[name]}.csv"
    times = np.loadtxt(path, delimiter=",", skiprows=1, usecols=0, dtype="datetime64[s]")
    values = np.loadtxt(path, delimiter=",", skiprows=1, usecols=1)
    labels = json.loads((folder / "combined_windows.json").read_text("utf-8"))
    (pairs,) = [w for key, w in labels.items() if key.endswith(f"/{path.name}")]
    windows = []
    for begin, end in pairs:
        inside = (times >= np.datetime64(begin[:19])) & (times <= np.datetime64(end[:19]))
        steps = np.flatnonzero(inside)
        windows.append((int(steps[0]), int(steps[-1])))
    # of the value that is predicted: the next one
    following = np.append(times[1:], times[-1] + (times[-1] - times[-2]))
    return Labelled(name, values, np.stack([values, *calendar(following)])[:, None], windows)


def calendar(times: np.ndarray) -> list[np.ndarray]:
    """Waves of the day and the week, and whether it is a weekend."""
    hours = (times - times.astype("datetime64[D]")).astype(float) / 3600
    weekday = (times.astype("datetime64[D]").astype(int) + 3) % 7
    day, week = 2 * np.pi * hours / 24, 2 * np.pi * (weekday + hours / 24) / 7
    waves = [f(angle) for angle in (day, 2 * day, week) for f in (np.sin, np.cos)]
    return [*waves, (weekday >= 5).astype(float)]


# -- scores ----------------------------------------------------------------------------------------


def of_stream(data: Labelled, ends: Sequence[float], cell: str) -> np.ndarray:
    """Alarms (T,) of streams of models that are fitted at these parts of the series; zeros before."""
    n = len(data.values)
    x, v = data.inputs, data.values
    alarms = np.zeros(n)
    cuts = [int(end * n) for end in ends] + [n]
    for cut, stop in itertools.pairwise(cuts):
        est = SequenceRegressor(
            cell=cell, level=90, scale_target=False, random_state=0, verbose=False
        )
        est.fit(x[:, :, : cut - 1], v[None, None, 1:cut])
        _, state = est.predict(x[:, :, : cut - 1], return_state=True)
        live = est.stream(1, state, alarm=True)
        for t in range(cut, stop):
            live.step(x[:, :, t - 1], alarm=False)
            live.observe(v[t, None, None])
            alarms[t] = live.alarm[0]
    return alarms


def persistence(data: Labelled, begin: int) -> np.ndarray:
    return np.abs(np.diff(data.values, prepend=data.values[0]))


def rolling_z(data: Labelled, begin: int, width: int) -> np.ndarray:
    past = np.lib.stride_tricks.sliding_window_view(data.values, width)[:-1]
    z = np.zeros(len(data.values))
    z[width:] = np.abs(data.values[width:] - past.mean(1)) / np.maximum(past.std(1), 1e-9)
    return z


def ridge(data: Labelled, begin: int) -> np.ndarray:
    """Fitted on what is before ``begin``."""
    x = np.lib.stride_tricks.sliding_window_view(data.values, LAGS)[:-1]
    y = data.values[LAGS:]
    mean, deviation = data.values[:begin].mean(), data.values[:begin].std()
    x, y = (x - mean) / deviation, (y - mean) / deviation
    model = Ridge().fit(x[: begin - LAGS], y[: begin - LAGS])
    return np.concatenate([np.zeros(LAGS), np.abs(y - model.predict(x))])


BASELINES: dict[str, Callable[[Labelled, int], np.ndarray]] = {
    "persistence": persistence,
    **{
        f"rolling z, {w}": lambda data, begin, w=w: rolling_z(data, begin, w) for w in (24, 96, 288)
    },
    "ridge": ridge,
}


def onsets(scores: np.ndarray, width: int) -> np.ndarray:
    """Scores that are larger than all of the ``width`` before, else 0."""
    before = np.concatenate([np.full(width, -np.inf), scores[:-1]])
    largest = np.lib.stride_tricks.sliding_window_view(before, width).max(1)
    return np.where(scores > largest, scores, 0.0)


# -- tables ----------------------------------------------------------------------------------------


def areas(series: Sequence[Labelled], cell: str) -> Table:
    table = Table(
        "ROC AUC on the last 40 per cent, fitted once on the first 60",
        ["series", "alarm", *BASELINES, "alarm minus best of the others"],
    )
    rows = []
    for data in series:
        begin = int(TRAINED * len(data.values))
        labels = data.in_window[begin:]
        scores = [of_stream(data, [TRAINED], cell), *(f(data, begin) for f in BASELINES.values())]
        rows.append([float(roc_auc_score(labels, score[begin:])) for score in scores])
        text = [f"{area:.3f}" for area in rows[-1]]
        table.rows.append([data.name, *text, f"{rows[-1][0] - max(rows[-1][1:]):+.3f}"])
        print(table.rows[-1], flush=True)
    mean = np.mean(rows, axis=0)
    table.rows.append(
        ["mean", *(f"{area:.3f}" for area in mean), f"{mean[0] - mean[1:].max():+.3f}"]
    )
    return table


def nab_scores(series: Sequence[Labelled], cell: str) -> Table:
    table = Table(
        "NAB's score of all series with one threshold", ["detector", *nab_scorer.PROFILES]
    )
    alarms = [of_stream(data, REFITS, cell) for data in series]
    begins = [nab_scorer.n_probation(len(data.values)) for data in series]
    contenders = {
        "alarm": alarms,
        **{
            name: [
                # in units of the deviation in the probation: one threshold serves all
                score / (1.0 if "z" in name else np.std(data.values[:begin]))
                for data, begin in zip(series, begins, strict=True)
                for score in [function(data, begin)]
            ]
            for name, function in BASELINES.items()
        },
    }
    for name, scores in contenders.items():
        with_windows = [
            (onsets(score, len(score) // 50), data.windows)
            for score, data in zip(scores, series, strict=True)
        ]
        found = [nab_scorer.nab_score(with_windows, p)[0] for p in nab_scorer.PROFILES.values()]
        table.rows.append([name, *(f"{score:.1f}" for score in found)])
    return table


# -- several sensors -------------------------------------------------------------------------------


def of_sensors(values: np.ndarray, alarm: bool | str) -> np.ndarray:
    """Alarms of the rows after the quiet ones of values (G, T), by the lines of the page."""
    x = values[:, None]
    est = SequenceRegressor(cell="linear", level=90, scale_target=False, verbose=False)
    est.fit(x[:, :, : QUIET - 1], x[:, :, 1:QUIET])
    _, state = est.predict(x[:, :, : QUIET - 1], return_state=True)
    live = est.stream(1, state, alarm=alarm)
    alarms = []
    for t in range(QUIET, x.shape[2]):
        live.step(x[:, :, t - 1])
        live.observe(x[:, :, t])
        alarms.append(live.alarm[0])
    return np.array(alarms)


def standardised(values: np.ndarray) -> np.ndarray:
    quiet = values[:, :QUIET]
    return ((values - quiet.mean(1, keepdims=True)) / (quiet.std(1, keepdims=True) + 1e-9)).T


def squared_z(values: np.ndarray) -> np.ndarray:
    return (standardised(values)[QUIET:] ** 2).mean(1)


def t2_and_q(values: np.ndarray) -> np.ndarray:
    rows = standardised(values)
    pca = PCA(0.9).fit(rows[:QUIET])
    scores = pca.transform(rows)
    t2 = (scores**2 / pca.explained_variance_).sum(1)
    q = ((rows - pca.inverse_transform(scores)) ** 2).sum(1)
    both = [part / np.quantile(part[:QUIET], 0.99) for part in (t2, q)]
    return np.add(*both)[QUIET:]


def episodes(score: np.ndarray, labels: np.ndarray, threshold: float) -> tuple[bool, int]:
    """Whether an episode begins in the fault, and how many begin outside of it."""
    begins = np.flatnonzero(onsets(score > threshold, GAP))
    return bool(labels[begins].any()), int((~labels[begins]).sum())


def several_sensors(folder: Path, n_runs: int) -> Table:
    table = Table(
        "SKAB, valve1: ROC AUC per row, and false episodes of all runs where so many faults are "
        "heard",
        ["score", "mean AUC", "lowest AUC", *(f"{share:.0%} heard" for share in HEARD)],
    )
    paths = sorted((folder / "valve1").glob("*.csv"), key=lambda path: int(path.stem))[:n_runs]
    read = [np.loadtxt(p, delimiter=";", skiprows=1, usecols=range(1, 10)) for p in paths]
    labels = [rows[QUIET:, 8] > 0 for rows in read]
    contenders: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        'alarm="frozen"': lambda values: of_sensors(values, "frozen"),
        "alarm=True": lambda values: of_sensors(values, True),
        "PCA, T2 + Q": t2_and_q,
        "mean squared z": squared_z,
    }
    for name, function in contenders.items():
        scores = [function(rows[:, :8].T) for rows in read]
        areas = [float(roc_auc_score(*pair)) for pair in zip(labels, scores, strict=True)]
        found = []  # share heard, and false episodes, of many thresholds
        for threshold in np.quantile(np.concatenate(scores), np.linspace(0, 1, 400)):
            of_runs = [episodes(s, y, threshold) for s, y in zip(scores, labels, strict=True)]
            heard, false = zip(*of_runs, strict=True)
            found.append((np.mean(heard), sum(false)))
        fewest = [min((f for h, f in found if h >= share), default=None) for share in HEARD]
        table.rows.append([name, f"{np.mean(areas):.3f}", f"{min(areas):.2f}", *map(str, fewest)])
    return table


# -- a choice without labels -----------------------------------------------------------------------


def choice(series: Sequence[Labelled], n_copies: int = 16) -> Table:
    """Areas of the alarm for anomalies that were put into residuals of training data."""
    rng = np.random.default_rng(0)
    spoilt = []
    for data in series:
        end = int(TRAINED * len(data.values))
        x, v = data.inputs[:, :, : end - 1], data.values[None, None, 1:end]
        est = SequenceRegressor(cell="linear", verbose=False).fit(x, v)
        residuals = (v - est.predict(x))[0, 0, LAGS:]
        spoilt.append(with_anomalies(residuals, len(residuals) // 5, n_copies, rng))
    table = Table(
        "ROC AUC for anomalies put into residuals of training data, mean of the series",
        ["half-lives, parts of the memory", "memory = calibration", "twice", "four times"],
    )
    shipped = residual_model.PARTS
    for parts in ((20, 5), (80, 20, 5), (100, 10), (40, 20, 10, 5), (160, 40, 10)):
        residual_model.PARTS = parts
        found = [np.mean([area_of(s, factor) for s in spoilt]) for factor in (1, 2, 4)]
        table.rows.append([str(parts), *(f"{area:.3f}" for area in found)])
    residual_model.PARTS = shipped
    return table


Spoilt = tuple[np.ndarray, np.ndarray, int]


def with_anomalies(
    residuals: np.ndarray, begin: int, n_copies: int, rng: np.random.Generator
) -> Spoilt:
    """Copies (B, T) with two anomalies each after ``begin``, where they are, and ``begin``."""
    scale = np.median(np.abs(residuals)) / 0.6745
    copies = np.repeat(residuals[None], n_copies, 0)
    labels = np.zeros(copies.shape, bool)
    n_steps = copies.shape[1] - begin
    for b in range(n_copies):
        for _ in range(2):
            width = int(n_steps * rng.uniform(0.02, 0.06))
            first = begin + rng.integers(n_steps // 10, n_steps - width)
            where = slice(first, first + width)
            size = rng.uniform(0.5, 2) * rng.choice([-1, 1])
            kinds = [
                copies[b, where] + 0.7 * size * scale,
                copies[b, where] * (1 + abs(size)),
                copies[b, where] + size * scale * np.linspace(0, 2, width),
                copies[b, where] + 4 * size * scale * (rng.random(width) < 0.08),
            ]
            copies[b, where] = kinds[b % len(kinds)]
            labels[b, where] = True
    return copies, labels, begin


def area_of(spoilt: Spoilt, factor: int) -> float:
    copies, labels, begin = spoilt
    model = ResidualModel((1, len(copies)), factor * begin)
    model.calibrate(Calibration(copies[None, :, :begin], True))
    alarms = []
    for t in range(begin, copies.shape[1]):
        model.observe(copies[None, :, t])
        alarms.append(model.alarm())
    rows = zip(labels[:, begin:], np.array(alarms).T, strict=True)
    return float(np.mean([roc_auc_score(*row) for row in rows]))


def main() -> None:
    made = parser(__doc__, rounds=1)
    made.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="has nab/, skab/")
    made.add_argument("--cell", default="linear")
    made.add_argument("--choose", action="store_true")
    args = parse(made)
    report = Report(__doc__, args)
    warnings.simplefilter("ignore", UserWarning)
    names = ["latency"] if args.quick else list(FILES)
    series = [read(name, args.data / "nab") for name in names]
    began = time.perf_counter()
    if args.choose:
        report.add(choice(series))
    report.add(several_sensors(args.data / "skab", 2 if args.quick else 16))
    report.add(areas(series, args.cell))
    report.add(nab_scores(series, args.cell))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
