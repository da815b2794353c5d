"""Heads fitted in closed form, against scikit-learn's ridge refitted without each row."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from fluxutils_py.auto import closed_form
from fluxutils_py.auto.closed_form import Rows, best_temperature, fit_closed_form
from fluxutils_py.errors import DataError

N, P, G = 41, 50, 3


def data(seed=0, n=N, p=P, weighted=True):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) * np.arange(1, p + 1) + 5
    y = x[:, :G] @ rng.normal(size=(G, G)) + rng.normal(size=(n, G))
    w = rng.uniform(0.2, 3, n) if weighted else np.ones(n)
    return x, y, w


def in_blocks(x, y, w, size=9, groups=None):
    groups = np.arange(len(x)) if groups is None else groups
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y, w, groups)]
    return [Rows(*parts) for parts in zip(*(t.split(size) for t in tensors), strict=True)]


def standardised(x, w):
    return StandardScaler().fit(x, sample_weight=w).transform(x) / np.sqrt(x.shape[1])


def refitted(x, y, w, alpha, train, test):
    model = Ridge(alpha=np.asarray(alpha), solver="svd").fit(
        x[train], y[train], sample_weight=w[train]
    )
    return model.predict(x[test])


@pytest.fixture(params=["dual", "primal"])
def form(request, monkeypatch):
    if request.param == "primal":
        monkeypatch.setattr(closed_form, "MOST_ROWS", 0)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("p", [7, P])
def test_weights_and_errors_left_out_are_those_of_refitted_ridges(form, p, weighted):
    x, y, w = data(p=p, weighted=weighted)
    head = fit_closed_form(in_blocks(x, y, w), N)
    z = standardised(x, w)
    all_rows = np.arange(N)
    fitted = torch.from_numpy(x) @ head.weight.T + head.bias
    np.testing.assert_allclose(
        fitted, refitted(z, y, w, head.alpha, all_rows, all_rows), rtol=0, atol=1e-7
    )
    assert head.groups.tolist() == all_rows.tolist()
    assert head.temperature == 1
    for i in range(N):
        expected = refitted(z, y, w, head.alpha, all_rows != i, [i])
        np.testing.assert_allclose(head.left_out[i : i + 1], expected, rtol=0, atol=1e-7)


def test_groups_are_left_out_together(form):
    x, y, w = data()
    groups = np.arange(N) % 5
    head = fit_closed_form(in_blocks(x, y, w, groups=groups), N)
    z = standardised(x, w)
    for g in range(5):
        expected = refitted(z, y, w, head.alpha, groups != g, groups == g)
        np.testing.assert_allclose(head.left_out[groups == g], expected, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_the_penalty_has_the_smallest_error_of_all_that_are_tried(form):
    x, y, w = data()
    head = fit_closed_form(in_blocks(x, y, w), N)
    z = standardised(x, w)
    unit = w @ (z**2).sum(1) / w.sum()
    errors = {}
    for alpha in np.logspace(-2, 4, 13) * 0.01 * unit:
        left_out = np.concatenate(
            [refitted(z, y, w, alpha, np.arange(N) != i, [i]) for i in range(N)]
        )
        errors[alpha] = w @ ((y - left_out) ** 2).sum(1)
    assert head.alpha == pytest.approx(min(errors, key=errors.get))


@pytest.fixture(scope="module")
def classes():
    """Rows of three classes, and the penalty that is best by accuracy, then by error."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, N)
    x = rng.normal(size=(N, 60)) + labels[:, None]
    y = 2.0 * np.eye(3)[labels] - 1
    w = np.ones(N)
    z = standardised(x, w)
    unit = (z**2).sum(1).mean()
    scores = {}
    for alpha in np.logspace(-2, 4, 13) * 0.01 * unit:
        left_out = np.concatenate(
            [refitted(z, y, w, alpha, np.arange(N) != i, [i]) for i in range(N)]
        )
        scores[alpha] = ((left_out.argmax(1) == labels).sum(), -((y - left_out) ** 2).sum())
    return x, y, w, max(scores, key=scores.get)


@pytest.mark.slow
@pytest.mark.usefixtures("form")
def test_classes_are_chosen_by_accuracy_then_by_error(classes):
    x, y, w, alpha = classes
    head = fit_closed_form(in_blocks(x, y, w), N, is_classifier=True)
    assert head.alpha == pytest.approx(alpha)


