"""The work that contenders of the benchmarks do, and the judge of its outcome."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fluxutils_py import net2vec


@pytest.fixture
def shape(module):
    """Nothing divides: short last groups and windows."""
    return module("work").Shape(
        n_features=3, n_series=7, n_steps=11, n_hidden=5, batchsize=4, seqsize=6, epochs=2
    )


def test_judge_agrees_with_torch(module, shape):
    work = module("work")
    x, y, model = work.make(shape)
    with torch.no_grad():
        h, _ = model[0].module(torch.from_numpy(x[:, :4]).permute(2, 1, 0))
        expected = F.mse_loss(model[1](h), torch.from_numpy(y[:, :4]).permute(2, 1, 0))
    assert work.judge(net2vec(model), x, y, shape) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
def test_contenders_end_with_the_same_weights(module, shape):
    work = module("work")
    data = work.make(shape)
    whole = work.by_hand(*data, shape)
    assert work.apart(whole, net2vec(data[2]), shape) > 1e-4  # something was learnt
    others = {
        "fit": work.by_fit(*data, shape),
        "not fused": work.by_hand(*data, shape, fused=False),
        "windows sent": work.by_hand(*data, shape, upfront=False),
        "by step": work.by_hand(*data, shape, loss=work.loss_by_steps),
        "fit by step": work.by_fit(*data, shape, loss=work.step_loss),
    }
    apart = {name: work.apart(vector, whole, shape) for name, vector in others.items()}
    assert max(apart.values()) < 1e-6, apart


def test_outcome_tells_other_work_from_the_same(module, shape):
    work = module("work")
    data = work.make(shape)
    vectors = {"base": work.by_hand(*data, shape)}
    vectors |= {"same": vectors["base"].clone(), "other": vectors["base"] * 1.01}
    seconds = {"base": [1.0, 2.0], "same": [2.0, 3.0], "other": [3.0, 8.0]}
    rows, off = work.outcome(seconds, vectors, "base", data, shape)
    assert [row[:3] for row in rows] == [
        ["base", "1.00 (1.00-1.00)", "1.500"],
        ["same", "1.75 (1.50-2.00)", "2.500"],
        ["other", "3.50 (3.00-4.00)", "5.500"],
    ]
    assert rows[1][4] == "0.0e+00"
    assert off["same"] == 0
    assert off["other"] > 1e-4


def test_windows_of_peers_are_those_of_the_loop(module, shape):
    x, y, _ = module("work").make(shape)
    windows = module("peers").Windows(x, y, shape)
    assert len(windows) == 4
    xs, ys = windows[3]  # the last three series, the last five steps
    np.testing.assert_array_equal(xs, x[:, 4:, 6:].transpose(2, 1, 0))
    np.testing.assert_array_equal(ys, y[:, 4:, 6:].transpose(2, 1, 0))


@pytest.mark.few
@pytest.mark.parametrize("peer", ["skorch", "lightning"])
def test_peer_ends_with_the_same_weights(module, shape, peer):
    pytest.importorskip(peer)  # of the benchmarks only: no extra of the tests brings them
    work, peers = module("work"), module("peers")
    data = work.make(shape)
    train = {"skorch": peers.by_skorch, "lightning": peers.by_lightning}[peer]
    assert work.apart(train(*data, shape), work.by_hand(*data, shape), shape) < 1e-6
