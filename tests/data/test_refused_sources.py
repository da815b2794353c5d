"""What users may have in place of arrays is refused with the way out, wherever it is given."""

import re
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import scipy.sparse
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    SequenceImputer,
    SequenceScaler,
    samples,
    timesteps,
)
from fluxutils_py.data.arrays import refuse_source
from fluxutils_py.errors import DataError

F, N, T = 2, 3, 7
X = np.random.default_rng(0).normal(size=(F, N, T)).astype("float32")
Y = X[:1] * 2
SPEC = {"epochs": 1, "batchsize": 2}


def of_library(module, name, **attributes):
    """An object whose class has the name of another library's; no library is needed."""
    return type(name, (SimpleNamespace,), {"__module__": module})(__getitem__=0, **attributes)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def nested():
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(2, 4)], layout=torch.jagged)


SOURCES = {
    "torch Dataset": (lambda: TensorDataset(torch.zeros(3, 2)), "TensorDataset"),
    "iterable torch Dataset": (Stream, "Stream"),
    "DataLoader": (lambda: DataLoader(TensorDataset(torch.zeros(3, 2))), "DataLoader"),
    "bfloat16": (lambda: torch.zeros(F, N, T, dtype=torch.bfloat16), "bfloat16"),
    "float8": (lambda: torch.zeros(F, N, T).to(torch.float8_e4m3fn), "float8"),
    "nested": (nested, "torch.jagged"),
    "sparse tensor": (lambda: torch.ones(F, N, T).to_sparse(), "torch.sparse_coo"),
    "meta": (lambda: torch.zeros(F, N, T, device="meta"), "meta"),
    "group": (lambda: of_library("zarr.core.group", "Group"), "zarr.core.group.Group"),
    "dask with unknown chunks": (
        lambda: of_library(
            "dask.array.core", "Array", shape=(F, float("nan")), __array__=0, dtype=X.dtype
        ),
        "(2, nan): call compute_chunk_sizes()",
    ),
    "lazy frame": (lambda: of_library("polars.lazyframe.frame", "LazyFrame"), "LazyFrame"),
    "sparse matrix": (lambda: scipy.sparse.csr_matrix(np.eye(N)), "csr_matrix"),
    "sparse array": (lambda: scipy.sparse.coo_array(np.eye(N)), "coo_array"),
    "generator": (lambda: (a for a in X), "generator"),
    "map": (lambda: map(np.asarray, X), "map"),
    "set": (lambda: {1, 2}, "set"),
}


def fit(*args, **kwargs):
    return Estimator(spec=SPEC, verbose=False).fit(*args, **kwargs)


USES = {
    "x": ("x", lambda a: fit(a, Y)),
    "one of several x": ("x[1]", lambda a: fit((X, a), Y)),
    "y": ("y", lambda a: fit(X, a)),
    "labels": ("y", lambda a: EstimatorClassifier(spec=SPEC, verbose=False).fit(X, a)),
    "weights": ("sample_weight", lambda a: fit(X, Y, a)),
    "validation": ("validation x", lambda a: fit(X, Y, validation_data=(a, Y))),
    "validation targets": ("validation y", lambda a: fit(X, Y, validation_data=(X, a))),
    "samples": ("x", samples),
    "timesteps": ("x", timesteps),
    "scaler": ("x", lambda a: SequenceScaler().fit(a)),
    "transform": ("x", lambda a: SequenceScaler().fit(X).transform(a)),
    "imputer": ("x", lambda a: SequenceImputer().fit(a)),
}


@pytest.fixture(scope="module")
def fitted():
    return fit(X, Y)


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_no_array_is_refused_with_the_remedy_wherever_it_comes(source, fitted):
    make, came = SOURCES[source]
    uses = USES | {
        "predict": ("x", fitted.predict),
        "score": ("y", lambda a: fitted.score(X, a)),
        "evaluate": ("y", lambda a: fitted.evaluate(X, a)),
    }
    for use, (name, call) in uses.items():
        with pytest.raises(DataError) as caught:
            call(make())
        text = str(caught.value)
        assert text.startswith(f"{name} must"), (use, text)
        assert came in text, use
        assert "(F, N, T)" in text, use
        assert ".float()" in text, use


def test_the_ways_out_work():
    series = [torch.randn(n, F) for n in (5, 3)]
    given = [a.T for a in unpack_sequence(pack_sequence(series))]
    targets = [a[:1] * 2 for a in given]
    assert [a.shape for a in fit(given, targets).predict(given)] == [(1, 5), (1, 3)]
    low = torch.tensor(X).bfloat16()
    assert fit(low.float(), Y).predict(low.float()).shape == (1, N, T)
    parts = torch.nested.nested_tensor([a.T for a in series], layout=torch.jagged)
    assert [a.shape for a in fit(list(parts.unbind()), targets).predict(given)] == [(1, 5), (1, 3)]


def test_one_series_of_a_list_is_named():
    with pytest.raises(DataError, match=r"x\[1\].*Tensor.*\.float\(\)"):
        fit(
            [torch.zeros(F, 3), torch.zeros(F, 4, dtype=torch.bfloat16)], [Y[:, 0, :3], Y[:, 0, :4]]
        )


def test_groups_of_hdf5_are_refused_and_their_datasets_are_not(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
        with pytest.raises(DataError, match=re.escape('or ["name"]')):
            fit(file, Y)
        assert fit(file["x"], Y).predict(file["x"]).shape == (1, N, T)


def test_classes_of_users_with_such_names_are_arrays_if_they_are():
    class Dataset:
        shape, dtype = X.shape, X.dtype

        def __getitem__(self, key):
            return X[key]

    refuse_source(Dataset(), "x")
    np.testing.assert_array_equal(fit(Dataset(), Y).predict(X).shape, (1, N, T))


@pytest.mark.parametrize(
    "good",
    [
        X,
        torch.tensor(X),
        X.tolist(),
        [X[:, 0], X[:, 1, :3]],
        (X, X),
        3.0,
        None,
        "text",
        np.float32(2),
    ],
)
def test_all_else_passes(good):
    refuse_source(good, "x")