def test_sums_choose_by_some_rows_of_large_data(monkeypatch):
    monkeypatch.setattr(closed_form, "MOST_ROWS", 0)
    monkeypatch.setattr(closed_form, "MOST_LEFT_OUT", 10)
    x, y, w = data()
    head = fit_closed_form(in_blocks(x, y, w), N)
    assert head.groups.tolist() == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    groups = np.arange(N) // 4  # 11 groups of at most 4
    whole = fit_closed_form(in_blocks(x, y, w, groups=groups), N)
    assert whole.groups.tolist() == [0] * 4 + [5] * 4 + [10]


@pytest.mark.parametrize("size", [1, 41])
def test_blocks_do_not_matter(form, size):
    x, y, w = data()
    a, b = (fit_closed_form(in_blocks(x, y, w, s), N) for s in (9, size))
    np.testing.assert_allclose(a.weight, b.weight, rtol=0, atol=1e-10)


def test_rows_of_weight_zero_have_no_effect(form):
    x, y, w = data()
    w[[3, 20]] = 0
    x[3] = 1e6
    head = fit_closed_form(in_blocks(x, y, w), N)
    live = w > 0
    numbers = np.flatnonzero(live)
    alone = fit_closed_form(in_blocks(x[live], y[live], w[live], groups=numbers), N - 2)
    np.testing.assert_allclose(head.weight, alone.weight, rtol=0, atol=1e-9)
    assert head.groups.tolist() == alone.groups.tolist()


def test_constant_and_repeated_features_do_no_harm(form):
    x, y, w = data()
    x = np.column_stack([x, np.full(N, 1e6), x[:, 0]])
    head = fit_closed_form(in_blocks(x, y, w), N)
    assert head.weight.isfinite().all()
    assert head.weight[:, P].abs().max() == 0
    np.testing.assert_allclose(head.weight[:, 0], head.weight[:, P + 1], rtol=1e-6)


def test_relative_factors_scale_features(form):
    x, y, w = data()
    relative = torch.linspace(0.1, 2, P)
    head = fit_closed_form(in_blocks(x, y, w), N, relative=[relative])
    z = standardised(x, w) * relative.numpy()
    fitted = torch.from_numpy(x) @ head.weight.T + head.bias
    expected = refitted(z, y, w, head.alpha, np.arange(N), np.arange(N))
    np.testing.assert_allclose(fitted, expected, rtol=0, atol=1e-6)


def test_a_floor_keeps_rounding_small(form):
    x, y, w = data()
    noise = 1e-9 * np.random.default_rng(8).normal(size=N)
    with_noise = np.column_stack([x, noise])
    head = fit_closed_form(in_blocks(with_noise, y, w), N, floor=1e-3)
    assert (head.weight[:, P].abs() * 1e-9 < 1e-5).all()
    blown_up = fit_closed_form(in_blocks(with_noise, y, w), N)
    assert (blown_up.weight[:, P].abs() * 1e-9 > 1e-3).any()


def test_the_temperature_has_the_smallest_log_loss():
    rng = np.random.default_rng(5)
    outputs = torch.from_numpy(rng.normal(size=(200, 3)))
    p = torch.softmax(4 * outputs, 1).numpy()
    labels = [rng.choice(3, p=row) for row in p]
    targets = torch.from_numpy(2.0 * np.eye(3)[labels] - 1)
    t = best_temperature(outputs, targets, torch.ones(200, dtype=torch.float64))
    assert 2.5 < t < 6.5


@pytest.mark.parametrize(("where", "value"), [("features", np.nan), ("targets", np.inf)])
def test_numbers_that_are_not_finite_are_named(form, where, value):
    x, y, w = data()
    (x if where == "features" else y)[12, 1] = value
    with pytest.raises(DataError, match=f"{where} .* row 12"):
        fit_closed_form(in_blocks(x, y, w), N)


