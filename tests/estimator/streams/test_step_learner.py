"""Streams that learn: updates beside plain loops, late targets, restarts, what learns, errors."""

import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import make_pipeline
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceRegressor,
    SequenceScaler,
    Spec,
    samples,
    stream,
)
from fluxutils_py.errors import DataError, LoadError, ShapeError, SpecError
from fluxutils_py.nn import GRU, LRU, LSTM, MinGRU, MinLSTM, native_kernels
from tests.plain_networks import LagRegressor

F, N, T, H = 2, 3, 40, 4
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)


def data(seed=0, n_series=N, n_steps=T):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(F, n_series, n_steps))
    return x, np.stack([x[0].cumsum(-1), x[0] * x[1]])[:1] / 3


def fitted(*layers, seqsize=5, opt=ADAM, n_out=1, y=None, **spec):
    torch.manual_seed(0)
    made = [layer(F if k == 0 else H, H) for k, layer in enumerate(layers)]
    model = nn.Sequential(*made, nn.Linear(H, n_out)).double()
    x, own = data()
    spec = Spec(epochs=1, batchsize=N, seqsize=seqsize, **spec)
    est = Estimator(model, None, opt, spec, random_state=0, verbose=False)
    return est.fit(x, own if y is None else y)


def run(live, x, y, delay=0, start=0, stop=None):
    """Predictions, with each target given ``delay`` steps late."""
    found = []
    for t in range(start, stop or x.shape[2]):
        found.append(live.step(x[:, :, t]))
        if t - delay >= start:
            live.observe(y[:, :, t - delay])
    return np.stack(found, -1)


pytestmark = pytest.mark.filterwarnings("ignore:this fit makes", "ignore:fewer than 50 updates")


# -- what an update is -----------------------------------------------------------------------------


def mingru_loop(est, x, y, rate, delay=0):
    """The whole past of MinGRU in real-time recurrent learning, by finite loops over parameters."""
    layer, head = est.model_[0].module.linear, est.model_[1]
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    out_w, out_b = head.weight.detach().clone(), head.bias.detach().clone()
    params = [weight, bias, out_w, out_b]
    adam = ADAM(params, lr=rate)
    n = x.shape[1]

    def step(h, x_t):
        gate, candidate = (x_t @ weight.T + bias).split(H, -1)
        z = torch.sigmoid(gate)
        return (1 - z) * h + z * candidate, z, candidate

    learnt = torch.zeros(n, H, dtype=torch.float64)  # before the oldest step without a target
    ahead = learnt
    by_weight = torch.zeros(n, H, 2, F, dtype=torch.float64)  # gate and candidate of each unit
    by_bias = torch.zeros(n, H, 2, dtype=torch.float64)
    found = []
    for t in range(x.shape[2]):
        ahead = step(ahead, torch.from_numpy(x[:, :, t].T))[0]
        found.append((ahead @ out_w.T + out_b).T.numpy().copy())
        if t < delay:
            continue
        x_s, y_s = (torch.from_numpy(a[:, :, t - delay].T) for a in (x, y))
        before = learnt
        learnt, z, candidate = step(before, x_s)
        slope = torch.stack([z * (1 - z) * (candidate - before), z], -1)  # (n, H, 2)
        kept = (1 - z)[:, :, None]
        by_weight = kept[..., None] * by_weight + slope[..., None] * x_s[:, None, None]
        by_bias = kept * by_bias + slope
        known = ~torch.isnan(y_s)
        error = torch.where(known, learnt @ out_w.T + out_b - y_s, torch.zeros_like(y_s))
        if not known.any():
            continue
        d_out = 2 * error / known.sum()
        d_h = d_out @ out_w
        out_w.grad, out_b.grad = d_out.T @ learnt, d_out.sum(0)
        weight.grad = torch.einsum("nh,nhkf->khf", d_h, by_weight).reshape(2 * H, F)
        bias.grad = torch.einsum("nh,nhk->kh", d_h, by_bias).reshape(-1)
        adam.step()
    return np.stack(found, -1)


