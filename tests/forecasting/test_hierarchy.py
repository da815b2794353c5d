"""Sums over groups: appended to frames, and forecasts that add up."""

import builtins
import importlib

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster, sum_groups
from fluxutils_py.forecasting.hierarchy import Sums, clipped_errors, past_steps

GROUPS = {"all": ["north", "c"], "north": ["a", "b"]}


@pytest.fixture(scope="module")
def df():
    rng = np.random.default_rng(0)
    n = 40
    base = np.cumsum(rng.normal(size=n))
    parts = [
        pd.DataFrame({"unique_id": name, "ds": np.arange(n), "y": 60 + base + rng.normal(size=n)})
        for name in "abc"
    ]
    out = pd.concat(parts, ignore_index=True)
    return out[~((out.unique_id == "b") & (out.ds < 7))].reset_index(drop=True)


@pytest.fixture(scope="module")
def fc(df):
    settings = {"hidden_size": 5, "max_steps": 30, "random_state": 0, "verbose": False}
    fc = Forecaster(3, 1, 1, quantiles=(0.1, 0.9), comm=None, **settings)
    return fc.fit(sum_groups(df, GROUPS))


@pytest.mark.slow
def test_sums_are_those_of_pandas(df):
    whole = df.copy()
    whole.loc[(whole.unique_id == "c") & (whole.ds == 20), "y"] = np.nan
    got = sum_groups(whole, GROUPS)
    wide = whole.pivot(index="ds", columns="unique_id", values="y")
    pd.testing.assert_frame_equal(got[: len(whole)], whole)
    for name, members in (("all", list("abc")), ("north", list("ab"))):
        expected = wide[members].sum(axis=1, skipna=False).dropna()
        found = got[got.unique_id == name].set_index("ds").y
        np.testing.assert_allclose(found, expected)
        assert (found.index == expected.index).all()
    exact = df.assign(y=df.y.round())  # pandas and polars add up in an order of their own
    of_polars = sum_groups(pl.DataFrame(exact.to_dict("list")), GROUPS)
    assert of_polars["y"].to_list() == sum_groups(exact, GROUPS).y.tolist()


@pytest.mark.slow
def test_bottom_up_forecasts_are_sums(df, fc):
    plain = fc.predict().set_index(["unique_id", "ds"])
    out = fc.predict(hierarchy=GROUPS, reconcile="bottom_up").set_index(["unique_id", "ds"])
    assert out.index.equals(plain.index)
    for name in "abc":
        pd.testing.assert_frame_equal(out.loc[name], plain.loc[name])
    for name, members in (("all", list("abc")), ("north", list("ab"))):
        expected = sum(plain.loc[m].Forecaster for m in members)
        np.testing.assert_allclose(out.loc[name].Forecaster, expected)
        moved = out.loc[name].sub(plain.loc[name])  # quantiles as far as the point
        np.testing.assert_allclose(moved["Forecaster-q0.1"], moved.Forecaster)
        np.testing.assert_allclose(moved["Forecaster-q0.9"], moved.Forecaster)
    # groups that are no series of fit
    with pytest.warns(UserWarning, match="'all' has no quantiles"):
        new = fc.predict(df, hierarchy=GROUPS, reconcile="bottom_up", h=2)
    new = new.set_index(["unique_id", "ds"])
    np.testing.assert_allclose(new.loc["all"].Forecaster, out.loc["all"].Forecaster[:2], rtol=1e-5)
    assert new.loc["north"]["Forecaster-q0.1"].isna().all()
    assert len(new) == 2 * 5


@pytest.mark.slow
def test_past_errors_are_those_of_forecasts_of_truncated_series(df, fc):
    whole = sum_groups(df, GROUPS)
    truth, forecast = past_steps(fc._fitted, fc.history_)
    for i, name in enumerate(fc.ids_):
        part = whole[whole.unique_id == name]
        for back in (0, 5, 14):
            known = part[part.ds < 39 - back]
            np.testing.assert_allclose(
                forecast[i, -1 - back], fc.predict(known, h=1).Forecaster[0], rtol=1e-4
            )
            assert truth[i, -1 - back] == part[part.ds == 39 - back].y.item()


@pytest.mark.slow
def test_mint_equals_its_formula(fc):
    pytest.importorskip("hierarchicalforecast", reason="an extra")
    plain = fc.predict().Forecaster.to_numpy().reshape(5, 3)
    out = fc.predict(hierarchy=GROUPS)
    found = out.Forecaster.to_numpy().reshape(5, 3)
    sums = Sums.of(GROUPS, fc.ids_)
    rows = np.r_[sums.of_group, sums.bottom]
    S = np.r_[sums.matrix, np.eye(3)]
    np.testing.assert_allclose(found[rows], S @ found[sums.bottom], rtol=1e-6)
    assert not np.allclose(found, plain)
    # the covariance of past errors, correlations shrunk by the share of Schaefer & Strimmer (2005)
    truth, forecast = past_steps(fc._fitted, fc.history_)
    errors = (truth - forecast)[rows]
    errors = errors[:, ~np.isnan(errors).any(0)]
    n = errors.shape[1]
    centred = errors - errors.mean(1, keepdims=True)
    covariance = centred @ centred.T / (n - 1)
    z = centred / centred.std(1, keepdims=True)
    products = z[:, None] * z[None]
    mean = products.mean(2)
    variance = ((products - mean[..., None]) ** 2).sum(2) * n / (n - 1) ** 3
    scale = n / (n - 1)
    off = ~np.eye(5, dtype=bool)
    share = min(1, variance[off].sum() / (mean[off] ** 2 * scale**2).sum())
    W = np.where(off, (1 - share) * covariance, covariance)
    inverse = np.linalg.inv(W)
    P = np.linalg.solve(S.T @ inverse @ S, S.T @ inverse)
    np.testing.assert_allclose(found[rows], S @ P @ plain[rows], rtol=1e-5)


