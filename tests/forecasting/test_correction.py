"""A correction is the same formula wherever forecasts come from: predict, update, walks, files, exports."""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.features import SOURCES, Correction
from fluxutils_py.forecasting.forecaster_export import ForecastStep

H, SEASON, LAG = 5, 3, 6
QUANTILES = (0.1, 0.5, 0.9)
NAMES = ["Forecaster", "Forecaster-lo-80", "Forecaster-median", "Forecaster-hi-80"]


def make_frame(n_steps, seed=0):
    """Five series of hours, of which one begins late; positive values."""
    rng = np.random.default_rng(seed)
    y = np.exp(3 + 0.1 * rng.normal(size=(5, 120)).cumsum(1))[:, :n_steps]
    parts = []
    for i, values in enumerate(y):
        begin = 8 if i == 2 else 0
        ds = pd.date_range("2026-01-01", periods=n_steps, freq="h")[begin:]
        parts.append(pd.DataFrame({"unique_id": f"s{i}", "ds": ds, "y": values[begin:]}))
    return pd.concat(parts)


def odd_correction():
    """Weights that differ by step, and offsets of which some let quantiles cross."""
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.ones(len(SOURCES)), size=H).T
    offsets = rng.normal(size=(len(QUANTILES), H))
    return Correction(weights, rng.uniform(0.3, 1.2, H), offsets, np.ones(H))


@pytest.fixture(scope="module", params=["auto", "none"])
def fitted(request, small):
    fc = Forecaster(H, (SEASON, LAG), quantiles=QUANTILES, transform=request.param, **small).fit(
        make_frame(90)
    )
    assert fc.correction_ is not None
    fc.state_ = replace(fc.state_, correction=odd_correction())
    return fc


def by_hand(fc, df, raw):
    """Forecasts of one series, from the definitions and from what the networks say."""
    c, f = fc.correction_, fc.features_
    z = np.log(df.y.to_numpy()) if f.log else df.y.to_numpy()
    naive = np.array([z[len(z) - SEASON + k % SEASON] for k in range(H)])
    last = z[-f.memory :]
    assert len(last) == len(z)
    scale = np.abs(z[SEASON:] - z[:-SEASON]).mean()
    network = (np.log(raw) if f.log else raw) - naive  # (1 + Q, H)
    k = np.arange(H)
    sources = [
        naive + network[0],
        naive,
        np.full(H, z[-1]),
        z[-1] + (z[-1] - z[0]) / (len(z) - 1) * (k + 1),
        np.full(H, z[-SEASON:].mean()),
        np.full(H, z.mean()),
        z[len(z) - LAG + k],
        np.array([z[[len(z) - SEASON * j + i % SEASON for j in (1, 2, 3, 4)]].mean() for i in k]),
    ]
    point = sum(w * source for w, source in zip(c.weights, sources, strict=True))
    rows = [point]
    for i in range(len(QUANTILES)):
        row = point + c.spread * (network[1 + i] - network[0]) + scale * c.offsets[i]
        rows.append(row if i == 0 else np.maximum(row, rows[-1]))
    return np.exp(rows) if f.log else np.maximum(rows, 0)


@pytest.mark.slow
def test_forecasts_are_the_formula_by_hand(fitted):
    df = make_frame(90)
    raw = copy.copy(fitted)
    raw.state_ = replace(raw.state_, correction=None)
    raw, found = raw.predict(df), fitted.predict(df)
    for name, series in df.groupby("unique_id"):
        mine, his = (t[t.unique_id == name][NAMES].to_numpy().T for t in (found, raw))
        np.testing.assert_allclose(mine, by_hand(fitted, series, his), rtol=1e-6)
    levels = found[NAMES[1:]].to_numpy()
    assert (np.diff(levels, axis=1) >= 0).all()


@pytest.mark.slow
def test_update_walk_and_file_correct_as_predict_does(fitted, tmp_path):
    df, more = make_frame(90), make_frame(97)
    expected = fitted.predict(more)[NAMES]
    updated = copy.deepcopy(fitted).update(more[more.ds > df.ds.max()])
    np.testing.assert_allclose(updated.predict()[NAMES], expected, rtol=1e-5)
    fitted.save(tmp_path / "fc")
    read = Forecaster.load(tmp_path / "fc")
    np.testing.assert_array_equal(read.correction_.weights, fitted.correction_.weights)
    np.testing.assert_array_equal(read.predict(more)[NAMES], expected)
    longer = make_frame(97 + H)
    walk = fitted.cross_validation(longer, refit=None)
    np.testing.assert_allclose(walk[NAMES], expected, rtol=1e-6)


