"""Training loops of PrayTools, against bare torch loops."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.data import BackgroundDataLoader
from fluxutils_py.data.parts import dividebatch
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import LSTM
from fluxutils_py.praytools.functional import autotrain, itrain, ptrain, train, ttrain
from fluxutils_py.praytools.sample_gradients import pgradient, tgradient
from fluxutils_py.training import StopTraining

SGD = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(model):
    return lambda x, y: nn.functional.mse_loss(model(x), y)


def batches(n=23):
    """The same minibatches in every run, of ``n`` observations."""
    generator = torch.Generator().manual_seed(2)

    def preparesamples():
        x = torch.randn(n, 3, generator=generator)
        return x, x.sum(1, keepdim=True)

    return preparesamples


def bare_loop(preparesamples, iterations, optimizer):
    model = make_model()
    opt, losses = optimizer(model.parameters()), []
    for _ in range(iterations):
        x, y = preparesamples()
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return model, losses


def distance(a, b):
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.AdamW])
def test_train_is_the_bare_loop_to_the_last_bit(optimizer):
    expected, losses = bare_loop(batches(), 20, optimizer)
    model, found = make_model(), []
    train(loss_of(model), model, batches(), optimizer, 20, cby=found.append)
    assert distance(model, expected) == 0
    assert found == losses
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_goes_on_where_it_was():
    expected, _ = bare_loop(batches(), 20, torch.optim.AdamW)
    model, preparesamples = make_model(), batches()
    opt = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        train(loss_of(model), list(model.parameters()), preparesamples, opt, 10)
    assert distance(model, expected) == 0


def test_no_iterations_call_nothing():
    model = make_model()

    def never():
        raise AssertionError

    train(never, model, never, SGD, 0, cb=never, cby=never)


def test_callbacks_come_after_the_update_in_order():
    model, log = make_model(), []
    weights = [model[0].weight.detach().clone()]

    def changed():
        log.append("a")
        assert not torch.equal(model[0].weight, weights[-1])
        weights.append(model[0].weight.detach().clone())

    train(
        loss_of(model),
        model,
        batches(),
        SGD,
        2,
        cb=[changed, lambda: log.append("b")],
        cby=lambda _: log.append("y"),
    )
    assert log == ["a", "b", "y"] * 2


def test_a_callback_may_end_training():
    model, log = make_model(), []

    def stop():
        log.append(1)
        if len(log) == 3:
            raise StopTraining

    train(loss_of(model), model, batches(), SGD, 50, cb=stop)
    assert distance(model, bare_loop(batches(), 3, SGD)[0]) == 0


def test_samples_may_come_from_the_background_and_end():
    model, preparesamples, count = make_model(), batches(), itertools.count()

    def load():
        if next(count) == 7:
            raise StopIteration
        return preparesamples()

    losses = []
    with BackgroundDataLoader(load, 3, workers=1) as loader:
        train(loss_of(model), model, loader, SGD, 100, cby=losses.append)
    expected, bare = bare_loop(batches(), 7, SGD)
    assert losses == bare
    assert distance(model, expected) == 0


@pytest.mark.parametrize(("what", "value"), [("loss", float("inf")), ("gradient norm", 0.0)])
def test_what_is_not_finite_is_an_error_and_trains_nothing(what, value):
    p = nn.Parameter(torch.tensor([1.0, value]))
    calls = itertools.count()

    def loss():  # the square root of 0 has no finite gradient
        return p.sqrt().sum() if next(calls) == 1 else p[0] * 2

    with pytest.raises(FloatingPointError) as error:
        train(loss, [p], tuple, SGD, 5)
    assert str(error.value) == (
        f"{what} is inf at iteration 2; the parameters are as before this step. Lower the learning "
        "rate, set clip, or look for extreme values in the data"
    )
    assert p[0].item() == pytest.approx(0.8)  # of one update


@pytest.mark.parametrize("bs", [2, 4, 30, "auto"])
def test_ptrain_is_train_to_rounding(bs):
    expected, losses = bare_loop(batches(103), 20, SGD)
    model, found, idents = make_model(), [], []
    preparesamples = batches(103)

    def prepare():
        idents.append(threading.get_ident())
        return preparesamples()

    ptrain(loss_of(model), model, prepare, SGD, 20, bs=bs, cby=found.append)
    assert distance(model, expected) < 1e-6
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert idents == [threading.get_ident()] * 20


def test_ptrain_takes_samples_that_are_divided_already():
    expected, _ = bare_loop(batches(), 20, SGD)
    model, preparesamples = make_model(), batches()
    ptrain(loss_of(model), model, lambda: dividebatch(3, *preparesamples()), SGD, 20, bs=None)
    assert distance(model, expected) < 1e-6


def test_ptrain_divides_along_any_axis():
    lstm = nn.LSTM(3, 2)
    twin, x = copy.deepcopy(lstm), torch.randn(5, 7, 3)  # (S, B, F)
    train(lambda x: lstm(x)[0].square().mean(), lstm, lambda: (x,), SGD, 3)
    ptrain(lambda x: twin(x)[0].square().mean(), twin, lambda: (x,), SGD, 3, bs=2, axis=1)
    assert distance(lstm, twin) < 1e-6


@pytest.mark.slow
def test_ptrain_is_the_same_in_every_run_with_dropout_too():
    def run():
        torch.manual_seed(5)
        model = nn.Sequential(make_model(), nn.Dropout(0.3))
        ptrain(loss_of(model), model, batches(), torch.optim.AdamW, 5, bs=3)
        return model

    expected = run()
    assert all(distance(run(), expected) == 0 for _ in range(20))


def test_ttrain_prepares_samples_in_its_threads():
    model, idents, calls = make_model(), set(), []
    x, y = batches()()

    def preparesamples():
        idents.add(threading.get_ident())
        calls.append(1)
        return x, y

    ttrain(loss_of(model), model, preparesamples, SGD, 20, n=3)
    assert len(calls) == 60
    assert len(idents) > 1
    expected, _ = bare_loop(lambda: (x, y), 20, SGD)  # the mean of equal samples is the sample
    assert distance(model, expected) < 1e-6


def test_ttrain_ends_with_its_samples():
    model, log, count = make_model(), [], itertools.count()
    x, y = batches()()

    def preparesamples():
        if next(count) >= 10:
            raise StopIteration
        return x, y

    ttrain(loss_of(model), model, preparesamples, SGD, 100, n=2, cby=log.append)
    assert len(log) == 5


def environments(signs):
    return tuple((torch.full((n + 2,), float(sign)),) for n, sign in enumerate(signs))


def test_itrain_with_tau_0_takes_the_plain_mean():
    samples = dividebatch(3, *batches(10)())
    model, twin = make_model(), make_model()
    opt, losses, found = SGD(twin.parameters()), [], []
    for _ in range(10):
        # 4, 3 and 3 observations weigh alike
        value = sum(loss_of(twin)(x, y) for x, y in samples) / 3
        opt.zero_grad()
        value.backward()
        opt.step()
        losses.append(value.item())
    itrain(loss_of(model), model, lambda: samples, SGD, 10, tau=0, cby=found.append)
    assert distance(model, twin) < 1e-6
    np.testing.assert_allclose(found, losses, rtol=1e-6)


def test_itrain_leaves_alone_what_environments_disagree_on():
    p, agreed = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))
    itrain(
        lambda x: (x * p).mean() + agreed.sum(), [p, agreed], lambda: environments([1, -1]), SGD, 4
    )
    assert p.item() == 1
    assert agreed.item() == pytest.approx(0.6)


def test_itrain_with_one_environment_is_train():
    p = nn.Parameter(torch.tensor([1.0]))
    itrain(lambda x: (x * p).mean(), [p], lambda: environments([1]), SGD, 4, tau=1)
    assert p.item() == pytest.approx(0.6)


def test_autotrain_takes_the_fastest_number_of_parts():
    model, sizes = make_model(), []
    mse = loss_of(model)

    def loss(x, y):
        sizes.append(len(x))
        return mse(x, y)

    stats = [{"parts": 1, "time": 3.0}, {"parts": 4, "time": 1.0}, {"parts": 8, "time": 2.0}]
    autotrain(loss, model, batches(), 23, SGD, 2, stats=stats)
    assert sorted(sizes) == sorted([6, 6, 6, 5] * 2)
    assert distance(model, bare_loop(batches(), 2, SGD)[0]) < 1e-6


def test_autotrain_measures_by_itself():
    model, preparesamples, losses = make_model(), batches(), []
    preparesamples_again = batches()
    autotrain(loss_of(model), model, preparesamples, 23, SGD, 3, steps=1, cby=losses.append)
    preparesamples_again()  # the one that was measured on
    expected, bare = bare_loop(preparesamples_again, 3, SGD)
    assert distance(model, expected) < 1e-6
    np.testing.assert_allclose(losses, bare, rtol=1e-6)


@pytest.mark.parametrize(
    "call", [train, ttrain, lambda *a: ptrain(*a, bs=2)], ids=["train", "ttrain", "ptrain"]
)
def test_what_is_no_sample_is_said_to_be_none(call):
    with pytest.raises(TypeError) as caught:
        call(lambda x: x.sum(), nn.Linear(3, 1), lambda: torch.zeros(4, 3), SGD, 1)
    assert str(caught.value) == (
        "preparesamples must return the arguments of loss as a tuple, such as (x, y) or (x,); it "
        "returned a Tensor"
    )


@pytest.mark.parametrize("form", [lambda model: model, lambda model: list(model.parameters())])
@pytest.mark.parametrize("run", ["ptrain", "ttrain", "pgradient", "tgradient"])
@pytest.mark.parametrize("layer", [nn.BatchNorm1d, LSTM])
def test_threads_refuse_what_they_would_change_at_once_in_both_forms_of_parameters(
    form, run, layer
):
    bad = nn.BatchNorm1d(3) if layer is nn.BatchNorm1d else LSTM(3, 3)
    model = nn.Sequential(bad, nn.Linear(3, 1))
    before = copy.deepcopy(model.state_dict())
    loss, params = (lambda x, y: nn.functional.mse_loss(model(x), y)), form(model)
    calls = {
        "ptrain": lambda: ptrain(loss, params, batches(), SGD, 3, bs=2),
        "ttrain": lambda: ttrain(loss, params, batches(), SGD, 3, n=2),
        "pgradient": lambda: pgradient(loss, params, [batches()(), batches()()]),
        "tgradient": lambda: tgradient(loss, params, batches(), 2),
    }
    with pytest.raises(ValueError, match=layer.__name__):
        calls[run]()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_observations_on_the_last_axis_are_divided_if_it_is_named():
    model = nn.Linear(3, 1)

    def loss(x, y):  # Julia's order: observations last
        return (model(x.T) - y.T).square().mean()

    def prepare():
        return torch.randn(3, 20), torch.randn(1, 20)

    with pytest.raises(ShapeError, match=r"\(3, 20\) and \(1, 20\)") as caught:
        ptrain(loss, model, prepare, torch.optim.SGD, 1, bs=2)
    assert "(axis=)" in caught.value.__notes__[0]
    found = []
    for parts in 1, 2:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        ptrain(loss, model, prepare, torch.optim.SGD, 3, bs=parts, axis=-1)
        found.append(model.weight.detach())
    torch.testing.assert_close(*found)