@pytest.mark.parametrize("delay", [0, 3])
def test_updates_of_a_diagonal_layer_are_those_of_real_time_recurrent_learning(delay):
    est = fitted(MinGRU)
    x, y = data(1)
    y[0, 1, 5:9] = np.nan
    y[:, :, 12] = np.nan
    expected = mingru_loop(est, x, y, 0.02, delay)
    found = run(est.stream(N, learn=0.02, delay=delay), x, y, delay)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    assert np.abs(found - est.predict(x)).max() > 0.1


@pytest.mark.slow
def test_updates_of_other_layers_go_through_the_last_steps():
    """A window of seqsize steps from the state that its first step had, and the loss of its last."""
    est = fitted(GRU, seqsize=4, clip=0.5)
    x, y = data(2, n_steps=15)
    gru = nn.GRU(F, H).double()
    head = nn.Linear(H, 1).double()
    gru.load_state_dict(est.model_[0].module.state_dict())
    head.load_state_dict(est.model_[1].state_dict())
    params = [*gru.parameters(), *head.parameters()]
    adam = ADAM(params, lr=0.02)
    starts = [torch.zeros(1, N, H, dtype=torch.float64)]
    h, expected = starts[0], []
    for t in range(15):
        x_t = torch.from_numpy(x.transpose(2, 1, 0))
        with torch.no_grad():
            out, h = gru(x_t[t : t + 1], h)
            expected.append(head(out)[0].T.numpy())
        first = max(0, t - 3)
        _, following = gru(x_t[first : first + 1], starts[-1])
        out, _ = gru(x_t[first : t + 1], starts[-1])
        loss = nn.functional.mse_loss(head(out[-1]), torch.from_numpy(y[:, :, t].T))
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        adam.step()
        if t >= 3:
            starts.append(following.detach())
    found = run(est.stream(N, learn=0.02), x, y)
    np.testing.assert_allclose(found, np.stack(expected, -1), rtol=1e-9, atol=1e-11)


def test_the_estimator_and_streams_made_before_stay():
    est = fitted(MinGRU)
    x, y = data(1)
    before, frozen = est.predict(x), est.stream(N)
    run(est.stream(N, learn=0.05), x, y)
    assert np.array_equal(est.predict(x), before)
    steps = np.stack([frozen.step(x[:, :, t]) for t in range(T)], -1)
    np.testing.assert_allclose(steps, before, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in est.model_.parameters())


def test_learn_is_a_step_and_its_truth():
    est = fitted(MinLSTM)
    x, y = data(1)
    live = est.stream(N, learn=True)
    with torch.no_grad():
        found = np.stack([live.learn(x[:, :, t], y[:, :, t]) for t in range(T)], -1)
    assert np.array_equal(found, run(est.stream(N, learn=True), x, y))
    # a hundredth of the rate of the fit
    assert np.array_equal(found, run(est.stream(N, learn=1e-4), x, y))


