"""Recurrent layers with a memory, losses over windows, and a model's parameters and states as plain data."""

from fluxutils_py.nn.losses import SeqLoss, as_loss, needs_weights, seqloss, takes_weights
from fluxutils_py.nn.ops import batched_gemm, batched_gemm_, bmm, contract
from fluxutils_py.nn.parameters import gradinfo, module_of, namedparams, namedweights, notrack, weights
from fluxutils_py.nn.randomness import seeded
from fluxutils_py.nn.recurrent import GRU, LSTM, RNN, Recur, bare_recurrent, wrap_recurrent
from fluxutils_py.nn.states import (
    batch_dims,
    loadstates,
    mark,
    marked,
    recurs,
    reset,
    restore,
    snapshot,
    states,
    truncate,
)
from fluxutils_py.nn.vectors import gradients, net2grad, net2vec, pack, vec2net
from fluxutils_py.nn.windows import prediction_copy, replica, run_window, takes_windows

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Recur",
    "SeqLoss",
    "as_loss",
    "bare_recurrent",
    "batch_dims",
    "batched_gemm",
    "batched_gemm_",
    "bmm",
    "contract",
    "gradients",
    "gradinfo",
    "loadstates",
    "mark",
    "marked",
    "module_of",
    "namedparams",
    "namedweights",
    "needs_weights",
    "net2grad",
    "net2vec",
    "notrack",
    "pack",
    "prediction_copy",
    "recurs",
    "replica",
    "reset",
    "restore",
    "run_window",
    "seeded",
    "seqloss",
    "snapshot",
    "states",
    "takes_weights",
    "takes_windows",
    "truncate",
    "vec2net",
    "weights",
    "wrap_recurrent",
]
