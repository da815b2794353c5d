"""fluxutils_py.save and load: pipelines and transformers as files without code."""

import io
import os
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import preprocessing
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline

import fluxutils_py
from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
    samples,
)
from fluxutils_py.errors import LoadError
from fluxutils_py.forecasting import Forecaster, forecaster_files
from fluxutils_py.saving.saving import FORECASTER_KIND

F, N, T = 3, 7, 11
X = np.random.default_rng(0).normal(2, 3, size=(F, N, T)).astype("f4")
ROWS = np.random.default_rng(1).normal(1, 2, size=(31, 4))
SMALL = {"hidden_size": 3, "epochs": 1, "batchsize": 7, "seqsize": 5}


def increment(x):
    return x + 1


def again(obj, tmp_path):
    fluxutils_py.save(obj, tmp_path / "file.pt")
    return fluxutils_py.load(tmp_path / "file.pt")


@pytest.mark.parametrize(
    "made",
    [
        preprocessing.StandardScaler(),
        preprocessing.StandardScaler(with_mean=False),
        preprocessing.RobustScaler(quantile_range=(10.0, 80.0)),
        preprocessing.MinMaxScaler((-1, 2), clip=True),
        preprocessing.MaxAbsScaler(),
        preprocessing.Normalizer(),
        preprocessing.PowerTransformer(),
        preprocessing.QuantileTransformer(n_quantiles=9, random_state=0),
        preprocessing.PolynomialFeatures(2),
        preprocessing.FunctionTransformer(np.expm1, np.log1p),
        SimpleImputer(strategy="median"),
        PCA(2, random_state=0),
        make_pipeline(SimpleImputer(), preprocessing.StandardScaler()),
        Pipeline([("a", "passthrough"), ("b", make_pipeline(preprocessing.MaxAbsScaler()))]),
    ],
    ids=str,
)
def test_transformers_of_scikit_learn_come_back(made, tmp_path):
    found = again(made.fit(ROWS), tmp_path)
    np.testing.assert_array_equal(found.transform(ROWS), made.transform(ROWS))
    assert str(found) == str(made)
    assert type(found) is type(made)


@pytest.mark.parametrize(
    "made",
    [SequenceScaler(), SequenceScaler(with_mean=False), WinsorScaler(), SequenceImputer("ffill")],
    ids=str,
)
def test_transformers_of_sequences_come_back(made, tmp_path):
    found = again(made.fit(samples(X, feature_names=["a", "b", "c"])), tmp_path)
    np.testing.assert_array_equal(found.transform(X), made.transform(X))
    assert found.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="features"):
        found.transform(X[:2])


@pytest.mark.slow
def test_pipelines_with_estimators_come_back(tmp_path):
    x, y = samples(X), samples(X[:1])
    pipe = make_pipeline(
        SequenceImputer(), SequenceScaler(), SequenceRegressor(cell="lstm", **SMALL, random_state=0)
    ).fit(x, y)
    found = again(pipe, tmp_path)
    np.testing.assert_array_equal(found.predict(X), pipe.predict(X))
    np.testing.assert_array_equal(found.fit(x, y).predict(X), pipe.fit(x, y).predict(X))
    labels = np.array(["dry", "wet"])[np.arange(N) % 2]
    classifier = make_pipeline(SequenceScaler(), SequenceClassifier(cell="lstm", **SMALL)).fit(
        x, labels
    )
    np.testing.assert_array_equal(again(classifier, tmp_path).predict(x), classifier.predict(x))


@pytest.mark.slow
def test_transformed_targets_come_back(tmp_path):
    x, y = ROWS, np.exp(ROWS[:, 0])
    for settings in (
        {"func": np.log1p, "inverse_func": np.expm1},
        {"transformer": preprocessing.StandardScaler()},
    ):
        inner = make_pipeline(
            preprocessing.StandardScaler(), SequenceRegressor(cell="lstm", **SMALL, random_state=0)
        )
        made = TransformedTargetRegressor(inner, **settings).fit(x, y)
        found = again(made, tmp_path)
        np.testing.assert_array_equal(found.predict(x), made.predict(x))
        # the argument is an unfitted clone
        assert not hasattr(found.regressor[-1], "model_")
        np.testing.assert_array_equal(found.fit(x, y).predict(x), made.predict(x))
    made.regressor[-1].set_params(hidden_size=4)
    with pytest.raises(NotFittedError, match="other settings"):
        fluxutils_py.save(made, tmp_path / "file.pt")


