"""What autocast does to layers: recurrent layers of every kind, against torch by itself."""

import pytest
import torch
from torch import nn

from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LRU,
    LSTM,
    MGU,
    RNN,
    TCN,
    MinGRU,
    Recur,
    SlidingWindowAttention,
    native_kernels,
)
from fluxutils_py.nn.precision import (
    as_float32,
    autocast,
    check_precision,
    require_float32,
)

S, B, F, H = 7, 5, 3, 4
CPU = torch.device("cpu")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "make", [LSTM, GRU, RNN, FLSTM, MGU, HFGRU, MinGRU, LRU, TCN, SlidingWindowAttention]
)
def test_every_layer_runs_and_learns_near_its_float32(make, native):
    torch.manual_seed(0)
    layer, x = make(F, H), torch.randn(S, B, F)
    model = nn.Sequential(nn.Linear(F, F), layer)  # the layer is given low precision
    found = []
    for chosen in ("bfloat16", "float32"):
        with native_kernels(native):
            for part in (layer, *layer.modules()):
                getattr(part, "reset", lambda: None)()
            with autocast(chosen, CPU):
                # the second from the state of the first
                parts = [
                    as_float32(model(x)),
                    as_float32(model(x)),
                ]
            torch.cat(parts).square().mean().backward()
        found.append((torch.cat(parts).detach(), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    (y, gradients), (y_32, gradients_32) = found
    assert (y - y_32).abs().max() < 0.03 * y_32.abs().max()
    for g, g_32 in zip(gradients, gradients_32, strict=True):
        assert g.dtype == torch.float32
        assert (g - g_32).abs().max() < 0.05 * max(q.abs().max() for q in gradients_32)


def test_without_kernels_recurrent_layers_are_float32():
    layer, x = Recur(nn.LSTM(F, 64)), torch.randn(S, B, F)
    with native_kernels(False):
        with autocast("bfloat16", CPU):
            y = layer(x.bfloat16())
        assert torch.equal(y, layer.module(x.bfloat16().float())[0])


def test_gradients_of_weights_used_at_every_step_add_up_in_float32_and_survive_a_first_use_without():
    torch.manual_seed(0)
    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1)
    with autocast("bfloat16", CPU):
        with torch.no_grad():
            layer(x)
        # the sum of 300 ones in bfloat16 is 256
        loss = sum(layer(x) for _ in range(300)).float().sum()
    loss.backward()
    assert layer.weight.grad.item() == 300


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"^precision .*'bfloat16'.* got 'half'$"):
        check_precision("half")
    with pytest.raises(ValueError, match=r"^spec.precision .*torch.bfloat16$"):
        check_precision(torch.bfloat16, "spec.precision")
    model = nn.Linear(2, 1).double()
    require_float32(model.parameters(), "float32")
    with pytest.raises(ValueError, match=r"float32.* torch.float64.*model.f"):
        require_float32(model.parameters(), "bfloat16")