def test_series_learn_together_as_alone_where_they_are_alike():
    est = fitted(MinGRU)
    x, y = data(1, n_series=1)
    both = run(est.stream(2, learn=0.02), np.repeat(x, 2, 1), np.repeat(y, 2, 1))
    one = run(est.stream(1, learn=0.02), x, y)
    np.testing.assert_allclose(both, np.repeat(one, 2, 1), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_inputs_that_change_after_a_step_change_nothing():
    est = fitted(MinGRU)
    x, y = data(1, n_series=1)
    expected = run(est.stream(1, learn=0.02, delay=3), x, y, 3)
    for native in (True, False):
        with native_kernels(native):
            live, room, found = est.stream(1, learn=0.02, delay=3), np.empty((F, 1)), []
            for t in range(T):
                room[:] = x[:, :, t]
                found.append(live.step(room))
                if t >= 3:
                    live.observe(y[:, :, t - 3])
        np.testing.assert_allclose(np.stack(found, -1), expected, rtol=1e-9, atol=1e-12)


# -- restarts --------------------------------------------------------------------------------------

NETS = {
    "exact": (MinGRU,),
    "exact, complex": (LRU, partial(LRU, n_states=3)),
    "exact, stacked": (LRU, partial(MinLSTM, trainable_init=True)),
    "truncated": (LSTM,),
    "mixed": (LRU, GRU),
}


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("delay", [0, 4])
def test_a_stream_restarted_anywhere_goes_on_with_the_same_bits(net, delay, tmp_path):
    est = fitted(*NETS[net])
    x, y = data(3)
    y[0, 1, 7:10] = np.nan
    x[:, 2, 11] = np.nan  # no input
    options = {"learn": 0.02, "delay": delay}
    whole = run(est.stream(N, **options), x, y, delay)
    live, state = None, None
    for t in range(T):
        if t % 7 == 0:
            live = est.stream(N, state, **options)
        assert np.array_equal(live.step(x[:, :, t]), whole[:, :, t], equal_nan=True), t
        if t >= delay:
            live.observe(y[:, :, t - delay])
        if t % 7 == 6:
            torch.save(live.state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt")
    assert live.n_pending == delay
    copied = pickle.loads(pickle.dumps(live))
    for t in range(5):
        assert np.array_equal(live.step(x[:, :, t]), copied.step(x[:, :, t]))
        live.observe(y[:, :, t])
        copied.observe(y[:, :, t])


@pytest.mark.few
@pytest.mark.parametrize("net", ["exact", "truncated"])
def test_reset_series_begin_anew_with_what_was_learnt(net):
    est = fitted(*NETS[net])
    x, y = data(4)
    live = est.stream(N, learn=0.02)
    run(live, x, y, 2, stop=20)
    live.reset([1])
    for t in (18, 19):  # of the series before the reset: those of series 1 change nothing
        other = y[:, :, t].copy()
        other[:, 1] = 1e3
        live.observe(other)
    now = live.step(x[:, :, 20])
    whole = est.stream(N, live.state, learn=0.02)
    live.observe(y[:, :, 20])
    whole.observe(y[:, :, 20])
    assert np.array_equal(live.step(x[:, :, 21]), whole.step(x[:, :, 21]))
    live.reset()
    assert live.n_pending == 0
    fresh = live.step(x[:, :, 20])
    # series 1 was at its first step both times, but for what the target between them taught
    assert 2 * np.abs(fresh - now)[:, 1].max() < np.abs(fresh - now)[:, [0, 2]].max()
    assert np.abs(fresh - est.stream(N).step(x[:, :, 20])).max() > 1e-3


def test_a_state_of_the_model_alone_starts_with_what_the_fit_learnt():
    est = fitted(MinGRU)
    x, y = data(1)
    _, state = est.predict(x[:, :, :30], return_state=True)
    live = est.stream(N, state, learn=0.02)
    np.testing.assert_allclose(live.learn(x[:, :, 30], y[:, :, 30]), est.predict(x)[:, :, 30])


@pytest.mark.slow
def test_an_optimizer_whose_memory_has_another_order_goes_on_with_the_same_bits():
    """Version 0.2.0 kept it in the order of its kernels."""
    est = fitted(MinGRU, opt=partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True))
    x, y = data(1)
    live = est.stream(N, learn=0.02)
    run(live, x, y, stop=20)
    state = live.state
    content = torch.load(io.BytesIO(state[-5].numpy().tobytes()))
    for memory in content["optimizer"]["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if memory[name].dim() == 2:
                memory[name] = memory[name].t().contiguous().t()
    file = io.BytesIO()
    torch.save(content, file)
    state[-5] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    again = est.stream(N, state, learn=0.02)
    assert np.array_equal(run(again, x, y, start=20), run(live, x, y, start=20))


# -- what goes with it -----------------------------------------------------------------------------


def test_frozen_parameters_stay():
    est = fitted(MinGRU)
    x, y = data(1)
    head = est.model_[1].weight

    def learnt(**options):
        live = est.stream(N, learn=0.05, **options)
        run(live, x, y)
        return run(live, x, y * np.nan)

    only_head = learnt(freeze="0")
    assert np.array_equal(only_head, learnt(freeze=["0.module.linear"]))
    assert np.array_equal(only_head, learnt(freeze=lambda name, p: p.shape[0] != len(head)))
    assert not np.array_equal(only_head, learnt())
    with pytest.raises(SpecError, match=r"no parameter or layer 'top'.*1\.weight"):
        est.stream(N, learn=True, freeze="top")
    with pytest.raises(SpecError, match=r"leaves nothing to learn.*1\.bias"):
        est.stream(N, learn=True, freeze=["0", "1"])


@pytest.mark.slow
def test_intervals_and_alarms_see_the_predictions_of_a_stream_that_learns():
    est = fitted(MinGRU)
    x, y = data(1, n_steps=120)
    watch = {"interval": 0.8, "alarm": True, "calibration": data(5, n_steps=80)}
    live = est.stream(N, learn=0.02, **watch)
    found = [live.learn(x[:, :, t], y[:, :, t]) for t in range(120)]
    alone = run(est.stream(N, learn=0.02), x, y)
    assert np.array_equal(np.stack([each[0] for each in found], -1), alone)
    again = est.stream(N, live.state, learn=0.02, **watch)
    for one, two in zip(live.step(x[:, :, 0]), again.step(x[:, :, 0]), strict=True):
        assert np.array_equal(one, two)


@pytest.mark.slow
def test_pipelines_learn_behind_their_transformers():
    x, y = data()
    small = {"cell": "mingru", "hidden_size": 4, "max_updates": 5, "batchsize": 3}
    made = partial(SequenceRegressor, seqsize=10, random_state=0, verbose=False, **small)
    pipe = make_pipeline(SequenceScaler(), made()).fit(samples(x), samples(y))
    scaler, est = pipe[0], pipe[1]
    x, y = data(1)
    found = run(stream(pipe, N, learn=True), x, y)
    inside = run(est.stream(N, learn=True), scaler.transform(x), y)
    np.testing.assert_allclose(found, inside, rtol=1e-9)
    own = TransformedTargetRegressor(made(), func=np.log1p, inverse_func=np.expm1)
    own.fit(samples(x), samples(np.abs(y)))
    with pytest.raises(SpecError, match=r"TransformedTargetRegressor.*scale_target=True"):
        stream(own, N, learn=True)


@pytest.mark.few
@pytest.mark.parametrize("cell", ["mingru", "linear+lru", "linear+lstm"])
def test_ready_made_networks_learn_in_the_units_of_the_target(cell):
    x, y = data(n_series=2, n_steps=60)
    y = 1000 + 50 * y
    small = {"cell": cell, "hidden_size": 4, "max_updates": 5, "batchsize": 2, "seqsize": 10}
    est = SequenceRegressor(random_state=0, verbose=False, **small).fit(x, y)
    moved = y + 30
    live = est.stream(2, learn=0.02)
    found = np.stack([live.learn(x[:, :, t], moved[:, :, t]) for t in range(60)], -1)
    frozen = est.predict(x)
    errors = [np.square(p - moved)[:, :, 30:].mean() for p in (found, frozen)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.slow
def test_labels_are_learnt():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 2, 160))
    y = np.where(x > 0, "up", "down")
    est = SequenceClassifier(
        4, cell="mingru", max_updates=30, batchsize=2, seqsize=20, random_state=0, verbose=False
    ).fit(x[:, :, :80], y[:, :, :80])
    turned = np.where(x > 0, "down", "up")
    missing = turned.astype(object)
    missing[:, :, 100:110] = None
    live = est.stream(2, learn=0.05)
    found = [live.learn(x[:, :, t], missing[:, :, t]) for t in range(80, 160)]
    right = np.stack(found, -1) == turned[:, :, 80:]
    assert right[:, :, :5].mean() < 0.3
    assert right[:, :, 50:].mean() > 0.9
    likely = est.stream(2, learn=0.05, method="predict_proba").learn(x[:, :, 0], y[:, :, 0])
    assert likely.shape == (2, 2)
    with pytest.raises(ValueError, match="'left'"):
        live.learn(x[:, :, 0], np.array([["left", "up"]]))
    assert live.n_pending == 0


@pytest.mark.slow
def test_labels_weigh_what_their_classes_weighed_in_the_fit():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 2, 60))
    y = np.where(x > 0, "up", "down")
    settings = {"cell": "mingru", "max_updates": 30, "batchsize": 2, "seqsize": 20}
    scores = []
    for y_true in (["up", "down"], ["up", None]):
        est = SequenceClassifier(4, **settings, class_weight={"down": 1e-12}, random_state=0)
        live = est.fit(x, y).stream(2, learn=0.05, method="decision_function")
        for t in range(5):
            live.learn(x[:, :, t], np.array([y_true], object))
        scores.append(live.step(x[:, :, 5]))
    np.testing.assert_allclose(*scores, rtol=1e-4)


