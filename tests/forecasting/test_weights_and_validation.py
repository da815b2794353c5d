"""Validation parts, weights and warm starts of a fit, against plain loops and plain fits."""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError
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


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_weights_are_no_weights_bit_by_bit(df, settings):
    plain = Forecaster(H, **settings).fit(df)
    for weight in (np.full(len(df), 0.3), "w"):
        weighted = Forecaster(H, **settings).fit(df.assign(w=7.1), sample_weight=weight)
        assert same(plain, weighted)
        assert plain.loss_curve_ == weighted.loss_curve_
    assert not same(plain, Forecaster(H, **settings).fit(df, sample_weight=df.ds + 1.0))


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
    fits = [Forecaster(H, **settings).fit(d, sample_weight=w) for d in (df, other)]
    assert same(*fits)
    assert not same(fits[0], Forecaster(H, **settings).fit(df, sample_weight=w + last))


@pytest.mark.slow
def test_weights_of_arrays_equal_those_of_frames(settings, rng):
    x = rng.normal(size=(2, 3, 30)) + 9
    w = rng.uniform(size=x.shape)
    frame = pd.DataFrame(
        {"unique_id": np.repeat(np.arange(6), 30), "ds": np.tile(np.arange(30), 6), "y": x.ravel()}
    )
    for weight in (w, w[0, :, 0], w[0]):
        whole = np.broadcast_to(weight[:, None] if weight.ndim == 1 else weight, x.shape)
        a = Forecaster(H, **settings).fit(x, sample_weight=weight)
        b = Forecaster(H, **settings).fit(frame, sample_weight=whole.ravel())
        for p, q in zip(weights_of(a), weights_of(b), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_weights_that_cannot_be_are_refused(df, settings):
    fc = Forecaster(H, **settings)
    bad = np.ones(len(df))
    bad[17] = -0.5
    for weight, error, message in (
        (bad, DataError, r"-0\.5 in row 17"),
        (np.where(bad < 0, np.nan, 1), DataError, r"nan in row 17"),
        (bad[1:], ShapeError, rf"\({len(df) - 1},\).*\({len(df)},\)"),
        ("v", DataError, r"'v'.*sample_weight"),
        (0 * bad, DataError, r"0 wherever there is a value"),
    ):
        with pytest.raises(error, match=message):
            fc.fit(df, sample_weight=weight)
    with pytest.raises(ShapeError, match=r"\(2,\).*\(3,\), \(3, 30\) or \(1, 3, 30\)"):
        fc.fit(np.ones((1, 3, 30)), sample_weight=[1, 2])


# -- validation ------------------------------------------------------------------------------------


@pytest.fixture
def validated(df, settings, monkeypatch):
    monkeypatch.setattr(model_fitting, "DROPOUT", 0.0)
    with pytest.warns(UserWarning, match=r"1 of 4 series .*10 steps .*'s3' has 9"):
        return Forecaster(H, **settings).fit(df, val_size=10)


def before_the_last(df, n):
    ends = df.groupby("unique_id").ds.transform("max")
    return df[df.ds <= ends - n]


@pytest.mark.slow
def test_nothing_is_learnt_from_the_validation_part(df, settings, validated):
    plain = Forecaster(H, **settings).fit(before_the_last(df, 10))
    assert plain.features_ == validated.features_
    np.testing.assert_allclose(
        plain.loss_curve_[: len(validated.loss_curve_)], validated.loss_curve_, rtol=1e-6
    )
    assert plain.validation_loss_curve_ == ()
    assert len(validated.validation_loss_curve_) == len(validated.loss_curve_)
    # forecasts start at the end of all data, those of series that were too short to train on too
    pd.testing.assert_frame_equal(validated.predict(), validated.predict(df), rtol=1e-5)


@pytest.mark.slow
def test_the_validation_loss_is_that_of_forecasts_into_the_held_out_part(df, validated, tmp_path):
    fitted = validated._fitted
    # quantiles as the networks say them, also where a series is too short
    as_learnt = copy.copy(validated)
    as_learnt.state_ = replace(fitted, features=replace(fitted.features, wander=()))
    total, count = 0.0, 0
    for name, part in df.groupby("unique_id"):
        first, last = part.ds.min(), part.ds.max()
        truth = part.set_index("ds").y
        for end in range(max(first, last - 10), last):
            known = part[part.ds <= end]
            if not known.y.notna().any():
                continue
            if end not in known.ds.to_numpy():  # a row that is missing counts as a missing value
                known = pd.concat([known, pd.DataFrame([{"unique_id": name, "ds": end}])])
            windows = fitted.windows(validated._read_known(known, None))
            n = len(range(first, end + 1))
            rows = Segments(np.zeros(1, int), np.array([n - 1]), np.ones(1, int))
            past = windows.past(rows, 0, 1)
            out = as_learnt.predict(known)
            columns = out[["Forecaster", "Forecaster-lo-60", "Forecaster-hi-60"]].to_numpy()
            transform = np.log if validated.features_.log else (lambda v: v)
            z = (transform(columns) - past.naive[0, 0][:, None]) / past.scale[0, 0]
            for k in range(H):
                y = truth.get(end + k + 1, np.nan)
                if np.isnan(y):
                    continue
                e = (transform(y) - past.naive[0, 0, k]) / past.scale[0, 0]
                error = abs(z[k, 0] - e)
                if validated.features_.log:
                    error = 20 * np.tanh(abs(z[k, 0] - e) * past.scale[0, 0] / 2) + 0.5 * abs(
                        z[k, 0] - e
                    )
                for q, level in ((0.2, z[k, 1]), (0.8, z[k, 2])):
                    error += max(q * (e - level), (q - 1) * (e - level)) / 2
                total += error
                count += 1
    best = min(validated.validation_loss_curve_)
    np.testing.assert_allclose(best, total / count, rtol=2e-3)
    validated.save(tmp_path / "fc.pt")
    again = Forecaster.load(tmp_path / "fc.pt")
    assert again.validation_loss_curve_ == validated.validation_loss_curve_


@pytest.mark.slow
def test_training_stops_when_validation_loss_rises_and_keeps_the_best(df, settings):
    fc = Forecaster(H, **{**settings, "max_steps": 150, "lr": 0.3})
    long = df[df.unique_id != "s3"]
    fc.fit(long, val_size=8)
    curve = fc.validation_loss_curve_
    assert len(curve) == np.argmin(curve) + 1 + 150 // 4 < 150
    arrays = np.stack([long[long.unique_id == "s0"].y.ffill().to_numpy()])[None]
    on_array = Forecaster(H, **settings).fit(arrays, val_size=8)
    assert on_array.predict()["Forecaster"].shape == (1, 1, H)
    assert len(on_array.validation_loss_curve_) == len(on_array.loss_curve_)


def test_validation_parts_that_cannot_be_are_refused(df, settings):
    fc = Forecaster(H, **settings)
    with pytest.raises(ValueError, match=r"val_size is 3, .*horizon of 4"):
        fc.fit(df, val_size=3)
    with pytest.raises(DataError, match=r"val_size=59 .*longest series has 60"):
        fc.fit(df, val_size=59)
    with pytest.raises(ValueError, match=r"val_size .*got -1"):
        fc.fit(df, val_size=-1)
