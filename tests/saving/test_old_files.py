"""fluxutils_py.saving.old_files: pipelines and transformers of 0.2.0."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import preprocessing
from sklearn.compose import TransformedTargetRegressor

import fluxutils_py
from fluxutils_py.errors import LoadError

FOLDER = Path(__file__).parents[1] / "golden"


def test_columns_targets_and_the_best_of_a_search_are_read_without_skops(monkeypatch):
    monkeypatch.setitem(sys.modules, "skops", None)
    found = fluxutils_py.load(FOLDER / "pipeline-columns.pt")
    rows = pd.DataFrame({"a": [1.0, -2, 4], "b": [np.nan, 0, 1], "d": [1.0, 2, 3]})
    rows["c"] = pd.Series(["x", "y", "x"], dtype=object)
    expected = [1.482657952900148, 1.2108075974348969, 1.3490128241222048]
    np.testing.assert_allclose(found.predict(rows), expected, rtol=1e-5)
    np.testing.assert_allclose(found.best_score_, -0.2720728240741719)
    best = found.best_params_
    assert best["columns__kept"] == "passthrough"
    assert isinstance(best["quantiles"], preprocessing.QuantileTransformer)
    targets = found[-1]
    assert type(targets) is TransformedTargetRegressor
    assert (targets.func, targets.regressor[-1].hidden_size) == (np.log1p, 2)
    assert found[0].get_feature_names_out().tolist()[:4] == [
        *("scaled__a", "scaled__b", "coded__c_x", "coded__c_y"),
    ]


@pytest.mark.parametrize(
    "described",
    [
        {"transformer": "Estimator", "settings": {}, "fitted": {}},
        {"transformer": "scale", "settings": {}, "fitted": {}},
        {"transformer": "StandardScaler", "settings": {"spam": 1}, "fitted": {}},
        {"transformer": "StandardScaler", "settings": {}, "fitted": {"transform": 1}},
        {"transformer": "StandardScaler", "settings": {}, "fitted": {"__class__": 1}},
        {"transformer": "StandardScaler", "settings": {}, "fitted": {"mean_": {"array": {}}}},
        {"transformer": "StandardScaler", "settings": {"copy": {"complex": 1}}, "fitted": {}},
        {"function": "load"},
        {"type": "load"},
        {"search": {"best": {"transformer": "Spam"}, "params": {}, "score": 1.0}},
        {"pipeline": 3},
        {},
    ],
    ids=str,
)
def test_files_that_say_anything_else_are_refused(described, tmp_path):
    content = {"kind": "fluxutils_py fitted objects", "format": 1, "object": described}
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(LoadError, match=r"file\.pt"):
        fluxutils_py.load(tmp_path / "file.pt")
