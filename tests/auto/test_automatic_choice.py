"""What ready-made estimators choose where nothing is set: models, windows, length of training."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceRegressor,
    check_export,
    net2vec,
    reset,
    samples,
)
from fluxutils_py.auto.choice_of_model import DataSize, choose_model
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator.fit_data import ReadData
from fluxutils_py.nn.ready_made import LinearPlusNetwork, MeanModel
from tests.plain_networks import QuietRegressor, plain_regressor

F, N, T = 2, 13, 70
SHORT = {"max_updates": 60, "hidden_size": 5, "random_state": 0}


def sums(n=N, dtype="float64", seed=0):
    """A target that is linear in the past, and one that a product of inputs moves."""
    rng = np.random.default_rng(seed)
    x = 7 + 3 * rng.normal(size=(F, n, T))
    z = (x - 7) / 3
    linear = z[:1] + 0.5 * np.roll(z[1:], 2, 2)
    product = z[:1] * z[1:]
    return x.astype(dtype), linear.astype(dtype), product.astype(dtype)


# -- the choice --------------------------------------------------------------------------------


def size(**changes):
    plain = {"n_features": 3, "n_series": 40, "n_steps": 4000, "longest": 100}
    return DataSize(**{**plain, "per_series": False, "n_classes": None, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"cell": "linear+lstm", "seqsize": 64, "batchsize": 16, "hidden_size": 48,
              "max_updates": 200, "needs_trial": True, "n_lags": 48, "has_statistics": True}),
        # eight passes in 600 updates of 16, 32, ... windows of 64 steps
        ({"n_steps": 76_800, "longest": 300}, {"max_updates": 600, "batchsize": 16}),
        ({"n_steps": 76_801, "longest": 300}, {"max_updates": 600, "batchsize": 32}),
        ({"n_steps": 300_000, "longest": 300}, {"max_updates": 600, "batchsize": 64}),
        ({"n_steps": 614_400, "longest": 300}, {"max_updates": 600, "batchsize": 128}),
        ({"n_steps": 20_480}, {"max_updates": 400}),
        ({"n_steps": 614_401}, {"hidden_size": 128, "lr": 0.01, "max_updates": 1000,
                                "needs_trial": True, "dropout": 0.0, "batchsize": 32}),
        ({"per_series": True}, {"cell": "kernels", "n_kernels": 10_000, "seqsize": None}),
        ({"per_series": True, "longest": 501}, {"seqsize": 128}),
        ({"per_series": True, "n_series": 4001}, {"n_kernels": 2_000}),
        ({"n_features": 60}, {"n_lags": 6, "has_statistics": False}),
        ({"n_features": 900}, {"n_lags": 1}),
        ({"longest": 9}, {"n_lags": 9}),
        ({"n_classes": 10}, {"class_weight": "sqrt_balanced"}),
        ({"n_classes": 11}, {"class_weight": None}),
        ({"n_classes": 2, "per_series": True}, {"class_weight": None}),
        ({"longest": 1, "n_steps": 900, "n_series": 900},
         {"cell": "linear+lstm", "batchsize": 128, "seqsize": None, "has_means": False,
          "max_updates": 480}),
        ({"longest": 1, "n_steps": 90, "n_series": 90}, {"cell": "linear"}),
        ({"has_symbols": True, "n_classes": 2, "n_steps": 40_000},
         {"cell": "lstm", "hidden_size": 128, "lr": 0.01, "max_updates": 800, "batchsize": 16,
          "needs_trial": False, "dropout": 0.0}),
        ({"has_symbols": True, "n_classes": 30, "n_steps": 600_000}, {"max_updates": 1000, "batchsize": 128}),
        ({"has_symbols": True}, {"cell": "linear+lstm"}),
        ({"has_symbols": True, "n_classes": 2, "longest": 1}, {"cell": "linear+lstm"}),
        ({"has_symbols": True, "n_classes": 2, "per_series": True}, {"cell": "kernels"}),
    ],
)  # fmt: skip
def test_the_choice_follows_the_size_of_the_data(changes, expected):
    choice = choose_model("auto", size(**changes))
    assert {name: getattr(choice, name) for name in expected} == expected


@pytest.mark.few
@pytest.mark.parametrize(
    ("change", "cell"),
    [
        (lambda x: x, "lstm"),
        (lambda x: x.astype("float32"), "lstm"),
        (lambda x: list(x.swapaxes(0, 1)), "lstm"),
        (lambda x: x & (np.arange(x.shape[2]) > 3), "lstm"),  # steps without a symbol
        (lambda x: x[:1], "linear+lstm"),  # one feature, which is on or off
        (lambda x: x | np.roll(x, 1, 0), "linear+lstm"),  # two at once
        (lambda x: x * 0.5, "linear+lstm"),
        # the first series alone looks like symbols
        (lambda x: x * np.array([1, 0.5, 0.5])[:, None], "linear+lstm"),
    ],
)
def test_symbols_with_labels_are_learnt_by_a_network_alone(change, cell, rng):
    letters = rng.integers(5, size=(1, 3, 90))
    x = change(letters == np.arange(5)[:, None, None])
    y = letters[0] > 2 if not isinstance(x, list) else list(letters.swapaxes(0, 1) > 2)
    est = SequenceClassifier(epochs=1, verbose=False).fit(x, y)
    assert est.cell_ == cell


def test_a_first_part_of_many_is_learnt_by_a_network():
    assert choose_model("auto", size(per_series=True), is_fit=False).cell == "lstm"


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [{"hidden_size": 4}, {"epochs": 2}, {"max_updates": 60}, {"lr": 0.1}, {"dropout": 0.1},
     {"num_layers": 2}, {"early_stopping": True}],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:this fit makes", "ignore:dropout option adds")
def test_a_setting_of_networks_asks_for_one(setting):
    x, y, _ = sums()
    small = {"hidden_size": 3, "max_updates": 3, "batchsize": 5, **setting}
    assert SequenceRegressor(**small).fit(x, y[0, :, -1]).cell_ == "lstm"
    est = SequenceRegressor(**small).fit(x, y)
    assert est.cell_ == "linear+lstm"
    assert est.fitted_parts_.choice.gain == 1
    # few rows of single steps, for which nothing set is linear
    assert SequenceRegressor(**small).fit(x[:, :, :1], y[:, :, :1]).cell_ == "linear+lstm"


@pytest.mark.slow
def test_cell_is_known_after_fit_alone():
    est = SequenceRegressor(cell="gru")
    assert not hasattr(est, "cell_")
    x, y, _ = sums()
    assert est.set_params(**SHORT).fit(x, y).cell_ == "gru"


# -- the sum of a linear model and a network -----------------------------------------------------


@pytest.mark.slow
def test_the_linear_model_is_the_one_alone_and_stays():
    x, y, _ = sums()
    alone = SequenceRegressor(cell="linear").fit(x, y)
    est = SequenceRegressor(cell="linear+lstm", **SHORT).fit(x, y)
    model = est.model_
    assert isinstance(model, LinearPlusNetwork)
    torch.testing.assert_close(
        model.linear.head.weight, alone.model_.head.weight, rtol=0, atol=1e-10
    )
    n_linear = sum(p.numel() for p in model.linear.parameters())
    assert est.grad_[:n_linear].abs().max() == 0
    assert est.grad_[n_linear:].abs().max() > 0


@pytest.mark.slow
def test_outputs_are_the_sum_by_hand():
    x, _, y = sums()
    est = SequenceRegressor(cell="linear+lstm", **SHORT, scale_target=False).fit(x, y)
    model = est.model_
    z = (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True)
    series = torch.from_numpy(z).permute(2, 1, 0)
    seen = [series]
    for span in (5, 20, 80):
        weights = (1 - 2 / (span + 1)) ** torch.arange(T, dtype=torch.float64)
        past = torch.stack(
            [(weights[: t + 1].flip(0)[:, None, None] * series[: t + 1]).sum(0) for t in range(T)]
        )
        seen.append(past / weights.cumsum(0)[:, None, None])
    lstm = nn.LSTM(F * 4, 5).double()
    lstm.load_state_dict(model.network.module.state_dict())
    added = model.head(lstm(torch.cat(seen, -1).clamp(-3, 3))[0])
    linear = model.linear.eval()(torch.from_numpy(x).permute(2, 1, 0))
    expected = (linear + added).detach().permute(2, 1, 0)
    np.testing.assert_allclose(est.predict(x), expected, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_trial_finds_whether_the_network_helps():
    x, _, product = sums(20)
    helped = SequenceRegressor(random_state=0).fit(x, product)
    assert helped.cell_ == "linear+lstm"
    assert helped.fitted_parts_.choice.gain > 0.5
    new = sums(10, seed=5)
    assert helped.score(new[0], new[2]) > 0.5
    assert SequenceRegressor(cell="linear").fit(x, product).score(new[0], new[2]) < 0.1


@pytest.mark.slow
def test_the_end_of_a_drifting_series_decides():
    """Where the level leaves what was seen, the linear model goes on and a network does not."""
    rng = np.random.default_rng(0)
    t = np.arange(1500)
    x = (t * 0.02 + np.sin(t / 9) + 0.1 * rng.normal(size=1500))[None, None]
    y = np.concatenate([x[:, :, 1:], x[:, :, -1:]], 2)
    est = SequenceRegressor(random_state=0).fit(x[:, :, :1200], y[:, :, :1200])
    predicted = est.predict(x)[:, :, 1200:-1]
    error = np.sqrt(np.square(predicted - y[:, :, 1200:-1]).mean())
    rows = np.stack([x[0, 0, 23 - k : 1499 - k] for k in range(24)], 1)
    ridge = Ridge(1.0).fit(rows[:1176], y[0, 0, 23:1199])
    of_ridge = np.sqrt(np.square(ridge.predict(rows[1177:]) - y[0, 0, 1200:-1]).mean())
    assert error < 1.1 * of_ridge


# -- scales, gaps, several models ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "linear+lstm", "linear"])
def test_units_of_inputs_do_not_matter(cell):
    x, y, _ = sums()
    short = {} if cell == "linear" else SHORT
    a = SequenceRegressor(cell=cell, **short).fit(x, y)
    b = SequenceRegressor(cell=cell, **short).fit(x * np.array([[[1e4]], [[1e-3]]]) - 1e6, y)
    np.testing.assert_allclose(
        b.predict(x * np.array([[[1e4]], [[1e-3]]]) - 1e6), a.predict(x), rtol=0, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "linear+lstm", "linear"])
def test_a_step_without_input_counts_as_the_mean(cell):
    x, y, _ = sums()
    y = y.copy()
    y[:, 3, 20:24] = np.nan
    gap = x.copy()
    gap[:, 3, 20:24] = np.nan
    short = {} if cell == "linear" else SHORT
    est = SequenceRegressor(cell=cell, **short).fit(gap, y)
    live = ~np.isnan(y[0])
    filled = gap.copy()
    filled[:, 3, 20:24] = x[:, live].mean(1)[:, None]
    again = clone(est).fit(filled, y)
    torch.testing.assert_close(net2vec(est), net2vec(again), rtol=0, atol=1e-8)
    found = est.predict(gap)
    assert np.isnan(found[0, 3, 20:24]).all()
    np.testing.assert_allclose(found[:, :, 24:], est.predict(filled)[:, :, 24:], atol=1e-12)
    live_steps = est.stream(N)
    for t in range(30):
        np.testing.assert_allclose(live_steps.step(gap[:, :, t]), found[:, :, t], atol=1e-9)


@pytest.mark.slow
def test_the_mean_of_models_is_that_of_its_members():
    x, _, y = sums()
    est = SequenceRegressor(n_models=3, **{**SHORT, "hidden_size": 4}).fit(x, y)
    assert isinstance(est.model_, MeanModel)
    series = torch.from_numpy(x).permute(2, 1, 0)
    outputs = torch.stack([member.eval()(series) for member in est.model_.members]).detach()
    expected = est.target_mean_ + est.target_scale_ * outputs.mean(0).permute(2, 1, 0).numpy()
    np.testing.assert_allclose(est.predict(x), expected, rtol=0, atol=1e-9)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@pytest.mark.slow
def test_several_sets_of_kernels(tmp_path):
    x, _, _ = sums(24)
    labels = np.arange(24) % 2
    x[:, labels == 1] = np.sin(np.arange(T) / 3) + 0.1 * x[:, labels == 1]
    est = SequenceClassifier(n_models=2, random_state=0).fit(x, labels)
    assert est.cell_ == "kernels"
    assert est.score(x, labels) == 1
    est.save(tmp_path / "m")
    loaded = SequenceClassifier.load(tmp_path / "m")
    assert np.array_equal(loaded.predict_proba(x), est.predict_proba(x))


# -- files, streams, exports, threads --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("labels", [False, True])
def test_what_was_chosen_is_in_files_copies_streams_and_exports(labels, tmp_path):
    x, _, y = sums(dtype="float32")
    kind = SequenceClassifier if labels else SequenceRegressor
    y = y > 0 if labels else y
    est = kind(**SHORT).fit(x, y)
    expected = est.predict_proba(x) if labels else est.predict(x)
    predict = "predict_proba" if labels else "predict"
    est.save(tmp_path / "m")
    loaded = kind.load(tmp_path / "m")
    for other in (loaded, pickle.loads(pickle.dumps(est))):
        assert other.cell_ == est.cell_
        assert np.array_equal(getattr(other, predict)(x), expected)
    live = est.stream(N, method=predict)
    steps = np.stack([live.step(x[:, :, t]) for t in range(T)], 2)
    np.testing.assert_allclose(steps, expected, rtol=0, atol=1e-5)
    if labels:  # exports take long, and all is said by one
        return
    est.export(tmp_path / "m.pt2", "torch")
    assert check_export(tmp_path / "m.pt2", est, x) < 1e-5


@pytest.mark.slow
def test_views_and_a_second_fit_give_the_same():
    x, _, y = sums()
    est = QuietRegressor(cell="linear+lstm", dropout=0.0, **SHORT)
    expected = est.fit(x, y).predict(x)
    view = clone(est).fit(samples(x), samples(y)).predict(x)
    np.testing.assert_allclose(view, expected, rtol=0, atol=1e-12)
    assert np.array_equal(est.fit(x, y).predict(x), expected)


# -- length of training ------------------------------------------------------------------------------


def updates(est):
    return int(next(iter(est.optimizer_.state.values()))["step"])


@pytest.mark.slow
def test_a_fit_makes_as_many_updates_as_it_may():
    x, y, _ = sums()
    est = plain_regressor(epochs=None, max_updates=53, batchsize=5, seqsize=20).fit(x, y)
    assert updates(est) == 53  # of 12 in an epoch
    assert est.n_iter_ == 5
    both = plain_regressor(epochs=5, max_updates=530, batchsize=5, seqsize=20).fit(x, y)
    assert (updates(both), both.n_iter_) == (60, 5)
    by_call = plain_regressor(max_updates=53, batchsize=5, seqsize=20).fit(x, y, epochs=6)
    assert (updates(by_call), by_call.n_iter_) == (72, 6)


@pytest.mark.slow
def test_one_cycle_rises_for_a_fifth_and_falls_to_nothing():
    x, y, _ = sums()
    rates = []

    def note(loop):
        rates.append(loop.optimizer.param_groups[0]["lr"])

    plain_regressor(
        epochs=None, max_updates=60, lr_schedule="onecycle", batchsize=5, seqsize=20,
        callbacks=note,
    ).fit(x, y)  # fmt: skip
    assert len(rates) == 60
    at_each = np.arange(1, 61)  # rates after each update, for the next
    rise = at_each / 12
    fall = (1 + np.cos(np.pi * (at_each - 12) / 48)) / 2
    np.testing.assert_allclose(rates, 0.01 * np.where(at_each < 12, rise, fall), atol=1e-12)


@pytest.mark.slow
def test_partial_fit_and_warm_start_after_a_cycle_learn_on():
    x, y, _ = sums()
    est = SequenceRegressor(cell="lstm", **SHORT, warm_start=True).fit(x, y)
    before = net2vec(est).clone()
    est.partial_fit(x, y)
    assert (net2vec(est) - before).abs().max() > 1e-3
    before = net2vec(est).clone()
    est.fit(x, y)
    assert (net2vec(est) - before).abs().max() > 1e-3


@pytest.mark.slow
def test_partial_fit_after_a_closed_form_begins_a_network_and_says_so():
    x, y, _ = sums()
    est = SequenceClassifier(random_state=0).fit(x, y[0, :, -1] > 0)
    with pytest.warns(UserWarning, match="begins anew, with a network.*cell_='kernels'"):
        est.partial_fit(x, y[0, :, -1] > 0)
    assert est.cell_ == "lstm"
    est.partial_fit(x, y[0, :, -1] > 0)
    assert est.n_iter_ == 2
    fixed = SequenceRegressor(cell="linear").fit(x, y)
    with pytest.raises(SpecError, match="cell='linear' is fitted in closed form"):
        fixed.partial_fit(x, y)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("spec.lr_schedule", {"spec": {"lr_schedule": "step"}}), ("max_updates", {"max_updates": 0})],
)
def test_bad_settings_of_the_length_are_named(name, bad):
    x, y, _ = sums()
    with pytest.raises(SpecError, match=f"^{name} must be"):
        SequenceRegressor(**bad).fit(x, y)


# -- groups --------------------------------------------------------------------------------------------


@pytest.fixture
def splits(monkeypatch):
    """The series in both parts of all data that fits hold out."""
    found = []
    plain = ReadData.split

    def split(*arguments):
        parts = plain(*arguments)
        found.append([part.series[part.length > 0] for part in parts])
        return parts

    monkeypatch.setattr(ReadData, "split", split)
    return found


@pytest.mark.parametrize(
    "settings",
    [{}, {"level": 80}, {"cell": "lstm", "level": 80}, {"cell": "mingru", "early_stopping": True}],
)
@pytest.mark.parametrize("n", [6, 23])
@pytest.mark.parametrize("per_series", [True, False])
def test_groups_are_held_out_together(per_series, n, settings, splits):
    x, y, _ = sums(n)
    owners = np.random.default_rng(1).permutation(np.arange(n) // 3)
    y = y.mean((0, 2)) if per_series else y
    plain_regressor(**{**SHORT, **settings}).fit(x, y, groups=[f"owner {i}" for i in owners])
    assert splits or settings == {}
    for training, held_out in splits:
        assert len(held_out)
        assert not set(owners[training]) & set(owners[held_out])
        assert len({*training, *held_out}) == n


def test_intervals_hold_for_groups_that_were_not_seen():
    rng = np.random.default_rng(0)

    def make(n_groups, size=10, n_steps=4, n_inputs=40):
        """Inputs tell the group, which has a mean of its own."""
        group = rng.normal(size=(n_inputs, n_groups, 1, 1)).repeat(size, 2)
        group = group + 0.05 * rng.normal(size=group.shape)
        z = rng.normal(size=(1, n_groups, size, 1))
        x = np.concatenate([group, z]).repeat(n_steps, 3).reshape(n_inputs + 1, -1, n_steps)
        y = 3 * z[0, :, :, 0] + rng.normal(size=(n_groups, 1))
        return x, y.ravel(), np.repeat(np.arange(n_groups), size)

    x, y, groups = make(60)
    x_new, y_new, _ = make(200)
    est = SequenceRegressor(cell="linear", level=90, random_state=0).fit(x, y, groups=groups)
    _, low, high = est.predict_interval(x_new)
    assert 0.85 < np.mean((low <= y_new) & (y_new <= high)) < 0.95


def test_one_group_is_none():
    x, y, _ = sums()
    one = plain_regressor(**SHORT, cell="linear", level=80).fit(x, y, groups=["a"] * N)
    none = plain_regressor(**SHORT, cell="linear", level=80).fit(x, y)
    assert all(map(np.array_equal, one.predict_interval(x), none.predict_interval(x)))


@pytest.mark.slow
def test_groups_are_left_out_together():
    """Copies of a series with noise: leaving out one of them tells nothing."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(1, 10, 40)), 4, axis=1)
    x = x + 0.01 * rng.normal(size=x.shape)
    people = np.repeat(np.arange(10), 4)
    y = rng.permutation(10)[people] % 2
    alone = SequenceClassifier(random_state=0).fit(x, y)
    together = SequenceClassifier(random_state=0).fit(x, y, groups=people.astype(str))
    assert alone.loss_ < 0.3 < together.loss_
    for bad in (people[:-1], people[:, None]):
        with pytest.raises(ShapeError, match="groups must have one entry for each of the 40"):
            SequenceClassifier().fit(x, y, groups=bad)
    with pytest.raises(DataError, match=r"groups .* validation_data"):
        Estimator(nn.Linear(1, 2)).fit(x, y[None, :, None], groups=people)
    assert len(list(GroupKFold(3).split(samples(x), y, people))) == 3


