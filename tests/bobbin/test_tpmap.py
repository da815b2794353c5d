"""A function called for several devices at once, on parts of its arguments."""

import numpy as np
import pytest
import torch

from fluxutils_py.bobbin import tpmap


def noisy_linear(w, x, generator, scale):
    noise = torch.randn(len(x), w.shape[1], generator=generator)
    return x @ w + scale * noise


def test_parts_of_the_leading_axis_together_are_the_whole():
    w, x = torch.randn(5, 3), torch.randn(8, 5)
    linear = tpmap(noisy_linear, "batch", ["broadcast", "shard", "rng", "static"], devices=4)
    found = linear(w, x, torch.Generator().manual_seed(0), 0.0)
    assert found.shape == (4, 2, 3)
    torch.testing.assert_close(found.reshape(8, 3), x @ w)


@pytest.mark.parametrize("x", [torch.arange(6.0), np.arange(6.0)], ids=["torch", "numpy"])
def test_one_device_has_an_axis_too(x):
    found = tpmap(lambda part: 2 * part, "batch", ["shard"], devices=1)(x)
    assert type(found) is type(x)
    assert found.tolist() == [(2 * x).tolist()]


def test_each_device_draws_numbers_of_its_own_that_are_the_same_again():
    w, x = torch.zeros(5, 3), torch.zeros(40, 5)
    linear = tpmap(noisy_linear, "batch", ["broadcast", "shard", "rng", "static"], devices=4)
    found = linear(w, x, torch.Generator().manual_seed(0), 1.0)
    for i in range(4):
        for k in range(i):
            assert (found[i] - found[k]).square().sum() > 1
    assert torch.equal(found, linear(w, x, torch.Generator().manual_seed(0), 1.0))


def test_keywords_trees_and_the_wrapper():
    def total(pair, *, each, times):
        return {"sum": pair["a"].sum() + each, "n": times}

    f = tpmap(
        total,
        "batch",
        ["shard"],
        {"each": "thru", "times": "static"},
        devices=["cpu", "cpu"],
        wrap_return=dict.items,
    )
    found = dict(f({"a": np.arange(6.0)}, each=torch.tensor([10.0, 20.0]), times=3))
    assert found["sum"].tolist() == [13.0, 32.0]
    assert found["n"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(torch.zeros(7)), ValueError, "7 rows, .* 2 devices"),
        (lambda f: f(torch.zeros(())), ValueError, "no leading axis"),
        (lambda f: f({"a": [torch.zeros(3)]}), ValueError, "^/a/0 has 3 rows, .* 2 devices"),
        (
            lambda f: tpmap(len, "batch", ["thru"], devices=2)(torch.zeros(4)),
            ValueError,
            "4 rows .* 2 dev",
        ),
        (lambda f: f(), TypeError, "expected 1 positional arguments .* got 0"),
        (lambda f: f(torch.zeros(2), y=1), TypeError, r"keywords \[\], got 1 and \['y'\]"),
        (lambda f: tpmap(len, "batch", ["split"])(1), ValueError, "static.*rng, not 'split'"),
    ],
)
def test_what_cannot_be_divided_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(tpmap(lambda v: v, "batch", ["shard"], devices=2))


def test_an_error_in_one_call_is_raised():
    with pytest.raises(ZeroDivisionError):
        tpmap(lambda x: 1 / 0, "batch", ["shard"], devices=2)(torch.zeros(2))


def test_by_default_all_gpus_are_devices_or_the_cpu_is_one(monkeypatch):
    """bobbin takes ``jax.local_devices`` for ``devices=None``."""
    for settings in {}, {"devices": None}:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        double = tpmap(lambda x: 2 * x, "batch", ["shard"], **settings)
        assert double(torch.ones(3)).tolist() == [[2, 2, 2]]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(ValueError, match=r"3 rows, .* 2 devices"):
            tpmap(lambda x: x, "batch", ["shard"], **settings)(torch.ones(3))
