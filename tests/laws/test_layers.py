"""The laws for each layer with a state: windows of any kind are one series, whoever computes them."""

import copy
import functools
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import (
    Estimator,
    Spec,
    loadstates,
    net2vec,
    reset,
    states,
    truncate,
)
from fluxutils_py.nn import (
    FLSTM,
    LRU,
    LSTM,
    TCN,
    CausalConv1d,
    CausalKernels,
    ExponentialMeans,
    MinGRU,
    MinLSTM,
    Recur,
    RollingStatistics,
    RunningStatistics,
    SequenceStack,
    SlidingWindowAttention,
)
from fluxutils_py.nn.cells import SMGUCell
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.training import Checkpointer, EveryNSteps
from tests.plain_networks import plain_regressor

from .conftest import B, S, T, difference, flat, make_task, window

LAYERS = {
    "MinGRU": partial(MinGRU, 3, 6),
    "MinLSTM": partial(MinLSTM, 3, 6, trainable_init=True),
    "LRU": partial(LRU, 3, 6, n_states=4),
    "CausalConv1d": partial(CausalConv1d, 3, 6, 3, dilation=4),
    "TCN": partial(TCN, 3, 6, n_levels=2),
    "SlidingWindowAttention": partial(SlidingWindowAttention, 3, 6, n_heads=2, window=7),
    "a stack of LRU": partial(SequenceStack, LRU, 3, 6),
    "a stack of LSTM": partial(SequenceStack, LSTM, 3, 6, dropout=0.1),
    "statistics": lambda: nn.Sequential(
        ExponentialMeans(3, [4]),
        RollingStatistics(3, [2, 5]),
        RunningStatistics(18),
        nn.Linear(127, 6),
    ),
    "causal kernels": lambda: nn.Sequential(
        CausalKernels(3, 20, 168).fit_biases(torch.randn(3, 9, 20)), nn.Linear(168, 6)
    ),
    "LSTM, trained": partial(LSTM, 3, 6, num_layers=2, trainable_init=True),
    "Recur(GRU), trained": lambda: Recur(nn.GRU(3, 6), trainable_init=True),
    "FLSTM, trained": partial(FLSTM, 3, 6, trainable_init=True),
    "a cell, trained": lambda: Recur(SMGUCell(3, 6), trainable_init=True),
}
every = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
# that one draws random numbers
EXACT = {name: layer for name, layer in LAYERS.items() if name != "a stack of LSTM"}
every_exact = pytest.mark.parametrize("layer", EXACT.values(), ids=EXACT)
# a smaller eps blows up the rounding of gradients near zero
adam = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
TRAINED = [name for name in LAYERS if "trained" in name]


def network(layer):
    torch.manual_seed(1)
    model = nn.Sequential(layer(), nn.Linear(6, 2)).double()
    for name, p in model.named_parameters():
        if "initial_state" in name:
            nn.init.normal_(p)
    return model


def fit(layer, task, callbacks=None, **spec):
    spec = Spec(**{"epochs": 1, "batchsize": B, "seqsize": S, **spec})
    est = Estimator(
        network(layer),
        None,
        adam,
        spec,
        callbacks=callbacks,
        random_state=0,
        verbose=False,
    )
    return est.fit(task.x, task.y)


@functools.cache
def fitted(layer):
    """Fitted once; tests only read it."""
    return fit(layer, make_task())


@pytest.mark.apart
@pytest.mark.few
@every_exact
@pytest.mark.parametrize("overlap", [0, 4, 13])
def test_laws_1_and_2_a_fit_is_a_hand_written_loop(layer, overlap):
    """A window begins ``overlap`` steps early, from the detached state of then; its loss is of its
    own steps.
    """
    # with a last group of three or five
    task, model = (
        make_task(n_series=11 if overlap else 37),
        network(layer),
    )
    est = fit(layer, task, overlap=overlap)
    opt = adam(model.parameters())
    for g in range(0, task.x.shape[1], B):
        series, before = slice(g, g + B), {0: None}  # the states before some steps
        for t in range(0, T, S):
            begin = max(0, t - overlap)
            for r, s in zip(recurrent_layers(model), before[begin] or [None] * 99, strict=False):
                r.state = s
            y = []
            later = {k - overlap for k in range(t + S, T, S)} | {t + S}
            for k in range(begin, min(t + S, T)):
                y.append(model(window(task.x, series, k, k + 1)))
                if k + 1 in later or k + 1 == t + S:
                    detached = [r.state for r in recurrent_layers(model)]
                    before[k + 1] = [
                        s.detach() if isinstance(s, torch.Tensor) else tuple(v.detach() for v in s)
                        for s in detached
                    ]
            loss = nn.functional.mse_loss(
                torch.cat(y)[t - begin :], window(task.y, series, t, t + S)
            )
            opt.zero_grad()
            loss.backward()
            opt.step()
    assert difference(net2vec(est), flat(model.parameters())) < 1e-12


