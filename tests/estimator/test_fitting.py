"""What is left of an estimator when a fit fails late."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, EveryNSteps, StopTraining

N, T = 7, 11
RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, N, T))
Y = np.cumsum(X.mean(0, keepdims=True), 2)
OTHER = np.concatenate([X, X[:1]])  # three features
STEPS = 6  # per epoch


class Boom(Exception):
    pass


def raises(error, step, epoch=2):
    def callback(loop):
        if loop.epoch + 1 == epoch and loop.epoch_step == step:
            raise error

    return callback


def net(n_in=2):
    torch.manual_seed(1)
    return nn.Sequential(LSTM(n_in, 4), nn.Dropout(0.1), nn.Linear(4, 1)).double()


def make(model=None, loss=None, opt=Adam, callbacks=None, epochs=2, **settings):
    spec = Spec(epochs=epochs, batchsize=4, seqsize=4, shuffle=True, rebatch=False)
    return Estimator(
        net() if model is None else model,
        loss,
        opt,
        spec,
        callbacks=callbacks,
        verbose=False,
        **settings,
    )


def picture(est):
    """All attributes, by value and by identity."""
    values = {
        k: (id(v), copy.deepcopy(v))
        for k, v in vars(est).items()
        if k not in ("model_", "optimizer_", "fitted_parts_")
    }
    parts = est.fitted_parts_
    values["parts"] = (id(parts), copy.deepcopy((parts.layout, parts.codec, parts.n_steps)))
    tensors = [
        *est.model_.state_dict().values(),
        *(v for s in est.optimizer_.state.values() for v in s.values()),
    ]
    return (
        values,
        [t.clone() for t in tensors],
        id(est.model_),
        id(est.optimizer_),
        est.fitted_parts_.rng.bit_generator.state,
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, nn.Module):
        return same(list(a.state_dict().values()), list(b.state_dict().values()))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return (
        len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, list | tuple)
        else a is b or a == b or a != a
    )


class Lazy:
    """An array in no memory: what is wrong in it is found when it is read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, key):
        return self.array[key]


def with_nan():
    x = X.copy()
    x[0, -1, -1] = np.nan
    return Lazy(x)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.rest = nn.Embedding(5, 2).double(), net()

    def forward(self, x):
        return self.rest(self.table(x[..., 0]))


LABELS = RNG.integers(5, size=(1, N, T))
NEGATIVE = LABELS.copy()
NEGATIVE[0, -1, -1] = -1

EARLIER = {
    "a NaN in what is read lazily": ({}, {}, {"x": with_nan()}, None, ValueError),
    "an index that there is not": (
        {"model": Embedded()},
        {"x": LABELS},
        {"x": NEGATIVE},
        None,
        IndexError,
    ),
    "a callback": ({}, {}, {}, raises(Boom(), 3), Boom),
    "a callback at the last step": ({}, {}, {}, raises(Boom(), STEPS), Boom),
    "a loss that is not finite": (
        {},
        {},
        {"y": Lazy(np.where(np.arange(T) == 10, 1e200, Y))},
        None,
        FloatingPointError,
    ),
    "sys.exit": ({}, {}, {}, raises(SystemExit(3), 3), SystemExit),
    "other features": (
        {"model": lambda n_in: net(n_in)},
        {},
        {"x": OTHER},
        raises(Boom(), 3),
        Boom,
    ),
}


@pytest.mark.few
@pytest.mark.parametrize("case", EARLIER)
@pytest.mark.filterwarnings("ignore:feature 0 of y has values of about")
def test_an_error_after_updates_leaves_an_earlier_fit_as_it_was(case):
    settings, first, second, callback, error = EARLIER[case]
    first = {"x": X, "y": Y, **first}
    est = make(**settings, random_state=0).fit(**first)
    before, predicted = picture(est), est.predict(first["x"])
    est.callbacks = callback
    with pytest.raises(error):
        est.fit(**{**first, **second})
    est.callbacks = None
    assert same(picture(est), before)
    assert np.array_equal(est.predict(first["x"]), predicted)
    assert est.partial_fit(**first).n_iter_ == 3  # and it goes on


def test_the_users_generator_is_as_before_an_error_that_leaves_the_earlier_fit():
    generator = np.random.default_rng(0)
    est = make(random_state=generator).fit(X, Y)
    before = generator.bit_generator.state
    with pytest.raises(Boom):
        est.set_params(callbacks=raises(Boom(), 3)).fit(X, Y)
    assert generator.bit_generator.state == before


@pytest.mark.few
@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyboardInterrupt, KeyboardInterrupt), (StopTraining, None)],
    ids=["interrupt", "stop"],
)
def test_what_a_user_ends_replaces_an_earlier_fit(error, raised):
    est = make(random_state=0).fit(X, Y)
    earlier = est.model_
    est.callbacks = raises(error(), 3, epoch=1)
    if raised is None:
        est.fit(X, Y)
    else:
        with pytest.raises(raised):
            est.fit(X, Y)
    alone = make(random_state=0, callbacks=raises(StopTraining(), 3, epoch=1)).fit(X, Y)
    assert est.model_ is not earlier
    assert torch.equal(net2vec(est), net2vec(alone))


@pytest.mark.parametrize("start", ["first fit", "warm_start", "partial_fit"])
def test_without_an_earlier_fit_or_going_on_from_it_what_was_learnt_stays(start):
    est, epochs = make(random_state=0, epochs=2), 1
    if start != "first fit":
        est.fit(X, Y)
        epochs = 3
    call = est.partial_fit if start == "partial_fit" else est.set_params(warm_start=True).fit
    with pytest.raises(Boom):
        est.set_params(callbacks=raises(Boom(), 3, epoch=epochs)) and call(X, Y)
    steps = next(iter(est.optimizer_.state.values()))["step"]
    assert steps == (epochs - 1) * STEPS + 3
    assert est.predict(X).shape == Y.shape


@pytest.mark.slow
def test_an_error_after_a_resume_leaves_an_earlier_fit_too(tmp_path):
    saves = Checkpointer(tmp_path, trigger=EveryNSteps(1))
    with pytest.raises(Boom):
        make(random_state=0, callbacks=[saves, raises(Boom(), 3)]).fit(X, Y)
    est = make(random_state=0).fit(X, Y)
    before = picture(est)
    with pytest.raises(Boom):
        est.set_params(callbacks=[saves, raises(Boom(), 4)]).fit(X, Y)
    est.callbacks = None
    assert same(picture(est), before)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_are_named_and_nothing_changes(off):
    x = np.random.default_rng(0).normal(size=(2, 3, 7)).astype("float32")
    est = Estimator(nn.Linear(2, 1), spec={"epochs": 1})
    with off(), pytest.raises(RuntimeError, match=r"gradients.*(no_grad|inference_mode)"):
        est.fit(x, x[:1])
    assert not hasattr(est, "model_")
    est.fit(x, x[:1])
    with off():
        assert est.evaluate(x, x[:1]) == pytest.approx(est.evaluate(x, x[:1]))
        with pytest.raises(RuntimeError, match=r"evaluate.gradient=True. needs gradients"):
            est.evaluate(x, x[:1], gradient=True)
