"""What scikit-learn's tools make of views of sequences: the numbers of plain matrices, and hardly
anything read.
"""

import os
import re
from contextlib import nullcontext
from typing import NamedTuple

import joblib
import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import BaggingRegressor, StackingRegressor, VotingRegressor
from sklearn.experimental import enable_halving_search_cv  # noqa: F401  makes the import below possible
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    HalvingGridSearchCV,
    KFold,
    RandomizedSearchCV,
    ShuffleSplit,
    TimeSeriesSplit,
    TunedThresholdClassifierCV,
    cross_val_predict,
    cross_val_score,
    cross_validate,
    learning_curve,
    permutation_test_score,
    train_test_split,
    validation_curve,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    SequenceClassifier,
    SequenceRegressor,
    SequenceScaler,
    h5mmap,
    h5save,
    pooled_scorer,
    samples,
    timesteps,
)
from fluxutils_py.data import LazyArray
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator import fitting
from tests.plain_networks import plain_regressor
from tests.versions import skip_before

pytestmark = pytest.mark.usefixtures("forked_workers")

F, G, N, T = 3, 2, 23, 11
GROUPS = np.arange(N) % 5
FOLDS = KFold(3, shuffle=True, random_state=0)
SMALL = {
    "hidden_size": 3,
    "epochs": 1,
    "batchsize": 7,
    "seqsize": 4,
    "random_state": 0,
    "verbose": False,
}
GRID = {"hidden_size": [2, 3]}


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(T, N, F)).transpose(2, 1, 0)


@pytest.fixture(scope="module")
def y(x):
    return np.stack([x.sum(0), x[0].cumsum(1)])  # (G, N, T)


def flat(a):
    """The matrix that samples(a) looks like, by a loop."""
    return np.stack([a[:, n].ravel() for n in range(a.shape[1])])


class Watch:
    """Bytes of x and of other arrays that were read as a whole, and the types of what was fitted."""

    def __init__(self):
        self.read, self.fitted, self.inside = {"x": 0, "y": 0}, [], False

    def counting(self, method):
        def counted(array, *args, **kwargs):
            outer, self.inside = self.inside, True
            try:
                found = method(array, *args, **kwargs)
            finally:
                self.inside = outer
            if not outer:
                n_features = array.n_features if isinstance(array, SequenceView) else array.shape[0]
                self.read["x" if n_features == F else "y"] += found.nbytes
            return found

        return counted


@pytest.fixture
def watch(monkeypatch):
    found = Watch()
    for kind in (SequenceView, LazyArray):
        monkeypatch.setattr(kind, "__array__", found.counting(kind.__array__))
    read_data = fitting.read_data

    def noting(settings, schema, x, *arguments, **settings_of_call):
        found.fitted.append(type(x).__name__)
        return read_data(settings, schema, x, *arguments, **settings_of_call)

    monkeypatch.setattr(fitting, "read_data", noting)
    return found


# -- rows are series: every tool against the same tool on a matrix -----------------------------------------


def split_scores(results):
    return [results[k] for k in sorted(results) if k.startswith("split") and k.endswith("score")]


def search(kind, **settings):
    def run(est, X, y, n_jobs):
        found = kind(est, GRID, cv=FOLDS, n_jobs=n_jobs, **settings).fit(X, y)
        return [*split_scores(found.cv_results_), found.predict(X)]

    return run


def halving(**settings):
    def run(est, X, y, n_jobs):
        found = HalvingGridSearchCV(
            est, GRID, cv=FOLDS, factor=2, random_state=0, n_jobs=n_jobs, **settings
        )
        found.fit(X, y)
        return [*split_scores(found.cv_results_), found.predict(X)]

    return run


def scores_of_folds(est, X, y, n_jobs):
    found = cross_validate(
        est,
        X,
        y,
        groups=GROUPS,
        cv=GroupKFold(4),
        scoring=["r2", "neg_mean_squared_error"],
        n_jobs=n_jobs,
    )
    return [found["test_r2"], found["test_neg_mean_squared_error"]]


def meta(make, method="predict"):
    def run(est, X, y, n_jobs):
        return [getattr(make(est, n_jobs).fit(X, y), method)(X)]

    return run


