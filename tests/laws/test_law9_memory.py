"""Law 9: an array gives bit for bit the same result in a file and in memory, whatever holds it.

Each case draws a public method, a container, a memory order, a type and a byte order, and compares
with the plain contiguous array of the machine's own floats. ``CONTAINER_CASES=5000`` draws more.
"""

import functools
import itertools
import os

import dask.array
import h5py
import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest
import torch
import xarray
import zarr
from sklearn.utils import _safe_indexing
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceFeatures,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    Spec,
    WinsorScaler,
    explain,
    h5concat,
    h5create,
    h5mmap,
    h5save,
    net2vec,
    samples,
    timesteps,
)
from fluxutils_py.data import SamplesView, TimestepsView
from fluxutils_py.nn import LSTM
from tests.plain_networks import plain_classifier, plain_regressor

from .conftest import N, T

CASES = int(os.environ.get("CONTAINER_CASES", "80"))
SHAPE = (2, 5, 11)
TYPES = ["f2", "f4", ">f4", "f8", ">f8", "i1", "u1", "<u2", ">i4", "i8", "?"]
ORDERS = list(itertools.permutations(range(3)))


def laid_out(a, rng):
    """The same array in any memory order, perhaps with gaps or backwards, perhaps read-only."""
    axes = ORDERS[rng.integers(6)] if a.ndim == 3 else rng.permutation(a.ndim)
    laid = np.ascontiguousarray(a.transpose(axes))
    way = rng.integers(3)
    if way == 1:
        big = np.zeros([2 * n + 1 for n in laid.shape], laid.dtype)
        big[(slice(1, None, 2),) * a.ndim] = laid
        laid = big[(slice(1, None, 2),) * a.ndim]
    elif way == 2:
        backwards = (slice(None, None, -1),) * a.ndim
        laid = laid[backwards].copy()[backwards]
    out = laid.transpose(np.argsort(axes))
    out.flags.writeable = bool(rng.integers(2))
    return out


# -- containers of one array -----------------------------------------------------------------------


class Duck:
    """All that an array needs."""

    def __init__(self, a):
        self.a, self.shape, self.dtype = a, a.shape, a.dtype

    def __getitem__(self, key):
        return self.a[key]


class Converted:
    """What NumPy can read and nobody can slice."""

    def __init__(self, a):
        self.a = a

    def __array__(self, dtype=None, copy=None):
        return np.array(self.a, dtype)


class Subclass(np.ndarray):
    pass


class Tensor(torch.Tensor):
    pass


def as_memmap(a, path):
    axes = np.argsort(a.strides)[::-1]
    m = np.memmap(path, a.dtype, "w+", shape=tuple(np.array(a.shape)[axes]))
    m[:] = a.transpose(axes)
    m.flush()
    return np.memmap(path, a.dtype, "r", shape=m.shape).transpose(np.argsort(axes))


def as_npy(a, path):
    np.save(path.with_suffix(".npy"), a)
    return np.load(path.with_suffix(".npy"), mmap_mode="r")


def in_h5py(a, path, **settings):
    return h5py.File(path, "w").create_dataset("a", data=a, **settings)


def in_h5mmap(a, path):
    h5save(path, {"a": a}, axes="TNF")
    return h5mmap(path, "a")


def in_lazy_h5(a, path):
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=a, compression="gzip")
    return h5mmap(path, "a", axes="FNT")


def as_tensor(a, path):
    return torch.tensor(np.array(a, a.dtype.newbyteorder("="), order="K"))


def in_zarr(a, path):
    return zarr.create_array(f"{path}.zarr", data=np.ascontiguousarray(a), chunks=a.shape)