@pytest.mark.parametrize("size", [1, 9])
def test_targets_with_weights_of_their_own_are_fitted_as_if_alone(form, size):
    x, y, w = data()
    y = np.column_stack([y, y[:, 0] * 3])  # the last has the weights of the first
    every = np.arange(N)
    weights = np.stack([w, w * (every % 3 > 0), w * (every < 12), w], 1)
    groups = every // 4
    n_rows = (weights > 0).sum(0)
    head = fit_closed_form(in_blocks(x, y, weights, size, groups), n_rows.tolist())
    for columns in ([0, 3], [1], [2]):
        own = weights[:, columns[0]]
        alone = fit_closed_form(
            in_blocks(x, y[:, columns], own, groups=groups), int((own > 0).sum())
        )
        rows = head.weights[:, columns[0]] > 0
        pairs = [
            (getattr(head, a)[columns], getattr(alone, a)) for a in ("weight", "bias", "alpha")
        ]
        pairs += [(head.left_out[rows][:, columns], alone.left_out)]
        pairs += [(head.groups[rows], alone.groups)]
        for got, expected in pairs:
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


class Captured(Exception):
    """The first thing that a rank tells the others."""


class Ranks:
    """Two ranks, of which the other has said what it has to say."""

    is_single = False

    def __init__(self, other=None):
        self.other = other

    def allgather(self, value):
        if self.other is None:
            raise Captured(value)
        other, self.other = self.other, value  # all say the same at last
        return [value, other]


def test_ranks_that_see_other_targets_missing_fit_the_same(form):
    x, y, w = data()
    weights = np.stack([w, w, w], 1)
    weights[:20:3, 1] = 0
    weights[20::4, 2] = 0
    n_rows = (weights > 0).sum(0).tolist()
    whole = fit_closed_form(in_blocks(x, y, weights), n_rows)
    first, second = ([a[k] for a in (x, y, weights)] for k in (slice(20), slice(20, N)))
    later = in_blocks(*second, groups=np.arange(20, N))
    with pytest.raises(Captured) as said:
        fit_closed_form(later, n_rows, ranks=Ranks())
    head = fit_closed_form(in_blocks(*first), n_rows, ranks=Ranks(said.value.args[0]))
    for got, expected in zip(head[:-1], whole[:-1], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_a_target_with_few_rows_is_a_constant(form):
    x, y, w = data()
    weights = np.stack([w, w * (np.arange(N) == 5), 0 * w], 1)
    head = fit_closed_form(in_blocks(x, y, weights), (weights > 0).sum(0).tolist())
    assert (head.weight[1:] == 0).all()
    assert head.bias[1:].tolist() == [y[5, 1], 0]


def test_given_rows_are_not_changed_and_their_type_makes_no_difference(form):
    x, y, w = data()
    short = [np.float32(x), y, w]
    heads = []
    for given in (short, [np.float64(short[0]), y, w]):
        (rows,) = in_blocks(*given, size=N)
        before = [part.clone() for part in rows]
        # the second of several factors sees the rows after the first
        relative = [torch.linspace(0, 1, P), torch.ones(P)]
        heads.append(fit_closed_form([rows], N, relative=relative))
        assert all(map(torch.equal, rows, before))
    for got, expected in zip(*(head[:-1] for head in heads), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_features_that_tell_nothing_leave_the_mean(form):
    x, y, w = data()
    head = fit_closed_form(in_blocks(0 * x + 3, y, w, groups=np.arange(N) // 5), N)
    assert (head.weight == 0).all()
    np.testing.assert_allclose(head.bias, np.average(y, 0, w), rtol=1e-12)
    others = np.arange(N) >= 5
    expected = np.average(y[others], 0, w[others])
    np.testing.assert_allclose(head.left_out[0], expected, rtol=1e-12)


def test_rows_of_a_single_group_are_left_out_one_by_one(form):
    x, y, w = data()
    together = fit_closed_form(in_blocks(x, y, w, groups=np.zeros(N, int)), N)
    alone = fit_closed_form(in_blocks(x, y, w), N)
    assert torch.equal(together.left_out, alone.left_out)


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [("features", 1e200, "feature 0"), ("targets", 1e200, "targets"), ("weights", np.inf, "row 0")],
)
def test_what_cannot_be_squared_is_refused(form, where, value, named):
    given = dict(zip(("features", "targets", "weights"), data(), strict=True))
    given[where] = given[where] * value
    with pytest.raises(DataError, match=named):
        fit_closed_form(in_blocks(*given.values()), N)


def test_too_few_rows_are_refused(form):
    x, y, w = data()
    with pytest.raises(DataError, match="at least 2 rows with a weight, got 0"):
        fit_closed_form(in_blocks(x, y, 0 * w), N)
