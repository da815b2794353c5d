"""Whether a model may be given whole windows, found out by trying; and running it either way."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import GRU, LSTM, BatchNorm, Recur
from fluxutils_py.nn import model_windows as windows_module
from fluxutils_py.nn.model_windows import (
    prediction_copy,
    run_window,
    takes_windows,
)
from fluxutils_py.nn.parameters import net2vec
from fluxutils_py.nn.states import reset, states

# torch says so once in a process, for whichever test is first to run such a layer in float32
pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning"
)

# S, B, F
SHAPES = [
    (7, 6, 3),
    (1, 1, 1),
    (2, 3, 3),
    (3, 1, 3),
    (1, 4, 4),
    (5, 2, 1),
    (1, 5, 2),
    (3, 2, 2),
]


class Module(nn.Module):
    """A module from parts and a function of them and the input."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *xs):
        return self.run(self, *xs)


def lost_state(n_in):
    """torch's own layer inside a module: it starts from zero at each call."""
    return Module(lambda m, x: m.out(m.rnn(x)[0]), rnn=nn.LSTM(n_in, 4), out=nn.Linear(4, 2))


SAFE = {
    "LSTM": lambda f: nn.Sequential(LSTM(f, 4), nn.Linear(4, 2)),
    "stacked": lambda f: nn.Sequential(
        nn.Linear(f, 3), nn.LayerNorm(3), GRU(3, 4, 2, dropout=0.5), nn.Linear(4, 1)
    ),
    "cell": lambda f: Recur(nn.LSTMCell(f, 4)),
    "projection": lambda f: Recur(nn.LSTM(f, 4, proj_size=2)),
    "no recurrence": lambda f: nn.Sequential(nn.Linear(f, 3), nn.Tanh(), nn.Linear(3, 1)),
    "flattened batch norm": lambda f: Module(
        lambda m, x: m.norm(x.reshape(-1, x.shape[-1])).reshape(x.shape), norm=nn.BatchNorm1d(f)
    ),
    "last axis by position": lambda f: Module(
        lambda m, x: m.rnn(x) * x.mean(-1, keepdim=True), rnn=LSTM(f, 4)
    ),
}
STEP_ONLY = {
    "batch norm": lambda f: nn.Sequential(LSTM(f, f), nn.BatchNorm1d(f), nn.Linear(f, 1)),
    "cell by hand": lambda f: Module(lambda m, x: m.cell(x), cell=nn.GRUCell(f, 4)),
    "unpacks two axes": lambda f: Module(
        lambda m, x: m.rnn(x) + 0 * len(two_axes(x)), rnn=LSTM(f, 4)
    ),
}
WINDOW_ONLY = {
    "unpacks three axes": lambda f: Module(
        lambda m, x: m.rnn(x) + 0 * len(as_three_axes(x)), rnn=LSTM(f, 4)
    ),
    "convolution over time": lambda f: Module(
        lambda m, x: m.conv(as_three_axes(x).permute(1, 2, 0)).permute(2, 0, 1),
        conv=nn.Conv1d(f, 2, 3, padding=1),
    ),
}
DIFFERENT = {
    "state lost": lost_state,
    "mean over time": lambda f: Module(lambda m, x: m.rnn(x) - x.mean(0).sum(), rnn=LSTM(f, 4)),
    "sum over all": lambda f: Module(lambda m, x: m.out(x) * x.sum(), out=nn.Linear(f, 1)),
    "running sum": lambda f: Module(lambda m, x: m.out(x).cumsum(0), out=nn.Linear(f, 1)),
}


def two_axes(x):
    _, _ = x.shape
    return x


def as_three_axes(x):
    _, _, _ = x.shape
    return x


# -- finding out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SAFE)
def test_models_that_treat_steps_alike_take_windows(kind, shape):
    assert takes_windows(SAFE[kind](shape[2]), (torch.randn(shape),))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", STEP_ONLY)
def test_models_that_fail_on_windows_take_steps(kind, shape):
    assert not takes_windows(STEP_ONLY[kind](shape[2]), (torch.randn(shape),))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", WINDOW_ONLY)
