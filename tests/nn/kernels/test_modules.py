"""Which calls the native kernels take over, and which are left to torch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from fluxutils_py import reset
from fluxutils_py.nn import LSTM, Recur, native_kernels
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels import modules as native_layers

from ..every_layer import LAYERS, F, hooked

pytestmark = pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())

H = 5
every_layer = pytest.mark.parametrize(
    "make", [partial(make, H) for make in LAYERS.values()], ids=LAYERS
)


def taken(layer, x):
    """Whether the kernels compute a call of a Recur; else its result must be torch's own, to the
    last bit.
    """
    calls = []
    original = native_layers.recurrence
    native_layers.recurrence = lambda *inputs: calls.append(1) or original(*inputs)
    try:
        y = layer(x)
    finally:
        native_layers.recurrence = original
    if not calls:
        layer.reset()
        with native_kernels(False):
            assert torch.equal(layer(x), y)
    return bool(calls)


@pytest.fixture
def x():
    return torch.randn(7, 4, F)


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(F, H),
        nn.GRU(F, H, 2, bias=False),
        nn.RNN(F, H, nonlinearity="relu"),
        nn.LSTMCell(F, H, bias=False),
        nn.GRUCell(F, H),
        nn.RNNCell(F, H),
        nn.LSTM(F, H, 2, dropout=0.5).eval(),
    ],
    ids=repr,
)
def test_layers_and_cells_are_taken_over_for_windows_and_steps(module, x):
    layer = Recur(module)
    assert taken(layer, x)
    assert taken(layer, x[0])
    with torch.no_grad():
        assert taken(layer, x)
    with torch.inference_mode():
        assert taken(layer, x)
    assert taken(layer.double(), x.double())


class Own(nn.LSTM):
    def forward(self, x, state=None):
        y, state = super().forward(x, state)
        return 2 * y, state


def patched():
    module = nn.LSTM(F, H)
    module.forward = lambda x, state=None: nn.LSTM.forward(module, 2 * x, state)
    return module


def parametrized():
    module = nn.LSTM(F, H)
    torch.nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    return module


def pruned():
    module = nn.GRUCell(F, H)
    return prune.random_unstructured(module, "weight_hh", 0.5)


def strided():
    module = nn.GRUCell(F, H)
    module.weight_hh = nn.Parameter(torch.randn(H, 3 * H).t())
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(F, H),
        lambda: hooked(nn.LSTM(F, H), "forward"),
        lambda: hooked(nn.LSTM(F, H), "forward_pre"),
        lambda: hooked(nn.LSTM(F, H), "full_backward"),
        patched,
        parametrized,
        pruned,
        strided,
        lambda: nn.LSTM(F, H, proj_size=2),
    ],
    ids=[
        "subclass",
        "forward hook",
        "pre-hook",
        "backward hook",
        "patched",
        "parametrized",
        "pruned",
        "strided",
        "proj",
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_modules_that_may_compute_something_else_are_left_to_torch(make, x):
    assert not taken(Recur(make()), x)


def test_other_types_are_left_to_torch(x):
    assert not taken(Recur(nn.GRU(F, H)).bfloat16(), x.bfloat16())
    layer = Recur(nn.GRU(F, H))
    with pytest.raises((RuntimeError, ValueError), match="type"):
        layer.reset() or layer(x.double())


def test_dropout_between_layers_in_training_is_left_to_torch(x):
    layer = LSTM(F, H, 2, dropout=0.5)
    torch.manual_seed(0)
    y = layer(x)
    torch.manual_seed(0)
    assert torch.equal(y, layer.module(x)[0])
    layer.reset()
    assert taken(layer.eval(), x)


def test_wrong_shapes_raise_torchs_errors(x):
    layer = LSTM(F, H)
    with pytest.raises(RuntimeError, match=r"input.size\(-1\).*input_size.* 3, got 2"):
        layer(x[..., :2])
    # reading on would be out of bounds
    layer.module.bias_hh_l0 = nn.Parameter(torch.zeros(4 * H + 1))
    with pytest.raises(RuntimeError):
        layer(x)


def test_no_series_and_no_steps_are_torchs_matter():
    assert LSTM(F, H)(torch.zeros(7, 0, F)).shape == (7, 0, H)
    with pytest.raises(RuntimeError, match=r"sequence length .*larger than 0"):
        LSTM(F, H)(torch.zeros(0, 4, F))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop because:UserWarning"
)  # of torch's cells under vmap
@pytest.mark.filterwarnings("ignore:`torch.jit")  # of one class or another
@pytest.mark.filterwarnings(
    "ignore:Converting a tensor to a Python:torch.jit.TracerWarning"
)  # of Recur's checks
def test_what_follows_torchs_operations_sees_them(x, monkeypatch):
    module = nn.GRU(F, H)
    expected = module(x)[0]

    def call(x):
        return Recur(module)(x)

    module.requires_grad_(False)
    assert "aten::gru" in str(torch.jit.trace(call, x).graph)
    cell = nn.GRUCell(F, H)
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in module.state_dict().items()})
    by_series = torch.func.vmap(lambda x: Recur(cell)(x), in_dims=1, out_dims=1)(x[:, :, None])
    torch.testing.assert_close(by_series.squeeze(2), expected, rtol=0, atol=1e-6)
    y, slope = torch.func.jvp(call, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    moved = (module(x + 1e-2)[0] - module(x - 1e-2)[0]) / 2e-2
    torch.testing.assert_close(slope, moved, rtol=0, atol=1e-3)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not taken(Recur(module), x)


@pytest.mark.parametrize("device", ["meta"])
def test_other_devices_are_left_to_torch(device, x):
    layer = Recur(nn.GRU(F, H)).to(device)
    assert layer(x.to(device)).is_meta


@every_layer
def test_functional_calls_compute_with_the_parameters_given(make):
    x = torch.randn(7, 9, F)  # as many series as all kernels take
    layer, other = make(), make()
    expected = other(x)
    expected_grads = torch.autograd.grad(expected.square().sum(), list(other.parameters()))
    given = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    y = torch.func.functional_call(layer, given, (x,))
    assert torch.equal(y, expected)
    grads = torch.autograd.grad(y.square().sum(), list(given.values()))
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@every_layer
def test_parameters_that_are_replaced_count(make):
    x = torch.randn(7, 9, F)
    layer, other = make(), make()
    before = layer(x).detach()
    for module, source in zip(layer.modules(), other.modules(), strict=True):
        for name in module._parameters:
            module._parameters[name] = source._parameters[name]
    layer.reset()
    expected = other(x)
    assert torch.equal(layer(x), expected)
    assert not torch.equal(expected, before)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("part", ["weight_hh", "bias_ih"])
def test_plain_tensors_in_place_of_parameters_count(kind, part, x):
    module = kind(F, H)
    name = part if "Cell" in kind.__name__ else part + "_l0"
    # small: a state that grows chaotic makes more than 1e-6 of rounding
    value = 0.3 * torch.randn(getattr(module, name).shape)
    expected = copy.deepcopy(module)
    with torch.no_grad():
        getattr(expected, name).copy_(value)
    delattr(module, name)
    setattr(module, name, value)
    torch.testing.assert_close(Recur(module)(x), Recur(expected)(x), rtol=0, atol=1e-6)


def test_models_with_averaged_weights_and_copies_compute_with_their_own(x):
    model = nn.Sequential(LSTM(F, H), nn.Linear(H, 1))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    averaged.update_parameters(model)  # the first update copies
    assert torch.equal(averaged(x), reset(model)(x))
    stacked, _ = torch.func.stack_module_state([model])
    one = torch.func.functional_call(
        reset(copy.deepcopy(model)), {k: 2 * v[0] for k, v in stacked.items()}, (x,)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert torch.equal(one, reset(model)(x))
