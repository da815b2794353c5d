"""The forms that data may have - native, rows, samples, timesteps - mean the same, and predictions
agree exactly.
"""

import pickle
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceRegressor,
    net2vec,
    samples,
    seqloss,
    timesteps,
)
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn import GRU, LSTM
from fluxutils_py.nn.states import reset
from tests.plain_networks import plain_classifier, plain_regressor

F, G, N, T = 3, 2, 7, 13
SPEC = {"epochs": 2, "batchsize": 4, "seqsize": 5, "shuffle": True, "rebatch": False}
RNG = np.random.default_rng(1)
X = RNG.normal(size=(F, N, T)).astype("float32")
Y = RNG.normal(size=(G, N, T)).astype("float32")
forms = pytest.mark.parametrize(
    "view", [lambda a: a, samples, timesteps], ids=["native", "samples", "timesteps"]
)


def rows(form, a):
    """An (F, N, T) array as the matrix of a form, by NumPy."""
    a = np.asarray(a)
    return {
        "native": lambda: a,
        "samples": lambda: a.transpose(1, 0, 2).reshape(a.shape[1], -1),
        "timesteps": lambda: a.transpose(2, 0, 1).reshape(a.shape[2], -1),
    }[form]()


def net(n_in, n_out, layer=LSTM):
    return nn.Sequential(layer(n_in, 4), nn.Linear(4, n_out))


def make(layer=LSTM, opt=None, **settings):
    spec = {**SPEC, **settings.pop("spec", {})}
    return Estimator(
        partial(net, layer=layer),
        None,
        opt,
        spec,
        **{"random_state": 3, "verbose": False, **settings},
    )


def same(a, b):
    assert torch.equal(net2vec(a), net2vec(b))
    assert a.loss_curve_ == b.loss_curve_
    return True


# -- fit -------------------------------------------------------------------------------------------------


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize("layer", [LSTM, GRU])
@pytest.mark.parametrize(
    "spec", [{}, {"rebatch": True, "batchsize": 32}, {"overlap": 2, "burn_in": 1, "clip": 0.1}]
)
@forms
def test_a_fit_on_a_view_is_that_on_the_array(layer, spec, view):
    est = make(layer, spec=spec).fit(view(X), view(Y))
    native = make(layer, spec=spec).fit(X, Y)
    assert same(est, native)
    assert torch.equal(est.grad_, native.grad_)


@pytest.mark.parametrize(
    "mixed", [(samples, lambda y: y), (lambda x: x, samples), (lambda x: x, timesteps)]
)
def test_views_and_arrays_may_be_mixed(mixed):
    of_x, of_y = mixed
    assert same(make().fit(of_x(X), of_y(Y)), make().fit(X, Y))


@pytest.mark.slow
def test_the_rows_of_a_view_are_trained_on():
    which = [5, 0, 3, 6, 2]
    assert same(
        make().fit(samples(X)[which], samples(Y)[which]), make().fit(X[:, which], Y[:, which])
    )
    assert same(
        make().fit(timesteps(X)[2:11], timesteps(Y)[2:11]), make().fit(X[:, :, 2:11], Y[:, :, 2:11])
    )


@pytest.mark.parametrize("context", [0, 5])
def test_steps_with_gaps_are_trained_on_as_series_of_their_own(context):
    """Whatever the context: training starts every stretch from zero."""
    steps = np.array([1, 2, 3, 4, 6, 7, 8, 9])
    est = make().fit(timesteps(X, context)[steps], timesteps(Y)[steps])
    pieces = [np.stack([a[:, :, 1:5], a[:, :, 6:10]], 2).reshape(len(a), 2 * N, 4) for a in (X, Y)]
    assert same(est, make().fit(*pieces))