def test_models_that_fail_on_steps_take_windows(kind, shape):
    assert takes_windows(WINDOW_ONLY[kind](shape[2]), (torch.randn(shape),))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_models_that_differ_are_refused_with_the_remedy(kind, shape):
    model = DIFFERENT[kind](shape[2])
    for _ in range(2):  # not remembered as an answer
        with pytest.raises(ShapeError) as caught:
            takes_windows(model, (torch.randn(shape),))
    message = str(caught.value)
    assert message.startswith(
        "the model Module gives other results for a window (S, B, F) than for its steps (B, F): "
    )
    assert (
        "set the class attribute takes_windows = True (it is meant to see whole windows) or False"
        in message
    )
    assert ("its recurrent layer 'rnn' sits outside Recur" in message) == (kind == "state lost")
    assert ("build it as Recur(...) and use its output alone (y = self.rnn(x))" in message) == (
        kind == "state lost"
    )


def test_the_ways_out_work():
    xs = torch.randn(7, 6, 3)
    model = lost_state(3)
    for way in (True, False):
        model.takes_windows = way
        assert takes_windows(model, (xs,)) == way
    assert run_window(model, xs).equal(torch.stack([model(x) for x in xs]))
    fixed = Module(lambda m, x: m.out(m.rnn(x)), rnn=Recur(nn.LSTM(3, 4)), out=nn.Linear(4, 2))
    assert takes_windows(fixed, (xs,))


# the habits of torch, whose layers return a tuple
FIRST_STEP = (lambda m, x: m.out(m.rnn(x)[0]), lambda m, x: m.out(m.rnn(x)[-1]))


@pytest.mark.parametrize("forward", FIRST_STEP)
def test_one_step_taken_for_the_output_of_a_tuple_is_named_with_its_shape(forward):
    model = Module(forward, rnn=LSTM(3, 4), out=nn.Linear(4, 2))
    with pytest.raises(ShapeError) as caught:
        takes_windows(model, (torch.randn(7, 6, 3),))
    message = str(caught.value)
    assert "outputs of shape (4, 2) for a window of (3, 4, 3); expected (S, B, G)" in message
    assert "y = self.gru(x), where torch has y = self.gru(x)[0]" in message
    assert "takes_windows" not in message


def test_an_output_unpacked_as_a_tuple_is_told_that_it_is_none():
    def forward(m, x):
        y, _ = m.rnn(x)
        return m.out(y)

    model = Module(forward, rnn=LSTM(3, 4), out=nn.Linear(4, 2))
    with pytest.raises(ShapeError, match=r"values to unpack.*output alone, not a tuple"):
        takes_windows(model, (torch.randn(7, 6, 3),))


def test_models_that_run_neither_way_say_why():
    with pytest.raises(ShapeError) as caught:
        takes_windows(nn.Linear(4, 1), (torch.randn(7, 6, 3),))
    message = str(caught.value)
    assert message.startswith("the model Linear runs neither on a window (S, B, F) = (7, 6, 3) (")
    assert message.count("mat1 and mat2 shapes cannot be multiplied") == 2
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("output", [None, [], {"y": 1}, 3.0])
def test_outputs_that_are_no_tensors_are_refused(output):
    with pytest.raises(ShapeError, match=f"must return a tensor .* got {type(output).__name__}"):
        takes_windows(Module(lambda m, x: output), (torch.randn(7, 6, 3),))


@pytest.mark.parametrize("bias", [0.0, 1.0, 100.0, 1000.0])
@pytest.mark.parametrize("zero", [False, True])
def test_a_fresh_or_zero_head_hides_no_lost_state(bias, zero):
    model = lost_state(3)
    nn.init.constant_(model.out.bias, bias)
    if zero:
        nn.init.zeros_(model.out.weight)
    with pytest.raises(ShapeError, match="gives other results"):
        takes_windows(model, (torch.randn(7, 6, 3),))


def test_zero_initialised_layers_hide_no_difference():
    model = Module(
        lambda m, x: x + m.gate * m.rnn(x)[0], rnn=nn.GRU(3, 3), gate=nn.Parameter(torch.zeros(3))
    )
    with pytest.raises(ShapeError, match="gives other results"):
        takes_windows(model, (torch.randn(7, 6, 3),))