# -- what is refused ------------------------------------------------------------------------------------


def test_several_inputs_are_refused():
    x, y, _ = sums()
    with pytest.raises(DataError, match="one input and one output"):
        SequenceRegressor().fit((x, x), y)


@pytest.mark.slow
def test_verbose_says_what_was_chosen(capsys):
    x, y, _ = sums()
    SequenceRegressor(cell="auto", max_updates=60, hidden_size=3, verbose=True).fit(x, y)
    assert "cell='linear+lstm', up to 60 updates" in capsys.readouterr().err
    SequenceClassifier(verbose=True).fit(x, y[0, :, -1] > 0)
    assert "cell='kernels', fitted in closed form" in capsys.readouterr().err
    SequenceClassifier(verbose=False).fit(x, y[0, :, -1] > 0)
    assert capsys.readouterr().err == ""


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "uint64", "bool"])
@pytest.mark.parametrize("make", [SequenceClassifier, SequenceRegressor])
def test_integers_are_as_floats_for_one_target_per_series(make, dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2 if dtype == "bool" else 100, (2, 12, 20)).astype(dtype)
    y = np.repeat(["a", "b", "c"], 4) if make is SequenceClassifier else np.arange(12.0)
    est = make(random_state=0, verbose=False)
    if dtype == "int8":  # series of different lengths
        x = [x[:, i, : 20 - i % 3] for i in range(12)]
        floats = [a.astype("float32") for a in x]
        first, first_float = x[0][:, None, 0], floats[0][:, None, 0]
    else:
        floats = x.astype("float32")
        first, first_float = x[:, :1, 0], floats[:, :1, 0]
    expected = clone(est).fit(floats, y)
    est.fit(x, y)
    assert est.cell_ == "kernels"
    # standardised in float64, so that a high level costs no digits: closer than float32
    method = "predict_proba" if make is SequenceClassifier else "predict"
    near = {"rtol": 1e-3, "atol": 1e-3}
    got = getattr(est, method)(x)
    np.testing.assert_allclose(got, getattr(expected, method)(floats), **near)
    stream, of_floats = est.stream(1, method=method), expected.stream(1, method=method)
    np.testing.assert_allclose(stream.step(first), of_floats.step(first_float), **near)
    window = torch.from_numpy(first.astype("int64").T[None])
    model = est.model_
    outputs = [reset(model)(w) for w in (window, window.float())]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


