"""Integrated gradients of the whole past: against torch.autograd on the unrolled series."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
    explain,
    samples,
    timesteps,
)
from fluxutils_py.explaining import integrated_gradients
from fluxutils_py.nn import GRU, LSTM, Recur

F, N, T = 3, 5, 23
RNG = np.random.default_rng(0)
X = RNG.normal(2, 3, size=(F, N, T))
Y = np.cumsum(X[:2], 2) / 5 + 40
SPEC = {"epochs": 2, "batchsize": 3, "seqsize": 7}
LABELS = np.array(["a", "b", "c", "a", "b"])


def fitted(model, x=X, y=Y, **settings):
    torch.manual_seed(0)
    return Estimator(model(), spec=SPEC, random_state=0, verbose=False, **settings).fit(x, y)


def lstm():
    return nn.Sequential(LSTM(3, 6, num_layers=2), nn.Tanh(), nn.Linear(6, 2))


def oracle(model, x, baseline, score, n_points):
    """Integrated gradients of arrays (F_i, T), each point of the path in one unrolled graph."""
    nodes, weights = np.polynomial.legendre.leggauss(n_points)
    sums = [np.zeros_like(a) for a in x]
    for node, weight in zip(nodes, weights, strict=True):
        at = [
            torch.tensor(b + (node + 1) / 2 * (a - b)).requires_grad_()
            for a, b in zip(x, baseline, strict=True)
        ]
        for layer in model.modules():
            if isinstance(layer, Recur):
                layer.reset()
        out = model(*(a.T[:, None] for a in at))  # (T, 1, G)
        grads = torch.autograd.grad(score(out), at, allow_unused=True)
        for total, grad, a, b in zip(sums, grads, x, baseline, strict=True):
            total += weight / 2 * grad.numpy() * (a - b)
    for layer in model.modules():
        if isinstance(layer, Recur):
            layer.reset()
    return sums


def set_window(monkeypatch, n_steps):
    """Make windows of so many steps, as a large model has them."""
    if n_steps is not None:
        monkeypatch.setattr(integrated_gradients, "window_size", lambda *_: n_steps)


# -- the numbers ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seqsize", [1, 5, 19, None])
def test_attributions_are_those_of_the_whole_unrolled_series(seqsize, monkeypatch):
    set_window(monkeypatch, seqsize)
    est = fitted(lstm)
    b = RNG.normal(size=F)
    e = explain(est, X, 2, 18, 1, baseline=b, n_points=9)
    (expected,) = oracle(est.model_, [X[:, 2, :19]], [b[:, None]], lambda out: out[-1, 0, 1], 9)
    assert e.attributions.shape == (F, 19)
    assert_allclose(e.attributions, expected, rtol=0, atol=1e-10)
    assert abs(expected[:, :3]).max() > 1e-8  # the first steps count too
    assert_allclose(e.value, est.predict(X)[1, 2, 18], rtol=1e-12)
    assert e.steps.tolist() == list(range(19))


class OwnState(nn.Module):
    """Two tensors of state, one of them integers, and one changed in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, state):
        if state is None:
            state = x.new_zeros(len(x), 4), torch.zeros(len(x), 1, dtype=torch.int64)
        h, n = state
        h.mul_(0.9)
        h = torch.tanh(self.linear(x) / (1 + n) + h)
        return h, (h.clone(), n + 1)


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, 23])
def test_own_recurrent_modules_with_integers_in_their_state(window, monkeypatch):
    set_window(monkeypatch, window)

    def model():
        return nn.Sequential(Recur(OwnState()), nn.Linear(4, 2))

    est = fitted(model)
    e = explain(est, X, 0, output=0, baseline="zero", n_points=40)
    (expected,) = oracle(est.model_, [X[:, 0]], [np.zeros((F, 1))], lambda out: out[-1, 0, 0], 40)
    assert_allclose(e.attributions, expected, rtol=0, atol=1e-10)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = GRU(5, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, a, b):
        return self.head(self.gru(torch.cat([a, b], -1)))


