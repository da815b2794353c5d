"""Programs in NumPy: they compute what the models compute; weights of 8 bits."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import reset
from fluxutils_py.exporting.rounded_weights import quantized, run_program, with_rounded_weights
from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LRU,
    LSTM,
    MGU,
    RNN,
    SGRU,
    SMGU,
    BatchNorm,
    MinGRU,
    MinLSTM,
    Recur,
    SequenceStack,
)
from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.layers import Elementwise
from fluxutils_py.steps.step_program import program_of


def exact(layer):
    for cell in layer.module.cells:
        cell.exact = True
    return layer


MODELS = {
    "torch": lambda: nn.Sequential(
        LSTM(3, 5, 2), GRU(5, 4, trainable_init=True), RNN(4, 5), Recur(nn.RNN(5, 3, 1, "relu"))
    ),
    "own": lambda: nn.Sequential(
        FLSTM(3, 5), SGRU(5, 4, 2), MGU(4, 5), SMGU(5, 3), HFGRU(3, 4, alpha=0.3)
    ),
    "exact": lambda: nn.Sequential(
        *map(exact, [FLSTM(3, 5), SGRU(5, 4), MGU(4, 5, 2), SMGU(5, 3)]), nn.Linear(3, 2)
    ),
    "linear": lambda: nn.Sequential(
        MinGRU(3, 5), MinLSTM(5, 4, trainable_init=True), LRU(4, 6), nn.Linear(6, 2, bias=False)
    ),
    "blocks": lambda: nn.Sequential(SequenceStack(LRU, 3, 6, 2), BatchNorm(6), nn.LayerNorm(6)),
    "activations": lambda: nn.Sequential(
        nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 9), nn.Tanh(), nn.Sigmoid(), nn.SiLU(),
        nn.LeakyReLU(0.3), nn.Linear(9, 9), nn.ELU(0.7), nn.Softplus(), nn.GELU(),
        Elementwise(ptanh), Elementwise(psigmoid),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MODELS))
def test_a_program_computes_what_the_model_computes(name, rng):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    xs = 2 * rng.normal(size=(20, 3, 3))
    model(torch.from_numpy(xs))  # statistics of batches
    reset(model.eval())
    with torch.no_grad():
        wanted = torch.stack([model(x) for x in torch.from_numpy(xs)])
    np.testing.assert_allclose(run_program(program_of(model, 3), xs), wanted, rtol=0, atol=1e-12)


def test_outputs_have_their_own_scale(rng):
    weight = rng.normal(size=(4, 3)) * [1, 1e-3, 0]
    integers, scale = quantized(weight)
    assert integers.dtype == np.int8
    assert integers.shape == (4, 3)
    assert abs(integers).max(0).tolist() == [127, 127, 0]
    largest = abs(weight).max(0)
    assert (abs(integers * scale - weight) <= 0.5001 * largest / 127).all()
    assert np.isfinite(scale).all()
    # no inputs
    assert quantized(np.zeros((0, 2)))[0].shape == (0, 2)


def test_all_products_are_rounded_and_nothing_else():
    model = nn.Sequential(LSTM(3, 4), MinGRU(4, 5), LRU(5, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    program = program_of(model.eval(), 3)
    rounded = with_rounded_weights(program)
    again = with_rounded_weights(rounded)
    for o, r, twice in zip(program.operations, rounded.operations, again.operations, strict=True):
        for name, value in vars(o).items():
            if not isinstance(value, np.ndarray):
                assert getattr(r, name) == value
                continue
            is_product = type(o).__name__ in ("Dense", "CellStep") and name.startswith("weight")
            changed = not np.array_equal(value, getattr(r, name))
            assert changed == (is_product and value.size > 0), (o, name)
            np.testing.assert_allclose(getattr(twice, name), getattr(r, name), rtol=1e-6)
