"""The loss and the gradient of data without an update, against a loop by hand."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.parameters import net2grad
from tests.plain_networks import plain_classifier, plain_regressor

F, G, N, T = 3, 2, 37, 43
RNG = np.random.default_rng(7)
X, Y = RNG.normal(size=(F, N, T)), RNG.normal(size=(G, N, T))


def fitted(seqsize=10, batchsize=8, dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(F, 5), nn.Dropout(dropout), nn.Linear(5, G)).double()
    spec = Spec(epochs=1, batchsize=batchsize, seqsize=seqsize, rebatch=False)
    return Estimator(
        model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), spec, verbose=False
    ).fit(X, Y)


def by_hand(model, batchsize, seqsize):
    """Mean loss over steps and mean gradient over windows, with the state carried by torch's own
    LSTM.
    """
    rnn, head = model[0].module, model[2]
    losses, steps, gradients = [], [], []
    for n in range(0, N, batchsize):
        state = None
        for t in range(0, T, seqsize):
            x = (
                torch.from_numpy(X[:, n : n + batchsize, t : t + seqsize])
                .permute(2, 1, 0)
                .contiguous()
            )
            y = torch.from_numpy(Y[:, n : n + batchsize, t : t + seqsize]).permute(2, 1, 0)
            hidden, state = rnn(x, state)
            state = tuple(s.detach() for s in state)
            loss = ((head(hidden) - y) ** 2).mean()
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            steps.append(y.shape[0] * y.shape[1])
            gradients.append(torch.cat([p.grad.ravel() for p in model.parameters()]))
    return np.average(losses, weights=steps), torch.stack(gradients).mean(0)


@pytest.mark.few
@pytest.mark.parametrize(("batchsize", "seqsize"), [(8, 10), (64, 43)])
def test_loss_and_gradient_are_those_of_a_loop_by_hand(batchsize, seqsize):
    est = fitted(seqsize, batchsize, dropout=0.5)  # which evaluation does without
    before = copy.deepcopy(vars(est)), net2vec(est.model_).clone()
    loss, gradient = est.evaluate(X, Y, gradient=True)
    assert net2vec(est.model_).equal(before[1])
    assert vars(est).keys() == before[0].keys()
    assert est.history_ == before[0]["history_"]
    assert est.evaluate(X, Y) == pytest.approx(loss, abs=1e-12)
    model = copy.deepcopy(est.model_).eval()
    wanted_loss, wanted = by_hand(model, batchsize, seqsize)
    assert abs(loss - wanted_loss) < 1e-12
    # net2vec orders parameters by itself: read the gradient as it reads parameters
    for p, g in zip(
        model.parameters(),
        torch.split(wanted, [p.numel() for p in model.parameters()]),
        strict=True,
    ):
        p.grad = g.view_as(p)
    assert (gradient - net2grad(model)).abs().max() < 1e-12


@pytest.mark.slow
def test_every_form_of_data_that_fit_takes():
    est = plain_regressor(4, epochs=2, random_state=0).fit(X, Y[:1])
    w = np.ones((N, T))
    assert est.evaluate(X, Y[:1], w) == pytest.approx(est.evaluate(X, Y[:1]), abs=1e-9)
    w[:, 20:] = 0
    assert est.evaluate(X, Y[:1], w) == pytest.approx(
        est.evaluate(X, Y[:1], lengths=np.full(N, 20)), abs=1e-9
    )
    labels = np.where(Y[:1] > 0, "up", "down")
    classifier = plain_classifier(4, epochs=2, random_state=0).fit(X, labels)
    loss, gradient = classifier.evaluate(X, labels, gradient=True)
    proba = classifier.predict_proba(X)
    wanted = -np.log(np.where(labels[0] == "down", proba[0], proba[1])).mean()
    assert abs(loss - wanted) < 1e-6
    assert gradient.shape == net2vec(classifier).shape
    with pytest.raises(ShapeError, match="SequenceRegressor was fitted on 3"):
        est.evaluate(X[:2], Y[:1])


@pytest.mark.parametrize("rebatch", ["auto", True])
@pytest.mark.parametrize("n", [1, 3])
def test_series_stay_whole_as_in_predict(n, rebatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, n, 421)).astype("float32")
    y = x[:1].cumsum(2) / 9
    spec = Spec(epochs=2, batchsize=16, seqsize=5, rebatch=rebatch)
    est = Estimator(nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)), nn.MSELoss(), None, spec).fit(x, y)
    expected = np.mean((est.predict(x) - y) ** 2)
    assert est.evaluate(x, y) == pytest.approx(expected, rel=1e-5)
    assert est.evaluate(x, y, gradient=True)[0] == pytest.approx(expected, rel=1e-5)
    est.fit(x, y, validation_data=(x, y))
    assert est.evaluate(x, y) == pytest.approx(est.validation_loss_curve_[-1], rel=1e-6)
