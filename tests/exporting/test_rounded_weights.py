"""Weights of 8 bits: a rounded copy of a model has those that its header holds."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.estimator.c_export import with_rounded_weights
from fluxutils_py.nn import GRU, LRU, LSTM, MGU, MinGRU, SequenceStack
from fluxutils_py.nn.closed_form_model import lag_model
from fluxutils_py.steps.operations import CellStep, Dense, quantized
from fluxutils_py.steps.step_program import program_of

MODELS = {
    "layers": lambda: nn.Sequential(
        LSTM(3, 4, 2), MinGRU(4, 5), LRU(5, 4), nn.LayerNorm(4), MGU(4, 3), nn.Linear(3, 1)
    ),
    "stack": lambda: nn.Sequential(
        SequenceStack(LRU, 3, 6, 2), GRU(6, 4, trainable_init=True), nn.Linear(4, 2)
    ),
    # a product for each of its layers
    "closed form": lambda: lag_model(3, 2, 5, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_products_are_rounded_and_nothing_else(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    before = [p.clone() for p in model.parameters()]
    rounded = with_rounded_weights(model)
    assert all(map(torch.equal, before, model.parameters()))
    pairs = zip(program_of(model, 3).operations, program_of(rounded, 3).operations, strict=True)
    n_rounded = 0
    for o, r in pairs:
        for part, value in vars(o).items():
            found = getattr(r, part)
            if not isinstance(value, np.ndarray):
                assert found == value
            elif isinstance(o, Dense | CellStep) and part.startswith("w") and value.size:
                integers, scale = quantized(value)
                np.testing.assert_allclose(found, integers * scale, rtol=1e-5)
                n_rounded += not np.array_equal(found, value)
            else:
                assert np.array_equal(found, value), (o, part)
    assert n_rounded > 2
