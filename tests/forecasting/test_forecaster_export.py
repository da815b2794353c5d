"""Exported forecasters: a consumer gives values and covariates as they are, and gets forecasts in
their units.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import NotFittedError

from fluxutils_py import check_export, export
from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.export_files import ExportedModel, read_metadata
from fluxutils_py.forecasting import Forecaster

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*series have no more steps than a season"),
    pytest.mark.usefixtures("onnx_operators_once"),
]


def shops(rng, n=40):
    """Three shops that open one after the other, with covariates of all kinds, numbers and
    categories.
    """
    parts = []
    for i, town in enumerate(["x", "y", "x"]):
        df = pd.DataFrame(
            {"unique_id": f"s{i}", "ds": np.arange(5 * i, n), "town": town, "size": 100.0 + i}
        )
        df["promo"] = rng.choice(["none", "flyer"], len(df))
        df["price"] = rng.uniform(5, 9, len(df))
        df["weather"] = rng.choice(["dry", "wet"], len(df))
        df["visitors"] = rng.normal(1000, 50, len(df))
        df["y"] = 30 + 4 * (df.promo == "flyer") - df.price + rng.normal(size=len(df)) * 0.1
        parts.append(df)
    return pd.concat(parts)


EXOG = {
    "hist_exog_list": ["weather", "visitors"],
    "futr_exog_list": ["promo", "price"],
    "stat_exog_list": ["town", "size"],
}


@pytest.mark.slow
def test_a_consumer_gives_covariates_as_they_are_and_gets_the_forecasts_of_predict(
    rng, small, tmp_path
):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    df = shops(rng, 60)
    fc = Forecaster(4, 7, 1, quantiles=(0.2, 0.8), **EXOG, **{**small, "max_steps": 20}).fit(df)
    assert fc.correction_ is not None
    path = tmp_path / "shops.onnx"
    fc.export(path)
    assert check_export(path, fc, df) < 1e-5
    about = read_metadata(path)
    assert [entry["name"] for entry in about["inputs"]] == ["y", "past", "static", "known"]
    assert [entry["name"] for entry in about["outputs"]] == [
        "Forecaster",
        "Forecaster-lo-60",
        "Forecaster-hi-60",
    ]
    names = {kind: [c["name"] for c in group] for kind, group in about["covariates"].items()}
    assert names == {
        "past": ["visitors", "weather"],
        "static": ["size", "town"],
        "known": ["price", "promo"],
    }

    def raw(frame, kind):
        columns = []
        for c in about["covariates"][kind]:
            codes = c["categories"] and {label: i + 1 for i, label in enumerate(c["categories"])}
            columns.append(frame[c["name"]].map(codes) if codes else frame[c["name"]])
        return np.stack([column.to_numpy(float) for column in columns], -1)  # (T, C)

    futr = fc.make_future_dataframe()
    futr["promo"], futr["price"] = (
        rng.choice(["none", "flyer"], len(futr)),
        rng.uniform(5, 9, len(futr)),
    )
    expected = fc.predict(futr_df=futr)
    for name, part in df.groupby("unique_id"):
        known = raw(pd.concat([part, futr[futr.unique_id == name]]), "known")  # (T + h, C)
        steps = np.lib.stride_tricks.sliding_window_view(known, 5, axis=0).reshape(len(part), -1)
        inputs = [part[["y"]].to_numpy(), raw(part, "past"), raw(part, "static"), steps]
        model = ExportedModel(path, 1)
        for piece in np.split(np.arange(len(part)), [1, 2, 17]):
            found = model.run(*(x[piece][:, None] for x in inputs))
        mine = expected[expected.unique_id == name].drop(columns=["unique_id", "ds"]).to_numpy().T
        np.testing.assert_allclose(np.stack([y[-1, 0] for y in found]), mine, rtol=1e-5)


@pytest.mark.slow
def test_another_forecaster_is_told_from_the_file(make_panel, small, tmp_path):
    panel = make_panel()
    fc = Forecaster(3, **small).fit(panel)
    path = tmp_path / "fc.pt2"
    export(fc, path, format="torch")
    assert check_export(path, fc, panel) < 1e-5
    with torch.no_grad():
        fc.models_[0].skip.bias.add_(0.01)
    with pytest.raises(ExportError, match=r"fc.pt2: Forecaster .*steps after"):
        check_export(path, fc, panel)


def test_what_cannot_be_exported_is_refused(small):
    with pytest.raises(NotFittedError):
        Forecaster(3).export("fc.onnx")
    with pytest.raises(ValueError, match=r"format .*'onnx' or 'torch', got 'tflite'"):
        Forecaster(3).export("fc.onnx", format="tflite")