def importance(est, X, y, n_jobs):
    fitted = clone(est).fit(X, y)
    return [
        permutation_importance(fitted, X, y, n_repeats=1, random_state=0, n_jobs=n_jobs).importances
    ]


def dependence(est, X, y, n_jobs):
    return [
        partial_dependence(clone(est).fit(X, y), X, [4], grid_resolution=3, kind="average")[
            "average"
        ]
    ]


def two_columns(y):
    return np.stack([y, -2 * y], 1)


class Tool(NamedTuple):
    run: object
    targets: str = "steps"  # or "series", "labels"
    reads_x: float = 0  # how often all of it is made a matrix
    reads_y: float = 0
    fits: str = "SamplesView"


# Of two candidates, or two metrics, each reads the targets of all test folds, twice.
TOOLS = {
    "GridSearchCV": Tool(search(GridSearchCV)),
    "GridSearchCV, a stock scorer": Tool(search(GridSearchCV, scoring="r2"), reads_y=4),
    "GridSearchCV, a target per series": Tool(search(GridSearchCV), "series"),
    "GridSearchCV, labels": Tool(search(GridSearchCV), "labels"),
    "RandomizedSearchCV": Tool(search(RandomizedSearchCV, n_iter=2, random_state=0)),
    "HalvingGridSearchCV, samples": Tool(halving(min_resources=12)),
    "HalvingGridSearchCV, epochs": Tool(
        halving(resource="epochs", min_resources=1, max_resources=2)
    ),
    "cross_validate, GroupKFold": Tool(scores_of_folds, reads_y=4),
    "cross_val_score": Tool(
        lambda est, X, y, n_jobs: [cross_val_score(est, X, y, cv=FOLDS, n_jobs=n_jobs)]
    ),
    "cross_val_predict": Tool(
        lambda est, X, y, n_jobs: [cross_val_predict(est, X, y, cv=FOLDS, n_jobs=n_jobs)]
    ),
    "cross_val_predict, predict_proba": Tool(
        lambda est, X, y, n_jobs: [
            cross_val_predict(est, X, y, cv=3, method="predict_proba", n_jobs=n_jobs)
        ],
        "labels",
    ),
    "learning_curve": Tool(
        lambda est, X, y, n_jobs: learning_curve(
            est, X, y, cv=FOLDS, train_sizes=[0.5, 1.0], shuffle=True, random_state=0, n_jobs=n_jobs
        )
    ),
    "validation_curve": Tool(
        lambda est, X, y, n_jobs: validation_curve(
            est, X, y, cv=FOLDS, param_name="seqsize", param_range=[3, 11], n_jobs=n_jobs
        )
    ),
    "permutation_test_score": Tool(
        lambda est, X, y, n_jobs: permutation_test_score(
            est, X, y, cv=FOLDS, n_permutations=2, random_state=0, n_jobs=n_jobs
        )
    ),
    "TransformedTargetRegressor": Tool(
        meta(
            lambda est, n_jobs: TransformedTargetRegressor(
                est, func=np.arcsinh, inverse_func=np.sinh
            )
        ),
        "series",
    ),
    "TransformedTargetRegressor, every step": Tool(
        meta(
            lambda est, n_jobs: TransformedTargetRegressor(
                clone(est).set_params(target="step"), func=np.arcsinh, inverse_func=np.sinh
            )
        ),
        reads_y=1,
    ),
    "StackingRegressor": Tool(
        meta(
            lambda est, n_jobs: StackingRegressor(
                [("a", est), ("b", clone(est).set_params(cell="gru"))],
                LinearRegression(),
                cv=3,
                n_jobs=n_jobs,
            )
        ),
        "series",
    ),
    "StackingRegressor, passthrough": Tool(
        meta(
            lambda est, n_jobs: StackingRegressor(
                [("a", est)], LinearRegression(), cv=3, passthrough=True, n_jobs=n_jobs
            )
        ),
        "series",
        reads_x=2,
    ),
    "VotingRegressor": Tool(
        meta(
            lambda est, n_jobs: VotingRegressor(
                [("a", est), ("b", clone(est).set_params(cell="gru"))], n_jobs=n_jobs
            )
        ),
        "series",
    ),
    "MultiOutputRegressor": Tool(
        lambda est, X, y, n_jobs: [
            MultiOutputRegressor(est, n_jobs=n_jobs).fit(X, two_columns(y)).predict(X)
        ],
        "series",
    ),
    "CalibratedClassifierCV": Tool(
        meta(lambda est, n_jobs: CalibratedClassifierCV(est, cv=3, n_jobs=n_jobs), "predict_proba"),
        "labels",
    ),
    "TunedThresholdClassifierCV": Tool(
        meta(lambda est, n_jobs: TunedThresholdClassifierCV(est, cv=3, n_jobs=n_jobs)), "labels"
    ),
    "permutation_importance": Tool(importance, reads_x=1),
    "partial_dependence": Tool(dependence, "series", reads_x=3),
    "BaggingRegressor": Tool(
        meta(
            lambda est, n_jobs: BaggingRegressor(
                clone(est).set_params(n_timesteps=T), 2, random_state=0, n_jobs=n_jobs
            )
        ),
        "series",
        reads_x=2,
        fits="ndarray",
    ),
}
# what goes to processes and comes back: views and parts of them, targets, labels, matrices,
# estimators, predictions, scores
PARALLEL = [
    "GridSearchCV",
    "cross_val_predict, predict_proba",
    "StackingRegressor",
    "permutation_importance",
    "BaggingRegressor",
]
ON_VIEWS: dict[str, list] = {}  # what each tool gave, for comparisons