def columns(**settings):
    return ColumnTransformer(
        [
            ("scaled", make_pipeline(SimpleImputer(), preprocessing.StandardScaler()), ["a", "b"]),
            ("coded", preprocessing.OneHotEncoder(), make_column_selector(dtype_include=object)),
            ("kept", "passthrough", slice(3, 4)),
            (
                "log",
                preprocessing.FunctionTransformer(np.log1p, feature_names_out="one-to-one"),
                [True, False, False, False],
            ),
        ],
        **settings,
    )


@pytest.mark.few
@pytest.mark.parametrize("remainder", ["drop", preprocessing.MinMaxScaler()], ids=str)
def test_selected_columns_come_back(remainder, tmp_path):
    frame = pd.DataFrame({"a": [1.0, 2, 4], "b": [3.0, 1, np.nan], "c": [1, 2, 3], "d": [4, 2, 1]})
    frame["c"] = pd.Series(["x", "y", "x"], dtype=object)
    made = columns(remainder=remainder).fit(frame)
    found = again(made, tmp_path)
    np.testing.assert_array_equal(found.transform(frame), made.transform(frame))
    assert found.get_feature_names_out().tolist() == made.get_feature_names_out().tolist()
    # fitted anew, with the settings that came back
    np.testing.assert_array_equal(found.fit_transform(frame), made.transform(frame))
    with pytest.raises(NotFittedError):
        fluxutils_py.save(columns(), tmp_path / "file.pt")


@pytest.mark.slow
def test_of_a_search_the_best_comes_back(tmp_path):
    x, y = samples(X), samples(X[:1])
    pipe = make_pipeline(SequenceScaler(), SequenceRegressor(cell="lstm", **SMALL, random_state=0))
    grid = {
        "sequenceregressor__hidden_size": [2, 3],
        "sequencescaler": [SequenceScaler(), "passthrough"],
    }
    search = GridSearchCV(pipe, grid, cv=2)
    with pytest.raises(NotFittedError, match="GridSearchCV"):
        fluxutils_py.save(search, tmp_path / "file.pt")
    found = again(search.fit(x, y), tmp_path)
    np.testing.assert_array_equal(found.predict(X), search.predict(X))
    assert type(found) is Pipeline
    hidden_size = "sequenceregressor__hidden_size"
    assert found.best_params_[hidden_size] == search.best_params_[hidden_size]
    assert found.best_score_ == search.best_score_
    without = GridSearchCV(pipe, grid, cv=2, refit=False).fit(x, y)
    with pytest.raises(TypeError, match="refit=True"):
        fluxutils_py.save(without, tmp_path / "file.pt")


@pytest.mark.slow
def test_forecasters_come_back_in_their_own_format(tmp_path):
    fc = Forecaster(h=2, max_steps=50, season_length=3, random_state=0).fit(X[:1] + 20)
    found = again(fc, tmp_path)
    np.testing.assert_array_equal(found.predict(), fc.predict())
    np.testing.assert_array_equal(Forecaster.load(tmp_path / "file.pt").predict(), fc.predict())
    assert fluxutils_py.load(tmp_path / "file.pt", lr=0.1).lr == 0.1
    assert FORECASTER_KIND == forecaster_files.KIND
    with pytest.raises(NotFittedError):
        fluxutils_py.save(Forecaster(h=2), tmp_path / "file.pt")


@pytest.mark.slow
def test_an_estimator_is_saved_as_by_its_own_method(tmp_path):
    est = SequenceRegressor(cell="lstm", **SMALL, random_state=0).fit(X, X[:1])
    assert type(again(est, tmp_path)) is SequenceRegressor
    np.testing.assert_array_equal(
        SequenceRegressor.load(tmp_path / "file.pt").predict(X), est.predict(X)
    )


class Own(torch.nn.Linear):
    pass


