"""The network: what it begins with, and that its quantiles cannot cross."""

import pytest
import torch
from torch import nn

from fluxutils_py import reset
from fluxutils_py.errors import SpecError
from fluxutils_py.forecasting.channels import Channels, Covariate
from fluxutils_py.forecasting.networks import DirectModel
from fluxutils_py.nn import LSTM


def group(n_numbers, *n_categories):
    numbers = [Covariate("number")] * n_numbers
    return (*numbers, *(Covariate("kind", categories=tuple("abcd"[:n])) for n in n_categories))


CHANNELS = Channels(4, 6, group(1, 3), group(1, 2), group(2, 4, 3))
N_CODES = len(CHANNELS.n_codes)
AHEAD = CHANNELS.current  # the first number known ahead, one step ahead
CODES_AHEAD = AHEAD + 2 * 2 * CHANNELS.h


def network(quantiles=()):
    return DirectModel(LSTM, CHANNELS, quantiles, hidden_size=7, dropout=0.3)


def sample(n_steps=5, n=3):
    x = torch.randn(n_steps, n, CHANNELS.total)
    for first, last in ((CHANNELS.numeric, AHEAD), (CODES_AHEAD, AHEAD + CHANNELS.ahead)):
        x[..., first:last] = torch.randint(0, 3, (n_steps, n, last - first)).float()
    return x


def test_quantiles_are_in_order_for_any_weights():
    model = network((0.1, 0.4, 0.5, 0.9)).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=3)
    out = model(sample()).unflatten(-1, (5, 4))
    assert (out[..., 1:, :].diff(dim=-2) >= 0).all()


def test_the_linear_way_begins_at_zero_and_windows_equal_steps():
    model = network().eval()
    assert not model.skip.weight.any()
    x = sample()
    whole = model(x)
    reset(model)
    steps = torch.stack([model(step) for step in x])
    torch.testing.assert_close(whole, steps)


def test_the_quantiles_do_not_move_the_point_forecast():
    model = network((0.1, 0.9))
    model(sample()).unflatten(-1, (3, 4))[..., 1:, :].sum().backward()
    assert not model.head.weight.grad.any()
    assert model.quantile_head.weight.grad.any()


@pytest.mark.parametrize("at", [AHEAD, CODES_AHEAD, CODES_AHEAD + 2 * CHANNELS.h])
def test_each_known_step_ahead_moves_its_own_forecast_alone(at):
    model = network().eval()
    for p in model.parameters():
        nn.init.normal_(p)
    x = sample()
    changed = x.clone()
    changed[..., at + 2] += 1
    a = model(x)
    reset(model)
    moved = (model(changed) - a).abs().amax((0, 1)) > 0
    assert moved.tolist() == [False, False, True, False]


def test_a_code_that_was_not_there_in_training_has_an_embedding_of_zeros():
    model = network()
    model(sample()).square().sum().backward()
    for table in model.embeddings:
        assert not table.weight[0].any()
        assert not table.weight.grad[0].any()
        assert table.weight.grad[1:3].any()


def test_categories_of_all_three_kinds_are_embedded_by_their_own_tables():
    model = network().eval()
    model.body = nn.Identity()  # passes the inputs on
    model.head, model.context = (
        nn.Linear(model.skip.in_features, 4),
        nn.Linear(model.skip.in_features, 8),
    )
    for table in model.embeddings:
        nn.init.normal_(table.weight)
    seen = []
    model.body.register_forward_hook(lambda module, args, out: seen.append(out))
    model.head = nn.Linear(model.skip.in_features, 4)
    x = sample()
    model(x)
    at = CHANNELS.numeric
    codes = x[..., at : at + N_CODES].long().unbind(-1)
    expected = [table.weight[code] for table, code in zip(model.embeddings, codes, strict=True)]
    torch.testing.assert_close(seen[0], torch.cat([x[..., :at], *expected], -1))


def test_bodies_that_take_windows_without_a_state_are_refused():
    class Convolution(nn.Linear):
        takes_windows = True

    with pytest.raises(
        SpecError,
        match=r"Convolution .*CausalConv1d or TCN",
    ):
        DirectModel(Convolution, CHANNELS)