def test_several_inputs(monkeypatch):
    set_window(monkeypatch, 4)
    x = (X, X[:2] ** 2)
    est = fitted(TwoInputs, x)
    b = (RNG.normal(size=F), "mean")
    e = explain(est, x, 4, -2, 0, baseline=b, n_points=8)
    mean = x[1].mean((1, 2))[:, None]
    expected = oracle(
        est.model_,
        [x[0][:, 4, :22], x[1][:, 4, :22]],
        [b[0][:, None], mean],
        lambda out: out[-1, 0, 0],
        8,
    )
    for got, wanted in zip(e.attributions, expected, strict=True):
        assert_allclose(got, wanted, rtol=0, atol=1e-10)
    assert "x[1] feature 1" in [s.name for s in e.by_feature()]


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.gru = GRU(5, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, a, k):
        return self.head(self.gru(torch.cat([a, self.embedding(k[..., 0])], -1)))


def test_integer_inputs_stay_as_they_are(monkeypatch):
    set_window(monkeypatch, 6)
    x = (X, RNG.integers(0, 3, size=(1, N, T)))
    est = fitted(Embedded, x)
    e = explain(est, x, 1, output=1)
    assert not e.attributions[1].any()
    assert e.attributions[0].all()
    assert e.completeness < 1e-4
    swapped = (np.broadcast_to(X.mean((1, 2))[:, None, None], X.shape).copy(), x[1])
    assert_allclose(e.baseline_value, est.predict(swapped)[1, 1, -1], rtol=1e-9)


def test_starts_and_lengths():
    est = fitted(lstm)
    starts, lengths = np.array([0, 0, 4, 0, 0]), np.array([23, 23, 11, 23, 23])
    padded = X.copy()
    padded[:, 2, :4] = padded[:, 2, 15:] = 1e9
    e = explain(
        est, padded, 2, output=0, starts=starts, lengths=lengths, baseline="zero", n_points=6
    )
    (expected,) = oracle(
        est.model_, [X[:, 2, 4:15]], [np.zeros((F, 1))], lambda out: out[-1, 0, 0], 6
    )
    assert_allclose(e.attributions, expected, rtol=0, atol=1e-10)
    assert e.steps.tolist() == list(range(4, 15))
    mean = explain(est, padded, 2, output=0, starts=starts, lengths=lengths)
    assert abs(mean.baseline_value) < 1e3  # of the steps that exist


def test_lists_of_series():
    est = fitted(lstm)
    x = [X[:, 0, :9], X[:, 1], X[:, 2, :4]]
    e = explain(est, x, 2, output=1)
    assert_allclose(
        e.attributions,
        explain(
            est, X[:, 2:3, :4], output=1, baseline=np.hstack(x).mean(1), n_points=e.n_points
        ).attributions,
        atol=1e-12,
    )


def test_steps_without_inputs_move_the_state_as_in_predict(monkeypatch):
    set_window(monkeypatch, 3)
    est = fitted(lstm)
    x = X.copy()
    x[:, 1, 5:8] = np.nan
    e = explain(est, x, 1, 12, 0)
    assert_allclose(e.value, est.predict(x)[0, 1, 12], rtol=1e-12)
    assert not e.attributions[:, 5:8].any()
    assert e.attributions[:, :5].all()
    with pytest.raises(ValueError, match=r"step 6 .*NaN"):
        explain(est, x, 1, 6, 0)


def test_one_step_and_one_series():
    est = fitted(lstm)
    e = explain(est, X[:, :1, :1], output=0, baseline="zero")
    assert e.attributions.shape == (F, 1)
    assert_allclose(e.attributions.sum(), e.value - e.baseline_value, rtol=1e-4)


def test_rows_with_gaps_are_refused_with_the_remedy():
    rows = timesteps(X)[[*range(4), *range(8, 20)]]
    with pytest.raises(ValueError, match=r"gaps.*\(F, N, T\)"):
        explain(fitted(lstm), rows, 3, 9, 0)


# -- kinds of models ------------------------------------------------------------------------------


class Smooth(nn.Module):
    """Sees windows; no state."""

    takes_windows = True

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 2, 4)

    def forward(self, x):
        padded = nn.functional.pad(x.permute(1, 2, 0), (3, 0))
        return torch.tanh(self.conv(padded)).permute(2, 0, 1)


