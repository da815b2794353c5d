"""One mean and one scale per feature, on every kind of input: compared with NumPy over all series
and steps.
"""

import copy
import pickle
import warnings

import h5py
import joblib
import numpy as np
import pytest
import sklearn
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fluxutils_py import SequenceImputer, SequenceScaler, h5mmap, h5save, samples, timesteps
from fluxutils_py.data import LazyArray, SamplesView, TimestepsView
from fluxutils_py.data import blocks as blocks_module
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.transformers import transformer_base
from tests.plain_networks import plain_regressor

F, N, T = 3, 7, 11


@pytest.fixture
def x(rng):
    """Features of very different size, some values missing."""
    x = rng.normal(size=(F, N, T)) * np.array([1e-9, 1.0, 1e6]).reshape(F, 1, 1)
    x += np.array([0.0, 50.0, -1e7]).reshape(F, 1, 1)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x


@pytest.fixture(params=[1 << 20, 20])
def _block_sizes(request, monkeypatch):
    """All at once, and in blocks that do not divide."""
    monkeypatch.setattr(blocks_module, "BLOCK", request.param)


def moments(x, w=None):
    """Mean and standard deviation of each feature of (F, N, T), with weights (N, T)."""
    w = np.broadcast_to(np.ones(x.shape[1:]) if w is None else w, x.shape) * ~np.isnan(x)
    mean = (w * np.nan_to_num(x)).sum((1, 2)) / w.sum((1, 2))
    squares = (w * np.nan_to_num(x - mean[:, None, None]) ** 2).sum((1, 2))
    return mean, np.sqrt(squares / w.sum((1, 2)))


def scaled(x, of=None):
    mean, std = moments(x if of is None else of)
    return (x - mean[:, None, None]) / std[:, None, None]


def near(value):
    return pytest.approx(value, rel=1e-10, abs=1e-10, nan_ok=True)


def mapped(x, path):
    h5save(path, {"x": x})
    return h5mmap(path, "x")


def as_memmap(x, path):
    m = np.memmap(path, x.dtype, "w+", shape=x.T.shape)
    m[:] = x.T
    m.flush()
    return np.memmap(path, x.dtype, "r", shape=x.T.shape).T


def as_dataset(x, path):
    with h5py.File(path, "w") as f:
        f["x"] = x
    return h5py.File(path, "r")["x"]


class Counting:
    """An array that tells how much of it is read, and never gives more than 1000 values at once."""

    ndim, dtype = 3, np.dtype("float32")

    def __init__(self, x):
        self.x, self.shape, self.read = x, x.shape, 0

    def __getitem__(self, key):
        block = self.x[key]
        assert block.size <= 1000, f"{block.size} values read at once"
        self.read += block.size
        return block


# -- fit -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_block_sizes")
def test_mean_and_scale_are_those_of_each_feature(x):
    s = SequenceScaler().fit(x)
    mean, std = moments(x)
    assert s.mean_ == pytest.approx(mean, rel=1e-12, abs=1e-25)
    assert s.scale_ == pytest.approx(std, rel=1e-12)
    assert s.var_ == pytest.approx(std**2, rel=1e-12)
    assert s.n_samples_seen_.tolist() == (~np.isnan(x)).sum((1, 2)).tolist()
    assert s.n_features_in_ == F


@pytest.mark.usefixtures("_block_sizes")
def test_parts_of_views_are_what_counts(x):
    some, late = np.array([4, 0, 5]), [2, 3, 7, 10]
    for view, part in ((samples(x)[some], x[:, some]), (timesteps(x)[late], x[:, :, late])):
        s = SequenceScaler().fit(view)
        assert s.mean_ == pytest.approx(moments(part)[0], rel=1e-12, abs=1e-25)
        assert s.scale_ == pytest.approx(moments(part)[1], rel=1e-12)