@pytest.mark.parametrize("n_series", [1, 2, 3, 4, 5])
def test_batch_norm_is_not_mistaken_where_series_and_features_are_as_many(n_series):
    xs = torch.randn(7, n_series, n_series)
    model = nn.Sequential(nn.BatchNorm1d(n_series), GRU(n_series, 2))
    assert not takes_windows(model, (xs,))
    assert run_window(model.eval(), xs).shape == (7, n_series, 2)


@pytest.mark.parametrize(
    "xs", [torch.zeros(7, 6, 3), torch.ones(2, 6, 3), torch.full((7, 6, 3), torch.nan)]
)
def test_data_without_variety_hide_no_difference(xs):
    with pytest.raises(ShapeError, match="gives other results"):
        takes_windows(lost_state(3), (xs,))
    assert takes_windows(SAFE["LSTM"](3), (xs,))


@pytest.mark.parametrize("n_series", [1, 3, 6])
def test_integers_are_tried_as_they_are(n_series):
    tokens = torch.randint(7, (5, n_series, 1))

    def embedded(rnn, **parts):
        return Module(
            lambda m, x: m.rnn(m.embed(x.squeeze(-1))), rnn=rnn, embed=nn.Embedding(7, 3), **parts
        )

    assert takes_windows(embedded(LSTM(3, 4)), (tokens,))
    lost = Module(
        lambda m, x: m.rnn(m.embed(x.squeeze(-1)))[0], rnn=nn.LSTM(3, 4), embed=nn.Embedding(7, 3)
    )
    with pytest.raises(ShapeError, match="gives other results"):
        takes_windows(lost, (tokens,))


def joined(n_in):
    return Module(lambda m, *xs: m.rnn(torch.cat(xs, -1)), rnn=LSTM(n_in, 4))


@pytest.mark.parametrize("features", [(4, 3), (3, 4), (1, 3), (1, 2, 3, 4), (2, 2)])
@pytest.mark.parametrize("n_series", [1, 2, 3, 4, 6])
def test_several_inputs_are_tried_with_as_many_series_each(features, n_series):
    xs = tuple(torch.randn(5, n_series, f) for f in features)
    model = joined(sum(features))
    assert takes_windows(model, xs)
    assert run_window(model, xs).equal(reset(model)(*xs))


def test_several_outputs_are_all_compared():
    parts = {"rnn": LSTM(3, 4), "lost": nn.GRU(3, 2)}
    xs = torch.randn(7, 6, 3)
    assert takes_windows(Module(lambda m, x: (m.rnn(x), 2 * x), **parts), (xs,))
    with pytest.raises(ShapeError, match=r"layer 'lost' .*outside Recur"):
        takes_windows(Module(lambda m, x: (m.rnn(x), m.lost(x)[0]), **parts), (xs,))


