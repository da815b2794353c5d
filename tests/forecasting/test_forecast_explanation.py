"""Explanations of forecasts: complete, against torch.autograd on the unrolled series, and right about
what matters.
"""

import numpy as np
import pandas as pd
import pytest
import torch

from fluxutils_py import explain, reset
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.correction import SOURCES, Correction

# few points on the path: kinks need many
pytestmark = pytest.mark.filterwarnings("ignore:attributions sum to")
H = 3


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(1)
    n = 50
    df = pd.DataFrame({"unique_id": np.repeat(["a", "b"], n), "ds": np.tile(np.arange(n), 2)})
    df["promo"] = rng.integers(0, 2, 2 * n)
    df["noise"] = rng.normal(size=2 * n)
    df["kind"] = rng.choice(["x", "y"], 2 * n)
    df["y"] = 30 + 8 * df.promo + rng.normal(size=2 * n)
    settings = {"hidden_size": 6, "max_steps": 120, "random_state": 0, "verbose": False}
    settings["calibrate"] = False  # what is explained are the networks
    fc = Forecaster(
        H,
        4,
        quantiles=(0.1, 0.9),
        n_models=2,
        futr_exog_list=["promo"],
        hist_exog_list=["noise", "kind"],
        comm=None,
        loss="smape",
        **settings,
    ).fit(df)
    futr = fc.make_future_dataframe().assign(promo=[1, 0, 1, 0, 1, 1])
    return fc, df, futr


@pytest.mark.slow
def test_attributions_equal_autograd_on_the_unrolled_series(made):
    fc, df, futr = made
    known = df[(df.unique_id == "b") | (df.ds >= 30)]
    e = fc.explain_forecast(known, "a", 2, output=0.9, futr_df=futr, n_points=64)
    one = known[known.unique_id == "a"]
    windows = fc._fitted.windows(fc._read_fitted(one, None))
    n = len(one)
    x = windows.inputs(Segments(np.zeros(1, int), np.zeros(1, int), np.array([n])), 0, n)[0]
    # the windows of the past do not reach beyond its end: known ahead are promo at the next steps
    c = fc.channels_
    first = c.numeric + len(c.categories)
    (covariate,) = fc.covariates_.futr
    promo = np.r_[one.promo.to_numpy(), futr[futr.unique_id == "a"].promo]
    for k in range(H):
        x[:, first + k] = (promo[k + 1 : k + 1 + n] - covariate.mean) / covariate.scale
    x = torch.from_numpy(x)
    baseline = torch.zeros_like(x)
    codes = slice(c.numeric, first)
    baseline[:, codes] = x[:, codes]
    last = c.numeric + len(c.categories) + c.ahead
    baseline[:, last:] = x[:, last:]
    past = windows.past(Segments(np.zeros(1, int), np.array([n - 1]), np.ones(1, int)), 0, 1)
    level, naive, scale = past.level[0, 0], past.naive[0, 0, 1], past.scale[0, 0]
    nodes, weights = np.polynomial.legendre.leggauss(64)
    total = np.zeros(x.shape)
    value = []

    def score(at):
        outs = []
        for model in fc.models_:
            reset(model.eval())
            out = model(at[:, None])[-1, 0].reshape(3, H)
            outs.append(out[2, 1] + out[0, 1] - out[0, 1].detach())
        return scale * torch.stack(outs).double().mean()

    for node, weight in zip(nodes, weights, strict=True):
        at = (baseline + (node + 1) / 2 * (x - baseline)).requires_grad_()
        (grad,) = torch.autograd.grad(score(at), at)
        total += weight / 2 * (grad * (x - baseline)).double().numpy()
    value = [score(v).item() for v in (x, baseline)]
    for model in fc.models_:
        reset(model)
    np.testing.assert_allclose(e.value - naive, value[0], rtol=1e-5)
    np.testing.assert_allclose(e.baseline_value - level, value[1], rtol=1e-5)
    np.testing.assert_allclose(e.attributions[:-1], total.T[:last], atol=1e-5 * abs(total).max())
    assert e.feature_names[-1] == "simple forecast: seasonal naive"
    np.testing.assert_allclose(e.attributions[-1], np.r_[np.zeros(n - 1), naive - level])
    out = fc.predict(known, futr_df=futr)
    np.testing.assert_allclose(np.exp(e.value), out["Forecaster-q0.9"][1], rtol=1e-5)
    assert len(e.feature_names) == last + 1
    assert e.output == "log of Forecaster-q0.9, step 2, of 'a'"


@pytest.mark.slow
def test_what_matters_comes_first(made):
    fc, df, futr = made
    for step in (1, 3):
        e = fc.explain_forecast(df, "a", step, futr_df=futr)
        assert e.completeness < 1e-4
        assert f"promo at step {step}" in [share.name for share in e.by_feature()[:3]]
        others = [k for k in range(1, H + 1) if k != step]
        # of the last step: covariates of other steps have no part in this forecast
        at = [e.feature_names.index(f"promo at step {k}") for k in others]
        assert not e.attributions[at].any()
    mean = fc.explain_forecast(df, "a", futr_df=futr, n_points=64)
    steps = [fc.explain_forecast(df, "a", k, futr_df=futr, n_points=64) for k in (1, 2, 3)]
    np.testing.assert_allclose(
        mean.attributions, np.mean([e.attributions for e in steps], 0), atol=1e-6
    )


