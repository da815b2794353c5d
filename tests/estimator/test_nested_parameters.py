"""Parameters inside arguments: found, set, searched; what the user gave stays as it is."""

import functools
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import cloudpickle  # with which joblib sends
import numpy as np
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, ParameterGrid
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import Bunch
from sklearn.utils.estimator_checks import (
    check_estimator_cloneable,
    check_get_params_invariance,
    check_no_attributes_set_in_init,
    check_parameters_default_constructible,
    check_set_params,
)
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler

from fluxutils_py import Estimator, EstimatorRegressor, Spec, net2vec
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.building import default_model
from fluxutils_py.nn import GRU, LSTM

F, N, T = 3, 7, 11  # nothing divides
X = np.random.default_rng(0).normal(size=(F, N, T))
Y = np.cumsum(X[::-1], 2) / 3  # as many features as X, so that both can be split along them
ADAMW = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip
SPEC = vars(Spec())


class Net(nn.Module):
    def __init__(self, n_in, n_out, hidden=4, *, cell=LSTM, bias):
        super().__init__()
        self.rnn, self.head = cell(n_in, hidden), nn.Linear(hidden, n_out, bias=bias)

    def forward(self, x):
        return self.head(self.rnn(x))


def make_net(n_features, hidden=5, n_outputs=1):
    return nn.Sequential(GRU(n_features, hidden), nn.Linear(hidden, n_outputs))


def make_lazy(n_out, eps=1e-5):
    return nn.Sequential(nn.LazyLinear(n_out), nn.LayerNorm(n_out, eps))


def make_open(n_in, n_out, width=2, **settings):
    return nn.Sequential(nn.Linear(n_in, width), nn.Linear(width, n_out, **settings))


def sgd(weights, lr=0.5, *, momentum):
    return SGD(weights, lr, momentum=momentum)


Triple = namedtuple("Triple", "epochs batchsize seqsize")


class Typed(NamedTuple):
    epochs: int
    batchsize: int
    seqsize: int | None = None


@dataclass(frozen=True)
class Frozen:
    epochs: int
    batchsize: int
    seqsize: int | None = None
    note: str = "mine"
    steps: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "steps", self.epochs * self.batchsize)


class Plain:
    clip = 3.0

    def __init__(self, epochs, batchsize, seqsize):
        self.epochs, self.batchsize, self.seqsize = epochs, batchsize, seqsize
        self._secret = 1


class Slots:
    __slots__ = ("batchsize", "epochs", "seqsize")

    def __init__(self, epochs, batchsize, seqsize):
        self.epochs, self.batchsize, self.seqsize = epochs, batchsize, seqsize


SPECS = {
    "dict": lambda **k: dict(k),
    "ordered dict": lambda **k: OrderedDict(k),
    "bunch": lambda **k: Bunch(**k),
    "frozen mapping": lambda **k: MappingProxyType(k),
    "namedtuple": lambda **k: Triple(**k),
    "typed namedtuple": lambda **k: Typed(**k),
    "frozen dataclass": lambda **k: Frozen(**k),
    "plain object": lambda **k: Plain(**k),
    "slots": lambda **k: Slots(**k),
    "namespace": lambda **k: SimpleNamespace(**k),
    "Spec": lambda **k: Spec(**k),
}


def inside(est, argument):
    """What get_params finds inside an argument, by short names."""
    return {
        k.removeprefix(f"{argument}__"): v
        for k, v in est.get_params().items()
        if k.startswith(f"{argument}__")
    }


def fields(spec):
    return {
        name: getattr(spec, name) if not hasattr(spec, "keys") else spec[name]
        for name in Triple._fields
    }


def instance():
    torch.manual_seed(1)
    return nn.Sequential(LSTM(F, 4), nn.Linear(4, F)).double()


def learnt(est):
    """What a fit learns."""
    return net2vec(est.fit(X, Y).model_)


