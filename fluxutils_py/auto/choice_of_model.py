"""Choose the model and the settings of a ready-made estimator from the sizes of its data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.data.blocks import block_slices
from fluxutils_py.estimator.fit_data import ReadData, within
from fluxutils_py.estimator.fitted_parts import FitChoice
from fluxutils_py.inputs.inputs import Inputs

# Steps in all, beyond which a large network learns from all it sees: it needs no dropout.
MANY_STEPS = 614_400
MANY_CLASSES = 10  # above which classes are not weighed: characters, rather than states
MOST_FEATURES = 400  # of a linear model of lags
MOST_LAGS = 48
STATISTICS = 13  # features for each input: itself, three exponential means, nine of windows
MANY_SERIES = 4000  # above which fewer kernels are enough
WHOLE = 500  # steps, up to which one target per series is learnt from whole series
PASSES = 20
LEAST_PASSES = 8  # of many steps, in larger minibatches
BATCHSIZES = (16, 32, 64, 128)
LEAST_TRIAL = 200  # steps, of which a fifth is held out
SYMBOLS_READ = 1000  # steps, by which symbols are recognised
MOST_SYMBOLS = 1000  # integers from here on are numbers


def _reads_symbols(inputs: Inputs) -> bool:
    """Return whether the first steps, of as many series as that takes, are symbols, or empty. A
    rank without series agrees with the others.
    """
    if len(inputs.series) != 1 or inputs.series[0].F < 2:
        return False
    whole = inputs.local_series()
    n_left = SYMBOLS_READ
    for place in np.flatnonzero(whole.length):
        row = whole[place : place + 1]
        values = inputs.series[0].read(row, 0, min(row.max_length, n_left))
        if not (((values == 0) | (values == 1)).all() and (values.sum(2) <= 1).all()):
            return False
        n_left -= len(values)
        if n_left <= 0:
            break
    return True


def _count_symbols(inputs: Inputs) -> float:
    """Return one more than the largest integer of inputs (1, N, T); infinity for numbers."""
    (x, *others) = inputs.series
    if others or x.F > 1 or x.kind != "int":
        return math.inf
    rows = inputs.local_series()
    most = 0
    for series, steps in block_slices(len(rows), rows.max_length):
        part = rows[series]
        values = x.read(part, steps.start, steps.stop)
        exists = np.arange(steps.start, steps.stop)[:, None] < part.length
        values = values[exists]
        if values.size and values.min() < 0:
            return math.inf
        most = max(most, int(values.max(initial=0)))
    return most + 1


@dataclass(frozen=True)
class DataSize:
    """What the choice depends on.

    Attributes
    ----------
    n_features : int
    n_series : int
        Of all ranks.
    n_steps : int
        Of all series together.
    longest : int
        Steps of the longest series.
    per_series : bool
        Whether there is one target per series.
    n_classes : int or None
        If targets are labels.
    has_symbols : bool
        Whether a step of the inputs is a symbol: one feature is 1, the others are 0.
    n_symbols : int
        Of integers (1, N, T) that are symbols; 0 for other inputs.
    """

    n_features: int
    n_series: int
    n_steps: int
    longest: int
    per_series: bool
    n_classes: int | None
    has_symbols: bool = False
    n_symbols: int = 0

    @property
    def has_labelled_symbols(self) -> bool:
        """Whether each symbol of a sequence has a label, as in text."""
        is_sequence = self.longest > 1 and not self.per_series
        are_symbols = self.has_symbols or self.n_symbols > 0
        return is_sequence and are_symbols and self.n_classes is not None

    @classmethod
    def of(cls, data: ReadData) -> DataSize:
        """Return the size of data of all ranks, up to the last steps with a target."""
        inputs = data.inputs
        segments = within(inputs.segments(), data.counted)
        most = math.inf
        if data.classes is not None and not data.targets.per_series and segments.max_length > 1:
            most = max(data.reader.gather(_count_symbols(inputs)))
        return cls(
            n_features=sum(s.F for s in inputs.series),
            n_series=len(segments),
            n_steps=int(segments.length.sum()),
            longest=segments.max_length,
            per_series=data.targets.per_series,
            n_classes=None if data.classes is None else len(data.classes),
            has_symbols=all(data.reader.gather(_reads_symbols(inputs))),
            n_symbols=int(most) if most <= MOST_SYMBOLS else 0,
        )


# Settings of a network that learns alone, of one that adds to a linear model, and of one that sees
# so much, or so plainly, that nothing need hold it back.
ALONE: dict[str, Any] = {"hidden_size": 48, "lr": 1e-2, "dropout": 0.0, "input_noise": 0.0}
BESIDE_LINEAR: dict[str, Any] = {"hidden_size": 48, "lr": 5e-3, "dropout": 0.3, "input_noise": 0.1}
OF_PLENTY: dict[str, Any] = {**ALONE, "hidden_size": 128}


def choose_model(cell: object, size: DataSize, *, is_fit: bool = True) -> FitChoice:
    """Choose for data of this size.

    ``cell`` is the argument of the estimator, "auto" or a choice of the user; unless
    ``is_fit``, the data are only the first of many.
    """
    is_auto = isinstance(cell, str) and cell == "auto"
    name = cell if isinstance(cell, str) else "a class"
    if is_auto:
        name = _cell_for(size, is_fit)
    is_sum = name.startswith("linear+")
    is_large = size.n_steps > MANY_STEPS
    network = ALONE
    if is_large or size.has_labelled_symbols:
        network = OF_PLENTY
    elif is_sum:
        network = BESIDE_LINEAR
    windows = _windows_of(size, is_large)
    return FitChoice(
        cell=name,
        n_kernels=2_000 if size.n_series > MANY_SERIES else 10_000,
        n_lags=min(size.longest, MOST_LAGS, max(1, MOST_FEATURES // size.n_features)),
        has_statistics=size.longest > 1 and STATISTICS * size.n_features <= MOST_FEATURES,
        has_means=size.longest > 1,
        class_weight=_class_weight_for(size),
        n_symbols=size.n_symbols,
        needs_trial=is_auto and is_sum and size.n_steps >= LEAST_TRIAL,
        **network,
        **windows,
    )


def _cell_for(size: DataSize, is_fit: bool) -> str:
    if not is_fit:
        return "lstm"  # which learns from part after part
    if size.per_series:
        return "kernels"
    if size.has_labelled_symbols:
        return "lstm"  # nothing lies outside what training has seen, where a linear model is safer
    if size.longest == 1 and size.n_steps < LEAST_TRIAL:
        return "linear"
    return "linear+lstm"


def _class_weight_for(size: DataSize) -> str | None:
    is_many = size.n_classes is None or size.n_classes > MANY_CLASSES
    return None if is_many or size.per_series else "sqrt_balanced"


def _windows_of(size: DataSize, is_large: bool) -> dict[str, Any]:
    """Return how to cut the data, and how often to update a network."""
    if size.longest == 1:  # rows of single steps
        n_updates = 3 * PASSES * -(-size.n_series // 128)
        return {"batchsize": 128, "seqsize": None, "max_updates": min(max(n_updates, 200), 1000)}
    seqsize: int | None = 64
    if size.per_series:
        seqsize = None if size.longest <= WHOLE else 128
    if is_large:
        return {"batchsize": 32, "seqsize": seqsize, "max_updates": 1000}
    n_windows = -(-size.n_steps // min(seqsize or size.longest, size.longest))
    most = 1000 if size.has_labelled_symbols else 600
    wanted = [b for b in BATCHSIZES if b * most >= LEAST_PASSES * n_windows]
    batchsize = min(wanted, default=BATCHSIZES[-1])
    n_updates = min(max(PASSES * -(-n_windows // batchsize), 200), most)
    return {"batchsize": batchsize, "seqsize": seqsize, "max_updates": n_updates}