@pytest.mark.slow
def test_a_step_for_export_corrects_as_predict_does(fitted):
    step = ForecastStep(fitted._fitted)
    df = make_frame(50)
    expected = fitted.predict(df)
    for name in ("s0", "s2"):
        y = torch.tensor(df[df.unique_id == name].y.to_numpy(copy=True))
        states = [s.of(1) for s in step.initial]
        with torch.no_grad():
            for value in y:
                found = step(value.reshape(1, 1), *states)
                states = list(found[step.n_outputs :])
        found = np.stack([x[0].numpy() for x in found[: step.n_outputs]])
        np.testing.assert_allclose(
            found, expected[expected.unique_id == name][NAMES].to_numpy().T, rtol=1e-5
        )


@pytest.mark.slow
def test_raw_forecasts_are_asked_for_by_name(small):
    df = make_frame(60)
    settings = {"quantiles": QUANTILES, **small}
    raw = Forecaster(H, SEASON, calibrate=False, **settings).fit(df)
    corrected = Forecaster(H, SEASON, **settings).fit(df)
    assert raw.correction_ is None
    # the networks that are kept are the same: they have seen all data
    for a, b in zip(raw.models_[0].parameters(), corrected.models_[0].parameters(), strict=True):
        np.testing.assert_array_equal(a.detach(), b.detach())
    assert (raw.predict()[NAMES[-1]] != corrected.predict()[NAMES[-1]]).all()


@pytest.mark.slow
def test_nothing_after_the_training_part_changes_a_forecast(small):
    df = make_frame(80)
    ends = df.groupby("unique_id").ds.transform("max")
    changed = df.copy()
    changed.loc[df.ds > ends - pd.Timedelta(hours=H), "y"] *= 7
    fc = Forecaster(H, SEASON, quantiles=QUANTILES, **small)
    one, other = (fc.cross_validation(data) for data in (df, changed))
    assert (one.y != other.y).all()
    np.testing.assert_array_equal(one[NAMES], other[NAMES])


@pytest.mark.slow
def test_counts_have_no_forecast_below_zero(small, rng):
    y = rng.poisson(0.3, size=(1, 6, 70)).astype(float)
    settings = {"quantiles": (0.05, 0.95), **small}
    found = Forecaster(4, 7, **settings).fit(y).predict()
    assert min(values.min() for values in found.values()) == 0
    below = Forecaster(4, 7, **settings).fit(y - 1).predict()
    assert below["Forecaster-lo-90"].min() < 0


@pytest.mark.slow
def test_means_are_forecast_where_they_are_asked_for(rng):
    """Skewed values without any pattern: their mean is far above their median, 1."""
    y = np.exp(1.5 * rng.normal(size=(1, 60, 60)))
    settings = {"max_steps": 60, "hidden_size": 4, "n_models": 1, "random_state": 0}
    for loss, truth in (("mse", np.exp(1.5**2 / 2)), ("auto", 1.0)):
        fc = Forecaster(2, 4, loss=loss, verbose=False, comm=None, **settings).fit(y)
        assert fc.features_.log == (loss == "auto")
        assert fc.predict().mean() == pytest.approx(truth, rel=0.2)


@pytest.mark.slow
def test_a_forecaster_says_where_nothing_is_learnt_beyond_simple_forecasts(rng):
    settings = {"hidden_size": 4, "n_models": 1, "random_state": 0, "verbose": False, "comm": None}
    walk = rng.normal(size=(1, 6, 150)).cumsum(2)
    with pytest.warns(UserWarning, match=r"weight of 0\.0\d .*simple forecasts"):
        fc = Forecaster(4, 7, **settings).fit(walk)
    trust = fc.correction_.trust
    assert (fc.correction_.weights[0] - (1 - trust)).mean() < 0.1
    # of networks that were hardly trained, nothing follows
    few = Forecaster(4, 7, max_steps=2, **settings).fit(walk)
    assert (few.correction_.weights[0] - (1 - trust)).mean() < 0.1
    t = np.arange(150)
    waves = np.sin(2 * np.pi * t / 7) + 0.3 * np.sin(2 * np.pi * t / 3)
    seasonal = Forecaster(4, 7, **settings).fit(waves + 0.2 * rng.normal(size=(1, 6, 150)))
    assert seasonal.correction_.weights[0].mean() > 0.3
