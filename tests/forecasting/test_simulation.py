"""Paths: marginals are the quantiles of predict, ranks those of past errors."""

from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.simulation import past_scores

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")
LEVELS = (0.1, 0.5, 0.9)
H = 4


@pytest.fixture(scope="module")
def fc():
    rng = np.random.default_rng(0)
    walks = [50 + np.cumsum(rng.normal(size=n)) for n in (40, 31, 23)]
    df = pd.concat(
        pd.DataFrame({"unique_id": name, "ds": np.arange(len(y)), "y": y})
        for name, y in zip("abc", walks, strict=True)
    )
    settings = {"hidden_size": 5, "max_steps": 40, "random_state": 0, "verbose": False}
    return Forecaster(H, 1, 1, quantiles=LEVELS, comm=None, **settings).fit(df), df


def paths_of(frame, name, n):
    part = frame[frame.unique_id == name].sort_values(["sample", "ds"])
    return part.Forecaster.to_numpy().reshape(n, H)


@pytest.mark.slow
@pytest.mark.parametrize("n", [40, 399])
def test_marginals_are_the_quantiles(fc, n):
    fc, _ = fc
    out = fc.predict()
    simulated = fc.simulate(n, random_state=1)
    assert list(simulated.columns) == ["unique_id", "ds", "sample", "Forecaster"]
    assert simulated.dtypes["ds"] == out.dtypes["ds"]
    for name, rows in out.groupby("unique_id"):
        paths = paths_of(simulated, name, n)
        for q in LEVELS:
            below = (paths < rows[f"Forecaster-q{q:g}"].to_numpy()).mean(0)
            assert (abs(below - q) <= 1 / n + 1e-9).all()


@pytest.mark.slow
def test_scores_are_those_of_forecasts_of_truncated_series(fc):
    fc, df = fc
    nodes = [NormalDist().inv_cdf(q) for q in LEVELS]
    expected = []
    for name in "abc":
        y = df[df.unique_id == name].y.to_numpy()
        last = len(y) - 1 - H
        for t in range(last, last // 2 - 1, -1):
            known = df[(df.unique_id == name) & (df.ds <= t)]
            row = fc.predict(known)
            scores = []
            for k in range(H):
                v = np.log(row.iloc[k][[f"Forecaster-q{q:g}" for q in LEVELS]].to_numpy(float))
                z = np.log(y[t + 1 + k])
                i = 0 if z <= v[1] else 1
                scores.append(nodes[i] + (z - v[i]) / (v[i + 1] - v[i]) * (nodes[i + 1] - nodes[i]))
            expected.append(scores)
    got = past_scores(fc._fitted, fc.history_)
    order = [np.lexsort(np.array(s).T.round(4)) for s in (got, expected)]
    np.testing.assert_allclose(got[order[0]], np.array(expected)[order[1]], rtol=1e-3, atol=1e-3)
    # as many paths as windows: each path has the ranks of one of them
    n = len(got)
    ranks = {tuple(r) for r in got.argsort(0).argsort(0)}
    paths = paths_of(fc.simulate(n, random_state=3), "b", n)
    assert {tuple(r) for r in paths.argsort(0).argsort(0)} == ranks


@pytest.mark.slow
def test_walks_stay_together_and_noise_does_not(small):
    rng = np.random.default_rng(2)
    noise = 10 + rng.normal(size=(1, 6, 120))
    walk = np.cumsum(noise - 10, axis=2) + 100
    correlations = []
    for y in (walk, noise):
        settings = {**small, "max_steps": 60}
        fc = Forecaster(6, 1, 1, quantiles=LEVELS, transform="none", **settings).fit(y)
        paths = fc.simulate(300, random_state=0)
        assert paths.shape == (300, 1, 6, 6)
        errors = paths - paths.mean(0)
        last = [errors[..., k].ravel() for k in (4, 5)]
        correlations.append(np.corrcoef(last)[0, 1])
    assert correlations[0] > 0.7
    assert abs(correlations[1]) < 0.35


@pytest.mark.slow
def test_paths_depend_on_random_state_alone_and_follow_updates(fc, tmp_path):
    fc, df = fc
    fc.save(tmp_path / "fc.pt")
    again = Forecaster.load(tmp_path / "fc.pt")
    a = fc.simulate(7, random_state=5)
    pd.testing.assert_frame_equal(again.simulate(7, random_state=5), a)
    pd.testing.assert_frame_equal(fc.simulate(7, df, random_state=5), a, rtol=1e-4)
    assert not a.Forecaster.equals(fc.simulate(7, random_state=6).Forecaster)
    more = pd.DataFrame({"unique_id": "a", "ds": [40, 41], "y": [51.0, 52.0]})
    again.update(more)
    pd.testing.assert_frame_equal(
        again.simulate(7, random_state=5),
        fc.simulate(7, pd.concat([df, more]), random_state=5),
        rtol=1e-4,
    )


@pytest.mark.slow
def test_counts_stay_above_zero_and_what_cannot_be_is_refused(fc, small, rng):
    counts = rng.poisson(0.5, size=(1, 3, 60)).astype(float)
    settings = {**small, "max_steps": 60, "season_length": 1}
    few = Forecaster(3, quantiles=(0.05, 0.95), **settings).fit(counts)
    low = few.predict()["Forecaster-q0.05"] >= 0
    assert (few.simulate(50, random_state=0)[:, low] >= 0).all()
    with pytest.raises(SpecError, match=r"has 1: .*quantiles=\(0\.1, 0\.5, 0\.9\)"):
        Forecaster(3, quantiles=(0.5,), **settings).fit(counts).simulate(5)
    with pytest.raises(DataError, match=r"takes 4 steps, .*longest has 3"):
        few.simulate(5, counts[:, :, :3])
    with pytest.raises(ValueError, match=r"n must be .*got 0"):
        few.simulate(0)