@pytest.mark.slow
def test_models_that_see_windows_get_those_of_predict():
    torch.manual_seed(0)
    est = Estimator(Smooth(), spec={**SPEC, "overlap": 3}, verbose=False).fit(X, Y)
    for step in (0, 6, 7, 15, 22):
        e = explain(est, X, 1, step, 1)
        assert_allclose(e.value, est.predict(X)[1, 1, step], rtol=1e-12)
        assert e.completeness < 1e-4
        assert e.steps[-1] == step
        assert not e.attributions[:, :-4].any()


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "linear"])
def test_one_label_per_series(cell):
    est = SequenceClassifier(4, cell=cell, epochs=60, random_state=0, verbose=False)
    est.fit(X, LABELS)
    e = explain(est, X, 1, output="c")
    scores = est.decision_function(X)
    assert_allclose(e.value, scores[1, 2], rtol=1e-9)
    assert e.output == "score of 'c'"
    assert e.completeness < 1e-4
    predicted = explain(est, X, 1)
    assert predicted.output == f"score of '{est.predict(X)[1]}'"
    assert_allclose(predicted.value, scores[1].max())


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["mgu", "lru", "tcn", "attention"])
def test_attributions_of_ready_made_cells_are_complete(cell, monkeypatch):
    set_window(monkeypatch, 4)
    est = SequenceRegressor(4, cell=cell, epochs=60, random_state=0, verbose=False)
    est.fit(X[:, :, :12], Y[:1, :, :12])
    e = explain(est, X, 2, 9)
    assert_allclose(e.attributions.sum(), e.value - e.baseline_value, rtol=1e-4)
    assert_allclose(e.value, est.predict(X)[0, 2, 9], rtol=1e-9)
    assert e.attributions[:, 0].any()


def test_two_classes_are_explained_by_their_difference():
    torch.manual_seed(0)
    y = (X[:1] > 2).astype(int)
    est = EstimatorClassifier(spec=SPEC, random_state=0, verbose=False).fit(X, y)
    e = explain(est, X, 0, 10, 1)
    assert_allclose(e.value, est.decision_function(X)[0, 0, 10], rtol=1e-9)
    assert_allclose(explain(est, X, 0, 10, 0).attributions, -e.attributions)


def test_the_model_of_the_estimator_stays():
    est = fitted(lstm)
    before = est.predict(X)
    grads = [p.grad for p in est.model_.parameters()]
    with torch.no_grad():  # it needs gradients all the same
        explain(est, X, output=0)
    assert [p.grad for p in est.model_.parameters()] == grads
    assert (est.predict(X) == before).all()
    assert est.model_[0].state is None


# -- pipelines ------------------------------------------------------------------------------------


def ready(**settings):
    return SequenceRegressor(4, epochs=20, random_state=0, verbose=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaler", "settings"), [(SequenceScaler(), {}), (StandardScaler(), {"n_timesteps": T})]
)
def test_linear_scalers_leave_attributions_of_the_inputs(scaler, settings):
    pipe = make_pipeline(scaler, ready(**settings)).fit(samples(X), samples(Y[:1]))
    e = explain(pipe, samples(X), 3)
    assert e.explained == "inputs"
    assert_allclose(e.value, pipe.predict(samples(X)).reshape(N, -1)[3, -1], rtol=1e-9)
    assert e.completeness < 1e-4


@pytest.mark.slow
def test_a_given_baseline_goes_through_the_scaler():
    pipe = make_pipeline(SequenceScaler(), ready()).fit(samples(X), samples(Y[:1]))
    b = np.array([1.0, -2.0, 30.0])
    e = explain(pipe, X, 3, baseline=b)
    at_baseline = np.broadcast_to(b[:, None, None], (F, 1, T)).copy()
    assert_allclose(e.baseline_value, pipe.predict(at_baseline)[0, 0, -1], rtol=1e-9)


