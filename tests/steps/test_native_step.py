"""Native steps give what the model gives for the whole window, on the state of its layers."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import states
from fluxutils_py.nn import LSTM, Recur, native_kernels
from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.layers import Elementwise
from fluxutils_py.steps.native_step import MOST_PRODUCTS, NativeStep, OutputForm, Scaler
from fluxutils_py.steps.session import InferenceSession
from tests.nn.every_layer import MODELS, F, hooked, with_head

pytestmark = pytest.mark.skipif(
    kernels.library_in_use() is None, reason="the kernels are not in use"
)

CLOSE = {torch.float32: 2e-6, torch.float64: 1e-12}
TYPES = list(CLOSE)


def session_of(model):
    return InferenceSession(model, lambda: [torch.zeros(3, 4, F, dtype=dtype_of(model))])


def dtype_of(model):
    return next(model.parameters()).dtype


def outputs_of(model, xs):
    """The outputs (S, N, G) by torch alone, from the start."""
    twin = copy.deepcopy(model)
    with native_kernels(False), torch.no_grad():
        return session_of(twin).run((torch.from_numpy(xs).to(dtype_of(model)),))[0].numpy()


def steps_of(step, xs):
    """What a native step gives for inputs (S, N, F); each step must be taken natively."""
    ys = []
    for x in xs:
        y = step.run(x.T)
        assert y is not None
        ys.append(y.T)
    return np.stack(ys)


@pytest.fixture
def xs():
    return np.random.default_rng(0).normal(size=(13, 1, F))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 5, 37])
def test_steps_are_those_of_the_window(name, n, dtype):
    model = with_head(name, n, dtype)
    for n_series in (1, 4):
        xs = np.random.default_rng(n).normal(size=(13, n_series, F))
        session = session_of(model)
        ys = steps_of(session.native_step((F, n_series)), xs)
        expected = outputs_of(model, xs)
        assert ys.dtype == expected.dtype
        np.testing.assert_allclose(ys, expected, rtol=0, atol=CLOSE[dtype])
        other = session_of(model)
        other.run((torch.from_numpy(xs).to(dtype),))
        for got, wanted in zip(session.state, other.state, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got, wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        nn.ReLU(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.SiLU(),
        nn.LeakyReLU(0.2),
        nn.ELU(0.7),
        nn.Softplus(),
        nn.GELU(),
        Elementwise(psigmoid),
        Elementwise(ptanh),
    ],
    ids=str,
)
def test_activations_are_torchs_near_and_far(function, dtype):
    values = torch.tensor(
        [0.0, 1e-3, -0.5, 2.0, -4.5, 19.0, 21.0, -30.0, 88.0, -200.0], dtype=dtype
    )
    n = len(values)
    model = nn.Sequential(nn.Linear(n, n), function).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(n))
        model[0].bias.zero_()
    y = NativeStep(model.eval(), [], (n, 1)).run(values.numpy()[:, None])
    expected = function(values).numpy()
    np.testing.assert_allclose(y[:, 0], expected, rtol=CLOSE[dtype], atol=CLOSE[dtype] / 10)


@pytest.mark.parametrize("name", MODELS)
def test_gates_that_are_far_open_or_closed_stay_numbers(name, xs):
    if name in ("relu", "no state"):
        pytest.skip("its outputs are as large as its inputs")
    model = with_head(name, 5, torch.float64)
    large = 1e6 * xs
    ys = steps_of(session_of(model).native_step((F, 1)), large)
    expected = outputs_of(model, large)
    # ptanh jumps by 4e-6 at 0, where rounding decides its side
    atol = 1e-5 if name == "FLSTM" else 1e-9
    np.testing.assert_allclose(ys, expected, rtol=1e-9, atol=atol)


# -- inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", ">f4", "float64", "longdouble", "int8", "uint64", "bool"]
)
def test_inputs_of_any_type_and_order(dtype):
    model = with_head("GRU")
    whole = np.random.default_rng(0).integers(0, 2, size=(F, 7, 4)).astype(dtype)
    step = session_of(model).native_step((F, 4))
    ys = [step.run(whole[:, t, ::-1]) for t in range(7)]
    expected = outputs_of(model, whole[:, :, ::-1].transpose(1, 2, 0).astype("f8"))
    np.testing.assert_allclose(np.stack(ys), expected.transpose(0, 2, 1), atol=2e-6)


@pytest.mark.parametrize("name", ["LSTM", "LRU", "MinLSTM", "stack"])
def test_a_series_without_input_moves_on_with_zeros(name):
    model = with_head(name)
    xs = np.random.default_rng(0).normal(size=(9, 4, F))
    gaps = np.random.default_rng(1).random((9, 4)) < 0.4
    xs[gaps] = np.nan
    ys = steps_of(session_of(model).native_step((F, 4)), xs)
    expected = outputs_of(model, np.nan_to_num(xs))
    expected[gaps] = np.nan
    assert 0 < np.isnan(ys).sum() < ys.size
    np.testing.assert_allclose(ys, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("series", [0, 3])
def test_a_bad_number_moves_no_series(bad, series):
    model = with_head("LSTM")
    session = session_of(model)
    step = session.native_step((F, 4))
    x = np.random.default_rng(0).normal(size=(F, 4))
    step.run(x)
    before = session.state
    x[1, series] = bad
    assert step.run(x) is None
    assert all(map(torch.equal, before, session.state))


def test_infinities_alone_are_no_gap():
    session = session_of(with_head("LSTM"))
    assert session.native_step((F, 1)).run(np.full((F, 1), np.inf)) is None
    assert not any(t.any() for t in session.state)  # no step was taken


def test_outputs_are_new_arrays_and_inputs_are_left_alone(xs):
    step = session_of(with_head("LSTM")).native_step((F, 1))
    x = xs[0].T.copy()
    x.flags.writeable = False
    first = step.run(x)
    kept = first.copy()
    step.run(xs[1].T)
    np.testing.assert_array_equal(first, kept)


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LSTM", "GRU", "LRU", "MinGRU", "LSTMCell", "trained start"])
def test_native_and_other_steps_take_turns(name):
    model = with_head(name)
    xs = np.random.default_rng(0).normal(size=(12, 4, F))
    expected = outputs_of(model, xs)
    session = session_of(model)
    step = session.native_step((F, 4))
    second = session.native_step((F, 4))
    for t, x in enumerate(xs):
        if t % 3 == 1:
            with torch.inference_mode():
                y = session.run((torch.from_numpy(x[None]).float(),))[0][0].numpy()
        else:
            y = (step if t % 3 else second).run(x.T).T
        np.testing.assert_allclose(y, expected[t], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["LSTM", "LRU", "trained start"])
def test_a_state_is_loaded_reset_and_kept(name):
    model = with_head(name)
    xs = np.random.default_rng(0).normal(size=(6, 4, F))
    session = session_of(model)
    step = session.native_step((F, 4))
    first = steps_of(step, xs)
    kept = session.state
    frozen = [t.clone() for t in kept]
    after = steps_of(step, xs)
    assert np.abs(after - first).max() > 1e-3
    assert all(map(torch.equal, kept, frozen))
    session.load(kept, 4)
    np.testing.assert_array_equal(steps_of(step, xs), after)
    session.load(None, 4)
    np.testing.assert_array_equal(steps_of(step, xs), first)
    session.load(kept, 4)
    session.reset(torch.tensor([0, 2]))
    mixed = after.copy()
    mixed[:, [0, 2]] = first[:, [0, 2]]
    np.testing.assert_allclose(steps_of(step, xs), mixed, rtol=0, atol=1e-6)
    assert all(map(torch.equal, kept, frozen))


def test_a_state_of_other_series_is_left_to_torch(xs):
    model = with_head("GRU")
    session = session_of(model)
    session.run((torch.zeros(1, 2, F),))
    assert session.native_step((F, 1)).run(xs[0].T) is None


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LSTM", "LRU", "stack", "no state", "trained start"])
@pytest.mark.parametrize("change", ["in place", "data", "optimizer"])
def test_changed_weights_are_packed_again(name, change, xs):
    model = with_head(name)
    session = session_of(model)
    step = session.native_step((F, 1))
    steps_of(step, xs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for p in model.parameters():
        if change == "in place":
            with torch.no_grad():
                p.mul_(0.9)
        elif change == "data":
            p.data = p.data * 0.9
        else:
            p.grad = torch.ones_like(p)
    optimizer.step()
    session.load(None, 1)
    np.testing.assert_allclose(steps_of(step, xs), outputs_of(model, xs), rtol=0, atol=2e-6)


def test_changed_statistics_are_packed_again(xs):
    model = with_head("no state")
    step = session_of(model).native_step((F, 1))
    steps_of(step, xs)
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    norm.running_mean += 1
    np.testing.assert_allclose(steps_of(step, xs), outputs_of(model, xs), rtol=0, atol=2e-6)


def test_a_model_that_gets_another_type_is_left_to_torch(xs):
    model = with_head("LSTM")
    step = session_of(model).native_step((F, 1))
    steps_of(step, xs)
    model.double()
    assert step.run(xs[0].T) is None


# -- when it does not apply ------------------------------------------------------------------------


def test_what_it_cannot_compute_is_left_to_torch(xs):
    model = with_head("LSTM")
    hooked(model[1])
    assert session_of(model).native_step((F, 1)).run(xs[0].T) is None
    low = InferenceSession(with_head("LSTM"), lambda: [torch.zeros(3, 4, F)], precision="bfloat16")
    assert low.native_step((F, 1)) is None
    many = MOST_PRODUCTS // 100
    assert session_of(with_head("GRU")).native_step((F, many)).run(np.zeros((F, many))) is None


def test_switched_off_hooked_or_watched_it_is_left_to_torch(xs):
    model = with_head("GRU")
    step = session_of(model).native_step((F, 1))
    x = xs[0].T
    with native_kernels(False):
        assert step.run(x) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert step.run(x) is None
    handle.remove()
    with torch.overrides.BaseTorchFunctionMode():
        assert step.run(x) is None
    np.testing.assert_allclose(step.run(x).T, outputs_of(model, xs)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_by_itself(copied, xs):
    model = with_head("LSTM")
    expected = outputs_of(model, xs)
    session = session_of(model)
    step = session.native_step((F, 1))
    steps_of(step, xs[:5])
    both = copied([session, step])
    np.testing.assert_allclose(steps_of(step, xs[5:]), expected[5:], rtol=0, atol=2e-6)
    del session, step
    np.testing.assert_allclose(steps_of(both[1], xs[5:]), expected[5:], rtol=0, atol=2e-6)
    assert [t.shape for t in both[0].state] == [(2, 1, 5)] * 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_goes_on(xs):
    model = with_head("LSTM")
    step = session_of(model).native_step((F, 1))
    steps_of(step, xs[:5])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, steps_of(step, xs[5:]).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    there = np.frombuffer(os.read(reader, 10_000), "f4").reshape(-1, 1, 2)
    np.testing.assert_array_equal(there, steps_of(step, xs[5:]))


# -- around the model ------------------------------------------------------------------------------


def test_scalers_work_in_float64():
    model = with_head("GRU")
    rng = np.random.default_rng(0)
    xs = rng.normal(1e6, 3, size=(9, 4, F))
    mean, scale, lower, upper = np.full(F, 1e6), np.array([3.0, 2, 1]), np.zeros(F), np.full(F, 1.5)
    xs[2, 1, 0] = np.nan
    scalers = [
        Scaler("fill", mean + 1),
        Scaler("standardize", mean, scale),
        Scaler("winsorize", mean * 0 + 0.1, scale, lower, upper),
    ]
    scaled = (np.where(np.isnan(xs), mean + 1, xs) - mean) / scale
    scaled = (np.clip(scaled, lower, upper) - 0.1) / scale
    ys = steps_of(session_of(model).native_step((F, 4), scalers), xs)
    np.testing.assert_allclose(ys, outputs_of(model, scaled), rtol=0, atol=2e-6)


def test_a_winsorised_gap_is_zero():
    model = with_head("GRU")
    xs = np.full((3, 1, F), np.nan)
    ones = np.ones(F)
    step = session_of(model).native_step((F, 1), [Scaler("winsorize", ones, ones, -ones, ones)])
    ys = steps_of(step, xs)
    np.testing.assert_allclose(ys, outputs_of(model, np.zeros_like(xs)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [2, 5])
def test_forms_of_outputs(dtype, n):
    model = nn.Sequential(LSTM(F, 6), nn.Linear(6, n)).to(dtype).eval()
    with torch.no_grad():
        model[1].weight *= 20
    xs = np.random.default_rng(0).normal(size=(9, 4, F))
    xs[3, 1] = np.nan
    scores = outputs_of(model, np.nan_to_num(xs)).astype(float)
    scores[3, 1] = np.nan
    exact = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    mean, scale = np.arange(n) + 1e5, np.arange(n) + 0.5
    expected = {
        "raw": scores,
        "log_probabilities": exact,
        "probabilities": np.exp(exact),
        "label": scores.argmax(-1)[..., None],
        "scaled": scores * scale + mean,
    }
    if n == 2:
        expected["difference"] = scores[..., 1:] - scores[..., :1]
    for method, wanted in expected.items():
        form = OutputForm(method)
        if method == "scaled":
            form = OutputForm(method, mean, scale, np.float64, n)
        ys = steps_of(session_of(model).native_step((F, 4), (), form), xs)
        assert ys.dtype == {"label": np.int64, "scaled": np.float64}.get(
            method, np.dtype(str(dtype).removeprefix("torch."))
        )
        np.testing.assert_allclose(ys, wanted, rtol=4 * CLOSE[dtype], atol=4 * CLOSE[dtype])


def test_the_first_score_that_is_no_number_is_the_largest_as_in_numpy(xs):
    model = nn.Sequential(LSTM(F, 6), nn.Linear(6, 5)).eval()
    with torch.no_grad():
        model[1].bias[[2, 4]] = torch.nan
    step = session_of(model).native_step((F, 1), (), OutputForm("label", n_outputs=5))
    assert step.run(xs[0].T) == outputs_of(model, xs)[0].argmax(-1) == 2


def test_scaled_outputs_are_rounded_to_their_type():
    model = with_head("GRU")
    xs = np.random.default_rng(0).normal(size=(9, 1, F))
    mean, scale = np.array([1000.0, -3]), np.array([2.0, 5])
    form = OutputForm("scaled", mean, scale, np.float32, 2)
    ys = steps_of(session_of(model).native_step((F, 1), (), form), xs)
    assert ys.dtype == np.float32
    np.testing.assert_allclose(ys, outputs_of(model, xs) * scale + mean, rtol=2e-6)


def test_outputs_of_another_number_are_left_to_torch(xs):
    form = OutputForm("label", n_outputs=3)
    assert session_of(with_head("GRU")).native_step((F, 1), (), form).run(xs[0].T) is None


def test_states_of_a_model_are_those_of_its_layers(xs):
    model = with_head("LSTM")
    layers = [m for m in model.modules() if isinstance(m, Recur)]
    steps_of(NativeStep(model, layers, (F, 1)), xs)
    other = copy.deepcopy(with_head("LSTM"))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other(torch.from_numpy(xs).float())
    for got, wanted in zip(states(model), states(other), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