# -- found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (None, {"n_hidden": 32}),
        (Net, {"hidden": 4, "cell": LSTM}),  # bias has no value yet
        (make_net, {"hidden": 5}),
        (functools.partial(Net, hidden=9, bias=True), {"hidden": 9, "cell": LSTM, "bias": True}),
        (functools.partial(Net, 3, bias=True), {"hidden": 4, "cell": LSTM, "bias": True}),
        (functools.partial(make_open, bias=False), {"width": 2, "bias": False}),
        (functools.partial(make_net, oops=1), {"oops": 1}),
        (functools.partial(Net, cell=functools.partial(GRU, num_layers=2), bias=True),
         {"hidden": 4, "bias": True, "cell__num_layers": 2, "cell__dropout": 0.0, "cell__bias": True,
              "cell__trainable_init": False}),
        (instance(), {}),
        (3, {}),
    ],
)  # fmt: skip
def test_what_is_inside_a_model_is_found(model, found):
    params = inside(Estimator(model), "model")
    cell = params.get("cell")
    if isinstance(cell, functools.partial):
        assert params.pop("cell") is model.keywords["cell"]
    assert params == found


def test_what_is_inside_an_optimizer_is_found():
    assert inside(Estimator(), "opt") == {**ADAMW, "lr": 0.01}  # of the model that None is
    assert inside(Estimator(opt=AdamW), "opt") == ADAMW
    assert inside(Estimator(opt=functools.partial(AdamW, lr=0.3)), "opt") == {**ADAMW, "lr": 0.3}
    assert inside(Estimator(opt=sgd), "opt") == {"lr": 0.5}
    assert inside(Estimator(opt=lambda p: SGD(p, 0.1)), "opt") == {}


@pytest.mark.parametrize("kind", SPECS)
def test_what_is_inside_a_spec_is_found(kind):
    found = inside(Estimator(spec=SPECS[kind](epochs=2, batchsize=3, seqsize=5)), "spec")
    more = {"plain object": {"clip": 3.0}, "frozen dataclass": {"note": "mine"}, "Spec": SPEC}
    assert found == {**more.get(kind, {}), "epochs": 2, "batchsize": 3, "seqsize": 5}


def test_no_spec_shows_the_defaults():
    assert inside(Estimator(), "spec") == SPEC


def test_what_is_inside_a_schedule_is_found():
    spec = Spec(lr_schedule=functools.partial(lr_scheduler.StepLR, step_size=5))
    found = inside(Estimator(spec=spec), "spec__lr_schedule")
    assert found == {"step_size": 5, "gamma": 0.1, "last_epoch": -1}


def test_subclasses_may_do_without_the_arguments():
    class Flat(Estimator):
        def __init__(self, lr=0.1, spec=None):
            super().__init__(opt=functools.partial(AdamW, lr=lr), spec=spec)
            self.lr = lr

    est = Flat(spec={"epochs": 1, "batchsize": 2, "seqsize": 3}).set_params(lr=0.2, spec__epochs=4)
    assert est.get_params() == {
        "lr": 0.2, "spec": {"epochs": 4, "batchsize": 2, "seqsize": 3},
        "spec__epochs": 4, "spec__batchsize": 2, "spec__seqsize": 3,
    }  # fmt: skip


def test_only_deep_asks_for_what_is_inside():
    assert list(Estimator().get_params(deep=False)) == Estimator._get_param_names()


# -- set ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECS)
def test_a_spec_is_replaced_by_one_that_differs(kind):
    spec = SPECS[kind](epochs=2, batchsize=3, seqsize=5)
    est = Estimator(spec=spec)
    assert est.set_params(spec__batchsize=4, spec__seqsize=None) is est
    assert fields(spec) == {"epochs": 2, "batchsize": 3, "seqsize": 5}
    assert fields(est.spec) == {"epochs": 2, "batchsize": 4, "seqsize": None}
    assert type(est.spec) is (type(spec) if kind in ("frozen dataclass", "Spec") else dict)
    if kind == "frozen dataclass":
        assert est.spec.steps == 8


