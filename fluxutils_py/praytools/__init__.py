"""The training functions and callbacks of PrayTools.jl, on this package's loop and threads."""

from fluxutils_py.data import BackgroundDataLoader
from fluxutils_py.data.parts import dividebatch
from fluxutils_py.nn.layers import ffnn
from fluxutils_py.nn.parameters import gradinfo
from fluxutils_py.praytools.callbacks import bestmodelselector, cb, cby, initevalcby
from fluxutils_py.praytools.class_balance import balanced_sample, classindexes, initbatchprovider
from fluxutils_py.praytools.functional import autotrain, itrain, ptrain, train, ttrain
from fluxutils_py.praytools.sample_gradients import (
    addgrad,
    igradient,
    maskedgrad,
    paralelization_stats,
    parallelization_stats,
    pgradient,
    signalign,
    tgradient,
)

__all__ = [
    "BackgroundDataLoader",
    "addgrad",
    "autotrain",
    "balanced_sample",
    "bestmodelselector",
    "cb",
    "cby",
    "classindexes",
    "dividebatch",
    "ffnn",
    "gradinfo",
    "igradient",
    "initbatchprovider",
    "initevalcby",
    "itrain",
    "maskedgrad",
    "paralelization_stats",
    "parallelization_stats",
    "pgradient",
    "ptrain",
    "signalign",
    "tgradient",
    "train",
    "ttrain",
]