@pytest.mark.slow
def test_what_cannot_learn_is_refused_with_the_remedy():
    x, y = data()
    with pytest.raises(SpecError, match=r"cell='linear'.*closed form.*cell='linear\+mingru'"):
        LagRegressor(n_lags=2).fit(x, y).stream(N, learn=True)
    ends = SequenceRegressor(
        cell="mingru", hidden_size=2, max_updates=2, batchsize=3, verbose=False
    ).fit(x, y[0, :, -1])
    with pytest.raises(SpecError, match="one target per series"):
        ends.stream(N, learn=True)
    est = fitted(MinGRU)
    for learn in (0, -1.0, "fast", float("nan")):
        with pytest.raises(SpecError, match="learn must be a positive number"):
            est.stream(N, learn=learn)
    with pytest.raises(SpecError, match="freeze is for streams with learn=True"):
        est.stream(N, freeze="0")
    with pytest.raises(SpecError, match="delay is for"):
        est.stream(N, delay=3)
    live = est.stream(N, learn=True)
    live.step(x[:, :, 0])
    with pytest.raises(DataError, match="1 earlier steps"):
        live.learn(x[:, :, 1], y[:, :, 1])
    live.observe(y[:, :, 0])
    with pytest.raises(ShapeError):
        live.learn(x[:, :, 1], y[:, :2, 1])
    assert live.n_pending == 0
    with pytest.raises(ShapeError):
        est.stream(2, live.state, learn=True)
    state = live.state
    state[-5] = state[-5][:100]
    with pytest.raises(LoadError, match="damaged"):
        est.stream(N, state, learn=True)
    stateless = Estimator(nn.Linear(F, 1).double(), spec={"epochs": 1}, verbose=False).fit(x, y)
    with pytest.raises(DataError, match="a stream of 3 series, this one has 2"):
        stateless.stream(2, stateless.stream(N, learn=True).state, learn=True)


