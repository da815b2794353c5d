"""What a forecaster has learnt; the ends of series and the networks' states there, against a walk
through each series alone; and warnings of short series.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import reset, states
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.channels import Channels
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.fitted_state import (
    last_outputs,
    run_steps,
    start_history,
    warn_short_series,
)
from fluxutils_py.forecasting.model_fitting import warn_long_horizon
from fluxutils_py.forecasting.networks import DirectModel
from fluxutils_py.forecasting.panel_windows import PackedSeries, PanelWindows, WindowArray
from fluxutils_py.forecasting.read_series import STEPS
from fluxutils_py.frames.panel import Panel
from fluxutils_py.nn import GRU, LSTM

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")
LENGTHS = np.array([9, 1, 30, 2, 17])
LAST = Segments(np.arange(5), LENGTHS - 1, np.ones(5, int))
PANEL = Panel(np.arange(5), np.zeros(5, int), LENGTHS, {}, {}, STEPS, None, {})


@pytest.fixture
def windows(rng):
    features = Features(3, 4, 4, 5, False, 1.0, 1e-6)
    source = PackedSeries(rng.normal(size=(1, LENGTHS.sum())), LENGTHS)
    return PanelWindows(source, features, Channels(3, features.n_inputs), np.zeros((5, 0)))


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_each_series_is_walked_through_but_for_its_last_step(windows, cell):
    model = DirectModel(lambda n_in, n_out: cell(n_in, n_out, 2), windows.channels, (), 6).eval()
    history = start_history([model], windows, PANEL)
    x = torch.from_numpy(np.asarray(WindowArray(windows, "inputs"))).permute(2, 1, 0)  # (T, N, F)
    outputs = last_outputs(model, windows, LAST, history.states[0])
    for i, n in enumerate(LENGTHS):
        reset(model)
        with torch.no_grad():
            if n > 1:
                model(x[: n - 1, i : i + 1])
            for found, expected in zip(history.states[0], states(model), strict=True):
                if n == 1:
                    assert not found[:, i].any()
                else:
                    torch.testing.assert_close(found[:, i], expected[:, 0])
            last = model(x[n - 1 : n, i : i + 1])
        np.testing.assert_allclose(outputs[i], last[0, 0].numpy(), atol=1e-5)
    reset(model)


def test_a_walk_goes_on_where_it_ended(windows):
    model = DirectModel(LSTM, windows.channels, (), 6).eval()
    zero = np.zeros(5, int)
    whole = run_steps(model, windows, zero, LENGTHS, None)
    half = LENGTHS // 2
    parts = run_steps(
        model, windows, half, LENGTHS - half, run_steps(model, windows, zero, half, None)
    )
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


def test_models_without_a_state_have_an_empty_one(windows):
    body = lambda n_in, n_out: nn.Linear(n_in, n_out)  # noqa: E731
    model = DirectModel(body, windows.channels, (), 6).eval()
    history = start_history([model], windows, PANEL)
    assert history.states == [[]]
    assert last_outputs(model, windows, LAST, []).shape == (5, 3)
    assert (history.n_series, history.n_kept) == (5, windows.features.lookback + 1)


@pytest.mark.slow
def test_tails_are_windows_of_the_last_steps_alone(panel, small):
    fc = Forecaster(3, **small).fit(panel)
    tail = fc.history_.tail
    windows = fc._fitted.tail_windows(tail, fc.history_.static)
    assert windows.ahead is None
    np.testing.assert_array_equal(
        windows.source.cut(np.array([2]), np.array([0]), tail.shape[2])[0, 0], tail[0, 2]
    )


@pytest.mark.slow
def test_columns_are_those_of_the_fit(panel, small):
    df = panel.rename(columns={"ds": "when"})
    fc = Forecaster(3, quantiles=(0.9, 0.1), **small).fit(df, time_col="when")
    fc.set_params(quantiles=())
    fitted = fc.state_
    assert fitted.names == ["Forecaster", "Forecaster-lo-80", "Forecaster-hi-80"]
    assert (fitted.columns.time, fitted.quantiles, fitted.h) == ("when", (0.1, 0.9), 3)
    assert fc.features_ is fitted.features
    assert list(fc.predict().columns) == ["unique_id", "when", *fitted.names]


def test_short_series_and_long_horizons_are_warned_of():
    lengths = np.array([9, 3])
    with pytest.warns(UserWarning, match=r"no series .*horizon of 9 steps"):
        warn_long_horizon(9, lengths)
    with pytest.warns(UserWarning, match=r"1 of 2 .*season of 4 .*series 1 has 3"):
        warn_short_series(4, lengths, np.array([0, 1], object))