def case(tool, x, y):
    """Estimator and data as views, and as matrices."""
    kind = SequenceClassifier if tool.targets == "labels" else SequenceRegressor
    est = kind(**SMALL)
    matrix = clone(est).set_params(n_timesteps=T)
    if tool.targets == "steps":
        return (est, samples(x), samples(y)), (matrix.set_params(target="step"), flat(x), flat(y))
    target = (
        y[0, :, -1]
        if tool.targets == "series"
        else np.where(np.arange(N) % 3 == 0, "calm", "storm")
    )
    return (est, samples(x), target), (matrix, flat(x), target)


def on_views(name, x, y):
    if name not in ON_VIEWS:
        views, _ = case(TOOLS[name], x, y)
        ON_VIEWS[name] = TOOLS[name].run(*views, None)
    return ON_VIEWS[name]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_a_view_gives_what_its_matrix_gives_and_stays_unread(name, x, y, watch):
    tool = TOOLS[name]
    views, matrices = case(tool, x, y)
    ON_VIEWS[name] = found = tool.run(*views, None)
    assert set(watch.fitted) == {tool.fits}
    assert watch.read["x"] <= tool.reads_x * x.nbytes
    assert watch.read["y"] <= tool.reads_y * y.nbytes
    assert_same(found, tool.run(*matrices, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", PARALLEL)
def test_two_processes_give_what_one_gives(name, x, y):
    views, _ = case(TOOLS[name], x, y)
    assert_same(TOOLS[name].run(*views, 2), on_views(name, x, y))


@pytest.mark.slow
def test_threads_give_what_one_gives(x, y):
    """As within a tool that runs in processes: there, joblib has inner tools use threads."""
    est = plain_regressor(num_layers=2, dropout=0.5, **SMALL)
    expected = search(GridSearchCV)(est, samples(x), samples(y), None)
    with joblib.parallel_config(backend="threading"):
        for _ in range(3):
            assert_same(search(GridSearchCV)(est, samples(x), samples(y), 2), expected)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["GridSearchCV", "GridSearchCV, a stock scorer", "cross_val_predict", "GridSearchCV, labels"],
)
@pytest.mark.parametrize("n_jobs", [None, 2])
def test_views_go_through_array_api_dispatch(name, n_jobs, x, y, watch):
    views, _ = case(TOOLS[name], x, y)
    expected = on_views(name, x, y)
    watch.read["y"] = 0
    with config_context(array_api_dispatch=True):
        found = TOOLS[name].run(*views, n_jobs)
    assert_same(found, expected)
    assert watch.read["x"] == 0
    assert watch.read["y"] <= TOOLS[name].reads_y * y.nbytes


# -- against folds cut by hand from (F, N, T) --------------------------------------------------------------


def fold_by_hand(est, x, y, train, test, axis, context=0):
    """Predictions for a test fold, (G, n, t), and their pooled R2."""
    fitted = clone(est).fit(x.take(train, axis), y.take(train, axis))
    lead = min(context, test[0])
    yhat = fitted.predict(x.take([*range(test[0] - lead, test[0]), *test], axis))
    yhat = yhat[:, :, lead:]
    true = y.take(test, axis)
    spread = ((true - true.mean((1, 2), keepdims=True)) ** 2).sum()
    return yhat, 1 - ((true - yhat) ** 2).sum() / spread


def near(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


FACES = {
    "samples": (samples, 1, FOLDS, 0),
    "timesteps": (timesteps, 2, TimeSeriesSplit(3), 0),
    "timesteps, warmed": (lambda a: timesteps(a, context=3), 2, TimeSeriesSplit(3), 3),
}


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("dispatch", [False, True])
def test_grid_search_scores_are_those_of_folds_cut_by_hand(face, dispatch, x, y, watch):
    view, axis, cv, context = FACES[face]
    est = plain_regressor(**SMALL)
    with config_context(array_api_dispatch=True) if dispatch else nullcontext():
        found = GridSearchCV(est, GRID, cv=cv, refit=False).fit(view(x), view(y)).cv_results_
    assert watch.read == {"x": 0, "y": 0}
    for i, hidden_size in enumerate(GRID["hidden_size"]):
        est.set_params(hidden_size=hidden_size)
        for fold, (train, test) in enumerate(cv.split(np.empty(x.shape[axis]))):
            _, score = fold_by_hand(est, x, y, train, test, axis, context)
            assert found[f"split{fold}_test_score"][i] == near(score)


@pytest.mark.slow
@pytest.mark.parametrize("cv", [KFold(3), FOLDS], ids=["in order", "shuffled"])
def test_predictions_for_samples_are_those_of_folds_cut_by_hand(cv, x, y, watch):
    est = plain_regressor(**SMALL)
    found = cross_val_predict(est, samples(x), samples(y), cv=cv)
    assert (found.shape, watch.read) == ((N, G * T), {"x": 0, "y": 0})
    for train, test in cv.split(np.empty(N)):
        np.testing.assert_array_equal(found[test], flat(fold_by_hand(est, x, y, train, test, 1)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("context", [0, 2, 100])
def test_predictions_for_time_steps_are_those_of_folds_cut_by_hand(context, x, y, watch):
    est = plain_regressor(**SMALL)
    found = cross_val_predict(est, timesteps(x, context), timesteps(y), cv=KFold(3))
    assert (found.shape, watch.read) == ((T, G * N), {"x": 0, "y": 0})
    for train, test in KFold(3).split(np.empty(T)):
        # stretches before and after the gap are series of their own, n by n, padded to one length
        runs = [run for run in np.split(train, np.flatnonzero(np.diff(train) > 1) + 1) if len(run)]
        lengths = np.tile([len(run) for run in runs], N)
        parts = [np.zeros((len(a), N * len(runs), lengths.max())) for a in (x, y)]
        for i, run in enumerate(runs):
            for part, a in zip(parts, (x, y), strict=True):
                part[:, i :: len(runs), : len(run)] = a[:, :, run]
        fitted = clone(est).fit(*parts, lengths=lengths)
        lead = min(context, test[0])
        expected = fitted.predict(x[:, :, test[0] - lead : test[-1] + 1])[:, :, lead:]
        np.testing.assert_array_equal(found[test], expected.reshape(-1, len(test)).T)


@pytest.mark.slow
def test_native_arrays_and_views_are_predicted_alike(x, y):
    est = plain_regressor(**SMALL).fit(x, y)
    native = est.predict(x)
    np.testing.assert_array_equal(est.predict(samples(x)), flat(native))
    np.testing.assert_array_equal(est.predict(timesteps(x)), native.reshape(-1, T).T)
    for view in (samples, timesteps):
        again = plain_regressor(**SMALL).fit(view(x), view(y))
        np.testing.assert_array_equal(again.predict(x), native)


@pytest.mark.slow
def test_learning_curve_in_time_trains_on_the_first_steps(x, y, watch):
    est = plain_regressor(**SMALL)
    cv = TimeSeriesSplit(2, max_train_size=5)
    sizes, train_scores, test_scores = learning_curve(
        est, timesteps(x), timesteps(y), cv=cv, train_sizes=[2, 5]
    )
    assert (sizes.tolist(), watch.read) == ([2, 5], {"x": 0, "y": 0})
    for fold, (train, test) in enumerate(cv.split(np.empty(T))):
        for i, size in enumerate(sizes):
            assert test_scores[i, fold] == near(fold_by_hand(est, x, y, train[:size], test, 2)[1])
            assert train_scores[i, fold] == near(
                fold_by_hand(est, x, y, train[:size], train[:size], 2)[1]
            )


@pytest.mark.slow
def test_halving_over_epochs_splits_time(x, y, watch):
    est = plain_regressor(**SMALL)
    cv = TimeSeriesSplit(2)
    resource = {"resource": "epochs", "min_resources": 1, "max_resources": 2}
    found = HalvingGridSearchCV(est, GRID, factor=2, cv=cv, **resource).fit(
        timesteps(x), timesteps(y)
    )
    assert watch.read == {"x": 0, "y": 0}
    est.set_params(**found.best_params_)
    assert found.best_params_["epochs"] == 2
    scores = [fold_by_hand(est, x, y, train, test, 2)[1] for train, test in cv.split(np.empty(T))]
    assert found.best_score_ == near(np.mean(scores))


@pytest.mark.slow
def test_metas_of_one_series_in_time(x, y, watch):
    x, y = x[:, :1], y[:1, :1]
    view, steps = timesteps(x), y.ravel()  # (T,)
    one, other = plain_regressor(**SMALL), plain_regressor(cell="gru", **SMALL)
    expected = [clone(est).fit(x, y).predict(x).ravel() for est in (one, other)]

    found = VotingRegressor([("one", one), ("other", other)]).fit(view, steps).predict(view)
    np.testing.assert_allclose(found, np.mean(expected, axis=0), rtol=1e-12)

    targets = np.stack([steps, steps**2], 1)
    found = MultiOutputRegressor(one).fit(view, targets).predict(view)
    squares = clone(one).fit(x, y**2).predict(x).ravel()
    np.testing.assert_array_equal(found, np.stack([expected[0], squares], 1))

    found = (
        TransformedTargetRegressor(one, func=np.arcsinh, inverse_func=np.sinh)
        .fit(view, steps)
        .predict(view)
    )
    np.testing.assert_array_equal(
        found, np.sinh(clone(one).fit(x, np.arcsinh(y)).predict(x).ravel())
    )
    assert watch.read == {"x": 0, "y": 0}


@pytest.mark.slow
def test_stacking_fits_its_last_estimator_on_predictions_of_folds_cut_by_hand(x, y, watch):
    est, target = plain_regressor(**SMALL), y[0, :, -1]
    found = StackingRegressor([("est", est)], LinearRegression(), cv=KFold(3)).fit(
        samples(x), target
    )
    assert watch.read["x"] == 0
    out = np.empty(N)
    for train, test in KFold(3).split(out):
        out[test] = clone(est).fit(x[:, train], target[train]).predict(x[:, test])
    last = LinearRegression().fit(out[:, None], target)
    fitted = clone(est).fit(x, target)
    np.testing.assert_allclose(
        found.predict(samples(x)), last.predict(fitted.predict(x)[:, None]), rtol=1e-9
    )


@pytest.mark.parametrize("dispatch", [False, True])
def test_train_test_split_divides_views_without_reading(dispatch, x, y, watch):
    if dispatch:
        skip_before("scikit-learn", "1.9", "array-API dispatch on views")
    labels = np.where(np.arange(N) % 3 == 0, "calm", "storm")
    with config_context(array_api_dispatch=True) if dispatch else nullcontext():
        parts = train_test_split(
            samples(x), samples(y), labels, np.arange(N), stratify=labels, random_state=0
        )
    assert watch.read == {"x": 0, "y": 0}
    *views, train_labels, test_labels, train, test = parts
    for view, a, index in zip(views, (x, x, y, y), (train, test, train, test), strict=True):
        np.testing.assert_array_equal(view, flat(a)[index])
    assert (sorted([*train, *test]), len(test)) == (list(range(N)), 6)
    np.testing.assert_array_equal(train_labels, labels[train])
    assert np.mean(test_labels == "calm") == near(2 / 6)
    first, last = train_test_split(timesteps(x), shuffle=False, test_size=4)
    np.testing.assert_array_equal(first.native, x[:, :, :-4])
    np.testing.assert_array_equal(last.native, x[:, :, -4:])


# -- weights, lengths, files --------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_and_lengths_are_routed_to_the_rows_that_they_belong_to(x, y, rng, watch):
    weights = {"series": rng.random(N), "steps": rng.random((N, T))}
    lengths = rng.integers(2, T + 1, N)
    est = plain_regressor(**SMALL)
    for w in weights.values():
        with config_context(enable_metadata_routing=True):
            asking = clone(est).set_fit_request(sample_weight=True, lengths=True)
            asking.set_score_request(sample_weight=True, lengths=True)
            routed = {"sample_weight": w, "lengths": lengths}
            found = cross_val_score(asking, samples(x), samples(y), cv=FOLDS, params=routed)
            searched = GridSearchCV(asking, {"hidden_size": [3]}, cv=FOLDS).fit(
                samples(x), samples(y), **routed
            )
        assert watch.read == {"x": 0, "y": 0}
        expected = []
        for train, test in FOLDS.split(w):
            fitted = clone(est).fit(x[:, train], y[:, train], w[train], lengths=lengths[train])
            expected.append(fitted.score(x[:, test], y[:, test], w[test], lengths=lengths[test]))
        assert found.tolist() == expected
        assert searched.best_score_ == near(np.mean(expected))


@pytest.mark.slow
def test_weights_given_as_params_go_to_fit(x, y, rng):
    est, w = plain_regressor(**SMALL), rng.random(N)
    found = cross_val_score(est, samples(x), samples(y), cv=FOLDS, params={"sample_weight": w})
    folds = FOLDS.split(w)
    expected = [clone(est).fit(x[:, a], y[:, a], w[a]).score(x[:, b], y[:, b]) for a, b in folds]
    assert found.tolist() == expected


@pytest.mark.slow
def test_fitted_searches_and_views_of_files_can_be_stored(x, y, tmp_path, watch):
    h5save(tmp_path / "data.h5", {"x": x, "y": y})
    view = samples(h5mmap(tmp_path / "data.h5", "x"))
    found = GridSearchCV(plain_regressor(**SMALL), GRID, cv=3).fit(view, samples(y))
    joblib.dump(found, tmp_path / "search.joblib")
    joblib.dump(view[::-2], tmp_path / "view.joblib")
    assert watch.read["x"] == 0
    assert (tmp_path / "view.joblib").stat().st_size < 1024 < x.nbytes
    again, part = (joblib.load(tmp_path / f"{name}.joblib") for name in ("search", "view"))
    np.testing.assert_array_equal(again.predict(view), found.predict(view))
    np.testing.assert_array_equal(part, flat(x)[::-2])


@pytest.mark.slow
def test_views_of_an_array_that_joblib_mapped_reach_other_processes_right(x, y, tmp_path, watch):
    joblib.dump(np.ascontiguousarray(x.transpose(2, 1, 0)), tmp_path / "x.joblib")  # time-major
    mapped = joblib.load(tmp_path / "x.joblib", mmap_mode="r").transpose(2, 1, 0)
    for view, cv in ((samples, FOLDS), (timesteps, TimeSeriesSplit(3))):
        found = cross_validate(
            plain_regressor(**SMALL),
            view(mapped),
            view(y),
            cv=cv,
            n_jobs=2,
            return_train_score=True,
        )
        expected = cross_validate(
            plain_regressor(**SMALL), view(x), view(y), cv=cv, return_train_score=True
        )
        assert found["train_score"].tolist() == expected["train_score"].tolist()
        assert found["test_score"].tolist() == expected["test_score"].tolist()
    assert watch.read == {"x": 0, "y": 0}


# -- pipelines ----------------------------------------------------------------------------------------------


def scaled_fold_by_hand(est, x, y, train, test, axis):
    seen = x.take(train, axis)
    mean, scale = seen.mean((1, 2), keepdims=True), seen.std((1, 2), keepdims=True)
    return fold_by_hand(est, (x - mean) / scale, y, train, test, axis)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("face", ["samples", "timesteps"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_pipeline_scales_each_fold_by_its_own_training_part(face, cached, x, y, tmp_path, watch):
    x = np.array([1, 100, 1e-3])[:, None, None] * x + np.array([0, -500, 7])[:, None, None]
    view, axis, cv, _ = FACES[face]
    pipe = make_pipeline(
        SequenceScaler(), plain_regressor(**SMALL), memory=os.fspath(tmp_path) if cached else None
    )
    search = GridSearchCV(pipe, {"sequenceregressor__lr": [0.01, 0.1]}, cv=cv)
    found = search.fit(view(x), view(y)).cv_results_
    assert set(watch.fitted) == {type(view(x)).__name__}
    assert watch.read == {"x": 0, "y": 0}
    for i, lr in enumerate([0.01, 0.1]):
        est = plain_regressor(lr=lr, **SMALL)
        for fold, (train, test) in enumerate(cv.split(np.empty(x.shape[axis]))):
            _, score = scaled_fold_by_hand(est, x, y, train, test, axis)
            assert found[f"split{fold}_test_score"][i] == pytest.approx(score, rel=1e-6)
    again = GridSearchCV(pipe, {"sequenceregressor__lr": [0.01, 0.1]}, cv=cv, n_jobs=2).fit(
        view(x), view(y)
    )
    assert_same(split_scores(again.cv_results_), split_scores(found))


@pytest.mark.slow
def test_a_pooled_scorer_reads_the_targets_of_test_folds_only(x, y, watch):
    est, scoring = plain_regressor(**SMALL), pooled_scorer("neg_mean_absolute_error")
    found = cross_val_score(est, timesteps(x), timesteps(y), cv=TimeSeriesSplit(3), scoring=scoring)
    for fold, (train, test) in enumerate(TimeSeriesSplit(3).split(np.empty(T))):
        yhat, _ = fold_by_hand(est, x, y, train, test, 2)
        assert found[fold] == near(-np.abs(yhat - y[:, :, test]).mean())
    assert watch.read["x"] == 0
    assert watch.read["y"] <= y.nbytes


# -- what cannot be -----------------------------------------------------------------------------------------

UNSORTED = (
    "time steps must stay in their order: a state that runs forward cannot be carried through "
    "steps that are shuffled, reversed or repeated; split with TimeSeriesSplit or "
    "KFold(shuffle=False), or use samples(x) to split between series"
)


@pytest.mark.parametrize(
    "split",
    [
        lambda x, y: cross_val_score(plain_regressor(**SMALL), x, y, cv=ShuffleSplit(3)),
        lambda x, y: train_test_split(x, y),
        lambda x, y: permutation_test_score(plain_regressor(**SMALL), x, y, cv=TimeSeriesSplit(2)),
        lambda x, y: HalvingGridSearchCV(plain_regressor(**SMALL), GRID, cv=TimeSeriesSplit(2)).fit(
            x, y
        ),
    ],
    ids=[
        "ShuffleSplit",
        "train_test_split",
        "permutation_test_score",
        "HalvingGridSearchCV, samples",
    ],
)
def test_shuffled_time_is_an_error(split, x, y):
    with pytest.raises(ValueError, match=f"^{re.escape(UNSORTED)}$"):
        split(timesteps(x), timesteps(y))


def test_arrays_of_three_axes_are_not_split_if_features_differ_in_number(x, y):
    with pytest.raises(ValueError, match=r"inconsistent .*samples.*\[3, 2\]$"):
        GridSearchCV(plain_regressor(**SMALL), GRID, cv=2).fit(x, y)


def test_arrays_of_three_axes_that_were_split_along_features_cannot_be_scored(x):
    with pytest.raises(ShapeError) as caught:
        cross_val_score(plain_regressor(**SMALL), x, x, cv=3, error_score="raise")
    assert all(
        part in str(caught.value)
        for part in ("x has 1 features", "SequenceRegressor was fitted on 2", "timesteps(x)")
    )