@pytest.mark.parametrize("kind", SPECS)
def test_optional_fields_of_a_spec_can_be_added_where_it_takes_more(kind):
    spec = SPECS[kind](epochs=2, batchsize=3, seqsize=5)
    est = Estimator(spec=spec)
    if kind == "frozen dataclass":
        with pytest.raises(SpecError, match=r"^Invalid parameter 'patience' for spec "):
            est.set_params(spec__patience=6)
        assert est.spec is spec
    else:
        est.set_params(spec__patience=6)
        assert inside(est, "spec")["patience"] == 6
        assert inside(Estimator(spec=spec), "spec").get("patience") is None


def test_a_class_or_function_becomes_a_partial():
    est = Estimator(Net, opt=SGD).set_params(model__hidden=6, model__bias=True, opt__lr=0.1)
    assert (est.model.func, est.model.keywords) == (Net, {"hidden": 6, "bias": True})
    assert (est.opt.func, est.opt.keywords) == (SGD, {"lr": 0.1})
    est = Estimator(make_net, opt=sgd).set_params(model__hidden=6, opt__momentum=0.1)
    assert (est.model.func, est.model.keywords) == (make_net, {"hidden": 6})
    assert (est.opt.func, est.opt.keywords) == (sgd, {"momentum": 0.1})


def test_a_partial_keeps_its_other_arguments():
    model = functools.partial(Net, 3, bias=True, hidden=2)
    est = Estimator(model).set_params(model__hidden=6)
    assert (est.model.func, est.model.args, est.model.keywords) == (
        Net,
        (3,),
        {"bias": True, "hidden": 6},
    )
    assert model.keywords == {"bias": True, "hidden": 2}


def test_nothing_given_becomes_the_default_with_what_is_set():
    est = Estimator().set_params(model__n_hidden=6, opt__lr=0.1, spec__epochs=2)
    assert (est.model.func, est.model.keywords) == (default_model, {"n_hidden": 6})
    assert (est.opt.func, est.opt.keywords) == (AdamW, {"lr": 0.1})
    assert est.spec == Spec(epochs=2)


def test_what_is_set_builds_on_the_defaults_of_the_estimator():
    est = EstimatorRegressor()  # a learning rate of 0.01
    assert (est.get_params()["spec__epochs"], est.get_params()["opt__lr"]) == (None, 0.01)
    assert inside(est, "opt") == {**ADAMW, "lr": 0.01}
    est.set_params(spec__batchsize=4, opt__weight_decay=0.5, model__n_hidden=3)
    assert est.spec == Spec(batchsize=4)
    assert (est.opt.func, est.opt.keywords) == (AdamW, {"lr": 0.01, "weight_decay": 0.5})


def test_what_is_set_to_none_is_the_default_again():
    est = EstimatorRegressor(spec=Spec(epochs=2), opt=SGD).set_params(
        spec=None, spec__batchsize=4, opt=None, opt__eps=1
    )
    assert est.spec == Spec(batchsize=4)
    assert (est.opt.func, est.opt.keywords) == (AdamW, {"lr": 0.01, "eps": 1})


def test_a_callable_dataclass_is_a_model_with_fields():
    @dataclass(frozen=True)
    class Maker:
        hidden: int = 3

        def __call__(self, n_in, n_out):
            return make_net(n_in, self.hidden, n_out)

    est = Estimator(Maker(), spec=Spec(epochs=1), random_state=0).set_params(model__hidden=6)
    assert est.model == Maker(6)
    assert est.fit(X, Y).model_[1].in_features == 6


def test_parameters_inside_parameters_are_set_the_same_way():
    step = functools.partial(lr_scheduler.StepLR, step_size=5)
    est = Estimator(functools.partial(Net, bias=True), spec=Spec(lr_schedule=step))
    est.set_params(spec__lr_schedule__step_size=2, spec__epochs=3, model__cell__num_layers=2)
    assert (est.spec.lr_schedule.func, est.spec.lr_schedule.keywords) == (
        lr_scheduler.StepLR,
        {"step_size": 2},
    )
    assert est.spec.epochs == 3
    assert (est.model.keywords["cell"].func, est.model.keywords["cell"].keywords) == (
        LSTM,
        {"num_layers": 2},
    )
    assert step.keywords == {"step_size": 5}


