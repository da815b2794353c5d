"""A spec of any form may leave out what ``Spec()`` has a default for."""

from argparse import Namespace
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

from fluxutils_py import Estimator, Spec
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.spec import read_spec


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
        ({"epoch": 3}, "spec has no field 'epochs' (found: epoch); did you mean 'epochs' where it says 'epoch'?"),
        (
            Namespace(epochs=3, seq_size=5),
            "spec has no field 'seqsize' (found: epochs, seq_size); did you mean 'seqsize' where it says 'seq_size'?",
        ),
        (
            namedtuple("S", "epochs batch_size")(3, 5),
            "spec has no field 'batchsize' (found: epochs, batch_size); did you mean 'batchsize' where it says "
            "'batch_size'?",
        ),
        (
            {},
            "spec has none of the fields epochs, batchsize, seqsize, shuffle, overlap, burn_in, clip, accumulate, "
            "patience, rebatch, scheduler, schedule_every, precision (found: none); None means the defaults",
        ),
    ],
)
def test_a_misspelt_name_is_an_error(spec, message):
    with pytest.raises(SpecError) as caught:
        read_spec(spec)
    assert str(caught.value) == message


def test_numbers_are_pythons():
    found = read_spec({"epochs": np.int64(2), "clip": np.float32(0.5), "shuffle": np.True_, "rebatch": np.False_})
    assert [type(v) for v in (found.epochs, found.clip, found.shuffle, found.rebatch)] == [int, float, bool, bool]


@pytest.mark.parametrize(
    ("name", "value"), [("scaling", "strong"), ("n_jobs", 2), ("random_state", 0), ("device", "cpu"), ("verbose", 1)]
)
@pytest.mark.parametrize(
    "make", [dict, lambda **fields: namedtuple("S", fields)(**fields), Namespace], ids=["dict", "namedtuple", "object"]
)
def test_an_argument_of_the_estimator_in_spec_is_refused(make, name, value):
    spec = make(**{"epochs": 1, "batchsize": 2, "seqsize": 3, name: value})
    x = np.zeros((1, 2, 6), "float32")
    with pytest.raises(SpecError, match=f"'{name}'.*argument of the estimator.*{name}={value!r}"):
        Estimator(spec=spec).fit(x, x)
