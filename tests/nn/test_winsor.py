"""Winsorising: NumPy's quantiles, means and standard deviations, whatever the data lie in."""

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn import LSTM, WinsorNorm, winsor

F, N, T = 5, 13, 37


def statistics(values):
    """Bounds, mean and standard deviation of one feature, by NumPy."""
    y = np.asarray(values, float)
    y = y[~np.isnan(y)]
    if y.size == 0:
        return 0, 0, 0, 1
    lower, upper = np.quantile(y, [0.01, 0.99])
    y = y.clip(lower, upper)
    std = y.std(ddof=1) if y.size > 1 and lower < upper else 1
    return lower, upper, y.mean(), std


def of(norm):
    return torch.stack([norm.lower, norm.upper, norm.mean, norm.std], 1).numpy()


def expected(x):
    return np.array([statistics(f) for f in np.asarray(x)])


def heavy(rng, dtype="float64"):
    """Far outliers, negative and positive; NaN; one value alone; none; constant."""
    x = (10 * rng.standard_t(1.5, size=(F, N, T))).astype(dtype)
    if x.dtype.kind == "f":
        x[0][rng.random((N, T)) < 0.2] = np.nan
        x[1], x[1, 3, 4] = np.nan, -7
        x[2] = np.nan
        x[0, 2, :2] = np.inf, -np.inf
    x[3] = 3
    return x


@pytest.fixture(
    params=[(1 << 20, 64), (317, 64), (1 << 20, 2)], ids=["at once", "in blocks", "small digits"]
)
def _ways(request, monkeypatch):
    monkeypatch.setattr(winsor, "BLOCK", request.param[0])
    monkeypatch.setattr(winsor, "MANY", request.param[1])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32", "uint8", "bool"])
@pytest.mark.usefixtures("_ways")
def test_statistics_are_numpys(dtype, rng):
    x = heavy(rng, dtype) if dtype != "bool" else heavy(rng) > 0
    np.testing.assert_allclose(of(WinsorNorm().fit(x)), expected(x), rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("n", [1, 2, 3, 50, 51, 100, 101, 102, 1000])
def test_quantiles_of_few_and_of_round_numbers_of_values(n, rng):
    x = rng.normal(size=(2, 1, n)) - 100
    np.testing.assert_allclose(of(WinsorNorm().fit(x)), expected(x), rtol=1e-14)


def test_values_that_differ_in_their_last_bit_and_zeros_of_both_signs():
    x = np.array([[[1.0, np.nextafter(1, 2), np.nextafter(1, 0)], [0.0, -0.0, 5e-324]]]).transpose(
        1, 0, 2
    )
    found = of(WinsorNorm().fit(x))
    np.testing.assert_allclose(found[:, :3], expected(x)[:, :3], rtol=1e-16, atol=0)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, path: np.asfortranarray(x),
        lambda x, path: torch.from_numpy(x),
        lambda x, path: torch.from_numpy(np.ascontiguousarray(x.T)).permute(2, 1, 0),
        lambda x, path: as_map(x, path, "C"),
        lambda x, path: as_map(x, path, "F"),
        lambda x, path: as_dataset(x, path),
    ],
)
@pytest.mark.usefixtures("_ways")
def test_every_kind_of_array_gives_the_same(form, tmp_path, rng):
    x = heavy(rng, "float32")
    np.testing.assert_allclose(
        of(WinsorNorm().fit(form(x, tmp_path / "x"))), expected(x), rtol=1e-13
    )


def as_map(x, path, order):
    m = np.memmap(path, x.dtype, "w+", shape=x.shape, order=order)
    m[:] = x
    m.flush()
    return np.memmap(path, x.dtype, "r", shape=x.shape, order=order)


