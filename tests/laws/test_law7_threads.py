"""Law 7: threads equal one thread, bit-identical from run to run."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, seqloss
from fluxutils_py.nn import FLSTM, GRU, LSTM, RNN, SMGU, TCN, CausalConv1d, Recur, kernels, native
from fluxutils_py.nn.parameters import weights
from fluxutils_py.nn.states import states
from fluxutils_py.training import StopTraining

from .conftest import B, S, T, difference, make_task

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
# Adam makes much of the rounding of tiny gradients
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
spec = Spec(epochs=1, batchsize=B, seqsize=S)


def fit(
    task,
    n_jobs,
    model=None,
    loss=None,
    x=None,
    y=None,
    epochs=1,
    weight=None,
    lengths=None,
    opt=sgd,
    **more,
):
    callbacks = more.pop("callbacks", None)
    return Estimator(
        model or task.ours(),
        loss,
        opt,
        Spec(epochs=epochs, batchsize=B, seqsize=S, **more),
        n_jobs=n_jobs,
        callbacks=callbacks,
        random_state=3,
    ).fit(task.x if x is None else x, task.y if y is None else y, weight, lengths=lengths)


def assert_alike(a, b, tolerance):
    assert difference(net2vec(a), net2vec(b)) < tolerance
    assert difference(a.grad_, b.grad_) < tolerance
    assert a.loss_ == pytest.approx(b.loss_, rel=tolerance)
    assert a.loss_curve_ == pytest.approx(b.loss_curve_, rel=tolerance)


def gaps(task):
    """Targets without some steps, some series without any, and one window of a group without any."""
    y = task.y.copy()
    y[:, 3, 5:9] = y[0, 7] = y[:, 8:16, 10:20] = y[:, 30:32, :] = np.nan
    return y


def sample_weights(task):
    w = np.random.default_rng(2).random(task.x.shape[1:])
    w[4:6], w[20, 7:] = 0, 0
    return w


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"overlap": 4},
        {"overlap": 13, "burn_in": 3},
        {"accumulate": 3, "clip": 0.3},
        {"shuffle": True, "overlap": 3, "gaps": True, "weighted": True},
        {"lengths": True, "burn_in": 12, "gaps": True},
    ],
    ids=str,
)
def test_threads_equal_one(dtype, case):
    task, case = make_task(dtype), dict(case)
    if case.pop("gaps", False):
        case["y"] = gaps(task)
    if case.pop("weighted", False):
        case["weight"] = sample_weights(task)
    if case.pop("lengths", False):
        case["lengths"] = np.random.default_rng(3).integers(13, T, 37)
    alone = fit(task, 1, **case)
    for n_jobs in (2, 3, B + 3):
        assert_alike(fit(task, n_jobs, **case), alone, TOLERANCE[dtype])


@pytest.mark.slow
def test_no_run_differs_from_another():
    task = make_task("float32", n_steps=23)
    first = fit(task, 3, y=gaps(task), overlap=3, opt=None)
    for _ in range(20):
        again = fit(task, 3, y=gaps(task), overlap=3, opt=None)
        assert torch.equal(net2vec(again), net2vec(first))
        assert torch.equal(again.grad_, first.grad_)
        assert again.loss_ == first.loss_


class Random(nn.Module):
    """Dropout inside a recurrent layer, between layers, and without a layer; noise on the input."""

    def __init__(self):
        super().__init__()
        self.rnn, self.drop, self.head = (
            Recur(nn.GRU(3, 6, 2, dropout=0.3)),
            nn.Dropout(0.2),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        h = F.dropout(self.drop(self.rnn(x + 0.1 * torch.randn_like(x))), 0.1, self.training)
        return self.head(h)

    takes_windows = True


@pytest.mark.slow
def test_random_models_are_the_same_in_every_run(task):
    torch.manual_seed(0)
    task.x, task.y = task.x[:, :11, :13], task.y[:, :11, :13]
    model = Random()
    before = torch.get_rng_state()
    first, alone = fit(task, 3, model=model), fit(task, 1, model=model)
    assert not torch.equal(net2vec(first), net2vec(alone))  # other numbers than in one thread
    assert abs(first.loss_ / alone.loss_ - 1) < 0.1
    assert torch.equal(torch.get_rng_state(), before)
    for _ in range(20):
        assert torch.equal(net2vec(fit(task, 3, model=model)), net2vec(first))
    other = clone(first).set_params(random_state=4).fit(task.x, task.y)
    assert not torch.equal(net2vec(other), net2vec(first))


# -- losses ------------------------------------------------------------------------------------------------


def classes(task, ignore=False):
    y = (np.digitize(task.y, [-0.3, 0.3]) % 3)[:1]
    if ignore:
        y[:, 2, 4:9] = y[:, 9:11, :] = -100
    return y


CRITERIA = {
    "sum": nn.MSELoss(reduction="sum"),
    "none": nn.MSELoss(reduction="none"),
    "batchmean": nn.KLDivLoss(reduction="batchmean", log_target=True),
    "own": lambda yhat, y: ((yhat - y) ** 4).mean(),
}


@pytest.mark.few
@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("weighted", [False, True])
def test_any_reduction(task, name, weighted):
    if weighted and name == "own":
        pytest.skip("gives a single number, which cannot be weighted")
    case = {
        "loss": CRITERIA[name],
        "weight": sample_weights(task) if weighted else None,
        "clip": 0.1,
    }
    assert_alike(fit(task, 3, **case), fit(task, 1, **case), 1e-12)


@pytest.mark.few
@pytest.mark.parametrize("class_weights", [None, torch.tensor([1.0, 5.0, 0.5])])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_with_class_weights_and_labels_to_ignore(
    task, class_weights, reduction, weighted
):
    model = nn.Sequential(task.plain()[0], nn.Linear(7, 3).double())
    case = {
        "model": model,
        "y": classes(task, ignore=True),
        "loss": nn.CrossEntropyLoss(class_weights, reduction=reduction),
        "weight": sample_weights(task) if weighted else None,
        "clip": 0.1,
    }
    assert_alike(fit(task, 3, **case), fit(task, 1, **case), 1e-12)


@pytest.mark.slow
def test_probabilities_as_targets(task):
    y = np.random.default_rng(0).dirichlet([1, 2, 3], task.x.shape[1:]).transpose(2, 0, 1)
    model = nn.Sequential(task.plain()[0], nn.Linear(7, 3).double())
    case = {"model": model, "y": y, "loss": nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.5]))}
    assert_alike(fit(task, 3, **case), fit(task, 1, **case), 1e-12)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = LSTM(3, 4), Recur(nn.GRUCell(2, 5))
        self.c, self.d = nn.Linear(9, 3), nn.Linear(9, 3)

    def forward(self, x, z):
        h = torch.cat([self.a(x), self.b(z)], -1)
        return self.c(h), self.d(h)


@pytest.mark.slow
def test_several_inputs_and_outputs_each_with_a_mean_of_its_own(task):
    torch.manual_seed(0)
    x = (task.x, np.random.default_rng(1).normal(size=(2, 37, 43)))
    y = (classes(task), np.flip(classes(task, ignore=True), 1))
    case = {
        "model": TwoInputs(),
        "x": x,
        "y": y,
        "loss": nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.5])),
    }
    assert_alike(fit(task, 3, **case, overlap=3), fit(task, 1, **case, overlap=3), 1e-12)


@pytest.mark.slow
def test_losses_of_the_users_own(task):
    mse = seqloss(F.mse_loss)

    def regularised(model, xs, ys):
        return mse(model, xs, ys) + 1e-2 * sum(w.square().sum() for w in weights(model))

    def by_steps(model, xs, ys, ws):
        total = sum(
            (F.mse_loss(model(x), y, reduction="none") * w).sum()
            for x, y, w in zip(xs, ys, ws, strict=True)
        )
        return total / (ws != 0).sum()

    assert_alike(fit(task, 3, loss=regularised), fit(task, 1, loss=regularised), 1e-12)
    case = {"loss": by_steps, "y": gaps(task), "weight": sample_weights(task)}
    assert_alike(fit(task, 3, **case), fit(task, 1, **case), 1e-12)
    # weights are made up for it
    assert_alike(fit(task, 3, loss=by_steps), fit(task, 1, loss=by_steps), 1e-12)


# -- models ------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """Takes single steps, holds layers in a list too, and counts its calls."""

    def __init__(self, task):
        super().__init__()
        lstm, self.head = task.plain()
        self.rnn, self.counter = Recur(lstm), 0
        self.parts = [self.rnn, self.head]

    def forward(self, x):
        n_series, _ = x.shape
        for part in self.parts:
            x = part(x)
        self.counter += 1
        return x.reshape(n_series, 2) * (1 + 1 / self.counter)


@pytest.mark.slow
def test_a_model_that_goes_by_what_it_counts_and_keeps_layers_in_a_list(task):
    alone, found = fit(task, 1, model=Own(task)), fit(task, 3, model=Own(task))
    assert_alike(found, alone, 1e-12)
    assert found.model_.counter == alone.model_.counter > T


@pytest.mark.slow
def test_what_a_callback_changes_all_threads_follow(task):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = task.plain()
            self.rnn, self.factor = Recur(self.rnn), 1.0
            self.register_buffer("shift", torch.zeros(2))

        def forward(self, x):
            return self.head(self.rnn(x)) * self.factor + self.shift

    def change(loop):
        model = loop.shared_data["model"]
        model.factor *= 0.9
        model.shift = model.shift + 0.01
        model.head.bias.requires_grad_(loop.step % 2 == 0)

    alone, found = (fit(task, n, model=Scaled(), callbacks=change) for n in (1, 3))
    assert_alike(found, alone, 1e-12)


@pytest.mark.slow
def test_the_state_is_the_models_between_windows(task):
    seen = {1: [], 3: []}
    for n_jobs, kept in seen.items():
        fit(
            task,
            n_jobs,
            callbacks=lambda loop, kept=kept: kept.append(states(loop.shared_data["model"])),
        )
    assert [s.shape for s in seen[3][-1]] == [(1, 5, 7), (1, 5, 7)]
    for one, three in zip(seen[1], seen[3], strict=True):
        assert all(difference(a, b) < 1e-12 for a, b in zip(one, three, strict=True))


@pytest.mark.slow
def test_parameters_that_a_loss_does_not_reach_stay(task):
    model = task.ours()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    found = fit(task, 3, model=model, opt=partial(torch.optim.AdamW, weight_decay=0.5))
    assert found.model_.unused.tolist() == [1, 1, 1]  # weight decay would shrink them


@pytest.mark.slow
def test_sparse_gradients(task):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Embedding(11, 5, sparse=True), nn.Flatten(-2), nn.Linear(5, 1)
        ).double()

    class Mixed(torch.optim.Optimizer):
        def __init__(self, params):
            params = list(params)
            self.parts = [torch.optim.SparseAdam(params[:1]), torch.optim.Adam(params[1:])]
            super().__init__(params, {})

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    x = np.random.default_rng(0).integers(0, 11, (1, 37, 43))
    case = {"x": x, "y": task.y[:1], "opt": Mixed}
    assert_alike(fit(task, 3, model=model(), **case), fit(task, 1, model=model(), **case), 1e-12)


@pytest.mark.slow
def test_batch_normalisation_is_refused_before_anything_is_learnt(task):
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    class Norm(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.rnn, self.norm, self.head = LSTM(3, 7), norm, nn.Linear(7, 2)

        def forward(self, x):
            h = self.rnn(x)
            return self.head(self.norm(h.flatten(0, -2)).reshape(h.shape))

        takes_windows = True

    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole message is compared
        fit(task, 2, model=Norm(nn.BatchNorm1d(7)))
    assert str(error.value) == (
        "'norm' (BatchNorm1d) normalises over the whole minibatch, which is divided over threads: "
        "train with n_jobs=1, or use nn.LayerNorm or nn.GroupNorm"
    )
    frozen = Norm(Frozen(7))
    assert_alike(*(fit(task, n, model=frozen) for n in (1, 2)), 1e-12)


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_change_in_the_forward_pass_are_refused(task, in_place):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = task.plain()
            self.rnn = Recur(self.rnn)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.seen = self.seen.add_(1) if in_place else self.seen + 1
            return self.head(self.rnn(x))

    model = Counting()
    est = Estimator(model, None, sgd, spec, n_jobs=2)
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole message is compared
        est.fit(task.x, task.y)
    assert str(error.value) == (
        "the model changes its buffer 'seen' as it runs, which several threads would do at once: "
        "train it with n_jobs=1"
    )
    assert not hasattr(est, "model_")


# -- around it ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("two_torch_threads")
def test_threads_end_with_the_fit_and_torch_has_its_own_back(task):
    before, seen = threading.active_count(), []
    fit(
        task,
        3,
        callbacks=lambda loop: seen.append((threading.active_count(), torch.get_num_threads())),
    )
    # a third is started when two have work at a time
    assert {n for n, _ in seen} <= {
        before + 1,
        before + 2,
    }
    assert {n for _, n in seen} == {1}
    assert (threading.active_count(), torch.get_num_threads()) == (before, 2)
    seen.clear()
    fit(
        task,
        None,
        callbacks=lambda loop: seen.append((threading.active_count(), torch.get_num_threads())),
    )
    assert set(seen) == {(before, 2)}


@pytest.mark.few
@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("window", [1, 8])
def test_an_error_in_a_thread_leaves_what_one_thread_leaves(task, failing, window):
    """The loss fails on the rows of one thread, in the first window or in a later one."""
    mse, windows = seqloss(F.mse_loss), []
    marks = task.x[0, [0, 3, 6], 0] if window == 1 else task.x[0, [8, 11, 14], 20]

    def loss(model, xs, ys):
        if (xs[0, :, 0] == marks[failing]).any():
            raise KeyError("of this loss")
        return mse(model, xs, ys)

    before, left = threading.active_count(), []
    for n_jobs in (1, 3):
        est = Estimator(
            task.ours(), loss, sgd, spec, n_jobs=n_jobs, callbacks=lambda _: windows.append(1)
        )
        with pytest.raises(KeyError, match="of this loss"):
            est.fit(task.x, task.y)
        left.append(est)
        assert threading.active_count() == before
        assert torch.get_num_threads() == 2
    assert len(windows) == 2 * (window - 1)
    if window == 1:
        assert not hasattr(left[0], "model_")
        assert not hasattr(left[1], "model_")
    else:
        assert difference(net2vec(left[0]), net2vec(left[1])) < 1e-12
        assert left[1].n_iter_ == left[0].n_iter_ == 0
        assert difference(left[0].predict(task.x), left[1].predict(task.x)) < 1e-12
        assert (
            difference(*(net2vec(est.set_params(loss=None).fit(task.x, task.y)) for est in left))
            < 1e-12
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:feature 0 of x has values")
def test_a_loss_that_is_not_finite_says_what_it_says_in_one_thread(task):
    x = task.x.copy()
    x[0, 9, 33] = 1e300
    messages = []
    for n_jobs in (1, 3):
        est = Estimator(
            task.ours(),
            lambda m, xs, ys: (m(xs) - ys + xs[..., :1] ** 2).square().mean(),
            sgd,
            spec,
        )
        with pytest.raises(FloatingPointError) as error:
            est.set_params(n_jobs=n_jobs).fit(x, task.y)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith("loss is inf at steps 30 to 40 of series 8 to 15; ")


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (
            lambda m, xs, ys: m(xs),
            ValueError,
            r"the loss .*scalar, .*of shape",
        ),
        (lambda m, xs, ys: 1.0, TypeError, r"the loss .*scalar tensor, got float"),
        (
            lambda m, xs, ys: ys.sum(),
            ValueError,
            r"the loss .*depend .*parameters",
        ),
    ],
)
def test_losses_that_are_none_are_errors_as_in_one_thread(task, loss, error, message):
    for n_jobs in (1, 3):
        with pytest.raises(error, match=message):
            fit(task, n_jobs, loss=loss)


@pytest.mark.slow
def test_validation_early_stopping_and_going_on(task):
    fitted = []
    for n_jobs in (1, 3):
        est = Estimator(
            task.ours(), None, sgd, Spec(3, B, S, patience=2), n_jobs=n_jobs, warm_start=True
        )
        est.fit(task.x, task.y, validation_data=(task.x[:, :5], task.y[:, :5]))
        est.partial_fit(task.x, task.y).fit(task.x, task.y)
        fitted.append(est)
    assert_alike(*fitted, 1e-12)
    assert fitted[0].validation_loss_curve_ == pytest.approx(
        fitted[1].validation_loss_curve_, rel=1e-12
    )


@pytest.mark.slow
def test_training_may_be_stopped(task):
    def stop(loop):
        if loop.step == 7:
            raise StopTraining

    assert_alike(*(fit(task, n, callbacks=stop) for n in (1, 3)), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_single_missing_outputs_and_series_that_begin_late(dtype):
    """Some threads have series of which no output is missing, some have none at all at first."""
    task = make_task(dtype)
    rng = np.random.default_rng(4)
    y = task.y.copy()
    y[rng.random(y.shape) < 0.3] = np.nan
    y[:, ::4] = task.y[:, ::4]
    starts = rng.integers(0, 30, y.shape[1])
    fits = [
        Estimator(task.ours(), None, sgd, Spec(1, B, S, overlap=3), n_jobs=n).fit(
            task.x, y, sample_weights(task), starts=starts
        )
        for n in (1, 3)
    ]
    assert_alike(*fits, TOLERANCE[dtype])


# -- the native kernels ------------------------------------------------------------------------------------

LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN, "FLSTM": FLSTM, "SMGU": SMGU}
ISAS = [name for name in kernels.ISAS if kernels.supports(name)]
by_kernels = pytest.mark.skipif(kernels.library() is None, reason=kernels.kernels_in_use())


@pytest.mark.slow
@by_kernels
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_and_instruction_sets_of_the_kernels_change_no_bit_of_a_fit(
    layer, dtype, rng, monkeypatch
):
    x = rng.normal(size=(3, 70, 41)).astype(dtype)
    y = np.roll(x[:2], 1, 2)
    model = torch.nn.Sequential(LAYERS[layer](3, 13, num_layers=2), torch.nn.Linear(13, 2))
    fitted = []
    for isa in ISAS:
        for n_threads in (1, 2, 5):
            monkeypatch.setattr(kernels._use, "library", kernels.Library(kernels.PATH, isa))
            monkeypatch.setattr(native, "n_threads", lambda n=n_threads: n)
            fitted.append(
                Estimator(model, None, None, Spec(2, 70, 20, overlap=3), random_state=0).fit(x, y)
            )
    for other in fitted[1:]:
        assert torch.equal(net2vec(other), net2vec(fitted[0]))
        assert torch.equal(other.grad_, fitted[0].grad_)
        assert other.loss_curve_ == fitted[0].loss_curve_


@by_kernels
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_of_the_kernels_depend_on_no_other_series_and_on_no_cut_of_time(layer, rng):
    x = rng.normal(size=(3, 37, 43)).astype("float32")
    est = Estimator(LAYERS[layer](3, 2), None, None, Spec(1, 37, 43), random_state=0).fit(x, x[:2])
    whole, state = est.predict(x, return_state=True)
    for batchsize, seqsize in ((5, 43), (37, 1), (1, 7), (16, 10)):
        est.set_params(spec=Spec(1, batchsize, seqsize))
        again, last = est.predict(x, return_state=True)
        np.testing.assert_array_equal(again, whole)
        assert all(torch.equal(a, b) for a, b in zip(last, state, strict=True))
    np.testing.assert_array_equal(est.predict(x[:, [30, 4]]), whole[:, [30, 4]])


class ByEinsum(nn.Module):
    """A weight whose gradient autograd gives in another memory order."""

    takes_windows = True

    def __init__(self, F):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, F, 1))

    def forward(self, x):
        return torch.einsum("sbf,hfo->sbho", x, self.weight).sum(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda F: TCN(F, 4, 3), lambda F: CausalConv1d(F, 2, 3), ByEinsum],
    ids=["TCN", "CausalConv1d", "einsum"],
)
def test_the_default_optimizer_takes_gradients_in_any_memory_order(make):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 10, 40))
    torch.manual_seed(0)
    model = nn.Sequential(make(3), nn.LazyLinear(1)).double()
    model(torch.zeros(5, 2, 3, dtype=torch.float64))
    ends = []
    for opt, n_jobs in ((None, 3), (None, 1), (torch.optim.AdamW, 1)):  # None is fused
        spec = Spec(epochs=2, batchsize=5, seqsize=20, overlap=8)
        est = Estimator(model, None, opt, spec, n_jobs=n_jobs, random_state=0).fit(x, x[:1])
        ends.append(net2vec(est))
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-6)
    torch.testing.assert_close(ends[1], ends[2], rtol=0, atol=1e-6)
