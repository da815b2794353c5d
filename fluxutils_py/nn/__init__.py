"""Layers that carry their state from window to window."""

from fluxutils_py.nn.attention import SlidingWindowAttention
from fluxutils_py.nn.causal_kernels import CausalKernels
from fluxutils_py.nn.cells import FLSTM, HFGRU, MGU, SGRU, SMGU
from fluxutils_py.nn.convolution import TCN, CausalConv1d
from fluxutils_py.nn.kernels.library import native_kernels
from fluxutils_py.nn.layers import BatchNorm, GaussianNoise, RNNStack
from fluxutils_py.nn.linear_recurrence import linear_recurrence
from fluxutils_py.nn.linear_rnn import LRU, MinGRU, MinLSTM
from fluxutils_py.nn.recurrent import GRU, LSTM, RNN, Recur
from fluxutils_py.nn.sequence_stack import SequenceStack
from fluxutils_py.nn.time_features import (
    ExponentialMeans,
    Lags,
    RollingStatistics,
    RunningStatistics,
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
    "CausalKernels",
    "ExponentialMeans",
    "GaussianNoise",
    "Lags",
    "MinGRU",
    "MinLSTM",
    "RNNStack",
    "Recur",
    "RollingStatistics",
    "RunningStatistics",
    "SequenceStack",
    "SlidingWindowAttention",
    "WinsorNorm",
    "linear_recurrence",
    "native_kernels",
]
