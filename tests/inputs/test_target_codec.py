"""Targets of any size: SequenceRegressor learns them at mean 0 and variance 1, and answers in their
units.
"""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    SequenceRegressor,
    SequenceScaler,
    h5mmap,
    h5save,
    net2vec,
    samples,
    timesteps,
)
from fluxutils_py.data import blocks as blocks_module
from fluxutils_py.errors import DataError, LoadError, SpecError
from fluxutils_py.estimator import fitting
from fluxutils_py.training import Checkpointer, EveryNSteps
from tests.plain_networks import plain_regressor

pytestmark = pytest.mark.filterwarnings("ignore:feature . of . has values of about")

N, T = 13, 17
SMALL = {"hidden_size": 3, "epochs": 2, "batchsize": 5, "seqsize": 6, "random_state": 0}
SHIFT, SIZE = np.array([50.0, -3e4]).reshape(2, 1, 1), np.array([7.0, 0.01]).reshape(2, 1, 1)


@pytest.fixture
def x(rng):
    return rng.normal(size=(3, N, T))


@pytest.fixture
def y(rng, x):
    """Two outputs of very different size."""
    return (x.cumsum(2)[:2] + 0.1 * rng.normal(size=(2, N, T))) * SIZE + SHIFT


@pytest.fixture(params=[1 << 20, 20])
def _block_sizes(request, monkeypatch):
    """All at once, and in blocks that do not divide."""
    monkeypatch.setattr(blocks_module, "BLOCK", request.param)


def by_hand(y, live=None, w=None):
    """Mean and standard deviation of each output over the live steps, in NumPy."""
    live = np.broadcast_to(
        np.ones(y.shape[1:], bool) if live is None else live, y.shape
    ) & ~np.isnan(y)
    w = np.broadcast_to(np.ones(y.shape[1:]) if w is None else w, y.shape)
    pairs = [(v[k], u[k]) for v, u, k in zip(y, w, live, strict=True)]
    mean = np.array([np.average(v, weights=u) for v, u in pairs])
    var = np.array(
        [np.average((v - m) ** 2, weights=u) for (v, u), m in zip(pairs, mean, strict=True)]
    )
    return mean, np.sqrt(var)


def scaled(y, mean, std):
    return (y - mean[:, None, None]) / std[:, None, None]


def agrees(x, y, mean, std, *args, lengths=None, starts=None):
    """Whether a fit is one on targets that were scaled by hand."""
    part = {"lengths": lengths, "starts": starts}
    est = plain_regressor(**SMALL).fit(x, y, *args, **part)
    assert est.target_mean_ == pytest.approx(mean, rel=1e-12)
    assert est.target_scale_ == pytest.approx(std, rel=1e-9)
    plain = plain_regressor(**SMALL, scale_target=False)
    plain.fit(x, scaled(y, mean, std), *args, **part)
    assert torch.allclose(net2vec(est), net2vec(plain), rtol=0, atol=1e-9)
    assert est.loss_curve_ == pytest.approx(plain.loss_curve_, rel=1e-7)
    wanted = plain.predict(x, **part) * std[:, None, None] + mean[:, None, None]
    assert np.allclose(est.predict(x, **part), wanted, rtol=1e-9, atol=0, equal_nan=True)


@pytest.mark.slow
def test_sales_around_50_are_learnt_with_all_defaults(rng):
    x = rng.normal(20, 5, size=(3, 20, 40)).astype("float32")
    sales = (
        50
        + np.einsum("f,fnt->nt", [0.5, -0.3, 0.2], x - 20)[None]
        + 0.3 * rng.normal(size=(1, 20, 40))
    )
    train, test = slice(0, 15), slice(15, 20)
    rows = [x[:, part].reshape(3, -1).T for part in (train, test)]
    linear = LinearRegression().fit(rows[0], sales[0, train].ravel())
    assert linear.score(rows[1], sales[0, test].ravel()) > 0.95
    model = make_pipeline(SequenceScaler(), plain_regressor(random_state=0)).fit(
        x[:, train], sales[:, train]
    )
    assert model.score(x[:, test], sales[:, test]) > 0.8


@pytest.mark.few
@pytest.mark.usefixtures("_block_sizes")
def test_a_fit_is_one_on_targets_that_were_scaled_by_hand(x, y):
    agrees(x, y, *by_hand(y))


@pytest.mark.slow
@pytest.mark.usefixtures("_block_sizes")
def test_only_steps_that_count_count(x, y, rng):
    w = rng.random((N, T)) * (rng.random((N, T)) > 0.2)
    lengths = rng.integers(3, T, N)
    y[:, rng.random((N, T)) < 0.2] = np.nan
    y[1, rng.random((N, T)) < 0.2] = np.nan  # one output of two
    starts = rng.integers(0, T - lengths + 1)
    exists = (np.arange(T) >= starts[:, None]) & (np.arange(T) < (starts + lengths)[:, None])
    y[:, ~exists] = 1e30
    agrees(x, y, *by_hand(y, exists, w), w, lengths=lengths, starts=starts)


