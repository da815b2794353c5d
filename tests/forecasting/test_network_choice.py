"""The network of segments: an oracle by hand, its laws, and the choice between it and the recurrent
one.
"""

import numpy as np
import pandas as pd
import pytest
import torch

from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.model_fitting import (
    best_network,
    candidate_networks,
    relative_error,
)
from fluxutils_py.forecasting.networks import SegmentModel, segment_length, segments_of_past
from fluxutils_py.forecasting.panel_windows import OriginArray, PackedSeries

SEASON, H = 7, 16  # the horizon ends in the middle of a segment of 14 steps


def values(n_series=3, n_steps=150, seed=0):
    """An array (1, N, T) with a gap."""
    rng = np.random.default_rng(seed)
    t = np.arange(n_steps)
    y = np.sin(2 * np.pi * t / SEASON) + 0.1 * rng.normal(size=(1, n_series, n_steps)).cumsum(2)
    y[0, 0, 60:75] = np.nan
    return y


@pytest.fixture(scope="module")
def fitted():
    settings = {"network": "segments", "quantiles": (0.1, 0.5, 0.9), "max_steps": 6}
    fc = Forecaster(
        H, SEASON, hidden_size=5, random_state=0, verbose=False, comm=None, n_models=2, **settings
    )
    y = values()
    return fc.fit(y[:, :, :140]), y


