"""What is missing is filled in on every kind of input: compared with pandas, series by series."""

import pickle

import h5py
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    SequenceImputer,
    SequenceScaler,
    export,
    h5mmap,
    h5save,
    samples,
    stream,
    timesteps,
)
from fluxutils_py.data.lazy import LazyArray
from fluxutils_py.errors import DataError, ExportError, ShapeError, SpecError
from fluxutils_py.transformers import imputer as module
from tests.plain_networks import plain_regressor

F, N, T = 3, 5, 43


@pytest.fixture
def x(rng):
    """Gaps of all lengths, at the start too, and a feature that one series lacks altogether."""
    x = rng.normal(5, 2, size=(F, N, T))
    x[rng.random(x.shape) < 0.3] = np.nan
    x[0, :3, :7] = np.nan
    x[1, 2, 5:40] = np.nan
    x[2, 4] = np.nan
    x[:, 0, 0] = np.nan
    x[0, :, -1] = 5.0  # or a stream would not know that the series ends before
    return x


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch):
    monkeypatch.setattr(module, "LOOK_BACK", 3)


def filled(x, start):
    """Every series forward by pandas, then what is left by the values of ``start``."""
    found = np.stack(
        [pd.DataFrame(series.T).ffill().to_numpy().T for series in x.transpose(1, 0, 2)], 1
    )
    return np.where(np.isnan(found), np.reshape(start, (-1, 1, 1)), found)


def padding(x):
    """Which steps (N, T) have no input before them, or none behind."""
    has = ~np.isnan(x).all(0)
    begun, left = (np.maximum.accumulate(a, 1) for a in (has, has[:, ::-1]))
    return ~(begun & left[:, ::-1])


def same(a, b):
    return np.array_equal(a, b, equal_nan=True)


def means(x):
    return np.nanmean(x.reshape(len(x), -1), 1)


CASES = [
    ("mean", None, lambda x: np.where(np.isnan(x), means(x)[:, None, None], x)),
    ("constant", None, lambda x: np.where(np.isnan(x), 0, x)),
    (
        "constant",
        [1.0, 2.0, 3.0],
        lambda x: np.where(np.isnan(x), np.array([1.0, 2.0, 3.0])[:, None, None], x),
    ),
    ("ffill", None, lambda x: filled(x, means(x))),
    ("ffill", -1, lambda x: filled(x, np.full(F, -1.0))),
    ("ffill", [1.0, 2.0, 3.0], lambda x: filled(x, np.array([1.0, 2.0, 3.0]))),
]
strategies = pytest.mark.parametrize(("strategy", "value", "oracle"), CASES)


def by_series(x, fill, start):
    """Fill in each series (T, F) that has values of a feature, the others by ``start``."""
    found = np.where(np.isnan(x), np.reshape(start, (-1, 1, 1)), x)
    for n in range(x.shape[1]):
        has = ~np.isnan(x[:, n]).all(1)
        found[has, n] = fill(x[has, n].T, np.asarray(start)[has]).T
    return found


def interpolated(series, start):
    filled = pd.DataFrame(series).interpolate().to_numpy()
    return np.where(np.isnan(filled), start, filled)


def of_mean(series, start):
    return SimpleImputer().fit_transform(series)


LOOK_AHEAD = [
    ("interpolate", None, lambda x: by_series(x, interpolated, means(x))),
    ("interpolate", [1.0, 2.0, 3.0], lambda x: by_series(x, interpolated, [1.0, 2.0, 3.0])),
    ("series_mean", None, lambda x: by_series(x, of_mean, means(x))),
    ("series_mean", -1, lambda x: by_series(x, of_mean, np.full(F, -1.0))),
]


def mapped(x, path):
    h5save(path, {"x": x})
    return h5mmap(path, "x")


@pytest.mark.parametrize(("strategy", "value", "oracle"), CASES + LOOK_AHEAD)
def test_every_form_is_filled_in_alike(x, strategy, value, oracle, tmp_path):
    wanted = np.where(padding(x), np.nan, oracle(x))
    imputer = SequenceImputer(strategy, fill_value=value)
    found = imputer.fit_transform(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=0)
    assert np.isnan(found[:, 0, 0]).all()
    file = mapped(x, tmp_path / "d.h5")
    for view in (samples, timesteps):
        of_view = SequenceImputer(strategy, fill_value=value).fit(view(x)).transform(view(file))
        assert type(of_view) is type(view(x))
        assert same(np.asarray(of_view.native), found)
        assert same(np.asarray(of_view), np.asarray(view(found)))
    with h5py.File(tmp_path / "e.h5", "w") as f:
        lazy = imputer.transform(f.create_dataset("x", data=x))
        assert not isinstance(lazy, np.ndarray)
        assert same(lazy[...], found)
        for window in (slice(2, 7), slice(40, None)):  # as training reads them
            assert same(lazy[:, 1:4, window], found[:, 1:4, window])