PLACES = {
    "array": lambda a, path: a,
    "subclass": lambda a, path: a.view(Subclass),
    "memmap": as_memmap,
    "npy": as_npy,
    "h5py": in_h5py,
    "torch": as_tensor,
    "subclass of torch": lambda a, path: as_tensor(a, path).as_subclass(Tensor),
    "zarr": in_zarr,
    "dask": lambda a, path: dask.array.from_array(a, chunks=3),
    "xarray": lambda a, path: xarray.DataArray(a),
    "duck": lambda a, path: Duck(a),
    "masked": lambda a, path: Duck(
        np.ma.MaskedArray(np.where(a == a, a, 99).astype(a.dtype), a != a)
    ),
}
OF_THREE_AXES = {
    **PLACES,
    "h5mmap": in_h5mmap,
    "lazy h5": in_lazy_h5,
    "nested lists": lambda a, path: a.tolist(),
    "list of matrices as lists": lambda a, path: [m.tolist() for m in a],
    "__array__": lambda a, path: Converted(a),
    "memoryview": lambda a, path: memoryview(np.array(a, a.dtype.newbyteorder("="))),
}
OF_STEPS = {
    **{name: make for name, make in PLACES.items() if "duck" not in name and name != "masked"},
    "lists": lambda a, path: a.tolist(),
    "pandas": lambda a, path: pd.DataFrame(a),
    "polars": lambda a, path: polars.DataFrame(np.array(a, a.dtype.newbyteorder("="))),
    "__array__": lambda a, path: Converted(a),
}
OF_ROWS = {
    "array": lambda a, path: a,
    "pandas": lambda a, path: pd.DataFrame(a),
    "polars": lambda a, path: polars.DataFrame(np.array(a, a.dtype.newbyteorder("="))),
    "arrow": lambda a, path: pyarrow.table(pd.DataFrame(np.array(a, a.dtype.newbyteorder("=")))),
    "lists": lambda a, path: a.tolist(),
    "list of rows": lambda a, path: list(a),
    "objects": lambda a, path: a.astype(object),
    "torch": as_tensor,
    "memmap": as_memmap,
    "__array__": lambda a, path: Converted(a),
}


# by scikit-learn, which asks arrays and pandas for their type
READ_AS_DOUBLES = ("polars", "arrow", "list of rows")
FORMS = {
    "native": lambda a: a,
    "list": lambda a: [a[:, n] for n in range(a.shape[1])],
    "samples": samples,
    "timesteps": timesteps,
    "rows": SamplesView.to_rows,
}


class Holder:
    """Puts arrays (F, N, T) into drawn containers of one drawn form."""

    def __init__(self, rng, folder):
        self.form = sorted(FORMS)[rng.integers(len(FORMS))]
        self.is_cut = self.form in ("samples", "timesteps") and rng.random() < 0.5
        self.rng, self.folder = rng, folder
        self.names = []

    def place(self, a, table):
        name = sorted(table)[self.rng.integers(len(table))]
        self.names.append(name)
        return table[name](laid_out(a, self.rng), self.folder / str(len(self.names)))

    def hold(self, a):
        if self.form == "list":
            return [self.place(a[:, n], PLACES) for n in range(a.shape[1])]
        if self.form == "rows":
            return self.place(SamplesView.to_rows(a), OF_ROWS)
        held = self.place(a, OF_THREE_AXES)
        return self.cut(FORMS[self.form](held)) if self.is_cut else FORMS[self.form](held)

    def cut(self, view):
        return _safe_indexing(view, np.array([4, 0, 1] if self.form == "samples" else [3, 4, 5, 6]))

    def plain(self, a, dtype, name, of_inputs=False):
        """The plain array of the same numbers in the same form, for what was held by this."""
        if "lists" in name or name == "objects" or (of_inputs and name in READ_AS_DOUBLES):
            dtype = np.asarray(a.tolist()).dtype if dtype.kind == "f" else dtype
        a = np.ascontiguousarray(a.astype(dtype))
        if self.is_cut:
            a = a[:, [4, 0, 1]] if self.form == "samples" else a[:, :, 3:7]
        return FORMS[self.form](np.ascontiguousarray(a))


# -- public methods --------------------------------------------------------------------------------

SHORT = {"epochs": 1, "seqsize": 4, "batchsize": 3, "random_state": 0, "verbose": False}


def regressor(form, **settings):
    n_timesteps = {"n_timesteps": SHAPE[2]} if form == "rows" else {}
    return plain_regressor(3, **SHORT, **n_timesteps, **settings)