def test_models_of_ones_own_are_given_to_load(tmp_path):
    est = Estimator(Own(F, 1), spec={"epochs": 1, "batchsize": 7, "seqsize": 5})
    pipe = make_pipeline(SequenceScaler(), est).fit(samples(X), samples(X[:1]))
    fluxutils_py.save(pipe, tmp_path / "file.pt")
    with pytest.raises(LoadError, match="Own"):
        fluxutils_py.load(tmp_path / "file.pt")
    found = fluxutils_py.load(tmp_path / "file.pt", model=Own(F, 1))
    np.testing.assert_array_equal(found.predict(X), pipe.predict(X))
    # the class of the estimator in it cannot load it, and says what can
    with pytest.raises(LoadError, match=r"fitted objects'.*fluxutils_py\.load"):
        Estimator.load(tmp_path / "file.pt", model=Own(F, 1))
    fluxutils_py.save(SequenceScaler().fit(X), tmp_path / "file.pt")
    with pytest.raises(TypeError, match="model"):
        fluxutils_py.load(tmp_path / "file.pt", model=Own(F, 1))


def own_net(n_in, n_out, width=2):
    return torch.nn.Sequential(Own(n_in, width), torch.nn.Linear(width, n_out))


def test_arguments_that_an_estimator_in_a_pipeline_does_not_take_are_named(tmp_path):
    pipe = make_pipeline(SequenceScaler(), SequenceRegressor(3, cell="gru", epochs=1))
    fluxutils_py.save(pipe.fit(samples(X), samples(X[:1])), tmp_path / "pipe")
    with pytest.raises(TypeError, match=r"arguments model; SequenceRegressor takes .*cell"):
        fluxutils_py.load(tmp_path / "pipe", model=Own(F, 1))


@pytest.mark.slow
def test_settings_that_a_search_has_found_are_those_of_the_loaded_model(tmp_path):
    est = Estimator(own_net, spec={"epochs": 1, "batchsize": 7, "seqsize": 5}, random_state=0)
    search = GridSearchCV(est, {"model__width": [3]}, cv=2, error_score="raise")
    search.fit(samples(X), samples(X[:1]))
    fluxutils_py.save(search, tmp_path / "file.pt")
    with pytest.raises(
        LoadError, match=r"own_net with width=3, .*fluxutils_py\.load\(path, model="
    ):
        fluxutils_py.load(tmp_path / "file.pt")
    found = fluxutils_py.load(tmp_path / "file.pt", model=own_net)
    np.testing.assert_array_equal(
        found.predict(X), search.predict(samples(X)).reshape(1, *X.shape[1:])
    )
    assert found.get_params()["model__width"] == found.best_params_["model__width"] == 3


class Doubled(TransformerMixin, BaseEstimator):
    def fit(self, x, y=None):
        self.n_features_in_ = x.shape[1]
        return self

    def transform(self, x):
        return 2 * x


def test_code_of_ones_own_is_named_and_asked_for(tmp_path):
    made = make_pipeline(preprocessing.FunctionTransformer(increment), Doubled()).fit(ROWS)
    path = tmp_path / "file.pt"
    fluxutils_py.save(made, path)
    names = [f"{__name__}.Doubled", f"{__name__}.increment"]
    with pytest.raises(LoadError, match=rf"file\.pt.*{names[0]}.*{names[1]}(.|\n)*trusted="):
        fluxutils_py.load(path)
    with pytest.raises(LoadError, match="increment"):
        fluxutils_py.load(path, trusted=[Doubled])
    found = fluxutils_py.load(path, trusted=names)
    np.testing.assert_array_equal(found.transform(ROWS), 2 * (ROWS + 1))


def test_trees_are_asked_for_with_the_reason_of_skops(tmp_path):
    made = RandomForestRegressor(1, random_state=0).fit(ROWS, ROWS[:, 0])
    fluxutils_py.save(made, tmp_path / "file.pt")
    with pytest.raises(LoadError, match=r"sklearn\.tree\._tree\.Tree(.|\n)*trusted="):
        fluxutils_py.load(tmp_path / "file.pt")
    found = fluxutils_py.load(tmp_path / "file.pt", trusted=["sklearn.tree._tree.Tree"])
    np.testing.assert_array_equal(found.predict(ROWS), made.predict(ROWS))


class Odd(preprocessing.StandardScaler):
    def __getstate__(self):
        raise RuntimeError("spam")


@pytest.mark.parametrize(
    ("made", "telling"),
    [
        (make_pipeline(preprocessing.FunctionTransformer(lambda x: x)), "<lambda>"),
        (Odd(), "spam"),
        ({"a": 1}, "not an estimator"),
        (None, "not an estimator"),
    ],
    ids=["lambda", "state", "dict", "nothing"],
)
def test_what_cannot_come_back_is_refused_and_nothing_is_written(made, telling, tmp_path):
    if hasattr(made, "fit"):
        made.fit(ROWS)
    with pytest.raises(TypeError, match=telling):
        fluxutils_py.save(made, tmp_path / "file.pt")
    assert os.listdir(tmp_path) == []


