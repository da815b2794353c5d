"""Law 9: a memory-mapped file gives bit for bit the result of the same array in memory, in any
memory order.
"""

import functools

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, h5concat, h5create, h5mmap, h5save, net2vec
from fluxutils_py.nn import LSTM

from .conftest import N, T, make_task

ORDERS = ["FNT", "TNF", "NTF", "NFT", "TFN", "FTN"]


def stored(a, order, kind, path):
    """``a`` with its axes laid out in memory in the given order, slowest first; seen as (F, N, T)."""
    axes = ["FNT".index(c) for c in order]
    laid = np.ascontiguousarray(a.transpose(axes))
    back = np.argsort(axes)
    if kind == "memmap":
        m = np.memmap(path, laid.dtype, "w+", shape=laid.shape)
        m[:] = laid
        m.flush()
        return np.memmap(path, laid.dtype, "r", shape=laid.shape).transpose(back)
    if kind == "npy":
        np.save(path.with_suffix(".npy"), laid)
        return np.load(path.with_suffix(".npy"), mmap_mode="r").transpose(back)
    if kind == "sliced":
        big = np.full([2 * n + 1 for n in laid.shape], 9, laid.dtype)
        view = big[1::2, 1::2, 1::2]
        view[:] = laid
        return view.transpose(back)
    if kind == "reversed twice":
        return np.ascontiguousarray(laid[::-1, ::-1, ::-1])[::-1, ::-1, ::-1].transpose(back)
    return laid.transpose(back)


def convert(a, order, kind, path):
    if kind.startswith("h5"):
        return in_hdf5(a, order, kind, str(path) + ".h5")
    if kind == "torch":
        return torch.tensor(stored(a, order, "array", path).copy())
    if kind == "list":
        return a.tolist()
    return stored(a, order, kind, path)


def in_hdf5(a, order, kind, path):
    if kind == "h5save":
        h5save(path, {"d": a}, axes=order)
        return h5mmap(path, "d", fallback="error")
    laid = np.ascontiguousarray(a.transpose(["FNT".index(c) for c in order]))
    if kind == "h5py":  # the open dataset itself, as (F, N, T)
        return h5py.File(path, "w").create_dataset("d", data=a)
    storage = {
        "h5chunked": {"chunks": True},
        "h5gzip": {"compression": "gzip"},
        "h5big-endian": {},
    }[kind]
    with h5py.File(path, "w") as f:
        f.create_dataset(
            "d",
            data=laid,
            dtype=laid.dtype.newbyteorder(">") if "endian" in kind else None,
            **storage,
        )
    return h5mmap(path, "d", axes=order)


SPEC = Spec(epochs=1, batchsize=8, seqsize=10, shuffle=True)


@functools.cache
def in_memory(dtype):
    """Fitted once on arrays in memory, with its predictions and its score; tests only read it."""
    task = make_task(dtype)
    est = Estimator(task.ours(), None, None, SPEC, random_state=0).fit(task.x, task.y)
    return net2vec(est), est.predict(task.x), est.score(task.x, task.y)


CASES = [(o, k) for o in ORDERS for k in ("array", "memmap", "sliced")]
CASES += [(o, k) for o in ("FNT", "TNF") for k in ("npy", "reversed twice", "torch")] + [
    ("FNT", "h5py"),
    ("FNT", "list"),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("order", "kind"), CASES)
def test_fit_and_predict(order, kind, dtype, tmp_path):
    if kind == "list" and dtype == "float32":
        pytest.skip("lists of numbers are float64")
    task = make_task(dtype)
    x, y = (
        convert(task.x, order, kind, tmp_path / "x"),
        convert(task.y, order, kind, tmp_path / "y"),
    )
    other = Estimator(task.ours(), None, None, SPEC, random_state=0).fit(x, y)
    params, predicted, score = in_memory(dtype)
    assert torch.equal(params, net2vec(other))
    assert np.array_equal(predicted, other.predict(x))
    assert score == other.score(x, y)


@pytest.fixture(scope="module")
def masked():
    """Inputs, targets with gaps, weights, and what fits them; the last is called once with what it
    is given here.
    """
    task = make_task(n_series=3)
    y = task.y.copy()
    y[:, np.random.default_rng(0).random((3, T)) < 0.2] = np.nan
    w = np.random.default_rng(0).random((3, T)) + 0.1
    spec = Spec(epochs=2, batchsize=16, seqsize=4, overlap=2, shuffle=True)

    def fit(x, y, w):
        est = Estimator(task.ours(), None, None, spec, random_state=0)
        return net2vec(est.fit(x, y, w, lengths=[43, 29, 40]))

    return task.x, y, w, fit, fit(task.x, y, w)


@pytest.mark.parametrize(
    ("order", "kind"),
    [(o, k) for o in ORDERS for k in ("array", "memmap", "h5save", "h5chunked")]
    + [("FNT", "h5py")],
)
def test_folds_masks_weights_and_lengths(order, kind, masked, tmp_path):
    x, y, w, fit, expected = masked
    x_, y_ = convert(x, order, kind, tmp_path / "x"), convert(y, order, kind, tmp_path / "y")
    w_ = stored(w[None], order, "memmap", tmp_path / "w")
    assert torch.equal(fit(x_, y_, w_), expected)


@functools.cache
def of_type(dtype):
    """Inputs, targets, a model, and its parameters after a fit on the inputs as numbers of torch's
    usual types.
    """
    x = (np.random.default_rng(0).normal(size=(3, N, T)) * 3).astype(dtype)
    y = make_task().y.astype("f4")
    model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 2))
    as_floats = x.astype("f8" if "f8" in dtype else "f4")
    return x, y, model, net2vec(Estimator(model, spec=IN_ORDER).fit(as_floats, y))


IN_ORDER = Spec(epochs=1, batchsize=8, seqsize=10)


@pytest.mark.parametrize("dtype", ["float16", ">f4", "<f8", "int8", "uint16", ">i4", "bool"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.filterwarnings(
    "ignore:feature . of x has values of about"
)  # negative numbers as uint16
def test_every_numeric_type(dtype, order, tmp_path):
    x, y, model, expected = of_type(dtype)
    other = Estimator(model, spec=IN_ORDER).fit(stored(x, order, "memmap", tmp_path / "x"), y)
    assert torch.equal(net2vec(other), expected)


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


@pytest.mark.parametrize("virtual", [True, False])
def test_files_put_together(task, virtual, tmp_path):
    for i, part in enumerate(np.array_split(np.arange(N), 3)):
        h5save(tmp_path / f"{i}.h5", {"x": task.x[:, part], "y": task.y[:, part]})
    h5concat(tmp_path / "all.h5", [tmp_path / f"{i}.h5" for i in range(3)], dims=1, virtual=virtual)
    x, y = h5mmap(tmp_path / "all.h5", "x"), h5mmap(tmp_path / "all.h5", "y")
    assert isinstance(x, np.ndarray) is not virtual
    other = Estimator(task.ours(), None, None, SPEC, random_state=0).fit(x, y)
    params, predicted, _ = in_memory("float64")
    assert torch.equal(params, net2vec(other))
    out = h5create(tmp_path / "out.h5", "yhat", (2, N, T), "f8")
    assert np.array_equal(other.predict(x, out=out), predicted)