@pytest.mark.slow
def test_one_target_per_series(x, y):
    per_series = y[:, :, -1].T
    mean, std = per_series.mean(0), per_series.std(0)
    est = plain_regressor(**SMALL).fit(x, per_series)
    plain = plain_regressor(**SMALL, scale_target=False).fit(x, (per_series - mean) / std)
    assert est.target_mean_ == pytest.approx(mean, rel=1e-12)
    assert est.predict(x) == pytest.approx(plain.predict(x) * std + mean, rel=1e-9)
    one = plain_regressor(**SMALL).fit(x, per_series[:, 0])
    assert one.predict(x).shape == (N,)
    assert one.score(x, per_series[:, 0]) == pytest.approx(
        1 - ((one.predict(x) - per_series[:, 0]) ** 2).sum() / (N * std[0] ** 2)
    )


@pytest.mark.slow
def test_integers_and_matrices(x, y):
    whole = (y[:1] * 10).round().astype(np.int64)
    est = plain_regressor(**SMALL).fit(x, whole)
    same = plain_regressor(**SMALL).fit(x, whole.astype(float))
    assert np.array_equal(est.predict(x), same.predict(x))
    assert est.predict(x).dtype == np.float64
    rows = plain_regressor(**SMALL).fit(x[:, :, 0].T, whole[0, :, 0])
    assert rows.target_mean_ == pytest.approx(whole[0, :, 0].mean())
    assert rows.predict(x[:, :, 0].T).shape == (N,)


def test_constants_are_learnt_as_they_are(x):
    est = plain_regressor(**SMALL).fit(x, np.full((1, N, T), 1e9))
    assert est.target_scale_ == 1
    assert est.predict(x) == pytest.approx(np.full((1, N, T), 1e9), abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"early_stopping": True}])
def test_a_large_mean_takes_no_digits_from_float32_inputs(x, y, settings):
    """Targets 1 apart around 1e9, where float32 knows multiples of 64."""
    small = (y[:1] - 50) / 7
    small -= small.mean()
    x = x.astype("float32")
    est = plain_regressor(**SMALL | {"epochs": 30}, **settings).fit(x, 1e9 + small)
    near = plain_regressor(**SMALL | {"epochs": 30}, **settings).fit(x, small)
    assert est.predict(x).dtype == np.float64
    assert est.predict(x) - 1e9 == pytest.approx(near.predict(x), abs=1e-4)
    assert est.score(x, 1e9 + small) == pytest.approx(near.score(x, small), abs=1e-4)
    short = plain_regressor(**SMALL).fit(x, small.astype("float32"))
    assert short.predict(x).dtype == np.float32


def test_validation_is_scaled_alike_and_takes_no_part(x, y):
    train, test = slice(0, 9), slice(9, N)
    mean, std = by_hand(y[:, train])
    est = plain_regressor(**SMALL).fit(
        x[:, train], y[:, train], validation_data=(x[:, test], 100 + y[:, test])
    )
    assert est.target_mean_ == pytest.approx(mean, rel=1e-12)
    plain = plain_regressor(**SMALL, scale_target=False).fit(
        x[:, train],
        scaled(y[:, train], mean, std),
        validation_data=(x[:, test], scaled(100 + y[:, test], mean, std)),
    )
    assert est.validation_loss_curve_ == pytest.approx(plain.validation_loss_curve_, rel=1e-9)


def test_what_is_held_out_takes_no_part(x, y, monkeypatch):
    monkeypatch.setattr(fitting, "VALIDATION_FRACTION", 0.3)
    est = plain_regressor(**SMALL, early_stopping=True).fit(timesteps(x), timesteps(y))
    assert est.target_mean_ == pytest.approx(by_hand(y[:, :, : T - 6])[0], rel=1e-12)


@pytest.mark.slow
def test_a_fit_that_goes_on_keeps_the_first_scale(x, y):
    mean, std = by_hand(y)
    plain = plain_regressor(**SMALL, scale_target=False).partial_fit(x, scaled(y, mean, std))
    plain.partial_fit(x, scaled(3 * y, mean, std))
    est = plain_regressor(**SMALL).partial_fit(x, y).partial_fit(x, 3 * y)
    assert est.target_mean_ == pytest.approx(mean, rel=1e-12)
    assert torch.allclose(net2vec(est), net2vec(plain), rtol=0, atol=1e-8)
    warm = plain_regressor(**SMALL | {"epochs": 1}, warm_start=True).fit(x, y).fit(x, 3 * y)
    assert torch.equal(net2vec(warm), net2vec(est))
    assert plain_regressor(**SMALL).fit(x, y).fit(x, 3 * y).target_mean_ == pytest.approx(
        3 * mean, rel=1e-12
    )


