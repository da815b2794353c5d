"""Law 1: fit equals a plain hand-written PyTorch loop."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, seqloss
from fluxutils_py.nn import LSTM, Recur

from .conftest import TOLERANCE, B, S, T, difference, flat, make_task, plain_loop, window

adam = partial(torch.optim.Adam, lr=1e-2)
spec = Spec(epochs=4, batchsize=B, seqsize=S)  # 5 groups of series, 5 windows each: 100 steps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_after_100_adam_steps(dtype):
    task = make_task(dtype)
    expected, losses, grads = plain_loop(task, adam, epochs=4)
    est = Estimator(task.ours(), nn.MSELoss(), adam, spec).fit(task.x, task.y)
    assert len(losses) == 100
    assert difference(net2vec(est), expected) < TOLERANCE[dtype]
    assert net2vec(est).dtype == getattr(torch, dtype)
    assert est.loss_ == pytest.approx(np.mean(losses[-25:]), rel=TOLERANCE[dtype])
    assert difference(est.grad_, torch.stack(grads[-25:]).mean(0)) < TOLERANCE[dtype]


@pytest.mark.few
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
        partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        partial(torch.optim.RMSprop, lr=1e-3),
    ],
    ids=lambda o: o.func.__name__,
)
def test_any_optimizer(task, optimizer):
    expected, _, _ = plain_loop(task, optimizer)
    est = Estimator(task.ours(), None, optimizer, Spec(epochs=1, batchsize=B, seqsize=S)).fit(
        task.x, task.y
    )
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.slow
def test_the_default_optimizer_is_adamw(task):
    expected, _, _ = plain_loop(task, torch.optim.AdamW)
    est = Estimator(task.ours(), None, None, Spec(epochs=1, batchsize=B, seqsize=S)).fit(
        task.x, task.y
    )
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.slow
def test_an_optimizer_instance_keeps_its_groups(task):
    lstm, head = task.plain()
    model = nn.Sequential(lstm, head)
    opt = torch.optim.SGD(
        [{"params": head.parameters(), "lr": 0.1}, {"params": lstm.parameters()}], lr=1e-3
    )
    before = net2vec(model)

    def grouped(params):
        return torch.optim.SGD(
            [{"params": params[-2:], "lr": 0.1}, {"params": params[:-2]}], lr=1e-3
        )

    expected, _, _ = plain_loop(task, grouped)
    est = Estimator(model, None, opt, Spec(epochs=1, batchsize=B, seqsize=S)).fit(task.x, task.y)
    assert difference(net2vec(est), expected) < 1e-12
    assert torch.equal(net2vec(model), before)  # the user's model stays as it is
    assert [g["lr"] for g in est.optimizer_.param_groups] == [0.1, 1e-3]


@pytest.mark.slow
def test_a_loss_that_steps_through_time(task):
    def loss(model, xs, ys):
        total = sum(F.mse_loss(model(x), y) for x, y in zip(xs, ys, strict=True))
        return total / len(xs)

    expected, _, _ = plain_loop(task, adam)
    est = Estimator(task.ours(), loss, adam, Spec(epochs=1, batchsize=B, seqsize=S)).fit(
        task.x, task.y
    )
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.slow
def test_a_model_that_takes_single_steps_only(task):
    class PerStep(nn.Module):
        def __init__(self, lstm, head):
            super().__init__()
            self.lstm, self.head = Recur(lstm), head

        def forward(self, x):
            n_series, _ = x.shape  # (B, F) and nothing else
            return self.head(self.lstm(x)).reshape(n_series, 2)

    expected, _, _ = plain_loop(task, adam)
    est = Estimator(PerStep(*task.plain()), None, adam, Spec(epochs=1, batchsize=B, seqsize=S)).fit(
        task.x, task.y
    )
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.slow
def test_a_cell_in_a_sequential(task):
    lstm, head = task.plain()
    cell = nn.LSTMCell(3, 7).double()
    with torch.no_grad():
        for ours, theirs in zip(cell.parameters(), lstm.parameters(), strict=True):
            ours.copy_(theirs)
    expected, _, _ = plain_loop(task, adam)
    est = Estimator(
        nn.Sequential(cell, head), None, adam, Spec(epochs=1, batchsize=B, seqsize=S)
    ).fit(task.x, task.y)
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.slow
def test_clip_is_the_global_norm(task):
    clip = 0.4
    expected, _, grads = plain_loop(
        task, adam, after_backward=lambda p: nn.utils.clip_grad_norm_(p, clip)
    )
    norms = [float(g.norm()) for g in grads]
    assert min(norms) < clip < max(norms)  # some are clipped, some are not
    est = Estimator(task.ours(), None, adam, Spec(epochs=1, batchsize=B, seqsize=S, clip=clip)).fit(
        task.x, task.y
    )
    assert difference(net2vec(est), expected) < 1e-12
    assert difference(est.grad_, torch.stack(grads).mean(0)) < 1e-12  # grad_ is before clipping


@pytest.mark.few
@pytest.mark.parametrize("k", [2, 3, 1000])
def test_accumulate_weighs_windows_by_their_steps(task, k):
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    opt = adam(params)
    total, count, windows = [torch.zeros_like(p) for p in params], 0, 0
    jobs = [(g, t) for g in range(0, 37, B) for t in range(0, T, S)]
    for i, (g, t) in enumerate(jobs):
        if t == 0:
            state = None
        xs, ys = (
            window(task.x, slice(g, g + B), t, t + S),
            window(task.y, slice(g, g + B), t, t + S),
        )
        h, state = lstm(xs, state)
        n = xs.shape[0] * xs.shape[1]
        grads = torch.autograd.grad(F.mse_loss(head(h), ys), params)
        total, count, windows = (
            [a + n * g_ for a, g_ in zip(total, grads, strict=True)],
            count + n,
            windows + 1,
        )
        if windows == k or i == len(jobs) - 1:
            for p, a in zip(params, total, strict=True):
                p.grad = a / count
            opt.step()
            total, count, windows = [torch.zeros_like(p) for p in params], 0, 0
        state = tuple(s.detach() for s in state)
    est = Estimator(task.ours(), None, adam, Spec(epochs=1, batchsize=B, seqsize=S, accumulate=k))
    est.fit(task.x, task.y)
    assert difference(net2vec(est), flat(params)) < 1e-12


@pytest.mark.slow
def test_shuffle_moves_series_never_time(task):
    seen = []

    def loss(model, xs, ys):
        seen.append(xs[:, :, 0].clone())
        return F.mse_loss(model(xs), ys)

    est = Estimator(
        task.ours(),
        loss,
        adam,
        Spec(epochs=2, batchsize=B, seqsize=S, shuffle=True),
        random_state=3,
    )
    est.fit(task.x, task.y)
    by_series = {round(float(v), 12): n for n, v in enumerate(task.x[0, :, 0])}
    orders = []
    for epoch in (seen[:25], seen[25:]):
        order = []
        for group in range(5):
            windows = epoch[group * 5 : group * 5 + 5]
            series = [by_series[round(float(v), 12)] for v in windows[0][0]]
            # each walks forward, whole
            assert torch.equal(torch.cat(windows), torch.tensor(task.x[0, series].T))
            order += series
        assert sorted(order) == list(range(37))
        orders.append(order)
    assert orders[0] != orders[1] != list(range(37))


@pytest.mark.slow
def test_embeddings_and_cross_entropy():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 11, size=(1, 13, 29))
    y = (x + np.roll(x, 1, 2)) % 5

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.lstm, self.head = nn.Embedding(11, 4), LSTM(4, 6), nn.Linear(6, 5)

        def forward(self, x):
            return self.head(self.lstm(self.embedding(x[..., 0])))

    plain = Tagger()
    opt = adam(plain.parameters())
    for g in range(0, 13, 5):
        state = None
        for t in range(0, 29, 7):
            xs, ys = window(x, slice(g, g + 5), t, t + 7), window(y, slice(g, g + 5), t, t + 7)
            h, state = plain.lstm.module(plain.embedding(xs[:, :, 0]), state)
            loss = F.cross_entropy(plain.head(h).reshape(-1, 5), ys.reshape(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            state = tuple(s.detach() for s in state)
    est = Estimator(
        Tagger(), nn.CrossEntropyLoss(), adam, Spec(epochs=1, batchsize=5, seqsize=7)
    ).fit(x, y)
    assert difference(net2vec(est), flat(plain.parameters())) < 1e-5
    assert est.predict(x).shape == (5, 13, 29)
    assert est.score(x, y) == pytest.approx((est.predict(x).argmax(0) == y[0]).mean())


@pytest.mark.slow
def test_tuples_of_inputs_and_outputs(task):
    class TwoInTwoOut(nn.Module):
        def __init__(self, lstm, head):
            super().__init__()
            self.lstm, self.head = Recur(lstm), head

        def forward(self, a, b):
            out = self.head(self.lstm(torch.cat([a, b], -1)))
            return out[..., :1], out[..., 1:]

    def both(out, y):
        return F.mse_loss(out[..., :1], y[..., :1]) + F.mse_loss(out[..., 1:], y[..., 1:])

    expected, _, _ = plain_loop(task, adam, criterion=both)
    x, y = (task.x[:1], task.x[1:]), (task.y[:1], task.y[1:])
    est = Estimator(
        TwoInTwoOut(*task.plain()),
        seqloss(F.mse_loss),
        adam,
        Spec(epochs=1, batchsize=B, seqsize=S),
    )
    est.fit(x, y)
    assert difference(net2vec(est), expected) < 1e-12
    predicted = est.predict(x)
    assert [p.shape for p in predicted] == [(1, 37, 43), (1, 37, 43)]
    out = (np.zeros((1, 37, 43)), np.zeros((1, 37, 43)))
    assert est.predict(x, out=out) is out
    assert all(np.array_equal(a, b) for a, b in zip(out, predicted, strict=True))

    seen = []

    def loss(model, xs, ys):
        seen.append((len(xs), xs[0].shape[-1], xs[1].shape[-1], len(ys)))
        return sum(F.mse_loss(a, b) for a, b in zip(model(*xs), ys, strict=True))

    custom = Estimator(
        TwoInTwoOut(*task.plain()), loss, adam, Spec(epochs=1, batchsize=B, seqsize=S)
    ).fit(x, y)
    assert set(seen) == {(2, 1, 2, 2)}
    assert difference(net2vec(custom), expected) < 1e-12


@pytest.mark.slow
def test_global_generators_are_left_alone_and_random_state_rules(task):
    model = nn.Sequential(LSTM(3, 7, num_layers=2, dropout=0.5), nn.Linear(7, 2))
    made = Estimator(
        model, spec=Spec(epochs=2, batchsize=B, seqsize=S, shuffle=True), random_state=7
    )
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002  # the legacy global generator is what must stay
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002  as above
    first = net2vec(made.fit(task.x, task.y))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002  as above
    torch.manual_seed(9)
    assert torch.equal(first, net2vec(copy.deepcopy(made).fit(task.x, task.y)))
    assert not torch.equal(first, net2vec(made.set_params(random_state=8).fit(task.x, task.y)))


@pytest.mark.few
@pytest.mark.parametrize(
    "spec", [Spec(2, 4, 5, accumulate=3), Spec(2, 4, 5, clip=1e-3)], ids=["accumulate", "clip"]
)
def test_sparse_gradients_equal_dense_ones(spec):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 11, size=(1, 7, 13)), rng.normal(size=(1, 7, 13)).astype("f4")

    class Words(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.lstm, self.head = (
                nn.Embedding(11, 4, sparse=sparse),
                LSTM(4, 6),
                nn.Linear(6, 1),
            )

        def forward(self, x):
            return self.head(self.lstm(self.embedding(x[..., 0])))

    sgd = partial(torch.optim.SGD, lr=0.5)
    dense, sparse = (net2vec(Estimator(Words(s), None, sgd, spec).fit(x, y)) for s in (False, True))
    assert difference(dense, sparse) < 1e-6
    assert difference(dense, net2vec(Words(False))) > 1e-4
