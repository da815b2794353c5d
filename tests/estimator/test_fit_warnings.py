"""Data from which a model probably learns something else than was meant are not taken without a
word.
"""

import math
import warnings
from contextlib import nullcontext
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingRegressor, StackingRegressor, VotingRegressor
from sklearn.impute import SimpleImputer
from sklearn.inspection import permutation_importance
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier, SequenceScaler, samples, timesteps
from fluxutils_py.errors import ShapeError, SingleStepWarning
from fluxutils_py.estimator import fit_warnings
from fluxutils_py.explaining import explain
from fluxutils_py.nn import GRU
from tests.plain_networks import plain_classifier, plain_regressor

N = 40
SMALL = {"hidden_size": 3, "epochs": 1, "random_state": 0}


@pytest.fixture(autouse=True)
def of_few_updates_nothing_is_said(monkeypatch):
    """These fits are short; tests here count warnings."""
    monkeypatch.setattr(fit_warnings, "ENOUGH", 0)
    monkeypatch.setattr(fit_warnings, "WORSE", math.inf)


# -- a matrix, whose rows are series of one step ---------------------------------------------------

ROWS = np.random.default_rng(0).normal(size=(N, 2))
SPEC = {"epochs": 1, "batchsize": 50, "seqsize": None}


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain_classifier(**SMALL),
        lambda: EstimatorClassifier(spec=SPEC),
        lambda: make_pipeline(SequenceScaler(), plain_classifier(**SMALL)),
        lambda: BaggingRegressor(plain_regressor(**SMALL), 1),
    ],
)
@pytest.mark.parametrize("form", [np.asarray, pd.DataFrame])
def test_a_recurrent_model_of_single_steps_warns_once_at_the_line_that_fits(make, form):
    with pytest.warns(SingleStepWarning) as found:
        make().fit(form(ROWS), np.arange(N) % 2)
    (warning,) = found
    for part in ("matrix", "one step", "timesteps(x.T[:, None])", "from_frame", "n_timesteps"):
        assert part in str(warning.message)
    assert warning.filename == __file__ or "sklearn" in warning.filename


def test_the_ways_out_that_it_names_run():
    y = np.arange(float(N))
    with warnings.catch_warnings(action="error"):
        steps = timesteps(ROWS.T[:, None])
        assert plain_regressor(**SMALL).fit(steps, y).predict(steps).shape == (N,)
        x = np.random.default_rng(0).normal(3, 2, size=(3, 31, 7))
        of_steps = plain_regressor(n_timesteps=7, **SMALL)
        pipe = make_pipeline(FunctionTransformer(np.asarray), StandardScaler(), of_steps)
        assert pipe.fit(samples(x), x.sum((0, 2))).predict(samples(x)).shape == (31,)
        assert next(of_steps.model_.parameters()).shape[1] == 3  # features of a step
        linear = Estimator(lambda n_in, n_out: nn.Linear(n_in, n_out), spec=SPEC)
        assert linear.fit(ROWS, y).predict(ROWS).shape == (N,)


@pytest.mark.parametrize("call", [
    lambda est: est.partial_fit(ROWS, np.arange(N)),
    lambda est: est.set_params(warm_start=True).fit(ROWS, np.arange(N)),
    lambda est: est.predict(pd.DataFrame(ROWS)),
    lambda est: SequenceScaler().fit(ROWS),
], ids=["partial fit", "warm start", "predict", "scaler"])  # fmt: skip
def test_the_first_fit_has_said_it(call):
    with pytest.warns(SingleStepWarning):
        est = plain_regressor(**SMALL).fit(ROWS, np.arange(N))
    with warnings.catch_warnings(action="error"):
        call(est)


# -- values that are too large ---------------------------------------------------------------------


class Own(nn.Module):
    """A recurrent network of one's own."""

    def __init__(self, n_in, n_out, norm=nn.Identity):
        super().__init__()
        self.norm = norm(n_in)
        self.rnn = GRU(n_in, 3)
        self.head = nn.Linear(3, n_out)

    def forward(self, x):
        return self.head(self.rnn(self.norm(x)))


