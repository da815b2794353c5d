"""Forecasts from inside of the training part, against predictions of truncated series."""

import pickle

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")


@pytest.fixture
def fc(panel, small):
    return Forecaster(4, freq="D", quantiles=(0.2, 0.8), **small).fit(panel)


@pytest.mark.filterwarnings("ignore:.*no series has a later one")
def test_each_forecast_is_that_of_the_series_up_to_its_cutoff(panel, fc):
    out = fc.predict_insample(step_size=5)
    for name, part in panel.groupby("unique_id"):
        days = pd.date_range(part.ds.min(), part.ds.max())
        truth = part.set_index("ds").y.reindex(days)
        found = out[out.unique_id == name]
        # each from the end, as long as one step is known and all h are
        cutoffs = [days[i] for i in range(len(days) - 5, -1, -5)][::-1]
        assert found.cutoff.unique().tolist() == cutoffs
        for cutoff in cutoffs[:2] + cutoffs[-1:]:
            known = part[part.ds <= cutoff]
            if cutoff not in known.ds.to_numpy():  # no row: the value is missing
                row = {"unique_id": name, "ds": cutoff, "y": np.nan}
                known = pd.concat([known, pd.DataFrame([row])])
            got = found[found.cutoff == cutoff].drop(columns=["cutoff", "y"])
            expected = fc.predict(known)
            pd.testing.assert_frame_equal(
                got.reset_index(drop=True), expected, rtol=1e-4, atol=1e-4 * fc.features_.unit
            )
            seen = found[found.cutoff == cutoff].y.to_numpy()
            np.testing.assert_array_equal(seen, truth.reindex(expected.ds).to_numpy())


@pytest.mark.slow
def test_the_last_origin_is_that_of_cross_validation(panel, fc, to_polars):
    with pytest.warns(UserWarning, match="too short for the first window"):
        walked = fc.cross_validation(panel, refit=None)
    out = fc.predict_insample(step_size=1000)
    both = walked.merge(out, on=["unique_id", "ds", "cutoff"], validate="1:1")
    assert len(both) == len(out) == len(walked)
    np.testing.assert_allclose(both.Forecaster_x, both.Forecaster_y, rtol=1e-6)
    again = fc.predict_insample(to_polars(panel), step_size=1000)
    assert again["Forecaster"].to_list() == out.Forecaster.to_list()
    # without a step size, from every step
    every = fc.predict_insample()
    steps = panel.groupby("unique_id").ds.agg(lambda d: (d.max() - d.min()).days + 1)
    assert len(every) == 4 * (steps - 4).clip(lower=0).sum()


@pytest.mark.slow
def test_data_that_a_copy_does_not_hold_are_asked_for(panel, fc, tmp_path, small):
    fc.save(tmp_path / "fc.pt")
    for other in (Forecaster.load(tmp_path / "fc.pt"), pickle.loads(pickle.dumps(fc))):
        with pytest.raises(DataError, match=r"predict_insample\(df\)"):
            other.predict_insample()
        pd.testing.assert_frame_equal(
            other.predict_insample(panel, step_size=9), fc.predict_insample(step_size=9)
        )
    with pytest.raises(DataError, match=r"horizon of 4 .*longest has 3"):
        fc.predict_insample(panel[panel.unique_id == "wave-60"].sort_values("ds")[:3])
    with pytest.raises(ValueError, match=r"step_size .*got 0"):
        fc.predict_insample(step_size=0)
    with pytest.raises(DataError, match="array"):
        Forecaster(2, 3, **small).fit(np.arange(1.0, 13)[None, None]).predict_insample()