def test_arguments_come_before_what_is_inside_them():
    wide = functools.partial(GRU, num_layers=2)
    est = Estimator(spec=Spec(epochs=7)).set_params(
        spec__epochs=3, spec={"epochs": 1, "batchsize": 2, "seqsize": 5},
        model__cell__bias=False, model__cell=wide, model=functools.partial(Net, bias=True),
    )  # fmt: skip
    assert est.spec == {"epochs": 3, "batchsize": 2, "seqsize": 5}
    assert est.model.keywords["cell"].keywords == {"num_layers": 2, "bias": False}
    assert wide.keywords == {"num_layers": 2}


@pytest.mark.slow
def test_what_get_params_gives_can_be_set_again():
    spec = {"epochs": 2, "batchsize": 4, "seqsize": 5}
    for est in (
        Estimator(spec=spec),
        Estimator(functools.partial(Net, bias=True), None, SGD, Triple(**spec)),
    ):
        est.random_state = 0
        again = clone(est).set_params(**est.get_params())
        assert {k: v for k, v in again.get_params().items() if "__" in k} == {
            k: v for k, v in est.get_params().items() if "__" in k
        }
        torch.testing.assert_close(learnt(again), learnt(est))


# -- what is set is what fit uses -----------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("kind", SPECS)
def test_fit_uses_what_was_set(kind):
    est = Estimator(spec=SPECS[kind](epochs=1, batchsize=7, seqsize=11), random_state=0)
    est.set_params(
        spec__epochs=2, spec__batchsize=4, spec__seqsize=5, opt__lr=0.1, model__n_hidden=3
    )
    spec = {
        "epochs": 2,
        "batchsize": 4,
        "seqsize": 5,
        **({"clip": 3.0} if kind == "plain object" else {}),
    }
    plain = Estimator(
        functools.partial(default_model, n_hidden=3), None, functools.partial(AdamW, lr=0.1), spec
    )
    assert torch.equal(learnt(est), learnt(plain.set_params(random_state=0)))


def test_setting_a_default_changes_nothing_but_rounding():
    plain = Estimator(spec=Spec(epochs=3, batchsize=4, seqsize=5), random_state=0)
    same = clone(plain).set_params(opt__lr=0.01, model__n_hidden=32)
    torch.testing.assert_close(learnt(same), learnt(plain), rtol=1e-12, atol=1e-12)


