"""Layers and models of every kind that the kernels compute, with parameters that hide no term."""

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
    SGRU,
    SMGU,
    MinGRU,
    MinLSTM,
    Recur,
    SequenceStack,
)
from fluxutils_py.nn.layers import ffnn

F = 3

# of F features and n units
LAYERS = {
    "LSTM": lambda n: LSTM(F, n, 2),
    "LSTM without bias": lambda n: LSTM(F, n, bias=False),
    "GRU": lambda n: GRU(F, n, 2),
    "GRU without bias": lambda n: GRU(F, n, 3, bias=False),
    "RNN": lambda n: RNN(F, n),
    "relu": lambda n: Recur(nn.RNN(F, n, nonlinearity="relu")),
    "LSTMCell": lambda n: Recur(nn.LSTMCell(F, n)),
    "GRUCell": lambda n: Recur(nn.GRUCell(F, n, bias=False)),
    "RNNCell": lambda n: Recur(nn.RNNCell(F, n, nonlinearity="relu")),
    "FLSTM": lambda n: FLSTM(F, n, 2),
    "SGRU": lambda n: SGRU(F, n),
    "MGU": lambda n: MGU(F, n),
    "SMGU": lambda n: SMGU(F, n, 3),
    "HFGRU": lambda n: HFGRU(F, n, 2, alpha=0.3),
    "MinGRU": lambda n: MinGRU(F, n),
    "MinLSTM": lambda n: MinLSTM(F, n),
    "LRU": lambda n: LRU(F, n, n_states=4, max_phase=0.5),
    "trained start": lambda n: GRU(F, n, 2, trainable_init=True),
    "LRU, trained start": lambda n: LRU(F, n, trainable_init=True),
}
MODELS = {
    **LAYERS,
    "stack": lambda n: SequenceStack(MinGRU, F, n),
    "LRU stack": lambda n: SequenceStack(LRU, F, n, 2, dropout=0.1),
    "no state": lambda n: ffnn(F, n, 2, nn.ReLU, nn.Identity),
    "normalised inputs": lambda n: nn.Sequential(
        nn.LayerNorm(F, elementwise_affine=False), LSTM(F, n)
    ),
}


def with_head(name, n=5, dtype=torch.float32):
    """A model and a linear head of two outputs, in evaluation mode."""
    return disturbed(nn.Sequential(MODELS[name](n), nn.Linear(n, 2)).to(dtype))


def disturbed(model):
    """The model with all biases, starts, norms and statistics away from 0 and 1, in evaluation
    mode.
    """
    with torch.no_grad():
        for t in [*model.parameters(), *model.buffers()]:
            if t.is_floating_point() and t.dim() != 2:  # no matrix, whose products would grow
                t += 0.2 * torch.rand_like(t)
    return model.eval()


def hooked(module, kind="forward"):
    """The module with a hook that does nothing."""
    getattr(module, f"register_{kind}_hook")(lambda *_: None)
    return module
