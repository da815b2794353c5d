"""Files of forecasters: what is read is what was written, and what is not stored is asked for."""

import numpy as np
import pandas as pd
import pytest
from torch import nn

from fluxutils_py.errors import LoadError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.nn import GRU

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")


def one_layer(n_in, n_out):
    return GRU(n_in, n_out)


@pytest.mark.few
@pytest.mark.parametrize("kind", ["pandas", "polars", "zone", "integer", "array"])
def test_a_forecaster_read_forecasts_and_updates_the_same(panel, small, to_polars, tmp_path, kind):
    df = panel
    if kind == "zone":
        df = df.assign(ds=df.ds.dt.tz_localize("America/New_York"))
    if kind == "integer":
        df = df.assign(
            ds=(df.ds - df.ds.min()).dt.days.astype("int32"),
            unique_id=pd.factorize(df.unique_id)[0],
        )
    if kind == "polars":
        df = to_polars(df)
    if kind == "array":
        df = np.random.default_rng(0).normal(size=(2, 3, 40))
    fc = Forecaster(4, quantiles=(0.3,), **{**small, "n_models": 2}).fit(df)
    fc.save(tmp_path / "fc.pt")
    again = Forecaster.load(tmp_path / "fc.pt")
    assert again.get_params() == {**fc.get_params(), "quantiles": [0.3], "comm": "auto"} | {
        name: [] for name in ("hist_exog_list", "futr_exog_list", "stat_exog_list")
    }
    assert again.features_ == fc.features_
    a, b = fc.predict(), again.predict()
    if kind == "array":
        np.testing.assert_array_equal(b["Forecaster-lo-40"], a["Forecaster-lo-40"])
        np.testing.assert_array_equal(
            again.update(df).predict()["Forecaster"], fc.update(df).predict()["Forecaster"]
        )
    elif kind == "polars":
        assert a.equals(b)
        assert a.schema == b.schema
    else:
        pd.testing.assert_frame_equal(a, b)
        pd.testing.assert_frame_equal(fc.predict(df), again.predict(df))


@pytest.mark.slow
def test_code_is_not_stored_but_asked_for(panel, small, tmp_path):
    fc = Forecaster(3, loss=nn.HuberLoss(), **{**small, "network": one_layer}).fit(panel)
    fc.save(tmp_path / "fc.pt")
    with pytest.raises(LoadError, match=r"network and loss, .*load\(path, network="):
        Forecaster.load(tmp_path / "fc.pt")
    again = Forecaster.load(tmp_path / "fc.pt", network=one_layer, loss=nn.HuberLoss())
    pd.testing.assert_frame_equal(again.predict(), fc.predict())


@pytest.mark.slow
def test_other_files_and_other_networks_are_refused(panel, small, tmp_path):
    with pytest.raises(FileNotFoundError):
        Forecaster.load(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("text")
    with pytest.raises(LoadError, match=r"text\.pt is damaged .*forecaster file"):
        Forecaster.load(tmp_path / "text.pt")
    Forecaster(3, **small).fit(panel).save(tmp_path / "fc.pt")
    with pytest.raises(LoadError, match=r"mismatch for body\.module\.weight_ih_l0: "):
        Forecaster.load(tmp_path / "fc.pt", hidden_size=6)
