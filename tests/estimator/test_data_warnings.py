"""Data from which a model probably learns something else than was meant are not taken without a
word.
"""

import math
import warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn import datasets
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import AdaBoostRegressor, BaggingRegressor, StackingRegressor, VotingRegressor
from sklearn.feature_selection import RFE
from sklearn.impute import SimpleImputer
from sklearn.inspection import permutation_importance
from sklearn.metrics import r2_score
from sklearn.multioutput import MultiOutputRegressor, RegressorChain
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    RobustScaler,
    StandardScaler,
)
from sklearn.semi_supervised import SelfTrainingClassifier
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    SequenceScaler,
    samples,
    timesteps,
)
from fluxutils_py.data import SequenceWindows
from fluxutils_py.errors import ShapeError, SingleStepWarning
from fluxutils_py.estimator import data_warnings, underfitting_warnings
from fluxutils_py.explaining import explain
from fluxutils_py.inputs import as_series
from fluxutils_py.nn import GRU
from tests.plain_networks import plain_classifier, plain_regressor

N = 40
SMALL = {"hidden_size": 3, "epochs": 1, "random_state": 0}


@pytest.fixture(autouse=True)
def of_few_updates_nothing_is_said(monkeypatch):
    """These fits are short; tests here count warnings."""
    monkeypatch.setattr(underfitting_warnings, "ENOUGH", 0)
    monkeypatch.setattr(underfitting_warnings, "WORSE", math.inf)


def frame(index=None, n=N):
    return pd.DataFrame(
        np.random.default_rng(0).normal(size=(n, 2)), columns=["a", "b"], index=index
    )


class Squashed(nn.Module):
    """Single steps, or windows, and a function without a module of its own."""

    def __init__(self, squash, takes_windows=True):
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.squash, self.takes_windows = squash, takes_windows

    def forward(self, x):
        return self.squash(self.head(x))


def softmax(z):
    return z.softmax(-1)


def log_softmax(z):
    return z.log_softmax(-1)


def unchanged(z):
    return z


@pytest.mark.parametrize(
    ("loss", "squash", "message"),
    [
        (nn.CrossEntropyLoss(), softmax, "softmax"),
        (F.cross_entropy, softmax, "softmax"),
        (nn.CrossEntropyLoss(), log_softmax, None),
        (nn.CrossEntropyLoss(), unchanged, None),
        (nn.CrossEntropyLoss(), torch.sigmoid, None),  # does not sum to 1
        (nn.NLLLoss(), log_softmax, None),
        (nn.NLLLoss(), softmax, "LogSoftmax"),
        (nn.NLLLoss(), unchanged, "LogSoftmax"),
        (nn.BCEWithLogitsLoss(), torch.sigmoid, "sigmoid"),
        (nn.BCEWithLogitsLoss(), nn.Sigmoid(), "sigmoid"),
        (nn.BCEWithLogitsLoss(), unchanged, None),
        (nn.BCEWithLogitsLoss(), torch.relu, None),
        (nn.BCELoss(), torch.sigmoid, None),
        (nn.MSELoss(), softmax, None),
    ],
)
def test_a_last_layer_that_does_not_fit_the_loss(loss, squash, message):
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    labels = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss is F.cross_entropy
    y = (x[:1] > 0).astype(int) if labels else (x[[0, 1, 0]] > 0).astype("float32")
    modes = [True] if message == "sigmoid" else [True, False]
    for takes_windows in modes:
        est = Estimator(Squashed(squash, takes_windows), loss, spec={"epochs": 2})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            est.fit(x, y)
            assert len(caught) == bool(message)
            est.partial_fit(x, y)  # the first fit has said it
        assert len(caught) == bool(message)
        assert all(message in str(w.message) for w in caught)