class TestUnscaled:
    x = np.random.default_rng(1).normal(size=(2, 7, 23))  # (F, N, T)
    y = x.sum(axis=0, keepdims=True)

    def fit(self, x, y, est=None, **arguments):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (est or Estimator(Own, spec={"epochs": 2}, random_state=0)).fit(x, y, **arguments)
        assert all(w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    @pytest.mark.parametrize("est", [None, plain_regressor(**SMALL)])
    def test_an_input_of_a_million_is_named_once(self, est):
        (said,) = self.fit(self.x * [[[1]], [[1e6]]], self.y, est)
        size = 1e6 * np.sqrt(np.square(self.x[1]).mean())
        assert f"feature 1 of x has values of about {size:.0g}" in said
        assert "SequenceScaler" in said

    def test_an_offset_counts_as_well(self):
        (said,) = self.fit(self.x + 3000, self.y)
        assert "of about 3e+03" in said

    def test_scaled_inputs_and_targets_are_fine(self):
        assert self.fit(self.x * 10, self.y * 1e6, plain_regressor(**SMALL)) == []
        pipe = make_pipeline(SequenceScaler(), plain_regressor(**SMALL))
        assert self.fit(self.x * 1e6, self.y, pipe) == []

    def test_targets_that_nobody_scales_are_named(self):
        for est in (None, plain_regressor(scale_target=False, **SMALL)):
            (said,) = self.fit(self.x, self.y * 1e4, est)
            assert "feature 0 of y has values of about" in said
            assert "scale_target=True" in said

    @pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
    def test_a_model_that_normalizes_its_inputs_may_have_any(self, norm):
        est = Estimator(partial(Own, norm=norm), spec={"epochs": 1}, random_state=0)
        assert self.fit(self.x * 1e6, self.y, est) == []

    def test_labels_and_what_does_not_count_have_no_scale(self):
        labels = (self.y > 0) * 5000
        assert self.fit(self.x, labels, plain_classifier(**SMALL)) == []
        y = np.concatenate([self.y, self.y])
        y[0, :, ::2] = np.nan  # one output alone
        weight = np.ones((7, 23))
        weight[:, 5] = 0
        y[:, :, 5] = 1e9
        assert self.fit(self.x, y, sample_weight=weight) == []
        y[1, 2, 3] = 1e9
        (said,) = self.fit(self.x, y, sample_weight=weight)
        assert "feature 1 of y" in said

    def test_a_fit_that_goes_on_says_nothing_again(self):
        est = plain_regressor(warm_start=True, **SMALL)
        assert len(self.fit(self.x * 1e6, self.y, est)) == 1
        assert self.fit(self.x * 1e6, self.y, est) == []


# -- views among scikit-learn's tools ----------------------------------------------------------------


@pytest.mark.parametrize("step", [StandardScaler(), SimpleImputer()])
@pytest.mark.parametrize("view", [samples, timesteps])
def test_a_transformer_of_matrices_that_met_a_view_is_named_with_what_to_take(step, view):
    x = np.random.default_rng(0).normal(size=(2, 5, 6))
    with pytest.raises(ShapeError, match=(
        r"StandardScaler .*SequenceScaler"
    )):  # fmt: skip
        make_pipeline(step, plain_regressor(**SMALL)).fit(view(x), view(x[:1]))


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


# -- after the fit ------------------------------------------------------------------------------


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
        # a model that sees each step alone loses nothing
        spec = {"epochs": 1, "batchsize": 50, "seqsize": None}
        Estimator(lambda n_in, n_out: nn.Linear(n_in, n_out), spec=spec).fit(
            samples(x), samples(x[:1])
        ).predict(walks(3, 47))


def test_labels_of_one_class_are_warned_of_unless_others_are_declared():
    x = np.random.default_rng(0).normal(size=(2, 7, 5))
    for y in (np.full((1, 7, 5), 3), np.full(7, "calm")):
        with pytest.warns(UserWarning, match=f"all labels of y are {y.ravel().tolist()[0]!r}"):
            plain_classifier(**SMALL).fit(x, y)
    with warnings.catch_warnings(action="error"):
        est = plain_classifier(**SMALL).partial_fit(x, np.full(7, 1), classes=[0, 1])
        est.partial_fit(x, np.full(7, 1))
        plain_regressor(**SMALL).fit(x, np.full((1, 7, 5), 3.0))


# -- an optimizer that goes on ---------------------------------------------------------------------

SLOW = partial(torch.optim.AdamW, lr=1e-4)


@pytest.mark.parametrize(
    ("opt", "changed"),
    [
        (SLOW, r"lr=0.01, not 0.0001"),
        (torch.optim.SGD, "AdamW, not SGD"),
        (partial(torch.optim.AdamW, lr=0.01), None),
        (
            lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.3),
            "weight_decay=0.01, not 0.3",
        ),
    ],
)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_a_fit_that_goes_on_says_that_it_keeps_its_optimizer(method, opt, changed):
    x = np.random.default_rng(0).normal(size=(2, 3, 40)).astype("f4")
    spec = {"epochs": 2, "batchsize": 1, "seqsize": 1}
    est = Estimator(opt=partial(torch.optim.AdamW, lr=0.01), spec=spec, random_state=0)
    est.fit(x, x[:1]).set_params(opt=opt, warm_start=True)
    expected = nullcontext() if changed is None else pytest.warns(UserWarning, match=changed)
    with expected:
        getattr(est, method)(x, x[:1])
    assert type(est.optimizer_) is torch.optim.AdamW
    assert est.optimizer_.param_groups[0]["lr"] == 0.01
    est.set_params(warm_start=False).fit(x, x[:1])  # anew, with the new one
    assert est.optimizer_.defaults["lr"] == opt([nn.Parameter(torch.zeros(1))]).defaults["lr"]