@pytest.mark.slow
def test_a_given_baseline_does_not_go_through_other_scalers():
    pipe = make_pipeline(StandardScaler(), ready(n_timesteps=T)).fit(samples(X), samples(Y[:1]))
    with pytest.raises(TypeError, match=r"'standardscaler'.*'mean'"):
        explain(pipe, samples(X), baseline=np.zeros(3))


@pytest.mark.slow
def test_what_other_transformers_leave_is_named():
    pipe = make_pipeline(SequenceScaler(), WinsorScaler(), ready()).fit(samples(X), samples(Y[:1]))
    assert explain(pipe, samples(X)).explained == "inputs of the model, after WinsorScaler"


# -- doubts and errors ----------------------------------------------------------------------------


def test_too_few_points_are_a_warning():
    def bent():
        return nn.Sequential(LSTM(3, 6), nn.Linear(6, 2), Steep())

    est = fitted(bent)
    with pytest.warns(UserWarning, match=r"1 points.*n_points=4"):
        e = explain(est, X, output=0, n_points=1, baseline="zero")
    assert e.completeness > 1e-4
    assert explain(est, X, output=0, baseline="zero").completeness < 1e-4


def test_many_steps_are_not_run_at_more_and_more_points_and_the_caller_is_told(monkeypatch):
    est = fitted(lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), LSTM(6, 6), nn.Linear(6, 2)))
    # 16 points for 23 steps are tried, 64 would be too many by one evaluation
    monkeypatch.setattr(integrated_gradients, "MOST_EVALUATIONS", 64 * T - 1)
    told = r"16 points on the path and 23 steps; give the last steps only, .*-200:\].* n_points=64"
    with pytest.warns(UserWarning, match=told) as found:
        e = explain(est, X, output=0)
    assert e.n_points == 16
    assert [w.filename for w in found] == [__file__]
    with pytest.warns(UserWarning, match="64 points"):  # who asks for more gets them
        assert explain(est, X, output=0, n_points=64).n_points == 64


class Steep(nn.Module):
    def forward(self, x):
        return torch.sin(3 * x)


class Threshold(nn.Module):
    def forward(self, x):
        return (x > 2).to(x.dtype)


@pytest.mark.slow
def test_thresholds_have_no_gradient():
    def hard():
        return nn.Sequential(Threshold(), nn.Linear(3, 2))

    with pytest.raises(ValueError, match=r"no gradient.*permutation_importance"):
        explain(fitted(hard), X, 0, output=0)
    kernels = SequenceClassifier(cell="kernels", verbose=False).fit(X, LABELS)
    with pytest.raises(TypeError, match=r"CausalKernels.*permutation_importance"):
        explain(kernels, X)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output": 0, "series": 5}, ValueError, "series is 5.* 5 series"),
        ({"output": 0, "step": 23}, ValueError, "step is 23.*0 to 22"),
        ({}, ValueError, r"\[2\] numbers.*output=0"),
        ({"output": 2}, ValueError, r"output is 2.*\[2\]"),
        ({"output": 0, "baseline": "median"}, ValueError, "'mean', 'zero'.*'median'"),
        ({"output": 0, "baseline": np.zeros(2)}, ValueError, r"\(2,\).*3 finite features"),
        ({"output": 0, "baseline": np.zeros((3, 4))}, ValueError, r"of shape \(F,\)"),
        ({"output": 0, "n_points": 0}, ValueError, "n_points.*0"),
    ],
)
def test_arguments_that_do_not_fit(arguments, error, message):
    with pytest.raises(error, match=message):
        explain(fitted(lstm), X, **arguments)


def test_estimators_that_cannot_be_explained():
    with pytest.raises(TypeError, match=r"Ridge.*permutation_importance"):
        explain(Ridge(), X)
    with pytest.raises(NotFittedError):
        explain(EstimatorRegressor(), X)
    integers = RNG.integers(0, 3, size=(1, N, T))

    class Words(nn.Sequential):
        def forward(self, k):
            return super().forward(k[..., 0])

    est = fitted(lambda: Words(nn.Embedding(3, 4), LSTM(4, 2)), integers)
    with pytest.raises(TypeError, match="integer"):
        explain(est, integers, output=0)