@pytest.mark.slow
def test_explain_takes_forecasters_and_arrays(rng, small):
    x = rng.normal(size=(2, 3, 40))
    fc = Forecaster(2, 5, calibrate=False, **{**small, "max_steps": 20}).fit(x)
    e = explain(fc, x, (1, 2), 2)
    np.testing.assert_allclose(e.value, fc.predict()[1, 2, 1], rtol=1e-5)
    assert e.attributions.shape == (fc.features_.n_inputs + 1, 40)
    assert e.feature_names[fc.features_.input_size - 1] == "y now"
    long = x[:1, :1]
    assert explain(fc, long).output == "Forecaster, mean of 2 steps, of number 0"
    for args, error, said in (
        ((0, 3), SpecError, "step is 3, .*2 steps"),
        (((2, 0), 1), DataError, r"series is \(2, 0\), .*2 features of 3"),
        ((0, 1, 0.3), SpecError, r"quantiles \(\), got 0\.3"),
    ):
        with pytest.raises(error, match=said):
            explain(fc, x, *args)
    with pytest.raises(SpecError, match="baseline='zero'"):
        explain(fc, x, baseline="zero")


@pytest.mark.slow
def test_series_that_cannot_be_explained_are_named(made):
    fc, df, futr = made
    with pytest.raises(DataError, match="'a', one of 2, got 'c'"):
        fc.explain_forecast(df, "c", futr_df=futr)
    with pytest.raises(DataError, match="futr_exog_list names promo"):
        fc.explain_forecast(df, "a")


QUANTILES = (0.1, 0.5, 0.9)


@pytest.fixture(scope="module", params=["recurrent", "segments"])
def corrected(request, small):
    """In float64, with weights that differ by step, and offsets of which some let quantiles cross."""
    rng = np.random.default_rng(0)
    x = np.exp(0.3 * rng.normal(size=(1, 2, 60))).cumsum(2) / 5 + 3
    settings = {**small, "quantiles": QUANTILES, "network": request.param}
    fc = Forecaster(H, 5, **settings).fit(x)
    weights = rng.dirichlet(np.ones(len(SOURCES)), size=H).T
    offsets = rng.normal(size=(len(QUANTILES), H)) / 3
    fc.correction_ = Correction(weights, rng.uniform(0.3, 0.8, H), offsets, np.ones(H))
    fc.models_ = [model.double() for model in fc.models_]
    return fc, x


@pytest.mark.slow
@pytest.mark.parametrize("output", [None, *QUANTILES])
def test_parts_add_up_to_the_corrected_forecast(corrected, output):
    fc, x = corrected
    column = "Forecaster" if output is None else f"Forecaster-q{output}"
    expected = np.log(fc.predict(x)[column][0, 1])
    z = np.log(x[0, 1])
    c, level = fc.correction_, z[-5:].mean()
    for step in (1, H, None):
        e = explain(fc, x, 1, step, output=output, n_points=64)
        steps = slice(None) if step is None else slice(step - 1, step)
        np.testing.assert_allclose(e.value, expected[steps].mean(), rtol=1e-9)
        if fc.network_ == "recurrent":  # without kinks, few points are complete
            total = e.baseline_value + e.attributions.sum()
            np.testing.assert_allclose(total, expected[steps].mean(), rtol=1e-9)
        assert e.completeness < 1e-2
        parts = {share.name: share.total for share in e.by_feature()}
        naive = c.weights[:2].sum(0) * (z[-5 : -5 + H] - level)
        for name, values in (
            ("seasonal naive", naive),
            ("last", c.weights[2] * (z[-1] - level)),
            ("mean", c.weights[5] * (z[-fc.features_.memory :].mean() - level)),
        ):
            np.testing.assert_allclose(parts[f"simple forecast: {name}"], values[steps].mean())
        assert ("calibration" in parts) == (output is not None)
        assert not e.attributions[-2:, :-1].any()


@pytest.mark.slow
@pytest.mark.parametrize("corrected", ["segments"], indirect=True)
def test_values_that_segments_read_have_the_gradients_of_a_plain_loop(corrected):
    fc, x = corrected
    e = explain(fc, x, 1, 2, n_points=32)
    assert e.feature_names[0] == "y"
    features, (model,) = fc.features_, fc.models_
    z = np.log(x[0, 1])
    scale = np.abs(z[5:] - z[:-5]).mean()
    values = np.zeros(fc.channels_.total)
    n = features.input_size
    values[:n] = np.clip((z[-n:] - z[-5:].mean()) / scale, -8, 8).astype(np.float32)
    values = torch.from_numpy(values)
    total = 0.0
    for node, weight in zip(*np.polynomial.legendre.leggauss(32), strict=True):
        at = ((node + 1) / 2 * values).requires_grad_()
        (grad,) = torch.autograd.grad(model(at[None, None])[0, 0, 1], at)
        total = total + weight / 2 * grad * values
    expected = np.zeros(60)
    expected[-n:] = fc.correction_.weights[0, 1] * scale * total[:n].numpy()
    np.testing.assert_allclose(e.attributions[0], expected, rtol=1e-5, atol=1e-9)
    assert np.count_nonzero(expected) == n
