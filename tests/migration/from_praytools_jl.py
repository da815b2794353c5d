"""What PrayTools.jl gives for rows of ``docs/from_praytools_jl.md``: by its formulas and its tests."""

import numpy as np
import torch

from tests.migration import Checks

checks = Checks()


def mean_gradient(names, samples):
    """The mean of the gradients of samples of one size, by plain torch."""
    found = [torch.autograd.grad(names["loss"](*sample), names["ps"]) for sample in samples]
    return [sum(parts) / len(found) for parts in zip(*found, strict=True)]


@checks.of("value, grads = pgradient(loss, ps, environments)")
def _(names, value):
    samples = names["environments"]
    losses = [float(names["loss"](*sample).detach()) for sample in samples]
    assert np.isclose(float(names["value"]), np.mean(losses), rtol=1e-5)
    for found, expected in zip(names["grads"], mean_gradient(names, samples), strict=True):
        torch.testing.assert_close(found, expected)


@checks.of("total = addgrad(gs, gs)")
def _(names, value):
    for found, one in zip(names["total"], names["gs"], strict=True):
        assert torch.equal(found, 2 * one)


@checks.of("parts = dividebatch(2, *preparesamples())")
def _(names, value):
    assert [(tuple(x.shape), tuple(y.shape)) for x, y in names["parts"]] == [((10, 3), (10, 1))] * 2
    for x, y in names["parts"]:  # a row's label stays beside it
        torch.testing.assert_close(y, x.sum(1, keepdim=True))


@checks.of("stats = paralelization_stats(loss, ps, preparesamples, 20)")
def _(names, value):
    assert [row["parts"] for row in names["stats"]] == [1, 1, 2, 4, 8, 16]
    assert all(row["time"] > 0 for row in names["stats"])


@checks.of("signalign([np.ones(3), -np.ones(3)], 0.5)")
def _(names, value):
    assert np.asarray(value).tolist() == [0, 0, 0]  # the signs agree nowhere


@checks.of("maskedgrad([gs, gs], 0.5)")
def _(names, value):
    for found, one in zip(value, names["gs"], strict=True):
        torch.testing.assert_close(found, one)


@checks.of("nan, inf, largest, l2 = gradinfo(gs)")
def _(names, value):
    flat = torch.cat([g.reshape(-1) for g in names["gs"]]).double().numpy()
    assert (int(names["nan"]), int(names["inf"])) == (0, 0)
    assert np.isclose(float(names["largest"]), np.abs(flat).max())
    assert np.isclose(float(names["l2"]), (flat**2).sum(), rtol=1e-5)


@checks.of("classindexes(targets)")
def _(names, value):
    assert {name: list(rows) for name, rows in value.items()} == {"a": [0, 3], "b": [1, 2, 4]}


@checks.of("balanced_sample(ci, 4)")
def _(names, value):
    rows = sorted(int(row) for row in value)
    assert {0, 3} < set(rows)  # both of "a", two of "b"
    assert len(set(rows)) == 4


@checks.of("x, y = initbatchprovider(data, targets, 4)()")
def _(names, value):
    assert np.asarray(names["x"]).shape == (3, 4)
    assert np.asarray(names["y"]).sum() == 4