# -- a trial leaves no trace ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", "stacked", "flattened batch norm", "batch norm"])
def test_a_trial_touches_neither_the_model_nor_the_data_nor_the_generators(kind):
    model = {**SAFE, **STEP_ONLY}[kind](3).train()
    xs = torch.randn(7, 6, 3)
    for x in xs[:2]:
        model(x.reshape(6, 3))
    parameters, buffers, state = net2vec(model), [b.clone() for b in model.buffers()], states(model)
    data, generator = xs.clone(), torch.get_rng_state()
    takes_windows(model, (xs,))
    assert net2vec(model).equal(parameters)
    assert all(a.equal(b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(a.equal(b) for a, b in zip(states(model), state, strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert xs.equal(data)
    assert torch.get_rng_state().equal(generator)
    assert all(m.training for m in model.modules())


@pytest.mark.slow
def test_the_verdict_does_not_depend_on_the_generators():
    for seed in range(20):
        torch.manual_seed(seed)
        assert takes_windows(SAFE["stacked"](3), (torch.randn(7, 6, 3),))
        with pytest.raises(ShapeError, match="gives other results"):
            takes_windows(lost_state(3), (torch.randn(7, 6, 3),))


@pytest.mark.slow
def test_the_answer_is_remembered_as_long_as_the_model_lives():
    calls = []

    def run(m, x):
        calls.append(tuple(x.shape))
        return m.rnn(x)

    model = Module(run, rnn=LSTM(3, 4))
    takes_windows(model, (torch.randn(7, 6, 3),))
    # a window of three steps, then the steps, the window again; few series, not 3
    assert calls == [(3, 4, 3), *3 * [(4, 3)], (3, 4, 3)]
    takes_windows(model, (torch.randn(2, 1, 3),))
    assert len(calls) == 5
    known = len(windows_module._modes)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(windows_module._modes) < known


def test_a_model_that_says_so_is_believed_without_a_trial():
    def never(m, x):
        raise AssertionError

    for way in (True, False):
        model = Module(never)
        model.takes_windows = way
        assert takes_windows(model, (torch.randn(7, 6, 3),)) == way


# -- running -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*SAFE, *STEP_ONLY])
def test_a_window_gives_what_its_steps_give(kind, shape):
    model = {**SAFE, **STEP_ONLY}[kind](shape[2]).double().eval()
    xs = torch.randn(shape, dtype=torch.float64)
    stepwise = copy.deepcopy(model)
    for x, y in zip(xs, run_window(model, xs), strict=True):
        torch.testing.assert_close(stepwise(x), y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("windows", [True, False])
def test_several_outputs_are_tuples_of_windows(windows):
    model = Module(lambda m, a, b: [m.rnn(a), b * 2], rnn=LSTM(3, 4))
    model.takes_windows = windows
    a, b = torch.randn(7, 6, 3), torch.randn(7, 6, 2)
    out = run_window(model, (a, b))
    assert isinstance(out, tuple)
    torch.testing.assert_close(out[0], model.rnn.module(a)[0], rtol=0, atol=1e-6)
    assert out[1].equal(2 * b)
    assert run_window(model, [a, b])[1].equal(2 * b)


# -- copies for prediction -----------------------------------------------------------------------------


def test_a_prediction_copy_shares_parameters_and_buffers_but_not_the_state():
    model = nn.Sequential(nn.Linear(3, 3), LSTM(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    model(torch.randn(6, 3))
    before = states(model)
    twin = prediction_copy(model)
    assert all(p is q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(p is q for p, q in zip(model.buffers(), twin.buffers(), strict=True))
    assert not any(a is b for a, b in zip(model.modules(), twin.modules(), strict=True))
    assert all(m.training for m in model.modules())
    assert not any(m.training for m in twin.modules())
    assert twin[1].state is None
    buffers = [b.clone() for b in model.buffers()]
    twin(torch.randn(2, 3))
    assert all(a.equal(b) for a, b in zip(states(model), before, strict=True))
    assert all(a.equal(b) for a, b in zip(model.buffers(), buffers, strict=True))
    with torch.no_grad():
        model[0].weight.zero_()
    assert not twin[0].weight.any()


KEPT = {
    "alone": lambda m, h: setattr(m, "kept", h),
    "in a list": lambda m, h: setattr(m, "kept", [h, 2 * h]),
    "in a dict": lambda m, h: setattr(m, "kept", {"h": h}),
}


@pytest.mark.parametrize("how", KEPT)
def test_models_that_keep_what_they_computed_can_be_tried_and_copied(how):
    def run(m, x):
        h = m.rnn(x)
        KEPT[how](m, h)
        return m.out(h)

    model = Module(run, rnn=LSTM(3, 4), out=nn.Linear(4, 1))
    xs = torch.randn(7, 6, 3)
    out = model(xs)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    assert takes_windows(model, (xs,))
    twin = prediction_copy(model)
    assert twin.out.weight is model.out.weight
    assert run_window(twin, xs).equal(out)
    kept = (
        model.kept if how == "alone" else model.kept[0] if how == "in a list" else model.kept["h"]
    )
    assert kept.requires_grad
    out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_are_computed_at_each_call_can_be_copied():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), LSTM(4, 2))
    xs = torch.randn(7, 6, 3)
    assert run_window(prediction_copy(model), xs).equal(model(xs))


def test_a_prediction_copy_knows_what_is_known_of_the_model():
    calls = []

    def run(m, x):
        calls.append(x.dim())
        return m.rnn(x)

    model = Module(run, rnn=LSTM(3, 4))
    xs = torch.randn(7, 6, 3)
    takes_windows(model, (xs,))
    n = len(calls)
    assert takes_windows(prediction_copy(model), (xs,))
    assert len(calls) == n


def test_threads_predict_with_copies_of_their_own():
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1)).double()
    xs = torch.randn(8, 20, 5, 3, dtype=torch.float64)
    expected = [model[1](model[0].module(x)[0]) for x in xs]
    found: list[torch.Tensor | None] = [None] * len(xs)

    def predict(i):
        twin = prediction_copy(model)
        with torch.no_grad():
            found[i] = torch.cat([run_window(twin, part) for part in xs[i].split(3)])

    threads = [threading.Thread(target=predict, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert model[0].state is None


def test_prediction_copies_share_parameters_and_buffers_and_remember_by_themselves():
    model = nn.Sequential(LSTM(3, 4, 2, dropout=0.5), nn.BatchNorm1d(4, affine=False))
    model[0](torch.randn(5, 2, 3))
    twin = prediction_copy(model)
    assert all(p is q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(p is q for p, q in zip(model.buffers(), twin.buffers(), strict=True))
    assert not twin.training
    assert model.training
    assert twin[0].state is None
    twin[0](torch.randn(5, 7, 3))
    assert model[0].state[0].shape == (2, 2, 4)


class Mixing(nn.Module):
    """A layer of torch, by default with the axes as torch users often have them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x)
        return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.parametrize("layer", [
    lambda: nn.GRU(5, 4, batch_first=True),
    lambda: nn.LSTM(5, 4, 2, batch_first=True),
    lambda: nn.TransformerEncoderLayer(5, 1, 8, batch_first=True),
])  # fmt: skip
@pytest.mark.parametrize("n_series", [1, 6])
def test_layers_that_take_series_for_steps_are_refused(layer, n_series):
    model, xs = Mixing(layer()), (torch.randn(7, n_series, 5),)
    with pytest.raises(ShapeError, match=r"'layer[.\w]*' \(\w+\).*batch_first=True"):
        takes_windows(model, xs)


def test_batch_first_layers_that_get_their_axes_and_a_batch_norm_are_fine():
    swapped = Module(
        lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1), rnn=nn.GRU(5, 4, batch_first=True)
    )
    swapped.takes_windows = True
    assert takes_windows(swapped, (torch.randn(7, 6, 5),))
    assert takes_windows(nn.Sequential(nn.Linear(5, 4), BatchNorm(4)), (torch.randn(7, 6, 5),))


class OwnState(nn.Module):
    """Keeps its state in an attribute, as advised where state has to live in the user's module."""

    def __init__(self, layer):
        super().__init__()
        self.rnn, self.out, self.hidden = layer, nn.Linear(4, 1), None

    def forward(self, x):
        h, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden if torch.is_tensor(hidden) else tuple(s.detach() for s in hidden)
        return self.out(h)


class OwnStateInBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 1)
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x):
        y = self.out(x) + self.level
        self.level = y.detach().mean().view(1)
        return y


@pytest.mark.parametrize("n_series", [1, 6])
@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnState(nn.LSTM(3, 4)),
        lambda: OwnState(nn.GRU(3, 4)),
        lambda: nn.Sequential(LSTM(3, 3), OwnState(nn.LSTM(3, 4))),
        OwnStateInBuffer,
    ],
)
def test_models_that_keep_a_state_that_reset_does_not_know_are_refused(make, n_series):
    for _ in range(2):  # not remembered as an answer
        model = make()
        with pytest.raises(ShapeError, match=r"(?s)called a second time.*Recur"):
            takes_windows(model, (torch.randn(7, n_series, 3),))
    with pytest.raises(ShapeError, match="rnn"):
        takes_windows(OwnState(nn.LSTM(3, 4)), (torch.randn(7, n_series, 3),))


def test_random_outputs_are_no_state():
    noisy = Module(
        lambda m, x: m.out(m.rnn(x)) + torch.randn(()), rnn=LSTM(3, 4), out=nn.Linear(4, 1)
    )
    with pytest.raises(ShapeError, match="takes_windows"):
        takes_windows(noisy, (torch.randn(7, 6, 3),))
    noisy.takes_windows = True
    assert takes_windows(noisy, (torch.randn(7, 6, 3),))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_models_that_have_diverged_can_be_tried(value):
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight[0] = value
    assert takes_windows(model, (torch.randn(7, 6, 3),))
