"""A session against one call of the model on the whole series."""

import pytest
import torch
from torch import nn

from fluxutils_py.nn import GRU
from fluxutils_py.steps.session import InferenceSession


class Causal(nn.Module):
    takes_windows = True

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 2, 4)

    def forward(self, x):
        return self.conv(nn.functional.pad(x.permute(1, 2, 0), (3, 0))).permute(2, 0, 1)


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(GRU(3, 5), nn.Linear(5, 2)), Causal], ids=["GRU", "causal"]
)
def test_windows_and_steps_give_what_one_call_gives(make):
    model, x = make(), torch.randn(11, 4, 3)
    with torch.no_grad():
        whole = make_copy(model)(x)
        session = InferenceSession(model, lambda: (x[:3],), overlap=3)
        parts = [session.run((part,))[0] for part in x.split([4, 1, 1, 5])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-6)
    assert all(layer.state is None for layer in model.modules() if isinstance(layer, GRU))


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(GRU(3, 5), nn.Linear(5, 2)), Causal], ids=["GRU", "causal"]
)
def test_another_session_continues_from_the_state(make):
    model, x = make(), torch.randn(9, 4, 3)
    with torch.no_grad():
        session, other = (InferenceSession(model, lambda: (x[:3],), overlap=3) for _ in range(2))
        session.run((x[:6],))
        other.load(session.state, 4)
        assert other.run((x[6:],))[0].equal(session.run((x[6:],))[0])


def test_series_that_began_at_different_steps_continue_from_the_state():
    model, x = Causal(), torch.randn(9, 5, 3)
    with torch.no_grad():
        session, other = (InferenceSession(model, lambda: (x[:3],), overlap=3) for _ in range(2))
        session.run((x[:5],))
        session.reset(torch.tensor([1, 4]))
        session.run((x[5:7],))
        expected = model(x)[7:]
        expected[:, [1, 4]] = model(x[5:])[2:, [1, 4]]
        other.load(session.state, 5)
        for continued in (session, other):
            torch.testing.assert_close(continued.run((x[7:],))[0], expected, rtol=0, atol=2e-6)


def make_copy(model):
    twin = type(model)() if isinstance(model, Causal) else nn.Sequential(GRU(3, 5), nn.Linear(5, 2))
    twin.load_state_dict(model.state_dict())
    return twin
