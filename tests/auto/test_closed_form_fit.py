"""Models of fixed features fitted on windows, against features of whole series and ridges."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from fluxutils_py import SequenceRegressor, reset
from fluxutils_py.auto import closed_form_fit
from fluxutils_py.auto.closed_form import Rows, fit_closed_form
from fluxutils_py.auto.closed_form_fit import ClosedFormTask, fit_closed_form_parts
from fluxutils_py.data import SampleWeight, SequenceWindows
from fluxutils_py.data.segments import Segments
from fluxutils_py.inputs import as_series
from fluxutils_py.nn.closed_form_model import kernel_model, lag_model
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.minibatch import TensorBatches

F, N, T = 2, 13, 31
LENGTHS = np.array([31, 20, 5, 31, 18, 9, 31, 20, 30, 7, 31, 12, 25])
CPU = torch.device("cpu")


@pytest.fixture
def x():
    rng = np.random.default_rng(0)
    return rng.normal(size=(F, N, T)) * [[[3.0]], [[0.5]]] + [[[40.0]], [[-1.0]]]


def batches(x, y, weight=None, batchsize=5, seqsize=7, lengths=None, burn_in=0):
    windows = SequenceWindows(
        as_series(x, "x"),
        as_series(y, "y"),
        weight,
        batchsize=batchsize,
        seqsize=seqsize,
        burn_in=burn_in,
        segments=None if lengths is None else Segments.from_lengths(N, T, lengths),
    )
    return TensorBatches(windows, torch.float64, CPU)


def last_step_weight(lengths):
    weight = np.zeros((N, T))
    weight[np.arange(N), lengths - 1] = 1
    return SampleWeight(weight, N, T)


def fitted(model, *args, **settings):
    per_series = settings.pop("per_series", False)
    n_classes = settings.pop("n_classes", None)
    made = batches(*args, **settings)
    head = fit_closed_form_parts(model, made, RankGroup(), ClosedFormTask(n_classes, per_series))
    return model, head


def standardised(x, lengths):
    live = np.concatenate([x[:, i, :n] for i, n in enumerate(lengths)], axis=1)
    return live.mean(1), live.std(1)


def test_inputs_are_standardised_over_existing_steps(x):
    y = np.zeros((1, N, T))
    model, _ = fitted(lag_model(F, 1, 2).double(), x, y, lengths=LENGTHS)
    mean, scale = standardised(x, LENGTHS)
    np.testing.assert_allclose(model.scale.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(model.scale.scale, scale, rtol=1e-12)


def lagged(x, lengths, n_lags, burn_in=0):
    with_loss = np.concatenate([x[:, i, burn_in:n] for i, n in enumerate(lengths)], axis=1)
    mean, scale = with_loss.mean(1), with_loss.std(1)
    z = (x - mean[:, None, None]) / scale[:, None, None]
    rows = []
    for i, n in enumerate(lengths):
        past = np.concatenate([np.zeros((F, n_lags - 1)), z[:, i, :n]], 1)
        for t in range(n):
            rows.append(np.concatenate([past[:, t + n_lags - 1 - k] for k in range(n_lags)]))
    return np.array(rows)


@pytest.mark.parametrize("burn_in", [0, 4])
@pytest.mark.parametrize(("batchsize", "seqsize"), [(5, 7), (13, 31), (4, 1)])
def test_a_linear_model_of_lags_is_the_ridge_on_lagged_rows(x, batchsize, seqsize, burn_in):
    rng = np.random.default_rng(1)
    y = x.sum(0, keepdims=True) * 0.3 + np.roll(x[:1], 1, 2) + rng.normal(size=(1, N, T))
    model, head = fitted(
        lag_model(F, 1, 3).double(),
        x,
        y,
        batchsize=batchsize,
        seqsize=seqsize,
        lengths=LENGTHS,
        burn_in=burn_in,
    )
    rows = lagged(x, LENGTHS, 3, burn_in)
    counts = np.concatenate([np.arange(n) >= burn_in for n in LENGTHS])
    targets = np.concatenate([y[0, i, :n] for i, n in enumerate(LENGTHS)])
    deviation = np.sqrt(rows[counts].var(0) + 1e-6)
    z = (rows - rows[counts].mean(0)) / deviation / np.sqrt(rows.shape[1])
    z = z * model.relative[0].numpy()
    expected = Ridge(np.asarray(head.alpha)).fit(z[counts], targets[counts]).predict(z)
    reset(model)
    got = model(torch.from_numpy(x).permute(2, 1, 0)).detach().numpy()[..., 0]
    got = np.concatenate([got[:n, i] for i, n in enumerate(LENGTHS)])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-7)


def kernel_features(model, x, lengths):
    """The features at the end of each series, each run alone."""
    rows = []
    for i, n in enumerate(lengths):
        reset(model)
        rows.append(model.features(torch.from_numpy(x[:, i : i + 1, :n]).permute(2, 1, 0))[-1, 0])
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("batchsize", "seqsize"), [(5, 7), (13, 31)])
def test_labels_of_series_are_learnt_from_features_at_their_ends(x, batchsize, seqsize):
    labels = np.arange(N) % 3
    x = x + labels[:, None]
    y = np.repeat(labels[None, :, None], T, 2)
    torch.manual_seed(0)
    model, head = fitted(
        kernel_model(F, 3, 340).double(),
        x,
        y,
        last_step_weight(LENGTHS),
        batchsize=batchsize,
        seqsize=seqsize,
        lengths=LENGTHS,
        per_series=True,
        n_classes=3,
    )
    features = kernel_features(model, x, LENGTHS)
    targets = torch.from_numpy(2.0 * np.eye(3)[labels] - 1)
    rows = Rows(features, targets, torch.ones(N), torch.arange(N))
    expected = fit_closed_form([rows], N, is_classifier=True, relative=model.relative, floor=1e-3)
    assert head.alpha == pytest.approx(expected.alpha)
    outputs = features @ expected.weight.T + expected.bias
    got = model.head(features)
    torch.testing.assert_close(got, expected.temperature * outputs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_biases_are_those_of_the_standardised_series(x):
    torch.manual_seed(0)
    model, _ = fitted(
        kernel_model(F, 1, 340).double(),
        x,
        x[:1],
        last_step_weight(LENGTHS),
        lengths=LENGTHS,
        per_series=True,
    )
    mean, scale = standardised(x, LENGTHS)
    z = torch.from_numpy((x - mean[:, None, None]) / scale[:, None, None])
    before = model.layers[0].module.biases.clone()
    model.layers[0].fit_biases(z, LENGTHS)
    torch.testing.assert_close(model.layers[0].module.biases, before, rtol=0, atol=1e-9)


def test_rows_are_counted_where_only_some_steps_have_a_target():
    """Of 9000 steps, 1800 have a target: all of these are left out in turn."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 30, 300))
    y = np.where(np.arange(300) % 5 == 3, x + rng.normal(size=x.shape), np.nan)
    model = lag_model(1, 1, 2).double()
    _, head = fitted(model, x, y, batchsize=30, seqsize=100)
    assert len(head.left_out) == 1800


