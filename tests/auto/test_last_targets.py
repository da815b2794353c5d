"""Steps without a target after the last one, and series without any, are as if not there."""

import numpy as np
import pytest
import torch

from fluxutils_py import SequenceRegressor
from fluxutils_py.auto.last_targets import steps_to_learn_from
from fluxutils_py.data import SampleWeight
from fluxutils_py.estimator import fitting
from fluxutils_py.inputs.inputs import Schema
from fluxutils_py.inputs.targets import SeriesReader
from tests.plain_networks import LagClassifier, LagRegressor

LENGTHS = [230, 257, 190, 240, 257, 201, 230, 222, 257, 213, 180, 250]
LINEAR = {"n_lags": 4, "verbose": False}


def series(lengths, dtype="float64"):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(2, n)).cumsum(1).astype(dtype) for n in lengths]
    return xs, [x[:1] - np.roll(x[1:], 2, 1) + rng.normal(size=(1, x.shape[1])) for x in xs]


def padded(arrays, n_steps, filling=np.nan):
    out = np.full((len(arrays[0]), len(arrays), n_steps), filling)
    for i, a in enumerate(arrays):
        out[:, i, : a.shape[1]] = a
    return out


def parameters(est):
    return torch.cat([p.detach().flatten() for p in est.model_.state_dict().values()])


def assert_same_model(a, b):
    torch.testing.assert_close(parameters(a), parameters(b), rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def cases():
    """Of each kind: an estimator, lists of series, and what is fitted on them."""
    made = {}
    for name in ("numbers", "labels", "groups", "one series"):
        xs, ys = series([2600] if name == "one series" else LENGTHS)
        more = {"groups": np.arange(12) // 2} if name == "groups" else {}
        est = LagRegressor(**LINEAR)
        if name == "labels":
            est = LagClassifier(**LINEAR)
            ys = [(y > 0).astype(float) for y in ys]
        made[name] = type(est), xs, ys, more, est.fit(xs, ys, **more)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tail"),
    [("numbers", 20), ("numbers", 100), ("numbers", 400), ("labels", 400), ("groups", 100),
     ("one series", 400)],
)  # fmt: skip
def test_a_tail_without_targets_leaves_the_model_as_it_is(cases, name, tail):
    make, xs, ys, more, expected = cases[name]
    n_steps = max(x.shape[1] for x in xs) + tail
    filling = np.nan if tail != 20 else 0.0
    x, y = padded(xs, n_steps, filling), padded(ys, n_steps)
    assert_same_model(make(**LINEAR).fit(x, y, **more), expected)


def test_a_tail_of_weight_0_and_series_of_weight_0_are_absent(cases):
    make, xs, ys, _, expected = cases["numbers"]
    others = [x + 100 for x in xs[:3]]
    x = padded([*xs[:5], *others, *xs[5:]], 600)
    y = padded([*ys[:5], *[o[:1] for o in others], *ys[5:]], 600)
    weight = np.isfinite(y[0]) * 1.0
    weight[5:8] = 0
    got = make(**LINEAR).fit(x, np.nan_to_num(y, nan=7.0), sample_weight=weight)
    assert_same_model(got, expected)


@pytest.mark.slow
def test_groups_without_a_target_are_absent(cases):
    make, xs, ys, _, expected = cases["groups"]
    nothing = [np.full_like(y, np.nan) for y in ys[:4]]
    groups = np.r_[0, 0, 1, 1, 2 + np.arange(12) // 2]
    assert_same_model(make(**LINEAR).fit(xs[:4] + xs, nothing + ys, groups=groups), expected)


@pytest.mark.slow
def test_the_choice_and_what_is_held_out_go_by_steps_with_a_target(monkeypatch):
    monkeypatch.setattr(fitting, "VALIDATION_FRACTION", 0.4)
    xs, ys = series([30, 25, 28])
    small = {"max_updates": 3, "hidden_size": 2, "batchsize": 3, "random_state": 0}
    small |= {"early_stopping": True, "verbose": False}
    expected = SequenceRegressor(**small).fit(xs, ys)
    got = SequenceRegressor(**small).fit(padded(xs, 90), padded(ys, 90))
    assert got.fitted_parts_.choice == expected.fitted_parts_.choice
    assert got.fitted_parts_.choice.n_lags == 30
    assert got.validation_loss_curve_ == pytest.approx(expected.validation_loss_curve_)
    assert_same_model(got, expected)


@pytest.mark.slow
def test_series_without_target_leave_kernels_as_they_are():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 14, 40))
    y = x[0, :, 20:].mean(1)
    weight = np.ones(14)
    weight[[0, 5, 6]] = 0
    x[:, weight == 0] += 1000
    got = SequenceRegressor(verbose=False, random_state=0).fit(x, y, sample_weight=weight)
    kept = weight > 0
    expected = SequenceRegressor(verbose=False, random_state=0).fit(x[:, kept], y[kept])
    assert got.cell_ == expected.cell_ == "kernels"
    assert_same_model(got, expected)


@pytest.mark.parametrize("has_weight", [False, True])
def test_lengths_are_those_of_a_plain_loop(has_weight):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(2, 9, 12))
    y[rng.random(y.shape) < 0.6] = np.nan
    y[:, 4] = np.nan
    weight = rng.integers(0, 2, (9, 12)) if has_weight else np.ones((9, 12), int)
    lengths = np.array([12, 5, 1, 12, 7, 12, 3, 11, 12])
    pool = SeriesReader()
    inputs = pool.inputs(y, Schema("Test"), lengths=lengths)
    targets = pool.targets(y, inputs, Schema("Test"))
    given = SampleWeight(weight, 9, 12) if has_weight else None
    got = steps_to_learn_from(inputs, targets, given, pool)
    for i, n in enumerate(lengths):
        counts = [np.isfinite(y[:, i, t]).any() and weight[i, t] > 0 for t in range(n)]
        assert got.length[i] == max([t + 1 for t in range(n) if counts[t]], default=1)
    whole = np.where(np.isfinite(y), y, 0.0)
    targets = pool.targets(whole, inputs, Schema("Test"))
    assert steps_to_learn_from(inputs, targets, None, pool) is None
