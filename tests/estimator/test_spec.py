"""A spec of any form may leave out what ``Spec()`` has a default for."""

import collections
import dataclasses
import inspect
import pickle
import types
from argparse import Namespace
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
from sklearn.base import clone

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceRegressor,
    Spec,
)
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.spec import ARGUMENTS, NAMES, read_spec
from fluxutils_py.forecasting import Forecaster


@dataclass
class Sizes:
    seqsize: int = 5


class Slots:
    __slots__ = ("seqsize",)

    def __init__(self):
        self.seqsize = 5


@pytest.mark.parametrize(
    "spec",
    [
        {"seqsize": 5},
        {"seqsize": 5, "depth": 3},
        namedtuple("S", "seqsize")(5),
        Sizes(),
        Slots(),
        Namespace(seqsize=5, output="runs"),
        Spec(seqsize=5),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_what_is_left_out_is_the_default(spec):
    assert read_spec(spec) == Spec(seqsize=5)


def test_a_fit_takes_it(rng):
    x = rng.normal(size=(1, 3, 7))
    est = Estimator(spec={"epochs": 2}, random_state=0).fit(x, x)
    assert est.loss_curve_ == Estimator(spec=Spec(epochs=2), random_state=0).fit(x, x).loss_curve_


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"epoch": 3},
            "spec field 'epoch' is not used; did you mean 'epochs'?",
        ),
        (
            Namespace(epochs=3, seq_size=5),
            "spec field 'seq_size' is not used; did you mean 'seqsize'?",
        ),
        (
            namedtuple("S", "epochs batch_size")(3, 5),
            "spec field 'batch_size' is not used; did you mean 'batchsize'?",
        ),
        (
            {},
            "spec has none of the fields epochs, batchsize, seqsize, shuffle, overlap, burn_in, "
            "clip, accumulate, patience, rebatch, precision, max_updates, lr_schedule, gradient "
            "(found: none); None means the defaults",
        ),
    ],
)
def test_a_misspelt_name_is_an_error(spec, message):
    with pytest.raises(SpecError) as caught:
        read_spec(spec)
    assert str(caught.value) == message


def test_numbers_are_pythons():
    found = read_spec(
        {"epochs": np.int64(2), "clip": np.float32(0.5), "shuffle": np.True_, "rebatch": np.False_}
    )
    assert [type(v) for v in (found.epochs, found.clip, found.shuffle, found.rebatch)] == [
        int,
        float,
        bool,
        bool,
    ]


@pytest.mark.parametrize(
    "field", ["scaling", "device", "random_state", "verbose", "callbacks", "warm_start"]
)
@pytest.mark.parametrize("form", ["dict", "namedtuple", "dataclass", "object"])
def test_an_argument_of_the_estimator_in_a_spec_is_refused_with_its_place(field, form):
    fields = {"epochs": 2, field: 1}
    made = {
        "dict": lambda: fields,
        "namedtuple": lambda: collections.namedtuple("S", fields)(**fields),
        "dataclass": lambda: dataclasses.make_dataclass("S", fields)(**fields),
        "object": lambda: types.SimpleNamespace(**fields),
    }[form]()
    with pytest.raises(SpecError, match=rf"{field}.*Estimator\(\.\.\., {field}="):
        read_spec(made)


def test_a_learning_rate_in_a_spec_is_sent_to_the_optimizer():
    with pytest.raises(SpecError, match=r"'lr'.*opt="):
        read_spec({"epochs": 2, "lr": 0.1})


def test_fields_that_are_none_or_nothing_of_ours_are_left_alone():
    assert read_spec({"epochs": 2, "device": None, "project": "x"}) == Spec(epochs=2)


def test_all_arguments_of_all_estimators_are_known():
    arguments = set(inspect.signature(Estimator).parameters)
    for cls in (EstimatorClassifier, EstimatorRegressor):
        arguments |= set(inspect.signature(cls).parameters)
    assert arguments - {"spec"} <= {*ARGUMENTS, *NAMES}


def test_a_misspelt_argument_of_spec_is_named():
    with pytest.raises(SpecError, match=r"'seq_size'.*'seqsize'"):
        Spec(seq_size=3)
    with pytest.raises(SpecError, match=r"'device'.*Estimator\("):
        Spec(device="cpu")
    assert list(inspect.signature(Spec).parameters) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("spec", [None, Spec(), {"batchsize": 16}, {"seqsize": None}])
def test_epochs_have_one_default_wherever_they_are_left_out(spec):
    x = np.random.default_rng(0).normal(size=(1, 3, 2)).astype("float32")
    assert Estimator(spec=spec).fit(x, x).n_iter_ == 100


UNKNOWN = [
    (Estimator, "seqsize", r"it is a field of the spec: spec=\{'seqsize': \.\.\.\}$"),
    (EstimatorRegressor, "burn_in", r"it is a field of the spec: spec=\{'burn_in': \.\.\.\}$"),
    (
        EstimatorClassifier,
        "seq_size",
        r"did you mean 'seqsize', a field of the spec: spec=\{'seqsize': \.\.\.\}\?$",
    ),
    (Estimator, "early_stopping", r"set patience=n in the spec, .*fit\(\.\.\., validation_data="),
    (EstimatorClassifier, "early_stopping", r"set patience=n in the spec, .*validation_data="),
    (Estimator, "random_sate", r"did you mean 'random_state'\?$"),
    (SequenceRegressor, "seq_size", r"did you mean 'seqsize'\?$"),
    (SequenceClassifier, "scale_weight", r"did you mean 'class_weight'\?$"),
    (SequenceRegressor, "accumulate", r"it is a field of the spec: spec=\{'accumulate': \.\.\.\}$"),
    (SequenceClassifier, "clip", r"it is a field of the spec: spec=\{'clip': \.\.\.\}$"),
    (
        SequenceRegressor,
        "n_iter_no_change",
        r"give spec=\{'patience': n\}, with early_stopping=True",
    ),
    (SequenceClassifier, "validation_fraction", "a tenth is held out; .*validation_data"),
    (SequenceRegressor, "scaling", "all ranks share each minibatch"),
    (SequenceRegressor, "compile", r"EstimatorRegressor\(model, compile=True\)"),
    (SequenceRegressor, "n_lags", "its former default always holds; .*EstimatorRegressor"),
    (
        Forecaster,
        "accumulate",
        r"field of the spec that an Estimator takes: .*spec=\{'accumulate': \.\.\.\}",
    ),
    (Forecaster, "max_step", r"did you mean 'max_steps'\?$"),
    (SequenceRegressor, "zzz", r"it has hidden_size, num_layers, "),
]


@pytest.mark.parametrize(("cls", "name", "remedy"), UNKNOWN)
def test_an_unknown_argument_of_an_estimator_is_named_with_what_was_meant(cls, name, remedy):
    with pytest.raises(TypeError, match=rf"^{cls.__name__} has no parameter '{name}'; .*{remedy}"):
        cls(**{name: 3})


@pytest.mark.parametrize("cls", [Estimator, EstimatorRegressor, SequenceRegressor, Forecaster])
def test_signature_clone_and_pickle_are_those_of_a_plain_constructor(cls):
    est = cls(3, random_state=7)
    given = inspect.signature(cls).parameters
    assert list(inspect.signature(cls.__init__).parameters)[1:] == list(given)
    assert given["random_state"].default is None
    assert {name for name in est.get_params(deep=False)} == set(given)
    for copied in (clone(est), pickle.loads(pickle.dumps(est))):
        assert type(copied) is cls
        assert copied.get_params(deep=False) == est.get_params(deep=False)
