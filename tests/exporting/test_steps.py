"""Models as functions of one step: their states, and what is refused."""

import pytest
import torch
from torch import nn

from fluxutils_py import states
from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.steps import InitialState, ModelStep
from fluxutils_py.nn import GRU, LSTM, Recur

X = [torch.randn(4, 2, 3)]


def test_a_step_takes_and_returns_the_states_in_their_order():
    model = nn.Sequential(LSTM(3, 5, 2, trainable_init=True), Recur(nn.GRUCell(5, 4))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    step = ModelStep(model, X)
    kept = [s.of(7) for s in step.initial]
    for x in torch.randn(3, 7, 3):
        y, *kept = step(x, *kept)
        with torch.no_grad():
            assert torch.allclose(y, model(x), atol=1e-6)
    assert [tuple(s.shape) for s in kept] == [(2, 7, 5), (2, 7, 5), (7, 4)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(kept, states(model), strict=True))


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 1)).train()
    model(torch.zeros(2, 3))
    before = states(model)
    ModelStep(model, X)
    assert model.training
    assert all(a.equal(b) for a, b in zip(states(model), before, strict=True))


def test_an_initial_state_is_repeated_along_its_batch_axis():
    s = InitialState(torch.tensor([[1.0, 2.0]]), 0).of(3)
    assert s.tolist() == [[1.0, 2.0]] * 3


class FromOnes(nn.Module):
    """Starts from something else than zeros, and does not say so."""

    def forward(self, x, state):
        state = torch.ones_like(x) if state is None else state
        return x + state, x + state


class Bidirectional(nn.Module):
    takes_windows = True

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, bidirectional=True)

    def forward(self, x):
        return self.rnn(x)[0]


class LooksAhead(nn.Module):
    def forward(self, x):
        return x + x.mean(0)


class WithAhead(nn.Module):
    takes_windows = True

    def __init__(self):
        super().__init__()
        self.rnn, self.ahead = GRU(3, 4), LooksAhead()

    def forward(self, x):
        return self.ahead(self.rnn(x))


class WithLoss(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.rnn, self.criterion = GRU(3, 1), criterion

    def forward(self, x):
        y = self.rnn(x)
        return y.square().mean() if self.criterion is None else self.criterion(y, x[..., :1])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(Recur(FromOnes())), "'0' does not start from zeros"),
        (Bidirectional(), r"rnn \(LSTM\) is bidirectional"),
        (WithAhead(), r"ahead \(LooksAhead\) reads the future"),
        (WithLoss(nn.MSELoss()), r"gives a loss for a step"),
        (WithLoss(None), "WithLoss gives a loss"),
    ],
    ids=["initial state", "bidirectional", "ahead", "loss module", "loss"],
)
def test_what_cannot_be_a_step_is_named(model, said):
    if isinstance(model, WithLoss):
        model.takes_windows = False
    with pytest.raises(ExportError, match=said):
        ModelStep(model.eval(), X)
