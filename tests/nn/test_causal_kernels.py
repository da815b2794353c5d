"""Causal kernels, against loops in NumPy."""

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import loadstates, reset, states
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn import CausalKernels, native_kernels
from fluxutils_py.nn.causal_kernels import draw_channels, plan_dilations, quantiles
from fluxutils_py.nn.kernels import library as kernels

F, N, T = 3, 5, 47


@pytest.fixture
def threads():
    """Sets the number of torch's threads, and of ours."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def made(dtype=torch.float64, n_in=F, length=T, size=500):
    torch.manual_seed(2)
    layer = CausalKernels(n_in, length, size).to(dtype)
    x = torch.randn(n_in, N, T, dtype=dtype)
    return layer.fit_biases(x), x


def convolutions(layer, x):
    """The outputs (kernels, T) for one series (F, T), tap by tap."""
    weights = np.full((84, 9), -1.0)
    for weight, triple in zip(weights, combinations(range(9), 3), strict=True):
        weight[list(triple)] = 2
    rows = []
    channels = layer.module.channels.numpy()
    for i, (d, _) in enumerate(layer.module.plan):
        past = np.concatenate([np.zeros((len(x), 8 * d)), x], axis=1)
        for k in range(84):
            summed = channels[84 * i + k] @ past
            rows.append(sum(weights[k, j] * summed[j * d : j * d + x.shape[1]] for j in range(9)))
    return np.array(rows)


def by_hand(layer, x):
    """The outputs (T, n_out) for one series (F, T)."""
    repeats = np.repeat([n for _, n in layer.module.plan], 84)
    outputs = np.repeat(convolutions(layer, x), repeats, axis=0)
    hits = outputs > layer.module.biases.numpy()[:, None]
    t = np.arange(1, x.shape[1] + 1)
    return np.concatenate([hits.cumsum(1) / t, 2 * (hits * t).cumsum(1) / t**2]).T


@pytest.mark.parametrize(("n_in", "length", "size"), [(3, 47, 500), (1, 47, 1700), (12, 5, 1)])
def test_outputs_are_those_of_a_loop_over_taps(n_in, length, size):
    layer, x = made(n_in=n_in, length=length, size=size)
    y = layer(x.permute(2, 1, 0))
    assert y.shape == (T, N, layer.n_out)
    for b in range(N):
        np.testing.assert_allclose(y[:, b], by_hand(layer, x[:, b].numpy()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windows_steps_batches_and_states_give_the_same_bits(dtype):
    layer, x = made(dtype)
    xs = x.permute(2, 1, 0)
    whole = layer(xs)
    assert whole.dtype == dtype
    reset(layer)
    parts = [layer(xs[:7]), layer(xs[7:8]), *(layer(step)[None] for step in xs[8:20])]
    kept = [s.clone() for s in states(layer)]
    parts.append(layer(xs[20:]))
    assert torch.equal(torch.cat(parts), whole)
    reset(layer)
    assert torch.equal(layer(xs[:, 3:4]), whole[:, 3:4])
    reset(layer)
    loadstates(layer, kept)
    assert torch.equal(layer(xs[20:]), whole[20:])


def test_advancing_goes_on_to_the_same_outputs():
    layer, x = made()
    xs = x.permute(2, 1, 0)
    expected = layer(xs)
    reset(layer)
    layer.advance(xs[:13])
    assert torch.equal(layer(xs[13]), expected[13])
    layer.advance(xs[14:-1])
    assert torch.equal(layer(xs[-1]), expected[-1])
    with pytest.raises(ShapeError, match="state of 5 series and got a batch of 2"):
        layer.advance(xs[:, :2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n_in", "length", "size"), [(1, 2200, 900), (2, 9, 168), (7, 60, 3000)])
@pytest.mark.parametrize("cuts", [[1], [2, 17], [5, 16, 33, 1024], [2100]])
def test_the_native_kernel_gives_the_bits_of_torch(n_in, length, size, cuts, dtype):
    if kernels.library_in_use() is None:
        pytest.skip("there are no native kernels")
    torch.manual_seed(4)
    layer = CausalKernels(n_in, length, size).to(dtype)
    x = torch.randn(sum(cuts), 3, n_in, dtype=dtype)
    layer.fit_biases(x.permute(2, 1, 0))
    runs = []
    for native in (True, False):
        reset(layer)
        with native_kernels(native):
            ys = [layer(part) for part in x.split(cuts)]
            outputs = torch.cat(ys)
            states_of_calls = [s.clone() for s in states(layer)]
            reset(layer)
            for part in x.split(cuts):
                layer.advance(part)
        runs.append([outputs, *states_of_calls, *states(layer)])
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours, theirs)


def test_threads_do_not_matter(threads):
    layer, x = made()
    xs = x.permute(2, 1, 0)
    whole = layer(xs)
    reset(layer)
    threads(2)
    assert torch.equal(layer(xs), whole)


def test_memory_for_comparisons_is_bounded_and_changes_nothing(monkeypatch):
    layer, x = made()
    xs = x.permute(2, 1, 0)
    whole = layer(xs)
    reset(layer)
    monkeypatch.setattr("fluxutils_py.nn.causal_kernels.BLOCK", 3 * N * layer.n_out // 2)
    assert torch.equal(layer(xs), whole)


@pytest.mark.slow
def test_a_long_series_is_counted_exactly_in_float32():
    layer, x = made(torch.float32, n_in=1)
    xs = x[:, :1].permute(2, 1, 0).repeat(400, 1, 1)  # 18,800 steps: sums far beyond 2 ** 24
    reset(layer)
    layer.advance(xs[:-1])
    last = layer(xs[-1:])[-1, 0]
    expected = by_hand(layer.double(), xs[:, 0].T.double().numpy())[-1]
    np.testing.assert_allclose(last, expected, rtol=0, atol=1e-7)


def test_a_series_that_is_reset_starts_anew():
    layer, x = made()
    xs = x.permute(2, 1, 0)
    fresh = layer(xs)
    layer.reset_series(torch.tensor([1, 4]))
    again = layer(xs)
    assert torch.equal(again[:, [1, 4]], fresh[:, [1, 4]])
    assert not torch.equal(again[:, [0]], fresh[:, [0]])


# -- what is drawn and learnt -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "per_kernel"), [(1, 59), (9, 59), (150, 59), (3000, 59), (80, 1)]
)
def test_dilations_grow_geometrically_up_to_the_length(length, per_kernel):
    plan = plan_dilations(length, per_kernel)
    dilations = [d for d, _ in plan]
    assert dilations[0] == 1
    assert dilations == sorted(set(dilations))
    assert 8 * dilations[-1] <= max(8, length - 1)
    assert sum(n for _, n in plan) == per_kernel
    assert min(n for _, n in plan) >= 1
    if per_kernel > 1 and length > 9:
        assert dilations[-1] == (length - 1) // 8


def test_kernels_add_up_one_to_nine_inputs_most_of_them_few():
    torch.manual_seed(0)
    numbers = draw_channels(5000, 20).sum(1)
    assert numbers.min() == 1
    assert numbers.max() == 9
    assert (numbers <= 3).float().mean() > 0.5  # uniform in the logarithm: log(4) / log(10) = .6
    assert draw_channels(50, 1).sum(1).tolist() == [1] * 50


def test_biases_are_numpys_quantiles_of_outputs_in_training_data():
    torch.manual_seed(1)
    outputs = torch.randn(101, 3 * 84, dtype=torch.float64)
    got = quantiles(outputs, [2, 1, 4]).numpy()
    places = np.arange(1, 1 + 7 * 84) * (np.sqrt(5) + 1) / 2 % 1
    start = 0
    for i, n in enumerate([2, 1, 4]):
        of_kernels = places[start : start + 84 * n].reshape(84, n)
        for k in range(84):
            expected = np.quantile(outputs[:, 84 * i + k].numpy(), of_kernels[k])
            np.testing.assert_allclose(
                got[start + k * n : start + (k + 1) * n], expected, atol=1e-12
            )
        start += 84 * n


def test_every_step_of_few_series_is_used_and_padding_is_not():
    torch.manual_seed(3)
    layer = CausalKernels(F, 20, 500).double()
    x = torch.randn(F, 2, 30, dtype=torch.float64)
    layer.fit_biases(x, lengths=[30, 11])
    outputs = [convolutions(layer, x[:, b, :n].numpy()) for b, n in enumerate([30, 11])]
    expected = quantiles(
        torch.from_numpy(np.concatenate(outputs, 1).T), [n for _, n in layer.module.plan]
    )
    torch.testing.assert_close(layer.module.biases, expected, rtol=0, atol=1e-12)
    x[:, 1, 11:] = torch.nan
    before = layer.module.biases.clone()
    layer.fit_biases(x, lengths=[30, 11])
    assert torch.equal(layer.module.biases, before)


@pytest.mark.parametrize("most", [100, 4000])
def test_biases_do_not_depend_on_how_series_are_read(most, monkeypatch):
    monkeypatch.setattr("fluxutils_py.nn.causal_kernels.MOST_POSITIONS", most)
    layer, x = made()
    before = layer.module.biases.clone()
    monkeypatch.setattr("fluxutils_py.nn.causal_kernels.READ", 10)
    assert torch.equal(layer.fit_biases(x.numpy()).module.biases, before)


def test_biases_are_part_of_the_state_dict_and_of_copies():
    layer, x = made()
    other = CausalKernels(F, T, 500).double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x.permute(2, 1, 0)), layer(x.permute(2, 1, 0)))


def test_the_length_is_that_of_the_training_series_unless_given():
    torch.manual_seed(0)
    x = torch.randn(F, 3, 90, dtype=torch.float64)
    layer = CausalKernels(F, size=500).double()
    assert layer.module.plan == [(1, 2)]
    layer.fit_biases(x, lengths=[90, 12, 41])
    assert layer.module.plan == plan_dilations(41, 2)
    torch.manual_seed(0)
    torch.randn(F, 3, 90, dtype=torch.float64)
    given = CausalKernels(F, 41, 500).double().fit_biases(x, lengths=[90, 12, 41])
    xs = x.permute(2, 1, 0)
    assert torch.equal(layer(xs), given(xs))
    fresh = CausalKernels(F, size=500).double()
    fresh.load_state_dict(layer.state_dict())
    reset(given)
    assert torch.equal(fresh(xs), given(xs))


def test_gradients_end_here():
    layer, x = made()
    model = nn.Sequential(layer, nn.Linear(layer.n_out, 1).double())
    y = model(x.permute(2, 1, 0).requires_grad_())
    y.sum().backward()
    assert model[1].weight.grad is not None
    assert not list(layer.parameters())


@pytest.mark.parametrize(
    ("x", "lengths", "error", "message"),
    [
        (torch.zeros(4, 2, 9), None, ShapeError, r"shape \(3, N, T\), got \(4, 2, 9\)"),
        (torch.zeros(3, 2, 0), None, ShapeError, r"got \(3, 2, 0\)"),
        (torch.zeros(3, 2, 9), [9], ShapeError, "2 integers from 1 to 9"),
        (torch.zeros(3, 2, 9), [9, 10], ShapeError, "from 1 to 9"),
        (torch.full((3, 2, 9), torch.nan), None, DataError, "NaN or infinity"),
    ],
)
def test_bad_training_data_are_named_and_change_nothing(x, lengths, error, message):
    layer, _ = made(torch.float32)
    before = layer.module.biases.clone()
    with pytest.raises(error, match=message):
        layer.fit_biases(x, lengths)
    assert torch.equal(layer.module.biases, before)


def test_bad_sizes_and_inputs_are_named():
    with pytest.raises(ValueError, match=r"CausalKernels: length .*None, got 0"):
        CausalKernels(3, 0)
    with pytest.raises(ShapeError, match=r"3 features \(n_in\), got .*\(6, 2, 4\)"):
        CausalKernels(3, 9, 200)(torch.zeros(6, 2, 4))
