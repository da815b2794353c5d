"""Who takes part in bench_defaults.py: our defaults, and what a careful person would do without us.

Each contender has a function ``fit(data, seed)`` that returns a function ``predict(x, lengths)``. It
sees the training part alone. None was tuned on a test part: settings are those of the libraries, or
what a tutorial would write, or chosen on the last fifth of the training steps where that is said.
"""

from __future__ import annotations

import functools
import importlib.util
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from real_data import RealData
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor, nn

import fluxutils_py

# (x, lengths) of the test part; returns labels or numbers, or probabilities (K, N, T) of characters
Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]
Fit = Callable[[RealData, int], Predict]

MOST_ROWS = 20_000  # steps that boosting and linear models are trained on


class Outcome(NamedTuple):
    score: float
    fit_seconds: float
    predict_seconds: float


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    ``kinds`` are the kinds of data that it can take, ``package`` what has to be installed;
    ``is_random`` says whether a seed changes anything, ``compiles`` whether a first run takes longer
    than all later ones, ``is_old`` whether it is an earlier version of this package.
    """

    title: str
    fit: Fit
    kinds: tuple[str, ...]
    package: str = ""
    is_random: bool = True
    compiles: bool = False
    is_old: bool = False

    def run(self, data: RealData, seed: int) -> Outcome:
        began = time.process_time()
        with warnings.catch_warnings():
            # solvers that stop at their limit, networks of few updates: part of what is compared
            warnings.simplefilter("ignore")
            predict = self.fit(data, seed)
            fitted = time.process_time()
            predicted = predict(data.x_test, data.test_lengths)
        ended = time.process_time()
        return Outcome(data.score(predicted), fitted - began, ended - fitted)

    def why_not(self, data: RealData) -> str:
        """Why it does not take part; empty if it does."""
        if data.kind not in self.kinds:
            return f"not made for {data.kind}"
        if self.is_old == hasattr(fluxutils_py.SequenceRegressor, "choice_") and self.fit is ours:
            return "this is another version of fluxutils_py"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


# -- this package ------------------------------------------------------------------------------------


def network(n_symbols: int) -> nn.Module:
    """The model of characters: what one would write first."""
    from fluxutils_py.nn import LSTM

    return nn.Sequential(
        nn.Embedding(n_symbols, 32), nn.Flatten(-2), LSTM(32, 96), nn.Linear(96, n_symbols)
    )


def by_estimator(data: RealData, estimator: Any) -> Predict:
    estimator.fit(data.x_train, data.y_train, lengths=data.train_lengths)

    def predict(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        if data.kind != "characters":
            return estimator.predict(x, lengths=lengths)
        found = estimator.predict_proba(x, lengths=lengths)
        probabilities = np.zeros((n_symbols(data), *found.shape[1:]))
        probabilities[estimator.classes_] = found
        return probabilities

    return predict


def n_symbols(data: RealData) -> int:
    """How many different characters there are."""
    return int(max(data.x_train.max(), data.y_train.max())) + 1


def ready_made(data: RealData, seed: int, settings: Mapping[str, Any]) -> Any:
    """A ready-made estimator with these settings and no other."""
    from fluxutils_py import SequenceClassifier, SequenceRegressor

    cls = SequenceClassifier if data.is_classification else SequenceRegressor
    return cls(random_state=seed, **settings)


def ours(data: RealData, seed: int) -> Predict:
    """Nothing is set but the seed."""
    if data.kind != "characters":
        return by_estimator(data, ready_made(data, seed, {}))
    # a feature for each character: numbers of characters have no order
    symbols = np.arange(n_symbols(data))[:, None, None]
    estimator = ready_made(data, seed, {})
    estimator.fit(data.x_train == symbols, data.y_train)

    def predict(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        found = estimator.predict_proba(x == symbols)
        probabilities = np.zeros((len(symbols), *found.shape[1:]))
        probabilities[estimator.classes_] = found
        return probabilities

    return predict


# -- features for models of tables -------------------------------------------------------------------


def recent(x: np.ndarray, n_lags: int, at: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The last ``n_lags`` steps of all features, a row for each place; the first step is repeated
    before the start.

    ``at`` are series and steps of the places.
    """
    series, steps = at
    before = np.maximum(steps[:, None] - np.arange(n_lags), 0)
    rows = x[:, series[:, None], before]  # (F, rows, lags)
    return rows.transpose(1, 0, 2).reshape(len(steps), -1)