DAYS = pd.date_range("2026-01-01", periods=N, name="date")
LIKE_TIME = [
    (DAYS, "has a DatetimeIndex"),
    (DAYS.to_period("D"), "has a PeriodIndex"),
    (DAYS - DAYS[0], "has a TimedeltaIndex"),
    (pd.Index(range(N), name="Timestamp"), "has an index named 'Timestamp'"),
    (
        pd.MultiIndex.from_product([list("vwxyz"), range(N // 5)], names=["shop", "week"]),
        "has an index named 'week'",
    ),
    (pd.MultiIndex.from_product([list("vwxyz"), DAYS[: N // 5]]), "has a DatetimeIndex"),
]


@pytest.mark.parametrize(("index", "why"), LIKE_TIME)
def test_an_index_in_time_is_warned_of_once_at_the_line_that_fits(index, why):
    with pytest.warns(SingleStepWarning) as found:
        plain_regressor(**SMALL).fit(frame(index), np.arange(N))
    (warning,) = found
    assert warning.filename == __file__
    assert all(
        part in str(warning.message)
        for part in (
            f"x is a data frame that {why}",
            "timesteps(x.to_numpy().T[:, None])",
            "fluxutils_py.from_frame(x, id_col, time_col, x=[...], y=...)",
            "fit on x.to_numpy()",
        )
    )


def test_the_ways_out_that_it_names_run():
    x, y = frame(DAYS), np.arange(float(N))
    est = plain_regressor(**SMALL).fit(timesteps(x.to_numpy().T[:, None]), y)
    assert est.predict(timesteps(x.to_numpy().T[:, None])).shape == (N,)
    assert plain_regressor(**SMALL).fit(x.to_numpy(), y).predict(x.to_numpy()).shape == (N,)


@pytest.mark.parametrize("make", [
    lambda: plain_classifier(**SMALL), lambda: EstimatorClassifier(spec={"epochs": 1, "batchsize": 50,
                                                                          "seqsize": None}),
    lambda: make_pipeline(SequenceScaler(), plain_classifier(**SMALL)).set_output(transform="pandas"),
])  # fmt: skip
def test_every_recurrent_estimator_warns(make):
    with pytest.warns(SingleStepWarning, match="DatetimeIndex") as found:
        make().fit(frame(DAYS), np.arange(N) % 2)
    assert len(found) == 1


def test_many_rows_are_warned_of(monkeypatch):
    monkeypatch.setattr(data_warnings, "MANY", 30)
    with pytest.warns(SingleStepWarning, match="^x .* 40 rows"):
        plain_regressor(**SMALL).partial_fit(frame(), np.arange(N))


@pytest.mark.parametrize("call", [
    lambda: plain_regressor(**SMALL).fit(frame(), np.arange(N)).predict(frame(DAYS)),
    lambda: plain_regressor(**SMALL).fit(frame(DAYS).to_numpy(), np.arange(N)),
    lambda: plain_regressor(**SMALL).fit(np.zeros((5000, 2)), np.zeros(5000)),
    lambda: plain_regressor(**SMALL, n_timesteps=2).fit(frame(DAYS), np.arange(N)),
    lambda: Estimator(lambda n_in, n_out: nn.Linear(n_in, n_out), spec={"epochs": 1, "batchsize": 50, "seqsize": None})
    .fit(frame(DAYS), np.arange(float(N))),
    lambda: SequenceScaler().fit(frame(DAYS)),
], ids=["predict", "array", "large array", "steps", "no recurrence", "scaler"])  # fmt: skip
def test_nothing_else_is_warned_of(call):
    with warnings.catch_warnings(action="error"):
        call()


@pytest.mark.parametrize("step", [StandardScaler(), SimpleImputer()])
@pytest.mark.parametrize("view", [samples, timesteps])
def test_a_transformer_of_matrices_that_met_a_view_is_named_with_what_to_take(step, view):
    x = np.random.default_rng(0).normal(size=(2, 5, 6))
    with pytest.raises(ShapeError, match=(
        r"StandardScaler .*SequenceScaler"
    )):  # fmt: skip
        make_pipeline(step, plain_regressor(**SMALL)).fit(view(x), view(x[:1]))


class Own(nn.Module):
    """A recurrent network, whose inputs and outputs may be scaled inside."""

    def __init__(self, n_in, n_out, shift=0, scale=1):
        super().__init__()
        self.rnn = GRU(n_in, 3)
        self.head = nn.Linear(3, n_out)
        self.shift = shift
        self.scale = scale

    def forward(self, x):
        y = self.head(self.rnn((x - self.shift) / self.scale))
        return y * self.scale + self.shift


def spread_of(x, y, **sizes):
    windows = SequenceWindows(as_series(x, "x"), as_series(y, "y"), **sizes)
    return data_warnings.spread_scales(windows)


class TestUnscaled:
    x = np.random.default_rng(1).normal(size=(2, 7, 23))  # (F, N, T)
    y = x.sum(axis=0, keepdims=True)

    def fit(self, x, y, est=None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (est or plain_regressor(**SMALL)).fit(x, y)
        return [str(w.message) for w in caught]

    def test_an_input_of_a_million_is_named(self):
        (said,) = self.fit(self.x * [[[1]], [[1e6]]], self.y)
        assert "feature 1 of x has values of about 9e+05" in said
        assert "SequenceScaler" in said

    def test_an_offset_counts_as_well(self):
        (said,) = self.fit(self.x + 3000, self.y)
        assert "of about 3e+03" in said

    def test_scaled_inputs_and_standardised_targets_are_fine(self):
        assert self.fit(self.x * 10, self.y * 1e6) == []
        assert (
            self.fit(
                self.x * 1e6, self.y, make_pipeline(SequenceScaler(), plain_regressor(**SMALL))
            )
            == []
        )

    @pytest.mark.parametrize(
        ("est", "remedy"),
        [
            (plain_regressor(scale_target=False, **SMALL), "scale_target=True"),
            (Estimator(spec={"epochs": 1}, random_state=0), "SequenceScaler().fit(y)"),
        ],
    )
    @pytest.mark.parametrize(
        ("scale", "how"), [(1e4, "has values of about"), (1e-4, "varies by no more")]
    )
    def test_targets_that_nobody_scales_are_named(self, est, remedy, scale, how):
        (said,) = self.fit(self.x, self.y * scale, est)
        assert f"feature 0 of y {how}" in said
        assert remedy in said

    @pytest.mark.slow
    @pytest.mark.parametrize("scale", [1e4, 1e-4])
    @pytest.mark.parametrize(
        "form", ["array", "list", "samples", "timesteps", "series", "several", "matrix"]
    )
    def test_what_it_says_of_targets_can_be_run(self, form, scale):
        x, y = self.x, self.y * scale
        forms = {
            "array": (x, y),
            "list": (list(x.transpose(1, 0, 2)), list(y.transpose(1, 0, 2))),
            "samples": (samples(x), samples(y)),
            "timesteps": (timesteps(x), timesteps(y)),
            "series": (x, y[0, :, -1]),
            "several": (x, y[0, :, -2:]),
            "matrix": (x[:, :, 0].T, y[0, :, 0]),
        }
        x, y = forms[form]
        adam = partial(torch.optim.Adam, lr=0.1)
        est = Estimator(
            nn.Sequential(nn.Linear(2, 1 + (form == "several"))),
            opt=adam,
            spec={"epochs": 30, "seqsize": 12},
        )
        (said,) = self.fit(x, y, est)
        *steps, last = said.partition("; scale it: ")[2].split("; ")
        tools = (SequenceScaler, TransformedTargetRegressor, StandardScaler)
        names = {tool.__name__: tool for tool in tools} | {"x": x, "y": y, "estimator": est}
        for step in steps:
            exec(step, names)
        found = eval(last, names)
        found = found.predict(x) if hasattr(found, "predict") else found
        y, found = (
            np.concatenate(a, None) if isinstance(a, list) else np.ravel(a) for a in (y, found)
        )
        assert r2_score(y, found) > 0.5

    def test_an_input_that_varies_too_little_is_named(self):
        (said,) = self.fit(self.x * [[[1]], [[1e-4]]], self.y)
        assert "feature 1 of x varies by no more than about 9e-05" in said
        assert "make_pipeline(SequenceScaler(), estimator)" in said
        assert len(self.fit(self.x * 1e-4 + 1, self.y)) == 1  # whatever its mean

    def test_constants_classes_and_rare_events_vary_enough(self):
        x = np.zeros((5, 7, 600))
        x[1] = 0.1  # a constant
        x[2, 3] = 1  # a class of series
        x[3, 0, 5] = 1  # a rare event
        # a constant, up to rounding
        x[4] = 0.3 + 1e-9 * np.random.default_rng(0).normal(size=(7, 600))
        y = np.where(np.arange(600) % 599 == 7, 1.0, 0) + np.zeros((1, 7, 1))
        assert self.fit(x, y, Estimator(spec={"epochs": 1}, random_state=0)) == []
        assert self.fit(x, np.ones_like(y), Estimator(spec={"epochs": 1}, random_state=0)) == []

    def test_a_scale_is_that_of_the_values_that_are_there(self):
        rng = np.random.default_rng(0)
        values, live = rng.normal(3, 0.01, (20, 5, 2)), rng.random((20, 5, 2)) < 0.5  # (S, B, F)
        scale = data_warnings.Scale.of(np.where(live, values, 1e9), live)
        for f in range(2):
            there = values[:, :, f][live[:, :, f]]
            assert scale.mean[f] == pytest.approx(there.mean())
            assert scale.spread[f] == pytest.approx(there.std())
            assert scale.size[f] == pytest.approx(np.sqrt((there**2).mean()))
            assert scale.reach[f] == pytest.approx(abs(there - there.mean()).max())

    @pytest.mark.slow
    def test_validation_data_that_a_pipeline_does_not_scale_are_named(self):
        for scale, offset, warned in (
            (3000, 0, True),
            (1 / 3000, 0, True),
            (3, 0, False),
            (1, 99, True),
            (1, 9, False),
        ):
            x = self.x * scale + offset
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                pipe = make_pipeline(SequenceScaler(), plain_regressor(**SMALL))
                pipe.fit(x, self.y, sequenceregressor__validation_data=(x, self.y))
            assert all("of validation x is about" in str(w.message) for w in found)
            assert bool(found) == warned

    def test_a_few_values_may_be_alike(self):
        for n_steps, warned in ((1, False), (4, False), (5, True)):
            x = self.x[:, :1, :n_steps] * 1e-4
            assert bool(self.fit(x, self.y[:, :1, :n_steps])) == warned

    def test_missing_outputs_do_not_hide_a_small_scale(self):
        y = 100 + np.concatenate([self.y, self.y]) * 1e-3
        y[0, :, ::2] = np.nan
        (said,) = self.fit(self.x, y, Estimator(spec={"epochs": 1}, random_state=0))
        assert "of y varies by no more than about 0.001" in said

    def test_a_model_that_normalizes_its_inputs_may_have_any(self):
        model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 1))
        assert (
            self.fit(self.x * 1e6, self.y, Estimator(model, spec={"epochs": 1}, random_state=0))
            == []
        )

    def test_missing_values_and_short_series_are_no_trouble(self):
        y = self.y.copy()
        y[:, :, :5] = np.nan
        assert self.fit(self.x, y) == []
        assert (
            self.fit(
                [a[:, : 3 + i] for i, a in enumerate(self.x.transpose(1, 0, 2))],
                [a[:, : 3 + i] for i, a in enumerate(self.y.transpose(1, 0, 2))],
            )
            == []
        )

    @pytest.mark.few
    @pytest.mark.parametrize("form", ["array", "list", "samples", "reversed"])
    def test_a_target_that_is_flat_at_first_is_fine_and_a_small_one_is_named(self, form):
        """Remaining life, capped: 1 in the first 40 % of each series, then down to 0."""
        life = np.random.default_rng(0).integers(70, 120, 30)
        left = life[:, None] - np.arange(120)
        y = np.clip(left / 50, 0, 1)[None]
        if form == "reversed":
            y = y[:, :, ::-1]
        x = np.random.default_rng(1).normal(size=(2, 30, 120))
        forms = {"list": lambda a: list(a.transpose(1, 0, 2)), "samples": samples}
        as_form = forms.get(form, np.asarray)
        est = Estimator(spec={"epochs": 1, "seqsize": 30, "batchsize": 5}, random_state=0)
        assert self.fit(as_form(x), as_form(y), est) == []
        (said,) = self.fit(as_form(x), as_form(y / 50), est)
        assert "feature 0 of y varies by no more than about 0.00" in said

    @pytest.mark.parametrize("shape", [(3, 7, 23), (3, 1, 9), (3, 200, 1)])
    def test_of_few_data_all_are_looked_at_once(self, shape):
        x = np.random.default_rng(2).normal(3, 2, shape)
        found = spread_of(x, x[:1], batchsize=300, seqsize=30)
        for name, a in (("x", x), ("y", x[:1])):
            flat = a.reshape(len(a), -1)
            assert (found[name].count == flat.shape[1]).all()
            np.testing.assert_allclose(found[name].mean, flat.mean(1))
            np.testing.assert_allclose(found[name].spread, flat.std(1))

    @pytest.mark.parametrize("shape", [(1, 3000), (500, 1), (37, 410), (3, 5000), (900, 16)])
    @pytest.mark.parametrize("seqsize", [7, 10_000])
    def test_of_many_data_pieces_of_all_series_and_times_are_looked_at(self, shape, seqsize):
        n_series, n_steps = shape
        series, steps = np.meshgrid(*map(np.arange, shape), indexing="ij")
        x = np.stack([series / n_series, steps / n_steps])
        found = spread_of(x, x, batchsize=4, seqsize=seqsize)["x"]
        assert (found.count <= 4000).all()
        np.testing.assert_allclose(found.mean, x.mean((1, 2)), atol=0.1)
        np.testing.assert_allclose(found.spread, x.std((1, 2)), atol=0.06)

    def test_a_module_of_ones_own_is_warned_of_what_its_layers_see(self):
        x = 5000 + 1000 * self.x
        est = Estimator(Own, spec={"epochs": 1}, random_state=0)
        (said,) = self.fit(x, self.y, est)
        assert "of x has values of about 5e+03" in said
        (said,) = self.fit(self.x, self.y / 1000, est)
        assert "of y varies by no more than" in said
        scaled = Estimator(partial(Own, shift=5000, scale=1000), spec={"epochs": 1}, random_state=0)
        assert self.fit(x, x[:1], scaled) == []

    def test_a_fit_that_goes_on_says_nothing_again(self):
        est = plain_regressor(warm_start=True, **SMALL)
        assert len(self.fit(self.x * 1e6, self.y, est)) == 1
        assert self.fit(self.x * 1e6, self.y, est) == []


def _hourly(n=200):
    hours = np.arange(n) * 2 * np.pi / 24
    noise = np.random.default_rng(1).normal(scale=0.1, size=(n, 3))
    return np.stack([np.sin(hours), np.cos(hours), np.sin(hours / 7)], 1) + noise


@pytest.mark.parametrize("form", [np.asarray, pd.DataFrame])
def test_rows_that_follow_each_other_in_time_are_warned_of_without_an_index_of_dates(form):
    x = _hourly()
    with pytest.warns(SingleStepWarning, match=r"200 rows.*\.T\[:, None\]"):
        plain_regressor(**SMALL).fit(form(x), x[:, 0])


@pytest.mark.slow
def test_the_advice_for_rows_in_time_learns_what_single_steps_cannot():
    x = _hourly(400)
    y = np.concatenate([[0], x[:-1, 0]])  # the value before
    y[1:] += x[:-1, 2]
    advised = timesteps(x.T[:, None])
    est = plain_regressor(8, epochs=60, random_state=0).fit(advised, y)
    assert est.n_features_in_ == 3
    assert r2_score(y, est.predict(advised)) > 0.8


TOYS = ["iris", "wine", "breast_cancer", "diabetes", "digits", "linnerud"]


@pytest.mark.parametrize("name", TOYS)
def test_toy_tables_are_not_taken_for_time(name):
    assert not data_warnings.follow_each_other(getattr(datasets, f"load_{name}")().data)


@pytest.mark.slow
def test_independent_sorted_and_grouped_rows_are_not_taken_for_time():
    rng, found = np.random.default_rng(0), 0
    for seed in range(50):
        n, n_features = int(rng.integers(60, 500)), int(rng.integers(1, 6))
        independent = rng.normal(size=(n, n_features))
        by_first = independent[np.argsort(independent[:, 0])]
        grouped = datasets.make_blobs(n, n_features, shuffle=False, random_state=seed)[0]
        heavy = rng.standard_cauchy((n, n_features))
        found += sum(
            data_warnings.follow_each_other(x) for x in (independent, by_first, grouped, heavy)
        )
    assert found <= 2  # of 200


@pytest.mark.parametrize(
    "make",
    [
        lambda: BaggingRegressor(plain_regressor(**SMALL), 1, bootstrap=False),
        lambda: AdaBoostRegressor(plain_regressor(**SMALL), n_estimators=1),
        lambda: RegressorChain(plain_regressor(**SMALL)),
    ],
)
def test_a_view_that_a_tool_flattened_is_noticed_with_its_number_of_steps(make):
    x = np.random.default_rng(0).normal(size=(3, 31, 7)).astype("float32")
    tool = make()
    y = x.sum((0, 2))
    if isinstance(tool, RegressorChain):
        y = np.stack([y, x[0].sum(1)], 1)
    with pytest.warns(SingleStepWarning, match=r"21 columns.*n_timesteps=7"):
        tool.fit(samples(x), y)


@pytest.mark.parametrize(
    "scaler", [StandardScaler(), MinMaxScaler((1, 5)), RobustScaler(), MaxAbsScaler()]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_flattened_view_is_noticed_behind_a_scaler_of_columns(scaler, dtype):
    x = np.random.default_rng(0).normal(3, 2, size=(3, 31, 7)).astype(dtype)
    y = x.sum((0, 2))
    pipe = make_pipeline(FunctionTransformer(np.asarray), scaler, plain_regressor(**SMALL))
    with pytest.warns(SingleStepWarning, match=r"21 columns.*n_timesteps=7"):
        pipe.fit(samples(x), y)
    with warnings.catch_warnings(action="error"):
        pipe.set_params(sequenceregressor__n_timesteps=7).fit(samples(x), y)


def constant_importance(est):
    return np.ones(est.n_features_in_)


@pytest.mark.parametrize("make", [
    lambda est: SelfTrainingClassifier(est),
    lambda est: RFE(est, n_features_to_select=1, step=20, importance_getter=constant_importance),
], ids=["self training", "elimination"])  # fmt: skip
def test_meta_estimators_that_flatten_a_view_are_noticed(make):
    x = np.random.default_rng(0).normal(size=(3, 31, 7))
    y = (x.mean((0, 2)) > 0).astype(int)
    y[::3] = -1  # no label, to SelfTrainingClassifier
    with pytest.warns(SingleStepWarning, match=r"21 columns.*n_timesteps=7"):
        make(plain_classifier(**SMALL)).fit(samples(x), y)


TWO = [("a", plain_regressor(**SMALL)), ("b", plain_regressor(**SMALL))]
KEEP = {
    "stacking": (StackingRegressor(TWO, cv=2), lambda fitted: fitted.estimators_),
    "voting": (VotingRegressor(TWO), lambda fitted: fitted.estimators_),
    "outputs": (
        MultiOutputRegressor(plain_regressor(**SMALL)),
        lambda fitted: fitted.estimators_,
    ),
    "calibration": (
        CalibratedClassifierCV(plain_classifier(**SMALL), cv=2),
        lambda fitted: [c.estimator for c in fitted.calibrated_classifiers_],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEP)
def test_meta_estimators_that_keep_a_view_train_on_its_steps(name):
    tool, parts = KEEP[name]
    x = np.random.default_rng(0).normal(size=(3, 31, 7))
    y = x.mean((0, 2))
    if name == "outputs":
        y = np.stack([y, -y], 1)
    elif name == "calibration":
        y = (y > 0).astype(int)
    with warnings.catch_warnings(action="error"):
        fitted = tool.fit(samples(x), y)
    for est in parts(fitted):
        assert est.n_features_in_ == 21
        assert next(est.model_.parameters()).shape[1] == 3  # features of a step
    assert len(fitted.predict(samples(x))) == 31


@pytest.mark.slow
def test_no_view_is_taken_for_flattened_where_steps_are_known_or_values_are_others():
    x = np.random.default_rng(0).normal(size=(3, 31, 7)).astype("float32")
    y = x.sum((0, 2))
    BaggingRegressor(plain_regressor(**SMALL, n_timesteps=7), 1).fit(samples(x), y)
    plain_regressor(**SMALL).fit(np.asarray(samples(x)) ** 3, y)
    plain_regressor(**SMALL).fit(np.asarray(samples(x))[::-1] + 1, y)
    plain_regressor(**SMALL).fit(np.asarray(samples(x))[:4] + 1, y[:4])


# -- after the fit, and arrays of other layouts -------------------------------------------------


def walks(n_features, n_steps, seed=0):
    """A series whose features are walks, of different scales, as (T, F)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n_steps, n_features)).cumsum(0) * (1 + np.arange(n_features))


@pytest.fixture(scope="module")
def fitted_on_series():
    x = walks(3, 47).T[:, None]
    with warnings.catch_warnings(action="ignore"):
        return plain_regressor(**SMALL).fit(x, x[:1])


SHORT = [
    (lambda est, rows: est.predict(rows), r"give x\.T"),
    (lambda est, rows: est.predict(pd.DataFrame(rows)), r"give x\.to_numpy\(\)\.T"),
    (lambda est, rows: est.score(rows, rows[:, 0]), "timesteps"),
    (lambda est, rows: est.evaluate(rows, rows[:, 0]), "timesteps"),
    (lambda est, rows: explain(est, rows), "timesteps"),
    (lambda est, rows: permutation_importance(est, rows, rows[:, 0], n_repeats=1), "timesteps"),
]


@pytest.mark.parametrize(("call", "remedy"), SHORT)
def test_rows_that_become_single_steps_after_a_fit_on_series_are_warned_of(
    fitted_on_series, call, remedy
):
    with pytest.warns(SingleStepWarning, match=rf"SequenceRegressor .*47 steps.*{remedy}"):
        call(fitted_on_series, walks(3, 47))


@pytest.mark.parametrize("form", [samples, lambda x: x])
def test_a_loaded_model_a_pipeline_and_a_classifier_warn_of_rows_too(form, tmp_path):
    x = walks(3, 47).T[:, None]
    y = (x[:1] > x[:1].mean()).astype(int)
    rows = walks(3, 47)
    with warnings.catch_warnings(action="ignore"):
        pipe = make_pipeline(SequenceScaler(), plain_classifier(**SMALL)).fit(form(x), form(y))
        pipe[-1].save(tmp_path / "file")
        loaded = type(pipe[-1]).load(tmp_path / "file")
    for call in (pipe.predict, pipe.predict_proba, loaded.predict):
        with pytest.warns(SingleStepWarning, match="47 steps") as found:
            call(rows)
        assert len(found) == 1


def test_validation_data_of_single_steps_are_warned_of():
    x = walks(3, 47).T[:, None]
    validation = (walks(3, 47), walks(3, 47)[:, 0])
    est = plain_regressor(**SMALL)
    with pytest.warns(SingleStepWarning, match="^validation x .*47 steps"):
        est.fit(x, x[:1], validation_data=validation)


def test_steps_that_are_meant_are_not_warned_of(fitted_on_series):
    x = walks(3, 47).T[:, None]
    with warnings.catch_warnings(action="error"):
        for one_step in (x[:, :, :1], samples(x[:, :, :1]), timesteps(x[:, :, :1])):
            fitted_on_series.predict(one_step)
        fitted_on_series.stream().step(x[:, :, 0])
        of_rows = plain_regressor(**SMALL).fit(x[:, 0, :9].T, x[0, 0, :9])
        of_rows.predict(walks(3, 47))
        # a model that sees each step alone loses nothing
        spec = {"epochs": 1, "batchsize": 50, "seqsize": None}
        Estimator(lambda n_in, n_out: nn.Linear(n_in, n_out), spec=spec).fit(
            samples(x), samples(x[:1])
        ).predict(walks(3, 47))


def said_of(x, y):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plain_regressor(**SMALL).fit(x, y)
    return [str(w.message) for w in found if w.category is SingleStepWarning]


@pytest.mark.slow
def test_a_series_in_the_layout_of_torch_is_warned_of_with_its_transpose():
    for n_features, form in ((1, np.asarray), (3, np.asarray), (3, samples)):
        series = walks(n_features, 100)
        (said,) = said_of(form(series[None]), series[:, 0])
        assert f"(1, 100, {n_features})" in said
        assert "x.transpose(2, 0, 1)" in said
        assert "y[None, None]" in said
        assert said_of(series[None].transpose(2, 0, 1), series[:, 0][None, None]) == []


@pytest.mark.slow
def test_series_that_are_series_are_not_taken_for_steps():
    rng = np.random.default_rng(0)
    long = rng.normal(size=2000).cumsum()
    days = np.sin(np.arange(2000) / 4) + long / 9  # each like the day before
    independent = rng.normal(size=(1, 150, 5)).cumsum(2)
    windows = np.lib.stride_tricks.sliding_window_view(long, 5)[None, :300]
    for x in (independent, windows, windows[:, ::3], days.reshape(1, -1, 5)):
        assert said_of(x, x[0, :, 0]) == []


def one_hot(letters, n):
    return np.eye(n)[letters]


def test_letters_of_a_text_are_taken_for_steps():
    # "the next letter" of a language in which each has three that may follow
    rng = np.random.default_rng(0)
    follow = rng.integers(0, 12, (12, 3))
    letters = [0]
    for choice in rng.integers(0, 3, 400):
        letters.append(int(follow[letters[-1], choice]))
    x = one_hot(letters, 12)
    assert data_warnings.follow_each_other(x)
    assert len(said_of(x, x[:, 0])) == 1
    assert len(said_of(x[None], x[:, 0])) == 1


@pytest.mark.slow
def test_independent_and_sorted_categories_are_not_taken_for_steps():
    found = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        for n_categories, n in ((3, 61), (4, 200), (26, 300), (90, 500)):
            drawn = rng.integers(0, n_categories, n)
            rare = np.minimum(rng.zipf(1.5, n), n_categories) - 1
            for letters in (drawn, np.sort(drawn), np.arange(n) % n_categories, rare):
                found += data_warnings.follow_each_other(one_hot(letters, n_categories))
    assert found == 0  # of 400


def test_labels_of_one_class_are_warned_of_unless_others_are_declared():
    x = np.random.default_rng(0).normal(size=(2, 7, 5))
    for y in (np.full((1, 7, 5), 3), np.full(7, "calm")):
        with pytest.warns(UserWarning, match=f"all labels of y are {y.ravel().tolist()[0]!r}"):
            plain_classifier(**SMALL).fit(x, y)
    with warnings.catch_warnings(action="error"):
        est = plain_classifier(**SMALL).partial_fit(x, np.full(7, 1), classes=[0, 1])
        est.partial_fit(x, np.full(7, 1))
        plain_regressor(**SMALL).fit(x, np.full((1, 7, 5), 3.0))