@pytest.mark.few
@every
def test_law_3_chunks_steps_and_streams_are_the_whole(layer):
    task, est = make_task(), fitted(layer)
    whole, state, found = est.predict(task.x), None, []
    for start, stop in ((0, 7), (7, 8), (8, 30), (30, T)):
        y, state = est.predict(task.x[:, :, start:stop], state=state, return_state=True)
        found.append(y)
    assert np.abs(np.concatenate(found, 2) - whole).max() < 1e-12
    live = est.stream(37)
    steps = np.stack([live.step(task.x[:, :, t]) for t in range(T)], 2)
    assert np.abs(steps - whole).max() < 1e-12
    for ours, theirs in zip(live.state, state, strict=True):
        assert difference(ours, theirs) < 1e-12


@every
def test_single_series_of_a_stream_start_anew(layer):
    task = make_task(n_series=3)
    est = fit(layer, task)
    live = est.stream(3)
    for t in range(9):
        live.step(task.x[:, :, t])
    live.reset([1])
    found = np.stack([live.step(task.x[:, :, t]) for t in range(9, T)], 2)
    assert np.abs(found[:, 1] - est.predict(task.x[:, :, 9:])[:, 1]).max() < 1e-12
    assert np.abs(found[:, ::2] - est.predict(task.x)[:, ::2, 9:]).max() < 1e-12


class Interrupted(Exception):
    pass


@pytest.mark.apart
@pytest.mark.few
@every
@pytest.mark.parametrize("spec", [{"shuffle": True}, {"overlap": 4}], ids=str)
def test_law_8_a_fit_that_is_stopped_goes_on_bit_for_bit(layer, spec, tmp_path):
    def stop(loop):
        if loop.step == 8:
            raise Interrupted

    task = make_task(n_series=11)
    whole = fit(layer, task, epochs=2, **spec)
    with pytest.raises(Interrupted):
        fit(
            layer,
            task,
            epochs=2,
            callbacks=[Checkpointer(tmp_path, trigger=EveryNSteps(3)), stop],
            **spec,
        )
    resumed = fit(
        layer, task, epochs=2, callbacks=[Checkpointer(tmp_path, trigger=EveryNSteps(3))], **spec
    )
    assert torch.equal(net2vec(resumed), net2vec(whole))
    assert resumed.loss_curve_ == whole.loss_curve_


@every
def test_states_are_saved_loaded_reset_and_truncated(layer):
    model = network(layer).eval()
    x = torch.randn(20, 5, 3, dtype=torch.float64)
    whole = model(x)
    reset(model)
    model(x[:9])
    truncate(model)
    kept = states(model)
    assert kept
    rest = model(x[9:])
    assert (rest - whole[9:]).abs().max() < 1e-12
    other = reset(copy.deepcopy(model))
    assert [s.shape[r.batch_dim] for r in recurrent_layers(other) for s in states(r)] == [0] * len(
        kept
    )
    assert torch.equal(loadstates(other, kept)(x[9:]), rest)
    assert (reset(other)(x) - whole).abs().max() < 1e-12


@pytest.mark.few
@every
def test_it_is_saved_as_plain_data(layer, tmp_path):
    task, est = make_task(), fitted(layer)
    est.save(tmp_path / "est")
    assert np.array_equal(Estimator.load(tmp_path / "est").predict(task.x), est.predict(task.x))


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_initial_state_is_in_the_parameters_and_moves(name):
    before, est = network(LAYERS[name]), fitted(LAYERS[name])
    assert len(net2vec(before)) == sum(p.numel() for p in before.parameters())
    pairs = zip(before[0].initial_state, est.model_[0].initial_state, strict=True)
    assert all(float((a - b).detach().abs().min()) > 1e-4 for a, b in pairs)


def calls(function):
    """How many functions and methods it calls, those of torch and NumPy among them."""
    counted = 0

    def count(frame, event, arg):
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.few
@pytest.mark.parametrize("cell", ["mingru", "minlstm", "lru", "tcn", "attention"])
def test_a_step_of_a_stream_costs_the_same_after_any_past(cell):
    """As many calls, with states of the same sizes."""
    x = np.random.default_rng(0).normal(size=(2, 3, 40)).astype("float32")
    live = plain_regressor(8, cell=cell, epochs=1).fit(x, x[:1]).stream(3)
    found = []
    for t in range(80):
        n = calls(lambda t=t: live.step(x[:, :, t % 40]))
        found.append((n, [s.shape for s in live.state]))
    assert found[40] == found[60] == found[79] == found[5]
