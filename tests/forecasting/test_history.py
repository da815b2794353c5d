"""The ends of series and the networks' states there: against a walk through each series alone."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import reset, states
from fluxutils_py.forecasting.channels import Channels
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.history import last_outputs, run_steps, start_history
from fluxutils_py.forecasting.networks import DirectModel, recurrent_body
from fluxutils_py.forecasting.panel_windows import PackedSeries, PanelWindows, WindowArray
from fluxutils_py.forecasting.read_series import STEPS
from fluxutils_py.frames.panel import Panel
from fluxutils_py.nn import GRU, LSTM

LENGTHS = np.array([9, 1, 30, 2, 17])
PANEL = Panel(np.arange(5), np.zeros(5, int), LENGTHS, {}, {}, STEPS, None, {})


@pytest.fixture
def windows(rng):
    features = Features(3, 4, 4, 5, False, 1.0, 1e-6)
    source = PackedSeries(rng.normal(size=(1, LENGTHS.sum())), LENGTHS)
    return PanelWindows(source, features, Channels(3, features.n_inputs))


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_each_series_is_walked_through_but_for_its_last_step(windows, cell):
    model = DirectModel(recurrent_body(cell, 2), windows.channels, (), 6).eval()
    history = start_history([model], windows, PANEL)
    x = torch.from_numpy(np.asarray(WindowArray(windows, "inputs"))).permute(2, 1, 0)  # (T, N, F)
    outputs = last_outputs(model, windows, LENGTHS - 1, history.states[0])
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
    model = DirectModel(recurrent_body(LSTM, 1), windows.channels, (), 6).eval()
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
    assert last_outputs(model, windows, LENGTHS - 1, []).shape == (5, 3)
    assert (history.n_series, history.n_kept) == (5, windows.features.lookback + 1)