@pytest.mark.slow
def test_stretches_of_unequal_length_are_padded_series():
    steps = np.array([0, 1, 2, 3, 4, 5, 8, 9, 12])
    est = make().fit(timesteps(X)[steps], timesteps(Y)[steps])
    xs, ys = (np.zeros((len(a), N, 3, 6), "float32") for a in (X, Y))
    for a, padded in ((X, xs), (Y, ys)):
        for i, (start, stop) in enumerate(((0, 6), (8, 10), (12, 13))):
            padded[:, :, i, : stop - start] = a[:, :, start:stop]
    padded = [a.reshape(len(a), N * 3, 6) for a in (xs, ys)]
    assert same(est, make().fit(*padded, lengths=np.tile([6, 2, 1], N)))


def test_stretches_against_a_plain_loop():
    steps = np.array([0, 1, 2, 3, 7, 8, 9, 12])
    x, y = X.astype(float), Y.astype(float)
    spec = {"epochs": 3, "batchsize": 100, "seqsize": 3, "shuffle": False}
    est = make(opt=partial(SGD, lr=0.1), spec=spec, callbacks=(first := First()))
    est.fit(timesteps(x)[steps], timesteps(y)[steps])
    rnn, head = nn.LSTM(F, 4, dtype=torch.double), nn.Linear(4, G, dtype=torch.double)
    model = nn.ModuleList([rnn, head])
    torch.nn.utils.vector_to_parameters(first.weights, model.parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    stretches = [
        torch.tensor(np.concatenate([x, y])[:, :, a:b].transpose(2, 1, 0))
        for a, b in ((0, 4), (7, 10), (12, 13))
    ]
    for _ in range(3):
        states = [None] * 3
        for start in (0, 3):  # windows of 3 steps, all series and stretches at once
            loss, count = 0.0, 0
            for i, s in enumerate(stretches):
                window = s[start : start + 3]
                if len(window):
                    out, state = rnn(window[:, :, :F], states[i])
                    states[i] = tuple(v.detach() for v in state)
                    loss = loss + ((head(out) - window[:, :, F:]) ** 2).mean(-1).sum()
                    count += window.shape[0] * N
            opt.zero_grad()
            (loss / count).backward()
            opt.step()
    assert torch.allclose(
        net2vec(est), torch.nn.utils.parameters_to_vector(model.parameters()), rtol=0, atol=1e-12
    )


class First:
    """The initial weights."""

    def on_start(self, loop):
        self.weights = net2vec(loop.shared_data["model"]).clone()


@pytest.mark.slow
@forms
def test_partial_fit_and_warm_start_go_on(view):
    x, y = view(X), view(Y)
    once = make(spec={"epochs": 3}).fit(X, Y)
    steps = make(spec={"epochs": 3})
    for _ in range(3):
        steps.partial_fit(x, y)
    warm = make(spec={"epochs": 1}, warm_start=True)
    for _ in range(3):
        warm.fit(x, y)
    assert len(once.loss_curve_) == len(steps.loss_curve_) == len(warm.loss_curve_) == 3
    native = make(spec={"epochs": 3})
    native.partial_fit(X, Y).partial_fit(X, Y).partial_fit(X, Y)
    assert same(steps, native)
    assert torch.equal(net2vec(warm), net2vec(steps))


@forms
def test_another_part_of_the_data_may_come_next(view):
    """As when data stream in: another number of series or steps, the same features."""
    est = make().fit(view(X), view(Y))
    x, y = X[:, 1:5, 2:9], Y[:, 1:5, 2:9]
    assert same(est.partial_fit(view(x), view(y)), make().fit(X, Y).partial_fit(x, y))
    assert est.predict(view(x)).shape == rows(view_name(view), y).shape


def view_name(view):
    return {samples: "samples", timesteps: "timesteps"}.get(view, "native")


@pytest.mark.slow
@forms
def test_validation_data_may_be_views(view):
    v = slice(2, 6)
    xv, yv = X[:, v], Y[:, v]
    est = make(spec={"patience": 1, "epochs": 4}).fit(
        view(X), view(Y), validation_data=(view(xv), view(yv))
    )
    native = make(spec={"patience": 1, "epochs": 4}).fit(X, Y, validation_data=(xv, yv))
    assert est.validation_loss_curve_ == native.validation_loss_curve_
    assert same(est, native)
    out = torch.tensor(est.predict(xv))
    last = (
        est.validation_loss_curve_[-1]
        if len(est.validation_loss_curve_) == 4
        else min(est.validation_loss_curve_)
    )
    best = min(est.validation_loss_curve_)
    assert float(mse_loss(out, torch.tensor(yv))) == pytest.approx(best, rel=1e-6)
    assert last >= best


# -- predict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [LSTM, GRU])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fitted", ["native", "samples", "timesteps"])
def test_predictions_agree_exactly(layer, dtype, fitted):
    x, y = X.astype(dtype), Y.astype(dtype)
    view = {"native": lambda a: a, "samples": samples, "timesteps": timesteps}[fitted]
    est = make(layer).fit(view(x), view(y))
    native = est.predict(x)
    assert native.shape == (G, N, T)
    assert native.dtype == dtype
    assert np.array_equal(est.predict(samples(x)), rows("samples", native))
    assert np.array_equal(est.predict(timesteps(x)), rows("timesteps", native))
    assert (
        est.score(samples(x), samples(y))
        == est.score(timesteps(x), timesteps(y))
        == est.score(x, y)
    )
    out = np.zeros((G, N, T), dtype)
    assert est.predict(samples(x), out) is out
    assert np.array_equal(out, native)
    assert np.array_equal(
        est.predict(samples(x)[[4, 1]]), rows("samples", est.predict(x[:, [4, 1]]))
    )


@pytest.mark.parametrize("context", [1, 4, 5, 6, 13, 100])
def test_a_fold_in_time_is_warmed_by_the_steps_before_it(context):
    est = make().fit(X, Y)
    whole = est.predict(X)
    for start, stop in ((0, 4), (3, 9), (6, 13), (12, 13)):
        fold = est.predict(timesteps(X, context)[start:stop])
        lead = min(context, start)
        assert np.array_equal(
            fold, rows("timesteps", est.predict(X[:, :, start - lead : stop])[:, :, lead:])
        )
        if context >= start:
            assert np.array_equal(fold, rows("timesteps", whole[:, :, start:stop]))
        else:
            assert not np.array_equal(fold, rows("timesteps", whole[:, :, start:stop]))


def test_every_stretch_is_warmed_by_the_steps_before_it():
    """Also by those that the split has put elsewhere, and by those of another stretch."""
    est = make().fit(X, Y)
    steps = np.array([0, 1, 4, 5, 6, 11])
    found = est.predict(timesteps(X, 2)[steps])
    pieces = [
        est.predict(X[:, :, a - lead : b])[:, :, lead:]
        for a, b, lead in ((0, 2, 0), (4, 7, 2), (11, 12, 2))
    ]
    assert np.array_equal(found, rows("timesteps", np.concatenate(pieces, 2)))
    cold = est.predict(timesteps(X)[steps])
    pieces = [est.predict(X[:, :, a:b]) for a, b in ((0, 2), (4, 7), (11, 12))]
    assert np.array_equal(cold, rows("timesteps", np.concatenate(pieces, 2)))


def test_a_score_of_stretches_is_that_of_their_predictions():
    est = make().fit(X, Y)
    steps = np.array([0, 1, 4, 5, 6, 11])
    v = timesteps(X, 2)[steps]
    y, out = (
        Y[:, :, steps].reshape(G, -1),
        est.predict(v).reshape(6, G, N).transpose(1, 2, 0).reshape(G, -1),
    )
    wanted = 1 - ((y - out) ** 2).sum() / ((y - y.mean(1, keepdims=True)) ** 2).sum()
    assert est.score(v, timesteps(Y)[steps]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("view", [samples, timesteps])
def test_a_state_goes_on_over_views(view):
    est = make().fit(X, Y)
    a, b = X[:, :, :6], X[:, :, 6:]
    first, state = est.predict(view(a), return_state=True)
    second, end = est.predict(view(b), state=state, return_state=True)
    whole, wanted = est.predict(X, return_state=True)
    np.testing.assert_allclose(first, rows(view.__name__, whole[:, :, :6]), rtol=0, atol=2e-6)
    np.testing.assert_allclose(second, rows(view.__name__, whole[:, :, 6:]), rtol=0, atol=2e-6)
    assert all(torch.allclose(u, v, rtol=0, atol=2e-6) for u, v in zip(end, wanted, strict=True))


def test_a_state_takes_the_place_of_the_context():
    est = make().fit(X, Y)
    state = est.predict(X[:, :, :6], return_state=True)[1]
    found = est.predict(timesteps(X, 3)[6:], state=state)
    np.testing.assert_allclose(
        found, rows("timesteps", est.predict(X)[:, :, 6:]), rtol=0, atol=2e-6
    )
    end = est.predict(timesteps(X, 3)[np.array([0, 1, 7, 8])], return_state=True)[1]
    wanted = est.predict(X[:, :, 4:9], return_state=True)[1]
    assert all(torch.allclose(u, v, rtol=0, atol=2e-6) for u, v in zip(end, wanted, strict=True))
    with pytest.raises(ValueError, match=(
        r"^state .*1 gaps"
    )):  # fmt: skip
        est.predict(timesteps(X)[np.array([0, 1, 7, 8])], state=state)


@pytest.mark.slow
def test_a_matrix_is_taken_for_the_view_that_it_looks_like():
    """Tools such as permutation_importance make a matrix of a view."""
    est = make().fit(samples(X), samples(Y))
    found = est.predict(rows("samples", X[:, 2:5]))
    assert np.array_equal(found, rows("samples", est.predict(X[:, 2:5])))
    assert est.n_features_in_ == F * T
    est = make().fit(timesteps(X), timesteps(Y))
    assert est.n_features_in_ == F * N
    assert np.array_equal(
        est.predict(rows("timesteps", X[:, :, 3:8])), rows("timesteps", est.predict(X[:, :, 3:8]))
    )
    assert est.score(rows("timesteps", X), rows("timesteps", Y)) == pytest.approx(
        est.score(X, Y), rel=1e-6
    )


def test_other_lengths_than_those_of_training_may_be_predicted():
    est = make().fit(samples(X), samples(Y))
    assert np.array_equal(
        est.predict(samples(X[:, :, :5])), rows("samples", est.predict(X)[:, :, :5])
    )
    assert np.array_equal(
        est.predict(rows("samples", X[:, :, :5])), rows("samples", est.predict(X)[:, :, :5])
    )


# -- matrices --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_are_series_of_one_step():
    x, y = X[:, 0].T, Y[:, 0].T  # (T samples, F), (T, G)
    est = make().fit(x, y)
    native = make().fit(x.T[:, :, None], y.T[:, :, None])
    assert same(est, native)
    assert np.array_equal(est.predict(x), native.predict(x.T[:, :, None])[:, :, 0].T)
    assert est.n_features_in_ == F
    vector = make().fit(x, y[:, 0])
    assert vector.predict(x).shape == (T,)
    assert np.array_equal(vector.predict(x), make().fit(x, y[:, :1]).predict(x)[:, 0])


@pytest.mark.few
@pytest.mark.parametrize("y", ["one", "two", "step"])
def test_matrices_of_n_timesteps_are_samples(y):
    x = rows("samples", X)
    target = "step" if y == "step" else "auto"
    settings = {
        "hidden_size": 4,
        "epochs": 2,
        "batchsize": 4,
        "seqsize": 5,
        "random_state": 0,
        "target": target,
    }
    targets = {"one": Y[0, :, -1], "two": Y[:, :, -1].T, "step": rows("samples", Y)}[y]
    est = plain_regressor(n_timesteps=T, **settings).fit(x, targets)
    view = plain_regressor(**settings).fit(samples(X), targets)
    assert same(est, view)
    assert est.predict(x).shape == targets.shape
    assert np.array_equal(est.predict(x), view.predict(samples(X)))
    assert est.n_features_in_ == F * T
    if y == "step":
        assert same(est, plain_regressor(**settings).fit(X, Y))


def test_matrices_that_are_not_n_timesteps():
    with pytest.raises(ShapeError) as info:
        plain_regressor(n_timesteps=4).fit(np.zeros((5, 9)), np.zeros(5))
    assert all(part in str(info.value) for part in ("9 columns", "4 steps (n_timesteps)"))


# -- one target per series -------------------------------------------------------------------------------


@pytest.mark.parametrize("y", [Y[0, :, -1], Y[:, :, -1].T, Y[0, :, -1].tolist(), torch.tensor(Y[:, :, -1].T),
                               pd.Series(Y[0, :, -1], index=range(3, 10)), pd.DataFrame(Y[:, :, -1].T),
                               (10 * Y[0, :, -1]).astype(int)],
                         ids=["vector", "matrix", "list", "torch", "Series", "frame", "int"])  # fmt: skip
@pytest.mark.parametrize("view", [lambda a: a, samples], ids=["native", "samples"])
def test_one_target_per_series_is_one_at_the_last_step(view, y):
    values = (
        np.asarray(y, dtype="float32" if np.asarray(y).dtype == "float32" else float)
        .reshape(N, -1)
        .T
    )
    full = np.full((len(values), N, T), np.nan, values.dtype)
    full[:, :, -1] = values
    spec = {"seqsize": None}
    est = make(spec=spec).fit(view(X), y)
    assert torch.allclose(net2vec(est), net2vec(make(spec=spec).fit(X, full)), rtol=0, atol=1e-6)
    found = est.predict(view(X))
    assert found.shape == np.asarray(y).shape
    assert est.n_outputs_ == len(values)
    out, wanted = found.reshape(N, -1), np.asarray(values).T
    r2 = 1 - ((out - wanted) ** 2).sum() / ((wanted - wanted.mean(0)) ** 2).sum()
    assert est.score(view(X), y) == pytest.approx(r2, rel=1e-5)
    assert np.array_equal(est.predict(samples(X)[[3, 1]]), est.predict(X[:, [3, 1]]))


@pytest.mark.parametrize("seqsize", [4, 100])
@pytest.mark.parametrize("lengths", [None, [13, 5, 1, 8, 13, 4, 9]])
def test_one_target_per_series_against_a_plain_loop(seqsize, lengths):
    """The state is carried through windows without a loss, and the loss is that of the last live
    steps.
    """
    x, y = X.astype(float), Y[:, :, 0].astype(float).T
    spec = {"epochs": 3, "batchsize": 100, "seqsize": seqsize, "shuffle": False, "rebatch": True}
    est = make(opt=partial(SGD, lr=0.1), spec=spec, callbacks=(first := First()))
    est.fit(x, y, lengths=lengths)
    rnn, head = nn.LSTM(F, 4, dtype=torch.double), nn.Linear(4, G, dtype=torch.double)
    model = nn.ModuleList([rnn, head])
    torch.nn.utils.vector_to_parameters(first.weights, model.parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    last = np.full(N, T - 1) if lengths is None else np.array(lengths) - 1
    xs, ys = torch.tensor(x.transpose(2, 1, 0)), torch.tensor(y)
    for _ in range(3):
        state = None
        for start in range(0, T, seqsize):
            out, state = rnn(xs[start : start + seqsize], state)
            state = tuple(s.detach() for s in state)
            here = [n for n in range(N) if start <= last[n] < start + seqsize]
            if here:
                found = torch.stack([head(out[last[n] - start, n]) for n in here])
                opt.zero_grad()
                mse_loss(found, ys[here]).backward()
                opt.step()
    assert torch.allclose(
        net2vec(est), torch.nn.utils.parameters_to_vector(model.parameters()), rtol=0, atol=1e-12
    )
    with torch.no_grad():
        wanted = [head(rnn(xs[: k + 1, n])[0][-1]).numpy() for n, k in enumerate(last)]
    assert np.allclose(est.predict(x, lengths=lengths), wanted, rtol=0, atol=1e-12)


def test_weights_of_series_weigh_their_targets():
    y, w = Y[0, :, -1], np.array([1, 0, 2, 3, 0, 1, 1.0])
    kept = np.repeat(np.arange(N), w.astype(int))
    spec = {"batchsize": 100, "seqsize": None, "shuffle": False}
    est = make(spec=spec, opt=partial(SGD, lr=0.1)).fit(samples(X), y, w)
    repeated = make(spec=spec, opt=partial(SGD, lr=0.1)).fit(samples(X)[kept], y[kept])
    assert torch.allclose(net2vec(est), net2vec(repeated), rtol=0, atol=1e-6)


# -- weights ---------------------------------------------------------------------------------------------

W = np.random.default_rng(5).uniform(0, 2, (N, T)) * (np.random.default_rng(6).random((N, T)) > 0.2)


@pytest.mark.few
@forms
@pytest.mark.parametrize("per", ["series", "step", "frame", "list", "torch", "float32", "integers"])
def test_weights_go_with_rows(view, per):
    """Oracle: the fit on arrays with weights of every step, (N, T)."""
    name = view_name(view)
    w = {
        "series": W[:, :1].repeat(T, 1),
        "integers": (W * 3).astype(int),
        "float32": W.astype("float32"),
    }.get(per, W)
    if name == "timesteps":
        w = W[:1].repeat(N, 0) if per == "series" else w
        given = w[0] if per == "series" else w.T
    else:
        given = w[:, 0] if per == "series" else w
    given = {"frame": pd.DataFrame, "list": lambda a: a.tolist(), "torch": torch.tensor}.get(
        per, lambda a: a
    )(given)
    kept = np.array(np.asarray(given))
    est = make().fit(view(X), view(Y), given)
    assert torch.allclose(net2vec(est), net2vec(make().fit(X, Y, w)), rtol=0, atol=1e-7)
    assert np.array_equal(np.asarray(given), kept)
    assert est.score(view(X), view(Y), given) == pytest.approx(est.score(X, Y, w), rel=1e-6)


def test_constant_weights_of_steps_are_no_weights():
    est = make().fit(timesteps(X), timesteps(Y), np.full(T, 3))
    assert torch.allclose(net2vec(est), net2vec(make().fit(X, Y)), rtol=0, atol=1e-7)


@pytest.mark.slow
def test_steps_of_weight_0_do_not_count():
    w = np.ones(T)
    w[[0, 5, 12]] = 0
    y = Y.copy()
    y[:, :, w == 0] = 1e6
    est = make().fit(timesteps(X), timesteps(y), w)
    assert same(est, make().fit(timesteps(X), timesteps(Y), w))


def test_rows_of_weight_0_are_not_there():
    x, y, w = X[:, 0].T, Y[:, 0].T, np.array([1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1])
    spec = {"shuffle": False}
    est, fewer = make(spec=spec).fit(x, y, w), make(spec=spec).fit(x[w > 0], y[w > 0])
    assert torch.allclose(net2vec(est), net2vec(fewer), rtol=0, atol=1e-7)  # the same minibatches


@forms
@pytest.mark.parametrize(("w", "error", "message"), [
    (np.ones(5), ShapeError, None),
    (np.ones((T, N + 1)), ShapeError, None),
    (np.zeros((1, N, T)), DataError,
     "sample_weight leaves nothing to learn from: every step has weight 0 or no target"),
    (np.full((1, N, T), -1.0), DataError,
     "sample_weight must be finite and not negative; use 0 for steps that should not count"),
    (np.full((1, N, T), np.nan), DataError,
     "sample_weight must be finite and not negative; use 0 for steps that should not count"),
    (np.full((1, N, T), "a"), DataError,
     "sample_weight must hold real numbers, got dtype <U1; convert it, as with astype"),
])  # fmt: skip
def test_weights_that_do_not_fit(view, w, error, message):
    if message is None:
        message = f"sample_weight has shape {w.shape}; expected " + (
            f"({T},), ({T}, {N}) or (1, {N}, {T}) for {T} time steps of {N} series"
            if view is timesteps
            else f"({N},), ({N}, {T}) or (1, {N}, {T}) for {N} series of {T} time steps"
        )
    with pytest.raises(error) as info:
        make().fit(view(X), view(Y), w)
    assert str(info.value) == message


# -- other things ----------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("per_series", [False, True])
def test_a_pickled_estimator_predicts_the_same_and_goes_on(view, per_series):
    y = Y[0, :, -1] if per_series and view is not timesteps else view(Y)
    est = make().fit(view(X), y)
    again = pickle.loads(pickle.dumps(est))
    assert np.array_equal(again.predict(view(X)), est.predict(view(X)))
    assert same(again.partial_fit(view(X), y), est.partial_fit(view(X), y))


@pytest.mark.slow
@forms
def test_the_same_random_state_gives_the_same_and_no_global_generator_moves(view):
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002  the one that must not move
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    est = plain_regressor(
        4, num_layers=2, dropout=0.3, epochs=2, shuffle=True, batchsize=3, random_state=5
    )
    first, second = net2vec(est.fit(view(X), view(Y))), net2vec(est.fit(view(X), view(Y)))
    other = net2vec(est.set_params(random_state=6).fit(view(X), view(Y)))
    est.predict(view(X))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002


def test_features_that_are_not_those_of_the_fit():
    est = make().fit(samples(X), samples(Y))
    for x in (X[:2], samples(X[:2]), timesteps(X[:2])):
        with pytest.raises(ShapeError) as info:
            est.predict(x)
        assert all(
            part in str(info.value)
            for part in ("x has 2 features", "Estimator was fitted on 3", "timesteps(x)")
        )
    with pytest.raises(ValueError, match=(
        r"^X has 40 .*39 .*: 3 .*13 steps$"
    )):  # fmt: skip
        est.predict(np.zeros((2, 40)))


def test_views_that_are_split_differently():
    with pytest.raises(
        ShapeError,
        match=r"^x is samples\(.*y is timesteps\(",
    ):
        make().fit(samples(X), timesteps(Y))
    with pytest.raises(ShapeError, match=r"^x has 7 series and y has 3 "):
        make().fit(samples(X), samples(Y)[:3])
    with pytest.raises(ValueError, match=r"inconsistent .*samples.*\[7, 4\]$"):
        make().fit(samples(X), Y[0, :4, 0])
    with pytest.raises(
        ValueError,
        match=r"0 sample\(s\) .*\(0, 39\).*minimum of 1",
    ):
        make().fit(samples(X)[[]], samples(Y)[[]])
    with pytest.raises(
        ValueError,
        match=r"^starts and lengths .*timesteps\(x\)",
    ):
        make().fit(timesteps(X), timesteps(Y), lengths=[3] * N)
    with pytest.raises(ShapeError, match=(
        r"^y has 1 .*7 series; .*timesteps\(y\)$"
    )):  # fmt: skip
        make().fit(timesteps(X), Y[0, 0])


@pytest.mark.slow
def test_plain_targets_of_time_steps():
    """(T, G * N) as timesteps(y) looks; a vector for one series."""
    assert same(make().fit(timesteps(X), rows("timesteps", Y)), make().fit(X, Y))
    one = make().fit(timesteps(X[:, :1]), Y[0, 0])
    assert torch.equal(net2vec(one), net2vec(make().fit(X[:, :1], Y[:1, :1])))
    assert one.predict(timesteps(X[:, :1])[4:]).shape == (T - 4,)


# -- files -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", ["samples", "per series", "timesteps", "rows", "frame", "strings", "balanced",
                                  "weights", "per step strings", "regressor", "classifier", "gru"])  # fmt: skip
def test_what_is_saved_is_loaded(case, tmp_path):
    small = {"hidden_size": 4, "epochs": 2, "batchsize": 4, "seqsize": 5, "random_state": 0}
    labels = np.where(Y[0, :, -1] > 0, "up", "down")
    spec = {"epochs": 2, "batchsize": 4, "seqsize": 5}
    matrix = rows("samples", X)
    est, x, y = {
        "samples": lambda: (plain_regressor(**small), samples(X), samples(Y)),
        "per series": lambda: (plain_regressor(**small), X, Y[0, :, -1]),
        "timesteps": lambda: (plain_regressor(**small), timesteps(X), timesteps(Y)),
        "rows": lambda: (plain_regressor(n_timesteps=T, **small), matrix, Y[0, :, -1]),
        "frame": lambda: (
            plain_regressor(**small),
            pd.DataFrame(X[:, 0].T, columns=list("abc")),
            Y[0, 0],
        ),
        "strings": lambda: (plain_classifier(**small), samples(X), labels),
        "balanced": lambda: (plain_classifier(class_weight="balanced", **small), X, labels),
        "weights": lambda: (
            plain_classifier(class_weight={"up": 2.0, "down": 1.0}, **small),
            X,
            labels,
        ),
        "per step strings": lambda: (
            plain_classifier(**small),
            X,
            np.where(Y[:1] > 0, "up", "down"),
        ),
        "regressor": lambda: (EstimatorRegressor(spec=spec, random_state=0), X, Y),
        "classifier": lambda: (
            EstimatorClassifier(spec=spec, random_state=0),
            X,
            np.sign(Y[:1]).astype(int),
        ),
        "gru": lambda: (plain_regressor(cell="gru", num_layers=2, dropout=0.1, **small), X, Y),
    }[case]()
    est.fit(x, y)
    est.save(tmp_path / "est")
    again = type(est).load(tmp_path / "est")
    assert type(again) is type(est)
    assert repr(again) == repr(est)
    assert np.array_equal(again.predict(x), est.predict(x))
    assert again.n_features_in_ == est.n_features_in_
    if case == "frame":
        assert again.feature_names_in_.tolist() == ["a", "b", "c"]
        assert again.feature_names_in_.dtype == object
    if hasattr(est, "classes_"):
        assert again.classes_.tolist() == est.classes_.tolist()
        assert again.classes_.dtype == est.classes_.dtype
        assert np.array_equal(again.predict_proba(x), est.predict_proba(x))
    assert again.score(x, y) == est.score(x, y)
    assert same(again.partial_fit(x, y), est.partial_fit(x, y))
    assert np.array_equal(again.predict(x), est.predict(x))


@pytest.mark.slow
def test_a_mean_loss_of_the_users_own_needs_no_weights_for_views():
    est = Estimator(net, seqloss(mse_loss), None, SPEC, random_state=0)
    assert torch.equal(net2vec(est.fit(samples(X), samples(Y))), net2vec(est.fit(X, Y)))

    def plain(model, xs, ys):
        reset(model)
        return mse_loss(model(xs), ys)

    Estimator(net, plain, None, SPEC, random_state=0).fit(samples(X), samples(Y))
    with pytest.raises(ValueError, match=(
        r"^y .*plain .*loss\(model, xs, ys, ws\)"
    )):  # fmt: skip
        Estimator(net, plain, None, SPEC, random_state=0).fit(samples(X), Y[0, :, 0])


def test_a_cell_that_is_a_class_is_asked_for(tmp_path):
    est = plain_regressor(4, cell=GRU, epochs=1, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    with pytest.raises(ValueError, match=(
        r" cell .*recurrent.GRU.*load\(path, cell"
    )):  # fmt: skip
        SequenceRegressor.load(tmp_path / "est")
    assert np.array_equal(
        SequenceRegressor.load(tmp_path / "est", cell=GRU).predict(X), est.predict(X)
    )