# -- what cannot be set ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("est", "params", "message"),
    [
        (Estimator(Net), {"model__hiden": 3},
         "Invalid parameter 'hiden' for model (Net). Valid parameters are: ['bias', 'cell', "
         "'hidden']."),
        (Estimator(functools.partial(make_net, hidden=2)), {"model__width": 3},
         "Invalid parameter 'width' for model (make_net). Valid parameters are: ['hidden']."),
        (Estimator(make_lazy), {"model__epss": 3},
         "Invalid parameter 'epss' for model (make_lazy). Valid parameters are: ['eps']."),
        (Estimator(opt=sgd), {"opt__weights": 3},
         "Invalid parameter 'weights' for opt (sgd). Valid parameters are: ['lr', 'momentum']."),
        (Estimator(), {"opt__epochs": 3},
         f"Invalid parameter 'epochs' for opt (AdamW). Valid parameters are: {sorted(ADAMW)}."),
        (Estimator(), {"spec__batch_size": 3},
         f"Invalid parameter 'batch_size' for spec (Spec). Valid parameters are: {sorted(SPEC)}."),
        (Estimator(spec={"epochs": 1, "batchsize": 2, "seqsize": 3, "note": 4}), {"spec__batch_size": 3},
         "Invalid parameter 'batch_size' for spec (dict). Valid parameters are: "
         f"{sorted([*SPEC, 'note'])}."),
        (Estimator(spec=Frozen(1, 2, 3)), {"spec__steps": 3},
         "Invalid parameter 'steps' for spec (Frozen). "
         "Valid parameters are: ['batchsize', 'epochs', 'note', 'seqsize']."),
        (Estimator(opt=SGD(instance().parameters(), 0.1)), {"opt__lr": 3},
         "Invalid parameter 'lr' for opt (SGD): an instance cannot be built again; "
         "give its class, a function that makes one, or a functools.partial of either."),
        (Estimator(spec=Plain(1, 2, 3)), {"spec__foo": 3},
         f"Invalid parameter 'foo' for spec (Plain). Valid parameters are: {sorted(SPEC)}."),
        (Estimator(spec=3), {"spec__epochs__foo": 3},
         "Invalid parameter 'epochs' for spec (int). Valid parameters are: []."),
        (Estimator(instance()), {"model__hidden": 3},
         "Invalid parameter 'hidden' for model (Sequential): an instance cannot be built again; "
         "give its class, a function that makes one, or a functools.partial of either."),
        (Estimator(Net), {"model__n_in": 3}, "Invalid parameter 'n_in' for model (Net): fit fills it in."),
        (Estimator(make_net), {"model__n_outputs": 3},
         "Invalid parameter 'n_outputs' for model (make_net): fit fills it in."),
        (Estimator(make_open), {"model__n_in": 3}, "Invalid parameter 'n_in' for model (make_open): fit fills it in."),
        (Estimator(), {"opt__params": 3}, "Invalid parameter 'params' for opt (AdamW): fit fills it in."),
        (Estimator(spec=Spec(lr_schedule=lr_scheduler.StepLR)), {"spec__lr_schedule__stepsize": 3},
         "Invalid parameter 'stepsize' for spec__lr_schedule (StepLR). Valid parameters are: "
         "['gamma', 'last_epoch', 'step_size']."),
        (Estimator(), {"spec__epochs__foo": 3},
         "Invalid parameter 'foo' for spec__epochs (NoneType). Valid parameters are: []."),
        (Estimator(), {"batchsize": 3},
         f"Invalid parameter 'batchsize' for estimator Estimator. Valid parameters are: "
         f"{Estimator._get_param_names()}. It is a field of the spec: spec__batchsize."),
        (Estimator(), {"modle__n_hidden": 3},
         f"Invalid parameter 'modle__n_hidden' for estimator Estimator. Valid parameters are: "
         f"{Estimator._get_param_names()}."),
        (Estimator(loss=nn.HuberLoss()), {"loss__delta": 3},
         "Invalid parameter 'loss__delta' for estimator Estimator: what is inside loss cannot be "
         "set; give loss as a whole."),
    ],
)  # fmt: skip
def test_unknown_names_are_errors_that_help(est, params, message):
    before = repr(est.get_params())
    with pytest.raises(SpecError) as error:
        est.set_params(verbose=False, spec=est.spec, **params)
    assert str(error.value) == message
    assert repr(est.get_params()) == before


def test_nothing_is_set_when_one_name_is_unknown():
    est = Estimator()
    for wrong in ("opt__foo", "foo", "loss__foo", "foo__bar"):
        with pytest.raises(ValueError, match=r"^Invalid parameter "):
            est.set_params(warm_start=True, model__n_hidden=3, spec=Spec(epochs=2), **{wrong: 1})
        assert (est.warm_start, est.model, est.opt, est.spec) == (False, None, None, None)


def test_functions_that_take_anything_are_given_anything():
    est = Estimator(make_open, spec=Spec(epochs=1)).set_params(model__bias=False, model__widht=3)
    assert est.model.keywords == {"bias": False, "widht": 3}


# -- scikit-learn's tools ---------------------------------------------------------------------------------------