def test_it_can_be_turned_off(x, y):
    est = plain_regressor(**SMALL, scale_target=False).fit(x, y)
    with pytest.raises(AttributeError, match="no mean and scale before fit"):
        est.target_mean_  # noqa: B018
    assert not hasattr(SequenceRegressor(), "target_scale_")
    assert abs(est.predict(x)).max() < 10
    with pytest.raises(SpecError, match=r"^scale_target .*got 'yes'$"):
        plain_regressor(scale_target="yes").fit(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_stored(x, y, dtype, tmp_path):
    x, y = x.astype(dtype), y.astype(dtype)
    est = plain_regressor(**SMALL).fit(x, y)
    est.save(tmp_path / "est")
    for again in (
        SequenceRegressor.load(tmp_path / "est"),
        pickle.loads(pickle.dumps(est)),
        copy.deepcopy(est),
    ):
        assert np.array_equal(again.predict(x), est.predict(x))
        assert again.predict(x).dtype == dtype
        assert again.score(x, y) == est.score(x, y)
        assert torch.equal(
            net2vec(again.partial_fit(x, 2 * y)), net2vec(copy.deepcopy(est).partial_fit(x, 2 * y))
        )


@pytest.mark.slow
@pytest.mark.parametrize("view", [lambda a: a, samples, timesteps])
def test_every_form_gives_the_same(x, y, view):
    native = plain_regressor(**SMALL).fit(x, y)
    est = plain_regressor(**SMALL).fit(view(x), view(y))
    assert torch.equal(net2vec(est), net2vec(native))
    assert np.array_equal(np.asarray(est.predict(view(x))), np.asarray(view(native.predict(x))))
    assert est.score(view(x), view(y)) == native.score(x, y)


@pytest.mark.slow
def test_a_file_is_read_block_by_block_and_never_written(x, y, tmp_path):
    h5save(tmp_path / "d.h5", {"x": x, "y": y})
    mx, my = h5mmap(tmp_path / "d.h5", "x"), h5mmap(tmp_path / "d.h5", "y")
    est = plain_regressor(**SMALL).fit(mx, my)
    assert torch.equal(net2vec(est), net2vec(plain_regressor(**SMALL).fit(x, y)))
    assert np.array_equal(np.asarray(my), y)


class Watched:
    """An array that counts the values of each read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __getitem__(self, key):
        self.reads.append(self.array[key].size)
        return self.array[key]


@pytest.mark.slow
def test_no_more_than_blocks_are_ever_read(x, y, monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK", 60)  # values; a window has 5 * 6 * 2
    watched = Watched(y)
    est = plain_regressor(**SMALL).fit(x, watched)
    assert max(watched.reads) <= 60
    assert torch.allclose(
        net2vec(est), net2vec(plain_regressor(**SMALL).fit(x, y)), rtol=0, atol=1e-12
    )


@pytest.mark.slow
def test_a_fit_that_was_killed_goes_on_and_one_on_other_targets_does_not(x, y, tmp_path):
    def stop(loop):
        if loop.step == 5:
            raise KeyboardInterrupt

    def make(*callbacks):
        saves = Checkpointer(tmp_path / "saves", trigger=EveryNSteps(1))
        return plain_regressor(**SMALL, callbacks=[saves, *callbacks])

    with pytest.raises(KeyboardInterrupt):
        make(stop).fit(x, y)
    whole = plain_regressor(**SMALL).fit(x, y)
    assert torch.equal(net2vec(make().fit(x, y)), net2vec(whole))
    other = y.copy()
    other[:, N // 2, T // 2] += 1  # in no window that a digest of the ends sees
    with pytest.raises(LoadError, match=r"scale of the targets .*: .* -> "):
        make().fit(x, other)


@pytest.mark.slow
def test_infinite_targets_are_refused_as_ever(x, y):
    y[0, 3, 4] = np.inf
    est = plain_regressor(**SMALL)
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(DataError, match=r"^y is inf at feature 0, series 3, "),
    ):
        est.fit(x, y)
    w = np.ones((N, T))
    w[3, 4] = 0
    assert np.isfinite(est.fit(x, y, w).predict(x)).all()
    for bad in (np.nan, -1):
        w[0, 0] = bad
        with pytest.raises(DataError, match=r"^sample_weight .*not negative"):
            est.fit(x, y, w)