@strategies
def test_a_stream_of_steps_is_the_transform_of_the_series(x, strategy, value, oracle):
    imputer = SequenceImputer(strategy, fill_value=value).fit(x)
    wanted, stream = imputer.transform(x), imputer.stream(N)
    first = [stream.step(x[:, :, t]) for t in range(20)]
    again = imputer.stream(N, [s.clone() for s in stream.state])
    found = np.stack([*first, *(again.step(x[:, :, t]) for t in range(20, T))], 2)
    assert same(found, wanted)
    again.reset([1, 3])
    other = imputer.transform(x[:, :, 5:])
    step = again.step(x[:, :, 5])
    assert same(step[:, [1, 3]], other[:, [1, 3], 0])
    again.reset()
    assert same(again.step(x[:, :, 5]), other[:, :, 0])


@pytest.mark.slow
def test_no_cut_is_seen(x, rng, tmp_path):
    """Blocks of any series and steps, in any order, from files and from memory."""
    imputer = SequenceImputer("ffill").fit(x)
    wanted = imputer.transform(x)
    for source in (
        mapped(x, tmp_path / "d.h5"),
        LazyArray(x, np.array([0, 1, 2, 3, 4]), None, (abs,)),
    ):
        expected = wanted if isinstance(source, np.ndarray) else imputer.transform(abs(x))
        lazy = imputer.transform(source)
        for _ in range(100):
            a, b = sorted(rng.integers(0, T + 1, 2))
            n = [
                slice(*sorted(rng.integers(0, N + 1, 2))),
                rng.permutation(N)[:2],
                2,
                slice(None, None, 2),
            ][rng.integers(4)]
            assert same(lazy[:, n, a:b], expected[:, n, a:b])
        walk = [lazy[:, :3, t : t + 5] for t in range(0, T, 5)]
        assert same(np.concatenate(walk, 2), expected[:, :3])
        steps = np.array([40, 3, 17])
        assert same(lazy[1:, 2, steps], expected[1:, 2, steps])
        assert same(lazy[:, 1:4, 7], expected[:, 1:4, 7])
        assert same(pickle.loads(pickle.dumps(lazy))[...], expected)
        assert lazy.shape == (F, N, T)
        assert lazy[:, :0].shape == (F, 0, T)


def test_no_later_step_is_looked_at(x):
    imputer = SequenceImputer("ffill").fit(x)
    other = x.copy()
    other[:, :, 30:] = 99
    for transform in (
        imputer.transform,
        lambda v: np.asarray(imputer.transform(timesteps(v)).native),
    ):
        assert same(transform(other)[:, :, :30], imputer.transform(x)[:, :, :30])


def test_a_part_of_a_view_is_filled_in_as_the_whole(x):
    imputer = SequenceImputer("ffill").fit(samples(x))
    whole = imputer.transform(x)
    steps = np.array([3, 4, 5, 9, 10, 30])
    part = imputer.transform(timesteps(x, context=2)[steps])
    assert part.context == 2
    assert same(np.asarray(part.native), whole[:, :, steps])
    assert same(np.asarray(imputer.transform(samples(x)[[4, 0]]).native), whole[:, [4, 0]])
    assert same(np.asarray(imputer.transform(timesteps(x))[steps].native), whole[:, :, steps])


def test_long_gaps_are_looked_back_through_once(x, monkeypatch):
    """Window by window, a gap costs no more than what is read anyway."""
    x[:] = np.nan
    x[:, :, 0] = 7
    reads = []
    read = module.read_block
    monkeypatch.setattr(
        module, "read_block", lambda x, f, n, t: reads.append(len(t)) or read(x, f, n, t)
    )
    lazy = module.ForwardFill(np.zeros(F)).over(x, np.zeros(N, int))
    assert all((lazy[:, :, t : t + 2] == 7).all() for t in range(0, T - 1, 2))
    assert sum(reads) <= T + 1