def rolling(x: np.ndarray, spans: tuple[int, ...], at: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Means, deviations and slopes of all features over the last steps, a row for each place.

    Near the start, they are those of the steps that there are; the slope of one step is 0.
    """
    # sums of squares need small numbers, and a constant has to stay one: trees see any rounding
    first = x[:, :, :1].astype(float)
    from_first = x - first
    columns = []
    for span in spans:
        before = np.zeros((*x.shape[:2], span - 1))
        windows = np.lib.stride_tricks.sliding_window_view(
            np.concatenate([before, from_first], axis=2), span, axis=2
        )
        n = np.minimum(np.arange(x.shape[2]) + 1, span)
        time = np.arange(span) - (span - 1)  # the last step is 0
        mean = windows.sum(3) / n
        square = np.einsum("fnts,fnts->fnt", windows, windows) / n
        mean_time = -(n - 1) / 2
        slope = (windows @ time / n - mean * mean_time) * 12 / np.maximum(n**2 - 1, 1)
        for found in (mean + first, np.sqrt(np.maximum(square - mean**2, 0)), slope):
            columns.append(found[:, at[0], at[1]].T)
    return np.concatenate(columns, axis=1)


def flat(x: np.ndarray, lengths: np.ndarray, n_steps: int, fill: float) -> np.ndarray:
    """A row for each series, cut or filled up to ``n_steps``."""
    rows = np.full((x.shape[1], x.shape[0], n_steps), fill, dtype=x.dtype)
    for n, length in enumerate(np.minimum(lengths, n_steps)):
        rows[n, :, :length] = x[:, n, :length]
    return rows.reshape(len(rows), -1)


def places(data: RealData) -> tuple[np.ndarray, np.ndarray]:
    """Series and steps of the training part that have a target, in the order of time."""
    live = np.arange(data.x_train.shape[2]) < data.train_lengths[:, None]
    steps, series = np.nonzero((live & np.isfinite(data.y_train[0])).T)
    return series, steps


def some(at: tuple[np.ndarray, np.ndarray], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """At most ``MOST_ROWS`` of the places, in the same order."""
    n = len(at[0])
    if n <= MOST_ROWS:
        return at
    chosen = np.sort(np.random.default_rng(seed).choice(n, MOST_ROWS, replace=False))
    return at[0][chosen], at[1][chosen]


def by_steps(model: Any, features: Callable[..., np.ndarray]) -> Predict:
    """Predict each step of each series from its features."""

    def predict(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        shape = x.shape[1:]
        at = tuple(axis.ravel() for axis in np.indices(shape))
        return model.predict(features(x, at)).reshape(1, *shape)

    return predict


# -- boosting ----------------------------------------------------------------------------------------

SPANS = (5, 20, 80)
LAGS = 24
FEW = 8  # features whose lags boosting gets, too


def past(x: np.ndarray, at: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    n_lags = LAGS if len(x) <= FEW else 1
    return np.concatenate([recent(x, n_lags, at), rolling(x, SPANS, at)], axis=1)


def boosting(data: RealData, seed: int) -> Predict:
    """HistGradientBoosting as it comes: on whole series as rows, or on lags and rolling features."""
    if data.per_series:
        model = HistGradientBoostingClassifier(random_state=seed)
        n_steps = data.x_train.shape[2]
        model.fit(flat(data.x_train, data.train_lengths, n_steps, np.nan), data.y_train)
        return lambda x, lengths: model.predict(flat(x, lengths, n_steps, np.nan))
    if data.is_classification:
        model = HistGradientBoostingClassifier(random_state=seed)
    else:
        model = HistGradientBoostingRegressor(random_state=seed)
    at = some(places(data), seed)
    model.fit(past(data.x_train, at), data.y_train[0][at])
    return by_steps(model, past)


# -- linear models -----------------------------------------------------------------------------------


def linear_model(data: RealData) -> Any:
    if data.is_classification:
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    return make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 4, 8)))


def linear(data: RealData, seed: int) -> Predict:
    """Ridge regression, or logistic regression for labels.

    On whole series as rows; on the last character or steps, one or ``LAGS`` of them as the last fifth
    of the training steps says.
    """
    if data.kind == "characters":
        return linear_characters(data, seed)
    if data.per_series:
        model = linear_model(data)
        n_steps = data.x_train.shape[2]
        model.fit(flat(data.x_train, data.train_lengths, n_steps, 0), data.y_train)
        return lambda x, lengths: model.predict(flat(x, lengths, n_steps, 0))
    at = some(places(data), seed)
    targets = data.y_train[0][at]
    cut = len(targets) * 4 // 5
    held_out = {}
    for n_lags in (1, LAGS):
        rows = recent(data.x_train, n_lags, at)
        model = linear_model(data).fit(rows[:cut], targets[:cut])
        held_out[n_lags] = model.score(rows[cut:], targets[cut:])
    best = max(held_out, key=held_out.__getitem__)
    features = functools.partial(recent_of, n_lags=best)
    return by_steps(linear_model(data).fit(features(data.x_train, at), targets), features)


def recent_of(x: np.ndarray, at: tuple[np.ndarray, np.ndarray], n_lags: int) -> np.ndarray:
    return recent(x, n_lags, at)


def linear_characters(data: RealData, seed: int, n_lags: int = 6) -> Predict:
    """Logistic regression on which characters were the last six."""
    symbols = [np.arange(n_symbols(data))] * n_lags
    model = make_pipeline(OneHotEncoder(categories=symbols), LogisticRegression(max_iter=100))
    at = some(places(data), seed)
    model.fit(recent(data.x_train, n_lags, at), data.y_train[0][at])

    def predict(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        at = tuple(axis.ravel() for axis in np.indices(x.shape[1:]))
        found = np.full((len(symbols[0]), x.shape[1] * x.shape[2]), 1e-6)
        found[model[-1].classes_] = model.predict_proba(recent(x, n_lags, at)).T
        return found.reshape(-1, *x.shape[1:])

    return predict


# -- MiniRocket --------------------------------------------------------------------------------------


def minirocket(data: RealData, seed: int) -> Predict:
    """aeon's classifier as it comes. Series of unequal lengths have zeros behind their ends."""
    from aeon.classification.convolution_based import MiniRocketClassifier

    n_steps = max(data.x_train.shape[2], data.x_test.shape[2])

    def cases(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return flat(x, lengths, n_steps, 0).reshape(x.shape[1], x.shape[0], n_steps)

    model = MiniRocketClassifier(random_state=seed)
    model.fit(cases(data.x_train, data.train_lengths), data.y_train)
    return lambda x, lengths: model.predict(cases(x, lengths))


# -- a plain loop in torch ---------------------------------------------------------------------------

UNITS, WINDOW, BATCH, RATE, CLIP = 32, 100, 32, 1e-3, 1.0
UPDATES = 500  # at least, in whole epochs
UPDATES_OF_CHARACTERS = 3000  # three passes or so over a book


class PlainLSTM(nn.Module):
    """An LSTM and a linear head, on standardised inputs or embedded characters."""

    def __init__(self, data: RealData, n_out: int) -> None:
        super().__init__()
        n_features = len(data.x_train)
        live = live_steps(data.x_train, data.train_lengths)  # (F, live)
        self.embedding = nn.Embedding(n_out, UNITS) if data.kind == "characters" else None
        n_in = UNITS if self.embedding is not None else n_features
        self.lstm = nn.LSTM(n_in, UNITS)
        self.head = nn.Linear(UNITS, n_out)
        self.register_buffer("mean", torch.tensor(live.mean(1), dtype=torch.float32))
        scale = np.maximum(live.std(1), 1e-6)
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (T, N, K) of inputs (T, N, F)."""
        if self.embedding is not None:
            return self.head(self.lstm(self.embedding(x[..., 0]))[0])
        return self.head(self.lstm((x - self.mean) / self.scale)[0])


def live_steps(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All steps of all series, (F, steps)."""
    return np.concatenate([x[:, n, :length] for n, length in enumerate(lengths)], axis=1)


@dataclass
class Windows:
    """Windows of steps, time first, their targets, and where there are any."""

    x: Tensor  # (T, windows, F)
    y: Tensor  # (T, windows)
    live: Tensor  # (T, windows), bool


def windows(data: RealData, y: np.ndarray) -> Windows:
    """Pieces of ``WINDOW`` steps for a target per step, whole series for one per series."""
    n_steps = data.x_train.shape[2]
    live = np.arange(n_steps) < data.train_lengths[:, None]
    if data.per_series:
        live = np.arange(n_steps) == data.train_lengths[:, None] - 1
        y = np.repeat(y[:, None], n_steps, axis=1)
    live = live & np.isfinite(y)
    length = n_steps if data.per_series else min(WINDOW, n_steps)
    more = -n_steps % length

    def pieces(a: np.ndarray) -> Tensor:
        """An array (..., N, T) as (T, windows, ...)."""
        a = np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, more)])
        a = a.reshape(*a.shape[:-2], -1, length)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(a, -1, 0)))

    x = pieces(data.x_train)  # (T, F, windows)
    found = Windows(x.permute(0, 2, 1).contiguous(), pieces(np.where(live, y, 0)), pieces(live))
    kept = found.live.any(0)
    return Windows(found.x[:, kept], found.y[:, kept], found.live[:, kept])