def as_dataset(x, path):
    with h5py.File(path, "w") as f:
        f["x"] = x
    return h5py.File(path, "r")["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_is_the_formula_and_nan_becomes_zero(dtype, rng):
    x = heavy(rng)
    norm = WinsorNorm().fit(x)
    lower, upper, mean, std = (s[:, None, None] for s in expected(x).T)
    y = np.nan_to_num((np.clip(x, lower, upper) - mean) / std)
    found = norm(torch.from_numpy(x.T.copy()).to(dtype))  # (T, N, F)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.numpy(), y.T, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5
    )
    np.testing.assert_allclose(
        norm(torch.from_numpy(x[:, :, 0].T.copy())).numpy(), y[:, :, 0].T, rtol=0, atol=1e-12
    )
    assert norm(torch.zeros(2, F, dtype=torch.int64)).dtype == torch.float32


def test_gradients_stop_at_the_bounds():
    norm = WinsorNorm().fit(torch.linspace(-1, 1, 101).view(1, 1, 101))
    x = torch.tensor([[0.5], [3.0], [torch.nan]], requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.tolist() == [[pytest.approx(float(1 / norm.std[0]))], [0.0], [0.0]]


def test_buffers_are_in_the_state_and_load_into_a_fresh_layer(rng):
    model = nn.Sequential(WinsorNorm().fit(rng.normal(size=(3, N, T))), LSTM(3, 4))
    assert [k for k in model.state_dict() if k.startswith("0.")] == [
        "0.lower",
        "0.upper",
        "0.mean",
        "0.std",
    ]
    other = nn.Sequential(WinsorNorm(3), LSTM(3, 4))
    x = torch.randn(7, 4, 3)
    assert torch.equal(other[0](x), x)  # before it is fitted, nothing changes
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert not list(model[0].parameters())
    assert repr(model[0]) == "WinsorNorm(3)"


def test_bad_data_are_refused_and_change_nothing(rng):
    norm = WinsorNorm().fit(rng.normal(size=(2, 3, 50)))
    before = of(norm)
    x = rng.normal(size=(2, 3, 50))
    x[1, 0, :5] = np.inf
    with pytest.raises(DataError) as info:
        norm.fit(x)
    assert str(info.value) == (
        "feature 1 is infinite in more than a hundredth of its values; use NaN for what is missing"
    )
    for bad in (np.zeros((3, 4)), np.zeros((2, 0, 4))):
        with pytest.raises(ShapeError) as info:
            norm.fit(bad)
        assert str(info.value) == (
            f"WinsorNorm is fitted on a non-empty array of shape (F, N, T), got {bad.shape}"
        )
    assert np.array_equal(of(norm), before)
    with pytest.raises(ShapeError, match=r"WinsorNorm has 2 .*\(5, 3\)$"):
        norm(torch.zeros(5, 3))
    with pytest.raises(
        ShapeError,
        match=r"WinsorNorm .*0 .*\(5, 3\).* fit",
    ):
        WinsorNorm()(torch.zeros(5, 3))


PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from fluxutils_py import WinsorScaler
from fluxutils_py.nn import WinsorNorm

def anonymous():  # MiB that cannot be dropped; file pages can
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("RssAnon")).split()[1]) / 1024

class Watched:  # looks at the memory each time a block is read
    dtype, peak = np.dtype("f4"), 0
    def __init__(self, x):
        self.x, self.shape, self.strides = x, x.shape, x.strides
    def __getitem__(self, key):
        self.peak = max(self.peak, anonymous())
        return self.x[key]

found = []
for n_steps in 50_000, 1_000_000:  # (T, N, F), nearly all of it never written: up to 160 MB
    x = np.memmap(sys.argv[1], "f4", "w+", shape=(n_steps, 10, 4))
    x[::1000] = np.random.default_rng(0).normal(size=(n_steps // 1000, 10, 4))
    x = Watched(x.T)
    {"layer": WinsorNorm, "scaler": WinsorScaler}[sys.argv[2]]().fit(x)
    found.append(x.peak)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs sparse files")
@pytest.mark.parametrize("kind", ["layer", "scaler"])
def test_memory_does_not_grow_with_the_file(kind, python, tmp_path):
    done = subprocess.run(
        [python, "-c", PROGRAM, str(tmp_path / "x"), kind],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)
    # the larger file has 153 MiB, 305 as float64; beside other work 74 came once
    assert large < small + 100