@pytest.mark.slow
def test_an_old_spike_does_not_decide_how_forecasts_add_up(df, fc):
    pytest.importorskip("hierarchicalforecast", reason="an extra")
    spiked = df.copy()
    spiked.loc[(df.unique_id == "c") & (df.ds == 25), "y"] *= 1000
    own = fc.predict(sum_groups(spiked, GROUPS)).set_index(["unique_id", "ds"]).Forecaster
    out = fc.predict(sum_groups(spiked, GROUPS), hierarchy=GROUPS)
    out = out.set_index(["unique_id", "ds"]).Forecaster
    # what the others' forecasts lack of the sum is not all laid upon c
    lack = own["all"] - own["a"] - own["b"] - own["c"]
    assert ((out["c"] - own["c"]).abs() < 0.3 * lack.abs()).all()


def test_far_errors_are_clipped_and_usual_ones_are_not():
    rng = np.random.default_rng(0)
    errors = rng.normal(size=(3, 400)) * [[1.0], [100.0], [1.0]]
    errors[2, 3:] = 0  # most are 0: nothing is usual
    errors[1, 5] = np.nan
    np.testing.assert_array_equal(clipped_errors(errors), errors)
    spiked = errors.copy()
    spiked[0, 7] = -5000.0
    found = clipped_errors(spiked)
    assert found[0, 7] == pytest.approx(-6 * 1.4826 * np.median(np.abs(spiked[0])))
    np.testing.assert_array_equal(np.delete(found, 7, 1), np.delete(errors, 7, 1))


@pytest.mark.slow
@pytest.mark.parametrize("refit", [None, True])
@pytest.mark.parametrize("method", ["mint", "bottom_up"])
def test_cross_validation_reconciles_at_each_cutoff(df, fc, method, refit):
    if method == "mint":
        pytest.importorskip("hierarchicalforecast", reason="an extra")
    whole = sum_groups(df, GROUPS)
    found = fc.cross_validation(
        whole, 2, 4, refit=refit, hierarchy=GROUPS, reconcile=method
    ).set_index(["unique_id", "ds"])
    for cutoff, part in found.groupby("cutoff"):
        past = whole[whole.ds <= cutoff]
        at = fc if refit is None else clone(fc).fit(past)
        expected = at.predict(past, hierarchy=GROUPS, reconcile=method)
        expected = expected.set_index(["unique_id", "ds"])
        np.testing.assert_allclose(
            part[expected.columns], expected.loc[part.index], rtol=1e-5, atol=1e-5
        )
        sums = part.Forecaster["a"] + part.Forecaster["b"] + part.Forecaster["c"]
        np.testing.assert_allclose(part.Forecaster["all"], sums, rtol=1e-5)
    assert found.cutoff.nunique() == 2


@pytest.mark.slow
def test_what_cannot_add_up_in_cross_validation_is_refused(df, fc):
    whole = sum_groups(df, GROUPS)
    with pytest.raises(DataError, match=r"'all' of the hierarchy .*sum_groups"):
        fc.cross_validation(df, refit=None, hierarchy=GROUPS)
    with pytest.raises(SpecError, match="got 'ols'"):
        fc.cross_validation(whole, refit=None, hierarchy=GROUPS, reconcile="ols")
    late = whole[(whole.unique_id != "c") | (whole.ds > 35)]
    with (
        pytest.raises(DataError, match="'c' has not begun"),
        pytest.warns(UserWarning, match="too short"),
    ):
        fc.cross_validation(late, 2, refit=None, hierarchy=GROUPS)


@pytest.mark.slow
def test_what_cannot_add_up_is_refused(df, fc, monkeypatch, small):
    with pytest.raises(SpecError, match=r"'mint', 'bottom_up'.* got 'ols'"):
        fc.predict(hierarchy=GROUPS, reconcile="ols")
    with pytest.raises(DataError, match=r"'all' is none of the series.*sum_groups"):
        fc.predict(df, hierarchy=GROUPS)
    uneven = df[(df.unique_id != "c") | (df.ds < 38)]
    with pytest.raises(DataError, match="'c' ends at 37, and 'a' at 39"):
        fc.predict(uneven, hierarchy=GROUPS, reconcile="bottom_up")
    for groups, said in (
        ({"all": ["a", "d"]}, "'d' of group 'all' is neither"),
        ({"all": ["a", "all"]}, "'all' is a part of itself"),
        ({"all": ["a", "half"], "half": ["a"]}, "'all' counts 'a' twice"),
        ({"all": []}, "'all' has no series"),
        ({"a": ["b"]}, "group 'a', which is a series"),
    ):
        with pytest.raises(DataError, match=said):
            sum_groups(df, groups)
    plain_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("hierarchicalforecast"):
            raise ImportError(name)
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(importlib, "import_module", lambda name: without(name))
    with pytest.raises(ImportError, match=r"bottom_up.*pip install hierarchicalforecast"):
        fc.predict(hierarchy=GROUPS)
