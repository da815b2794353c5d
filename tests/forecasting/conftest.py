"""Panels as they come: awkward lengths, gaps, values that never change, and a loop that forecasts
them step by step.
"""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch


def series(kind, n, rng):
    """Values of a series of ``n`` steps."""
    t = np.arange(n)
    return {
        "wave": 20 + 5 * np.sin(2 * np.pi * t / 7) + rng.normal(size=n),
        "constant": np.full(n, 3.0),
        "zero": np.zeros(n),
        "negative": -50 + 3 * np.sin(2 * np.pi * t / 7) + rng.normal(size=n),
        "large": 1e6 * (2 + np.cos(2 * np.pi * t / 7)),
    }[kind]


@pytest.fixture(scope="session")
def to_polars():
    """A frame of pandas as one of polars, missing values as null; without pyarrow, which
    pl.from_pandas asks for.
    """
    return lambda df: pl.DataFrame(df.to_dict("list")).fill_nan(None)


LENGTHS = {
    "wave": (60, 41, 1, 2, 8, 15),
    "constant": (37, 3),
    "zero": (29,),
    "negative": (52, 5),
    "large": (44, 1),
}


def awkward_panel(kinds=tuple(LENGTHS), seed=0, freq="D", missing=True):
    """A long frame in random order: lengths 1 to 60, late starts, missing rows and missing values."""
    rng = np.random.default_rng(seed)
    parts = []
    for kind in kinds:
        for n in LENGTHS[kind]:
            y = series(kind, n, rng)
            begin = int(rng.integers(0, 61 - n))
            ds = pd.date_range("2024-02-01", periods=61, freq=freq)[begin : begin + n]
            df = pd.DataFrame({"unique_id": f"{kind}-{n}", "ds": ds, "y": y})
            if missing and n > 20:
                df.loc[rng.choice(n - 1, 4, replace=False), "y"] = np.nan
                df = df.drop(index=rng.choice(np.arange(1, n - 1), 5, replace=False))
            parts.append(df)
    return pd.concat(parts).sample(frac=1, random_state=seed).reset_index(drop=True)


@pytest.fixture
def panel():
    return awkward_panel()


@pytest.fixture(scope="session")
def make_panel():
    """:func:`awkward_panel`."""
    return awkward_panel


@pytest.fixture(scope="session")
def small():
    """Settings of a tiny recurrent network, trained for a moment."""
    settings = {"network": "recurrent", "hidden_size": 5, "max_steps": 3, "n_models": 1}
    return {**settings, "random_state": 0, "verbose": False, "comm": None}


# -- the naive loop: one value at a time, from the definitions ------------------------------------------


def filled_values(z, m):
    """Missing values from the same place in one of the last two seasons, else the last value; NaN
    before the first.
    """
    out = []
    for t, value in enumerate(z):
        found = value
        for back in (m, 2 * m):
            if np.isnan(found) and t >= back:
                found = z[t - back]
        out.append(found)
    last, whole = np.nan, []
    for value in out:
        last = last if np.isnan(value) else value
        whole.append(last)
    return whole


def mean_of(values):
    there = [v for v in values if not np.isnan(v)]
    return sum(there) / len(there) if there else np.nan


def at(values, t):
    return values[t] if 0 <= t < len(values) else np.nan


def naive_state(z, t, f):
    """Level, scale and the seasonal naive forecast at step ``t`` of values in the units of the
    transform.
    """
    m = f.season
    z, filled = z[: t + 1], filled_values(z[: t + 1], m)  # nothing later is looked at
    level = mean_of([at(filled, t - j) for j in range(m)])
    changes = [abs(z[s] - z[s - m]) for s in range(m, t + 1)]
    scale = mean_of(changes)
    if np.isnan(scale):
        scale = mean_of([abs(z[s] - z[s - 1]) for s in range(1, t + 1)])
    scale = f.smallest_scale if np.isnan(scale) else max(scale, f.smallest_scale)
    ahead = []
    for k in range(1, f.h + 1):
        value = at(filled, t + k - m * -(-k // m))
        ahead.append(filled[t] if np.isnan(value) else value)
    return level, scale, np.array(ahead), filled


def naive_inputs(z, t, f):
    """The inputs of the network at step ``t``."""
    level, scale, ahead, filled = naive_state(z, t, f)
    levels = [mean_of([at(filled, s - j) for j in range(f.season)]) for s in range(t + 1)]
    x = [(at(filled, t - f.input_size + 1 + j) - level) / scale for j in range(f.input_size)]
    x.append((level - at(levels, t - f.lag)) / scale)
    x.append((filled[t] - at(filled, t - f.season)) / scale)
    x.append((mean_of([at(filled, t - j) for j in range(f.lag)]) - level) / scale)
    x.append(np.log(scale / f.unit))
    if f.lag > f.season:
        for k in range(1, f.h + 1):
            back = f.lag * -(-k // f.lag)
            x.append(
                (at(filled, t + k - back) - at(levels, t - back) - (ahead[k - 1] - level)) / scale
            )
    return np.clip(np.nan_to_num(np.array(x), nan=0.0), -8, 8)


def naive_forecast(y, f, model):
    """Forecasts of one series by a network, walked through step by step with torch's own LSTM cell."""
    z = np.log(y) if f.log else np.asarray(y, float)
    weights = {k: v.detach().double() for k, v in model.state_dict().items()}
    H = weights["body.module.weight_hh_l0"].shape[1]
    cell = torch.nn.LSTMCell(f.n_inputs, H, dtype=torch.float64)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cell.load_state_dict({name: weights[f"body.module.{name}_l0"] for name in names})
    state = None
    for t in range(len(z)):
        x = torch.from_numpy(naive_inputs(z, t, f))
        with torch.no_grad():
            state = cell(x[None], state)
    u = state[0][0] @ weights["head.weight"].T + weights["head.bias"]
    u = u + x @ weights["skip.weight"].T + weights["skip.bias"]
    _, scale, ahead, _ = naive_state(z, len(z) - 1, f)
    forecast = ahead + scale * u.numpy()
    return np.exp(forecast) if f.log else forecast


@pytest.fixture(scope="session")
def oracle():
    """The naive loop's functions by name."""
    return SimpleNamespace(state=naive_state, inputs=naive_inputs, forecast=naive_forecast)