def numbers(rng, dtype):
    x = rng.integers(0, 2 if dtype == "?" else 9, SHAPE).astype(dtype)
    return x, x[:1].cumsum(2).astype("f8" if "f8" in dtype else "f4")


@functools.cache
def fitted(form, dtype, classifier=False):
    x, y = numbers(np.random.default_rng(1), dtype)
    held, targets = FORMS[form](x), FORMS[form](y)
    if not classifier:
        return regressor(form).fit(held, targets)
    n_timesteps = {"n_timesteps": SHAPE[2]} if form == "rows" else {}
    est = plain_classifier(3, **SHORT, **n_timesteps)
    return est.fit(held, FORMS[form]((y > 20).astype(int)))


LENGTHS = np.array([11, 7, 9, 11, 8])


def masked(x, y):
    """Fit windows that overlap, in another order, of series that end early."""
    spec = Spec(2, 3, 4, overlap=2, shuffle=True)
    weight = np.arange(1.0, 56).reshape(1, 5, 11)
    est = Estimator(spec=spec, random_state=0).fit(x, y, weight, lengths=LENGTHS)
    return net2vec(est), est.predict(x, lengths=LENGTHS)


def learnt(transformer, *names):
    return [getattr(transformer, name) for name in names]


OF_ESTIMATORS = {
    "fit": lambda est, x, y: net2vec(est().fit(x, y)),
    "fit to scales": lambda est, x, y: net2vec(
        SequenceRegressor(**est().get_params(deep=False)).fit(x, y)
    ),
    "partial_fit": lambda est, x, y: net2vec(est().partial_fit(x, y).partial_fit(x, y)),
    "sample_weight": lambda est, x, y: net2vec(est().fit(x, y, est.weight())),
    "masked": lambda est, x, y: masked(x, y),
    "stream": lambda est, x, y: est.stream(est.trained()),
    "validation_data": lambda est, x, y: (
        est().fit(x, y, validation_data=(x, y)).validation_loss_curve_
    ),
    "predict": lambda est, x, y: est.trained().predict(x),
    "score": lambda est, x, y: est.trained().score(x, y),
    "evaluate": lambda est, x, y: est.trained().evaluate(x, y),
    "explain": lambda est, x, y: explain(est.trained(), x, 1, n_points=16).attributions,
    "predict_proba": lambda est, x, y: est.trained(True).predict_proba(x),
    "decision_function": lambda est, x, y: est.trained(True).decision_function(x),
    "labels": lambda est, x, y: est.trained(True).predict(x),
}
OF_TRANSFORMERS = {
    "scaler": lambda est, x, y: learnt(SequenceScaler().fit(x), "mean_", "scale_"),
    "scaled": lambda est, x, y: SequenceScaler().fit_transform(x),
    "unscaled": lambda est, x, y: SequenceScaler().fit(x).inverse_transform(x),
    "imputed": lambda est, x, y: SequenceImputer().fit_transform(x),
    "winsorised": lambda est, x, y: WinsorScaler().fit_transform(x),
    "features": lambda est, x, y: SequenceFeatures(
        lags=[1], exponential_means=[], rolling=[3]
    ).fit_transform(x),
}
OF_TRANSFORMERS["stream of a transformer"] = lambda est, x, y: est.stream(
    SequenceImputer("ffill").fit(x)
)
METHODS = OF_ESTIMATORS | OF_TRANSFORMERS


class Maker:
    """Makes estimators for arrays of a form, or gives one that was fitted before."""

    def __init__(self, form, dtype, x, place=lambda a, table: a):
        self.form, self.dtype, self.x, self.place = form, dtype, x, place

    def weight(self):
        return self.place(np.arange(1.0, SHAPE[1] + 1), PLACES)

    def stream(self, model):
        live = model.stream(SHAPE[1])
        return [live.step(self.place(self.x[:, :, t], OF_STEPS)) for t in range(3)]

    def __call__(self, **settings):
        return regressor(self.form, **settings)

    def trained(self, classifier=False):
        return fitted(self.form, self.dtype, classifier)


