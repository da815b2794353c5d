"""Tables in notebooks: read back from the HTML with Python's own parser."""

from functools import partial
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from fluxutils_py import Estimator, EstimatorRegressor, Spec
from fluxutils_py.nn import LSTM
from tests.versions import skip_before

X = np.random.default_rng(0).normal(size=(3, 7, 11)).astype("float32")
Y = X.mean(0, keepdims=True)


@pytest.fixture(autouse=True)
def tables():
    skip_before("scikit-learn", "1.8", "tables of parameters and fitted attributes")


class Cells(HTMLParser):
    """The rows of all tables, each with its class before its cells."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.inside = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([dict(attrs).get("class")])
        if tag == "td":
            self.inside = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "td"

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data.strip()


def parameters(est):
    """Name, value and whether it is set, in the order shown."""
    return [
        (row[2], row[3], row[0] == "user-set")
        for row in Cells(est._repr_html_()).rows
        if "" in row[1:2]
    ]


def attributes(est):
    return {row[1]: row[3] for row in Cells(est._repr_html_()).rows if len(row) == 4 and row[1]}


def network():
    return nn.Sequential(LSTM(3, 8), nn.Linear(8, 1))


def test_what_is_set_comes_first_and_in_its_place():
    schedule = partial(lr_scheduler.StepLR, step_size=5)
    est = Estimator(
        network(), nn.L1Loss(), partial(AdamW, lr=0.02), Spec(3, 4, 5, lr_schedule=schedule)
    )
    rows = parameters(est)
    n = sum(p.numel() for p in network().parameters())
    assert rows[:12] == [
        ("model", f"Sequential, {n} parameters", True),
        ("loss", "L1Loss()", True),
        ("opt", "AdamW(lr=0.02)", True),
        ("opt__lr", "0.02", True),
        ("spec", "Spec(...)", True),
        ("spec__epochs", "3", True),
        ("spec__batchsize", "4", True),
        ("spec__seqsize", "5", True),
        ("spec__lr_schedule", "StepLR(step_size=5)", True),
        ("spec__lr_schedule__step_size", "5", True),
        ("spec__lr_schedule__gamma", "0.1", True),
        ("spec__lr_schedule__last_epoch", "-1", True),
    ]
    assert not any(is_set for *_, is_set in rows[12:])
    assert {name for name, *_ in rows} == set(est.get_params())


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({}, []),
        ({"model": nn.LSTM, "opt": SGD}, [("model", "LSTM"), ("opt", "SGD")]),
        ({"spec": {"epochs": None, "batchsize": 4}},
         [("spec", "{'batchsize': 4, 'epochs': None}"), ("spec__batchsize", "4")]),
        ({"model": nn.LazyLinear(1), "callbacks": len},
         [("model", "LazyLinear(in...=1, bias=True)"), ("callbacks", "<built-in function len>")]),
        ({"model": nn.Sequential(nn.LazyLinear(1), nn.Linear(2, 3))}, [("model", "Sequential, 9 parameters")]),
    ],
)  # fmt: skip
def test_defaults_do_not_count_as_set(arguments, rows):
    assert [
        (name, value) for name, value, is_set in parameters(Estimator(**arguments)) if is_set
    ] == rows


def test_defaults_of_typed_estimators_do_not_count_as_set():
    assert not [row for row in parameters(EstimatorRegressor()) if row[2]]
    assert ("spec__epochs", "None", False) in parameters(EstimatorRegressor())


def test_settings_of_an_optimizer_count_as_set_if_they_are_not_its_defaults():
    net = network()
    rows = parameters(Estimator(net, opt=Adam(net.parameters(), eps=1e-3)))
    assert [row for row in rows if row[2]][1:] == [
        ("opt", "Adam(lr=0.001)", True),
        ("opt__eps", "0.001", True),
    ]


def test_fitted_attributes_are_short():
    est = Estimator(network(), spec=Spec(3, 4, 5)).fit(X, Y)
    shown = attributes(est)
    assert shown["model_"] == "Sequential, 425 parameters"
    assert shown["optimizer_"] == "AdamW(lr=0.001)"
    assert shown["history_"] == "3 records"
    assert shown["n_iter_"] == "3"
    assert type(est.model_) is nn.Sequential  # shown so, not made so
    assert isinstance(est.history_[0], dict)


def test_nothing_is_changed_or_drawn_by_showing():
    est = Estimator(network(), spec=Spec(3, 4, 5)).fit(X, Y)
    before, state = dict(vars(est)), torch.get_rng_state()
    est._repr_html_()
    assert vars(est) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_pipelines_show_it_too():
    assert (
        "Sequential, 425 parameters"
        in make_pipeline(StandardScaler(), Estimator(network()))._repr_html_()
    )


def test_other_nested_estimators_keep_their_place():
    class Callback(BaseEstimator):
        def __init__(self, depth=3):
            self.depth = depth

    rows = parameters(Estimator(callbacks=Callback()))
    assert ("callbacks__depth", "3", True) in rows
    assert not [name for name, _, is_set in rows if is_set and not name.startswith("callbacks")]