def by_hand(model, x):
    """The outputs (1 + quantiles, h) for the last values x of one series, gate by gate."""
    p = {k: v.double().numpy() for k, v in model.state_dict().items()}
    w, n = model.segment, len(p["places"])

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    def step(v, state):
        a = p["recurrent.weight_ih_l0"] @ v + p["recurrent.bias_ih_l0"]
        b = p["recurrent.weight_hh_l0"] @ state + p["recurrent.bias_hh_l0"]
        (xr, xz, xn), (hr, hz, hn) = np.split(a, 3), np.split(b, 3)
        z = sigmoid(xz + hz)
        return (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * state

    x = x - x[-1]
    state = np.zeros(model.recurrent.hidden_size)
    for segment in x.reshape(-1, w):
        embedded = p["embedding.weight"] @ segment + p["embedding.bias"]
        state = step(np.maximum(embedded, 0), state)
    rows = [p["head.weight"] @ step(p["places"][k], state) + p["head.bias"] for k in range(n)]
    out = np.concatenate([row.reshape(-1, w) for row in rows], 1)[:, : model.h]
    naive = np.array([x[len(x) - SEASON + k % SEASON] for k in range(model.h)])
    point = out[0] + p["skip.weight"] @ x + p["skip.bias"] - naive
    levels = np.cumsum([out[1], *np.log1p(np.exp(out[2:]))], 0)
    return np.concatenate([point[None], point + levels])


def test_outputs_are_those_by_hand_and_do_not_depend_on_windows():
    features = Features(H, SEASON, SEASON, 56, False, 1.0, 1e-6)
    torch.manual_seed(0)
    model = SegmentModel(features, (0.1, 0.5, 0.9), 5).eval()
    torch.nn.init.normal_(model.skip.weight, std=0.1)
    x = torch.randn(4, 3, 61)  # other inputs are not read
    out = model(x).detach()
    for s, b in [(0, 0), (3, 2)]:
        expected = by_hand(model, x[s, b, :56].double().numpy())
        np.testing.assert_allclose(out[s, b].reshape(4, H), expected, atol=2e-5)
        torch.testing.assert_close(model(x[s])[b].detach(), out[s, b])
    model.forget_steps(10)
    assert not model(x)[..., 10:H].any()


@pytest.mark.slow
def test_update_files_and_longer_histories_agree(fitted, tmp_path):
    fc, y = fitted
    whole = fc.predict(y)
    fc.save(tmp_path / "fc.pt")
    other = Forecaster.load(tmp_path / "fc.pt")
    assert other.network_ == "segments"
    updated = other.update(y[:, :, 140:]).predict()
    for name, expected in whole.items():
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(updated[name], expected, rtol=1e-6)
    # what lies further back than its inputs and statistics counts for nothing
    f = fc.features_
    cut = y[:, 1:, -1 - f.lookback :]
    later = fc.predict(cut)
    for name, expected in whole.items():
        np.testing.assert_allclose(later[name], expected[:, 1:], rtol=1e-5)


@pytest.mark.slow
def test_an_exported_file_forecasts_any_number_of_series(tmp_path):
    settings = {"network": "segments", "max_steps": 1, "hidden_size": 3, "n_models": 1}
    settings |= {"calibrate": False, "verbose": False, "comm": None, "transform": "none"}
    fc = Forecaster(15, SEASON, **settings).fit(values(3, 60))  # two segments are forecast
    fc.export(tmp_path / "fc.pt2", "torch")
    for n in (1, 3):
        assert fc.check_export(tmp_path / "fc.pt2", values(n, 20)) < 1e-5


@pytest.mark.slow
def test_origins_are_the_inputs_and_targets_of_their_steps(fitted):
    fc, y = fitted
    windows = fc._fitted.windows(fc._read_known(y, None))
    origins = (np.array([3, 9, 40]), np.array([5, 9, 44]), 4)
    steps = [(0, 3), (0, 4), (2, 41), (2, 42)]  # of 6: every one and a half
    x, t = (np.asarray(OriginArray(windows, c, *origins)) for c in ("inputs", "targets"))
    assert x.shape == (windows.channels.total, 4, 1)
    for i, (n, at) in enumerate(steps):
        past = y[0, n, : at + 1]
        m = SEASON
        changes = np.abs(past[m:] - past[:-m])
        steps_before = np.abs(np.diff(past))
        scale = (changes if len(changes) else steps_before).mean()
        last = (past[-1] - past[-m:].mean()) / scale
        np.testing.assert_allclose(x[fc.features_.input_size - 1, i, 0], last, rtol=1e-4)
        if at >= m - 1:
            naive = past[len(past) - m :][np.arange(H) % m]
            expected = (y[0, n, at + 1 : at + 1 + H] - naive) / scale
            np.testing.assert_allclose(t[:, i, 0], expected, rtol=1e-4)


@pytest.mark.slow
def test_the_kind_with_the_smaller_error_on_the_held_out_end_is_chosen():
    t = np.arange(600)
    y = 3 + np.sin(2 * np.pi * t / SEASON) + 0.1 * np.random.default_rng(0).normal(size=(1, 8, 600))
    few = {"hidden_size": 4, "random_state": 0, "comm": None, "max_steps": 8, "transform": "none"}
    fc = Forecaster(3, SEASON, verbose=False, calibrate=False, **few).fit(y)
    assert set(fc.network_errors_) == {"recurrent", "segments"}
    assert fc.network_ == best_network(fc.network_errors_)
    alone = Forecaster(3, SEASON, verbose=False, calibrate=False, network=fc.network_, **few).fit(y)
    assert alone.network_errors_ == {}
    np.testing.assert_allclose(alone.predict(), fc.predict(), rtol=1e-6)


def test_which_kinds_can_be_used(fitted):
    fc, y = fitted
    fitted_parts = fc._fitted
    lengths = np.full(36, 150)

    def kinds(is_weighted=False, **settings):
        made = Forecaster(H, **{"season_length": SEASON, **settings})
        return candidate_networks(made, lengths, fitted_parts, is_weighted)

    assert kinds() == ["recurrent", "segments"]
    assert kinds(quantiles=np.arange(1, 64) / 64) == ["segments"]
    assert kinds(network="gru") == kinds(season_length=(SEASON, 14)) == ["recurrent"]
    assert kinds(network="segments") == ["segments"]
    assert kinds(is_weighted=True) == ["recurrent"]
    # half of the steps are inputs at most
    assert (segment_length(SEASON), segments_of_past(SEASON, 150, H)) == (14, 4)
    assert segments_of_past(24, 20_000, 48) * segment_length(24) == 336
    with pytest.raises(SpecError, match=r"season_length=\(7, 14\)"):
        Forecaster(H, (SEASON, 14), network="segments").fit(y)
    with pytest.raises(SpecError, match="'segment'"):
        Forecaster(H, SEASON, network="segment").fit(y)
    df = pd.DataFrame({"unique_id": "a", "ds": np.arange(60), "y": y[0, 1, :60], "x": 1.0})
    with pytest.raises(DataError, match="hist_exog_list"):
        Forecaster(H, SEASON, network="segments", hist_exog_list=["x"]).fit(df)


def test_errors_are_relative_to_the_naive_forecast_where_both_are_known(fitted):
    class End:
        targets = np.array([[[1.0, -2.0, np.nan]]])
        errors = np.array([[[0.5, 1.0, np.nan]]])

    assert relative_error(End, "mae") == pytest.approx(0.5)
    assert relative_error(End, "mse") == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("recurrent", "segments", "best"),
    [(0.8, 0.7, "segments"), (0.8, 0.81, "segments"), (0.8, 0.83, "recurrent")],
)
def test_segments_are_taken_where_both_kinds_err_alike(recurrent, segments, best):
    assert best_network({"recurrent": recurrent, "segments": segments}) == best