def plain_lstm(data: RealData, seed: int) -> Predict:
    """What tutorials write: Adam, minibatches of shuffled windows, each from the zero state.

    Of whole series the loss is that of the last step. Predictions run over each series as a whole.
    """
    torch.manual_seed(seed)
    if data.is_classification:
        labels, y = np.unique(data.y_train, return_inverse=True)
        if data.kind == "characters":
            labels, y = np.arange(n_symbols(data)), data.y_train
        mean, scale, n_out = 0, 1, len(labels)
        y = y.reshape(data.y_train.shape)
    else:
        live = data.y_train[np.isfinite(data.y_train)]
        labels, mean, scale, n_out = None, live.mean(), live.std(), 1
        y = (data.y_train - mean) / scale
    model = PlainLSTM(data, n_out)
    n_updates = UPDATES_OF_CHARACTERS if data.kind == "characters" else UPDATES
    parts = windows(data, y if data.per_series else y[0])
    train(model, parts, data.is_classification, n_updates)

    def predict(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            out = model(torch.from_numpy(x).permute(2, 1, 0)).numpy()  # (T, N, K)
        if data.per_series:
            last = out[lengths - 1, np.arange(len(lengths))]
            return labels[last.argmax(1)]
        if data.kind == "characters":
            return torch.from_numpy(out).softmax(2).numpy().transpose(2, 1, 0)
        if data.is_classification:
            return labels[out.argmax(2)].T[None]
        return out.transpose(2, 1, 0) * scale + mean

    return predict


def train(model: PlainLSTM, parts: Windows, is_classification: bool, at_least: int) -> None:
    """Adam over shuffled minibatches, until so many updates are made and the epoch is over."""
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    n_windows, n_updates = parts.x.shape[1], 0
    while n_updates < at_least:
        for rows in torch.randperm(n_windows).split(BATCH):
            live = parts.live[:, rows]
            out = model(parts.x[:, rows])[live]
            target = parts.y[:, rows][live]
            if is_classification:
                loss = F.cross_entropy(out, target.long())
            else:
                loss = F.mse_loss(out[:, 0], target.float())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            n_updates += 1


# -- all of them -------------------------------------------------------------------------------------

SERIES, LABELS, NUMBERS = "labels of series", "labels of steps", "numbers of steps"
ALL = (SERIES, LABELS, NUMBERS, "characters")

CONTENDERS = {
    "ours": Contender("fluxutils_py, nothing set", ours, ALL),
    # measured in an environment that has it
    "0.2.0": Contender("fluxutils_py 0.2.0, nothing set", ours, ALL, is_old=True),
    "linear": Contender("ridge, logistic regression", linear, ALL, is_random=False),
    # of characters, each round would grow eighty trees
    "boosting": Contender("HistGradientBoosting", boosting, (SERIES, LABELS, NUMBERS)),
    "lstm": Contender("LSTM in a torch loop", plain_lstm, ALL),
    "minirocket": Contender(
        "MiniRocket of aeon", minirocket, (SERIES,), package="aeon", compiles=True
    ),
}
