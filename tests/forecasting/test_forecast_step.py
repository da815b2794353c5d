"""One step of a forecaster in torch: walked through series value by value, against ``predict``."""

import numpy as np
import pandas as pd
import pytest
import torch

from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.forecaster_export import ForecastStep

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*series have no more steps than a season", "ignore:.*have no value in"
)


def step_of(fc):
    return ForecastStep(fc._fitted)


def walked(step, inputs):
    """Forecasts (outputs, h) after the last of some steps of one series; each input is (T, n)."""
    states = [s.of(1) for s in step.initial]
    with torch.no_grad():
        for t in range(len(inputs[0])):
            now = [torch.tensor(x[t : t + 1]) for x in inputs]
            found = step(*now, *states)
            states = list(found[step.n_outputs :])
    return np.stack([y[0].numpy() for y in found[: step.n_outputs]])


@pytest.mark.few
@pytest.mark.parametrize(
    ("kinds", "settings"),
    [
        (
            ("wave", "constant", "zero", "negative", "large"),
            {"h": 5, "season_length": (7, 14), "quantiles": (0.1, 0.9)},
        ),
        (("wave", "constant", "zero", "negative", "large"), {"h": 16, "season_length": 1}),
        (("wave", "constant"), {"h": 9, "season_length": (7, 7), "network": "gru"}),
        (("wave",), {"h": 16, "season_length": (7, 14), "network": "mingru"}),
    ],
)
def test_values_one_by_one_forecast_as_predict_does(make_panel, small, kinds, settings):
    panel = make_panel(kinds)
    fc = Forecaster(freq="D", **{**small, "n_models": 2, **settings}).fit(panel)
    assert fc.features_.log == (kinds[-1] != "large")
    step, out = step_of(fc), fc.predict()
    for name, part in panel.groupby("unique_id"):
        y = part.set_index("ds").y.sort_index()
        y = y.reindex(pd.date_range(y.index[0], y.index[-1])).to_numpy()
        expected = out[out.unique_id == name].drop(columns=["unique_id", "ds"]).to_numpy().T
        found = walked(step, [y[:, None]])
        np.testing.assert_allclose(
            found, expected, rtol=1e-5, atol=1e-6 * fc.features_.unit, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no series has a later one")
def test_a_value_missing_for_longer_than_the_memory_is_gone(small):
    y = np.r_[np.arange(1.0, 30.0), np.full(300, np.nan)]
    fc = Forecaster(3, 7, 1, **small).fit(
        pd.DataFrame({"unique_id": "a", "ds": np.arange(29), "y": y[:29]})
    )
    last = 29 + 2 * 7 + fc.features_.memory  # two seasons are filled in from the seasons before
    for n in (last, last + 1):
        df = pd.DataFrame({"unique_id": "a", "ds": np.arange(n), "y": y[:n]})
        found = walked(step_of(fc), [y[:n, None]])
        np.testing.assert_allclose(found[0], fc.predict(df).Forecaster, rtol=1e-5)
    assert np.isnan(found).all()