def test_a_kind_without_another_is_the_best():
    assert best_network({"recurrent": 0.9}) == "recurrent"


@pytest.mark.slow
def test_weights_of_origins_equal_a_plain_loop():
    y = values()[:, :, :60]
    w = np.random.default_rng(5).uniform(size=y.shape)
    w[0, 0, 50:] = 0.0
    settings = {"network": "segments", "max_steps": 2, "hidden_size": 3, "n_models": 1}
    fc = Forecaster(H, SEASON, verbose=False, comm=None, random_state=0, **settings)
    fc.fit(y)
    windows = fc._fitted.windows(fc._read_known(y, None))
    n = y.shape[1]
    origins = (np.full(n, 9), np.full(n, 59), 37)
    plain = OriginArray(windows, "targets", *origins)
    weighted = OriginArray(
        windows, "targets", *origins, PackedSeries(w.reshape(1, -1), np.full(n, 60))
    )
    assert weighted.shape == (2 * H, 37, 1)
    rows = Segments(np.arange(37), np.zeros(37, int), np.ones(37, int))
    targets = plain.read_segments(rows, 0, 1)[0]
    found = weighted.read_segments(rows, 0, 1)[0]
    steps = plain.steps(rows)
    for i in range(37):
        for k in range(H):
            at = steps.start[i] + 1 + k
            weight = w[0, steps.series[i], at] if at < 60 else 0.0
            expected = [targets[i, k], weight] if weight else [np.nan, np.nan]
            if np.isnan(targets[i, k]):
                expected = [np.nan, np.nan]
            np.testing.assert_allclose(found[i, [k, H + k]], expected, rtol=1e-6)


@pytest.mark.slow
def test_segments_learn_from_weights():
    y = values(1, 150)[0, 0]
    df = pd.DataFrame({"unique_id": "a", "ds": np.arange(150), "y": y, "w": 0.5})
    settings = {"network": "segments", "max_steps": 8, "hidden_size": 3, "n_models": 1}
    settings |= {"random_state": 0, "verbose": False, "comm": None, "calibrate": False}
    fc = Forecaster(H, SEASON, loss="mae", **settings)
    plain = fc.fit(df).predict()
    pd.testing.assert_frame_equal(fc.fit(df, sample_weight="w").predict(), plain)
    other = fc.fit(df.assign(w=1.0 + df.ds), sample_weight="w").predict()
    assert (other.Forecaster != plain.Forecaster).all()
