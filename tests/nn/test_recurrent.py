"""Layers with a memory against torch's own recurrent modules, whose state is carried by hand."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import GRU, LSTM, RNN, Recur, native_kernels
from fluxutils_py.nn.recurrent import unwrapped_recurrent, wrap_recurrent
from fluxutils_py.nn.states import reset, truncate

# torch says so once in a process, for whichever test is first to run such a layer in float32
pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning"
)

F, H = 3, 5
# steps, series: one of each, and as many series as features
SHAPES = [
    (1, 1),
    (7, 3),
    (4, 5),
    (6, 1),
    (1, 4),
]
ATOL = 1e-12
FUSED = {
    "LSTM": lambda: nn.LSTM(F, H),
    "LSTM of two layers": lambda: nn.LSTM(F, H, 2),
    "LSTM with projection": lambda: nn.LSTM(F, H, 2, proj_size=2),
    "GRU of three layers": lambda: nn.GRU(F, H, 3),
    "GRU without bias": lambda: nn.GRU(F, H, bias=False),
    "RNN": lambda: nn.RNN(F, H, nonlinearity="relu"),
}
CELLS = {"LSTMCell": nn.LSTMCell, "GRUCell": nn.GRUCell, "RNNCell": nn.RNNCell}


class Leaky(nn.Module):
    """An own recurrent module: its state is one tensor."""

    def __init__(self, n_in: int = F, n_out: int = H) -> None:
        super().__init__()
        self.inner = nn.Linear(n_in, n_out)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.inner(x)) if state is None else torch.tanh(self.inner(x) + 0.5 * state)
        return 2 * h, h


class WindowedLeaky(Leaky):
    """The same, given whole windows; its state is a tuple whose batch is axis 1."""

    takes_windows, batch_dim = True, 1

    def forward(self, x, state):
        assert x.dim() == 3
        ys, h = [], None if state is None else state[0].squeeze(0)
        for step in x:
            y, h = super().forward(step, h)
            ys.append(y)
        return torch.stack(ys), (h.unsqueeze(0), h.unsqueeze(0).clone())


OWN = {"own module": Leaky, "own module of windows": WindowedLeaky}
ALL = {**FUSED, **{k: (lambda cell=cell: cell(F, H)) for k, cell in CELLS.items()}, **OWN}


def by_hand(module, x, state=None):
    """Outputs and last state of any of the modules above for a window, without Recur."""
    if isinstance(module, nn.RNNBase):
        return module(x, state)
    if isinstance(module, WindowedLeaky):
        return module(x, state)
    outs = []
    for step in x:
        if isinstance(module, Leaky):
            y, state = module(step, state)
        elif isinstance(module, nn.LSTMCell):
            state = module(step, state)
            y = state[0]
        else:
            y = state = module(step, state)
        outs.append(y)
    return torch.stack(outs), state


def same(a, b, atol=ATOL):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def tensors(state):
    return [state] if isinstance(state, Tensor) else list(state)


def same_state(a, b, atol=ATOL):
    assert isinstance(a, Tensor) == isinstance(b, Tensor)
    for s, t in zip(tensors(a), tensors(b), strict=True):
        same(s, t, atol)


# -- one call is like another --------------------------------------------------------------------------


@pytest.mark.parametrize(("n_steps", "n_series"), SHAPES)
@pytest.mark.parametrize("kind", ALL)
def test_window_calls_step_calls_and_torch_agree(kind, n_steps, n_series):
    module = ALL[kind]().double()
    rnn = Recur(module)
    xs = torch.randn(n_steps, n_series, F, dtype=torch.float64)
    expected, last = by_hand(module, xs)
    whole = rnn(xs)
    same(whole, expected)
    same_state(rnn.state, last)
    rnn.reset()
    steps = torch.stack([rnn(x) for x in xs])
    same(steps, expected)
    same_state(rnn.state, last)


@pytest.mark.parametrize("kind", ALL)
def test_windows_of_any_length_mixed_with_steps_go_on_where_the_last_call_ended(kind):
    module = ALL[kind]().double()
    rnn = Recur(module)
    xs = torch.randn(11, F, F, dtype=torch.float64)  # as many series as features
    expected, last = by_hand(module, xs)
    parts = [rnn(xs[:4]), rnn(xs[4])[None], rnn(xs[5:6]), rnn(xs[6])[None], rnn(xs[7:])]
    same(torch.cat(parts), expected)
    same_state(rnn.state, last)


@pytest.mark.parametrize(("ready", "torchs"), [(LSTM, nn.LSTM), (GRU, nn.GRU), (RNN, nn.RNN)])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_ready_layers_are_torchs_layers(ready, torchs, num_layers, bias):
    ours = ready(F, H, num_layers, bias=bias)
    theirs = torchs(F, H, num_layers, bias=bias)
    theirs.load_state_dict(ours.module.state_dict())  # equal names and shapes
    xs = torch.randn(7, 2, F)
    with native_kernels(False):
        same(ours(xs), theirs(xs)[0], 0)
    assert repr(ours) == f"{ready.__name__}(\n  (module): {theirs!r}\n)"


@pytest.mark.parametrize("kind", ALL)
def test_gradients_flow_through_calls_until_the_state_is_truncated(kind):
    module = ALL[kind]().double()
    rnn = Recur(module)
    xs = torch.randn(6, 4, F, dtype=torch.float64)

    def gradients(outputs):
        module.zero_grad()
        outputs[-1].square().sum().backward()
        return [p.grad.clone() for p in module.parameters()]

    rnn(xs[:4])
    through = gradients(rnn(xs[4:]))
    for got, want in zip(through, gradients(by_hand(module, xs)[0]), strict=True):
        same(got, want)

    rnn.reset()
    rnn(xs[:4])
    kept = [t.clone() for t in tensors(rnn.state)]
    assert truncate(rnn) is rnn
    for t, before in zip(tensors(rnn.state), kept, strict=True):
        assert t.equal(before)
        assert not t.requires_grad
    stopped = gradients(rnn(xs[4:]))
    _, state = by_hand(module, xs[:4])
    state = state.detach() if isinstance(state, Tensor) else tuple(t.detach() for t in state)
    for got, want in zip(stopped, gradients(by_hand(module, xs[4:], state)[0]), strict=True):
        same(got, want)
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(through, stopped, strict=True))


# -- layers and dropout --------------------------------------------------------------------------------


@pytest.mark.parametrize(("ready", "torchs"), [(LSTM, nn.LSTM), (GRU, nn.GRU), (RNN, nn.RNN)])
def test_dropout_is_between_layers_and_in_training_only(ready, torchs):
    # everything is dropped between the layers: the second sees zeros, and its own output is not
    # dropped
    rnn = ready(F, H, num_layers=2, dropout=1.0).double()
    first, second = torchs(F, H).double(), torchs(H, H).double()
    values = {name: p for name, p in rnn.module.state_dict().items()}
    first.load_state_dict({n: v for n, v in values.items() if n.endswith("l0")})
    second.load_state_dict(
        {n.replace("l1", "l0"): v for n, v in values.items() if n.endswith("l1")}
    )
    xs = torch.randn(7, 2, F, dtype=torch.float64)
    same(rnn(xs), second(torch.zeros(7, 2, H, dtype=torch.float64))[0])
    reset(rnn).eval()
    same(rnn(xs), second(first(xs)[0])[0])


def test_dropout_draws_what_torch_draws():
    rnn = LSTM(F, H, num_layers=3, dropout=0.4)
    xs = torch.randn(7, 2, F)
    torch.manual_seed(5)
    ours = rnn(xs)
    torch.manual_seed(5)
    same(ours, rnn.module(xs)[0], 0)
    reset(rnn)
    assert not rnn(xs).equal(ours)


# -- what it refuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_another_number_of_series_is_refused_until_the_state_is_reset(kind):
    rnn = Recur(ALL[kind]())
    rnn(torch.zeros(2, 4, F))
    for x in (torch.zeros(2, 3, F), torch.zeros(3, F), torch.zeros(1, F)):
        with pytest.raises(ShapeError, match=r"4 series .*batch of \d: call reset"):
            rnn(x)
    rnn(torch.zeros(4, F))
    rnn.reset()
    rnn(torch.zeros(3, F))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.LSTM(F, H, bidirectional=True),
            r"bidirectional LSTM .*bidirectional=False.* x\[:, :, k:\] and y\[:, :, :-k\]",
        ),
        (nn.GRU(F, H, batch_first=True), "build the GRU with batch_first=False"),
        (LSTM(F, H), "already a Recur"),
        (Recur(nn.GRUCell(F, H)), "already a Recur"),
        (torch.tanh, "wraps a torch module"),
        (nn.LSTM, "wraps a torch module, got type"),
    ],
)
def test_modules_that_cannot_carry_a_state_are_refused(module, message):
    with pytest.raises(TypeError, match=message):
        Recur(module)


@pytest.mark.parametrize("shape", [(F,), (), (2, 2, 2, F)])
def test_input_that_is_neither_step_nor_window_is_refused(shape):
    with pytest.raises(ShapeError, match=r"LSTM\(LSTM\).*\(B, F\).*\(S, B, F\)"):
        LSTM(F, H)(torch.zeros(shape))


def test_an_error_inside_leaves_the_state_as_it_was():
    rnn = LSTM(F, H)
    rnn(torch.randn(2, 4, F))
    before = [t.clone() for t in rnn.state]
    with pytest.raises(RuntimeError):
        rnn(torch.zeros(2, 4, F + 1))
    assert all(a.equal(b) for a, b in zip(rnn.state, before, strict=True))


# -- types and places ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("kind", ["LSTM", "GRUCell", "own module"])
def test_integer_input_takes_the_type_of_the_parameters(kind, dtype):
    rnn = Recur(ALL[kind]().double())
    xs = torch.randint(0, 2, (5, 2, F)).to(dtype)
    ours = rnn(xs)
    same(ours, by_hand(rnn.module, xs.double())[0])


@pytest.mark.parametrize("kind", ALL)
def test_the_state_follows_moves_to_another_type_and_device(kind):
    rnn = Recur(ALL[kind]())
    xs = torch.randn(6, 2, F)
    rnn(xs[:4])
    before = [t.double() for t in tensors(rnn.state)]
    rnn.double()
    state = before[0] if isinstance(rnn.state, Tensor) else tuple(before)
    same_state(rnn.state, state, 0)
    same(rnn(xs[4:].double()), by_hand(rnn.module, xs[4:].double(), state)[0])
    rnn.to("meta")
    assert {t.device.type for t in tensors(rnn.state)} == {"meta"}


def test_the_state_is_not_in_the_state_dict():
    rnn = LSTM(F, H)
    names = list(rnn.state_dict())
    rnn(torch.zeros(2, 4, F))
    assert list(rnn.state_dict()) == names == [f"module.{n}" for n in nn.LSTM(F, H).state_dict()]


# -- copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("kind", ALL)
def test_copies_of_a_model_with_a_live_graph_carry_the_value_of_the_state(kind, copied):
    rnn = Recur(ALL[kind]().double())
    xs = torch.randn(6, 2, F, dtype=torch.float64)
    rnn.mark(2)
    out = rnn(xs[:4])
    assert all(t.requires_grad for t in tensors(rnn.state))
    twin = copied(rnn)
    same_state(twin.state, rnn.state, 0)
    same_state(twin.marked(), rnn.marked(), 0)
    assert not any(t.requires_grad for t in tensors(twin.state))
    expected = by_hand(rnn.module, xs)[0]
    same(twin(xs[4:]), expected[4:])
    same(rnn(xs[4:]), expected[4:])  # the copy has moved on by itself
    for t in tensors(twin.state):
        t.detach().zero_()
    assert all(t.abs().max() > 0 for t in tensors(rnn.state))
    out.sum().backward()  # the graph of the original is alive
    assert all(p.grad is not None for p in rnn.parameters())
    assert all(p.grad is None for p in twin.parameters())


# -- marks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 7, 10, 11, 15])
@pytest.mark.parametrize(
    "kind", ["LSTM of two layers", "GRUCell", "own module", "own module of windows"]
)
def test_a_mark_notes_the_state_after_so_many_steps(kind, steps):
    rnn = Recur(ALL[kind]().double())
    module = rnn.module
    xs = torch.randn(14, 2, F, dtype=torch.float64)  # 3 before the mark, 11 after
    expected, _ = by_hand(module, xs)
    parts = [rnn(xs[:3])]
    rnn.mark(steps)
    parts += [rnn(xs[3:9]), rnn(xs[9])[None], rnn(xs[10:])]
    same(torch.cat(parts), expected)
    # a step that was not reached: the state at the time of the mark
    _, noted = by_hand(module, xs[: 3 + (steps if steps <= 11 else 0)])
    same_state(rnn.marked(), noted)
    assert not any(t.requires_grad for t in tensors(rnn.marked()))
    assert all(t.requires_grad for t in tensors(rnn.state))


def test_a_mark_does_not_stop_gradients():
    rnn = LSTM(F, H).double()
    xs = torch.randn(6, 2, F, dtype=torch.float64)

    def gradient():
        rnn.zero_grad()
        rnn(xs)[-1].sum().backward()
        rnn.reset()
        return torch.cat([p.grad.flatten() for p in rnn.parameters()])

    expected = gradient()
    rnn.mark(4)
    same(gradient(), expected)


def test_reset_forgets_marks():
    rnn = LSTM(F, H)
    assert rnn.marked() is None
    rnn.mark(2)
    assert rnn.marked() is None  # nothing seen yet: the zero state
    rnn(torch.zeros(4, 2, F))
    assert rnn.marked() is not None
    rnn.reset()
    assert rnn.marked() is None
    rnn(torch.zeros(4, 2, F))
    assert rnn.marked() is None


# -- plain torch layers in a model ---------------------------------------------------------------------


def test_bare_layers_in_sequential_are_wrapped_and_parameters_keep_their_order():
    model = nn.Sequential(
        nn.Linear(F, F),
        nn.Sequential(nn.LSTM(F, H), nn.Tanh()),
        nn.GRUCell(H, H),
        LSTM(H, H),
        nn.Linear(H, 1),
    )
    before = list(model.parameters())
    shapes = [tuple(p.shape) for p in before]
    assert wrap_recurrent(model) is model
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert [tuple(p.shape) for p in model.parameters()] == shapes
    assert [type(m) for m in model] == [nn.Linear, nn.Sequential, Recur, LSTM, nn.Linear]
    assert isinstance(model[1][0], Recur)
    assert model(torch.zeros(7, 2, F)).shape == (7, 2, 1)
    wrapped = list(model.modules())
    wrap_recurrent(model)  # nothing more to do
    assert all(a is b for a, b in zip(model.modules(), wrapped, strict=True))


@pytest.mark.parametrize("module", [nn.LSTM(F, H), nn.GRUCell(F, H)])
def test_a_model_that_is_a_recurrent_layer_is_wrapped(module):
    wrapped = wrap_recurrent(module)
    assert isinstance(wrapped, Recur)
    assert wrapped.module is module


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(F, H), nn.Sequential(nn.GRU(H, 2))

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class OwnSequential(nn.Sequential):
    def forward(self, x):
        y, _ = self[0](x)
        return self[1](y)


def test_layers_held_by_other_modules_are_left_to_their_forward():
    model = OwnForward()
    wrap_recurrent(model)
    assert isinstance(model.rnn, nn.LSTM)
    assert isinstance(model.head[0], Recur)
    assert model(torch.zeros(7, 4, F)).shape == (7, 4, 2)


def test_a_sequential_with_a_forward_of_its_own_is_left_to_it():
    model = wrap_recurrent(OwnSequential(nn.LSTM(F, H), nn.Linear(H, 1)))
    assert isinstance(model[0], nn.LSTM)
    assert model(torch.zeros(7, 4, F)).shape == (7, 4, 1)


def test_a_layer_used_twice_has_two_states():
    layer = nn.GRU(F, F).double()
    model = wrap_recurrent(nn.Sequential(layer, nn.Tanh(), layer))
    xs = torch.randn(7, 2, F, dtype=torch.float64)
    same(torch.cat([model(xs[:4]), model(xs[4:])]), layer(torch.tanh(layer(xs)[0]))[0])
    assert len(list(model.parameters())) == 4


def test_wrapping_refuses_what_recur_refuses():
    with pytest.raises(TypeError, match="reads the future"):
        wrap_recurrent(nn.Sequential(nn.LSTM(F, H, bidirectional=True)))


def test_bare_layers_are_found_by_name():
    model = nn.ModuleDict(
        {"a": LSTM(F, H), "b": nn.GRU(F, H), "c": nn.Sequential(nn.Linear(2, 2), nn.RNNCell(F, H))}
    )
    assert unwrapped_recurrent(model) == ["b", "c.1"]
    assert unwrapped_recurrent(LSTM(F, H)) == []


def test_a_trained_start_of_one_tensor():
    layer = Recur(nn.RNNCell(3, 2), trainable_init=True)
    with torch.no_grad():
        for start in layer.initial_state:
            start.fill_(0.5)
    x = torch.randn(4, 5, 3)
    expected = layer.module(x[0], torch.full((5, 2), 0.5))
    torch.testing.assert_close(layer(x)[0], expected)