def test_columns_of_a_matrix_are_its_features(x):
    rows = np.ascontiguousarray(x[:, :, 0].T)  # (N, F)
    s, theirs = SequenceScaler().fit(rows), StandardScaler().fit(rows)
    for name in ("mean_", "var_", "scale_", "n_samples_seen_"):
        assert getattr(s, name) == near(getattr(theirs, name))
    assert s.transform(rows) == near(theirs.transform(rows))
    assert s.inverse_transform(s.transform(rows)) == near(rows)


@pytest.mark.usefixtures("_block_sizes")
def test_weights_count_as_repetitions(x, rng):
    steps = rng.integers(0, 3, (N, T)).astype("float32")
    for given, w, weight in (
        (x, steps, steps),
        (x, steps, steps[None]),
        (x, steps[:, :1], steps[:, 0]),
        (samples(x), steps, steps),
        (timesteps(x), steps, steps.T),
        (timesteps(x), steps[:1], steps[0]),
    ):
        s = SequenceScaler().fit(given, sample_weight=weight)
        mean, std = moments(x, w)
        assert s.mean_ == pytest.approx(mean, rel=1e-12, abs=1e-25)
        assert s.scale_ == pytest.approx(std, rel=1e-12)
        assert s.n_samples_seen_ == near((np.broadcast_to(w, x.shape) * ~np.isnan(x)).sum((1, 2)))
    x[0], x[0, steps == 0] = 0.1, 1e30  # wild where it does not count
    dead = SequenceScaler().fit(x, sample_weight=steps)
    assert (dead.var_[0], dead.scale_[0]) == (0, 1)


@pytest.mark.usefixtures("_block_sizes")
def test_constant_features_keep_their_scale(rng):
    x = rng.normal(size=(6, N, T))
    x[0] = 0.1  # has no exact double
    x[1] = 0
    x[2] = -1e300 / 3
    x[3] = 0.3
    x[3, ::2] = 0.1 + 0.2  # rounding
    x[4] *= 1e-40  # small, not constant
    x[5] = 1.7e9 + 1e-3 * x[5]  # seconds since 1970, and milliseconds
    s = SequenceScaler().fit(x)
    assert s.scale_[:4].tolist() == [1, 1, 1, 1]
    assert s.var_[:3].tolist() == [0, 0, 0]
    assert s.scale_[4:] == pytest.approx([x[4].std(), x[5].std()], rel=1e-6)
    z = s.transform(x)
    assert (z[:3] == 0).all()
    assert z[4:].std((1, 2)) == near([1, 1])


def test_a_large_mean_takes_no_digits(rng):
    x = (rng.integers(-9, 10, (F, N, T)) + 1e7).astype("float32")  # exact
    z = SequenceScaler().fit(x).transform(x)
    exact = x - 1e7
    assert z == pytest.approx(scaled(exact.astype(float)), rel=2e-7, abs=1e-7)
    assert z.dtype == np.float32


def test_a_feature_without_values_is_left_as_it_is(x):
    x[1] = np.nan
    s = SequenceScaler().fit(x)
    assert (s.mean_[1], s.var_[1], s.scale_[1], s.n_samples_seen_[1]) == (0, 0, 1, 0)
    assert (s.transform(np.full((F, 2, 2), 5.0))[1] == 5).all()


def test_switched_off_parts_are_not_done(x):
    mean, std = moments(x)
    centred = SequenceScaler(with_std=False).fit(x)
    assert centred.scale_ is None
    assert centred.transform(x) == pytest.approx(x - mean[:, None, None], nan_ok=True)
    assert SequenceScaler(with_mean=False).fit(samples(x)).transform(x) == near(
        x / std[:, None, None]
    )
    neither = SequenceScaler(with_mean=False, with_std=False).fit(x)
    assert np.array_equal(neither.transform(x), x, equal_nan=True)
    assert np.array_equal(neither.inverse_transform(x), x, equal_nan=True)