def test_a_loss_that_is_not_finite_changes_no_parameter():
    est = fitted(MinGRU)
    x, _ = data(1)
    live, frozen = est.stream(N, learn=0.02), est.stream(N)
    with pytest.raises(FloatingPointError, match="inf"):
        live.learn(x[:, :, 0], np.full((1, N), 1e300))
    assert live.n_pending == 0
    frozen.step(x[:, :, 0])
    np.testing.assert_allclose(live.step(x[:, :, 1]), frozen.step(x[:, :, 1]), rtol=1e-12)


# -- whether it helps ------------------------------------------------------------------------------


def made_series(seed, drift, n_steps=600, fitted=300):
    """A filter of one input and a share of another; both turn after the fit where it drifts."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 4, n_steps)).astype("float32")
    slow = np.zeros_like(x[:1])
    for t in range(1, n_steps):
        slow[:, :, t] = 0.8 * slow[:, :, t - 1] + 0.3 * np.tanh(x[:1, :, t])
    amount = drift * np.clip((np.arange(n_steps) - fitted) / 200, 0, None)
    y = slow * (1 + amount) + x[1:] * (0.5 - amount) + amount
    return x, (y + 0.3 * rng.normal(size=y.shape)).astype("float32")


def error_ratio(seed, drift):
    """The squared error of a stream that learns, relative to that of one that does not."""
    x, y = made_series(seed, drift)
    est = SequenceRegressor(8, cell="mingru", max_updates=150, random_state=0, verbose=False).fit(
        x[:, :, :300], y[:, :, :300]
    )
    _, state = est.predict(x[:, :, :300], return_state=True)
    live = est.stream(4, state, learn=True)
    found = [live.learn(x[:, :, t], y[:, :, t]) for t in range(300, 600)]
    frozen = est.predict(x)[:, :, 300:]
    errors = [np.square(p - y[:, :, 300:]).mean() for p in (np.stack(found, -1), frozen)]
    return errors[0] / errors[1]


@pytest.mark.slow
def test_learning_follows_a_drift():
    assert error_ratio(1, 1.0) < 0.8


@pytest.mark.slow
def test_learning_does_no_harm_where_nothing_changes():
    assert error_ratio(2, 0.0) < 1.02
