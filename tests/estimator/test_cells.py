"""The cells of FluxUtils in the ready-made estimators: learning, saving, and predicting in parts."""

import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, SequenceRegressor, Spec, net2vec, reset
from fluxutils_py.auto.sequence_estimators import CELLS
from fluxutils_py.nn import HFGRU, Recur, RNNStack
from fluxutils_py.nn.cells import SMGUCell
from tests.plain_networks import plain_classifier, plain_regressor

OWN = ["flstm", "sgru", "mgu", "smgu", "hfgru"]
WITHOUT_RECURRENCE = ["mingru", "minlstm", "lru", "tcn", "attention"]
X = np.random.default_rng(0).normal(size=(3, 7, 43))
Y = X.mean(0, keepdims=True)


def test_names_of_cells():
    assert list(CELLS) == ["lstm", "gru", "rnn", *OWN, *WITHOUT_RECURRENCE]
    message = (
        "cell must be one of 'auto', 'kernels', 'linear', 'linear+lstm', 'lstm', 'gru', 'rnn', "
        "'flstm', 'sgru', 'mgu', 'smgu', 'hfgru', 'mingru', 'minlstm', 'lru', 'tcn', 'attention', "
        "or a class, got 'flsm'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plain_regressor(cell="flsm").fit(X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("cell", OWN)
def test_fit_is_a_hand_written_loop_over_the_steps_of_the_cell(cell):
    """Windows through the layer, against the cell's formula step by step under autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(CELLS[cell](3, 5), nn.Linear(5, 1)).double()
    spec = Spec(epochs=2, batchsize=4, seqsize=10, rebatch=False)
    est = Estimator(model, F.mse_loss, partial(torch.optim.Adam, lr=1e-2), spec).fit(X, Y)
    inner, head = model[0].module.cells[0], model[1]
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    xs, ys = (torch.from_numpy(a).permute(2, 1, 0) for a in (X, Y))
    for _ in range(2):
        for n in range(0, 7, 4):
            state = None
            for t in range(0, 43, 10):
                loss = 0
                window = range(t, min(t + 10, 43))
                for k in window:
                    h, state = inner(xs[k, n : n + 4], state)
                    loss = loss + F.mse_loss(head(h), ys[k, n : n + 4]) / len(window)
                opt.zero_grad()
                loss.backward()
                opt.step()
                state = (
                    tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
                )
    torch.testing.assert_close(net2vec(est), net2vec(reset(model)), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*OWN, *WITHOUT_RECURRENCE])
def test_ready_made_estimators_learn_save_and_predict_in_parts(cell, tmp_path):
    est = plain_regressor(
        6, 2, cell, dropout=0.1, epochs=30, lr=0.03, seqsize=10, random_state=0
    ).fit(X, Y)
    assert est.score(X, Y) > 0.8
    est.save(tmp_path / "est")
    loaded = SequenceRegressor.load(tmp_path / "est")
    whole = est.predict(X)
    assert np.array_equal(loaded.predict(X), whole)
    first, state = loaded.predict(X[:, :, :17], return_state=True)
    rest = loaded.predict(X[:, :, 17:], state=state)
    assert np.abs(np.concatenate([first, rest], 2) - whole).max() < 2e-6
    est.partial_fit(X, Y)
    loaded.partial_fit(X, Y)
    assert np.array_equal(est.predict(X), loaded.predict(X))
    labels = np.where(X[0].mean(1) > 0, "up", "down")
    assert set(plain_classifier(4, cell=cell, epochs=2).fit(X, labels).predict(X)) <= {
        "up",
        "down",
    }


def test_settings_of_a_layer_by_name_and_any_stack_as_cell():
    est = plain_regressor(4, cell=partial(HFGRU, alpha=0.5), epochs=1).fit(X, Y)
    assert est.model_[0].alpha == 0.5
    est = plain_regressor(4, 2, cell=partial(RNNStack, layer=HFGRU), epochs=1).fit(X, Y)
    assert len(est.model_[0]) == 2


@pytest.mark.slow
def test_a_cell_of_one_step_in_a_model_of_ones_own():
    model = nn.Sequential(Recur(SMGUCell(3, 4)), nn.Linear(4, 1)).double()
    layer = nn.Sequential(CELLS["smgu"](3, 4), nn.Linear(4, 1)).double()
    layer.load_state_dict(dict(zip(layer.state_dict(), model.state_dict().values(), strict=True)))
    spec = Spec(epochs=2, batchsize=4, seqsize=10)
    steps, windows = (
        Estimator(m, None, None, spec, random_state=0).fit(X, Y) for m in (model, layer)
    )
    torch.testing.assert_close(net2vec(steps), net2vec(windows), rtol=0, atol=1e-12)