# -- integers that are symbols ---------------------------------------------------------------------


def shifted(n_series=4, n_steps=60, n_symbols=5):
    """Return symbols, and as labels what each follows: the sum of the last two."""
    x = np.random.default_rng(0).integers(0, n_symbols, (1, n_series, n_steps))
    return x, (x + np.roll(x, 1, 2)) % n_symbols


def test_integers_with_labels_at_each_step_are_symbols():
    x, y = shifted()
    settings = {"max_updates": 100, "hidden_size": 24, "seqsize": 20, "random_state": 0}
    est = SequenceClassifier(**settings).fit(x, y)
    assert est.cell_ == "lstm"
    assert est.choice_.n_symbols == 5
    assert est.model_[0].weight.shape == (5, 32)
    assert est.score(x[:, :, 1:], y[:, :, 1:]) > 0.95
    live = est.stream(4)
    steps = np.stack([live.step(x[:, :, t]) for t in range(9)], 2)
    np.testing.assert_array_equal(steps, est.predict(x)[:, :, :9])
    for call in (est.predict, lambda z: live.step(z[:, :, 0])):
        with pytest.raises(DataError, match=r"from 9 to 9.*index out of range"):
            call(np.full_like(x, 9))


@pytest.mark.parametrize(
    ("change", "targets"),
    [
        (lambda x: x.astype(float), "labels"),
        (lambda x: x - 1, "labels"),
        (lambda x: x * 300, "labels"),
        (lambda x: np.concatenate([x, x + 1]), "labels"),
        (lambda x: x, "numbers"),
        (lambda x: x, "labels of series"),
    ],
)
def test_other_integers_are_numbers(change, targets):
    x, y = shifted(6, 30)
    cls = SequenceClassifier
    if targets == "numbers":
        cls, y = SequenceRegressor, y.astype(float)
    if targets == "labels of series":
        y = np.arange(6) % 2
    est = cls(cell="gru", max_updates=2, random_state=0).fit(change(x), y)
    assert est.choice_.n_symbols == 0


def test_ranks_and_padding_count_symbols_of_series_alone():
    x, y = shifted(3, 40)
    x[0, 1, 25:] = 700  # behind its end
    est = SequenceClassifier(max_updates=2, random_state=0).fit(x, y, lengths=[40, 25, 40])
    assert est.choice_.n_symbols == 5