def test_of_large_data_evenly_spread_pieces_are_read(monkeypatch):
    """As if all was read, and the state had run through all."""
    monkeypatch.setattr(closed_form_fit, "MOST_READ", 20_000)
    monkeypatch.setattr(closed_form_fit, "PIECE", 1000)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 30_000)).astype("float32")
    y = x[:1] + 0.5 * np.roll(x[1:], 3, 2)
    counted = []
    plain = closed_form_fit.CountingRows.add

    def add(self, steps, weights):
        counted.append(steps.numpy())
        plain(self, steps, weights)

    monkeypatch.setattr(closed_form_fit.CountingRows, "add", add)
    est = SequenceRegressor(cell="linear").fit(x, y + 0.1 * rng.normal(size=y.shape))
    series, step = np.divmod(np.concatenate(counted), closed_form_fit.MOST_LENGTH)
    assert 14_000 < len(step) < 22_000
    assert np.unique(series).tolist() == [0, 1, 2]
    pieces = np.unique(series * 30 + step // 1000)
    assert np.diff(pieces).max() <= 5  # of 90, every fourth or so
    assert (step % 1000 >= closed_form_fit.WARM_UP).all()
    np.testing.assert_allclose(est.predict(x)[:, :, 3:], y[:, :, 3:], atol=0.05)


def test_of_many_short_series_some_are_read(monkeypatch):
    monkeypatch.setattr(closed_form_fit, "MOST_READ", 1000)
    x = np.random.default_rng(0).normal(size=(1, 100, 40))
    est = SequenceRegressor(cell="linear").fit(x, 2 * x)
    scale = est.model_.scale
    read = x[0, np.linspace(0, 99, 25).astype(int)]
    np.testing.assert_allclose(scale.mean, read.mean(), rtol=0, atol=1e-9)