@pytest.mark.slow
def test_a_pipeline_of_views_is_the_one_by_hand(x, rng):
    y = rng.normal(size=(1, N, T))
    settings = {"hidden_size": 3, "epochs": 2, "seqsize": 7, "random_state": 0}
    model = make_pipeline(SequenceImputer("ffill"), SequenceScaler(), plain_regressor(**settings))
    model.fit(samples(x), samples(y))
    by_hand = SequenceScaler().fit_transform(SequenceImputer("ffill").fit_transform(x))
    wanted = plain_regressor(**settings).fit(by_hand, y).predict(by_hand)
    np.testing.assert_allclose(model.predict(x), wanted, rtol=0, atol=1e-12)
    turned = make_pipeline(SequenceScaler(), SequenceImputer("ffill")).fit(x)
    scaled = SequenceScaler().fit_transform(x)
    by_hand = SequenceImputer("ffill").fit_transform(scaled)
    assert same(np.asarray(turned.transform(samples(x)).native), by_hand)


def test_matrices_are_rows_of_one_step(x):
    rows = x[:, 0].T
    found = SequenceImputer().fit_transform(rows)
    assert np.allclose(found, np.where(np.isnan(rows), np.nanmean(rows, 0), rows))
    frame = pd.DataFrame(rows, columns=list("abc"))
    imputer = SequenceImputer().set_output(transform="pandas").fit(frame)
    assert list(imputer.transform(frame).columns) == list("abc")
    for strategy in ("ffill", "series_mean", "interpolate"):
        with pytest.raises(ShapeError, match=rf"^strategy='{strategy}' .*\(F, N, T\)"):
            SequenceImputer(strategy).fit(rows)


@pytest.mark.parametrize(("strategy", "value", "oracle"), LOOK_AHEAD)
def test_series_of_different_lengths_are_filled_in_each_by_itself(x, strategy, value, oracle):
    x = np.where(padding(x), np.nan, x).astype("float32")
    lengths = [43, 7, 19, 1, 30]
    short = [x[:, n, :length].copy() for n, length in enumerate(lengths)]
    whole = np.full_like(x, np.nan)
    for n, a in enumerate(short):
        whole[:, n, : a.shape[1]] = a
    imputer = SequenceImputer(strategy, fill_value=value)
    found = imputer.fit_transform(short)
    wanted = np.where(padding(whole), np.nan, oracle(whole.astype(float)))
    for n, a in enumerate(found):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, wanted[:, n, : lengths[n]], rtol=1e-6)
    # at the heads and tails of one array too, wherever it begins
    assert same(imputer.transform(whole), np.where(padding(whole), np.nan, wanted).astype("f4"))


@pytest.mark.parametrize("strategy", ["series_mean", "interpolate"])
def test_what_looks_ahead_has_no_stream_and_no_export(x, strategy, rng, tmp_path):
    imputer = SequenceImputer(strategy).fit(x)
    remedy = rf"strategy='{strategy}' uses later steps.*SequenceImputer\('ffill'\)"
    with pytest.raises(SpecError, match=remedy):
        imputer.stream(N)
    settings = {"hidden_size": 3, "epochs": 1, "seqsize": 7, "random_state": 0}
    model = make_pipeline(imputer, plain_regressor(**settings)).fit(x, rng.normal(size=(1, N, T)))
    with pytest.raises(SpecError, match=remedy):
        stream(model, N)
    with pytest.raises(ExportError, match=remedy):
        export(model, tmp_path / "m.pt2", format="torch")


def test_features_and_integers_without_gaps_stay(rng):
    whole = rng.integers(0, 9, size=(F, N, T))
    assert same(SequenceImputer("ffill").fit_transform(whole), whole)
    empty = np.full((1, N, T), np.nan)
    assert np.isnan(SequenceImputer("ffill").fit_transform(empty)).all()


def test_what_cannot_be_filled_in_with_is_an_error(x):
    with pytest.raises(ValueError, match=r"'ffill'.*'interpolate'\), got 'median'"):
        SequenceImputer("median").fit(x)
    with pytest.raises(ValueError, match=r"broadcast.*\(2,\).*\(3,\)"):
        SequenceImputer("constant", fill_value=[1.0, 2.0]).fit(x)
    for strategy, value in (("mean", 0.0), ("constant", np.nan), ("ffill", [0.0, np.nan, 0.0])):
        with pytest.raises(ValueError, match=rf"fill_value .*finite.*'{strategy}'.*'constant'"):
            SequenceImputer(strategy, fill_value=value).fit(x)
    with pytest.raises(NotFittedError):
        SequenceImputer().stream()
    x[1, 2, 3] = np.inf
    with pytest.raises(DataError, match=(
        r"^x .*1, series 2, step 3; .*Imputer"
    )):  # fmt: skip
        SequenceImputer().fit(x)
