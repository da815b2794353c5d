"""Recurrent layers with a memory, losses over windows, and a model's parameters and states as plain data."""

from fluxutils_py.nn.activations import dpsigmoid, dptanh, psigmoid, ptanh
from fluxutils_py.nn.attention import SlidingWindowAttention
from fluxutils_py.nn.cells import FLSTMCell, HFGRUCell, MGUCell, SGRUCell, SMGUCell
from fluxutils_py.nn.convolution import TCN, CausalConv1d
from fluxutils_py.nn.kernels import kernels_in_use, native_kernels
from fluxutils_py.nn.layers import BatchNorm, DenseReLU, GaussianNoise, RNNStack, ffnn
from fluxutils_py.nn.linear_recurrence import linear_recurrence
from fluxutils_py.nn.linear_rnn import LRU, MinGRU, MinLSTM
from fluxutils_py.nn.losses import SeqLoss, as_loss, needs_weights, seqloss, takes_weights
from fluxutils_py.nn.ops import batched_gemm, batched_gemm_, bmm, contract
from fluxutils_py.nn.parameters import gradinfo, module_of, namedparams, namedweights, notrack, weights
from fluxutils_py.nn.randomness import seeded
from fluxutils_py.nn.recurrent import GRU, LSTM, RNN, Recur, bare_recurrent, wrap_recurrent
from fluxutils_py.nn.sequence_stack import SequenceStack
from fluxutils_py.nn.session import InferenceSession
from fluxutils_py.nn.stacks import FLSTM, HFGRU, MGU, SGRU, SMGU
from fluxutils_py.nn.states import (
    batch_dims,
    evaluating,
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
from fluxutils_py.nn.vectors import gradients, net2grad, net2vec, pack, vec2net, windices
from fluxutils_py.nn.windows import (
    context_steps,
    known_mode,
    needs_context,
    prediction_copy,
    replica,
    run_window,
    takes_windows,
    window_mode,
)
from fluxutils_py.nn.winsor import WinsorNorm

__all__ = [
    "FLSTM",
    "GRU",
    "HFGRU",
    "LRU",
    "LSTM",
    "MGU",
    "RNN",
    "SGRU",
    "SMGU",
    "TCN",
    "BatchNorm",
    "CausalConv1d",
    "DenseReLU",
    "FLSTMCell",
    "GaussianNoise",
    "HFGRUCell",
    "InferenceSession",
    "MGUCell",
    "MinGRU",
    "MinLSTM",
    "RNNStack",
    "Recur",
    "SGRUCell",
    "SMGUCell",
    "SeqLoss",
    "SequenceStack",
    "SlidingWindowAttention",
    "WinsorNorm",
    "as_loss",
    "bare_recurrent",
    "batch_dims",
    "batched_gemm",
    "batched_gemm_",
    "bmm",
    "context_steps",
    "contract",
    "dpsigmoid",
    "dptanh",
    "evaluating",
    "ffnn",
    "gradients",
    "gradinfo",
    "kernels_in_use",
    "known_mode",
    "linear_recurrence",
    "loadstates",
    "mark",
    "marked",
    "module_of",
    "namedparams",
    "namedweights",
    "native_kernels",
    "needs_context",
    "needs_weights",
    "net2grad",
    "net2vec",
    "notrack",
    "pack",
    "prediction_copy",
    "psigmoid",
    "ptanh",
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
    "windices",
    "window_mode",
    "wrap_recurrent",
]