def test_what_is_not_fitted_is_refused(tmp_path):
    for made in (
        SequenceScaler(),
        make_pipeline(SequenceScaler()),
        make_pipeline(SequenceScaler(), Estimator()),
    ):
        with pytest.raises(NotFittedError):
            fluxutils_py.save(made, tmp_path / "file.pt")


def test_classes_of_estimators_of_ones_own_are_saved_alone(tmp_path):
    class OwnEstimator(Estimator):
        pass

    est = OwnEstimator(Own(F, 1), spec={"epochs": 1, "batchsize": 7, "seqsize": 5})
    pipe = make_pipeline(SequenceScaler(), est).fit(samples(X), samples(X[:1]))
    with pytest.raises(TypeError, match="OwnEstimator"):
        fluxutils_py.save(pipe, tmp_path / "file.pt")


def test_without_skops_the_error_says_what_to_install(tmp_path, monkeypatch):
    made = SequenceScaler().fit(X)
    fluxutils_py.save(made, tmp_path / "file.pt")
    monkeypatch.setitem(sys.modules, "skops", None)
    with pytest.raises(ImportError, match="pip install skops"):
        fluxutils_py.load(tmp_path / "file.pt")
    with pytest.raises(ImportError, match="pip install skops"):
        fluxutils_py.save(made, tmp_path / "file.pt")


def replaced(data, old, new):
    """Return an archive of skops with other text in its schema."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(buffer, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "schema.json":
                assert old in content
                content = content.replace(old, new)
            changed.writestr(name, content)
    return buffer.getvalue()


def compressed(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", b" " * 10**6)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("tamper", "telling"),
    [
        (lambda d: replaced(d, b'"StandardScaler"', b'"system"'), r"sklearn.*\.system"),
        (lambda d: replaced(d, b'"FunctionNode"', b'"MethodNode"'), "damaged"),
        (lambda d: replaced(d, b'"log1p"', b'"load"'), r"numpy\S*\.load"),
        (lambda d: replaced(d, b'"protocol"', b'"spam"'), "damaged"),
        (lambda d: d[:-30], "damaged"),
        (compressed, "larger than the file"),
    ],
    ids=["class", "loader", "function", "schema", "cut", "compressed"],
)
def test_files_that_say_anything_else_are_refused(tamper, telling, tmp_path):
    path = tmp_path / "file.pt"
    made = make_pipeline(
        preprocessing.FunctionTransformer(np.log1p), preprocessing.StandardScaler()
    )
    fluxutils_py.save(made.fit(np.abs(ROWS)), path)
    content = torch.load(path, weights_only=True)
    data = tamper(content["object"].numpy().tobytes())
    torch.save({**content, "object": torch.frombuffer(bytearray(data), dtype=torch.uint8)}, path)
    with pytest.raises(LoadError, match=rf"file\.pt(.|\n)*{telling}"):
        fluxutils_py.load(path)


@pytest.mark.parametrize("changed", [{"estimators": 3}, {"object": "text"}, {"format": 3}], ids=str)
def test_other_contents_are_refused(changed, tmp_path):
    path = tmp_path / "file.pt"
    fluxutils_py.save(SequenceScaler().fit(X), path)
    torch.save({**torch.load(path, weights_only=True), **changed}, path)
    with pytest.raises(LoadError, match=r"file\.pt"):
        fluxutils_py.load(path)


def test_places_of_estimators_that_the_file_lacks_are_refused(tmp_path):
    path = tmp_path / "file.pt"
    est = Estimator(Own(F, 1), spec={"epochs": 1, "batchsize": 7, "seqsize": 5})
    fluxutils_py.save(make_pipeline(SequenceScaler(), est).fit(samples(X), samples(X[:1])), path)
    torch.save({**torch.load(path, weights_only=True), "estimators": []}, path)
    with pytest.raises(LoadError, match=r"file\.pt.*damaged"):
        fluxutils_py.load(path)


@pytest.mark.slow
def test_an_error_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.pt"
    fluxutils_py.save(SequenceScaler().fit(X), path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        fluxutils_py.save(SequenceScaler(with_std=False).fit(X), path)
    assert os.listdir(tmp_path) == ["file.pt"]
    assert fluxutils_py.load(path).with_std