@pytest.fixture
def sent_by_value():
    """Other processes cannot import this file."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
@pytest.mark.usefixtures("sent_by_value", "forked_workers")
@pytest.mark.parametrize("kind", ["dict", "namedtuple", "frozen dataclass", "plain object", "Spec"])
def test_grids_search_inside_arguments_in_several_processes(kind):
    spec = SPECS[kind](epochs=2, batchsize=7, seqsize=5)
    est = Estimator(functools.partial(Net, bias=True), None, AdamW, spec, random_state=0)
    grid = {"spec__batchsize": [3, 4], "opt__lr": [0.1, 0.01], "model__hidden": [2, 3]}
    everything = np.arange(F)  # a split that keeps all of (F, N, T)
    search = GridSearchCV(
        est, grid, cv=[(everything, everything)], n_jobs=2, error_score="raise"
    ).fit(X, Y)

    clip = {"clip": 3.0} if kind == "plain object" else {}
    scores = [
        Estimator(
            functools.partial(Net, hidden=p["model__hidden"], bias=True),
            None,
            functools.partial(AdamW, lr=p["opt__lr"]),
            {"epochs": 2, "batchsize": p["spec__batchsize"], "seqsize": 5, **clip},
            random_state=0,
        )
        .fit(X, Y)
        .score(X, Y)
        for p in ParameterGrid(grid)
    ]
    assert len(set(scores)) == 8
    assert search.cv_results_["mean_test_score"] == pytest.approx(scores, rel=1e-9)
    best = search.best_estimator_
    assert best.model.keywords["hidden"] == search.best_params_["model__hidden"]
    assert fields(spec) == {"epochs": 2, "batchsize": 7, "seqsize": 5}
    assert (est.spec, est.opt) == (spec, AdamW)


def test_pipelines_reach_inside():
    pipe = Pipeline([("same", FunctionTransformer()), ("net", Estimator(spec=Spec(epochs=2)))])
    assert pipe.get_params()["net__spec__epochs"] == 2
    pipe.set_params(net__spec__epochs=3, net__opt__lr=0.1)
    assert pipe["net"].spec == Spec(epochs=3)
    assert clone(pipe)["net"].get_params()["opt__lr"] == 0.1


def test_clones_have_the_same_parameters():
    est = Estimator(functools.partial(Net, bias=True), spec=Plain(1, 2, 3)).set_params(
        opt__lr=0.1, model__hidden=9
    )
    again = clone(est)
    assert repr(inside(again, "model")) == repr(inside(est, "model"))
    assert inside(again, "opt") == inside(est, "opt")
    assert inside(again, "spec") == inside(est, "spec")
    assert again.spec is not est.spec


@pytest.mark.parametrize(
    "check",
    [
        check_estimator_cloneable,
        check_get_params_invariance,
        check_no_attributes_set_in_init,
        check_parameters_default_constructible,
        check_set_params,
    ],
)
def test_scikit_learns_checks_of_parameters(check):
    check("Estimator", Estimator(functools.partial(Net, bias=True), None, AdamW, Spec(epochs=1)))


def test_a_clone_keeps_requests_for_metadata_and_an_optimizer_bound_to_its_model():
    model = nn.Sequential(LSTM(F, 4), nn.Linear(4, F)).double()
    est = Estimator(
        model,
        opt=AdamW(model.parameters(), lr=0.1),
        spec={"epochs": 1, "batchsize": 4, "seqsize": 5},
    )
    with sklearn.config_context(enable_metadata_routing=True):
        est.set_fit_request(sample_weight=True)
        twin = clone(est)
        assert twin.get_metadata_routing().fit.requests["sample_weight"] is True
    held = {id(p) for p in twin.opt.param_groups[0]["params"]}
    assert held == {id(p) for p in twin.model.parameters()}
    assert held.isdisjoint(id(p) for p in model.parameters())


def test_showing_an_estimator_in_a_notebook_changes_nothing():
    est = Estimator(spec=Spec(1, 4, 5), verbose=False).fit(X, Y)
    before = dict(vars(est))
    assert "epochs=1" in est._repr_html_()
    assert vars(est) == before