# -- transform -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32", "uint8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_in_memory_give_fresh_arrays_of_their_memory_order(rng, dtype, order):
    x = np.asarray(rng.integers(0, 100, (F, N, T)), dtype, order=order)
    kept = x.copy()
    s = SequenceScaler().fit(x)
    z = s.transform(x)
    assert type(z) is np.ndarray
    assert z.dtype == {"float16": "float32", ">f4": "float32"}.get(
        dtype, dtype if "float" in dtype else "float64"
    )
    assert z.strides == tuple(n // x.itemsize * z.itemsize for n in x.strides)
    assert not np.shares_memory(z, x)
    assert (x == kept).all()
    tolerance = 1e-6 if z.dtype == np.float32 else 1e-12
    assert z == pytest.approx(scaled(x.astype(float)), rel=tolerance, abs=tolerance)
    assert s.inverse_transform(z) == pytest.approx(
        x.astype(float), rel=tolerance, abs=100 * tolerance
    )


def test_views_give_views(x, tmp_path):
    s = SequenceScaler().fit(x[:, 2:])
    expected = scaled(x, of=x[:, 2:])
    for array in (x, mapped(x, tmp_path / "x.h5"), as_dataset(x, tmp_path / "y.h5")):
        v = s.transform(samples(array))
        assert type(v) is SamplesView
        assert v.shape == (N, F * T)
        assert np.asarray(v[[3, 1]].native) == near(expected[:, [3, 1]])
        t = s.transform(timesteps(array, context=4)[5:9])
        assert type(t) is TimestepsView
        assert t.context == 4
        assert np.asarray(t.native) == near(expected[:, :, 5:9])
        assert np.asarray(t.with_context(slice(0, 4))[0]) == near(expected[:, :, 1:9])
        assert np.asarray(s.inverse_transform(t).native) == pytest.approx(
            x[:, :, 5:9], rel=1e-12, nan_ok=True
        )


def test_arrays_in_files_give_lazy_arrays(x, tmp_path):
    s = SequenceScaler().fit(x)
    for array in (
        mapped(x, tmp_path / "x.h5"),
        as_dataset(x, tmp_path / "y.h5"),
        as_memmap(x, tmp_path / "m"),
        LazyArray(x),
    ):
        z = s.transform(array)
        assert isinstance(z, LazyArray)
        assert z[:, 2:5, 1:] == near(scaled(x)[:, 2:5, 1:])
        assert np.asarray(s.inverse_transform(z)) == pytest.approx(x, rel=1e-12, nan_ok=True)


def test_no_more_than_blocks_are_ever_read(rng, monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK", 1000)
    x = rng.normal(3, 2, size=(2, 61, 97)).astype("float32")
    for form in (samples, timesteps, lambda a: a):
        source = Counting(x)
        given = form(source)
        s = SequenceScaler().fit(given)
        assert source.read == x.size  # each value once
        z = s.transform(given)
        z = getattr(z, "native", z)
        assert source.read == x.size  # and none by transform
        window = z[:, 4:9, 90:]
        assert source.read == x.size + window.size
        assert window == pytest.approx(scaled(x.astype(float))[:, 4:9, 90:], rel=1e-5, abs=1e-5)


@pytest.fixture
def _most_values(monkeypatch):
    """Blocks of 1000 values, and scales of a fifth of them."""
    monkeypatch.setattr(blocks_module, "BLOCK", 1000)
    monkeypatch.setattr(transformer_base, "MOST_VALUES", 2 * 61 * 970 // 5)


@pytest.mark.usefixtures("_most_values")
def test_of_very_many_values_some_from_all_series_and_times_are_taken(rng):
    wave = np.sin(np.arange(970) * (2 * np.pi / 110))  # of as many steps as five blocks have
    x = rng.normal(size=(2, 61, 970)) + 3 * wave + np.linspace(0, 2, 970) + np.ones((61, 1))
    x[:, :30] += 2
    x = x.astype("float32")
    source = Counting(x)
    s = SequenceScaler().fit(source)
    assert x.size / 6 < source.read < x.size / 4
    assert s.n_samples_seen_.sum() == source.read
    mean, std = moments(x.astype(float))
    assert np.abs(s.mean_ - mean).max() < 0.25 * std.min()  # every fifth block: 0.7
    assert s.scale_ == pytest.approx(std, rel=0.15)
    again = SequenceScaler().fit(np.asfortranarray(x))
    assert (s.mean_ == again.mean_).all()
    assert (s.scale_ == again.scale_).all()
    weighted = SequenceScaler().fit(x, sample_weight=np.full(61, 7.0))
    assert weighted.mean_ == pytest.approx(s.mean_, rel=1e-12)
    assert SequenceImputer().fit(x).statistics_ == pytest.approx(s.mean_, rel=1e-12)


def test_errors_name_features_that_have_names(x):
    x[1, 4, 9] = np.inf
    named = samples(x, feature_names=["wind", "rain", "heat"])
    with pytest.raises(DataError, match="infinite at feature 'rain', series 4, step 9"):
        SequenceScaler().fit(named)
    x[1] = np.where(x[1] > 50, 1e200, -1e200)
    with pytest.raises(DataError, match=r"^feature 'rain' of x has values that are too large"):
        SequenceScaler().fit(named)


def test_the_matrix_that_a_view_looks_like_is_taken_too(x):
    expected = scaled(x)
    for view in (samples(x), timesteps(x)):
        s = SequenceScaler().fit(view)
        flat = np.asarray(view)
        assert s.n_features_in_ == flat.shape[1]
        z = s.transform(flat)
        assert type(z) is np.ndarray
        assert z == near(view.to_rows(expected))
        assert s.inverse_transform(z) == pytest.approx(flat, rel=1e-12, nan_ok=True)
        assert s.transform(flat[2:4].astype("float32")).dtype == np.float32
        assert s.get_feature_names_out().tolist() == [f"x{i}" for i in range(flat.shape[1])]


def test_predictions_get_back_the_units_of_their_targets(x):
    y = x[2:]
    for face in (samples, timesteps):
        s = SequenceScaler().fit(face(y))
        rows = np.asarray(s.transform(face(y)))  # as predict returns them
        assert s.inverse_transform(rows) == pytest.approx(
            np.asarray(face(y)), rel=1e-12, nan_ok=True
        )
    # series of other lengths
    short = SequenceScaler().fit(samples(y)).inverse_transform(np.zeros((N, 4)))
    assert short == near(np.full((N, 4), moments(y)[0][0]))


@pytest.mark.parametrize(
    "store",
    [lambda o, p: pickle.loads(pickle.dumps(o)), lambda o, p: joblib.load(joblib.dump(o, p)[0])],
)
def test_scalers_and_what_they_transform_can_be_stored(x, store, tmp_path):
    s = SequenceScaler().fit(samples(x))
    again = store(s, tmp_path / "s")
    assert (again.transform(x) == s.transform(x))[~np.isnan(x)].all()
    array = mapped(x, tmp_path / "x.h5")
    view = s.transform(timesteps(array)[3:])
    # it names the file and holds no values, however many there are
    longer = s.transform(timesteps(mapped(np.tile(x, 50), tmp_path / "z.h5"))[3:])
    assert abs(len(pickle.dumps(longer)) - len(pickle.dumps(view))) < 32
    assert np.array_equal(np.asarray(store(view, tmp_path / "v")), np.asarray(view), equal_nan=True)
    lazy = s.transform(array)
    assert np.array_equal(np.asarray(store(lazy, tmp_path / "l")), np.asarray(lazy), equal_nan=True)


def test_what_was_transformed_stays_when_the_scaler_learns_more(x):
    s = SequenceScaler().fit(x)
    view = s.transform(samples(x))
    before = np.asarray(view)
    s.fit(x + 1e9)
    assert np.array_equal(np.asarray(view), before, equal_nan=True)


# -- with scikit-learn ---------------------------------------------------------------------------------


def test_set_output_makes_frames_of_matrices_and_leaves_sequences_alone(x):
    pd = pytest.importorskip("pandas")
    s = SequenceScaler().set_output(transform="pandas")
    frame = pd.DataFrame(x[:, :, 0].T, columns=["a", "b", "c"], index=range(5, 5 + N))
    z = s.fit_transform(frame)
    assert isinstance(z, pd.DataFrame)
    assert list(z.columns) == ["a", "b", "c"]
    assert list(z.index) == list(frame.index)
    assert s.feature_names_in_.tolist() == ["a", "b", "c"]
    assert type(s.inverse_transform(z)) is np.ndarray
    assert s.inverse_transform(z.to_numpy()) == pytest.approx(
        frame.to_numpy(), rel=1e-12, nan_ok=True
    )
    assert type(s.fit_transform(samples(x))) is SamplesView
    assert not hasattr(s, "feature_names_in_")
    assert list(s.transform(np.asarray(samples(x))).columns[:2]) == ["x0", "x1"]
    assert type(s.transform(timesteps(x))) is TimestepsView
    assert type(s.fit_transform(x)) is np.ndarray
    with sklearn.config_context(transform_output="pandas"):
        assert type(SequenceScaler().fit_transform(samples(x))) is SamplesView
        assert isinstance(SequenceScaler().fit_transform(x[:, :, 0].T), pd.DataFrame)


@pytest.mark.parametrize("face", [lambda a: a, samples, timesteps])
def test_a_pipeline_is_scaling_by_hand(rng, face):
    x = rng.normal(5, 3, size=(F, N, T)).astype("float32")
    y = x[:1] - x[1:2]
    reg = plain_regressor(4, epochs=3, seqsize=5, random_state=0)
    pipe = make_pipeline(SequenceScaler(), reg).fit(face(x), face(y))
    by_hand = sklearn.clone(reg).fit(face(SequenceScaler().fit_transform(x)), face(y))
    z = pipe[0].transform(x)
    assert (pipe.predict(face(x)) == by_hand.predict(face(z))).all()
    assert pipe.score(face(x), face(y)) == by_hand.score(face(z), face(y))


def test_a_pipeline_takes_matrices(rng):
    x = rng.normal(5, 3, size=(40, F))
    pipe = make_pipeline(SequenceScaler(), plain_regressor(4, epochs=3, random_state=0)).fit(
        x, x[:, 0]
    )
    assert pipe.predict(x).shape == (40,)


@pytest.mark.slow
def test_folds_in_time_are_scaled_by_their_own_training_steps(rng):
    x = rng.normal(size=(F, N, 23)).cumsum(2)
    y = x[:1]
    pipe = make_pipeline(SequenceScaler(), plain_regressor(4, epochs=2, random_state=0))
    cv = [(np.arange(10), np.arange(10, 16)), (np.arange(16), np.arange(16, 23))]
    for train, test in cv:
        fitted = sklearn.clone(pipe).fit(timesteps(x)[train], timesteps(y)[train])
        assert fitted[0].mean_ == near(x[:, :, train].mean((1, 2)))
        z = (x - x[:, :, train].mean((1, 2), keepdims=True)) / x[:, :, train].std(
            (1, 2), keepdims=True
        )
        by_hand = sklearn.clone(pipe[1]).fit(timesteps(z)[train], timesteps(y)[train])
        expected = by_hand.predict(timesteps(z)[test])
        assert fitted.predict(timesteps(x)[test]) == pytest.approx(expected, abs=1e-9)
    out = cross_val_predict(pipe, samples(x), samples(y), cv=3)
    assert out.shape == (N, 23)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["native", "samples", "timesteps", "rows"])
def test_targets_are_transformed_and_back(rng, form):
    x = rng.normal(size=(F, 30, T))
    y = 1e4 + 1e3 * x[:2]
    reg = plain_regressor(8, epochs=30, lr=0.03, random_state=0)
    face = {
        "native": lambda a: a,
        "samples": samples,
        "timesteps": timesteps,
        "rows": lambda a: a[:, :, 0].T,
    }[form]
    if form == "samples":  # the views of targets are made matrices
        reg.set_params(target="step")
    both = TransformedTargetRegressor(
        make_pipeline(SequenceScaler(), reg), transformer=SequenceScaler()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "this fit makes [0-9]+ updates? in all")
        warnings.filterwarnings("ignore", ".* is a matrix, each of whose rows is taken")
        both.fit(face(x), face(y))
    pred = both.predict(face(x))
    true = np.asarray(face(y))
    assert pred.shape == true.shape
    assert np.mean((pred - true) ** 2) < 0.9e6  # below the variance: the units are back
    per_column = form != "native"
    assert both.transformer_.mean_ == near(true.mean(0) if per_column else true.mean((1, 2)))


def test_weights_are_routed(rng):
    x = rng.normal(size=(F, N, T))
    w = np.arange(N, dtype=float)
    with sklearn.config_context(enable_metadata_routing=True):
        pipe = make_pipeline(
            SequenceScaler().set_fit_request(sample_weight=True),
            plain_regressor(4, epochs=1).set_fit_request(sample_weight=False),
        ).fit(samples(x), samples(x[:1]), sample_weight=w)
    assert pipe[0].mean_ == near(moments(x, w[:, None])[0])
    requests = SequenceScaler().get_metadata_routing()
    for method in ("fit", "transform", "inverse_transform"):
        assert "x" not in getattr(requests, method).requests  # as X never is


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", [lambda a: a, samples, timesteps])
@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.usefixtures("_block_sizes")
def test_infinite_values_are_named(x, face, value):
    s = SequenceScaler().fit(x)
    before = copy.deepcopy(vars(s))
    x[1, 4, 9] = value
    with pytest.raises(DataError, match=r"feature 1, series 4, step 9.*SequenceScaler"):
        s.fit(face(x))
    assert all(np.array_equal(v, before[k]) for k, v in vars(s).items())
    with pytest.raises(ValueError, match="Input X contains infinity"):
        s.fit(x[:, 4].T)


def test_another_number_of_features_is_named(x):
    s = SequenceScaler().fit(x)
    for call in (s.transform, s.inverse_transform):
        for given in (x[:2], samples(x[:2]), timesteps(x[:2])):
            with pytest.raises(ShapeError) as e:
                call(given)
            assert "x has 2 features per step, but SequenceScaler was fitted on 3;" in str(e.value)
        with pytest.raises(
            ValueError,
            match=r"2 features, .*SequenceScaler .*3 ",
        ):
            call(x[:2, :, 0].T)
    with pytest.raises(
        ValueError,
        match=r"4 features, .*SequenceScaler .*33 ",
    ):
        SequenceScaler().fit(samples(x)).transform(np.zeros((N, 4)))


def test_several_inputs_get_several_scalers(x):
    with pytest.raises(ShapeError) as e:
        SequenceScaler().fit((x, x[:1]))
    assert all(part in str(e.value) for part in ("SequenceScaler takes one array", "a tuple of 2"))


def test_what_cannot_be_learnt_from_is_an_error(x):
    with pytest.raises(NotFittedError):
        SequenceScaler().transform(samples(x))
    with pytest.raises(ShapeError) as e:
        SequenceScaler().fit(x, sample_weight=np.ones(T))
    assert all(
        part in str(e.value)
        for part in ("shape (11,)", "(7,), (7, 11) or (1, 7, 11)", "7 series of 11 time steps")
    )
    with pytest.raises(DataError) as e:
        SequenceScaler().fit(x, sample_weight=-np.ones(N))
    assert "sample_weight must be finite and not negative" in str(e.value)