# what has another meaning, or is refused
IMPOSSIBLE = {
    "explain": lambda holder, kind: kind in "iu",  # no gradient
    "features": lambda holder, kind: holder.form == "timesteps",  # of the steps that are cut off
    "masked": lambda holder, kind: holder.form not in ("native", "samples") or holder.is_cut,
    # rows are other ones
    "sample_weight": lambda holder, kind: holder.form == "timesteps" or holder.is_cut,
    "stream": lambda holder, kind: holder.form != "native",
    "stream of a transformer": lambda holder, kind: holder.form != "native",
}


def values(result):
    """A result as plain arrays."""
    if isinstance(result, list | tuple):
        return [array for r in result for array in values(r)]
    native = isinstance(result, SamplesView | TimestepsView)
    return [np.asarray(result.native if native else result)]


@pytest.mark.few
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.filterwarnings("ignore:X has feature names")
def test_nothing_but_the_numbers_matters(seed, tmp_path):
    rng = np.random.default_rng(seed)
    method = sorted(METHODS)[rng.integers(len(METHODS))]
    dtype = TYPES[rng.integers(len(TYPES))]
    holder = Holder(rng, tmp_path)
    x, y = numbers(rng, dtype)
    if holder.form != "rows":  # where scikit-learn allows no NaN
        y[0, 1, 3] = y[0, 2, 5] = np.nan
        if x.dtype.kind == "f" and method != "explain":
            x[:, 2, 5] = np.nan
    if IMPOSSIBLE.get(method, lambda holder, kind: False)(holder, np.dtype(dtype).kind):
        return
    held, targets = holder.hold(x), holder.hold(y)
    short = np.dtype(dtype).kind == "f" and np.dtype(dtype).itemsize <= 4
    if holder.form == "rows":  # as scikit-learn has it
        short = "f4" in dtype
    elif method in OF_ESTIMATORS:
        short = "f8" not in dtype
    plain = holder.plain(x, np.dtype("f4" if short else "f8"), holder.names[0], True)
    plain_targets = holder.plain(y, y.dtype, holder.names[-1])
    run, precision = METHODS[method], y.dtype.str
    expected = values(run(Maker(holder.form, precision, x), plain, plain_targets))
    found = values(run(Maker(holder.form, precision, x, holder.place), held, targets))
    case = f"{method} of {dtype} in {holder.form}, {holder.is_cut}: {holder.names}"
    # scales of integers are applied in float64, and native steps are for arrays of NumPy
    atol = 0 if np.dtype(dtype).kind == "f" and method != "stream" else 1e-5
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape, case
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=case)


def test_the_users_data_are_never_written_to(task):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x.mul_(2)))

    # windows could be views of this
    x = np.ascontiguousarray(task.x.transpose(2, 1, 0)).transpose(2, 1, 0)
    x.flags.writeable = task.y.flags.writeable = False
    before = x.copy()
    model = InPlace()
    model.takes_windows = True
    Estimator(model, spec=Spec(1, N, T)).fit(x, task.y).predict(x)
    assert np.array_equal(x, before)


@pytest.mark.few
@pytest.mark.parametrize("virtual", [True, False])
def test_files_put_together(task, virtual, tmp_path):
    for i, part in enumerate(np.array_split(np.arange(N), 3)):
        h5save(tmp_path / f"{i}.h5", {"x": task.x[:, part], "y": task.y[:, part]})
    h5concat(tmp_path / "all.h5", [tmp_path / f"{i}.h5" for i in range(3)], dims=1, virtual=virtual)
    x, y = h5mmap(tmp_path / "all.h5", "x"), h5mmap(tmp_path / "all.h5", "y")
    assert isinstance(x, np.ndarray) is not virtual
    fits = [Estimator(task.ours(), None, None, Spec(1, 8, 10), random_state=0) for _ in "xy"]
    other, plain = fits[0].fit(x, y), fits[1].fit(task.x, task.y)
    assert torch.equal(net2vec(plain), net2vec(other))
    out = h5create(tmp_path / "out.h5", "yhat", (2, N, T), "f8")
    assert np.array_equal(other.predict(x, out=out), plain.predict(task.x))
