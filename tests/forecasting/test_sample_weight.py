"""Weights of values as targets, against plain loops and plain fits."""

import numpy as np
import pandas as pd
import pytest
import torch

from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster, model_fitting
from fluxutils_py.forecasting.networks import ForecastLoss
from fluxutils_py.forecasting.panel_windows import WindowArray
from fluxutils_py.forecasting.read_series import WEIGHT, target_weights
from fluxutils_py.frames.panel import Columns, read_panel

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")
H = 4
LENGTHS = (60, 43, 30, 9)


@pytest.fixture(scope="module")
def df():
    rng = np.random.default_rng(3)
    parts = []
    for i, n in enumerate(LENGTHS):
        t = np.arange(n)
        y = 20 + 3 * np.sin(2 * np.pi * t / 5) + rng.normal(size=n)
        parts.append(pd.DataFrame({"unique_id": f"s{i}", "ds": t + 7 * i, "y": y}))
    out = pd.concat(parts, ignore_index=True)
    out.loc[[3, 70], "y"] = np.nan
    return out.drop(index=[11, 80]).reset_index(drop=True)


@pytest.fixture
def settings(small):
    return {**small, "max_steps": 12, "season_length": (5,), "quantiles": (0.2, 0.8)}


def weights_of(fc):
    return [p.detach().clone() for m in fc.models_ for p in m.parameters()]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(weights_of(a), weights_of(b), strict=True))


@pytest.mark.slow
def test_equal_weights_are_no_weights_bit_by_bit(df, settings):
    plain = Forecaster(H, **settings).fit(df)
    weighted = Forecaster(H, **settings).fit(df.assign(w=8.0), sample_weight="w")
    assert same(plain, weighted)
    assert plain.loss_curve_ == weighted.loss_curve_
    other = Forecaster(H, **settings).fit(df.assign(w=df.ds + 1.0), sample_weight="w")
    assert not same(plain, other)


@pytest.mark.slow
def test_weighted_losses_equal_plain_loops(df, settings):
    rng = np.random.default_rng(0)
    w = rng.uniform(0, 2, len(df)) * (rng.random(len(df)) < 0.7)
    fc = Forecaster(H, **settings).fit(df)
    panel = read_panel(df, Columns(), 1, extra={WEIGHT: w})
    source = target_weights(panel)
    windows = fc._fitted.windows(panel)
    n, T = panel.n_series, int(panel.lengths.max())
    rows = Segments(np.arange(n), np.zeros(n, int), panel.lengths)
    y = WindowArray(windows, "targets", weights=source).read_segments(rows, 0, T)
    plain = WindowArray(windows, "targets").read_segments(rows, 0, T)
    by_row = dict(zip(zip(df.unique_id, df.ds, strict=True), w, strict=True))
    known = df.y.notna() & (w > 0)
    mean = w[known].mean()
    for i in range(n):
        for t in range(T):
            for k in range(H):
                weight = by_row.get((panel.ids[i], panel.first[i] + t + k + 1), 0.0)
                got = y[t, i, [k, H + k]]
                if weight == 0 or np.isnan(plain[t, i, k]):
                    assert np.isnan(got).all()
                else:
                    np.testing.assert_allclose(got, [plain[t, i, k], weight / mean], rtol=1e-6)
    # the loss of a window: each error times its weight, over the number of errors that count
    loss = ForecastLoss("mae", H, (0.2, 0.8))
    out = torch.randn(T, n, 3 * H, generator=torch.Generator().manual_seed(0))
    ys = torch.from_numpy(np.nan_to_num(y))
    mask = torch.from_numpy((~np.isnan(y)).astype("float32"))

    class Fixed(torch.nn.Module):
        takes_windows = True

        def forward(self, x):
            return out[: len(x)]

    got = loss(Fixed(), torch.zeros(T, n, 1), ys, mask).item()
    total = 0.0
    for t, i, k in np.argwhere(~np.isnan(y[:, :, :H])):
        truth, weight = y[t, i, k], y[t, i, H + k]
        error = abs(out[t, i, k].item() - truth)
        for j, q in enumerate((0.2, 0.8), 1):
            e = truth - out[t, i, j * H + k].item()
            error += max(q * e, (q - 1) * e) / 2
        total += weight * error
    np.testing.assert_allclose(got, total / np.sum(~np.isnan(y[:, :, :H])), rtol=1e-5)


@pytest.mark.slow
def test_rows_of_weight_zero_have_no_part_in_the_loss(df, settings, monkeypatch):
    fixed = Forecaster(H, **settings).fit(df).features_
    # chosen from all values, also from those of weight 0
    monkeypatch.setattr(model_fitting, "choose_features", lambda *a: fixed)
    last = df.groupby("unique_id").cumcount(ascending=False) < 6
    w = np.where(last, 0.0, 1.0 + df.ds % 3)
    other = df.assign(y=df.y.where(~last, df.y + 2))
    weights = ((df, w), (other, w), (df, w + last))
    fits = [Forecaster(H, **settings).fit(d.assign(w=v), sample_weight="w") for d, v in weights]
    assert same(*fits[:2])
    assert not same(fits[0], fits[2])


def test_weights_that_cannot_be_are_refused(df, settings):
    fc = Forecaster(H, **settings)
    bad = np.ones(len(df))
    bad[17] = -0.5
    for weight, message in (
        (bad, r"'w'.* -0\.5 in row 17"),
        (np.where(bad < 0, np.nan, 1), r"nan in row 17"),
        (0 * bad, r"0 wherever there is a value"),
    ):
        with pytest.raises(DataError, match=message):
            fc.fit(df.assign(w=weight), sample_weight="w")
    with pytest.raises(DataError, match=r"'v'.*sample_weight"):
        fc.fit(df, sample_weight="v")
    with pytest.raises(SpecError, match="name of a column"):
        fc.fit(df, sample_weight=bad)
